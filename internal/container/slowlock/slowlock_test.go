package slowlock

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// TestLock: a wait for a Lock ends early if it must, and a fake clock advances during it.
func TestLock(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := New()
		l.Lock()
		end := make(chan struct{})
		close(end)
		require.False(t, l.LockUntil(end))
		require.False(t, l.LockWithin(time.Minute))
		time.AfterFunc(time.Second, l.Unlock)
		require.True(t, l.LockWithin(time.Minute))
		time.AfterFunc(time.Second, l.Unlock)
		require.True(t, l.LockUntil(nil))
		l.Unlock()
	})
}
