package codeq

import (
	"codeq/internal/engine"
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
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
)

func subscribe(t *testing.T, q *Queue, opts SubscribeOptions) *Subscription {
	t.Helper()
	sub, err := q.Subscribe(opts)
	require.NoError(t, err)
	return sub
}

// buffered reads what a subscription holds, without waiting for more.
func buffered(sub *Subscription) (events []Event) {
	for {
		e, ok, _ := sub.take()
		if !ok {
			return events
		}
		events = append(events, e)
	}
}

// brief is a line for each event that is buffered: kind, attempt, error.
func brief(sub *Subscription) (lines []string) {
	for _, e := range buffered(sub) {
		lines = append(lines, strings.TrimSpace(fmt.Sprint(e.Kind, " ", e.Attempt, " ", e.LastError)))
	}
	return lines
}

// TestEventKinds has each verb make its change, and looks as soon as the verb
// has returned.
func TestEventKinds(t *testing.T) {
	bubble(t, Options{Shards: 1, MaxAttempts: 3}, func(t *testing.T, q *Queue) {
		ctx := context.Background()
		sub := subscribe(t, q, SubscribeOptions{})
		expect := func(want ...string) {
			t.Helper()
			require.Equal(t, want, brief(sub))
		}
		claim := func(queue string) Receipt {
			t.Helper()
			l := claimNow(t, q, queue)
			require.NotNil(t, l)
			expect(fmt.Sprint("claimed ", l.Attempt))
			return l.Receipt
		}

		produce(t, q, Task{Queue: "a"})
		expect("produced 0")
		require.NoError(t, q.Retry(ctx, claim("a"), RetryOptions{Err: errors.New("boom"), After: -1}))
		expect("retried 1 boom")
		require.NoError(t, q.Release(ctx, claim("a"), 0))
		expect("released 1")
		require.NoError(t, q.Release(ctx, claim("a"), time.Minute))
		expect("released 1")
		time.Sleep(2 * time.Minute)
		require.Empty(t, buffered(sub), "that a task becomes ready is no event")
		require.NoError(t, q.failed(ctx, claim("a"), failOp{how: engine.FailReturn}, nil))
		expect("released 1")
		r := claim("a")
		require.NoError(t, q.Extend(ctx, r, time.Minute))
		require.Empty(t, buffered(sub))
		require.NoError(t, q.Complete(ctx, r, nil, Task{Queue: "b"}, Task{Queue: "b"}))
		expect("completed 2", "produced 0", "produced 0")
		require.ErrorIs(t, q.Complete(ctx, r, nil), ErrLeaseLost)
		require.Empty(t, buffered(sub), "what is refused is no change")

		require.NoError(t, q.DeadLetter(ctx, claim("b"), errors.New("hopeless")))
		expect("dead 1 hopeless")
		for i := 1; i <= 2; i++ {
			require.NoError(t, q.Retry(ctx, claim("b"), RetryOptions{Err: errors.New("again"), After: -1}))
			expect(fmt.Sprint("retried ", i, " again"))
		}
		require.NoError(t, q.Retry(ctx, claim("b"), RetryOptions{Err: errors.New("enough"), After: -1}))
		expect("dead 3 enough")

		produce(t, q, Task{Queue: "c", MaxAttempts: 2, RunAt: time.Now().Add(time.Hour)})
		expect("produced 0")
		time.Sleep(time.Hour)
		claim("c")
		time.Sleep(30 * time.Second)
		synctest.Wait()
		expect("expired 1")
		claim("c")
		time.Sleep(30 * time.Second)
		synctest.Wait()
		expect("expired 2", "dead 2 lease expired")

		produce(t, q, Task{Queue: "d", Retention: time.Hour})
		require.NoError(t, q.Complete(ctx, claimNow(t, q, "d").Receipt, []byte("kept")))
		expect("produced 0", "claimed 1", "completed 1")
		time.Sleep(2 * time.Hour)
		synctest.Wait()
		require.Empty(t, buffered(sub), "that a result is forgotten is no event")
		require.Zero(t, sub.Lost())
	})
}

// TestEventFields: an event names its task and tells the time of the commit.
func TestEventFields(t *testing.T) {
	bubble(t, Options{Shards: 3}, func(t *testing.T, q *Queue) {
		sub := subscribe(t, q, SubscribeOptions{})
		start := time.Now()
		id := produce(t, q, Task{Queue: "a", Tenant: "t"})[0]
		time.Sleep(time.Second)
		long := errors.New(strings.Repeat("x", 2*engine.MaxCause))
		require.NoError(t, q.DeadLetter(context.Background(), claimNow(t, q, "a").Receipt, long))
		events := buffered(sub)
		for i := range events {
			require.WithinDuration(t, start.Add(time.Second*time.Duration(min(i, 1))), events[i].Time, 0)
			events[i].Time = time.Time{}
		}
		require.Equal(t, []Event{
			{Kind: EventProduced, ID: id, Queue: "a", Tenant: "t"},
			{Kind: EventClaimed, ID: id, Queue: "a", Tenant: "t", Attempt: 1},
			{Kind: EventDeadLettered, ID: id, Queue: "a", Tenant: "t", Attempt: 1, LastError: strings.Repeat("x", engine.MaxCause)},
		}, events)
	})
}

func TestEventKindText(t *testing.T) {
	for k := EventProduced; k < endOfKinds; k++ {
		require.NotEmpty(t, k.String())
		b, err := k.MarshalText()
		require.NoError(t, err)
		require.Equal(t, k.String(), string(b))
	}
	require.Equal(t, "canceled", EventCanceled.String())
	require.Equal(t, "expired", EventExpired.String())
	for _, k := range []EventKind{0, endOfKinds, 255} {
		require.Equal(t, fmt.Sprintf("EventKind(%d)", uint8(k)), k.String())
		_, err := k.MarshalText()
		require.ErrorIs(t, err, ErrInvalid)
	}
}

func TestSubscribeFilters(t *testing.T) {
	bubble(t, Options{Shards: 2}, func(t *testing.T, q *Queue) {
		filters := []SubscribeOptions{
			{},
			{Queues: []string{"a", "none"}},
			{Kinds: []EventKind{EventProduced, EventDeadLettered, EventCanceled}},
			{Queues: []string{"b"}, Kinds: []EventKind{EventClaimed}},
			{Queues: []string{}, Kinds: []EventKind{}},
		}
		var subs []*Subscription
		for _, f := range filters {
			subs = append(subs, subscribe(t, q, f))
		}
		produce(t, q, Task{Queue: "a"}, Task{Queue: "b"})
		require.NoError(t, q.Complete(context.Background(), claimNow(t, q, "a").Receipt, nil))
		require.NoError(t, q.DeadLetter(context.Background(), claimNow(t, q, "b").Receipt, nil))
		var got [][]string
		for _, sub := range subs {
			var lines []string
			for _, e := range buffered(sub) {
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
		require.Empty(t, q.events.all())
		require.Len(t, subscribe(t, q, SubscribeOptions{}).ring, 1024)
	})
}

// TestEventsLost: a subscription that nobody reads keeps the newest events and
// counts the others, and a reader that comes late goes on from there.
func TestEventsLost(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		slow := subscribe(t, q, SubscribeOptions{Queues: []string{"a"}, Buffer: 3})
		fast := subscribe(t, q, SubscribeOptions{})
		var want []ID
		var lost uint64
		for _, burst := range []int{1, 2, 1, 10, 3, 4} {
			tasks := make([]Task, burst)
			for i := range tasks {
				tasks[i].Queue = "a"
			}
			ids, err := q.ProduceBatch(context.Background(), tasks)
			require.NoError(t, err)
			produce(t, q, Task{Queue: "b"}) // of no interest: not lost
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
		require.Empty(t, buffered(slow))
		require.Len(t, buffered(fast), 21+6)
		require.Zero(t, fast.Lost())
	})
}

// TestNextWaits: Next wakes for an event of its own, and for the end of ctx.
func TestNextWaits(t *testing.T) {
	bubble(t, Options{Shards: 2}, func(t *testing.T, q *Queue) {
		sub := subscribe(t, q, SubscribeOptions{Queues: []string{"a"}})
		got := make(chan ID, 3)
		for range cap(got) {
			go func() {
				if e, err := sub.Next(context.Background()); err == nil {
					got <- e.ID
				}
			}()
		}
		synctest.Wait()
		produce(t, q, Task{Queue: "b"})
		synctest.Wait()
		require.Empty(t, got)
		var read []ID
		want := produce(t, q, Task{Queue: "a"}, Task{Queue: "a"}, Task{Queue: "a"})
		for range want {
			read = append(read, <-got)
		}
		require.ElementsMatch(t, want, read, "each event goes to one reader")

		cause := errors.New("enough")
		ctx, cancel := context.WithTimeoutCause(context.Background(), time.Second, cause)
		defer cancel()
		_, err := sub.Next(ctx)
		require.ErrorIs(t, err, cause)
		produce(t, q, Task{Queue: "a"})
		_, err = sub.Next(ctx)
		require.ErrorIs(t, err, cause, "a reader that is never short of events ends too")
		require.Len(t, buffered(sub), 1)
	})
}

// TestNothingIsCollectedInVain: without interest in a change, nothing of it is
// remembered.
func TestNothingIsCollectedInVain(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		collected := func() (n int) {
			require.NoError(t, q.shard(0).probe(func(s *shard) error {
				n = cap(s.Effects.Events)
				return nil
			}))
			return n
		}
		produce(t, q, Task{Queue: "a"})
		sub := subscribe(t, q, SubscribeOptions{Kinds: []EventKind{EventDeadLettered}})
		l := claimNow(t, q, "a")
		require.Zero(t, collected())
		require.NoError(t, q.DeadLetter(context.Background(), l.Receipt, nil))
		require.NotZero(t, collected())
		require.NoError(t, q.shard(0).probe(func(s *shard) error {
			s.Effects.Events = nil
			return nil
		}))
		other := subscribe(t, q, SubscribeOptions{})
		other.Close()
		sub.Close()
		produce(t, q, Task{Queue: "a"})
		require.NoError(t, q.DeadLetter(context.Background(), claimNow(t, q, "a").Receipt, nil))
		require.Zero(t, collected())
	})
}

// TestSubscriptionCloses at any moment while events flow from several shards,
// whether it is read or not.
func TestSubscriptionCloses(t *testing.T) {
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
				if i > 0 { // the first is never read
					reader.Go(func() {
						for e, err := range sub.All(context.Background()) {
							if errors.Is(err, ErrClosed) {
								break
							}
							if err != nil || e.Queue != "a" || !eventKinds.valid(e.Kind) {
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
	require.Empty(t, q.events.all())
	require.Zero(t, q.events.wanted.Load())
	cancel()
	load.Wait()
	require.NoError(t, q.Close())
}

// TestEventsOfManyShards: the events of all shards arrive, those of a task in
// the order of its life and those of a shard in the order of its decisions.
func TestEventsOfManyShards(t *testing.T) {
	const callers, each = 8, 100
	bubble(t, Options{Shards: 4, GroupCap: 16}, func(t *testing.T, q *Queue) {
		sub := subscribe(t, q, SubscribeOptions{Buffer: 3 * callers * each})
		var wg sync.WaitGroup
		for range callers {
			wg.Go(func() {
				for range each {
					if _, err := q.Produce(context.Background(), Task{Queue: "a"}); err != nil {
						t.Error(err)
					}
				}
			})
			wg.Go(func() {
				for range each {
					l, err := q.Claim(context.Background(), ClaimRequest{Queues: []string{"a"}})
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
		lives := make(map[ID][]EventKind)
		last := make(map[int]ID) // produced last, by shard
		for _, e := range buffered(sub) {
			lives[e.ID] = append(lives[e.ID], e.Kind)
			if e.Kind == EventProduced {
				before := last[e.ID.shard(4)]
				require.Negative(t, slices.Compare(before[:], e.ID[:]))
				last[e.ID.shard(4)] = e.ID
			}
		}
		require.Len(t, lives, callers*each)
		for _, life := range lives {
			require.Equal(t, []EventKind{EventProduced, EventClaimed, EventCompleted}, life)
		}
		require.Len(t, last, 4)
		require.Zero(t, sub.Lost())
	})
}

// TestEventsEndWithClose: what the closing queue still does is told, then every
// reader learns of the end.
func TestEventsEndWithClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		q, err := Open("queue", &Options{Shards: 2, fs: vfs.NewMem()})
		require.NoError(t, err)
		full := subscribe(t, q, SubscribeOptions{})
		empty := subscribe(t, q, SubscribeOptions{Queues: []string{"none"}})
		left := subscribe(t, q, SubscribeOptions{})
		ended := make(chan error, 1)
		go func() {
			_, err := empty.Next(ctx)
			ended <- err
		}()
		produce(t, q, Task{Queue: "a"}, Task{Queue: "a"})
		synctest.Wait()
		require.NoError(t, q.Close())
		require.ErrorIs(t, <-ended, ErrClosed)
		var kinds []EventKind
		var errs []error
		for e, err := range full.All(ctx) {
			kinds, errs = append(kinds, e.Kind), append(errs, err)
		}
		require.Equal(t, []EventKind{EventProduced, EventProduced, 0}, kinds)
		require.Equal(t, []error{nil, nil, ErrClosed}, errs)
		_, err = full.Next(ctx)
		require.ErrorIs(t, err, ErrClosed)
		left.Close()
		_, err = left.Next(ctx)
		require.ErrorIs(t, err, ErrClosed, "what a closed subscription held is dropped")
		_, err = q.Subscribe(SubscribeOptions{})
		require.ErrorIs(t, err, ErrClosed)
	})
}

// eventCommitter looks at a subscription in the middle of each commit.
type eventCommitter struct {
	committer
	sub    *Subscription
	during []string // what was there
	err    error    // of the next commits; those do not happen
}

func (c *eventCommitter) Commit(b *pebble.Batch) error {
	c.during = append(c.during, brief(c.sub)...)
	if c.err != nil {
		return c.err
	}
	return c.committer.Commit(b)
}

// TestEventsFollowTheCommit: before it there are none, and none for one that fails.
func TestEventsFollowTheCommit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, err := Open("queue", &Options{Shards: 2, fs: vfs.NewMem()})
		require.NoError(t, err)
		sub := subscribe(t, q, SubscribeOptions{})
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
			c.err = errBroken
			return nil
		}))
		require.ErrorIs(t, q.Complete(context.Background(), l.Receipt, nil, Task{Queue: "a"}), ErrUncertain)
		_, err = q.startingAt(0).Produce(context.Background(), Task{Queue: "a"})
		require.ErrorIs(t, err, ErrFailed)
		require.Empty(t, c.during)
		require.Empty(t, brief(sub))
		produce(t, q.startingAt(1), Task{Queue: "a"})
		require.Equal(t, []string{"produced 0"}, brief(sub), "the other shard goes on")
		require.NoError(t, q.Close())
		require.Empty(t, brief(sub))
	})
}

// witness produces a task, and notes what a subscription has when its caller is
// about to be woken.
type witness struct {
	completion
	sub  *Subscription
	task engine.NewTask
	seen []string
}

func (w *witness) resolve(s *shard) {
	s.Probe().Admit(&w.task)
	s.settle(w)
}

func (w *witness) verb() *verb { return &internal }

func (w *witness) settle(err error) {
	w.seen = brief(w.sub)
	w.completion.settle(err)
}

// TestEventsPrecedeTheReturn: a caller finds the event of what it did.
func TestEventsPrecedeTheReturn(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		w := &witness{completion: newCompletion(), sub: subscribe(t, q, SubscribeOptions{})}
		w.task = prepare(&Task{Queue: "a"}, nil)
		_, err := q.shard(0).do(context.Background(), w, &w.completion)
		require.NoError(t, err)
		require.Equal(t, []string{"produced 0"}, w.seen)
	})
}

// TestEventsOverRestart: a queue that is opened again tells nothing of its past,
// and goes on with what was under way.
func TestEventsOverRestart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		opts := Options{Shards: 1, MaxAttempts: 2, fs: vfs.NewMem()}
		q, err := Open("queue", &opts)
		require.NoError(t, err)
		produce(t, q, Task{Queue: "a", Tenant: "t"})
		old := subscribe(t, q, SubscribeOptions{})
		l := claimNow(t, q, "a")
		require.NoError(t, q.Retry(context.Background(), l.Receipt, RetryOptions{After: -1}))
		claimNow(t, q, "a")
		require.NoError(t, q.Close())

		q, err = Open("queue", &opts)
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		sub := subscribe(t, q, SubscribeOptions{})
		synctest.Wait()
		require.Empty(t, brief(sub))
		time.Sleep(time.Minute)
		synctest.Wait()
		events := buffered(sub)
		require.Len(t, events, 2)
		for i, kind := range []EventKind{EventExpired, EventDeadLettered} {
			e := events[i]
			require.Equal(t, kind, e.Kind)
			require.Equal(t, l.ID, e.ID)
			require.Equal(t, "a t 2", fmt.Sprint(e.Queue, " ", e.Tenant, " ", e.Attempt))
		}
		require.Equal(t, []string{"claimed 1", "retried 1", "claimed 2"}, brief(old))
	})
}
