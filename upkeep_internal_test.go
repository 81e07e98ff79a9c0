package codeq

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/owner"
)

// TestUpkeepStats: what an owner does is counted by kind, with its duration and its size.
func TestUpkeepStats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, err := Open(t.TempDir(), &Options{Shards: 1})
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		steps := func() []UpkeepStats {
			synctest.Wait()
			st, err := q.StorageStats()
			require.NoError(t, err)
			require.Len(t, st.Shards[0].Upkeep, int(endOfUpkeepKinds))
			return st.Shards[0].Upkeep
		}
		before := steps()
		produce(t, q, Task{Queue: "a", Payload: make([]byte, 1000)})
		after := steps()
		for i := range after {
			require.Equal(t, UpkeepKind(i), after[i].Kind)
			require.NotEmpty(t, after[i].Kind.String())
			n := after[i].Count - before[i].Count
			switch after[i].Kind {
			case UpkeepOperations, UpkeepSeal, UpkeepCommit, UpkeepRelease, UpkeepGroup:
				require.EqualValues(t, 1, n, after[i].Kind)
			default:
				require.Zero(t, n, after[i].Kind)
			}
		}
		require.Greater(t, after[UpkeepOperations].MaxBytes, int64(1000))
		require.Greater(t, after[UpkeepCommit].MaxBytes, int64(1000))
		require.Greater(t, after[UpkeepGroup].MaxBytes, int64(1000))
		require.GreaterOrEqual(t, after[UpkeepCommit].MaxRecords, int64(2), "the task, and counters")

		// A step that takes long.
		s := q.shard(0)
		require.NoError(t, s.probe(func(*shard) error {
			time.Sleep(3 * time.Millisecond)
			return nil
		}))
		slow := steps()[UpkeepOperations]
		require.Equal(t, 3*time.Millisecond, slow.Max)
		require.EqualValues(t, 1, slow.Buckets[12], "2,048 us to 4,096 us")
		require.Equal(t, slow.Max, slow.Quantile(1))
		require.LessOrEqual(t, slow.Quantile(0.5), time.Microsecond)
		require.Equal(t, UpkeepOperations, longestUpkeep(t, q, UpkeepGroup).Kind)
		require.Equal(t, UpkeepGroup, longestUpkeep(t, q, UpkeepOperations).Kind)

		// Upkeep is counted when it has something to do, with what it reads.
		l := claimNow(t, q, "a")
		time.Sleep(time.Until(l.Deadline) + time.Second)
		reaped := steps()[UpkeepReap]
		require.Positive(t, reaped.Count)
		require.GreaterOrEqual(t, reaped.MaxRecords, int64(2), "a record is read, and written")
		require.Greater(t, reaped.MaxBytes, int64(2000))
	})
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
