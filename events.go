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
	// Attempt is the number of attempts after the change, like [TaskInfo.Attempts]: [EventClaimed]
	// includes the attempt that begins, [EventReleased] does not include the one given back.
	Attempt int `json:",omitzero"`
	// Time is the wall clock time of the commit, to the millisecond. Changes that were committed
	// together have the same Time.
	Time time.Time `json:",omitzero"`
	// LastError is the error of the attempt, for [EventRetried] and [EventDeadLettered]:
	// [Lease.LastError] of the next attempt. Otherwise it is empty.
	LastError string `json:",omitzero"`
	// Progress is the handler's report, for [EventProgress].
	Progress Progress `json:",omitzero"`
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
	// EventProgress: a handler has called [ReportProgress], which changes no state. Of several
	// reports in a second, only the latest has an event. In a cluster, reports are written to the
	// logs of the shards while there are subscriptions to them.
	EventProgress
	EventSuspended // waits between two steps ([Sleep]); the attempt does not count
	endOfKinds
)

// inner returns the kind of the rules.
func (k EventKind) inner() engine.EventKind {
	switch k {
	case EventProgress:
		return engine.EventProgress
	case EventSuspended:
		return engine.EventSuspended
	}
	return engine.EventKind(k)
}

// eventKindOf is the reverse of inner.
func eventKindOf(k engine.EventKind) EventKind {
	switch k {
	case engine.EventProgress:
		return EventProgress
	case engine.EventSuspended:
		return EventSuspended
	}
	return EventKind(k)
}

var eventKinds = newEnum[EventKind]("EventKind",
	"", "produced", "claimed", "completed", "retried", "released", "dead", "canceled", "expired", "progress", "suspended",
)

// String returns the kind in lower case; that of [EventDeadLettered] is "dead".
func (k EventKind) String() string { return eventKinds.Text(k) }

// MarshalText returns the text of String, and [ErrInvalid] for any other value.
func (k EventKind) MarshalText() ([]byte, error) { return eventKinds.Marshal(k) }

// UnmarshalText reads the text of MarshalText, and returns [ErrInvalid] for any other.
func (k *EventKind) UnmarshalText(b []byte) error { return eventKinds.Unmarshal(k, b) }

const kindLimit = "EventProduced, EventClaimed, EventCompleted, EventRetried, EventReleased, " +
	"EventDeadLettered, EventCanceled, EventExpired, EventProgress, EventSuspended"

const allKinds engine.KindSet = 1<<EventProgress - 2 | 1<<engine.EventProgress | 1<<engine.EventSuspended

// SubscribeOptions are the options of [Queue.Subscribe]. A zero field means its documented default.
type SubscribeOptions struct {
	// Queues are the queues to collect events of; they need not exist yet. Default: all.
	Queues []string
	// Kinds are the kinds of events that are collected. Default: all.
	Kinds []EventKind
	// Buffer is how many unread events are held; when it is full, each new event drops the oldest.
	// An event takes about a hundred bytes plus LastError, which is at most 8 KiB. Up to 1,048,576.
	// Default: 1024.
	Buffer int
}

const (
	defaultEventBuffer = 1024
	maxEventBuffer     = 1 << 20
)

// Subscribe begins to collect events. It reports every change by a call that begins after Subscribe
// has returned, for each shard in the order of the changes; between shards the order is not
// defined. When the call that makes a change returns, its event has reached the subscription.
//
// Events report changes, but are no complete record of them. Earlier changes are not reported;
// among them are leases that expired while the queue was closed, if [Open] has already taken the
// tasks back. A commit that fails is not reported, although the next Open may find its changes
// stored; its shard sends no further events, and the subscription goes on with those of the others.
//
// Call [Subscription.Close] when you do not read it any more; until then it uses the memory of its
// buffer. The queue never waits for it.
//
// Errors: [ErrInvalid], [ErrClosed], and [ErrNotLeader] or [ErrUncertain] in a cluster.
func (q *Queue) Subscribe(opts SubscribeOptions) (_ *Subscription, err error) {
	defer public(&err)
	if q != nil && q.node != nil {
		return q.subscribe(q.node.ctx, opts)
	}
	return q.subscribe(context.Background(), opts)
}

// subscribe is Subscribe, which gives up when ctx ends.
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
		if err := q.node.publishInterests(ctx); err != nil {
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

// eventOf converts an event of the rules.
func eventOf(e *engine.Event) Event {
	return Event{
		Kind: eventKindOf(e.Kind), ID: e.ID, Queue: e.Queue, Tenant: e.Tenant, Attempt: int(e.Attempt), Time: e.Time, LastError: e.LastError,
		Progress: progressOf(e.Progress),
	}
}

var errNotSubscribed = fmt.Errorf("%w: this Subscription was not made by Subscribe", ErrClosed)

// isMade reports whether Subscribe has made the subscription.
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

// Lost returns how many events have been dropped because the buffer was full. All of them came
// before the event that Next returns next.
func (sub *Subscription) Lost() uint64 {
	if !sub.isMade() {
		return 0
	}
	return sub.events.Lost()
}

// Close ends the subscription and drops the unread events. It may be called more than once, and at
// any moment.
func (sub *Subscription) Close() {
	if sub.isMade() {
		sub.events.Close()
		sub.from.Stop()
	}
}

// In a cluster, the log entry of a change also carries its broadcast (events for subscribers,
// outcomes for callers of Await, cancels for handlers), so that all nodes receive it in the order
// of the log, whichever node led the shard then and leads it now. The interest of a node is stored
// in each shard: from then on the leader adds the broadcasts of interest to its entries, and so
// does the next leader. While no node is interested, entries have no broadcast.

// publish delivers the broadcast of a log entry on this node: after the entry is in the store, and
// before any caller learns that it has been applied.
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

// want asks all shards to tell this node of something, from the next change on, until it is
// released.
func (n *node) want(ctx context.Context, kinds engine.KindSet) error {
	return n.interests.Keep(kinds, func() error { return n.publishInterests(ctx) })
}

// publishInterests stores this node's interests in all shards: those of its calls, and those of its
// subscriptions.
func (n *node) publishInterests(ctx context.Context) error {
	return n.interests.Set(ctx, n.queue.events.Wanted, func(all keys.InterestValue) error {
		for i := range n.queue.replicas {
			op := &interestOp{completion: newCompletion(callInterest), Interest: call.Interest{Node: n.Self().Node, Wants: all}}
			if err := n.queue.ask(ctx, i, op); err != nil {
				return err
			}
		}
		return nil
	})
}

// withdrawInterests withdraws the interests that the node no longer has.
func (n *node) withdrawInterests() {
	withdraw := func() { n.interests.Withdraw(n.ctx, func() error { return n.publishInterests(n.ctx) }) }
	n.background.Go(func() { contain(n.log, "withdrawal of interests", withdraw, nil) })
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
