package codeq

import (
	"context"
	"fmt"
	"strconv"
	"time"
	"unicode/utf8"

	"codeq/internal/call"
	"codeq/internal/engine"
	"codeq/internal/keys"
)

// taskKind is a kind of the tasks of a queue.
type taskKind struct{ queue, kind string }

// HandleKind registers the handler of the tasks of a queue with one [Task.Kind]. So several
// handlers share a queue, each with its own type of payload, and a [Task.Group] spans them:
//
//	codeq.HandleKind(mux, "orders", "charge", charge)
//	codeq.HandleKind(mux, "orders", "ship", ship) // after the charge of the same order
//
// Everything else is as with [Handle]. That or [HandleBatch] may register a handler of the same
// queue, for its tasks without a kind.
//
// Claims take tasks of all kinds, in the order of the queue. A task for which a call of [Queue.Run]
// has no handler is [Scheduled] again: after a second at first, then after as long as it has waited
// in all, up to a minute. No attempt counts, and it keeps its turn in its group and its idempotency
// key, until a call that knows its kind claims it, as after a deployment. In a cluster, such tasks
// go to waiting calls of the nodes in turn. [RunOptions].UnhandledFor bounds that time: it should
// be minutes. The log names each such kind once for each call, and [Totals].Unhandled counts. Each
// time costs a claim and a commit: see that every kind has a handler.
func HandleKind[T any](m *Mux, queue, kind string, h func(context.Context, *Job[T]) error, opts ...HandlerOption) {
	k := taskKind{queue, kind}
	of := fmt.Sprintf("%q, kind %q", queue, kind)
	if _, ok := m.kinds[k]; ok {
		m.refuse(&InvalidError{"HandleKind queue", of, "one handler for each kind"})
	}
	if kind == "" || !utf8.ValidString(kind) {
		m.refuse(&InvalidError{"HandleKind kind of queue " + strconv.Quote(queue), strconv.Quote(kind), "a name in UTF-8"})
	}
	enc := m.encoding("HandleKind", k, of, h == nil, opts)
	if m.kinds == nil {
		m.kinds = make(map[taskKind]handler)
	}
	m.kinds[k] = handlerOf(enc, h)
}

// unhandled returns the verdict on a task without a handler of its kind.
func (r *runner) unhandled(l *Lease) error {
	if k := (taskKind{l.Queue, l.Kind}); !r.unhandledKinds.Has(k) {
		r.unhandledKinds.Add(k)
		r.queue.opts.log.Warn("no handler for a kind of tasks: they wait", "queue", l.Queue, "kind", l.Kind, "task", l.ID, "worker", r.opts.Name)
	}
	if err := r.queue.needsFormat(r.queue.shardOf(l.ID), "kinds of tasks", keys.FormatOfKinds); err != nil {
		return Snooze(time.Second)
	}
	return &call.Wish{How: engine.FailUnhandled, After: r.opts.UnhandledFor, Err: fmt.Errorf("%w: kind %q of queue %q", ErrNoHandler, l.Kind, l.Queue)}
}
