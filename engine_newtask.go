package codeq

import (
	"fmt"
	"slices"

	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/wire"
)

// newTask is a task on its way into a shard, as the caller's goroutine has
// prepared it, perhaps on another node or in another shard.
type newTask struct {
	key   laneKey
	runAt uint64 // wall clock, ms; 0: at once
	rec   []byte // stored form; the shard keeps it
	tied  *tied  // nil: it has to do with nobody
}

// tied is what the shard has to know of a new task that is bound to others.
type tied struct {
	record.Ties
	parents [][record.IDLen]byte // as in Task.After
	onDead  XOnDead
	twin    int // the task of the batch that has the same key; negative: none
}

func tiedOf(rec *record.Record) *tied {
	return &tied{Ties: rec.Ties, parents: rec.Parents, onDead: XOnDead(rec.OnDead), twin: -1}
}

// home is the shard to which a task belongs, if it belongs to a certain one.
func (t *newTask) home(shards int) (shard int, bound bool) {
	if t.tied == nil {
		return 0, false
	}
	return t.tied.Ties.Home(shards)
}

// message has another shard take the task in.
func (t *newTask) message() *keys.Message {
	return &keys.Message{
		Kind: keys.MsgAdmit, Queue: t.key.queue, Tenant: t.key.tenant, Priority: t.key.priority, Record: t.rec,
	}
}

// newTaskOf is the task that a message is about.
func newTaskOf(m *keys.Message) (newTask, error) {
	rec, err := record.Decode(m.Record)
	if err != nil {
		return newTask{}, err
	}
	t := newTask{
		key:   laneKey{queue: m.Queue, tenant: m.Tenant, priority: m.Priority},
		runAt: rec.RunAt, rec: m.Record, tied: tiedOf(&rec),
	}
	if !t.valid(&rec, 0) {
		return newTask{}, fmt.Errorf("%w: task of queue %q in a message", wire.ErrMalformed, m.Queue)
	}
	return t, nil
}

// valid reports whether a shard can take in what another node has sent as the
// n-th task of a batch: produce has refused anything else where it came from.
func (t *newTask) valid(rec *record.Record, n int) bool {
	for _, p := range rec.Parents {
		if at, sibling := keys.NthOf(p); sibling && at >= n {
			return false
		}
	}
	return t.key.priority <= XMaxPriority
}

// isScattered reports whether a shard would have to send the task to another one, where
// those of its batch for which it waits are not known: verbs refuse it.
func (t *newTask) isScattered(shard, shards int) bool {
	home, bound := t.home(shards)
	return bound && home != shard && t.refersToSiblings()
}

// refersToSiblings reports whether the task waits for others of its batch.
func (t *newTask) refersToSiblings() bool {
	return t.tied != nil && slices.ContainsFunc(t.tied.parents, func(p [record.IDLen]byte) bool { _, ok := keys.NthOf(p); return ok })
}

// uniqueKey is the idempotency key of a task that was just encoded.
func (t *newTask) uniqueKey() string {
	rec, err := record.Decode(t.rec)
	if err != nil {
		panic("codeq: a record that was just encoded: " + err.Error())
	}
	return rec.UniqueKey
}

// prepareRecord is a new task with a record, which it encodes into buf.
func prepareRecord(k laneKey, rec *record.Record, buf []byte) newTask {
	n := newTask{key: k, runAt: rec.RunAt, rec: rec.Append(buf)}
	if rec.Ties != (record.Ties{}) || len(rec.Parents) > 0 {
		n.tied = tiedOf(rec)
	}
	return n
}
