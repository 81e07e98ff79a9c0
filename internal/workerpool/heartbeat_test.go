package workerpool

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// TestHeart: the heartbeat begins at a wakeup, and ends when there is no more reason for it, again
// and again.
func TestHeart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		h := NewHeartbeat()
		begun, beats := 0, 0
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			h.Run(time.Second, func() { begun++ }, func() bool { beats++; return beats%3 != 0 })
		}()
		for i := range 2 {
			time.Sleep(time.Minute)
			synctest.Wait()
			require.Equal(t, i, begun)
			require.Equal(t, 3*i, beats, "it sleeps")
			h.Wake()
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Equal(t, 6, beats)
		h.Stop()
		h.Stop()
		<-ended
	})
}
