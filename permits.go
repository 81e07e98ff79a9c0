package codeq

import (
	"context"
	"slices"
	"sync/atomic"
	"time"

	"codeq/internal/dispatch"
	"codeq/internal/engine"
	"codeq/internal/wire"
)

// In a cluster the shards of a queue are led by several nodes, and a limit for all
// of them is kept by permits: a shard leases a task of a queue with Concurrency or
// Rate only with a permit, which it gets from the permit allocator, the leader of the first
// shard (permitallocator.go). With Concurrency, a permit is taken up until the lease ends,
// and may then serve for the next one; with Rate, it serves once.
//
// What a shard tells the permit allocator is not a change but how many permits it has, so
// that what is lost, or comes twice, is put right by what comes next.
//
// Invariant: the permit allocator never believes that a shard has fewer permits than it has.
// For that
//   - permits are given back, and the ends of leases told, only after the group
//     that ended the leases has persisted: a next leader would find them in force;
//   - of what a shard has told, the latest counts, by epoch and number;
//   - a shard takes what the permit allocator grants only in answer to the last that it has
//     told. Whatever it tells makes answers to what it has told before void;
//   - a leader answers what it is asked, as ever, only after a majority has
//     confirmed that it leads. So a new permit allocator that has asked a shard knows of
//     all that any permit allocator before it has granted there: after its answer, the
//     shard takes it no more, and leaders of the shard before that one are over.
//
// A new leader of a shard has as many permits as there are leases in its store;
// what its predecessor had more comes back to the permit allocator when it tells that.

// permits is what a shard has of the permits of a queue. It is the gateway of the
// queue in a cluster. The shard's owner uses it.
type permits struct {
	shard  *shard
	claims *queuePermits
	unused int
	spent  uint64 // have been used for a lease, ever
	over   bool   // perhaps there are more leases than the limit: permits of leases that end go back

	told  report // the last that the permit allocator was told, and what it has granted since
	sure  bool   // that it has heard that, or will
	since uint64 // when; monotonic clock, ms
	open  *permitsOp
	drop  context.CancelFunc // ends the call of open
	dry   bool               // the last answer was that there is none

	asking  []*claimOp // NoWait: want to know if there are permits
	covered int        // those of them whose question is in open
}

// report is what a shard tells of its permits of a queue.
type report struct {
	epoch  uint64 // of the shard's leader
	seq    uint64 // in the epoch
	try    uint64
	held   int    // with a lease, or unused
	unused int    //
	spent  uint64 // in the epoch
}

// after reports whether r was told later than other.
func (r *report) after(other *report) bool {
	if r.epoch != other.epoch {
		return r.epoch > other.epoch
	}
	if r.seq != other.seq {
		return r.seq > other.seq
	}
	return r.try > other.try
}

func (r *report) append(dst []byte) []byte {
	for _, n := range [...]uint64{r.epoch, r.seq, r.try, uint64(r.held), uint64(r.unused), r.spent} {
		dst = wire.AppendUint(dst, n)
	}
	return dst
}

func readReport(r *wire.Reader) report {
	return report{
		epoch: r.Uint(), seq: r.Uint(), try: r.Uint(), held: int(r.Uint()), unused: int(r.Uint()), spent: r.Uint(),
	}
}

// permitTurn is how long, in ms, a shard uses permits for one lease after the other
// before it lets those go first that wait for them in other shards.
const permitTurn = 100

// permitTable is what a shard knows of the permits of queues.
type permitTable struct {
	queues  map[*engine.Queue]*queuePermits
	dirty   []*queuePermits // flushReports looks at them
	flushed []*queuePermits // memory for the next dirty
	reports uint64          // to permit allocators
}

// queuePermits is what a shard knows of the permits of a queue.
type queuePermits struct {
	*dispatch.Queue
	allocator *permitAllocator // nil: another shard has it, or none does
	dirty     bool
}

// permitsOf returns what the shard knows of the permits of a queue.
func (s *shard) permitsOf(q *engine.Queue) *queuePermits {
	c := s.permits.queues[q]
	if c == nil {
		if s.permits.queues == nil {
			s.permits.queues = make(map[*engine.Queue]*queuePermits)
		}
		c = &queuePermits{Queue: s.claims.Of(q)}
		s.permits.queues[q] = c
	}
	return c
}

// needs reports whether the table could not do without a queue.
func (t *permitTable) needs(q *engine.Queue) bool {
	c := t.queues[q]
	return c != nil && (c.allocator != nil || c.dirty)
}

// permits is what the shard has of the queue's permits; nil if it needs none.
func (c *queuePermits) permits() *permits {
	p, _ := c.Gateway().(*permits)
	return p
}

// Look reports whether there is a permit. If there is none, one is asked for as
// soon as the group has persisted, if there are still claims then for which it would serve.
func (p *permits) Look(*dispatch.Dispatcher, time.Time) (ok bool, wait time.Duration) {
	if p.unused == 0 {
		p.shard.markDirty(p.claims)
		return false, 0
	}
	return true, 0
}

// Enter uses a permit.
func (p *permits) Enter(d *dispatch.Dispatcher, now time.Time) (ok bool, wait time.Duration) {
	if ok, wait = p.Look(d, now); ok {
		p.unused--
		p.spent++
		p.shard.markDirty(p.claims)
	}
	return ok, wait
}

// Leave is the end of n leases.
func (p *permits) Leave(n int) (wake []*dispatch.Dispatcher) {
	s, set := p.shard, p.claims.Settings
	if set.Concurrency == 0 {
		return nil
	}
	s.markDirty(p.claims)
	if set.Rate == 0 && !p.over && !p.turnEnds() {
		p.unused += n
		s.claims.Throttle(p.claims.Queue, s.Now)
	}
	return nil
}

// turnEnds reports whether other shards are to go first. While there is no permit allocator
// to give permits to, none do.
func (p *permits) turnEnds() bool {
	s := p.shard
	return s.Now-p.since >= permitTurn && s.node.queue.replicas[0].hasLeader()
}

// permit has a shard go by the limits of a queue for all its shards.
func (s *shard) permit(c *queuePermits, before *engine.Settings) {
	set, p := c.Settings, c.permits()
	limited := set.Concurrency > 0 || set.Rate > 0
	switch {
	case limited && p == nil:
		p = &permits{shard: s, claims: c, over: true}
		s.claims.SetGateway(c.Queue, p)
	case limited:
		p.void()
		if set.Rate > 0 && before.Rate == 0 { // they have no token
			p.unused = 0
		}
		if set.Concurrency > 0 && (before.Concurrency == 0 || before.Concurrency > set.Concurrency) {
			p.unused, p.over = 0, true
		}
	case p != nil:
		p.void()
		s.answerAsking(p)
		s.claims.SetGateway(c.Queue, nil)
		return
	default:
		return
	}
	p.sure = false
	s.markDirty(c)
}

// markDirty has speak look after a queue.
func (s *shard) markDirty(c *queuePermits) {
	if !c.dirty {
		c.dirty = true
		s.permits.dirty = append(s.permits.dirty, c)
	}
}

// flushReports has the permit allocator, and as the permit allocator the other shards, learn what they have
// to. REQUIRES: all that was decided has persisted.
func (s *shard) flushReports() {
	t := &s.permits
	if len(t.dirty) == 0 {
		return
	}
	t.dirty, t.flushed = t.flushed[:0], t.dirty
	for i, c := range t.flushed {
		t.flushed[i] = nil
		c.dirty = false
		if c.allocator != nil {
			s.askShards(c)
		}
		if p := c.permits(); p != nil {
			s.report(p)
		}
	}
}

// report tells the permit allocator how many permits the shard has, if it has fewer than the
// permit allocator knows, or wants some. It gives those back that nobody wants.
func (s *shard) report(p *permits) {
	q := p.claims
	need := p.need()
	p.unused = min(p.unused, need)
	if p.unused > 0 {
		s.markDirty(p.claims) // until they are used: who wants them may change his mind
	}
	held, want := int(q.Counts.Leased)+p.unused, need-p.unused
	if want == 0 {
		s.answerAsking(p)
	}
	tells := !p.sure || q.Settings.Concurrency > 0 && held < p.told.held || q.Settings.Rate > 0 && p.unused < p.told.unused
	switch {
	case p.open != nil && !p.open.wait: // its answer comes at once, and may grant something
		return
	case tells:
	case p.open == nil && want == 0, p.open != nil && want > 0 && len(p.asking) == 0:
		return
	}
	p.void()
	p.note(held)
	op := &permitsOp{completion: newCompletion(), queue: q.Name, shard: s.index, report: p.told, want: want}
	op.wait = want > 0 && len(p.asking) == 0 && p.dry
	p.dry = false
	ctx, drop := context.WithCancel(s.node.ctx)
	p.open, p.drop, p.covered = op, drop, len(p.asking)
	s.goFor("report of permits", func() {
		defer drop()
		change := s.node.queue.replicas[0].route.next()
		settled, err := s.node.do(ctx, 0, op)
		if !settled {
			op.gone.Store(true)
		}
		if pace(ctx, change, err) {
			_ = s.inbox.pass(&permitsAnswer{permits: p, op: op, err: err}) // whoever leads the shard next tells what it has
		}
	})
}

// note notes what the permit allocator is about to learn. REQUIRES: open is nil.
func (p *permits) note(held int) {
	s := p.shard
	s.permits.reports++
	p.told = report{epoch: s.epoch, seq: s.permits.reports, held: held, unused: p.unused, spent: p.spent}
	p.sure, p.since = true, s.Now
}

// void has an answer to what the permit allocator was told last come to nothing.
func (p *permits) void() {
	if p.open != nil {
		p.drop()
		p.open, p.drop, p.covered = nil, nil, 0
	}
}

// need is how many tasks could be leased at once, if there were permits.
func (p *permits) need() int {
	q := p.claims
	if q.Settings.Paused {
		return 0
	}
	n, ready := 0, int(q.Counts.Ready)
	for _, op := range p.asking {
		if !op.IsTaken() {
			n += op.Max
		}
	}
	return min(n+p.shard.claims.Wants(p.claims.Queue, ready-n), ready)
}

// Ask has a claim that does not wait know whether the permit allocator has permits, if
// they are what it lacks. It is called again, or refused, when that is known.
func (p *permits) Ask(c *dispatch.Claim) bool {
	q := p.claims
	if p.unused > 0 || q.Counts.Ready == 0 || q.Settings.Paused || slices.Contains(c.Asked, q.Name) {
		return false
	}
	p.asking = append(p.asking, c.Caller.(*claimOp))
	return true
}

// answerAsking resolves the claims again that want to know if there are permits.
func (s *shard) answerAsking(p *permits) {
	for _, op := range p.asking {
		s.postponeOp(op)
	}
	clear(p.asking)
	p.asking, p.covered = p.asking[:0], 0
}

// closePermits ends the calls that are under way. REQUIRES: the owner is about to end.
func (s *shard) closePermits(reason error) {
	for _, c := range s.permits.queues {
		if p := c.permits(); p != nil {
			p.void()
			for _, op := range p.asking {
				refuse(op, reason)
			}
		}
		if w := c.allocator; w != nil {
			for i := range w.shards {
				if op := w.shards[i].op; op != nil {
					op.settle(reason)
				}
			}
		}
	}
}

// permitsOp tells the permit allocator of a shard's permits of a queue, and asks for more.
type permitsOp struct {
	completion
	queue string
	shard int
	report
	want int
	wait bool        // until one is granted at least: the shard has been told that there is none
	gone atomic.Bool // the shard waits no more

	granted int
	over    bool // there are more leases than the limit
}

func (op *permitsOp) abandon(*shard) { op.gone.Store(true) }

// again makes what follows of what was told before, which may arrive yet.
func (op *permitsOp) again() {
	op.try++
	op.granted, op.over, op.err = 0, false, nil
}

func (op *permitsOp) encode(dst []byte) (callKind, []byte) {
	dst = wire.AppendUint(wire.AppendBytes(dst, op.queue), uint64(op.shard))
	dst = wire.AppendUint(op.report.append(dst), uint64(op.want))
	return callPermits, wire.AppendBool(dst, op.wait)
}

func (op *permitsOp) decode(r *wire.Reader) {
	op.queue, op.shard = r.String(), int(r.Uint())
	op.report = readReport(r)
	op.want, op.wait = int(r.Uint()), r.Bool()
	if op.shard < 0 || op.held < 0 || op.unused < 0 || op.want < 0 {
		r.Fail()
	}
}

func (op *permitsOp) encodeReply(dst []byte) []byte {
	return wire.AppendBool(wire.AppendUint(dst, uint64(op.granted)), op.over)
}

func (op *permitsOp) decodeReply(r *wire.Reader) {
	op.granted, op.over = int(r.Uint()), r.Bool()
	if op.granted < 0 || op.granted > op.want {
		r.Fail()
	}
}

// permitsAnswer is what has become of a permitsOp.
type permitsAnswer struct {
	permits *permits
	op      *permitsOp
	err     error
}

func (a *permitsAnswer) resolve(s *shard) {
	p := a.permits
	if p.open != a.op { // or they are no longer wanted
		return
	}
	asked := slices.Clone(p.asking[:p.covered])
	p.asking = slices.Delete(p.asking, 0, p.covered)
	p.void()
	s.markDirty(p.claims)
	if a.err != nil {
		p.sure = false
		for _, op := range asked {
			refuse(op, a.err)
		}
		return
	}
	p.unused += a.op.granted
	p.told.held += a.op.granted
	p.told.unused += a.op.granted
	p.over = a.op.over
	p.dry = a.op.want > 0 && a.op.granted == 0
	s.claims.Open(p.claims.Queue) // before those who asked look at the sets that have it
	for _, op := range asked {
		op.Asked = append(op.Asked, p.claims.Name)
		op.resolve(s)
	}
}

func (a *permitsAnswer) settle(error) {}

// askPermitsOp has a shard tell a new permit allocator of its permits of a queue, and go by
// the permit allocator's settings, or newer ones, first.
type askPermitsOp struct {
	completion
	queue string
	value []byte // the settings
	report
}

func (op *askPermitsOp) resolve(s *shard) {
	s.settle(op)
	if op.err = s.refusal(s.Adopt(op.queue, op.value)); op.err != nil {
		return
	}
	s.follow()
	c := s.permitsOf(s.QueueNamed(op.queue))
	p, q := c.permits(), c.Queue
	if p == nil { // it needs none, by newer settings
		s.permits.reports++
		op.report = report{epoch: s.epoch, seq: s.permits.reports, held: int(q.Counts.Leased)}
		return
	}
	p.void()
	p.note(int(q.Counts.Leased) + p.unused)
	op.report = p.told
	s.markDirty(c)
}

func (op *askPermitsOp) encode(dst []byte) (callKind, []byte) {
	return callAskPermits, wire.AppendBytes(wire.AppendBytes(dst, op.queue), op.value)
}

func (op *askPermitsOp) decode(r *wire.Reader) { op.queue, op.value = r.String(), r.Bytes() }

func (op *askPermitsOp) encodeReply(dst []byte) []byte { return op.report.append(dst) }

func (op *askPermitsOp) decodeReply(r *wire.Reader) {
	op.report = readReport(r)
	if op.held < 0 || op.unused < 0 {
		r.Fail()
	}
}

// openGates opens the queues whose rates let the next tasks pass.
func (s *shard) openGates() {
	for q := s.claims.Opening(); q != nil; q = s.claims.Opening() {
		if c := s.permits.queues[q.Queue]; c != nil && c.allocator != nil {
			s.allot(c.allocator)
		}
	}
}

// MayAsk is always true: the permit allocator may have permits.
func (p *permits) MayAsk() bool { return true }
