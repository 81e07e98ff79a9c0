package ready

import "sync/atomic"

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

// WholeShare is the share of a tenant of weight 1 in its only shard: up to 16, each number of
// shards divides it.
const WholeShare = 720720

func (l *laneShare) size() uint64 { return uint64(l.weight) * WholeShare / uint64(l.shards) }

// shareOf returns the share of a ring. A lane without a laneShare has that of a tenant of weight 1
// in its only shard: it was loaded from disk, or is of the tenant "" and the shard does not know
// yet that another shard has other tenants.
func (r *ring) shareOf() uint64 {
	if r.shares == nil {
		return WholeShare * uint64(r.lanes)
	}
	return r.shares.sum + WholeShare*uint64(r.lanes-r.shares.lanes)
}

// isShared reports whether the tenant of a lane is counted: it has a name, or some other tenant of
// the queue in this process does.
func (l *Lane) isShared() bool { return l.Named || l.Queue.Shared }

// joinShares counts a lane that is in its ring and is not counted yet.
func (t *Tasks) joinShares(l *Lane) {
	if l.share == nil {
		if t.Hold == nil {
			return
		}
		l.share = &laneShare{count: t.Hold(l)}
	}
	t.enterShare(l, l.share.count.Add(1))
}

// leaveShares is called before a lane with a share leaves its ring.
func (t *Tasks) leaveShares(l *Lane) {
	l.Queue.rings[l.Priority].shares.remove(l.share)
	l.share.shards = 0
	l.share.count.Add(-1)
	if !l.isShared() {
		t.dropShare(l)
	}
}

// dropShare is called when a lane that is in no ring leaves memory.
func (t *Tasks) dropShare(l *Lane) {
	if l.share != nil {
		l.share = nil
		t.Release(l)
	}
}

// renewShare looks how many shards the tenant of a lane in a ring has now, and how much weight.
func (t *Tasks) renewShare(l *Lane) {
	h := l.share
	if h == nil {
		t.joinShares(l)
		return
	}
	n := h.count.Load()
	if t.boundShards(n) != h.shards || l.Weight != h.weight {
		l.Queue.rings[l.Priority].shares.remove(h)
		t.enterShare(l, n)
	}
}

// boundShards bounds a number of shards: the last owner of one may not have left yet.
func (t *Tasks) boundShards(n int32) int16 { return int16(max(1, min(n, int32(t.config.Shards)))) }

func (t *Tasks) enterShare(l *Lane, shards int32) {
	h, r := l.share, l.Queue.rings[l.Priority]
	h.shards, h.weight = t.boundShards(shards), l.Weight
	h.rest = min(h.rest, h.shards-1)
	if r.shares == nil {
		r.shares = &ringShares{shards: make([]int, t.config.Shards+1)}
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
		return l.Weight
	}
	most := l.Queue.rings[l.Priority].shares.most
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
		return l.Weight
	}
	most := l.Queue.rings[l.Priority].shares.most
	if most == h.shards && h.rest == 0 {
		return h.weight
	}
	parts := h.weight*int32(most) + int32(h.rest)
	h.rest = int16(parts % int32(h.shards))
	return parts / int32(h.shards)
}

// Weigh sets the weight of a lane's tenant. The tenant is not counted any more if Hold is nil.
func (t *Tasks) Weigh(l *Lane, weight int32) {
	l.Weight = weight
	switch turn := l.ringNext != nil; {
	case l.share == nil:
	case t.Hold != nil && turn:
		t.renewShare(l)
	case t.Hold == nil:
		if turn {
			t.leaveShares(l)
		}
		t.dropShare(l)
	}
}
