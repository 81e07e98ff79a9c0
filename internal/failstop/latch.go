// Package failstop has a Pebble store stop at its first failure, where Pebble
// itself would end the process, panic with its locks locked, or report a commit
// as a success that it could not write.
//
// A [Latch] belongs to one store. It is the store's logger and its event
// listener, and it puts a file system around the one that the store is to use.
// What Pebble cannot stand to fail fails here in its place; see [Latch.FS].
// From then on the latch has a reason, [Latch.Err], and the store is unfit:
//
//   - Whoever commits asks Err after each commit, and takes the commit for
//     failed if there is a reason. A commit at pebble.Sync whose log could not
//     be written has a reason by the time it returns.
//   - Nothing is written any more, so that the log has a prefix of the commits,
//     and the store opens with it.
//   - Nothing that waits for Pebble waits for ever: Pebble takes its writes for
//     done, ends its stalls, and can be closed.
package failstop

import (
	"context"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
)

// retryEvery bounds how often Pebble repeats background work that fails, which by
// itself it does thousands of times a second.
const retryEvery = 100 * time.Millisecond

// Latch remembers why a store is unfit for use. All methods may be called
// concurrently. It is a pebble.LoggerAndTracer.
type Latch struct {
	log    *slog.Logger
	name   string
	reason atomic.Pointer[error]

	stalls  atomic.Int32 // commits that wait for background work
	hurried atomic.Bool
	warned  atomic.Int64 // when Background last logged, in seconds since 1970
	failed  atomic.Int64 // when background work last failed, in ns since 1970

	trouble chan error // capacity 1
}

// New returns the latch of one store. What it logs calls the store by name.
func New(log *slog.Logger, name string) *Latch {
	return &Latch{log: log, name: name, trouble: make(chan error, 1)}
}

// Err returns why the store is unfit for use, or nil.
func (l *Latch) Err() error {
	if p := l.reason.Load(); p != nil {
		return *p
	}
	return nil
}

// Fail makes the store unfit for use. The first reason stays, and is logged.
func (l *Latch) Fail(err error) {
	if l.reason.CompareAndSwap(nil, &err) {
		l.log.Error(l.name+" failed", "err", err)
	}
}

// Hurry says that the store is about to be closed: a commit that waits for room
// on a full disk does so no longer, but fails.
func (l *Latch) Hurry() { l.hurried.Store(true) }

// Trouble receives errors of background work, which Pebble goes on trying. One
// is kept until somebody receives it.
func (l *Latch) Trouble() <-chan error { return l.trouble }

// Listener is the listener of the store's events. It does no I/O, since Pebble
// calls it with locks held.
func (l *Latch) Listener() *pebble.EventListener {
	return &pebble.EventListener{
		BackgroundError: l.background,
		WriteStallBegin: func(pebble.WriteStallBeginInfo) { l.stalls.Add(1) },
		WriteStallEnd:   func() { l.stalls.Add(-1) },
	}
}

// background logs an error of a flush or a compaction. While a commit waits for
// it, only a full disk is worth the wait: it is what somebody may mend without
// opening the store again.
func (l *Latch) background(err error) {
	now := time.Now()
	l.failed.Store(now.UnixNano())
	if l.stalls.Load() > 0 && (l.hurried.Load() || !vfs.IsNoSpaceError(err)) {
		l.Fail(fmt.Errorf("commits cannot go on: %w", err))
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

// backOff waits if background work has failed a moment ago. REQUIRES: no lock
// of Pebble's is held.
func (l *Latch) backOff() {
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

// Fatalf fails and returns, where Pebble's own logger ends the process.
func (l *Latch) Fatalf(format string, args ...any) { l.Fail(fmt.Errorf(format, args...)) }

// Eventf does nothing.
func (l *Latch) Eventf(context.Context, string, ...any) {}

// IsTracingEnabled returns false.
func (l *Latch) IsTracingEnabled(context.Context) bool { return false }
