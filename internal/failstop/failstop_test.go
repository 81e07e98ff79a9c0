package failstop

import (
	"bytes"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/integrity"
	"codeq/internal/testbase"
)

var errBroken = errors.New("the disk is broken")

const dir = "store"

// breakable returns a file system. While broken has an error, its operations of certain kinds fail
// on names with a part.
func breakable(base vfs.FS, kinds []errorfs.OpKind, part string) (vfs.FS, *atomic.Pointer[error]) {
	broken := new(atomic.Pointer[error])
	return errorfs.Wrap(base, errorfs.InjectorFunc(func(op errorfs.Op) error {
		err := broken.Load()
		if err == nil || !strings.Contains(op.Path, part) {
			return nil
		}
		for _, k := range kinds {
			if k == op.Kind {
				return *err
			}
		}
		return nil
	})), broken
}

func open(t *testing.T, l *Latch, fs vfs.FS) *pebble.DB { return openWith(t, l, fs, true) }

func openWith(t *testing.T, l *Latch, fs vfs.FS, compact bool) *pebble.DB {
	o := &pebble.Options{
		FS: fs, FormatMajorVersion: pebble.FormatColumnarBlocks, MemTableSize: 64 << 10, MemTableStopWritesThreshold: 2,
		DisableAutomaticCompactions: !compact,
	}
	db, err := l.Open(dir, o)
	require.NoError(t, err)
	return db
}

func key(i int) []byte { return fmt.Appendf(nil, "%06d", i) }

// TestFail: if a write to any of a store's own files fails, the store fails. It can be closed, and
// has all earlier commits when it is opened again.
func TestFail(t *testing.T) {
	create := []errorfs.OpKind{errorfs.OpCreate, errorfs.OpReuseForWrite}
	write := []errorfs.OpKind{errorfs.OpFileWrite}
	sync := []errorfs.OpKind{errorfs.OpFileSync, errorfs.OpFileSyncData, errorfs.OpFileSyncTo}
	for _, tc := range []struct {
		kinds []errorfs.OpKind
		part  string
	}{
		{create, ".log"},
		{write, ".log"},
		{sync, ".log"},
		{write, "MANIFEST"},
		{sync, "MANIFEST"},
		{sync, dir}, // and all files in it
	} {
		t.Run(fmt.Sprint(tc), func(t *testing.T) {
			disk := crashfs.New()
			fs, broken := breakable(disk, tc.kinds, tc.part)
			l := New(slog.New(slog.DiscardHandler), "store")
			db := open(t, l, fs)
			acked := 0
			for ; l.Err() == nil; acked++ {
				require.Less(t, acked, 1000)
				require.NoError(t, db.Set(key(acked), bytes.Repeat([]byte("x"), 1000), pebble.Sync))
				if acked == 100 {
					broken.Store(&errBroken)
				}
				if acked > 100 && tc.part == "MANIFEST" {
					require.NoError(t, db.Flush())
				}
			}
			acked-- // the one that failed
			require.ErrorIs(t, l.Err(), errBroken)
			broken.Store(nil)
			for i := range 1000 { // the store writes none of these, and none hangs
				require.NoError(t, db.Set(key(100000+i), bytes.Repeat([]byte("x"), 1000), pebble.Sync))
			}
			require.NoError(t, db.Close())

			l = New(slog.New(slog.DiscardHandler), "store")
			db = open(t, l, disk)
			it, err := db.NewIter(nil)
			require.NoError(t, err)
			n := 0
			for valid := it.First(); valid; valid = it.Next() {
				require.Equal(t, string(key(n)), string(it.Key()))
				n++
			}
			require.NoError(t, it.Close())
			require.GreaterOrEqual(t, n, acked)
			require.LessOrEqual(t, n, acked+2)
			require.NoError(t, l.Close(db))
		})
	}
}

// TestOpenFails: hidden errors during the open of a store make the latch fail.
func TestOpenFails(t *testing.T) {
	for _, kind := range []errorfs.OpKind{errorfs.OpCreate, errorfs.OpFileWrite, errorfs.OpFileSync} {
		fs, broken := breakable(crashfs.New(), []errorfs.OpKind{kind}, dir+"/")
		broken.Store(&errBroken)
		l := New(slog.New(slog.DiscardHandler), "store")
		_, err := l.Open(dir, &pebble.Options{FS: fs})
		require.ErrorIs(t, err, errBroken, kind)
	}
}

// TestNoSpace: a caller of Ready before each commit learns that flushes find no space, and does not
// wait. A caller of Throttle waits until there is space, or until the store closes or fails.
func TestNoSpace(t *testing.T) {
	const memory = 4 * 64 << 10
	for _, full := range []error{syscall.ENOSPC, syscall.EDQUOT} {
		synctest.Test(t, func(t *testing.T) {
			fs, broken := breakable(crashfs.New(), []errorfs.OpKind{errorfs.OpCreate}, ".sst")
			l := New(slog.New(slog.DiscardHandler), "store")
			l.Limit(memory, memory/4, NewMemory(memory))
			o := &pebble.Options{
				FS: fs, FormatMajorVersion: pebble.FormatColumnarBlocks, MemTableSize: 64 << 10, MemTableStopWritesThreshold: 100,
			}
			db, err := l.Open(dir, o)
			require.NoError(t, err)
			broken.Store(&full)
			n := 0
			set := func() {
				require.NoError(t, db.Set(key(n), bytes.Repeat([]byte("x"), 1000), pebble.Sync))
				l.Wrote(1000)
				n++
			}
			for l.Ready(db) == nil {
				set()
				require.Less(t, n, memory/1000)
				synctest.Wait()
			}
			require.Equal(t, ErrNoSpace, l.Ready(db))
			require.True(t, l.NoSpace())
			var waited atomic.Bool
			go func() {
				assert.NoError(t, l.Throttle(db))
				waited.Store(true)
			}()
			time.Sleep(time.Minute)
			require.False(t, waited.Load())
			broken.Store(nil)
			time.Sleep(time.Second)
			require.True(t, waited.Load())
			require.NoError(t, l.Ready(db))
			require.False(t, l.NoSpace())

			broken.Store(&full)
			for l.Ready(db) == nil {
				set()
				synctest.Wait()
			}
			ended := make(chan error)
			go func() { ended <- l.Throttle(db) }()
			synctest.Wait()
			l.Hurry()
			require.NoError(t, <-ended, "the log has it")
			broken.Store(nil)
			require.NoError(t, l.Close(db))
		})
	}
}

// TestStall: on a full disk, commits that wait for tables wait until there is room, or until the
// store closes; on a broken disk they fail.
func TestStall(t *testing.T) {
	for _, tc := range []struct {
		name        string
		err         error
		room, hurry bool
	}{
		{"room returns", syscall.ENOSPC, true, false},
		{"closed while full", syscall.ENOSPC, false, true},
		{"broken", errBroken, false, false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				fs, broken := breakable(crashfs.New(), []errorfs.OpKind{errorfs.OpCreate}, ".sst")
				var logged bytes.Buffer
				l := New(slog.New(slog.NewTextHandler(&logged, nil)), "store")
				db := open(t, l, fs)
				broken.Store(&tc.err)
				var written atomic.Int64
				done := make(chan struct{})
				go func() {
					defer close(done)
					for i := range 500 {
						if l.Err() != nil {
							return
						}
						require.NoError(t, db.Set(key(i), bytes.Repeat([]byte("x"), 1000), pebble.Sync))
						written.Add(1)
					}
				}()
				time.Sleep(time.Minute)
				if errors.Is(tc.err, syscall.ENOSPC) {
					require.NoError(t, l.Err())
					require.Less(t, written.Load(), int64(300))
				}
				if tc.room {
					broken.Store(nil)
				}
				if tc.hurry {
					l.Hurry()
				}
				<-done
				if tc.room {
					require.NoError(t, l.Err())
					require.EqualValues(t, 500, written.Load())
				} else {
					require.ErrorIs(t, l.Err(), tc.err)
				}
				require.NoError(t, db.Close())
				require.Less(t, strings.Count(logged.String(), "\n"), 100, "a minute's errors")
			})
		})
	}
}

// TestOpenNeedsTables: the open of a store writes the content of logs to tables, and Pebble would
// wait for these writes.
func TestOpenNeedsTables(t *testing.T) {
	for _, reason := range []error{errBroken, syscall.ENOSPC} {
		disk := crashfs.New()
		l := New(slog.New(slog.DiscardHandler), "store")
		db := open(t, l, disk)
		require.NoError(t, db.Set(key(1), nil, pebble.Sync))
		require.NoError(t, db.Close())
		fs, broken := breakable(disk, []errorfs.OpKind{errorfs.OpCreate}, ".sst")
		broken.Store(&reason)
		l = New(slog.New(slog.DiscardHandler), "store")
		_, err := l.Open(dir, &pebble.Options{FS: fs, FormatMajorVersion: pebble.FormatColumnarBlocks})
		require.ErrorIs(t, err, reason)
		db = open(t, New(slog.New(slog.DiscardHandler), "store"), disk)
		_, closer, err := db.Get(key(1))
		require.NoError(t, err)
		require.NoError(t, errors.Join(closer.Close(), db.Close()))
	}
}

// TestCorruption: a damaged table makes the store fail, and does not end the process.
func TestCorruption(t *testing.T) {
	testbase.SkipUnderRace(t)
	disk := crashfs.New()
	l := New(slog.New(slog.DiscardHandler), "store")
	db := open(t, l, disk)
	require.NoError(t, db.Set(key(1), nil, pebble.Sync))
	require.NoError(t, db.Flush())
	require.NoError(t, db.Close())
	names, err := disk.List(dir)
	require.NoError(t, err)
	for _, name := range names {
		if strings.HasSuffix(name, ".sst") {
			require.NoError(t, disk.Remove(dir+"/"+name))
		}
	}
	l = New(slog.New(slog.DiscardHandler), "store")
	db, err = l.Open(dir, &pebble.Options{FS: disk, FormatMajorVersion: pebble.FormatColumnarBlocks})
	if err == nil {
		_, _, err = db.Get(key(1))
		require.Error(t, err)
		err = l.Close(db)
	}
	require.ErrorContains(t, err, "file does not exist")
}

// TestCompactionReads: a compaction that cannot read the keys under a tombstone goes on when it can
// read them. If it still cannot read them at the close of the store, the store can be opened again.
func TestCompactionReads(t *testing.T) {
	for _, heals := range []bool{true, false} {
		t.Run(fmt.Sprint(heals), func(t *testing.T) {
			disk := crashfs.New()
			fs, broken := breakable(disk, []errorfs.OpKind{errorfs.OpFileReadAt}, ".sst")
			l := New(slog.New(slog.DiscardHandler), "store")
			db := openWith(t, l, fs, false)
			for i := range 100 {
				require.NoError(t, db.Set(key(i), bytes.Repeat([]byte{byte(i)}, 1000), pebble.Sync))
			}
			require.NoError(t, db.Flush())
			for i := range 100 {
				if i%10 != 0 {
					require.NoError(t, db.SingleDelete(key(i), pebble.Sync))
				}
			}
			require.NoError(t, db.Flush())
			require.NoError(t, l.Close(db))
			l = New(slog.New(slog.DiscardHandler), "store")
			db = openWith(t, l, fs, false) // without the blocks in the cache
			for i := 0; i < 100; i += 10 { // opens the tables
				_, closer, err := db.Get(key(i))
				require.NoError(t, err)
				require.NoError(t, closer.Close())
			}
			broken.Store(&errBroken)
			compacted := make(chan error, 1)
			go func() { compacted <- db.Compact(t.Context(), []byte("0"), []byte("9"), false) }()
			for err := error(nil); err == nil; {
				select {
				case err = <-l.trouble:
				case err = <-compacted:
				}
				require.ErrorIs(t, err, errBroken)
			}
			require.NoError(t, l.Err())
			require.NoError(t, db.Set(key(200), nil, pebble.Sync))
			if heals {
				broken.Store(nil)
				require.NoError(t, <-compacted)
				require.NoError(t, l.Close(db))
			} else {
				require.ErrorIs(t, l.Close(db), errBroken)
				broken.Store(nil)
			}
			l = New(slog.New(slog.DiscardHandler), "store")
			db = openWith(t, l, fs, false)
			_, closer, err := db.Get(key(200))
			require.NoError(t, err)
			require.NoError(t, closer.Close())
			_, _, err = db.Get(key(51))
			require.ErrorIs(t, err, pebble.ErrNotFound)
			require.NoError(t, l.Close(db))
		})
	}
}

// TestElsewhere: the failure of a checkpoint affects nothing else, and a failed store does not
// change other directories.
func TestElsewhere(t *testing.T) {
	fs, broken := breakable(crashfs.New(), []errorfs.OpKind{errorfs.OpCreate}, "copy")
	l := New(slog.New(slog.DiscardHandler), "store")
	db := openWith(t, l, fs, false)
	require.NoError(t, db.Set(key(1), nil, pebble.Sync))
	broken.Store(&errBroken)
	require.ErrorIs(t, db.Checkpoint("copy"), errBroken)
	require.NoError(t, l.Err())
	l.Fail(errBroken)
	_, err := l.FS(fs, dir).Create("copy/file", vfs.WriteCategoryUnspecified)
	require.ErrorIs(t, err, errBroken)
	require.NoError(t, db.Close())
}

// TestReadOfFailed: a table flushed by a failed store does not exist; a reader gets the reason of
// the failure, not an error of damage.
func TestReadOfFailed(t *testing.T) {
	l := New(slog.New(slog.DiscardHandler), "store")
	db := openWith(t, l, crashfs.New(), false)
	require.NoError(t, db.Set(key(1), []byte("x"), pebble.Sync))
	l.Fail(errBroken)
	require.NoError(t, db.Flush())
	_, _, err := db.Get(key(1))
	require.ErrorIs(t, err, errBroken)
	require.False(t, pebble.IsCorruptionError(err))
	_ = l.Close(db)
}

// TestPanicInRead: a reader, and each later caller that finds the failed store, gets the error of
// damage. A panic of another package goes on.
func TestPanicInRead(t *testing.T) {
	l := New(slog.New(slog.DiscardHandler), "store")
	require.PanicsWithValue(t, "other", func() { _ = l.Read(func() error { panic("other") }) })
	require.NoError(t, l.Err())
	var closed pebble.DB
	err := l.Read(func() error { return closed.Flush() })
	require.ErrorIs(t, err, integrity.ErrDamaged)
	require.ErrorIs(t, l.Err(), integrity.ErrDamaged)
	<-l.Parked()
}

// TestFirstReason: the first failure is the reason, and is logged once.
func TestFirstReason(t *testing.T) {
	var logged bytes.Buffer
	l := New(slog.New(slog.NewTextHandler(&logged, nil)), "shop")
	require.NoError(t, l.Err())
	l.Fatalf("first: %w", errBroken)
	l.Fail(errors.New("second"))
	require.ErrorIs(t, l.Err(), errBroken)
	require.Equal(t, 1, strings.Count(logged.String(), "shop failed"))
}
