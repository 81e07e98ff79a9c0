//go:build unix

package platform

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
)

// giveLike gives a file that root has made to the owner and the group of the directory that it is
// in. It stays root's if the system refuses that, as some do in a container.
func giveLike(f *os.File, dir string) {
	if os.Geteuid() != 0 {
		return
	}
	info, err := os.Stat(dir)
	if err != nil {
		return
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok && st.Uid != 0 {
		_ = f.Chown(int(st.Uid), int(st.Gid))
	}
}

// GiveDirectory gives a directory that root has made to the owner and the group of the one that it
// is in, as giveLike does. Another user may have put a link in its place.
func GiveDirectory(dir string) error {
	if os.Geteuid() != 0 {
		return nil
	}
	f, err := openAtOnce(dir, os.O_RDONLY|syscall.O_DIRECTORY|syscall.O_NOFOLLOW)
	if err != nil {
		return err
	}
	giveLike(f, filepath.Dir(dir))
	return f.Close()
}

// SyncAll makes the name of a directory durable in a parent that cannot be opened, since it may be
// entered, but not listed.
func SyncAll(dir string) error {
	f, err := openAtOnce(dir, os.O_RDONLY|syscall.O_DIRECTORY)
	if err != nil {
		return err
	}
	return errors.Join(syncFileSystem(f), f.Sync(), f.Close())
}
