//go:build unix || windows

package platform

import (
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"testing"

	"github.com/stretchr/testify/require"
)

// Only some systems set these.
var (
	mkfifo       func(name string) error
	setByProcess func(bool)
)

// requireHeld tries a lock, requires that another lock excludes it, and returns the holder.
func requireHeld(t *testing.T, name string, lock func(string) (io.Closer, error)) *Held {
	t.Helper()
	l, err := lock(name)
	require.ErrorIs(t, err, ErrHeld)
	require.Nil(t, l)
	var held *Held
	require.ErrorAs(t, err, &held)
	require.Equal(t, name, held.Path)
	return held
}

func requireLock(t *testing.T, name string, lock func(string) (io.Closer, error)) io.Closer {
	t.Helper()
	l, err := lock(name)
	require.NoError(t, err)
	return l
}

// kinds runs f with the locks of this system, and with those of kernels that have only locks of
// processes.
func kinds(t *testing.T, f func(t *testing.T)) {
	t.Run("of what was opened", f)
	if setByProcess != nil {
		t.Run("of the process", func(t *testing.T) {
			setByProcess(true)
			defer setByProcess(false)
			f(t)
		})
	}
}

// TestLocks: owners exclude each other and readers, by any path, and readers share.
func TestLocks(t *testing.T) {
	kinds(t, func(t *testing.T) {
		dir := t.TempDir()
		name, link := filepath.Join(dir, "LOCK"), filepath.Join(dir, "link")
		owner := requireLock(t, name, FS.Lock)
		require.NoError(t, os.Link(name, link))
		for _, path := range []string{name, link} {
			for _, lock := range []func(string) (io.Closer, error){FS.Lock, lockShared} {
				held := requireHeld(t, path, lock)
				require.True(t, held.Here)
				require.Equal(t, "this process has locked "+path, held.Error())
			}
		}
		require.NoError(t, owner.Close())
		require.Empty(t, read(t, name), "a dead process would leave its PID")

		first, second := requireLock(t, name, lockShared), requireLock(t, link, lockShared)
		for range 2 {
			held := requireHeld(t, name, FS.Lock)
			require.True(t, held.Reads)
			require.Equal(t, "a process that reads has locked "+name, held.Error())
			require.NoError(t, first.Close())
			first = second
		}
		require.NoError(t, requireLock(t, name, FS.Lock).Close())
		_, err := lockShared(filepath.Join(dir, "none"))
		require.ErrorIs(t, err, fs.ErrNotExist)
		require.NoFileExists(t, filepath.Join(dir, "none"))
	})
}

func read(t *testing.T, name string) string {
	t.Helper()
	b, err := os.ReadFile(name)
	require.NoError(t, err)
	return string(b)
}

// TestLockOutlivesReads: a process that reads its own locked file keeps the lock.
func TestLockOutlivesReads(t *testing.T) {
	dir := t.TempDir()
	name := filepath.Join(dir, "LOCK")
	for _, lock := range []func(string) (io.Closer, error){FS.Lock, lockShared} {
		l := requireLock(t, name, lock)
		read(t, name)
		f, err := os.OpenFile(name, os.O_RDWR, 0)
		require.NoError(t, err)
		require.NoError(t, f.Close())
		require.NoError(t, os.CopyFS(t.TempDir(), os.DirFS(dir)))
		requireHeld(t, name, FS.Lock)
		require.NoError(t, l.Close())
	}
}

// TestLockTells: LOCK names its holder, and does not change before the lock is held.
func TestLockTells(t *testing.T) {
	name := filepath.Join(t.TempDir(), "LOCK")
	owner := requireLock(t, name, FS.Lock)
	for text, want := range map[string]string{
		`{"pid":12,"host":"web","process":"x"}`: "process 12 on host web",
		`{"pid":12,"process":"x"}`:              "process 12",
		"":                                      "another process",
		"12":                                    "another process",
		`{"pid":`:                               "another process",
	} {
		require.NoError(t, os.WriteFile(name, []byte(text), 0o600))
		held := requireHeld(t, name, FS.Lock)
		require.Equal(t, want+" has locked "+name, held.Error())
		require.False(t, held.Here)
		require.Equal(t, text, read(t, name))
	}
	require.NoError(t, owner.Close())
	require.NoError(t, os.WriteFile(name, []byte(`{"pid":12}`), 0o600)) // of a killed process
	owner = requireLock(t, name, FS.Lock)
	require.Equal(t, os.Getpid(), requireHeld(t, name, FS.Lock).Holder.PID)
	require.NoError(t, owner.Close())
}

// TestLockOfDirectory: the lock of a directory excludes others, also after the removal or
// replacement of the file that they lock.
func TestLockOfDirectory(t *testing.T) {
	if runtime.GOOS == "windows" {
		t.Skip("no such locks")
	}
	dir := t.TempDir()
	name, link := filepath.Join(dir, "LOCK"), filepath.Join(t.TempDir(), "link")
	require.NoError(t, os.Symlink(dir, link))
	lockOwner := func(dir string) (io.Closer, error) { return LockDirectory(FS, dir, false) }
	lockReader := func(dir string) (io.Closer, error) { return LockDirectory(FS, dir, true) }
	owner := requireLock(t, dir, lockOwner)
	requireLock(t, name, FS.Lock)
	require.NoError(t, os.Remove(name))
	replaced := requireLock(t, name, FS.Lock) // it is a new file
	for _, path := range []string{dir, link} {
		require.False(t, requireHeld(t, path, lockOwner).Reads)
		require.False(t, requireHeld(t, path, lockReader).Reads)
	}
	require.NoError(t, errors.Join(replaced.Close(), owner.Close()))

	first, second := requireLock(t, dir, lockReader), requireLock(t, link, lockReader)
	for _, l := range []io.Closer{first, second} {
		require.True(t, requireHeld(t, dir, lockOwner).Reads)
		require.NoError(t, l.Close())
	}
	require.NoError(t, requireLock(t, dir, lockOwner).Close())
}

// TestLockRefusesOtherFiles: a path that is not a regular file is refused at once, but not as a
// held lock.
func TestLockRefusesOtherFiles(t *testing.T) {
	kinds(t, func(t *testing.T) {
		dir := t.TempDir()
		names := []string{"directory", "dangling"}
		require.NoError(t, os.Mkdir(filepath.Join(dir, "directory"), 0o700))
		require.NoError(t, os.Symlink("nowhere", filepath.Join(dir, "dangling")))
		if mkfifo != nil {
			require.NoError(t, mkfifo(filepath.Join(dir, "fifo")))
			names = append(names, "fifo")
		}
		for _, name := range names {
			for _, lock := range []func(string) (io.Closer, error){FS.Lock, lockShared} {
				_, err := lock(filepath.Join(dir, name))
				require.ErrorContains(t, err, name)
				require.NotErrorIs(t, err, ErrHeld)
			}
		}
	})
}
