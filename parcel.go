package codeq

import (
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/wire"
)

// parcel is messages on their way to the shard that resolves it.
type parcel struct {
	completion
	from     int // shards
	to       int
	first    uint64 // number of messages[0]
	messages []keys.Message
	taken    int
}

func (p *parcel) resolve(s *shard) {
	if p.from >= len(s.Inbound) { // decode does not know how many shards there are
		p.err = errMalformedCall
		s.settle(p)
		return
	}
	p.taken += s.TakeMessages(p.from, p.first+uint64(p.taken), p.messages[p.taken:])
	if p.taken < len(p.messages) {
		s.postponeOp(p)
		return
	}
	s.settle(p)
}

func (p *parcel) encode(dst []byte) (callKind, []byte) {
	dst = wire.AppendUint(wire.AppendUint(dst, uint64(p.from)), p.first)
	dst = wire.AppendUint(dst, uint64(len(p.messages)))
	for i := range p.messages {
		dst = wire.AppendBytes(dst, p.messages[i].Append(nil))
	}
	return callParcel, dst
}

func (p *parcel) decode(r *wire.Reader) {
	from := r.Uint()
	if from >= maxShards {
		r.Fail()
	}
	p.from, p.first = int(from), r.Uint()
	for range r.Count(2) {
		m, err := keys.ParseMessage(r.Bytes())
		switch {
		case err != nil:
		case m.Kind == keys.MsgAdmit:
			_, err = engine.NewTaskOf(&m)
		case m.Kind == keys.MsgSettings:
			_, err = engine.ParseSettings(m.Settings)
		}
		if err != nil {
			r.Fail()
			return
		}
		p.messages = append(p.messages, m)
	}
}

func (p *parcel) again() { p.taken, p.err = 0, nil }

// deliver has the receiver take messages, whoever leads it, and the sender's owner learn of it. If
// the receiver does not take any more, they stay where they are until the next Open.
func (s *shard) deliver(o *engine.Outgoing) {
	p := &parcel{completion: newCompletion(), from: s.index, to: o.To, first: o.First, messages: o.Messages}
	if s.node != nil {
		s.goFor("parcel", func() {
			n := s.node
			change := n.queue.replicas[p.to].route.next()
			_, err := n.do(n.ctx, p.to, p)
			if pace(n.ctx, change, err) {
				_ = s.inbox.pass(&confirmOp{by: p, err: err}) // whoever leads the shard next sends them again
			}
		})
		return
	}
	p.reply = func(err error) {
		if err == nil {
			_ = s.inbox.pass(&confirmOp{by: p}) // one that is closing sends them again, to be ignored
		}
	}
	_ = s.peers[p.to].inbox.pass(p)
}

// confirmOp forgets messages that their receiver has taken, or sends them again.
type confirmOp struct {
	by  *parcel
	err error // they may not have been taken
}

func (op *confirmOp) resolve(s *shard) {
	if op.err != nil {
		s.Unconfirmed(op.by.to)
		return
	}
	s.Confirmed(op.by.to, op.by.first, len(op.by.messages))
}

func (op *confirmOp) settle(error) {}
