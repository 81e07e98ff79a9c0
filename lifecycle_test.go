package codeq_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
)

// TestLifeOfATask follows one task through every state.
func TestLifeOfATask(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		q, err := codeq.Open("q", onDisk(crashfs.New(), &codeq.Options{Shards: 2, Retention: time.Hour}))
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		state := func(id codeq.ID) codeq.State {
			info, err := q.Get(ctx, id)
			require.NoError(t, err)
			require.NoError(t, checkAll(q))
			require.NoError(t, checkMemory(q))
			return info.State
		}

		id, err := q.Produce(ctx, codeq.Task{
			Queue: "a", Payload: []byte("x"), Headers: map[string]string{"k": "v"}, Tenant: "t", Priority: 3, MaxAttempts: 4,
			RunAt: time.Now().Add(time.Minute),
		})
		require.NoError(t, err)
		require.Equal(t, codeq.Scheduled, state(id))
		l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}}) // waits for a minute
		require.NoError(t, err)
		require.Equal(t, id, l.ID)
		require.Equal(t, 1, l.Attempt)
		require.Equal(t, "x", string(l.Payload))
		require.Equal(t, "v", l.Headers["k"])
		require.Equal(t, codeq.Leased, state(id))
		require.NoError(t, q.Retry(ctx, l.Receipt, codeq.RetryOptions{Err: errors.New("boom"), After: -1}))
		require.Equal(t, codeq.Ready, state(id))

		l2, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}})
		require.NoError(t, err)
		require.Equal(t, 2, l2.Attempt)
		require.Equal(t, "boom", l2.LastError)
		require.ErrorIs(t, q.Complete(ctx, l.Receipt, nil), codeq.ErrLeaseLost)
		time.Sleep(30 * time.Second)
		synctest.Wait()
		require.ErrorIs(t, q.Complete(ctx, l2.Receipt, nil), codeq.ErrLeaseLost)
		require.Equal(t, codeq.Ready, state(id))

		l3, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}, NoWait: true})
		require.NoError(t, err)
		require.Equal(t, 3, l3.Attempt)
		require.NoError(t, q.Complete(ctx, l3.Receipt, []byte("r"), codeq.Task{Queue: "b"}))
		require.Equal(t, codeq.Done, state(id))
		info, err := q.Get(ctx, id)
		require.NoError(t, err)
		require.Equal(t, "r", string(info.Result))
		counts, err := q.Stats(ctx)
		require.NoError(t, err)
		require.Equal(t, map[string]codeq.Counts{"a": {Done: 1}, "b": {Ready: 1}}, counts)

		l4, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a", "b"}})
		require.NoError(t, err)
		require.Equal(t, shardOf(id, 2), shardOf(l4.ID, 2), "a follow-up lies beside its parent")
		require.NoError(t, q.DeadLetter(ctx, l4.Receipt, errors.New("given up")))
		require.Equal(t, codeq.Dead, state(l4.ID))

		time.Sleep(time.Hour * 9 / 8) // the end of the bucket in which it is kept
		synctest.Wait()
		_, err = q.Get(ctx, id)
		require.ErrorIs(t, err, codeq.ErrNotFound)
		require.NoError(t, checkAll(q))
	})
}
