package engine

import (
	"maps"
	"math/bits"
	"sync/atomic"
)

// How the tenants of a queue share its claims if the process has several shards.
//
// In a shard, tenants take turns. If shards took turns as well, a tenant with tasks in one of four
// shards would get a quarter of its share. So a claim goes to a shard with a probability in
// proportion to the shard's share, and a turn lasts longer, the fewer shards its tenant has.
//
// With w the weight of a tenant, and n the number of shards where it has a turn, each of its lanes
// has the share w/n. The share of a ring is the sum of those of its lanes, and in its shard a
// lane gets turns in proportion to its own. So the shares of a tenant add up to w, and those of all
// rings to the sum of all weights.

// tenantTable counts in how many shards of a process tenants have turns. It is safe for concurrent
// use.
type tenantTable interface {
	// Hold returns the count of a queue, tenant and priority: one for all shards, until Drop.
	Hold(q *Queue, tenant string, priority uint8) *atomic.Int32
	Drop(q *Queue, tenant string, priority uint8)
}

// laneShare is the share of a lane in the claims of its queue.
//
// Invariant: if the lane is in a ring, shards counts it, and so does the ring, by shards and
// weight.
type laneShare struct {
	count  *atomic.Int32
	weight int32 // as of the last look
	shards int16 // likewise the count; 0: the lane is in no ring
	rest   int16 // of the last turn: less than a claim, which has shards parts
}

// ringShares are the shares of the lanes of a ring.
type ringShares struct {
	sum    uint64
	lanes  int   // that have a share
	most   int16 // the largest number of shards of any of them; 0: there are none
	shards []int // by number of shards, how many lanes
}

// wholeShare is the share of a tenant of weight 1 in its only shard: up to 16, each number of
// shards divides it.
const wholeShare = 720720

func (l *laneShare) size() uint64 { return uint64(l.weight) * wholeShare / uint64(l.shards) }

// shareOf returns the share of a ring. A lane without a laneShare has that of a tenant of weight 1
// in its only shard: it was loaded from disk, or is of the tenant "" and the shard does not know
// yet that another shard has other tenants.
func (r *ring) shareOf() uint64 {
	if r.shares == nil {
		return wholeShare * uint64(r.lanes)
	}
	return r.shares.sum + wholeShare*uint64(r.lanes-r.shares.lanes)
}

// Share begins to count the turns of tenants, and the suspects at work, in tables of all shards of
// the process. Without the first the shard has no turns any more; without the second it goes on.
func (s *State) Share(t tenantTable, suspects suspectTable) {
	if suspects != nil {
		s.shareSuspects(suspects)
	}
	if t == nil {
		for _, l := range s.lanes.All() {
			if l == nil || l.share == nil {
				continue
			}
			if l.ringNext != nil {
				s.leaveShares(l)
			}
			s.dropShare(l)
		}
	}
	s.tenants = t // lanes in rings are counted at their next turns
}

// isShared reports whether the tenant of a lane is counted: it has a name, or some other tenant of
// the queue in this process does.
func (l *Lane) isShared() bool { return l.Tenant != "" || l.queue.Shared }

// joinShares counts a lane that is in its ring and is not counted yet.
func (s *State) joinShares(l *Lane) {
	if l.share == nil {
		if s.tenants == nil {
			return
		}
		l.share = &laneShare{count: s.tenants.Hold(l.queue, l.Tenant, l.Priority)}
	}
	s.enterShare(l, l.share.count.Add(1))
}

// leaveShares is called before a lane with a share leaves its ring.
func (s *State) leaveShares(l *Lane) {
	l.queue.rings[l.Priority].shares.remove(l.share)
	l.share.shards = 0
	l.share.count.Add(-1)
	if l.Tenant == "" && !l.queue.Shared {
		s.dropShare(l)
	}
}

// dropShare is called when a lane that is in no ring leaves memory.
func (s *State) dropShare(l *Lane) {
	if l.share != nil {
		l.share = nil
		s.tenants.Drop(l.queue, l.Tenant, l.Priority)
	}
}

// renewShare looks how many shards the tenant of a lane in a ring has now, and how much weight.
func (s *State) renewShare(l *Lane) {
	h := l.share
	if h == nil {
		s.joinShares(l)
		return
	}
	n := h.count.Load()
	if s.boundShards(n) != h.shards || int32(l.queue.Settings.weight(l.Tenant)) != h.weight {
		l.queue.rings[l.Priority].shares.remove(h)
		s.enterShare(l, n)
	}
}

// boundShards bounds a number of shards: the last owner of one may not have left yet.
func (s *State) boundShards(n int32) int16 { return int16(max(1, min(n, int32(s.config.Shards)))) }

func (s *State) enterShare(l *Lane, shards int32) {
	h, r := l.share, l.queue.rings[l.Priority]
	h.shards, h.weight = s.boundShards(shards), int32(l.queue.Settings.weight(l.Tenant))
	h.rest = min(h.rest, h.shards-1)
	if r.shares == nil {
		r.shares = &ringShares{shards: make([]int, s.config.Shards+1)}
	}
	r.shares.add(h)
}

func (r *ringShares) add(h *laneShare) {
	r.sum += h.size()
	r.lanes++
	r.shards[h.shards]++
	r.most = max(r.most, h.shards)
}

func (r *ringShares) remove(h *laneShare) {
	r.sum -= h.size()
	r.lanes--
	r.shards[h.shards]--
	for r.most > 0 && r.shards[r.most] == 0 {
		r.most--
	}
}

// longestTurn returns how many claims a turn of a lane lasts at the most: the tenant's weight, and
// more if other tenants of the ring have more shards.
func (l *Lane) longestTurn() int32 {
	h := l.share
	if h == nil || h.shards == 0 {
		return int32(l.queue.Settings.weight(l.Tenant))
	}
	most := l.queue.rings[l.Priority].shares.most
	if most == h.shards {
		return h.weight
	}
	return (h.weight*int32(most) + int32(h.shards) - 1) / int32(h.shards)
}

// beginTurn returns how many claims the next turn of a lane lasts. The rest of the division counts
// in the turn after it.
func (l *Lane) beginTurn() int32 {
	h := l.share
	if h == nil || h.shards == 0 {
		return int32(l.queue.Settings.weight(l.Tenant))
	}
	most := l.queue.rings[l.Priority].shares.most
	if most == h.shards && h.rest == 0 {
		return h.weight
	}
	parts := h.weight*int32(most) + int32(h.rest)
	h.rest = int16(parts % int32(h.shards))
	return parts / int32(h.shards)
}

// renewWeights is called when the weights of a queue's tenants have changed.
func (s *State) renewWeights(q *Queue, before map[string]int) {
	after := q.Settings.TenantWeights
	if q.Mask == 0 || maps.Equal(before, after) {
		return
	}
	for _, weights := range []map[string]int{before, after} {
		for tenant := range weights {
			for mask := q.Mask; mask != 0; mask &= mask - 1 {
				l := q.lane(tenant, uint8(bits.TrailingZeros16(mask)))
				if l != nil && l.ringNext != nil && l.share != nil {
					s.renewShare(l)
				}
			}
		}
	}
}
