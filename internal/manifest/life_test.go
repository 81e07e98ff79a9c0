package manifest

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
)

// TestLives: each time that a node's directory is opened begins a life with a larger number, which
// is on disk, also if the clock was set back or the directory is an older copy.
func TestLives(t *testing.T) {
	fs := vfs.NewCrashableMem()
	begin := func() uint64 {
		d, err := Open(fs, "q", Want{Shards: 1, Node: "n"})
		require.NoError(t, err)
		require.NoError(t, d.Take(false, "", nil))
		require.NoError(t, d.Close()) // as when its process is killed
		return d.Life
	}
	first := begin()
	fs = fs.CrashClone(vfs.CrashCloneCfg{})
	m, err := Read(fs, "q")
	require.NoError(t, err)
	require.Equal(t, first, m.Life)
	require.WithinDuration(t, time.Now(), time.UnixMilli(int64(first>>lifeChance)), time.Minute)
	second := begin()
	require.Greater(t, second, first)

	synctest.Test(t, func(t *testing.T) { // at the year 2000
		third := begin()
		require.Greater(t, third, second)
		require.NotEqual(t, LifeAfter(second), LifeAfter(second), "of copies of the directory")
		copied := LifeAfter(0)
		time.Sleep(time.Second)
		require.Greater(t, LifeAfter(0), copied)
	})
	d, err := Open(fs, "alone", Want{Shards: 1})
	require.NoError(t, err)
	require.NoError(t, d.Take(false, "", nil))
	require.Zero(t, d.Life)
	require.NoError(t, d.Close())
}
