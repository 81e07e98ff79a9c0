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
	if s.node != nil {
		s.goFor("messages", func() {
			n := s.node
			change := n.queue.replicas[p.to].group.Changed()
			_, err := n.do(n.ctx, p.to, p)
			taken := len(p.List)
			if err != nil {
				taken = 0 // they may not be
			}
			if cluster.Pace(n.ctx, change, err) {
				notify(s.inbox, &confirmVerb, func(s *shard) { // or else the next leader sends them again
					s.confirm(p.to, p.First, taken)
					s.rules.Mail.Durable(p.to, p.First+uint64(taken)-1)
				})
			}
		})
		return
	}
	to := s.peers[p.to]
	durable := func(s *shard) { s.rules.Mail.Durable(p.to, p.First+uint64(len(p.List))-1) }
	p.reply = func(err error) {
		if err != nil { // the receiver takes none any more
			notify(s.inbox, &confirmVerb, func(s *shard) { s.takers.End(p.to, err, func(t *takenOp) { t.settle(err) }) })
			return
		}
		later := to != s && to.rules.Store.AfterSync(s.index, func() { notify(s.inbox, &confirmVerb, durable) })
		notify(s.inbox, &confirmVerb, func(s *shard) { // one that is closing sends them again, to be ignored
			if s.confirm(p.to, p.First, len(p.List)); !later {
				durable(s)
			}
		})
	}
	if err := to.inbox.Pass(p); err != nil {
		p.reply(err)
	}
}

// confirm notes that so many messages were taken, or must be sent again.
func (s *shard) confirm(to int, first uint64, n int) {
	s.rules.Mail.Confirmed(to, first, n)
	untaken, _ := s.rules.Mail.Untaken(to)
	s.takers.Take(to, untaken-1, func(t *takenOp) {
		if s.node == nil { // messages stay taken even if this group fails
			t.settle(nil)
			return
		}
		s.settleAfterCommit(t) // which confirms that this node led when the call came
	})
}

// goFor does something for the owner, which relies on it, on a goroutine that Close waits for.
func (s *shard) goFor(what string, f func()) {
	s.node.background.Go(func() {
		contain(s.opts.log, what, f, func(err error) { notify(s.inbox, &internal, func(*shard) { panic(err) }) })
	})
}

// startSweep reads, beside the owner, the names that a sweep needs. REQUIRES: as store.Slot.View.
func (s *shard) startSweep(sw *engine.LaneSweep) {
	v := s.replica.slot.View()
	var err error
	swept := func(s *shard) { s.rules.Names.Swept(sw, err) }
	go func() {
		defer v.Done() // which the store waits for before it closes
		err = guarded(s.opts.log, "sweep of lanes", func() error { return sw.Names.Read(v.Reader(), s.hasEnded) })
		notify(s.inbox, &internal, swept)
	}()
}

// hasEnded reports whether the owner has ended. Any goroutine may ask.
func (s *shard) hasEnded() bool { return base.IsClosed(s.done) }
