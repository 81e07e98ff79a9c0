package store

import (
	"bytes"
	"cmp"
	"fmt"
	"math"
	"slices"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/keys"
)

// QueueNames returns the names of queues by number.
func QueueNames(r pebble.Reader, numbers []uint32) (map[uint32]string, error) {
	lower, upper := keys.Range(keys.Queue)
	it, err := r.NewIter(&pebble.IterOptions{LowerBound: lower, UpperBound: upper})
	if err != nil {
		return nil, Error(err)
	}
	defer func() { _ = it.Close() }() // its error is that of it.Error
	names := make(map[uint32]string)
	slices.Sort(numbers)
	for _, n := range slices.Compact(numbers) {
		if key := keys.AppendNumbered(nil, keys.Queue, n); it.SeekGE(key) && bytes.Equal(it.Key(), key) {
			names[n] = string(it.Value())
		}
	}
	return names, Error(it.Error())
}

// NewestLanes collects the lanes with the largest Seqs.
type NewestLanes struct {
	Most  int
	lanes []StoredLane
	least uint64 // there are enough lanes with a Seq of at least this one
}

// Add adds a lane.
func (n *NewestLanes) Add(e StoredLane) {
	if e.Seq < n.least {
		return
	}
	if n.lanes = append(n.lanes, e); len(n.lanes) >= 4*n.Most {
		n.lanes = n.List()
		n.least = n.lanes[n.Most-1].Seq
	}
}

// List returns the lanes, the newest first.
func (n *NewestLanes) List() []StoredLane {
	slices.SortFunc(n.lanes, func(a, b StoredLane) int {
		return cmp.Or(cmp.Compare(b.Seq, a.Seq), cmp.Compare(a.Number, b.Number))
	})
	return n.lanes[:min(len(n.lanes), n.Most)]
}

// StoredQueue is a queue that has a number, and the counters under it.
type StoredQueue struct {
	Number uint32
	Name   string
	keys.CountersValue
}

// ReadQueues emits the queues of the catalogue, and returns the minter's clock.
func ReadQueues(r pebble.Reader, emit func(StoredQueue) error) (clock uint64, err error) {
	it, err := r.NewIter(&pebble.IterOptions{LowerBound: []byte{keys.Counters}, UpperBound: []byte{keys.Counters + 1}})
	if err != nil {
		return 0, Error(err)
	}
	defer func() { _ = it.Close() }() // its error is that of it.Error
	it.First()
	counters := counterReader{it: it}
	if err := Scan(r, keys.Queue, func(key, value []byte) error {
		n, err := keys.ParseNumbered(key)
		if err != nil || n == 0 {
			return fmt.Errorf("%w: malformed queue key %x", base.ErrCorrupt, key)
		}
		v, err := counters.of(n)
		if err != nil {
			return err
		}
		return emit(StoredQueue{n, string(value), v})
	}); err != nil {
		return 0, err
	}
	_, err = counters.of(math.MaxUint32)
	return counters.clock, err
}

// counterReader reads the counters of queues in the order of their numbers.
type counterReader struct {
	it    *pebble.Iterator
	clock uint64 // the latest one so far
}

// of returns the counters of the queue with a number, and moves behind them. The numbers of
// successive calls do not decrease.
func (c *counterReader) of(number uint32) (of keys.CountersValue, err error) {
	for ; c.it.Valid(); c.it.Next() {
		n, err := keys.ParseNumbered(c.it.Key())
		if err != nil {
			return of, fmt.Errorf("%w: malformed counters key %x", base.ErrCorrupt, c.it.Key())
		}
		if n > number {
			break
		}
		value, err := c.it.ValueAndErr()
		if err != nil {
			return of, Error(err)
		}
		v, err := keys.ParseCounters(value)
		if err != nil {
			return of, fmt.Errorf("%w: %w", base.ErrCorrupt, err)
		}
		if c.clock = max(c.clock, v.Clock); n == number {
			of = v
		} else if v.Counts != (keys.Counts{}) {
			return of, fmt.Errorf("%w: queue %d has tasks and no name", base.ErrCorrupt, n)
		}
	}
	return of, Error(c.it.Error())
}

// StoredLane is an entry of a lane.
type StoredLane struct {
	Number uint32
	keys.LaneValue
}

// ReadLanes emits the lanes of the catalogue.
func ReadLanes(r pebble.Reader, emit func(StoredLane) error) error {
	return Scan(r, keys.Lane, func(key, value []byte) error {
		n, err := keys.ParseNumbered(key)
		if err != nil || n > keys.MaxLane {
			return fmt.Errorf("%w: malformed lane key %x", base.ErrCorrupt, key)
		}
		v, err := keys.ParseLaneValue(value)
		if err != nil || v.Queue == 0 || v.Priority > keys.MaxPriority {
			return fmt.Errorf("%w: lane %d has value %x", base.ErrCorrupt, n, value)
		}
		return emit(StoredLane{n, v})
	})
}

// Awakened returns the numbers of the queues with wakeups. A wakeup concerns tasks of its queue,
// perhaps later ones.
func (r *Reads) Awakened() (map[uint32]bool, error) {
	awakened := make(map[uint32]bool)
	lower, upper := keys.Range(keys.Wake)
	for lower != nil {
		from := lower
		lower = nil
		if err := r.Walk(from, upper, func(it *pebble.Iterator, _ int) (bool, error) {
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

// LaneEntry reads the catalogue's entry of a lane, and the name of its queue; the error is
// pebble.ErrNotFound if there is none.
func (r *Reads) LaneEntry(n uint32) (queue string, v keys.LaneValue, err error) {
	b, err := r.Lookup(keys.AppendNumbered(nil, keys.Lane, n))
	if err == nil && b == nil {
		err = pebble.ErrNotFound
	}
	if err != nil {
		return "", v, err
	}
	if v, err = keys.ParseLaneValue(b); err != nil {
		return "", v, fmt.Errorf("%w: lane %d: %w", base.ErrCorrupt, n, err)
	}
	name, err := r.Lookup(keys.AppendNumbered(nil, keys.Queue, v.Queue))
	if err == nil && name == nil {
		err = fmt.Errorf("%w: queue %d of lane %d is missing", base.ErrCorrupt, v.Queue, n)
	}
	return string(name), v, err
}
