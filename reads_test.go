package codeq

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/keys"
	"codeq/internal/wire"
)

// fillQueue produces tasks into a queue, and leases some of them.
func fillQueue(t *testing.T, q *Queue, queue string, tasks, leases int) (ids []ID) {
	t.Helper()
	ctx := context.Background()
	for len(ids) < tasks {
		batch := make([]Task, min(1000, tasks-len(ids)))
		for i := range batch {
			batch[i] = Task{Queue: queue, Payload: []byte("x")}
		}
		made, err := q.ProduceBatch(ctx, batch)
		require.NoError(t, err)
		ids = append(ids, made...)
	}
	for n := 0; n < leases; {
		got, err := q.ClaimBatch(ctx, ClaimRequest{Queues: []string{queue}, Max: min(1000, leases-n), LeaseFor: time.Hour})
		require.NoError(t, err)
		n += len(got)
	}
	return ids
}

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
	ids := fillQueue(t, q, "a", 100, 0)
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
