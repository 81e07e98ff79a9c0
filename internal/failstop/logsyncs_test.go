package failstop

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/record"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
)

// logsAtClose returns base with a sync of each log at its close.
func logsAtClose(base vfs.FS) vfs.FS { return SyncLogsAtClose(base, new(LogSyncs)) }

// recorder is a file system in memory that records the operations that change something, as
// "op path".
type recorder struct {
	vfs.FS
	mu  sync.Mutex
	ops []string
	err map[string]error // of an operation, by "op path"
}

func newRecorder() *recorder { return &recorder{FS: crashfs.New(), err: make(map[string]error)} }

// note records the end of an operation, and returns its error.
func (r *recorder) note(op, name string) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ops = append(r.ops, op+" "+name)
	return r.err[op+" "+name]
}

func (r *recorder) file(op, name string, f vfs.File, err error) (vfs.File, error) {
	if err != nil {
		return nil, err
	}
	return recordedFile{f, name, r}, r.note(op, name)
}

func (r *recorder) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := r.FS.Create(name, c)
	return r.file("create", name, f, err)
}

func (r *recorder) ReuseForWrite(old, name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := r.FS.ReuseForWrite(old, name, c)
	return r.file("reuse", name, f, err)
}

func (r *recorder) OpenReadWrite(name string, c vfs.DiskWriteCategory, opts ...vfs.OpenOption) (vfs.File, error) {
	f, err := r.FS.OpenReadWrite(name, c, opts...)
	return r.file("open", name, f, err)
}

func (r *recorder) OpenDir(name string) (vfs.File, error) {
	f, err := r.FS.OpenDir(name)
	return r.file("opendir", name, f, err)
}

func (r *recorder) Unwrap() vfs.FS { return r.FS }

type recordedFile struct {
	vfs.File
	name string
	r    *recorder
}

func (f recordedFile) Write(p []byte) (int, error) {
	n, err := f.File.Write(p)
	return n, errors.Join(err, f.r.note("write", f.name))
}

func (f recordedFile) Sync() error { return errors.Join(f.File.Sync(), f.r.note("sync", f.name)) }

func (f recordedFile) SyncData() error {
	return errors.Join(f.File.SyncData(), f.r.note("syncdata", f.name))
}

func (f recordedFile) SyncTo(n int64) (bool, error) {
	_, err := f.File.SyncTo(n)
	return true, errors.Join(err, f.r.note("syncto", f.name))
}

func (f recordedFile) Close() error {
	return errors.Join(f.File.Close(), f.r.note("close", f.name))
}

// take returns the operations since the last call.
func (r *recorder) take() []string {
	r.mu.Lock()
	defer r.mu.Unlock()
	ops := r.ops
	r.ops = nil
	return ops
}

func TestLogSyncsOnlyAtClose(t *testing.T) {
	create := func(fs vfs.FS, name string) (vfs.File, error) { return fs.Create(name, walCategory) }
	reuse := func(fs vfs.FS, name string) (vfs.File, error) {
		f, err := fs.Create("old", walCategory)
		require.NoError(t, err)
		require.NoError(t, f.Close())
		return fs.ReuseForWrite("old", name, walCategory)
	}
	openRW := func(fs vfs.FS, name string) (vfs.File, error) { return fs.OpenReadWrite(name, walCategory) }
	copied := func(fs vfs.FS, name string) (vfs.File, error) {
		return fs.Create(name, vfs.WriteCategoryUnspecified)
	}
	real := []string{"write", "sync", "syncdata", "syncto", "close"}
	elided := []string{"write", "syncto", "syncdata", "close"}

	for _, tc := range []struct {
		name string
		open func(vfs.FS, string) (vfs.File, error)
		file string
		want []string
	}{
		{"created log", create, "000004.log", elided},
		{"reused log", reuse, "000004.log", elided},
		{"created table", create, "000004.sst", real},
		{"reused table", reuse, "000004.sst", real},
		{"log in the middle", create, "a.log.tmp", real},
		{"log opened otherwise", openRW, "000004.log", real},
		{"copy of a log", copied, "000004.log", real},
	} {
		t.Run(tc.name, func(t *testing.T) {
			rec := newRecorder()
			f, err := tc.open(logsAtClose(rec), tc.file)
			require.NoError(t, err)
			rec.take()
			_, err = f.Write([]byte("x"))
			require.NoError(t, err)
			require.NoError(t, f.Sync())
			require.NoError(t, f.SyncData())
			full, err := f.SyncTo(1)
			require.NoError(t, err)
			require.True(t, full, "the answer of the base")
			require.NoError(t, f.Close())

			var want []string
			for _, op := range tc.want {
				want = append(want, op+" "+tc.file)
			}
			require.Equal(t, want, rec.take())
		})
	}

	rec := newRecorder()
	dir, err := logsAtClose(rec).OpenDir("")
	require.NoError(t, err)
	require.NoError(t, dir.Sync())
	require.Equal(t, []string{"opendir ", "sync "}, rec.take())
}

func TestCloseErrors(t *testing.T) {
	syncErr, closeErr := errors.New("sync"), errors.New("close")
	for _, tc := range []struct{ sync, close, want error }{
		{nil, nil, nil},
		{syncErr, nil, syncErr},
		{nil, closeErr, closeErr},
		{syncErr, closeErr, syncErr},
	} {
		rec := newRecorder()
		rec.err["syncdata 1.log"], rec.err["close 1.log"] = tc.sync, tc.close
		f, err := logsAtClose(rec).Create("1.log", walCategory)
		require.NoError(t, err)
		require.ErrorIs(t, f.Close(), tc.want)
		require.Equal(t, []string{"create 1.log", "syncdata 1.log", "close 1.log"}, rec.take())
	}
}

// TestNoGapAtTheEndOfABlock zeroes the tail of a block. A power loss can do so if the kernel wrote
// the page of the tail earlier and the next block later. Where Pebble's reader skips a record, a
// sync of the tail is necessary.
func TestNoGapAtTheEndOfABlock(t *testing.T) {
	const num, header = 7, 11
	records := func(log []byte) (s string) {
		for r := record.NewReader(bytes.NewReader(log), num); ; {
			rec, err := r.Next()
			if err != nil {
				return s
			}
			p, err := io.ReadAll(rec)
			require.NoError(t, err)
			s += string(p[:1])
		}
	}
	for tail := minTail - 1; tail <= maxTail+1; tail++ {
		rec := newRecorder()
		f, err := logsAtClose(rec).Create("7.log", walCategory)
		require.NoError(t, err)
		w := record.NewLogWriter(f, num, record.LogWriterConfig{
			WriteWALSyncOffsets: func() bool { return false },
		})
		write := func(p string, n int) []string {
			rec.take()
			var done sync.WaitGroup
			var syncErr error
			done.Add(1)
			_, err := w.SyncRecord([]byte(strings.Repeat(p, n)), &done, &syncErr)
			require.NoError(t, err)
			done.Wait()
			require.NoError(t, syncErr)
			return rec.take()
		}
		write("a", blockSize-header-tail)
		ops := write("b", 100)
		write("c", 100)
		require.NoError(t, w.Close())

		r, err := rec.Open("7.log")
		require.NoError(t, err)
		log, err := io.ReadAll(r)
		require.NoError(t, err)
		require.NoError(t, r.Close())
		require.Equal(t, "abc", records(log))
		clear(log[blockSize-tail : blockSize])

		switch {
		case tail < minTail: // padding
			require.Equal(t, "abc", records(log), "tail %d", tail)
			require.Equal(t, []string{"write 7.log"}, ops, "tail %d", tail)
		case tail > maxTail:
			require.Equal(t, "a", records(log), "tail %d", tail)
			require.Equal(t, []string{"write 7.log", "write 7.log"}, ops, "tail %d", tail)
		default:
			require.Equal(t, "ac", records(log), "tail %d", tail)
			require.Equal(t, []string{"write 7.log", "syncdata 7.log", "write 7.log"}, ops, "tail %d", tail)
		}
	}
}

func TestOpenErrors(t *testing.T) {
	fs := logsAtClose(crashfs.New())
	_, err := fs.Create("missing/1.log", walCategory)
	require.ErrorIs(t, err, os.ErrNotExist)
	_, err = fs.ReuseForWrite("missing/1.log", "2.log", walCategory)
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestUnwrap(t *testing.T) {
	base := crashfs.New()
	require.Equal(t, vfs.FS(base), logsAtClose(base).Unwrap())
	require.Equal(t, vfs.FS(base), vfs.Root(logsAtClose(base)))
}

// TestPebbleUsesLogsAsExpected checks the package's assumptions about Pebble: the category and name
// of its logs, a Close at each rotation before the creation of the next log, and a sync of the copy
// of a log in a checkpoint.
func TestPebbleUsesLogsAsExpected(t *testing.T) {
	rec := newRecorder()
	db, err := pebble.Open("db", &pebble.Options{
		FS: logsAtClose(rec), FormatMajorVersion: pebble.FormatColumnarBlocks, MemTableSize: 64 << 10, Logger: quiet{},
	})
	require.NoError(t, err)
	logOps := func() (ops []string) {
		for _, op := range rec.take() {
			if strings.HasSuffix(op, ".log") && !strings.HasPrefix(op, "write") {
				ops = append(ops, op)
			}
		}
		return ops
	}
	require.Equal(t, []string{"create db/000002.log"}, logOps())
	for i := range 100 {
		require.NoError(t, db.Set(key(i), nil, pebble.Sync))
	}
	require.Empty(t, logOps())

	require.NoError(t, db.Checkpoint("copy", pebble.WithFlushedWAL()))
	require.Equal(t, []string{
		"create copy/000002.log", "syncdata copy/000002.log", "close copy/000002.log",
	}, logOps())

	require.NoError(t, db.Flush())
	require.Equal(t, []string{
		"syncdata db/000002.log", "close db/000002.log", "create db/000004.log",
	}, logOps())

	require.NoError(t, db.Close())
	require.Equal(t, []string{"syncdata db/000004.log", "close db/000004.log"}, logOps())
}

type quiet struct{}

func (quiet) Infof(string, ...any)              {}
func (quiet) Errorf(string, ...any)             {}
func (quiet) Fatalf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }
