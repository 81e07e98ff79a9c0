package codeq_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/engine"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/internal/testbase"
	"codeq/test/queuetest"
)

// TestRetentionPrecedence: the task says how long it is kept, or else its queue, or else the
// options.
func TestRetentionPrecedence(t *testing.T) {
	ctx := context.Background()
	const no = time.Duration(0)
	for _, c := range []struct {
		options, settings, task time.Duration
		want                    time.Duration // 0: not kept; Forever
	}{
		{no, no, no, no},
		{time.Hour, no, no, time.Hour},
		{no, 2 * time.Hour, no, 2 * time.Hour},
		{no, no, 3 * time.Hour, 3 * time.Hour},
		{time.Hour, 2 * time.Hour, no, 2 * time.Hour},
		{3 * time.Hour, 2 * time.Hour, time.Hour, time.Hour},
		{codeq.Forever, no, no, codeq.Forever},
		{codeq.Forever, time.Hour, no, time.Hour},
		{time.Hour, codeq.Forever, no, codeq.Forever},
		{time.Hour, time.Hour, codeq.Forever, codeq.Forever},
		{codeq.Forever, codeq.Forever, time.Minute, time.Minute},
		{no, no, time.Nanosecond, time.Millisecond},
	} {
		t.Run(fmt.Sprint(c.options, " ", c.settings, " ", c.task), func(t *testing.T) {
			queuetest.InFlow(t, codeq.Options{Shards: 1, Retention: c.options}, func(f *queuetest.FlowTest) {
				require.NoError(f, f.Q.Configure(ctx, "a", func(s *codeq.Settings) { s.Retention = c.settings }))
				done := queuetest.Produce(f.T, f.Q, codeq.Task{Queue: "a", Retention: c.task})[0]
				f.Complete("a")
				canceled := queuetest.Produce(f.T, f.Q, codeq.Task{Queue: "a", Retention: c.task})[0]
				f.Cancel(canceled)
				if c.want == no {
					f.RequireGone(done, canceled)
					return
				}
				kept := c.want
				for _, id := range []codeq.ID{done, canceled} {
					info, err := f.Q.Get(ctx, id)
					require.NoError(f, err)
					if require.Equal(f, kept == codeq.Forever, info.Until.IsZero()); kept != codeq.Forever {
						require.WithinRange(f, info.Until, info.At.Add(kept), info.At.Add(kept+max(kept/8, time.Second)))
					}
				}
				if kept == codeq.Forever {
					kept = 50 * 365 * 24 * time.Hour
				}
				time.Sleep(kept - time.Millisecond)
				f.Check()
				f.RequireState(codeq.Done, done)
				f.RequireState(codeq.Canceled, canceled)
				require.Equal(f, codeq.Counts{Done: 1, Canceled: 1}, f.Counts("a"))
				if c.want != codeq.Forever {
					time.Sleep(time.Millisecond + max(kept/8, time.Second))
					f.Check()
					f.RequireGone(done, canceled)
					require.Equal(f, codeq.Counts{}, f.Counts("a"))
				}
			})
		})
	}
}

// TestBucketsAreNoNarrowerThanASecond: short retentions do not make more buckets.
func TestBucketsAreNoNarrowerThanASecond(t *testing.T) {
	for r := int64(1); r < 20_000; r++ {
		until := map[uint64]bool{}
		for wall := uint64(5_000_000); wall < 5_002_000; wall += 100 {
			until[keys.BucketOf(wall, r)] = true
		}
		require.LessOrEqual(t, len(until), 3, "buckets that two seconds need, with a retention of %d ms", r)
	}
}

// count counts the commits of the first shard from now on.
func count(t *testing.T, q *codeq.Queue) *queuetest.CountingCommitter {
	c := new(queuetest.CountingCommitter)
	queuetest.WrapCommits(t, q, 0, func(next inspect.Committer) inspect.Committer {
		c.Committer = next
		return c
	})
	return c
}

// completeAll completes n tasks of a queue.
func completeAll(t *testing.T, q *codeq.Queue, queue string, n int) {
	t.Helper()
	ctx := context.Background()
	for n > 0 {
		leases, err := q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{queue}, Max: min(n, 500)})
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

// TestExpiryCostsLittle: ten thousand results that are forgotten at the same time cost one range
// deletion, and results of another time stay.
func TestExpiryCostsLittle(t *testing.T) {
	t.Parallel()
	const n = 10_000
	queuetest.InFlow(t, codeq.Options{Shards: 1, Retention: time.Hour}, func(f *queuetest.FlowTest) {
		tasks := make([]codeq.Task, n)
		for i := range tasks {
			tasks[i].Queue = "a"
		}
		ids := f.Batch(tasks...)
		completeAll(f.T, f.Q, "a", n)
		long := queuetest.Produce(f.T, f.Q, codeq.Task{Queue: "a", Retention: 3 * time.Hour})[0]
		f.Complete("a")
		require.Equal(f, codeq.Counts{Done: n + 1}, f.Counts("a"))
		c := count(f.T, f.Q)
		time.Sleep(59 * time.Minute)
		synctest.Wait()
		require.Zero(f, c.Commits)
		f.RequireState(codeq.Done, ids[0], ids[n-1])
		time.Sleep(10 * time.Minute)
		f.Check()
		require.LessOrEqual(f, c.Commits, 2, "buckets are wide")
		require.LessOrEqual(f, c.Largest, uint32(3), "keys in one commit: a range, a bucket, the counts")
		require.Equal(f, codeq.Counts{Done: 1}, f.Counts("a"))
		f.RequireGone(ids[0], ids[n/2], ids[n-1])
		f.RequireState(codeq.Done, long)
		time.Sleep(3 * time.Hour)
		f.RequireGone(long)
	})
}

// TestManyBucketsExpire: tasks that expire at one moment are forgotten in groups of bounded size,
// and each bucket at its time.
func TestManyBucketsExpire(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	opts := codeq.Options{Shards: 1, Retention: time.Minute}
	queuetest.Bubble(t, opts, func(t *testing.T, q *codeq.Queue) {
		queues := engine.UpkeepBudget.Records + 500
		for i := range queues {
			name := fmt.Sprint(i)
			queuetest.Produce(t, q, codeq.Task{Queue: name}, codeq.Task{Queue: name, Retention: 10 * time.Minute})
			for range 2 {
				require.NoError(t, q.Complete(t.Context(), queuetest.ClaimNow(t, q, name).Receipt, nil))
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
		st, err := q.StorageStats()
		require.NoError(t, err)
		for _, st := range st.Shards[0].Upkeep {
			if st.Kind == codeq.UpkeepForget {
				require.Greater(t, st.Count, int64(1))
				require.LessOrEqual(t, st.MaxRecords, int64(engine.UpkeepBudget.Records+1))
			}
		}
		time.Sleep(10 * time.Minute)
		require.Zero(t, kept())
		require.NoError(t, queuetest.CheckMemory(q))
	})
}
