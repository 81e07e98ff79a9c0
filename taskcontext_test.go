package codeq

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// TestFrameEnds: a handler's context says the same of its end whether it is
// asked before or after it, and a derived one ends with it.
func TestFrameEnds(t *testing.T) {
	cause := errors.New("the lease is lost")
	for _, early := range []bool{true, false} {
		f := &taskContext{runner: &runner{values: context.Background()}}
		require.NoError(t, f.Err())
		require.NoError(t, context.Cause(f))
		var child context.Context
		var cancel context.CancelFunc
		if early {
			child, cancel = context.WithCancel(f)
			require.NoError(t, child.Err())
		}
		f.end(cause)
		f.end(nil)
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

// TestFrameDeadline: a Timeout ends the context of a handler at its time, whether or not somebody asked
// before; a handler that has returned by then was not late.
func TestFrameDeadline(t *testing.T) {
	for _, early := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			begun := time.Now()
			newFrame := func() *taskContext {
				return &taskContext{runner: &runner{values: context.Background()}, deadline: begun.Add(time.Second)}
			}
			f, ended := newFrame(), newFrame()
			at, ok := f.Deadline()
			require.True(t, ok)
			require.Equal(t, begun.Add(time.Second), at)
			if early {
				f.Done()
				ended.Done()
			}
			require.NoError(t, f.Err())
			ended.end(nil)
			require.Equal(t, context.Canceled, ended.Err())
			time.Sleep(time.Second)
			synctest.Wait()
			require.Equal(t, context.Canceled, ended.Err())
			require.Equal(t, context.DeadlineExceeded, f.Err())
			require.Equal(t, context.DeadlineExceeded, context.Cause(f))
			<-f.Done()
			f.end(errors.New("later"))
			require.Equal(t, context.DeadlineExceeded, context.Cause(f))
		})
	}
}
