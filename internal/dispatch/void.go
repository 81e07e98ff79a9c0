package dispatch

// A waiting claim has tickets in several lists, of several shards, and is served from one of them.
// Its other tickets are void then, and are removed in one of four ways: in the shard that serves
// it, at once; if its caller gives up, by Leave; in other shards, by a sweep (CountVoid, Sweep),
// since these are busy or asleep and only count the tickets; and when a list grows (WaitList).

// Leave drops the tickets of a claim that does not wait any more.
func (d *Dispatcher) Leave(c Departure) {
	if c.list != nil {
		if set := d.sets.byDigest[c.list.Digest]; set != nil {
			set.line(c.remote).voided()
		}
		return
	}
	for _, name := range c.queues {
		if q := d.known(name); q != nil {
			q.line(c.remote).voided()
			d.unlist(q)
		}
	}
}

// voidHere drops the tickets of a claim that has been taken for a queue of this shard, except the
// one by which it was taken.
func (d *Dispatcher) voidHere(c *Claim, by *Queue) {
	spent := false
	for _, name := range c.Queues {
		q := d.known(name)
		if q == by && !spent {
			spent = true
			continue
		}
		if q != nil {
			q.line(c.Remote).voided()
			if q != by { // which is being served
				d.unlist(q)
			}
		}
	}
}

// maxVoid is how many void tickets a shard may have, in addition to the number of good ones, before
// a sweep.
const maxVoid = 1 << 10

// CountVoid counts tickets that are void because another shard, or another node, has served their
// claim. It is safe for concurrent use.
func (d *Dispatcher) CountVoid(tickets int) {
	after := d.void.Add(int64(tickets))
	if after > maxVoid && after-int64(tickets) <= maxVoid {
		d.port.Sweep()
	}
}

// sweep is the state of a search for void tickets.
type sweep struct {
	on         bool
	left, kept int // queues of listed still to be swept; good tickets found
}

// Sweep begins to drop the void tickets of all lists.
func (d *Dispatcher) Sweep() { d.sweep = sweep{on: true, left: d.listed.Len()} }

// IsSweeping reports whether SweepOn has something to do.
func (d *Dispatcher) IsSweeping() bool { return d.sweep.on }

// SweepOn continues the sweep, until the budget of the rules is spent.
func (d *Dispatcher) SweepOn() {
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
		d.void.Store(-int64(w.kept)) // otherwise CountVoid would not ask for another sweep
		w.on = false
	}
}
