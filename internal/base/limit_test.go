package base_test

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/base"
)

// TestLimit: a call ends after its timeout if the shard does nothing, and otherwise when the shard
// has done nothing for half of it.
func TestLimit(t *testing.T) {
	const timeout = 8 * time.Second
	for _, c := range []struct {
		name         string
		begun        time.Duration // before now
		works, moves time.Duration // for how long
		ends         time.Duration // from now on
	}{
		{"nothing", 0, 0, 0, timeout},
		{"works at first", 0, timeout/2 - 1, 0, timeout},
		{"works for long", 0, 3*timeout - 1, 0, 3*timeout + timeout/2},
		{"ends working at the timeout", 0, timeout - 1, 0, timeout + timeout/2},
		{"a message moves", 0, 0, 3*timeout - 1, 3*timeout + timeout/2},
		{"began before", 3 * timeout / 4, 0, 0, timeout / 4},
		{"began long ago", 9 * timeout, 0, 0, timeout / 8},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				begun := time.Now()
				done := func() uint64 { return uint64(min(time.Since(begun), c.works)) }
				var ls base.Limits
				ls.Init(timeout, done)
				for range 2 { // the second time it has been used
					l := ls.New(begun.Add(-c.begun))
					for <-l.C(); !l.IsOver(time.Since(begun) <= c.moves); <-l.C() {
					}
					l.Free()
					require.LessOrEqual(t, time.Since(begun), c.ends)
					require.GreaterOrEqual(t, time.Since(begun)+timeout/2, c.ends)
					begun = time.Now()
				}
			})
		})
	}
}

// TestAwait: an outcome is returned; without one, the call is uncertain at the end of ctx, or of
// the limit.
func TestAwait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var ls base.Limits
		ls.Init(time.Second, func() uint64 { return 0 })
		came := make(chan error, 1)
		came <- base.ErrEmpty
		settled, err := base.Await(context.Background(), nil, came)
		require.True(t, settled)
		require.Equal(t, base.ErrEmpty, err)
		begun := time.Now()
		settled, err = base.Await(context.Background(), ls.New(begun), came)
		require.False(t, settled)
		require.ErrorIs(t, err, base.ErrUncertain)
		require.ErrorIs(t, err, base.ErrLate)
		require.Equal(t, time.Second, time.Since(begun))
		ctx, cancel := context.WithTimeout(t.Context(), time.Second/2)
		defer cancel()
		settled, err = base.Await(ctx, ls.New(time.Now()), came)
		require.False(t, settled)
		require.ErrorIs(t, err, base.ErrUncertain)
		require.ErrorIs(t, err, context.DeadlineExceeded)
	})
}
