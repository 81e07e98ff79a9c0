package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/dispatch"
)

// TestEndOfContext: the error of a call whose ctx has ended matches how it ended, and the cause.
func TestEndOfContext(t *testing.T) {
	cause := errors.New("the user left")
	bubble(t, codeq.Options{Shards: 2, MinFreeBytes: -1}, func(t *testing.T, q *codeq.Queue) {
		sub, err := q.Subscribe(codeq.SubscribeOptions{})
		require.NoError(t, err)
		defer sub.Close()
		live := produce(t, q, codeq.Task{Queue: "live", RunAt: time.Now().Add(24 * time.Hour)})[0]
		for range 9 {
			produce(t, q, codeq.Task{Queue: "dead"})
			require.NoError(t, q.DeadLetter(t.Context(), claimNow(t, q, "dead").Receipt, nil))
		}
		var m codeq.Mux
		codeq.Handle(&m, "verbs", func(context.Context, *codeq.Job[[]byte]) error { return nil })
		tasks := []codeq.Task{{Queue: "verbs"}, {Queue: "verbs"}}
		verbs := verbsOf(t, q, &m, tasks, []codeq.ID{live, live})
		delete(verbs, "Run") // returns nil
		delete(verbs, "ServeLocal")
		for name := range verbs {
			if !takesContext(name) {
				delete(verbs, name)
			}
		}
		verbs["Next"] = func(ctx context.Context) error { _, err := sub.Next(ctx); return err }
		verbs["All"] = func(ctx context.Context) (err error) {
			for _, err = range sub.All(ctx) {
			}
			return err
		}
		// Those that wait.
		waiting := map[string]func(context.Context) error{
			"Claim": func(ctx context.Context) error {
				_, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"none"}})
				return err
			},
			"Claim of many": func(ctx context.Context) error {
				req := codeq.ClaimRequest{Max: 2}
				for i := range 2 * dispatch.ShortList {
					req.Queues = append(req.Queues, fmt.Sprint("none ", i))
				}
				_, err := q.ClaimBatch(ctx, req)
				return err
			},
			"Await":    func(ctx context.Context) error { _, err := q.Await(ctx, live); return err },
			"WaitIdle": func(ctx context.Context) error { return q.WaitIdle(ctx, "live") },
			"PurgeDead": func(ctx context.Context) error {
				_, err := q.PurgeDead(ctx, codeq.DeadFilter{Queue: "dead", Rate: 0.001})
				return err
			},
			"Next": func(ctx context.Context) error {
				for {
					if _, err := sub.Next(ctx); err != nil {
						return err
					}
				}
			},
		}
		matches := func(name string, err, how error) {
			require.ErrorIs(t, err, how, name)
			require.ErrorIs(t, err, cause, name)
		}
		ended, cancel := context.WithCancelCause(t.Context())
		cancel(cause)
		late, stop := context.WithDeadlineCause(t.Context(), time.Now().Add(-time.Second), cause)
		defer stop()
		for name, verb := range verbs {
			switch name {
			case "ClusterStatus", "AddNode", "RemoveNode", "ReplaceNode", "TransferLeadership", "Drain", "Undrain":
				continue // refused by a queue by itself
			}
			matches(name, verb(ended), context.Canceled)
			matches(name, verb(late), context.DeadlineExceeded)
		}
		for name, verb := range waiting {
			ctx, cancel := context.WithCancelCause(t.Context())
			time.AfterFunc(time.Second, func() { cancel(cause) })
			matches(name, verb(ctx), context.Canceled)
			if name == "PurgeDead" {
				continue // gives up before a deadline that is too near
			}
			ctx, stop := context.WithTimeoutCause(t.Context(), time.Second, cause)
			matches(name, verb(ctx), context.DeadlineExceeded)
			stop()
		}
	})
}
