package localsocket

import (
	"context"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/engine"
	"codeq/internal/entries"
)

// TestEndOfSubscription: a program that waits for events learns whether its subscription has ended
// or the queue is closed.
func TestEndOfSubscription(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var hub entries.Hub
		var all subscriptions
		ended, _ := begin(t, &hub, &all)
		waits := read(t.Context(), &all, ended)
		other, _ := begin(t, &hub, &all)
		otherWaits := read(t.Context(), &all, other)
		require.NotEqual(t, ended, other)
		require.True(t, all.end(ended))
		require.False(t, all.end(ended))
		require.ErrorIs(t, <-waits, base.ErrNotServed)
		hub.Close()
		require.ErrorIs(t, <-otherWaits, base.ErrClosed)
	})
}

// TestUnreadSubscription: a subscription lasts while it has a reader, and ends soon after its last
// read. If the reader disconnects, it ends at once.
func TestUnreadSubscription(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var hub entries.Hub
		var all subscriptions
		requireOver := func(over <-chan struct{}, is bool) {
			t.Helper()
			synctest.Wait()
			select {
			case <-over:
				require.True(t, is)
			default:
				require.False(t, is)
			}
		}
		never, neverOver := begin(t, &hub, &all)
		gone, goneOver := begin(t, &hub, &all)
		ctx, leave := context.WithCancel(t.Context())
		goneWaits := read(ctx, &all, gone)
		kept, keptOver := begin(t, &hub, &all)
		time.Sleep(unreadFor - 1)
		requireOver(neverOver, false)
		keptWaits := []<-chan error{read(t.Context(), &all, kept), read(t.Context(), &all, kept)}
		time.Sleep(time.Hour)
		requireOver(neverOver, true)
		require.ErrorIs(t, <-read(t.Context(), &all, never), base.ErrNotServed)

		leave()
		require.ErrorIs(t, <-goneWaits, context.Canceled)
		requireOver(goneOver, true)

		for n := range 2 { // each of the two readers gets one event
			requireOver(keptOver, false)
			hub.Publish([]engine.Event{{Kind: 0, Queue: strconv.Itoa(n)}})
			synctest.Wait()
			select {
			case err := <-keptWaits[0]:
				require.NoError(t, err)
			case err := <-keptWaits[1]:
				require.NoError(t, err)
			}
			time.Sleep(unreadFor - 1)
		}
		requireOver(keptOver, false)
		time.Sleep(time.Nanosecond)
		requireOver(keptOver, true)
		require.Empty(t, all.all)
	})
}

// begin begins a subscription. over is closed at its end.
func begin(t *testing.T, hub *entries.Hub, all *subscriptions) (number uint64, over <-chan struct{}) {
	events, err := hub.Subscribe(engine.KindSet(1), nil, 1)
	require.NoError(t, err)
	number, sub, err := all.add(events)
	require.NoError(t, err)
	watched := make(chan struct{})
	ctx := t.Context()
	go func() {
		defer close(watched)
		all.watch(ctx, number, sub)
	}()
	return number, watched
}

// read waits for an event.
func read(ctx context.Context, all *subscriptions, number uint64) (ends <-chan error) {
	read := make(chan error, 1)
	go func() {
		_, err := all.next(ctx, strconv.AppendUint(nil, number, 10))
		read <- err
	}()
	synctest.Wait()
	return read
}
