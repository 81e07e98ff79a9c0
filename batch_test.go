package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/test/queuetest"
)

// batchLog notes the payloads of the batches that a handler gets.
type batchLog struct {
	mu      sync.Mutex
	batches [][]string
}

func (l *batchLog) add(jobs []*codeq.Job[string]) {
	l.mu.Lock()
	defer l.mu.Unlock()
	var batch []string
	for _, j := range jobs {
		batch = append(batch, j.Args)
	}
	l.batches = append(l.batches, batch)
}

func (l *batchLog) sizes() (sizes []int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, b := range l.batches {
		sizes = append(sizes, len(b))
	}
	return sizes
}

// note returns a handler that notes its batches and completes all.
func (l *batchLog) note(_ context.Context, jobs []*codeq.Job[string]) []error {
	l.add(jobs)
	return nil
}

func numbered(t *testing.T, n int, change func(i int, task *codeq.Task)) (tasks []codeq.Task) {
	for i := range n {
		task, err := codeq.NewTask("a", fmt.Sprint(i))
		require.NoError(t, err)
		if change != nil {
			change(i, &task)
		}
		tasks = append(tasks, task)
	}
	return tasks
}

// TestBatchTrickle: a trickle of 2,000 tasks makes at most 30 calls, as each batch waits for its
// Linger or until it is full. Each task is in one of them.
func TestBatchTrickle(t *testing.T) {
	for _, concurrency := range []int{1, 8} {
		for _, shards := range []int{1, 4} {
			t.Run(fmt.Sprint(concurrency, " workers, ", shards, " shards"), func(t *testing.T) {
				queuetest.Bubble(t, codeq.Options{Shards: shards}, func(t *testing.T, q *codeq.Queue) {
					var log batchLog
					var mux codeq.Mux
					codeq.HandleBatch(&mux, "a", codeq.BatchOptions{Max: 100, Linger: 20 * time.Millisecond}, log.note)
					stop := queuetest.Run(q, &mux, codeq.RunOptions{Concurrency: concurrency})
					for _, task := range numbered(t, 2000, nil) {
						queuetest.Produce(t, q, task)
						time.Sleep(200 * time.Microsecond)
					}
					time.Sleep(time.Second)
					require.NoError(t, stop())
					require.LessOrEqual(t, len(log.sizes()), 30)
					require.LessOrEqual(t, slices.Max(log.sizes()), 100)
					all := slices.Concat(log.batches...)
					require.Len(t, all, 2000)
					slices.Sort(all)
					require.Len(t, slices.Compact(all), 2000)
					require.Zero(t, queuetest.CountsOf(t, q, "a"))
				})
			})
		}
	}
}

// runBatches runs a batch handler of queue a.
func runBatches(t *testing.T, q *codeq.Queue, o codeq.BatchOptions, opts codeq.RunOptions,
	h func(context.Context, []*codeq.Job[string]) []error,
) (stop func() error) {
	t.Helper()
	var mux codeq.Mux
	codeq.HandleBatch(&mux, "a", o, h)
	return queuetest.Run(q, &mux, opts)
}

// TestBatchVerdicts: each task of a batch ends as its error says, with its own result, follow-ups
// and metadata. A payload that cannot be decoded is a dead letter, which the handler does not see.
func TestBatchVerdicts(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 3, Retention: time.Hour}, func(t *testing.T, q *codeq.Queue) {
		tasks := numbered(t, 7, func(i int, task *codeq.Task) {
			if i == 5 {
				task.Payload = []byte("{")
			}
		})
		ids := queuetest.Produce(t, q, tasks...)
		var reported atomic.Int64
		calls := 0
		stop := runBatches(t, q, codeq.BatchOptions{Linger: time.Second}, codeq.RunOptions{
			OnError: func(*codeq.Lease, error) { reported.Add(1) },
		}, func(ctx context.Context, jobs []*codeq.Job[string]) []error {
			calls++
			require.Len(t, jobs, 6)
			_, ok := codeq.LeaseFrom(ctx)
			require.False(t, ok, "it is the context of no task")
			errs := make([]error, len(jobs))
			for i, j := range jobs {
				l, ok := codeq.LeaseFrom(j.Context())
				require.True(t, ok)
				require.Same(t, j.Lease, l)
				require.NoError(t, codeq.SetMetadata(j.Context(), "is", j.Args))
				switch j.Args {
				case "0":
					require.NoError(t, j.SetResultValue("zero"))
					j.FollowUp(codeq.Task{Queue: "next"})
				case "1":
					j.FollowUp(codeq.Task{Queue: "next"})
					errs[i] = errors.New("retry")
				case "2":
					errs[i] = codeq.RetryAfter(time.Hour, errors.New("after"))
				case "3":
					errs[i] = codeq.Snooze(time.Hour)
				case "4":
					errs[i] = codeq.DeadLetter(errors.New("dead"))
				case "6":
					j.SetResult(make([]byte, 10<<20))
				}
			}
			return errs
		})
		synctest.Wait()
		time.Sleep(1100 * time.Millisecond)
		require.NoError(t, stop())
		require.Equal(t, 1, calls)
		require.EqualValues(t, 5, reported.Load(), "of all but the completed and the snoozed one")
		for i, want := range []struct {
			state    codeq.State
			attempts int
			err      string
		}{
			{codeq.Done, 1, ""}, {codeq.Scheduled, 1, "retry"}, {codeq.Scheduled, 1, "after"}, {codeq.Scheduled, 0, ""},
			{codeq.Dead, 1, "dead"}, {codeq.Dead, 1, "payload of queue a"}, {codeq.Dead, 1, "Complete result"},
		} {
			info := queuetest.InfoOf(t, q, ids[i])
			require.Equal(t, want.state, info.State, i)
			require.Equal(t, want.attempts, info.Attempts, i)
			require.Contains(t, info.LastError, want.err, i)
			if i != 5 {
				require.Equal(t, map[string]string{"is": fmt.Sprint(i)}, info.Metadata)
			}
		}
		require.Equal(t, `"zero"`, string(queuetest.InfoOf(t, q, ids[0]).Result))
		queuetest.Quiesce(t, q)
		require.EqualValues(t, 1, queuetest.CountsOf(t, q, "next").Ready)
		require.NoError(t, queuetest.CheckAll(q))
	})
}

// TestBatchFails: if the handler panics, ends its goroutine, or returns a wrong number of errors,
// the attempts of all tasks have failed, and the worker goes on.
func TestBatchFails(t *testing.T) {
	for how, c := range map[string]struct {
		fail func(jobs []*codeq.Job[string]) []error
		text string
	}{
		"panic":     {func([]*codeq.Job[string]) []error { panic("at the disco") }, "panic: at the disco"},
		"Goexit":    {func([]*codeq.Job[string]) []error { runtime.Goexit(); return nil }, "ended its goroutine"},
		"too few":   {func(jobs []*codeq.Job[string]) []error { return make([]error, len(jobs)-1) }, "returned 9 errors for 10 jobs"},
		"too many":  {func(jobs []*codeq.Job[string]) []error { return make([]error, len(jobs)+1) }, "returned 11 errors for 10 jobs"},
		"empty":     {func([]*codeq.Job[string]) []error { return []error{} }, "returned 0 errors for 10 jobs"},
		"bad error": {func([]*codeq.Job[string]) []error { return slices.Repeat([]error{(*badError)(nil)}, 10) }, "method Error panics"},
	} {
		t.Run(how, func(t *testing.T) {
			queuetest.Bubble(t, codeq.Options{Shards: 2, Backoff: codeq.Backoff{Base: time.Hour}}, func(t *testing.T, q *codeq.Queue) {
				ids := queuetest.Produce(t, q, numbered(t, 10, nil)...)
				var reported atomic.Int64
				var calls atomic.Int64
				stop := runBatches(t, q, codeq.BatchOptions{Linger: time.Second}, codeq.RunOptions{
					Concurrency: 1, OnError: func(*codeq.Lease, error) { reported.Add(1) },
				}, func(_ context.Context, jobs []*codeq.Job[string]) []error {
					if calls.Add(1) == 1 {
						return c.fail(jobs)
					}
					return nil
				})
				time.Sleep(2 * time.Second)
				require.EqualValues(t, 10, reported.Load())
				for _, id := range ids {
					info := queuetest.InfoOf(t, q, id)
					require.Equal(t, 1, info.Attempts)
					require.Contains(t, info.LastError, c.text)
				}
				time.Sleep(3 * time.Hour)
				require.Zero(t, queuetest.CountsOf(t, q, "a"))
				require.NoError(t, stop())
			})
		})
	}
}

type badError struct{ text string }

func (e *badError) Error() string { return e.text }

// TestBatchLeases: the leases of a batch last while it waits for more tasks, while it waits for a
// place, and while it is at work, however short they are.
func TestBatchLeases(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 2}, func(t *testing.T, q *codeq.Queue) {
		var log batchLog
		stop := runBatches(t, q, codeq.BatchOptions{Linger: 50 * time.Second, By: codeq.ByTenant}, codeq.RunOptions{
			Concurrency: 1, LeaseFor: 3 * time.Minute, OnError: func(_ *codeq.Lease, err error) { t.Error(err) },
		}, func(ctx context.Context, jobs []*codeq.Job[string]) []error {
			log.add(jobs)
			time.Sleep(time.Hour)
			require.NoError(t, ctx.Err())
			return nil
		})
		queuetest.Produce(t, q, numbered(t, 20, func(i int, task *codeq.Task) { task.Tenant = fmt.Sprint("t", i%4) })...)
		time.Sleep(5 * time.Hour)
		require.Equal(t, []int{5, 5, 5, 5}, log.sizes())
		require.Zero(t, queuetest.CountsOf(t, q, "a"), "each at its first attempt")
		require.NoError(t, stop())
	})
}

// TestBatchBy: a batch has tasks of one group. One whose By panics, or ends its goroutine, has
// failed alone. The tasks that wait for a place are bounded.
func TestBatchBy(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 2, MaxAttempts: 1}, func(t *testing.T, q *codeq.Queue) {
		const n, groups = 700, 7
		var log batchLog
		gate := make(chan struct{})
		mux := new(codeq.Mux)
		codeq.HandleBatch(mux, "a", codeq.BatchOptions{Max: 10, Linger: 100 * time.Millisecond, By: func(l *codeq.Lease) string {
			switch string(l.Payload) {
			case `"3"`:
				panic("no group")
			case `"4"`:
				runtime.Goexit()
			}
			return l.Headers["group"]
		}}, func(_ context.Context, jobs []*codeq.Job[string]) []error {
			for _, j := range jobs {
				require.Equal(t, jobs[0].Headers["group"], j.Headers["group"])
			}
			log.add(jobs)
			<-gate
			return nil
		})
		queuetest.Produce(t, q, numbered(t, n, func(i int, task *codeq.Task) {
			task.Headers = map[string]string{"group": fmt.Sprint(i % groups)}
		})...)
		stop := queuetest.Run(q, mux, codeq.RunOptions{Concurrency: 2})
		time.Sleep(time.Second)
		require.LessOrEqual(t, queuetest.CountsOf(t, q, "a").Leased, uint64(2*10+4*10+9), "at work, and waiting for a place")
		close(gate)
		time.Sleep(10 * time.Second)
		require.NoError(t, stop())
		require.Len(t, slices.Concat(log.batches...), n-2)
		require.LessOrEqual(t, len(log.sizes()), n/10*2, "most are full")
		require.Equal(t, codeq.Counts{Dead: 2}, queuetest.CountsOf(t, q, "a"))
	})
}

// TestBatchLosesTasks: a task that is canceled while its batch waits, or is at work, or that loses
// its lease, leaves it. The others go on; the handler's context ends with the last one.
func TestBatchLosesTasks(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 2, Retention: time.Hour}, func(t *testing.T, q *codeq.Queue) {
		ids := queuetest.Produce(t, q, numbered(t, 4, nil)...)
		begun := make(chan []*codeq.Job[string])
		ended := make(chan error)
		var reported atomic.Int64
		stop := runBatches(t, q, codeq.BatchOptions{Linger: time.Second}, codeq.RunOptions{
			LeaseFor: time.Minute, OnError: func(*codeq.Lease, error) { reported.Add(1) },
		}, func(ctx context.Context, jobs []*codeq.Job[string]) []error {
			begun <- jobs
			<-ctx.Done()
			ended <- context.Cause(ctx)
			return nil
		})
		synctest.Wait()
		require.NoError(t, q.Cancel(t.Context(), ids[0]), "while the batch waits")
		jobs := <-begun
		require.Len(t, jobs, 3)
		contextOf := func(id codeq.ID) context.Context {
			return jobs[slices.IndexFunc(jobs, func(j *codeq.Job[string]) bool { return j.ID == id })].Context()
		}
		require.NoError(t, q.Cancel(t.Context(), ids[1]))
		synctest.Wait()
		require.ErrorIs(t, context.Cause(contextOf(ids[1])), codeq.ErrCanceled)
		require.NoError(t, contextOf(ids[2]).Err())
		queuetest.LoseLease(t, q, ids[2])
		time.Sleep(time.Minute)
		require.ErrorIs(t, context.Cause(contextOf(ids[2])), codeq.ErrLeaseLost)
		require.NoError(t, contextOf(ids[3]).Err())
		require.Empty(t, ended)
		require.NoError(t, q.Cancel(t.Context(), ids[3]))
		require.ErrorIs(t, <-ended, codeq.ErrCanceled, "the last one")
		synctest.Wait()
		require.EqualValues(t, 4, reported.Load())
		for i, want := range []codeq.State{codeq.Canceled, codeq.Canceled, codeq.Leased, codeq.Canceled} {
			require.Equal(t, want, queuetest.InfoOf(t, q, ids[i]).State, i)
		}
		go func() { <-begun; <-ended }() // the second attempt of one
		require.NoError(t, stop())
	})
}

// TestBatchTimeout: the context of the handler ends at the earliest Timeout of its tasks, and that
// of a task at its own. A handler that goes on costs the attempts of those tasks.
func TestBatchTimeout(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{}, func(t *testing.T, q *codeq.Queue) {
		ids := queuetest.Produce(t, q, numbered(t, 3, func(i int, task *codeq.Task) { task.Timeout = time.Duration(i) * time.Minute })...)
		stop := runBatches(t, q, codeq.BatchOptions{Linger: time.Second}, codeq.RunOptions{Concurrency: 1},
			func(ctx context.Context, jobs []*codeq.Job[string]) []error {
				if len(jobs) < 3 {
					return nil
				}
				<-ctx.Done()
				require.ErrorIs(t, context.Cause(ctx), context.DeadlineExceeded)
				for _, j := range jobs {
					require.Equal(t, j.Args == "1", j.Context().Err() != nil)
				}
				time.Sleep(30 * time.Second)
				return nil
			})
		time.Sleep(75 * time.Second)
		for i, id := range ids {
			info := queuetest.InfoOf(t, q, id)
			require.Equal(t, codeq.Leased, info.State)
			require.Equal(t, 1, info.Attempts, i)
		}
		infos, err := q.Workers(t.Context())
		require.NoError(t, err)
		require.Len(t, infos[0].Hung, 3, "all tasks of the batch")
		time.Sleep(time.Hour)
		require.NoError(t, stop())
		require.Zero(t, queuetest.CountsOf(t, q, "a"))
	})
}

// TestBatchDrain: when Run ends, or the queue is closed, batches that wait for more tasks or for a
// place give them back without an attempt; those at work have their Grace, and lose their tasks
// after it.
func TestBatchDrain(t *testing.T) {
	for _, closes := range []bool{false, true} {
		disk := crashfs.New()
		synctest.Test(t, func(t *testing.T) {
			q := queuetest.OpenForRun(t, *queuetest.OnDisk(disk, &codeq.Options{Shards: 2}))
			var ended atomic.Bool
			stop := runBatches(t, q, codeq.BatchOptions{Linger: 9 * time.Second, By: codeq.ByTenant}, codeq.RunOptions{Concurrency: 2, Grace: 5 * time.Second},
				func(ctx context.Context, jobs []*codeq.Job[string]) []error {
					begun := time.Now()
					<-ctx.Done()
					for _, j := range jobs {
						require.Error(t, j.Context().Err())
					}
					require.Equal(t, 9*time.Second, time.Since(begun))
					ended.Store(true)
					return nil
				})
			produce := func(tenant string) {
				queuetest.Produce(t, q, numbered(t, 10, func(_ int, task *codeq.Task) { task.Tenant = tenant })...)
			}
			produce("at work")
			time.Sleep(10 * time.Second)
			produce("lingers")
			time.Sleep(time.Second)
			produce("waits")
			time.Sleep(2 * time.Second)
			require.EqualValues(t, 30, queuetest.CountsOf(t, q, "a").Leased)
			begun := time.Now()
			if closes {
				require.NoError(t, q.Close())
				require.ErrorIs(t, stop(), codeq.ErrClosed)
			} else {
				require.NoError(t, stop())
			}
			require.Equal(t, 5*time.Second, time.Since(begun))
			require.True(t, ended.Load())
		})
		synctest.Test(t, func(t *testing.T) {
			q := queuetest.OpenForRun(t, *queuetest.OnDisk(disk, &codeq.Options{Shards: 2}))
			require.Equal(t, codeq.Counts{Ready: 30}, queuetest.CountsOf(t, q, "a"))
			for info, err := range q.List(t.Context(), codeq.ListOptions{State: codeq.Ready}) {
				require.NoError(t, err)
				require.Zero(t, info.Attempts)
				require.False(t, info.Suspect)
			}
		})
	}
}

// TestBatchKilled: if the process is killed amid a batch, all of its tasks are suspects, also those
// of a batch that has not begun.
func TestBatchKilled(t *testing.T) {
	disk := crashfs.New()
	var crashed *crashfs.Disk
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, *queuetest.OnDisk(disk, &codeq.Options{Shards: 2, Durability: codeq.DurabilityDisk}))
		queuetest.Produce(t, q, numbered(t, 15, nil)...)
		stop := runBatches(t, q, codeq.BatchOptions{Max: 10, Linger: 9 * time.Second}, codeq.RunOptions{Grace: -1},
			func(ctx context.Context, jobs []*codeq.Job[string]) []error {
				<-ctx.Done()
				return nil
			})
		time.Sleep(5 * time.Second)
		crashed = disk.CrashClone(vfs.CrashCloneCfg{})
		require.NoError(t, stop())
	})
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, *queuetest.OnDisk(crashed, &codeq.Options{Shards: 2, SuspectFor: time.Second}))
		require.EqualValues(t, 15, queuetest.CountsOf(t, q, "a").Blocked)
		var log batchLog
		stop := runBatches(t, q, codeq.BatchOptions{Max: 10}, codeq.RunOptions{}, log.note)
		time.Sleep(time.Minute)
		require.NoError(t, stop())
		require.Len(t, slices.Concat(log.batches...), 15)
		require.Zero(t, queuetest.CountsOf(t, q, "a"))
	})
}

// TestBatchQuiet: quiet workers fill no batch, and begin those that have tasks.
func TestBatchQuiet(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{}, func(t *testing.T, q *codeq.Queue) {
		var log batchLog
		stop := runBatches(t, q, codeq.BatchOptions{Linger: 9 * time.Second}, codeq.RunOptions{Concurrency: 1}, log.note)
		queuetest.Produce(t, q, numbered(t, 3, nil)...)
		time.Sleep(time.Second)
		require.NoError(t, q.QuietWorkers(t.Context(), ""))
		queuetest.Produce(t, q, numbered(t, 3, nil)...)
		synctest.Wait()
		require.Equal(t, []int{3}, log.sizes())
		require.NoError(t, q.ResumeWorkers(t.Context(), ""))
		time.Sleep(10 * time.Second)
		require.Equal(t, []int{3, 3}, log.sizes())
		require.NoError(t, stop())
	})
}

// TestBatchBesideOthers: a Run may have both kinds of handlers. A batch takes one place.
func TestBatchBesideOthers(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 2}, func(t *testing.T, q *codeq.Queue) {
		var log batchLog
		var mux codeq.Mux
		var one, most, now atomic.Int64
		codeq.HandleBatch(&mux, "a", codeq.BatchOptions{Max: 10, Linger: 100 * time.Millisecond}, func(_ context.Context, jobs []*codeq.Job[string]) []error {
			most.Store(max(most.Load(), now.Add(1)))
			defer now.Add(-1)
			log.add(jobs)
			time.Sleep(time.Second)
			return nil
		})
		codeq.Handle(&mux, "b", func(context.Context, *codeq.Job[string]) error {
			most.Store(max(most.Load(), now.Add(1)))
			defer now.Add(-1)
			time.Sleep(time.Second)
			one.Add(1)
			return nil
		})
		tasks := numbered(t, 200, func(i int, task *codeq.Task) {
			if i%10 == 0 {
				task.Queue = "b"
			}
		})
		queuetest.Produce(t, q, tasks...)
		stop := queuetest.Run(q, &mux, codeq.RunOptions{Concurrency: 3})
		require.NoError(t, q.WaitIdle(t.Context(), "a", "b"))
		require.NoError(t, stop())
		require.EqualValues(t, 20, one.Load())
		require.Len(t, slices.Concat(log.batches...), 180)
		require.LessOrEqual(t, len(log.sizes()), 25)
		require.LessOrEqual(t, most.Load(), int64(3))
	})
}

// TestBatchRefused: Run refuses invalid options, a second handler, and middleware beside batches.
func TestBatchRefused(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Limits: codeq.Limits{Batch: 50}}, func(t *testing.T, q *codeq.Queue) {
		note := new(batchLog).note
		for field, fill := range map[string]func(m *codeq.Mux){
			`HandleBatch queue`:                func(m *codeq.Mux) { codeq.HandleBatch(m, "a", codeq.BatchOptions{Max: 1}, note) },
			`HandleBatch handler of queue "b"`: func(m *codeq.Mux) { codeq.HandleBatch[string](m, "b", codeq.BatchOptions{Max: 1}, nil) },
			`BatchOptions.Linger of queue "b"`: func(m *codeq.Mux) { codeq.HandleBatch(m, "b", codeq.BatchOptions{Max: 1, Linger: -1}, note) },
			`BatchOptions.Linger of queue "c"`: func(m *codeq.Mux) { codeq.HandleBatch(m, "c", codeq.BatchOptions{Max: 1, Linger: time.Hour}, note) },
			`BatchOptions.Linger of queue "d"`: func(m *codeq.Mux) {
				codeq.HandleBatch(m, "d", codeq.BatchOptions{Max: 1, Linger: 10 * time.Second}, note)
			},
			`BatchOptions.Max of queue "b"`:        func(m *codeq.Mux) { codeq.HandleBatch(m, "b", codeq.BatchOptions{Max: 51}, note) },
			`BatchOptions.Max of queue "negative"`: func(m *codeq.Mux) { codeq.HandleBatch(m, "negative", codeq.BatchOptions{Max: -1}, note) },
			`Use`:                                  func(m *codeq.Mux) { m.Use(func(next codeq.Handler) codeq.Handler { return next }) },
		} {
			var mux codeq.Mux
			codeq.HandleBatch(&mux, "a", codeq.BatchOptions{Max: 50}, note)
			fill(&mux)
			err := q.Run(t.Context(), &mux, nil)
			var invalid *codeq.InvalidError
			require.ErrorAs(t, err, &invalid, field)
			require.Equal(t, field, invalid.Field)
		}
	})
}

// TestBatchMax: without Max, a batch has as many tasks as the limit of batches permits.
func TestBatchMax(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Limits: codeq.Limits{Batch: 50}}, func(t *testing.T, q *codeq.Queue) {
		queuetest.Produce(t, q, numbered(t, 50, nil)...)
		queuetest.Produce(t, q, numbered(t, 50, nil)...)
		var log batchLog
		stop := runBatches(t, q, codeq.BatchOptions{}, codeq.RunOptions{Concurrency: 1}, log.note)
		time.Sleep(time.Second)
		require.NoError(t, stop())
		require.Equal(t, []int{50, 50}, log.sizes())
	})
}

// TestBatchSteps: a job of a batch has steps, by its own context, and sleeps alone.
func TestBatchSteps(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{}, func(t *testing.T, q *codeq.Queue) {
		queuetest.Produce(t, q, numbered(t, 3, nil)...)
		var charged, finished atomic.Int64
		stop := runBatches(t, q, codeq.BatchOptions{Linger: time.Second}, codeq.RunOptions{}, func(_ context.Context, jobs []*codeq.Job[string]) []error {
			errs := make([]error, len(jobs))
			for i, j := range jobs {
				_, errs[i] = codeq.Step(j.Context(), "charge", func(context.Context) (int, error) {
					charged.Add(1)
					return 1, nil
				})
				if errs[i] == nil && j.Args == "1" {
					errs[i] = codeq.Sleep(j.Context(), "a while", time.Hour)
				}
				if errs[i] == nil {
					finished.Add(1)
				}
			}
			return errs
		})
		time.Sleep(time.Minute)
		require.EqualValues(t, 2, finished.Load())
		time.Sleep(2 * time.Hour)
		require.NoError(t, stop())
		require.EqualValues(t, 3, finished.Load())
		require.EqualValues(t, 3, charged.Load())
		require.Zero(t, queuetest.CountsOf(t, q, "a"))
	})
}
