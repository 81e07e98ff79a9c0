package codeq_test

import (
	"context"
	"errors"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/testkit"
)

// TestCloseWakesClaims: whatever waits for a task gets ErrClosed.
func TestCloseWakesClaims(t *testing.T) {
	for _, shards := range []int{1, 3} {
		synctest.Test(t, func(t *testing.T) {
			q := openForRun(t, codeq.Options{Shards: shards})
			produce(t, q, codeq.Task{Queue: "known", RunAt: time.Now().Add(time.Hour)})
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

// TestCloseEndsRates: a call that waits for its rate gets ErrClosed at once.
func TestCloseEndsRates(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for name, call := range map[string]func(*codeq.Queue) error{
			"Bulk": func(q *codeq.Queue) error {
				_, err := q.Bulk(context.Background(), codeq.BulkOptions{Action: codeq.BulkRedrive, Rate: 0.01})
				return err
			},
			"RedriveAllDead": func(q *codeq.Queue) error {
				_, err := q.RedriveAllDead(context.Background(), codeq.DeadFilter{Rate: 0.01})
				return err
			},
			"PurgeDead": func(q *codeq.Queue) error {
				_, err := q.PurgeDead(context.Background(), codeq.DeadFilter{Rate: 0.01})
				return err
			},
		} {
			q := openForRun(t, codeq.Options{})
			for range 3 {
				produce(t, q, codeq.Task{Queue: "a"})
				require.NoError(t, q.DeadLetter(context.Background(), claimNow(t, q, "a").Receipt, nil))
			}
			ended := make(chan error, 1)
			go func() { ended <- call(q) }()
			synctest.Wait()
			closed := time.Now()
			require.NoError(t, q.Close())
			require.ErrorIs(t, <-ended, codeq.ErrClosed, name)
			require.Less(t, time.Since(closed), time.Second, name)
		}
	})
}

// TestCloseFinishesWhatWasAccepted: an operation that has a place in an inbox
// is carried out, and one that waits for a place is refused.
func TestCloseFinishesWhatWasAccepted(t *testing.T) {
	for _, shards := range []int{1, 3} {
		synctest.Test(t, func(t *testing.T) {
			const depth, late = 10, 4
			opts := *onDisk(crashfs.New(), &codeq.Options{Shards: shards, InboxDepth: depth, GroupCap: 3})
			q := openForRun(t, opts)
			gates := make([]chan struct{}, shards)
			errs := make([]chan error, shards)
			for i := range shards {
				gates[i] = shut(t, q, i)
				errs[i] = make(chan error, 1+depth+late)
				one := startingAt(q, i)
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
			q = openForRun(t, opts)
			require.Equal(t, codeq.Counts{Ready: uint64(shards * (1 + depth))}, countsOf(t, q, "a"))
		})
	}
}

// TestCloseServesAcceptedClaims: a claim is served by what was accepted before
// Close, although nobody may claim after it.
func TestCloseServesAcceptedClaims(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		opts := *onDisk(crashfs.New(), &codeq.Options{LeaseFor: time.Hour})
		q := openForRun(t, opts)
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
		open := shut(t, q, 0)
		go produce(t, q, codeq.Task{Queue: "other"})
		synctest.Wait()
		go produce(t, q, codeq.Task{Queue: "a"})
		synctest.Wait()
		closed := make(chan error)
		go func() { closed <- q.Close() }()
		synctest.Wait()
		close(open)
		require.NoError(t, <-closed)
		a, b := <-claimed, <-claimed
		require.True(t, (a == nil) != (b == nil), "one claim is served, one refused")
		q = openForRun(t, opts)
		require.Equal(t, codeq.Counts{Leased: 1}, countsOf(t, q, "a"))
	})
}

// TestCloseManyTimes: every call of Close returns when the queue is closed.
func TestCloseManyTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		opts := *onDisk(crashfs.New(), &codeq.Options{Shards: 3})
		q := openForRun(t, opts)
		open := shut(t, q, 1)
		stored := make(chan error, 1)
		go func() {
			_, err := startingAt(q, 1).Produce(context.Background(), codeq.Task{Queue: "a"})
			stored <- err
		}()
		synctest.Wait()
		errs := make(chan error, 10)
		for range cap(errs) {
			go func() { errs <- q.Close() }()
		}
		for range 1000 { // those behind the first wait for a mutex, which synctest.Wait does not take for waiting
			runtime.Gosched()
		}
		require.Empty(t, errs)
		close(open)
		for range cap(errs) {
			require.NoError(t, <-errs)
		}
		require.NoError(t, <-stored)
		require.NoError(t, q.Close())
		require.NoError(t, openForRun(t, opts).Close(), "the directory is free when Close has returned")
	})
}

// allVerbs calls everything that a Queue can do, by name.
func allVerbs(q *codeq.Queue, r codeq.Receipt, m *codeq.Mux) map[string]func(context.Context) error {
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
		"Get": func(ctx context.Context) error {
			_, err := q.Get(ctx, r.ID)
			return err
		},
		"List": func(ctx context.Context) error {
			for _, err := range q.List(ctx, codeq.ListOptions{State: codeq.Ready}) {
				if err != nil {
					return err
				}
			}
			return nil
		},
		"Stats": func(ctx context.Context) error {
			_, err := q.Stats(ctx)
			return err
		},
		"WaitIdle": func(ctx context.Context) error { return q.WaitIdle(ctx) },
		"Run":      func(ctx context.Context) error { return q.Run(ctx, m, nil) },
	}
}

// TestVerbsAfterClose: nothing works on a closed queue, and nothing hangs.
func TestVerbsAfterClose(t *testing.T) {
	for _, shards := range []int{1, 3} {
		synctest.Test(t, func(t *testing.T) {
			q := openForRun(t, codeq.Options{Shards: shards})
			var m codeq.Mux
			codeq.Handle(&m, "a", untilCancelled)
			produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
			l := claimNow(t, q, "a")
			require.NoError(t, q.Close())
			for name, verb := range allVerbs(q, l.Receipt, &m) {
				require.ErrorIs(t, verb(t.Context()), codeq.ErrClosed, name)
			}
		})
	}
}

// TestCallerWaitsForRoom: a caller of any verb waits while the inbox is full.
// When its ctx ends, nothing has been done, and it knows.
func TestCallerWaitsForRoom(t *testing.T) {
	reason := errors.New("no patience")
	for name := range allVerbs(nil, codeq.Receipt{}, nil) {
		switch name {
		case "Get", "List": // do not ask the owner
			continue
		case "Run": // ends without an error
			continue
		}
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := openForRun(t, codeq.Options{InboxDepth: 1})
				id := produce(t, q, codeq.Task{Queue: "a"})[0]
				l := claimNow(t, q, "a")
				open, filled := fillInbox(t, q)
				ctx, cancel := context.WithTimeoutCause(t.Context(), 10*time.Second, reason)
				defer cancel()
				start := time.Now()
				err := allVerbs(q, l.Receipt, nil)[name](ctx)
				require.Equal(t, 10*time.Second, time.Since(start))
				require.ErrorIs(t, err, reason)
				close(open)
				require.NoError(t, <-filled)
				require.NoError(t, <-filled)
				require.Equal(t, codeq.Counts{Leased: 1, Ready: 2}, countsOf(t, q, "a"))
				require.Equal(t, codeq.Counts{}, countsOf(t, q, "b"))
				require.Equal(t, codeq.Leased, infoOf(t, q, id).State)
				require.Equal(t, l.Deadline.Unix(), infoOf(t, q, id).At.Unix())
			})
		})
	}
}

// TestCallerWithEndedContext: nothing is done for it, even if there is room.
func TestCallerWithEndedContext(t *testing.T) {
	reason := errors.New("too late")
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, codeq.Options{Shards: 3})
		produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
		l := claimNow(t, q, "a")
		ctx, cancel := context.WithCancelCause(t.Context())
		cancel(reason)
		for range 20 { // no select is to choose by chance
			for name, verb := range allVerbs(q, l.Receipt, nil) {
				if name != "Run" {
					err := verb(ctx)
					require.ErrorIs(t, err, reason, name)
					require.ErrorIs(t, err, context.Canceled, name)
					require.NotErrorIs(t, err, codeq.ErrUncertain, name)
				}
			}
		}
		require.Equal(t, codeq.Counts{Leased: 1, Ready: 1}, countsOf(t, q, "a"))
		require.Equal(t, codeq.Counts{}, countsOf(t, q, "b"))
	})
}

// TestCallerLeavesDuringCommit: a caller whose ctx ends while its operation is
// being committed does not know the outcome. A claim waits for it, or its task
// would be leased by nobody.
func TestCallerLeavesDuringCommit(t *testing.T) {
	reason := errors.New("no patience")
	for name := range allVerbs(nil, codeq.Receipt{}, nil) {
		switch name {
		case "Get", "List", "Stats", "WaitIdle", "Run": // write nothing
			continue
		}
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := openForRun(t, codeq.Options{MaxAttempts: 2})
				produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
				l := claimNow(t, q, "a")
				open := shut(t, q, 0)
				ctx, cancel := context.WithTimeoutCause(t.Context(), 10*time.Second, reason)
				defer cancel()
				start := time.Now()
				result := make(chan error, 1)
				go func() { result <- allVerbs(q, l.Receipt, nil)[name](ctx) }()
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
				require.Equal(t, want, countsOf(t, q, "a"), "it was carried out all the same")
				require.NoError(t, checkAll(q))
			})
		})
	}
}

// TestCallersOfFailedShard: of the callers at the moment at which a shard's
// storage fails, those of the group do not know the outcome, and the others
// know that there is none.
func TestCallersOfFailedShard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, codeq.Options{InboxDepth: 1})
		waiting := make(chan error, 1)
		go func() {
			_, err := q.Claim(context.Background(), codeq.ClaimRequest{Queues: []string{"z"}})
			waiting <- err
		}()
		synctest.Wait()
		failShard(t, q, 0)
		open, filled := fillInbox(t, q)
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

// TestCloseTellsFailure: when a shard has failed, also by a fault of its owner, of which its store
// knows nothing, Close says so, each time, and the queue is open again afterwards.
func TestCloseTellsFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		opts := onDisk(crashfs.New(), &codeq.Options{Shards: 3})
		q, err := codeq.Open("queue", opts)
		require.NoError(t, err)
		failShard(t, q, 1)
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
