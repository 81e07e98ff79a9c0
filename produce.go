package codeq

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"

	"codeq/internal/base"
	"codeq/internal/call"
	"codeq/internal/container/arena"
	"codeq/internal/engine"
	"codeq/internal/entries"
	"codeq/internal/keys"
	"codeq/internal/listing"
	"codeq/internal/record"
)

// Produce stores a task and returns its ID. The task can be claimed as soon as its RunAt has come
// and nothing else holds it back.
//
// If the idempotency key of the task is taken, Produce stores nothing, and returns the ID of the
// task that has it, with a [*DuplicateError] ([ErrDuplicate]). An error that matches [ErrUncertain]
// leaves open whether the task was stored; after any other error it was not.
//
// With parents ([Task].After), Produce then waits until their shards have noted the task, in a
// cluster for [Cluster].CallTimeout at the most. If that, or ctx, or the room on the disk ends
// before, the error matches [ErrUncertain] and comes with the ID: the task is stored and will be
// noted, and a parent that goes until then is missing.
//
// Errors: [ErrDuplicate], [ErrNotFound] ([RefuseOnMissing]), [ErrNotMember], those of changes (see
// [Queue]), and that of ctx.
func (q *Queue) Produce(ctx context.Context, t Task) (_ ID, err error) {
	defer public(&err)
	if err := q.checkCall(ctx); err != nil {
		return ID{}, err
	}
	if len(q.opts.Producing) > 0 {
		return q.produceThrough(ctx, &t)
	}
	return q.produceOne(ctx, &t)
}

// produceOne stores a task.
func (q *Queue) produceOne(ctx context.Context, t *Task) (ID, error) {
	op, shard, err := q.prepareOne(ctx, t)
	if err != nil {
		return ID{}, err
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

// prepareOne makes the operation that produces a task, and finds its shard.
func (q *Queue) prepareOne(ctx context.Context, t *Task) (op *produceOp, shard int, err error) {
	if err := t.check(&q.opts.Limits, 0); err != nil {
		return nil, 0, err
	}
	op = q.produceOp()
	op.Tasks = append(op.Tasks, prepare(t, nil))
	var cost call.BatchCost
	if err = cost.Add(&op.Tasks[0], q.opts.Limits.ofCommit()); err == nil {
		err = q.checkParents(ctx, "", op.Tasks)
	}
	if err != nil {
		q.recycleProduce(op)
		return nil, 0, translated(err)
	}
	shard, bound := op.Tasks[0].Home(len(q.replicas))
	if !bound {
		shard = q.anyShard()
	}
	return op, shard, nil
}

// ProduceBatch stores all of the tasks or none, in one commit, and returns their IDs in the same
// order. Tasks of one queue, tenant and priority that are ready at once are claimed in the order of
// the batch.
//
// If some tasks are not stored, or that is not known, the error is a [*BatchError] with the error
// of each. A task with an idempotency key that is taken is not stored, but the others are: its ID
// is that of the task that has the key, and its error a [*DuplicateError] ([ErrDuplicate]). A task
// with [Unique].Replace replaces an earlier one of the batch with its key as well: of several, the
// last one is stored, in the place of the first, and all return its ID. The error of a batch that
// is refused before anything is written is no BatchError, and has the index of an invalid task.
//
// With several shards, tasks with a LimitKey, Group or idempotency key belong to a certain shard,
// and a batch that belongs to several shards is stored in parts, each in one commit. A task that
// waits for others of the batch ([Nth]) and belongs elsewhere is in a part after theirs: they may
// have ended when it is stored, and are missing then ([OnMissing]) unless they have a Retention. If
// a part fails, its tasks and those of later parts are not stored: their IDs are zero, and the
// errors of the latter wrap that of the part. Parts in which all tasks have an idempotency key come
// first, as far as the waits permit: it is safe to produce a batch again if all of its tasks have
// one, or none of the three.
//
// Errors: those of [Queue.Produce], such as [ErrInvalid], that of ctx, and a [*BatchError] of them.
func (q *Queue) ProduceBatch(ctx context.Context, tasks []Task) (_ []ID, err error) {
	defer public(&err)
	if err = q.checkCall(ctx); err != nil || len(tasks) == 0 {
		return nil, err
	}
	if len(q.opts.Producing) > 0 {
		return q.opts.through(ctx, Producing{Tasks: tasks}, q.produceBatch)
	}
	return q.produceBatch(ctx, tasks)
}

func (q *Queue) produceBatch(ctx context.Context, tasks []Task) (_ []ID, err error) {
	ctx = q.backend.begin(ctx)
	op := q.produceOp()
	if op.Tasks, err = q.prepareBatch("ProduceBatch", tasks, op.Tasks); err == nil {
		err = q.checkParents(ctx, "ProduceBatch", op.Tasks)
	}
	if err != nil {
		q.recycleProduce(op)
		return nil, err
	}
	ids, errs := make([]ID, len(tasks)), call.BatchErrors{N: len(tasks)}
	parts, all := call.SplitBatch(op.Tasks, len(q.replicas)), op.Tasks
	if parts == nil {
		parts = []call.BatchPart{{Shard: q.anyShard()}}
	}
	var hops []call.BatchHop
	for i := range parts {
		part, next := &parts[i], op
		if len(parts) > 1 {
			next = q.produceOp()
			next.Tasks = part.Append(next.Tasks, all, func(i int) keys.ID { return keys.ID(ids[i]) })
		}
		asked, err := q.produce(ctx, part, next, tasks, ids, &errs)
		if err != nil {
			errs.Fail(parts[i:i+1], base.Prefixed(err))
			errs.Fail(parts[i+1:], base.Prefixed(fmt.Errorf("not stored, since an earlier part of the batch was not: %w", err)))
			break
		}
		hops = append(hops, asked...)
	}
	if err := q.awaitTaken(ctx, hops); err != nil {
		for i := range tasks {
			if len(tasks[i].After) > 0 {
				errs.Set(i, base.Prefixed(err))
			}
		}
	}
	if errs.Errs != nil {
		return ids, &BatchError{errs.Errs}
	}
	return ids, nil
}

// produce stores the tasks of a part by op, which it recycles. The hops notify the tasks' parents.
func (q *Queue) produce(ctx context.Context, part *call.BatchPart, op *produceOp, tasks []Task, ids []ID, errs *call.BatchErrors) ([]call.BatchHop, error) {
	settled, err := q.backend.produce(ctx, part.Shard, op)
	if settled {
		defer q.recycleProduce(op)
	}
	if err != nil {
		return nil, err
	}
	for i, id := range op.IDs {
		ids[part.At(i)] = id
	}
	for _, i := range op.Duplicates {
		at := part.At(i)
		if unique := &tasks[at].Unique; !unique.Replace || !call.HasReplaced(op.Tasks, i, op.Duplicates) {
			errs.Set(at, &DuplicateError{Key: unique.Key, ID: op.IDs[i], Index: at})
		}
	}
	return call.BatchHops(op.Tasks, part.Shard, len(q.replicas), len(op.Duplicates) > 0), nil
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

// batch collects the tasks of a verb: it checks them, and encodes them into its own memory.
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

	// Waits for the end of the only task, which begin before it can end; nil: nobody waits. An
	// operation with one is not used again.
	ends  *awaitOp          // without a cluster: begins in the commit
	hears *entries.Listener // in a cluster: when the node applies the commit
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

// recycleProduce keeps an operation for reuse. REQUIRES: it is settled, or no shard has had it.
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
	if op.ends != nil && v == engine.Decided && err == nil && len(op.Duplicates) == 0 {
		op.ends.ID = op.IDs[0]
		op.ends.begin(s)
	}
	s.conclude(op, &op.completion, v, err)
}

func atMostTasks(n int) string { return fmt.Sprintf("at most %d", n) }

func taskError(verb string, i int, err error) error {
	return fmt.Errorf("%s: task %d: %w", verb, i, err)
}

// Producing is the argument of a [ProduceFunc].
type Producing struct {
	// Tasks is a copy: a [ProduceMiddleware] may change its elements, but not their number, nor the
	// maps and slices in them, which are the caller's.
	Tasks    []Task
	FollowUp bool   // they are stored with the completion of another task, and have no IDs yet
	Schedule string // the name of the schedule that stores Tasks[0] for its ticks, without an ID; "": none
}

// ProduceFunc stores tasks as [Queue.ProduceBatch] does, and returns their IDs, if they have any.
type ProduceFunc func(ctx context.Context, p Producing) ([]ID, error)

// ProduceMiddleware wraps the storing of tasks by this [Queue]: traces, defaults, compression or
// encryption of payloads, which a [Middleware] of the handlers reverts. It is called, on the
// goroutine of the caller, for each [Queue.Produce], [Queue.ProduceBatch], [Call],
// [Queue.SetSchedule] (not for the ticks), [Job].FollowUp, and for the follow-ups of each
// [Queue.Complete] and of each completion of [Queue.CompleteBatch]. Programs that use [OpenLocal]
// store their tasks as they are. [Queue.Schedules] returns the changed task: a header may mark it,
// so that it is not changed again when it is set again.
//
// The [ProduceFunc] that it returns calls next with ctx or a context derived from it, again only
// after an error, and returns after next has. Its error, or else that of the last next, is that of
// the call; the IDs are those of next. An error for follow-ups of a handler is the verdict on its
// task, as that of the handler; ctx is then that of [Job].Context.
type ProduceMiddleware func(next ProduceFunc) ProduceFunc

// through stores tasks by the middleware of produces.
func (o *Options) through(ctx context.Context, p Producing, store func(context.Context, []Task) ([]ID, error)) (ids []ID, _ error) {
	n := len(p.Tasks)
	var failed error = &InvalidError{"Options.Producing", "did not call next", "a call, or an error"}
	next := func(ctx context.Context, p Producing) ([]ID, error) {
		switch {
		case failed == nil:
			return nil, &InvalidError{"Options.Producing", "called next again after a success", "one success"}
		case len(p.Tasks) != n:
			failed = &InvalidError{"Producing.Tasks", len(p.Tasks), fmt.Sprint("the ", n, " of the caller")}
		default:
			ids, failed = store(ctx, p.Tasks)
		}
		return ids, failed
	}
	for i, mw := range slices.Backward(o.Producing) {
		if next = mw(next); next == nil {
			return nil, &InvalidError{fmt.Sprintf("Options.Producing %d", i), "returned nil", "a ProduceFunc"}
		}
	}
	p.Tasks = slices.Clone(p.Tasks)
	if _, err := next(ctx, p); err != nil {
		return ids, err
	}
	return ids, failed
}

// produceThrough is produceOne behind the middleware.
func (q *Queue) produceThrough(ctx context.Context, t *Task) (id ID, err error) {
	_, err = q.opts.through(ctx, Producing{Tasks: []Task{*t}}, func(ctx context.Context, tasks []Task) (_ []ID, err error) {
		id, err = q.produceOne(ctx, &tasks[0])
		return []ID{id}, err
	})
	return id, err
}
