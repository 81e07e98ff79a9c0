package engine

import (
	"codeq/internal/container/numset"
	"codeq/internal/keys"
	"codeq/internal/store"
)

// LaneSweep finds unused entries of lanes and queues in the catalogue, so that their numbers can be
// reused. The owner takes a snapshot. A goroutine reads there which lanes the IDs of tasks and
// stored values name. Then the owner removes the lanes that were not in memory at the start of the
// sweep, have not come back since, and are not named. IDs are minted, and tasks placed, only in
// lanes in memory: nothing can name such a lane unless the snapshot shows it.
//
// The cost of a sweep is spread over the lanes that come and go: before the next sweep, a quarter
// as many lanes must leave memory as this sweep read entries. Tasks in their first place are not
// read: their lane is in memory.
//
// Only the shard's owner uses it, except Names: the reader uses Names until it has finished.
type LaneSweep struct {
	lanes, queues numset.Set // that may be removed
	Names         *store.LaneNames
	found         bool   // the reader has finished
	next          uint32 // lane or queue to remove next
	lanesGone     bool   // all lanes that can be removed are
}

func (ns *names) sweepLanesIsDue() bool {
	c := &ns.catalogue
	if c.sweep != nil {
		return c.sweep.found
	}
	return ns.absentLanes() > c.sweepAt
}

// absentLanes returns how many entries of lanes are not in memory.
func (ns *names) absentLanes() int { return ns.catalogue.lanes.Len() - ns.catalogue.loaded.Len() }

// sweepLanes begins a sweep, or continues its removals.
func (ns *names) sweepLanes() {
	if ns.catalogue.sweep == nil {
		ns.beginSweep()
		return
	}
	ns.endSweep()
}

// beginSweep starts a reader of disk as it is now, without the current group: the group adds only
// names of lanes in memory.
func (ns *names) beginSweep() {
	c := &ns.catalogue
	m := &store.LaneNames{Absent: c.lanes.Without(&c.loaded)}
	c.sweep = &LaneSweep{Names: m, lanes: c.lanes.Without(&c.loaded), queues: c.queues.Without(&c.current)}
	ns.Effects.Sweep = c.sweep
}

const (
	// openSweepLanes: Open sweeps a small store if more entries than this are not in memory. If
	// each process has other queues and is short, a sweep beside the owner would never end. Reading
	// so many entries takes about a millisecond.
	openSweepLanes = 1 << 10
	openSweepBytes = 1 << 20 // of tables that the sweep of a small store reads, at most
)

// sweepAtOpen reads a small store for a sweep.
func (ns *names) sweepAtOpen() error {
	if ns.absentLanes() <= min(openSweepLanes, ns.catalogue.sweepAt) || ns.Store.SizeWithout(keys.Task) > openSweepBytes {
		return nil
	}
	ns.beginSweep()
	sw := ns.catalogue.sweep
	ns.Effects.Sweep = nil
	ns.Swept(sw, sw.Names.Read(ns.Store.DB(), func() bool { return false }))
	return nil
}

// Swept is called when the reader has finished or failed.
func (ns *names) Swept(sw *LaneSweep, err error) {
	if m := sw.Names; err != nil {
		sw.lanes, sw.queues = numset.Set{}, numset.Set{}
	} else {
		sw.lanes, sw.queues = sw.lanes.Without(&m.Lanes), sw.queues.Without(&m.Queues)
	}
	sw.queues.Remove(0)
	sw.found = true
}

// endSweep removes the lanes and queues that nothing names.
func (ns *names) endSweep() {
	c := &ns.catalogue
	sw := c.sweep
	free := func(named, taken *numset.Set, remove func(n uint32)) (more bool) {
		for n, ok := named.Next(sw.next); ok; n, ok = named.Next(n + 1) {
			if sw.next = n; ns.Spent() {
				return true
			}
			taken.Remove(n)
			remove(n)
		}
		sw.next = 0
		return false
	}
	if !sw.lanesGone {
		if free(&sw.lanes, &c.lanes, func(n uint32) {
			ns.Group.Delete(keys.AppendNumbered(nil, keys.Lane, n))
			c.formerLanes.Remove(n)
		}) {
			return
		}
		sw.lanesGone = true
	}
	if free(&sw.queues, &c.queues, func(n uint32) {
		ns.Group.Delete(keys.AppendNumbered(nil, keys.Queue, n))
		ns.Group.Delete(keys.AppendNumbered(nil, keys.Counters, n))
		ns.Group.unclocked = true
		c.formerQueues.Remove(n)
	}) {
		return
	}
	c.sweep = nil
	c.swept++
	c.sweepAt = ns.absentLanes() + max(ns.config.SweepLanes, c.loaded.Len(), sw.Names.Entries/4)
	if c.lanes.Len() > keys.MaxLane/4*3 { // sweeps are better than no lanes
		c.sweepAt = min(c.sweepAt, ns.absentLanes()+keys.MaxLane/64)
	}
}
