package manifest

import (
	"io/fs"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/platform"
	"codeq/internal/testkit"
)

// TestUnlistableParent: a queue can be made in a directory that the user may enter and write, but
// not list. In a directory that the user may not write, nothing is left behind.
func TestUnlistableParent(t *testing.T) {
	root, err := os.MkdirTemp("/tmp", "manifest") // other users may enter it
	require.NoError(t, err)
	defer os.RemoveAll(root)
	require.NoError(t, os.Chmod(root, 0o755))
	parent, foreign := filepath.Join(root, "parent"), filepath.Join(root, "foreign")
	require.NoError(t, os.Mkdir(parent, 0o700))
	require.NoError(t, os.Mkdir(foreign, 0o711))
	user, as := uintptr(65534), testkit.AsUser
	if os.Geteuid() != 0 {
		as = func(_ *testing.T, _ uintptr, f func() error) error { return f() }
		require.NoError(t, os.Chmod(foreign, 0o100))
	} else {
		require.NoError(t, os.Chown(parent, int(user), -1))
	}
	require.NoError(t, os.Chmod(parent, 0o300))
	open := func(name string) error {
		return as(t, user, func() error {
			d, err := Open(platform.FS, name, Want{NewShards: 1})
			if err == nil {
				err = d.Close()
			}
			return err
		})
	}
	for _, name := range []string{"queue", "a/b/queue", "queue"} {
		require.NoError(t, open(filepath.Join(parent, name)))
	}
	require.ErrorIs(t, open(filepath.Join(foreign, "a", "queue")), fs.ErrPermission)
	require.NoError(t, os.Chmod(foreign, 0o700))
	require.NoDirExists(t, filepath.Join(foreign, "a"))
}
