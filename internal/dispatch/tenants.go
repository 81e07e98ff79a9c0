package dispatch

import (
	"sync"
	"sync/atomic"

	"codeq/internal/engine"
)

// tenantCounts are the numbers of shards of the process where the tenants of a queue have turns, by
// priority and tenant. A shard looks up a count when the tenant gets its first turn there, and
// keeps it while it has the lane in memory. It is safe for concurrent use.
type tenantCounts struct {
	named atomic.Int32 // number of counts of tenants with a name
	mu    sync.Mutex   // guards the fields below
	count int
	all   *[16]map[string]*tenantCount // by priority; keys that are strings are hashed faster. nil: count is 0
}

// tenantCount is a number of shards.
type tenantCount struct {
	shards atomic.Int32
	users  int32 // shards that keep it; guarded by tenantCounts.mu
}

func (t *tenantCounts) hold(tenant string, priority uint8) *atomic.Int32 {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.all == nil {
		t.all = new([16]map[string]*tenantCount)
	}
	counts := t.all[priority]
	c := counts[tenant]
	if c == nil {
		if counts == nil {
			counts = make(map[string]*tenantCount)
			t.all[priority] = counts
		}
		c = new(tenantCount)
		counts[tenant] = c
		if t.count++; tenant != "" {
			t.named.Add(1)
		}
	}
	c.users++
	return &c.shards
}

// drop ends a hold.
func (t *tenantCounts) drop(tenant string, priority uint8) {
	t.mu.Lock()
	defer t.mu.Unlock()
	counts := t.all[priority]
	c := counts[tenant]
	if c.users--; c.users > 0 {
		return
	}
	if tenant != "" {
		t.named.Add(-1)
	}
	if delete(counts, tenant); len(counts) == 0 {
		t.all[priority] = nil // a map keeps its size
	}
	if t.count--; t.count == 0 {
		t.all = nil
	}
}

// shardTenants is how the rules of a shard find the counts of tenants.
type shardTenants Dispatcher

func (d *shardTenants) Hold(of *engine.Queue, tenant string, priority uint8) *atomic.Int32 {
	q := (*Dispatcher)(d).Of(of)
	if q.heads == nil {
		q.heads = d.board.hold(q.Name, d.shards)
	}
	return q.heads.tenants.hold(tenant, priority)
}

func (d *shardTenants) Drop(of *engine.Queue, tenant string, priority uint8) {
	(*Dispatcher)(d).Of(of).heads.tenants.drop(tenant, priority)
}
