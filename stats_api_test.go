package codeq_test

import (
	"errors"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/testkit"
)

// TestStorageStatsWhileClosing: there are numbers, or ErrClosed.
func TestStorageStatsWhileClosing(t *testing.T) {
	t.Parallel()
	for range 20 {
		q, err := codeq.Open(t.TempDir(), &codeq.Options{Shards: 3})
		require.NoError(t, err)
		var asking sync.WaitGroup
		begun := make(chan struct{})
		asking.Go(func() {
			for n := 0; ; n++ {
				if n == 1 {
					close(begun)
				}
				if _, err := q.StorageStats(); errors.Is(err, codeq.ErrClosed) {
					return
				} else if err != nil {
					t.Error(err)
					return
				}
			}
		})
		<-begun
		require.NoError(t, q.Close())
		asking.Wait()
	}
}

// TestCacheBytes: readers have as much of the block cache as Options says, whatever memtables
// occupy, and find there what they have read before.
func TestCacheBytes(t *testing.T) {
	t.Parallel()
	const cache, memTable, shards = 8 << 20, 2 << 20, 2
	q, err := codeq.Open(t.TempDir(), &codeq.Options{Shards: shards, CacheBytes: cache, MemTableBytes: memTable})
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	rng, payload := testkit.Seeded(t), make([]byte, 8<<10)
	var ids []codeq.ID
	for range 48 << 20 / len(payload) {
		for k := range payload {
			payload[k] = byte(rng.Uint32()) // that nothing compresses
		}
		ids = append(ids, produce(t, startingAt(q, len(ids)%shards), codeq.Task{Queue: "a", Payload: payload})...)
	}
	read := func(ids []codeq.ID) (hits float64) {
		before, err := q.StorageStats()
		require.NoError(t, err)
		for _, id := range ids {
			_, err := q.Get(t.Context(), id)
			require.NoError(t, err)
		}
		after, err := q.StorageStats()
		require.NoError(t, err)
		require.LessOrEqual(t, after.CacheBytes, int64(cache+shards*memTable))
		n := after.CacheHits - before.CacheHits
		return float64(n) / float64(n+after.CacheMisses-before.CacheMisses)
	}
	read(ids)
	st, err := q.StorageStats()
	require.NoError(t, err)
	require.Greater(t, st.CacheBytes, int64(cache*3/4))
	some := ids[:cache/2/len(payload)]
	read(some)
	require.Greater(t, read(some), 0.9)
}
