package workers

import (
	"context"
	"sync"
	"time"
)

// Context is the context of a handler, with the values of another one. Many handlers never ask when
// their context ends: ending, which says so, is made when one does.
type Context struct {
	values   context.Context
	deadline *time.Time // nil: none, as most tasks have

	mu     sync.Mutex              // guards what follows
	over   bool                    // the context has ended
	cause  error                   // of the end; nil: context.Canceled
	ending context.Context         // ends with the Context, and has no values; nil: not used yet
	cancel context.CancelCauseFunc // of ending
}

// Begin gives the context its values and its deadline; nil is none. REQUIRES: nobody uses the
// context yet.
func (c *Context) Begin(values context.Context, deadline *time.Time) {
	c.values, c.deadline = values, deadline
}

// Value returns the value in the context whose values it has. Package context finds the cause of
// the end, and the contexts to cancel, as values under keys of its own.
func (c *Context) Value(key any) any {
	if v := c.values.Value(key); v != nil {
		return v
	}
	if ctx := c.usedEnding(); ctx != nil {
		return ctx.Value(key)
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
	if ctx := c.usedEnding(); ctx != nil {
		return ctx.Err()
	}
	return nil
}

// usedEnding returns ending; nil if the context has not ended and nobody has used ending.
func (c *Context) usedEnding() context.Context {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.over || c.ending == nil && c.deadline != nil && time.Until(*c.deadline) <= 0 {
		return c.makeEnding()
	}
	return c.ending
}

// makeEnding returns ending, and makes it first if there is none. REQUIRES: mu is held.
func (c *Context) makeEnding() context.Context {
	if c.ending == nil {
		c.ending, c.cancel = context.WithCancelCause(context.Background())
		if c.over {
			c.cancel(c.cause)
		}
		if c.deadline != nil {
			var stop context.CancelFunc
			cancel := c.cancel
			c.ending, stop = context.WithDeadline(c.ending, *c.deadline)
			c.cancel = func(cause error) {
				cancel(cause)
				stop()
			}
		}
	}
	return c.ending
}

// End ends the context, if it has not ended.
func (c *Context) End(cause error) {
	c.mu.Lock()
	if !c.over {
		c.over, c.cause = true, cause
	}
	cancel, cause := c.cancel, c.cause
	c.mu.Unlock()
	if cancel != nil { // a second call does nothing
		cancel(cause)
	}
}
