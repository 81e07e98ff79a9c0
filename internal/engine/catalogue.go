package engine

import (
	"errors"
	"fmt"
	"strings"

	"github.com/cespare/xxhash/v2"
	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/container/chunked"
	"codeq/internal/container/numset"
	"codeq/internal/keys"
)

// catalogue holds the numbers of a shard's lanes and queues. A lane is in memory while it has ready
// or leased tasks, a queue while it has tasks in any state, settings, or waiting claims; some
// thousands of others stay that were used last. A lane that comes back gets its number again if it
// is one of the last that left (former), in this process or in the one before; otherwise another
// one, which costs no read: what is stored under the old one (a task that waits, the ID of one that
// is kept) finds the lane by the old entry. LaneSweep removes the entries that nothing names any
// more.
//
// Invariant: the tasks in the range Task lie under numbers of lanes in memory. Among the entries of
// a (queue, tenant, priority), the one with the largest Seq has the number that is, or was last, in
// memory. A queue with a task keeps its number, and the entries of the lanes that its tasks name
// have it. No number in aliases has been that of a lane in memory since it was looked up.
//
// Only the shard's owner uses it.
type catalogue struct {
	lanes, queues   numset.Set // numbers that are taken once the group has persisted
	loaded, current numset.Set // numbers of the lanes and queues in memory
	seq             uint64     // no entry has a larger Seq

	formerLanes  former[formerLane]
	formerQueues former[string]

	aliases map[uint32]*Lane // by other numbers of lanes in memory: some of those looked up
	gone    [64]uint64       // by hash of the name: Queue.arrived of queues that have left memory

	sweep   *LaneSweep // nil: none is under way
	sweepAt int        // how many lanes may be out of memory before the next sweep
	swept   uint64     // sweeps that have ended since Open
}

const (
	IdleLanes  = 1 << 13 // idle lanes that stay in memory
	SweepLanes = 1 << 13 // a sweep begins with at least so many entries that are not in memory
	aliasesCap = 1 << 12
)

func newCatalogue(sweepLanes int) catalogue {
	c := catalogue{sweepAt: sweepLanes}
	c.queues.Add(0) // 0 is never assigned
	return c
}

// lane returns a lane. One that is not in memory is added to the catalogue.
// REQUIRES: hasLanes has returned nil.
func (ns *names) lane(k LaneKey) *Lane {
	q := ns.QueueNamed(k.Queue)
	if l := q.lane(k.Tenant, k.Priority); l != nil {
		return l
	}
	name := laneName{strings.Clone(k.Tenant), k.Priority}
	if l := ns.returnLane(q, name); l != nil {
		return l
	}
	l := newLane(ns.catalogue.lanes.Take(), q, name.tenant, name.priority)
	ns.enterLane(l)
	return l
}

// enterLane adds a lane without ready tasks to memory and to the catalogue.
func (ns *names) enterLane(l *Lane) {
	q := l.queue
	if q.Number == 0 && !ns.returnQueue(q) {
		q.Number = ns.catalogue.queues.Take()
		q.since = ns.catalogue.seq + 1
		ns.addQueue(q)
		ns.Group.set(keys.AppendNumbered(nil, keys.Queue, q.Number), []byte(q.Name))
	}
	ns.addLane(l)
	ns.catalogue.seq++
	entry := keys.LaneValue{Queue: q.Number, Priority: l.Priority, Tenant: l.Tenant, Seq: ns.catalogue.seq}
	ns.Group.set(keys.AppendNumbered(nil, keys.Lane, l.number), entry.Append(nil))
	ns.ready.Load(&l.tasks, 0)
}

// addQueue makes a queue available by its number.
func (ns *names) addQueue(q *Queue) {
	setAt(&ns.numbers, q.Number, q)
	ns.catalogue.current.Add(q.Number)
	ns.catalogue.formerQueues.remove(q.Number)
}

func (ns *names) addLane(l *Lane) {
	setAt(&ns.lanes, l.number, l)
	ns.catalogue.loaded.Add(l.number)
	delete(ns.catalogue.aliases, l.number) // it may have been the number of another lane
	ns.catalogue.formerLanes.remove(l.number)
	l.queue.addLane(l)
}

// setAt sets the n-th element of a list, and grows the list if it is shorter.
func setAt[T any](all *chunked.List[*T], n uint32, v *T) {
	for int(n) >= all.Len() {
		all.Append(nil)
	}
	all.Set(int(n), v)
}

// hasLanes refuses tasks if the lanes might run out.
func (ns *names) hasLanes(tasks int) error {
	if ns.catalogue.lanes.Len()+tasks > keys.MaxLane {
		return ErrNoLanes
	}
	return nil
}

// laneNumbered returns the lane that a stored task names.
func (ns *names) laneNumbered(n uint32) (*Lane, error) {
	if l := ns.lanes.At(int(n)); l != nil {
		return l, nil
	}
	c := &ns.catalogue
	if l := c.aliases[n]; l != nil && ns.lanes.At(int(l.number)) == l {
		return l, nil
	}
	key, err := ns.laneEntry(n)
	if errors.Is(err, pebble.ErrNotFound) {
		err = fmt.Errorf("%w: lane %d is missing", base.ErrCorrupt, n)
	}
	if err != nil {
		return nil, err
	}
	q := ns.QueueNamed(key.Queue)
	l := q.lane(key.Tenant, key.Priority)
	if l == nil {
		l = ns.returnLane(q, laneName{key.Tenant, key.Priority})
	}
	if l == nil { // the entry gets its number back
		if c.sweep != nil {
			c.sweep.lanes.Remove(n)
		}
		l = newLane(n, q, key.Tenant, key.Priority)
		ns.enterLane(l)
	}
	if l.number == n {
		return l, nil
	}
	if len(c.aliases) >= aliasesCap || c.aliases == nil {
		c.aliases = make(map[uint32]*Lane)
	}
	c.aliases[n] = l
	return l, nil
}

// laneEntry reads the catalogue's entry of a number; the error is pebble.ErrNotFound if there is
// none.
func (ns *names) laneEntry(n uint32) (LaneKey, error) {
	b, err := ns.read(keys.AppendNumbered(nil, keys.Lane, n))
	if err == nil && b == nil {
		err = pebble.ErrNotFound
	}
	if err != nil {
		return LaneKey{}, err
	}
	v, err := keys.ParseLaneValue(b)
	if err != nil {
		return LaneKey{}, fmt.Errorf("%w: lane %d: %w", base.ErrCorrupt, n, err)
	}
	name, err := ns.read(keys.AppendNumbered(nil, keys.Queue, v.Queue))
	if err == nil && name == nil {
		err = fmt.Errorf("%w: queue %d of lane %d is missing", base.ErrCorrupt, v.Queue, n)
	}
	return LaneKey{string(name), v.Tenant, v.Priority}, err
}

// originQueue returns the queue in which a task was produced, by the lane in its ID; nil if that
// queue has no tasks. For an ID that no stored task has, it may be any queue.
func (ns *names) originQueue(id keys.ID) (*Queue, error) {
	n := keys.LaneOf(id)
	if l := ns.lanes.At(int(n)); l != nil {
		return l.queue, nil
	}
	key, err := ns.laneEntry(n)
	if errors.Is(err, pebble.ErrNotFound) {
		return nil, nil
	}
	return ns.Queues[key.Queue], err
}

func (c *catalogue) slot(queue string) int {
	return int(xxhash.Sum64String(queue) % uint64(len(c.gone)))
}
