package localsocket

import (
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"time"

	"codeq/internal/base"
	"codeq/internal/engine"
	"codeq/internal/entries"
	"codeq/internal/guard"
	"codeq/internal/wire"
)

// Events are fetched: a program begins a subscription by one call, and then always has another one
// under way that waits for events. A subscription ends when such a call is canceled, or loses its
// connection, even if other calls wait for its events, and when there was none for some time. A
// program may learn of that later than the process, and have connected again by then, perhaps to
// another process: the number of a subscription is never that of another one, of any process.

const (
	eventsOfCall = 64
	unreadFor    = time.Minute // a subscription ends after it
)

// subscriptions are those of programs.
type subscriptions struct {
	mu  sync.Mutex // guards all
	all map[uint64]*subscription
}

type subscription struct {
	events  *entries.Subscription
	readers int           // calls under way that wait for events
	unread  *time.Timer   // runs while there are no readers
	ended   chan struct{} // closed by end
}

// subscribe begins a subscription.
func (s *Server) subscribe(ctx context.Context, options []byte) ([]byte, error) {
	sub, err := s.c.Subscribe(ctx, options)
	if err != nil {
		return nil, err
	}
	number, added, err := s.subs.add(sub)
	if err != nil {
		sub.Close()
		return nil, err
	}
	s.background.Go(func() {
		guard.Contain(s.c.Logger, "end of a local subscription", func() { s.subs.watch(s.ctx, number, added) }, nil)
	})
	return json.Marshal(number)
}

// add gives a subscription a number.
func (s *subscriptions) add(events *entries.Subscription) (number uint64, sub *subscription, err error) {
	var random [8]byte
	_, _ = rand.Read(random[:]) // never fails
	number = binary.BigEndian.Uint64(random[:])
	sub = &subscription{events: events, unread: time.NewTimer(unreadFor), ended: make(chan struct{})}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.all) >= maxSubscriptions {
		return 0, nil, fmt.Errorf("%w: programs have %d subscriptions, and no more are accepted", base.ErrNotServed, len(s.all))
	}
	if s.all == nil {
		s.all = make(map[uint64]*subscription)
	}
	s.all[number] = sub
	return number, sub, nil
}

// watch ends a subscription without readers. It returns when that has ended, or ctx.
func (s *subscriptions) watch(ctx context.Context, number uint64, sub *subscription) {
	defer sub.unread.Stop()
	select {
	case <-sub.unread.C:
	case <-ctx.Done():
	case <-sub.ended:
	}
	s.end(number)
}

// end ends a subscription; false: it has ended before.
func (s *subscriptions) end(number uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	sub := s.all[number]
	if sub == nil {
		return false
	}
	sub.events.Close()
	close(sub.ended)
	delete(s.all, number)
	return true
}

// errNoSubscription is the answer to a call for events of an ended subscription.
var errNoSubscription = fmt.Errorf("%w: the subscription has ended, as nothing more was asked of it", base.ErrNotServed)

// read begins to read a subscription; nil: it has ended.
func (s *subscriptions) read(number uint64) *subscription {
	s.mu.Lock()
	defer s.mu.Unlock()
	sub := s.all[number]
	if sub != nil {
		sub.readers++
		sub.unread.Stop()
	}
	return sub
}

// leave ends to read a subscription.
func (s *subscriptions) leave(sub *subscription) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if sub.readers--; sub.readers == 0 {
		sub.unread.Reset(unreadFor)
	}
}

// has reports whether a subscription has not ended.
func (s *subscriptions) has(number uint64) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.all[number] != nil
}

// next waits for events, and returns some.
func (s *subscriptions) next(ctx context.Context, argument []byte) ([]byte, error) {
	var number uint64
	if json.Unmarshal(argument, &number) != nil {
		return nil, errMalformed
	}
	sub := s.read(number)
	if sub == nil {
		return nil, errNoSubscription
	}
	defer s.leave(sub)
	e, err := sub.events.Next(ctx)
	switch {
	case errors.Is(err, base.ErrClosed) && !s.has(number): // else the queue is closed
		return nil, errNoSubscription
	case err != nil:
		if ctx.Err() != nil {
			s.end(number)
		}
		return nil, err
	}
	found := []engine.Event{e}
	for ok := true; ok && len(found) < eventsOfCall; {
		if e, ok, _ = sub.events.Take(); ok {
			found = append(found, e)
		}
	}
	if ctx.Err() != nil { // these events are lost
		s.end(number)
	}
	return append(wire.AppendUint(nil, sub.events.Lost()), entries.EncodeEffects(&engine.Effects{Events: found})...), nil
}

func (s *subscriptions) unsubscribe(argument []byte) ([]byte, error) {
	var number uint64
	if json.Unmarshal(argument, &number) != nil {
		return nil, errMalformed
	}
	if !s.end(number) {
		return nil, errNoSubscription
	}
	return []byte("null"), nil
}

// Source brings the events of a subscription from the process that serves the queue.
type Source struct {
	stop context.CancelFunc
	done chan struct{} // closed when no more come
	err  error         // why; valid once done is closed
}

const unsubscribeTimeout = 5 * time.Second

// Subscribe begins a subscription, and publishes its events in a hub until the Source is stopped,
// or the Client closed. Then it closes the hub. into is the only subscription of the hub.
func (c *Client) Subscribe(options any, hub *entries.Hub, into *entries.Subscription) (*Source, error) {
	var number uint64
	if err := c.Tell(context.Background(), Subscribe, options, &number); err != nil {
		return nil, err
	}
	ctx, stop := context.WithCancel(context.Background())
	s := &Source{stop: stop, done: make(chan struct{})}
	bring := func() {
		const what = "events of another process"
		guard.Contain(c.log, what, func() { s.err = c.bring(ctx, number, hub, into) }, func(value any, _ []byte) {
			s.err = fmt.Errorf("codeq: panic in %s: %v", what, value)
		})
		close(s.done)
		guard.Contain(c.log, "end of events of another process", func() {
			hub.Close()
			ctx, cancel := context.WithTimeout(context.Background(), unsubscribeTimeout)
			defer cancel()
			_ = c.Tell(ctx, Unsubscribe, number, nil) // or it ends as it has no readers
		}, nil)
	}
	if !c.start(bring) {
		return nil, base.ErrClosed
	}
	return s, nil
}

// bring fetches events until ctx ends.
func (c *Client) bring(ctx context.Context, number uint64, hub *entries.Hub, into *entries.Subscription) error {
	body, err := json.Marshal(number)
	if err != nil {
		return err
	}
	for lost := uint64(0); ; {
		reply, err := c.Call(ctx, Events, body, true)
		if ctx.Err() != nil {
			return base.ErrClosed
		}
		if err != nil {
			return err
		}
		r := wire.NewReader(reply)
		total := r.Uint()
		m, err := entries.ParseMessage(r.Rest())
		if err != nil {
			return err
		}
		into.AddLost(total - lost)
		lost = total
		hub.Publish(m.Events)
	}
}

// Stop ends the events. s may be nil.
func (s *Source) Stop() {
	if s != nil {
		s.stop()
	}
}

// EndOf is the error of a reader: if there is nothing more to read, why no more come. s may be nil.
func (s *Source) EndOf(err error) error {
	if s == nil || !errors.Is(err, base.ErrClosed) {
		return err
	}
	select {
	case <-s.done:
		return s.err
	default:
		return err
	}
}
