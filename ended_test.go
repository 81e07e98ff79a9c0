package codeq

import (
	"context"
	"fmt"
	"math"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/engine"
	"codeq/internal/keys"
)

// TestBucketOf: a bucket ends no sooner than what it keeps may be forgotten, and
// an eighth of the retention later at the most, or a second; and a retention has
// few of them.
func TestBucketOf(t *testing.T) {
	const second = 1000
	walls := []uint64{0, 1, 999, 1000, 1_700_000_000_000, 1_700_000_000_001, 1_700_000_123_456, 1<<48 - 1}
	var retentions []int64
	for _, r := range []int64{1, second, 8 * second, 16 * second, 60 * second, 3600 * second, 86400 * second, 365 * 86400 * second} {
		retentions = append(retentions, r-1, r, r+1)
	}
	for bit := range 53 {
		retentions = append(retentions, 1<<bit-1, 1<<bit, 1<<bit+1, 1<<bit+1<<bit/3)
	}
	retentions = append(retentions, int64(millis(math.MaxInt64)))
	for _, wall := range walls {
		for _, r := range retentions {
			until := engine.BucketOf(wall, r)
			require.GreaterOrEqual(t, until, wall+uint64(r), "wall %d, retention %d", wall, r)
			require.LessOrEqual(t, until, wall+uint64(r)+max(uint64(r)/8, second), "wall %d, retention %d", wall, r)
		}
		require.Equal(t, uint64(keys.Forever), engine.BucketOf(wall, -1))
	}
	for _, r := range retentions[1:] {
		if r < second {
			continue
		}
		buckets := make(map[uint64]bool)
		for i := range int64(200) { // over the time of one retention
			buckets[engine.BucketOf(1_700_000_000_000+uint64(r/200*i), r)] = true
		}
		require.LessOrEqual(t, len(buckets), 18, "retention %d", r)
	}
}

// count has the commits of a shard counted from now on.
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
	const n = 10_000
	inFlow(t, Options{Shards: 1, Retention: time.Hour}, func(f *flowTest) {
		tasks := make([]Task, n)
		for i := range tasks {
			tasks[i].Queue = "a"
		}
		ids := f.batch(tasks...)
		completeAll(f.T, f.q, "a", n)
		long := produce(f.T, f.q, Task{Queue: "a", Retention: 3 * time.Hour})[0]
		f.complete("a")
		require.Equal(f, Counts{Done: n + 1}, f.counts("a"))
		c := count(f.T, f.q.shard(0))
		time.Sleep(59 * time.Minute)
		synctest.Wait()
		require.Zero(f, c.commits)
		f.requireState(Done, ids[0], ids[n-1])
		time.Sleep(10 * time.Minute)
		f.check()
		require.LessOrEqual(f, c.commits, 2, "buckets are wide")
		require.LessOrEqual(f, c.largest, uint32(3), "keys in one commit: a range, a bucket, the counts")
		require.Equal(f, Counts{Done: 1}, f.counts("a"))
		f.requireState(gone, ids[0], ids[n/2], ids[n-1])
		f.requireState(Done, long)
		time.Sleep(3 * time.Hour)
		f.requireState(gone, long)
	})
}

// TestRetentionPrecedence: the task says how long it is kept; or else its queue;
// or else the options.
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
		{Forever, no, no, Forever},
		{Forever, time.Hour, no, time.Hour},
		{time.Hour, Forever, no, Forever},
		{time.Hour, time.Hour, Forever, Forever},
		{Forever, Forever, time.Minute, time.Minute},
		{no, no, time.Nanosecond, time.Millisecond},
	} {
		t.Run(fmt.Sprint(c.options, " ", c.settings, " ", c.task), func(t *testing.T) {
			inFlow(t, Options{Shards: 1, Retention: c.options}, func(f *flowTest) {
				require.NoError(f, f.q.Configure(ctx, "a", func(s *Settings) { s.Retention = c.settings }))
				done := produce(f.T, f.q, Task{Queue: "a", Retention: c.task})[0]
				f.complete("a")
				canceled := produce(f.T, f.q, Task{Queue: "a", Retention: c.task})[0]
				f.cancel(canceled)
				if c.want == no {
					f.requireState(gone, done, canceled)
					return
				}
				kept := c.want
				if kept == Forever {
					kept = 50 * 365 * 24 * time.Hour
				}
				time.Sleep(kept - time.Millisecond)
				f.check()
				f.requireState(Done, done)
				f.requireState(Canceled, canceled)
				require.Equal(f, Counts{Done: 1, Canceled: 1}, f.counts("a"))
				if c.want != Forever {
					time.Sleep(time.Millisecond + max(kept/8, time.Second))
					f.check()
					f.requireState(gone, done, canceled)
					require.Equal(f, Counts{}, f.counts("a"))
				}
			})
		})
	}
}

// TestRetentionIsDecidedAtTheEnd: settings of the moment at which a task ends
// count; those that come later change nothing for it.
func TestRetentionIsDecidedAtTheEnd(t *testing.T) {
	ctx := context.Background()
	inFlow(t, Options{Shards: 3}, func(f *flowTest) {
		set := func(d time.Duration) {
			f.Helper()
			require.NoError(f, f.q.Configure(ctx, "a", func(s *Settings) { s.Retention = d }))
		}
		first := produce(f.T, f.q, Task{Queue: "a"})[0]
		set(time.Hour)
		f.complete("a")
		set(Forever)
		second := produce(f.T, f.q, Task{Queue: "a"})[0]
		f.complete("a")
		set(0)
		third := produce(f.T, f.q, Task{Queue: "a"})[0]
		f.complete("a")
		f.requireState(Done, first, second)
		f.requireState(gone, third)
		time.Sleep(2 * time.Hour)
		f.requireState(gone, first)
		f.requireState(Done, second)
	})
}

// TestStatsOverExpiry: the counts are exact before and after what has ended is
// forgotten, whatever was taken out of its bucket before, and over restarts.
func TestStatsOverExpiry(t *testing.T) {
	ctx := context.Background()
	for _, shards := range []int{1, 3} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			inFlow(t, Options{Shards: shards, Retention: time.Hour}, func(f *flowTest) {
				require.NoError(f, f.q.Configure(ctx, "a", func(s *Settings) { s.DeadRetention = 2 * time.Hour }))
				for range 10 {
					produce(f.T, f.q, Task{Queue: "a"})
					f.complete("a")
					f.cancel(produce(f.T, f.q, Task{Queue: "a"})[0])
				}
				var dead []ID
				for range 10 {
					dead = append(dead, produce(f.T, f.q, Task{Queue: "a"})[0])
					f.die("a")
				}
				require.Equal(f, Counts{Done: 10, Canceled: 10, Dead: 10}, f.counts("a"))
				f.cancel(dead[0]) // leaves its bucket for another
				require.NoError(f, f.q.RedriveDead(ctx, dead[1]))
				f.check()
				want := Counts{Ready: 1, Done: 10, Canceled: 11, Dead: 8}
				require.Equal(f, want, f.counts("a"))
				f.reopen()
				require.Equal(f, want, f.counts("a"))
				time.Sleep(70 * time.Minute)
				require.Equal(f, Counts{Ready: 1, Dead: 8}, f.counts("a"))
				f.reopen()
				require.Equal(f, Counts{Ready: 1, Dead: 8}, f.counts("a"))
				time.Sleep(70 * time.Minute)
				require.Equal(f, Counts{Ready: 1}, f.counts("a"))
				f.requireState(gone, dead[2:]...)
				f.reopen()
				require.Equal(f, Counts{Ready: 1}, f.counts("a"))
			})
		})
	}
}

// TestExpiryWhileClosed: what should have been forgotten while the queue was
// closed is when it is opened, and nothing else.
func TestExpiryWhileClosed(t *testing.T) {
	for _, shards := range []int{1, 3} {
		inFlow(t, Options{Shards: shards}, func(f *flowTest) {
			var ids []ID
			for _, retention := range []time.Duration{time.Hour, 2 * time.Hour, Forever} {
				for range 5 {
					ids = append(ids, produce(f.T, f.q, Task{Queue: "a", Retention: retention})...)
					f.complete("a")
				}
			}
			require.NoError(f, f.q.Close())
			time.Sleep(90 * time.Minute)
			f.open()
			f.check()
			f.requireState(gone, ids[:5]...)
			f.requireState(Done, ids[5:]...)
			require.Equal(f, Counts{Done: 10}, f.counts("a"))
			time.Sleep(time.Hour)
			f.requireState(gone, ids[5:10]...)
			f.requireState(Done, ids[10:]...)
			require.Equal(f, Counts{Done: 5}, f.counts("a"))
		})
	}
}

// TestUnknownAfterExpiry: verbs do not find what has expired, from the moment
// at which its bucket ends.
func TestUnknownAfterExpiry(t *testing.T) {
	ctx := context.Background()
	inFlow(t, Options{Shards: 1}, func(f *flowTest) {
		require.NoError(f, f.q.Configure(ctx, "a", func(s *Settings) { s.DeadRetention = time.Minute }))
		id := produce(f.T, f.q, Task{Queue: "a"})[0]
		f.die("a")
		time.Sleep(2 * time.Minute)
		f.check()
		require.ErrorIs(f, f.q.RedriveDead(ctx, id), ErrNotFound)
		require.ErrorIs(f, f.q.Cancel(ctx, id), ErrNotFound)
		_, err := f.q.Await(ctx, id)
		require.ErrorIs(f, err, ErrNotFound)
		child := produce(f.T, f.q, Task{Queue: "child", After: []ID{id}})[0]
		f.requireState(Ready, child) // a parent that is no more counts as completed
	})
}

// TestBucketsAreNoNarrowerThanASecond: short retentions do not make more of them.
func TestBucketsAreNoNarrowerThanASecond(t *testing.T) {
	for r := int64(1); r < 20_000; r++ {
		until := map[uint64]bool{}
		for wall := uint64(5_000_000); wall < 5_002_000; wall += 100 {
			until[engine.BucketOf(wall, r)] = true
		}
		require.LessOrEqual(t, len(until), 3, "buckets that two seconds need, with a retention of %d ms", r)
	}
}

// TestManyBucketsExpire: what is forgotten at one moment is, in groups of bounded size,
// and each bucket at its time.
func TestManyBucketsExpire(t *testing.T) {
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
		for _, st := range q.shard(0).steps.table.stats() {
			if st.Kind == StepForget {
				require.Greater(t, st.Count, int64(1))
				require.LessOrEqual(t, st.MaxRecords, int64(engine.UpkeepBudget.Records+1))
			}
		}
		time.Sleep(10 * time.Minute)
		require.Zero(t, kept())
		require.NoError(t, q.checkMemory())
	})
}
