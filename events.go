package codeq

import (
	"cmp"
	"context"
	"fmt"
	"iter"
	"time"

	"codeq/internal/call"
	"codeq/internal/engine"
	"codeq/internal/entries"
	"codeq/internal/keys"
	"codeq/internal/localsocket"
)

// Event is one change of a task's state, which has been stored.
type Event struct {
	Kind   EventKind `json:",omitzero"`
	ID     ID        `json:",omitzero"`
	Queue  string    `json:",omitzero"`
	Tenant string    `json:",omitzero"`
	// Attempt is that after the change, like [TaskInfo.Attempts]: with the attempt that begins at
	// [EventClaimed], without the one given back at [EventReleased].
	Attempt   int       `json:",omitzero"`
	Time      time.Time `json:",omitzero"` // of the commit, by the wall clock, to the millisecond; the same for changes of one commit
	LastError string    `json:",omitzero"` // of the attempt, for [EventRetried] and [EventDeadLettered]: [Lease.LastError] of the next
	Progress  Progress  `json:",omitzero"` // the handler's report, for [EventProgress]
}

// EventKind is the kind of change of a task.
type EventKind uint8

// The kinds of events. There is none for a waiting task that becomes ready, is replaced or moved,
// for a dead letter that is redriven or purged, and for the end of a task's retention.
const (
	EventProduced     EventKind = iota + 1 // stored, ready or not
	EventClaimed                           // leased to a worker
	EventCompleted                         // done
	EventRetried                           // failed, and waits for another attempt
	EventReleased                          // given back; the attempt does not count
	EventDeadLettered                      // out of attempts, or given up
	EventCanceled                          // canceled
	EventExpired                           // lease expired: the attempt counts; or its process died: see [Queue.Run]
	// EventProgress: a handler has called [ReportProgress], which changes no state; at most one in
	// a second. In a cluster, the shards log reports while there are subscriptions to them.
	EventProgress
	EventSuspended // waits between two steps ([Sleep]); the attempt does not count
	EventUnhandled // waits for a Run with a handler of its kind ([HandleKind]); no attempt counts
	endOfKinds
)

// laterKinds is by how much the rules' number of EventProgress, and of each later kind, is larger.
const laterKinds = engine.EventProgress - engine.EventKind(EventProgress)

func (k EventKind) inner() engine.EventKind {
	if k >= EventProgress {
		return engine.EventKind(k) + laterKinds
	}
	return engine.EventKind(k)
}

func eventKindOf(k engine.EventKind) EventKind {
	if k >= engine.EventProgress {
		k -= laterKinds
	}
	return EventKind(k)
}

var eventKinds = newEnum[EventKind]("EventKind",
	"", "produced", "claimed", "completed", "retried", "released", "dead", "canceled", "expired", "progress", "suspended", "unhandled",
)

// String returns the kind in lower case; that of [EventDeadLettered] is "dead".
func (k EventKind) String() string { return eventKinds.Text(k) }

// MarshalText returns the text of String, and [ErrInvalid] for any other value.
func (k EventKind) MarshalText() ([]byte, error) { return eventKinds.Marshal(k) }

// UnmarshalText reads the text of MarshalText, and returns [ErrInvalid] for any other.
func (k *EventKind) UnmarshalText(b []byte) error { return eventKinds.Unmarshal(k, b) }

const kindLimit = "EventProduced, EventClaimed, EventCompleted, EventRetried, EventReleased, " +
	"EventDeadLettered, EventCanceled, EventExpired, EventProgress, EventSuspended, EventUnhandled"

const allKinds engine.KindSet = 1<<EventProgress - 2 | (1<<(endOfKinds-EventProgress)-1)<<engine.EventProgress

// SubscribeOptions are the options of [Queue.Subscribe]. A zero field means its documented default.
type SubscribeOptions struct {
	Queues []string    // the queues to collect events of; they need not exist yet. Default: all.
	Kinds  []EventKind // the kinds of events that are collected. Default: all.
	// Buffer is how many unread events are held, up to 1,048,576, of a hundred bytes and LastError
	// (at most 8 KiB). When it is full, each new event drops the oldest. Default: 1024.
	Buffer int
}

const (
	defaultEventBuffer = 1024
	maxEventBuffer     = 1 << 20
)

// Subscribe begins to collect events: every change by a call that begins after Subscribe has
// returned, for each shard in the order of the changes; between shards the order is not defined.
// When the call that makes a change returns, its event has reached the subscription.
//
// Events are no complete record: earlier ones are not reported, nor leases that expired while the
// queue was closed, if [Open] has taken the tasks back. A commit that fails is not reported,
// although the next Open may find its changes; its shard sends no further events. Use
// [Subscription.Close] in the end: the queue never waits for it, but its buffer takes memory.
//
// Errors: [ErrInvalid], [ErrClosed], and [ErrNotLeader] or [ErrUncertain] in a cluster.
func (q *Queue) Subscribe(opts SubscribeOptions) (_ *Subscription, err error) {
	defer public(&err)
	if q != nil && q.node != nil {
		return q.subscribe(q.node.ctx, opts)
	}
	return q.subscribe(context.Background(), opts)
}

func (q *Queue) subscribe(ctx context.Context, opts SubscribeOptions) (*Subscription, error) {
	if err := q.checkCall(context.Background()); err != nil {
		return nil, err
	}
	for _, name := range opts.Queues {
		if name == "" {
			return nil, &InvalidError{"SubscribeOptions.Queues", `""`, "names"}
		}
		if err := checkName("SubscribeOptions.Queues", name, q.opts.Limits.Name); err != nil {
			return nil, err
		}
	}
	kinds := allKinds
	if len(opts.Kinds) > 0 {
		kinds = 0
	}
	for _, k := range opts.Kinds {
		if !eventKinds.Valid(k) {
			return nil, &InvalidError{"SubscribeOptions.Kinds", k, kindLimit}
		}
		kinds |= 1 << k.inner()
	}
	if opts.Buffer < 0 || opts.Buffer > maxEventBuffer {
		return nil, &InvalidError{"SubscribeOptions.Buffer", opts.Buffer, fmt.Sprint("0 to ", maxEventBuffer)}
	}
	opts.Buffer = cmp.Or(opts.Buffer, defaultEventBuffer)
	if r, ok := q.backend.(*remote); ok {
		return r.subscribe(opts, kinds)
	}
	events, err := q.events.Subscribe(kinds, opts.Queues, opts.Buffer)
	if err != nil {
		return nil, err
	}
	if q.node != nil {
		if err := q.node.interests.Publish(ctx); err != nil {
			events.Close()
			return nil, err
		}
	}
	return &Subscription{events: events}, nil
}

// Subscription is a bounded buffer of events, made by [Queue.Subscribe]. Its methods are safe for
// concurrent use; each event goes to one of several readers. A nil or zero Subscription has ended.
type Subscription struct {
	events *entries.Subscription
	from   *localsocket.Source // nil: the events are of this process
}

// Next returns the oldest unread event, and waits for one if there is none. It returns [ErrClosed]
// after [Subscription.Close], or when the queue is closed and its last event has been read.
//
// Errors: [ErrInvalid], [ErrClosed], and that of ctx.
func (sub *Subscription) Next(ctx context.Context) (_ Event, err error) {
	defer public(&err)
	switch {
	case !sub.isMade():
		return Event{}, errNotSubscribed
	case ctx == nil:
		return Event{}, errNoContext
	}
	e, err := sub.events.Next(ctx)
	if err != nil {
		return Event{}, sub.from.EndOf(err)
	}
	return eventOf(&e), nil
}

func eventOf(e *engine.Event) Event {
	return Event{
		Kind: eventKindOf(e.Kind), ID: e.ID, Queue: e.Queue, Tenant: e.Tenant, Attempt: int(e.Attempt), Time: e.Time, LastError: e.LastError,
		Progress: progressOf(e.Progress),
	}
}

var errNotSubscribed = fmt.Errorf("%w: this Subscription was not made by Subscribe", ErrClosed)

func (sub *Subscription) isMade() bool { return sub != nil && sub.events != nil }

// All yields the results of Next, and ends after the first error.
//
// Errors: [ErrInvalid], [ErrClosed], and that of ctx.
func (sub *Subscription) All(ctx context.Context) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		for {
			e, err := sub.Next(ctx)
			if !yield(e, err) || err != nil {
				return
			}
		}
	}
}

// Lost returns how many events a full buffer has dropped, all of them from before the next one.
func (sub *Subscription) Lost() uint64 {
	if !sub.isMade() {
		return 0
	}
	return sub.events.Lost()
}

// Close ends the subscription and drops the unread events, at any moment, more than once too.
func (sub *Subscription) Close() {
	if sub.isMade() {
		sub.events.Close()
		sub.from.Stop()
	}
}

// In a cluster, the log entry of a change carries its broadcast (events for subscribers, outcomes
// for callers of Await, cancels for handlers) to all nodes, in the order of the log. Each shard
// stores the interest of a node: its leaders add the broadcasts of interest to their entries.

// publish delivers the broadcast of a log entry in the store, before callers learn of the entry.
func (r *replica) publish(b []byte) error {
	if len(b) == 0 {
		return nil
	}
	m, err := entries.ParseMessage(b)
	if err != nil {
		return err
	}
	r.node.queue.events.Publish(m.Events)
	r.awaits.Tell(m.Endings)
	for _, lease := range m.Canceled {
		r.node.queue.runs.CancelAny(lease)
	}
	return nil
}

func (n *node) storeInterests(ctx context.Context, all keys.InterestValue) error {
	for i := range n.queue.replicas {
		op := &interestOp{completion: newCompletion(callInterest), Interest: call.Interest{Node: n.Self().Node, Wants: all}}
		if err := n.queue.ask(ctx, i, op); err != nil {
			return err
		}
	}
	return nil
}

func (n *node) withdrawInterests() {
	n.background.Go(func() { contain(n.log, "withdrawal of interests", func() { n.interests.Withdraw(n.ctx) }, nil) })
}

// interestOp stores the interests of a node; none, if the node has gone.
type interestOp struct {
	completion
	call.Interest
}

func (op *interestOp) resolve(s *shard) {
	s.settleAfterCommit(op)
	if op.Gone {
		var member bool
		if member, op.err = s.replica.group.HasMember(op.Node); member || op.err != nil {
			return // it has been added again since
		}
	}
	s.rules.Mail.SetInterest(op.Node, op.Wants, op.Gone)
}
