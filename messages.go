package codeq

import (
	"codeq/internal/base"
	"codeq/internal/call"
	"codeq/internal/cluster"
	"codeq/internal/engine"
)

// messageBatch is messages on their way to the shard that resolves it.
type messageBatch struct {
	completion
	call.Messages
	to int // shard
}

func (p *messageBatch) resolve(s *shard) {
	if p.From >= s.opts.Shards { // Read does not know how many shards there are
		p.err = errMalformedCall
		s.settleAfterCommit(p)
		return
	}
	p.Taken += s.rules.TakeMessages(p.From, p.First+uint64(p.Taken), p.List[p.Taken:])
	if p.Taken < len(p.List) {
		s.deferOp(p)
		return
	}
	s.settleAfterCommit(p)
}

// deliver sends messages to the leader of their receiver, and tells the sender's owner when they
// are taken, and when they are so for good: in a cluster, and with DurabilityDisk, at once. If the
// receiver takes no more, they stay where they are until the next Open.
func (s *shard) deliver(o *engine.Outgoing) {
	p := &messageBatch{completion: newCompletion(callMessages), Messages: call.Messages{From: s.index, First: o.First, List: o.Messages}, to: o.To}
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
				_ = s.inbox.Pass(&taken) // the next leader of the shard sends them again
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
		taken.durable = to == s || !to.rules.Store.AfterSync(s.index, func() { _ = s.inbox.Pass(&forGood) })
		_ = s.inbox.Pass(&taken) // one that is closing sends them again, to be ignored
	}
	if err := to.inbox.Pass(p); err != nil {
		p.reply(err)
	}
}

// confirmOp reports that messages were taken, or must be sent again. In a standalone queue a
// receiver that does not take them takes none any more.
type confirmOp struct {
	to      int
	first   uint64
	n       int   // so many of those sent
	err     error // why they were not, in a standalone queue
	late    bool  // they were confirmed as taken before
	durable bool  // for good
}

func (op *confirmOp) settle(error) {}
func (op *confirmOp) verb() *verb  { return &confirmVerb }

func (op *confirmOp) resolve(s *shard) {
	switch {
	case op.err != nil:
		s.takers.End(op.to, op.err, func(t *takenOp) { t.settle(op.err) })
		return
	case !op.late:
		s.rules.Mail.Confirmed(op.to, op.first, op.n)
		first, _ := s.rules.Mail.Untaken(op.to)
		s.takers.Take(op.to, first-1, func(t *takenOp) {
			if s.node == nil { // messages stay taken even if this group fails
				t.settle(nil)
				return
			}
			s.settleAfterCommit(t) // which confirms that this node led when the call came
		})
	}
	if op.durable {
		s.rules.Mail.Durable(op.to, op.first+uint64(op.n)-1)
	}
}

// goFor does something for the owner, which relies on it, on a goroutine that Close waits for.
func (s *shard) goFor(what string, f func()) {
	s.node.background.Go(func() {
		contain(s.opts.log, what, f, func(err error) { notify(s.inbox, &internal, func(*shard) { panic(err) }) })
	})
}

// startSweep reads, beside the owner, the names on disk that a sweep of lanes needs. REQUIRES: as
// store.Slot.View.
func (s *shard) startSweep(sw *engine.LaneSweep) {
	v := s.replica.slot.View()
	go func() {
		defer v.Close() // which the store waits for before it closes
		err := guarded(s.opts.log, "sweep of lanes", func() error { return sw.Names.Read(v.Reader(), s.hasEnded) })
		notify(s.inbox, &internal, func(s *shard) { s.rules.Names.Swept(sw, err) })
	}()
}

// hasEnded reports whether the owner has ended. Any goroutine may ask.
func (s *shard) hasEnded() bool { return base.IsClosed(s.done) }
