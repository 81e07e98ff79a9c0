package codeq

import (
	"context"
	"errors"
	"runtime"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/engine"
)

// TestCallMissesNoEnd: the task of a call ends before its caller goes on after the produce, and so
// many others do that the shard does not remember how.
func TestCallMissesNoEnd(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		ctx := t.Context()
		op, shard, err := q.prepareOne(ctx, &Task{Queue: "called"})
		require.NoError(t, err)
		end, err := q.backend.call(ctx, shard, op)
		require.NoError(t, err)
		l := claimNow(t, q, "called")
		require.NoError(t, q.Complete(ctx, l.Receipt, []byte("result")))
		for range 5 {
			_, err := q.ProduceBatch(ctx, slices.Repeat([]Task{{Queue: "other"}}, 1000))
			require.NoError(t, err)
			leases, err := q.ClaimBatch(ctx, ClaimRequest{Queues: []string{"other"}, Max: 1000})
			require.NoError(t, err)
			completions := make([]Completion, len(leases))
			for i := range leases {
				completions[i].Receipt = leases[i].Receipt
			}
			require.NoError(t, q.CompleteBatch(ctx, completions))
		}
		_, err = q.Await(ctx, l.ID)
		require.ErrorIs(t, err, ErrNotFound)
		o, err := end(ctx)
		require.NoError(t, err)
		require.Equal(t, "result", string(o.Result))
	})
}

// leftCalls counts the calls that nobody waits for any more.
type leftCalls struct {
	backend
	n int
}

func (b *leftCalls) call(ctx context.Context, shard int, op *produceOp) (endOfTask, error) {
	end, err := b.backend.call(ctx, shard, op)
	return func(ctx context.Context) (*engine.Outcome, error) {
		if ctx.Err() != nil {
			b.n++
		}
		return end(ctx)
	}, err
}

// TestCallIsLeft: a call gives up its wait if a middleware does not come to it.
func TestCallIsLeft(t *testing.T) {
	var after func() error
	mw := func(next ProduceFunc) ProduceFunc {
		return func(ctx context.Context, p Producing) ([]ID, error) {
			ids, err := next(ctx, p)
			require.NoError(t, err)
			return ids, after()
		}
	}
	bubble(t, Options{Shards: 1, Producing: []ProduceMiddleware{mw}}, func(t *testing.T, q *Queue) {
		left := &leftCalls{backend: q.backend}
		q.backend = left
		for i, after1 := range []func() error{
			func() error { return errors.New("after next") },
			func() error { panic("of a middleware") },
			func() error { runtime.Goexit(); return nil },
		} {
			after = after1
			ended := make(chan any)
			go func() {
				defer func() { ended <- recover() }()
				_, err := Call[int](t.Context(), q, Task{Queue: "a"})
				require.Error(t, err)
			}()
			<-ended
			require.Equal(t, i+1, left.n)
		}
	})
}
