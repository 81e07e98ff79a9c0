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
	onDead  OnDead
	twin    int // the task of the batch that has the same key; negative: none
}

func tiedOf(rec *record.Record) *tied {
	return &tied{Ties: rec.Ties, parents: rec.Parents, onDead: OnDead(rec.OnDead), twin: -1}
}

// home is the shard to which a task belongs, if it belongs to a certain one.
func (t *newTask) home(shards int) (shard int, bound bool) {
	if t.tied == nil {
		return 0, false
	}
	return homeOf(&t.tied.Ties, shards)
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
		if at, sibling := nthOf(p); sibling && at >= n {
			return false
		}
	}
	return t.key.priority <= MaxPriority
}

// isScattered reports whether a shard would have to send the task to another one, where
// those of its batch for which it waits are not known: verbs refuse it.
func (t *newTask) isScattered(shard, shards int) bool {
	home, bound := t.home(shards)
	return bound && home != shard && t.refersToSiblings()
}

// refersToSiblings reports whether the task waits for others of its batch.
func (t *newTask) refersToSiblings() bool {
	return t.tied != nil && slices.ContainsFunc(t.tied.parents, func(p [record.IDLen]byte) bool { return isNth(p) })
}

// uniqueKey is the idempotency key of a task that was just encoded.
func (t *newTask) uniqueKey() string {
	rec, err := record.Decode(t.rec)
	if err != nil {
		panic("codeq: a record that was just encoded: " + err.Error())
	}
	return rec.UniqueKey
}

// appendTasks appends new tasks to a call of another node. What binds them to
// others is in their records.
func appendTasks(dst []byte, tasks []newTask) []byte {
	dst = wire.AppendUint(dst, uint64(len(tasks)))
	for i := range tasks {
		t := &tasks[i]
		dst = wire.AppendBytes(dst, t.key.queue)
		dst = wire.AppendBytes(dst, t.key.tenant)
		dst = append(dst, t.key.priority)
		dst = wire.AppendBool(dst, t.tied != nil)
		dst = wire.AppendBytes(dst, t.rec)
	}
	return dst
}

// farLimits are what bounds the batches of other nodes, whose own limits may be others.
var farLimits = Limits{Parents: maxBatchParents, CommitBytes: maxCommitBytes}

// readTasks reads what appendTasks has written. The records alias the message.
func readTasks(r *wire.Reader) []newTask {
	n := r.Count(5)
	if n == 0 {
		return nil
	}
	tasks := make([]newTask, n)
	tied, cost := false, commitCost{}
	for i := range tasks {
		t := &tasks[i]
		t.key = laneKey{queue: r.String(), tenant: r.String(), priority: r.Byte()}
		bound := r.Bool()
		t.rec = r.Bytes()
		rec, err := record.Decode(t.rec)
		if err != nil || !t.valid(&rec, i) {
			r.Fail()
			return nil
		}
		t.runAt = rec.RunAt
		if bound {
			t.tied, tied = tiedOf(&rec), true
		}
		if cost.add(t, &farLimits) != nil {
			r.Fail()
			return nil
		}
	}
	if tied {
		findTwins(tasks)
	}
	return tasks
}
