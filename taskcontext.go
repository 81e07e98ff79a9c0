package codeq

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"codeq/internal/base"
	"codeq/internal/call"
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/workerpool"
)

// taskContext is a worker's running task: its handler's context or the parent, in that of Run.
type taskContext struct {
	workerpool.Context
	runner *runner
	lease  Lease
	rare   atomic.Pointer[rareParts] // nil: not used yet
}

// rareParts are the parts of a taskContext that many handlers do not use.
type rareParts struct {
	logger  atomic.Pointer[slog.Logger] // nil: not used yet
	notes   atomic.Pointer[saidNotes]   // nil: the handler has said nothing
	steps   atomic.Pointer[call.Steps]  // nil: it has not come to any
	earlier []record.LogLine            // of earlier attempts
	gives   bool                        // it has an output
	out     output
	cursors atomic.Pointer[workerpool.Stored[record.Cursors]] // nil: not used yet
}

// decode decodes the lease. The steps and cursors of earlier runs are read when one is needed.
func (c *taskContext) decode(g *engine.Grant) error {
	rest, err := decodeGrant(g, &c.lease)
	if rest.beside {
		c.steps().Unread = true
	}
	if len(rest.logs) > 0 {
		c.rareParts().earlier = rest.logs
	}
	if c.lease.Timeout == 0 {
		c.lease.Timeout = c.runner.policyOf(&c.lease).RunFor(g.Timeout)
	}
	return err
}

// rareParts returns the parts, and makes them first if there are none.
func (c *taskContext) rareParts() *rareParts {
	if r := c.rare.Load(); r != nil {
		return r
	}
	c.rare.CompareAndSwap(nil, new(rareParts))
	return c.rare.Load()
}

// steps returns the steps of the task, as its handler goes through them.
func (c *taskContext) steps() *call.Steps {
	r := c.rareParts()
	if s := r.steps.Load(); s != nil {
		return s
	}
	r.steps.CompareAndSwap(nil, &call.Steps{Host: (*stepHost)(c)})
	return r.steps.Load()
}

// markEnded is set when the task of a handler that goes on is given back, and when the handler
// returns: the second one tells the shard. markOverdue: the end of its Timeout was reported;
// markStuck: it was counted.
const markEnded, markOverdue, markStuck = 1, 2, 4

// output is the result and the follow-ups of a handler, in memory that the handler does not share.
type output struct {
	result     []byte
	resultErr  error // why the result cannot be stored
	next       batch
	nextFailed *failure // how the attempt ends as follow-ups are not stored
}

func (o *output) setResult(result []byte, l *Limits) {
	o.result, o.resultErr = nil, checkResult(result, l)
	if o.resultErr == nil {
		o.result = bytes.Clone(result)
	}
}

// followUp adds tasks of the handler of c, which inherit the trace context in trace.
func (o *output) followUp(c *taskContext, tasks []Task, trace map[string]string) {
	if o.nextFailed != nil {
		return
	}
	opts := c.runner.queue.opts
	tasks = slices.Clone(tasks)
	for i := range tasks {
		tasks[i].Headers = record.InheritTrace(tasks[i].Headers, trace, opts.Limits.Headers)
	}
	if err := o.addThrough(c, opts, tasks); err != nil {
		o.nextFailed = failureOf(err)
	}
}

// addThrough is add behind the middleware. A panic there concerns the task of c only.
func (o *output) addThrough(c *taskContext, opts *Options, tasks []Task) (err error) {
	if len(opts.Producing) == 0 {
		return o.add(tasks, &opts.Limits)
	}
	defer recovered(&err)
	_, err = opts.through(c, Producing{Tasks: tasks, FollowUp: true}, func(_ context.Context, tasks []Task) ([]ID, error) {
		return nil, o.add(tasks, &opts.Limits)
	})
	return err
}

// add adds all of the follow-ups or, with an error, none.
func (o *output) add(tasks []Task, l *Limits) error {
	before := o.next
	o.next.verb = "Complete"
	err := o.next.add(tasks, l)
	if err != nil {
		o.next, err = before, neverStored(err)
	}
	return err
}

// neverStored makes the verdict of an error of output that can never be stored; nil: there is none.
func neverStored(err error) error {
	if err == nil {
		return nil
	}
	return DeadLetter(base.Prefixed(translated(err)))
}

// fill moves the output to op, or returns how the attempt ends as it cannot be stored.
func (o *output) fill(op *completeOp) *failure {
	if o.resultErr != nil {
		return failureOf(neverStored(o.resultErr))
	}
	if o.nextFailed != nil {
		return o.nextFailed
	}
	o.next.Finish()
	op.Result, op.Next = o.result, append(op.Next, o.next.Tasks...)
	return nil
}

// output returns the output of the handler, to add to it.
func (c *taskContext) output() *output {
	r := c.rareParts()
	r.gives = true
	return &r.out
}

// given returns what the handler gives; nil: nothing.
func (c *taskContext) given() *output {
	if r := c.rare.Load(); r != nil && r.gives {
		return &r.out
	}
	return nil
}

// dropOutput forgets what the handler has given.
func (c *taskContext) dropOutput() {
	if r := c.rare.Load(); r != nil {
		r.gives, r.out = false, output{}
	}
}

// taskContextKey is the key under which a taskContext is its own value.
type taskContextKey struct{}

// Value returns the value in the context of Run, or what package context looks for in this one.
func (c *taskContext) Value(key any) any {
	if key == (taskContextKey{}) {
		return c
	}
	if v := c.runner.values.Value(key); v != nil {
		return v
	}
	return c.Context.Value(key)
}

// taskContextOf returns the taskContext behind ctx; nil: none.
func taskContextOf(ctx context.Context) *taskContext {
	if ctx == nil {
		return nil
	}
	c, _ := ctx.Value(taskContextKey{}).(*taskContext)
	return c
}

// LeaseFrom returns the task of ctx, which is a handler's context or derived from one; ok is false
// if it is neither. The lease must only be read: it belongs to the handler.
func LeaseFrom(ctx context.Context) (l *Lease, ok bool) {
	c := taskContextOf(ctx)
	if c == nil {
		return nil, false
	}
	return &c.lease, true
}

// reportEvery is the shortest time between two reports of a handler to its shard.
const reportEvery = time.Second

// saidNotes are a handler's notes: reported to the shard, and the last ones again with the outcome.
type saidNotes = workerpool.Latest[record.Notes]

// say changes the notes of the handler.
func (c *taskContext) say(change func(*record.Notes)) error {
	rare := c.rareParts()
	of := &rare.notes
	notes := of.Load()
	if notes == nil {
		first := record.Notes{Metadata: c.lease.Metadata, Logs: rare.earlier}
		of.CompareAndSwap(nil, workerpool.NewLatest(first, reportEvery, c.runner.queue.opts.log, &c.runner.reports, c.report))
		notes = of.Load()
	}
	return notes.Change(func(n record.Notes) (record.Notes, error) {
		if change(&n); n.Size() > record.MaxNotes {
			return n, &InvalidError{"progress and metadata", bytesOf(n.Size()), atMost(record.MaxNotes)}
		}
		return n, nil
	})
}

// report sends the handler's notes to the shard. If that fails, the outcome still carries them.
func (c *taskContext) report(n *record.Notes) {
	note := rule(callNote, &call.Note{Receipt: c.lease.Receipt.inner(), Notes: n})
	_, _ = c.runner.queue.do(c.runner.storing, c.runner.queue.shardOf(c.lease.ID), note)
}

// End ends the handler's context, and its reports.
func (c *taskContext) End(cause error) {
	c.Context.End(cause)
	if r := c.rare.Load(); r != nil {
		if notes := r.notes.Load(); notes != nil {
			notes.Close()
		}
		if cursors := r.cursors.Load(); cursors != nil {
			cursors.Close()
		}
	}
}

// lastNotes returns the handler's last notes; nil: none.
func (c *taskContext) lastNotes() *record.Notes {
	if r := c.rare.Load(); r != nil {
		if notes := r.notes.Load(); notes != nil {
			return notes.Get()
		}
	}
	return nil
}

// ReportProgress says how far the handler of ctx, its context or derived from it, has come: done of
// total, in any unit, with a note for people. [TaskInfo.Progress] is the latest report, on all
// nodes. Reports cost no write: the shard keeps them in memory, and gets one in a second at most,
// the first at once and the latest in the end. They are stored with the end of an attempt if the
// task stays. If the process, or the shard's leader, dies before, they are lost. It does nothing
// outside of a running handler, never waits, and is safe for concurrent use.
//
// Errors: [ErrInvalid] if the note and the metadata of the task have more than 4 KiB.
func ReportProgress(ctx context.Context, done, total int64, note string) (err error) {
	defer public(&err)
	c := taskContextOf(ctx)
	if c == nil {
		return nil
	}
	return c.say(func(n *record.Notes) {
		n.Done, n.Total, n.Text, n.At = done, total, strings.ToValidUTF8(note, "\ufffd"), wallMillis(c.runner.queue.opts)
	})
}

// SetMetadata keeps a value with the task of ctx, as [ReportProgress] keeps a report, with its
// rules; "" removes it. [TaskInfo.Metadata] shows it, and the next attempt finds it in
// [Lease.Metadata], to go on where this one has stopped. If the process, or the shard's leader,
// dies before the attempt's end, the next one may find the value that this one had found.
//
// Errors: [ErrInvalid] if the keys and values, and the note of the last report, have more than 4
// KiB, or the key or the value is not UTF-8.
func SetMetadata(ctx context.Context, key, value string) (err error) {
	defer public(&err)
	c := taskContextOf(ctx)
	if c == nil {
		return nil
	}
	if err := checkUTF8("SetMetadata", key, value); err != nil {
		return err
	}
	return c.say(func(n *record.Notes) { n.SetMetadata(key, value) })
}

// Cursor returns the last value of [SetCursor] under a name for the task of ctx, a handler's
// context or derived from one, in this run of the handler or an earlier one; zero if there is none.
// So a long loop goes on where the run before has stopped. The codec is as for a [Step]. Cursors
// are deleted, or kept ([Task.Retention]), with the task: see [TaskInfo.Cursors].
//
// Errors: that of the codec, [ErrInvalid], those of the first read ([ErrFormat], [ErrNotFound],
// [ErrUncertain], [ErrNotLeader], [ErrFailed], [ErrClosed]), and that of ctx.
func Cursor[T any](ctx context.Context, name string, opts ...PayloadOption) (_ T, err error) {
	defer public(&err)
	var value T
	enc, err := encodingOf(opts)
	if err != nil {
		return value, err
	}
	l, err := cursorsOf(ctx, name)
	if err != nil {
		return value, err
	}
	if err := enc.decode(bytes.Clone((*l.Get())[name]), &value); err != nil {
		return value, fmt.Errorf("cursor %q into %T: %w", name, value, err)
	}
	return value, nil
}

// SetCursor sets the value that [Cursor] returns under a name. It is stored once in a second at
// most, the first at once, and at the end of a run if the task goes on: unlike [SetMetadata], it
// survives the end of the process, except the last second. A task has at most 4 KiB of names and
// values; a name has 1 to 128 bytes of UTF-8. It is safe for concurrent use.
//
// Errors: those of Cursor, such as that of the codec and [ErrInvalid], and that of ctx.
func SetCursor[T any](ctx context.Context, name string, value T, opts ...PayloadOption) (err error) {
	defer public(&err)
	enc, err := encodingOf(opts)
	if err != nil {
		return err
	}
	l, err := cursorsOf(ctx, name)
	if err != nil {
		return err
	}
	b, err := enc.encode(value)
	if err != nil {
		return fmt.Errorf("cursor %q from %T: %w", name, value, err)
	}
	return l.Change(func(now record.Cursors) (record.Cursors, error) {
		next := maps.Clone(now)
		if next == nil {
			next = make(record.Cursors)
		}
		next[name] = bytes.Clone(b)
		if n := next.Size(); n > record.MaxCursorBytes {
			return now, &InvalidError{"cursors of a task", bytesOf(n), atMost(record.MaxCursorBytes)}
		}
		return next, nil
	})
}

// cursorsOf returns the cursors of the task of ctx, and reads those of earlier runs first.
func cursorsOf(ctx context.Context, name string) (*workerpool.Stored[record.Cursors], error) {
	c := taskContextOf(ctx)
	if c == nil {
		return nil, errNoHandlerContext
	}
	if err := call.CheckName("Cursor name", name); err != nil {
		return nil, translated(err)
	}
	rare := c.rareParts()
	if rare.cursors.Load() == nil {
		before, err := c.steps().Cursors(ctx)
		if err != nil {
			return nil, err
		}
		first := workerpool.NewStored(before, reportEvery, c.runner.queue.opts.log, &c.runner.reports, c.putCursors)
		rare.cursors.CompareAndSwap(nil, first)
	}
	return rare.cursors.Load(), nil
}

func (c *taskContext) putCursors(v *record.Cursors) error {
	r := c.runner
	op := &stepOp{completion: newCompletion(callStep), Step: call.Step{
		Receipt: c.lease.Receipt.inner(), RoomWait: call.RoomWait{Gone: r.storing.Done()}, Cursors: v.Append(nil),
	}}
	_, err := r.queue.do(r.storing, r.queue.shardOf(c.lease.ID), op)
	return err
}

// storeCursors stores what the handler has set last.
func (c *taskContext) storeCursors() {
	if rare := c.rare.Load(); rare != nil && rare.cursors.Load() != nil {
		rare.cursors.Load().Store()
	}
}

var silence = slog.New(slog.DiscardHandler)

// LoggerFrom returns [Options.Logger] with attributes of the task of ctx, a handler's context or
// derived from one: "task" (its ID), "queue", "attempt", and "tenant" and "kind" if it has them;
// for a [HandleBatch] handler "queue" and "tasks" (their number). Outside of a handler it discards
// everything. It is safe for concurrent use, also after the handler's return. [RunOptions].KeepLogs
// keeps its lines with the task.
func LoggerFrom(ctx context.Context) *slog.Logger {
	c := taskContextOf(ctx)
	if c == nil {
		return loggerOfBatch(ctx)
	}
	rare := c.rareParts()
	if l := rare.logger.Load(); l != nil {
		return l
	}
	l := c.runner.queue.opts.Logger.With(
		"task", c.lease.ID.String(), "queue", c.lease.Queue, "attempt", c.lease.Attempt)
	if c.lease.Tenant != "" {
		l = l.With("tenant", c.lease.Tenant)
	}
	if c.lease.Kind != "" {
		l = l.With("kind", c.lease.Kind)
	}
	if keep := c.runner.opts.KeepLogs; keep != nil && c.runner.queue.needsFormat(c.runner.queue.shardOf(c.lease.ID), "logs of tasks", keys.FormatOfLogs) == nil {
		l = slog.New(workerpool.KeepLog(l.Handler(), keep, c.log))
	}
	rare.logger.Store(l)
	return l
}

// log keeps a line with the task, until its handler has returned.
func (c *taskContext) log(level slog.Level, text string) {
	if c.IsOver() {
		return
	}
	line := record.LogLine{At: wallMillis(c.runner.queue.opts), Level: int(level), Attempt: uint32(c.lease.Attempt), Text: text}
	_ = c.say(func(n *record.Notes) { n.Log(line) }) // they are not in the Size of the notes
}
