package codeq

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/keys"
	"codeq/internal/owner"
)

// TestStatsAmidRestore: while the store of a replica is being replaced, its statistics report that.
func TestStatsAmidRestore(t *testing.T) {
	q := loneNode(t, 1)
	r := q.replicas[0]
	open := r.slot.Store()
	r.slot.Set(nil) // as between the stores, when the next one does not open
	st, err := q.StorageStats()
	require.NoError(t, err)
	require.Equal(t, []ShardStorage{{LastError: "codeq: shard 0: its store is not open"}}, st.Shards)
	r.slot.Set(open)
}

// TestQuantileOfUpkeep: of 100 steps, 90 took 5 us and 10 took 1 ms.
func TestQuantileOfUpkeep(t *testing.T) {
	var table owner.UpkeepTable
	require.Zero(t, upkeepStats(&table)[UpkeepReap].Quantile(0.99))
	for i := range 100 {
		took := 5 * time.Microsecond
		if i%10 == 0 {
			took = time.Millisecond
		}
		table.Note(uint8(UpkeepReap), took, 1, 1)
	}
	table.Note(uint8(UpkeepWake), time.Hour, 1, 1)
	st := upkeepStats(&table)[UpkeepReap]
	require.EqualValues(t, 100, st.Count)
	require.Equal(t, 8*time.Microsecond, st.Quantile(0.5))
	require.Equal(t, 8*time.Microsecond, st.Quantile(0.9))
	require.Equal(t, time.Millisecond, st.Quantile(0.91))
	require.EqualValues(t, 1, upkeepStats(&table)[UpkeepWake].Buckets[owner.UpkeepBuckets-1])
}

// TestObservationIsBounded: beyond a number of queues, the others are reported together, and the
// memory for many queues is not kept. No change is lost.
func TestObservationIsBounded(t *testing.T) {
	o := new(observed)
	for round := range 2 {
		var sum uint64
		const queues = observedQueues + 100
		for i := range uint64(queues) {
			for range 2 {
				o.delta(fmt.Sprint(round, "-", i)).add(&keys.Totals{EventProduced - 1: i})
				sum += i
			}
			o.addCommit(CommitSample{})
		}
		require.Len(t, o.Queues, observedQueues+1)
		for i, d := range o.Queues {
			sum -= d.Produced
			require.Equal(t, i == observedQueues, d.Queue == "")
		}
		require.Zero(t, sum)
		require.Len(t, o.Commits, observedSamples)
		require.EqualValues(t, queues-observedSamples, o.MissedCommits)
		o.Reset()
		require.Zero(t, cap(o.Queues))
		require.Empty(t, o.index)
		require.Equal(t, Observation{Commits: o.Commits, Handlers: o.Handlers}, o.Observation)
		require.Empty(t, o.Commits)
	}
}
