package codeq

import (
	"context"
	"flag"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/engine"
	"codeq/internal/inspect"
)

var reapMiB = flag.Int("reap.mib", 0, "TestReapOfLargeRecords: 66 tasks of so many MiB each, at most 64, on disk")

// TestReapOfLargeRecords: leases of a process that has died are taken back at Open, few at a
// time if the records are large.
func TestReapOfLargeRecords(t *testing.T) {
	t.Parallel()
	n, size, dir := 16, 512<<10, "queue"
	opts := Options{Shards: 1, Limits: Limits{Payload: 64 << 20}}
	if *reapMiB > 0 {
		n, size, dir = 66, *reapMiB<<20, t.TempDir()
	} else {
		inspect.Options(&opts).FS = crashfs.New()
	}
	ctx := context.Background()
	open := func() *Queue {
		q, err := Open(dir, &opts)
		require.NoError(t, err)
		return q
	}
	q := open()
	payload := make([]byte, size)
	for range n {
		produce(t, q, Task{Queue: "a", Payload: payload})
		op, err := q.claim(ctx, &ClaimRequest{Queues: []string{"a"}}, &runner{queue: q})
		require.NoError(t, err)
		op.unref()
	}
	require.EqualValues(t, n, countsOf(t, q, "a").Leased)
	require.NoError(t, q.Close())

	q = open()
	defer func() { require.NoError(t, q.Close()) }()
	for tries := 0; countsOf(t, q, "a").Ready < uint64(n); tries++ {
		require.Less(t, tries, 2*n, "each group takes one back at least")
	}
	st, err := q.StorageStats()
	require.NoError(t, err)
	steps := st.Shards[0].Upkeep
	unit := int64(2*size + 2000) // a record is read, and written
	require.LessOrEqual(t, steps[UpkeepReap].MaxBytes, unit+engine.GroupBytes/2)
	require.LessOrEqual(t, steps[UpkeepCommit].MaxBytes, unit+engine.GroupBytes)
	require.GreaterOrEqual(t, steps[UpkeepReap].Count, int64(n/2))
	require.NoError(t, q.checkAll())
}
