package fsck

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/failstop"
	"codeq/internal/integrity"
	"codeq/internal/keys"
	"codeq/internal/store"
	"codeq/internal/testkit"
)

// entriesOf returns the entries of a store, by key.
func entriesOf(t *testing.T, db *pebble.DB) map[string]string {
	t.Helper()
	entries := make(map[string]string)
	it, err := db.NewIter(nil)
	require.NoError(t, err)
	for valid := it.First(); valid; valid = it.Next() {
		entries[string(it.Key())] = string(it.Value())
	}
	require.NoError(t, it.Close())
	return entries
}

// TestSalvage damages a block with entries, in overlapping tables of several levels: the salvage
// finds each entry that can be read alone.
func TestSalvage(t *testing.T) {
	disk := crashfs.New()
	opts := &pebble.Options{FS: disk, FormatMajorVersion: store.Format, DisableAutomaticCompactions: true, LoggerAndTracer: failstop.New(slog.New(slog.DiscardHandler), "store")}
	for i := range opts.Levels {
		opts.Levels[i].BlockSize, opts.Levels[i].IndexBlockSize = 256, 100
	}
	db, err := pebble.Open("store", opts)
	require.NoError(t, err)
	for _, layer := range []struct{ from, to, step int }{{0, 400, 4}, {100, 110, 3}, {150, 300, 2}, {290, 395, 5}} {
		for i := layer.from; i < layer.to; i += layer.step {
			require.NoError(t, db.Set(fmt.Appendf([]byte{keys.Task}, "%04d", i), fmt.Appendf(nil, "value %d", i), nil))
		}
		require.NoError(t, db.Flush())
		if layer.from == 0 {
			require.NoError(t, db.Compact(context.Background(), []byte{0}, []byte{0xff}, false))
		}
	}
	want := entriesOf(t, db)
	require.NoError(t, db.Close())
	names, err := disk.List("store")
	require.NoError(t, err)
	lost, damaged := 0, 0
	for _, name := range names {
		path := disk.PathJoin("store", name)
		if !integrity.IsTable(path) {
			continue
		}
		r, err := store.OpenTable(disk, path)
		require.NoError(t, err)
		blocks, _ := testkit.Blocks(t, r)
		for _, at := range blocks {
			disk := cloneStore(t, disk, "store")
			testkit.Overwrite(t, disk, path, at+8, "damage")
			damaged++
			db, err := store.OpenForReading(disk, "store")
			require.NoError(t, err)
			s, err := newSalvage(db)
			require.NoError(t, err)
			got := make(map[string]string)
			require.NoError(t, s.scan(keys.Task, func(key, value []byte) {
				require.NotContains(t, got, string(key))
				got[string(key)] = string(value)
			}))
			for key, value := range want {
				if s.has([]byte(key)) {
					require.Equal(t, value, got[key], "%s, block at %d: %s", name, at, key)
					// nothing shows that the last entry before a block is the last one
				} else if _, found := got[key]; !found {
					lost++
				}
			}
			require.Equal(t, len(got) < len(want), s.gaps[keys.Task])
			require.NoError(t, db.Close())
		}
	}
	t.Logf("%d blocks damaged, which hide %d entries", damaged, lost)
	require.Greater(t, damaged, 10)
	require.Positive(t, lost)
}

// cloneStore copies the files of a directory to another file system.
func cloneStore(t *testing.T, from *crashfs.Disk, dir string) *crashfs.Disk {
	t.Helper()
	to := crashfs.New()
	ok, err := vfs.Clone(from, to, dir, dir)
	require.NoError(t, err)
	require.True(t, ok)
	return to
}

// TestGather compares the entries gathered from the tables and logs of a store with the entries
// that Pebble reads. No entry is missing or older, no matter how compactions have changed sequence
// numbers. If a table is missing, only its own entries are missing.
func TestGather(t *testing.T) {
	rng := testkit.Seeded(t)
	rounds := testkit.Sized(4, 12)
	back := 0
	for range rounds {
		disk := crashfs.New()
		db, err := pebble.Open("store", &pebble.Options{FS: disk, FormatMajorVersion: store.Format, L0CompactionThreshold: 2, LoggerAndTracer: failstop.New(slog.New(slog.DiscardHandler), "store")})
		require.NoError(t, err)
		const n = 40
		key := func() []byte { return fmt.Appendf(nil, "k%02d", rng.IntN(n)) }
		var snap *pebble.Snapshot
		for op := range 400 {
			b := db.NewBatch()
			for range 1 + rng.IntN(4) {
				switch r := rng.IntN(24); {
				case r < 14:
					require.NoError(t, b.Set(key(), fmt.Append(nil, op), nil))
				case r < 22:
					require.NoError(t, b.Delete(key(), nil))
				case r == 22:
					require.NoError(t, b.DeleteRange(key(), key(), nil))
				default: // written once
					once := fmt.Appendf(nil, "once %d", op)
					require.NoError(t, db.Set(once, nil, pebble.NoSync))
					if rng.IntN(2) == 0 {
						require.NoError(t, db.Flush())
					}
					require.NoError(t, b.SingleDelete(once, nil))
				}
			}
			require.NoError(t, b.Commit(pebble.Sync))
			switch rng.IntN(40) {
			case 0, 1, 2:
				require.NoError(t, db.Flush())
			case 3:
				if a, z := key(), key(); bytes.Compare(a, z) < 0 {
					require.NoError(t, db.Compact(context.Background(), a, z, false))
				}
			case 4: // compactions keep the entries in it
				if snap != nil {
					require.NoError(t, snap.Close())
				}
				snap = db.NewSnapshot()
			}
		}
		want := entriesOf(t, db)
		if snap != nil {
			require.NoError(t, snap.Close())
		}
		require.NoError(t, db.Close())
		gathered := func(disk *crashfs.Disk) map[string]string {
			db, err := gatherStore(disk, "store", "gathered")
			require.NoError(t, err)
			got := entriesOf(t, db)
			require.NoError(t, errors.Join(db.Close(), disk.RemoveAll("gathered")))
			return got
		}
		got := gathered(disk)
		for key, value := range want {
			require.Equal(t, value, got[key], key)
		}
		back += len(got) - len(want)
		names, err := disk.List("store")
		require.NoError(t, err)
		for _, name := range names {
			if !integrity.IsTable(name) {
				continue
			}
			of := crashfs.New() // that table alone
			require.NoError(t, of.MkdirAll("store", 0o755))
			_, err := vfs.Clone(disk, of, disk.PathJoin("store", name), of.PathJoin("store", name))
			require.NoError(t, err)
			its := gathered(of)
			disk := cloneStore(t, disk, "store")
			require.NoError(t, disk.Remove(disk.PathJoin("store", name)))
			got := gathered(disk)
			for key, value := range want {
				if its[key] != value {
					require.Equal(t, value, got[key], "%s without %s", key, name)
				}
			}
		}
	}
	t.Logf("%d deleted entries are back", back)
}
