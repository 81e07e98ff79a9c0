package codeq

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/engine"
)

// count counts the commits of a shard from now on.
func count(t *testing.T, s *shard) *countingCommitter {
	t.Helper()
	var c *countingCommitter
	require.NoError(t, s.probe(func(s *shard) error {
		c = &countingCommitter{committer: s.commit}
		s.commit = c
		return nil
	}))
	return c
}

// completeAll completes n tasks of a queue.
func completeAll(t *testing.T, q *Queue, queue string, n int) {
	t.Helper()
	ctx := context.Background()
	for n > 0 {
		leases, err := q.ClaimBatch(ctx, ClaimRequest{Queues: []string{queue}, Max: min(n, 500)})
		require.NoError(t, err)
		done := make(chan error, len(leases))
		for _, l := range leases {
			go func() { done <- q.Complete(ctx, l.Receipt, []byte("result")) }()
		}
		for range leases {
			require.NoError(t, <-done)
		}
		n -= len(leases)
	}
}

// TestExpiryCostsLittle: ten thousand results that are forgotten at the same
// time cost one range deletion, and those of another time stay.
func TestExpiryCostsLittle(t *testing.T) {
	t.Parallel()
	const n = 10_000
	inFlow(t, Options{Shards: 1, Retention: time.Hour}, func(f *FlowTest) {
		tasks := make([]Task, n)
		for i := range tasks {
			tasks[i].Queue = "a"
		}
		ids := f.Batch(tasks...)
		completeAll(f.T, f.Q, "a", n)
		long := produce(f.T, f.Q, Task{Queue: "a", Retention: 3 * time.Hour})[0]
		f.Complete("a")
		require.Equal(f, Counts{Done: n + 1}, f.Counts("a"))
		c := count(f.T, f.Q.shard(0))
		time.Sleep(59 * time.Minute)
		synctest.Wait()
		require.Zero(f, c.commits)
		f.RequireState(Done, ids[0], ids[n-1])
		time.Sleep(10 * time.Minute)
		f.Check()
		require.LessOrEqual(f, c.commits, 2, "buckets are wide")
		require.LessOrEqual(f, c.largest, uint32(3), "keys in one commit: a range, a bucket, the counts")
		require.Equal(f, Counts{Done: 1}, f.Counts("a"))
		f.RequireGone(ids[0], ids[n/2], ids[n-1])
		f.RequireState(Done, long)
		time.Sleep(3 * time.Hour)
		f.RequireGone(long)
	})
}

// TestManyBucketsExpire: what is forgotten at one moment is, in groups of bounded size,
// and each bucket at its time.
func TestManyBucketsExpire(t *testing.T) {
	t.Parallel()
	opts := Options{Shards: 1, Retention: time.Minute}
	bubble(t, opts, func(t *testing.T, q *Queue) {
		const queues = 5000
		for i := range queues {
			name := fmt.Sprint(i)
			produce(t, q, Task{Queue: name}, Task{Queue: name, Retention: 10 * time.Minute})
			for range 2 {
				require.NoError(t, q.Complete(t.Context(), claimNow(t, q, name).Receipt, nil))
			}
		}
		kept := func() (n uint64) {
			stats, err := q.Stats(t.Context())
			require.NoError(t, err)
			for _, c := range stats {
				n += c.Done
			}
			return n
		}
		require.EqualValues(t, 2*queues, kept())
		time.Sleep(2 * time.Minute)
		require.EqualValues(t, queues, kept())
		for _, st := range upkeepStats(q.shard(0).upkeep.UpkeepTable) {
			if st.Kind == UpkeepForget {
				require.Greater(t, st.Count, int64(1))
				require.LessOrEqual(t, st.MaxRecords, int64(engine.UpkeepBudget.Records+1))
			}
		}
		time.Sleep(10 * time.Minute)
		require.Zero(t, kept())
		require.NoError(t, q.checkMemory())
	})
}
