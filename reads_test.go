package codeq

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/keys"
	"codeq/internal/wire"
)

// TestListBeginsBehindTheConsumed: List of one queue's ready tasks reads the lanes of that
// queue only, each from its first ready task on.
func TestListBeginsBehindTheConsumed(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	q, err := Open(t.TempDir(), &Options{Shards: 1})
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	for i := range 50 {
		produce(t, q, Task{Queue: fmt.Sprint("other ", i)})
	}
	ids, err := q.ProduceBatch(ctx, slices.Repeat([]Task{{Queue: "a"}}, 100))
	require.NoError(t, err)
	for range 90 {
		l, err := q.Claim(ctx, ClaimRequest{Queues: []string{"a"}})
		require.NoError(t, err)
		require.NoError(t, q.Complete(ctx, l.Receipt, nil))
	}
	l := newLister(ListOptions{State: Ready, Queue: "a"})
	op := &readOp{completion: newCompletion(callRead), list: l}
	_, err = q.do(ctx, 0, op)
	require.NoError(t, err)
	s := q.shard(0)
	require.NoError(t, s.probe(func(s *shard) error {
		v := viewOf(s)
		defer v.close()
		l.Visit(&s.State, v.Snapshot)
		return nil
	}))
	r := wire.NewReader(l.Append(nil))
	require.True(t, r.Bool(), "it is known what there is to read")
	r.Uint()
	require.EqualValues(t, 1, r.Uint(), "lanes to read")
	first := ids[90]
	require.Equal(t, keys.AppendTask(nil, keys.LaneOf(first), keys.SinceOf(keys.ID(first)), first), r.Bytes())
	require.Len(t, collect(t, q.List(ctx, ListOptions{State: Ready, Queue: "a"})), 10)
}
