package codeq

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/keys"
)

// inState is a way to bring a task of queue "a", with an idempotency key, into a state.
type inState struct {
	name  string
	state State
	reach func(p *Process, task Task) ID
}

// waitingStates are the ways in which a task waits.
var waitingStates = []inState{
	{"ready", Ready, func(p *Process, task Task) ID { return p.Store(task) }},
	{"given back", Ready, func(p *Process, task Task) ID {
		id := p.Store(task)
		require.NoError(p.T, p.Release(context.Background(), p.Take("a").Receipt, 0))
		return id
	}},
	{"scheduled", Scheduled, func(p *Process, task Task) ID {
		task.RunAt = p.Now().Add(time.Hour)
		return p.Store(task)
	}},
	{"between two attempts", Scheduled, func(p *Process, task Task) ID {
		id := p.Store(task)
		require.NoError(p.T, p.Retry(context.Background(), p.Take("a").Receipt, RetryOptions{After: time.Hour}))
		return id
	}},
	{"for a parent", Blocked, func(p *Process, task Task) ID {
		task.After = []ID{p.Store(Task{Queue: "parents"})}
		return p.Store(task)
	}},
	{"for the turn of its group", Blocked, func(p *Process, task Task) ID {
		task.Group = "g"
		p.Store(Task{Queue: "a", Group: "g", RunAt: p.Now().Add(time.Millisecond)})
		p.Pass(time.Millisecond)
		return p.Store(task)
	}},
	{"for room in its limit", Blocked, func(p *Process, task Task) ID {
		task.LimitKey = "l"
		require.NoError(p.T, p.Configure(context.Background(), "a", func(s *Settings) { s.ConcurrencyPerKey = 1 }))
		p.Store(Task{Queue: "a", LimitKey: "l"})
		p.Take("a")
		id := p.Store(task)
		require.Nil(p.T, claimNow(p.T, p.Queue, "a"))
		return id
	}},
}

// busyStates are those of a task that has not ended, and does not wait.
var busyStates = []inState{
	{"leased", Leased, func(p *Process, task Task) ID {
		id := p.Store(task)
		p.Take("a")
		return id
	}},
	{"leased again", Leased, func(p *Process, task Task) ID {
		id := p.Store(task)
		require.NoError(p.T, p.Retry(context.Background(), p.Take("a").Receipt, RetryOptions{After: -1}))
		require.Equal(p.T, 2, p.Take("a").Attempt)
		return id
	}},
	{"dead", Dead, func(p *Process, task Task) ID {
		id := p.Store(task)
		require.NoError(p.T, p.DeadLetter(context.Background(), p.Take("a").Receipt, errors.New("boom")))
		return id
	}},
}

// TestCancel: in every state but those of the end, and what is left of the task.
func TestCancel(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for _, from := range append(slices.Clone(waitingStates), busyStates...) {
		for _, retention := range []time.Duration{0, Forever} {
			t.Run(fmt.Sprintf("%s, kept for %d", from.name, retention), func(t *testing.T) {
				throughSteps(t, Options{Shards: 2, LeaseFor: 24 * time.Hour}, func(t *testing.T, p *Process) {
					task := keyed("k")
					task.Retention, task.Payload = retention, []byte("x")
					id := from.reach(p, task)
					p.Step()
					require.Equal(t, from.state, p.StateOf(id))
					require.NoError(t, p.Cancel(ctx, id))
					p.Step()
					if retention == 0 {
						require.Zero(t, p.StateOf(id))
						require.ErrorIs(t, p.Cancel(ctx, id), ErrNotFound)
					} else {
						info := infoOf(t, p.Queue, id)
						require.Equal(t, Canceled, info.State)
						require.Equal(t, p.Now().UnixMilli(), info.At.UnixMilli())
						require.Equal(t, "x", string(info.Payload))
						require.ErrorIs(t, p.Cancel(ctx, id), ErrNotWaiting)
					}
					require.Zero(t, p.Stored(keys.Unique), "its key is free")
					p.Pass(2 * time.Hour)
					for l := claimNow(t, p.Queue, "a"); l != nil; l = claimNow(t, p.Queue, "a") {
						require.NotEqual(t, id, l.ID)
					}
				})
			})
		}
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
		r.number = q.runs.Add(r)
		op, err := q.claim(t.Context(), &r.req, r)
		require.NoError(t, err)
		require.NoError(t, q.Cancel(t.Context(), id))
		q.notices.Wait()
		w := r.pool.Workers()[0]
		r.Do(w, &op.Grants[0])
		op.unref()
		require.Len(t, reported, 1)
		require.ErrorIs(t, reported[0], ErrCanceled)
		_, running := w.Task()
		require.False(t, running)
		require.Equal(t, Canceled, infoOf(t, q, id).State)
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
		for r := range q.runs.All {
			if !r.canceledReceipts.IsEmpty() {
				told++
			}
		}
		require.Equal(t, 1, told)
		for i, want := range []int64{0, 1, 0} {
			require.Equal(t, want, ended[i].Load())
		}
	})
}

// TestChangesAreRefused: SetPriority and SetRunAt of tasks that do not wait.
func TestChangesAreRefused(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	done := inState{"done", Done, func(p *Process, task Task) ID {
		id := p.Store(task)
		require.NoError(t, p.Complete(ctx, p.Take("a").Receipt, nil))
		return id
	}}
	canceled := inState{"canceled", Canceled, func(p *Process, task Task) ID {
		id := p.Store(task)
		require.NoError(t, p.Cancel(ctx, id))
		return id
	}}
	for _, in := range append(slices.Clone(busyStates), done, canceled) {
		t.Run(in.name, func(t *testing.T) {
			throughSteps(t, Options{Shards: 2, Retention: Forever}, func(t *testing.T, p *Process) {
				id := in.reach(p, keyed("k"))
				p.Step()
				before := infoOf(t, p.Queue, id)
				for _, err := range []error{p.SetPriority(ctx, id, 5), p.SetRunAt(ctx, id, time.Now().Add(time.Hour))} {
					require.ErrorIs(t, err, ErrNotWaiting)
					require.ErrorContains(t, err, in.state.String())
				}
				p.Step()
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
	t.Parallel()
	ctx := context.Background()
	for _, in := range waitingStates {
		t.Run(in.name, func(t *testing.T) {
			throughSteps(t, Options{Shards: 1, LeaseFor: 24 * time.Hour}, func(t *testing.T, p *Process) {
				id := in.reach(p, keyed("k"))
				p.Step()
				for _, priority := range []int{9, 0, 3} {
					before := infoOf(t, p.Queue, id)
					require.NoError(t, p.SetPriority(ctx, id, priority))
					p.Step()
					before.Priority = priority
					require.Equal(t, before, infoOf(t, p.Queue, id))
				}
				p.Taken(keyedAs(p, id), id)
				p.Free(in.name)
				p.Store(Task{Queue: "a", Priority: 2})
				require.Equal(t, id, p.Take("a").ID)
			})
		})
	}
}

// keyedAs returns a task with the key of a stored one.
func keyedAs(p *Process, id ID) Task {
	info := infoOf(p.T, p.Queue, id)
	return Task{Queue: info.Queue, Group: info.Group, LimitKey: info.LimitKey, Unique: Unique{Key: info.Unique.Key}}
}

// Free lets a task go on that waits as one of waitingStates does.
func (p *Process) Free(name string) {
	ctx := context.Background()
	switch name {
	case "scheduled", "between two attempts":
		p.Pass(time.Hour)
	case "for a parent":
		require.NoError(p.T, p.Complete(ctx, p.Take("parents").Receipt, nil))
	case "for the turn of its group":
		require.NoError(p.T, p.Complete(ctx, p.Take("a").Receipt, nil))
	case "for room in its limit":
		require.NoError(p.T, p.Configure(ctx, "a", func(s *Settings) { s.ConcurrencyPerKey = 0 }))
	}
	p.Check()
}

// TestSetRunAt: a task that waits becomes ready at the new time, and not before
// what else holds it back.
func TestSetRunAt(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for _, in := range waitingStates {
		t.Run(in.name, func(t *testing.T) {
			throughSteps(t, Options{Shards: 1, LeaseFor: 24 * time.Hour}, func(t *testing.T, p *Process) {
				id := in.reach(p, keyed("k"))
				p.Step()
				attempts := infoOf(t, p.Queue, id).Attempts
				late := time.UnixMilli(p.Now().Add(5 * time.Hour).UnixMilli())
				require.NoError(t, p.SetRunAt(ctx, id, late.Add(time.Hour)))
				p.Step()
				require.NoError(t, p.SetRunAt(ctx, id, late))
				p.Step()
				info := infoOf(t, p.Queue, id)
				require.Equal(t, late, info.RunAt)
				require.Equal(t, attempts, info.Attempts)
				if in.name == "for a parent" {
					require.Equal(t, Blocked, info.State)
				} else {
					require.Equal(t, Scheduled, info.State)
					require.Equal(t, late, info.At)
				}
				p.Taken(keyedAs(p, id), id)
				p.Free(in.name)
				require.Equal(t, Scheduled, p.StateOf(id))
				p.Pass(time.Until(late) - time.Millisecond)
				require.Equal(t, Scheduled, p.StateOf(id))
				p.Pass(time.Millisecond)
				require.Equal(t, id, p.Take("a").ID)
			})
		})
		t.Run(in.name+", now", func(t *testing.T) {
			throughSteps(t, Options{Shards: 1, LeaseFor: 24 * time.Hour}, func(t *testing.T, p *Process) {
				id := in.reach(p, keyed("k"))
				p.Step()
				for i, now := range []time.Time{{}, p.Now(), time.UnixMilli(0), firstMoment} {
					require.NoError(t, p.SetRunAt(ctx, id, now), i)
					p.Step()
					switch in.name {
					case "for a parent", "for the turn of its group", "for room in its limit":
						require.Equal(t, Blocked, p.StateOf(id), i)
					default:
						require.Equal(t, Ready, p.StateOf(id), i)
					}
				}
				if in.state == Blocked {
					p.Free(in.name)
				}
				require.Equal(t, id, p.Take("a").ID)
			})
		})
	}
}

// TestSetRunAtOrder: a task that becomes ready by it is behind those that are.
func TestSetRunAtOrder(t *testing.T) {
	throughSteps(t, Options{Shards: 1, WindowTasks: 2}, func(t *testing.T, p *Process) {
		ctx := context.Background()
		later := p.Store(Task{Queue: "a", RunAt: p.Now().Add(time.Hour)})
		var order []ID
		for range 5 {
			order = append(order, p.Store(Task{Queue: "a"}))
			p.Pass(time.Millisecond)
		}
		require.NoError(t, p.SetRunAt(ctx, later, time.Time{}))
		p.Pass(time.Millisecond)
		require.NoError(t, p.SetRunAt(ctx, order[0], time.Time{}))
		p.Pass(time.Millisecond)
		p.Step()
		order = append(order[1:], later, order[0], p.Store(Task{Queue: "a"}))
		for i, id := range order {
			require.Equal(t, id, p.Take("a").ID, i)
		}
	})
}

// TestSetRunAtOfTurn: a task that has the turn of its group keeps it while it
// is put off; one that waits for the turn lets others go first.
func TestSetRunAtOfTurn(t *testing.T) {
	t.Parallel()
	throughSteps(t, Options{Shards: 1, LeaseFor: 24 * time.Hour}, func(t *testing.T, p *Process) {
		ctx := context.Background()
		var ids []ID
		for range 3 {
			ids = append(ids, p.Store(Task{Queue: "a", Group: "g"}))
		}
		require.NoError(t, p.SetRunAt(ctx, ids[0], p.Now().Add(time.Hour)))
		require.NoError(t, p.SetRunAt(ctx, ids[1], p.Now().Add(2*time.Hour)))
		p.Step()
		require.Nil(t, claimNow(t, p.Queue, "a"))
		require.Equal(t, []State{Scheduled, Scheduled, Blocked}, []State{p.StateOf(ids[0]), p.StateOf(ids[1]), p.StateOf(ids[2])})
		p.Pass(time.Hour)
		l := p.Take("a")
		require.Equal(t, ids[0], l.ID)
		require.NoError(t, p.Complete(ctx, l.Receipt, nil))
		p.Step()
		l = p.Take("a")
		require.Equal(t, ids[2], l.ID)
		p.Pass(2 * time.Hour)
		p.Step()
		require.Equal(t, Blocked, p.StateOf(ids[1]))
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
			throughSteps(t, Options{Shards: shards, LeaseFor: 24 * time.Hour}, func(t *testing.T, p *Process) {
				ctx := context.Background()
				var got chan ID
				wait := func() { // lets claims wait, as a process does that has begun
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
				p.Store(Task{Queue: "a"})
				l := p.Take("a")
				wait()
				require.NoError(t, p.Pause(ctx, "a"))
				set, err := p.Settings("a")
				require.NoError(t, err)
				require.True(t, set.Paused)
				ids := make(map[ID]bool)
				for range 3 {
					ids[p.Store(Task{Queue: "a"})] = true
				}
				ids[p.Store(Task{Queue: "a", RunAt: p.Now().Add(time.Minute)})] = true
				p.Check()
				require.Empty(t, got)
				p.Step()
				if p.End == closed || p.End == killed {
					wait()
				}
				p.Pass(time.Minute)
				require.NoError(t, p.Extend(ctx, l.Receipt, time.Hour))
				require.NoError(t, p.Retry(ctx, l.Receipt, RetryOptions{After: -1})) // those in workers' hands go on
				ids[l.ID] = true
				synctest.Wait()
				require.Empty(t, got)
				require.Nil(t, claimNow(t, p.Queue, "a"))
				require.Equal(t, Counts{Ready: 5}, countsOf(t, p.Queue, "a"))
				other := p.Store(Task{Queue: "b"})
				require.Equal(t, other, claimNow(t, p.Queue, "a", "b").ID)

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
				next := p.Store(Task{Queue: "a"})
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
	produce(t, q.Queue, Task{Queue: "unheard of"})
	require.Nil(t, claimNow(t, q.Queue, "unheard of"))
}
