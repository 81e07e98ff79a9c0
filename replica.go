package codeq

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/raft"

	"codeq/internal/manifest"
	"codeq/internal/schema"
	"codeq/internal/snapshot"
	"codeq/internal/store"
)

// replica is what this process has of a shard: the store, and the shard itself
// while this process decides. Without a cluster that is always, from Open to
// Close. In a cluster it is while this node leads the shard's Raft group; see
// leadership.go.
type replica struct {
	index int
	store *store.Store          // replaced by restore
	lead  atomic.Pointer[shard] // nil: another process decides, or nobody does
	steps stepTable             // of the shards that have decided here

	// mu is held for reading by who reads the store beside the shard's owner,
	// for writing to close or replace it.
	mu sync.RWMutex

	// In a cluster only.
	node      *node
	raft      *raft.Raft
	running   bool // Raft's goroutines have begun; set before they do
	snapshots *snapshot.Store
	source    *liveStore    // of the snapshots; guarded by mu; nil while the store is being replaced
	applied   atomic.Uint64 // index of the last entry in the store
	transport *transport
	health    peerHealth
	growth    growth
	ended     chan *shard   // capacity 1: the shard led here has come to its end by itself
	kept      chan struct{} // capacity 1: the shard was to be handed over, and has not been
	broken    atomic.Pointer[error]
	asking    asking
	leading   leaderTerm
	route     changes // of where the shard is led
	tenure    tenure
	producing session
	awaits    awaitTable
	progress  changes // of applied
	replayed  uint64  // the last entry that the log had when the node was opened
}

// close releases the store. REQUIRES: the shard has ended.
func (r *replica) close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.source = nil
	if err := r.store.Close(); err != nil {
		return fmt.Errorf("%w: close shard %d: %w", ErrFailed, r.index, err)
	}
	return nil
}

// use keeps the store open while f uses it.
func (r *replica) use(f func(*store.Store) error) error {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if err := r.failure(); err != nil {
		return err
	}
	if r.node != nil && r.source == nil {
		return errReplaced
	}
	return f(r.store)
}

// hurry has a commit that waits for room on a full disk fail.
func (r *replica) hurry() {
	r.mu.RLock()
	defer r.mu.RUnlock()
	r.store.Hurry()
}

// restore replaces the store by one that the snapshots have received.
func (r *replica) restore() error {
	r.leave(ErrNotLeader)
	r.mu.Lock()
	defer r.mu.Unlock()
	if _, _, ok := r.snapshots.Installed(); !ok {
		return nil // the store is as far as the snapshot
	}
	r.source = nil
	if err := r.store.Close(); err != nil {
		return err
	}
	return r.openStore()
}

// openStore puts what the snapshots have received in place, if anything, and
// opens the store. REQUIRES: mu is held, or nobody else knows the replica.
func (r *replica) openStore() error {
	q := r.node.queue
	dir := manifest.ShardDir(q.dir.FS, q.dir.Path, r.index)
	if from, _, ok := r.snapshots.Installed(); ok {
		if err := q.dir.FS.RemoveAll(dir); err != nil {
			return err
		}
		if err := q.dir.FS.Rename(from, dir); err != nil {
			return err
		}
		if err := manifest.SyncDirectory(q.dir.FS, q.dir.Path); err != nil {
			return err
		}
		if err := r.snapshots.Swapped(); err != nil {
			return err
		}
	}
	st, err := store.Open(dir, q.opts.storeConfig(), q.caches, q.dir.Creating)
	if err != nil {
		return err
	}
	index := uint64(0)
	if err := st.Read(func() (err error) { index, err = schema.Applied(st.DB()); return err }); err != nil {
		return errors.Join(err, st.Close())
	}
	r.store, r.source = st, &liveStore{r, st}
	r.applied.Store(index)
	return nil
}

// fail ends the replica: its store cannot be written, or its log not be read, or
// its vote not be stored. The others go on without it. It never waits.
func (r *replica) fail(cause error) {
	err := fmt.Errorf("%w: shard %d: %w", ErrFailed, r.index, cause)
	if !r.broken.CompareAndSwap(nil, &err) {
		return
	}
	r.node.log.Error("replica failed", "shard", r.index, "err", cause)
	r.changed()
	r.node.background.Go(func() { contain(r.node.log, "end of a replica", r.shutDown, nil) })
}

// shutDown ends Raft's part. Raft does not answer what is on its way to the state machine when it
// is shut down. Until then all is answered: entries by Apply, with the
// failure, or else when the leadership is lost.
func (r *replica) shutDown() {
	<-r.asking.end()
	_ = r.raft.Shutdown().Error() // of the group's goroutines; Raft has logged what went wrong
}

// enter lets a proposal go to Raft, which answers it; the caller then has asking
// left. It never waits.
func (r *replica) enter() error {
	if r.failure() != nil || !r.asking.enter() {
		return fmt.Errorf("%w: %w", ErrNotLeader, r.failure())
	}
	return nil
}

// asking is those whom Raft is to answer.
type asking struct {
	mu    sync.Mutex // guards what follows
	count int
	over  chan struct{} // closed when all have been answered; nil: more may come
}

// enter reports whether there may be one more, who calls leave then.
func (a *asking) enter() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.over != nil {
		return false
	}
	a.count++
	return true
}

func (a *asking) leave() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.count--
	if a.count == 0 && a.over != nil {
		close(a.over)
	}
}

// end lets nobody else enter, and returns what is closed when all have left. It
// is called once.
func (a *asking) end() <-chan struct{} {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.over = make(chan struct{})
	if a.count == 0 {
		close(a.over)
	}
	return a.over
}

// failure is why the replica has ended; nil if it has not.
func (r *replica) failure() error {
	if err := r.broken.Load(); err != nil {
		return *err
	}
	return nil
}

// Where a shard is led, as this node knows, and how those who wait hear that it
// may be led elsewhere.

// changed says that the shard may be led by another node, or be ready to be asked.
func (r *replica) changed() {
	r.route.changed()
	r.node.routes.changed()
}

// changes tells those who wait that something has changed. The zero changes is
// ready for use.
type changes struct {
	mu     sync.Mutex // guards change
	change chan struct{}
}

// next returns a channel that is closed at the next change.
func (c *changes) next() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.change == nil {
		c.change = make(chan struct{})
	}
	return c.change
}

func (c *changes) changed() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.change != nil {
		close(c.change)
		c.change = nil
	}
}

// tenure is how long calls wait for a leader of the shard on another node.
type tenure struct {
	mu     sync.Mutex // guards what follows
	leader raft.ServerID
	over   chan struct{}
}

// begin notes who leads now.
func (t *tenure) begin(leader raft.ServerID, grace time.Duration) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.leader == leader {
		return
	}
	if over := t.over; over != nil {
		time.AfterFunc(grace, func() { close(over) })
	}
	t.leader, t.over = leader, make(chan struct{})
}

// of returns a channel that is closed some time after another node than the
// given one is known to lead: what has not been answered by then will not be.
func (t *tenure) of(leader raft.ServerID) <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.leader != leader { // not noted yet, or over already
		return nil
	}
	return t.over
}

// anyShard is a shard for a task that may be in any: one that this node leads, or
// else one that has a leader.
func (n *node) anyShard() int {
	replicas := n.queue.replicas
	first := rand.IntN(len(replicas))
	reachable := first
	for i := range replicas {
		at := (first + i) % len(replicas)
		if replicas[at].lead.Load() != nil {
			return at
		}
		if !replicas[reachable].hasLeader() && replicas[at].hasLeader() {
			reachable = at
		}
	}
	return reachable
}

// hasLeader reports whether a node is known to lead the shard.
func (r *replica) hasLeader() bool {
	addr, _ := r.raft.LeaderWithID()
	return addr != ""
}
