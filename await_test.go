package codeq

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/entries"
)

// TestAwaitMany: a thousand callers wait for one task, and one for each of a
// thousand; each gets what is its own.
func TestAwaitMany(t *testing.T) {
	t.Parallel()
	const n = 1000
	ctx := context.Background()
	for _, shards := range []int{1, 3} {
		bubble(t, Options{Shards: shards}, func(t *testing.T, q *Queue) {
			one := produce(t, q, Task{Queue: "one"})[0]
			same := make(chan error, n)
			each := make(chan error, n)
			for i := range n {
				go func() {
					o, err := q.Await(ctx, one)
					if err == nil && string(o.Result) != "result" {
						err = fmt.Errorf("the task of all has the result %q", o.Result)
					}
					same <- err
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
				require.NoError(t, <-same)
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
		waiting := make(chan error, patient)
		for range patient {
			go func() {
				o, err := q.Await(context.Background(), ids[0])
				if err == nil && o.State != Done {
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
			require.NoError(t, q.shard(0).probe(func(s *shard) error {
				most = max(most, len(s.awaits.Of(ids[0]))+len(s.awaits.Of(ids[1])))
				return nil
			}))
		}
		require.LessOrEqual(t, most, 2*patient+entries.SweepMin+1)
		require.NoError(t, q.Complete(context.Background(), claimNow(t, q, "a").Receipt, nil))
		for range patient {
			require.NoError(t, <-waiting)
		}
	})
}

// TestWaitsOutlastLeaders: calls that wait on purpose go on over a time without a leader, also if
// they begin in it, and end with their ctx.
func TestWaitsOutlastLeaders(t *testing.T) {
	t.Parallel()
	simCase(t, Options{}, func(t *testing.T, c *simCluster) {
		_, other := c.lead()
		q := simQueue(other)
		id := produce(t, q, Task{Queue: "a"})[0]
		outcomes := make(chan error, 6)
		wait := func(ctx context.Context) {
			for _, verb := range []func() error{
				func() error { _, err := q.Await(ctx, id); return err },
				func() error { return q.WaitIdle(ctx) },
				func() error { _, err := q.Claim(ctx, ClaimRequest{Queues: []string{"later"}}); return err },
			} {
				go func() { outcomes <- verb() }()
			}
		}
		wait(t.Context())
		synctest.Wait()
		pause := func(paused bool) {
			for _, n := range c.members() {
				if n != other {
					c.net.Pause(n.name, paused)
				}
			}
		}
		pause(true)
		time.Sleep(2 * simCallTimeout)
		wait(t.Context())
		time.Sleep(4 * simCallTimeout)
		require.Empty(t, outcomes)

		ctx, cancel := context.WithTimeout(t.Context(), 2*simCallTimeout)
		defer cancel()
		wait(ctx)
		for range 3 {
			require.ErrorIs(t, <-outcomes, context.DeadlineExceeded)
		}
		require.Equal(t, context.DeadlineExceeded, ctx.Err())
		require.Empty(t, outcomes)

		pause(false)
		require.NoError(t, q.WaitReady(t.Context()))
		l, err := q.Claim(t.Context(), ClaimRequest{Queues: []string{"a"}})
		require.NoError(t, err)
		require.NoError(t, q.Complete(t.Context(), l.Receipt, nil))
		for range 4 { // Await, WaitIdle
			require.NoError(t, <-outcomes)
		}
		for range 2 {
			produce(t, q, Task{Queue: "later"})
			require.NoError(t, <-outcomes)
		}
	})
}
