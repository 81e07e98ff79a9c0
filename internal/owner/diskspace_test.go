package owner

import (
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/base"
)

// someFree is a disk with so many free bytes.
type someFree uint64

func (d someFree) DiskUsage() (vfs.DiskUsage, error) {
	return vfs.DiskUsage{AvailBytes: uint64(d)}, nil
}

// TestDenied: a disk that refuses all writes is full. The error names the lack: room, or, if there
// is room, inodes or a quota.
func TestDenied(t *testing.T) {
	for free, says := range map[someFree]string{
		1 << 20: "nothing can be written: make room on the disk",
		1 << 34: "nothing can be written though 17179869184 bytes are free: free inodes (df -i), or raise the quota of the user",
	} {
		w := NewDiskWatch(free, 1<<21, 1)
		_, looked := w.Look(1, true)
		require.True(t, looked)
		err := w.Refusal(3)
		require.ErrorIs(t, err, base.ErrDiskFull)
		require.EqualError(t, err, "codeq: disk is full: shard 3: "+says)
	}
}
