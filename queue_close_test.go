package codeq_test

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"io/fs"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// TestCloseWakesClaims: every claim that waits for a task gets ErrClosed.
func TestCloseWakesClaims(t *testing.T) {
	for _, shards := range []int{1, 3} {
		synctest.Test(t, func(t *testing.T) {
			q := queuetest.OpenForRun(t, codeq.Options{Shards: shards})
			queuetest.Produce(t, q, codeq.Task{Queue: "known", RunAt: time.Now().Add(time.Hour)})
			const each = 20
			errs := make(chan error, 3*each)
			for range each {
				go func() {
					_, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"known", "unknown"}})
					errs <- err
				}()
				go func() {
					_, err := q.Claim(context.Background(), codeq.ClaimRequest{Queues: []string{"known"}})
					errs <- err
				}()
				go func() {
					_, err := q.ClaimBatch(t.Context(), codeq.ClaimRequest{Queues: []string{"unknown", "known"}, Weights: map[string]int{"known": 2}, Max: 7})
					errs <- err
				}()
			}
			synctest.Wait()
			require.Empty(t, errs)
			require.NoError(t, q.Close())
			synctest.Wait()
			require.Len(t, errs, 3*each)
			for range 3 * each {
				require.ErrorIs(t, <-errs, codeq.ErrClosed)
			}
		})
	}
}

// TestCloseFinishesWhatWasAccepted: Close carries out operations with a place in an inbox, and
// refuses those that wait for a place.
func TestCloseFinishesWhatWasAccepted(t *testing.T) {
	for _, shards := range []int{1, 3} {
		synctest.Test(t, func(t *testing.T) {
			const depth, late = 10, 4
			opts := *queuetest.OnDisk(crashfs.New(), &codeq.Options{Shards: shards, InboxDepth: depth, GroupCap: 3})
			q := queuetest.OpenForRun(t, opts)
			gates := make([]chan struct{}, shards)
			errs := make([]chan error, shards)
			for i := range shards {
				gates[i] = queuetest.Shut(t, q, i)
				errs[i] = make(chan error, 1+depth+late)
				one := queuetest.StartingAt(q, i)
				push := func() {
					_, err := one.Produce(context.Background(), codeq.Task{Queue: "a"})
					errs[i] <- err
				}
				go push() // the owner commits it
				synctest.Wait()
				for range depth + late {
					go push()
				}
			}
			synctest.Wait()
			closed := make(chan error)
			go func() { closed <- q.Close() }()
			synctest.Wait()
			for i := range errs {
				require.Len(t, errs[i], late, "those without a place are refused at once")
				for range late {
					require.ErrorIs(t, <-errs[i], codeq.ErrClosed)
				}
			}
			select {
			case err := <-closed:
				t.Fatal("Close does not wait: ", err)
			default:
			}
			for _, g := range gates {
				close(g)
			}
			require.NoError(t, <-closed)
			for i := range errs {
				for range 1 + depth {
					require.NoError(t, <-errs[i])
				}
			}
			q = queuetest.OpenForRun(t, opts)
			require.Equal(t, codeq.Counts{Ready: uint64(shards * (1 + depth))}, queuetest.CountsOf(t, q, "a"))
		})
	}
}

// TestCloseServesAcceptedClaims: a task that was accepted before Close goes to a waiting claim,
// although Close refuses new claims.
func TestCloseServesAcceptedClaims(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		opts := *queuetest.OnDisk(crashfs.New(), &codeq.Options{LeaseFor: time.Hour})
		q := queuetest.OpenForRun(t, opts)
		claimed := make(chan *codeq.Lease, 2)
		for range 2 {
			go func() {
				l, err := q.Claim(context.Background(), codeq.ClaimRequest{Queues: []string{"a"}})
				if err != nil {
					assert.ErrorIs(t, err, codeq.ErrClosed)
				}
				claimed <- l
			}()
		}
		synctest.Wait()
		open := queuetest.Shut(t, q, 0)
		go queuetest.Produce(t, q, codeq.Task{Queue: "other"})
		synctest.Wait()
		go queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		synctest.Wait()
		closed := make(chan error)
		go func() { closed <- q.Close() }()
		synctest.Wait()
		close(open)
		require.NoError(t, <-closed)
		a, b := <-claimed, <-claimed
		require.True(t, (a == nil) != (b == nil), "one claim is served, one refused")
		q = queuetest.OpenForRun(t, opts)
		require.Equal(t, codeq.Counts{Leased: 1}, queuetest.CountsOf(t, q, "a"))
	})
}

// TestCloseManyTimes: every call of Close returns when the queue is closed.
func TestCloseManyTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		opts := *queuetest.OnDisk(crashfs.New(), &codeq.Options{Shards: 3})
		q := queuetest.OpenForRun(t, opts)
		open := queuetest.Shut(t, q, 1)
		stored := make(chan error, 1)
		go func() {
			_, err := queuetest.StartingAt(q, 1).Produce(context.Background(), codeq.Task{Queue: "a"})
			stored <- err
		}()
		synctest.Wait()
		errs := make(chan error, 10)
		for range cap(errs) {
			go func() { errs <- q.Close() }()
		}
		for range 1000 { // the other calls wait for a mutex, which synctest.Wait does not see
			runtime.Gosched()
		}
		require.Empty(t, errs)
		close(open)
		for range cap(errs) {
			require.NoError(t, <-errs)
		}
		require.NoError(t, <-stored)
		require.NoError(t, q.Close())
		require.NoError(t, queuetest.OpenForRun(t, opts).Close(), "the directory is free when Close has returned")
	})
}

// allVerbs returns calls of the verbs that wait for the owner of a shard, by name.
func allVerbs(q *codeq.Queue, r codeq.Receipt) map[string]func(context.Context) error {
	claim := codeq.ClaimRequest{Queues: []string{"a"}}
	return map[string]func(context.Context) error{
		"Produce": func(ctx context.Context) error {
			_, err := q.Produce(ctx, codeq.Task{Queue: "a"})
			return err
		},
		"ProduceBatch": func(ctx context.Context) error {
			_, err := q.ProduceBatch(ctx, []codeq.Task{{Queue: "a"}, {Queue: "b"}})
			return err
		},
		"Claim": func(ctx context.Context) error {
			_, err := q.Claim(ctx, claim)
			return err
		},
		"Claim without waiting": func(ctx context.Context) error {
			req := claim
			req.NoWait = true
			_, err := q.Claim(ctx, req)
			return err
		},
		"ClaimBatch": func(ctx context.Context) error {
			req := claim
			req.Max = 5
			_, err := q.ClaimBatch(ctx, req)
			return err
		},
		"Complete":   func(ctx context.Context) error { return q.Complete(ctx, r, nil, codeq.Task{Queue: "b"}) },
		"Retry":      func(ctx context.Context) error { return q.Retry(ctx, r, codeq.RetryOptions{After: time.Hour}) },
		"Release":    func(ctx context.Context) error { return q.Release(ctx, r, 0) },
		"DeadLetter": func(ctx context.Context) error { return q.DeadLetter(ctx, r, nil) },
		"Extend":     func(ctx context.Context) error { return q.Extend(ctx, r, time.Hour) },
		"Stats": func(ctx context.Context) error {
			_, err := q.Stats(ctx)
			return err
		},
		"WaitIdle": func(ctx context.Context) error { return q.WaitIdle(ctx) },
	}
}

// TestCallerWaitsForRoom: a caller of any verb waits while the inbox is full. When its ctx ends,
// nothing has been done, and the outcome is certain.
func TestCallerWaitsForRoom(t *testing.T) {
	reason := errors.New("no patience")
	for name := range allVerbs(nil, codeq.Receipt{}) {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := queuetest.OpenForRun(t, codeq.Options{InboxDepth: 1})
				id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
				l := queuetest.ClaimNow(t, q, "a")
				open, filled := queuetest.FillInbox(t, q)
				ctx, cancel := context.WithTimeoutCause(t.Context(), 10*time.Second, reason)
				defer cancel()
				start := time.Now()
				err := allVerbs(q, l.Receipt)[name](ctx)
				require.Equal(t, 10*time.Second, time.Since(start))
				require.ErrorIs(t, err, reason)
				close(open)
				require.NoError(t, <-filled)
				require.NoError(t, <-filled)
				require.Equal(t, codeq.Counts{Leased: 1, Ready: 2}, queuetest.CountsOf(t, q, "a"))
				require.Equal(t, codeq.Counts{}, queuetest.CountsOf(t, q, "b"))
				require.Equal(t, codeq.Leased, queuetest.InfoOf(t, q, id).State)
				require.Equal(t, l.Deadline.Unix(), queuetest.InfoOf(t, q, id).At.Unix())
			})
		})
	}
}

// TestCallerLeavesDuringCommit: a caller does not know the outcome if its ctx ends during the
// commit of its operation. A claim waits for the commit: otherwise its task would be leased without
// a worker.
func TestCallerLeavesDuringCommit(t *testing.T) {
	reason := errors.New("no patience")
	for name := range allVerbs(nil, codeq.Receipt{}) {
		switch name {
		case "Stats", "WaitIdle": // write nothing
			continue
		}
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := queuetest.OpenForRun(t, codeq.Options{MaxAttempts: 2})
				queuetest.Produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
				l := queuetest.ClaimNow(t, q, "a")
				open := queuetest.Shut(t, q, 0)
				ctx, cancel := context.WithTimeoutCause(t.Context(), 10*time.Second, reason)
				defer cancel()
				start := time.Now()
				result := make(chan error, 1)
				go func() { result <- allVerbs(q, l.Receipt)[name](ctx) }()
				time.Sleep(10 * time.Second)
				synctest.Wait()
				if strings.HasPrefix(name, "Claim") {
					require.Empty(t, result)
					close(open)
					require.NoError(t, <-result)
				} else {
					err := <-result
					require.Equal(t, 10*time.Second, time.Since(start))
					require.ErrorIs(t, err, codeq.ErrUncertain)
					require.ErrorIs(t, err, reason)
					close(open)
				}
				want := map[string]codeq.Counts{
					"Produce":               {Leased: 1, Ready: 2},
					"ProduceBatch":          {Leased: 1, Ready: 2},
					"Claim":                 {Leased: 2},
					"Claim without waiting": {Leased: 2},
					"ClaimBatch":            {Leased: 2},
					"Complete":              {Ready: 1},
					"Retry":                 {Ready: 1, Scheduled: 1},
					"Release":               {Ready: 2},
					"DeadLetter":            {Ready: 1, Dead: 1},
					"Extend":                {Leased: 1, Ready: 1},
				}[name]
				require.Equal(t, want, queuetest.CountsOf(t, q, "a"), "it was carried out all the same")
				require.NoError(t, queuetest.CheckAll(q))
			})
		})
	}
}

// TestCallersOfFailedShard: when the storage of a shard fails, the callers in the current group do
// not know the outcome. The other callers know that nothing was done.
func TestCallersOfFailedShard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{InboxDepth: 1})
		waiting := make(chan error, 1)
		go func() {
			_, err := q.Claim(context.Background(), codeq.ClaimRequest{Queues: []string{"z"}})
			waiting <- err
		}()
		synctest.Wait()
		queuetest.FailShard(t, q, 0)
		open, filled := queuetest.FillInbox(t, q)
		late := make(chan error, 1)
		go func() {
			_, err := q.Produce(context.Background(), codeq.Task{Queue: "a"})
			late <- err
		}()
		synctest.Wait()
		close(open)
		uncertain := 0
		for _, errs := range []chan error{filled, filled, late, waiting} {
			err := <-errs
			require.ErrorIs(t, err, testkit.ErrDisk)
			if errors.Is(err, codeq.ErrUncertain) {
				uncertain++
			} else {
				require.ErrorIs(t, err, codeq.ErrFailed)
			}
		}
		require.Equal(t, 1, uncertain, "one produce was in the group")
	})
}

// TestCloseTellsFailure: each call of Close reports a failed shard, even if its owner failed and
// not its store. The queue can be opened again afterwards.
func TestCloseTellsFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		opts := queuetest.OnDisk(crashfs.New(), &codeq.Options{Shards: 3})
		q, err := codeq.Open("queue", opts)
		require.NoError(t, err)
		queuetest.FailShard(t, q, 1)
		for err == nil {
			_, err = q.Produce(t.Context(), codeq.Task{Queue: "a"})
		}
		require.ErrorIs(t, err, codeq.ErrUncertain)
		for range 2 {
			err = q.Close()
			require.ErrorIs(t, err, codeq.ErrFailed)
			require.ErrorIs(t, err, testkit.ErrDisk)
			require.ErrorContains(t, err, "shard 1")
			requirePrefix(t, "Close", err)
		}
		q, err = codeq.Open("queue", opts)
		require.NoError(t, err)
		require.NoError(t, q.Close())
	})
}

var closeRounds = flag.Int("close.rounds", 0, "how many queues TestCloseRaces closes; 0: 30, 200 with -long")

// TestCloseRaces: at any moment of Close, each verb is carried out or refused, and acknowledged
// changes are there after the next Open.
func TestCloseRaces(t *testing.T) {
	t.Parallel()
	rounds := cmp.Or(*closeRounds, testkit.Sized(30, 200))
	calls := int64(0)
	for round := range rounds {
		calls += closeRace(t, 1+round%3, int64(1+round%30*8))
	}
	t.Logf("%d calls in %d rounds", calls, rounds)
}

// closeRace closes a queue once that many calls of all verbs have begun, while calls go on. It
// returns the number of calls.
func closeRace(t *testing.T, shards int, after int64) int64 {
	opts := *queuetest.OnDisk(crashfs.New(), &codeq.Options{Shards: shards, LeaseFor: time.Hour, Retention: codeq.Forever, InboxDepth: 2})
	q, err := codeq.Open("q", &opts)
	require.NoError(t, err)
	var m codeq.Mux
	codeq.Handle(&m, "run", func(context.Context, *codeq.Job[[]byte]) error { return nil })

	var calls atomic.Int64
	reached := make(chan struct{})
	var workers sync.WaitGroup
	var mu sync.Mutex // guards the counts of acknowledged changes, by queue
	made, done := make(map[string]int), make(map[string]int)
	work := func(cycle func() error) {
		workers.Go(func() {
			for {
				if calls.Add(1) == after {
					close(reached)
				}
				if err := cycle(); err != nil {
					if !errors.Is(err, codeq.ErrClosed) || errors.Is(err, codeq.ErrUncertain) {
						t.Errorf("refused with %v", err)
					}
					return
				}
			}
		})
	}
	acknowledged := func(counts map[string]int, name string, n int) {
		mu.Lock()
		defer mu.Unlock()
		counts[name] += n
	}
	ctx := context.Background()
	cancellable, cancel := context.WithCancel(ctx)
	defer cancel()
	for _, name := range []string{"a", "run"} {
		work(func() error {
			_, err := q.Produce(cancellable, codeq.Task{Queue: name})
			if err == nil {
				acknowledged(made, name, 1)
			}
			return err
		})
	}
	work(func() error {
		_, err := q.ProduceBatch(ctx, []codeq.Task{{Queue: "a"}, {Queue: "a"}, {Queue: "a"}})
		if err == nil {
			acknowledged(made, "a", 3)
		}
		return err
	})
	for i := range 4 { // claim, and finish in every way
		work(func() error {
			leases, err := q.ClaimBatch(cancellable, codeq.ClaimRequest{Queues: []string{"a"}, Max: 3})
			if err != nil {
				return err
			}
			for n, l := range leases {
				switch (i + n) % 4 {
				case 0, 1:
					if err = q.Complete(ctx, l.Receipt, nil, codeq.Task{Queue: "next"}); err == nil {
						acknowledged(done, "a", 1)
						acknowledged(made, "next", 1)
					}
				case 2:
					err = q.Retry(cancellable, l.Receipt, codeq.RetryOptions{After: -1})
				default:
					if err = q.Extend(ctx, l.Receipt, time.Hour); err == nil {
						err = q.Release(ctx, l.Receipt, 0)
					}
				}
				if err != nil {
					return err
				}
			}
			return nil
		})
	}
	work(func() error {
		_, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"never"}})
		return err
	})
	work(func() error {
		err := q.Configure(ctx, "configured", func(s *codeq.Settings) { s.Burst++ })
		if err == nil {
			acknowledged(made, "configured", 1)
		}
		return err
	})
	others := everyVerb(t, q, &m)
	for name, verb := range others {
		work(func() error {
			err := verb(cancellable)
			for _, answer := range []error{codeq.ErrNotFound, codeq.ErrNotWaiting, codeq.ErrLeaseLost, codeq.ErrEmpty, codeq.ErrDuplicate, codeq.ErrNotEmpty, fs.ErrExist} {
				if errors.Is(err, answer) {
					return nil
				}
			}
			if errors.Is(err, codeq.ErrNoCluster) || errors.Is(err, errors.ErrUnsupported) { // the only error of such a verb
				return codeq.ErrClosed
			}
			if err != nil && !errors.Is(err, codeq.ErrClosed) {
				t.Errorf("%s: %v", name, err)
			}
			return err
		})
	}
	<-reached
	var closers sync.WaitGroup
	for range 2 {
		closers.Go(func() { assert.NoError(t, q.Close()) })
	}
	closers.Wait()
	workers.Wait()

	q, err = codeq.Open("q", &opts)
	require.NoError(t, err)
	counts, err := q.Stats(ctx)
	require.NoError(t, err)
	for _, name := range []string{"a", "run", "next"} {
		require.EqualValues(t, made[name], counts[name].Total(), "tasks of queue %s", name)
	}
	require.EqualValues(t, done["a"], counts["a"].Done)
	require.Zero(t, counts["run"].Leased, "Run has ended in peace")
	set, err := q.Settings("configured")
	require.NoError(t, err)
	require.Equal(t, made["configured"], set.Burst)
	require.NoError(t, queuetest.CheckAll(q))
	require.NoError(t, q.Close())
	return calls.Load()
}

// everyVerb returns all methods of a Queue but Close, by name, with arguments that fit their types.
// Their results are read to the end.
func everyVerb(t *testing.T, q *codeq.Queue, m *codeq.Mux) map[string]func(context.Context) error {
	tasks := []codeq.Task{
		{Queue: "verbs", Retention: time.Hour, Unique: codeq.Unique{Key: "k"}},
		{Queue: "verbs", RunAt: time.Now().Add(time.Hour)},
		{Queue: "verbs", Group: "g", LimitKey: "l"},
	}
	ids := make([]codeq.ID, len(tasks))
	for i := range tasks {
		var err error
		ids[i], err = q.Produce(context.Background(), tasks[i])
		require.NoError(t, err)
	}
	sub, err := q.Subscribe(codeq.SubscribeOptions{})
	require.NoError(t, err)
	t.Cleanup(sub.Close)
	return queuetest.VerbsOf(t, q, m, tasks, ids)
}

// TestLifeOfATask follows one task through every state.
func TestLifeOfATask(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		q, err := codeq.Open("q", queuetest.OnDisk(crashfs.New(), &codeq.Options{Shards: 2, Retention: time.Hour}))
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		state := func(id codeq.ID) codeq.State {
			info, err := q.Get(ctx, id)
			require.NoError(t, err)
			require.NoError(t, queuetest.CheckAll(q))
			require.NoError(t, queuetest.CheckMemory(q))
			return info.State
		}

		id, err := q.Produce(ctx, codeq.Task{
			Queue: "a", Payload: []byte("x"), Headers: map[string]string{"k": "v"}, Tenant: "t", Priority: 3, MaxAttempts: 4,
			RunAt: time.Now().Add(time.Minute),
		})
		require.NoError(t, err)
		require.Equal(t, codeq.Scheduled, state(id))
		l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}}) // waits for a minute
		require.NoError(t, err)
		require.Equal(t, id, l.ID)
		require.Equal(t, 1, l.Attempt)
		require.Equal(t, "x", string(l.Payload))
		require.Equal(t, "v", l.Headers["k"])
		require.Equal(t, codeq.Leased, state(id))
		require.NoError(t, q.Retry(ctx, l.Receipt, codeq.RetryOptions{Err: errors.New("boom"), After: -1}))
		require.Equal(t, codeq.Ready, state(id))

		l2, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}})
		require.NoError(t, err)
		require.Equal(t, 2, l2.Attempt)
		require.Equal(t, "boom", l2.LastError)
		require.ErrorIs(t, q.Complete(ctx, l.Receipt, nil), codeq.ErrLeaseLost)
		time.Sleep(30 * time.Second)
		synctest.Wait()
		require.ErrorIs(t, q.Complete(ctx, l2.Receipt, nil), codeq.ErrLeaseLost)
		require.Equal(t, codeq.Ready, state(id))

		l3, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}, NoWait: true})
		require.NoError(t, err)
		require.Equal(t, 3, l3.Attempt)
		require.NoError(t, q.Complete(ctx, l3.Receipt, []byte("r"), codeq.Task{Queue: "b"}))
		require.Equal(t, codeq.Done, state(id))
		info, err := q.Get(ctx, id)
		require.NoError(t, err)
		require.Equal(t, "r", string(info.Result))
		counts, err := q.Stats(ctx)
		require.NoError(t, err)
		require.Equal(t, map[string]codeq.Counts{"a": {Done: 1}, "b": {Ready: 1}}, counts)

		l4, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a", "b"}})
		require.NoError(t, err)
		require.Equal(t, queuetest.ShardOf(id, 2), queuetest.ShardOf(l4.ID, 2), "a follow-up lies beside its parent")
		require.NoError(t, q.DeadLetter(ctx, l4.Receipt, errors.New("given up")))
		require.Equal(t, codeq.Dead, state(l4.ID))

		time.Sleep(time.Hour * 9 / 8) // the end of its bucket
		synctest.Wait()
		_, err = q.Get(ctx, id)
		require.ErrorIs(t, err, codeq.ErrNotFound)
		require.NoError(t, queuetest.CheckAll(q))
	})
}
