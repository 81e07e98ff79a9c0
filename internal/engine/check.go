package engine

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/keys"
	"codeq/internal/ready"
	"codeq/internal/record"
	"codeq/internal/store"
)

// checker compares memory with disk.
type checker struct {
	state  *State
	disk   pebble.Reader
	needed func(*Queue) bool
	onDisk map[*Lane][]ready.Item // ready tasks, in order
	last   uint64                 // largest number minted, as far as disk shows
	errs   []error
}

func (c *checker) report(format string, args ...any) {
	c.errs = append(c.errs, fmt.Errorf(format, args...))
}

// Check compares memory with what disk has, and returns the differences. It is for tests: its cost
// grows with all that is stored. REQUIRES: isAtRest. needed reports whether the owner needs a
// queue; claimable, whether a queue has a task that may be leased.
func (s *State) Check(disk pebble.Reader, needed func(*Queue) bool) (claimable func(*Queue) bool, err error) {
	c := &checker{state: s, disk: disk, needed: needed, onDisk: make(map[*Lane][]ready.Item)}
	for _, check := range []func() error{
		c.leases, c.orphans, c.leaseClock, c.ready, c.catalogue, c.former, c.lanes, c.queues, c.times, c.recurring, c.caches, c.buckets,
		c.limits, c.settings, c.outbox,
	} {
		if err := check(); err != nil {
			return nil, err
		}
	}
	return c.claimable, errors.Join(c.errs...)
}

// isAtRest reports whether nothing is under way: the group is empty, and no refill and no upkeep is
// due.
func (s *State) isAtRest() bool {
	g := &s.Group
	busy := !g.isEmpty()
	return !busy && !s.Mail.IsAhead() && !s.Names.ready.WantsRefill() && !s.upkeepIsDue()
}

// claimable reports whether a queue has a task that may be leased, as far as its gate allows.
func (c *checker) claimable(q *Queue) bool {
	if q.Settings.Paused {
		return false
	}
	for l, items := range c.onDisk {
		for _, it := range items {
			head, err := record.DecodeHead(it.Record)
			if l.queue == q && (err != nil || c.state.Ties.mayLease(q, &head)) {
				return true
			}
		}
	}
	return false
}

// caches: the cached keys, groups and parents are as on disk, and no cache misses an entry that it
// should hold. So are the waiting tasks in memory.
func (c *checker) caches() error {
	ti := &c.state.Ties
	for i, what := range [...]string{"idempotency key", "group", "number of parents", "end being told", "number of pins"} {
		c.errs = append(c.errs, ti.caches()[i].Check(c.disk, what)...)
	}
	c.errs = append(c.errs, ti.blocked.Check(c.disk)...)
	return nil
}

// ready reads the ready tasks of every lane.
func (c *checker) ready() error {
	s := c.state
	return store.Scan(c.disk, keys.Task, func(key, value []byte) error {
		number, since, id, err := keys.ParseTask(key)
		if err != nil {
			return err
		}
		l, err := s.Names.laneNumbered(number)
		if err != nil {
			return err
		}
		ls := s.Leases.byID[id]
		if ls == nil {
			it := ready.Item{Pos: ready.Pos{Since: since, ID: id}, Record: bytes.Clone(value)}
			c.onDisk[l] = append(c.onDisk[l], it)
		} else if len(ls.copied) > 0 && !bytes.Equal(ls.copied, value) {
			c.report("record of leased task %s is copied as %x, on disk it is %x", id, ls.copied, value)
		}
		return nil
	})
}

// lanes: each lane is where it belongs, and its ready tasks are as on disk.
func (c *checker) lanes() error {
	s := c.state
	leased := make(map[*Lane][]uint64)
	for _, ls := range s.Leases.byID {
		leased[ls.lane] = append(leased[ls.lane], ls.since)
	}
	var lanes []ready.Stored
	for n, l := range s.Names.lanes.All() {
		if l == nil {
			continue
		}
		if int(l.number) != n || l.queue.lane(l.Tenant, l.Priority) != l {
			c.report("lane %d is not where it belongs", n)
		}
		if l.tasks.Number != l.number || l.tasks.Queue != &l.queue.Queue || l.tasks.Weight != l.queue.Settings.Weight(l.Tenant) {
			c.report("lane %d is not as its ready tasks have it", n)
		}
		lanes = append(lanes, ready.Stored{Lane: &l.tasks, Name: l.queue.Name, Tasks: c.onDisk[l], Leased: leased[l]})
	}
	var queues []*ready.Queue
	for _, q := range s.Names.Queues {
		queues = append(queues, &q.Queue)
	}
	c.errs = append(c.errs, s.Names.ready.Check(lanes, queues)...)
	return nil
}
