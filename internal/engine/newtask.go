package engine

import (
	"fmt"

	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/wire"
)

// NewTask is a task to be taken in, as the caller's goroutine has prepared it, perhaps on another
// node or in another shard.
type NewTask struct {
	Key   LaneKey
	RunAt uint64 // wall clock, ms; 0: at once
	Rec   []byte // stored form; the shard keeps it
	Tied  *Tied  // nil: it has no ties
}

// Tied is what the shard needs to know of a new task with ties.
type Tied struct {
	record.Ties
	Parents [][record.IDLen]byte // as in Task.After
	Twin    int                  // index of the task of the batch with the same key; negative: none
	Refuses bool                 // it is not to be stored if a parent is missing
	policy  policy
	done    keys.ID // the parent that was completed in the commit of its follow-up; zero: none

	// siblings are those of its parents, in ascending order, that are of its batch and in another
	// shard.
	siblings []keys.ID
}

func TiedOf(rec *record.Record) *Tied {
	return &Tied{
		Ties: rec.Ties, Parents: rec.Parents, Twin: -1, Refuses: rec.OnMissing == refuseOnMissing, policy: policyOf(rec),
	}
}

// Home returns the shard to which a task belongs; bound is false if it may be in any.
func (t *NewTask) Home(shards int) (shard int, bound bool) {
	if t.Tied == nil {
		return 0, false
	}
	return t.Tied.Ties.Home(shards)
}

// message asks another shard to take in the task.
func (t *NewTask) message() *keys.Message {
	m := &keys.Message{
		Kind: keys.MsgAdmit, Queue: t.Key.Queue, Tenant: t.Key.Tenant, Priority: t.Key.Priority, Record: t.Rec,
	}
	if t.Tied.done != (keys.ID{}) && t.Tied.policy != t.Tied.policy.onDead() {
		m.Kind, m.Parent = keys.MsgFollow, t.Tied.done
	}
	return m
}

// NewTasksOf returns the tasks in a message: several for MsgFlow.
func NewTasksOf(m *keys.Message) ([]NewTask, error) {
	if m.Kind != keys.MsgFlow {
		t, err := newTaskOf(m, &keys.MessageTask{Queue: m.Queue, Tenant: m.Tenant, Priority: m.Priority, Record: m.Record}, 0)
		return []NewTask{t}, err
	}
	tasks := make([]NewTask, len(m.Tasks))
	holders := make(map[[keys.UniqueLen]byte]bool)
	for i := range tasks {
		var err error
		if tasks[i], err = newTaskOf(m, &m.Tasks[i], i); err != nil {
			return nil, err
		}
		if key := tasks[i].Tied.Unique; key != [keys.UniqueLen]byte{} {
			if holders[key] { // of twins, only the first is sent
				return nil, fmt.Errorf("%w: message with two tasks of one idempotency key", wire.ErrMalformed)
			}
			holders[key] = true
		}
	}
	return tasks, nil
}

// newTaskOf returns the n-th task of a message.
func newTaskOf(m *keys.Message, of *keys.MessageTask, n int) (NewTask, error) {
	rec, err := record.Decode(of.Record)
	if err != nil {
		return NewTask{}, err
	}
	t := NewTask{
		Key:   LaneKey{Queue: of.Queue, Tenant: of.Tenant, Priority: of.Priority},
		RunAt: rec.RunAt, Rec: of.Record, Tied: TiedOf(&rec),
	}
	t.Tied.done, t.Tied.siblings = m.Parent, m.Siblings
	if !t.Valid(&rec, n) {
		return NewTask{}, fmt.Errorf("%w: message with a task of queue %q", wire.ErrMalformed, of.Queue)
	}
	return t, nil
}

// Valid reports whether a shard can take in a task from another node as the n-th of a batch: a
// sound node refuses anything else before it sends it.
func (t *NewTask) Valid(rec *record.Record, n int) bool {
	for _, p := range rec.Parents {
		if at, sibling := keys.NthOf(p); sibling && (at < 0 || at >= n) {
			return false
		}
	}
	return t.Key.Priority <= maxPriority && rec.OnDead <= runOnDead && rec.OnMissing <= refuseOnMissing
}

// Encode sets all but the Key of a new task by its record, which it encodes into buf.
func (t *NewTask) Encode(rec *record.Record, buf []byte) {
	t.RunAt, t.Rec, t.Tied = rec.RunAt, rec.Append(buf), nil
	if rec.Ties != (record.Ties{}) || len(rec.Parents) > 0 {
		t.Tied = TiedOf(rec)
	}
}
