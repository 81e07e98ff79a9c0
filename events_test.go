package codeq_test

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

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/test/queuetest"
)

func subscribe(t *testing.T, q *codeq.Queue, opts codeq.SubscribeOptions) *codeq.Subscription {
	t.Helper()
	sub, err := q.Subscribe(opts)
	require.NoError(t, err)
	return sub
}

// TestEventFields: an event has the fields of its task and the time of its commit.
func TestEventFields(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 3}, func(t *testing.T, q *codeq.Queue) {
		sub := subscribe(t, q, codeq.SubscribeOptions{})
		start := time.Now()
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a", Tenant: "t"})[0]
		time.Sleep(time.Second)
		long := errors.New(strings.Repeat("x", 2*8<<10))
		require.NoError(t, q.DeadLetter(context.Background(), queuetest.ClaimNow(t, q, "a").Receipt, long))
		events := queuetest.Buffered(sub)
		for i := range events {
			require.WithinDuration(t, start.Add(time.Second*time.Duration(min(i, 1))), events[i].Time, 0)
			events[i].Time = time.Time{}
		}
		require.Equal(t, []codeq.Event{
			{Kind: codeq.EventProduced, ID: id, Queue: "a", Tenant: "t"},
			{Kind: codeq.EventClaimed, ID: id, Queue: "a", Tenant: "t", Attempt: 1},
			{Kind: codeq.EventDeadLettered, ID: id, Queue: "a", Tenant: "t", Attempt: 1, LastError: strings.Repeat("x", 8<<10)},
		}, events)
	})
}

func TestSubscribeFilters(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 2}, func(t *testing.T, q *codeq.Queue) {
		filters := []codeq.SubscribeOptions{
			{},
			{Queues: []string{"a", "none"}},
			{Kinds: []codeq.EventKind{codeq.EventProduced, codeq.EventDeadLettered, codeq.EventCanceled}},
			{Queues: []string{"b"}, Kinds: []codeq.EventKind{codeq.EventClaimed}},
			{Queues: []string{}, Kinds: []codeq.EventKind{}},
		}
		var subs []*codeq.Subscription
		for _, f := range filters {
			subs = append(subs, subscribe(t, q, f))
		}
		queuetest.Produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "b"})
		require.NoError(t, q.Complete(context.Background(), queuetest.ClaimNow(t, q, "a").Receipt, nil))
		require.NoError(t, q.DeadLetter(context.Background(), queuetest.ClaimNow(t, q, "b").Receipt, nil))
		var got [][]string
		for _, sub := range subs {
			var lines []string
			for _, e := range queuetest.Buffered(sub) {
				lines = append(lines, fmt.Sprint(e.Queue, " ", e.Kind))
			}
			got = append(got, lines)
		}
		all := []string{"a produced", "b produced", "a claimed", "a completed", "b claimed", "b dead"}
		require.Equal(t, [][]string{
			all,
			{"a produced", "a claimed", "a completed"},
			{"a produced", "b produced", "b dead"},
			{"b claimed"},
			all,
		}, got)
	})
}

// TestEventsLost: a subscription without a reader keeps the newest events and counts the lost ones.
// A late reader continues with the kept events.
func TestEventsLost(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		slow := subscribe(t, q, codeq.SubscribeOptions{Queues: []string{"a"}, Buffer: 3})
		fast := subscribe(t, q, codeq.SubscribeOptions{})
		var want []codeq.ID
		var lost uint64
		for _, burst := range []int{1, 2, 1, 10, 3, 4} {
			tasks := make([]codeq.Task, burst)
			for i := range tasks {
				tasks[i].Queue = "a"
			}
			ids, err := q.ProduceBatch(context.Background(), tasks)
			require.NoError(t, err)
			queuetest.Produce(t, q, codeq.Task{Queue: "b"}) // not selected, so not lost
			want = append(want, ids...)
			if n := len(want) - 3; n > 0 {
				lost += uint64(n)
				want = want[n:]
			}
			require.Equal(t, lost, slow.Lost())
			if burst == 10 {
				e, err := slow.Next(context.Background())
				require.NoError(t, err)
				require.Equal(t, want[0], e.ID)
				want = want[1:]
			}
		}
		for _, id := range want {
			e, err := slow.Next(context.Background())
			require.NoError(t, err)
			require.Equal(t, id, e.ID)
		}
		require.Empty(t, queuetest.Buffered(slow))
		require.Len(t, queuetest.Buffered(fast), 21+6)
		require.Zero(t, fast.Lost())
	})
}

// TestNextWaits: Next returns when an event of its subscription arrives, or when ctx ends.
func TestNextWaits(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 2}, func(t *testing.T, q *codeq.Queue) {
		sub := subscribe(t, q, codeq.SubscribeOptions{Queues: []string{"a"}})
		got := make(chan codeq.ID, 3)
		for range cap(got) {
			go func() {
				if e, err := sub.Next(context.Background()); err == nil {
					got <- e.ID
				}
			}()
		}
		synctest.Wait()
		queuetest.Produce(t, q, codeq.Task{Queue: "b"})
		synctest.Wait()
		require.Empty(t, got)
		var read []codeq.ID
		want := queuetest.Produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
		for range want {
			read = append(read, <-got)
		}
		require.ElementsMatch(t, want, read, "each event goes to one reader")

		cause := errors.New("enough")
		ctx, cancel := context.WithTimeoutCause(context.Background(), time.Second, cause)
		defer cancel()
		_, err := sub.Next(ctx)
		require.ErrorIs(t, err, cause)
		queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		_, err = sub.Next(ctx)
		require.ErrorIs(t, err, cause, "a reader that is never short of events ends too")
		require.Len(t, queuetest.Buffered(sub), 1)
	})
}

// TestEventsEndWithClose: a reader gets all events of the closing queue, and then ErrClosed.
func TestEventsEndWithClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		q, err := codeq.Open("queue", queuetest.OnDisk(crashfs.New(), &codeq.Options{Shards: 2}))
		require.NoError(t, err)
		full := subscribe(t, q, codeq.SubscribeOptions{})
		empty := subscribe(t, q, codeq.SubscribeOptions{Queues: []string{"none"}})
		left := subscribe(t, q, codeq.SubscribeOptions{})
		ended := make(chan error, 1)
		go func() {
			_, err := empty.Next(ctx)
			ended <- err
		}()
		queuetest.Produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
		synctest.Wait()
		require.NoError(t, q.Close())
		require.ErrorIs(t, <-ended, codeq.ErrClosed)
		var kinds []codeq.EventKind
		var errs []error
		for e, err := range full.All(ctx) {
			kinds, errs = append(kinds, e.Kind), append(errs, err)
		}
		require.Equal(t, []codeq.EventKind{codeq.EventProduced, codeq.EventProduced, 0}, kinds)
		require.Equal(t, []error{nil, nil, codeq.ErrClosed}, errs)
		_, err = full.Next(ctx)
		require.ErrorIs(t, err, codeq.ErrClosed)
		left.Close()
		_, err = left.Next(ctx)
		require.ErrorIs(t, err, codeq.ErrClosed, "what a closed subscription held is dropped")
		_, err = q.Subscribe(codeq.SubscribeOptions{})
		require.ErrorIs(t, err, codeq.ErrClosed)
	})
}

// TestEventsOfManyShards: the events of all shards arrive. The events of a task are in the order of
// its life, and the events of a shard are in the order of its decisions.
func TestEventsOfManyShards(t *testing.T) {
	const callers, each = 8, 100
	queuetest.Bubble(t, codeq.Options{Shards: 4, GroupCap: 16}, func(t *testing.T, q *codeq.Queue) {
		sub := subscribe(t, q, codeq.SubscribeOptions{Buffer: 3 * callers * each})
		var wg sync.WaitGroup
		for range callers {
			wg.Go(func() {
				for range each {
					if _, err := q.Produce(context.Background(), codeq.Task{Queue: "a"}); err != nil {
						t.Error(err)
					}
				}
			})
			wg.Go(func() {
				for range each {
					l, err := q.Claim(context.Background(), codeq.ClaimRequest{Queues: []string{"a"}})
					if err == nil {
						err = q.Complete(context.Background(), l.Receipt, nil)
					}
					if err != nil {
						t.Error(err)
					}
				}
			})
		}
		wg.Wait()
		lives := make(map[codeq.ID][]codeq.EventKind)
		last := make(map[int]codeq.ID) // the last produced task, by shard
		for _, e := range queuetest.Buffered(sub) {
			lives[e.ID] = append(lives[e.ID], e.Kind)
			if e.Kind == codeq.EventProduced {
				before := last[queuetest.ShardOf(e.ID, 4)]
				require.Negative(t, slices.Compare(before[:], e.ID[:]))
				last[queuetest.ShardOf(e.ID, 4)] = e.ID
			}
		}
		require.Len(t, lives, callers*each)
		for _, life := range lives {
			require.Equal(t, []codeq.EventKind{codeq.EventProduced, codeq.EventClaimed, codeq.EventCompleted}, life)
		}
		require.Len(t, last, 4)
		require.Zero(t, sub.Lost())
	})
}
