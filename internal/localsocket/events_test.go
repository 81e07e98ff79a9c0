package localsocket

import (
	"strconv"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/broadcast"
	"codeq/internal/engine"
)

// TestEndOfSubscription: a program that waits for events learns whether its subscription has ended
// or the queue is closed.
func TestEndOfSubscription(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var hub broadcast.Hub
		var all subscriptions
		begin := func() (number uint64, waits <-chan error) {
			sub, err := hub.Subscribe(engine.KindSet(1), nil, 1)
			require.NoError(t, err)
			number, _, err = all.add(sub)
			require.NoError(t, err)
			ends := make(chan error, 1)
			go func() {
				_, err := all.next(t.Context(), strconv.AppendUint(nil, number, 10))
				ends <- err
			}()
			synctest.Wait()
			return number, ends
		}
		ended, waits := begin()
		other, otherWaits := begin()
		require.NotEqual(t, ended, other)
		all.end(ended)
		require.ErrorIs(t, <-waits, base.ErrNotServed)
		hub.Close()
		require.ErrorIs(t, <-otherWaits, base.ErrClosed)
	})
}
