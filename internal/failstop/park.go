package failstop

import (
	"bytes"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"
	"time"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/guard"
	"codeq/internal/integrity"
)

// When a compaction cannot continue to read in the middle of the keys that a tombstone covers,
// Pebble panics, on its own goroutine, where no caller can recover. So reads of such a compaction
// do not fail: they are repeated until they succeed, and if they cannot, the goroutine is parked
// for ever. A store with such a goroutine cannot be closed; it is abandoned, and its lock released.

const iterator = "github.com/cockroachdb/pebble/v2/internal/compact.(*Iter)."

// inIterator reports whether it is called by a compaction that might panic.
func inIterator() bool {
	var pcs [64]uintptr
	frames := runtime.CallersFrames(pcs[:runtime.Callers(2, pcs[:])])
	for {
		f, more := frames.Next()
		if strings.HasPrefix(f.Function, iterator) {
			return true
		}
		if !more {
			return false
		}
	}
}

// retryRead repeats a read. In a compaction it returns no error.
func (l *Latch) retryRead(read func() error) error {
	for tries := 1; ; tries++ {
		err := read()
		if err == nil {
			return nil
		}
		if !inIterator() {
			time.Sleep(retryEvery) // a compaction that fails is retried at once
			return err
		}
		l.background(err)
		if tries > 1 && l.hurried.Load() {
			l.Fail(err)
		}
		if l.Err() != nil {
			l.park()
		}
		time.Sleep(retryEvery)
	}
}

// Abandon makes the latch fail for good, and the store is not closed: Pebble has panicked, and its
// locks stay locked.
func (l *Latch) Abandon(err error) {
	l.Fail(err)
	l.parkOnce.Do(func() { close(l.parked) })
}

// Parked is closed when a call of Pebble may wait for ever: the store is then abandoned instead of
// closed.
func (l *Latch) Parked() <-chan struct{} { return l.parked }

// panicked is Abandon for a caught panic.
func (l *Latch) panicked(what string, value any, stack []byte) {
	l.logPanic(what, value, stack)
	l.Abandon(fmt.Errorf("panic in %s of a store: %v", what, value))
}

func (l *Latch) logPanic(what string, value any, stack []byte) {
	l.log.Error("Pebble has panicked", "in", what, "value", fmt.Sprint(value), "stack", string(stack))
}

// Read calls a function that reads the store, on the caller's goroutine. Damage that no checksum
// covers, such as a length that is out of range, may make Pebble panic: the error then matches
// integrity.ErrDamaged, and the store is abandoned for the same reason, which Err returns. Other
// panics go on, as do those on Pebble's own goroutines.
func (l *Latch) Read(do func() error) (err error) {
	ended := false
	defer func() {
		if ended {
			return
		}
		if stack := debug.Stack(); inPebble(stack) {
			v := recover()
			l.logPanic("a read", v, stack)
			err = fmt.Errorf("%w: panic in a read of a store: %v", integrity.ErrDamaged, v)
			l.Abandon(err)
		}
	}()
	err = do()
	ended = true
	return err
}

// inPebble reports whether a function of Pebble has panicked below Read.
func inPebble(stack []byte) bool {
	_, panicked, ok := bytes.Cut(stack, []byte("\npanic("))
	below, _, _ := bytes.Cut(panicked, []byte("failstop.(*Latch).Read("))
	return ok && bytes.Contains(below, []byte("github.com/cockroachdb/pebble/"))
}

// park blocks for ever.
func (l *Latch) park() {
	l.parkOnce.Do(func() { close(l.parked) })
	select {}
}

// Open opens the store in dir. The latch sets the loggers of o and most of its event listener, puts
// FS around o.FS, and stops writes itself, without o.L0StopWritesThreshold. Any failure meanwhile
// makes Open fail, as it would wait for the failed work.
func (l *Latch) Open(dir string, o *pebble.Options) (*pebble.DB, error) {
	base := o.FS
	l.guard(o, dir)
	var db *pebble.DB
	opened := make(chan error, 1)
	go guard.Run("open of a store", func() {
		d, err := pebble.Open(dir, o)
		db = d
		opened <- err
	}, func(value any, stack []byte) { l.panicked("Open", value, stack) })
	select {
	case err := <-opened:
		if err != nil {
			return nil, errors.Join(err, l.Err())
		}
	case <-l.parked:
		l.left.Store(true)
		return nil, errors.Join(l.Err(), l.unlock())
	}
	l.waiting.Add(-1)
	if l.Err() != nil {
		return nil, l.Close(db)
	}
	if !o.ReadOnly {
		l.reserve.keep(base, dir)
	}
	l.hurried.Store(false)
	return db, nil
}

// unlock releases the directory of an abandoned store.
func (l *Latch) unlock() error {
	if l.lock == nil { // Pebble had not locked it yet
		return nil
	}
	return l.lock.Close()
}

// Close closes the store. It returns why the latch has failed, if it has, or the error of Pebble.
// REQUIRES: db is not in use any more.
//
// A store that cannot be closed, because a compaction cannot read or Pebble has panicked, is
// abandoned with its goroutines and memory. It may be opened again.
func (l *Latch) Close(db *pebble.DB) error {
	l.Hurry()
	l.memory.note(0)
	l.reserve.end()
	closed := make(chan error, 1)
	select {
	case <-l.parked:
	default:
		go guard.Run("close of a store", func() { closed <- db.Close() },
			func(value any, stack []byte) { l.panicked("Close", value, stack) })
	}
	select {
	case err := <-closed:
		return errors.Join(l.Err(), err)
	case <-l.parked:
		l.left.Store(true)
		return errors.Join(l.Err(), l.unlock())
	}
}
