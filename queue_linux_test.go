package codeq_test

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"codeq"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// TestOpenLockedByBindMount: a queue is also locked at the path of a bind mount, which is no link.
func TestOpenLockedByBindMount(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	dir, mount := filepath.Join(root, "queue"), filepath.Join(root, "mount")
	tasks := queuetest.ClosedQueue(t, dir, 1)
	require.NoError(t, os.Mkdir(mount, 0o700))
	if err := unix.Mount(dir, mount, "", unix.MS_BIND, ""); err != nil {
		t.Skip("this process may not mount: ", err)
	}
	defer func() { require.NoError(t, unix.Unmount(mount, unix.MNT_DETACH)) }()
	q, err := codeq.Open(dir, nil)
	require.NoError(t, err)
	requireLocked(t, mount, true)
	testkit.ReadFile(t, filepath.Join(mount, "LOCK"))
	requireLocked(t, dir, true)
	require.NoError(t, q.Close())
	r := openReader(t, mount, nil)
	requireOwnedElsewhere(t, dir, codeq.ErrLocked)
	require.NoError(t, r.Close())
	queuetest.RequireTasks(t, dir, nil, tasks)
}
