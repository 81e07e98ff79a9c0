package codeq

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

	"codeq/internal/keys"
	"codeq/internal/recent"
)

// inState is a way to have a task of queue "a", with an idempotency key, in a state.
type inState struct {
	name  string
	state State
	reach func(p *process, task Task) ID
}

// waitingStates are the ways in which a task waits.
var waitingStates = []inState{
	{"ready", Ready, func(p *process, task Task) ID { return p.produce(task) }},
	{"given back", Ready, func(p *process, task Task) ID {
		id := p.produce(task)
		require.NoError(p.t, p.Release(context.Background(), p.claim("a").Receipt, 0))
		return id
	}},
	{"scheduled", Scheduled, func(p *process, task Task) ID {
		task.RunAt = p.opts.wall().Add(time.Hour)
		return p.produce(task)
	}},
	{"between two attempts", Scheduled, func(p *process, task Task) ID {
		id := p.produce(task)
		require.NoError(p.t, p.Retry(context.Background(), p.claim("a").Receipt, RetryOptions{After: time.Hour}))
		return id
	}},
	{"for a parent", Blocked, func(p *process, task Task) ID {
		task.After = []ID{p.produce(Task{Queue: "parents"})}
		return p.produce(task)
	}},
	{"for the turn of its group", Blocked, func(p *process, task Task) ID {
		task.Group = "g"
		p.produce(Task{Queue: "a", Group: "g", RunAt: p.opts.wall().Add(time.Millisecond)})
		p.pass(time.Millisecond)
		return p.produce(task)
	}},
	{"for room in its limit", Blocked, func(p *process, task Task) ID {
		task.LimitKey = "l"
		require.NoError(p.t, p.Configure(context.Background(), "a", func(s *Settings) { s.ConcurrencyPerKey = 1 }))
		p.produce(Task{Queue: "a", LimitKey: "l"})
		p.claim("a")
		id := p.produce(task)
		require.Nil(p.t, claimNow(p.t, p.Queue, "a"))
		return id
	}},
}

// busyStates are those of a task that has not ended, and does not wait.
var busyStates = []inState{
	{"leased", Leased, func(p *process, task Task) ID {
		id := p.produce(task)
		p.claim("a")
		return id
	}},
	{"leased again", Leased, func(p *process, task Task) ID {
		id := p.produce(task)
		require.NoError(p.t, p.Retry(context.Background(), p.claim("a").Receipt, RetryOptions{After: -1}))
		require.Equal(p.t, 2, p.claim("a").Attempt)
		return id
	}},
	{"dead", Dead, func(p *process, task Task) ID {
		id := p.produce(task)
		require.NoError(p.t, p.DeadLetter(context.Background(), p.claim("a").Receipt, errors.New("boom")))
		return id
	}},
}

// TestCancel: in every state but those of the end, and what is left of the task.
func TestCancel(t *testing.T) {
	ctx := context.Background()
	for _, from := range append(slices.Clone(waitingStates), busyStates...) {
		for _, retention := range []time.Duration{0, Forever} {
			t.Run(fmt.Sprintf("%s, kept for %d", from.name, retention), func(t *testing.T) {
				throughSteps(t, Options{Shards: 2, LeaseFor: 24 * time.Hour}, func(t *testing.T, p *process) {
					task := keyed("k")
					task.Retention, task.Payload = retention, []byte("x")
					id := from.reach(p, task)
					p.step()
					require.Equal(t, from.state, p.state(id))
					require.NoError(t, p.Cancel(ctx, id))
					p.step()
					if retention == 0 {
						require.Zero(t, p.state(id))
						require.ErrorIs(t, p.Cancel(ctx, id), ErrNotFound)
					} else {
						info := infoOf(t, p.Queue, id)
						require.Equal(t, Canceled, info.State)
						require.Equal(t, p.opts.wall().UnixMilli(), info.At.UnixMilli())
						require.Equal(t, "x", string(info.Payload))
						require.ErrorIs(t, p.Cancel(ctx, id), ErrNotWaiting)
					}
					require.Zero(t, p.stored(keys.Unique), "its key is free")
					p.pass(2 * time.Hour)
					for l := claimNow(t, p.Queue, "a"); l != nil; l = claimNow(t, p.Queue, "a") {
						require.NotEqual(t, id, l.ID)
					}
				})
			})
		}
	}
}

func TestCancelEnded(t *testing.T) {
	throughSteps(t, Options{Shards: 2}, func(t *testing.T, p *process) {
		ctx := context.Background()
		require.ErrorIs(t, p.Cancel(ctx, ID{}), ErrNotFound)
		gone := p.produce(Task{Queue: "a"})
		require.NoError(t, p.Complete(ctx, p.claim("a").Receipt, nil))
		kept := p.produce(Task{Queue: "a", Retention: time.Hour})
		require.NoError(t, p.Complete(ctx, p.claim("a").Receipt, []byte("result")))
		p.step()
		require.ErrorIs(t, p.Cancel(ctx, gone), ErrNotFound)
		require.ErrorIs(t, p.Cancel(ctx, kept), ErrNotWaiting)
		info := infoOf(t, p.Queue, kept)
		require.Equal(t, Done, info.State)
		require.Equal(t, "result", string(info.Result))
		p.pass(2 * time.Hour)
		require.ErrorIs(t, p.Cancel(ctx, kept), ErrNotFound)
	})
}

// TestCancelRetention: what is canceled is kept like what is completed.
func TestCancelRetention(t *testing.T) {
	throughSteps(t, Options{Shards: 1, Retention: time.Hour}, func(t *testing.T, p *process) {
		ctx := context.Background()
		require.NoError(t, p.Configure(ctx, "configured", func(s *Settings) { s.Retention = 2 * time.Hour }))
		for _, tc := range []struct {
			task  Task
			hours int
		}{{Task{Queue: "a"}, 1}, {Task{Queue: "configured"}, 2}, {Task{Queue: "configured", Retention: 3 * time.Hour}, 3}} {
			id := p.produce(tc.task)
			require.NoError(t, p.Cancel(ctx, id))
			p.step()
			p.pass(time.Duration(tc.hours)*time.Hour - time.Millisecond)
			require.Equal(t, Canceled, p.state(id))
			p.pass(time.Duration(tc.hours) * time.Hour / 8)
			require.Zero(t, p.state(id))
		}
	})
}

// TestCancelPassesOn: what a canceled task held back goes on, and what waits
// for it is canceled.
func TestCancelPassesOn(t *testing.T) {
	throughSteps(t, Options{Shards: 3, LeaseFor: 24 * time.Hour, Retention: Forever}, func(t *testing.T, p *process) {
		ctx := context.Background()
		first := p.produce(Task{Queue: "a", Group: "g"})
		second := p.produce(Task{Queue: "a", Group: "g"})
		third := p.produce(Task{Queue: "a", Group: "g"})
		p.step()
		require.NoError(t, p.Cancel(ctx, second)) // it was not its turn
		p.step()
		require.Equal(t, Blocked, p.state(third))
		require.Equal(t, first, p.claim("a").ID)
		require.NoError(t, p.Cancel(ctx, first))
		p.step()
		require.Equal(t, Ready, p.state(third))

		require.NoError(t, p.Configure(ctx, "b", func(s *Settings) { s.ConcurrencyPerKey = 1 }))
		first = p.produce(Task{Queue: "b", LimitKey: "l"})
		second = p.produce(Task{Queue: "b", LimitKey: "l"})
		require.Equal(t, first, p.claim("b").ID)
		require.Nil(t, claimNow(t, p.Queue, "b"))
		require.NoError(t, p.Cancel(ctx, first))
		p.step()
		require.Equal(t, second, p.claim("b").ID)

		parent := p.produce(Task{Queue: "c"})
		child := p.produce(Task{Queue: "c", After: []ID{parent}})
		grandchild := p.produce(Task{Queue: "c", After: []ID{child}})
		p.step()
		require.NoError(t, p.Cancel(ctx, parent))
		p.step()
		require.Equal(t, []State{Canceled, Canceled, Canceled}, []State{p.state(parent), p.state(child), p.state(grandchild)})
	})
}

// TestCancelDeadOfGroup: the group of a dead letter has gone on, and is not
// touched by the end of it.
func TestCancelDeadOfGroup(t *testing.T) {
	throughSteps(t, Options{Shards: 1, LeaseFor: 24 * time.Hour}, func(t *testing.T, p *process) {
		ctx := context.Background()
		dead := p.produce(Task{Queue: "a", Group: "g"})
		next := p.produce(Task{Queue: "a", Group: "g"})
		last := p.produce(Task{Queue: "a", Group: "g"})
		require.NoError(t, p.DeadLetter(ctx, p.claim("a").Receipt, nil))
		p.step()
		l := p.claim("a")
		require.Equal(t, next, l.ID)
		require.NoError(t, p.Cancel(ctx, dead))
		p.step()
		require.Equal(t, Blocked, p.state(last))
		require.Nil(t, claimNow(t, p.Queue, "a"))
		require.NoError(t, p.Complete(ctx, l.Receipt, nil))
		require.Equal(t, last, p.claim("a").ID)
	})
}

// TestCancelAwaited: who waits for a task learns of its cancel.
func TestCancelAwaited(t *testing.T) {
	bubble(t, Options{Shards: 2}, func(t *testing.T, q *Queue) {
		id := produce(t, q, Task{Queue: "a"})[0]
		l := claimNow(t, q, "a")
		require.NoError(t, q.Retry(context.Background(), l.Receipt, RetryOptions{Err: errors.New("boom"), After: time.Hour}))
		outcome := make(chan *Outcome, 1)
		go func() {
			o, err := q.Await(context.Background(), id)
			require.NoError(t, err)
			outcome <- o
		}()
		synctest.Wait()
		require.Empty(t, outcome)
		require.NoError(t, q.Cancel(context.Background(), id))
		require.Equal(t, &Outcome{State: Canceled, LastError: "boom", Attempts: 1}, <-outcome)
	})
}

// TestCancelLease: the worker of a canceled task learns of it by whatever it
// does with its receipt, which has no effect.
func TestCancelLease(t *testing.T) {
	throughSteps(t, Options{Shards: 2, Retention: Forever}, func(t *testing.T, p *process) {
		ctx := context.Background()
		id := p.produce(Task{Queue: "a"})
		r := p.claim("a").Receipt
		p.step()
		require.NoError(t, p.Cancel(ctx, id))
		verbs := []func() error{
			func() error { return p.Complete(ctx, r, []byte("result"), Task{Queue: "next"}) },
			func() error { return p.Extend(ctx, r, time.Hour) },
			func() error { return p.Retry(ctx, r, RetryOptions{}) },
			func() error { return p.Release(ctx, r, 0) },
			func() error { return p.DeadLetter(ctx, r, nil) },
		}
		for i, verb := range verbs {
			err := verb()
			require.ErrorIs(t, err, ErrLeaseLost, i)
			require.ErrorIs(t, err, ErrCanceled, i)
		}
		p.step()
		for i, verb := range verbs { // who asks after a restart learns less
			require.ErrorIs(t, verb(), ErrLeaseLost, i)
		}
		p.pass(time.Hour)
		require.Equal(t, Counts{Canceled: 1}, countsOf(t, p.Queue, "a"))
		require.Equal(t, Counts{}, countsOf(t, p.Queue, "next"))
	})
}

// TestCanceledLeasesAreBounded: of many canceled leases the latest are remembered.
func TestCanceledLeasesAreBounded(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		ctx := context.Background()
		const n = 2*recent.Capacity + 3
		_, err := q.ProduceBatch(ctx, slices.Repeat([]Task{{Queue: "a"}}, n))
		require.NoError(t, err)
		leases, err := q.ClaimBatch(ctx, ClaimRequest{Queues: []string{"a"}, Max: n})
		require.NoError(t, err)
		require.Len(t, leases, n)
		for _, l := range leases {
			require.NoError(t, q.Cancel(ctx, l.ID))
		}
		for i, l := range leases {
			err := q.Complete(ctx, l.Receipt, nil)
			require.ErrorIs(t, err, ErrLeaseLost)
			require.Equal(t, i >= n-recent.Capacity, errors.Is(err, ErrCanceled), i)
		}
	})
}

// TestCancelRunning: the handler of a canceled task is told at once, and what
// it returns is of no consequence.
func TestCancelRunning(t *testing.T) {
	for name, verdict := range map[string]error{
		"completed": nil, "failed": errors.New("boom"), "snoozed": Snooze(time.Second), "given up": DeadLetter(errors.New("boom")),
	} {
		t.Run(name, func(t *testing.T) {
			throughSteps(t, Options{Shards: 2, Retention: Forever}, func(t *testing.T, p *process) {
				start := time.Now()
				var m Mux
				var mu sync.Mutex // guards causes
				causes := make(map[ID]error)
				var told time.Duration
				Handle(&m, "a", func(ctx context.Context, j *Job[[]byte]) error {
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
					j.FollowUp(Task{Queue: "b"})
					return verdict
				})
				run := startRun(t, p.Queue, &m, RunOptions{Concurrency: 2, Grace: 2 * time.Hour})
				id := p.produce(Task{Queue: "a"})
				p.pass(time.Minute)
				require.NoError(t, p.Cancel(context.Background(), id))
				p.check()
				mu.Lock()
				require.Len(t, causes, 1)
				require.ErrorIs(t, causes[id], ErrCanceled)
				mu.Unlock()
				require.Equal(t, time.Minute, told)
				reports := run.reported()
				require.Len(t, reports, 1)
				require.ErrorIs(t, reports[0], ErrCanceled)
				p.step()
				p.pass(time.Hour)
				require.Equal(t, Counts{Canceled: 1}, countsOf(t, p.Queue, "a"))
				require.Equal(t, Counts{}, countsOf(t, p.Queue, "b"))
				require.Equal(t, 1, infoOf(t, p.Queue, id).Attempts)
			})
		})
	}
}

// TestCancelBeforeHandler: a task that is canceled between the claim of Run and
// its handler is not handled.
func TestCancelBeforeHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, Options{Retention: Forever})
		var m Mux
		Handle(&m, "a", func(context.Context, *Job[[]byte]) error {
			t.Error("the handler of a canceled task runs")
			return nil
		})
		id := produce(t, q, Task{Queue: "a"})[0]
		var reported []error
		r, err := q.newRun(t.Context(), &m, &RunOptions{OnError: func(_ *Lease, err error) { reported = append(reported, err) }})
		require.NoError(t, err)
		q.runs.add(r)
		op, err := q.claim(t.Context(), &r.req, r)
		require.NoError(t, err)
		require.NoError(t, q.Cancel(t.Context(), id))
		q.notices.Wait()
		w := &worker{runner: r}
		w.do(&op.Grants[0])
		op.unref()
		require.Len(t, reported, 1)
		require.ErrorIs(t, reported[0], ErrCanceled)
		require.False(t, w.busy())
		require.Equal(t, Canceled, infoOf(t, q, id).State)
	})
}

// TestCancelOneOfManyHandlers: the others go on.
func TestCancelOneOfManyHandlers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, Options{Shards: 2, Retention: Forever})
		var m Mux
		var ended atomic.Int64
		Handle(&m, "a", func(ctx context.Context, j *Job[[]byte]) error {
			select {
			case <-ctx.Done():
				ended.Add(1)
			case <-time.After(time.Minute):
			}
			return ctx.Err()
		})
		run := startRun(t, q, &m, RunOptions{Concurrency: 20})
		ids := produce(t, q, make100("a")[:20]...)
		synctest.Wait()
		for _, id := range ids[:5] {
			require.NoError(t, q.Cancel(context.Background(), id))
		}
		synctest.Wait()
		require.EqualValues(t, 5, ended.Load())
		time.Sleep(time.Minute)
		synctest.Wait()
		require.EqualValues(t, 5, ended.Load())
		require.Len(t, run.reported(), 5)
		require.Equal(t, Counts{Done: 15, Canceled: 5}, countsOf(t, q, "a"))
		require.NoError(t, q.checkAll())
		require.NoError(t, q.checkMemory())
	})
}

// TestCancelToldToItsRun: of several calls of Run, the one that has the task learns of its cancel.
func TestCancelToldToItsRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, Options{Shards: 2})
		var ended [3]atomic.Int64
		for i, name := range []string{"a", "b", "c"} {
			var m Mux
			Handle(&m, name, func(ctx context.Context, j *Job[[]byte]) error {
				<-ctx.Done()
				ended[i].Add(1)
				return ctx.Err()
			})
			startRun(t, q, &m, RunOptions{})
		}
		id := produce(t, q, Task{Queue: "b"})[0]
		produce(t, q, Task{Queue: "a"}, Task{Queue: "c"})
		synctest.Wait()
		require.NoError(t, q.Cancel(t.Context(), id))
		synctest.Wait()
		told := 0
		for _, r := range q.runs.runs {
			if r.canceledReceipts.some.Load() {
				told++
			}
		}
		require.Equal(t, 1, told)
		for i, want := range []int64{0, 1, 0} {
			require.Equal(t, want, ended[i].Load())
		}
	})
}

// TestCancelRace: of all that end a leased task at the same time, one does.
func TestCancelRace(t *testing.T) {
	throughSteps(t, Options{Shards: 2, GroupCap: 3, Retention: Forever}, func(t *testing.T, p *process) {
		ctx := context.Background()
		for range 50 {
			id := p.produce(keyed("k"))
			l := p.claim("a")
			var wg sync.WaitGroup
			var won atomic.Int64
			for i := range 12 {
				wg.Go(func() {
					var err error
					if i%2 == 0 {
						err = p.Cancel(ctx, id)
					} else {
						err = p.Complete(ctx, l.Receipt, nil, Task{Queue: "next"})
					}
					if err == nil {
						won.Add(1)
					}
				})
			}
			wg.Wait()
			require.EqualValues(t, 1, won.Load())
		}
		counts := countsOf(t, p.Queue, "a")
		require.EqualValues(t, 50, counts.Done+counts.Canceled)
		require.Equal(t, counts.Done, countsOf(t, p.Queue, "next").Ready)
		require.Zero(t, p.stored(keys.Unique))
	})
}

// TestChangesAreRefused: SetPriority and SetRunAt of tasks that do not wait.
func TestChangesAreRefused(t *testing.T) {
	ctx := context.Background()
	done := inState{"done", Done, func(p *process, task Task) ID {
		id := p.produce(task)
		require.NoError(t, p.Complete(ctx, p.claim("a").Receipt, nil))
		return id
	}}
	canceled := inState{"canceled", Canceled, func(p *process, task Task) ID {
		id := p.produce(task)
		require.NoError(t, p.Cancel(ctx, id))
		return id
	}}
	for _, in := range append(slices.Clone(busyStates), done, canceled) {
		t.Run(in.name, func(t *testing.T) {
			throughSteps(t, Options{Shards: 2, Retention: Forever}, func(t *testing.T, p *process) {
				id := in.reach(p, keyed("k"))
				p.step()
				before := infoOf(t, p.Queue, id)
				for _, err := range []error{p.SetPriority(ctx, id, 5), p.SetRunAt(ctx, id, time.Now().Add(time.Hour))} {
					require.ErrorIs(t, err, ErrNotWaiting)
					require.ErrorContains(t, err, in.state.String())
				}
				p.step()
				require.Equal(t, before, infoOf(t, p.Queue, id))
			})
		})
	}
	q := openLimited(t)
	id := produce(t, q.Queue, Task{Queue: "a"})[0]
	for _, err := range []error{q.SetPriority(ctx, ID{}, 5), q.SetRunAt(ctx, ID{}, time.Time{})} {
		require.ErrorIs(t, err, ErrNotFound)
	}
	for _, priority := range []int{-1, 10, math.MinInt} {
		q.refused("SetPriority priority", priority, "0 to 9", func() error { return q.SetPriority(ctx, id, priority) })
	}
	for _, at := range []time.Time{firstMoment.Add(-1), lastMoment.Add(1)} {
		q.refused("Task.RunAt", at, "the years 0 to 9999", func() error { return q.SetRunAt(ctx, id, at) })
	}
}

// TestSetPriority: of a task that waits, whatever for: it goes on waiting, and
// has the new priority when it is ready.
func TestSetPriority(t *testing.T) {
	ctx := context.Background()
	for _, in := range waitingStates {
		t.Run(in.name, func(t *testing.T) {
			throughSteps(t, Options{Shards: 1, LeaseFor: 24 * time.Hour}, func(t *testing.T, p *process) {
				id := in.reach(p, keyed("k"))
				p.step()
				for _, priority := range []int{9, 0, 3} {
					before := infoOf(t, p.Queue, id)
					require.NoError(t, p.SetPriority(ctx, id, priority))
					p.step()
					before.Priority = priority
					require.Equal(t, before, infoOf(t, p.Queue, id))
				}
				p.taken(keyedAs(p, id), id)
				p.release(in.name)
				p.produce(Task{Queue: "a", Priority: 2})
				require.Equal(t, id, p.claim("a").ID)
			})
		})
	}
}

// keyedAs returns a task with the key of a stored one.
func keyedAs(p *process, id ID) Task {
	info := infoOf(p.t, p.Queue, id)
	return Task{Queue: info.Queue, Group: info.Group, LimitKey: info.LimitKey, Unique: Unique{Key: info.Unique.Key}}
}

// release lets a task go on that waits as one of waitingStates does.
func (p *process) release(name string) {
	ctx := context.Background()
	switch name {
	case "scheduled", "between two attempts":
		p.pass(time.Hour)
	case "for a parent":
		require.NoError(p.t, p.Complete(ctx, p.claim("parents").Receipt, nil))
	case "for the turn of its group":
		require.NoError(p.t, p.Complete(ctx, p.claim("a").Receipt, nil))
	case "for room in its limit":
		require.NoError(p.t, p.Configure(ctx, "a", func(s *Settings) { s.ConcurrencyPerKey = 0 }))
	}
	p.check()
}

// TestSetPriorityOrder: ready tasks are claimed by priority, and those of one
// by age, however often they were moved, also those that are not in memory.
func TestSetPriorityOrder(t *testing.T) {
	throughSteps(t, Options{Shards: 1, WindowTasks: 8}, func(t *testing.T, p *process) {
		ctx := context.Background()
		type aged struct {
			id       ID
			age      int
			priority int
		}
		rng := rand.New(rand.NewPCG(1, 2))
		var tasks []aged
		for i := range 200 {
			priority := rng.IntN(3)
			tasks = append(tasks, aged{p.produce(Task{Queue: "a", Priority: priority}), i, priority})
			p.pass(time.Millisecond)
		}
		for range 3 {
			for range 100 {
				i := rng.IntN(len(tasks))
				tasks[i].priority = rng.IntN(3)
				require.NoError(t, p.SetPriority(ctx, tasks[i].id, tasks[i].priority))
			}
			p.step()
		}
		slices.SortFunc(tasks, func(a, b aged) int { return cmp.Or(b.priority-a.priority, a.age-b.age) })
		for i, want := range tasks {
			require.Equal(t, want.id, p.claim("a").ID, i)
		}
		require.Nil(t, claimNow(t, p.Queue, "a"))
	})
}

// TestSetRunAt: a task that waits becomes ready at the new time, and not before
// what else holds it back.
func TestSetRunAt(t *testing.T) {
	ctx := context.Background()
	for _, in := range waitingStates {
		t.Run(in.name, func(t *testing.T) {
			throughSteps(t, Options{Shards: 1, LeaseFor: 24 * time.Hour}, func(t *testing.T, p *process) {
				id := in.reach(p, keyed("k"))
				p.step()
				attempts := infoOf(t, p.Queue, id).Attempts
				late := time.UnixMilli(p.opts.wall().Add(5 * time.Hour).UnixMilli())
				require.NoError(t, p.SetRunAt(ctx, id, late.Add(time.Hour)))
				p.step()
				require.NoError(t, p.SetRunAt(ctx, id, late))
				p.step()
				info := infoOf(t, p.Queue, id)
				require.Equal(t, late, info.RunAt)
				require.Equal(t, attempts, info.Attempts)
				if in.name == "for a parent" {
					require.Equal(t, Blocked, info.State)
				} else {
					require.Equal(t, Scheduled, info.State)
					require.Equal(t, late, info.At)
				}
				p.taken(keyedAs(p, id), id)
				p.release(in.name)
				require.Equal(t, Scheduled, p.state(id))
				p.pass(time.Until(late) - time.Millisecond)
				require.Equal(t, Scheduled, p.state(id))
				p.pass(time.Millisecond)
				require.Equal(t, id, p.claim("a").ID)
			})
		})
		t.Run(in.name+", now", func(t *testing.T) {
			throughSteps(t, Options{Shards: 1, LeaseFor: 24 * time.Hour}, func(t *testing.T, p *process) {
				id := in.reach(p, keyed("k"))
				p.step()
				for i, now := range []time.Time{{}, p.opts.wall(), time.UnixMilli(0), firstMoment} {
					require.NoError(t, p.SetRunAt(ctx, id, now), i)
					p.step()
					switch in.name {
					case "for a parent", "for the turn of its group", "for room in its limit":
						require.Equal(t, Blocked, p.state(id), i)
					default:
						require.Equal(t, Ready, p.state(id), i)
					}
				}
				if in.state == Blocked {
					p.release(in.name)
				}
				require.Equal(t, id, p.claim("a").ID)
			})
		})
	}
}

// TestSetRunAtOrder: a task that becomes ready by it is behind those that are.
func TestSetRunAtOrder(t *testing.T) {
	throughSteps(t, Options{Shards: 1, WindowTasks: 2}, func(t *testing.T, p *process) {
		ctx := context.Background()
		later := p.produce(Task{Queue: "a", RunAt: p.opts.wall().Add(time.Hour)})
		var order []ID
		for range 5 {
			order = append(order, p.produce(Task{Queue: "a"}))
			p.pass(time.Millisecond)
		}
		require.NoError(t, p.SetRunAt(ctx, later, time.Time{}))
		p.pass(time.Millisecond)
		require.NoError(t, p.SetRunAt(ctx, order[0], time.Time{}))
		p.pass(time.Millisecond)
		p.step()
		order = append(order[1:], later, order[0], p.produce(Task{Queue: "a"}))
		for i, id := range order {
			require.Equal(t, id, p.claim("a").ID, i)
		}
	})
}

// TestSetRunAtOfTurn: a task that has the turn of its group keeps it while it
// is put off; one that waits for the turn has others go first.
func TestSetRunAtOfTurn(t *testing.T) {
	throughSteps(t, Options{Shards: 1, LeaseFor: 24 * time.Hour}, func(t *testing.T, p *process) {
		ctx := context.Background()
		var ids []ID
		for range 3 {
			ids = append(ids, p.produce(Task{Queue: "a", Group: "g"}))
		}
		require.NoError(t, p.SetRunAt(ctx, ids[0], p.opts.wall().Add(time.Hour)))
		require.NoError(t, p.SetRunAt(ctx, ids[1], p.opts.wall().Add(2*time.Hour)))
		p.step()
		require.Nil(t, claimNow(t, p.Queue, "a"))
		require.Equal(t, []State{Scheduled, Scheduled, Blocked}, []State{p.state(ids[0]), p.state(ids[1]), p.state(ids[2])})
		p.pass(time.Hour)
		l := p.claim("a")
		require.Equal(t, ids[0], l.ID)
		require.NoError(t, p.Complete(ctx, l.Receipt, nil))
		p.step()
		l = p.claim("a")
		require.Equal(t, ids[2], l.ID)
		p.pass(2 * time.Hour)
		p.step()
		require.Equal(t, Blocked, p.state(ids[1]))
		require.NoError(t, p.Complete(ctx, l.Receipt, nil))
		require.Equal(t, ids[1], p.claim("a").ID)
	})
}

// TestSetRunAtWakesClaims: a claim that waits gets what becomes ready.
func TestSetRunAtWakesClaims(t *testing.T) {
	bubble(t, Options{Shards: 2}, func(t *testing.T, q *Queue) {
		id := produce(t, q, Task{Queue: "a", RunAt: time.Now().Add(time.Hour)})[0]
		got := make(chan ID, 1)
		go func() {
			l, err := q.Claim(context.Background(), ClaimRequest{Queues: []string{"a"}})
			require.NoError(t, err)
			got <- l.ID
		}()
		synctest.Wait()
		require.NoError(t, q.SetRunAt(context.Background(), id, time.Time{}))
		synctest.Wait()
		require.Equal(t, id, <-got)
		require.NoError(t, q.checkMemory())
	})
}

// TestPause: nothing is claimed from a paused queue, over restarts too; claims
// that wait get its tasks when it is resumed.
func TestPause(t *testing.T) {
	for _, shards := range []int{1, 3} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			throughSteps(t, Options{Shards: shards, LeaseFor: 24 * time.Hour}, func(t *testing.T, p *process) {
				ctx := context.Background()
				var got chan ID
				wait := func() { // has claims wait, as a process does that has begun
					got = make(chan ID, 5)
					for range 5 {
						go func(q *Queue, got chan ID) {
							if l, err := q.Claim(ctx, ClaimRequest{Queues: []string{"a"}}); err == nil {
								got <- l.ID
							}
						}(p.Queue, got)
					}
					synctest.Wait()
				}
				p.produce(Task{Queue: "a"})
				l := p.claim("a")
				wait()
				require.NoError(t, p.Pause(ctx, "a"))
				set, err := p.Settings("a")
				require.NoError(t, err)
				require.True(t, set.Paused)
				ids := make(map[ID]bool)
				for range 3 {
					ids[p.produce(Task{Queue: "a"})] = true
				}
				ids[p.produce(Task{Queue: "a", RunAt: p.opts.wall().Add(time.Minute)})] = true
				p.check()
				require.Empty(t, got)
				p.step()
				if p.end == closed || p.end == killed {
					wait()
				}
				p.pass(time.Minute)
				require.NoError(t, p.Extend(ctx, l.Receipt, time.Hour))
				require.NoError(t, p.Retry(ctx, l.Receipt, RetryOptions{After: -1})) // those in workers' hands go on
				ids[l.ID] = true
				synctest.Wait()
				require.Empty(t, got)
				require.Nil(t, claimNow(t, p.Queue, "a"))
				require.Equal(t, Counts{Ready: 5}, countsOf(t, p.Queue, "a"))
				other := p.produce(Task{Queue: "b"})
				require.Equal(t, other, claimNow(t, p.Queue, "a", "b").ID)

				require.NoError(t, p.Pause(ctx, "a")) // again
				require.NoError(t, p.Resume(ctx, "a"))
				p.check()
				require.Len(t, got, 5)
				for range 5 {
					id := <-got
					require.True(t, ids[id])
					delete(ids, id)
				}
				p.step()
				next := p.produce(Task{Queue: "a"})
				require.Equal(t, next, p.claim("a").ID)
			})
		})
	}
}

// TestPauseRun: Run does not begin with tasks of a paused queue, and ends those
// that it has.
func TestPauseRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, Options{Shards: 2, Retention: Forever})
		ctx := context.Background()
		var m Mux
		calls := newCallRecorder()
		Handle(&m, "a", func(_ context.Context, j *Job[[]byte]) error {
			calls.add(j.Lease)
			time.Sleep(time.Minute)
			return nil
		})
		startRun(t, q, &m, RunOptions{Concurrency: 4})
		produce(t, q, Task{Queue: "a"})
		synctest.Wait()
		require.NoError(t, q.Pause(ctx, "a"))
		produce(t, q, Task{Queue: "a"}, Task{Queue: "a"})
		time.Sleep(time.Hour)
		synctest.Wait()
		require.Len(t, calls.all(), 1)
		require.Equal(t, Counts{Ready: 2, Done: 1}, countsOf(t, q, "a"))
		require.NoError(t, q.Resume(ctx, "a"))
		synctest.Wait()
		require.Len(t, calls.all(), 3)
		time.Sleep(time.Minute)
	})
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
	produce(t, q.Queue, Task{Queue: "unheard of"})
	require.Nil(t, claimNow(t, q.Queue, "unheard of"))
}

// TestSnooze: a task that its handler puts off keeps its attempts, its key and
// the turn of its group, over a restart too.
func TestSnooze(t *testing.T) {
	throughSteps(t, Options{Shards: 1, Retention: Forever}, func(t *testing.T, p *process) {
		ctx := context.Background()
		task := Task{Queue: "a", Group: "g", MaxAttempts: 1, Unique: Unique{Key: "k", For: time.Second}}
		var calls *callRecorder
		work := func() *activeRun {
			var m Mux
			calls = newCallRecorder()
			Handle(&m, "a", func(_ context.Context, j *Job[[]byte]) error {
				if calls.add(j.Lease); len(j.Payload) == 0 {
					return Snooze(time.Hour)
				}
				return nil
			})
			return startRun(t, p.Queue, &m, RunOptions{})
		}
		run := work()
		id := p.produce(task)
		other := p.produce(Task{Queue: "a", Group: "g", Payload: []byte("x")})
		for range 2 {
			synctest.Wait()
			require.Len(t, calls.all(), 1)
			require.Equal(t, id, calls.all()[0].id)
			require.Equal(t, 1, calls.all()[0].attempt)
			info := infoOf(t, p.Queue, id)
			require.Equal(t, Scheduled, info.State)
			require.Zero(t, info.Attempts)
			require.Empty(t, info.LastError)
			require.Empty(t, run.reported())
			p.taken(task, id)
			require.NoError(t, run.end(nil))
			p.step()
			p.pass(time.Hour)
			require.Equal(t, Ready, p.state(id))
			require.Equal(t, Blocked, p.state(other))
			run = work()
		}
		synctest.Wait()
		require.NoError(t, p.Cancel(ctx, id))
		p.check()
		require.Equal(t, Done, p.state(other))
		require.NoError(t, run.end(nil))
	})
}
