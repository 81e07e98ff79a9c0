package codeq

import (
	"errors"
	"fmt"

	"codeq/internal/keys"
)

// check walks everything that a shard has stored and returns what contradicts
// itself:
//
//   - a task's record lies in one place only, in a lane of the catalogue, and
//     in a shard that its ID routes to;
//   - every record that is not in its first place has an index entry that
//     points at it, and every index entry points at a record;
//   - every lease record has a lease that is in force;
//   - the counts of every queue are those of its records.
func (v *view) check(index, shards int) error {
	c := checker{view: v, index: index, shards: shards, seen: make(map[ID]keys.Place), indexed: make(map[ID]bool), counts: make(map[uint32]keys.Counts)}
	err := errors.Join(
		v.loadLeases(),
		scan(v.snap, keys.Task, c.record),
		scan(v.snap, keys.Scheduled, c.record),
		scan(v.snap, keys.Dead, c.record),
		scan(v.snap, keys.Done, c.record),
		scan(v.snap, keys.Index, c.entry),
		scanLeases(v.snap, c.leases),
		scan(v.snap, keys.Counters, c.counters),
	)
	for id, p := range c.seen {
		if first := keys.FirstPlace(keys.LaneOf(id), id); p != first && !c.indexed[id] {
			c.report("task %s at %+v has no index entry", id, p)
		}
	}
	for n, counts := range c.counts {
		c.report("queue %d has tasks and no counters: %+v", n, counts)
	}
	return errors.Join(append(c.errs, err)...)
}

type checker struct {
	view          *view
	index, shards int
	seen          map[ID]keys.Place
	indexed       map[ID]bool
	counts        map[uint32]keys.Counts // found, by queue; counters strikes them off
	errs          []error
}

func (c *checker) report(format string, args ...any) {
	c.errs = append(c.errs, fmt.Errorf("%w: "+format, append([]any{ErrCorrupt}, args...)...))
}

func (c *checker) record(key, value []byte) error {
	id, p, err := keys.ParsePlaceKey(key)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	if other, ok := c.seen[id]; ok {
		c.report("task %s is at %+v and at %+v", ID(id), other, p)
	}
	c.seen[id] = p
	if got := ID(id).shard(c.shards); got != c.index {
		c.report("task %s of shard %d lies in shard %d", ID(id), got, c.index)
	}
	t, err := c.view.info(id, p, value)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	number, err := c.queueNumber(p, value)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	counts := c.counts[number]
	switch t.State {
	case Ready:
		counts.Ready++
	case Scheduled:
		counts.Scheduled++
	case Leased:
		counts.Leased++
	case Dead:
		counts.Dead++
		if number != p.Group {
			c.report("dead letter %s of queue %d lies with queue %d", ID(id), number, p.Group)
		}
	case Done:
		counts.Done++
	}
	c.counts[number] = counts
	return nil
}

func (c *checker) queueNumber(p keys.Place, value []byte) (uint32, error) {
	number := p.Group
	var err error
	switch p.Range {
	case keys.Scheduled, keys.Dead:
		number, _, err = keys.SplitLane(value)
	case keys.Done:
		var done keys.DoneValue
		done, _, err = keys.ParseDone(value)
		number = done.Lane
	}
	if err != nil {
		return 0, err
	}
	l, err := c.view.lane(number)
	if err != nil {
		return 0, err
	}
	return l.queue.number, nil
}

func (c *checker) entry(key, value []byte) error {
	id, err := keys.ParseIndex(key)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	p, err := keys.ParsePlace(value)
	if err != nil {
		c.report("index of task %s: %w", ID(id), err)
		return nil
	}
	c.indexed[id] = true
	if at, ok := c.seen[id]; !ok || at != p {
		c.report("index says that task %s is at %+v; found: %t, at %+v", ID(id), p, ok, at)
	}
	return nil
}

func (c *checker) leases(seq uint64, _ keys.LeaseHeader, entries []keys.LeaseEntry) error {
	live := 0
	for i := range entries {
		head, err := leasedHead(c.view.snap, &entries[i])
		if err != nil {
			c.report("%w", err)
		}
		if head != nil {
			live++
		}
	}
	if live == 0 {
		c.report("lease record %x has no lease in force", seq)
	}
	return nil
}

func (c *checker) counters(key, value []byte) error {
	n, err := keys.ParseNumbered(key)
	if err != nil {
		c.report("%w", err)
		return nil
	}
	v, err := keys.ParseCounters(value)
	if err != nil {
		c.report("counters of queue %d: %w", n, err)
		return nil
	}
	if v.Counts != c.counts[n] {
		c.report("queue %d is counted as %+v and has %+v", n, v.Counts, c.counts[n])
	}
	delete(c.counts, n)
	return nil
}
