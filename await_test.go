package codeq

import (
	"codeq/internal/broadcast"
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
)

// awaited is what a call of Await has returned.
type Awaited struct {
	*Outcome
	Err error
}

// await calls Await, and returns when it waits or has returned.
func await(ctx context.Context, q *Queue, id ID) chan Awaited {
	c := make(chan Awaited, 1)
	go func() {
		o, err := q.Await(ctx, id)
		c <- Awaited{o, err}
	}()
	synctest.Wait()
	return c
}

// TestAwait: whoever waits for a task learns how it has ended, at that moment.
// Who asks later does so as long as the task is kept.
func TestAwait(t *testing.T) {
	ctx := context.Background()
	for _, shards := range []int{1, 3} {
		for _, retention := range []time.Duration{0, time.Hour} {
			t.Run(fmt.Sprint(shards, " shards, retention ", retention), func(t *testing.T) {
				bubble(t, Options{Shards: shards, Retention: retention}, func(t *testing.T, q *Queue) {
					for _, c := range []struct {
						name string
						task Task
						end  func(l *Lease) error
						want Outcome
						kept bool
					}{
						{"completed", Task{}, func(l *Lease) error {
							return q.Complete(ctx, l.Receipt, []byte("result"))
						}, Outcome{State: Done, Result: []byte("result"), Attempts: 1}, retention > 0},
						{"completed without a result", Task{}, func(l *Lease) error {
							return q.Complete(ctx, l.Receipt, nil)
						}, Outcome{State: Done, Attempts: 1}, retention > 0},
						{"completed later", Task{}, func(l *Lease) error {
							if err := q.Retry(ctx, l.Receipt, RetryOptions{Err: errors.New("not yet"), After: -1}); err != nil {
								return err
							}
							return q.Complete(ctx, claimNow(t, q, "completed later").Receipt, []byte("at last"))
						}, Outcome{State: Done, Result: []byte("at last"), Attempts: 2}, retention > 0},
						{"given up", Task{}, func(l *Lease) error {
							return q.DeadLetter(ctx, l.Receipt, errors.New("broken"))
						}, Outcome{State: Dead, LastError: "broken", Attempts: 1}, true},
						{"out of attempts", Task{MaxAttempts: 1}, func(l *Lease) error {
							return q.Retry(ctx, l.Receipt, RetryOptions{Err: errors.New("boom")})
						}, Outcome{State: Dead, LastError: "boom", Attempts: 1}, true},
						{"expired", Task{MaxAttempts: 1, LeaseFor: time.Second}, func(l *Lease) error {
							time.Sleep(time.Second)
							synctest.Wait()
							return nil
						}, Outcome{State: Dead, LastError: "lease expired", Attempts: 1}, true},
						{"canceled", Task{}, func(l *Lease) error {
							return q.Cancel(ctx, l.ID)
						}, Outcome{State: Canceled, Attempts: 1}, retention > 0},
					} {
						c.task.Queue = c.name
						id := produce(t, q, c.task)[0]
						whileReady := await(ctx, q, id)
						l := claimNow(t, q, c.name)
						whileLeased := await(ctx, q, id)
						require.Empty(t, whileReady)
						require.Empty(t, whileLeased)
						require.NoError(t, c.end(l))
						for _, waiting := range []chan Awaited{whileReady, whileLeased} {
							got := <-waiting
							require.NoError(t, got.Err, c.name)
							require.Equal(t, &c.want, got.Outcome, c.name)
						}
						got, err := q.Await(ctx, id)
						if !c.kept {
							require.ErrorIs(t, err, ErrNotFound, c.name)
							require.Nil(t, got)
							continue
						}
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
							require.Equal(t, Dead, info.State)
						}
					}
					require.NoError(t, q.checkMemory())
				})
			})
		}
	}
}

func allTasks(t *testing.T, q *Queue) map[ID]*TaskInfo {
	t.Helper()
	tasks, err := q.list()
	require.NoError(t, err)
	return tasks
}

// TestAwaitTasksThatWait: a task may be awaited that is scheduled or blocked,
// and that ends by the end of another.
func TestAwaitTasksThatWait(t *testing.T) {
	ctx := context.Background()
	for _, shards := range []int{1, 3} {
		bubble(t, Options{Shards: shards}, func(t *testing.T, q *Queue) {
			later := produce(t, q, Task{Queue: "later", RunAt: time.Now().Add(time.Hour)})[0]
			parent := produce(t, q, Task{Queue: "parent"})[0]
			child := produce(t, q, Task{Queue: "child", After: []ID{parent}})[0]
			last := produce(t, q, Task{Queue: "child", After: []ID{child}})[0]
			synctest.Wait()
			forLater, forChild, forLast := await(ctx, q, later), await(ctx, q, child), await(ctx, q, last)

			require.NoError(t, q.Cancel(ctx, parent))
			require.Equal(t, &Outcome{State: Canceled}, (<-forChild).Outcome)
			require.Equal(t, &Outcome{State: Canceled}, (<-forLast).Outcome)
			l, err := q.Claim(ctx, ClaimRequest{Queues: []string{"later"}})
			require.NoError(t, err)
			require.Empty(t, forLater)
			require.NoError(t, q.Complete(ctx, l.Receipt, nil))
			require.Equal(t, Done, (<-forLater).State)
		})
	}
}

// TestAwaitRedriven: a dead letter has ended; redriven, it ends anew. Purged, it
// is no more.
func TestAwaitRedriven(t *testing.T) {
	ctx := context.Background()
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		id := produce(t, q, Task{Queue: "a"})[0]
		require.NoError(t, q.DeadLetter(ctx, claimNow(t, q, "a").Receipt, errors.New("broken")))
		o, err := q.Await(ctx, id)
		require.NoError(t, err)
		require.Equal(t, Dead, o.State)
		require.NoError(t, q.RedriveDead(ctx, id))
		second := await(ctx, q, id)
		require.Empty(t, second)
		require.NoError(t, q.DeadLetter(ctx, claimNow(t, q, "a").Receipt, errors.New("again")))
		require.Equal(t, "again", (<-second).LastError)
		n, err := q.PurgeDead(ctx, DeadFilter{})
		require.NoError(t, err)
		require.Equal(t, 1, n)
		_, err = q.Await(ctx, id)
		require.ErrorIs(t, err, ErrNotFound)
	})
}

func TestAwaitUnknown(t *testing.T) {
	for _, shards := range []int{1, 3} {
		bubble(t, Options{Shards: shards}, func(t *testing.T, q *Queue) {
			for _, id := range []ID{{}, Nth(3), {1, 2, 3, 4, 5, 6, 0x70, 0, 0x80, 0xff, 0xff, 0xff}} {
				_, err := q.Await(context.Background(), id)
				require.ErrorIs(t, err, ErrNotFound)
				produce(t, q, Task{Queue: "a"})
			}
		})
	}
}

// TestAwaitEndsWithContext: who gives up is told why, before or while it waits,
// and the others go on waiting.
func TestAwaitEndsWithContext(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		id := produce(t, q, Task{Queue: "a"})[0]
		other := await(context.Background(), q, id)
		cause := errors.New("enough")
		ctx, cancel := context.WithTimeoutCause(context.Background(), time.Minute, cause)
		defer cancel()
		c := await(ctx, q, id)
		require.Empty(t, c)
		got := <-c
		require.ErrorIs(t, got.Err, cause)
		require.ErrorIs(t, got.Err, context.DeadlineExceeded)
		require.NotErrorIs(t, got.Err, ErrUncertain)
		require.Nil(t, got.Outcome)
		_, err := q.Await(ctx, id)
		require.ErrorIs(t, err, cause)
		require.Empty(t, other)
		require.NoError(t, q.Complete(context.Background(), claimNow(t, q, "a").Receipt, nil))
		require.Equal(t, Done, (<-other).State)
	})
}

// TestAwaitOverRestart: who waits when the queue is closed gets ErrClosed, and
// may wait again when it is open again.
func TestAwaitOverRestart(t *testing.T) {
	ctx := context.Background()
	synctest.Test(t, func(t *testing.T) {
		opts := Options{Shards: 3, fs: vfs.NewMem()}
		q, err := Open("queue", &opts)
		require.NoError(t, err)
		id := produce(t, q, Task{Queue: "a"})[0]
		c := await(ctx, q, id)
		require.NoError(t, q.Close())
		got := <-c
		require.ErrorIs(t, got.Err, ErrClosed)
		_, err = q.Await(ctx, id)
		require.ErrorIs(t, err, ErrClosed)

		q, err = Open("queue", &opts)
		require.NoError(t, err)
		c = await(ctx, q, id)
		require.Empty(t, c)
		require.NoError(t, q.Complete(ctx, claimNow(t, q, "a").Receipt, []byte("r")))
		require.Equal(t, "r", string((<-c).Result))
		require.NoError(t, q.Close())
	})
}

// TestAwaitInFailedShard: who waits for a task of a shard that fails is told.
func TestAwaitInFailedShard(t *testing.T) {
	ctx := context.Background()
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, Options{Shards: 1})
		id := produce(t, q, Task{Queue: "a"})[0]
		other := produce(t, q, Task{Queue: "b"})[0]
		l := claimNow(t, q, "a")
		atStake, c := await(ctx, q, id), await(ctx, q, other)
		failShard(t, q, 0)
		require.ErrorIs(t, q.Complete(ctx, l.Receipt, nil), ErrUncertain)
		require.ErrorIs(t, (<-atStake).Err, ErrUncertain, "it may have ended")
		require.ErrorIs(t, (<-c).Err, ErrFailed)
	})
}

// TestAwaitMany: a thousand callers wait for one task, and one for each of a
// thousand; each gets what is its own.
func TestAwaitMany(t *testing.T) {
	t.Parallel()
	const n = 1000
	ctx := context.Background()
	for _, shards := range []int{1, 3} {
		bubble(t, Options{Shards: shards}, func(t *testing.T, q *Queue) {
			one := produce(t, q, Task{Queue: "one"})[0]
			same := make(chan Awaited, n)
			each := make(chan error, n)
			for i := range n {
				go func() {
					o, err := q.Await(ctx, one)
					same <- Awaited{o, err}
				}()
				id := produce(t, q, Task{Queue: "many", Payload: fmt.Append(nil, i)})[0]
				go func() {
					o, err := q.Await(ctx, id)
					if err == nil && string(o.Result) != fmt.Sprint(i) {
						err = fmt.Errorf("task %d has the result %q", i, o.Result)
					}
					each <- err
				}()
			}
			synctest.Wait()
			for range n {
				l := claimNow(t, q, "many")
				require.NoError(t, q.Complete(ctx, l.Receipt, l.Payload))
			}
			require.Empty(t, same)
			result := []byte("result")
			require.NoError(t, q.Complete(ctx, claimNow(t, q, "one").Receipt, result))
			for range n {
				require.NoError(t, <-each)
				got := <-same
				require.NoError(t, got.Err)
				require.Equal(t, "result", string(got.Result))
			}
			for _, s := range q.led() {
				require.NoError(t, s.probe(func(s *shard) error {
					if !s.awaits.IsEmpty() {
						return errors.New("tasks are still awaited")
					}
					return nil
				}))
			}
		})
	}
}

// TestAwaitSweep: callers that have given up leave no memory behind, beyond a
// bound, and do not take those along that wait.
func TestAwaitSweep(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		const patient, impatient = 10, 5000
		ids := produce(t, q, Task{Queue: "a"}, Task{Queue: "b"})
		var waiting []chan Awaited
		for range patient {
			waiting = append(waiting, await(context.Background(), q, ids[0]))
		}
		most := 0
		for range impatient / 2 {
			ctx, cancel := context.WithTimeout(context.Background(), time.Second)
			for _, id := range ids {
				_, err := q.Await(ctx, id)
				require.ErrorIs(t, err, context.DeadlineExceeded)
			}
			cancel()
			require.NoError(t, q.shard(0).probe(func(s *shard) error {
				most = max(most, len(s.awaits.Of(ids[0]))+len(s.awaits.Of(ids[1])))
				return nil
			}))
		}
		require.LessOrEqual(t, most, 2*patient+broadcast.SweepMin+1)
		require.NoError(t, q.Complete(context.Background(), claimNow(t, q, "a").Receipt, nil))
		for _, c := range waiting {
			require.Equal(t, Done, (<-c).State)
		}
	})
}

// TestAwaitResultIsNotShared: a result belongs to the caller of Await. Neither
// who completed the task nor others who wait change it.
func TestAwaitResultIsNotShared(t *testing.T) {
	ctx := context.Background()
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		id := produce(t, q, Task{Queue: "a"})[0]
		first, second := await(ctx, q, id), await(ctx, q, id)
		result := []byte("result")
		require.NoError(t, q.Complete(ctx, claimNow(t, q, "a").Receipt, result))
		clear(result)
		got := <-first
		require.Equal(t, "result", string(got.Result))
		clear(got.Result)
		require.Equal(t, "result", string((<-second).Result))
	})
}
