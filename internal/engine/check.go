package engine

import (
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/ready"
	"codeq/internal/record"
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
	return !busy && !s.Mail.out.ahead && !s.Names.ready.WantsRefill() && !s.upkeepIsDue()
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
