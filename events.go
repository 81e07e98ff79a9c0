package codeq

import (
	"context"
	"fmt"
	"iter"
	"sync"
	"sync/atomic"
	"time"

	"codeq/internal/base"
	"codeq/internal/engine"
)

// Event is one change of a task's state, which has been stored.
type Event struct {
	Kind   EventKind `json:",omitzero"`
	ID     ID        `json:",omitzero"`
	Queue  string    `json:",omitzero"`
	Tenant string    `json:",omitzero"`
	// Attempt is the number of attempts after the change, like TaskInfo.Attempts: EventClaimed
	// includes the attempt that begins, EventReleased does not include the one given back.
	Attempt int `json:",omitzero"`
	// Time is the wall clock time of the commit, to the millisecond. Changes that were committed
	// together have the same Time.
	Time time.Time `json:",omitzero"`
	// LastError is the error of the attempt, for EventRetried and EventDeadLettered:
	// Lease.LastError of the next attempt. Otherwise it is empty.
	LastError string `json:",omitzero"`
}

// EventKind says what has happened to a task.
type EventKind uint8

// The kinds of events. There is none for a waiting task that becomes ready, is replaced or moved,
// for a dead letter that is redriven or purged, and for an ended task whose retention has passed.
const (
	EventProduced     EventKind = iota + 1 // stored, ready or not
	EventClaimed                           // leased to a worker
	EventCompleted                         // done
	EventRetried                           // failed, and waits for another attempt
	EventReleased                          // given back; the attempt does not count
	EventDeadLettered                      // out of attempts, or given up
	EventCanceled                          // canceled
	EventExpired                           // lease expired, the attempt counts; after the last one, EventDeadLettered
	endOfKinds
)

var eventKinds = enum[EventKind]{"EventKind", []string{
	"", "produced", "claimed", "completed", "retried", "released", "dead", "canceled", "expired",
}}

// String returns the kind in lower case; that of EventDeadLettered is "dead".
func (k EventKind) String() string { return eventKinds.text(k) }

// MarshalText returns the same as String, and an error that matches [ErrInvalid] for an unknown
// kind.
func (k EventKind) MarshalText() ([]byte, error) { return eventKinds.marshal(k) }

// UnmarshalText reads what MarshalText returns, and returns an error that matches [ErrInvalid] for
// anything else.
func (k *EventKind) UnmarshalText(b []byte) error { return eventKinds.unmarshal(k, b) }

const kindLimit = "EventProduced, EventClaimed, EventCompleted, EventRetried, EventReleased, " +
	"EventDeadLettered, EventCanceled, EventExpired"

func (k EventKind) set() engine.KindSet { return 1 << k }

const allKinds engine.KindSet = 1<<endOfKinds - 2

// SubscribeOptions are the options of Subscribe. A zero field means its documented default.
type SubscribeOptions struct {
	// Queues are the queues whose events are collected; they need not exist yet. Default: all.
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
// among them are leases that expired while the queue was closed, if Open has already taken the
// tasks back. A commit that fails is not reported, although the next Open may find its changes
// stored; its shard sends no further events, and the subscription goes on with those of the others.
//
// Subscribe returns an error that matches [ErrInvalid] when an option is out of bounds, and
// [ErrClosed] when the queue is closed. Close the subscription when you do not read it any more;
// until then it uses the memory of its buffer. The queue never waits for it.
//
// Errors: [ErrInvalid], [ErrClosed], and [ErrNotLeader] or [ErrUncertain] in a cluster.
func (q *Queue) Subscribe(opts SubscribeOptions) (_ *Subscription, err error) {
	defer public(&err)
	if err := q.checkCall(context.Background()); err != nil {
		return nil, err
	}
	sub := &Subscription{hub: &q.events, kinds: allKinds}
	if len(opts.Queues) > 0 {
		sub.queues = make(map[string]bool, len(opts.Queues))
	}
	for _, name := range opts.Queues {
		if name == "" {
			return nil, &InvalidError{"SubscribeOptions.Queues", `""`, "names"}
		}
		if err := checkName("SubscribeOptions.Queues", name, q.opts.Limits.Name); err != nil {
			return nil, err
		}
		sub.queues[name] = true
	}
	if len(opts.Kinds) > 0 {
		sub.kinds = 0
	}
	for _, k := range opts.Kinds {
		if !eventKinds.valid(k) {
			return nil, &InvalidError{"SubscribeOptions.Kinds", k, kindLimit}
		}
		sub.kinds |= k.set()
	}
	if opts.Buffer < 0 || opts.Buffer > maxEventBuffer {
		return nil, &InvalidError{"SubscribeOptions.Buffer", opts.Buffer, fmt.Sprint("0 to ", maxEventBuffer)}
	}
	if opts.Buffer == 0 {
		opts.Buffer = defaultEventBuffer
	}
	sub.ring = make([]Event, opts.Buffer)
	if err := q.events.add(sub); err != nil {
		return nil, err
	}
	if q.node != nil {
		if err := q.node.publishInterests(q.node.ctx, 0); err != nil {
			sub.Close()
			return nil, err
		}
	}
	return sub, nil
}

// Subscription is a bounded buffer of events, made by Subscribe. Its methods are safe for
// concurrent use; each event goes to one of several readers. A nil or zero Subscription has ended.
type Subscription struct {
	hub    *eventHub
	queues map[string]bool // nil: all
	kinds  engine.KindSet

	mu      sync.Mutex    // guards what follows; may be locked while the hub's is held, not the reverse
	ring    []Event       // of fixed length; nil after Close
	first   int           // index of the oldest event
	held    int           // number of events; they follow first, around the end of ring
	lost    uint64        // number of events dropped from a full ring
	ended   bool          // nothing is added any more
	changed chan struct{} // non-nil while readers wait; closed when there is an event or the end
}

// Next returns the oldest unread event, and waits for one if there is none. It returns the error of
// ctx when ctx ends, and [ErrClosed] after Close, or when the queue is closed and its last event
// has been read.
func (sub *Subscription) Next(ctx context.Context) (_ Event, err error) {
	defer public(&err)
	switch {
	case !sub.isMade():
		return Event{}, errNotSubscribed
	case ctx == nil:
		return Event{}, errNoContext
	}
	for {
		if ctx.Err() != nil {
			return Event{}, base.EndOf(ctx)
		}
		e, ok, changed := sub.take()
		switch {
		case ok:
			return e, nil
		case changed == nil:
			return Event{}, ErrClosed
		}
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
}

var errNotSubscribed = fmt.Errorf("%w: this Subscription was not made by Subscribe", ErrClosed)

// isMade reports whether Subscribe has made the subscription.
func (sub *Subscription) isMade() bool { return sub != nil && sub.hub != nil }

// take removes the oldest event. If there is none, changed is closed when there is one, and nil if
// there will be none.
func (sub *Subscription) take() (e Event, ok bool, changed <-chan struct{}) {
	sub.mu.Lock()
	defer sub.mu.Unlock()
	if sub.held > 0 {
		e = sub.ring[sub.first]
		sub.ring[sub.first] = Event{}
		sub.first = (sub.first + 1) % len(sub.ring)
		sub.held--
		return e, true, nil
	}
	if sub.ended {
		return Event{}, false, nil
	}
	if sub.changed == nil {
		sub.changed = make(chan struct{})
	}
	return Event{}, false, sub.changed
}

// All yields the results of Next, and ends after the first error: that of ctx, or [ErrClosed].
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
	sub.mu.Lock()
	defer sub.mu.Unlock()
	return sub.lost
}

// Close ends the subscription and drops the unread events. It may be called more than once, and at
// any moment.
func (sub *Subscription) Close() {
	if !sub.isMade() {
		return
	}
	sub.hub.remove(sub)
	sub.mu.Lock()
	defer sub.mu.Unlock()
	sub.ring, sub.held = nil, 0
	sub.end()
}

// end says that no event is added any more. REQUIRES: mu is held.
func (sub *Subscription) end() {
	sub.ended = true
	sub.wake()
}

// wake wakes the waiting readers. REQUIRES: mu is held.
func (sub *Subscription) wake() {
	if sub.changed != nil {
		close(sub.changed)
		sub.changed = nil
	}
}

// offer adds those of the events that the options select.
func (sub *Subscription) offer(events []Event) {
	sub.mu.Lock()
	defer sub.mu.Unlock()
	if sub.ended {
		return
	}
	for i := range events {
		e := &events[i]
		if sub.kinds&e.Kind.set() == 0 || sub.queues != nil && !sub.queues[e.Queue] {
			continue
		}
		if sub.held == len(sub.ring) {
			sub.first = (sub.first + 1) % len(sub.ring)
			sub.held--
			sub.lost++
		}
		sub.ring[(sub.first+sub.held)%len(sub.ring)] = *e
		sub.held++
	}
	if sub.held > 0 {
		sub.wake()
	}
}

// eventHub holds the subscriptions of a queue. Without one, wanted is empty, and a change of state
// only reads it.
type eventHub struct {
	wanted atomic.Uint32                   // KindSet of the kinds that any subscription wants
	subs   atomic.Pointer[[]*Subscription] // never changed in place; nil: none

	mu     sync.Mutex // held to change wanted, subs and closed
	closed bool
}

func (h *eventHub) add(sub *Subscription) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return ErrClosed
	}
	h.replace(append(h.all(), sub))
	return nil
}

func (h *eventHub) remove(sub *Subscription) {
	h.mu.Lock()
	defer h.mu.Unlock()
	var rest []*Subscription
	for _, other := range h.all() {
		if other != sub {
			rest = append(rest, other)
		}
	}
	h.replace(rest)
}

// close ends all subscriptions; the events in them can still be read. REQUIRES: the owners of the
// shards have ended.
func (h *eventHub) close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.closed = true
	for _, sub := range h.all() {
		sub.mu.Lock()
		sub.end()
		sub.mu.Unlock()
	}
	h.replace(nil)
}

// all returns a slice without spare capacity, so that append copies it.
func (h *eventHub) all() []*Subscription {
	if p := h.subs.Load(); p != nil {
		return (*p)[:len(*p):len(*p)]
	}
	return nil
}

// replace sets the subscriptions. REQUIRES: mu is held.
func (h *eventHub) replace(subs []*Subscription) {
	var wanted engine.KindSet
	for _, sub := range subs {
		wanted |= sub.kinds
	}
	h.subs.Store(&subs)
	h.wanted.Store(uint32(wanted))
}
