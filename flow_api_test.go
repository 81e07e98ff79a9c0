package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
)

// diamond is a task, two that wait for it, and one that waits for both.
func diamond() []codeq.Task {
	return []codeq.Task{
		{Queue: "top"},
		{Queue: "left", After: []codeq.ID{codeq.Nth(0)}},
		{Queue: "right", After: []codeq.ID{codeq.Nth(0)}},
		{Queue: "bottom", After: []codeq.ID{codeq.Nth(1), codeq.Nth(2), codeq.Nth(1)}},
	}
}

// TestNth: a batch, or the follow-ups of a completion, is stored as a flow whole.
func TestNth(t *testing.T) {
	for _, shards := range []int{1, 3} {
		inFlow(t, codeq.Options{Shards: shards}, func(f *codeq.FlowTest) {
			ids := f.Batch(diamond()...)
			f.RequireState(codeq.Ready, ids[0])
			f.RequireState(codeq.Blocked, ids[1:]...)
			bottom, err := f.Q.Get(context.Background(), ids[3])
			require.NoError(f, err)
			require.Equal(f, []codeq.ID{ids[1], ids[2], ids[1]}, bottom.After, "the IDs have taken the place of Nth")
			f.FinishDiamond()

			f.ProduceAt(0, codeq.Task{Queue: "start"})
			f.Complete("start", diamond()...)
			require.EqualValues(f, 1, f.Counts("bottom").Blocked)
			f.Reopen()
			f.FinishDiamond()
		})
	}
}

// TestNthTogetherWithIDs: siblings and tasks that exist already are parents of
// one task, in whatever shards these are.
func TestNthTogetherWithIDs(t *testing.T) {
	inFlow(t, codeq.Options{Shards: 3}, func(f *codeq.FlowTest) {
		var old []codeq.ID
		for shard := range 3 {
			old = append(old, f.ProduceAt(shard, codeq.Task{Queue: "old"}))
		}
		ids := f.Batch(codeq.Task{Queue: "new"}, codeq.Task{Queue: "join", After: append([]codeq.ID{codeq.Nth(0)}, old...)})
		f.Complete("new")
		f.Complete("old")
		f.Complete("old")
		f.RequireState(codeq.Blocked, ids[1])
		f.Reopen()
		f.Complete("old")
		f.Complete("join")
	})
}

func TestChain(t *testing.T) {
	for _, shards := range []int{1, 3} {
		inFlow(t, codeq.Options{Shards: shards}, func(f *codeq.FlowTest) {
			const n = 40
			var ids []codeq.ID
			for i := range n {
				task := codeq.Task{Queue: "chain", Payload: []byte{byte(i)}}
				if i > 0 {
					task.After = []codeq.ID{ids[i-1]}
				}
				ids = append(ids, f.ProduceAt(i%shards, task))
			}
			for i := range n {
				l := f.Claim("chain")
				require.Equal(f, []byte{byte(i)}, l.Payload)
				require.Nil(f, claimNow(f.T, f.Q, "chain"), "one at a time")
				require.NoError(f, f.Q.Complete(context.Background(), l.Receipt, nil))
			}
		})
	}
}

// TestFanOutAndIn: a thousand tasks wait for one, and one waits for them all.
func TestFanOutAndIn(t *testing.T) {
	t.Parallel()
	const n = 1000
	ctx := context.Background()
	work := func(f *codeq.FlowTest, queue string, n int) {
		for n > 0 {
			leases, err := f.Q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{queue}, Max: min(n, 100)})
			require.NoError(f, err)
			for _, l := range leases {
				require.NoError(f, f.Q.Complete(ctx, l.Receipt, nil))
			}
			n -= len(leases)
		}
		f.Check()
	}
	for _, shards := range []int{1, 3} {
		t.Run(fmt.Sprint("one batch, ", shards, " shards"), func(t *testing.T) {
			inFlow(t, codeq.Options{Shards: shards}, func(f *codeq.FlowTest) {
				tasks := []codeq.Task{{Queue: "first"}}
				join := codeq.Task{Queue: "last"}
				for i := range n {
					tasks = append(tasks, codeq.Task{Queue: "middle", After: []codeq.ID{codeq.Nth(0)}})
					join.After = append(join.After, codeq.Nth(i+1))
				}
				f.Batch(append(tasks, join)...)
				require.EqualValues(f, n, f.Counts("middle").Blocked)
				f.Complete("first")
				require.EqualValues(f, n, f.Counts("middle").Ready)
				work(f, "middle", n-1)
				require.EqualValues(f, 1, f.Counts("last").Blocked)
				work(f, "middle", 1)
				f.Complete("last")
			})
		})
	}
	t.Run("over shards", func(t *testing.T) {
		inFlow(t, codeq.Options{Shards: 3}, func(f *codeq.FlowTest) {
			first := f.ProduceAt(0, codeq.Task{Queue: "first"})
			join := codeq.Task{Queue: "last"}
			for shard := range 3 {
				var tasks []codeq.Task
				for i := shard; i < n; i += 3 {
					tasks = append(tasks, codeq.Task{Queue: "middle", After: []codeq.ID{first}})
				}
				ids, err := startingAt(f.Q, shard).ProduceBatch(ctx, tasks)
				require.NoError(f, err)
				join.After = append(join.After, ids...)
			}
			last := f.ProduceAt(1, join)
			f.Check()
			f.Complete("first")
			require.EqualValues(f, n, f.Counts("middle").Ready)
			work(f, "middle", n-1)
			f.RequireState(codeq.Blocked, last)
			work(f, "middle", 1)
			f.RequireState(codeq.Ready, last)
		})
	})
}

// TestOnDeadOfSeveralParents: one parent is enough to cancel, and all have to
// end for the task to go on.
func TestOnDeadOfSeveralParents(t *testing.T) {
	for _, shards := range []int{1, 3} {
		inFlow(t, codeq.Options{Shards: shards}, func(f *codeq.FlowTest) {
			var parents []codeq.ID
			for i := range 3 {
				parents = append(parents, f.ProduceAt(i%shards, codeq.Task{Queue: fmt.Sprint(i)}))
			}
			hold := f.ProduceAt(0, codeq.Task{Queue: "hold", After: parents, Retention: codeq.Forever})
			run := f.ProduceAt(0, codeq.Task{Queue: "run", After: parents, OnDead: codeq.RunOnDead, Retention: codeq.Forever})
			stop := f.ProduceAt(0, codeq.Task{Queue: "stop", After: parents, OnDead: codeq.CancelOnDead, Retention: codeq.Forever})
			f.Complete("0")
			f.Die("1")
			f.RequireState(codeq.Blocked, hold, run)
			f.RequireState(codeq.Canceled, stop)
			f.Die("2")
			f.RequireState(codeq.Blocked, hold)
			f.RequireState(codeq.Ready, run)
			f.Cancel(parents[1])
			f.RequireState(codeq.Canceled, hold)
			require.NoError(f, f.Q.RedriveDead(context.Background(), parents[2]))
			f.Complete("2")
			f.RequireState(codeq.Canceled, hold, stop)
		})
	}
}

// TestChildWaitsForMore: when its parents have ended, a task may still have to
// wait for its time, its turn, or room.
func TestChildWaitsForMore(t *testing.T) {
	ctx := context.Background()
	for _, shards := range []int{1, 3} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			inFlow(t, codeq.Options{Shards: shards, LeaseFor: 24 * time.Hour}, func(f *codeq.FlowTest) {
				after := func(task codeq.Task) codeq.ID { // a child of a task of the queue parent
					parent := produce(f.T, f.Q, codeq.Task{Queue: "parent"})[0]
					task.After = []codeq.ID{parent}
					id := produce(f.T, f.Q, task)[0]
					f.Check()
					f.RequireState(codeq.Blocked, id)
					return id
				}

				later := after(codeq.Task{Queue: "later", RunAt: time.Now().Add(time.Hour)})
				f.Complete("parent")
				f.RequireState(codeq.Scheduled, later)
				time.Sleep(time.Hour)
				f.RequireState(codeq.Ready, later)
				late := after(codeq.Task{Queue: "later", RunAt: time.Now().Add(time.Minute)})
				time.Sleep(time.Hour)
				f.RequireState(codeq.Blocked, late)
				f.Complete("parent")
				f.RequireState(codeq.Ready, late)

				rival := produce(f.T, f.Q, codeq.Task{Queue: "group", Group: "g"})[0]
				inGroup := after(codeq.Task{Queue: "group", Group: "g"})
				f.Complete("parent")
				f.RequireState(codeq.Blocked, inGroup)
				f.RequireState(codeq.Ready, rival)
				f.Complete("group")
				f.RequireState(codeq.Ready, inGroup)
				second := produce(f.T, f.Q, codeq.Task{Queue: "group", Group: "g"})[0]
				f.RequireState(codeq.Blocked, second)
				f.Complete("group")
				f.RequireState(codeq.Ready, second)
				waits := after(codeq.Task{Queue: "group2", Group: "g"})
				third := produce(f.T, f.Q, codeq.Task{Queue: "group2", Group: "g"})[0]
				f.RequireState(codeq.Ready, third) // who waits for parents does not have the turn
				f.Cancel(third)
				f.RequireState(codeq.Blocked, waits)
				f.Complete("parent")
				f.Complete("group2")

				require.NoError(f, f.Q.Configure(ctx, "limited", func(s *codeq.Settings) { s.ConcurrencyPerKey = 1 }))
				produce(f.T, f.Q, codeq.Task{Queue: "limited", LimitKey: "k"})
				lease := f.Claim("limited")
				limited := after(codeq.Task{Queue: "limited", LimitKey: "k"})
				f.Complete("parent")
				require.Nil(f, claimNow(f.T, f.Q, "limited"))
				f.RequireState(codeq.Blocked, limited)
				require.NoError(f, f.Q.Complete(ctx, lease.Receipt, nil))
				f.Complete("limited")

				unique := after(codeq.Task{Queue: "unique", Unique: codeq.Unique{Key: "k"}})
				id, err := f.Q.Produce(ctx, codeq.Task{Queue: "unique", Unique: codeq.Unique{Key: "k"}})
				require.ErrorIs(f, err, codeq.ErrDuplicate)
				require.Equal(f, unique, id)
				id, err = f.Q.Produce(ctx, codeq.Task{Queue: "unique", Payload: []byte("new"), Unique: codeq.Unique{Key: "k", Replace: true}})
				require.NoError(f, err)
				require.Equal(f, unique, id)
				f.Check()
				f.RequireState(codeq.Blocked, unique) // it waits for its parent still
				info, err := f.Q.Get(ctx, unique)
				require.NoError(f, err)
				require.Len(f, info.After, 1)
				f.Complete("parent")
				require.Equal(f, "new", string(f.Claim("unique").Payload))
			})
		})
	}
}

// TestBlockedTaskIsChanged: a task keeps its parents when it gets another
// priority or time.
func TestBlockedTaskIsChanged(t *testing.T) {
	ctx := context.Background()
	for _, shards := range []int{1, 3} {
		inFlow(t, codeq.Options{Shards: shards}, func(f *codeq.FlowTest) {
			p1, p2 := f.ProduceAt(0, codeq.Task{Queue: "p1"}), f.ProduceAt(shards-1, codeq.Task{Queue: "p2"})
			child := f.ProduceAt(0, codeq.Task{Queue: "child", After: []codeq.ID{p1, p2}})
			rival := f.ProduceAt(0, codeq.Task{Queue: "child", Priority: 3})
			require.NoError(f, f.Q.SetPriority(ctx, child, 7))
			f.Check()
			f.Complete("p1")
			require.NoError(f, f.Q.SetRunAt(ctx, child, time.Now().Add(time.Hour)))
			f.Check()
			f.RequireState(codeq.Blocked, child)
			f.Reopen()
			f.Complete("p2")
			f.RequireState(codeq.Scheduled, child)
			require.NoError(f, f.Q.SetRunAt(ctx, child, time.Time{}))
			f.Check()
			require.Equal(f, child, f.Claim("child").ID)
			require.Equal(f, rival, f.Claim("child").ID)
		})
	}
}

// TestCancelInFlow: the cancel of a task takes those with it that wait for it,
// and those that wait for them, and nothing else.
func TestCancelInFlow(t *testing.T) {
	for _, shards := range []int{1, 3} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			inFlow(t, codeq.Options{Shards: shards, Retention: codeq.Forever}, func(f *codeq.FlowTest) {
				root := f.ProduceAt(0, codeq.Task{Queue: "root"})
				other := f.ProduceAt(0, codeq.Task{Queue: "other"})
				var ids []codeq.ID // a chain below root
				for i := range 6 {
					parent := root
					if i > 0 {
						parent = ids[i-1]
					}
					ids = append(ids, f.ProduceAt(i%shards, codeq.Task{Queue: "chain", After: []codeq.ID{parent, other}}))
				}
				beside := f.ProduceAt(shards-1, codeq.Task{Queue: "beside", After: []codeq.ID{root}})
				f.Check()

				f.Cancel(ids[3])
				f.RequireState(codeq.Canceled, ids[3:]...)
				f.RequireState(codeq.Blocked, ids[:3]...)
				f.RequireState(codeq.Blocked, beside)
				require.ErrorIs(f, f.Q.Cancel(context.Background(), ids[5]), codeq.ErrNotWaiting)

				f.Cancel(root)
				f.RequireState(codeq.Canceled, ids...)
				f.RequireState(codeq.Canceled, beside)
				f.RequireState(codeq.Ready, other)
				f.Complete("other") // children that are canceled do not mind
				require.EqualValues(f, codeq.Counts{Canceled: 6}, f.Counts("chain"))
			})
		})
	}
}

func TestNthIsRefused(t *testing.T) {
	ctx := context.Background()
	inFlow(t, codeq.Options{Shards: 3}, func(f *codeq.FlowTest) {
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

// TestFollowUpsOverShards: follow-ups of a completion wait for each other, whichever shards their
// keys, groups and limits belong to. When Complete has returned, all of them are there and know
// each other.
func TestFollowUpsOverShards(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for _, shards := range []int{1, 2, 4, 7} {
		for at := range shards {
			t.Run(fmt.Sprint(shards, " shards, at ", at), func(t *testing.T) {
				inFlow(t, codeq.Options{Shards: shards}, func(f *codeq.FlowTest) {
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

// TestFollowUpsOfRunOverShards: a handler's follow-ups wait for each other, too, and WaitIdle waits
// for those that are on their way.
func TestFollowUpsOfRunOverShards(t *testing.T) {
	t.Parallel()
	inFlow(t, codeq.Options{Shards: 4}, func(f *codeq.FlowTest) {
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

// TestFollowUpsOfFollowUpsEnd: a follow-up that is canceled, or completed, before the shard of
// another one has asked for it counts as it has ended, whatever that one does about parents that
// are missing.
func TestFollowUpsOfFollowUpsEnd(t *testing.T) {
	t.Parallel()
	for _, onMissing := range []codeq.OnMissing{codeq.RunOnMissing, codeq.CancelOnMissing, codeq.RefuseOnMissing} {
		t.Run(onMissing.String(), func(t *testing.T) {
			inFlow(t, codeq.Options{Shards: 4}, func(f *codeq.FlowTest) {
				gone := f.ProduceAt(0, codeq.Task{Queue: "x", Retention: time.Hour})
				f.Cancel(gone)
				for at := range 4 {
					for shard := range 4 {
						f.ProduceAt(at, codeq.Task{Queue: "start"})
						child := f.Bound("child", shard, 1)[0]
						child.After, child.OnMissing, child.Retention = []codeq.ID{codeq.Nth(0)}, onMissing, time.Hour
						f.Complete("start", codeq.Task{Queue: "canceled", After: []codeq.ID{gone}}, child)
					}
				}
				require.EqualValues(f, codeq.Counts{Canceled: 16}, f.Counts("child"))
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
			inFlow(t, codeq.Options{Shards: shards}, func(f *codeq.FlowTest) {
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
					require.ErrorIs(f, err, codeq.ErrDuplicate)
					require.Equal(f, ids, again)
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

				// groups, and a task that waits for what is stored before it and after it
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
		q := openForRun(t, codeq.Options{Shards: 3})
		task := func(shard int, after ...codeq.ID) codeq.Task {
			return codeq.Task{Queue: "a", LimitKey: keyOf("a", shard, 3), After: after}
		}
		failShard(t, q, 1)
		batch := []codeq.Task{task(0), task(1, codeq.Nth(0)), task(2, codeq.Nth(1))}
		ids, err := q.ProduceBatch(context.Background(), batch)
		require.ErrorIs(t, err, codeq.ErrUncertain)
		require.NotZero(t, ids[0])
		require.Zero(t, ids[1])
		require.Zero(t, ids[2])
		infoOf(t, q, ids[0])
	})
}

// TestNthOfTaskThatExisted: who waits for a task of the batch whose idempotency
// key was taken waits for the task that has the key.
func TestNthOfTaskThatExisted(t *testing.T) {
	for _, replace := range []bool{false, true} {
		inFlow(t, codeq.Options{Shards: 3}, func(f *codeq.FlowTest) {
			first := codeq.Task{Queue: "first", Unique: codeq.Unique{Key: "k", Replace: replace}}
			old := produce(f.T, f.Q, first)[0]
			ids, err := f.Q.ProduceBatch(context.Background(), []codeq.Task{first, {Queue: "second", After: []codeq.ID{codeq.Nth(0)}}})
			require.Equal(f, !replace, errors.Is(err, codeq.ErrDuplicate))
			require.Equal(f, old, ids[0])
			f.Check()
			f.RequireState(codeq.Blocked, ids[1])
			f.Complete("first")
			f.Complete("second")
		})
	}
}

// TestFollowUpOfItself: a follow-up may wait for the task that is completed,
// and for others.
func TestFollowUpOfItself(t *testing.T) {
	for _, retention := range []time.Duration{0, time.Hour} {
		inFlow(t, codeq.Options{Shards: 3, Retention: retention}, func(f *codeq.FlowTest) {
			f.ProduceAt(0, codeq.Task{Queue: "start"})
			other := f.ProduceAt(1, codeq.Task{Queue: "other"})
			l := f.Claim("start")
			require.NoError(f, f.Q.Complete(context.Background(), l.Receipt, nil, codeq.Task{Queue: "next", After: []codeq.ID{l.ID, l.ID, other}}))
			f.Check()
			require.EqualValues(f, 1, f.Counts("next").Blocked)
			f.Complete("other")
			f.Complete("next")
		})
	}
}

// TestFlowSurvivesReopen: who waits, and for how many, is on disk.
func TestFlowSurvivesReopen(t *testing.T) {
	t.Parallel()
	for _, shards := range []int{1, 3} {
		inFlow(t, codeq.Options{Shards: shards, LeaseFor: 24 * time.Hour}, func(f *codeq.FlowTest) {
			var parents []codeq.ID
			for i := range 5 {
				parents = append(parents, f.ProduceAt(i%shards, codeq.Task{Queue: "parent"}))
			}
			l := f.Claim("parent")
			child := f.ProduceAt(0, codeq.Task{Queue: "child", After: append(parents, parents...)}) // each counts once
			f.Reopen()
			for range 4 {
				f.Complete("parent")
				f.Reopen()
				f.RequireState(codeq.Blocked, child)
			}
			require.NoError(f, f.Q.Complete(context.Background(), l.Receipt, nil), "a lease from before")
			f.Reopen()
			f.RequireState(codeq.Ready, child)
		})
	}
}

// TestParentResults: what the parents leave behind is read by their IDs.
func TestParentResults(t *testing.T) {
	inFlow(t, codeq.Options{Shards: 3, Retention: time.Hour}, func(f *codeq.FlowTest) {
		var m codeq.Mux
		codeq.Handle(&m, "part", func(_ context.Context, j *codeq.Job[[]byte]) error {
			j.SetResult([]byte(strings.ToUpper(string(j.Payload))))
			return nil
		})
		var joined atomic.Pointer[string]
		codeq.Handle(&m, "join", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			var parts []string
			for _, id := range j.After {
				parent, err := f.Q.Get(ctx, id)
				if err != nil {
					return codeq.DeadLetter(err)
				}
				parts = append(parts, string(parent.Result))
			}
			text := strings.Join(parts, " ")
			joined.Store(&text)
			return nil
		})
		old := f.ProduceAt(2, codeq.Task{Queue: "part", Payload: []byte("zero")})
		f.Batch(
			codeq.Task{Queue: "part", Payload: []byte("one")},
			codeq.Task{Queue: "part", Payload: []byte("two")},
			codeq.Task{Queue: "join", After: []codeq.ID{old, codeq.Nth(0), codeq.Nth(1)}},
		)
		ctx, stop := context.WithCancel(context.Background())
		ended := make(chan error)
		go func() { ended <- f.Q.Run(ctx, &m, nil) }()
		require.NoError(f, f.Q.WaitIdle(context.Background()))
		stop()
		require.NoError(f, <-ended)
		require.Equal(f, "ZERO ONE TWO", *joined.Load())
	})
}

// TestNthOfTwin: of two tasks of a batch with one idempotency key the first is
// stored, and who waits for the second waits for it.
func TestNthOfTwin(t *testing.T) {
	for _, shards := range []int{1, 3} {
		inFlow(t, codeq.Options{Shards: shards}, func(f *codeq.FlowTest) {
			twin := codeq.Task{Queue: "twin", Unique: codeq.Unique{Key: "k"}}
			ids, err := f.Q.ProduceBatch(context.Background(), []codeq.Task{twin, twin, {Queue: "child", After: []codeq.ID{codeq.Nth(1)}}})
			require.ErrorIs(f, err, codeq.ErrDuplicate)
			require.Equal(f, ids[0], ids[1])
			f.Check()
			f.RequireState(codeq.Blocked, ids[2])
			f.Complete("twin")
			f.Complete("child")
		})
	}
}

// TestFollowUpReplacesItself: a task whose idempotency key outlives it, and
// whose follow-up has the same key and Replace, is completed; the follow-up is
// a duplicate, since there is nothing left that waits.
func TestFollowUpReplacesItself(t *testing.T) {
	inFlow(t, codeq.Options{Shards: 1}, func(f *codeq.FlowTest) {
		task := codeq.Task{Queue: "a", Unique: codeq.Unique{Key: "k", For: time.Hour, Replace: true}}
		produce(f.T, f.Q, task)
		f.Complete("a", task, codeq.Task{Queue: "b"})
		require.Equal(f, codeq.Counts{}, f.Counts("a"))
		require.Equal(f, codeq.Counts{Ready: 1}, f.Counts("b"))
		time.Sleep(time.Hour)
		produce(f.T, f.Q, task)
		require.Equal(f, codeq.Counts{Ready: 1}, f.Counts("a"))
	})
}

// flowLayouts are where a parent, in shard 0, and its child may lie.
var flowLayouts = []struct {
	name          string
	shards, child int
}{{"one shard", 1, 0}, {"same shard of three", 3, 0}, {"another shard", 3, 2}}

// TestAfterExistingTask: a task may wait for one that is already stored, in
// whatever state that is.
func TestAfterExistingTask(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	ready := func(f *codeq.FlowTest, queue string) codeq.ID {
		return f.ProduceAt(0, codeq.Task{Queue: queue, Retention: codeq.Forever})
	}
	dead := func(f *codeq.FlowTest, queue string) codeq.ID {
		id := ready(f, queue)
		f.Die(queue)
		return id
	}
	completeIt := func(f *codeq.FlowTest, queue string, _ codeq.ID) { f.Complete(queue) }
	cancelIt := func(f *codeq.FlowTest, _ string, id codeq.ID) { f.Cancel(id) }
	purgeIt := func(f *codeq.FlowTest, queue string, _ codeq.ID) {
		n, err := f.Q.PurgeDead(ctx, codeq.DeadFilter{Queue: queue})
		require.NoError(f, err)
		require.Equal(f, 1, n)
	}
	redriveIt := func(f *codeq.FlowTest, queue string, id codeq.ID) {
		require.NoError(f, f.Q.RedriveDead(ctx, id))
		f.Complete(queue)
	}
	for _, l := range flowLayouts {
		t.Run(l.name, func(t *testing.T) {
			inFlow(t, codeq.Options{Shards: l.shards}, func(f *codeq.FlowTest) {
				for _, c := range []struct {
					parent string
					make   func(f *codeq.FlowTest, queue string) codeq.ID
					onDead codeq.OnDead
					first  codeq.State // of the child
					then   func(f *codeq.FlowTest, queue string, parent codeq.ID)
					last   codeq.State // of the child
				}{
					{"ready", ready, codeq.HoldOnDead, codeq.Blocked, completeIt, codeq.Ready},
					{"ready, canceled", ready, codeq.RunOnDead, codeq.Blocked, cancelIt, codeq.Canceled},
					{"scheduled", func(f *codeq.FlowTest, queue string) codeq.ID {
						return f.ProduceAt(0, codeq.Task{Queue: queue, RunAt: time.Now().Add(time.Minute)})
					}, codeq.HoldOnDead, codeq.Blocked, func(f *codeq.FlowTest, queue string, _ codeq.ID) {
						time.Sleep(time.Minute)
						f.Complete(queue)
					}, codeq.Ready},
					{"blocked", func(f *codeq.FlowTest, queue string) codeq.ID {
						first := f.ProduceAt(0, codeq.Task{Queue: queue + ", before"})
						return f.ProduceAt(0, codeq.Task{Queue: queue, After: []codeq.ID{first}})
					}, codeq.HoldOnDead, codeq.Blocked, func(f *codeq.FlowTest, queue string, _ codeq.ID) {
						f.Complete(queue + ", before")
						f.Complete(queue)
					}, codeq.Ready},
					{"leased", func(f *codeq.FlowTest, queue string) codeq.ID {
						ready(f, queue)
						return f.Claim(queue).ID
					}, codeq.HoldOnDead, codeq.Blocked, func(f *codeq.FlowTest, queue string, _ codeq.ID) {
						time.Sleep(time.Minute) // the lease expires: the second attempt ends it
						f.Complete(queue)
					}, codeq.Ready},
					{"leased, canceled", func(f *codeq.FlowTest, queue string) codeq.ID {
						ready(f, queue)
						return f.Claim(queue).ID
					}, codeq.HoldOnDead, codeq.Blocked, cancelIt, codeq.Canceled},
					{"done", func(f *codeq.FlowTest, queue string) codeq.ID {
						id := ready(f, queue)
						f.Complete(queue)
						f.RequireState(codeq.Done, id)
						return id
					}, codeq.HoldOnDead, codeq.Ready, nil, 0},
					{"done and gone", func(f *codeq.FlowTest, queue string) codeq.ID {
						id := f.ProduceAt(0, codeq.Task{Queue: queue})
						f.Complete(queue)
						f.RequireGone(id)
						return id
					}, codeq.HoldOnDead, codeq.Ready, nil, 0},
					{"dead, redriven", dead, codeq.HoldOnDead, codeq.Blocked, redriveIt, codeq.Ready},
					{"dead, purged", dead, codeq.HoldOnDead, codeq.Blocked, purgeIt, codeq.Canceled},
					{"dead, canceled", dead, codeq.HoldOnDead, codeq.Blocked, cancelIt, codeq.Canceled},
					{"dead, cancel", dead, codeq.CancelOnDead, codeq.Canceled, nil, 0},
					{"dead, run", dead, codeq.RunOnDead, codeq.Ready, nil, 0},
					{"canceled", func(f *codeq.FlowTest, queue string) codeq.ID {
						id := ready(f, queue)
						f.Cancel(id)
						return id
					}, codeq.RunOnDead, codeq.Canceled, nil, 0},
					{"canceled and gone", func(f *codeq.FlowTest, queue string) codeq.ID {
						id := f.ProduceAt(0, codeq.Task{Queue: queue})
						f.Cancel(id)
						return id
					}, codeq.HoldOnDead, codeq.Ready, nil, 0},
					{"unknown", func(f *codeq.FlowTest, queue string) codeq.ID {
						return codeq.ID{1, 2, 3, 4, 5, 6, 0x70, 0, 0x80, 0xff, 0xff, 0xff}
					}, codeq.CancelOnDead, codeq.Ready, nil, 0},
				} {
					queue := "parent " + c.parent
					parent := c.make(f, queue)
					child := f.ProduceAt(l.child, codeq.Task{Queue: "child " + c.parent, After: []codeq.ID{parent}, OnDead: c.onDead, Retention: codeq.Forever})
					f.Check()
					require.Equal(f, c.first, f.State(child), "parent %s", c.parent)
					if c.then != nil {
						c.then(f, queue, parent)
						f.Check()
						require.Equal(f, c.last, f.State(child), "parent %s, afterwards", c.parent)
					}
					info, err := f.Q.Get(ctx, child)
					require.NoError(f, err)
					require.Equal(f, []codeq.ID{parent}, info.After)
					require.Equal(f, c.onDead, info.OnDead)
				}
			})
		})
	}
}

// TestOnDead: what becomes of a task when a parent dies that it waits for.
func TestOnDead(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for _, l := range flowLayouts {
		t.Run(l.name, func(t *testing.T) {
			inFlow(t, codeq.Options{Shards: l.shards}, func(f *codeq.FlowTest) {
				parent := f.ProduceAt(0, codeq.Task{Queue: "parent"})
				children := make(map[codeq.OnDead]codeq.ID)
				for _, onDead := range []codeq.OnDead{codeq.HoldOnDead, codeq.CancelOnDead, codeq.RunOnDead} {
					children[onDead] = f.ProduceAt(l.child, codeq.Task{
						Queue: "child", After: []codeq.ID{parent}, OnDead: onDead, Retention: codeq.Forever,
					})
				}
				f.Check()
				f.Die("parent")
				f.RequireState(codeq.Blocked, children[codeq.HoldOnDead])
				f.RequireState(codeq.Canceled, children[codeq.CancelOnDead])
				f.RequireState(codeq.Ready, children[codeq.RunOnDead])
				f.Reopen()
				for range 2 { // it dies again
					require.NoError(f, f.Q.RedriveDead(ctx, parent))
					f.Check()
					f.RequireState(codeq.Blocked, children[codeq.HoldOnDead])
					f.Die("parent")
				}
				n, err := f.Q.RedriveAllDead(ctx, codeq.DeadFilter{Queue: "parent"})
				require.NoError(f, err)
				require.Equal(f, 1, n)
				f.Complete("parent")
				f.RequireState(codeq.Ready, children[codeq.HoldOnDead])
				f.RequireState(codeq.Canceled, children[codeq.CancelOnDead])
			})
		})
	}
}

// TestDeadParentIsKept: a dead letter that others wait for does not expire,
// whether they began to wait before its death or after.
func TestDeadParentIsKept(t *testing.T) {
	ctx := context.Background()
	for _, l := range flowLayouts {
		t.Run(l.name, func(t *testing.T) {
			inFlow(t, codeq.Options{Shards: l.shards}, func(f *codeq.FlowTest) {
				for _, queue := range []string{"before", "after", "lonely"} {
					require.NoError(f, f.Q.Configure(ctx, queue, func(s *codeq.Settings) { s.DeadRetention = time.Hour }))
				}
				before := f.ProduceAt(0, codeq.Task{Queue: "before"})
				after := f.ProduceAt(0, codeq.Task{Queue: "after"})
				lonely := f.ProduceAt(0, codeq.Task{Queue: "lonely"})
				child1 := f.ProduceAt(l.child, codeq.Task{Queue: "child", After: []codeq.ID{before}})
				f.Check()
				f.Die("before")
				f.Die("after")
				f.Die("lonely")
				time.Sleep(30 * time.Minute)
				child2 := f.ProduceAt(l.child, codeq.Task{Queue: "child", After: []codeq.ID{after}})
				f.Check()
				time.Sleep(24 * time.Hour)
				f.Check()
				f.RequireGone(lonely)
				f.RequireState(codeq.Dead, before, after)
				f.RequireState(codeq.Blocked, child1, child2)
				f.Reopen()
				for _, id := range []codeq.ID{before, after} {
					require.NoError(f, f.Q.RedriveDead(ctx, id))
				}
				f.Complete("before")
				f.Complete("after")
				f.RequireState(codeq.Ready, child1, child2)
			})
		})
	}
}

// TestCanceledChildIsForgotten: a parent ends in peace whose child was canceled
// and is not kept.
func TestCanceledChildIsForgotten(t *testing.T) {
	for _, l := range flowLayouts {
		inFlow(t, codeq.Options{Shards: l.shards}, func(f *codeq.FlowTest) {
			parent := f.ProduceAt(0, codeq.Task{Queue: "parent"})
			child := f.ProduceAt(l.child, codeq.Task{Queue: "child", After: []codeq.ID{parent}})
			sibling := f.ProduceAt(l.child, codeq.Task{Queue: "child", After: []codeq.ID{parent}})
			f.Check()
			f.Cancel(child)
			f.RequireGone(child)
			f.Reopen()
			f.Complete("parent")
			f.RequireGone(child)
			f.RequireState(codeq.Ready, sibling)
		})
	}
}

// TestAlterAsParentsEnd: a task is altered in the group in which the last of its parents
// ends. It goes on in the next one, and nothing says any more that it waits.
func TestAlterAsParentsEnd(t *testing.T) {
	ctx := context.Background()
	for _, c := range []struct {
		name  string
		alter func(f *codeq.FlowTest, child codeq.ID) error
		want  codeq.State
	}{
		{"priority", func(f *codeq.FlowTest, child codeq.ID) error { return f.Q.SetPriority(ctx, child, 7) }, codeq.Ready},
		{"later", func(f *codeq.FlowTest, child codeq.ID) error {
			return f.Q.SetRunAt(ctx, child, time.Now().Add(time.Hour))
		}, codeq.Scheduled},
		{"now", func(f *codeq.FlowTest, child codeq.ID) error { return f.Q.SetRunAt(ctx, child, time.Time{}) }, codeq.Ready},
		{"replace", func(f *codeq.FlowTest, child codeq.ID) error {
			id, err := f.Q.Produce(ctx, codeq.Task{Queue: "b", Priority: 7, Unique: codeq.Unique{Key: "k", Replace: true}})
			require.Equal(f, child, id)
			return err
		}, codeq.Ready},
		{"cancel", func(f *codeq.FlowTest, child codeq.ID) error { return f.Q.Cancel(ctx, child) }, codeq.Canceled},
	} {
		t.Run(c.name, func(t *testing.T) {
			inFlow(t, codeq.Options{Shards: 1, Retention: codeq.Forever}, func(f *codeq.FlowTest) {
				parent := f.ProduceAt(0, codeq.Task{Queue: "a"})
				child := f.ProduceAt(0, codeq.Task{Queue: "b", After: []codeq.ID{parent}, Unique: codeq.Unique{Key: "k", Replace: true}})
				last := f.ProduceAt(0, codeq.Task{Queue: "c", After: []codeq.ID{child}, OnDead: codeq.RunOnDead})
				synctest.Wait()
				l := f.Claim("a")
				goOn := hold(f.Q, 0)
				synctest.Wait()
				done := make(chan error, 2)
				go func() { done <- f.Q.Complete(ctx, l.Receipt, nil) }()
				synctest.Wait()
				go func() { done <- c.alter(f, child) }()
				synctest.Wait()
				goOn()
				require.NoError(f, errors.Join(<-done, <-done))
				synctest.Wait()
				f.RequireState(c.want, child)
				f.Check()
				f.Reopen()
				if c.want == codeq.Scheduled {
					time.Sleep(2 * time.Hour)
				}
				if c.want != codeq.Canceled {
					f.Complete("b")
					synctest.Wait()
					f.RequireState(codeq.Ready, last)
				}
			})
		})
	}
}

// TestCanceledParent: when a call has returned that produces a task, its parents know of it: the
// task goes with one that is canceled or purged the next moment, wherever both lie.
func TestCanceledParent(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for _, shards := range []int{1, 4} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			inFlow(t, codeq.Options{Shards: shards}, func(f *codeq.FlowTest) {
				produce := func(task codeq.Task) codeq.ID {
					f.Helper()
					id, err := f.Q.Produce(ctx, task)
					require.NoError(f, err)
					return id
				}
				cancel := func(id codeq.ID) {
					f.Helper()
					require.NoError(f, f.Q.Cancel(ctx, id))
				}
				claim := func(queue string) *codeq.Lease {
					f.Helper()
					l, err := f.Q.Claim(ctx, codeq.ClaimRequest{Queues: []string{queue}})
					require.NoError(f, err)
					return l
				}
				child := func(parents ...codeq.ID) codeq.Task {
					return codeq.Task{Queue: "child", After: parents, Retention: codeq.Forever}
				}
				var children []codeq.ID
				for i := range 50 {
					parent := produce(codeq.Task{Queue: "parent"})
					switch i % 5 {
					case 0:
						children = append(children, produce(child(parent)))
						cancel(parent)
					case 1: // another one is completed
						other := produce(codeq.Task{Queue: "other"})
						children = append(children, produce(child(other, parent)))
						require.NoError(f, f.Q.Complete(ctx, claim("other").Receipt, nil))
						cancel(parent)
					case 2: // a batch, with some that belong to certain shards
						bound := child(parent)
						bound.Group = fmt.Sprint("g", i)
						ids, err := f.Q.ProduceBatch(ctx, []codeq.Task{child(parent), bound, child(parent)})
						require.NoError(f, err)
						children = append(children, ids...)
						cancel(parent)
					case 3: // follow-ups, of which one goes to another shard first
						produce(codeq.Task{Queue: "before"})
						l := claim("before")
						first, bound := child(parent, l.ID), child(parent, l.ID)
						first.OnMissing, bound.OnMissing, bound.Unique.Key = codeq.RefuseOnMissing, codeq.CancelOnMissing, fmt.Sprint("k", i)
						require.NoError(f, f.Q.Complete(ctx, l.Receipt, nil, first, bound))
						cancel(parent)
					default: // a dead letter, which does not expire while others wait
						require.NoError(f, f.Q.Configure(ctx, "dying", func(s *codeq.Settings) { s.DeadRetention = time.Second }))
						dead := produce(codeq.Task{Queue: "dying"})
						require.NoError(f, f.Q.DeadLetter(ctx, claim("dying").Receipt, nil))
						children = append(children, produce(child(dead)))
						time.Sleep(time.Minute)
						n, err := f.Q.PurgeDead(ctx, codeq.DeadFilter{Queue: "dying"})
						require.NoError(f, err)
						require.Equal(f, 1, n)
						cancel(parent)
					}
				}
				f.RequireState(codeq.Canceled, children...)
				require.EqualValues(f, 80, f.Counts("child").Canceled)
				require.Zero(f, f.Counts("child").Ready)
			})
		})
	}
}

// TestManyParents: beyond those that are looked up at once, parents of the same shard are told by
// messages, for which the call waits as well; and a tick tells those of its shard.
func TestManyParents(t *testing.T) {
	ctx := context.Background()
	inFlow(t, codeq.Options{Shards: 1}, func(f *codeq.FlowTest) {
		parents := f.Batch(slices.Repeat([]codeq.Task{{Queue: "parent"}}, 1000)...)
		child, err := f.Q.Produce(ctx, codeq.Task{Queue: "child", After: parents, Retention: codeq.Forever})
		require.NoError(f, err)
		require.NoError(f, f.Q.Cancel(ctx, parents[999]))
		f.RequireState(codeq.Canceled, child)

		task := codeq.Task{Queue: "tick", After: parents[:1], Retention: codeq.Forever}
		require.NoError(f, f.Q.SetSchedule(ctx, codeq.Schedule{Name: "s", Every: time.Minute, Task: task}))
		time.Sleep(time.Minute)
		require.EqualValues(f, 1, f.Counts("tick").Blocked)
		require.NoError(f, f.Q.Cancel(ctx, parents[0]))
		require.EqualValues(f, 1, f.Counts("tick").Canceled)
		time.Sleep(time.Minute)
		require.EqualValues(f, 1, f.Counts("tick").Ready, "the parent is missing")
	})
}

// TestOnMissing: what becomes of a task whose parent is gone.
func TestOnMissing(t *testing.T) {
	ctx := context.Background()
	for _, l := range flowLayouts {
		t.Run(l.name, func(t *testing.T) {
			inFlow(t, codeq.Options{Shards: l.shards}, func(f *codeq.FlowTest) {
				gone := f.ProduceAt(0, codeq.Task{Queue: "parent"})
				f.Cancel(gone)
				task := func(how codeq.OnMissing) codeq.Task {
					return codeq.Task{Queue: "child", After: []codeq.ID{gone}, OnMissing: how, Retention: codeq.Forever}
				}
				run := f.ProduceAt(l.child, task(codeq.RunOnMissing))
				stop := f.ProduceAt(l.child, task(codeq.CancelOnMissing))
				f.RequireState(codeq.Ready, run)
				f.RequireState(codeq.Canceled, stop)
				info, err := f.Q.Get(ctx, stop)
				require.NoError(f, err)
				require.Equal(f, codeq.CancelOnMissing, info.OnMissing)

				refused := task(codeq.RefuseOnMissing)
				_, err = f.Q.Produce(ctx, refused)
				require.ErrorIs(f, err, codeq.ErrNotFound)
				require.ErrorContains(f, err, gone.String())
				_, err = f.Q.ProduceBatch(ctx, []codeq.Task{{Queue: "child"}, refused})
				require.ErrorIs(f, err, codeq.ErrNotFound)
				require.ErrorContains(f, err, "task 1")
				err = f.Q.SetSchedule(ctx, codeq.Schedule{Name: "s", Every: time.Minute, Task: refused})
				require.ErrorIs(f, err, codeq.ErrNotFound)
				f.ProduceAt(0, codeq.Task{Queue: "before"})
				lease := f.Claim("before")
				require.ErrorIs(f, f.Q.Complete(ctx, lease.Receipt, nil, refused), codeq.ErrNotFound)
				require.NoError(f, f.Q.Complete(ctx, lease.Receipt, nil), "nothing was done before")
				require.EqualValues(f, 1, f.Counts("child").Ready)

				parent := f.ProduceAt(0, codeq.Task{Queue: "parent"})
				keyed := codeq.Task{Queue: "child", After: []codeq.ID{parent}, OnMissing: codeq.RefuseOnMissing, Unique: codeq.Unique{Key: "k"}}
				id, err := f.Q.Produce(ctx, keyed)
				require.NoError(f, err)
				f.Complete("parent")
				f.RequireState(codeq.Ready, id)
				again, err := f.Q.Produce(ctx, keyed)
				require.ErrorIs(f, err, codeq.ErrDuplicate, "it was stored, whatever has become of the parent")
				require.Equal(f, id, again)

				_, err = f.Q.Produce(ctx, codeq.Task{Queue: "child", OnMissing: codeq.RefuseOnMissing + 1})
				require.ErrorIs(f, err, codeq.ErrInvalid)
			})
		})
	}
}
