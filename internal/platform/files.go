// Package platform holds the code that differs between operating systems: a file system of private
// files, locks of files and directories, the identity of a file, of a boot of the machine, and the
// memory of the C library. Beside it only package localsocket asks for the system: which user is at
// the other end of a socket. It also reads, writes and syncs files of any file system.
package platform

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"syscall"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// The modes of new files and directories, with any umask. Existing ones keep their modes. On
// Windows they have no effect.
const (
	DirMode  fs.FileMode = 0o700
	fileMode fs.FileMode = 0o600
)

// FS is vfs.Default with these modes: the payloads of tasks may be secret, and file names tell what
// there is. Files that root makes in the directory of another user's queue belong to that user:
// otherwise they would be unreadable there. vfs.Root of it is vfs.Default.
var FS vfs.FS = privateFS{vfs.Default}

type privateFS struct{ vfs.FS }

// Unwrap returns vfs.Default, for vfs.Root.
func (p privateFS) Unwrap() vfs.FS { return p.FS }

// MkdirAll makes a directory and its missing parents, or nothing.
func (p privateFS) MkdirAll(dir string, _ os.FileMode) error {
	missing, err := missingOf(dir)
	if err != nil {
		return err
	}
	for n, name := range slices.Backward(missing) {
		err := mkdir(name)
		if errors.Is(err, fs.ErrExist) { // another process made it meanwhile, or it is no directory
			if info, statErr := os.Stat(name); statErr == nil && info.IsDir() {
				continue
			}
		}
		if err != nil {
			for _, made := range missing[n+1:] {
				_ = os.Remove(made) // unless another process uses it
			}
			return err
		}
	}
	return nil
}

// missingOf returns a directory, if it is missing, and then those of its parents that are missing.
func missingOf(dir string) (missing []string, err error) {
	for dir = filepath.Clean(dir); ; dir = filepath.Dir(dir) {
		info, err := os.Stat(dir)
		switch {
		case err == nil && info.IsDir():
			return missing, nil
		case err == nil:
			return nil, &fs.PathError{Op: "mkdir", Path: dir, Err: syscall.ENOTDIR}
		case !errors.Is(err, fs.ErrNotExist) || filepath.Dir(dir) == dir:
			return nil, err
		}
		if err := DanglingLink(dir); err != nil {
			return nil, err
		}
		missing = append(missing, dir)
	}
}

// DanglingLink returns an error if a path is a link to a missing target.
func DanglingLink(path string) error {
	target, err := os.Readlink(path)
	if err != nil {
		return nil
	}
	return &fs.PathError{Op: "mkdir", Path: path, Err: fmt.Errorf(
		"it is a link to %q, which does not exist: make that directory, or remove the link", target)}
}

// mkdir makes a directory, which must not exist.
func mkdir(dir string) error {
	if err := os.Mkdir(dir, DirMode); err != nil {
		return err
	}
	info, err := os.Stat(dir)
	if err == nil && info.Mode().Perm()&DirMode != DirMode {
		err = os.Chmod(dir, DirMode)
	}
	if err == nil && inQueue(filepath.Dir(dir)) {
		err = GiveDirectory(dir)
	}
	if err != nil {
		return errors.Join(err, os.Remove(dir))
	}
	return nil
}

// inQueue reports whether a directory is that of a queue, which has a LOCK, or is in one.
func inQueue(dir string) bool {
	for _, dir := range []string{dir, filepath.Dir(dir)} {
		if _, err := os.Lstat(filepath.Join(dir, lockName)); err == nil {
			return true
		}
	}
	return false
}

// lockName is the name of the file that is locked in the directory of a queue, or of a store.
const lockName = "LOCK"

// List reads the names in a directory. It does not wait for the other end of a FIFO of that name.
func (p privateFS) List(dir string) ([]string, error) {
	if info, err := os.Stat(dir); err == nil && !info.IsDir() {
		return nil, &fs.PathError{Op: "list", Path: dir, Err: syscall.ENOTDIR}
	}
	return p.FS.List(dir)
}

// Create makes the file with its mode: other users could open it before a later change of the mode.
// Like vfs.Default, it replaces an existing file. Other links of that file keep their content.
func (p privateFS) Create(name string, category vfs.DiskWriteCategory) (vfs.File, error) {
	err := create(name)
	for errors.Is(err, fs.ErrExist) {
		if err := p.Remove(name); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return nil, err
		}
		err = create(name)
	}
	if err != nil {
		return nil, err
	}
	return p.OpenReadWrite(name, category)
}

// create makes an empty file, which must not exist.
func create(name string) error {
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, fileMode)
	if err != nil {
		return err
	}
	info, err := f.Stat()
	if err == nil && info.Mode().Perm()&fileMode != fileMode {
		err = f.Chmod(fileMode)
	}
	if err == nil {
		giveLike(f, filepath.Dir(name))
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return errors.Join(err, os.Remove(name))
	}
	return nil
}

// ReadFile reads a file of any file system.
func ReadFile(fsys vfs.FS, name string) ([]byte, error) {
	f, err := fsys.Open(name, vfs.SequentialReadsOption)
	if err != nil {
		return nil, err
	}
	b, err := io.ReadAll(f)
	return b, errors.Join(err, f.Close())
}

// WriteFile writes a file of any file system, and syncs it.
func WriteFile(fsys vfs.FS, name string, b []byte) error {
	f, err := fsys.Create(name, vfs.WriteCategoryUnspecified)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	return errors.Join(err, f.Sync(), f.Close())
}

// SyncDirectory makes the names in a directory of any file system durable.
func SyncDirectory(fsys vfs.FS, path string) error {
	d, err := fsys.OpenDir(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
