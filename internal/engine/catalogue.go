package engine

import (
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/cespare/xxhash/v2"
	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/chunked"
	"codeq/internal/keys"
	"codeq/internal/numset"
	"codeq/internal/schema"
	"codeq/internal/store"
)

// catalogue has the numbers of a shard's lanes and queues. A lane is in memory while it has ready
// or leased tasks, a queue while it has tasks in any state, settings, or waiting claims; some
// thousands of others stay that were used last. A lane that comes back gets another number, which
// costs no read: what is stored under the old one (a task that waits, the ID of one that is kept)
// finds the lane by the old entry. LaneSweep removes the entries that nothing names any more.
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
	seq             uint64     // the largest Seq of an entry

	aliases map[uint32]*Lane // by other numbers of lanes in memory: some of those looked up
	idle    laneList         // all lanes in memory that are idle, and some that are not
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

// isIdle reports whether a lane has neither ready nor leased tasks.
func (l *Lane) isIdle() bool { return l.leased == 0 && l.drained() }

// lane returns a lane. One that is not in memory is added to the catalogue.
// REQUIRES: hasLanes has returned nil.
func (s *State) lane(k LaneKey) *Lane {
	q := s.QueueNamed(k.Queue)
	if l := q.lane(k.Tenant, k.Priority); l != nil {
		return l
	}
	l := newLane(s.catalogue.lanes.Take(), q, strings.Clone(k.Tenant), k.Priority)
	l.complete = true
	s.enterLane(l)
	return l
}

// enterLane adds a lane without ready tasks to memory and to the catalogue.
func (s *State) enterLane(l *Lane) {
	q := l.queue
	if q.number == 0 {
		q.number = s.catalogue.queues.Take()
		q.since = s.catalogue.seq + 1
		s.addQueue(q)
		s.Group.set(keys.AppendNumbered(nil, keys.Queue, q.number), []byte(q.Name))
	}
	s.addLane(l)
	s.catalogue.seq++
	entry := keys.LaneValue{Queue: q.number, Priority: l.Priority, Tenant: l.Tenant, Seq: s.catalogue.seq}
	s.Group.set(keys.AppendNumbered(nil, keys.Lane, l.number), entry.Append(nil))
	s.noteIdle(l)
}

// addQueue makes a queue available by its number.
func (s *State) addQueue(q *Queue) {
	setAt(&s.numbers, q.number, q)
	s.catalogue.current.Add(q.number)
}

func (s *State) addLane(l *Lane) {
	setAt(&s.lanes, l.number, l)
	s.catalogue.loaded.Add(l.number)
	delete(s.catalogue.aliases, l.number) // it may have been the number of another lane
	l.window.Use(&s.windows.pool)
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
func (s *State) hasLanes(tasks int) error {
	if s.catalogue.lanes.Len()+tasks > keys.MaxLane {
		return ErrNoLanes
	}
	return nil
}

// laneNumbered returns the lane that a stored task names.
func (s *State) laneNumbered(n uint32) (*Lane, error) {
	if l := s.lanes.At(int(n)); l != nil {
		return l, nil
	}
	c := &s.catalogue
	if l := c.aliases[n]; l != nil && s.lanes.At(int(l.number)) == l {
		return l, nil
	}
	key, err := s.laneEntry(n)
	if errors.Is(err, pebble.ErrNotFound) {
		err = fmt.Errorf("%w: lane %d is missing", base.ErrCorrupt, n)
	}
	if err != nil {
		return nil, err
	}
	q := s.QueueNamed(key.Queue)
	l := q.lane(key.Tenant, key.Priority)
	if l == nil { // the entry gets its number back
		if c.sweep != nil {
			c.sweep.lanes.Remove(n)
		}
		l = newLane(n, q, key.Tenant, key.Priority)
		l.complete = true
		s.enterLane(l)
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
func (s *State) laneEntry(n uint32) (LaneKey, error) {
	b, err := s.read(keys.AppendNumbered(nil, keys.Lane, n))
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
	name, err := s.read(keys.AppendNumbered(nil, keys.Queue, v.Queue))
	if err == nil && name == nil {
		err = fmt.Errorf("%w: queue %d of lane %d is missing", base.ErrCorrupt, v.Queue, n)
	}
	return LaneKey{string(name), v.Tenant, v.Priority}, err
}

// originQueue returns the queue in which a task was produced, by the lane in its ID; nil if that
// queue has no tasks. For an ID that no stored task has, it may be any queue.
func (s *State) originQueue(id keys.ID) (*Queue, error) {
	n := keys.LaneOf(id)
	if l := s.lanes.At(int(n)); l != nil {
		return l.queue, nil
	}
	key, err := s.laneEntry(n)
	if errors.Is(err, pebble.ErrNotFound) {
		return nil, nil
	}
	return s.Queues[key.Queue], err
}

// laneList holds lanes in the order in which they were last added.
type laneList struct {
	first, last *Lane
	n           int
}

// push adds a lane, or moves it to the end.
func (t *laneList) push(l *Lane) {
	if t.last == l {
		return
	}
	t.remove(l)
	if l.idler = true; t.last == nil {
		t.first = l
	} else {
		t.last.idleNext, l.idlePrev = l, t.last
	}
	t.last = l
	t.n++
}

// remove takes a lane out if it is in the list.
func (t *laneList) remove(l *Lane) {
	if !l.idler {
		return
	}
	if l.idlePrev != nil {
		l.idlePrev.idleNext = l.idleNext
	} else {
		t.first = l.idleNext
	}
	if l.idleNext != nil {
		l.idleNext.idlePrev = l.idlePrev
	} else {
		t.last = l.idlePrev
	}
	l.idleNext, l.idlePrev, l.idler = nil, nil, false
	t.n--
}

// noteIdle is called when a lane may have become idle.
func (s *State) noteIdle(l *Lane) {
	if l.isIdle() {
		s.catalogue.idle.push(l)
	}
}

// Rest is called when a queue may no longer be needed.
func (s *State) Rest(q *Queue) {
	if !q.resting && q.lanes.Len() == 0 { // else the last of them calls Rest
		q.resting = true
		s.resting = append(s.resting, q)
	}
}

// forgetIdle drops from memory the lanes that have been idle longest, beyond those that may stay,
// and reports the queues that are no longer needed. Its cost grows with what the group did, and
// with doubtsAtOnce.
// REQUIRES: the group is empty.
func (s *State) forgetIdle() {
	c := &s.catalogue
	for c.idle.n > s.config.IdleLanes {
		l := c.idle.first
		c.idle.remove(l)
		if l.isIdle() {
			s.dropLane(l)
		}
	}
	s.forgetQueues()
}

// doubtsAtOnce is how many doubtful queues a group checks once no wakeups are on disk only.
const doubtsAtOnce = 1 << 10

// forgetQueues reports the queues that the rules no longer need: the owner drops them, unless it
// needs them itself. A queue with wakeups in memory stays until they are applied. While wakeups are
// on disk only, a queue that may have some of them is doubtful, and stays as well.
func (s *State) forgetQueues() {
	if !s.wakeups.onDisk {
		for range min(s.doubtful.Len(), doubtsAtOnce) {
			s.resting = append(s.resting, s.doubtful.Pop())
		}
	}
	var awakened map[*Queue]bool
	for _, q := range s.resting {
		if q.hasWakeups && s.wakeups.onDisk {
			s.doubtful.Append(q)
			continue
		}
		if q.resting = false; q.hasWakeups {
			if awakened == nil {
				awakened = s.wakeups.queues()
			}
			if q.hasWakeups = awakened[q]; q.hasWakeups {
				continue // applying the last of them calls Rest
			}
		}
		if s.isUnknown(q) {
			s.Effects.Forgotten = append(s.Effects.Forgotten, q)
		}
	}
	clear(s.resting)
	s.resting = s.resting[:0]
}

// HasDoubts reports whether doubtful queues can be checked now.
func (s *State) HasDoubts() bool { return s.doubtful.Len() > 0 && !s.wakeups.onDisk }

// dropLane drops an idle lane from memory.
func (s *State) dropLane(l *Lane) {
	q := l.queue
	if l.ringNext != nil {
		s.leaveRing(l)
		s.show(q)
	}
	if l.spilled > 0 {
		s.Store.RemoveDeepLane(l.number)
	}
	s.windows.forget(l)
	if q.removeLane(l); q.lanes.Len() == 0 {
		s.Rest(q)
	}
	s.lanes.Set(int(l.number), nil)
	s.catalogue.loaded.Remove(l.number)
}

// isUnknown reports whether the rules need nothing that memory has of a queue.
func (s *State) isUnknown(q *Queue) bool {
	return q.lanes.Len() == 0 && q.Counts == keys.Counts{} && len(q.buckets) == 0 && !q.touched && !q.Fed && q.rechecks == 0 &&
		q.Version == 0
}

// Forget removes a queue that nobody needs from memory.
func (s *State) Forget(q *Queue) {
	c := &s.catalogue
	delete(s.Queues, q.Name)
	s.handles.Append(q.Handle)
	if q.number != 0 {
		s.numbers.Set(int(q.number), nil)
		c.current.Remove(q.number)
	}
	c.gone[c.slot(q.Name)] += q.arrived
}

func (c *catalogue) slot(queue string) int {
	return int(xxhash.Sum64String(queue) % uint64(len(c.gone)))
}

// loadCatalogue reads which numbers are taken, and loads the queues with tasks, and the lanes that
// may have ready or leased ones.
func (s *State) loadCatalogue() error {
	awakened, err := s.loadAwakened()
	if err != nil {
		return err
	}
	s.wakeups.onDisk = len(awakened) > 0
	c := &s.catalogue
	if err := schema.ReadAhead(s.Store, s.readQueues, func(e storedQueue) error {
		c.queues.Add(e.number)
		if e.counts == (keys.Counts{}) && !awakened[e.number] {
			return nil
		}
		known := len(s.Queues)
		q := s.QueueNamed(e.name)
		if len(s.Queues) == known {
			return fmt.Errorf("%w: queue %q has tasks under the number %d and under another", base.ErrCorrupt, q.Name, e.number)
		}
		q.number, q.Counts, q.hasWakeups = e.number, e.counts, awakened[e.number]
		s.addQueue(q)
		s.noteBusy(q)
		return nil
	}); err != nil {
		return err
	}
	var seqs []uint64 // by number
	return schema.ReadAhead(s.Store, s.readLanes, func(e storedLane) error {
		if !c.queues.Has(e.Queue) {
			return fmt.Errorf("%w: queue %d of lane %d is missing", base.ErrCorrupt, e.Queue, e.number)
		}
		c.lanes.Add(e.number)
		c.seq = max(c.seq, e.Seq)
		q := s.numbers.At(int(e.Queue))
		if q == nil {
			return nil
		}
		if q.Counts.Ready+q.Counts.Leased == 0 {
			return nil
		}
		if other := q.lane(e.Tenant, e.Priority); other != nil {
			if seqs[other.number] >= e.Seq {
				return nil
			}
			s.dropLane(other)
		}
		seqs = append(seqs, make([]uint64, int(e.number)-len(seqs))...)
		seqs = append(seqs, e.Seq)
		s.addLane(newLane(e.number, q, e.Tenant, e.Priority))
		return nil
	})
}

// storedQueue is a queue that has a number, and the counts under it.
type storedQueue struct {
	number uint32
	name   string
	counts keys.Counts
}

// readQueues emits the queues of the catalogue, and sets the minter's clock.
func (s *State) readQueues(emit func(storedQueue) error) error {
	it, err := s.Store.DB().NewIter(&pebble.IterOptions{LowerBound: []byte{keys.Counters}, UpperBound: []byte{keys.Counters + 1}})
	if err != nil {
		return store.Error(err)
	}
	defer func() { _ = it.Close() }() // its error is that of it.Error
	it.First()
	if err := schema.Scan(s.Store.DB(), keys.Queue, func(key, value []byte) error {
		n, err := keys.ParseNumbered(key)
		if err != nil || n == 0 {
			return fmt.Errorf("%w: malformed queue key %x", base.ErrCorrupt, key)
		}
		counts, err := s.readCounters(it, n)
		if err != nil {
			return err
		}
		return emit(storedQueue{n, string(value), counts})
	}); err != nil {
		return err
	}
	_, err = s.readCounters(it, math.MaxUint32)
	return err
}

// readCounters returns the counts of the queue with a number, and moves the iterator behind them.
// The numbers of successive calls do not decrease.
func (s *State) readCounters(it *pebble.Iterator, number uint32) (tasks keys.Counts, err error) {
	for ; it.Valid(); it.Next() {
		n, err := keys.ParseNumbered(it.Key())
		if err != nil {
			return tasks, fmt.Errorf("%w: malformed counters key %x", base.ErrCorrupt, it.Key())
		}
		if n > number {
			break
		}
		value, err := it.ValueAndErr()
		if err != nil {
			return tasks, store.Error(err)
		}
		v, err := keys.ParseCounters(value)
		if err != nil {
			return tasks, fmt.Errorf("%w: %w", base.ErrCorrupt, err)
		}
		if s.mint.clock = max(s.mint.clock, v.Clock); n == number {
			tasks = v.Counts
		} else if v.Counts != (keys.Counts{}) {
			return tasks, fmt.Errorf("%w: queue %d has tasks and no name", base.ErrCorrupt, n)
		}
	}
	return tasks, store.Error(it.Error())
}

// storedLane is an entry of a lane.
type storedLane struct {
	number uint32
	keys.LaneValue
}

// readLanes emits the lanes of the catalogue.
func (s *State) readLanes(emit func(storedLane) error) error {
	return schema.Scan(s.Store.DB(), keys.Lane, func(key, value []byte) error {
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
func (s *State) loadAwakened() (map[uint32]bool, error) {
	awakened := make(map[uint32]bool)
	lower, upper := keys.Range(keys.Wake)
	for lower != nil {
		from := lower
		lower = nil
		if err := s.walk(from, upper, func(it *pebble.Iterator, _ int) (bool, error) {
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
	for _, l := range s.lanes.All() {
		switch {
		case l == nil:
		case l.queue.Counts.Ready > 0:
			s.joinRing(l)
			if l.queue.Counts.Ready > deepLane {
				l.spilled = deepLane // perhaps another lane of the queue is the deep one
				s.Store.AddDeepLane(l.number)
			}
		default:
			l.complete = true
			s.noteIdle(l)
		}
	}
	s.forgetIdle()
	return nil
}
