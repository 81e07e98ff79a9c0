package codeq

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
)

// TestLifeOfATask follows one task through every state.
func TestLifeOfATask(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		q, err := Open("q", &Options{Shards: 2, Retention: time.Hour, fs: vfs.NewMem()})
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		state := func(id ID) State {
			info, err := q.Get(ctx, id)
			require.NoError(t, err)
			require.NoError(t, q.checkAll())
			require.NoError(t, q.checkMemory())
			return info.State
		}

		id, err := q.Produce(ctx, Task{
			Queue: "a", Payload: []byte("x"), Headers: map[string]string{"k": "v"}, Tenant: "t", Priority: 3, MaxAttempts: 4,
			RunAt: time.Now().Add(time.Minute),
		})
		require.NoError(t, err)
		require.Equal(t, Scheduled, state(id))
		l, err := q.Claim(ctx, ClaimRequest{Queues: []string{"a"}}) // waits for a minute
		require.NoError(t, err)
		require.Equal(t, id, l.ID)
		require.Equal(t, 1, l.Attempt)
		require.Equal(t, "x", string(l.Payload))
		require.Equal(t, "v", l.Headers["k"])
		require.Equal(t, Leased, state(id))
		require.NoError(t, q.Retry(ctx, l.Receipt, RetryOptions{Err: errors.New("boom"), After: -1}))
		require.Equal(t, Ready, state(id))

		l2, err := q.Claim(ctx, ClaimRequest{Queues: []string{"a"}})
		require.NoError(t, err)
		require.Equal(t, 2, l2.Attempt)
		require.Equal(t, "boom", l2.LastError)
		require.ErrorIs(t, q.Complete(ctx, l.Receipt, nil), ErrLeaseLost)
		time.Sleep(30 * time.Second)
		synctest.Wait()
		require.ErrorIs(t, q.Complete(ctx, l2.Receipt, nil), ErrLeaseLost)
		require.Equal(t, Ready, state(id))

		l3, err := q.Claim(ctx, ClaimRequest{Queues: []string{"a"}, NoWait: true})
		require.NoError(t, err)
		require.Equal(t, 3, l3.Attempt)
		require.NoError(t, q.Complete(ctx, l3.Receipt, []byte("r"), Task{Queue: "b"}))
		require.Equal(t, Done, state(id))
		info, err := q.Get(ctx, id)
		require.NoError(t, err)
		require.Equal(t, "r", string(info.Result))
		counts, err := q.Stats(ctx)
		require.NoError(t, err)
		require.Equal(t, map[string]Counts{"a": {Done: 1}, "b": {Ready: 1}}, counts)

		l4, err := q.Claim(ctx, ClaimRequest{Queues: []string{"a", "b"}})
		require.NoError(t, err)
		require.Equal(t, id.shard(2), l4.ID.shard(2), "a follow-up lies beside its parent")
		require.NoError(t, q.DeadLetter(ctx, l4.Receipt, errors.New("given up")))
		require.Equal(t, Dead, state(l4.ID))

		time.Sleep(time.Hour * 9 / 8) // the end of the bucket in which it is kept
		synctest.Wait()
		_, err = q.Get(ctx, id)
		require.ErrorIs(t, err, ErrNotFound)
		require.NoError(t, q.checkAll())
	})
}
