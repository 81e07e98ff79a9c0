package engine

import (
	"bytes"
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/store"
)

// loadCatalogue reads which numbers are taken, and loads the queues with tasks or wakeups, and the
// lanes that may have ready or leased tasks. awakened has the numbers of the queues with wakeups.
func (ns *names) loadCatalogue(awakened map[uint32]bool) error {
	c := &ns.catalogue
	if err := store.ReadAhead(ns.Store, ns.readQueues, func(e storedQueue) error {
		c.queues.Add(e.number)
		if e.Counts == (keys.Counts{}) && e.Totals.Day == 0 && !awakened[e.number] {
			return nil
		}
		known := len(ns.Queues)
		q := ns.QueueNamed(e.name)
		if len(ns.Queues) == known {
			return fmt.Errorf("%w: queue %q has tasks under the number %d and under another", base.ErrCorrupt, q.Name, e.number)
		}
		q.Number, q.Counts, q.totals, q.hasWakeups = e.number, e.Counts, e.Totals, awakened[e.number]
		ns.addQueue(q)
		ns.noteBusy(q)
		ns.Rest(q) // it may have totals only
		return nil
	}); err != nil {
		return err
	}
	var seqs []uint64 // by number
	idle := newestLanes{most: ns.formerMost()}
	if err := store.ReadAhead(ns.Store, ns.readLanes, func(e storedLane) error {
		if !c.queues.Has(e.Queue) {
			return fmt.Errorf("%w: queue %d of lane %d is missing", base.ErrCorrupt, e.Queue, e.number)
		}
		c.lanes.Add(e.number)
		c.seq = max(c.seq, e.Seq)
		q := ns.numbers.At(int(e.Queue))
		if q == nil || q.Counts.Ready+q.Counts.Leased == 0 {
			idle.add(e)
			return nil
		}
		if other := q.lane(e.Tenant, e.Priority); other != nil {
			if seqs[other.number] >= e.Seq {
				return nil
			}
			ns.dropLane(other)
		}
		seqs = append(seqs, make([]uint64, int(e.number)-len(seqs))...)
		seqs = append(seqs, e.Seq)
		ns.addLane(newLane(e.number, q, e.Tenant, e.Priority))
		return nil
	}); err != nil {
		return err
	}
	return ns.loadFormer(idle.list())
}

// loadFormer notes the numbers of lanes that are not in memory, and of their queues; the newest is
// first.
func (ns *names) loadFormer(lanes []storedLane) error {
	var numbers []uint32
	for _, e := range lanes {
		if ns.numbers.At(int(e.Queue)) == nil {
			numbers = append(numbers, e.Queue)
		}
	}
	names, err := ns.readNames(numbers)
	if err != nil {
		return err
	}
	c := &ns.catalogue
	for _, e := range slices.Backward(lanes) { // a newer entry of a lane replaces the others
		c.formerLanes.add(formerLane{e.Queue, laneName{e.Tenant, e.Priority}}, e.number, ns.formerMost())
		if name, ok := names[e.Queue]; ok {
			c.formerQueues.add(name, e.Queue, ns.formerMost())
		}
	}
	return nil
}

// readNames returns the names of queues by number.
func (ns *names) readNames(numbers []uint32) (map[uint32]string, error) {
	lower, upper := keys.Range(keys.Queue)
	it, err := ns.Store.DB().NewIter(&pebble.IterOptions{LowerBound: lower, UpperBound: upper})
	if err != nil {
		return nil, store.Error(err)
	}
	defer func() { _ = it.Close() }() // its error is that of it.Error
	names := make(map[uint32]string)
	slices.Sort(numbers)
	for _, n := range slices.Compact(numbers) {
		if key := keys.AppendNumbered(nil, keys.Queue, n); it.SeekGE(key) && bytes.Equal(it.Key(), key) {
			names[n] = string(it.Value())
		}
	}
	return names, store.Error(it.Error())
}

// newestLanes collects the lanes with the largest Seqs.
type newestLanes struct {
	most  int
	lanes []storedLane
	least uint64 // there are enough lanes with a Seq of at least this one
}

func (n *newestLanes) add(e storedLane) {
	if e.Seq < n.least {
		return
	}
	if n.lanes = append(n.lanes, e); len(n.lanes) >= 4*n.most {
		n.lanes = n.list()
		n.least = n.lanes[n.most-1].Seq
	}
}

// list returns them, the newest first.
func (n *newestLanes) list() []storedLane {
	slices.SortFunc(n.lanes, func(a, b storedLane) int {
		return cmp.Or(cmp.Compare(b.Seq, a.Seq), cmp.Compare(a.number, b.number))
	})
	return n.lanes[:min(len(n.lanes), n.most)]
}

// storedQueue is a queue that has a number, and the counters under it.
type storedQueue struct {
	number uint32
	name   string
	keys.CountersValue
}

// readQueues emits the queues of the catalogue, and sets the minter's clock.
func (ns *names) readQueues(emit func(storedQueue) error) error {
	it, err := ns.Store.DB().NewIter(&pebble.IterOptions{LowerBound: []byte{keys.Counters}, UpperBound: []byte{keys.Counters + 1}})
	if err != nil {
		return store.Error(err)
	}
	defer func() { _ = it.Close() }() // its error is that of it.Error
	it.First()
	if err := store.Scan(ns.Store.DB(), keys.Queue, func(key, value []byte) error {
		n, err := keys.ParseNumbered(key)
		if err != nil || n == 0 {
			return fmt.Errorf("%w: malformed queue key %x", base.ErrCorrupt, key)
		}
		counters, err := ns.readCounters(it, n)
		if err != nil {
			return err
		}
		return emit(storedQueue{n, string(value), counters})
	}); err != nil {
		return err
	}
	_, err = ns.readCounters(it, math.MaxUint32)
	return err
}

// readCounters returns the counters of the queue with a number, and moves the iterator behind them.
// The numbers of successive calls do not decrease.
func (ns *names) readCounters(it *pebble.Iterator, number uint32) (of keys.CountersValue, err error) {
	for ; it.Valid(); it.Next() {
		n, err := keys.ParseNumbered(it.Key())
		if err != nil {
			return of, fmt.Errorf("%w: malformed counters key %x", base.ErrCorrupt, it.Key())
		}
		if n > number {
			break
		}
		value, err := it.ValueAndErr()
		if err != nil {
			return of, store.Error(err)
		}
		v, err := keys.ParseCounters(value)
		if err != nil {
			return of, fmt.Errorf("%w: %w", base.ErrCorrupt, err)
		}
		if ns.mint.clock = max(ns.mint.clock, v.Clock); n == number {
			of = v
		} else if v.Counts != (keys.Counts{}) {
			return of, fmt.Errorf("%w: queue %d has tasks and no name", base.ErrCorrupt, n)
		}
	}
	return of, store.Error(it.Error())
}

// storedLane is an entry of a lane.
type storedLane struct {
	number uint32
	keys.LaneValue
}

// readLanes emits the lanes of the catalogue.
func (ns *names) readLanes(emit func(storedLane) error) error {
	return store.Scan(ns.Store.DB(), keys.Lane, func(key, value []byte) error {
		n, err := keys.ParseNumbered(key)
		if err != nil || n > keys.MaxLane {
			return fmt.Errorf("%w: malformed lane key %x", base.ErrCorrupt, key)
		}
		v, err := keys.ParseLaneValue(value)
		if err != nil || v.Queue == 0 || v.Priority > maxPriority {
			return fmt.Errorf("%w: lane %d has value %x", base.ErrCorrupt, n, value)
		}
		return emit(storedLane{n, v})
	})
}

// loadAwakened returns the numbers of the queues that have wakeups: these concern tasks of theirs,
// perhaps tasks still to come.
func (ns *names) loadAwakened() (map[uint32]bool, error) {
	awakened := make(map[uint32]bool)
	lower, upper := keys.Range(keys.Wake)
	for lower != nil {
		from := lower
		lower = nil
		if err := ns.walk(from, upper, func(it *pebble.Iterator, _ int) (bool, error) {
			n, _, _, err := keys.ParseGrouped(it.Key())
			awakened[n] = true
			lower = keys.GroupEnd(keys.AppendNumbered(nil, keys.Wake, n))
			return false, err
		}); err != nil {
			return nil, err
		}
	}
	return awakened, nil
}

// beginLanes sets what load knows of the tasks of each lane, once the leases are known.
func (s *State) beginLanes() error {
	for _, l := range s.Names.lanes.All() {
		if l != nil {
			s.Names.ready.Load(&l.tasks, l.queue.Counts.Ready)
		}
	}
	s.forgetIdle()
	return nil
}
