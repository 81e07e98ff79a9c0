package workers

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"codeq/internal/guard"
)

// Context is the context of a handler, without values: who embeds it may add some. Many handlers
// never ask when their context ends: ending, which says so, is made when one does.
type Context struct {
	deadline *time.Time // nil: none, as most tasks have

	mu     sync.Mutex // guards what follows
	over   bool       // the context has ended
	ended  time.Time  // when it has ended, if there was a cause
	watch  *watch     // nil: there is none
	ending *ending    // nil: nobody has asked yet, and there is no cause to keep
}

// ending is a context that ends with a Context.
type ending struct {
	context.Context
	cancel context.CancelCauseFunc
}

// watch looks at a context once.
type watch struct {
	timer   *time.Timer
	running *sync.WaitGroup
}

// Begin gives the context its deadline; nil is none. REQUIRES: nobody uses the context yet.
func (c *Context) Begin(deadline *time.Time) { c.deadline = deadline }

// overdueAfter is how long a handler may go on after the deadline of its context.
const overdueAfter = time.Second

// Watch calls late, on a goroutine of its own, if End was not called overdueAfter after the
// deadline, or as long after it as it was ahead, if that is less. running counts the watch until
// late has returned, or End was called before. There is one call of Watch at the most.
func (c *Context) Watch(running *sync.WaitGroup, log *slog.Logger, late func()) {
	if c.deadline == nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over {
		return
	}
	d := time.Until(*c.deadline)
	d += min(max(d, 0), overdueAfter)
	running.Add(1)
	c.watch = &watch{time.AfterFunc(d, func() {
		defer running.Done()
		guard.Contain(log, "watch of a handler", late, nil)
	}), running}
}

// Ended returns when the context has ended, by its deadline or by a cause; ok is false if it has
// not.
func (c *Context) Ended() (at time.Time, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.deadline != nil && time.Until(*c.deadline) <= 0 && (c.ended.IsZero() || c.deadline.Before(c.ended)) {
		return *c.deadline, true
	}
	return c.ended, !c.ended.IsZero()
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
	if c.deadline == nil {
		return time.Time{}, false
	}
	return *c.deadline, true
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

// usedEnding returns ending; nil if the context has not ended and nobody has used ending.
func (c *Context) usedEnding() *ending {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over || c.ending == nil && c.deadline != nil && time.Until(*c.deadline) <= 0 {
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
	if c.deadline != nil {
		var stop context.CancelFunc
		ctx, stop = context.WithDeadline(ctx, *c.deadline)
		end = func(cause error) {
			cancel(cause)
			stop()
		}
	}
	c.ending = &ending{ctx, end}
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
		c.ended = time.Now()
	}
	c.over = true
	if c.watch != nil && c.watch.timer.Stop() {
		c.watch.running.Done()
	}
	if c.ending != nil {
		c.ending.cancel(cause)
	}
}
