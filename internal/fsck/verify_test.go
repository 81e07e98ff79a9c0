package fsck

import (
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/manifest"
	"codeq/internal/store"
)

// TestVerifyClosesWhatLeaks: Pebble can lose an iterator over damaged data. Verify reports a store
// with a lost iterator as a problem, and does not panic.
func TestVerifyClosesWhatLeaks(t *testing.T) {
	disk := crashfs.New()
	db, err := pebble.Open("shard", &pebble.Options{FS: disk, FormatMajorVersion: store.Format})
	require.NoError(t, err)
	require.NoError(t, db.Set([]byte("a"), []byte("b"), nil))
	require.NoError(t, db.Flush())
	require.NoError(t, db.Close())

	db, err = store.OpenForReading(disk, "shard")
	require.NoError(t, err)
	it, err := db.NewIter(nil)
	require.NoError(t, err)
	require.True(t, it.First())
	v := verifier{Directory: manifest.New(disk, "q", manifest.Manifest{Shards: 1}), report: new(Report)}
	require.NoError(t, v.close(0, "shard", db, true))
	require.Len(t, v.report.Problems, 1)
	require.Contains(t, v.report.Problems[0].Text, "cannot be closed")
}
