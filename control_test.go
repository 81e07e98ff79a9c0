package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/container/recent"
	"codeq/internal/keys"
	"codeq/test/queuetest"
)

// TestCancelLease: after Cancel, every call with the task's receipt returns ErrCanceled and has no
// effect.
func TestCancelLease(t *testing.T) {
	queuetest.ThroughSteps(t, codeq.Options{Shards: 2, Retention: codeq.Forever}, func(t *testing.T, p *queuetest.Process) {
		ctx := context.Background()
		id := p.Store(codeq.Task{Queue: "a"})
		r := p.Take("a").Receipt
		p.Step()
		require.NoError(t, p.Cancel(ctx, id))
		verbs := []func() error{
			func() error { return p.Complete(ctx, r, []byte("result"), codeq.Task{Queue: "next"}) },
			func() error { return p.Extend(ctx, r, time.Hour) },
			func() error { return p.Retry(ctx, r, codeq.RetryOptions{}) },
			func() error { return p.Release(ctx, r, 0) },
			func() error { return p.DeadLetter(ctx, r, nil) },
		}
		for i, verb := range verbs {
			err := verb()
			require.ErrorIs(t, err, codeq.ErrLeaseLost, i)
			require.ErrorIs(t, err, codeq.ErrCanceled, i)
		}
		p.Step()
		for i, verb := range verbs { // after a restart, the error is less specific
			require.ErrorIs(t, verb(), codeq.ErrLeaseLost, i)
		}
		p.Pass(time.Hour)
		require.Equal(t, codeq.Counts{Canceled: 1}, queuetest.CountsOf(t, p.Queue, "a"))
		require.Equal(t, codeq.Counts{}, queuetest.CountsOf(t, p.Queue, "next"))
	})
}

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

// TestCancelRace: many calls end a leased task at the same time, and exactly one call succeeds.
func TestCancelRace(t *testing.T) {
	t.Parallel()
	queuetest.ThroughSteps(t, codeq.Options{Shards: 2, GroupCap: 3, Retention: codeq.Forever}, func(t *testing.T, p *queuetest.Process) {
		ctx := context.Background()
		for range 50 {
			id := p.Store(queuetest.Keyed("k"))
			l := p.Take("a")
			var wg sync.WaitGroup
			var won atomic.Int64
			for i := range 12 {
				wg.Go(func() {
					var err error
					if i%2 == 0 {
						err = p.Cancel(ctx, id)
					} else {
						err = p.Complete(ctx, l.Receipt, nil, codeq.Task{Queue: "next"})
					}
					if err == nil {
						won.Add(1)
					}
				})
			}
			wg.Wait()
			require.EqualValues(t, 1, won.Load())
		}
		counts := queuetest.CountsOf(t, p.Queue, "a")
		require.EqualValues(t, 50, counts.Done+counts.Canceled)
		require.Equal(t, counts.Done, queuetest.CountsOf(t, p.Queue, "next").Ready)
		require.Zero(t, p.Stored(keys.Unique))
	})
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

// TestPauseRun: Run starts no tasks of a paused queue, and finishes the tasks that it has.
func TestPauseRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Shards: 2, Retention: codeq.Forever})
		ctx := context.Background()
		var m codeq.Mux
		calls := newCallRecorder()
		codeq.Handle(&m, "a", func(_ context.Context, j *codeq.Job[[]byte]) error {
			calls.add(j.Lease)
			time.Sleep(time.Minute)
			return nil
		})
		startRun(t, q, &m, codeq.RunOptions{Concurrency: 4})
		queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		synctest.Wait()
		require.NoError(t, q.Pause(ctx, "a"))
		queuetest.Produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
		time.Sleep(time.Hour)
		synctest.Wait()
		require.Len(t, calls.all(), 1)
		require.Equal(t, codeq.Counts{Ready: 2, Done: 1}, queuetest.CountsOf(t, q, "a"))
		require.NoError(t, q.Resume(ctx, "a"))
		synctest.Wait()
		require.Len(t, calls.all(), 3)
		time.Sleep(time.Minute)
	})
}

// TestSnooze: a snoozed task keeps its number of attempts, its key, and the turn of its group, also
// over a restart.
func TestSnooze(t *testing.T) {
	queuetest.ThroughSteps(t, codeq.Options{Shards: 1, Retention: codeq.Forever}, func(t *testing.T, p *queuetest.Process) {
		ctx := context.Background()
		task := codeq.Task{Queue: "a", Group: "g", MaxAttempts: 1, Unique: codeq.Unique{Key: "k", For: time.Second}}
		var calls *callRecorder
		work := func() *activeRun {
			var m codeq.Mux
			calls = newCallRecorder()
			codeq.Handle(&m, "a", func(_ context.Context, j *codeq.Job[[]byte]) error {
				if calls.add(j.Lease); len(j.Payload) == 0 {
					return codeq.Snooze(time.Hour)
				}
				return nil
			})
			return startRun(t, p.Queue, &m, codeq.RunOptions{})
		}
		run := work()
		id := p.Store(task)
		other := p.Store(codeq.Task{Queue: "a", Group: "g", Payload: []byte("x")})
		for range 2 {
			synctest.Wait()
			require.Len(t, calls.all(), 1)
			require.Equal(t, id, calls.all()[0].id)
			require.Equal(t, 1, calls.all()[0].attempt)
			info := queuetest.InfoOf(t, p.Queue, id)
			require.Equal(t, codeq.Scheduled, info.State)
			require.Zero(t, info.Attempts)
			require.Empty(t, info.LastError)
			require.Empty(t, run.Reported())
			p.Taken(task, id)
			require.NoError(t, run.End(nil))
			p.Step()
			p.Pass(time.Hour)
			require.Equal(t, codeq.Ready, p.StateOf(id))
			require.Equal(t, codeq.Blocked, p.StateOf(other))
			run = work()
		}
		synctest.Wait()
		require.NoError(t, p.Cancel(ctx, id))
		p.Check()
		require.Equal(t, codeq.Done, p.StateOf(other))
		require.NoError(t, run.End(nil))
	})
}

// inState is a way to bring a task of queue "a", with an idempotency key, into a state.
type inState struct {
	name  string
	state codeq.State
	reach func(p *queuetest.Process, task codeq.Task) codeq.ID
}

// waitingStates are the states of a waiting task.
var waitingStates = []inState{
	{"ready", codeq.Ready, func(p *queuetest.Process, task codeq.Task) codeq.ID { return p.Store(task) }},
	{"given back", codeq.Ready, func(p *queuetest.Process, task codeq.Task) codeq.ID {
		id := p.Store(task)
		require.NoError(p.T, p.Release(context.Background(), p.Take("a").Receipt, 0))
		return id
	}},
	{"scheduled", codeq.Scheduled, func(p *queuetest.Process, task codeq.Task) codeq.ID {
		task.RunAt = p.Now().Add(time.Hour)
		return p.Store(task)
	}},
	{"between two attempts", codeq.Scheduled, func(p *queuetest.Process, task codeq.Task) codeq.ID {
		id := p.Store(task)
		require.NoError(p.T, p.Retry(context.Background(), p.Take("a").Receipt, codeq.RetryOptions{After: time.Hour}))
		return id
	}},
	{"for a parent", codeq.Blocked, func(p *queuetest.Process, task codeq.Task) codeq.ID {
		task.After = []codeq.ID{p.Store(codeq.Task{Queue: "parents"})}
		return p.Store(task)
	}},
	{"for the turn of its group", codeq.Blocked, func(p *queuetest.Process, task codeq.Task) codeq.ID {
		task.Group = "g"
		p.Store(codeq.Task{Queue: "a", Group: "g", RunAt: p.Now().Add(time.Millisecond)})
		p.Pass(time.Millisecond)
		return p.Store(task)
	}},
	{"for room in its limit", codeq.Blocked, func(p *queuetest.Process, task codeq.Task) codeq.ID {
		task.LimitKey = "l"
		require.NoError(p.T, p.Configure(context.Background(), "a", func(s *codeq.Settings) { s.ConcurrencyPerKey = 1 }))
		p.Store(codeq.Task{Queue: "a", LimitKey: "l"})
		p.Take("a")
		id := p.Store(task)
		require.Nil(p.T, queuetest.ClaimNow(p.T, p.Queue, "a"))
		return id
	}},
}

// busyStates are the states of a task that has not ended and does not wait.
var busyStates = []inState{
	{"leased", codeq.Leased, func(p *queuetest.Process, task codeq.Task) codeq.ID {
		id := p.Store(task)
		p.Take("a")
		return id
	}},
	{"leased again", codeq.Leased, func(p *queuetest.Process, task codeq.Task) codeq.ID {
		id := p.Store(task)
		require.NoError(p.T, p.Retry(context.Background(), p.Take("a").Receipt, codeq.RetryOptions{After: -1}))
		require.Equal(p.T, 2, p.Take("a").Attempt)
		return id
	}},
	{"dead", codeq.Dead, func(p *queuetest.Process, task codeq.Task) codeq.ID {
		id := p.Store(task)
		require.NoError(p.T, p.DeadLetter(context.Background(), p.Take("a").Receipt, errors.New("boom")))
		return id
	}},
}

// TestChangesAreRefused: SetPriority and SetRunAt refuse a task that does not wait.
func TestChangesAreRefused(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	done := inState{"done", codeq.Done, func(p *queuetest.Process, task codeq.Task) codeq.ID {
		id := p.Store(task)
		require.NoError(t, p.Complete(ctx, p.Take("a").Receipt, nil))
		return id
	}}
	canceled := inState{"canceled", codeq.Canceled, func(p *queuetest.Process, task codeq.Task) codeq.ID {
		id := p.Store(task)
		require.NoError(t, p.Cancel(ctx, id))
		return id
	}}
	for _, in := range append(slices.Clone(busyStates), done, canceled) {
		t.Run(in.name, func(t *testing.T) {
			queuetest.ThroughSteps(t, codeq.Options{Shards: 2, Retention: codeq.Forever}, func(t *testing.T, p *queuetest.Process) {
				id := in.reach(p, queuetest.Keyed("k"))
				p.Step()
				before := queuetest.InfoOf(t, p.Queue, id)
				for _, err := range []error{p.SetPriority(ctx, id, 5), p.SetRunAt(ctx, id, time.Now().Add(time.Hour))} {
					require.ErrorIs(t, err, codeq.ErrNotWaiting)
					require.ErrorContains(t, err, in.state.String())
				}
				p.Step()
				require.Equal(t, before, queuetest.InfoOf(t, p.Queue, id))
			})
		})
	}
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

// TestSetPriority: a waiting task keeps waiting after SetPriority, and has the new priority when it
// is ready.
func TestSetPriority(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for _, in := range waitingStates {
		t.Run(in.name, func(t *testing.T) {
			queuetest.ThroughSteps(t, codeq.Options{Shards: 1, LeaseFor: 24 * time.Hour}, func(t *testing.T, p *queuetest.Process) {
				id := in.reach(p, queuetest.Keyed("k"))
				p.Step()
				for _, priority := range []int{9, 0, 3} {
					before := queuetest.InfoOf(t, p.Queue, id)
					require.NoError(t, p.SetPriority(ctx, id, priority))
					p.Step()
					before.Priority = priority
					require.Equal(t, before, queuetest.InfoOf(t, p.Queue, id))
				}
				p.Taken(keyedAs(p, id), id)
				p.Free(in.name)
				p.Store(codeq.Task{Queue: "a", Priority: 2})
				require.Equal(t, id, p.Take("a").ID)
			})
		})
	}
}

// keyedAs returns a task with the key of a stored one.
func keyedAs(p *queuetest.Process, id codeq.ID) codeq.Task {
	info := queuetest.InfoOf(p.T, p.Queue, id)
	return codeq.Task{Queue: info.Queue, Group: info.Group, LimitKey: info.LimitKey, Unique: codeq.Unique{Key: info.Unique.Key}}
}

// TestSetRunAt: a waiting task becomes ready at its new time, but not before its other conditions
// are met.
func TestSetRunAt(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for _, in := range waitingStates {
		t.Run(in.name, func(t *testing.T) {
			queuetest.ThroughSteps(t, codeq.Options{Shards: 1, LeaseFor: 24 * time.Hour}, func(t *testing.T, p *queuetest.Process) {
				id := in.reach(p, queuetest.Keyed("k"))
				p.Step()
				attempts := queuetest.InfoOf(t, p.Queue, id).Attempts
				late := time.UnixMilli(p.Now().Add(5 * time.Hour).UnixMilli()).UTC()
				require.NoError(t, p.SetRunAt(ctx, id, late.Add(time.Hour)))
				p.Step()
				require.NoError(t, p.SetRunAt(ctx, id, late))
				p.Step()
				info := queuetest.InfoOf(t, p.Queue, id)
				require.Equal(t, late, info.RunAt)
				require.Equal(t, attempts, info.Attempts)
				if in.name == "for a parent" {
					require.Equal(t, codeq.Blocked, info.State)
				} else {
					require.Equal(t, codeq.Scheduled, info.State)
					require.Equal(t, late, info.At)
				}
				p.Taken(keyedAs(p, id), id)
				p.Free(in.name)
				require.Equal(t, codeq.Scheduled, p.StateOf(id))
				p.Pass(time.Until(late) - time.Millisecond)
				require.Equal(t, codeq.Scheduled, p.StateOf(id))
				p.Pass(time.Millisecond)
				require.Equal(t, id, p.Take("a").ID)
			})
		})
		t.Run(in.name+", now", func(t *testing.T) {
			queuetest.ThroughSteps(t, codeq.Options{Shards: 1, LeaseFor: 24 * time.Hour}, func(t *testing.T, p *queuetest.Process) {
				id := in.reach(p, queuetest.Keyed("k"))
				p.Step()
				for i, now := range []time.Time{{}, p.Now(), time.UnixMilli(0), firstMoment} {
					require.NoError(t, p.SetRunAt(ctx, id, now), i)
					p.Step()
					switch in.name {
					case "for a parent", "for the turn of its group", "for room in its limit":
						require.Equal(t, codeq.Blocked, p.StateOf(id), i)
					default:
						require.Equal(t, codeq.Ready, p.StateOf(id), i)
					}
				}
				if in.state == codeq.Blocked {
					p.Free(in.name)
				}
				require.Equal(t, id, p.Take("a").ID)
			})
		})
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
