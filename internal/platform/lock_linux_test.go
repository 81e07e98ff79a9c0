package platform

import (
	"os"
	"testing"

	"github.com/stretchr/testify/require"
)

func init() { setByProcess = byProcess.Store }

// TestOwnerOfDirectory: the kernel names the owner of a directory if no LOCK does.
func TestOwnerOfDirectory(t *testing.T) {
	for _, h := range []Holder{self, {PID: 1, Host: self.Host}, {PID: 1 << 22, Host: "another"}} {
		told := ownerAt(h.ownersByte())
		require.Equal(t, h.PID, told.PID)
		require.Equal(t, h.Host == self.Host, told.Host == self.Host)
		require.Less(t, h.ownersByte(), int64(readersByte))
	}
	dir := t.TempDir()
	l, err := LockDirectory(FS, dir, false)
	require.NoError(t, err)
	_, err = LockDirectory(FS, dir, true)
	var held *Held
	require.ErrorAs(t, err, &held)
	require.Equal(t, Holder{PID: os.Getpid(), Host: self.Host}, held.Holder)
	require.NoError(t, l.Close())
}
