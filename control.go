package codeq

import (
	"context"
	"time"

	"codeq/internal/call"
	"codeq/internal/engine"
)

// Cancel ends a task that has not been completed: the task is not delivered again, and is kept as
// [Canceled] for its retention. If a handler of [Queue.Run] is working on it, the handler's context
// is cancelled with the cause [ErrCanceled], and what the handler returns has no effect; any other
// worker gets an error that matches [ErrLeaseLost] and [ErrCanceled] when it next uses its receipt.
// Tasks that wait for a canceled one are canceled too. A dead letter can be canceled as well.
//
// Cancel returns [ErrNotFound] if the task does not exist, or is no longer kept, and
// [ErrNotWaiting] if it is completed or canceled already.
//
// Errors: [ErrInvalid], [ErrNotFound], [ErrNotWaiting], [ErrDiskFull], [ErrUncertain], [ErrFailed],
// [ErrNotLeader], [ErrClosed], and that of ctx.
func (q *Queue) Cancel(ctx context.Context, id ID) (err error) {
	defer public(&err)
	return q.alter(ctx, id, engine.AlterCancel, 0)
}

// SetPriority moves a waiting task (ready, scheduled or blocked) to another priority, 0 to 9. A
// ready task keeps its turn by age. SetPriority returns [ErrNotFound] if the task does not exist,
// and [ErrNotWaiting] if it is leased or has ended.
//
// Errors: [ErrInvalid], [ErrNotFound], [ErrNotWaiting], [ErrDiskFull], [ErrUncertain], [ErrFailed],
// [ErrNotLeader], [ErrClosed], and that of ctx.
func (q *Queue) SetPriority(ctx context.Context, id ID, priority int) (err error) {
	defer public(&err)
	if priority < MinPriority || priority > MaxPriority {
		return &InvalidError{"SetPriority priority", priority, "0 to 9"}
	}
	return q.alter(ctx, id, engine.AlterPriority, uint64(priority))
}

// SetRunAt changes when a waiting task (ready, scheduled or blocked) becomes ready; zero or past:
// now, unless something else holds it back. A task that was ready already goes behind the other
// ready tasks. Errors are those of [Queue.SetPriority].
//
// Errors: [ErrInvalid], [ErrNotFound], [ErrNotWaiting], [ErrDiskFull], [ErrUncertain], [ErrFailed],
// [ErrNotLeader], [ErrClosed], and that of ctx.
func (q *Queue) SetRunAt(ctx context.Context, id ID, t time.Time) (err error) {
	defer public(&err)
	if err := q.checkCall(ctx); err != nil {
		return err
	}
	task := Task{Queue: "any", RunAt: t}
	if err := task.check(&q.opts.Limits, 0); err != nil {
		return err
	}
	return q.alter(ctx, id, engine.AlterRunAt, runAtMillis(t))
}

// Forget deletes a task that has ended: one that is kept ([Done] or [Canceled]) before its retention
// has passed, or a dead letter, as [Queue.PurgeDead] does. Its idempotency key stays taken for as
// long as before. If tasks that have it in [Task.After] have not ended, they still get its result:
// then it goes a second after the last of them has ended.
//
// Forget returns [ErrNotFound] if the task does not exist, or has not ended.
//
// Errors: [ErrInvalid], [ErrNotFound], [ErrDiskFull], [ErrUncertain], [ErrFailed], [ErrNotLeader],
// [ErrFormat] (the leader of the shard runs an older version), [ErrClosed], and that of ctx.
func (q *Queue) Forget(ctx context.Context, id ID) (err error) {
	defer public(&err)
	return q.alter(ctx, id, engine.AlterForget, 0)
}

func (q *Queue) alter(ctx context.Context, id ID, how engine.Alteration, arg uint64) error {
	_, err := q.doFor(ctx, id, rule(callAlter, &call.Alter{ID: id, How: how, Arg: arg}))
	return err
}
