package codeq

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/call"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
)

// TestLargestBatch: a batch at the limits is one commit, whatever it is large by.
func TestLargestBatch(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	q, err := Open("q", inspect.With(&Options{Shards: 1, Limits: Limits{Parents: 40_000}}, inspect.Private{FS: crashfs.New()}))
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	parent := produce(t, q, Task{Queue: "p"})[0]
	counting := &countingCommitter{}
	require.NoError(t, q.shard(0).probe(func(s *shard) error {
		counting.committer, s.commit = s.commit, counting
		return nil
	}))
	siblings := make([]ID, 200)
	for i := range siblings {
		siblings[i] = Nth(i)
	}
	tasks := make([]Task, 400)
	for i := range tasks {
		tasks[i] = Task{Queue: "a", Tenant: fmt.Sprint(i), After: []ID{parent}}
		if i >= 200 {
			tasks[i].After = siblings[:199]
		}
	}
	_, err = q.ProduceBatch(ctx, tasks)
	require.NoError(t, err)
	require.NoError(t, q.checkAll())
	var cost call.BatchCost
	for i := range tasks {
		n := prepare(&tasks[i], nil)
		require.NoError(t, cost.Add(&n, call.MaxBatchLimits))
	}
	st, err := q.StorageStats()
	require.NoError(t, err)
	require.LessOrEqual(t, st.Shards[0].Upkeep[UpkeepCommit].MaxBytes, int64(cost.Bytes), "the cost is not underestimated")
	require.GreaterOrEqual(t, counting.largest, uint32(400*2+200*200))
}
