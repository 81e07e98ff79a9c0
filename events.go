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

// Event is one change of a task's state. It has been stored when it is seen.
type Event struct {
	Kind   EventKind `json:",omitzero"`
	ID     ID        `json:",omitzero"`
	Queue  string    `json:",omitzero"`
	Tenant string    `json:",omitzero"`
	// Attempt counts the attempts of the task as they stand after the change,
	// as TaskInfo.Attempts does: of EventClaimed the one that begins is included,
	// of EventReleased the one given back is not.
	Attempt int `json:",omitzero"`
	// Time is the wall clock of the commit, to the millisecond. Changes that
	// were committed together have the same.
	Time time.Time `json:",omitzero"`
	// LastError is what the attempt left behind, of EventRetried and EventDeadLettered: what
	// Lease.LastError shows afterwards. Otherwise it is empty.
	LastError string `json:",omitzero"`
}

// EventKind is what has happened to a task.
type EventKind uint8

// The kinds of events. That a task that waited becomes ready, is replaced or
// moved, that a dead letter is redriven or purged, and that an ended task is no
// longer kept, are not among them.
const (
	EventProduced     EventKind = iota + 1 // stored, to be ready at once or later
	EventClaimed                           // leased to a worker
	EventCompleted                         // done
	EventRetried                           // failed, and to be tried again
	EventReleased                          // given back; the attempt does not count
	EventDeadLettered                      // out of attempts, or given up
	EventCanceled                          // taken back by who produced it
	EventExpired                           // its lease ran out; the attempt counts. EventDeadLettered follows if it was the last
	endOfKinds
)

var eventKinds = enum[EventKind]{"EventKind", []string{
	"", "produced", "claimed", "completed", "retried", "released", "dead", "canceled", "expired",
}}

// String returns the kind in lower case; that of EventDeadLettered is "dead".
func (k EventKind) String() string { return eventKinds.text(k) }

// MarshalText returns the same as String, and an error that matches [ErrInvalid] for what is no
// kind.
func (k EventKind) MarshalText() ([]byte, error) { return eventKinds.marshal(k) }

// UnmarshalText reads what MarshalText returns, and returns an error that matches [ErrInvalid] for
// anything else.
func (k *EventKind) UnmarshalText(b []byte) error { return eventKinds.unmarshal(k, b) }

const kindLimit = "EventProduced, EventClaimed, EventCompleted, EventRetried, EventReleased, EventDeadLettered, " +
	"EventCanceled, EventExpired"

func (k EventKind) set() engine.KindSet { return 1 << k }

const allKinds engine.KindSet = 1<<endOfKinds - 2

// SubscribeOptions of Subscribe. A zero field is its documented default.
type SubscribeOptions struct {
	// Queues are those whose tasks are of interest; they need not exist yet.
	// Default: all.
	Queues []string
	// Kinds of events that are of interest. Default: all.
	Kinds []EventKind
	// Buffer is how many events are held until they are read; then each new
	// one drops the oldest. An event takes about a hundred bytes and LastError,
	// which is at most 8 KiB. Up to 1,048,576. Default: 1024.
	Buffer int
}

const (
	defaultEventBuffer = 1024
	maxEventBuffer     = 1 << 20
)

// Subscribe begins to collect events. Every change that is made by a call that
// begins after Subscribe has returned is told, in the order of the changes for
// each shard; between shards the order is not defined. When the call that
// makes a change returns, its event has reached the subscription.
//
// Events tell of changes and are no record of them. Nothing is told of what was before, not
// even of leases that ran out while the queue was closed, if Open has taken
// the tasks back by then. A commit that fails is not told, although the next
// Open may find its changes stored; its shard has no further events, and the
// subscription goes on with those of the others.
//
// Subscribe returns an error that matches [ErrInvalid] when an option is out of
// bounds, and [ErrClosed] when the queue is closed. Close the subscription when
// it is no longer read; until then it costs its buffer, and the engine never
// waits for it.
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
// concurrent use; of several readers, each event goes to one. A nil or zero one has ended.
type Subscription struct {
	hub    *eventHub
	queues map[string]bool // nil: all
	kinds  engine.KindSet

	mu      sync.Mutex    // guards what follows; may be taken with the hub's held, not the reverse
	ring    []Event       // of fixed length; nil after Close
	first   int           // where the oldest event is
	held    int           // how many events there are; they follow each other, around the end of ring
	lost    uint64        // dropped from a full ring
	ended   bool          // nothing is added any more
	changed chan struct{} // non-nil while readers wait; closed when there is an event or the end
}

// Next returns the oldest event that has not been read, and waits for one if
// there is none. It returns the error of ctx when ctx ends, and [ErrClosed] after
// Close, or when the queue is closed and its last event has been read.
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

// take removes the oldest event. If there is none, changed is closed when there
// is one, and nil when there will be none.
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

// All yields what Next returns, and ends after the first error: that of ctx, or [ErrClosed].
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

// Lost is how many events have been dropped because the buffer was full. All
// of them came before the event that Next returns next.
func (sub *Subscription) Lost() uint64 {
	if !sub.isMade() {
		return 0
	}
	sub.mu.Lock()
	defer sub.mu.Unlock()
	return sub.lost
}

// Close ends the subscription and drops what has not been read. It may be
// called twice and at any moment.
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

// end is the end of what is added. REQUIRES: mu is held.
func (sub *Subscription) end() {
	sub.ended = true
	sub.wake()
}

// wake has the readers that wait look again. REQUIRES: mu is held.
func (sub *Subscription) wake() {
	if sub.changed != nil {
		close(sub.changed)
		sub.changed = nil
	}
}

// offer adds those of the events that are of interest.
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

// eventHub is the subscriptions of a queue. Without one, wanted is empty, and
// a change of state costs a look at it.
type eventHub struct {
	wanted atomic.Uint32                   // KindSet of what any subscription is interested in
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

// close ends all subscriptions; what they hold can still be read. REQUIRES:
// the owners of the shards have ended.
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

// all returns a slice without room for another.
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
