//go:build unix

package platform

import (
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
)

func init() { mkfifo = func(name string) error { return syscall.Mkfifo(name, 0o600) } }

// TestLockIsReleasedWithItsCopies: during its start, a child process has a copy of the descriptor.
// The copy does not keep the lock.
func TestLockIsReleasedWithItsCopies(t *testing.T) {
	dir := t.TempDir()
	name := filepath.Join(dir, "LOCK")
	for range 2 {
		owner, directory := requireLock(t, name, FS.Lock), func() *directoryLock {
			l, err := LockDirectory(FS, dir, false)
			require.NoError(t, err)
			return l.(*directoryLock)
		}()
		for _, f := range []*os.File{owner.(*heldFile).File, directory.File} {
			fd, err := syscall.Dup(int(f.Fd()))
			require.NoError(t, err)
			defer func() { require.NoError(t, syscall.Close(fd)) }()
		}
		require.NoError(t, owner.Close())
		require.NoError(t, directory.Close())
	}
}

// TestMkdirAll: MkdirAll makes all directories or none, with any umask.
func TestMkdirAll(t *testing.T) {
	root := t.TempDir()
	defer syscall.Umask(syscall.Umask(0o177))
	dir := filepath.Join(root, "a", "b", "c")
	for range 2 {
		require.NoError(t, FS.MkdirAll(dir, 0o777))
	}
	for _, made := range []string{"a", "a/b", "a/b/c"} {
		info, err := os.Stat(filepath.Join(root, made))
		require.NoError(t, err)
		require.Equal(t, os.ModeDir|DirMode, info.Mode())
	}
	long := strings.Repeat("z", 300)
	require.Error(t, FS.MkdirAll(filepath.Join(root, "x", "y", long), 0o777))
	require.NoDirExists(t, filepath.Join(root, "x"))
	require.NoError(t, os.WriteFile(filepath.Join(root, "file"), nil, 0o600))
	require.ErrorIs(t, FS.MkdirAll(filepath.Join(root, "file", "x"), 0o777), syscall.ENOTDIR)
	require.ErrorIs(t, FS.MkdirAll(filepath.Join(root, "file"), 0o777), syscall.ENOTDIR)
	require.NoError(t, os.Symlink(dir, filepath.Join(root, "link")))
	require.NoError(t, FS.MkdirAll(filepath.Join(root, "link", "d"), 0o777))
	require.DirExists(t, filepath.Join(dir, "d"))
}
