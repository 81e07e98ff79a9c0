package snapshot

import (
	"bytes"
	"errors"
	"fmt"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/container/slowlock"
	"codeq/internal/platform"
)

// received is the files of another node's checkpoint, as far as they have arrived. They stay when
// their connection breaks. Only the latest connection adds to them.
type received struct {
	store    *Store
	dir      string
	encoded  []byte // manifest
	manifest *manifest

	mu         slowlock.Lock // guards the fields below
	connection int           // the latest
	gone       bool          // removed, installed, or incomplete after an error
	done       int64         // bytes that have arrived, of all files together
	next       int           // of the files; those before it are durable
	open       vfs.File      // that file; nil if none of it has arrived
	written    int64         // bytes of it
	unsynced   int64         // of these
	complete   bool          // all is durable
	piece      []byte        // copy for File.Write, which may change its argument
}

// syncBytes bounds the bytes that a slow disk must still store at the end of a file, and so how
// long a receiver accepts nothing.
const syncBytes = 16 << 20

// errSuperfluous ends a connection.
var errSuperfluous = errors.New("snapshot: the files come on another connection, or are not wanted any more")

// errStuck refuses a connection.
var errStuck = errors.New("snapshot: the disk does not take what has come on an earlier connection")

// arrival is one connection on which files arrive.
type arrival struct {
	*received
	number int
}

// receive continues with the files of a manifest, or begins. It removes received bytes of other
// files, so that a store has the files of one checkpoint at most beside its own. It fails if the
// disk does not store earlier bytes within twice wait.
func (s *Store) receive(encoded []byte, wait time.Duration) (*arrival, error) {
	m, err := parseManifest(encoded)
	if err != nil {
		return nil, err
	}
	if !s.receiving.LockWithin(wait) {
		return nil, errStuck
	}
	defer s.receiving.Unlock()
	r := s.received
	if r != nil && !r.mu.LockWithin(wait) {
		return nil, errStuck
	}
	if r != nil && !bytes.Equal(r.encoded, encoded) {
		s.received = nil
		r.remove()
		r.mu.Unlock()
	}
	if s.received == nil {
		r = &received{store: s, encoded: bytes.Clone(encoded), manifest: m, mu: slowlock.New()}
		r.dir = s.fs.PathJoin(s.dir, fmt.Sprint(receivingPrefix, s.number()))
		if err := s.fs.MkdirAll(r.dir, platform.DirMode); err != nil {
			return nil, err
		}
		s.received = r
		r.mu.Lock()
	}
	defer r.mu.Unlock()
	r.connection++
	return &arrival{r, r.connection}, nil
}

// Missing is the number of bytes that have not arrived of the files being received, if any.
func (s *Store) Missing() (bytes int64, receiving bool) {
	s.receiving.Lock()
	defer s.receiving.Unlock()
	if s.received == nil {
		return 0, false
	}
	return s.received.manifest.total - s.received.offset(), true
}

// DropReceived removes received files that have not been installed.
func (s *Store) DropReceived() {
	s.receiving.Lock()
	defer s.receiving.Unlock()
	s.dropReceived()
}

// dropReceived is DropReceived. REQUIRES: receiving is held.
func (s *Store) dropReceived() {
	if r := s.received; r != nil {
		r.mu.Lock()
		defer r.mu.Unlock()
		s.received = nil
		r.remove()
	}
}

// adopt returns the files of a manifest. They are the caller's from then on.
func (s *Store) adopt(encoded []byte) (*received, error) {
	s.receiving.Lock()
	defer s.receiving.Unlock()
	r := s.received
	if r == nil || !bytes.Equal(r.encoded, encoded) {
		return nil, fmt.Errorf("%w: none of its files are there", ErrDamaged)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.complete {
		return nil, fmt.Errorf("%w: %d of %d bytes of its files are there", ErrDamaged, r.done, r.manifest.total)
	}
	r.gone = true
	s.received = nil
	return r, nil
}

// remove removes the files. REQUIRES: mu is held.
func (r *received) remove() {
	r.gone = true
	if r.open != nil {
		_ = r.open.Close()
		r.open = nil
	}
	r.store.remove(r.dir)
}

// drop removes the files, unless another connection adds to them.
func (a *arrival) drop() {
	s := a.store
	s.receiving.Lock()
	defer s.receiving.Unlock()
	if s.received == a.received && a.isLatest() {
		s.dropReceived()
	}
}

func (a *arrival) isLatest() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.number == a.connection
}

// offset is the number of bytes that have arrived.
func (r *received) offset() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.done
}

// write adds bytes that have arrived, at an offset in all files together.
func (a *arrival) write(offset int64, p []byte) error {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.gone || a.number != a.connection:
		return errSuperfluous
	case offset != a.done || int64(len(p)) > a.manifest.total-a.done:
		return fmt.Errorf("%w: %d bytes at %d, where %d of %d were there", ErrDamaged, len(p), offset, a.done, a.manifest.total)
	}
	for len(p) > 0 {
		n, err := a.append(p)
		if p = p[n:]; err != nil {
			a.gone = true // another connection may have begun before they are removed
			return err
		}
	}
	return nil
}

// append adds some of p, which is not empty, to the next file. REQUIRES: mu is held.
func (r *received) append(p []byte) (int, error) {
	if err := r.skip(); err != nil {
		return 0, err
	}
	f := r.manifest.files[r.next]
	r.piece = append(r.piece[:0], p[:min(int64(len(p)), f.size-r.written)]...)
	n, err := r.open.Write(r.piece)
	r.done, r.written, r.unsynced = r.done+int64(n), r.written+int64(n), r.unsynced+int64(n)
	if err == nil && r.unsynced >= syncBytes {
		err = r.open.SyncData()
		r.unsynced = 0
	}
	return n, err
}

// skip makes complete files durable, and opens the next incomplete one. REQUIRES: mu is held.
func (r *received) skip() error {
	for r.next < len(r.manifest.files) {
		f := r.manifest.files[r.next]
		if r.open == nil {
			open, err := r.store.fs.Create(r.store.fs.PathJoin(r.dir, f.name), vfs.WriteCategoryUnspecified)
			if err != nil {
				return err
			}
			r.open, r.written, r.unsynced = open, 0, 0
		}
		if r.written < f.size {
			return nil
		}
		err := errors.Join(r.open.Sync(), r.open.Close())
		r.open = nil
		if err != nil {
			return err
		}
		r.next++
	}
	return nil
}

// finish makes all of the files durable, and their directory.
func (a *arrival) finish() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	switch {
	case a.gone || a.number != a.connection:
		return errSuperfluous
	case a.complete:
		return nil
	case a.done < a.manifest.total:
		return fmt.Errorf("%w: %d of %d bytes have arrived", ErrDamaged, a.done, a.manifest.total)
	}
	err := a.skip()
	if err == nil {
		err = platform.SyncDirectory(a.store.fs, a.dir)
	}
	a.complete, a.gone = err == nil, err != nil
	return err
}
