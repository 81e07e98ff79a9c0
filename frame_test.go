package codeq

import (
	"context"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestFrameEnds: a handler's context says the same of its end whether it is
// asked before or after it, and a derived one ends with it.
func TestFrameEnds(t *testing.T) {
	cause := errors.New("the lease is lost")
	for _, early := range []bool{true, false} {
		f := &frame{runner: &runner{values: context.Background()}}
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
