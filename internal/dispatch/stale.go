package dispatch

// A waiting claim has tickets in several lists, of several shards, and is served from one of them.
// Its other tickets are stale then, and are removed in one of four ways: in the shard that serves
// it, at once; if its caller gives up, by Leave; in other shards, by a sweep (CountStale, Sweep),
// since these are busy or asleep and only count the tickets; and when a list grows (waitList).

// Leave drops the tickets of a claim that does not wait any more.
func (d *Dispatcher) Leave(c Departure) {
	if c.list != nil {
		if set := d.sets.byDigest[c.list.Digest]; set != nil {
			set.line(c.remote).noteStale()
		}
		return
	}
	for _, name := range c.queues {
		if q := d.known(name); q != nil {
			q.line(c.remote).noteStale()
			d.unlist(q)
		}
	}
}

// dropStale drops the tickets of a claim that has been taken for a queue of this shard, except the
// ticket that took it.
func (d *Dispatcher) dropStale(c *Claim, by *Queue) {
	if len(c.Queues) == 1 {
		return
	}
	spent := false
	for _, name := range c.Queues {
		q := d.known(name)
		if q == by && !spent {
			spent = true
			continue
		}
		if q != nil {
			q.line(c.Remote).noteStale()
			if q != by { // which is being served
				d.unlist(q)
			}
		}
	}
}

// maxStale is how many stale tickets a shard may have, in addition to the number of good ones,
// before a sweep.
const maxStale = 1 << 10

// CountStale counts tickets that are stale because another shard, or another node, has served their
// claim. It is safe for concurrent use.
func (d *Dispatcher) CountStale(tickets int) {
	after := d.stale.Add(int64(tickets))
	if after > maxStale && after-int64(tickets) <= maxStale {
		d.port.Sweep()
	}
}

// sweep is the state of a search for stale tickets.
type sweep struct {
	on         bool
	left, kept int // queues of listed still to be swept; good tickets found
}

// Sweep begins to drop the stale tickets of all lists.
func (d *Dispatcher) Sweep() { d.sweep = sweep{on: true, left: d.listed.Len()} }

// sweepOn continues the sweep, until the budget of the rules is spent.
func (d *Dispatcher) sweepOn() {
	w := &d.sweep
	w.left = min(w.left, d.listed.Len())
	for w.left > 0 && !d.rules.Spent() {
		w.left-- // from the end: unlist moves the last one, which has been swept
		q := d.listed.At(w.left)
		q.sweep()
		w.kept += q.tickets()
		d.unlist(q)
	}
	if w.left == 0 {
		for _, set := range d.sets.byDigest {
			set.sweep()
			w.kept += set.tickets()
		}
		d.stale.Store(-int64(w.kept)) // otherwise CountStale would not ask for another sweep
		w.on = false
	}
}
