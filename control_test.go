package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/container/recent"
	"codeq/test/queuetest"
)

// TestCanceledLeasesAreBounded: the shard remembers only the latest of many canceled leases.
func TestCanceledLeasesAreBounded(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		ctx := context.Background()
		const n = 2*recent.Capacity + 3
		_, err := q.ProduceBatch(ctx, slices.Repeat([]codeq.Task{{Queue: "a"}}, n))
		require.NoError(t, err)
		leases, err := q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{"a"}, Max: n})
		require.NoError(t, err)
		require.Len(t, leases, n)
		for _, l := range leases {
			require.NoError(t, q.Cancel(ctx, l.ID))
		}
		for i, l := range leases {
			err := q.Complete(ctx, l.Receipt, nil)
			require.ErrorIs(t, err, codeq.ErrLeaseLost)
			require.Equal(t, i >= n-recent.Capacity, errors.Is(err, codeq.ErrCanceled), i)
		}
	})
}

// TestCancelRunning: the context of a canceled task's handler ends at once, and the handler's
// result has no effect.
func TestCancelRunning(t *testing.T) {
	t.Parallel()
	for name, verdict := range map[string]error{
		"completed": nil, "failed": errors.New("boom"), "snoozed": codeq.Snooze(time.Second), "given up": codeq.DeadLetter(errors.New("boom")),
	} {
		t.Run(name, func(t *testing.T) {
			queuetest.ThroughSteps(t, codeq.Options{Shards: 2, Retention: codeq.Forever}, func(t *testing.T, p *queuetest.Process) {
				start := time.Now()
				var m codeq.Mux
				var mu sync.Mutex // guards causes
				causes := make(map[codeq.ID]error)
				var told time.Duration
				codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
					select {
					case <-ctx.Done():
					case <-time.After(time.Hour):
					}
					mu.Lock()
					defer mu.Unlock()
					causes[j.ID] = context.Cause(ctx)
					if ctx.Err() != nil {
						told = time.Since(start)
					}
					j.FollowUp(codeq.Task{Queue: "b"})
					return verdict
				})
				run := startRun(t, p.Queue, &m, codeq.RunOptions{Concurrency: 2, Grace: 2 * time.Hour})
				id := p.Store(codeq.Task{Queue: "a"})
				p.Pass(time.Minute)
				require.NoError(t, p.Cancel(context.Background(), id))
				p.Check()
				mu.Lock()
				require.Len(t, causes, 1)
				require.ErrorIs(t, causes[id], codeq.ErrCanceled)
				mu.Unlock()
				require.Equal(t, time.Minute, told)
				reports := run.Reported()
				require.Len(t, reports, 1)
				require.ErrorIs(t, reports[0], codeq.ErrCanceled)
				p.Step()
				p.Pass(time.Hour)
				require.Equal(t, codeq.Counts{Canceled: 1}, queuetest.CountsOf(t, p.Queue, "a"))
				require.Equal(t, codeq.Counts{}, queuetest.CountsOf(t, p.Queue, "b"))
				require.Equal(t, 1, queuetest.InfoOf(t, p.Queue, id).Attempts)
			})
		})
	}
}

// TestSetRunAtWakesClaims: a waiting claim gets a task that SetRunAt makes ready.
func TestSetRunAtWakesClaims(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 2}, func(t *testing.T, q *codeq.Queue) {
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a", RunAt: time.Now().Add(time.Hour)})[0]
		got := make(chan codeq.ID, 1)
		go func() {
			l, err := q.Claim(context.Background(), codeq.ClaimRequest{Queues: []string{"a"}})
			require.NoError(t, err)
			got <- l.ID
		}()
		synctest.Wait()
		require.NoError(t, q.SetRunAt(context.Background(), id, time.Time{}))
		synctest.Wait()
		require.Equal(t, id, <-got)
		require.NoError(t, queuetest.CheckMemory(q))
	})
}

// TestChangesAreRefused: SetPriority and SetRunAt refuse values out of bounds and unknown tasks.
func TestChangesAreRefused(t *testing.T) {
	ctx := context.Background()
	q := openLimited(t)
	id := queuetest.Produce(t, q.Queue, codeq.Task{Queue: "a"})[0]
	for _, err := range []error{q.SetPriority(ctx, codeq.ID{}, 5), q.SetRunAt(ctx, codeq.ID{}, time.Time{})} {
		require.ErrorIs(t, err, codeq.ErrNotFound)
	}
	for _, priority := range []int{-1, 10, math.MinInt} {
		q.refused("SetPriority priority", priority, "0 to 9", func() error { return q.SetPriority(ctx, id, priority) })
	}
	for _, at := range []time.Time{firstMoment.Add(-1), lastMoment.Add(1)} {
		q.refused("Task.RunAt", at, "the years 0 to 9999 in UTC", func() error { return q.SetRunAt(ctx, id, at) })
	}
}

// TestPause: claims get no tasks from a paused queue, even after restarts. Waiting claims get the
// tasks when the queue is resumed.
func TestPause(t *testing.T) {
	t.Parallel()
	for _, shards := range []int{1, 3} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			queuetest.ThroughSteps(t, codeq.Options{Shards: shards, LeaseFor: 24 * time.Hour}, func(t *testing.T, p *queuetest.Process) {
				ctx := context.Background()
				var got chan codeq.ID
				wait := func() { // starts claims that wait, as a new process does
					got = make(chan codeq.ID, 5)
					for range 5 {
						go func(q *codeq.Queue, got chan codeq.ID) {
							if l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}}); err == nil {
								got <- l.ID
							}
						}(p.Queue, got)
					}
					synctest.Wait()
				}
				p.Store(codeq.Task{Queue: "a"})
				l := p.Take("a")
				wait()
				require.NoError(t, p.Pause(ctx, "a"))
				set, err := p.Settings("a")
				require.NoError(t, err)
				require.True(t, set.Paused)
				ids := make(map[codeq.ID]bool)
				for range 3 {
					ids[p.Store(codeq.Task{Queue: "a"})] = true
				}
				ids[p.Store(codeq.Task{Queue: "a", RunAt: p.Now().Add(time.Minute)})] = true
				p.Check()
				require.Empty(t, got)
				p.Step()
				if p.Ends() {
					wait()
				}
				p.Pass(time.Minute)
				require.NoError(t, p.Extend(ctx, l.Receipt, time.Hour))
				// Leased tasks continue.
				require.NoError(t, p.Retry(ctx, l.Receipt, codeq.RetryOptions{After: -1}))
				ids[l.ID] = true
				synctest.Wait()
				require.Empty(t, got)
				require.Nil(t, queuetest.ClaimNow(t, p.Queue, "a"))
				require.Equal(t, codeq.Counts{Ready: 5}, queuetest.CountsOf(t, p.Queue, "a"))
				other := p.Store(codeq.Task{Queue: "b"})
				require.Equal(t, other, queuetest.ClaimNow(t, p.Queue, "a", "b").ID)

				require.NoError(t, p.Pause(ctx, "a")) // again
				require.NoError(t, p.Resume(ctx, "a"))
				p.Check()
				require.Len(t, got, 5)
				for range 5 {
					id := <-got
					require.True(t, ids[id])
					delete(ids, id)
				}
				p.Step()
				next := p.Store(codeq.Task{Queue: "a"})
				require.Equal(t, next, p.Take("a").ID)
			})
		})
	}
}

// TestPauseRefused: Pause and Resume refuse invalid names of queues and contexts that have ended.
func TestPauseRefused(t *testing.T) {
	q := openLimited(t)
	ctx := context.Background()
	for _, verb := range []func(context.Context, string) error{q.Pause, q.Resume} {
		q.refused("queue", `""`, "a name", func() error { return verb(ctx, "") })
		q.refused("queue", "11 bytes", "at most 10 bytes", func() error { return verb(ctx, text(11)) })
		ended, end := context.WithCancelCause(ctx)
		end(errBubbleOver)
		require.ErrorIs(t, verb(ended, "a"), errBubbleOver)
	}
	set, err := q.Settings("a")
	require.NoError(t, err)
	require.False(t, set.Paused)
	require.NoError(t, q.Pause(ctx, "unheard of")) // before the queue has a task
	queuetest.Produce(t, q.Queue, codeq.Task{Queue: "unheard of"})
	require.Nil(t, queuetest.ClaimNow(t, q.Queue, "unheard of"))
}
