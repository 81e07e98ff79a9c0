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
	"codeq/internal/broadcast"
	"codeq/internal/engine"
	"codeq/internal/guard"
	"codeq/internal/peer"
	"codeq/internal/wire"
)

// Events are fetched: a program begins a subscription by one call, and then always has another one
// under way that waits for events. A subscription ends with the connection on which it has begun. A
// program learns of that later than the process, and may by then have connected again, perhaps to
// another process: the number of a subscription is never that of another one, of any process.

const (
	maxSubscriptions = MaxConnections
	eventsOfCall     = 64
)

// subscriptions are those of programs.
type subscriptions struct {
	mu  sync.Mutex // guards all
	all map[uint64]*subscription
}

type subscription struct {
	events *broadcast.Subscription
	ended  chan struct{} // closed by end
}

// subscribe begins a subscription.
func (s *Server) subscribe(r *peer.Request) ([]byte, error) {
	sub, err := s.c.Subscribe(r.Body)
	if err != nil {
		return nil, err
	}
	number, ended, err := s.subs.add(sub)
	if err != nil {
		sub.Close()
		return nil, err
	}
	s.background.Go(func() {
		guard.Contain(s.c.Logger, "end of a local subscription", func() {
			select {
			case <-r.Ended():
			case <-s.ctx.Done():
			case <-ended:
			}
			s.subs.end(number)
		}, nil)
	})
	return json.Marshal(number)
}

// add gives a subscription a number. ended is closed when it is ended.
func (s *subscriptions) add(events *broadcast.Subscription) (number uint64, ended <-chan struct{}, err error) {
	var random [8]byte
	_, _ = rand.Read(random[:]) // never fails
	number = binary.BigEndian.Uint64(random[:])
	sub := &subscription{events, make(chan struct{})}
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.all) >= maxSubscriptions {
		return 0, nil, fmt.Errorf("%w: other programs have %d subscriptions, and no more are accepted", base.ErrNotServed, len(s.all))
	}
	if s.all == nil {
		s.all = make(map[uint64]*subscription)
	}
	s.all[number] = sub
	return number, sub.ended, nil
}

// end ends a subscription, if it has not ended yet.
func (s *subscriptions) end(number uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if sub := s.all[number]; sub != nil {
		sub.events.Close()
		close(sub.ended)
		delete(s.all, number)
	}
}

// find returns a subscription that has not been ended.
func (s *subscriptions) find(number uint64) (*broadcast.Subscription, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if sub := s.all[number]; sub != nil {
		return sub.events, nil
	}
	return nil, fmt.Errorf("%w: the subscription has ended with its connection", base.ErrNotServed)
}

// next waits for events, and returns some.
func (s *subscriptions) next(ctx context.Context, argument []byte) ([]byte, error) {
	var number uint64
	if json.Unmarshal(argument, &number) != nil {
		return nil, errMalformed
	}
	sub, err := s.find(number)
	if err != nil {
		return nil, err
	}
	e, err := sub.Next(ctx)
	if errors.Is(err, base.ErrClosed) {
		if _, ended := s.find(number); ended != nil {
			return nil, ended // and not the queue
		}
	}
	if err != nil {
		return nil, err
	}
	found := []engine.Event{e}
	for ok := true; ok && len(found) < eventsOfCall; {
		if e, ok, _ = sub.Take(); ok {
			found = append(found, e)
		}
	}
	return append(wire.AppendUint(nil, sub.Lost()), broadcast.Encode(&engine.Effects{Events: found})...), nil
}

func (s *subscriptions) unsubscribe(argument []byte) ([]byte, error) {
	var number uint64
	if json.Unmarshal(argument, &number) != nil {
		return nil, errMalformed
	}
	if _, err := s.find(number); err != nil {
		return nil, err
	}
	s.end(number)
	return []byte("null"), nil
}

// Source brings the events of a subscription from the process that serves the queue.
type Source struct {
	stop context.CancelFunc
	done chan struct{} // closed when no more come
	err  error         // why; valid once done is closed
}

const unsubscribeTimeout = 5 * time.Second

// Subscribe begins a subscription, and lets its events come to a hub until the Source is stopped,
// or the Client closed. Then it closes the hub, of which into is the only subscription.
func (c *Client) Subscribe(options any, hub *broadcast.Hub, into *broadcast.Subscription) (*Source, error) {
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
			_ = c.Tell(ctx, Unsubscribe, number, nil) // or it ends with the connection
		}, nil)
	}
	if !c.start(bring) {
		return nil, base.ErrClosed
	}
	return s, nil
}

// bring fetches events until ctx ends.
func (c *Client) bring(ctx context.Context, number uint64, hub *broadcast.Hub, into *broadcast.Subscription) error {
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
		m, err := broadcast.Parse(r.Rest())
		if err != nil {
			return err
		}
		into.AddLost(total - lost)
		lost = total
		hub.Publish(m.Events)
	}
}

// Stop lets no more events come. s may be nil.
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
