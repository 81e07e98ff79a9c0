package snapshot

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/hashicorp/raft"

	"codeq/internal/container/slowlock"
	"codeq/internal/platform"
)

var (
	// ErrDamaged is returned for incomplete or damaged files, manifests, pieces of files, and
	// metadata.
	ErrDamaged = errors.New("snapshot: damaged")
	// errSuperseded is returned for a snapshot that was replaced by a newer one, or of a store that
	// is no longer the live one.
	errSuperseded = errors.New("snapshot: superseded")
	// errUnknown is returned for a snapshot that is not the newest, or if there is none.
	errUnknown = errors.New("snapshot: unknown")
	// ErrNotLive is returned while there is no live store.
	ErrNotLive = errors.New("snapshot: no live store")
)

// Live is the store that snapshots are taken of. Its dynamic type is comparable. Its methods may be
// called from several goroutines, and the store is not closed before they return; after it was
// closed they return an error.
type Live interface {
	// Flush makes the applied entries durable.
	Flush() error
	// Checkpoint writes the state into dir, which does not exist: at least the flushed state, as
	// files without subdirectories.
	Checkpoint(dir string) error
}

// Store is the raft.SnapshotStore of one shard. It keeps the newest snapshot only. All methods may
// be called from several goroutines.
//
// Invariant: if the metadata says installed, the directory incoming-N is durable and complete, or
// has been renamed to the live store's place. Invariant: if it does not, the live store holds the
// snapshot's index durably.
type Store struct {
	fs   vfs.FS
	dir  string
	live func() Live // called without mu: it may wait for a caller of Installed
	log  *slog.Logger

	publishing slowlock.Lock // guards the metadata file; current changes only under it and mu

	mu       sync.Mutex // guards the fields below; not held while the disk works
	current  *record    // nil if there is no snapshot; replaced, never changed
	sequence uint64     // the last number given to a snapshot or directory
	installs uint64     // installs published by this process

	receiving slowlock.Lock // guards received; held before mu
	received  *received     // not installed yet; nil: none
}

// Open opens the snapshots in dir, which is created if necessary in an existing directory, and
// removes unfinished files of an earlier process. Nothing else may use dir. Live returns the
// current live store, or nil while there is none; it is not called before the first snapshot is
// taken or sent.
func Open(fs vfs.FS, dir string, live func() Live, log *slog.Logger) (*Store, error) {
	s := &Store{fs: fs, dir: dir, live: live, log: log, publishing: slowlock.New(), receiving: slowlock.New()}
	if err := s.open(); err != nil {
		return nil, fmt.Errorf("snapshot: open %s: %w", dir, err)
	}
	return s, nil
}

// Check reads the metadata in dir, and changes nothing. There may be none.
func Check(fs vfs.FS, dir string) error {
	_, err := readRecord(fs, dir)
	return err
}

// Received returns the directory in dir that will replace the live store, as Installed does, and
// changes nothing; "": there is none.
func Received(fs vfs.FS, dir string) (string, error) {
	r, err := readRecord(fs, dir)
	if err != nil || r == nil || !r.Installed {
		return "", err
	}
	from := fs.PathJoin(dir, incomingName(r.Sequence))
	if _, err := fs.Stat(from); errors.Is(err, os.ErrNotExist) {
		return "", nil
	} else if err != nil {
		return "", err
	}
	return from, nil
}

func (s *Store) open() error {
	if err := s.fs.MkdirAll(s.dir, platform.DirMode); err != nil {
		return err
	}
	if err := platform.SyncDirectory(s.fs, s.fs.PathDir(s.dir)); err != nil {
		return err
	}
	current, err := readRecord(s.fs, s.dir)
	if err != nil {
		return err
	}
	keep := ""
	if current != nil {
		s.sequence = current.Sequence
		if current.Installed {
			keep = incomingName(current.Sequence)
			switch _, err := s.fs.Stat(s.fs.PathJoin(s.dir, keep)); {
			case errors.Is(err, os.ErrNotExist):
				if current, err = s.writeSwapped(current); err != nil {
					return err
				}
			case err != nil:
				return err
			}
		}
	}
	s.current = current

	names, err := s.fs.List(s.dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		leftover := strings.HasPrefix(name, sendingPrefix) || strings.HasPrefix(name, receivingPrefix) ||
			strings.HasPrefix(name, incomingPrefix) || name == recordTemp
		if !leftover || name == keep {
			continue
		}
		if err := s.fs.RemoveAll(s.fs.PathJoin(s.dir, name)); err != nil {
			return err
		}
	}
	return nil
}

// Create begins a snapshot: a local one if Persist is called next, and an install if a manifest is
// written. The sink is a [*Sink].
func (s *Store) Create(
	version raft.SnapshotVersion, index, term uint64,
	configuration raft.Configuration, configurationIndex uint64, _ raft.Transport,
) (raft.SnapshotSink, error) {
	if version != raft.SnapshotVersionMax {
		return nil, fmt.Errorf("snapshot: create: unsupported version %d", version)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.admit(index); err != nil {
		return nil, fmt.Errorf("snapshot: create: %w", err)
	}
	s.sequence++
	return &Sink{store: s, record: record{
		Format:   recordFormat,
		Sequence: s.sequence,
		Meta: raft.SnapshotMeta{
			Version:            version,
			ID:                 fmt.Sprintf("%d-%d-%d", term, index, s.sequence),
			Index:              index,
			Term:               term,
			Configuration:      configuration.Clone(),
			ConfigurationIndex: configurationIndex,
		},
	}}, nil
}

// List returns the newest snapshot, or nothing if there is none.
func (s *Store) List() ([]*raft.SnapshotMeta, error) {
	current := s.newest()
	if current == nil {
		return nil, nil
	}
	return []*raft.SnapshotMeta{current.meta()}, nil
}

// Open returns the metadata of the newest snapshot, and an empty reader: Restore swaps directories,
// and the sender of the snapshot sends a Checkpoint before.
func (s *Store) Open(id string) (*raft.SnapshotMeta, io.ReadCloser, error) {
	current := s.newest()
	if current == nil || current.Meta.ID != id {
		return nil, nil, fmt.Errorf("%w: %q", errUnknown, id)
	}
	return current.meta(), io.NopCloser(strings.NewReader("")), nil
}

// Close removes received files that have not been installed. REQUIRES: no more files come.
func (s *Store) Close() { s.DropReceived() }

// number returns the next number of a directory.
func (s *Store) number() uint64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sequence++
	return s.sequence
}

// Installed returns the directory of a received state that is not swapped in yet, and the index of
// its snapshot. The documentation of the package says how to swap it in.
func (s *Store) Installed() (dir string, index uint64, ok bool) {
	current := s.newest()
	if current == nil || !current.Installed {
		return "", 0, false
	}
	return s.fs.PathJoin(s.dir, incomingName(current.Sequence)), current.Meta.Index, true
}

// Swapped records that the directory that Installed returns has become that of the live store.
// REQUIRES: it was renamed, the directory that holds its new name is synced, and live no longer
// returns the old store.
func (s *Store) Swapped() error {
	s.publishing.Lock()
	defer s.publishing.Unlock()
	current := s.newest()
	if current == nil || !current.Installed {
		return errors.New("snapshot: swapped: nothing is installed")
	}
	dir := s.fs.PathJoin(s.dir, incomingName(current.Sequence))
	if _, err := s.fs.Stat(dir); err == nil {
		return fmt.Errorf("snapshot: swapped: %s has not been renamed", dir)
	} else if !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("snapshot: swapped: %w", err)
	}
	swapped, err := s.writeSwapped(current)
	if err != nil {
		return fmt.Errorf("snapshot: swapped: %w", err)
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.current = swapped
	return nil
}

func (s *Store) writeSwapped(r *record) (*record, error) {
	swapped := *r
	swapped.Installed = false
	if _, err := writeRecord(s.fs, s.dir, &swapped); err != nil {
		return nil, err
	}
	return &swapped, nil
}

// admit refuses an index before that of the newest snapshot: Raft may already have truncated the
// log between the two. An equal index is an install that is repeated because the leader did not get
// the answer. REQUIRES: mu is held.
func (s *Store) admit(index uint64) error {
	if s.current != nil && index < s.current.Meta.Index {
		return fmt.Errorf("%w: index %d by index %d", errSuperseded, index, s.current.Meta.Index)
	}
	return nil
}

// begin returns the number of installs published before a local snapshot of live, for publish to
// compare. It refuses a store that is not, or will soon not be, the live one: Raft may install
// between FSM.Snapshot and Persist.
func (s *Store) begin(live Live) (installs uint64, err error) {
	s.mu.Lock()
	installs = s.installs
	pending := s.current != nil && s.current.Installed
	s.mu.Unlock()
	if pending || s.live() != live {
		return 0, fmt.Errorf("%w: the store has been replaced", errSuperseded)
	}
	return installs, nil
}

// publish replaces the newest snapshot by r, durably. A local snapshot is refused if another was
// installed since begin. If written is true in spite of an error, r may be the newest snapshot
// after a crash.
func (s *Store) publish(r *record, installs uint64) (written bool, err error) {
	s.publishing.Lock()
	defer s.publishing.Unlock()
	if err := s.mayPublish(r, installs); err != nil {
		return false, err
	}
	if written, err := writeRecord(s.fs, s.dir, r); err != nil {
		return written, err
	}
	if old := s.replace(r); old != nil && old.Installed {
		s.remove(s.fs.PathJoin(s.dir, incomingName(old.Sequence)))
	}
	return true, nil
}

// mayPublish returns an error if r must not be published; nil holds until another snapshot is
// published. REQUIRES: publishing is held.
func (s *Store) mayPublish(r *record, installs uint64) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.admit(r.Meta.Index); err != nil {
		return err
	}
	if !r.Installed && installs != s.installs {
		return fmt.Errorf("%w: the store has been replaced", errSuperseded)
	}
	return nil
}

// replace makes r the newest snapshot, and returns the one before. REQUIRES: publishing is held.
func (s *Store) replace(r *record) (old *record) {
	s.mu.Lock()
	defer s.mu.Unlock()
	old, s.current = s.current, r
	if r.Installed {
		s.installs++
	}
	return old
}

// newest is the newest snapshot; nil: there is none.
func (s *Store) newest() *record {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.current
}

// remove removes an unused directory; Open removes its leftovers.
func (s *Store) remove(dir string) {
	if err := s.fs.RemoveAll(dir); err != nil && !errors.Is(err, os.ErrNotExist) {
		s.log.Warn("remove directory of a snapshot", "dir", dir, "error", err)
	}
}
