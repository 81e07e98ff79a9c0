package codeq

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"codeq/internal/base"
	"codeq/internal/call"
	"codeq/internal/cluster"
	"codeq/internal/engine"
	"codeq/internal/guard"
	"codeq/internal/record"
	"codeq/internal/wire"
)

// Completion is the completion of one task of a [Queue.CompleteBatch]; see [Queue.Complete].
type Completion struct {
	Receipt Receipt
	Result  []byte
	Next    []Task
}

// Failure is the end of one failed attempt of a [Queue.RetryBatch] or [Queue.DeadLetterBatch].
type Failure struct {
	Receipt Receipt
	Err     error         // stored with the task; nil: nothing is
	After   time.Duration // [RetryOptions].After; 0 for a dead letter
}

// BatchError has the error of each element of a batch; [errors.Is] and [errors.As] find them.
type BatchError struct {
	Errors []error // by the index of the element; nil: it has gone well
}

const shownErrors = 3

func (e *BatchError) Error() string {
	var text strings.Builder
	failed := 0
	for i, err := range e.Errors {
		if err == nil {
			continue
		}
		if failed++; failed <= shownErrors {
			fmt.Fprintf(&text, "; %d: %s", i, strings.TrimPrefix(err.Error(), "codeq: "))
		}
	}
	if failed > shownErrors {
		text.WriteString("; ...")
	}
	return fmt.Sprintf("codeq: %d of a batch of %d%s", failed, len(e.Errors), text.String())
}

// Unwrap returns the errors, without the nil ones.
func (e *BatchError) Unwrap() []error {
	return slices.DeleteFunc(slices.Clone(e.Errors), func(err error) bool { return err == nil })
}

// CompleteBatch finishes tasks, each as [Queue.Complete] does, in one call, and one commit a shard
// (several if the shard is busy and the batch large). It is not atomic: if some completions fail,
// the others do not, and the error is a [*BatchError]. Of two with the same receipt the second one
// is [ErrLeaseLost]. Another error, that of Complete, refuses a batch before anything is written:
// of more than [Limits.Batch] completions or follow-ups, of more than [Limits.BatchBytes] of
// results and payloads, or with a completion that is invalid by itself.
//
// Errors: [ErrNotFound] ([RefuseOnMissing]), those of changes (see [Queue]) but ErrUncertain, that
// of ctx, and a [*BatchError] of these, [ErrLeaseLost] and [ErrUncertain].
func (q *Queue) CompleteBatch(ctx context.Context, completions []Completion) (err error) {
	defer public(&err)
	if err = q.checkCall(ctx); err != nil {
		return err
	}
	b, err := q.newLeaseCalls("CompleteBatch", len(completions))
	if err != nil {
		return err
	}
	for i := range completions {
		c := &completions[i]
		op := &completeOp{completion: completion{kind: callComplete}}
		op.Receipt, op.StillRuns, op.Result = c.Receipt.inner(), true, slices.Clone(c.Result)
		b.bytes += len(c.Result)
		if err := checkResult(c.Result, &q.opts.Limits); err != nil {
			return b.refused(i, err)
		}
		if b.next += len(c.Next); b.next > q.opts.Limits.Batch {
			return &InvalidError{b.verb + " follow-ups", fmt.Sprint(b.next, " and more"), atMostTasks(q.opts.Limits.Batch)}
		}
		for t := range c.Next {
			b.bytes += len(c.Next[t].Payload)
		}
		if len(c.Next) > 0 {
			if err := q.prepareNext(ctx, op, c.Next, q.shardOf(c.Receipt.ID)); err != nil {
				return b.refused(i, translated(err))
			}
		}
		b.add(c.Receipt, op)
	}
	return q.doLeases(q.backend.begin(ctx), b) // the time of the call begins after the middleware
}

// RetryBatch is [Queue.Retry] for many, with outcomes as of [Queue.CompleteBatch]. The texts of the
// errors count for [Limits.BatchBytes].
//
// Errors: those of [Queue.CompleteBatch] but [ErrNotFound], and that of ctx.
func (q *Queue) RetryBatch(ctx context.Context, failures []Failure) (err error) {
	defer public(&err)
	return q.failBatch(ctx, "RetryBatch", failures, func(f *Failure) (call.Fail, error) {
		return retryOf(f.After), nil
	})
}

// DeadLetterBatch is [Queue.DeadLetter] for many, as [Queue.RetryBatch] is [Queue.Retry].
//
// Errors: those of [Queue.CompleteBatch] but [ErrNotFound], and that of ctx.
func (q *Queue) DeadLetterBatch(ctx context.Context, failures []Failure) (err error) {
	defer public(&err)
	return q.failBatch(ctx, "DeadLetterBatch", failures, func(f *Failure) (call.Fail, error) {
		if f.After != 0 {
			return call.Fail{}, &InvalidError{"Failure.After", f.After, "0 for a dead letter"}
		}
		return call.Fail{How: engine.FailDead}, nil
	})
}

// ReleaseBatch is [Queue.Release] for many, with outcomes as of [Queue.CompleteBatch].
//
// Errors: those of [Queue.CompleteBatch] but [ErrNotFound], and that of ctx.
func (q *Queue) ReleaseBatch(ctx context.Context, receipts []Receipt, after time.Duration) (err error) {
	defer public(&err)
	if err := checkRelease(after); err != nil {
		return err
	}
	failures := make([]Failure, len(receipts))
	for i, r := range receipts {
		failures[i].Receipt = r
	}
	return q.failBatch(ctx, "ReleaseBatch", failures, func(*Failure) (call.Fail, error) {
		return call.Fail{How: engine.FailRelease, Wait: int64(record.Millis(after))}, nil
	})
}

// ExtendBatch is [Queue.Extend] for many, with outcomes as of [Queue.CompleteBatch].
//
// Errors: those of [Queue.CompleteBatch] but [ErrNotFound], and that of ctx.
func (q *Queue) ExtendBatch(ctx context.Context, receipts []Receipt, d time.Duration) (err error) {
	defer public(&err)
	if ctx, err = q.begin(ctx); err != nil {
		return err
	}
	if err := checkExtension(d); err != nil {
		return err
	}
	b, err := q.newLeaseCalls("ExtendBatch", len(receipts))
	if err != nil {
		return err
	}
	for _, r := range receipts {
		b.add(r, rule(callExtend, &call.Extend{Receipt: r.inner(), Duration: record.Millis(d)}))
	}
	return q.doLeases(ctx, b)
}

func (q *Queue) failBatch(ctx context.Context, verb string, failures []Failure, of func(*Failure) (call.Fail, error)) (err error) {
	if ctx, err = q.begin(ctx); err != nil {
		return err
	}
	b, err := q.newLeaseCalls(verb, len(failures))
	if err != nil {
		return err
	}
	for i := range failures {
		f := &failures[i]
		op := &failOp{completion: completion{kind: callFail}}
		if op.Fail, err = of(f); err != nil {
			return b.refused(i, err)
		}
		op.How |= engine.StillRuns
		if op.Receipt = f.Receipt.inner(); f.Err != nil {
			op.Cause = record.Clip(guard.ErrorText(f.Err), record.MaxCause)
			b.bytes += len(op.Cause)
		}
		b.add(f.Receipt, op)
	}
	return q.doLeases(ctx, b)
}

type leaseCalls struct {
	verb  string
	parts []*leaseOps // by shard; nil: none
	at    [][]int     // likewise, the indices of the operations in the batch
	n     int         // operations
	next  int         // follow-ups
	bytes int         // of results, payloads and the texts of errors
}

func (q *Queue) newLeaseCalls(verb string, n int) (*leaseCalls, error) {
	if n > q.opts.Limits.Batch {
		return nil, &InvalidError{verb + " elements", n, atMostTasks(q.opts.Limits.Batch)}
	}
	return &leaseCalls{verb: verb, parts: make([]*leaseOps, len(q.replicas)), at: make([][]int, len(q.replicas))}, nil
}

func (b *leaseCalls) refused(i int, err error) error {
	return fmt.Errorf("%s: element %d: %w", b.verb, i, err)
}

func (b *leaseCalls) add(r Receipt, op request) {
	shard := r.ID.shard(len(b.parts))
	if b.parts[shard] == nil {
		b.parts[shard] = &leaseOps{completion: newCompletion(callLeases)}
	}
	b.parts[shard].ops = append(b.parts[shard].ops, op)
	b.at[shard] = append(b.at[shard], b.n)
	b.n++
}

// doLeases carries out the operations, in each shard in their order.
func (q *Queue) doLeases(ctx context.Context, b *leaseCalls) error {
	if b.bytes > q.opts.Limits.BatchBytes {
		return &InvalidError{b.verb + " bytes", bytesOf(b.bytes), atMost(q.opts.Limits.BatchBytes)}
	}
	errs := make([]error, b.n)
	failed := q.inParallel(b.verb, len(b.parts), func(shard int) error {
		if b.parts[shard] != nil {
			q.doLeasesOf(ctx, shard, b.parts[shard], func(i int, err error) { errs[b.at[shard][i]] = base.Prefixed(err) })
		}
		return nil
	})
	if failed != nil || slices.ContainsFunc(errs, func(err error) bool { return err != nil }) {
		return errors.Join(&BatchError{errs}, failed)
	}
	return nil
}

// doLeasesOf carries out the operations of a shard. failed is called for each that fails.
func (q *Queue) doLeasesOf(ctx context.Context, shard int, b *leaseOps, failed func(i int, err error)) {
	_, whole := q.do(ctx, shard, b)
	for i, op := range b.ops {
		err := whole
		if err == nil {
			err = op.base().err
		}
		if c, ok := op.(*completeOp); ok && err == nil {
			err = q.awaitTaken(ctx, call.BatchHops(c.Next, shard, len(q.replicas), true))
		}
		if err != nil {
			failed(i, err)
		}
	}
}

// leaseOps is operations that end or extend leases of a shard. They are decided one after the
// other, in one group, unless it is full: then those of other callers come between.
type leaseOps struct {
	completion
	ops []request // completions, failures and extensions; each keeps its outcome

	// Of the owner.
	next   int    // index of the next operation to decide
	left   int    // that have no outcome yet
	judged uint64 // round.Judged for all of them
}

// resolve puts the operations behind those of other callers. REQUIRES: the owner has just taken the
// batch from the inbox: it is never put off, as it writes nothing itself.
func (b *leaseOps) resolve(s *shard) {
	b.next, b.left, b.judged = 0, len(b.ops), s.rules.Judged // an earlier owner may have decided some
	for _, op := range b.ops {
		op.base().reply = func(err error) { b.answer(op, err) }
	}
	s.undecided.batches = append(s.undecided.batches, b)
}

// answer keeps the outcome of an operation. The last one settles the whole.
func (b *leaseOps) answer(op request, err error) {
	op.base().err = err
	if b.left--; b.left == 0 {
		b.settle(call.WholeFailure(len(b.ops), func(i int) error { return b.ops[i].base().err }))
	}
}

func (b *leaseOps) weigh(t *cluster.Tries) {
	for _, op := range b.ops {
		c := op.base()
		c.err = t.Outcome(c.err, op.verb().is(endsLease))
	}
}

func (b *leaseOps) Append(dst []byte) []byte {
	dst = wire.AppendUint(dst, uint64(len(b.ops)))
	for _, op := range b.ops {
		dst = wire.AppendBytes(append(dst, byte(op.base().kind)), op.Append(nil))
	}
	return dst
}

func (b *leaseOps) Read(r *wire.Reader) {
	n := r.Count(2)
	if n == 0 {
		r.Fail()
	}
	for ; n > 0; n-- {
		var op request
		if kind := callKind(r.Byte()); kind == callComplete || kind == callFail || kind == callExtend {
			op = verbs[kind].new("")
		}
		if op == nil || parse(r.Bytes(), op.Read) != nil {
			r.Fail()
			return
		}
		b.ops = append(b.ops, op)
	}
}

func (b *leaseOps) AppendReply(dst []byte) []byte {
	for _, op := range b.ops {
		dst = call.AppendOutcome(dst, op.base().err, encodeError)
	}
	return dst
}

func (b *leaseOps) ReadReply(r *wire.Reader) {
	for _, op := range b.ops {
		op.base().err = call.ReadOutcome(r, decodeError)
	}
}

func (b *leaseOps) Again() {
	for _, op := range b.ops {
		tryAgain(op)
	}
}
