package store

import (
	"crypto/rand"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
)

// TestTightDiskIsNotSearched: on a tight disk with nothing to reclaim, checks become rare.
func TestTightDiskIsNotSearched(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		st := openTest(t, Config{FS: crashfs.New(), MemTableBytes: 512 << 10, ReclaimFrom: 512 << 10})
		defer func() { require.NoError(t, st.Close()) }()
		n := uint32(0)
		write := func(value []byte) {
			n++
			b := st.DB().NewBatch()
			require.NoError(t, b.Set([]byte{'k', byte(n >> 16), byte(n >> 8), byte(n)}, value, nil))
			require.NoError(t, st.Commit(b))
			require.NoError(t, b.Close())
		}
		value := make([]byte, 16<<10)
		for range 1024 {
			_, _ = rand.Read(value)
			require.True(t, st.HasSpace())
			write(value)
		}
		time.Sleep(time.Minute)
		looks, last := 0, st.reclaimer.sizes.Load()
		for range 600 {
			time.Sleep(100 * time.Millisecond)
			write([]byte("small"))
			st.Reclaim(16 << 20)
			synctest.Wait()
			if now := st.reclaimer.sizes.Load(); now != last {
				looks, last = looks+1, now
			}
		}
		require.Less(t, looks, 60)
		require.Greater(t, looks, 10)
	})
}
