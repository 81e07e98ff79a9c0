package codeq

import (
	"errors"
	"fmt"
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
// decides: without a cluster from Open to Close, in one while this node leads the Raft group.
type replica struct {
	index  int
	slot   store.Slot            // the store is replaced by stateMachine.Open
	lead   atomic.Pointer[shard] // nil: another process decides, or none
	upkeep owner.UpkeepTable     // of the shards that have decided here

	failed error // why the shard of a standalone queue has failed; its owner sets it before it ends

	node      *node // in a cluster only, like the fields below
	group     *cluster.Group
	clockedAt atomic.Pointer[time.Time] // when the store got the clock of leases that it has
	mono      func() time.Time          // Options.mono
	producing *call.Session             // of this node
	awaits    entries.Awaiting
}

// close releases the store, if one is open. REQUIRES: the shard has ended.
func (r *replica) close() error {
	if err := r.slot.Close(); err != nil {
		return fmt.Errorf("%w: close shard %d: %w", ErrFailed, r.index, errors.Join(r.failed, err))
	}
	return r.failed
}

// reconcile makes the stores of all shards agree with each other; differ: assume different moments,
// even if the manifest does not say so. REQUIRES: they are open, and not in use.
func (q *Queue) reconcile(differ bool) error {
	stores := make([]*store.Store, len(q.replicas))
	for i, r := range q.replicas {
		stores[i] = r.slot.Store()
	}
	return convert.Reconcile(stores, differ || q.dir.Differ, q.opts.log)
}

// Live returns the store of the replica; nil while it is being replaced.
func (m *stateMachine) Live() snapshot.Live {
	if live, ok := m.replica.slot.Live(); ok {
		return live
	}
	return nil
}
