package codeq

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/engine"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/internal/testkit"
)

// buffered returns the buffered events of a subscription, without a wait for more.
func buffered(sub *Subscription) (events []Event) {
	for {
		e, ok, _ := sub.events.Take()
		if !ok {
			return events
		}
		events = append(events, eventOf(&e))
	}
}

// brief returns a line for each buffered event: kind, attempt, error.
func brief(sub *Subscription) (lines []string) {
	for _, e := range buffered(sub) {
		lines = append(lines, strings.TrimSpace(fmt.Sprint(e.Kind, " ", e.Attempt, " ", e.LastError)))
	}
	return lines
}

func TestSubscribeLimits(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		for _, opts := range []SubscribeOptions{
			{Queues: []string{"a", ""}},
			{Queues: []string{strings.Repeat("x", 256)}},
			{Kinds: []EventKind{0}},
			{Kinds: []EventKind{EventProduced, endOfKinds}},
			{Buffer: -1},
			{Buffer: maxEventBuffer + 1},
		} {
			_, err := q.Subscribe(opts)
			require.ErrorIs(t, err, ErrInvalid)
		}
		require.Zero(t, q.events.Wanted())
		sub, err := q.Subscribe(SubscribeOptions{})
		require.NoError(t, err)
		q.events.Publish(slices.Repeat([]engine.Event{{Kind: engine.EventProduced}}, 1025))
		require.EqualValues(t, 1, sub.Lost())
	})
}

// TestNothingIsCollectedInVain: a shard collects no events of a kind that no subscription wants.
func TestNothingIsCollectedInVain(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		collected := func() (n int) {
			require.NoError(t, q.shard(0).probe(func(s *shard) error {
				n = cap(s.rules.Effects.Events)
				return nil
			}))
			return n
		}
		produce(t, q, Task{Queue: "a"})
		sub, err := q.Subscribe(SubscribeOptions{Kinds: []EventKind{EventDeadLettered}})
		require.NoError(t, err)
		l := claimNow(t, q, "a")
		require.Zero(t, collected())
		require.NoError(t, q.DeadLetter(context.Background(), l.Receipt, nil))
		require.NotZero(t, collected())
		require.NoError(t, q.shard(0).probe(func(s *shard) error {
			s.rules.Effects.Events = nil
			return nil
		}))
		other, err := q.Subscribe(SubscribeOptions{})
		require.NoError(t, err)
		other.Close()
		sub.Close()
		produce(t, q, Task{Queue: "a"})
		require.NoError(t, q.DeadLetter(context.Background(), claimNow(t, q, "a").Receipt, nil))
		require.Zero(t, collected())
	})
}

// TestSubscriptionCloses: a subscription can be closed at any moment while events arrive from
// several shards, with or without a reader.
func TestSubscriptionCloses(t *testing.T) {
	t.Parallel()
	q, err := Open(t.TempDir(), &Options{Shards: 2})
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	var load sync.WaitGroup
	for range 4 {
		load.Go(func() {
			for ctx.Err() == nil {
				_, err := q.Produce(context.Background(), Task{Queue: "a"})
				if err == nil {
					var l *Lease
					if l, err = q.Claim(context.Background(), ClaimRequest{Queues: []string{"a"}}); err == nil {
						err = q.Complete(context.Background(), l.Receipt, nil)
					}
				}
				if err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	var subscribers sync.WaitGroup
	for i := range 4 {
		subscribers.Go(func() {
			for n := range 50 {
				sub, err := q.Subscribe(SubscribeOptions{Buffer: 1 + 10*i})
				if err != nil {
					t.Error(err)
					return
				}
				var reader sync.WaitGroup
				if i > 0 { // the first subscription has no reader
					reader.Go(func() {
						for e, err := range sub.All(context.Background()) {
							if errors.Is(err, ErrClosed) {
								break
							}
							if err != nil || e.Queue != "a" || !eventKinds.Valid(e.Kind) {
								t.Errorf("%+v, %v", e, err)
							}
						}
					})
				}
				time.Sleep(time.Duration(n%5) * time.Millisecond)
				sub.Close()
				sub.Close()
				reader.Wait()
				if _, err := sub.Next(context.Background()); !errors.Is(err, ErrClosed) {
					t.Error(err)
				}
				sub.Lost()
			}
		})
	}
	subscribers.Wait()
	require.Zero(t, q.events.Wanted())
	cancel()
	load.Wait()
	require.NoError(t, q.Close())
}

// eventCommitter reads a subscription in each commit.
type eventCommitter struct {
	committer
	sub    *Subscription
	during []string // events at that time
	err    error    // if set, the commits fail with it
}

func (c *eventCommitter) Commit(b *pebble.Batch) error {
	c.during = append(c.during, brief(c.sub)...)
	if c.err != nil {
		return c.err
	}
	return c.committer.Commit(b)
}

// TestEventsFollowTheCommit: events appear after their commit, and a failed commit has none.
func TestEventsFollowTheCommit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, err := Open("queue", inspect.With(&Options{Shards: 2}, inspect.Private{FS: crashfs.New()}))
		require.NoError(t, err)
		sub, err := q.Subscribe(SubscribeOptions{})
		require.NoError(t, err)
		c := &eventCommitter{committer: q.shard(0).commit, sub: sub}
		require.NoError(t, q.shard(0).probe(func(s *shard) error {
			s.commit = c
			return nil
		}))
		produce(t, q.startingAt(0), Task{Queue: "a"})
		require.Empty(t, c.during)
		require.Equal(t, []string{"produced 0"}, brief(sub))
		l := claimNow(t, q.startingAt(0), "a")
		require.Empty(t, c.during)
		require.Equal(t, []string{"claimed 1"}, brief(sub))

		require.NoError(t, q.shard(0).probe(func(*shard) error {
			c.err = testkit.ErrBroken
			return nil
		}))
		require.ErrorIs(t, q.Complete(context.Background(), l.Receipt, nil, Task{Queue: "a"}), ErrUncertain)
		_, err = q.startingAt(0).Produce(context.Background(), Task{Queue: "a"})
		require.ErrorIs(t, err, ErrFailed)
		require.Empty(t, c.during)
		require.Empty(t, brief(sub))
		produce(t, q.startingAt(1), Task{Queue: "a"})
		require.Equal(t, []string{"produced 0"}, brief(sub), "the other shard goes on")
		require.ErrorIs(t, q.Close(), ErrFailed)
		require.Empty(t, brief(sub))
	})
}

// witness produces a task, and records the events of a subscription just before the caller wakes.
type witness struct {
	completion
	sub  *Subscription
	task engine.NewTask
	seen []string
}

func (w *witness) resolve(s *shard) {
	_, w.err = s.rules.Produce([]engine.NewTask{w.task}, new(keys.CallNumber), new(engine.Produced))
	s.settleAfterCommit(w)
}

func (w *witness) verb() *verb { return &internal }

func (w *witness) settle(err error) {
	w.seen = brief(w.sub)
	w.completion.settle(err)
}

// TestEventsPrecedeTheReturn: when a call returns, its event is in the subscription.
func TestEventsPrecedeTheReturn(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		sub, err := q.Subscribe(SubscribeOptions{})
		require.NoError(t, err)
		w := &witness{completion: newCompletion(0), sub: sub}
		w.task = prepare(&Task{Queue: "a"}, nil)
		_, err = q.shard(0).do(context.Background(), w, &w.completion, nil)
		require.NoError(t, err)
		require.Equal(t, []string{"produced 0"}, w.seen)
	})
}
