package codeq

import (
	"bytes"
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"codeq/internal/call"
	"codeq/internal/engine"
	"codeq/internal/record"
	"codeq/internal/workerpool"
)

// taskContext is the running task of a worker. It is the handler's context, or the parent of it,
// with the values of the context of Run.
type taskContext struct {
	workerpool.Context
	runner *runner
	lease  Lease
	rare   atomic.Pointer[rareParts] // nil: not used yet
	notes  atomic.Pointer[saidNotes] // nil: the handler has said nothing
	out    *output                   // nil: nothing
}

// rareParts are the parts of a taskContext that few handlers use.
type rareParts struct {
	logger atomic.Pointer[slog.Logger] // nil: not used yet
	steps  stepLog
}

// decode decodes the lease of the task. The steps of earlier runs are read when the handler comes
// to its first one.
func (c *taskContext) decode(g *engine.Grant) error {
	steps, err := decodeGrant(g, &c.lease)
	if steps > 0 {
		c.rareParts().steps.loaded = false
	}
	return err
}

// rareParts returns the parts, and makes them first if there are none.
func (c *taskContext) rareParts() *rareParts {
	if r := c.rare.Load(); r != nil {
		return r
	}
	c.rare.CompareAndSwap(nil, &rareParts{steps: stepLog{of: c, loaded: true}})
	return c.rare.Load()
}

// markEnded is set when the task of a handler that goes on is given back, and when the handler
// returns: the second one tells the shard. markOverdue: the end of its Timeout was reported.
const markEnded, markOverdue = 1, 2

// output is the result and the follow-ups of a handler, in memory that it does not share with the
// handler.
type output struct {
	result    []byte
	resultErr error // why the result cannot be stored
	next      batch
	nextErr   error // why the follow-ups cannot be stored
}

func (o *output) setResult(result []byte, l *Limits) {
	o.result, o.resultErr = nil, checkResult(result, l)
	if o.resultErr == nil {
		o.result = bytes.Clone(result)
	}
}

// followUp adds tasks, which inherit the trace context in trace.
func (o *output) followUp(tasks []Task, trace map[string]string, l *Limits) {
	if o.nextErr != nil {
		return
	}
	tasks = slices.Clone(tasks)
	for i := range tasks {
		tasks[i].Headers = record.InheritTrace(tasks[i].Headers, trace, l.Headers)
	}
	o.next.verb = "Complete"
	o.nextErr = o.next.add(tasks, l)
}

// fill moves the output to op. An error says why it can never be stored.
func (o *output) fill(op *completeOp) error {
	if o.resultErr != nil {
		return o.resultErr
	}
	if o.nextErr != nil {
		return o.nextErr
	}
	o.next.Finish()
	op.Result, op.Next = o.result, append(op.Next, o.next.Tasks...)
	return nil
}

func (c *taskContext) output() *output {
	if c.out == nil {
		c.out = new(output)
	}
	return c.out
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

// saidNotes are a handler's notes on its work: reported to the shard, and the last ones again with
// the outcome.
type saidNotes = workerpool.Latest[record.Notes]

// say changes the notes of the handler.
func (c *taskContext) say(change func(*record.Notes)) error {
	notes := c.notes.Load()
	if notes == nil {
		first := record.Notes{Metadata: c.lease.Metadata}
		c.notes.CompareAndSwap(nil, workerpool.NewLatest(first, reportEvery, c.runner.queue.opts.log, &c.runner.reports, c.report))
		notes = c.notes.Load()
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
	if notes := c.notes.Load(); notes != nil {
		notes.Close()
	}
}

// lastNotes returns the handler's last notes; nil: none.
func (c *taskContext) lastNotes() *record.Notes {
	if notes := c.notes.Load(); notes != nil {
		return notes.Get()
	}
	return nil
}

// ReportProgress says how far the handler of ctx, which is its context or derived from it, has
// come: done of total, in any unit, with a note for people. [Queue.Get] and the lists show the
// latest report in [TaskInfo.Progress], on all nodes. Reports cost no write: the shard keeps them
// in its memory, and gets one in a second at most, the first at once and the latest in the end.
// They are stored with the end of the attempt if the task stays: for another attempt, as a dead
// letter, or kept with its result. If the process, or the node that leads the shard, dies before,
// the reports of the attempt are lost, until the handler reports again.
//
// Outside of a handler, and after it has returned, ReportProgress does nothing. It is safe for
// concurrent use, and waits for nothing.
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

// SetMetadata keeps a value with the task of ctx, which is a handler's context or derived from one;
// "" removes it. [TaskInfo.Metadata] shows it, and the next attempt finds it in [Lease.Metadata]:
// so a handler can go on where the one before has stopped. It is stored with the end of the
// attempt, in the same commit as the outcome, and shown before that like a [ReportProgress]: if the
// process, or the node that leads the shard, dies before, the next attempt may find the value that
// the one before had found.
//
// Outside of a handler, and after it has returned, SetMetadata does nothing. It is safe for
// concurrent use, and waits for nothing.
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

var silence = slog.New(slog.DiscardHandler)

// LoggerFrom returns [Options.Logger] with attributes of the task of ctx, which is a handler's
// context or derived from one: "task" (its ID), "queue", "attempt", and "tenant" if it has one. It
// is made by the first call. The context of a [HandleBatch] handler has "queue" and "tasks" (their
// number). Outside of a handler LoggerFrom returns a logger that discards
// everything. LoggerFrom is safe for concurrent use, and the logger works after the handler has
// returned.
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
	rare.logger.Store(l)
	return l
}
