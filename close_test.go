package codeq

import (
	"context"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"
)

// fillInbox makes the owner of a queue's only shard, which has an inbox of
// depth one, block in a commit, and fills the inbox.
func fillInbox(t *testing.T, q *Queue) (open chan struct{}, errs chan error) {
	t.Helper()
	open, errs = shut(t, q, 0), make(chan error, 2)
	for range 2 {
		go func() {
			_, err := q.Produce(context.Background(), Task{Queue: "a"})
			errs <- err
		}()
		synctest.Wait()
	}
	require.Equal(t, 1, q.shard(0).inbox.Len())
	return open, errs
}

// TestCallerGetsRoom: callers that wait for room are let in when there is some.
func TestCallerGetsRoom(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, Options{InboxDepth: 1})
		open, filled := fillInbox(t, q)
		const callers = 30
		errs := make(chan error, callers)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		for range callers {
			go func() {
				_, err := q.Produce(ctx, Task{Queue: "a"})
				errs <- err
			}()
		}
		synctest.Wait()
		require.Empty(t, errs)
		require.Equal(t, 1, q.shard(0).inbox.Len())
		close(open)
		for range callers {
			require.NoError(t, <-errs)
		}
		require.NoError(t, <-filled)
		require.NoError(t, <-filled)
		require.Equal(t, Counts{Ready: 2 + callers}, countsOf(t, q, "a"))
	})
}
