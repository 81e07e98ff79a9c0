// Package entries has the entries of a shard's log. An [Entry] is a batch, which a replica writes
// into its store ([Writer]), and a [Message], which passes events to subscribers ([Hub]) and ends
// of tasks to the callers that wait for them ([Awaiting]). A queue by itself passes them without a
// log.
package entries

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"

	"codeq/internal/base"
	"codeq/internal/engine"
)

// Hub passes events on to subscriptions. Without one, Wanted is empty, and a change of state only
// reads it.
type Hub struct {
	lost   atomic.Uint64                   // by all subscriptions
	wanted atomic.Uint32                   // KindSet of the kinds that any subscription wants
	subs   atomic.Pointer[[]*Subscription] // never changed in place; nil: none
	// Less, if it is not nil, is called when a subscription has ended.
	Less func()

	mu     sync.Mutex // held to change wanted, subs and closed
	closed bool
}

// Subscription is a bounded buffer of events. Its methods are safe for concurrent use.
type Subscription struct {
	hub    *Hub
	queues []string // sorted; none: all
	kinds  engine.KindSet

	mu      sync.Mutex     // guards the fields below; may be locked while the hub's is held, not the reverse
	ring    []engine.Event // of fixed length; nil after Close
	first   int            // index of the oldest event
	held    int            // number of events; they follow first, around the end of ring
	lost    uint64         // number of events dropped from a full ring
	ended   bool           // nothing is added any more
	changed chan struct{}  // non-nil while readers wait; closed when there is an event or the end
}

// Wanted returns the kinds that any subscription wants.
func (h *Hub) Wanted() engine.KindSet { return engine.KindSet(h.wanted.Load()) }

// Lost returns how many events all subscriptions have lost, those that have ended included.
func (h *Hub) Lost() uint64 { return h.lost.Load() }

// Subscribe adds a subscription of these kinds of events of some queues, or of all if none is
// named, that holds so many events. It returns base.ErrClosed after Close.
func (h *Hub) Subscribe(kinds engine.KindSet, queues []string, buffer int) (*Subscription, error) {
	sub := &Subscription{hub: h, kinds: kinds, queues: slices.Sorted(slices.Values(queues))}
	sub.ring = make([]engine.Event, buffer)
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		return nil, base.ErrClosed
	}
	h.replace(append(h.all(), sub))
	return sub, nil
}

// Publish offers events to all subscriptions, which copy them.
func (h *Hub) Publish(events []engine.Event) {
	for _, sub := range h.all() {
		sub.offer(events)
	}
}

func (h *Hub) remove(sub *Subscription) {
	h.mu.Lock()
	rest := slices.Clone(h.all())
	h.replace(slices.DeleteFunc(rest, func(other *Subscription) bool { return other == sub }))
	h.mu.Unlock()
	if h.Less != nil {
		h.Less()
	}
}

// Close ends all subscriptions; the events in them can still be read. REQUIRES: nothing is
// published any more.
func (h *Hub) Close() {
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
func (h *Hub) all() []*Subscription {
	if p := h.subs.Load(); p != nil {
		return slices.Clip(*p)
	}
	return nil
}

// replace sets the subscriptions. REQUIRES: mu is held.
func (h *Hub) replace(subs []*Subscription) {
	var wanted engine.KindSet
	for _, sub := range subs {
		wanted |= sub.kinds
	}
	h.subs.Store(&subs)
	h.wanted.Store(uint32(wanted))
}

// Next returns the oldest unread event, and waits for one if there is none. It returns the error of
// ctx when ctx ends, and base.ErrClosed after the end and the last event.
func (sub *Subscription) Next(ctx context.Context) (engine.Event, error) {
	for {
		if ctx.Err() != nil {
			return engine.Event{}, base.EndOf(ctx)
		}
		e, ok, changed := sub.Take()
		switch {
		case ok:
			return e, nil
		case changed == nil:
			return engine.Event{}, base.ErrClosed
		}
		select {
		case <-changed:
		case <-ctx.Done():
		}
	}
}

// Take removes the oldest event. If there is none, changed is closed when there is one, and nil if
// there will be none.
func (sub *Subscription) Take() (e engine.Event, ok bool, changed <-chan struct{}) {
	sub.mu.Lock()
	defer sub.mu.Unlock()
	if sub.held > 0 {
		e = sub.ring[sub.first]
		sub.ring[sub.first] = engine.Event{}
		sub.first = (sub.first + 1) % len(sub.ring)
		sub.held--
		return e, true, nil
	}
	if sub.ended {
		return engine.Event{}, false, nil
	}
	if sub.changed == nil {
		sub.changed = make(chan struct{})
	}
	return engine.Event{}, false, sub.changed
}

// Lost returns how many events have been dropped because the buffer was full.
func (sub *Subscription) Lost() uint64 {
	sub.mu.Lock()
	defer sub.mu.Unlock()
	return sub.lost
}

// AddLost counts events that were lost on their way to the hub.
func (sub *Subscription) AddLost(n uint64) {
	sub.mu.Lock()
	defer sub.mu.Unlock()
	sub.lost += n
	sub.hub.lost.Add(n)
}

// Close ends the subscription and drops the unread events. It may be called more than once.
func (sub *Subscription) Close() {
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

// offer adds those of the events that are subscribed.
func (sub *Subscription) offer(events []engine.Event) {
	sub.mu.Lock()
	defer sub.mu.Unlock()
	if sub.ended {
		return
	}
	for i := range events {
		if e := &events[i]; sub.wants(e) {
			sub.add(e)
		}
	}
	if sub.held > 0 {
		sub.wake()
	}
}

func (sub *Subscription) wants(e *engine.Event) bool {
	if sub.kinds>>e.Kind&1 == 0 {
		return false
	}
	_, found := slices.BinarySearch(sub.queues, e.Queue)
	return found || len(sub.queues) == 0
}

// add adds an event, in place of the oldest if the ring is full. REQUIRES: mu is held.
func (sub *Subscription) add(e *engine.Event) {
	if sub.held == len(sub.ring) {
		sub.first = (sub.first + 1) % len(sub.ring)
		sub.held--
		sub.lost++
		sub.hub.lost.Add(1)
	}
	sub.ring[(sub.first+sub.held)%len(sub.ring)] = *e
	sub.held++
}
