package codeq

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/engine"
)

// TestEndsOfAttemptsReadNothing: the end of an attempt reads the task's record from memory if it is small, and
// as long as all copies together are; else from disk.
func TestEndsOfAttemptsReadNothing(t *testing.T) {
	for _, c := range []struct {
		name  string
		size  int
		full  bool // other copies take all of the memory
		reads bool
	}{
		{"small", 100, false, false},
		{"large", engine.CopyCap, false, true},
		{"beyond the bound", 100, true, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
				fill := func(n int) {
					require.NoError(t, q.shard(0).probe(func(s *shard) error {
						if c.full {
							s.Probe().HoldCopies(n)
						}
						return nil
					}))
				}
				fill(engine.CopiesCap)
				ends := map[string]func(context.Context, Receipt) error{
					"kept":     func(ctx context.Context, r Receipt) error { return q.Complete(ctx, r, []byte("result")) },
					"retried":  func(ctx context.Context, r Receipt) error { return q.Retry(ctx, r, RetryOptions{}) },
					"dead":     func(ctx context.Context, r Receipt) error { return q.DeadLetter(ctx, r, errors.New("given up")) },
					"released": func(ctx context.Context, r Receipt) error { return q.Release(ctx, r, 0) },
				}
				for name, end := range ends {
					task := Task{Queue: name, Payload: make([]byte, c.size), Retention: Forever}
					produce(t, q, task)
					l := claimNow(t, q, name)
					l.Payload[0] = 'x' // it is the worker's
					before := q.readsOf(t)
					require.NoError(t, end(t.Context(), l.Receipt))
					require.Equal(t, c.reads, q.readsOf(t) > before, name)
					info, err := q.Get(t.Context(), l.ID)
					require.NoError(t, err)
					require.Equal(t, task.Payload, info.Payload)
				}
				fill(-engine.CopiesCap)
				requireSettled(t, q)
			})
		})
	}
}

// readsOf is how many entries the owner of the only shard has read.
func (q *Queue) readsOf(t *testing.T) (n int) {
	require.NoError(t, q.shard(0).probe(func(s *shard) error { n = s.Probe().Usage().Read; return nil }))
	return n
}
