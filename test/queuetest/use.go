package queuetest

import (
	"context"
	"errors"
	"iter"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/listing"
)

// UseEverything starts calls of a queue that are under way when it is closed; the caller then calls
// wait.
func UseEverything(t *testing.T, q *codeq.Queue) (wait func()) {
	ctx := context.Background()
	var m codeq.Mux
	var handled sync.WaitGroup
	const tasks = 300
	handled.Add(tasks)
	codeq.Handle(&m, "a", func(context.Context, *codeq.Job[[]byte]) error {
		handled.Done()
		return nil
	})
	var waiting sync.WaitGroup
	refused := func(name string, verb func() error) {
		waiting.Go(func() {
			if err := verb(); !errors.Is(err, codeq.ErrClosed) {
				t.Errorf("%s: %v", name, err)
			}
		})
	}
	refused("Run", func() error { return q.Run(ctx, &m, nil) })
	for range tasks { // some memtables full, so that stores flush
		_, err := q.Produce(ctx, codeq.Task{Queue: "a", Payload: make([]byte, 4<<10)})
		require.NoError(t, err)
	}
	handled.Wait()

	id, err := q.Produce(ctx, codeq.Task{Queue: "waits", RunAt: time.Now().Add(time.Hour)})
	require.NoError(t, err)
	sub, err := q.Subscribe(codeq.SubscribeOptions{})
	require.NoError(t, err)
	refused("Claim", func() error { _, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"b"}}); return err })
	refused("Await", func() error { _, err := q.Await(ctx, id); return err })
	refused("All", func() (err error) {
		for _, err = range sub.All(ctx) {
		}
		return err
	})
	refused("Next", func() error {
		for {
			if _, err := sub.Next(ctx); err != nil {
				return err
			}
		}
	})
	_, err = q.ProduceBatch(ctx, slices.Repeat([]codeq.Task{{Queue: "listed"}}, 3*listing.PageTasks))
	require.NoError(t, err)
	refused("WaitIdle", func() error { return q.WaitIdle(ctx, "listed") })
	for _, err := range q.List(ctx, codeq.ListOptions{State: codeq.Ready}) { // one that is not read to its end
		require.NoError(t, err)
		break
	}
	next, stop := iter.Pull2(q.List(ctx, codeq.ListOptions{State: codeq.Ready})) // one that Close overtakes
	_, err, ok := next()
	require.NoError(t, err)
	require.True(t, ok)
	require.NoError(t, q.Configure(ctx, "a", func(s *codeq.Settings) { s.Concurrency = 5 }))
	require.NoError(t, q.SetSchedule(ctx, codeq.Schedule{Name: "s", Every: time.Second, Task: codeq.Task{Queue: "s"}}))
	return func() {
		waiting.Wait()
		stop()
		sub.Close()
	}
}
