package failstop

import (
	"context"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/testkit"
)

// TestReserve: vital work uses the space of the reserve when there is no other space. No other work
// begins until the reserve exists again. A failed sync is not repeated.
func TestReserve(t *testing.T) {
	for _, c := range []struct {
		what  string
		kinds []errorfs.OpKind
		part  string
		ends  bool
	}{
		{"a log is written", []errorfs.OpKind{errorfs.OpFileWrite}, ".log", false},
		{"a log is begun", []errorfs.OpKind{errorfs.OpCreate}, ".log", false},
		{"a MANIFEST is written", []errorfs.OpKind{errorfs.OpFileWrite}, "MANIFEST", false},
		{"a log is synced", []errorfs.OpKind{errorfs.OpFileSync, errorfs.OpFileSyncData, errorfs.OpFileSyncTo}, ".log", true},
	} {
		t.Run(c.what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var armed, full atomic.Bool // full: there is no room for the reserve either
				var failed atomic.Int64
				fs := errorfs.Wrap(crashfs.New(), errorfs.InjectorFunc(func(op errorfs.Op) error {
					switch {
					case full.Load() && strings.HasSuffix(op.Path, "RESERVE") && op.Kind == errorfs.OpCreate:
						return syscall.ENOSPC
					case armed.Load() && slices.Contains(c.kinds, op.Kind) && strings.Contains(op.Path, c.part):
						armed.Store(false) // the reserve has room
						full.Store(true)
						failed.Add(1)
						return syscall.ENOSPC
					}
					return nil
				}))
				l := New(slog.New(slog.DiscardHandler), "store")
				o := &pebble.Options{FS: fs, FormatMajorVersion: pebble.FormatColumnarBlocks, MemTableSize: 64 << 10}
				db, err := l.Open(dir, o)
				require.NoError(t, err)
				require.NoError(t, l.Ready(db))
				flush := func() {
					for i := range 3 {
						require.NoError(t, db.Set(key(i), make([]byte, 100), pebble.Sync))
					}
					_, err := db.AsyncFlush() // it waits until there is room
					require.NoError(t, err)
					synctest.Wait()
				}
				armed.Store(true)
				if c.ends {
					_ = db.Set(key(0), nil, pebble.Sync)
					require.ErrorIs(t, l.Err(), syscall.ENOSPC)
					require.NoError(t, db.Close())
					return
				}
				flush()
				require.EqualValues(t, 1, failed.Load())
				require.NoError(t, l.Err())
				require.Equal(t, ErrNoSpace, l.Ready(db))
				require.True(t, l.NoSpace())
				time.Sleep(time.Second)
				require.Equal(t, ErrNoSpace, l.Ready(db))
				l.Hurry()
				require.Equal(t, ErrNoSpace, l.Ready(db), "for those who are still decided before the store is closed")
				full.Store(false)
				time.Sleep(time.Second)
				require.NoError(t, l.Ready(db))
				require.False(t, l.NoSpace())
				require.NoError(t, l.Close(db))
				db, err = New(slog.New(slog.DiscardHandler), "store").Open(dir, o)
				require.NoError(t, err)
				_, closer, err := db.Get(key(2))
				require.NoError(t, err)
				require.NoError(t, closer.Close())
				require.NoError(t, db.Close())
			})
		})
	}
}

// TestReserveOfFiles: on a disk without room for another file, a commit and a flush at the same
// time still begin their logs. No other work begins a log until there is room.
func TestReserveOfFiles(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := testkit.NewSmallDisk(1 << 30)
		l := New(slog.New(slog.DiscardHandler), "store")
		db, err := l.Open(dir, &pebble.Options{
			FS: disk, FormatMajorVersion: pebble.FormatColumnarBlocks, MemTableSize: 64 << 10, MemTableStopWritesThreshold: 4,
		})
		require.NoError(t, err)
		require.NoError(t, l.Ready(db))
		synctest.Wait() // until Pebble has removed the files from its open
		disk.FillNodes()
		begin := func(n int) {
			require.NoError(t, db.Set(key(n), make([]byte, 100), pebble.Sync))
			_, err := db.AsyncFlush()
			require.NoError(t, err)
		}
		begin(0)
		begin(1)
		require.ErrorIs(t, l.Flush(t.Context(), db), syscall.ENOSPC)
		require.NoError(t, l.Err())
		require.Equal(t, ErrNoSpace, l.Ready(db))
		disk.Nodes.Store(1 << 30)
		time.Sleep(time.Second)
		require.NoError(t, l.Ready(db))
		require.NoError(t, l.Flush(t.Context(), db))
		require.NoError(t, l.Close(db))
	})
}

// TestReserveIsBegun: during the first creation of the reserve, which takes a while on a slow disk,
// the disk does not count as full.
func TestReserveIsBegun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		goOn := make(chan struct{})
		fs := &testkit.HookFS{FS: crashfs.New(), Before: func(op, name string) error {
			if op == "create" && strings.HasSuffix(name, "RESERVE") {
				<-goOn
			}
			return nil
		}}
		l := New(slog.New(slog.DiscardHandler), "store")
		db, err := l.Open(dir, &pebble.Options{FS: fs, FormatMajorVersion: pebble.FormatColumnarBlocks})
		require.NoError(t, err)
		ready := make(chan error, 1)
		go func() { ready <- l.Ready(db) }()
		synctest.Wait()
		require.False(t, l.NoSpace())
		require.NoError(t, l.Ready(db))
		close(goOn)
		require.NoError(t, <-ready)
		require.NoError(t, l.Close(db))
	})
}

// TestReserveHasSpaceFirst: if the process may open no further file, the reserve still gets its
// space. If there is no space, the reserve opens one file.
func TestReserveHasSpaceFirst(t *testing.T) {
	for _, full := range []bool{false, true} {
		disk, created := testkit.NewSmallDisk(1<<30), 0
		fs := &testkit.HookFS{FS: disk, Before: func(op, name string) error {
			if op != "create" || !strings.HasSuffix(name, "RESERVE") {
				return nil
			}
			if created++; created > 2 {
				return syscall.EMFILE
			}
			return nil
		}}
		l := New(slog.New(slog.DiscardHandler), "store")
		db, err := l.Open(dir, &pebble.Options{FS: fs, FormatMajorVersion: pebble.FormatColumnarBlocks})
		require.NoError(t, err)
		before := disk.Used.Load()
		if full {
			disk.Free(reserveBytes - 1)
		}
		require.Equal(t, full, l.NoSpace())
		if full {
			require.Equal(t, 1, created)
			disk.Free(1 << 30)
		} else {
			require.EqualValues(t, reserveBytes, disk.Used.Load()-before)
		}
		require.NoError(t, l.Close(db))
	}
}

// TestFlushesShareTheReserve: several flushes may come at one moment, as for all groups of a log.
// The flushes after the first one begin no log that would exceed the reserve.
func TestFlushesShareTheReserve(t *testing.T) {
	disk := testkit.NewSmallDisk(1 << 30)
	var asked atomic.Int64
	const flushes = 3 * reserveFiles
	fs := &testkit.HookFS{FS: disk, Before: func(op, name string) error {
		if op == "create" && isLog(name) && asked.Load() > 0 {
			for range 1000 { // until the others can do no more
				runtime.Gosched()
			}
		}
		return nil
	}}
	l := New(slog.New(slog.DiscardHandler), "store")
	db, err := l.Open(dir, &pebble.Options{FS: fs, FormatMajorVersion: pebble.FormatColumnarBlocks, MemTableStopWritesThreshold: 2 * flushes})
	require.NoError(t, err)
	require.NoError(t, l.Ready(db))
	require.NoError(t, db.Set(key(0), nil, pebble.Sync))
	disk.FillNodes()
	ctx, end := context.WithCancel(t.Context())
	var flushing sync.WaitGroup
	for range flushes {
		flushing.Go(func() {
			asked.Add(1)
			_ = l.Flush(ctx, db)
		})
	}
	require.Eventually(t, func() bool { return asked.Load() == flushes && l.NoSpace() }, 10*time.Second, time.Millisecond)
	end()
	flushing.Wait()
	require.NoError(t, l.Err())
	disk.Nodes.Store(1 << 30)
	require.Eventually(t, func() bool { return l.Ready(db) == nil }, 10*time.Second, time.Millisecond)
	require.NoError(t, l.Flush(t.Context(), db))
	require.NoError(t, l.Close(db))
}
