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

// Context is the context of a handler, without values: an embedder may add some. Many handlers have
// no deadline, and never ask when their context ends: they have no end.
type Context struct {
	mu    sync.Mutex    // guards the fields below, but for marks
	over  bool          // the context has ended
	marks atomic.Uint32 // of the embedder
	end   *end          // nil: it has no deadline, was not asked for its end yet, and there is no cause to keep
}

// end is when and how a Context ends.
type end struct {
	due             time.Time // zero: it has no deadline
	watch           watch     // without a timer: there is none
	context.Context           // ends with the Context; nil: it was not asked for yet
	cancel          context.CancelCauseFunc
	at              time.Time // when the Context has ended, if there was a cause
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
		c.end = &end{due: time.Now().Add(timeout)}
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
	d := time.Until(c.end.due)
	if more := min(max(d, 0), overdueAfter); d <= math.MaxInt64-more {
		d += more
	}
	running.Add(1)
	c.end.watch = watch{time.AfterFunc(d, func() {
		defer running.Done()
		guard.Contain(log, "watch of a handler", late, nil)
	}), running}
}

// IsOver reports whether End was called.
func (c *Context) IsOver() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.over
}

// Ended returns when the context has ended, by its deadline or by a cause; ok is false if it has
// not.
func (c *Context) Ended() (at time.Time, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.end == nil {
		return at, false
	}
	if at = c.end.at; c.isDue() && (at.IsZero() || c.end.due.Before(at)) {
		at = c.end.due
	}
	return at, !at.IsZero()
}

// isDue reports whether the deadline has passed. REQUIRES: mu is held.
func (c *Context) isDue() bool {
	return c.end != nil && !c.end.due.IsZero() && time.Until(c.end.due) <= 0
}

// Value returns nil, but for package context, which finds the cause of the end, and the contexts to
// cancel, as values under keys of its own.
func (c *Context) Value(key any) any {
	if ctx := c.used(); ctx != nil {
		return ctx.Value(key)
	}
	return nil
}

// Deadline returns the deadline.
func (c *Context) Deadline() (time.Time, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.end == nil {
		return time.Time{}, false
	}
	return c.end.due, !c.end.due.IsZero()
}

// Done returns a channel that is closed when the context ends.
func (c *Context) Done() <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.made().Done()
}

// Err returns nil until the context ends.
func (c *Context) Err() error {
	if ctx := c.used(); ctx != nil {
		return ctx.Err()
	}
	return nil
}

// used returns the context that ends with this one; nil if this one has not ended, and was not
// asked for its end.
func (c *Context) used() context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over || c.isDue() {
		return c.made()
	}
	if c.end == nil {
		return nil
	}
	return c.end.Context
}

// made returns the context that ends with this one, and makes it first if there is none. REQUIRES:
// mu is held.
func (c *Context) made() context.Context {
	if c.end == nil {
		c.end = new(end)
	}
	e := c.end
	if e.Context != nil {
		return e.Context
	}
	ctx, cancel := context.WithCancelCause(context.Background())
	if c.over {
		cancel(nil)
	}
	if e.Context, e.cancel = ctx, cancel; !e.due.IsZero() {
		var stop context.CancelFunc
		e.Context, stop = context.WithDeadline(ctx, e.due)
		e.cancel = func(cause error) {
			cancel(cause)
			stop()
		}
	}
	return e.Context
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
		c.made()
		c.end.at = time.Now()
	}
	c.over = true
	e := c.end
	if e == nil {
		return
	}
	if e.watch.timer != nil && e.watch.timer.Stop() {
		e.watch.running.Done()
	}
	if e.Context != nil {
		e.cancel(cause)
	}
}
