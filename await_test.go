package codeq

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/broadcast"
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
		require.LessOrEqual(t, most, 2*patient+broadcast.SweepMin+1)
		require.NoError(t, q.Complete(context.Background(), claimNow(t, q, "a").Receipt, nil))
		for range patient {
			require.NoError(t, <-waiting)
		}
	})
}
