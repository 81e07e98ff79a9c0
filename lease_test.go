package codeq_test

import (
	"context"
	"flag"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/engine"
	"codeq/internal/inspect"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

func TestLeaseExpires(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 1, LeaseFor: time.Second}, func(t *testing.T, q *codeq.Queue) {
		ctx := context.Background()
		queuetest.Produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
		first := queuetest.ClaimNow(t, q, "a")
		time.Sleep(999 * time.Millisecond)
		require.NoError(t, q.Extend(ctx, first.Receipt, time.Second))
		time.Sleep(999 * time.Millisecond)
		require.NoError(t, q.Complete(ctx, first.Receipt, nil), "extended")

		second := queuetest.ClaimNow(t, q, "a")
		time.Sleep(time.Second)
		for name, err := range map[string]error{
			"Complete":   q.Complete(ctx, second.Receipt, nil),
			"Extend":     q.Extend(ctx, second.Receipt, time.Second),
			"Retry":      q.Retry(ctx, second.Receipt, codeq.RetryOptions{}),
			"Release":    q.Release(ctx, second.Receipt, 0),
			"DeadLetter": q.DeadLetter(ctx, second.Receipt, nil),
		} {
			require.ErrorIs(t, err, codeq.ErrLeaseLost, name)
		}
		again := queuetest.ClaimNow(t, q, "a")
		require.Equal(t, second.ID, again.ID)
		require.Equal(t, 2, again.Attempt)
		require.Greater(t, again.Receipt.Token, second.Receipt.Token)
		require.Equal(t, "lease expired", again.LastError)
		require.NoError(t, q.Complete(ctx, again.Receipt, nil))
		require.ErrorIs(t, q.Complete(ctx, again.Receipt, nil), codeq.ErrLeaseLost, "finished twice")
	})
}

// TestExpiryWakesAWaiter: when a lease ends, the shard hands the task on within 50 ms, without a
// call that would wake the shard.
func TestExpiryWakesAWaiter(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 2}, func(t *testing.T, q *codeq.Queue) {
		ctx := context.Background()
		for _, d := range []time.Duration{10 * time.Millisecond, 1234 * time.Millisecond, 10 * time.Minute} {
			id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
			_, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}, LeaseFor: d})
			require.NoError(t, err)
			start := time.Now()
			l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}})
			require.NoError(t, err)
			require.Equal(t, id, l.ID)
			took := time.Since(start)
			require.GreaterOrEqual(t, took, d)
			require.LessOrEqual(t, took, d+50*time.Millisecond)
			require.NoError(t, q.Complete(ctx, l.Receipt, nil))
		}
	})
}

func TestLeaseForOfTheTask(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{LeaseFor: time.Minute}, func(t *testing.T, q *codeq.Queue) {
		queuetest.Produce(t, q, codeq.Task{Queue: "a", LeaseFor: time.Hour}, codeq.Task{Queue: "a"})
		require.Equal(t, time.Hour, time.Until(queuetest.ClaimNow(t, q, "a").Deadline))
		require.Equal(t, time.Minute, time.Until(queuetest.ClaimNow(t, q, "a").Deadline))
	})
}

// TestMassExpiry: 100,000 leases end at the same time. The shard takes all of them back in many
// groups, and serves other claims between the groups.
func TestMassExpiry(t *testing.T) {
	t.Parallel()
	n := testkit.Sized(10_000, 100_000)
	queuetest.Bubble(t, codeq.Options{Shards: 1, LeaseFor: time.Second}, func(t *testing.T, q *codeq.Queue) {
		ctx := context.Background()
		for done := 0; done < n; done += 1000 {
			batch := make([]codeq.Task, 1000)
			for i := range batch {
				batch[i] = codeq.Task{Queue: "a"}
			}
			_, err := q.ProduceBatch(ctx, batch)
			require.NoError(t, err)
			leases, err := q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{"a"}, Max: 1000})
			require.NoError(t, err)
			require.Len(t, leases, 1000)
		}
		counting := new(queuetest.CountingCommitter)
		require.NoError(t, inspect.Of(q).Owner(0, func(s *inspect.Owner) error {
			counting.Committer, s.Commit = s.Commit, counting
			return nil
		}))
		queuetest.Produce(t, q, codeq.Task{Queue: "urgent"})
		time.Sleep(time.Second)
		l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"urgent"}})
		require.NoError(t, err)
		require.NoError(t, q.Complete(ctx, l.Receipt, nil))
		synctest.Wait()
		stats, err := q.Stats(ctx)
		require.NoError(t, err)
		require.EqualValues(t, n, stats["a"].Ready)
		require.Zero(t, stats["a"].Leased)
		require.GreaterOrEqual(t, counting.Commits, n/engine.UpkeepBudget.Records, "each is written")
		require.LessOrEqual(t, counting.Largest, uint32(engine.UpkeepBudget.Records+16), "keys in one commit: those of the last unit, and of queues and lease records, come on top")
	})
}

// TestHotPathKeys: the life of a single task costs the keys that the layout promises, and no reads.
// Many tasks in one group cost fewer keys for each task.
func TestHotPathKeys(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		ctx := context.Background()
		queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		// This creates the lane.
		require.NoError(t, q.Complete(ctx, queuetest.ClaimNow(t, q, "a").Receipt, nil))
		counting := new(queuetest.CountingCommitter)
		require.NoError(t, inspect.Of(q).Owner(0, func(s *inspect.Owner) error {
			counting.Committer, s.Commit = s.Commit, counting
			return nil
		}))
		queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		require.NoError(t, q.Complete(ctx, queuetest.ClaimNow(t, q, "a").Receipt, nil))
		require.Equal(t, 3, counting.Commits)
		require.EqualValues(t, 4+3, counting.Keys, "record, lease and their ends, and counters with each commit")

		*counting = queuetest.CountingCommitter{Committer: counting.Committer}
		_, err := q.ProduceBatch(ctx, slices.Repeat([]codeq.Task{{Queue: "a"}}, 100))
		require.NoError(t, err)
		leases, err := q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{"a"}, Max: 100})
		require.NoError(t, err)
		require.Len(t, leases, 100)
		require.EqualValues(t, 100+1+2, counting.Keys, "records, one lease record, counters")
	})
}

var reapMiB = flag.Int("reap.mib", 0, "TestReapOfLargeRecords: 66 tasks of so many MiB each, at most 64, on disk")

// TestReapOfLargeRecords: Open takes back the leases of a dead process. If the records are large,
// it takes back few leases at a time.
func TestReapOfLargeRecords(t *testing.T) {
	t.Parallel()
	n, size, dir := 16, 512<<10, "queue"
	opts := codeq.Options{Shards: 1, Limits: codeq.Limits{Payload: 64 << 20}}
	if *reapMiB > 0 {
		n, size, dir = 66, *reapMiB<<20, t.TempDir()
	} else {
		inspect.Options(&opts).FS = crashfs.New()
	}
	ctx := context.Background()
	open := func() *codeq.Queue {
		q, err := codeq.Open(dir, &opts)
		require.NoError(t, err)
		return q
	}
	q := open()
	payload := make([]byte, size)
	for range n {
		queuetest.Produce(t, q, codeq.Task{Queue: "a", Payload: payload})
		_, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}, Local: true})
		require.NoError(t, err)
	}
	require.EqualValues(t, n, queuetest.CountsOf(t, q, "a").Leased)
	require.NoError(t, q.Close())

	q = open()
	defer func() { require.NoError(t, q.Close()) }()
	for tries := 0; queuetest.CountsOf(t, q, "a").Ready < uint64(n); tries++ {
		require.Less(t, tries, 2*n, "each group takes one back at least")
	}
	st, err := q.StorageStats()
	require.NoError(t, err)
	steps := st.Shards[0].Upkeep
	unit := int64(2*size + 2000) // one read and one write of a record
	require.LessOrEqual(t, steps[codeq.UpkeepReap].MaxBytes, unit+engine.GroupBytes/2)
	require.LessOrEqual(t, steps[codeq.UpkeepCommit].MaxBytes, unit+engine.GroupBytes)
	require.GreaterOrEqual(t, steps[codeq.UpkeepReap].Count, int64(n/2))
	require.NoError(t, queuetest.CheckAll(q))
}

// TestStallEndsNoLease: a worker's call before the deadline extends or ends its lease, even if the
// owner processes the call late. A later call returns ErrLeaseLost. The lease of a dead worker
// ends, too.
func TestStallEndsNoLease(t *testing.T) {
	verbs := map[string]func(*codeq.Queue, codeq.Receipt) error{
		"complete": func(q *codeq.Queue, r codeq.Receipt) error { return q.Complete(context.Background(), r, nil) },
		"retry": func(q *codeq.Queue, r codeq.Receipt) error {
			return q.Retry(context.Background(), r, codeq.RetryOptions{After: time.Hour})
		},
		"release": func(q *codeq.Queue, r codeq.Receipt) error { return q.Release(context.Background(), r, time.Hour) },
		"extend":  func(q *codeq.Queue, r codeq.Receipt) error { return q.Extend(context.Background(), r, time.Hour) },
		"batch": func(q *codeq.Queue, r codeq.Receipt) error {
			return q.CompleteBatch(context.Background(), []codeq.Completion{{Receipt: r}})
		},
	}
	for name, verb := range verbs {
		for _, opts := range []codeq.Options{{}, {InboxDepth: 1}, {GroupCap: 1}} {
			t.Run(fmt.Sprintf("%s/depth %d, cap %d", name, opts.InboxDepth, opts.GroupCap), func(t *testing.T) {
				opts.LeaseFor = 30 * time.Second
				queuetest.Bubble(t, opts, func(t *testing.T, q *codeq.Queue) {
					queuetest.Produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
					l, dead := queuetest.ClaimNow(t, q, "a"), queuetest.ClaimNow(t, q, "a")
					open := queuetest.Shut(t, q, 0)
					for range 5 { // one for the stalled commit, four ahead of the verb
						go func() { _, _ = q.Produce(context.Background(), codeq.Task{Queue: "b"}) }()
						synctest.Wait()
					}
					time.Sleep(29 * time.Second)
					done := make(chan error, 1)
					go func() { done <- verb(q, l.Receipt) }()
					time.Sleep(20 * time.Second)
					close(open)
					require.NoError(t, <-done)

					again, err := q.Claim(context.Background(), codeq.ClaimRequest{Queues: []string{"a"}})
					require.NoError(t, err)
					require.Equal(t, dead.ID, again.ID)
					require.LessOrEqual(t, time.Since(dead.Deadline), 50*time.Second, "who has died is found in time")
					require.ErrorIs(t, verb(q, dead.Receipt), codeq.ErrLeaseLost)
				})
			})
		}
	}
}

// TestLateForLease: without a stall, a call after the deadline is too late. A call before the
// deadline is in time, even if the owner processes it in a later group.
func TestLateForLease(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{LeaseFor: time.Second, GroupCap: 1}, func(t *testing.T, q *codeq.Queue) {
		queuetest.Produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
		early, late := queuetest.ClaimNow(t, q, "a"), queuetest.ClaimNow(t, q, "a")
		slow := queuetest.SlowDown(t, q, 0, 100*time.Millisecond)
		time.Sleep(990 * time.Millisecond)
		errs := make(chan error, 4)
		for range 3 {
			go func() {
				errs <- q.Configure(context.Background(), "b", func(s *codeq.Settings) { s.Paused = !s.Paused })
			}()
		}
		synctest.Wait()
		require.NoError(t, q.Complete(t.Context(), early.Receipt, nil))
		require.Greater(t, slow.Commits.Load(), int64(1))
		for range 3 {
			require.NoError(t, <-errs)
		}
		time.Sleep(time.Second)
		require.ErrorIs(t, q.Complete(t.Context(), late.Receipt, nil), codeq.ErrLeaseLost)
	})
}

// TestStallOfGrant: a lease is usable even if the commit of its grant takes longer than the lease.
func TestStallOfGrant(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{LeaseFor: 30 * time.Second}, func(t *testing.T, q *codeq.Queue) {
		queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		open := queuetest.Shut(t, q, 0)
		leased := make(chan *codeq.Lease, 1)
		go func() { leased <- queuetest.ClaimNow(t, q, "a") }()
		time.Sleep(time.Minute)
		close(open)
		l := <-leased
		time.Sleep(29 * time.Second)
		require.NoError(t, q.Complete(t.Context(), l.Receipt, nil))
	})
}

// TestStallsUnderRun: Run renews in time, however long the owner stalls, so every task runs once.
func TestStallsUnderRun(t *testing.T) {
	queuetest.Bubble(t, codeq.Options{LeaseFor: 30 * time.Second}, func(t *testing.T, q *codeq.Queue) {
		rng := testkit.Seeded(t)
		var mu sync.Mutex // guards rng
		chance := func(n int) time.Duration {
			mu.Lock()
			defer mu.Unlock()
			return time.Duration(rng.IntN(n))
		}
		var m codeq.Mux
		var calls atomic.Int64
		codeq.Handle(&m, "a", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
			calls.Add(1)
			select {
			case <-time.After(chance(200) * time.Second):
				return nil
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		})
		const tasks = 50
		for range tasks {
			queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		}
		ctx, stop := context.WithCancel(t.Context())
		run := make(chan error, 1)
		go func() {
			run <- q.Run(ctx, &m, &codeq.RunOptions{Concurrency: 5, OnError: func(_ *codeq.Lease, err error) { t.Error(err) }})
		}()
		for queuetest.CountsOf(t, q, "a").Total() > 0 {
			open := queuetest.Shut(t, q, 0)
			go func() { _, _ = q.Produce(context.Background(), codeq.Task{Queue: "b"}) }()
			time.Sleep(chance(60_000) * time.Millisecond)
			close(open)
			time.Sleep(chance(20_000) * time.Millisecond)
		}
		stop()
		<-run
		require.EqualValues(t, tasks, calls.Load())
	})
}

// TestStalledShardCostsNoLeaseElsewhere: while one shard cannot commit, Run renews the leases of
// another shard.
func TestStalledShardCostsNoLeaseElsewhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Shards: 2, LeaseFor: 10 * time.Second})
		queuetest.Produce(t, queuetest.StartingAt(q, 0), codeq.Task{Queue: "a"})
		healthy := queuetest.Produce(t, queuetest.StartingAt(q, 1), codeq.Task{Queue: "a"})[0]
		done := make(chan struct{})
		var mu sync.Mutex
		causes := make(map[codeq.ID]error)
		var m codeq.Mux
		codeq.Handle(&m, "a", func(ctx context.Context, job *codeq.Job[[]byte]) error {
			select {
			case <-done:
			case <-ctx.Done():
			}
			mu.Lock()
			defer mu.Unlock()
			causes[job.ID] = context.Cause(ctx)
			return nil
		})
		ctx, stop := context.WithCancel(t.Context())
		ran := make(chan error)
		go func() { ran <- q.Run(ctx, &m, &codeq.RunOptions{Concurrency: 2}) }()
		synctest.Wait()
		open := queuetest.Shut(t, q, 0)
		stalled := make(chan error)
		go func() {
			_, err := queuetest.StartingAt(q, 0).Produce(ctx, codeq.Task{Queue: "b"})
			stalled <- err
		}()
		time.Sleep(time.Minute)
		close(open)
		require.NoError(t, <-stalled)
		synctest.Wait()
		close(done)
		stop()
		require.NoError(t, <-ran)
		require.Contains(t, causes, healthy)
		require.NoError(t, causes[healthy])
	})
}
