package engine

import (
	"errors"
	"fmt"

	"codeq/internal/container/numset"
	"codeq/internal/keys"
	"codeq/internal/store"

	"github.com/cockroachdb/pebble/v2"
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
	Names         *laneNames
	found         bool   // the reader has finished
	next          uint32 // lane or queue to remove next
	lanesGone     bool   // all lanes that can be removed are
}

// laneNames has the names that a sweep has read in a snapshot.
type laneNames struct {
	absent        numset.Set // lanes that were not in memory
	lanes, queues numset.Set // that are named
	entries       int        // read
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
	m := &laneNames{absent: c.lanes.Without(&c.loaded)}
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
		sw.lanes, sw.queues = sw.lanes.Without(&m.lanes), sw.queues.Without(&m.queues)
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
			c.formerLanes.remove(n)
		}) {
			return
		}
		sw.lanesGone = true
	}
	if free(&sw.queues, &c.queues, func(n uint32) {
		ns.Group.Delete(keys.AppendNumbered(nil, keys.Queue, n))
		ns.Group.Delete(keys.AppendNumbered(nil, keys.Counters, n))
		ns.Group.unclocked = true
		c.formerQueues.remove(n)
	}) {
		return
	}
	c.sweep = nil
	c.swept++
	c.sweepAt = ns.absentLanes() + max(ns.config.SweepLanes, c.loaded.Len(), sw.Names.entries/4)
	if c.lanes.Len() > keys.MaxLane/4*3 { // sweeps are better than no lanes
		c.sweepAt = min(c.sweepAt, ns.absentLanes()+keys.MaxLane/64)
	}
}

var errSweepEnded = errors.New("the shard has ended")

// Read reads disk as it was when the sweep began, until stop returns true. It may run concurrently
// with the owner.
func (m *laneNames) Read(r pebble.Reader, stop func() bool) error {
	for _, of := range [...]struct {
		prefix byte
		name   func(key, value []byte) error
	}{
		{keys.Index, m.byKey}, {keys.Pending, m.byKey},
		{keys.Scheduled, m.waiting}, {keys.Blocked, m.waiting},
		{keys.Dead, m.ended}, {keys.Done, m.ended}, {keys.Canceled, m.ended},
		{keys.Lease, m.leases}, {keys.Unique, m.unique}, {keys.Group, m.turn}, {keys.Wake, m.wakeup},
		{keys.Dependent, m.dependent}, {keys.Pin, m.pin}, {keys.Outbound, m.message}, {keys.Session, m.session},
		{keys.Lane, m.entry}, // last, once all named lanes are known
	} {
		if err := store.Scan(r, of.prefix, func(key, value []byte) error {
			if m.entries++; m.entries%1024 == 0 && stop() {
				return errSweepEnded
			}
			return of.name(key, value)
		}); err != nil {
			return err
		}
	}
	return nil
}

func (m *laneNames) id(id keys.ID) { m.lanes.Add(keys.LaneOf(id)) }

func (m *laneNames) byKey(key, _ []byte) error {
	id, err := keys.ParseByID(key)
	m.id(id)
	return err
}

func (m *laneNames) waiting(key, value []byte) error {
	id, _, err := keys.ParsePlaceKey(key)
	if err != nil {
		return err
	}
	m.id(id)
	n, _, err := keys.SplitLane(value)
	m.lanes.Add(n)
	return err
}

func (m *laneNames) ended(key, value []byte) error {
	_, _, id, err := keys.ParseGrouped(key)
	if err != nil {
		return err
	}
	m.id(id)
	v, _, err := keys.ParseEnded(value)
	m.lanes.Add(v.Lane)
	return err
}

func (m *laneNames) leases(key, value []byte) error {
	seq, err := keys.ParseLease(key)
	if err != nil {
		return err
	}
	_, entries, err := keys.ParseLeases(seq, value)
	for i := range entries {
		m.id(entries[i].ID)
		m.lanes.Add(entries[i].Lane)
	}
	return err
}

func (m *laneNames) unique(_, value []byte) error {
	v, err := keys.ParseUnique(value)
	m.id(v.ID)
	return err
}

func (m *laneNames) turn(_, value []byte) error {
	v, err := keys.ParseGroup(value)
	m.id(v.Holder)
	return err
}

func (m *laneNames) wakeup(key, _ []byte) error {
	queue, _, id, err := keys.ParseGrouped(key)
	m.id(id)
	m.queues.Add(queue)
	return err
}

func (m *laneNames) dependent(key, _ []byte) error {
	parent, child, err := keys.ParseDependent(key)
	m.id(parent)
	m.id(child)
	return err
}

func (m *laneNames) pin(key, _ []byte) error {
	child, parent, err := keys.ParsePin(key)
	m.id(child)
	m.id(parent)
	return err
}

func (m *laneNames) message(_, value []byte) error {
	msg, err := keys.ParseMessage(value)
	if err == nil {
		m.id(msg.Parent)
		m.id(msg.Child)
	}
	return err
}

func (m *laneNames) session(_, value []byte) error {
	v, err := keys.ParseSession(value)
	for i := range v.Calls {
		for _, id := range v.Calls[i].IDs {
			m.id(id)
		}
	}
	return err
}

// entry adds the queue of a lane that stays.
func (m *laneNames) entry(key, value []byte) error {
	n, err := keys.ParseNumbered(key)
	if err != nil {
		return err
	}
	v, _, err := keys.SplitLaneValue(value)
	if err != nil {
		return fmt.Errorf("lane %d: %w", n, err)
	}
	if !m.absent.Has(n) || m.lanes.Has(n) {
		m.queues.Add(v.Queue)
	}
	return nil
}
