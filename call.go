package codeq

import (
	"context"
	"fmt"
	"strings"

	"codeq/internal/call"
	"codeq/internal/engine"
	"codeq/internal/entries"
	"codeq/internal/wire"
)

// CallError says why a [Call] has no result although its task is stored.
type CallError struct {
	ID ID
	// Outcome is how the task has ended; zero if the call has ended before.
	Outcome Outcome
	// Err is [ErrCanceled] for a task that was canceled, the error of the codec, or why the call
	// has ended before its task, such as that of ctx. nil: the task is a dead letter.
	Err error
}

func (e *CallError) Error() string {
	why := fmt.Sprintf("a dead letter after %d attempts: %s", e.Outcome.Attempts, e.Outcome.LastError)
	if e.Err != nil {
		why = strings.TrimPrefix(e.Err.Error(), "codeq: ")
	}
	return fmt.Sprintf("codeq: call of task %s: %s", e.ID, why)
}

func (e *CallError) Unwrap() error { return e.Err }

// Call produces a task, waits until it has ended, and returns its result, decoded as [Handle]
// decodes payloads; that of a task without a result is the zero R. It misses no end of the task,
// which need not be kept ([Task].Retention): the wait begins in the commit of the produce. In a
// cluster it goes on over changes of the leader, as that of [Queue.Await].
//
// When ctx ends, Call returns, and the task goes on, unless the caller cancels it ([Queue.Cancel])
// by the ID in the [*CallError]. Within a handler of [Queue.Run], Call takes a place of the Run
// while it waits: if all handlers call tasks of that Run, none goes on.
//
// An error is a [*CallError] if the task is stored: it has become a dead letter, was canceled, has
// a result that cannot be decoded, or ctx or the queue has ended before. Any other error is one of
// [Queue.Produce], and the task is stored only if it matches [ErrUncertain]: by [OpenLocal], also
// if ctx ends while the task is at work. If the idempotency key of the task is taken, Call does not
// wait: the [*DuplicateError] has the ID for Await.
//
// Errors: those of [Queue.Produce], [ErrCanceled], that of ctx, and that of the codec.
func Call[R any](ctx context.Context, q *Queue, t Task, opts ...PayloadOption) (_ R, err error) {
	defer public(&err)
	var result R
	e, err := encodingOf(opts)
	if err != nil {
		return result, err
	}
	id, o, err := q.call(ctx, &t)
	switch {
	case id == ID{}:
		return result, err
	case err != nil:
		return result, &CallError{ID: id, Err: err}
	case o.State == Canceled:
		return result, &CallError{id, *o, ErrCanceled}
	case o.State != Done:
		return result, &CallError{ID: id, Outcome: *o}
	}
	if err := e.decode(o.Result, &result); err != nil {
		return result, &CallError{id, *o, fmt.Errorf("result of queue %s into %T: %w", t.Queue, result, err)}
	}
	return result, nil
}

// call produces a task, and waits for its end. The ID is zero if it is not certainly stored.
func (q *Queue) call(ctx context.Context, t *Task) (id ID, _ *Outcome, err error) {
	if err := q.checkCall(ctx); err != nil {
		return id, nil, err
	}
	begin := q.beginCall
	if len(q.opts.Producing) > 0 {
		begin = q.callThrough
	}
	id, end, err := begin(ctx, t)
	if err != nil {
		return id, nil, err
	}
	o, err := end(ctx)
	if err != nil {
		return id, nil, err
	}
	return id, outcomeOf(o), nil
}

// beginCall produces the task of a call.
func (q *Queue) beginCall(ctx context.Context, t *Task) (id ID, _ endOfTask, err error) {
	op, shard, err := q.prepareOne(ctx, t)
	if err != nil {
		return id, nil, err
	}
	end, err := q.backend.call(ctx, shard, op)
	if err != nil {
		return id, nil, err
	}
	if end == nil {
		return id, nil, &DuplicateError{Key: t.Unique.Key, ID: op.IDs[0]}
	}
	return op.IDs[0], end, nil
}

// callThrough is beginCall behind the middleware. After its error the ID is that of a stored task.
func (q *Queue) callThrough(ctx context.Context, t *Task) (id ID, end endOfTask, err error) {
	waits := false
	defer func() {
		if end != nil && !waits {
			ended, cancel := context.WithCancel(context.Background())
			cancel()
			_, _ = end(ended)
		}
	}()
	_, err = q.opts.through(ctx, Producing{Tasks: []Task{*t}}, func(ctx context.Context, tasks []Task) (_ []ID, err error) {
		id, end, err = q.beginCall(ctx, &tasks[0])
		return []ID{id}, err
	})
	waits = err == nil
	return id, end, err
}

// callOp is a Call of a program beside the process, which carries it out.
type callOp struct {
	completion
	call.Produce
	outcome engine.Outcome
	lost    error // why the outcome is not known of a task that is stored
}

// resolve is not for shards: they get a produce, and the wait for the end.
func (op *callOp) resolve(s *shard) {
	op.err = errMalformedCall
	s.settleAfterCommit(op)
}

// carryOut makes the process carry out the call.
func (op *callOp) carryOut(ctx context.Context, b backend, shard int) error {
	produce := &produceOp{completion: newCompletion(callProduce), Produce: op.Produce}
	produce.Call.Seq = 0 // it is numbered as one of this process
	end, err := b.call(ctx, shard, produce)
	if err != nil {
		return err
	}
	if op.Produced = produce.Produced; len(op.Duplicates) > 0 {
		return nil
	}
	o, err := end(ctx)
	if op.lost = err; err == nil {
		op.outcome = *o
	}
	return nil
}

func (op *callOp) AppendReply(dst []byte) []byte {
	dst = call.AppendOutcome(op.Produce.AppendReply(dst), op.lost, encodeError)
	return entries.AppendOutcome(dst, &op.outcome)
}

func (op *callOp) ReadReply(r *wire.Reader) {
	op.Produce.ReadReply(r)
	op.lost = call.ReadOutcome(r, decodeError)
	op.outcome = entries.ReadOutcome(r)
}

func (r *remote) call(ctx context.Context, shard int, op *produceOp) (endOfTask, error) {
	c := &callOp{completion: newCompletion(callCall), Produce: op.Produce}
	if _, err := r.do(ctx, shard, c); err != nil {
		return nil, err
	}
	if op.Produced = c.Produced; len(op.Duplicates) > 0 {
		return nil, nil
	}
	return func(context.Context) (*engine.Outcome, error) { return orNil(&c.outcome, c.lost) }, nil
}
