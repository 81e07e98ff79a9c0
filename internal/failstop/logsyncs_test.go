package failstop

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/record"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/testbase"
)

// logsAtClose returns base with a sync of each log at its close.
func logsAtClose(base vfs.FS) vfs.FS { return SyncLogsAtClose(base, new(LogSyncs)) }

// hookFS calls after at the end of each operation that changes something, with the operation and
// the path. An error of after becomes the error of the operation.
type hookFS struct {
	vfs.FS
	after func(op, name string) error
}

func (fs hookFS) file(op, name string, f vfs.File, err error) (vfs.File, error) {
	if err != nil {
		return nil, err
	}
	return hookFile{f, name, fs.after}, fs.after(op, name)
}

func (fs hookFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := fs.FS.Create(name, c)
	return fs.file("create", name, f, err)
}

func (fs hookFS) ReuseForWrite(old, name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := fs.FS.ReuseForWrite(old, name, c)
	return fs.file("reuse", name, f, err)
}

func (fs hookFS) OpenReadWrite(
	name string, c vfs.DiskWriteCategory, opts ...vfs.OpenOption,
) (vfs.File, error) {
	f, err := fs.FS.OpenReadWrite(name, c, opts...)
	return fs.file("open", name, f, err)
}

func (fs hookFS) OpenDir(name string) (vfs.File, error) {
	f, err := fs.FS.OpenDir(name)
	return fs.file("opendir", name, f, err)
}

func (fs hookFS) Rename(oldname, newname string) error {
	return errors.Join(fs.FS.Rename(oldname, newname), fs.after("rename", newname))
}

func (fs hookFS) Remove(name string) error {
	return errors.Join(fs.FS.Remove(name), fs.after("remove", name))
}

// Lock locks nothing, so that two DBs can act for a process and its successor.
func (fs hookFS) Lock(string) (io.Closer, error) { return io.NopCloser(nil), nil }

func (fs hookFS) Unwrap() vfs.FS { return fs.FS }

type hookFile struct {
	vfs.File
	name  string
	after func(op, name string) error
}

func (f hookFile) Write(p []byte) (int, error) {
	n, err := f.File.Write(p)
	return n, errors.Join(err, f.after("write", f.name))
}

func (f hookFile) Sync() error {
	return errors.Join(f.File.Sync(), f.after("sync", f.name))
}

func (f hookFile) SyncData() error {
	return errors.Join(f.File.SyncData(), f.after("syncdata", f.name))
}

func (f hookFile) SyncTo(n int64) (bool, error) {
	_, err := f.File.SyncTo(n)
	return true, errors.Join(err, f.after("syncto", f.name))
}

func (f hookFile) Close() error {
	return errors.Join(f.File.Close(), f.after("close", f.name))
}

// recorder is a file system in memory that records operations as "op path".
type recorder struct {
	hookFS
	mu  sync.Mutex
	ops []string
	err map[string]error // by "op path"
}

func newRecorder() *recorder {
	r := &recorder{err: map[string]error{}}
	r.hookFS = hookFS{crashfs.New(), func(op, name string) error {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.ops = append(r.ops, op+" "+name)
		return r.err[op+" "+name]
	}}
	return r
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
	db, err := pebble.Open("db", logOptions(logsAtClose(rec)))
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
		require.NoError(t, db.Set(logKey(i), nil, pebble.Sync))
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

// image is a disk after a power loss. The keys on it are a gapless prefix of those written, of min
// to max keys.
type image struct {
	fs       *crashfs.Disk
	at       string
	percent  int // share of the unsynced data that has survived
	min, max int
}

// crasher writes keys in order to a DB on a disk, and takes images of this disk.
type crasher struct {
	disk   *crashfs.Disk
	layers func(vfs.FS) vfs.FS
	format pebble.FormatMajorVersion

	next    atomic.Int64 // the key to write
	durable atomic.Int64 // keys below are in closed logs or tables
	closed  atomic.Int64 // logs closed
	reused  atomic.Int64 // logs reused

	gate sync.Mutex  // held while the DB may create no table: the number of logs grows
	live atomic.Bool // whether operations take images

	// manifest is true before the sync of the directory with a new MANIFEST and the marker that
	// names it. An image could keep the marker alone; Pebble cannot handle this on any file system.
	manifest atomic.Bool

	mu     sync.Mutex
	rng    *rand.Rand
	images []image
}

// newCrasher starts with an empty disk, under the layers of the test.
func newCrasher(
	seed uint64, layers func(vfs.FS) vfs.FS, format pebble.FormatMajorVersion,
) *crasher {
	return &crasher{
		disk:   crashfs.New(),
		layers: layers,
		format: format,
		rng:    rand.New(rand.NewPCG(seed, 0)),
	}
}

func (c *crasher) open(fs vfs.FS) (*pebble.DB, error) {
	opts := logOptions(c.layers(fs))
	opts.FormatMajorVersion = c.format
	return pebble.Open("db", opts)
}

// openDisk opens the DB on the disk itself. Its operations take images.
func (c *crasher) openDisk() (*pebble.DB, error) {
	return c.open(hookFS{c.disk, c.after})
}

func (c *crasher) after(op, name string) error {
	odds := 15
	switch log := strings.HasSuffix(name, ".log"); {
	case op == "write":
		return nil
	case op == "create" && strings.HasPrefix(name, "db/MANIFEST-"):
		c.manifest.Store(true)
	case op == "sync" && name == "db":
		c.manifest.Store(false)
	case op == "create" && strings.HasSuffix(name, ".sst"):
		c.gate.Lock()
		defer c.gate.Unlock()
	case op == "close" && log:
		c.durable.Store(c.next.Load())
		c.closed.Add(1)
		odds = 3
	case op == "reuse" && log:
		c.reused.Add(1)
		odds = 3
	case log:
		odds = 3
	}
	if c.live.Load() {
		c.snap(odds, op+" "+name, false)
	}
	return nil
}

// snap takes an image with a probability of 1/odds. REQUIRES: no Set runs if idle.
func (c *crasher) snap(odds int, at string, idle bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.rng.IntN(odds) > 0 || c.manifest.Load() {
		return
	}
	img := image{at: at, percent: min(max(c.rng.IntN(150)-25, 0), 100)}
	img.min = int(c.durable.Load())
	img.fs = c.disk.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: img.percent, RNG: c.rng})
	img.max = int(c.next.Load())
	switch {
	case !idle:
		img.max++
	case img.percent == 100:
		img.min = img.max
	}
	c.images = append(c.images, img)
}

// write writes keys until n logs are closed, with images in between. Then it makes Pebble flush,
// and the next logs reuse these logs.
func (c *crasher) write(t *testing.T, db *pebble.DB, n int64) {
	c.gate.Lock()
	for until := c.closed.Load() + n; c.closed.Load() < until; {
		i := c.next.Load()
		require.NoError(t, db.Set(logKey(int(i)), logValue(int(i)), pebble.Sync))
		c.next.Add(1)
		c.snap(100, "idle", true)
	}
	c.gate.Unlock()
	require.NoError(t, db.Flush())
}

// check opens an image and returns the number of keys on it.
func (c *crasher) check(img image) (int, error) {
	db, err := c.open(img.fs)
	if err != nil {
		return 0, err
	}
	n, err := prefix(db)
	switch err = errors.Join(err, db.Close()); {
	case err != nil:
		return 0, err
	case n < img.min || n > img.max:
		return 0, fmt.Errorf("%d keys, want %d to %d", n, img.min, img.max)
	}
	return n, nil
}

// checkAll checks the images so far and drops them. It returns the number of images, the number of
// broken ones, and a copy of an unbroken one with the number of its keys.
func (c *crasher) checkAll(t *testing.T) (all, broken int, disk *crashfs.Disk, keys int) {
	c.mu.Lock()
	images := c.images
	c.images = nil
	c.mu.Unlock()
	for i, img := range images {
		clone := img.fs.CrashClone(vfs.CrashCloneCfg{})
		n, err := c.check(img)
		if err != nil {
			t.Logf("image %d at %q, %d%%: %v", i, img.at, img.percent, err)
			broken++
		} else {
			disk, keys = clone, n
		}
	}
	return len(images), broken, disk, keys
}

// prefix returns the number of keys if they are all up to some key.
func prefix(db *pebble.DB) (n int, err error) {
	it, err := db.NewIter(nil)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, it.Close()) }()
	for it.First(); it.Valid(); it.Next() {
		if !bytes.Equal(it.Key(), logKey(n)) {
			return 0, fmt.Errorf("key %x where %x is expected", it.Key(), logKey(n))
		}
		if !bytes.Equal(it.Value(), logValue(n)) {
			return 0, fmt.Errorf("wrong value of key %d", n)
		}
		n++
	}
	return n, nil
}

// TestPowerLoss has several power losses; each one happens on an image of the disk after the power
// loss before it.
func TestPowerLoss(t *testing.T) {
	testbase.SkipUnderRace(t)
	for seed := range uint64(2) {
		t.Run(fmt.Sprintf("seed %d", seed), func(t *testing.T) {
			c := newCrasher(seed, logsAtClose, pebble.FormatColumnarBlocks)
			total := 0
			for range 3 {
				db, err := c.openDisk()
				require.NoError(t, err)
				c.live.Store(true)
				var disk *crashfs.Disk
				var keys int
				for range 2 {
					c.write(t, db, 3)
					all, broken, d, k := c.checkAll(t)
					require.Zero(t, broken, "of %d images", all)
					require.NotZero(t, all)
					total, disk, keys = total+all, d, k
				}
				c.live.Store(false)
				require.NoError(t, db.Close())
				require.NotZero(t, c.reused.Swap(0), "no log was reused")

				c.disk = disk
				c.next.Store(int64(keys))
				c.durable.Store(int64(keys))
				c.live.Store(true) // also while the next DB opens
			}
			t.Logf("%d images", total)
			require.GreaterOrEqual(t, total, 30)
		})
	}
}

// TestPowerLossAfterKill loses power while and after a process recovers the unsynced log of a
// killed process.
func TestPowerLossAfterKill(t *testing.T) {
	const n = 100
	c := newCrasher(1, logsAtClose, pebble.FormatColumnarBlocks)
	set := func(db *pebble.DB) {
		for range n {
			i := int(c.next.Load())
			require.NoError(t, db.Set(logKey(i), logValue(i), pebble.Sync))
			c.next.Add(1)
			c.snap(5, "idle", true)
		}
	}
	// The killed process: n keys fit into a memtable, and so it does no background work.
	killed, err := c.openDisk()
	require.NoError(t, err)
	set(killed)
	require.Zero(t, c.closed.Load())

	c.live.Store(true)
	db, err := c.openDisk()
	require.NoError(t, err)
	c.durable.Store(n) // Open has flushed the keys of the log.
	set(db)
	c.live.Store(false)

	all, broken, _, _ := c.checkAll(t)
	require.Zero(t, broken, "of %d images", all)
	require.GreaterOrEqual(t, all, 20)
	require.NoError(t, db.Close())
	require.NoError(t, killed.Close())
}

// TestPowerLossNeeds shows that TestPowerLoss fails without the syncs of the package, and without
// the format that the package demands.
func TestPowerLossNeeds(t *testing.T) {
	for _, tc := range []struct {
		name   string
		layers func(vfs.FS) vfs.FS
		format pebble.FormatMajorVersion
	}{
		{"a sync at close", func(fs vfs.FS) vfs.FS { return logsAtClose(lyingFS{fs}) }, pebble.FormatColumnarBlocks},
		{"an old format", logsAtClose, pebble.FormatWALSyncChunks},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := newCrasher(1, tc.layers, tc.format)
			db, err := c.openDisk()
			require.NoError(t, err)
			c.live.Store(true)
			broken := 0
			for round := 0; broken == 0 && round < 10; round++ {
				c.write(t, db, 3)
				_, broken, _, _ = c.checkAll(t)
			}
			c.live.Store(false)
			require.NoError(t, db.Close())
			require.NotZero(t, broken)
		})
	}
}

// lyingFS creates files with a SyncData that does nothing.
type lyingFS struct{ vfs.FS }

func (fs lyingFS) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := fs.FS.Create(name, c)
	if err != nil || !strings.HasSuffix(name, ".log") {
		return f, err
	}
	return lyingFile{f}, nil
}

type lyingFile struct{ vfs.File }

func (lyingFile) SyncData() error { return nil }

func logOptions(fs vfs.FS) *pebble.Options {
	return &pebble.Options{
		FS:                          fs,
		FormatMajorVersion:          pebble.FormatColumnarBlocks,
		Logger:                      quiet{},
		MemTableSize:                64 << 10,
		MemTableStopWritesThreshold: 8,
	}
}

type quiet struct{}

func (quiet) Infof(string, ...any)              {}
func (quiet) Errorf(string, ...any)             {}
func (quiet) Fatalf(format string, args ...any) { panic(fmt.Sprintf(format, args...)) }

func logKey(i int) []byte { return binary.BigEndian.AppendUint64(nil, uint64(i)) }

// logValue is up to 400 bytes long, or 2,000. Longer ones make the images slow to open: Pebble
// flips every bit of a chunk with a wrong checksum.
func logValue(i int) []byte {
	rng := rand.New(rand.NewPCG(uint64(i), 0))
	n := rng.IntN(51) * 8
	if rng.IntN(50) == 0 {
		n = 2_000
	}
	v := make([]byte, 0, n)
	for len(v) < n {
		v = binary.LittleEndian.AppendUint64(v, rng.Uint64())
	}
	return v
}
