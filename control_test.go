package codeq_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
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
	"codeq/internal/testbase"
	"codeq/test/queuetest"
)

func TestCancelEnded(t *testing.T) {
	queuetest.ThroughSteps(t, codeq.Options{Shards: 2}, func(t *testing.T, p *queuetest.Process) {
		ctx := context.Background()
		require.ErrorIs(t, p.Cancel(ctx, codeq.ID{}), codeq.ErrNotFound)
		gone := p.Store(codeq.Task{Queue: "a"})
		require.NoError(t, p.Complete(ctx, p.Take("a").Receipt, nil))
		kept := p.Store(codeq.Task{Queue: "a", Retention: time.Hour})
		require.NoError(t, p.Complete(ctx, p.Take("a").Receipt, []byte("result")))
		p.Step()
		require.ErrorIs(t, p.Cancel(ctx, gone), codeq.ErrNotFound)
		require.ErrorIs(t, p.Cancel(ctx, kept), codeq.ErrNotWaiting)
		info := queuetest.InfoOf(t, p.Queue, kept)
		require.Equal(t, codeq.Done, info.State)
		require.Equal(t, "result", string(info.Result))
		p.Pass(2 * time.Hour)
		require.ErrorIs(t, p.Cancel(ctx, kept), codeq.ErrNotFound)
	})
}

// TestCancelRetention: what is canceled is kept like what is completed.
func TestCancelRetention(t *testing.T) {
	queuetest.ThroughSteps(t, codeq.Options{Shards: 1, Retention: time.Hour}, func(t *testing.T, p *queuetest.Process) {
		ctx := context.Background()
		require.NoError(t, p.Configure(ctx, "configured", func(s *codeq.Settings) { s.Retention = 2 * time.Hour }))
		for _, tc := range []struct {
			task  codeq.Task
			hours int
		}{{codeq.Task{Queue: "a"}, 1}, {codeq.Task{Queue: "configured"}, 2}, {codeq.Task{Queue: "configured", Retention: 3 * time.Hour}, 3}} {
			id := p.Store(tc.task)
			require.NoError(t, p.Cancel(ctx, id))
			p.Step()
			p.Pass(time.Duration(tc.hours)*time.Hour - time.Millisecond)
			require.Equal(t, codeq.Canceled, p.StateOf(id))
			p.Pass(time.Duration(tc.hours) * time.Hour / 8)
			require.Zero(t, p.StateOf(id))
		}
	})
}

// TestCancelPassesOn: what a canceled task held back goes on, and what waits
// for it is canceled.
func TestCancelPassesOn(t *testing.T) {
	t.Parallel()
	queuetest.ThroughSteps(t, codeq.Options{Shards: 3, LeaseFor: 24 * time.Hour, Retention: codeq.Forever}, func(t *testing.T, p *queuetest.Process) {
		ctx := context.Background()
		first := p.Store(codeq.Task{Queue: "a", Group: "g"})
		second := p.Store(codeq.Task{Queue: "a", Group: "g"})
		third := p.Store(codeq.Task{Queue: "a", Group: "g"})
		p.Step()
		require.NoError(t, p.Cancel(ctx, second)) // it was not its turn
		p.Step()
		require.Equal(t, codeq.Blocked, p.StateOf(third))
		require.Equal(t, first, p.Take("a").ID)
		require.NoError(t, p.Cancel(ctx, first))
		p.Step()
		require.Equal(t, codeq.Ready, p.StateOf(third))

		require.NoError(t, p.Configure(ctx, "b", func(s *codeq.Settings) { s.ConcurrencyPerKey = 1 }))
		first = p.Store(codeq.Task{Queue: "b", LimitKey: "l"})
		second = p.Store(codeq.Task{Queue: "b", LimitKey: "l"})
		require.Equal(t, first, p.Take("b").ID)
		require.Nil(t, queuetest.ClaimNow(t, p.Queue, "b"))
		require.NoError(t, p.Cancel(ctx, first))
		p.Step()
		require.Equal(t, second, p.Take("b").ID)

		parent := p.Store(codeq.Task{Queue: "c"})
		child := p.Store(codeq.Task{Queue: "c", After: []codeq.ID{parent}})
		grandchild := p.Store(codeq.Task{Queue: "c", After: []codeq.ID{child}})
		p.Step()
		require.NoError(t, p.Cancel(ctx, parent))
		p.Step()
		require.Equal(t, []codeq.State{codeq.Canceled, codeq.Canceled, codeq.Canceled}, []codeq.State{p.StateOf(parent), p.StateOf(child), p.StateOf(grandchild)})
	})
}

// TestCancelDeadOfGroup: the group of a dead letter has gone on, and is not
// touched by the end of it.
func TestCancelDeadOfGroup(t *testing.T) {
	queuetest.ThroughSteps(t, codeq.Options{Shards: 1, LeaseFor: 24 * time.Hour}, func(t *testing.T, p *queuetest.Process) {
		ctx := context.Background()
		dead := p.Store(codeq.Task{Queue: "a", Group: "g"})
		next := p.Store(codeq.Task{Queue: "a", Group: "g"})
		last := p.Store(codeq.Task{Queue: "a", Group: "g"})
		require.NoError(t, p.DeadLetter(ctx, p.Take("a").Receipt, nil))
		p.Step()
		l := p.Take("a")
		require.Equal(t, next, l.ID)
		require.NoError(t, p.Cancel(ctx, dead))
		p.Step()
		require.Equal(t, codeq.Blocked, p.StateOf(last))
		require.Nil(t, queuetest.ClaimNow(t, p.Queue, "a"))
		require.NoError(t, p.Complete(ctx, l.Receipt, nil))
		require.Equal(t, last, p.Take("a").ID)
	})
}

// TestCancelAwaited: who waits for a task learns of its cancel.
func TestCancelAwaited(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 2}, func(t *testing.T, q *codeq.Queue) {
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		l := queuetest.ClaimNow(t, q, "a")
		require.NoError(t, q.Retry(context.Background(), l.Receipt, codeq.RetryOptions{Err: errors.New("boom"), After: time.Hour}))
		outcome := make(chan *codeq.Outcome, 1)
		go func() {
			o, err := q.Await(context.Background(), id)
			require.NoError(t, err)
			outcome <- o
		}()
		synctest.Wait()
		require.Empty(t, outcome)
		require.NoError(t, q.Cancel(context.Background(), id))
		require.Equal(t, &codeq.Outcome{State: codeq.Canceled, LastError: "boom", Attempts: 1}, <-outcome)
	})
}

// TestCancelLease: the worker of a canceled task learns of it by whatever it
// does with its receipt, which has no effect.
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
		for i, verb := range verbs { // who asks after a restart learns less
			require.ErrorIs(t, verb(), codeq.ErrLeaseLost, i)
		}
		p.Pass(time.Hour)
		require.Equal(t, codeq.Counts{Canceled: 1}, queuetest.CountsOf(t, p.Queue, "a"))
		require.Equal(t, codeq.Counts{}, queuetest.CountsOf(t, p.Queue, "next"))
	})
}

// TestCanceledLeasesAreBounded: of many canceled leases the latest are remembered.
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

// TestCancelRunning: the handler of a canceled task is told at once, and what
// it returns is of no consequence.
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

// TestCancelOneOfManyHandlers: the others go on.
func TestCancelOneOfManyHandlers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Shards: 2, Retention: codeq.Forever})
		var m codeq.Mux
		var ended atomic.Int64
		codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			select {
			case <-ctx.Done():
				ended.Add(1)
			case <-time.After(time.Minute):
			}
			return ctx.Err()
		})
		run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 20})
		ids := queuetest.Produce(t, q, slices.Repeat([]codeq.Task{{Queue: "a"}}, 20)...)
		synctest.Wait()
		for _, id := range ids[:5] {
			require.NoError(t, q.Cancel(context.Background(), id))
		}
		synctest.Wait()
		require.EqualValues(t, 5, ended.Load())
		time.Sleep(time.Minute)
		synctest.Wait()
		require.EqualValues(t, 5, ended.Load())
		require.Len(t, run.Reported(), 5)
		require.Equal(t, codeq.Counts{Done: 15, Canceled: 5}, queuetest.CountsOf(t, q, "a"))
		require.NoError(t, queuetest.CheckAll(q))
		require.NoError(t, queuetest.CheckMemory(q))
	})
}

// TestCancelRace: of all that end a leased task at the same time, one does.
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

// TestSetPriorityOrder: ready tasks are claimed by priority, and those of one
// by age, however often they were moved, also those that are not in memory.
func TestSetPriorityOrder(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	queuetest.ThroughSteps(t, codeq.Options{Shards: 1, WindowTasks: 8}, func(t *testing.T, p *queuetest.Process) {
		ctx := context.Background()
		type aged struct {
			id       codeq.ID
			age      int
			priority int
		}
		rng := rand.New(rand.NewPCG(1, 2))
		var tasks []aged
		for i := range 200 {
			priority := rng.IntN(3)
			tasks = append(tasks, aged{p.Store(codeq.Task{Queue: "a", Priority: priority}), i, priority})
			p.Pass(time.Millisecond)
		}
		for range 3 {
			for range 100 {
				i := rng.IntN(len(tasks))
				tasks[i].priority = rng.IntN(3)
				require.NoError(t, p.SetPriority(ctx, tasks[i].id, tasks[i].priority))
			}
			p.Step()
		}
		slices.SortFunc(tasks, func(a, b aged) int { return cmp.Or(b.priority-a.priority, a.age-b.age) })
		for i, want := range tasks {
			require.Equal(t, want.id, p.Take("a").ID, i)
		}
		require.Nil(t, queuetest.ClaimNow(t, p.Queue, "a"))
	})
}

// TestSetRunAtWakesClaims: a claim that waits gets what becomes ready.
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

// TestPauseRun: Run does not begin with tasks of a paused queue, and ends those
// that it has.
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

// TestSnooze: a task that its handler puts off keeps its attempts, its key and
// the turn of its group, over a restart too.
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

// waitingStates are the ways in which a task waits.
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

// busyStates are those of a task that has not ended, and does not wait.
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

// TestCancel: in every state but those of the end, and what is left of the task.
func TestCancel(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	ctx := context.Background()
	for _, from := range append(slices.Clone(waitingStates), busyStates...) {
		for _, retention := range []time.Duration{0, codeq.Forever} {
			t.Run(fmt.Sprintf("%s, kept for %d", from.name, retention), func(t *testing.T) {
				queuetest.ThroughSteps(t, codeq.Options{Shards: 2, LeaseFor: 24 * time.Hour}, func(t *testing.T, p *queuetest.Process) {
					task := queuetest.Keyed("k")
					task.Retention, task.Payload = retention, []byte("x")
					id := from.reach(p, task)
					p.Step()
					require.Equal(t, from.state, p.StateOf(id))
					require.NoError(t, p.Cancel(ctx, id))
					p.Step()
					if retention == 0 {
						require.Zero(t, p.StateOf(id))
						require.ErrorIs(t, p.Cancel(ctx, id), codeq.ErrNotFound)
					} else {
						info := queuetest.InfoOf(t, p.Queue, id)
						require.Equal(t, codeq.Canceled, info.State)
						require.Equal(t, p.Now().UnixMilli(), info.At.UnixMilli())
						require.Equal(t, "x", string(info.Payload))
						require.ErrorIs(t, p.Cancel(ctx, id), codeq.ErrNotWaiting)
					}
					require.Zero(t, p.Stored(keys.Unique), "its key is free")
					p.Pass(2 * time.Hour)
					for l := queuetest.ClaimNow(t, p.Queue, "a"); l != nil; l = queuetest.ClaimNow(t, p.Queue, "a") {
						require.NotEqual(t, id, l.ID)
					}
				})
			})
		}
	}
}

// TestChangesAreRefused: SetPriority and SetRunAt of tasks that do not wait.
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

// TestSetPriority: of a task that waits, whatever for: it goes on waiting, and
// has the new priority when it is ready.
func TestSetPriority(t *testing.T) {
	testbase.SkipUnderRace(t)
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

// TestSetRunAt: a task that waits becomes ready at the new time, and not before
// what else holds it back.
func TestSetRunAt(t *testing.T) {
	testbase.SkipUnderRace(t)
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

// TestSetRunAtOrder: a task that becomes ready by it is behind those that are.
func TestSetRunAtOrder(t *testing.T) {
	queuetest.ThroughSteps(t, codeq.Options{Shards: 1, WindowTasks: 2}, func(t *testing.T, p *queuetest.Process) {
		ctx := context.Background()
		later := p.Store(codeq.Task{Queue: "a", RunAt: p.Now().Add(time.Hour)})
		var order []codeq.ID
		for range 5 {
			order = append(order, p.Store(codeq.Task{Queue: "a"}))
			p.Pass(time.Millisecond)
		}
		require.NoError(t, p.SetRunAt(ctx, later, time.Time{}))
		p.Pass(time.Millisecond)
		require.NoError(t, p.SetRunAt(ctx, order[0], time.Time{}))
		p.Pass(time.Millisecond)
		p.Step()
		order = append(order[1:], later, order[0], p.Store(codeq.Task{Queue: "a"}))
		for i, id := range order {
			require.Equal(t, id, p.Take("a").ID, i)
		}
	})
}

// TestSetRunAtOfTurn: a task that has the turn of its group keeps it while it
// is put off; one that waits for the turn lets others go first.
func TestSetRunAtOfTurn(t *testing.T) {
	t.Parallel()
	queuetest.ThroughSteps(t, codeq.Options{Shards: 1, LeaseFor: 24 * time.Hour}, func(t *testing.T, p *queuetest.Process) {
		ctx := context.Background()
		var ids []codeq.ID
		for range 3 {
			ids = append(ids, p.Store(codeq.Task{Queue: "a", Group: "g"}))
		}
		require.NoError(t, p.SetRunAt(ctx, ids[0], p.Now().Add(time.Hour)))
		require.NoError(t, p.SetRunAt(ctx, ids[1], p.Now().Add(2*time.Hour)))
		p.Step()
		require.Nil(t, queuetest.ClaimNow(t, p.Queue, "a"))
		require.Equal(t, []codeq.State{codeq.Scheduled, codeq.Scheduled, codeq.Blocked}, []codeq.State{p.StateOf(ids[0]), p.StateOf(ids[1]), p.StateOf(ids[2])})
		p.Pass(time.Hour)
		l := p.Take("a")
		require.Equal(t, ids[0], l.ID)
		require.NoError(t, p.Complete(ctx, l.Receipt, nil))
		p.Step()
		l = p.Take("a")
		require.Equal(t, ids[2], l.ID)
		p.Pass(2 * time.Hour)
		p.Step()
		require.Equal(t, codeq.Blocked, p.StateOf(ids[1]))
		require.NoError(t, p.Complete(ctx, l.Receipt, nil))
		require.Equal(t, ids[1], p.Take("a").ID)
	})
}

// TestPause: nothing is claimed from a paused queue, over restarts too; claims
// that wait get its tasks when it is resumed.
func TestPause(t *testing.T) {
	t.Parallel()
	for _, shards := range []int{1, 3} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			queuetest.ThroughSteps(t, codeq.Options{Shards: shards, LeaseFor: 24 * time.Hour}, func(t *testing.T, p *queuetest.Process) {
				ctx := context.Background()
				var got chan codeq.ID
				wait := func() { // lets claims wait, as a process does that has begun
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
				require.NoError(t, p.Retry(ctx, l.Receipt, codeq.RetryOptions{After: -1})) // those in workers' hands go on
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

// TestPauseRefused: names of queues, and contexts that have ended.
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
	require.NoError(t, q.Pause(ctx, "unheard of")) // before it has a task
	queuetest.Produce(t, q.Queue, codeq.Task{Queue: "unheard of"})
	require.Nil(t, queuetest.ClaimNow(t, q.Queue, "unheard of"))
}
