// Package failstop stops a Pebble store at its first failure, where Pebble itself would end the
// process, panic with its locks locked, or report a commit as a success that it could not write.
//
// A [Latch] belongs to one store. It is the store's logger, listens to its events, and wraps the
// file system that the store uses. Failures that Pebble cannot handle make the latch fail instead;
// see [Latch.FS]. From then on the latch has a reason, [Latch.Err], and the store must not be used:
//
//   - The committer calls Err after each commit, and treats the commit as failed if there is a
//     reason. When a commit at pebble.Sync returns and its log could not be written, there is one.
//   - Nothing is written any more, so that the log has a prefix of the commits, and the store can
//     be opened with it.
//   - Nothing waits for Pebble for ever: Pebble believes that its writes are done, ends its stalls,
//     and can be closed.
//
// [SyncLogsAtClose] is the other file system below a store: with it a commit waits for the
// operating system, not for the disk.
package failstop

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// retryEvery limits how often Pebble repeats background work that fails, which it would otherwise
// do thousands of times a second.
const retryEvery = 100 * time.Millisecond

// Latch remembers why a store must not be used. All methods may be called concurrently, unless they
// say otherwise. It is a pebble.LoggerAndTracer.
type Latch struct {
	log    *slog.Logger
	name   string
	reason atomic.Pointer[error]

	waiting atomic.Int32 // commits, and Open, that wait for background work
	hurried atomic.Bool  // commits do not wait, even for a full disk
	warned  atomic.Int64 // when Background last logged, in seconds since 1970
	failed  atomic.Int64 // when background work last failed, in ns since 1970

	trouble chan error // capacity 1: an error of background work, which Pebble retries

	parkOnce sync.Once     // guards parked
	parked   chan struct{} // closed when a goroutine of Pebble is parked; see park.go
	left     atomic.Bool   // the store will not be closed
	lock     io.Closer     // of the store's directory; set while Pebble opens it

	work  chan struct{} // capacity 1: background work has ended, or the latch has failed
	grown atomic.Bool   // a table was added since lags last read the metrics

	// Whether the last flush, and the last compaction, failed for lack of space.
	flushFull, compactFull atomic.Bool

	reserve  reserve
	flushing sync.Mutex                    // held while a flush is begun by Flush
	usage    func() (vfs.DiskUsage, error) // of the store's disk; set before Pebble opens it

	memory   memory
	wrote    int                   // bytes since lags last read the metrics; only who commits uses it
	measure  func(*pebble.Metrics) // nil: not wanted
	listener Listener              // nil: none
}

// ErrNoSpace says that nothing more can be written because the disk is full.
var ErrNoSpace = errors.New("no space for tables, or for the log")

// IsNoSpace reports whether an error says that the disk, or a quota, is full.
func IsNoSpace(err error) bool { return vfs.IsNoSpaceError(err) || errors.Is(err, syscall.EDQUOT) }

// New returns the latch of a store that will be opened. Its log messages call the store by name.
func New(log *slog.Logger, name string) *Latch {
	l := &Latch{
		log: log, name: name, trouble: make(chan error, 1), parked: make(chan struct{}), work: make(chan struct{}, 1),
	}
	l.waiting.Store(1)
	l.hurried.Store(true)
	return l
}

// Err returns why the store is no longer usable, or nil.
func (l *Latch) Err() error {
	if p := l.reason.Load(); p != nil {
		return *p
	}
	return nil
}

// Fail makes the store unusable. The first reason is kept and logged.
func (l *Latch) Fail(err error) {
	if l.reason.CompareAndSwap(nil, &err) {
		l.log.Error(l.name+" failed", "err", err)
		l.proceed()
	}
}

// Hurry is called before the store is closed: a commit that waits for room on a full disk stops
// waiting and fails.
func (l *Latch) Hurry() {
	l.hurried.Store(true)
	l.proceed()
}

// tooManyTables is when commits wait for compactions: a lookup of a key may have to read as many
// tables.
const tooManyTables = 24

// Limit sets how many bytes memtables may take before Throttle and Ready wait for flushes: most, or
// a memtable less while the memory is used up that the store shares with others. It is called
// before Open. There MemTableStopWritesThreshold must be larger, by the commits between two calls.
func (l *Latch) Limit(most, memTable int, shared *Memory) {
	l.memory.most, l.memory.memTable, l.memory.shared = int64(most), int64(memTable), shared
}

// Measure makes the latch call f with the metrics that Throttle and Ready read: after each flush,
// and whenever half a memtable was committed. It is called before Open, and Limit too.
func (l *Latch) Measure(f func(*pebble.Metrics)) { l.measure = f }

// Listener is called for background work, while Pebble's locks are held: it must not block.
type Listener interface {
	FlushBegins()
	FlushEnds()
	CompactionEnds()
}

// Listen sets the listener for flushes and compactions of the store. It is called before Open.
func (l *Latch) Listen(to Listener) { l.listener = to }

// Wrote is called after a commit of so many bytes. Only the goroutine that commits may call it,
// Throttle and Ready.
func (l *Latch) Wrote(n int) { l.wrote += n }

// Throttle waits while flushes or compactions lag far behind, and returns Err. Pebble would wait
// for them within the commit, even if they never end.
func (l *Latch) Throttle(db *pebble.DB) error {
	for errors.Is(l.Ready(db), ErrNoSpace) && !l.hurried.Load() {
		if l.reserve.gone.Load() { // no other goroutine looks for room
			time.Sleep(retryEvery)
		} else {
			l.await()
		}
	}
	l.proceed() // so that others that wait check again
	return l.Err()
}

// Ready is Throttle for callers that need not commit: it returns ErrNoSpace, without waiting, while
// flushes, or the compactions that it would wait for, fail for lack of space, or the reserve is in
// use. Pebble retries all of them.
func (l *Latch) Ready(db *pebble.DB) error {
	// even if the store is about to be closed: a write might find no room
	if !l.hasReserve() {
		return ErrNoSpace
	}
	for l.Err() == nil && !l.hurried.Load() {
		tables, memory := l.lags(db)
		if l.flushFull.Load() || tables && l.compactFull.Load() {
			return ErrNoSpace
		}
		if !tables && !memory {
			break
		}
		l.await()
	}
	return l.Err()
}

// Takes reports whether a commit of so many bytes can be made long before Ready and Throttle wait:
// there is room for other commits beside it, or no memtable waits for a flush. While the disk is
// full there is nothing to wait for, and Ready says so. Any goroutine may call it.
func (l *Latch) Takes(db *pebble.DB, bytes int) bool {
	if l.hurried.Load() || l.Err() != nil || l.flushFull.Load() || l.compactFull.Load() {
		return true // the commit itself finds out
	}
	m := db.Metrics()
	return m.Levels[0].Sublevels < tooManyTables/2 &&
		(m.MemTable.Count <= 1 || !l.memory.isLow(int64(m.MemTable.Size)+int64(bytes)))
}

// NoSpace reports whether flushes fail for lack of space, or the reserve is in use.
func (l *Latch) NoSpace() bool { return l.flushFull.Load() || !l.hasReserve() }

// lags reports whether too many tables wait for compactions, and whether too much memory waits for
// flushes.
func (l *Latch) lags(db *pebble.DB) (tables, memory bool) {
	if !l.grown.Load() && (l.memory.most == 0 || int64(l.wrote) < l.memory.memTable/2) {
		return false, false
	}
	l.grown.Store(false)
	l.wrote = 0
	m := db.Metrics()
	if l.measure != nil {
		l.measure(m)
	}
	size := int64(m.MemTable.Size)
	l.memory.note(size)
	if l.grown.Load() { // a flush has ended meanwhile: it may be the last one for long
		l.memory.note(0)
	}
	tables, memory = m.Levels[0].Sublevels >= tooManyTables, l.memory.isUsed(size)
	if tables || memory {
		l.grown.Store(true)
	}
	return tables, memory
}

// await waits for the end of a flush or a compaction.
func (l *Latch) await() {
	l.waiting.Add(1) // only now: work that fails while no commit waits may be retried
	<-l.work
	l.waiting.Add(-1)
}

// proceed wakes one goroutine that waits in await.
func (l *Latch) proceed() {
	select {
	case l.work <- struct{}{}:
	default:
	}
}

// guard puts the latch into the options o of a store in dir.
func (l *Latch) guard(o *pebble.Options, dir string) {
	o.FS = l.FS(o.FS, dir)
	l.usage = func() (vfs.DiskUsage, error) { return o.FS.GetDiskUsage(dir) }
	o.Logger, o.LoggerAndTracer = l, l
	o.L0StopWritesThreshold = math.MaxInt // Throttle waits instead
	if o.EventListener == nil {
		o.EventListener = new(pebble.EventListener)
	}
	e := o.EventListener // called with locks held: the functions below do no I/O
	e.BackgroundError = l.background
	e.DataCorruption = func(i pebble.DataCorruptionInfo) {
		l.Fail(fmt.Errorf("%s: %w", i.Path, i.Details))
		if inIterator() {
			l.park()
		}
	}
	e.FlushEnd = func(i pebble.FlushInfo) {
		l.flushFull.Store(IsNoSpace(i.Err))
		l.grown.Store(true)
		if i.Err == nil {
			l.memory.note(0) // lags counts again, before the next commit
		}
		l.proceed()
		if l.listener != nil && i.Err == nil {
			l.listener.FlushEnds()
		}
	}
	e.CompactionEnd = func(i pebble.CompactionInfo) {
		l.compactFull.Store(IsNoSpace(i.Err))
		l.proceed()
		if l.listener != nil {
			l.listener.CompactionEnds()
		}
	}
	if l.listener != nil {
		e.FlushBegin = func(pebble.FlushInfo) { l.listener.FlushBegins() }
	}
	e.WriteStallBegin = func(pebble.WriteStallBeginInfo) { l.waiting.Add(1) }
	e.WriteStallEnd = func() { l.waiting.Add(-1) }
}

// background logs an error of a flush or a compaction. While a commit waits for it, the latch
// fails, unless the disk is full: that can be repaired without opening the store again.
func (l *Latch) background(err error) {
	now := time.Now()
	l.failed.Store(now.UnixNano())
	if l.waiting.Load() > 0 && (l.hurried.Load() || !IsNoSpace(err)) {
		l.Fail(fmt.Errorf("background work: %w", err))
	}
	select {
	case l.trouble <- err:
	default:
	}
	second := now.Unix()
	if last := l.warned.Load(); second != last && l.warned.CompareAndSwap(last, second) {
		l.log.Error("background work of the "+l.name+" failed", "err", err)
	}
}

// backOff waits if background work failed a moment ago. REQUIRES: no lock of Pebble is held.
func (l *Latch) backOff() {
	if l.left.Load() {
		select {} // the store will not be closed, and its work would go on for ever
	}
	if at := l.failed.Load(); at != 0 {
		time.Sleep(min(retryEvery-time.Since(time.Unix(0, at)), retryEvery))
	}
}

// Infof does nothing.
func (l *Latch) Infof(string, ...any) {}

// Errorf logs.
func (l *Latch) Errorf(format string, args ...any) {
	l.log.Warn(l.name + ": " + fmt.Sprintf(format, args...))
}

// Fatalf makes the latch fail and returns; Pebble's own logger ends the process.
func (l *Latch) Fatalf(format string, args ...any) { l.Fail(fmt.Errorf(format, args...)) }

// Eventf does nothing.
func (l *Latch) Eventf(context.Context, string, ...any) {}

// IsTracingEnabled returns false.
func (l *Latch) IsTracingEnabled(context.Context) bool { return false }
