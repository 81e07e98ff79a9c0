package codeq

import (
	"context"
	"errors"
	"io/fs"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestStorageStats holds what the stores say against the directory.
func TestStorageStats(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	opts := &Options{Shards: 2, MemTableBytes: 256 << 10}
	q, err := Open(dir, opts)
	require.NoError(t, err)
	stats := func() (st *StorageStats) {
		require.Eventually(t, func() bool { // Pebble deletes files meanwhile
			st, err = q.StorageStats()
			require.NoError(t, err)
			require.Len(t, st.Shards, 2)
			disk, size := st.Shards[0].DiskBytes+st.Shards[1].DiskBytes, sizeOf(t, dir)
			return disk > size*9/10-16<<10 && disk < size*11/10+16<<10
		}, 10*time.Second, time.Millisecond)
		return st
	}
	empty := stats()
	payload := make([]byte, 8<<10)
	const tasks = 200 // of which a shard gets 200 KiB times four: some memtables full
	for range tasks / 2 {
		for i := range 2 {
			_, err := q.startingAt(i).ProduceBatch(t.Context(), []Task{{Queue: "a", Payload: payload}})
			require.NoError(t, err)
		}
	}
	full := stats()
	var logged int64
	for i, s := range full.Shards {
		require.Greater(t, s.DiskBytes, empty.Shards[i].DiskBytes)
		require.Positive(t, s.MemTableBytes)
		require.Positive(t, s.LogBytes)
		require.GreaterOrEqual(t, s.LoggedBytes, s.LogBytes)
		logged += s.LoggedBytes
	}
	require.GreaterOrEqual(t, logged, int64(tasks*len(payload)))
	require.Less(t, logged, int64(2*tasks*len(payload)))
	for _, s := range q.led() {
		require.NoError(t, s.Store.Flush(context.Background()))
	}
	flushed := stats()
	var tables int64
	for i, s := range flushed.Shards {
		require.Greater(t, s.Flushes, empty.Shards[i].Flushes)
		require.Positive(t, s.Tables)
		require.Positive(t, s.FlushedBytes)
		require.Positive(t, s.ReadAmp)
		require.LessOrEqual(t, s.L0Tables, s.Tables)
		require.Less(t, s.LogBytes, full.Shards[i].LogBytes)
		tables += s.TableBytes
	}
	require.NoError(t, q.Close())
	_, err = q.StorageStats()
	require.ErrorIs(t, err, ErrClosed)

	// What counts begins again; what is, does not.
	q, err = Open(dir, opts)
	require.NoError(t, err)
	var reopened int64
	for i, s := range stats().Shards {
		require.Less(t, s.LoggedBytes, full.Shards[i].LoggedBytes)
		reopened += s.TableBytes
	}
	require.Positive(t, reopened)
	require.LessOrEqual(t, reopened, 2*tables)
	_, err = q.ClaimBatch(t.Context(), ClaimRequest{Queues: []string{"a"}, Max: 10})
	require.NoError(t, err)
	st := stats()
	require.Positive(t, st.CacheHits+st.CacheMisses)
	require.Positive(t, st.CacheBytes)
	require.NoError(t, q.Close())
}

func sizeOf(t *testing.T, dir string) (bytes int64) {
	require.NoError(t, filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			var info fs.FileInfo
			if info, err = e.Info(); err == nil {
				bytes += info.Size()
			}
		}
		if errors.Is(err, fs.ErrNotExist) { // deleted meanwhile
			return nil
		}
		return err
	}))
	return bytes
}

// TestClusterStorageStats: every node has its replicas, and no log beside Raft's.
func TestClusterStorageStats(t *testing.T) {
	t.Parallel()
	qs := threeNodes(t, Options{Shards: 1}, nil)
	_, err := qs[0].Produce(t.Context(), Task{Queue: "a", Payload: make([]byte, 1000)})
	require.NoError(t, err)
	for _, q := range qs {
		st, err := q.StorageStats()
		require.NoError(t, err)
		require.Len(t, st.Shards, 1)
		require.Positive(t, st.Shards[0].DiskBytes)
		require.Positive(t, st.Shards[0].MemTableBytes)
		require.Zero(t, st.Shards[0].LogBytes)
		require.Zero(t, st.Shards[0].LoggedBytes)
	}
	r := qs[0].replicas[0]
	r.mu.Lock()
	source := r.source
	r.source = nil // as between the stores, when the next one does not open
	r.mu.Unlock()
	st, err := qs[0].StorageStats()
	require.NoError(t, err)
	require.Positive(t, st.FreeBytes)
	require.Equal(t, []ShardStorage{{LastError: "codeq: shard 0: its store is not open"}}, st.Shards)
	r.mu.Lock()
	r.source = source
	r.mu.Unlock()
}
