package codeq

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"codeq/internal/call"
	"codeq/internal/cluster"
	"codeq/internal/convert"
	"codeq/internal/entries"
	"codeq/internal/owner"
	"codeq/internal/snapshot"
	"codeq/internal/store"
)

// replica is this process's part of a shard: the store, and the shard itself while this process
// decides: without a cluster from Open to Close, in a cluster while this node leads the shard's
// Raft group.
type replica struct {
	index  int
	store  *store.Store          // replaced by stateMachine.Open; nil: none is open
	lead   atomic.Pointer[shard] // nil: another process decides, or none
	upkeep owner.UpkeepTable     // of the shards that have decided here

	failed error // why the shard of a standalone queue has failed; its owner sets it before it ends

	latest store.Latest // may be closed

	// mu is held for reading by readers of the store other than the shard's owner, for writing to
	// close or replace it.
	mu sync.RWMutex

	// In a cluster only.
	node      *node
	group     *cluster.Group
	source    *liveStore                // of the snapshots; guarded by mu; nil while the store is being replaced
	clockedAt atomic.Pointer[time.Time] // when the store got the clock of leases that it has
	mono      func() time.Time          // Options.mono
	producing *call.Session             // of this node
	awaits    entries.Awaiting
}

// close releases the store, if one is open. REQUIRES: the shard has ended.
func (r *replica) close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.source = nil
	if r.store == nil {
		return r.failed
	}
	if err := r.store.Close(); err != nil {
		return fmt.Errorf("%w: close shard %d: %w", ErrFailed, r.index, errors.Join(r.failed, err))
	}
	return r.failed
}

// reconcile makes the stores of all shards agree with each other; differ: assume different moments,
// even if the manifest does not say so. REQUIRES: they are open, and not in use.
func (q *Queue) reconcile(differ bool) error {
	stores := make([]*store.Store, len(q.replicas))
	for i, r := range q.replicas {
		stores[i] = r.store
	}
	return convert.Reconcile(stores, differ || q.dir.Differ, q.opts.log)
}

// use keeps the store open while f uses it.
func (r *replica) use(f func(*store.Store) error) error {
	r.mu.RLock()
	defer r.mu.RUnlock()
	if r.node != nil {
		if err := r.group.Failure(); err != nil {
			return err
		}
		if r.source == nil {
			return errReplaced
		}
	}
	return f(r.store)
}

// liveStore is the store that a shard's snapshots are made of.
type liveStore struct {
	replica *replica
	store   *store.Store
}

// Live returns the store of the replica; nil while it is being replaced.
func (m *stateMachine) Live() snapshot.Live {
	r := m.replica
	r.mu.RLock()
	defer r.mu.RUnlock()
	if r.source == nil {
		return nil
	}
	return r.source
}

var errReplaced = errors.New("the store has been replaced")

func (l *liveStore) use(f func(*store.Store) error) error {
	return l.replica.use(func(st *store.Store) error {
		if st != l.store {
			return errReplaced
		}
		return f(st)
	})
}

// Flush makes all applied entries durable.
func (l *liveStore) Flush() error { return l.use(flushStore) }

func flushStore(st *store.Store) error { return st.Flush(context.Background()) }

// Checkpoint copies all applied entries, by hard links.
func (l *liveStore) Checkpoint(dir string) error {
	return l.use(func(st *store.Store) error {
		if err := flushStore(st); err != nil {
			return err
		}
		return st.Checkpoint(dir)
	})
}
