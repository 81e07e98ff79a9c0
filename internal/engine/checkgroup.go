package engine

import "codeq/internal/base"

// Assertions about a group, in builds that have them.

// assertEmpty: the group has no entries, so that disk has every task.
func (g *commitGroup) assertEmpty() {
	if base.Invariants && g.Entries() > 0 {
		base.Violated("the group has %d entries before it begins", g.Entries())
	}
}

// assertCounts: no count of the queue is negative.
func (q *Queue) assertCounts() {
	c := &q.Counts
	for _, n := range [...]uint64{c.Ready, c.Scheduled, c.Blocked, c.Leased, c.Dead, c.Done, c.Canceled} {
		if int64(n) < 0 {
			base.Violated("queue %q has the counts %+v", q.Name, *c)
		}
	}
	for k, b := range q.buckets {
		if b.Size > *c.Ended(k.prefix) {
			base.Violated("queue %q has %d tasks in bucket %+v, and the counts %+v", q.Name, b.Size, k, *c)
		}
	}
}
