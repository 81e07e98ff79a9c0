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

func TestWaitIdle(t *testing.T) {
	bubble(t, codeq.Options{Shards: 3}, func(t *testing.T, q *codeq.Queue) {
		ctx := context.Background()
		require.NoError(t, q.WaitIdle(ctx), "a queue without tasks is idle")
		produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "b"}, codeq.Task{Queue: "later", RunAt: time.Now().Add(time.Hour)})
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

		a := claimNow(t, q, "a")
		synctest.Wait()
		require.Empty(t, idle, "a leased task is not done")
		require.NoError(t, q.Complete(ctx, a.Receipt, nil, codeq.Task{Queue: "a"}))
		synctest.Wait()
		require.Empty(t, idle, "its follow-up is not done")
		require.NoError(t, q.Complete(ctx, claimNow(t, q, "a").Receipt, nil))
		require.Equal(t, "a", <-idle)
		require.NoError(t, q.DeadLetter(ctx, claimNow(t, q, "b").Receipt, errors.New("no")))
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
		q, err := codeq.Open("queue", onDisk(crashfs.New(), &codeq.Options{Shards: 2}))
		require.NoError(t, err)
		produce(t, q, codeq.Task{Queue: "a"})
		ended := make(chan error)
		go func() { ended <- q.WaitIdle(context.Background()) }()
		synctest.Wait()
		require.NoError(t, q.Close())
		require.ErrorIs(t, <-ended, codeq.ErrClosed)
	})
}
