package permits

import (
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/wire"
)

// cluster simulates shards and an allocator, and the messages between them.
type cluster struct {
	t         *testing.T
	rng       *rand.Rand
	now       uint64   // ms
	settings  []Limits // by version; the last one is in force where the allocator is
	shards    []*shard
	allocator *allocatorNode
	messages  []message // under way, in any order
	calm      bool      // nothing fails any more

	lose, repeat, replace, configure float64 // probabilities
	most                             int     // tasks that come at once

	bound int    // of the leases that there may be; 0: not known
	rated bucket // the claims, by the rate in force
}

// message is a message under way. It is either delivered, perhaps twice, or lost.
type message struct{ deliver, lost func() }

// shard is the stored state of a shard, and its leader.
type shard struct {
	index   int
	leased  int
	version int // of the settings
	leader  *leader
	old     []*leader // earlier leaders that do not know that another one leads
}

// leader decides for a shard. Only the last leader of the shard can commit and answer.
type leader struct {
	w       *cluster
	shard   *shard
	epoch   uint64
	seq     uint64
	leased  int
	version int
	group   bool     // something has been decided that is not stored
	answers []func() // wait for the commit

	holder  *Holder // nil: no limits
	call    *call   // under way; nil: none
	dirty   bool
	ready   int // tasks
	claims  int // that wait
	asking  int // claims that do not wait
	covered int // those of asking that call asks for
	entered int // leases begun with a permit
}

// call is a request on its way to the allocator, or an answer on its way back.
type call struct {
	r       Request
	granted int // by the answer that is under way
}

// allocatorNode is the node that leads the first shard, and has the allocator.
type allocatorNode struct {
	allocator *Allocator // nil: no limits
	pending   []*pendingCall
	wake      uint64 // when there is more to allot; ms; 0: no such time
}

type pendingCall struct {
	from *leader
	call *call
	try  uint64
}

// bucket allows as many claims as a rate allows in any window of time.
type bucket struct {
	on    bool
	level float64
	at    uint64
}

func newCluster(t *testing.T, seed uint64) *cluster {
	rng := rand.New(rand.NewPCG(seed, 0))
	w := &cluster{
		t: t, rng: rng, now: 1, settings: []Limits{{}},
		lose: 0.3 * rng.Float64(), repeat: 0.2 * rng.Float64(),
		replace: 0.05 * rng.Float64(), configure: 0.02 * rng.Float64(),
		most: 2 << rng.IntN(5),
	}
	for i := range 1 + rng.IntN(4) {
		s := &shard{index: i}
		w.shards = append(w.shards, s)
		w.lead(s)
	}
	w.allocator = new(allocatorNode)
	if rng.IntN(4) > 0 {
		w.change()
	}
	return w
}

func (w *cluster) limits() *Limits { return &w.settings[len(w.settings)-1] }

func (w *cluster) chance(p float64) bool { return !w.calm && w.rng.Float64() < p }

func (w *cluster) time() time.Time { return time.UnixMilli(int64(w.now)) }

func (w *cluster) send(deliver, lost func()) { w.messages = append(w.messages, message{deliver, lost}) }

// arrive delivers a message, or loses it.
func (w *cluster) arrive() {
	i := w.rng.IntN(len(w.messages))
	m := w.messages[i]
	if !w.chance(w.repeat) {
		last := len(w.messages) - 1
		w.messages[i], w.messages = w.messages[last], w.messages[:last]
	}
	if w.chance(w.lose) {
		m.lost()
		return
	}
	m.deliver()
}

// step makes a random change.
func (w *cluster) step() {
	s := w.shards[w.rng.IntN(len(w.shards))]
	l := s.leader
	if len(s.old) > 0 && w.rng.IntN(4) == 0 {
		l = s.old[w.rng.IntN(len(s.old))]
	}
	switch {
	case w.chance(w.replace):
		w.lead(s)
	case w.chance(w.replace):
		w.replaceAllocator()
	case w.chance(w.configure):
		w.change()
	case w.allocator.wake > 0 && w.allocator.wake <= w.now:
		w.allot()
	case len(w.messages) > 0 && w.rng.IntN(5) < 2:
		w.arrive()
	default:
		switch w.rng.IntN(10) {
		case 0, 1, 2:
			l.commit()
		case 3, 4:
			l.ready += w.rng.IntN(w.most)
			l.claims += w.rng.IntN(w.most)
			if l.serve(); w.rng.IntN(4) == 0 && l.ready > 0 && l.holder != nil && l.holder.Unused() == 0 {
				l.asking++
				l.dirty = true
			}
		case 5, 6:
			l.end()
		case 7:
			l.serve()
		case 8:
			if w.rng.IntN(3) == 0 {
				l.claims = w.rng.IntN(l.claims + 1) // others give up
			}
		case 9:
			w.now += w.rng.Uint64N(1 << w.rng.IntN(10))
		}
	}
}

// lead replaces the leader of a shard.
func (w *cluster) lead(s *shard) {
	old, next := s.leader, &leader{w: w, shard: s, epoch: 1}
	s.leader = next
	if old != nil {
		if old.group && w.rng.IntN(2) == 0 { // the group was stored, but the leader does not know it
			s.leased, s.version = old.leased, old.version
		}
		if w.rng.IntN(2) == 0 {
			s.old = append(s.old, old)
		}
		for _, answer := range old.answers {
			answer()
		}
		old.answers = nil
		next.epoch, next.ready, next.claims = old.epoch+1, old.ready, old.claims
	}
	next.leased = s.leased
	next.apply(s.version)
	next.serve()
}

func (l *leader) isOver() bool { return l != l.shard.leader }

// apply makes a shard apply settings.
func (l *leader) apply(version int) {
	limits := l.w.settings[version]
	l.version = version
	switch {
	case !limits.Any():
		l.hangUp()
		l.holder, l.asking = nil, 0
	case l.holder == nil:
		h := NewHolder(l.epoch, &l.seq, limits)
		l.holder, l.dirty = &h, true
	default:
		l.hangUp()
		l.holder.Set(limits)
		l.dirty = true
	}
}

func (l *leader) adopt(version int) {
	if version > l.version {
		l.group = true
		l.apply(version)
	}
}

// serve begins leases, as long as there are tasks, claims and permits.
func (l *leader) serve() {
	for l.ready > 0 && l.claims > 0 {
		if l.holder != nil {
			l.dirty = true
			if l.holder.Unused() == 0 {
				return
			}
		}
		l.claims--
		l.begin()
		if l.w.rng.IntN(8) == 0 { // the others in the next group
			return
		}
	}
}

func (l *leader) begin() {
	if l.holder != nil {
		l.holder.Enter()
		l.entered++
	}
	l.ready--
	l.leased++
	l.group = true
	if !l.isOver() {
		l.w.checkLease()
	}
}

// end ends a lease.
func (l *leader) end() {
	if l.leased == 0 {
		return
	}
	l.leased--
	l.group = true
	if h := l.holder; h != nil {
		l.dirty = true
		if h.Leave(1, h.TurnEnds(l.w.now) && !l.w.chance(0.3)) {
			l.serve()
		}
	}
}

// commit stores the decisions, and then sends answers and reports.
func (l *leader) commit() {
	s := l.shard
	if l.isOver() && l.group {
		for i, old := range s.old {
			if old == l {
				s.old = append(s.old[:i:i], s.old[i+1:]...)
			}
		}
		return
	}
	if !l.isOver() {
		s.leased, s.version = l.leased, l.version
	}
	l.group = false
	for _, answer := range l.answers {
		answer()
	}
	l.answers = nil
	if !l.dirty || l.holder == nil {
		return
	}
	l.dirty = false
	need := min(l.ready, l.claims+l.asking)
	r, send := l.holder.Report(l.leased, need, l.asking > 0, l.w.now)
	l.dirty = l.holder.Unused() > 0
	if r.Want == 0 {
		l.asking, l.covered = 0, 0
	}
	if !send {
		return
	}
	r.Rank, r.Share = l.w.rng.Uint64N(4), l.w.rng.Uint64N(4)*1000
	l.hangUp()
	l.call, l.covered = &call{r: r}, l.asking
	l.sendCall(l.call)
}

// hangUp stops waiting for the answer to the last report.
func (l *leader) hangUp() {
	c, o := l.call, l.w.allocator
	l.call, l.covered = nil, 0
	if c != nil {
		l.w.send(func() { o.withdraw(l.shard.index, c) }, func() {})
	}
}

func (o *allocatorNode) withdraw(shard int, c *call) {
	if o.allocator != nil && o.pending[shard] != nil && o.pending[shard].call == c {
		o.allocator.Withdraw(shard)
		o.pending[shard] = nil
	}
}

func (l *leader) sendCall(c *call) {
	b := c.r.Append(nil)
	reader := wire.NewReader(b)
	r := ReadRequest(reader)
	require.NoError(l.w.t, reader.Done())
	require.Equal(l.w.t, c.r, r)
	l.w.send(func() { l.w.hear(l, c, r) }, func() { l.w.fail(l, c, r.Try) })
}

// fail tells a caller that there will be no answer to a try. The caller tries again, or gives up.
func (w *cluster) fail(l *leader, c *call, try uint64) {
	again := func() {
		switch {
		case c.r.Try != try || l.holder == nil:
		case l.call == c && w.rng.IntN(2) == 0:
			c.r.Try++
			c.granted = 0
			l.sendCall(c)
		case l.holder.Unanswered(&c.r):
			if l.call != c {
				w.t.Error("a failure is taken that nobody waits for")
			}
			l.answered()
		}
	}
	w.send(again, again)
}

// hear is the arrival of a call at the allocator.
func (w *cluster) hear(l *leader, c *call, r Request) {
	o, shard := w.allocator, l.shard.index
	if o.allocator == nil {
		w.answer(&pendingCall{l, c, r.Try}, Answer{Granted: r.Want})
		return
	}
	if !o.allocator.Hear(shard, &r, w.time()) {
		w.fail(l, c, r.Try)
		return
	}
	if o.pending[shard] != nil {
		w.dismiss(o, shard, Answer{})
	}
	o.pending[shard] = &pendingCall{l, c, r.Try}
	w.allot()
}

func (w *cluster) dismiss(o *allocatorNode, shard int, a Answer) {
	p := o.pending[shard]
	if p == nil {
		w.t.Errorf("shard %d is answered, and has not asked", shard)
		return
	}
	o.pending[shard] = nil
	w.answer(p, a)
}

// answer sends an answer, which a majority has confirmed.
func (w *cluster) answer(p *pendingCall, a Answer) {
	c := p.call
	if c.r.Try == p.try {
		c.granted = a.Granted
	}
	w.send(func() {
		l := p.from
		if c.r.Try == p.try && l.holder != nil && l.holder.Answered(&c.r, a) {
			if l.call != c {
				w.t.Error("an answer is taken that nobody waits for")
			}
			l.answered()
		}
	}, func() { w.fail(p.from, c, p.try) })
}

// answered is the end of a call.
func (l *leader) answered() {
	n := l.covered
	l.call, l.covered, l.dirty = nil, 0, true
	l.asking -= n
	for ; n > 0 && l.ready > 0 && l.holder.Unused() > 0; n-- {
		l.begin()
	}
	l.serve()
}

// allot sends the decisions of the allocator.
func (w *cluster) allot() {
	o := w.allocator
	o.wake = 0
	if o.allocator == nil {
		return
	}
	answers, wait := o.allocator.Allot(w.time())
	for _, d := range answers {
		w.dismiss(o, d.Shard, d.Answer)
	}
	if wait > 0 {
		o.wake = w.now + uint64((wait+time.Millisecond-1)/time.Millisecond)
	}
	w.ask(o, len(w.settings)-1)
}

// ask asks the shards that the allocator does not know.
func (w *cluster) ask(o *allocatorNode, version int) {
	a := o.allocator
	for _, s := range w.shards {
		if !a.Ask(s.index) {
			continue
		}
		done := false
		answered := func(r *Report) {
			if done || w.allocator != o || o.allocator != a {
				return
			}
			done = true
			if r == nil {
				a.NotReported(s.index)
			} else if a.Reported(s.index, r, w.time()) && o.pending[s.index] != nil {
				w.dismiss(o, s.index, Answer{})
			}
			w.allot()
		}
		lost := func() { w.send(func() { answered(nil) }, func() { answered(nil) }) }
		w.send(func() {
			w.tell(s, version, func(r Report) { w.send(func() { answered(&r) }, lost) }, lost)
		}, lost)
	}
}

// tell is the arrival of a question at a shard, which answers after the present group is stored.
func (w *cluster) tell(s *shard, version int, answer func(Report), lost func()) {
	l := s.leader
	l.adopt(version)
	r := Report{Epoch: l.epoch, Held: l.leased}
	if l.holder != nil {
		l.hangUp()
		r = l.holder.ReportNow(l.leased, w.now)
		l.dirty = true
	} else {
		l.seq++
		r.Seq = l.seq
	}
	l.answers = append(l.answers, func() {
		if l.isOver() {
			lost()
			return
		}
		answer(r)
	})
}

// change sets other limits on the node of the allocator, and sends them to the shards.
func (w *cluster) change() {
	var l Limits
	for !l.Any() && w.rng.IntN(6) > 0 {
		if w.rng.IntN(3) > 0 {
			l.Concurrency = 1 + w.rng.IntN(6)
		}
		if w.rng.IntN(2) > 0 {
			l.Rate = []float64{5, 20, 100, 1000}[w.rng.IntN(4)]
		}
		l.Burst = 1 + w.rng.IntN(1<<w.rng.IntN(5))
	}
	w.settings = append(w.settings, l)
	o := w.allocator
	if !l.Any() {
		if o.allocator != nil {
			for i, p := range o.pending {
				if p != nil {
					w.dismiss(o, i, Answer{Granted: p.call.r.Want})
				}
			}
		}
		o.allocator = nil
	} else {
		w.apply(o, true)
	}
	version := len(w.settings) - 1
	for _, s := range w.shards {
		adopt := func() { s.leader.adopt(version) }
		w.send(adopt, func() {})
	}
}

func (w *cluster) apply(o *allocatorNode, fresh bool) {
	if o.allocator == nil {
		o.allocator, o.pending = NewAllocator(len(w.shards)), make([]*pendingCall, len(w.shards))
	}
	o.allocator.Set(*w.limits(), fresh, w.time())
	w.allot()
}

// replaceAllocator makes another node lead. The old one goes on asking shards for a while.
func (w *cluster) replaceAllocator() {
	old := w.allocator
	w.allocator = new(allocatorNode)
	if old.allocator != nil {
		for i, p := range old.pending {
			if p != nil {
				w.fail(p.from, p.call, p.try)
			}
			version := len(w.settings) - 1
			if w.rng.IntN(2) == 0 {
				w.send(func() { w.tell(w.shards[i], version, func(Report) {}, func() {}) }, func() {})
			}
		}
	}
	if w.limits().Any() {
		w.apply(w.allocator, false)
	}
}
