package codeq

import (
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/engine"
	"codeq/internal/inspect"
)

// TestDueAtOnceClockSetBack: the clock is set back when some of the tasks are ready
// that were due at one moment, others are scheduled to that moment again, whose IDs are before
// those of the rest, and all become ready when it comes.
func TestDueAtOnceClockSetBack(t *testing.T) {
	t.Parallel()
	var skew atomic.Int64
	wall := func() time.Time { return time.Now().Add(time.Duration(skew.Load())) }
	bubble(t, *inspect.With(&Options{Shards: 1}, inspect.Private{Wall: wall}), func(t *testing.T, q *Queue) {
		due := time.Now().Add(time.Hour)
		early := produce(t, q, slices.Repeat([]Task{{Queue: "early", RunAt: due.Add(time.Hour)}}, 3)...)
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
