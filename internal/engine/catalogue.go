package engine

import (
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/cespare/xxhash/v2"
	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/container/chunked"
	"codeq/internal/container/numset"
	"codeq/internal/container/recent"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/store"
)

// catalogue holds the numbers of a shard's lanes and queues. A lane is in memory while it has ready
// or leased tasks, a queue while it has tasks in any state, settings, or waiting claims. Some
// thousands of other lanes and queues stay: the last used ones. A lane that comes back gets its
// number again if it is among the last that left (former), in this process or in the process
// before. Otherwise it gets a new number, which costs no read: stored values with the old number (a
// waiting task, the ID of a kept task) find the lane by the old entry. LaneSweep removes unused
// entries.
//
// Invariant: the tasks in the range Task lie under numbers of lanes in memory. Among the entries of
// a (queue, tenant, priority), the entry with the largest Seq has the number that is, or was last,
// in memory. A queue with a task keeps its number, and the entries of its tasks' lanes have that
// number. Since the lookup of a number in aliases, no lane in memory has had that number.
//
// Only the shard's owner uses it.
type catalogue struct {
	lanes, queues   numset.Set // numbers that are taken once the group has persisted
	loaded, current numset.Set // numbers of the lanes and queues in memory
	seq             uint64     // no entry has a larger Seq

	// the numbers of the lanes and queues that left memory last: an index on disk of all would cost
	// a read for each new name
	formerLanes  recent.Numbers[formerLane]
	formerQueues recent.Numbers[string]

	aliases map[uint32]*Lane // lanes in memory by their other numbers: some of those looked up
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

// lane returns a lane. If the lane is not in memory, it is added to the catalogue.
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
		ns.Group.Set(keys.AppendNumbered(nil, keys.Queue, q.Number), []byte(q.Name))
	}
	ns.addLane(l)
	ns.catalogue.seq++
	entry := keys.LaneValue{Queue: q.Number, Priority: l.Priority, Tenant: l.Tenant, Seq: ns.catalogue.seq}
	ns.Group.Set(keys.AppendNumbered(nil, keys.Lane, l.number), entry.Append(nil))
	ns.ready.Load(&l.tasks, 0)
}

// addQueue makes a queue available by its number.
func (ns *names) addQueue(q *Queue) {
	setAt(&ns.numbers, q.Number, q)
	ns.catalogue.current.Add(q.Number)
	ns.catalogue.formerQueues.Remove(q.Number)
}

func (ns *names) addLane(l *Lane) {
	setAt(&ns.lanes, l.number, l)
	ns.catalogue.loaded.Add(l.number)
	delete(ns.catalogue.aliases, l.number) // it may have been the number of another lane
	ns.catalogue.formerLanes.Remove(l.number)
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

// canHave refuses tasks if the lanes might run out, or the shard's format is too old for one.
func (ns *names) canHave(tasks []NewTask) error {
	if ns.Format < keys.FormatOfKinds {
		for i := range tasks {
			if err := ns.knows(tasks[i].Rec); err != nil {
				return err
			}
		}
	}
	return ns.hasLanes(len(tasks))
}

// knows refuses a record that the shard's format is too old for.
func (ns *names) knows(rec []byte) error {
	if ns.Format >= keys.FormatOfKinds {
		return nil
	}
	what := "kinds of tasks"
	if record.HasNewKey(rec) {
		what = "keys with MaxWait or ReleaseOnClaim"
	} else if !record.HasKind(rec) {
		return nil
	}
	return fmt.Errorf("%w: the shard has format %d, and %s need %d", base.ErrFormat, ns.Format, what, keys.FormatOfKinds)
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

// laneEntry is Reads.LaneEntry.
func (ns *names) laneEntry(n uint32) (LaneKey, error) {
	queue, v, err := ns.LaneEntry(n)
	return LaneKey{queue, v.Tenant, v.Priority}, err
}

// originQueue returns the queue of a task at its production, by the lane in its ID; nil if that
// queue has no tasks. If the ID belongs to no stored task, the result may be any queue.
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

// formerLane is the name of a lane, with the number of its queue.
type formerLane struct {
	queue uint32
	laneName
}

// formerCap is how many lanes, and how many queues, are held at most.
const formerCap = 1 << 10

// formerMost limits the former lanes, and the former queues.
func (ns *names) formerMost() int { return min(formerCap, ns.config.IdleLanes) }

// returnQueue numbers a queue that comes back, and reports whether its number is known.
func (ns *names) returnQueue(q *Queue) bool {
	c := &ns.catalogue
	n, ok := c.formerQueues.Take(q.Name)
	if !ok {
		return false
	}
	if c.sweep != nil {
		c.sweep.queues.Remove(n)
	}
	c.seq++
	q.Number, q.since = n, c.seq
	ns.addQueue(q)
	return true
}

// returnLane loads a lane that comes back; nil if its number is not known.
func (ns *names) returnLane(q *Queue, name laneName) *Lane {
	c := &ns.catalogue
	if q.Number == 0 && !ns.returnQueue(q) {
		return nil
	}
	n, ok := c.formerLanes.Take(formerLane{q.Number, name})
	if !ok {
		return nil
	}
	if c.sweep != nil {
		c.sweep.lanes.Remove(n)
	}
	l := newLane(n, q, name.tenant, name.priority)
	ns.addLane(l)
	ns.ready.Load(&l.tasks, 0)
	return l
}

// loadCatalogue reads which numbers are taken, and loads the queues with tasks or wakeups, and the
// lanes that may have ready or leased tasks. awakened has the numbers of the queues with wakeups.
func (ns *names) loadCatalogue(awakened map[uint32]bool) error {
	c := &ns.catalogue
	if err := store.ReadAhead(ns.Store, func(emit func(store.StoredQueue) error) (err error) {
		ns.mint.Clock, err = store.ReadQueues(ns.Store.DB(), emit)
		return err
	}, func(e store.StoredQueue) error {
		c.queues.Add(e.Number)
		if e.Counts == (keys.Counts{}) && e.Totals.Day == 0 && !awakened[e.Number] {
			return nil
		}
		known := len(ns.Queues)
		q := ns.QueueNamed(e.Name)
		if len(ns.Queues) == known {
			return fmt.Errorf("%w: queue %q has tasks under the number %d and under another", base.ErrCorrupt, q.Name, e.Number)
		}
		q.Number, q.Counts, q.totals, q.hasWakeups = e.Number, e.Counts, e.Totals, awakened[e.Number]
		ns.addQueue(q)
		ns.noteBusy(q)
		ns.Rest(q) // it may have totals only
		return nil
	}); err != nil {
		return err
	}
	var seqs []uint64 // by number
	idle := store.NewestLanes{Most: ns.formerMost()}
	if err := store.ReadAhead(ns.Store, func(emit func(store.StoredLane) error) error {
		return store.ReadLanes(ns.Store.DB(), emit)
	}, func(e store.StoredLane) error {
		if !c.queues.Has(e.Queue) {
			return fmt.Errorf("%w: queue %d of lane %d is missing", base.ErrCorrupt, e.Queue, e.Number)
		}
		c.lanes.Add(e.Number)
		c.seq = max(c.seq, e.Seq)
		q := ns.numbers.At(int(e.Queue))
		if q == nil || q.Counts.Ready+q.Counts.Leased == 0 {
			idle.Add(e)
			return nil
		}
		if other := q.lane(e.Tenant, e.Priority); other != nil {
			if seqs[other.number] >= e.Seq {
				return nil
			}
			ns.dropLane(other)
		}
		seqs = append(seqs, make([]uint64, int(e.Number)-len(seqs))...)
		seqs = append(seqs, e.Seq)
		ns.addLane(newLane(e.Number, q, e.Tenant, e.Priority))
		return nil
	}); err != nil {
		return err
	}
	return ns.loadFormer(idle.List())
}

// loadFormer notes the numbers of lanes that are not in memory, and of their queues; the newest is
// first.
func (ns *names) loadFormer(lanes []store.StoredLane) error {
	var numbers []uint32
	for _, e := range lanes {
		if ns.numbers.At(int(e.Queue)) == nil {
			numbers = append(numbers, e.Queue)
		}
	}
	names, err := store.QueueNames(ns.Store.DB(), numbers)
	if err != nil {
		return err
	}
	c := &ns.catalogue
	for _, e := range slices.Backward(lanes) { // a newer entry of a lane replaces the others
		c.formerLanes.Add(formerLane{e.Queue, laneName{e.Tenant, e.Priority}}, e.Number, ns.formerMost())
		if name, ok := names[e.Queue]; ok {
			c.formerQueues.Add(name, e.Queue, ns.formerMost())
		}
	}
	return nil
}
