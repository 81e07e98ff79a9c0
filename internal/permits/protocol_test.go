package permits

import (
	"flag"
	"fmt"
	"math/rand/v2"
	"testing"
)

var (
	schedulesFlag = flag.Int("permits.schedules", 2000, "how many schedules TestProtocol runs")
	seedFlag      = flag.Uint64("seed", 0, "the seed of the only schedule that TestProtocol runs; 0: random ones")
)

// TestProtocol: shards and an allocator never grant more leases than the limits allow, while
// messages are lost, late, reordered or repeated, and leaders and limits change. Once nothing fails
// any more, every shard that wants permits gets some, and unneeded permits go back.
func TestProtocol(t *testing.T) {
	if *seedFlag != 0 {
		runSchedule(t, *seedFlag)
		return
	}
	for range *schedulesFlag {
		if runSchedule(t, rand.Uint64()); t.Failed() {
			return
		}
	}
}

func runSchedule(t *testing.T, seed uint64) {
	w := newCluster(t, seed)
	defer func() {
		if t.Failed() {
			t.Logf("-seed %d, at %d ms, limits %+v", seed, w.now, *w.limits())
			for _, s := range w.shards {
				t.Logf("shard %d: %+v, %+v", s.index, s.leader, s.leader.holder)
			}
			t.Logf("allocator: %+v", w.allocator.allocator)
		}
	}()
	for range 100 + w.rng.IntN(500) {
		w.step()
		w.check()
	}
	w.endFaults()
	w.requireProgress()
	w.requireRest()
}

// potential is how many permits a shard has, or will take.
func (s *shard) potential() (held, unused int) {
	l := s.leader
	if l.holder != nil {
		unused = l.holder.unused
		if l.call != nil && l.holder.awaits(&l.call.r) {
			unused += l.call.granted
		}
	}
	return max(l.leased+unused, s.leased), unused
}

// isStable reports whether all shards apply the settings in force.
func (w *cluster) isStable() bool {
	for _, s := range w.shards {
		if min(s.version, s.leader.version) < len(w.settings)-1 {
			return false
		}
	}
	return true
}

// check checks the invariants that hold at any time.
func (w *cluster) check() {
	a, limits, stable := w.allocator.allocator, w.limits(), w.isStable()
	held, unused := 0, 0
	for _, s := range w.shards {
		h, u := s.potential()
		held, unused = held+h, unused+u
		if a != nil && a.shards[s.index].known && a.shards[s.index].request.Held < h {
			w.t.Errorf("shard %d has %d permits, the allocator believes %d", s.index, h, a.shards[s.index].request.Held)
		}
	}
	if a != nil {
		b := &a.tokens
		if b.level != 0 && b.level+float64(b.out) > float64(b.burst)+1e-9 {
			w.t.Errorf("%v tokens, and %d in shards, in a bucket of %d", b.level, b.out, b.burst)
		}
	}
	switch {
	case !stable || limits.Concurrency == 0:
		w.bound = 0
	case w.bound == 0: // leases from before the limit, or a higher one, are all right
		w.bound = max(limits.Concurrency, held)
	default:
		if held > w.bound {
			w.t.Errorf("%d permits, %d were there and %d are allowed", held, w.bound, limits.Concurrency)
		}
		w.bound = max(limits.Concurrency, held)
	}
	switch {
	case !stable || limits.Rate == 0:
		w.rated.on = false
	case !w.rated.on && unused <= limits.Burst && a != nil && a.unknown == 0:
		w.rated = bucket{true, float64(limits.Burst), w.now}
	}
}

// checkLease checks the invariants that hold when a lease has begun.
func (w *cluster) checkLease() {
	limits := w.limits()
	if w.isStable() && limits.Concurrency > 0 {
		leased := 0
		for _, s := range w.shards {
			leased += s.leader.leased
		}
		if leased > limits.Concurrency {
			w.t.Errorf("a lease begins, then there are %d, and %d are allowed", leased, limits.Concurrency)
		}
	}
	if b := &w.rated; b.on {
		b.level = min(b.level+limits.Rate*float64(w.now-b.at)/1e3, float64(limits.Burst))
		b.at = w.now
		if b.level--; b.level < -1e-6 {
			w.t.Errorf("more claims than the rate allows, by %v", -b.level)
		}
	}
}

// endFaults makes everything work from now on.
func (w *cluster) endFaults() {
	w.calm = true
	for _, s := range w.shards {
		s.old = nil
		w.send(func() { s.leader.adopt(len(w.settings) - 1) }, nil)
	}
}

// round gives all parts the time for their due work.
func (w *cluster) round() {
	for _, s := range w.shards {
		s.leader.serve()
		s.leader.commit()
	}
	for n := len(w.messages); n > 0; n-- {
		w.arrive()
		w.check()
	}
	w.now += 1 + w.rng.Uint64N(40)
	if o := w.allocator; o.wake > 0 && o.wake <= w.now {
		w.allot()
	}
	w.check()
}

// patience is how many rounds something may take at the most.
const patience = 3000

// requireProgress checks that all shards with tasks and claims begin leases, as many at once as the
// limit allows.
func (w *cluster) requireProgress() {
	limits, most := w.limits(), 0
	var busy []*leader
	var goals []int
	for _, s := range w.shards {
		l := s.leader
		l.ready, l.claims = 0, 0
		if len(busy) == 0 || w.rng.IntN(3) > 0 {
			l.ready, l.claims = 1e6, 1e6
			busy, goals = append(busy, l), append(goals, l.entered+5)
		}
	}
	for range patience {
		if w.t.Failed() {
			return
		}
		w.round()
		leased, served := 0, true
		for i, l := range busy {
			served = served && (l.holder == nil || l.entered >= goals[i])
		}
		for _, s := range w.shards {
			leased += s.leader.leased
		}
		most = max(most, leased)
		if served && (limits.Rate > 0 || most >= limits.Concurrency) {
			return
		}
		for _, s := range w.shards {
			for range s.leader.leased {
				if w.rng.IntN(3) == 0 {
					s.leader.end()
				}
			}
		}
	}
	w.t.Errorf("a shard of %d gets no permits, or not all are used", len(busy))
}

// requireRest checks that, when no shard wants a permit, all permits go back and no more messages
// are sent.
func (w *cluster) requireRest() {
	for _, s := range w.shards {
		s.leader.ready, s.leader.claims = 0, 0
	}
	why := ""
	for range patience {
		for _, s := range w.shards {
			for s.leader.leased > 0 {
				s.leader.end()
			}
		}
		w.round()
		if why = w.restless(); why == "" || w.t.Failed() {
			return
		}
	}
	w.t.Error(why)
}

// restless returns what keeps the cluster from rest.
func (w *cluster) restless() string {
	if len(w.messages) > 0 {
		return fmt.Sprintf("%d messages", len(w.messages))
	}
	for _, s := range w.shards {
		l := s.leader
		switch {
		case l.dirty && l.holder != nil || l.group || l.call != nil || l.asking > 0:
			return fmt.Sprintf("shard %d goes on", s.index)
		case l.holder != nil && l.holder.unused > 0:
			return fmt.Sprintf("shard %d keeps %d permits", s.index, l.holder.unused)
		}
	}
	limits, a := w.limits(), w.allocator.allocator
	if limits.Concurrency > 0 && a.room() != limits.Concurrency || limits.Rate > 0 && a.tokens.out > 0 {
		return "the allocator believes that shards have permits"
	}
	return ""
}
