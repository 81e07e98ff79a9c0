package engine

import (
	"fmt"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/store"
)

// mail holds the shard's relations with others: messages to and from shards, sessions of the nodes
// that call the shard, and the interests of nodes.
type mail struct {
	*round

	store.Outbox
	inbound   []uint64 // by shard, the last message taken
	arrived   uint64   // messages with tasks that have come from other shards since Open
	Sessions  store.Sessions
	interests store.Interests

	Interested KindSet // the interests of all nodes; in a cluster only
	Placement  string  // the node chosen by hand as leader; "": any; in a cluster only
}

// send stores a message to a shard.
func (ml *mail) send(to int, m *keys.Message) { ml.Outbox.Send(&ml.Group.Writes, to, m) }

func (ml *mail) loadMessages() (err error) {
	if ml.inbound, err = store.LoadNumbers(ml.Store.DB(), keys.Inbound, ml.config.Shards); err != nil {
		return err
	}
	return ml.Outbox.Load(ml.Store.DB(), ml.config.Shards)
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
		outcome, _, ok := s.depend(m.Parent, m.Child, store.ParentPolicy(m.Outcome))
		if ok && outcome != store.ParentWaits {
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
	case keys.MsgEnded:
		if m.Outcome == keys.ParentEnded {
			return s.childEnded(m.Parent, m.Child)
		}
		s.parentEnded(m.Parent, m.Child, m.Outcome)
		return true
	default:
		s.parentEnded(m.Parent, m.Child, m.Outcome)
		return true
	}
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
	ml.Broken = ml.ReadOut(&ml.Reads, BatchCap, ml.Spent, func(to int, first uint64, messages []keys.Message) {
		ml.Effects.Outgoing = append(ml.Effects.Outgoing, Outgoing{to, first, messages})
	})
}

// Durable notes that no power loss undoes the effects of the messages up to a number, if their
// receiver has taken them.
func (ml *mail) Durable(to int, last uint64) {
	ml.NoteDurable(to, last)
	ml.forgetTaken()
}

// forgetTaken deletes the messages that are taken for good.
func (ml *mail) forgetTaken() { ml.ForgetTaken(&ml.Group.Writes, ml.Spent) }

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

// mergeInterests makes groups collect for the interests of all nodes.
func (ml *mail) mergeInterests() {
	ml.Interested = KindSet(ml.interests.Kinds())
	ml.Wanted |= ml.Interested
}

func (ml *mail) loadInterests() error {
	err := ml.interests.Load(ml.Store.DB())
	ml.mergeInterests()
	return err
}

// SetInterest stores the interests of a node, unless they are older than the stored ones; gone: the
// node was removed from the cluster.
func (ml *mail) SetInterest(node string, v keys.InterestValue, gone bool) {
	if gone {
		ml.Sessions.EndNode(node, ml.Wall)
		ml.interests.Remove(&ml.Group.Writes, node)
	} else {
		ml.interests.Set(&ml.Group.Writes, node, v)
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
