package codeq_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/keys"
)

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
		{codeq.Forever, no, no, codeq.Forever},
		{codeq.Forever, time.Hour, no, time.Hour},
		{time.Hour, codeq.Forever, no, codeq.Forever},
		{time.Hour, time.Hour, codeq.Forever, codeq.Forever},
		{codeq.Forever, codeq.Forever, time.Minute, time.Minute},
		{no, no, time.Nanosecond, time.Millisecond},
	} {
		t.Run(fmt.Sprint(c.options, " ", c.settings, " ", c.task), func(t *testing.T) {
			inFlow(t, codeq.Options{Shards: 1, Retention: c.options}, func(f *codeq.FlowTest) {
				require.NoError(f, f.Q.Configure(ctx, "a", func(s *codeq.Settings) { s.Retention = c.settings }))
				done := produce(f.T, f.Q, codeq.Task{Queue: "a", Retention: c.task})[0]
				f.Complete("a")
				canceled := produce(f.T, f.Q, codeq.Task{Queue: "a", Retention: c.task})[0]
				f.Cancel(canceled)
				if c.want == no {
					f.RequireGone(done, canceled)
					return
				}
				kept := c.want
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

// TestRetentionIsDecidedAtTheEnd: settings of the moment at which a task ends
// count; those that come later change nothing for it.
func TestRetentionIsDecidedAtTheEnd(t *testing.T) {
	ctx := context.Background()
	inFlow(t, codeq.Options{Shards: 3}, func(f *codeq.FlowTest) {
		set := func(d time.Duration) {
			f.Helper()
			require.NoError(f, f.Q.Configure(ctx, "a", func(s *codeq.Settings) { s.Retention = d }))
		}
		first := produce(f.T, f.Q, codeq.Task{Queue: "a"})[0]
		set(time.Hour)
		f.Complete("a")
		set(codeq.Forever)
		second := produce(f.T, f.Q, codeq.Task{Queue: "a"})[0]
		f.Complete("a")
		set(0)
		third := produce(f.T, f.Q, codeq.Task{Queue: "a"})[0]
		f.Complete("a")
		f.RequireState(codeq.Done, first, second)
		f.RequireGone(third)
		time.Sleep(2 * time.Hour)
		f.RequireGone(first)
		f.RequireState(codeq.Done, second)
	})
}

// TestStatsOverExpiry: the counts are exact before and after what has ended is
// forgotten, whatever was taken out of its bucket before, and over restarts.
func TestStatsOverExpiry(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for _, shards := range []int{1, 3} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			inFlow(t, codeq.Options{Shards: shards, Retention: time.Hour}, func(f *codeq.FlowTest) {
				require.NoError(f, f.Q.Configure(ctx, "a", func(s *codeq.Settings) { s.DeadRetention = 2 * time.Hour }))
				for range 10 {
					produce(f.T, f.Q, codeq.Task{Queue: "a"})
					f.Complete("a")
					f.Cancel(produce(f.T, f.Q, codeq.Task{Queue: "a"})[0])
				}
				var dead []codeq.ID
				for range 10 {
					dead = append(dead, produce(f.T, f.Q, codeq.Task{Queue: "a"})[0])
					f.Die("a")
				}
				require.Equal(f, codeq.Counts{Done: 10, Canceled: 10, Dead: 10}, f.Counts("a"))
				f.Cancel(dead[0]) // leaves its bucket for another
				require.NoError(f, f.Q.RedriveDead(ctx, dead[1]))
				f.Check()
				want := codeq.Counts{Ready: 1, Done: 10, Canceled: 11, Dead: 8}
				require.Equal(f, want, f.Counts("a"))
				f.Reopen()
				require.Equal(f, want, f.Counts("a"))
				time.Sleep(70 * time.Minute)
				require.Equal(f, codeq.Counts{Ready: 1, Dead: 8}, f.Counts("a"))
				f.Reopen()
				require.Equal(f, codeq.Counts{Ready: 1, Dead: 8}, f.Counts("a"))
				time.Sleep(70 * time.Minute)
				require.Equal(f, codeq.Counts{Ready: 1}, f.Counts("a"))
				f.RequireGone(dead[2:]...)
				f.Reopen()
				require.Equal(f, codeq.Counts{Ready: 1}, f.Counts("a"))
			})
		})
	}
}

// TestExpiryWhileClosed: what should have been forgotten while the queue was
// closed is when it is opened, and nothing else.
func TestExpiryWhileClosed(t *testing.T) {
	t.Parallel()
	for _, shards := range []int{1, 3} {
		inFlow(t, codeq.Options{Shards: shards}, func(f *codeq.FlowTest) {
			var ids []codeq.ID
			for _, retention := range []time.Duration{time.Hour, 2 * time.Hour, codeq.Forever} {
				for range 5 {
					ids = append(ids, produce(f.T, f.Q, codeq.Task{Queue: "a", Retention: retention})...)
					f.Complete("a")
				}
			}
			require.NoError(f, f.Q.Close())
			time.Sleep(90 * time.Minute)
			f.Open()
			f.Check()
			f.RequireGone(ids[:5]...)
			f.RequireState(codeq.Done, ids[5:]...)
			require.Equal(f, codeq.Counts{Done: 10}, f.Counts("a"))
			time.Sleep(time.Hour)
			f.RequireGone(ids[5:10]...)
			f.RequireState(codeq.Done, ids[10:]...)
			require.Equal(f, codeq.Counts{Done: 5}, f.Counts("a"))
		})
	}
}

// TestUnknownAfterExpiry: verbs do not find what has expired, from the moment
// at which its bucket ends.
func TestUnknownAfterExpiry(t *testing.T) {
	ctx := context.Background()
	inFlow(t, codeq.Options{Shards: 1}, func(f *codeq.FlowTest) {
		require.NoError(f, f.Q.Configure(ctx, "a", func(s *codeq.Settings) { s.DeadRetention = time.Minute }))
		id := produce(f.T, f.Q, codeq.Task{Queue: "a"})[0]
		f.Die("a")
		time.Sleep(2 * time.Minute)
		f.Check()
		require.ErrorIs(f, f.Q.RedriveDead(ctx, id), codeq.ErrNotFound)
		require.ErrorIs(f, f.Q.Cancel(ctx, id), codeq.ErrNotFound)
		_, err := f.Q.Await(ctx, id)
		require.ErrorIs(f, err, codeq.ErrNotFound)
		child := produce(f.T, f.Q, codeq.Task{Queue: "child", After: []codeq.ID{id}})[0]
		f.RequireState(codeq.Ready, child) // a parent that is no more counts as completed
	})
}

// TestBucketsAreNoNarrowerThanASecond: short retentions do not make more of them.
func TestBucketsAreNoNarrowerThanASecond(t *testing.T) {
	for r := int64(1); r < 20_000; r++ {
		until := map[uint64]bool{}
		for wall := uint64(5_000_000); wall < 5_002_000; wall += 100 {
			until[keys.BucketOf(wall, r)] = true
		}
		require.LessOrEqual(t, len(until), 3, "buckets that two seconds need, with a retention of %d ms", r)
	}
}
