// Package offline works on the directory of a closed queue, and changes nothing in it. [Open] reads
// it through the rules of each shard, as its owner does: their memory is loaded from the store, and
// they decide nothing afterwards. [Export] writes its contents as JSON lines, and [Import] makes a
// new directory of these, which may have another number of shards.
package offline

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/base"
	"codeq/internal/call"
	"codeq/internal/engine"
	"codeq/internal/fsck"
	"codeq/internal/keys"
	"codeq/internal/listing"
	"codeq/internal/manifest"
	"codeq/internal/raftlog"
	"codeq/internal/recurrence"
	"codeq/internal/snapshot"
	"codeq/internal/store"
)

// Config says how a directory is opened.
type Config struct {
	AcceptCopy bool  // files of it may be of different moments
	CacheBytes int64 // of all shards
	// Rules returns the configuration of the rules of a shard.
	Rules func(m *manifest.Manifest, shard int) engine.Config
}

// Rules check those stored values that users see.
var Rules = &fsck.Rules{
	Settings: func(value []byte) (version uint64, err error) {
		set, err := engine.ParseSettings(value)
		return set.Version, err
	},
	Schedule: recurrence.CheckStored,
}

// Queue is a directory that is open for reading. Its methods are safe for concurrent use.
type Queue struct {
	dir    *manifest.Directory
	caches *store.Caches
	shards []*shard
	stale  Staleness

	mu     sync.RWMutex // held for reading by calls, for writing by Close
	closed bool
}

// Staleness says how old the content of a directory is.
type Staleness struct {
	Node   string // of a cluster; "": a queue by itself
	Closed bool   // all stores were closed in order
	Shards []Position
}

// Position is how far a replica is; zero for a queue by itself.
type Position struct {
	Applied uint64 // the last entry that its store has
	Logged  uint64 // the last entry that its log has, or its store
}

// shard is a shard that is open for reading.
type shard struct {
	store *store.Store // does not change

	mu    sync.Mutex // guards rules, which read memory only
	rules engine.State
}

// Open opens the directory of a queue, or of a node.
func Open(fsys vfs.FS, path string, c Config) (*Queue, error) {
	d, err := manifest.OpenReadOnly(fsys, path)
	if err != nil {
		return nil, err
	}
	q := &Queue{dir: d, caches: store.NewCaches(c.CacheBytes, 0, d.Shards+1)}
	if err := q.open(c); err != nil {
		return nil, errors.Join(fmt.Errorf("open %s for reading: %w", path, err), q.Close())
	}
	return q, nil
}

func (q *Queue) open(c Config) error {
	if !c.AcceptCopy {
		if err := q.dir.RefuseCopy(); err != nil {
			return err
		}
	}
	closed, err := q.dir.IsClosed()
	if err != nil {
		return err
	}
	q.stale = Staleness{Node: q.dir.Node, Closed: closed, Shards: make([]Position, q.dir.Shards)}
	for i := range q.dir.Shards {
		if err := q.openShard(i, c); err != nil {
			return fmt.Errorf("shard %d: %w", i, err)
		}
	}
	if q.dir.Node == "" {
		return nil
	}
	return q.readLogs()
}

// openShard opens the store of a shard, and loads its memory.
func (q *Queue) openShard(i int, c Config) error {
	st, err := openStore(q.dir, i, q.caches)
	if err != nil {
		return err
	}
	s := &shard{store: st}
	q.shards = append(q.shards, s)
	s.rules.Init(c.Rules(&q.dir.Manifest, i), st)
	if q.dir.Node != "" { // how far the replica is
		p := &q.stale.Shards[i]
		if err := st.Read(func() (err error) { p.Applied, _, err = store.Applied(st.DB()); return err }); err != nil {
			return err
		}
		p.Logged = p.Applied
	}
	s.rules.Update(engine.Start{Instant: engine.Instant{Wall: uint64(time.Now().UnixMilli())}, Format: q.dir.Format})
	return s.rules.Load(0)
}

// openStore opens the store of a shard for reading, and makes sure that it is that of the shard.
func openStore(d *manifest.Directory, i int, caches *store.Caches) (*store.Store, error) {
	dir, err := storeDir(d, i)
	if err != nil {
		return nil, err
	}
	st, err := store.OpenReadOnly(d.FS, dir, slog.New(slog.DiscardHandler), caches)
	if err != nil {
		return nil, err
	}
	if err := st.Read(func() error {
		identity, err := store.Lookup(st.DB(), []byte{keys.Meta})
		if err != nil {
			return err
		}
		return d.CheckStored(i, identity)
	}); err != nil {
		return nil, errors.Join(err, st.Close())
	}
	return st, nil
}

// storeDir returns the directory of a shard's latest store. If the process was killed while it
// replaced a store, that is the new one, as for codeq.Open.
func storeDir(d *manifest.Directory, i int) (string, error) {
	if d.Node != "" {
		dir, err := snapshot.Received(d.FS, manifest.MetaDir(d.FS, d.Path, i))
		if errors.Is(err, snapshot.ErrDamaged) {
			err = fmt.Errorf("%w: %w", base.ErrCorrupt, err)
		}
		if err != nil || dir != "" {
			return dir, err
		}
	}
	return fsck.StoreDir(d.FS, d.Path, i)
}

// readLogs reads how far the logs of a node are.
func (q *Queue) readLogs() error {
	dir := q.dir.FS.PathJoin(q.dir.Path, manifest.RaftDir)
	if _, err := q.dir.FS.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil // a queue by itself that was about to found a cluster
	}
	st, err := store.OpenReadOnly(q.dir.FS, dir, slog.New(slog.DiscardHandler), q.caches)
	if err != nil {
		return err
	}
	err = st.Read(func() error {
		for i := range q.stale.Shards {
			last, err := raftlog.Last(st.DB(), uint32(i))
			if errors.Is(err, raftlog.ErrCorrupt) {
				err = fmt.Errorf("%w: %w", base.ErrCorrupt, err)
			}
			if err != nil {
				return err
			}
			q.stale.Shards[i].Logged = max(q.stale.Shards[i].Logged, last)
		}
		return nil
	})
	return errors.Join(err, st.Close())
}

// Shards returns the number of shards.
func (q *Queue) Shards() int { return len(q.shards) }

// Options returns those of the application; nil: none are stored.
func (q *Queue) Options() *manifest.Options { return q.dir.Options }

// DiskUsage describes the disk of the directory.
func (q *Queue) DiskUsage() (vfs.DiskUsage, error) { return q.dir.FS.GetDiskUsage(q.dir.Path) }

// Staleness says how old the content of the directory is.
func (q *Queue) Staleness() Staleness { return q.stale }

// use calls f with a shard that stays open meanwhile.
func (q *Queue) use(n int, f func(*shard) error) error {
	q.mu.RLock()
	defer q.mu.RUnlock()
	if q.closed {
		return base.ErrClosed
	}
	s := q.shards[n]
	err := s.store.Read(func() error { return f(s) })
	if err != nil && !errors.Is(err, base.ErrNotFound) {
		err = fmt.Errorf("read shard %d: %w", n, err)
	}
	return err
}

// Decide makes the rules of a shard answer a call that only reads.
func (q *Queue) Decide(n int, b call.Body) error {
	return q.use(n, func(s *shard) error {
		s.mu.Lock()
		defer s.mu.Unlock()
		for {
			v, err := b.Decide(&s.rules)
			if err == nil {
				err = s.rules.Mend()
			}
			if v != engine.Again || err != nil {
				return err
			}
			s.rules.Refill() // it needs entries that are on disk
		}
	})
}

// Read looks something up in a shard.
func (q *Queue) Read(n int, l listing.Lookup) error {
	return q.use(n, func(s *shard) (err error) {
		for again := true; again && err == nil; {
			again, err = l.Look(s.snapshot(func(v *store.Snapshot) { l.Visit(&s.rules, v) }), func() bool { return false })
		}
		return err
	})
}

// snapshot returns a Snapshot. visit adds the leases that the rules know.
func (s *shard) snapshot(visit func(*store.Snapshot)) *store.Snapshot {
	v := store.NewSnapshot(s.store.DB())
	v.Leases = make(map[keys.ID]store.Lease)
	s.mu.Lock()
	defer s.mu.Unlock()
	visit(v)
	return v
}

// Stats describes the store of a shard.
func (q *Queue) Stats(n int) (m store.Stats, err error) {
	err = q.use(n, func(s *shard) error { m = s.store.Stats(); return nil })
	return m, err
}

// Close waits for running calls, and releases the directory. It may be called twice.
func (q *Queue) Close() error {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.closed {
		return nil
	}
	q.closed = true
	var errs []error
	for _, s := range q.shards {
		s.rules.Close()
		errs = append(errs, s.store.Close())
	}
	q.caches.Close()
	return errors.Join(append(errs, q.dir.Close())...)
}
