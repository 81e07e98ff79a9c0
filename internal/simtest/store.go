package simtest

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"maps"
	"path"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/failstop"
	"codeq/internal/integrity"
	"codeq/internal/keys"
	"codeq/internal/manifest"
	"codeq/internal/store"
)

// StoreContents returns the contents of all files below a directory by name, without the lock.
func StoreContents(t testing.TB, disk vfs.FS, dir string) map[string]string {
	t.Helper()
	names, err := disk.List(dir)
	require.NoError(t, err)
	files := make(map[string]string)
	for _, name := range names {
		name = path.Join(dir, name)
		info, err := disk.Stat(name)
		require.NoError(t, err)
		switch {
		case info.IsDir():
			maps.Copy(files, StoreContents(t, disk, name))
		case path.Base(name) != manifest.LockName:
			f, err := disk.Open(name)
			require.NoError(t, err)
			b, err := io.ReadAll(f)
			require.NoError(t, errors.Join(err, f.Close()))
			files[name] = string(b)
		}
	}
	return files
}

// AlterStore changes the store of shard 0, and closes it in order.
func AlterStore(t testing.TB, disk vfs.FS, change func(db *pebble.DB)) {
	t.Helper()
	const dir = "queue/shard-000"
	db, err := pebble.Open(dir, &pebble.Options{FS: disk, FormatMajorVersion: store.Format, Logger: failstop.New(slog.New(slog.DiscardHandler), "store")})
	require.NoError(t, err)
	change(db)
	require.NoError(t, db.Close())
	require.NoError(t, integrity.Seal(disk, dir))
}

// StoreRecords returns the keys of the task records in the store of a shard.
func StoreRecords(t testing.TB, disk vfs.FS, dir string) map[keys.ID][]byte {
	t.Helper()
	db, err := store.OpenForReading(disk, dir)
	require.NoError(t, err)
	found := make(map[keys.ID][]byte)
	for _, prefix := range keys.RecordRanges {
		require.NoError(t, store.Scan(db, prefix, func(key, _ []byte) error {
			id, _, err := keys.ParsePlaceKey(key)
			found[id] = bytes.Clone(key)
			return err
		}))
	}
	require.NoError(t, db.Close())
	return found
}

// UnreadableRecords returns the tasks with records that the damaged store of a shard does not
// return.
func UnreadableRecords(t testing.TB, disk vfs.FS, dir string, records map[keys.ID][]byte) map[keys.ID]bool {
	t.Helper()
	db, err := store.OpenForReading(disk, dir)
	require.NoError(t, err)
	lost := make(map[keys.ID]bool)
	for id, key := range records {
		it, err := db.NewIter(&pebble.IterOptions{LowerBound: key, UpperBound: append(bytes.Clone(key), 0)})
		require.NoError(t, err)
		found := it.First()
		if err := it.Close(); err != nil {
			lost[id] = true
		} else {
			require.True(t, found)
		}
	}
	require.NoError(t, db.Close())
	return lost
}

// RequirePebbleFormat checks the format of all Pebble stores of a directory.
func RequirePebbleFormat(t testing.TB, disk vfs.FS, format uint64) {
	t.Helper()
	m, err := manifest.Read(disk, "queue")
	require.NoError(t, err)
	var stores []string
	for shard := range m.Shards {
		stores = append(stores, manifest.ShardDir(disk, "queue", shard))
	}
	if m.Node != "" {
		stores = append(stores, disk.PathJoin("queue", manifest.RaftDir))
	}
	for _, dir := range stores {
		desc, err := pebble.Peek(dir, disk)
		require.NoError(t, err)
		require.EqualValues(t, format, desc.FormatMajorVersion, dir)
	}
}

// ManifestText returns the content of the file of a manifest.
func ManifestText(t testing.TB, m manifest.Manifest) string {
	t.Helper()
	b, err := m.Encode()
	require.NoError(t, err)
	return string(b)
}
