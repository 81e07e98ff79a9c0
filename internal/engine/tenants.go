package engine

import (
	"maps"
	"sync/atomic"

	"codeq/internal/ready"
)

// tenantTable counts in how many shards of a process tenants have turns. It is safe for concurrent
// use.
type tenantTable interface {
	// Hold returns the count of a queue, tenant and priority: one for all shards, until Drop.
	Hold(q *Queue, tenant string, priority uint8) *atomic.Int32
	Drop(q *Queue, tenant string, priority uint8)
}

// Share begins to count the turns of tenants, and the suspects at work, in tables of all shards of
// the process. Without the first the shard has no turns any more; without the second it goes on.
func (s *State) Share(t tenantTable, suspects suspectTable) {
	if suspects != nil {
		s.Suspects.shareSuspects(suspects)
	}
	if t == nil {
		s.Names.ready.Hold = nil
		for _, l := range s.Names.lanes.All() {
			if l != nil {
				s.Names.ready.Weigh(&l.tasks, l.tasks.Weight)
			}
		}
		return
	}
	// lanes in rings are counted at their next turns
	s.Names.ready.Hold = func(of *ready.Lane) *atomic.Int32 {
		l := s.Names.laneOf(of)
		return t.Hold(l.queue, l.Tenant, l.Priority)
	}
	s.Names.ready.Release = func(of *ready.Lane) {
		l := s.Names.laneOf(of)
		t.Drop(l.queue, l.Tenant, l.Priority)
	}
}

// renewWeights is called when the weights of a queue's tenants have changed.
func (ns *names) renewWeights(q *Queue, before map[string]int) {
	after := q.Settings.TenantWeights
	if q.lanes.Len() == 0 || maps.Equal(before, after) {
		return
	}
	for _, weights := range []map[string]int{before, after} {
		for tenant := range weights {
			for p := range uint8(maxPriority + 1) {
				if l := q.lane(tenant, p); l != nil {
					ns.ready.Weigh(&l.tasks, q.Settings.weight(tenant))
				}
			}
		}
	}
}
