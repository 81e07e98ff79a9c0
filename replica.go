package codeq

import (
	"context"
	"sync"
	"sync/atomic"
)

// replica is what this process has of a shard: the store, and the shard itself
// while this process decides.
type replica struct {
	index int
	store *store
	lead  atomic.Pointer[shard] // nil: another process decides, or nobody does

	mu sync.RWMutex // held for reading by views, for writing to close the store
}

// close releases the store. REQUIRES: the shard has ended.
func (r *replica) close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.store.close()
}

// shard is a shard that this process leads; nil if it does not.
func (q *Queue) shard(index int) *shard { return q.replicas[index].lead.Load() }

// led is the shards that this process leads.
func (q *Queue) led() []*shard {
	led := make([]*shard, 0, len(q.replicas))
	for _, r := range q.replicas {
		if s := r.lead.Load(); s != nil {
			led = append(led, s)
		}
	}
	return led
}

// shardOf is the number of the shard that has a task.
func (q *Queue) shardOf(id ID) int { return id.shard(len(q.replicas)) }

// do has a shard resolve an operation and waits for its outcome. settled is
// false when the operation still belongs to the shard.
func (q *Queue) do(ctx context.Context, shard int, op request) (settled bool, err error) {
	return q.shard(shard).do(ctx, op, op.base())
}

// do hands an operation to the shard and waits for its outcome. settled is
// false when the operation still belongs to the shard.
func (s *shard) do(ctx context.Context, op operation, c *completion) (settled bool, err error) {
	if err := s.inbox.push(ctx, op); err != nil {
		return true, err
	}
	return c.wait(ctx)
}
