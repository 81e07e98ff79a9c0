package workerpool

import (
	"context"
	"log/slog"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"codeq/internal/guard"
)

// Context is the context of a handler, without values: an embedder may add some. Many handlers
// never ask when their context ends: ending, which says so, is made when one does.
type Context struct {
	due *due // nil: it has no deadline, as most tasks have none

	mu     sync.Mutex    // guards the fields below, but for marks
	over   bool          // the context has ended
	marks  atomic.Uint32 // of the embedder
	ending *ending       // nil: it was not asked for yet, and there is no cause to keep
}

// due is a deadline.
type due struct {
	at    time.Time
	watch watch // without a timer: there is none
}

// ending is a context that ends with a Context.
type ending struct {
	context.Context
	cancel context.CancelCauseFunc
	at     time.Time // when the Context has ended, if there was a cause
}

// watch looks at a context once.
type watch struct {
	timer   *time.Timer
	running *sync.WaitGroup
}

// Begin gives the context its deadline, after a time; 0: it has none. REQUIRES: the context is not
// in use yet.
func (c *Context) Begin(timeout time.Duration) {
	if timeout > 0 {
		c.due = &due{at: time.Now().Add(timeout)}
	}
}

// Mark sets a mark, one bit, and reports whether it was set before.
func (c *Context) Mark(mark uint32) bool { return c.marks.Or(mark)&mark != 0 }

// overdueAfter is how long a handler may go on after the deadline of its context.
const overdueAfter = time.Second

// Watch calls late, on a goroutine of its own, if End was not called overdueAfter after the
// deadline, or as long after it as it was ahead, if that is less. running counts the watch until
// late has returned, or End was called before. There is one call of Watch at the most. REQUIRES:
// the context has a deadline.
func (c *Context) Watch(running *sync.WaitGroup, log *slog.Logger, late func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over {
		return
	}
	d := time.Until(c.due.at)
	if more := min(max(d, 0), overdueAfter); d <= math.MaxInt64-more {
		d += more
	}
	running.Add(1)
	c.due.watch = watch{time.AfterFunc(d, func() {
		defer running.Done()
		guard.Contain(log, "watch of a handler", late, nil)
	}), running}
}

// Ended returns when the context has ended, by its deadline or by a cause; ok is false if it has
// not.
func (c *Context) Ended() (at time.Time, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ending != nil {
		at = c.ending.at
	}
	if c.due != nil && time.Until(c.due.at) <= 0 && (at.IsZero() || c.due.at.Before(at)) {
		at = c.due.at
	}
	return at, !at.IsZero()
}

// Value returns nil, but for package context, which finds the cause of the end, and the contexts to
// cancel, as values under keys of its own.
func (c *Context) Value(key any) any {
	if e := c.usedEnding(); e != nil {
		return e.Value(key)
	}
	return nil
}

// Deadline returns the deadline.
func (c *Context) Deadline() (time.Time, bool) {
	if c.due == nil {
		return time.Time{}, false
	}
	return c.due.at, true
}

// Done returns a channel that is closed when the context ends.
func (c *Context) Done() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.makeEnding().Done()
}

// Err returns nil until the context ends.
func (c *Context) Err() error {
	if e := c.usedEnding(); e != nil {
		return e.Err()
	}
	return nil
}

// usedEnding returns ending; nil if the context has not ended and ending was not asked for.
func (c *Context) usedEnding() *ending {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over || c.ending == nil && c.due != nil && time.Until(c.due.at) <= 0 {
		return c.makeEnding()
	}
	return c.ending
}

// makeEnding returns ending, and makes it first if there is none. REQUIRES: mu is held.
func (c *Context) makeEnding() *ending {
	if c.ending != nil {
		return c.ending
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	if c.over {
		cancel(nil)
	}
	end := cancel
	if c.due != nil {
		var stop context.CancelFunc
		ctx, stop = context.WithDeadline(ctx, c.due.at)
		end = func(cause error) {
			cancel(cause)
			stop()
		}
	}
	c.ending = &ending{Context: ctx, cancel: end}
	return c.ending
}

// End ends the context, if it has not ended, for a cause; nil: [context.Canceled]. It has ended
// when End returns.
func (c *Context) End(cause error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over {
		return
	}
	if cause != nil {
		c.makeEnding()
		c.ending.at = time.Now()
	}
	c.over = true
	if c.due != nil && c.due.watch.timer != nil && c.due.watch.timer.Stop() {
		c.due.watch.running.Done()
	}
	if c.ending != nil {
		c.ending.cancel(cause)
	}
}
