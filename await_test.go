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
