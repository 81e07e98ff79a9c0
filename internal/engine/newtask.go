package engine

import (
	"fmt"
	"slices"

	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/wire"
)

// NewTask is a task on its way into a shard, as the caller's goroutine has prepared it, perhaps on
// another node or in another shard.
type NewTask struct {
	Key   LaneKey
	RunAt uint64 // wall clock, ms; 0: at once
	Rec   []byte // stored form; the shard keeps it
	Tied  *Tied  // nil: it has to do with nobody
}

// Tied is what the shard has to know of a new task that is bound to others.
type Tied struct {
	record.Ties
	Parents [][record.IDLen]byte // as in Task.After
	onDead  OnDead
	Twin    int // the task of the batch that has the same key; negative: none
}

func TiedOf(rec *record.Record) *Tied {
	return &Tied{Ties: rec.Ties, Parents: rec.Parents, onDead: OnDead(rec.OnDead), Twin: -1}
}

// Home is the shard to which a task belongs, if it belongs to a certain one.
func (t *NewTask) Home(shards int) (shard int, bound bool) {
	if t.Tied == nil {
		return 0, false
	}
	return t.Tied.Ties.Home(shards)
}

// message has another shard take the task in.
func (t *NewTask) message() *keys.Message {
	return &keys.Message{
		Kind: keys.MsgAdmit, Queue: t.Key.Queue, Tenant: t.Key.Tenant, Priority: t.Key.Priority, Record: t.Rec,
	}
}

// NewTaskOf is the task that a message is about.
func NewTaskOf(m *keys.Message) (NewTask, error) {
	rec, err := record.Decode(m.Record)
	if err != nil {
		return NewTask{}, err
	}
	t := NewTask{
		Key:   LaneKey{Queue: m.Queue, Tenant: m.Tenant, Priority: m.Priority},
		RunAt: rec.RunAt, Rec: m.Record, Tied: TiedOf(&rec),
	}
	if !t.Valid(&rec, 0) {
		return NewTask{}, fmt.Errorf("%w: task of queue %q in a message", wire.ErrMalformed, m.Queue)
	}
	return t, nil
}

// Valid reports whether a shard can take in what another node has sent as the n-th task of a batch:
// produce has refused anything else where it came from.
func (t *NewTask) Valid(rec *record.Record, n int) bool {
	for _, p := range rec.Parents {
		if at, sibling := keys.NthOf(p); sibling && at >= n {
			return false
		}
	}
	return t.Key.Priority <= MaxPriority
}

// IsScattered reports whether a shard would have to send the task to another one, where those of
// its batch for which it waits are not known: verbs refuse it.
func (t *NewTask) IsScattered(shard, shards int) bool {
	home, bound := t.Home(shards)
	return bound && home != shard && t.RefersToSiblings()
}

// RefersToSiblings reports whether the task waits for others of its batch.
func (t *NewTask) RefersToSiblings() bool {
	return t.Tied != nil && slices.ContainsFunc(t.Tied.Parents, func(p [record.IDLen]byte) bool { _, ok := keys.NthOf(p); return ok })
}

// UniqueKey is the idempotency key of a task that was just encoded.
func (t *NewTask) UniqueKey() string {
	rec, err := record.Decode(t.Rec)
	if err != nil {
		panic("codeq: a record that was just encoded: " + err.Error())
	}
	return rec.UniqueKey
}

// prepareRecord is a new task with a record, which it encodes into buf.
func PrepareTask(k LaneKey, rec *record.Record, buf []byte) NewTask {
	n := NewTask{Key: k, RunAt: rec.RunAt, Rec: rec.Append(buf)}
	if rec.Ties != (record.Ties{}) || len(rec.Parents) > 0 {
		n.Tied = TiedOf(rec)
	}
	return n
}
