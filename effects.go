package codeq

import (
	"slices"

	"codeq/internal/base"
	"codeq/internal/call"
	"codeq/internal/cluster"
	"codeq/internal/dispatch"
	"codeq/internal/engine"
	"codeq/internal/entries"
	"codeq/internal/keys"
	"codeq/internal/wire"
)

// The effects that the rules have collected, and the owner carries out: between two operations
// those that later operations of the group depend on, before the commit those that concern what is
// on disk already, and after it what others are told.

// follow carries out the effects that the rest of the group depends on.
func (s *shard) follow() {
	if len(s.Effects.Freed) > 0 { // first: they are of the gates from before
		s.claims.LeaveGates()
	}
	if len(s.Effects.Configured) > 0 {
		s.followSettings()
	}
	if !s.Effects.Suspects.IsZero() {
		s.claims.EndSuspects()
	}
}

// followSettings applies new settings of queues to the claims.
func (s *shard) followSettings() {
	for i, r := range s.Effects.Configured {
		s.Effects.Configured[i] = engine.Reconfigured{}
		q := s.claims.Of(r.Queue)
		if s.claims.HasGates() {
			s.claims.Limit(q, r.AfterOpen)
		} else {
			s.permits.Limit(q, r.AfterOpen)
		}
		s.claims.Open(q)
	}
	s.Effects.Configured = s.Effects.Configured[:0]
}

// showAll tells other shards what is next to be claimed. REQUIRES: the group is empty, so that disk
// has whatever they are told.
func (s *shard) showAll() {
	for i, q := range s.Effects.Shown {
		s.Effects.Shown[i] = nil
		s.claims.Publish(q)
	}
	s.Effects.Shown = s.Effects.Shown[:0]
}

// sendAll sends what disk has had since before the group.
func (s *shard) sendAll() {
	for i := range s.Effects.Outgoing {
		s.deliver(&s.Effects.Outgoing[i])
	}
	clear(s.Effects.Outgoing)
	s.Effects.Outgoing = s.Effects.Outgoing[:0]
	if sw := s.Effects.Sweep; sw != nil {
		s.Effects.Sweep = nil
		s.startSweep(sw)
	}
}

// tellAll tells subscribers and handlers what the group has done. REQUIRES: it has persisted.
func (s *shard) tellAll() {
	e := &s.Effects
	if s.node == nil { // else the log tells
		if len(e.Events) > 0 {
			s.hub.Publish(e.Events)
		}
		for _, r := range e.Canceled {
			s.runs.Cancel(r.Runner, r.Receipt)
		}
	}
}

// observe tells the observer of the commit, and of what it has changed. REQUIRES: there is an
// observer, and the group has persisted.
func (s *shard) observe() {
	o := s.opts.teller.Begin()
	for i := range s.Effects.Counted {
		c := &s.Effects.Counted[i]
		if n := c.Events(); n != (keys.Totals{}) { // else only its counts have changed
			o.delta(c.Queue.Name).add(&n)
		}
	}
	o.addCommit(CommitSample{Shard: s.index, Operations: s.callers.count(), Took: s.upkeep.Took})
	s.opts.teller.End(o.isFull())
}

// note sets what the rules are to know of the next group.
func (s *shard) note() {
	s.Reap = s.reapable()
	s.Wanted = s.Interested
	if s.node == nil {
		s.Wanted = s.hub.Wanted() | engine.WantCancels
	}
	if s.opts.teller != nil {
		s.Wanted |= engine.WantCounts
	}
	if !s.awaits.IsEmpty() {
		s.Wanted |= engine.WantOutcomes
	}
}

// answerAll answers those who wait for tasks that the group has ended, and for queues that have
// become idle.
func (s *shard) answerAll() {
	if !s.awaits.IsEmpty() {
		for i := range s.Effects.Endings {
			e := &s.Effects.Endings[i]
			for _, op := range s.awaits.Of(e.ID) {
				op.outcome = entries.CloneOutcome(&e.Outcome) // the memory of the result belongs to who has completed the task
				s.settleAfterCommit(op)
			}
			s.awaits.Drop(e.ID)
		}
	}
	if len(s.idlers) > 0 {
		s.idlers = slices.DeleteFunc(s.idlers, func(op *idleOp) bool {
			if op.IsGone() {
				return true
			}
			if !s.Idle(&op.Idleness) {
				return false
			}
			s.settleAfterCommit(op)
			return true
		})
	}
}

// collectServed settles the claims that have been served.
func (s *shard) collectServed() {
	for i, served := range s.claims.Served {
		s.claims.Served[i] = dispatch.Served{}
		op := served.Claim.Caller.(*claimOp)
		if served.Waited {
			for _, other := range op.shards {
				if other != s {
					other.claims.CountStale(op.Tickets())
				}
			}
		}
		s.settleAfterCommit(op)
	}
	s.claims.Served = s.claims.Served[:0]
}

// messageBatch is messages on their way to the shard that resolves it.
type messageBatch struct {
	completion
	from     int // shards
	to       int
	first    uint64 // number of messages[0]
	messages []keys.Message
	taken    int
}

func (p *messageBatch) resolve(s *shard) {
	if p.from >= s.opts.Shards { // decode does not know how many shards there are
		p.err = errMalformedCall
		s.settleAfterCommit(p)
		return
	}
	p.taken += s.TakeMessages(p.from, p.first+uint64(p.taken), p.messages[p.taken:])
	if p.taken < len(p.messages) {
		s.deferOp(p)
		return
	}
	s.settleAfterCommit(p)
}

func (p *messageBatch) encode(dst []byte) []byte {
	return call.AppendMessages(dst, p.from, p.first, p.messages)
}

func (p *messageBatch) decode(r *wire.Reader) { p.from, p.first, p.messages = call.ReadMessages(r) }

func (p *messageBatch) again() { p.taken, p.err = 0, nil }

// deliver sends messages to the leader of their receiver, and tells the sender's owner when they
// are taken, and when they are so for good: in a cluster, and with DurabilityDisk, at once. If the
// receiver takes no more, they stay where they are until the next Open.
func (s *shard) deliver(o *engine.Outgoing) {
	p := &messageBatch{completion: newCompletion(callMessages), from: s.index, to: o.To, first: o.First, messages: o.Messages}
	taken := confirmOp{to: o.To, first: o.First, n: len(o.Messages), durable: true}
	if s.node != nil {
		s.goFor("messages", func() {
			n := s.node
			change := n.queue.replicas[p.to].group.Changed()
			_, err := n.do(n.ctx, p.to, p)
			if err != nil {
				taken.n = 0 // they may not be
			}
			if cluster.Pace(n.ctx, change, err) {
				_ = s.inbox.Pass(&taken) // whoever leads the shard next sends them again
			}
		})
		return
	}
	to := s.peers[p.to]
	p.reply = func(err error) {
		if err != nil {
			_ = s.inbox.Pass(&confirmOp{to: p.to, err: err})
			return
		}
		forGood := taken
		forGood.late = true
		taken.durable = to == s || !to.Store.AfterSync(s.index, func() { _ = s.inbox.Pass(&forGood) })
		_ = s.inbox.Pass(&taken) // one that is closing sends them again, to be ignored
	}
	if err := to.inbox.Pass(p); err != nil {
		p.reply(err)
	}
}

// confirmOp says that messages were taken, or are to be sent again. In a queue by itself a receiver
// that does not take them takes none any more.
type confirmOp struct {
	to      int
	first   uint64
	n       int   // so many of those sent
	err     error // why they were not, in a queue by itself
	late    bool  // that they were was said before
	durable bool  // for good
}

func (op *confirmOp) resolve(s *shard) {
	switch {
	case op.err != nil:
		s.takers.End(op.to, op.err, func(t *takenOp) { t.settle(op.err) })
		return
	case !op.late:
		s.Confirmed(op.to, op.first, op.n)
		first, _ := s.Untaken(op.to)
		s.takers.Take(op.to, first-1, func(t *takenOp) {
			if s.node == nil { // what was taken was, whatever becomes of this group
				t.settle(nil)
				return
			}
			s.settleAfterCommit(t) // which confirms that this node led when the call came
		})
	}
	if op.durable {
		s.Durable(op.to, op.first+uint64(op.n)-1)
	}
}

func (op *confirmOp) settle(error) {}

// goFor does something for the owner, which relies on it, on a goroutine that Close waits for.
func (s *shard) goFor(what string, f func()) {
	s.node.background.Go(func() {
		contain(s.opts.log, what, f, func(err error) { _ = s.inbox.Pass(&crashOp{err}) }) // or it has ended
	})
}

// startSweep reads, beside the owner, what a sweep of lanes has to know of what disk has now.
// REQUIRES: as viewOf.
func (s *shard) startSweep(sw *engine.LaneSweep) {
	v, swept := viewOf(s), &sweptOp{sweep: sw}
	go func() {
		defer v.close() // which the store waits for before it closes
		swept.err = guarded(s.opts.log, "sweep of lanes", func() error {
			return sw.Names.Read(v.snap, s.hasEnded)
		})
		_ = s.inbox.Pass(swept) // one that is closing sweeps no more
	}()
}

// hasEnded reports whether the owner has ended. Any goroutine may ask.
func (s *shard) hasEnded() bool { return base.IsClosed(s.done) }

// sweptOp says that what a sweep has to know has been read, or why not.
type sweptOp struct {
	sweep *engine.LaneSweep
	err   error
}

func (op *sweptOp) resolve(s *shard) { s.Swept(op.sweep, op.err) }
func (op *sweptOp) settle(error)     {}

// forget drops the queues that neither the rules nor the owner need.
func (s *shard) forget() {
	for _, q := range s.Effects.Forgotten {
		if s.claims.Forget(q) { // else whoever needs it lets it rest again
			s.Forget(q)
		}
	}
	clear(s.Effects.Forgotten)
	s.Effects.Forgotten = s.Effects.Forgotten[:0]
}
