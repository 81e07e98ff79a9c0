package codeq

import (
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/engine"
)

// walkedFor is how many keys the owner of the first shard steps over until do
// has returned and the shard rests.
func walkedFor(t *testing.T, q *Queue, do func()) (keys uint64) {
	t.Helper()
	walked := func() (n uint64) {
		require.NoError(t, q.shard(0).probe(func(s *shard) error { n = s.Probe().Usage().Walked; return nil }))
		return n
	}
	before := walked()
	do()
	synctest.Wait()
	return walked() - before
}

// TestDueAtOnce: what tasks cost that become due at one moment is in proportion to their
// number, however many groups it takes: each is read once. So are idempotency keys
// that become free at one moment.
func TestDueAtOnce(t *testing.T) {
	t.Parallel()
	const batch, batches, slack = 512, 20, 4
	tasks := func(template Task, n int) []Task {
		all := make([]Task, n)
		for i := range all {
			all[i] = template
		}
		return all
	}
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		due := time.Now().Add(time.Hour)
		const n = batch * batches
		for range batches {
			_, err := q.ProduceBatch(t.Context(), tasks(Task{Queue: "a", RunAt: due}, batch))
			require.NoError(t, err)
		}
		require.LessOrEqual(t, walkedFor(t, q, func() { time.Sleep(time.Hour) }), uint64(slack*n))
		stats, err := q.Stats(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, n, stats["a"].Ready)
		requireSettled(t, q)

		for g := range batches {
			unique := tasks(Task{Queue: "b"}, batch)
			for i := range unique {
				unique[i].Unique = Unique{Key: fmt.Sprint(g, " ", i), For: 24 * time.Hour}
			}
			_, err := q.ProduceBatch(t.Context(), unique)
			require.NoError(t, err)
		}
		require.LessOrEqual(t, walkedFor(t, q, func() { time.Sleep(25 * time.Hour) }), uint64(slack*n))
		requireSettled(t, q)
	})
}

// TestDueAtOnceClockSetBack: the clock is set back when some of the tasks are ready
// that were due at one moment, others are scheduled to that moment again, whose IDs are before
// those of the rest, and all become ready when it comes.
func TestDueAtOnceClockSetBack(t *testing.T) {
	t.Parallel()
	var skew atomic.Int64
	wall := func() time.Time { return time.Now().Add(time.Duration(skew.Load())) }
	bubble(t, Options{Shards: 1, wall: wall}, func(t *testing.T, q *Queue) {
		due := time.Now().Add(time.Hour)
		early := produce(t, q, named(Task{Queue: "early", RunAt: due.Add(time.Hour)}, "a", "b", "c")...)
		late := make([]Task, 3*engine.UpkeepBudget.Records)
		for i := range late {
			late[i] = Task{Queue: "late", RunAt: due}
		}
		_, err := q.ProduceBatch(t.Context(), late)
		require.NoError(t, err)
		s := q.shard(0)
		hold, held := make(chan struct{}), make(chan struct{})
		go func() {
			_ = s.probe(func(*shard) error { close(held); <-hold; return nil })
		}()
		<-held
		left := make(chan uint64, 1)
		go func() {
			_ = s.probe(func(s *shard) error {
				left <- s.Queues["late"].Counts.Scheduled
				skew.Store(-int64(time.Hour))
				return nil
			})
		}()
		synctest.Wait()
		skew.Store(int64(time.Hour))
		close(hold)
		n := <-left
		require.Positive(t, n, "callers are served in each group")
		require.Less(t, n, uint64(len(late)))
		for _, id := range early {
			require.NoError(t, q.SetRunAt(t.Context(), id, due))
		}
		requireSettled(t, q)
		skew.Store(int64(time.Hour))
		require.NoError(t, q.SetRunAt(t.Context(), early[0], due), "which wakes the owner")
		synctest.Wait()
		requireSettled(t, q)
		stats, err := q.Stats(t.Context())
		require.NoError(t, err)
		require.EqualValues(t, len(late), stats["late"].Ready)
		require.EqualValues(t, len(early), stats["early"].Ready)
	})
}
