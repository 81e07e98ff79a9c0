package codeq

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/engine"
	"codeq/internal/inspect"
	"codeq/internal/testkit"
)

// TestMassExpiry: a hundred thousand leases that end at once are all taken
// back, in many groups between which other claims are served.
func TestMassExpiry(t *testing.T) {
	t.Parallel()
	n := testkit.Sized(10_000, 100_000, 100_000)
	bubble(t, Options{Shards: 1, LeaseFor: time.Second}, func(t *testing.T, q *Queue) {
		ctx := context.Background()
		for done := 0; done < n; done += 1000 {
			batch := make([]Task, 1000)
			for i := range batch {
				batch[i] = Task{Queue: "a"}
			}
			_, err := q.ProduceBatch(ctx, batch)
			require.NoError(t, err)
			leases, err := q.ClaimBatch(ctx, ClaimRequest{Queues: []string{"a"}, Max: 1000})
			require.NoError(t, err)
			require.Len(t, leases, 1000)
		}
		counting := &countingCommitter{committer: q.shard(0).commit}
		require.NoError(t, q.shard(0).probe(func(s *shard) error {
			s.commit = counting
			return nil
		}))
		produce(t, q, Task{Queue: "urgent"})
		time.Sleep(time.Second)
		l, err := q.Claim(ctx, ClaimRequest{Queues: []string{"urgent"}})
		require.NoError(t, err)
		require.NoError(t, q.Complete(ctx, l.Receipt, nil))
		synctest.Wait()
		stats, err := q.Stats(ctx)
		require.NoError(t, err)
		require.EqualValues(t, n, stats["a"].Ready)
		require.Zero(t, stats["a"].Leased)
		require.GreaterOrEqual(t, counting.commits, n/engine.UpkeepBudget.Records, "each is written")
		require.LessOrEqual(t, counting.largest, uint32(engine.UpkeepBudget.Records+16), "keys in one commit: those of the last unit, and of queues and lease records, come on top")
	})
}

// TestLeaseOverRestart: a lease of Claim keeps its deadline over a restart, one
// that belongs to the process ends with it, for no attempt.
func TestLeaseOverRestart(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {}) // the same checks hold for an empty queue
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		opts := inspect.With(&Options{Shards: 1, MaxAttempts: 2}, inspect.Private{FS: crashfs.New()})
		q, err := Open("queue", opts)
		require.NoError(t, err)
		produce(t, q, Task{Queue: "remote"}, Task{Queue: "local"})
		remote, err := q.Claim(ctx, ClaimRequest{Queues: []string{"remote"}, LeaseFor: time.Minute})
		require.NoError(t, err)
		for range 3 {
			op, err := q.claim(ctx, &ClaimRequest{Queues: []string{"local"}, NoWait: true}, &runner{queue: q})
			require.NoError(t, err)
			require.EqualValues(t, 1, op.Grants[0].Attempt)
			op.unref()
			require.NoError(t, q.Close())
			time.Sleep(10 * time.Second)
			q, err = Open("queue", opts)
			require.NoError(t, err)
			synctest.Wait()
		}
		stats, err := q.Stats(ctx)
		require.NoError(t, err)
		require.Equal(t, Counts{Ready: 1}, stats["local"])
		require.Equal(t, Counts{Leased: 1}, stats["remote"])
		require.Nil(t, claimNow(t, q, "remote"))
		require.NoError(t, q.Extend(ctx, remote.Receipt, time.Minute))
		time.Sleep(time.Minute)
		require.Equal(t, 2, claimNow(t, q, "remote").Attempt)
		require.NoError(t, q.checkAll())
		require.NoError(t, q.Close())
	})
}

// TestWallClockJumps: a clock that is set does not disturb leases while the
// queue is open, never prolongs them over a restart, and makes scheduled tasks
// ready within a minute of the time that it shows.
func TestWallClockJumps(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		var offset atomic.Int64 // set here, read by the owner
		opts := inspect.With(&Options{Shards: 1, LeaseFor: time.Minute}, inspect.Private{FS: crashfs.New()})
		inspect.Options(opts).Wall = func() time.Time { return time.Now().Add(time.Duration(offset.Load())) }
		q, err := Open("queue", opts)
		require.NoError(t, err)
		step := func(d time.Duration) { // as nobody's call: the owner reads the clock when it wakes
			synctest.Wait()
			offset.Add(int64(d))
		}
		for _, jump := range []time.Duration{time.Hour, -2 * time.Hour} {
			id := produce(t, q, Task{Queue: "a"})[0]
			l := claimNow(t, q, "a")
			require.Equal(t, id, l.ID)
			step(jump)
			time.Sleep(59 * time.Second)
			require.Nil(t, claimNow(t, q, "a"), "after a jump of %v", jump)
			time.Sleep(time.Second)
			again := claimNow(t, q, "a")
			require.NotNil(t, again, "after a jump of %v", jump)
			require.NoError(t, q.Complete(ctx, again.Receipt, nil))
		}

		produce(t, q, Task{Queue: "later", RunAt: inspect.Options(opts).Wall().Add(10 * time.Hour)})
		step(10 * time.Hour)
		start := time.Now()
		_, err = q.Claim(ctx, ClaimRequest{Queues: []string{"later"}})
		require.NoError(t, err)
		require.LessOrEqual(t, time.Since(start), time.Minute)

		produce(t, q, Task{Queue: "a"})
		l := claimNow(t, q, "a")
		require.NoError(t, q.Close())
		step(-time.Hour)
		q, err = Open("queue", opts)
		require.NoError(t, err)
		time.Sleep(59 * time.Second)
		require.Nil(t, claimNow(t, q, "a"))
		time.Sleep(time.Second)
		require.Equal(t, l.ID, claimNow(t, q, "a").ID)
		require.NoError(t, q.checkAll())
		require.NoError(t, q.Close())
	})
}

// TestHotPathKeys: a cycle of a task by itself costs what the layout promises,
// and no reads; many in one group cost less.
func TestHotPathKeys(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		ctx := context.Background()
		produce(t, q, Task{Queue: "a"})
		require.NoError(t, q.Complete(ctx, claimNow(t, q, "a").Receipt, nil)) // makes the lane
		counting := &countingCommitter{committer: q.shard(0).commit}
		require.NoError(t, q.shard(0).probe(func(s *shard) error {
			s.commit = counting
			return nil
		}))
		produce(t, q, Task{Queue: "a"})
		require.NoError(t, q.Complete(ctx, claimNow(t, q, "a").Receipt, nil))
		require.Equal(t, 3, counting.commits)
		require.EqualValues(t, 4+3, counting.keys, "record, lease and their ends, and counters with each commit")

		*counting = countingCommitter{committer: counting.committer}
		_, err := q.ProduceBatch(ctx, slices.Repeat([]Task{{Queue: "a"}}, 100))
		require.NoError(t, err)
		leases, err := q.ClaimBatch(ctx, ClaimRequest{Queues: []string{"a"}, Max: 100})
		require.NoError(t, err)
		require.Len(t, leases, 100)
		require.EqualValues(t, 100+1+2, counting.keys, "records, one lease record, counters")
	})
}
