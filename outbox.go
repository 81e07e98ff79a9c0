package codeq

import (
	"fmt"
	"slices"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/keys"
	"codeq/internal/wire"
)

// outbox is how a shard has another one do something exactly once. The message
// is stored in the commit of what makes it necessary, numbered by receiver.
// The receiver notes the number of the last message of each sender in the
// commit of what the message does, and ignores what it has taken already; then
// the sender forgets the message. Messages of one sender and receiver are taken
// in order, some hundred at a time, the next ones when these are confirmed.
// Memory holds none of them but those under way.
//
// A shard that asks itself goes the same way.
//
// The number of the last message to each receiver is stored with it, since the
// message itself will be forgotten. The numbers of the messages that wait for a
// receiver have a gap if a power loss took the last of them, and not what they
// did to the receiver.
type outbox struct {
	next    []uint64 // by receiver, the number of the next message
	stored  []uint64 // by receiver, the number of the last message, as disk has it
	ahead   bool     // next has moved on from what is stored
	first   []uint64 // by receiver, the number of the first one that is not confirmed
	sending []bool   // by receiver: some are under way
	waiting []uint64 // by receiver, messages that are not confirmed
	due     bool     // there may be something to send
}

// parcelCap is how many messages are under way between two shards at the most.
const parcelCap = 256

// send stores a message for a shard.
func (s *shard) send(to int, m *keys.Message) {
	seq := s.out.next[to]
	s.out.next[to]++
	s.out.ahead = true
	s.out.waiting[to]++
	s.out.due = true
	s.group.set(keys.AppendOutbound(nil, uint32(to), seq), m.Append(nil))
}

// loadOutbox finds what has not been confirmed before the queue was closed.
func (s *shard) loadOutbox(shards int) error {
	s.out = outbox{
		next: make([]uint64, shards), stored: make([]uint64, shards), first: make([]uint64, shards),
		sending: make([]bool, shards), waiting: make([]uint64, shards),
	}
	s.inbound = make([]uint64, shards)
	for prefix, numbers := range map[byte][]uint64{keys.Inbound: s.inbound, keys.Sent: s.out.stored} {
		if err := scan(s.store.DB(), prefix, func(key, value []byte) error {
			n, err := keys.ParseNumbered(key)
			if err == nil && int(n) < shards {
				numbers[n], err = keys.ParseNumber(value)
			}
			if err != nil || int(n) >= shards {
				return fmt.Errorf("%w: last message, %x, is %x", ErrCorrupt, key, value)
			}
			return nil
		}); err != nil {
			return err
		}
	}
	last := slices.Clone(s.out.stored)
	if err := scan(s.store.DB(), keys.Outbound, func(key, _ []byte) error {
		to, seq, err := keys.ParseOutbound(key)
		if err != nil || int(to) >= shards {
			return fmt.Errorf("%w: message %x", ErrCorrupt, key)
		}
		if s.out.waiting[to] == 0 {
			s.out.first[to] = seq
		}
		last[to] = max(last[to], seq)
		s.out.waiting[to]++
		s.out.due = true
		return nil
	}); err != nil {
		return err
	}
	for to, n := range last {
		s.out.countFrom(to, n)
	}
	return nil
}

// countFrom continues the numbering after a message to a shard.
func (o *outbox) countFrom(to int, last uint64) {
	o.next[to] = max(o.next[to], last+1)
	if o.waiting[to] == 0 {
		o.first[to] = o.next[to]
	}
	o.ahead = o.ahead || o.next[to] != o.stored[to]+1
}

// loadNumbers continues the numbering after what the receivers in this process
// have taken: a power loss below DurabilityDisk may have taken the last messages
// and not that.
// REQUIRES: all shards are loaded, and none runs.
func (s *shard) loadNumbers() {
	for to, peer := range s.peers {
		s.out.countFrom(to, peer.inbound[s.index])
	}
}

// seal has the group store how far the messages are counted.
func (o *outbox) seal(g *group) {
	if !o.ahead {
		return
	}
	o.ahead = false
	for to, next := range o.next {
		if last := next - 1; last != o.stored[to] {
			o.stored[to] = last
			g.set(keys.AppendNumbered(nil, keys.Sent, uint32(to)), keys.AppendNumber(nil, last))
		}
	}
}

// sendOut has the receivers take what is stored for them.
// REQUIRES: the group is empty of messages, so that disk has them all.
func (s *shard) sendOut() {
	s.out.due = false
	for to := range s.out.next {
		if s.out.sending[to] || s.out.waiting[to] == 0 {
			continue
		}
		s.budget.begun = false // each receiver gets a message, whatever the others do
		p := &parcel{completion: newCompletion(), from: s.index, to: to}
		lower := keys.AppendOutbound(nil, uint32(to), s.out.first[to])
		upper := keys.AppendNumbered(nil, keys.Outbound, uint32(to)+1)
		s.broken = s.walk(lower, upper, func(it *pebble.Iterator, n int) (bool, error) {
			_, seq, err := keys.ParseOutbound(it.Key())
			if err != nil {
				return false, err
			}
			if n == 0 {
				p.first = seq
			} else if seq != p.first+uint64(n) {
				return false, nil
			}
			v, err := it.ValueAndErr()
			if err != nil {
				return false, err
			}
			m, err := keys.ParseMessage(append([]byte(nil), v...))
			if err != nil {
				return false, err
			}
			p.messages = append(p.messages, m)
			return len(p.messages) < parcelCap && !s.spent(), nil
		})
		if s.broken != nil {
			return
		}
		if len(p.messages) == 0 { // written by this group
			s.out.due = true
			continue
		}
		s.out.sending[to] = s.deliver(p)
	}
}

func (s *shard) sendIsDue() bool { return s.out.due }

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
	if p.from >= len(s.inbound) { // decode does not know how many shards there are
		p.err = errMalformedCall
		s.settle(p)
		return
	}
	for p.taken < len(p.messages) && s.broken == nil && !s.spent() {
		seq := p.first + uint64(p.taken)
		if seq > s.inbound[p.from] {
			if !s.obey(&p.messages[p.taken]) {
				break
			}
			s.inbound[p.from] = seq
		}
		p.taken++
	}
	if p.taken > 0 {
		key := keys.AppendNumbered(nil, keys.Inbound, uint32(p.from))
		s.group.set(key, keys.AppendNumber(nil, s.inbound[p.from]))
	}
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
			_, err = newTaskOf(&m)
		case m.Kind == keys.MsgSettings:
			_, err = parseSettings(m.Settings)
		}
		if err != nil {
			r.Fail()
			return
		}
		p.messages = append(p.messages, m)
	}
}

func (p *parcel) again() { p.taken, p.err = 0, nil }

// deliver has the receiver take a parcel, whoever leads it, and the sender's
// owner learn of it. It is false if the receiver does not take any more: the
// messages stay where they are until the next Open.
func (s *shard) deliver(p *parcel) bool {
	if s.node != nil {
		s.goFor("parcel", func() {
			n := s.node
			change := n.queue.replicas[p.to].route.next()
			_, err := n.do(n.ctx, p.to, p)
			if pace(n.ctx, change, err) {
				_ = s.inbox.pass(&confirmOp{by: p, err: err}) // whoever leads the shard next sends them again
			}
		})
		return true
	}
	p.reply = func(err error) {
		if err == nil {
			_ = s.inbox.pass(&confirmOp{by: p}) // one that is closing sends them again, to be ignored
		}
	}
	return s.peers[p.to].inbox.pass(p) == nil
}

// obey does what a message says. It is false if disk is behind with what it is
// about; then nothing was done.
func (s *shard) obey(m *keys.Message) bool {
	switch m.Kind {
	case keys.MsgAdmit:
		t, err := newTaskOf(m)
		if err != nil {
			s.broken = fmt.Errorf("%w: message: %w", ErrCorrupt, err)
			return true
		}
		tasks := []newTask{t}
		if !s.canAdmit(tasks) {
			return false
		}
		s.admitAll(tasks, nil, nil)
		s.queue(m.Queue).arrived++
		s.arrived++
		return true
	case keys.MsgDepend:
		return s.depend(m.Parent, m.Child, OnDead(m.Outcome))
	case keys.MsgUnpin:
		return s.unpinned(m.Parent, m.Until)
	case keys.MsgLeft:
		return s.left(m.Child, m.Until)
	case keys.MsgSettings:
		if err := s.adoptValue(m.Queue, m.Settings); err != nil {
			s.broken = fmt.Errorf("%w: message: %w", ErrCorrupt, err)
		}
		return true
	default:
		s.parentEnded(m.Parent, m.Child, m.Outcome)
		return true
	}
}

// confirmOp forgets messages that their receiver has taken, or sends them again.
type confirmOp struct {
	by  *parcel
	err error // they may not have been taken
}

func (op *confirmOp) resolve(s *shard) {
	to, n := op.by.to, uint64(len(op.by.messages))
	if op.err != nil {
		s.out.sending[to], s.out.due = false, true
		return
	}
	for seq := op.by.first; seq < op.by.first+n; seq++ {
		s.group.delete(keys.AppendOutbound(nil, uint32(to), seq))
	}
	s.out.first[to] = op.by.first + n
	s.out.waiting[to] -= n
	s.out.sending[to] = false
	s.out.due = s.out.due || s.out.waiting[to] > 0
}

func (op *confirmOp) settle(error) {}

// busy reports whether messages are not confirmed.
func (o *outbox) busy() bool {
	return slices.ContainsFunc(o.waiting, func(n uint64) bool { return n > 0 })
}
