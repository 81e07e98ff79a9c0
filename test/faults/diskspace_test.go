package faults_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/engine"
	"codeq/internal/inspect"
	"codeq/internal/store"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

func openOnSmallDisk(t *testing.T, d *testkit.SmallDisk, change func(*codeq.Options)) *codeq.Queue {
	o := queuetest.OnDisk(d, &codeq.Options{Shards: 2, MemTableBytes: 256 << 10, MinFreeBytes: testkit.MinFree, LeaseFor: time.Hour})
	if change != nil {
		change(o)
	}
	q, err := codeq.Open("queue", o)
	require.NoError(t, err)
	return q
}

// fillDisk produces until the disk is full.
func fillDisk(t *testing.T, q *codeq.Queue) (produced int) {
	for {
		_, err := q.Produce(t.Context(), codeq.Task{Queue: "a", Payload: bytes.Repeat([]byte("x"), 20<<10)})
		if errors.Is(err, codeq.ErrDiskFull) {
			return produced
		}
		require.NoError(t, err)
		produced++
		require.Less(t, produced, 10_000)
		time.Sleep(10 * time.Millisecond)
	}
}

// dropTo sets the room of the disk to a level, and waits until the queue sees it.
func dropTo(d *testkit.SmallDisk, level engine.Room) {
	time.Sleep(2 * store.LookEvery * time.Millisecond) // until flushes have ended
	d.Free(testkit.FreeAt[level])
	time.Sleep(2 * store.LookEvery * time.Millisecond)
}

// TestDiskLevels: every verb works down to its level of room. Below that it is refused, and changes
// nothing.
func TestDiskLevels(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		disk := testkit.NewSmallDisk(64 << 20)
		q := openOnSmallDisk(t, disk, func(o *codeq.Options) { o.MaxAttempts = 10 })
		task := codeq.Task{Queue: "a", Payload: []byte("more")}
		kept := codeq.Task{Queue: "kept", Retention: time.Hour}
		lease := func(task codeq.Task) codeq.Receipt {
			task.Queue += " leased"
			queuetest.Produce(t, q, task)
			return queuetest.ClaimNow(t, q, task.Queue).Receipt
		}
		dead := func(queue string) codeq.ID {
			r := lease(codeq.Task{Queue: queue})
			require.NoError(t, q.DeadLetter(ctx, r, nil))
			return r.ID
		}
		waits := func(task codeq.Task) codeq.ID {
			id := queuetest.Produce(t, q, task)[0]
			return id
		}
		schedule := func(name string) codeq.Schedule { return codeq.Schedule{Name: name, Cron: "@yearly", Task: task} }
		now := func(call func() error) func() func() error { return func() func() error { return call } }
		of := func(task codeq.Task, end func(codeq.Receipt) error) func() func() error {
			return func() func() error {
				r := lease(task)
				return func() error { return end(r) }
			}
		}
		verbs := []struct {
			name  string
			level engine.Room // the lowest at which it works
			plan  func() func() error
		}{
			{"Produce", engine.Roomy, now(func() error { _, err := q.Produce(ctx, task); return err })},
			{"ProduceBatch", engine.Roomy, now(func() error { _, err := q.ProduceBatch(ctx, []codeq.Task{task, task}); return err })},
			{"SetSchedule", engine.Roomy, now(func() error { return q.SetSchedule(ctx, schedule("new")) })},
			{"Claim", engine.RoomLow, func() func() error {
				waits(codeq.Task{Queue: "to claim"})
				return func() error {
					_, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"to claim"}, NoWait: true})
					return err
				}
			}},
			{"RedriveDead", engine.RoomLow, func() func() error {
				id := dead("dead")
				return func() error { return q.RedriveDead(ctx, id) }
			}},
			{"SetPriority", engine.RoomLow, func() func() error {
				id := waits(codeq.Task{Queue: "b"})
				return func() error { return q.SetPriority(ctx, id, 7) }
			}},
			{"Complete with a follow-up", engine.RoomScarce, of(task, func(r codeq.Receipt) error { return q.Complete(ctx, r, nil, task) })},
			{"Complete, kept", engine.RoomScarce, of(kept, func(r codeq.Receipt) error { return q.Complete(ctx, r, []byte("result")) })},
			{"Retry", engine.RoomScarce, of(task, func(r codeq.Receipt) error { return q.Retry(ctx, r, codeq.RetryOptions{}) })},
			{"Release", engine.RoomScarce, of(task, func(r codeq.Receipt) error { return q.Release(ctx, r, time.Hour) })},
			{"DeadLetter", engine.RoomScarce, of(task, func(r codeq.Receipt) error { return q.DeadLetter(ctx, r, nil) })},
			{"Extend", engine.RoomScarce, of(task, func(r codeq.Receipt) error { return q.Extend(ctx, r, 2*time.Hour) })},
			{"CompleteBatch, kept", engine.RoomScarce, of(kept, func(r codeq.Receipt) error {
				return q.CompleteBatch(ctx, []codeq.Completion{{Receipt: r, Result: []byte("result")}})
			})},
			{"ExtendBatch", engine.RoomScarce, of(task, func(r codeq.Receipt) error { return q.ExtendBatch(ctx, []codeq.Receipt{r}, 2*time.Hour) })},
			{"Cancel, kept", engine.RoomScarce, func() func() error {
				id := waits(kept)
				return func() error { return q.Cancel(ctx, id) }
			}},
			{"Configure", engine.RoomScarce, now(func() error { return q.Configure(ctx, "b", func(s *codeq.Settings) { s.Concurrency++ }) })},
			{"Complete", engine.RoomNone, of(task, func(r codeq.Receipt) error { return q.Complete(ctx, r, []byte("dropped")) })},
			{"CompleteBatch", engine.RoomNone, of(task, func(r codeq.Receipt) error {
				return q.CompleteBatch(ctx, []codeq.Completion{{Receipt: r, Result: []byte("dropped")}})
			})},
			{"Cancel", engine.RoomNone, func() func() error {
				id := waits(task)
				return func() error { return q.Cancel(ctx, id) }
			}},
			{"Cancel, leased", engine.RoomNone, of(task, func(r codeq.Receipt) error { return q.Cancel(ctx, r.ID) })},
			{"DeleteSchedule", engine.RoomNone, func() func() error {
				require.NoError(t, q.SetSchedule(ctx, schedule("old")))
				return func() error { return q.DeleteSchedule(ctx, "old") }
			}},
			{"PauseSchedule", engine.RoomScarce, func() func() error {
				require.NoError(t, q.SetSchedule(ctx, schedule("to pause")))
				return func() error { return q.PauseSchedule(ctx, "to pause") }
			}},
			{"ReleaseKey, of a task that goes on", engine.RoomScarce, func() func() error {
				t := codeq.Task{Queue: "keys", Unique: codeq.Unique{Key: "k"}}
				_, _ = q.Produce(ctx, t) // an earlier pass may have stored it
				return func() error { return q.ReleaseKey(ctx, codeq.UniqueKey{Queue: t.Queue, Key: t.Unique.Key}) }
			}},
			{"ReleaseKey", engine.RoomNone, func() func() error {
				task := codeq.Task{Queue: "keys of ended tasks", Unique: codeq.Unique{Key: "k", For: time.Hour}}
				if _, err := q.Produce(ctx, task); err == nil { // else it was stored before
					queuetest.Complete(t, q, queuetest.ClaimNow(t, q, task.Queue))
				}
				return func() error { return q.ReleaseKey(ctx, codeq.UniqueKey{Queue: task.Queue, Key: task.Unique.Key}) }
			}},
			{"PurgeDead", engine.RoomNone, func() func() error {
				dead("dead to purge")
				return func() error { _, err := q.PurgeDead(ctx, codeq.DeadFilter{Queue: "dead to purge leased"}); return err }
			}},
			{"Forget", engine.RoomNone, func() func() error {
				r := lease(codeq.Task{Queue: "to forget", Retention: time.Hour})
				require.NoError(t, q.Complete(ctx, r, nil))
				return func() error { return q.Forget(ctx, r.ID) }
			}},
			{"Bulk, purge", engine.RoomNone, func() func() error {
				dead("dead in bulk")
				time.Sleep(time.Millisecond)
				return func() error {
					_, err := q.Bulk(ctx, codeq.BulkOptions{Action: codeq.BulkPurge, TaskFilter: codeq.TaskFilter{States: []codeq.State{codeq.Dead}, Queue: "dead in bulk leased"}})
					return err
				}
			}},
			{"Bulk, move", engine.RoomLow, func() func() error {
				waits(codeq.Task{Queue: "to move"})
				time.Sleep(time.Millisecond)
				return func() error {
					_, err := q.Bulk(ctx, codeq.BulkOptions{Action: codeq.BulkMove, ToQueue: "moved", TaskFilter: codeq.TaskFilter{States: []codeq.State{codeq.Ready}, Queue: "to move"}})
					return err
				}
			}},
			{"Signal", engine.RoomLow, func() func() error {
				id := waits(task)
				return func() error { return q.Signal(ctx, id, "s", 1) }
			}},
			{"ListPage", engine.RoomEmpty, now(func() error { _, err := q.ListPage(ctx, codeq.PageOptions{}); return err })},
			{"FindByKey", engine.RoomEmpty, func() func() error {
				t := codeq.Task{Queue: "keys to find", Unique: codeq.Unique{Key: "k"}}
				_, _ = q.Produce(ctx, t) // an earlier pass may have stored it
				return func() error {
					_, err := q.FindByKey(ctx, codeq.UniqueKey{Queue: t.Queue, Key: t.Unique.Key})
					return err
				}
			}},
			{"Stats", engine.RoomEmpty, now(func() error { _, err := q.Stats(ctx); return err })},
			{"Info", engine.RoomEmpty, now(func() error { _, err := q.Info(ctx); return err })},
			{"TotalsByDay", engine.RoomEmpty, now(func() error { _, err := q.TotalsByDay(ctx, "a"); return err })},
			{"Get", engine.RoomEmpty, func() func() error {
				id := waits(kept)
				return func() error { _, err := q.Get(ctx, id); return err }
			}},
			{"List", engine.RoomEmpty, func() func() error {
				return func() error {
					for _, err := range q.List(ctx, codeq.ListOptions{State: codeq.Leased}) {
						return err
					}
					return nil
				}
			}},
			{"Schedules", engine.RoomEmpty, now(func() error { _, err := q.Schedules(ctx); return err })},
		}
		for level := engine.Roomy; level <= engine.RoomEmpty; level++ {
			dropTo(disk, engine.Roomy)
			calls := make([]func() error, len(verbs))
			for i, v := range verbs {
				calls[i] = v.plan()
			}
			dropTo(disk, level)
			for i, v := range verbs {
				before, err := queuetest.List(q)
				require.NoError(t, err)
				err = calls[i]()
				if level <= v.level {
					require.NoError(t, err, "%s at level %s", v.name, level)
					continue
				}
				require.ErrorIs(t, err, codeq.ErrDiskFull, "%s at level %s", v.name, level)
				require.ErrorContains(t, err, "shard ")
				after, err := queuetest.List(q)
				require.NoError(t, err)
				require.Equal(t, before, after, v.name)
			}
			if level > engine.RoomScarce {
				require.ErrorIs(t, q.Checkpoint(ctx, "copy"), codeq.ErrDiskFull)
			}
			disk.Free(64 << 20)
			time.Sleep(time.Second)
			for i, v := range verbs { // refused calls have changed nothing
				if level > v.level {
					require.NoError(t, calls[i](), "%s after level %s", v.name, level)
				}
			}
			require.NoError(t, queuetest.CheckAll(q))
			require.NoError(t, queuetest.CheckMemory(q))
		}
		require.NoError(t, q.Close())
		require.NoError(t, openOnSmallDisk(t, disk, nil).Close())
	})
}

// TestDiskFull: producers fill the disk until they are refused. The reserve for leased tasks stays
// free, and waiting claims wait until there is room.
func TestDiskFull(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		disk := testkit.NewSmallDisk(16 << 20)
		q := openOnSmallDisk(t, disk, nil)
		require.Greater(t, fillDisk(t, q), 30)
		require.Greater(t, disk.Size.Load()-disk.Used.Load(), int64(testkit.MinFree)*3/4)
		dropTo(disk, engine.RoomScarce)
		short, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		_, err := q.Claim(short, codeq.ClaimRequest{Queues: []string{"a"}})
		require.ErrorIs(t, err, context.DeadlineExceeded)
		waiting := make(chan error, 1)
		go func() {
			_, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}})
			waiting <- err
		}()
		for level := engine.RoomScarce; level <= engine.RoomEmpty; level++ {
			dropTo(disk, level)
			require.Empty(t, waiting)
		}
		disk.Free(64 << 20)
		require.NoError(t, <-waiting, "nobody has called")
		require.NoError(t, q.Close())
	})
}

// TestDiskFullLeases: a lease does not run while the full disk refuses both its end and its
// extension. Any other time counts.
func TestDiskFullLeases(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	for _, reopened := range []bool{false, true} {
		t.Run(fmt.Sprint("reopened ", reopened), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx := t.Context()
				disk := testkit.NewSmallDisk(64 << 20)
				q := openOnSmallDisk(t, disk, nil)
				queuetest.Produce(t, q, codeq.Task{Queue: "a"})
				claim := codeq.ClaimRequest{Queues: []string{"a"}, LeaseFor: time.Minute}
				l, err := q.Claim(ctx, claim)
				require.NoError(t, err)
				for _, level := range []engine.Room{engine.RoomNone, engine.RoomEmpty, engine.RoomNone} {
					dropTo(disk, level)
					require.ErrorIs(t, q.Extend(ctx, l.Receipt, time.Minute), codeq.ErrDiskFull)
					if reopened {
						require.NoError(t, q.Close())
						dropTo(disk, level) // without the reserves of the stores
						q = openOnSmallDisk(t, disk, nil)
					}
					time.Sleep(time.Hour)
				}
				disk.Free(64 << 20)
				time.Sleep(store.LookEvery * time.Millisecond)
				require.NoError(t, q.Extend(ctx, l.Receipt, time.Minute))
				dropTo(disk, engine.RoomScarce)
				time.Sleep(time.Minute)
				require.ErrorIs(t, q.Extend(ctx, l.Receipt, time.Minute), codeq.ErrLeaseLost)
				dropTo(disk, engine.Roomy)
				l, err = q.Claim(ctx, claim)
				require.NoError(t, err)
				require.Equal(t, 2, l.Attempt)
				require.NoError(t, queuetest.CheckAll(q))
				require.NoError(t, q.Close())
			})
		})
	}
}

// TestDiskFullForTimes: ticks and expired leases wait for room. They only check it now and then,
// and none is lost.
func TestDiskFullForTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		disk := testkit.NewSmallDisk(64 << 20)
		q := openOnSmallDisk(t, disk, func(o *codeq.Options) { o.Shards = 1 })
		require.NoError(t, q.SetSchedule(ctx, codeq.Schedule{Name: "s", Every: 10 * time.Second, Missed: codeq.MissedAll, Task: codeq.Task{Queue: "ticks"}}))
		queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		queuetest.Produce(t, q, codeq.Task{Queue: "later", RunAt: time.Now().Add(time.Minute)})
		_, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}, LeaseFor: time.Minute})
		require.NoError(t, err)
		counts := func() (ticks, leased, scheduled int) {
			stats, err := q.Stats(ctx)
			require.NoError(t, err)
			return int(stats["ticks"].Ready), int(stats["a"].Leased), int(stats["later"].Scheduled)
		}
		for _, free := range []int64{testkit.MinFree - 1, testkit.MinFree/2 - 1} {
			ticks, _, _ := counts()
			disk.Free(free)
			time.Sleep(2 * time.Second)
			asked := disk.Asked.Load()
			time.Sleep(10 * time.Minute)
			require.Less(t, disk.Asked.Load()-asked, int64(700))
			now, leased, scheduled := counts()
			require.LessOrEqual(t, now, ticks+1)
			if free < testkit.MinFree/2 {
				require.Equal(t, 1, leased)
				require.Equal(t, 1, scheduled)
			} else { // they go on
				require.Zero(t, leased)
				require.Zero(t, scheduled)
				_, err = q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}, LeaseFor: time.Minute})
				require.NoError(t, err)
				id := queuetest.Claim(t, q, "later")
				require.NoError(t, q.Release(ctx, id.Receipt, time.Minute))
			}
			if free < testkit.MinFree/2 {
				disk.Free(64 << 20)
				time.Sleep(10 * time.Second)
				now, leased, scheduled = counts()
				require.Greater(t, now, 110, "every tick")
				require.Equal(t, 1, leased, "no lease has ended in time without room")
				require.Zero(t, scheduled)
				time.Sleep(time.Minute)
				_, leased, _ = counts()
				require.Zero(t, leased)
			}
		}
		require.NoError(t, q.Close())
	})
}

// TestDiskScarceAmidTelling: a task has ended, but there is no room for the messages to all tasks
// that waited for it. Calls that would change the task are refused, and not tried again and again.
func TestDiskScarceAmidTelling(t *testing.T) {
	for _, end := range []codeq.State{codeq.Done, codeq.Dead} {
		t.Run(end.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx := t.Context()
				disk := testkit.NewSmallDisk(64 << 20)
				var groups atomic.Int64
				q := openOnSmallDisk(t, disk, func(o *codeq.Options) {
					o.Shards, o.MaxAttempts = 1, 1
					inspect.Options(o).Wall = func() time.Time {
						if groups.Add(1) > 10_000 {
							panic("the owner goes round and round")
						}
						return time.Now()
					}
				})
				parent := queuetest.Produce(t, q, codeq.Task{Queue: "parent", Retention: time.Hour})[0]
				for range engine.TellAtOnce + 1 {
					queuetest.Produce(t, q, codeq.Task{Queue: "child", After: []codeq.ID{parent}, OnDead: codeq.CancelOnDead})
				}
				l := queuetest.ClaimNow(t, q, "parent")
				dropTo(disk, engine.RoomScarce)
				if end == codeq.Done {
					queuetest.Complete(t, q, l)
				} else {
					require.NoError(t, q.Retry(ctx, l.Receipt, codeq.RetryOptions{}))
				}
				require.EqualValues(t, engine.TellAtOnce+1, queuetest.CountsOf(t, q, "child").Blocked)
				o, err := q.Await(ctx, parent)
				require.NoError(t, err)
				require.Equal(t, end, o.State)
				require.ErrorIs(t, q.Cancel(ctx, parent), codeq.ErrDiskFull)
				n, err := q.PurgeDead(ctx, codeq.DeadFilter{})
				if end == codeq.Dead {
					require.ErrorIs(t, err, codeq.ErrDiskFull)
				}
				require.Zero(t, n)
				dropTo(disk, engine.Roomy)
				require.Zero(t, queuetest.CountsOf(t, q, "child").Blocked)
				if end == codeq.Dead {
					require.NoError(t, q.Cancel(ctx, parent))
				}
				require.NoError(t, queuetest.CheckAll(q))
				require.NoError(t, q.Close())
			})
		})
	}
}

// TestDiskFullKeepsOutcomes: handlers return while the disk is full, at any level. Their results
// are stored when there is room. No task is reported as failed, no attempt counts twice, and no
// successful task becomes dead.
func TestDiskFullKeepsOutcomes(t *testing.T) {
	t.Parallel()
	for level := engine.RoomLow; level <= engine.RoomEmpty; level++ {
		t.Run(level.String(), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				disk := testkit.NewSmallDisk(64 << 20)
				q := openOnSmallDisk(t, disk, func(o *codeq.Options) { o.LeaseFor, o.MaxAttempts = time.Minute, 3 })
				for _, queue := range []string{"follow", "keep", "retry", "snooze", "drop"} {
					for range 3 {
						queuetest.Produce(t, q, codeq.Task{Queue: queue, Retention: map[string]time.Duration{"keep": codeq.Forever}[queue]})
					}
				}
				full := make(chan struct{})
				calls := make(map[string]int)
				var mu sync.Mutex
				var reported []error
				mux := new(codeq.Mux)
				handle := func(queue string, do func(*codeq.Job[[]byte]) error) {
					codeq.Handle(mux, queue, func(_ context.Context, j *codeq.Job[[]byte]) error {
						mu.Lock()
						calls[queue]++
						mu.Unlock()
						<-full
						return do(j)
					})
				}
				handle("follow", func(j *codeq.Job[[]byte]) error {
					j.FollowUp(codeq.Task{Queue: "next"}, codeq.Task{Queue: "next", Group: "g"})
					return nil
				})
				handle("keep", func(j *codeq.Job[[]byte]) error { j.SetResult([]byte("result")); return nil })
				handle("retry", func(*codeq.Job[[]byte]) error { return codeq.RetryAfter(100*time.Hour, errors.New("no")) })
				handle("snooze", func(*codeq.Job[[]byte]) error { return codeq.Snooze(100 * time.Hour) })
				handle("drop", func(*codeq.Job[[]byte]) error { return nil })
				stop := queuetest.Run(q, mux, codeq.RunOptions{Concurrency: 20, OnError: func(_ *codeq.Lease, err error) {
					mu.Lock()
					reported = append(reported, err)
					mu.Unlock()
				}})
				synctest.Wait()
				dropTo(disk, level)
				close(full)
				time.Sleep(time.Hour)
				disk.Free(64 << 20)
				time.Sleep(10 * time.Second)
				stats, err := q.Stats(t.Context())
				require.NoError(t, err)
				require.Equal(t, map[string]codeq.Counts{
					"keep": {Done: 3}, "retry": {Scheduled: 3}, "snooze": {Scheduled: 3},
					"next": {Ready: 4, Blocked: 2},
				}, stats)
				require.Equal(t, map[string]int{"follow": 3, "keep": 3, "retry": 3, "snooze": 3, "drop": 3}, calls)
				require.Len(t, reported, 3)
				for _, err := range reported {
					require.EqualError(t, err, "no")
				}
				require.NoError(t, queuetest.CheckAll(q))
				require.NoError(t, stop())
				require.NoError(t, q.Close())
			})
		})
	}
}

// TestDiskFullAtTheEndOfRun: Run and Close wait for room as long as for handlers, and no longer.
// Then they report the results that could not be stored, and these tasks run again.
func TestDiskFullAtTheEndOfRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const tasks = 8
		disk := testkit.NewSmallDisk(64 << 20)
		q := openOnSmallDisk(t, disk, nil)
		for range tasks {
			queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		}
		full := make(chan struct{})
		var done atomic.Int64
		mux := new(codeq.Mux)
		codeq.Handle(mux, "a", func(context.Context, *codeq.Job[[]byte]) error {
			<-full
			if done.Add(1)%2 == 0 {
				return codeq.Snooze(time.Minute)
			}
			return nil
		})
		errs := make(chan error, 2*tasks)
		ended := make(chan error, 1)
		go func() {
			ended <- q.Run(t.Context(), mux, &codeq.RunOptions{
				Concurrency: tasks, Grace: 5 * time.Second, OnError: func(_ *codeq.Lease, err error) { errs <- err },
			})
		}()
		synctest.Wait()
		dropTo(disk, engine.RoomEmpty)
		close(full)
		synctest.Wait()
		require.Empty(t, errs)
		begin := time.Now()
		require.NoError(t, q.Close())
		require.ErrorIs(t, <-ended, codeq.ErrClosed)
		require.LessOrEqual(t, time.Since(begin), 12*time.Second)
		require.Len(t, errs, tasks)
		for range tasks {
			require.ErrorIs(t, <-errs, codeq.ErrDiskFull)
		}
		disk.Free(64 << 20)
		q = openOnSmallDisk(t, disk, nil)
		counts := queuetest.CountsOf(t, q, "a")
		require.EqualValues(t, tasks, counts.Ready+counts.Leased)
		require.NoError(t, queuetest.CheckAll(q))
		require.NoError(t, q.Close())
	})
}

// TestDiskReallyFull: no more tables can be written, whatever free space the file system reports.
// Calls that write are refused in time, reads work, no lease is lost, and work goes on when there
// is room. Close does not wait for room.
func TestDiskReallyFull(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	for _, room := range []bool{true, false} {
		for _, full := range []error{syscall.ENOSPC, syscall.EDQUOT} {
			t.Run(fmt.Sprintf("room %t, %v", room, full), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					ctx := t.Context()
					disk := testkit.NewSmallDisk(1 << 20)
					disk.Only, disk.Err = ".sst", full
					q := openOnSmallDisk(t, disk, func(o *codeq.Options) { o.MinFreeBytes, o.LeaseFor = -1, time.Minute })
					first := queuetest.StartingAt(q, 0)
					queuetest.Produce(t, first, codeq.Task{Queue: "b"})
					l := queuetest.Claim(t, first, "b")
					var err error
					produced, payload := 0, bytes.Repeat([]byte("x"), 20<<10)
					for {
						if _, err = first.Produce(ctx, codeq.Task{Queue: "a", Payload: payload}); err != nil {
							break
						}
						produced++
						require.Less(t, produced, 1000)
					}
					require.ErrorIs(t, err, codeq.ErrDiskFull)
					require.ErrorContains(t, err, "shard 0")
					disk.Size.Store(0) // the space of the failed table must not hold another one
					begin := time.Now()
					require.ErrorIs(t, q.Complete(ctx, l.Receipt, nil), codeq.ErrDiskFull)
					_, err = first.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}, NoWait: true})
					require.ErrorIs(t, err, codeq.ErrDiskFull)
					info := queuetest.InfoOf(t, q, l.ID)
					require.Equal(t, codeq.Leased, info.State)
					require.EqualValues(t, produced, queuetest.CountsOf(t, q, "a").Ready)
					queuetest.Produce(t, queuetest.StartingAt(q, 1), codeq.Task{Queue: "c"})
					queuetest.Complete(t, q, queuetest.Claim(t, first, "c"))
					require.Zero(t, time.Since(begin), "nothing has waited")
					time.Sleep(2 * time.Minute)
					require.ErrorIs(t, q.Complete(ctx, l.Receipt, nil), codeq.ErrDiskFull)
					if room {
						disk.Free(64 << 20)
						time.Sleep(store.LookEvery * time.Millisecond)
						require.NoError(t, q.Complete(ctx, l.Receipt, nil), "the lease is in force")
						queuetest.Produce(t, first, codeq.Task{Queue: "b"})
						require.NoError(t, q.Close())
					} else {
						require.NoError(t, q.Close())
						_, err := codeq.Open("queue", queuetest.OnDisk(disk, &codeq.Options{}))
						require.ErrorIs(t, err, codeq.ErrDiskFull)
						require.ErrorIs(t, err, full)
						require.ErrorContains(t, err, "queue")
						disk.Free(64 << 20)
					}
					q = openOnSmallDisk(t, disk, nil)
					require.EqualValues(t, produced, queuetest.CountsOf(t, q, "a").Ready)
					require.NoError(t, queuetest.CheckAll(q))
					require.NoError(t, q.Close())
				})
			})
		}
	}
}

// TestLogWithoutSpace: the log cannot be written, whatever free space the file system reports.
// Calls that write are refused in time, reads work, no shard fails, and work goes on when there is
// room.
func TestLogWithoutSpace(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	rng := testkit.Seeded(t)
	for _, d := range []codeq.Durability{codeq.DurabilityNone, codeq.DurabilityProcess, codeq.DurabilityDisk} {
		for shards, size := range map[int]int{1: 20 << 10, 3: 100} {
			synctest.Test(t, func(t *testing.T) {
				ctx := t.Context()
				disk := testkit.NewSmallDisk(int64(24<<20 + rng.IntN(4<<20)))
				disk.Err = []error{syscall.ENOSPC, syscall.EDQUOT}[rng.IntN(2)]
				q := openOnSmallDisk(t, disk, func(o *codeq.Options) {
					o.MinFreeBytes, o.Shards, o.Durability = -1, shards, d
				})
				id := queuetest.Produce(t, q, codeq.Task{Queue: "b"})[0]
				batch := make([]codeq.Task, min(200, 256<<10/size))
				for i := range batch {
					payload := make([]byte, size) // that does not compress
					for k := range payload {
						payload[k] = byte(rng.Uint32())
					}
					batch[i] = codeq.Task{Queue: "a", Payload: payload}
				}
				produced := 0
				for range 3 {
					disk.Free(int64(rng.IntN(8 << 20)))
					time.Sleep(store.LookEvery * time.Millisecond)
					for {
						_, err := q.ProduceBatch(ctx, batch)
						if err != nil {
							require.ErrorIs(t, err, codeq.ErrDiskFull)
							require.NotErrorIs(t, err, codeq.ErrUncertain)
							break
						}
						produced += len(batch)
						require.Less(t, produced*size, 100<<20)
					}
					begin := time.Now()
					info := queuetest.InfoOf(t, q, id)
					require.Equal(t, codeq.Ready, info.State)
					require.EqualValues(t, produced, queuetest.CountsOf(t, q, "a").Ready)
					require.Zero(t, time.Since(begin), "nothing has waited")
				}
				disk.Free(64 << 20)
				time.Sleep(store.LookEvery * time.Millisecond)
				queuetest.Complete(t, q, queuetest.ClaimNow(t, q, "b"))
				require.NoError(t, queuetest.CheckAll(q))
				require.NoError(t, q.Close())
				q = openOnSmallDisk(t, disk, func(o *codeq.Options) { o.Shards = shards })
				require.EqualValues(t, produced, queuetest.CountsOf(t, q, "a").Ready)
				require.NoError(t, queuetest.CheckAll(q))
				require.NoError(t, q.Close())
			})
		}
	}
}

// TestDiskFullUnderway: the memtables are full and the owner waits for a slow flush, which then
// finds the disk full: no call waits longer. A flush that is only slow delays calls, and none is
// refused.
func TestDiskFullUnderway(t *testing.T) {
	for _, full := range []bool{true, false} {
		t.Run(fmt.Sprint("full ", full), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx := t.Context()
				slow := make(chan struct{})
				var fails atomic.Bool
				fails.Store(full)
				disk := &testkit.HookFS{FS: crashfs.New(), Before: func(op, name string) error {
					if op != "create" || !strings.HasSuffix(name, ".sst") {
						return nil
					}
					<-slow
					if fails.Load() {
						return syscall.ENOSPC
					}
					return nil
				}}
				opts := queuetest.OnDisk(disk, &codeq.Options{Shards: 1, MemTableBytes: 256 << 10, MinFreeBytes: -1})
				close(slow)
				fails.Store(false)
				q, err := codeq.Open("queue", opts)
				require.NoError(t, err)
				fails.Store(full)
				slow = make(chan struct{})
				produced := 0
				ended := make(chan error, 1)
				go func() {
					var err error
					for ; err == nil && produced < 100; produced++ {
						_, err = q.Produce(ctx, codeq.Task{Queue: "a", Payload: bytes.Repeat([]byte("x"), 20<<10)})
					}
					ended <- err
				}()
				synctest.Wait()
				require.Empty(t, ended)
				most := store.MemTables * opts.MemTableBytes / (20 << 10)
				require.Less(t, produced, most*3/2, "memory has an end")
				close(slow)
				if !full {
					require.NoError(t, <-ended)
					require.NoError(t, q.Close())
					return
				}
				require.ErrorIs(t, <-ended, codeq.ErrDiskFull)
				require.EqualValues(t, produced-1, queuetest.CountsOf(t, q, "a").Ready)
				fails.Store(false)
				time.Sleep(store.LookEvery * time.Millisecond)
				queuetest.Produce(t, q, codeq.Task{Queue: "a"})
				require.NoError(t, queuetest.CheckAll(q))
				require.NoError(t, q.Close())
			})
		})
	}
}

// TestOpenOnFullDisk: Open returns that the disk is full, and works when there is room.
func TestOpenOnFullDisk(t *testing.T) {
	t.Parallel()
	disk := testkit.NewSmallDisk(0)
	for _, room := range []int64{0, 100, 300, 1000, 3000} {
		disk.Free(room)
		_, err := codeq.Open("queue", queuetest.OnDisk(disk, &codeq.Options{Shards: 1}))
		require.ErrorIs(t, err, codeq.ErrDiskFull, room)
		require.ErrorContains(t, err, "queue")
	}
	disk.Free(256 << 20)
	require.NoError(t, openOnSmallDisk(t, disk, func(o *codeq.Options) { o.Shards = 1 }).Close())
}

// TestMinFreeBytes: there is a default, and a negative number means no limit.
func TestMinFreeBytes(t *testing.T) {
	for free, want := range map[int64]error{0: codeq.ErrDiskFull, -1: nil, 32 << 20: codeq.ErrDiskFull, 16 << 20: nil} {
		disk := testkit.NewSmallDisk(28 << 20)
		q := openOnSmallDisk(t, disk, func(o *codeq.Options) { o.MinFreeBytes = free })
		_, err := q.Produce(t.Context(), codeq.Task{Queue: "a"})
		require.ErrorIs(t, err, want, free)
		require.NoError(t, q.Close())
	}
}
