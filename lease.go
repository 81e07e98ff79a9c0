package codeq

import (
	"context"
	"fmt"
	"time"

	"codeq/internal/call"
	"codeq/internal/engine"
	"codeq/internal/guard"
	"codeq/internal/keys"
	"codeq/internal/record"
)

// Complete finishes a task, which is kept with result for its retention, if it has one. The same
// commit produces the tasks in next: either the task is done and all of them exist, or neither.
// Those with a taken idempotency key are left out. With several shards, those with a LimitKey,
// Group or idempotency key, and those that wait for them ([Nth]), appear in their shard a moment
// later, exactly once. If some have parents ([Task].After), Complete waits until the parents'
// shards have noted them, as [Queue.Produce] does; if that fails, the error matches [ErrUncertain],
// and the task is done. A follow-up may wait for the task itself, which counts as completed. One
// that ends before another that waits for it is in its shard counts as long as [Queue.Await]
// returns its outcome.
//
// After [ErrLeaseLost] (the lease is not in force) next was not produced either. After
// [ErrUncertain], complete again until a call succeeds or returns ErrLeaseLost, at the latest when
// the lease would have expired. Verbs with a [Receipt] are safe for concurrent use.
//
// Errors: [ErrLeaseLost] (with [ErrCanceled] after a cancel), [ErrNotFound] ([RefuseOnMissing]),
// those of changes (see [Queue]), and that of ctx.
func (q *Queue) Complete(ctx context.Context, r Receipt, result []byte, next ...Task) (err error) {
	defer public(&err)
	if err := q.checkCall(ctx); err != nil {
		return err
	}
	op := q.completeOp(r)
	op.StillRuns = true
	err = checkResult(result, &q.opts.Limits)
	shard := q.shardOf(r.ID)
	if err == nil {
		op.Result = append(op.Result, result...)
		if len(next) > 0 {
			err = q.prepareNext(ctx, op, next, shard)
		}
	}
	if err != nil {
		q.recycleComplete(op)
		return translated(err)
	}
	settled, err := q.do(ctx, shard, op)
	if !settled {
		return err
	}
	hops := call.BatchHops(op.Next, shard, len(q.replicas), true)
	if q.recycleComplete(op); err == nil {
		err = q.awaitTaken(ctx, hops)
	}
	return err
}

func (q *Queue) prepareNext(ctx context.Context, op *completeOp, next []Task, shard int) error {
	if len(q.opts.Producing) == 0 {
		return q.checkNext(ctx, op, next, shard)
	}
	_, err := q.opts.through(ctx, Producing{Tasks: next, FollowUp: true}, func(ctx context.Context, tasks []Task) ([]ID, error) {
		op.Next = op.Next[:0] // of a call before
		return nil, q.checkNext(ctx, op, tasks, shard)
	})
	return err
}

func (q *Queue) checkNext(ctx context.Context, op *completeOp, next []Task, shard int) (err error) {
	if op.Next, err = q.prepareBatch("Complete", next, op.Next); err != nil {
		return err
	}
	if err = call.CheckRoute(op.Next, shard, len(q.replicas), q.opts.Limits.ofCommit()); err != nil {
		return err
	}
	return q.checkParents(ctx, "Complete", op.Next)
}

// Retry ends a failed attempt, which counts. The task waits as opts say and is then ready again,
// behind the ready tasks of its lane; out of attempts, it becomes a dead letter.
//
// Errors: [ErrLeaseLost] (with [ErrCanceled]), those of changes (see [Queue]), and that of ctx.
func (q *Queue) Retry(ctx context.Context, r Receipt, opts RetryOptions) (err error) {
	defer public(&err)
	op := retryOf(opts.After)
	op.How |= engine.StillRuns
	return q.failed(ctx, r, op, opts.Err)
}

// retryOf ends an attempt that is followed by another one, as RetryOptions.After says.
func retryOf(after time.Duration) call.Fail {
	op := call.Fail{How: engine.FailRetry, Wait: -1}
	switch {
	case after > 0:
		op.Wait = int64(record.Millis(after))
	case after < 0:
		op.Wait = 0
	}
	return op
}

// Release gives a task back without counting the attempt. It is ready again after the given time,
// at once for 0, behind the ready tasks of its lane.
//
// Errors: [ErrLeaseLost] (with [ErrCanceled]), those of changes (see [Queue]), and that of ctx.
func (q *Queue) Release(ctx context.Context, r Receipt, after time.Duration) (err error) {
	defer public(&err)
	if err := checkRelease(after); err != nil {
		return err
	}
	return q.failed(ctx, r, call.Fail{How: engine.FailRelease | engine.StillRuns, Wait: int64(record.Millis(after))}, nil)
}

func checkRelease(after time.Duration) error {
	if after < 0 {
		return &InvalidError{"Release after", after, "0 or more"}
	}
	return nil
}

// DeadLetter makes a task a dead letter, even with attempts left. It keeps cause, which may be nil.
//
// Errors: [ErrLeaseLost] (with [ErrCanceled]), those of changes (see [Queue]), and that of ctx.
func (q *Queue) DeadLetter(ctx context.Context, r Receipt, cause error) (err error) {
	defer public(&err)
	return q.failed(ctx, r, call.Fail{How: engine.FailDead | engine.StillRuns}, cause)
}

// Extend moves the deadline of a lease to d from now, 10 ms to 365 days. When the lease expires,
// the task is ready again, and the attempt counts; see [Queue.Claim] for its place.
//
// Errors: [ErrLeaseLost] (with [ErrCanceled]), those of changes (see [Queue]), and that of ctx.
func (q *Queue) Extend(ctx context.Context, r Receipt, d time.Duration) (err error) {
	defer public(&err)
	if err := checkExtension(d); err != nil {
		return err
	}
	return q.doFor(ctx, r.ID, rule(callExtend, &call.Extend{Receipt: r.inner(), Duration: record.Millis(d)}))
}

func checkExtension(d time.Duration) error {
	if d < minLease || d > maxLease {
		return &InvalidError{"Extend duration", d, fmt.Sprint(minLease, " to ", maxLease)}
	}
	return nil
}

type completeOp struct {
	completion
	call.Complete
	ofRunner
}

// ofRunner is embedded in operations that end leases. Run does not wait for them: the runner gets
// the outcome in place of a caller, and owns the operation from then on.
type ofRunner struct {
	runner *runner // nil: a caller waits
	lease  *Lease
}

// leaseEnd is an operation that embeds ofRunner.
type leaseEnd interface {
	request
	of() *ofRunner
	recycle(q *Queue) // keeps the operation for reuse, if it is worth it
}

func (o *ofRunner) of() *ofRunner { return o }

// tell gives the outcome of an operation to its runner, and reports whether it has one.
func (o *ofRunner) tell(op leaseEnd, err error) bool {
	if o.runner == nil {
		return false
	}
	if err == nil {
		err = op.base().err
	}
	o.runner.settled(op, err)
	return true
}

func (q *Queue) completeOp(r Receipt) *completeOp {
	op, ok := q.pools.complete.Get().(*completeOp)
	if !ok {
		op = &completeOp{completion: newCompletion(callComplete)}
	}
	op.Receipt = r.inner()
	return op
}

func checkResult(result []byte, l *Limits) error {
	if len(result) > l.Payload {
		return &InvalidError{"Complete result", bytesOf(len(result)), atMost(l.Payload)}
	}
	return nil
}

// maxPooledResult is the size of the largest result buffer that is kept for reuse, in bytes.
const maxPooledResult = 16 << 10

// recycleComplete keeps an operation for reuse, as recycleProduce does.
func (q *Queue) recycleComplete(op *completeOp) {
	clear(op.Next)
	op.Complete, op.err, op.ofRunner = call.Complete{Result: op.Result[:0], Next: op.Next[:0]}, nil, ofRunner{}
	if cap(op.Result) > maxPooledResult {
		op.Result = nil
	}
	q.pools.complete.Put(op)
}

func (op *completeOp) recycle(q *Queue) { q.recycleComplete(op) }

func (op *completeOp) settle(err error) {
	if !op.tell(op, err) {
		op.completion.settle(err)
	}
}

func (op *completeOp) resolve(s *shard) {
	takeNotes(s, op.Receipt, op.Notes)
	v, err := s.rules.Complete(op.Receipt, op.Result, op.Retention, op.Next, op.StillRuns)
	s.conclude(op, &op.completion, v, err)
}

// takeNotes gives a lease that is about to end the last notes of its handler.
func takeNotes(s *shard, r engine.Receipt, n *record.Notes) {
	if n != nil {
		_ = s.rules.Leases.Note(r, n) // if the lease is lost, the verb says so
	}
}

type failOp struct {
	completion
	call.Fail
	ofRunner
}

func (op *failOp) recycle(*Queue) {}

func (op *completeOp) abandon(*shard) { op.Leave() }
func (op *failOp) abandon(*shard)     { op.Leave() }

func (op *failOp) settle(err error) {
	if !op.tell(op, err) {
		op.completion.settle(err)
	}
}

func (q *Queue) failed(ctx context.Context, r Receipt, f call.Fail, cause error) error {
	if cause != nil {
		f.Cause = guard.ErrorText(cause)
	}
	f.Receipt = r.inner()
	return q.doFor(ctx, r.ID, &failOp{completion: newCompletion(callFail), Fail: f})
}

func (op *failOp) resolve(s *shard) {
	takeNotes(s, op.Receipt, op.Notes)
	var v engine.Verdict
	var err error
	if op.How == engine.FailUnhandled {
		s.claims.Refused(op.Receipt)
	}
	if op.How == engine.FailSuspend {
		v, err = s.rules.Suspend(op.Receipt, op.Wait, op.Step.Number, &op.Step.Step)
	} else {
		v, err = s.rules.Fail(op.Receipt, op.How, op.Policy, op.Wait, op.Cause)
	}
	s.conclude(op, &op.completion, v, err)
}

// Lease is a claimed task, leased to the worker until Deadline.
type Lease struct {
	ID      ID      `json:",omitzero"`
	Receipt Receipt `json:",omitzero"` // the argument of the verbs that end or extend the lease
	Task
	Attempt   int       `json:",omitzero"` // how many attempts the task has had, this one included
	Deadline  time.Time `json:",omitzero"` // when it expires, unless extended, by the wall clock of the process that granted it
	LastError string    `json:",omitzero"` // of the last failed attempt
	// Metadata has the values of earlier attempts by [SetMetadata]. It must only be read.
	Metadata map[string]string `json:",omitempty"`
}

// Receipt identifies one lease of one task. With it a worker can finish the task, once, while the
// lease is in force. It is plain data: an application may send it to a remote worker as text.
type Receipt struct {
	ID    ID
	Token uint64 // larger with every lease of the task
}

// String returns the text form, ID.token.
func (r Receipt) String() string { return r.inner().String() }

func (r Receipt) MarshalText() ([]byte, error) { return []byte(r.String()), nil }

// UnmarshalText reads the text of String, and returns [ErrInvalid] for any other.
func (r *Receipt) UnmarshalText(b []byte) error {
	read, ok := keys.ParseReceipt(b)
	if !ok {
		return &InvalidError{"Receipt", string(b), "ID.token"}
	}
	*r = receiptOf(read)
	return nil
}

func receiptOf(r engine.Receipt) Receipt { return Receipt{ID: r.ID, Token: r.Token} }

func (r Receipt) inner() engine.Receipt { return engine.Receipt{ID: r.ID, Token: r.Token} }

// RetryOptions are the options of [Queue.Retry].
type RetryOptions struct {
	Err   error         // stored with the task; its text is LastError of the next [Lease]
	After time.Duration // until the task is ready again. 0: by its [Policy]; negative: at once.
}
