package workerpool_test

import (
	"context"
	"errors"
	"log/slog"
	"math"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"codeq/internal/workerpool"
)

// TestContextEnds: a handler's context reports the same end to a caller that asks before the end
// and to one that asks after it. A derived context ends with it.
func TestContextEnds(t *testing.T) {
	cause := errors.New("the lease is lost")
	for _, early := range []bool{true, false} {
		f := new(workerpool.Context)
		f.Begin(0)
		require.NoError(t, f.Err())
		require.NoError(t, context.Cause(f))
		var child context.Context
		var cancel context.CancelFunc
		if early {
			child, cancel = context.WithCancel(f)
			require.NoError(t, child.Err())
		}
		f.End(cause)
		f.End(nil)
		if !early {
			child, cancel = context.WithCancel(f)
		}
		defer cancel()
		<-f.Done()
		<-child.Done()
		for _, ctx := range []context.Context{f, child} {
			require.ErrorIs(t, ctx.Err(), context.Canceled)
			require.Equal(t, cause, context.Cause(ctx))
		}
	}
}

// TestContextDeadline: a Timeout ends the context of a handler at its time, with and without an
// earlier caller of Done, and a later end changes nothing. A handler that has returned by then was
// not late.
func TestContextDeadline(t *testing.T) {
	for _, early := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			begun := time.Now()
			newContext := func() *workerpool.Context {
				c := new(workerpool.Context)
				c.Begin(time.Second)
				return c
			}
			f, ended, late := newContext(), newContext(), newContext()
			at, ok := f.Deadline()
			require.True(t, ok)
			require.Equal(t, begun.Add(time.Second), at)
			if early {
				f.Done()
				ended.Done()
				late.Done()
			}
			require.NoError(t, f.Err())
			ended.End(nil)
			require.Equal(t, context.Canceled, ended.Err())
			time.Sleep(time.Second)
			synctest.Wait()
			require.Equal(t, context.Canceled, ended.Err())
			require.Equal(t, context.DeadlineExceeded, f.Err())
			require.Equal(t, context.DeadlineExceeded, context.Cause(f))
			<-f.Done()
			for _, c := range []*workerpool.Context{f, late} {
				c.End(errors.New("later"))
				require.Equal(t, context.DeadlineExceeded, context.Cause(c))
			}
		})
	}
}

// TestContextEndsTwice: after a call that ends a context, the caller finds the context and all
// derived contexts ended, even if another call ends the context at the same time.
func TestContextEndsTwice(t *testing.T) {
	cause := errors.New("the lease is lost")
	for range 200 {
		f := new(workerpool.Context)
		var children []context.Context
		for range 100 {
			child, cancel := context.WithCancel(f)
			defer cancel()
			children = append(children, child)
		}
		var ends sync.WaitGroup
		for range 2 {
			ends.Go(func() {
				f.End(cause)
				for _, c := range children {
					assert.ErrorIs(t, c.Err(), context.Canceled)
				}
				assert.Equal(t, cause, context.Cause(f))
			})
		}
		ends.Wait()
	}
}

// TestWatchFarDeadline: a deadline at the end of time has not passed.
func TestWatchFarDeadline(t *testing.T) {
	for _, ahead := range []time.Duration{math.MaxInt64, math.MaxInt64 - time.Millisecond, math.MaxInt64 / 2} {
		synctest.Test(t, func(t *testing.T) {
			var running sync.WaitGroup
			c := new(workerpool.Context)
			c.Begin(ahead)
			c.Watch(&running, slog.New(slog.DiscardHandler), func() { t.Error("looked at once") })
			time.Sleep(time.Minute)
			require.NoError(t, c.Err())
			c.End(nil)
			running.Wait()
		})
	}
}

// TestWatch: the watch checks a context that has not ended in time, and Run can wait for this
// check.
func TestWatch(t *testing.T) {
	log := slog.New(slog.DiscardHandler)
	for name, end := range map[string]func(*workerpool.Context){
		"late":   func(*workerpool.Context) { time.Sleep(time.Minute) },
		"ended":  func(c *workerpool.Context) { c.End(nil); c.End(nil) },
		"panics": func(*workerpool.Context) { time.Sleep(time.Minute) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var running sync.WaitGroup
				var looked time.Duration
				begun := time.Now()
				c := new(workerpool.Context)
				c.Begin(time.Second)
				_, ended := c.Ended()
				require.False(t, ended)
				c.Watch(&running, log, func() {
					looked = time.Since(begun)
					if name == "panics" {
						panic("a test's")
					}
				})
				end(c)
				running.Wait()
				want := 2 * time.Second
				if name == "ended" {
					want = 0
				}
				require.Equal(t, want, looked)
				time.Sleep(time.Minute)
				at, ended := c.Ended()
				require.True(t, ended)
				require.Equal(t, begun.Add(time.Second), at)
				if name == "ended" {
					c.Watch(&running, log, func() { t.Error("it has ended") })
					time.Sleep(time.Minute)
				}
			})
		})
	}
}
