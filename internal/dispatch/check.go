package dispatch

import (
	"errors"
	"fmt"
	"slices"

	"codeq/internal/engine"
)

// Usage is how much a Dispatcher has in memory.
type Usage struct {
	Tickets     int // stale ones included
	Queues      int // queues with claims that wait
	Sets        int // sets of long lists
	SetNames    int // queues in the sets
	DroppedSets int // dropped sets that are still in the entries of some queues
}

// Usage counts the entries that the Dispatcher has in memory.
func (d *Dispatcher) Usage() Usage {
	u := Usage{
		Queues: d.listed.Len(), Sets: len(d.sets.byDigest), SetNames: d.sets.names, DroppedSets: len(d.sets.dropped),
	}
	for _, q := range d.queues.All() {
		if q != nil {
			u.Tickets += q.tickets()
		}
	}
	for _, s := range d.sets.byDigest {
		u.Tickets += s.tickets()
	}
	return u
}

// Needs reports whether the Dispatcher still needs a queue.
func (d *Dispatcher) Needs(q *engine.Queue) bool {
	c := d.queues.At(q.Handle)
	return c != nil && c.isNeeded()
}

// Check returns an error if the state of the Dispatcher is inconsistent while nothing is under way.
// claimable reports whether a queue has a ready task that limits other than the gate allow.
func (d *Dispatcher) Check(claimable func(*engine.Queue) bool) error {
	for handle, q := range d.queues.All() {
		if q != nil && (q.Handle != handle || d.rules.Names.Queues[q.Name] != q.Queue) {
			return fmt.Errorf("handle %d is of queue %q, which is forgotten", handle, q.Name)
		}
	}
	passable := func(q *Queue) bool { return claimable(q.Queue) && q.mayPass() }
	return errors.Join(d.checkGates(), d.checkHeads(), d.checkWaiters(passable))
}

// mayPass reports whether the gate of a queue, if there is one, has room; it ignores the rate.
func (q *Queue) mayPass() bool {
	g, _ := q.gate.(*gate)
	if g == nil {
		return true
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.rate == nil && (g.limit == 0 || g.leased < g.limit)
}

// checkWaiters: no claim waits for a queue that has a ready task which may be claimed.
func (d *Dispatcher) checkWaiters(claimable func(*Queue) bool) error {
	for name, q := range d.rules.Names.Queues {
		if c := d.Of(q); slices.ContainsFunc(c.waiters.All(), Ticket.Good) && claimable(c) {
			return fmt.Errorf("queue %q has ready tasks and claims that wait", name)
		}
	}
	for _, s := range d.sets.byDigest {
		waiting := slices.ContainsFunc(s.waiters.All(), Ticket.Good)
		for at, q := range s.queues.All() {
			if (waiting || !s.open.has(at)) && claimable(d.Of(q)) {
				return fmt.Errorf("queue %q has ready tasks, claims that wait in a set (%v) or is not open there",
					q.Name, waiting)
			}
		}
	}
	return nil
}

// checkHeads: the published heads are those of this shard.
func (d *Dispatcher) checkHeads() error {
	if d.board == nil {
		return nil
	}
	for name, q := range d.rules.Names.Queues {
		c, told := d.Of(q), head(0)
		if c.heads != nil {
			told = head(c.heads.shards[d.index].word.Load())
			if d.board.of(name) != c.heads {
				return fmt.Errorf("the heads of queue %q are not on the board", name)
			}
		}
		if h, _ := d.headAndShare(c); told != h {
			return fmt.Errorf("the published head of queue %q is %x, the real one %x", name, told, h)
		}
	}
	return nil
}

// checkGates: the queues have the gates of the process.
func (d *Dispatcher) checkGates() error {
	if d.gates == nil {
		return nil
	}
	d.gates.mu.Lock()
	defer d.gates.mu.Unlock()
	for name, q := range d.rules.Names.Queues {
		if g, _ := d.Of(q).gate.(*gate); g != d.gates.byQueue[name] {
			return fmt.Errorf("shard %d has another gate of queue %q", d.index, name)
		}
	}
	return nil
}

// CheckLimits returns an error if the gate of a queue does not count the leases of all shards of
// the process, or does not apply its settings: both are given by queue.
func (d *Dispatcher) CheckLimits(leased map[string]int, set map[string]engine.Configured) error {
	d.gates.mu.Lock()
	defer d.gates.mu.Unlock()
	for name, g := range d.gates.byQueue {
		want := set[name]
		g.mu.Lock()
		n, limit, version := g.leased, g.limit, g.version
		g.mu.Unlock()
		if n != leased[name] {
			return fmt.Errorf("the gate of queue %q counts %d leases, there are %d", name, n, leased[name])
		}
		if version != want.Version || limit != want.Settings.Concurrency {
			return fmt.Errorf("the gate of queue %q has limit %d of version %d, the settings are %x",
				name, limit, version, want.Value)
		}
	}
	return nil
}
