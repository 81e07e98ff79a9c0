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
	"github.com/stretchr/testify/require"
)

var errBroken = errors.New("the disk is broken")

const dir = "store"

// breakable returns a file system whose operations of a kind fail on names
// with a part, while broken has an error.
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

func open(t *testing.T, l *Latch, fs vfs.FS) *pebble.DB {
	db, err := pebble.Open(dir, &pebble.Options{
		FS: l.FS(fs, dir), LoggerAndTracer: l, EventListener: l.Listener(), FormatMajorVersion: pebble.FormatColumnarBlocks,
		MemTableSize: 64 << 10, MemTableStopWritesThreshold: 2,
	})
	require.NoError(t, err)
	return db
}

func key(i int) []byte { return fmt.Appendf(nil, "%06d", i) }

// TestFail: whatever of a store's own files cannot be written, the store
// fails, can be closed, and has all that was committed before when it is opened again.
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
		{sync, dir}, // and all that is in it
	} {
		t.Run(fmt.Sprint(tc), func(t *testing.T) {
			disk := vfs.NewMem()
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
			for i := range 1000 { // none of these is stored, none hangs
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
			require.NoError(t, db.Close())
			require.NoError(t, l.Err())
		})
	}
}

// TestOpenFails: errors that are hidden while the store is opened are the latch's.
func TestOpenFails(t *testing.T) {
	for _, kind := range []errorfs.OpKind{errorfs.OpCreate, errorfs.OpFileWrite, errorfs.OpFileSync} {
		fs, broken := breakable(vfs.NewMem(), []errorfs.OpKind{kind}, dir+"/")
		broken.Store(&errBroken)
		l := New(slog.New(slog.DiscardHandler), "store")
		db, err := pebble.Open(dir, &pebble.Options{FS: l.FS(fs, dir), LoggerAndTracer: l, EventListener: l.Listener()})
		if err == nil {
			require.NoError(t, db.Close())
		}
		require.ErrorIs(t, errors.Join(err, l.Err()), errBroken, kind)
	}
}

// TestStall: commits that wait for tables wait on a full disk until there is
// room, or the store is to be closed; on a broken one they fail.
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
				fs, broken := breakable(vfs.NewMem(), []errorfs.OpKind{errorfs.OpCreate}, ".sst")
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

// TestElsewhere: a checkpoint that fails is nobody's failure but its own, and
// a store that has failed leaves other directories alone.
func TestElsewhere(t *testing.T) {
	fs, broken := breakable(vfs.NewMem(), []errorfs.OpKind{errorfs.OpCreate}, "copy")
	l := New(slog.New(slog.DiscardHandler), "store")
	db := open(t, l, fs)
	require.NoError(t, db.Set(key(1), nil, pebble.Sync))
	broken.Store(&errBroken)
	require.ErrorIs(t, db.Checkpoint("copy"), errBroken)
	require.NoError(t, l.Err())
	l.Fail(errBroken)
	_, err := l.FS(fs, dir).Create("copy/file", vfs.WriteCategoryUnspecified)
	require.ErrorIs(t, err, errBroken)
	require.NoError(t, db.Close())
}

// TestFirstReason: what fails first is what is told, once.
func TestFirstReason(t *testing.T) {
	var logged bytes.Buffer
	l := New(slog.New(slog.NewTextHandler(&logged, nil)), "shop")
	require.NoError(t, l.Err())
	l.Fatalf("first: %w", errBroken)
	l.Fail(errors.New("second"))
	require.ErrorIs(t, l.Err(), errBroken)
	require.Equal(t, 1, strings.Count(logged.String(), "shop failed"))
}
