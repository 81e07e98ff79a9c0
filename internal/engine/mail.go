package engine

import (
	"fmt"
	"slices"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/store"
)

// mail holds the shard's relations with others: messages to and from shards, sessions of the nodes
// that call the shard, and the interests of nodes.
type mail struct {
	*round

	out       outbox
	inbound   []uint64 // by shard, the last message taken
	arrived   uint64   // messages with tasks that have come from other shards since Open
	Sessions  store.Sessions
	interests map[string]keys.InterestValue // by node; without kinds: its interest has ended

	Interested KindSet // the interests of all nodes; in a cluster only
	Placement  string  // the node chosen by hand as leader; "": any; in a cluster only
}

// outbox makes another shard do something exactly once. The message is stored in the commit of its
// cause, numbered by receiver. The receiver stores the number of the last message of each sender in
// the commit of the message's effects, and ignores earlier numbers. Messages of one sender and
// receiver are taken in order, some hundred at a time, the next ones when these are taken. Memory
// holds only those being sent.
//
// A message that is taken is deleted when the commit of its receiver is durable: the logs of two
// shards have no order, and a power loss below DurabilityDisk might keep the deletion and lose the
// effects of the message. Until then the message is kept, and sent again after Open.
//
// A shard sends messages to itself in the same way. They are deleted once they are taken, as both
// commits are in one log.
//
// The number of the last message to each receiver has its own entry, since the message will be
// deleted. The numbers of the messages that wait for a receiver have a gap if a power loss took the
// last of them from the sender, and the receiver had taken these.
type outbox struct {
	next    []uint64 // by receiver, the number of the next message
	stored  []uint64 // by receiver, the number of the last message, as stored
	ahead   bool     // some number is larger than the stored one
	first   []uint64 // by receiver, no message before this number is stored
	taken   []uint64 // by receiver, the number of the last message that it has taken, as far as is known
	durable []uint64 // by receiver, messages up to this number may be deleted once they are taken
	sending []bool   // by receiver: messages are being sent
	waiting []uint64 // by receiver, messages that are not taken
	due     bool     // there may be something to send
	over    bool     // there may be something to delete
}

// send stores a message to a shard.
func (ml *mail) send(to int, m *keys.Message) {
	seq := ml.out.next[to]
	ml.out.next[to]++
	ml.out.ahead = true
	ml.out.waiting[to]++
	ml.out.due = true
	ml.Group.Set(keys.AppendOutbound(nil, uint32(to), seq), m.Append(nil))
}

// loadOutbox finds the messages that were not deleted before the queue was closed. All of them are
// sent: their receivers know which they have taken.
func (ml *mail) loadOutbox(shards int) error {
	ml.out = outbox{
		next: make([]uint64, shards), stored: make([]uint64, shards), first: make([]uint64, shards),
		taken: make([]uint64, shards), durable: make([]uint64, shards),
		sending: make([]bool, shards), waiting: make([]uint64, shards),
	}
	ml.inbound = make([]uint64, shards)
	for prefix, numbers := range map[byte][]uint64{keys.Inbound: ml.inbound, keys.Sent: ml.out.stored} {
		if err := store.Scan(ml.Store.DB(), prefix, func(key, value []byte) error {
			n, err := keys.ParseNumbered(key)
			if err == nil && int(n) < shards {
				numbers[n], err = keys.ParseNumber(value)
			}
			if err != nil || int(n) >= shards {
				return fmt.Errorf("%w: last message number %x has value %x", base.ErrCorrupt, key, value)
			}
			return nil
		}); err != nil {
			return err
		}
	}
	last := slices.Clone(ml.out.stored)
	if err := store.Scan(ml.Store.DB(), keys.Outbound, func(key, _ []byte) error {
		to, seq, err := keys.ParseOutbound(key)
		if err != nil || int(to) >= shards {
			return fmt.Errorf("%w: malformed message key %x", base.ErrCorrupt, key)
		}
		if ml.out.waiting[to] == 0 {
			ml.out.first[to] = seq
		}
		last[to] = max(last[to], seq)
		ml.out.waiting[to]++
		ml.out.due = true
		return nil
	}); err != nil {
		return err
	}
	for to, n := range last {
		ml.out.countFrom(to, n)
	}
	return nil
}

// countFrom continues the numbering after a message to a shard.
func (o *outbox) countFrom(to int, last uint64) {
	o.next[to] = max(o.next[to], last+1)
	if o.waiting[to] == 0 {
		o.first[to] = o.next[to]
	}
	o.taken[to] = o.first[to] - 1
	o.ahead = o.ahead || o.next[to] != o.stored[to]+1
}

// seal stores the numbers of the last messages.
func (o *outbox) seal(g *commitGroup) {
	if !o.ahead {
		return
	}
	o.ahead = false
	for to, next := range o.next {
		if last := next - 1; last != o.stored[to] {
			o.stored[to] = last
			g.Set(keys.AppendNumbered(nil, keys.Sent, uint32(to)), keys.AppendNumber(nil, last))
		}
	}
}

// applyMessage applies a message. It returns false, and does nothing, if disk lacks the latest
// state that the message needs.
func (s *State) applyMessage(m *keys.Message) bool {
	switch m.Kind {
	case keys.MsgAdmit, keys.MsgFollow, keys.MsgFlow, keys.MsgTick:
		tasks, err := NewTasksOf(m)
		if err != nil {
			s.Broken = fmt.Errorf("%w: message: %w", base.ErrCorrupt, err)
			return true
		}
		if !s.Ties.canAdmit(tasks) {
			return false
		}
		ids, refused := s.admitAll(tasks, nil, nil)
		for i := range tasks {
			if ids[i] != (keys.ID{}) {
				s.Names.QueueNamed(tasks[i].Key.Queue).arrived++
			}
		}
		s.Mail.arrived++
		if m.Kind == keys.MsgTick && len(refused) == 0 {
			s.Mail.send(keys.ShardOfSchedule(m.Schedule, s.config.Shards), &keys.Message{Kind: keys.MsgTicked, Schedule: m.Schedule, Tick: m.Tick})
		}
		return true
	case keys.MsgTicked:
		s.Times.ticked(m.Schedule, m.Tick)
		return true
	case keys.MsgDepend:
		outcome, _, ok := s.depend(m.Parent, m.Child, policy(m.Outcome))
		if ok && outcome != waiting {
			s.tellChild(m.Parent, m.Child, outcome)
		}
		return ok
	case keys.MsgUnpin:
		return s.unpinned(m.Parent, m.Until)
	case keys.MsgLeft:
		return s.Ties.unpinParents(m.Child, m.Until)
	case keys.MsgSettings:
		if err := s.Names.adoptSent(m.Queue, m.Settings); err != nil {
			s.Broken = fmt.Errorf("%w: message: %w", base.ErrCorrupt, err)
		}
		return true
	default:
		s.parentEnded(m.Parent, m.Child, m.Outcome)
		return true
	}
}

// busy reports whether some messages are not taken.
func (o *outbox) busy() bool {
	return slices.ContainsFunc(o.waiting, func(n uint64) bool { return n > 0 })
}

// Outgoing is consecutive messages to a shard.
type Outgoing struct {
	To       int
	First    uint64 // number of Messages[0]
	Messages []keys.Message
}

// sendOut reads the stored messages, for the owner to send.
// REQUIRES: the group has no messages, so that disk has them all.
func (ml *mail) sendOut() {
	ml.out.due = false
	for to := range ml.out.next {
		if ml.out.sending[to] || ml.out.waiting[to] == 0 {
			continue
		}
		ml.budget.begun = false // each receiver gets a message, however much the others use up
		p := Outgoing{To: to}
		lower := keys.AppendOutbound(nil, uint32(to), ml.out.taken[to]+1)
		upper := keys.AppendNumbered(nil, keys.Outbound, uint32(to)+1)
		ml.Broken = ml.Walk(lower, upper, func(it *pebble.Iterator, n int) (bool, error) {
			_, seq, err := keys.ParseOutbound(it.Key())
			if err != nil {
				return false, err
			}
			if n == 0 {
				p.First = seq
			} else if seq != p.First+uint64(n) {
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
			p.Messages = append(p.Messages, m)
			return len(p.Messages) < BatchCap && !ml.Spent(), nil
		})
		if ml.Broken != nil {
			return
		}
		if len(p.Messages) == 0 { // they are in this group
			ml.out.due = true
			continue
		}
		ml.out.sending[to] = true
		ml.Effects.Outgoing = append(ml.Effects.Outgoing, p)
	}
}

// Untaken returns the number of the first message to a shard that may not have been taken, and of
// the next one that will be sent: if they are equal, all have been.
func (ml *mail) Untaken(to int) (first, next uint64) { return ml.out.taken[to] + 1, ml.out.next[to] }

func (ml *mail) sendIsDue() bool { return ml.out.due }

// Confirmed notes that the receiver has taken the first n messages of those being sent; the others
// are sent again.
func (ml *mail) Confirmed(to int, first uint64, n int) {
	ml.out.taken[to] = max(ml.out.taken[to], first+uint64(n)-1)
	if ml.out.waiting[to] -= uint64(n); ml.out.waiting[to] == 0 { // there may be a gap before the next one
		ml.out.taken[to] = ml.out.next[to] - 1
	}
	ml.out.sending[to] = false
	ml.out.due = ml.out.due || ml.out.waiting[to] > 0
	ml.out.over = ml.out.over || ml.out.first[to] < ml.out.end(to)
}

// Durable notes that no power loss undoes the effects of the messages up to a number, if their
// receiver has taken them.
func (ml *mail) Durable(to int, last uint64) {
	ml.out.durable[to] = max(ml.out.durable[to], last)
	ml.forgetTaken()
}

// forgetTaken deletes the messages that are taken for good.
func (ml *mail) forgetTaken() {
	ml.out.over = false
	for to := range ml.out.first {
		for end := ml.out.end(to); ml.out.first[to] < end; ml.out.first[to]++ {
			if ml.Spent() {
				ml.out.over = true
				return
			}
			ml.Group.Delete(keys.AppendOutbound(nil, uint32(to), ml.out.first[to]))
		}
	}
}

// end returns the number before which no message to a shard is needed any more.
func (o *outbox) end(to int) uint64 { return min(o.taken[to], o.durable[to]) + 1 }

func (ml *mail) forgetTakenIsDue() bool { return ml.out.over }

// TakeMessages applies messages of a shard; first is the number of the first one. It returns how
// many it has taken: fewer than all if disk lacks the latest state that the next one needs, or the
// budget is spent.
func (s *State) TakeMessages(from int, first uint64, messages []keys.Message) (taken int) {
	for taken < len(messages) && s.Broken == nil && !s.Spent() {
		seq := first + uint64(taken)
		if seq > s.Mail.inbound[from] {
			if !s.applyMessage(&messages[taken]) {
				break
			}
			s.Mail.inbound[from] = seq
		}
		taken++
	}
	if taken > 0 {
		key := keys.AppendNumbered(nil, keys.Inbound, uint32(from))
		s.Group.Set(key, keys.AppendNumber(nil, s.Mail.inbound[from]))
	}
	return taken
}

// BatchCap is how many messages are sent together between two shards at most.
const BatchCap = 256

// Package keys has copies of these values: they are equal.
var (
	_ [parentPinned - keys.ParentPinned]struct{}
	_ [keys.ParentPinned - parentPinned]struct{}
	_ [toBeCanceled - keys.PendingCanceled]struct{}
	_ [cancelOnDead - keys.CancelOnDead]struct{}
	_ [keys.CancelOnDead - cancelOnDead]struct{}
	_ [runOnDead - keys.MaxOnDead]struct{}
	_ [keys.MaxOnDead - runOnDead]struct{}
	_ [refuseOnMissing - keys.MaxOnMissing]struct{}
	_ [keys.MaxOnMissing - refuseOnMissing]struct{}
)

// mergeInterests makes groups collect for the interests of all nodes.
func (ml *mail) mergeInterests() {
	ml.Interested = 0
	for _, v := range ml.interests {
		ml.Interested |= KindSet(v.Kinds)
	}
	ml.Wanted |= ml.Interested
}

func (ml *mail) loadInterests() error {
	ml.interests = make(map[string]keys.InterestValue)
	err := store.Scan(ml.Store.DB(), keys.Interest, func(key, value []byte) error {
		v, err := keys.ParseInterest(value)
		if err != nil {
			return fmt.Errorf("%w: interest of node %q: %w", base.ErrCorrupt, key[1:], err)
		}
		ml.interests[string(key[1:])] = v
		return nil
	})
	ml.mergeInterests()
	return err
}

// SetInterest stores the interests of a node, unless they are older than the stored ones; gone: the
// node was removed from the cluster.
func (ml *mail) SetInterest(node string, v keys.InterestValue, gone bool) {
	old := ml.interests[node]
	if !gone && (v.IsBefore(old) || v.Kinds == 0 && old.Kinds == 0) {
		return
	}
	key := keys.AppendNamed(nil, keys.Interest, node)
	if ml.interests[node] = v; gone {
		ml.Sessions.EndNode(node, ml.Wall)
		delete(ml.interests, node)
	}
	if v.Kinds == 0 || gone {
		ml.Group.Delete(key)
	} else {
		ml.Group.Set(key, v.Append(nil))
	}
	ml.mergeInterests()
}

// SetPlacement stores the node that should lead the shard by request; "": any.
func (ml *mail) SetPlacement(node string) {
	if ml.Placement = node; node == "" {
		ml.Group.Delete([]byte{keys.Placement})
	} else {
		ml.Group.Set([]byte{keys.Placement}, []byte(node))
	}
}

func (ml *mail) loadPlacement() error {
	node, err := store.Lookup(ml.Store.DB(), []byte{keys.Placement})
	ml.Placement = string(node)
	return err
}
