package codeq

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"codeq/internal/base"
	"codeq/internal/call"
	"codeq/internal/container/arena"
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/listing"
	"codeq/internal/record"
)

// Produce stores a task and returns its ID. The task can be claimed as soon as its RunAt has come
// and nothing else holds it back.
//
// If the idempotency key of the task is taken, Produce stores nothing, and returns the ID of the
// task that has it, with a [*DuplicateError] ([ErrDuplicate]). An error that matches [ErrUncertain]
// leaves open whether the task was stored; after any other error it was not. Produce is safe for
// concurrent use.
//
// A task with parents ([Task].After) is stored in one commit, as any other. Then Produce waits
// until its parents' shards have noted it, in a cluster for [Cluster].CallTimeout at the most. If
// that, or ctx, or the room on the disk ends before, the error matches [ErrUncertain] and comes
// with the ID: the task is stored, its parents' shards will note it, and a parent that goes until
// then is missing.
//
// Errors: [ErrInvalid], [ErrDuplicate], [ErrNotFound] ([RefuseOnMissing]), [ErrDiskFull],
// [ErrUncertain], [ErrFailed], [ErrNotLeader], [ErrNotMember], [ErrClosed], and that of ctx.
func (q *Queue) Produce(ctx context.Context, t Task) (_ ID, err error) {
	defer public(&err)
	if err := q.checkCall(ctx); err != nil {
		return ID{}, err
	}
	if err := t.check(&q.opts.Limits, 0); err != nil {
		return ID{}, err
	}
	op := q.produceOp()
	op.Tasks = append(op.Tasks, prepare(&t, nil))
	var cost call.BatchCost
	if err = cost.Add(&op.Tasks[0], q.opts.Limits.ofCommit()); err == nil {
		err = q.checkParents(ctx, "", op.Tasks)
	}
	if err != nil {
		q.recycleProduce(op)
		return ID{}, translated(err)
	}
	shard, bound := op.Tasks[0].Home(len(q.replicas))
	if !bound {
		shard = q.anyShard()
	}
	if settled, err := q.backend.produce(ctx, shard, op); err != nil {
		if settled {
			q.recycleProduce(op)
		}
		return ID{}, err
	}
	id, duplicate := op.IDs[0], len(op.Duplicates) > 0
	hops := call.BatchHops(op.Tasks, shard, len(q.replicas), false)
	q.recycleProduce(op)
	if err = q.awaitTaken(ctx, hops); duplicate {
		err = errors.Join(&DuplicateError{Key: t.Unique.Key, ID: id}, err)
	}
	return id, err
}

// ProduceBatch stores all of the tasks or none, in one commit, and returns their IDs in the same
// order. Tasks of one queue, tenant and priority that are ready at once are claimed in the order of
// the batch.
//
// A task with an idempotency key that is taken is not stored, but the others are: its ID is that of
// the task that has the key, and the error joins a [*DuplicateError] ([ErrDuplicate]) for each such
// task. A task with [Unique].Replace replaces an earlier one of the batch with its key as well: of
// several, the last one is stored, in the place of the first, and all return its ID. Other errors
// are those of [Queue.Produce]; the error of an invalid task contains its index.
//
// With several shards, tasks with a LimitKey, Group or idempotency key belong to a certain shard,
// and a batch that belongs to several shards is stored in parts, each in one commit. A task that
// waits for others of the batch ([Nth]) and belongs elsewhere is in a part after theirs: they may
// have ended when it is stored, and are missing then ([OnMissing]) unless they have a Retention. If
// a part fails, its tasks and those of later parts are not stored: their IDs are zero. Parts in
// which all tasks have an idempotency key come first, as far as the waits permit: it is safe to
// produce a batch again if all of its tasks have one, or none of the three.
//
// Errors: [ErrInvalid], [ErrDuplicate], [ErrNotFound] ([RefuseOnMissing]), [ErrDiskFull],
// [ErrUncertain], [ErrFailed], [ErrNotLeader], [ErrNotMember], [ErrClosed], and that of ctx.
func (q *Queue) ProduceBatch(ctx context.Context, tasks []Task) (_ []ID, err error) {
	defer public(&err)
	if ctx, err = q.begin(ctx); err != nil {
		return nil, err
	}
	if len(tasks) == 0 {
		return nil, nil
	}
	op := q.produceOp()
	if op.Tasks, err = q.prepareBatch("ProduceBatch", tasks, op.Tasks); err == nil {
		err = q.checkParents(ctx, "ProduceBatch", op.Tasks)
	}
	if err != nil {
		q.recycleProduce(op)
		return nil, err
	}
	parts := call.SplitBatch(op.Tasks, len(q.replicas))
	ids := make([]ID, len(tasks))
	if parts == nil {
		hops, err := q.produce(ctx, q.anyShard(), op, tasks, func(i int) int { return i }, ids)
		return ids, errors.Join(err, q.awaitTaken(ctx, hops))
	}
	all := op.Tasks
	var duplicates []error
	var hops []call.BatchHop
	for _, part := range parts {
		next := op
		if len(parts) > 1 {
			next = q.produceOp()
			next.Tasks = part.Append(next.Tasks, all, func(i int) keys.ID { return keys.ID(ids[i]) })
		}
		asked, err := q.produce(ctx, part.Shard, next, tasks, func(i int) int { return part.Tasks[i] }, ids)
		hops = append(hops, asked...)
		if err != nil {
			duplicates = append(duplicates, err)
			if !errors.Is(err, ErrDuplicate) {
				break
			}
		}
	}
	return ids, errors.Join(append(duplicates, q.awaitTaken(ctx, hops))...)
}

// produce stores the tasks of op in a shard, recycles op, and puts the IDs into ids. at returns the
// index in tasks of the operation's i-th task. The hops notify the tasks' parents.
func (q *Queue) produce(ctx context.Context, shard int, op *produceOp, tasks []Task, at func(int) int, ids []ID) ([]call.BatchHop, error) {
	settled, err := q.backend.produce(ctx, shard, op)
	if settled {
		defer q.recycleProduce(op)
	}
	if err != nil {
		return nil, err
	}
	for i, id := range op.IDs {
		ids[at(i)] = id
	}
	var errs []error
	for _, i := range op.Duplicates {
		if tasks[at(i)].Unique.Replace && call.HasReplaced(op.Tasks, i, op.Duplicates) {
			continue
		}
		errs = append(errs, &DuplicateError{Key: tasks[at(i)].Unique.Key, ID: op.IDs[i], Index: at(i)})
	}
	return call.BatchHops(op.Tasks, shard, len(q.replicas), len(op.Duplicates) > 0), errors.Join(errs...)
}

// checkParents refuses tasks with a missing parent that must exist. It passes tasks with a taken
// key, since they are not stored anyway.
func (q *Queue) checkParents(ctx context.Context, verb string, tasks []engine.NewTask) error {
	if !call.Refuses(tasks) {
		return nil
	}
	i, parent, err := call.FindMissing(tasks, len(q.replicas), func(shard int, ids []keys.ID) ([]keys.ID, error) {
		b := &call.Missing{IDs: ids}
		err := q.ask(ctx, shard, rule(callMissing, b))
		return b.Missing, err
	}, func(shard int, key [keys.UniqueLen]byte) error {
		l := listing.NewOne(true, taskInfo)
		l.Key = key
		return q.read(ctx, shard, callFind, l)
	})
	if err == nil && i >= 0 {
		err = fmt.Errorf("%w: parent %s", ErrNotFound, keys.FormatID(parent))
		if verb != "" {
			err = taskError(verb, i, err)
		}
	}
	return err
}

// awaitTaken waits until the messages to the parents of stored tasks have been taken.
func (q *Queue) awaitTaken(ctx context.Context, hops []call.BatchHop) error {
	for _, h := range hops {
		if err := q.doTaken(ctx, h.From, &takenOp{completion: newCompletion(callTaken), Taken: call.Taken{To: h.To}}); err != nil {
			return fmt.Errorf("%w: it is stored, and shard %d has not noted yet which tasks wait for its own: %w", ErrUncertain, h.To, base.CauseOf(err))
		}
	}
	return nil
}

// doTaken makes a shard resolve a takenOp.
func (q *Queue) doTaken(ctx context.Context, shard int, op *takenOp) error {
	if q.opts.Cluster != nil {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeoutCause(ctx, q.opts.Cluster.CallTimeout, errNotTaken)
		defer cancel()
	}
	err := q.ask(ctx, shard, op)
	op.GiveUp()
	return err
}

var errNotTaken = fmt.Errorf("%w: Cluster.CallTimeout", context.DeadlineExceeded)

// prepare does the part of a produce that the caller's goroutine can do: it encodes the record into
// a separate buffer. REQUIRES: t is checked.
func prepare(t *Task, records *arena.Arena) (n engine.NewTask) {
	buffer := func(size int) []byte {
		if records != nil {
			return records.Buffer(size)
		}
		return make([]byte, 0, size)
	}
	n.Key.Queue, n.Key.Tenant, n.Key.Priority = t.Queue, t.Tenant, uint8(t.Priority)
	if t.isPlain() {
		n.Rec = record.AppendPlain(buffer(record.PlainSize(t.Payload)), t.Payload)
		return n
	}
	var rec record.Record
	t.fill(&rec)
	n.Encode(&rec, buffer(rec.MaxSize()))
	return n
}

// batch collects the tasks of a verb: it checks them, and encodes them into its own memory, as they
// are added.
type batch struct {
	verb string
	call.BatchBuilder
	records arena.Arena
	bytes   int // of the payloads
}

// prepareBatch checks and prepares tasks, and appends them to into, which is empty.
func (q *Queue) prepareBatch(verb string, tasks []Task, into []engine.NewTask) ([]engine.NewTask, error) {
	b := batch{verb: verb, BatchBuilder: call.BatchBuilder{Tasks: into}}
	err := b.add(tasks, &q.opts.Limits)
	if err == nil {
		b.Finish()
	}
	return b.Tasks, err
}

// add adds tasks. After an error the batch must not be used.
func (b *batch) add(tasks []Task, limits *Limits) error {
	if n := len(b.Tasks) + len(tasks); n > limits.Batch {
		return &InvalidError{b.verb + " tasks", n, atMostTasks(limits.Batch)}
	}
	for i := range tasks {
		t, n := &tasks[i], len(b.Tasks)
		if err := t.check(limits, n); err != nil {
			return taskError(b.verb, n, err)
		}
		if b.bytes += len(t.Payload); b.bytes > limits.BatchBytes {
			return &InvalidError{b.verb + " payloads", bytesOf(b.bytes) + " and more", atMost(limits.BatchBytes)}
		}
		if err := b.Add(prepare(t, &b.records), limits.ofCommit()); err != nil {
			return taskError(b.verb, n, translated(err))
		}
	}
	return nil
}

// produceOp stores all of its tasks, or none.
type produceOp struct {
	completion
	call.Produce
}

func (q *Queue) produceOp() *produceOp {
	if op, ok := q.pools.produce.Get().(*produceOp); ok {
		return op
	}
	return &produceOp{completion: newCompletion(callProduce)}
}

func newProduce(from string) request {
	return &produceOp{completion: completion{kind: callProduce}, Produce: call.Produce{Call: keys.CallNumber{Node: from}}}
}

// recycleProduce keeps an operation for reuse. REQUIRES: it is settled, or was never given to a
// shard.
func (q *Queue) recycleProduce(op *produceOp) {
	clear(op.Tasks)
	op.Tasks, op.IDs, op.Duplicates, op.err = op.Tasks[:0], op.IDs[:0], op.Duplicates[:0], nil
	op.Call = keys.CallNumber{}
	q.pools.produce.Put(op)
}

// pools keep operations for reuse. They belong to a Queue and not to the package, since channels of
// a testing/synctest bubble must not outlive it.
type pools struct{ produce, claim, complete sync.Pool }

func (op *produceOp) resolve(s *shard) {
	if err := s.checkCaller(&op.Call); err != nil {
		s.conclude(op, &op.completion, engine.Decided, err)
		return
	}
	v, err := s.rules.Produce(op.Tasks, &op.Call, &op.Produced)
	s.conclude(op, &op.completion, v, err)
}

func atMostTasks(n int) string { return fmt.Sprintf("at most %d", n) }

func taskError(verb string, i int, err error) error {
	return fmt.Errorf("%s: task %d: %w", verb, i, err)
}
