package testkit

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
)

func ReadFile(t testing.TB, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	require.NoError(t, err)
	return string(b)
}

func WriteFile(t testing.TB, path, content string) {
	t.Helper()
	require.NoError(t, os.WriteFile(path, []byte(content), 0o644))
}

// CopyDirectory copies a directory, also of an open queue: if a file disappears meanwhile, it
// begins again.
func CopyDirectory(t testing.TB, from, to string) {
	t.Helper()
	err := os.CopyFS(to, os.DirFS(from))
	for tries := 0; tries < 100 && errors.Is(err, fs.ErrNotExist); tries++ {
		require.NoError(t, os.RemoveAll(to))
		err = os.CopyFS(to, os.DirFS(from))
	}
	require.NoError(t, err)
}

// RecursiveListing returns the mode and a hash of the content of everything below a directory, by
// path.
func RecursiveListing(t testing.TB, dir string) map[string]string {
	t.Helper()
	all := make(map[string]string)
	require.NoError(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		content := ""
		if info.Mode().IsRegular() {
			b, err := os.ReadFile(path)
			if err != nil {
				return err
			}
			content = fmt.Sprintf("%x", sha256.Sum256(b))
		}
		rel, err := filepath.Rel(dir, path)
		all[rel] = fmt.Sprint(info.Mode(), " ", content)
		return err
	}))
	return all
}

// eachLog calls visit for the logs in the directory of a store.
func eachLog(t testing.TB, disk *crashfs.Disk, dir string, visit func(vfs.File)) {
	t.Helper()
	names, err := disk.List(dir)
	require.NoError(t, err)
	for _, name := range names {
		if strings.HasSuffix(name, ".log") {
			f, err := disk.Open(disk.PathJoin(dir, name))
			require.NoError(t, err)
			visit(f)
			require.NoError(t, f.Close())
		}
	}
}

// LogSize returns the size of the largest log of a store.
func LogSize(t testing.TB, disk *crashfs.Disk, dir string) (size int) {
	t.Helper()
	eachLog(t, disk, dir, func(f vfs.File) {
		info, err := f.Stat()
		require.NoError(t, err)
		size = max(size, int(info.Size()))
	})
	return size
}

// SyncLogs syncs the logs of a store.
func SyncLogs(t testing.TB, disk *crashfs.Disk, dir string) {
	t.Helper()
	eachLog(t, disk, dir, func(f vfs.File) { require.NoError(t, f.Sync()) })
}
