package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/entries"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/test/queuetest"
)

// awaited is the result of a call of Await.
type awaited struct {
	*codeq.Outcome
	err error
}

// await calls Await, and returns when the call waits or has returned.
func await(ctx context.Context, q *codeq.Queue, id codeq.ID) chan awaited {
	c := make(chan awaited, 1)
	go func() {
		o, err := q.Await(ctx, id)
		c <- awaited{o, err}
	}()
	synctest.Wait()
	return c
}

// TestAwait: a call that waits for a task returns its outcome at the moment when the task ends. A
// later call returns the outcome, too, even if the task is not kept.
func TestAwait(t *testing.T) {
	ctx := context.Background()
	for _, shards := range []int{1, 3} {
		for _, retention := range []time.Duration{0, time.Hour} {
			t.Run(fmt.Sprint(shards, " shards, retention ", retention), func(t *testing.T) {
				queuetest.Bubble(t, codeq.Options{Shards: shards, Retention: retention}, func(t *testing.T, q *codeq.Queue) {
					for _, c := range []struct {
						name string
						task codeq.Task
						end  func(l *codeq.Lease) error
						want codeq.Outcome
						kept bool
					}{
						{"completed", codeq.Task{}, func(l *codeq.Lease) error {
							return q.Complete(ctx, l.Receipt, []byte("result"))
						}, codeq.Outcome{State: codeq.Done, Result: []byte("result"), Attempts: 1}, retention > 0},
						{"completed without a result", codeq.Task{}, func(l *codeq.Lease) error {
							return q.Complete(ctx, l.Receipt, nil)
						}, codeq.Outcome{State: codeq.Done, Attempts: 1}, retention > 0},
						{"completed later", codeq.Task{}, func(l *codeq.Lease) error {
							if err := q.Retry(ctx, l.Receipt, codeq.RetryOptions{Err: errors.New("not yet"), After: -1}); err != nil {
								return err
							}
							return q.Complete(ctx, queuetest.ClaimNow(t, q, "completed later").Receipt, []byte("at last"))
						}, codeq.Outcome{State: codeq.Done, Result: []byte("at last"), Attempts: 2}, retention > 0},
						{"given up", codeq.Task{}, func(l *codeq.Lease) error {
							return q.DeadLetter(ctx, l.Receipt, errors.New("broken"))
						}, codeq.Outcome{State: codeq.Dead, LastError: "broken", Attempts: 1}, true},
						{"out of attempts", codeq.Task{MaxAttempts: 1}, func(l *codeq.Lease) error {
							return q.Retry(ctx, l.Receipt, codeq.RetryOptions{Err: errors.New("boom")})
						}, codeq.Outcome{State: codeq.Dead, LastError: "boom", Attempts: 1}, true},
						{"expired", codeq.Task{MaxAttempts: 1, LeaseFor: time.Second}, func(l *codeq.Lease) error {
							time.Sleep(time.Second)
							synctest.Wait()
							return nil
						}, codeq.Outcome{State: codeq.Dead, LastError: "lease expired", Attempts: 1}, true},
						{"canceled", codeq.Task{}, func(l *codeq.Lease) error {
							return q.Cancel(ctx, l.ID)
						}, codeq.Outcome{State: codeq.Canceled, Attempts: 1}, retention > 0},
					} {
						c.task.Queue = c.name
						id := queuetest.Produce(t, q, c.task)[0]
						whileReady := await(ctx, q, id)
						l := queuetest.ClaimNow(t, q, c.name)
						whileLeased := await(ctx, q, id)
						require.Empty(t, whileReady)
						require.Empty(t, whileLeased)
						require.NoError(t, c.end(l))
						for _, waiting := range []chan awaited{whileReady, whileLeased} {
							got := <-waiting
							require.NoError(t, got.err, c.name)
							require.Equal(t, &c.want, got.Outcome, c.name)
						}
						if !c.kept {
							_, err := q.Get(ctx, id)
							require.ErrorIs(t, err, codeq.ErrNotFound, c.name)
						}
						got, err := q.Await(ctx, id)
						require.NoError(t, err, c.name)
						require.Equal(t, len(c.want.Result), len(got.Result))
						got.Result = c.want.Result // nil or empty
						require.Equal(t, &c.want, got, c.name)
					}
					if retention > 0 {
						time.Sleep(2 * retention)
						for id := range allTasks(t, q) {
							info, err := q.Get(ctx, id)
							require.NoError(t, err)
							require.Equal(t, codeq.Dead, info.State)
						}
					}
					require.NoError(t, queuetest.CheckMemory(q))
				})
			})
		}
	}
}

func allTasks(t *testing.T, q *codeq.Queue) map[codeq.ID]*codeq.TaskInfo {
	t.Helper()
	tasks, err := queuetest.List(q)
	require.NoError(t, err)
	return tasks
}

// TestAwaitTasksThatWait: Await accepts a scheduled or blocked task, and a task that ends with
// another task.
func TestAwaitTasksThatWait(t *testing.T) {
	ctx := context.Background()
	for _, shards := range []int{1, 3} {
		queuetest.Bubble(t, codeq.Options{Shards: shards}, func(t *testing.T, q *codeq.Queue) {
			later := queuetest.Produce(t, q, codeq.Task{Queue: "later", RunAt: time.Now().Add(time.Hour)})[0]
			parent := queuetest.Produce(t, q, codeq.Task{Queue: "parent"})[0]
			child := queuetest.Produce(t, q, codeq.Task{Queue: "child", After: []codeq.ID{parent}})[0]
			last := queuetest.Produce(t, q, codeq.Task{Queue: "child", After: []codeq.ID{child}})[0]
			synctest.Wait()
			forLater, forChild, forLast := await(ctx, q, later), await(ctx, q, child), await(ctx, q, last)

			require.NoError(t, q.Cancel(ctx, parent))
			require.Equal(t, &codeq.Outcome{State: codeq.Canceled}, (<-forChild).Outcome)
			require.Equal(t, &codeq.Outcome{State: codeq.Canceled}, (<-forLast).Outcome)
			l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"later"}})
			require.NoError(t, err)
			require.Empty(t, forLater)
			require.NoError(t, q.Complete(ctx, l.Receipt, nil))
			require.Equal(t, codeq.Done, (<-forLater).State)
		})
	}
}

// TestAwaitLate: for about ten minutes, Await returns the outcome of an ended task that is not
// kept, but not after a restart. For a kept task, Await returns ErrNotFound after the retention.
func TestAwaitLate(t *testing.T) {
	ctx := context.Background()
	synctest.Test(t, func(t *testing.T) {
		opts := *queuetest.OnDisk(crashfs.New(), &codeq.Options{Shards: 3})
		q, err := codeq.Open("queue", &opts)
		require.NoError(t, err)
		task := codeq.Task{Queue: "a"}
		kept := codeq.Task{Queue: "a", Retention: time.Second}
		ids := queuetest.Produce(t, q, task, task, kept)
		for range ids {
			l := queuetest.ClaimNow(t, q, "a")
			if l.ID == ids[1] {
				require.NoError(t, q.Cancel(ctx, l.ID))
				continue
			}
			require.NoError(t, q.Complete(ctx, l.Receipt, []byte("result")))
		}
		done := &codeq.Outcome{State: codeq.Done, Result: []byte("result"), Attempts: 1}
		ends := []*codeq.Outcome{done, {State: codeq.Canceled, Attempts: 1}, done}
		for i, id := range ids {
			o, err := q.Await(ctx, id)
			require.NoError(t, err)
			require.Equal(t, ends[i], o)
		}
		time.Sleep(9 * time.Minute)
		o, err := q.Await(ctx, ids[0])
		require.NoError(t, err)
		require.Equal(t, done, o)
		_, err = q.Await(ctx, ids[2])
		require.ErrorIs(t, err, codeq.ErrNotFound)
		time.Sleep(2 * time.Minute)
		_, err = q.Await(ctx, ids[0])
		require.ErrorIs(t, err, codeq.ErrNotFound)

		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		require.NoError(t, q.Complete(ctx, queuetest.ClaimNow(t, q, "a").Receipt, nil))
		require.NoError(t, q.Close())
		q, err = codeq.Open("queue", &opts)
		require.NoError(t, err)
		_, err = q.Await(ctx, id)
		require.ErrorIs(t, err, codeq.ErrNotFound)
		require.NoError(t, q.Close())
	})
}

// TestAwaitRedriven: a dead letter has ended, and Await returns its outcome. After a redrive, Await
// waits for the next end. After a purge, it returns ErrNotFound.
func TestAwaitRedriven(t *testing.T) {
	ctx := context.Background()
	queuetest.Bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		require.NoError(t, q.DeadLetter(ctx, queuetest.ClaimNow(t, q, "a").Receipt, errors.New("broken")))
		o, err := q.Await(ctx, id)
		require.NoError(t, err)
		require.Equal(t, codeq.Dead, o.State)
		require.NoError(t, q.RedriveDead(ctx, id))
		second := await(ctx, q, id)
		require.Empty(t, second)
		require.NoError(t, q.DeadLetter(ctx, queuetest.ClaimNow(t, q, "a").Receipt, errors.New("again")))
		require.Equal(t, "again", (<-second).LastError)
		n, err := q.PurgeDead(ctx, codeq.DeadFilter{})
		require.NoError(t, err)
		require.Equal(t, 1, n)
		_, err = q.Await(ctx, id)
		require.ErrorIs(t, err, codeq.ErrNotFound)
	})
}

func TestAwaitUnknown(t *testing.T) {
	for _, shards := range []int{1, 3} {
		queuetest.Bubble(t, codeq.Options{Shards: shards}, func(t *testing.T, q *codeq.Queue) {
			for _, id := range []codeq.ID{{}, codeq.Nth(3), {1, 2, 3, 4, 5, 6, 0x70, 0, 0x80, 0xff, 0xff, 0xff}} {
				_, err := q.Await(context.Background(), id)
				require.ErrorIs(t, err, codeq.ErrNotFound)
				queuetest.Produce(t, q, codeq.Task{Queue: "a"})
			}
		})
	}
}

// TestAwaitOverRestart: a call that waits while the queue is closed returns ErrClosed. After the
// next Open, a new call can wait for the same task.
func TestAwaitOverRestart(t *testing.T) {
	ctx := context.Background()
	synctest.Test(t, func(t *testing.T) {
		opts := *queuetest.OnDisk(crashfs.New(), &codeq.Options{Shards: 3})
		q, err := codeq.Open("queue", &opts)
		require.NoError(t, err)
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		c := await(ctx, q, id)
		require.NoError(t, q.Close())
		got := <-c
		require.ErrorIs(t, got.err, codeq.ErrClosed)
		_, err = q.Await(ctx, id)
		require.ErrorIs(t, err, codeq.ErrClosed)

		q, err = codeq.Open("queue", &opts)
		require.NoError(t, err)
		c = await(ctx, q, id)
		require.Empty(t, c)
		require.NoError(t, q.Complete(ctx, queuetest.ClaimNow(t, q, "a").Receipt, []byte("r")))
		require.Equal(t, "r", string((<-c).Result))
		require.NoError(t, q.Close())
	})
}

// TestAwaitInFailedShard: when a shard fails, the calls that wait for its tasks return an error.
func TestAwaitInFailedShard(t *testing.T) {
	ctx := context.Background()
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Shards: 1})
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		other := queuetest.Produce(t, q, codeq.Task{Queue: "b"})[0]
		l := queuetest.ClaimNow(t, q, "a")
		atStake, c := await(ctx, q, id), await(ctx, q, other)
		queuetest.FailShard(t, q, 0)
		require.ErrorIs(t, q.Complete(ctx, l.Receipt, nil), codeq.ErrUncertain)
		require.ErrorIs(t, (<-atStake).err, codeq.ErrUncertain, "it may have ended")
		require.ErrorIs(t, (<-c).err, codeq.ErrFailed)
	})
}

// TestAwaitSweep: abandoned calls leave a bounded amount of memory behind, and the sweep does not
// remove calls that still wait.
func TestAwaitSweep(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		const patient, impatient = 10, 5000
		ids := queuetest.Produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "b"})
		waiting := make(chan error, patient)
		for range patient {
			go func() {
				o, err := q.Await(context.Background(), ids[0])
				if err == nil && o.State != codeq.Done {
					err = fmt.Errorf("the task is %s", o.State)
				}
				waiting <- err
			}()
		}
		synctest.Wait()
		most := 0
		for range impatient / 2 {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			for _, id := range ids {
				_, err := q.Await(ctx, id)
				require.ErrorIs(t, err, context.DeadlineExceeded)
			}
			cancel()
			require.NoError(t, inspect.Of(q).Owner(0, func(s *inspect.Owner) error {
				most = max(most, s.Awaiting(keys.ID(ids[0]))+s.Awaiting(keys.ID(ids[1])))
				return nil
			}))
		}
		require.LessOrEqual(t, most, 2*patient+entries.SweepMin+1)
		require.NoError(t, q.Complete(context.Background(), queuetest.ClaimNow(t, q, "a").Receipt, nil))
		for range patient {
			require.NoError(t, <-waiting)
		}
	})
}

func TestWaitIdle(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 3}, func(t *testing.T, q *codeq.Queue) {
		ctx := context.Background()
		require.NoError(t, q.WaitIdle(ctx), "a queue without tasks is idle")
		queuetest.Produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "b"}, codeq.Task{Queue: "later", RunAt: time.Now().Add(time.Hour)})
		idle := make(chan string, 3)
		wait := func(name string, queues ...string) {
			go func() {
				if q.WaitIdle(ctx, queues...) == nil {
					idle <- name
				}
			}()
			synctest.Wait()
		}
		wait("a", "a")
		wait("a and b", "a", "b")
		wait("all")
		short, cancel := context.WithTimeout(ctx, time.Second)
		require.ErrorIs(t, q.WaitIdle(short, "b"), context.DeadlineExceeded)
		cancel()

		a := queuetest.ClaimNow(t, q, "a")
		synctest.Wait()
		require.Empty(t, idle, "a leased task is not done")
		require.NoError(t, q.Complete(ctx, a.Receipt, nil, codeq.Task{Queue: "a"}))
		synctest.Wait()
		require.Empty(t, idle, "its follow-up is not done")
		require.NoError(t, q.Complete(ctx, queuetest.ClaimNow(t, q, "a").Receipt, nil))
		require.Equal(t, "a", <-idle)
		require.NoError(t, q.DeadLetter(ctx, queuetest.ClaimNow(t, q, "b").Receipt, errors.New("no")))
		require.Equal(t, "a and b", <-idle)
		l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"later"}})
		require.NoError(t, err)
		require.Empty(t, idle)
		require.NoError(t, q.Complete(ctx, l.Receipt, nil))
		require.Equal(t, "all", <-idle)
	})
}

func TestWaitIdleEndsWithClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, err := codeq.Open("queue", queuetest.OnDisk(crashfs.New(), &codeq.Options{Shards: 2}))
		require.NoError(t, err)
		queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		ended := make(chan error)
		go func() { ended <- q.WaitIdle(context.Background()) }()
		synctest.Wait()
		require.NoError(t, q.Close())
		require.ErrorIs(t, <-ended, codeq.ErrClosed)
	})
}
