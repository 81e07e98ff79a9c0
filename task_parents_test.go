package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/engine"
	"codeq/internal/inspect"
	"codeq/internal/store"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// TestAlterAsParentsEnd: one group both alters a task and ends its last parent. The task goes on in
// the next group, and no record says any more that it waits.
func TestAlterAsParentsEnd(t *testing.T) {
	ctx := context.Background()
	for _, c := range []struct {
		name  string
		alter func(f *queuetest.FlowTest, child codeq.ID) error
		want  codeq.State
	}{
		{"priority", func(f *queuetest.FlowTest, child codeq.ID) error { return f.Q.SetPriority(ctx, child, 7) }, codeq.Ready},
		{"later", func(f *queuetest.FlowTest, child codeq.ID) error {
			return f.Q.SetRunAt(ctx, child, time.Now().Add(time.Hour))
		}, codeq.Scheduled},
		{"now", func(f *queuetest.FlowTest, child codeq.ID) error { return f.Q.SetRunAt(ctx, child, time.Time{}) }, codeq.Ready},
		{"replace", func(f *queuetest.FlowTest, child codeq.ID) error {
			id, err := f.Q.Produce(ctx, codeq.Task{Queue: "b", Priority: 7, Unique: codeq.Unique{Key: "k", Replace: true}})
			require.Equal(f, child, id)
			return err
		}, codeq.Ready},
		{"cancel", func(f *queuetest.FlowTest, child codeq.ID) error { return f.Q.Cancel(ctx, child) }, codeq.Canceled},
	} {
		t.Run(c.name, func(t *testing.T) {
			queuetest.InFlow(t, codeq.Options{Shards: 1, Retention: codeq.Forever}, func(f *queuetest.FlowTest) {
				parent := f.ProduceAt(0, codeq.Task{Queue: "a"})
				child := f.ProduceAt(0, codeq.Task{Queue: "b", After: []codeq.ID{parent}, Unique: codeq.Unique{Key: "k", Replace: true}})
				last := f.ProduceAt(0, codeq.Task{Queue: "c", After: []codeq.ID{child}, OnDead: codeq.RunOnDead})
				synctest.Wait()
				l := f.Claim("a")
				goOn := queuetest.Hold(f.Q, 0)
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

// TestCanceledParent: when the call that produces a task has returned, the parents of the task have
// recorded it. If one of them is canceled or purged the next moment, the task is canceled too,
// wherever both are stored.
func TestCanceledParent(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for _, shards := range []int{1, 4} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			queuetest.InFlow(t, codeq.Options{Shards: shards}, func(f *queuetest.FlowTest) {
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
					case 1: // another parent is completed
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
					case 3: // follow-ups; one goes to another shard first
						produce(codeq.Task{Queue: "before"})
						l := claim("before")
						first, bound := child(parent, l.ID), child(parent, l.ID)
						first.OnMissing, bound.OnMissing, bound.Unique.Key = codeq.RefuseOnMissing, codeq.CancelOnMissing, fmt.Sprint("k", i)
						require.NoError(f, f.Q.Complete(ctx, l.Receipt, nil, first, bound))
						cancel(parent)
					default: // a dead letter, which does not expire while other tasks wait for it
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

// TestManyParents: a call looks up a bounded number of parents at once. Further parents get
// messages, even in the same shard, and the call waits for these as well. A tick informs the
// parents of its own shard.
func TestManyParents(t *testing.T) {
	ctx := context.Background()
	queuetest.InFlow(t, codeq.Options{Shards: 1}, func(f *queuetest.FlowTest) {
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

// TestOnMissing: the outcome of a task with a missing parent.
func TestOnMissing(t *testing.T) {
	ctx := context.Background()
	for _, l := range flowLayouts {
		t.Run(l.name, func(t *testing.T) {
			queuetest.InFlow(t, codeq.Options{Shards: l.shards}, func(f *queuetest.FlowTest) {
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

// TestChildrenGoOnInOneCommit: the commit of a task's end also releases the first children that
// have no other parent, and looks up nothing but their records. A child with another parent goes on
// with the last of them.
func TestChildrenGoOnInOneCommit(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		family := []codeq.Task{{Queue: "parent"}, {Queue: "parent"}, {Queue: "both", After: []codeq.ID{codeq.Nth(0), codeq.Nth(1)}}}
		for range engine.TellAtOnce / 2 {
			family = append(family, codeq.Task{Queue: "child", After: []codeq.ID{codeq.Nth(0), codeq.Nth(0)}})
		}
		_, err := q.ProduceBatch(t.Context(), family)
		require.NoError(t, err)
		queuetest.RequireSettled(t, q)
		end := func() (reads int, commits uint64) {
			l := queuetest.ClaimNow(t, q, "parent")
			reads, commits = readsOf(t, q), inspect.Of(q).Commits()
			queuetest.Complete(t, q, l)
			synctest.Wait()
			return readsOf(t, q) - reads, inspect.Of(q).Commits() - commits
		}
		reads, commits := end()
		require.EqualValues(t, 1, commits)
		require.LessOrEqual(t, reads, 2*(engine.TellAtOnce/2+1), "a dependent and a record each")
		require.EqualValues(t, engine.TellAtOnce/2, queuetest.CountsOf(t, q, "child").Ready)
		require.Equal(t, codeq.Counts{Blocked: 1}, queuetest.CountsOf(t, q, "both"))
		_, commits = end()
		require.EqualValues(t, 1, commits)
		require.Equal(t, codeq.Counts{Ready: 1}, queuetest.CountsOf(t, q, "both"))
	})
}

// TestParentsThatDoNotAnswer: if a call cannot wait until a parent has recorded its task, the error
// says that the task is stored. The parent gets the message later.
func TestParentsThatDoNotAnswer(t *testing.T) {
	queuetest.InFlow(t, codeq.Options{Shards: 2}, func(f *queuetest.FlowTest) {
		parent := f.ProduceAt(0, codeq.Task{Queue: "parent"})
		goOn := queuetest.Hold(f.Q, 0)
		synctest.Wait()
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		task := codeq.Task{Queue: "child", LimitKey: f.KeyOf("child", 1), Retention: codeq.Forever}
		waiting := task
		waiting.After = []codeq.ID{parent}
		child, err := f.Q.Produce(ctx, waiting)
		require.ErrorIs(f, err, codeq.ErrUncertain)
		require.ErrorIs(f, err, context.DeadlineExceeded)
		require.ErrorContains(f, err, "it is stored")
		again, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		ids, err := f.Q.ProduceBatch(again, []codeq.Task{task, waiting})
		goOn()
		var each *codeq.BatchError
		require.ErrorAs(f, err, &each)
		require.NoError(f, each.Errors[0])
		require.ErrorIs(f, each.Errors[1], codeq.ErrUncertain)
		f.RequireState(codeq.Blocked, child, ids[1])
		f.Cancel(parent)
		f.RequireState(codeq.Canceled, child, ids[1])
	})
}

// TestParentsOnFullDisk: when the disk has too little room for messages, a call that has stored
// tasks does not wait until the parents have recorded them. This holds for a new call and for one
// that already waits. The parents get the messages when there is room.
func TestParentsOnFullDisk(t *testing.T) {
	t.Parallel()
	disk := testkit.NewSmallDisk(testkit.FreeAt[engine.Roomy])
	queuetest.InFlow(t, *inspect.With(&codeq.Options{Shards: 2, MinFreeBytes: testkit.MinFree, MemTableBytes: 256 << 10, LeaseFor: time.Hour}, inspect.Private{FS: disk}), func(f *queuetest.FlowTest) {
		ctx, child := context.Background(), codeq.Task{Queue: "child", LimitKey: f.KeyOf("child", 1), Retention: codeq.Forever}
		stored := func(err error) {
			f.Helper()
			require.ErrorIs(f, err, codeq.ErrUncertain)
			require.NotErrorIs(f, err, codeq.ErrDiskFull, "which says that nothing was stored")
			require.ErrorContains(f, err, "make room on the disk")
		}
		room := func(level engine.Room) {
			time.Sleep(2 * store.LookEvery * time.Millisecond) // flushes end
			disk.Free(testkit.FreeAt[level])
			time.Sleep(2 * store.LookEvery * time.Millisecond)
		}
		parents := []codeq.ID{f.ProduceAt(0, codeq.Task{Queue: "parent"}), f.ProduceAt(0, codeq.Task{Queue: "parent"})}
		f.ProduceAt(1, codeq.Task{Queue: "work"})
		l := f.Claim("work")

		goOn := queuetest.Hold(f.Q, 0)
		waits := make(chan error, 1)
		var first codeq.ID
		go func() {
			task := child
			task.After = parents[:1]
			var err error
			first, err = f.Q.Produce(ctx, task)
			waits <- err
		}()
		synctest.Wait()
		require.Empty(f, waits)
		room(engine.RoomScarce)
		stored(<-waits)
		goOn()

		child.After = parents[1:]
		began := time.Now()
		stored(f.Q.Complete(ctx, l.Receipt, nil, child))
		require.Less(f, time.Since(began), time.Second)
		room(engine.Roomy)
		f.RequireState(codeq.Blocked, first)
		for _, parent := range parents {
			f.Cancel(parent)
		}
		f.RequireState(codeq.Canceled, first)
		require.Equal(f, codeq.Counts{Canceled: 2}, f.Counts("child"))
	})
}

// TestParentsOfFailedShard: no call waits for a shard that takes no messages any more.
func TestParentsOfFailedShard(t *testing.T) {
	queuetest.InFlow(t, codeq.Options{Shards: 2}, func(f *queuetest.FlowTest) {
		parent := f.ProduceAt(0, codeq.Task{Queue: "parent"})
		_ = inspect.Of(f.Q).Owner(0, func(*inspect.Owner) error { panic(testkit.Injected("of the test")) })
		synctest.Wait()
		for range 2 {
			id, err := f.Q.Produce(context.Background(), codeq.Task{Queue: "child", LimitKey: f.KeyOf("child", 1), After: []codeq.ID{parent}})
			require.ErrorIs(f, err, codeq.ErrUncertain)
			require.ErrorIs(f, err, codeq.ErrFailed)
			require.NotZero(f, id)
		}
		_ = f.Q.Close() // of a queue that has failed
		f.Open()
		synctest.Wait()
	})
}

// TestTellChildrenInPieces: the end of a task with many children is told in small groups, and a
// crash or a close may interrupt any of them. A redrive or a purge of the task waits until all
// children have been told this end.
func TestTellChildrenInPieces(t *testing.T) {
	n := testkit.Sized(1500, 100_000)
	ctx := context.Background()
	ends := map[string]func(f *queuetest.FlowTest, l *codeq.Lease){
		"done":   func(f *queuetest.FlowTest, l *codeq.Lease) { require.NoError(f, f.Q.Complete(ctx, l.Receipt, nil)) },
		"dead":   func(f *queuetest.FlowTest, l *codeq.Lease) { require.NoError(f, f.Q.DeadLetter(ctx, l.Receipt, nil)) },
		"cancel": func(f *queuetest.FlowTest, l *codeq.Lease) { require.NoError(f, f.Q.Cancel(ctx, l.ID)) },
	}
	then := map[string]func(f *queuetest.FlowTest, parent codeq.ID){
		"nothing": func(*queuetest.FlowTest, codeq.ID) {},
		"reopen":  func(f *queuetest.FlowTest, _ codeq.ID) { require.NoError(f, f.Q.Close()); f.Open() },
		"redrive": func(f *queuetest.FlowTest, parent codeq.ID) {
			if err := f.Q.RedriveDead(ctx, parent); err == nil {
				require.NoError(f, f.Q.Complete(ctx, f.Claim("parents").Receipt, nil))
			}
		},
		"purge": func(f *queuetest.FlowTest, _ codeq.ID) {
			_, err := f.Q.PurgeDead(ctx, codeq.DeadFilter{})
			require.NoError(f, err)
		},
	}
	for _, shards := range []int{1, 3} {
		for end, finish := range ends {
			for next, do := range then {
				t.Run(fmt.Sprintf("%s, %s, %d shards", end, next, shards), func(t *testing.T) {
					t.Parallel()
					queuetest.InFlow(t, codeq.Options{Shards: shards, Limits: codeq.Limits{Parents: 1 << 20}}, func(f *queuetest.FlowTest) {
						parent := queuetest.Produce(t, f.Q, codeq.Task{Queue: "parents"})[0]
						for i := 0; i < n; i += 500 {
							tasks := make([]codeq.Task, 500)
							for j := range tasks {
								onDead := codeq.OnDead(j % 3)
								tasks[j] = codeq.Task{Queue: fmt.Sprint("children", onDead), After: []codeq.ID{parent}, OnDead: onDead}
							}
							f.Batch(tasks...)
						}
						f.Check()
						l := f.Claim("parents")
						for i := range inspect.Of(f.Q).Shards() {
							queuetest.SlowDown(t, f.Q, i, time.Millisecond)
						}
						finish(f, l)
						require.NoError(t, queuetest.CheckAll(f.Q), "amid")
						do(f, parent)
						for i := range inspect.Of(f.Q).Shards() { // as long as a shard still tells children
							err := queuetest.ErrBusy
							for tries := 0; errors.Is(err, queuetest.ErrBusy) && tries < n; tries++ {
								time.Sleep(time.Millisecond)
								err = inspect.Of(f.Q).Owner(i, func(o *inspect.Owner) error {
									u := o.Rules.Probe().Usage()
									if o.Busy || u.Telling > 0 || slices.ContainsFunc(u.Out.Waiting, func(n uint64) bool { return n > 0 }) {
										return queuetest.ErrBusy
									}
									return nil
								})
							}
							require.NoError(t, err)
						}
						synctest.Wait()
						third := uint64(n / 3)
						for onDead := codeq.HoldOnDead; onDead <= codeq.RunOnDead; onDead++ {
							queue := fmt.Sprint("children", onDead)
							got := queuetest.CountsOf(t, f.Q, queue)
							switch {
							case end == "done", end == "dead" && onDead == codeq.RunOnDead:
								require.InDelta(t, third, got.Ready, 500, queue)
								require.Equal(t, codeq.Counts{Ready: got.Ready}, got, queue)
							case end == "cancel", onDead == codeq.CancelOnDead, next == "purge":
								require.Equal(t, codeq.Counts{}, got, queue)
							case next == "redrive":
								require.InDelta(t, third, got.Ready, 500, queue)
							default:
								require.InDelta(t, third, got.Blocked, 500, queue)
							}
						}
						st, err := f.Q.StorageStats()
						require.NoError(t, err)
						told := int64(0)
						for _, s := range st.Shards {
							told += s.Upkeep[codeq.UpkeepTell].Count
							require.LessOrEqual(t, s.Upkeep[codeq.UpkeepTell].MaxRecords, int64(2100))
						}
						require.Positive(t, told)
					})
				})
			}
		}
	}
}
