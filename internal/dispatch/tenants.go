package dispatch

import (
	"sync"
	"sync/atomic"

	"codeq/internal/engine"
)

// tenantCounts are the numbers of shards of the process where the tenants of a queue have turns, by
// tenant and priority. A shard looks up a count when the tenant gets its first turn there, and
// keeps it while it has the lane in memory. It is safe for concurrent use.
type tenantCounts struct {
	named atomic.Int32 // number of counts of tenants with a name
	mu    sync.Mutex   // guards all
	all   map[tenantPriority]*tenantCount
}

type tenantPriority struct {
	tenant   string
	priority uint8
}

// tenantCount is a number of shards.
type tenantCount struct {
	shards atomic.Int32
	users  int32 // shards that keep it; guarded by tenantCounts.mu
}

func (t *tenantCounts) hold(of tenantPriority) *atomic.Int32 {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := t.all[of]
	if c == nil {
		if t.all == nil {
			t.all = make(map[tenantPriority]*tenantCount)
		}
		c = new(tenantCount)
		t.all[of] = c
		if of.tenant != "" {
			t.named.Add(1)
		}
	}
	c.users++
	return &c.shards
}

// drop ends a hold.
func (t *tenantCounts) drop(of tenantPriority) {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := t.all[of]
	if c.users--; c.users > 0 {
		return
	}
	if of.tenant != "" {
		t.named.Add(-1)
	}
	if delete(t.all, of); len(t.all) == 0 {
		t.all = nil // a map keeps its size
	}
}

// shardTenants is how the rules of a shard find the counts of tenants.
type shardTenants Dispatcher

func (d *shardTenants) Hold(of *engine.Queue, tenant string, priority uint8) *atomic.Int32 {
	q := (*Dispatcher)(d).Of(of)
	if q.heads == nil {
		q.heads = d.board.hold(q.Name, d.shards)
	}
	return q.heads.tenants.hold(tenantPriority{tenant, priority})
}

func (d *shardTenants) Drop(of *engine.Queue, tenant string, priority uint8) {
	(*Dispatcher)(d).Of(of).heads.tenants.drop(tenantPriority{tenant, priority})
}
