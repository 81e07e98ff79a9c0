package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/testbase"
	"codeq/test/queuetest"
)

func TestNthIsRefused(t *testing.T) {
	ctx := context.Background()
	queuetest.InFlow(t, codeq.Options{Shards: 3}, func(f *queuetest.FlowTest) {
		refused := func(err error, field string) {
			f.Helper()
			var invalid *codeq.InvalidError
			require.ErrorAs(f, err, &invalid)
			require.Equal(f, field, invalid.Field)
		}
		_, err := f.Q.Produce(ctx, codeq.Task{Queue: "a", After: []codeq.ID{codeq.Nth(0)}})
		refused(err, "Task.After")
		_, err = f.Q.Produce(ctx, codeq.Task{Queue: "a", After: []codeq.ID{{}}})
		refused(err, "Task.After")
		_, err = f.Q.Produce(ctx, codeq.Task{Queue: "a", After: make([]codeq.ID, codeq.MaxParents+1)})
		refused(err, "Task.After")
		_, err = f.Q.Produce(ctx, codeq.Task{Queue: "a", OnDead: codeq.RunOnDead + 1})
		refused(err, "Task.OnDead")
		places := []codeq.ID{codeq.Nth(1), codeq.Nth(2), codeq.Nth(-1), codeq.Nth(-2), codeq.Nth(math.MinInt), codeq.Nth(math.MaxInt32), codeq.Nth(math.MaxInt), {}}
		for _, after := range places {
			_, err = f.Q.ProduceBatch(ctx, []codeq.Task{{Queue: "a"}, {Queue: "a", After: []codeq.ID{after}}})
			refused(err, "Task.After")
			require.ErrorContains(f, err, "task 1")
		}

		f.ProduceAt(0, codeq.Task{Queue: "start"})
		l := f.Claim("start")
		for _, after := range places {
			refused(f.Q.Complete(ctx, l.Receipt, nil, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a", After: []codeq.ID{after}}), "Task.After")
			refused(f.Q.SetSchedule(ctx, codeq.Schedule{Name: "s", Every: time.Hour, Task: codeq.Task{Queue: "a", After: []codeq.ID{after}}}), "Task.After")
		}
		refused(f.Q.Complete(ctx, l.Receipt, nil, codeq.Task{Queue: "a", After: []codeq.ID{codeq.Nth(0)}}), "Task.After")
		stats, err := f.Q.Stats(ctx)
		require.NoError(f, err)
		require.Equal(f, map[string]codeq.Counts{"start": {Leased: 1}}, stats, "nothing was stored")
	})
}

// TestFollowUpsOverShards: follow-ups of a completion wait for each other, for any shards of their
// keys, groups and limits. When Complete has returned, all of them are stored, with the links
// between them.
func TestFollowUpsOverShards(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for _, shards := range []int{1, 2, 4, 7} {
		for at := range shards {
			t.Run(fmt.Sprint(shards, " shards, at ", at), func(t *testing.T) {
				queuetest.InFlow(t, codeq.Options{Shards: shards}, func(f *queuetest.FlowTest) {
					const n = 8
					var next []codeq.Task
					join := codeq.Task{Queue: "join"}
					for i := range n {
						next = append(next, codeq.Task{Queue: "a", Unique: codeq.Unique{Key: fmt.Sprint(i)}})
						join.After = append(join.After, codeq.Nth(i))
					}
					next = append(next,
						join,
						codeq.Task{Queue: "end", Group: "g", After: []codeq.ID{codeq.Nth(n)}},
						codeq.Task{Queue: "a", Unique: codeq.Unique{Key: "0"}}, // a twin
						codeq.Task{Queue: "c", LimitKey: "l", After: []codeq.ID{codeq.Nth(n + 1), codeq.Nth(n + 2)}},
						codeq.Task{Queue: "free"},
						codeq.Task{Queue: "d", Unique: codeq.Unique{Key: "d"}, After: []codeq.ID{codeq.Nth(n + 4)}},
					)
					f.ProduceAt(at, codeq.Task{Queue: "start"})
					l := f.Claim("start")
					next[0].After = []codeq.ID{l.ID}
					require.NoError(f, f.Q.Complete(ctx, l.Receipt, nil, next...))
					stats, err := f.Q.Stats(ctx)
					require.NoError(f, err)
					delete(stats, "start")
					require.Equal(f, map[string]codeq.Counts{
						"a": {Ready: n}, "join": {Blocked: 1}, "end": {Blocked: 1}, "c": {Blocked: 1}, "free": {Ready: 1}, "d": {Blocked: 1},
					}, stats)
					for info, err := range f.Q.List(ctx, codeq.ListOptions{State: codeq.Blocked, Queue: "join"}) {
						require.NoError(f, err)
						require.Len(f, info.After, n)
					}
					f.Check()
					for range n {
						require.Equal(f, codeq.Counts{Blocked: 1}, f.Counts("join"))
						f.Complete("a")
					}
					require.Equal(f, codeq.Counts{Blocked: 1}, f.Counts("end"))
					f.Complete("join")
					require.Equal(f, codeq.Counts{Blocked: 1}, f.Counts("c"))
					f.Complete("end")
					f.Complete("c")
					f.Complete("free")
					f.Complete("d")
				})
			})
		}
	}
}

// TestFollowUpsOfRunOverShards: the follow-ups of a handler wait for each other too, and WaitIdle
// waits for those on their way.
func TestFollowUpsOfRunOverShards(t *testing.T) {
	t.Parallel()
	queuetest.InFlow(t, codeq.Options{Shards: 4}, func(f *queuetest.FlowTest) {
		ctx, stop := context.WithCancel(context.Background())
		var handled atomic.Int32
		var m codeq.Mux
		codeq.Handle(&m, "start", func(_ context.Context, j *codeq.Job[[]byte]) error {
			for i := range 8 {
				next := codeq.Task{Queue: "next", Unique: codeq.Unique{Key: fmt.Sprint(j.ID, i)}}
				if i > 0 {
					next.After = []codeq.ID{codeq.Nth(i - 1)}
				}
				j.FollowUp(next)
			}
			return nil
		})
		codeq.Handle(&m, "next", func(context.Context, *codeq.Job[[]byte]) error { handled.Add(1); return nil })
		ran := make(chan error, 1)
		go func() { ran <- f.Q.Run(ctx, &m, nil) }()
		for at := range 4 {
			f.ProduceAt(at, codeq.Task{Queue: "start"})
			require.NoError(f, f.Q.WaitIdle(ctx))
			require.EqualValues(f, 8*(at+1), handled.Load())
		}
		stop()
		require.NoError(f, <-ran)
	})
}

// TestFollowUpsOfFollowUpsEnd: a follow-up is canceled or completed before the shard of its child
// asks for it. It then counts as ended, for any OnMissing of the child.
func TestFollowUpsOfFollowUpsEnd(t *testing.T) {
	t.Parallel()
	for _, onMissing := range []codeq.OnMissing{codeq.RunOnMissing, codeq.CancelOnMissing, codeq.RefuseOnMissing} {
		t.Run(onMissing.String(), func(t *testing.T) {
			queuetest.InFlow(t, codeq.Options{Shards: 3}, func(f *queuetest.FlowTest) {
				gone := f.ProduceAt(0, codeq.Task{Queue: "x", Retention: time.Hour})
				f.Cancel(gone)
				for at := range 3 {
					for shard := range 3 {
						f.ProduceAt(at, codeq.Task{Queue: "start"})
						child := f.Bound("child", shard, 1)[0]
						child.After, child.OnMissing, child.Retention = []codeq.ID{codeq.Nth(0)}, onMissing, time.Hour
						f.Complete("start", codeq.Task{Queue: "canceled", After: []codeq.ID{gone}}, child)
					}
				}
				require.EqualValues(f, codeq.Counts{Canceled: 9}, f.Counts("child"))
			})
		})
	}
}

// TestKeysAndJoin: a batch of tasks with idempotency keys and groups, and of others that wait for
// them, works with any number of shards, and may be produced again.
func TestKeysAndJoin(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for _, shards := range []int{1, 2, 4, 7} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			queuetest.InFlow(t, codeq.Options{Shards: shards}, func(f *queuetest.FlowTest) {
				const n = 20
				var tasks []codeq.Task
				join := codeq.Task{Queue: "join", Unique: codeq.Unique{Key: "join"}}
				for i := range n {
					tasks = append(tasks, codeq.Task{Queue: "a", Unique: codeq.Unique{Key: fmt.Sprint(i)}})
					join.After = append(join.After, codeq.Nth(i))
				}
				tasks = append(tasks, join, codeq.Task{Queue: "end", Unique: codeq.Unique{Key: "end"}, After: []codeq.ID{codeq.Nth(n)}})
				ids := f.Batch(tasks...)
				for range 2 {
					again, err := f.Q.ProduceBatch(ctx, tasks)
					require.Equal(f, ids, again)
					var each *codeq.BatchError
					require.ErrorAs(f, err, &each)
					for i, err := range each.Errors {
						require.Equal(f, &codeq.DuplicateError{Key: tasks[i].Unique.Key, ID: ids[i], Index: i}, err)
					}
				}
				joined, err := f.Q.Get(ctx, ids[n])
				require.NoError(f, err)
				require.Equal(f, ids[:n], joined.After)
				for range n {
					f.RequireState(codeq.Blocked, ids[n], ids[n+1])
					f.Complete("a")
				}
				f.RequireState(codeq.Blocked, ids[n+1])
				f.Complete("join")
				f.Complete("end")

				// groups, and a task that waits for others stored before it and after it
				ids = f.Batch(
					codeq.Task{Queue: "b", Group: "g"}, codeq.Task{Queue: "c"},
					codeq.Task{Queue: "d", Group: "h", After: []codeq.ID{codeq.Nth(0), codeq.Nth(1)}},
					codeq.Task{Queue: "e", After: []codeq.ID{codeq.Nth(2), codeq.Nth(0)}},
				)
				f.Complete("b")
				f.RequireState(codeq.Blocked, ids[2:]...)
				f.Complete("c")
				f.Complete("d")
				f.Complete("e")
				f.Check()
			})
		})
	}
}

// TestFailedPart: when a shard fails, the tasks of its part and of those after it are not stored,
// and the others are.
func TestFailedPart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Shards: 3})
		task := func(shard int, after ...codeq.ID) codeq.Task {
			return codeq.Task{Queue: "a", LimitKey: queuetest.KeyOf("a", shard, 3), After: after}
		}
		queuetest.FailShard(t, q, 1)
		batch := []codeq.Task{task(0), task(1, codeq.Nth(0)), task(2, codeq.Nth(1))}
		ids, err := q.ProduceBatch(context.Background(), batch)
		require.ErrorIs(t, err, codeq.ErrUncertain)
		require.NotZero(t, ids[0])
		require.Zero(t, ids[1])
		require.Zero(t, ids[2])
		queuetest.InfoOf(t, q, ids[0])
		var each *codeq.BatchError
		require.ErrorAs(t, err, &each)
		require.Len(t, each.Errors, 3)
		require.NoError(t, each.Errors[0])
		require.ErrorIs(t, each.Errors[1], codeq.ErrUncertain)
		require.EqualError(t, each.Errors[2], "codeq: not stored, since an earlier part of the batch was not: "+strings.TrimPrefix(each.Errors[1].Error(), "codeq: "))
		require.ErrorIs(t, each.Errors[2], codeq.ErrUncertain)

		all := []codeq.Task{task(1), task(1)}
		_, err = q.ProduceBatch(context.Background(), all)
		require.ErrorAs(t, err, &each)
		for _, err := range each.Errors {
			require.ErrorIs(t, err, codeq.ErrFailed)
		}
		_, err = q.ProduceBatch(context.Background(), append(all, codeq.Task{}))
		require.ErrorIs(t, err, codeq.ErrInvalid)
		require.False(t, errors.As(err, &each), "refused as a whole")
	})
}

// TestParentResults: a child reads the results of its parents in one call. One that is not kept is
// missing.
func TestParentResults(t *testing.T) {
	queuetest.InFlow(t, codeq.Options{Shards: 3}, func(f *queuetest.FlowTest) {
		var m codeq.Mux
		codeq.Handle(&m, "part", func(_ context.Context, j *codeq.Job[[]byte]) error {
			j.SetResult([]byte(strings.ToUpper(string(j.Payload))))
			return nil
		})
		var joined atomic.Pointer[string]
		codeq.Handle(&m, "join", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			parents, err := j.Parents(ctx)
			if err != nil {
				return codeq.DeadLetter(err)
			}
			var parts []string
			for i, parent := range parents {
				if parent == nil {
					parts = append(parts, "missing")
					continue
				}
				one, err := f.Q.Get(ctx, j.After[i])
				require.NoError(f, err)
				require.Equal(f, one, parent)
				parts = append(parts, string(parent.Result))
			}
			text := strings.Join(parts, " ")
			joined.Store(&text)
			return nil
		})
		old := f.ProduceAt(2, codeq.Task{Queue: "part", Payload: []byte("zero"), Retention: time.Hour})
		f.Batch(
			codeq.Task{Queue: "part", Payload: []byte("one"), Retention: time.Hour},
			codeq.Task{Queue: "part", Payload: []byte("two"), Retention: time.Hour},
			codeq.Task{Queue: "part", Payload: []byte("not kept")},
			codeq.Task{Queue: "join", After: []codeq.ID{old, codeq.Nth(0), codeq.Nth(1), codeq.Nth(2), old}},
		)
		ctx, stop := context.WithCancel(context.Background())
		ended := make(chan error)
		go func() { ended <- f.Q.Run(ctx, &m, nil) }()
		require.NoError(f, f.Q.WaitIdle(context.Background()))
		stop()
		require.NoError(f, <-ended)
		require.Equal(f, "ZERO ONE TWO missing ZERO", *joined.Load())
	})
}

// TestManyParentResults: more parents than one message has, with larger results than one has.
func TestManyParentResults(t *testing.T) {
	testbase.SkipUnderRace(t)
	queuetest.Bubble(t, codeq.Options{Shards: 2, Retention: time.Hour}, func(t *testing.T, q *codeq.Queue) {
		const n, large = 3000, 8
		var m codeq.Mux
		codeq.Handle(&m, "part", func(_ context.Context, j *codeq.Job[[]byte]) error {
			j.SetResult(j.Payload)
			return nil
		})
		joined := make(chan error, 1)
		codeq.Handle(&m, "join", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			parents, err := j.Parents(ctx)
			for i, parent := range parents {
				if want := fmt.Sprint(i); string(parent.Result[:len(want)]) != want {
					err = errors.Join(err, fmt.Errorf("result %d is %.20q", i, parent.Result))
				}
			}
			joined <- err
			return nil
		})
		var tasks []codeq.Task
		join := codeq.Task{Queue: "join"}
		for i := range n {
			payload := []byte(fmt.Sprint(i))
			if i < large {
				payload = append(payload, make([]byte, 1<<20-10)...)
			}
			tasks = append(tasks, codeq.Task{Queue: "part", Payload: payload, LimitKey: fmt.Sprint(i % 2)})
			join.After = append(join.After, codeq.Nth(i))
		}
		_, err := q.ProduceBatch(t.Context(), append(tasks, join))
		require.NoError(t, err)
		ctx, stop := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- q.Run(ctx, &m, &codeq.RunOptions{Concurrency: 100}) }()
		require.NoError(t, <-joined)
		stop()
		require.NoError(t, <-ended)
		_, err = new(codeq.Job[int]).Parents(t.Context())
		require.Error(t, err)
	})
}

// TestFollowUpReplacesItself: a task has an idempotency key that outlives it, and its follow-up has
// the same key and Replace. The task is completed, and the follow-up is a duplicate, since no
// waiting task is left to replace.
func TestFollowUpReplacesItself(t *testing.T) {
	queuetest.InFlow(t, codeq.Options{Shards: 1}, func(f *queuetest.FlowTest) {
		task := codeq.Task{Queue: "a", Unique: codeq.Unique{Key: "k", For: time.Hour, Replace: true}}
		queuetest.Produce(f.T, f.Q, task)
		f.Complete("a", task, codeq.Task{Queue: "b"})
		require.Equal(f, codeq.Counts{}, f.Counts("a"))
		require.Equal(f, codeq.Counts{Ready: 1}, f.Counts("b"))
		time.Sleep(time.Hour)
		queuetest.Produce(f.T, f.Q, task)
		require.Equal(f, codeq.Counts{Ready: 1}, f.Counts("a"))
	})
}

// flowLayouts are where a parent, in shard 0, and its child may lie.
var flowLayouts = []struct {
	name          string
	shards, child int
}{{"one shard", 1, 0}, {"same shard of three", 3, 0}, {"another shard", 3, 2}}
