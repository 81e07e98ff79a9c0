// Package private is the file system of the operating system, in which everything that is created
// is for its owner only: the payloads of tasks may be secret, and the rest tells what there is.
package private

import (
	"errors"
	"io/fs"
	"os"

	"github.com/cockroachdb/pebble/v2/vfs"
)

// The modes of what is created. What exists keeps its mode. On Windows they have no effect.
const (
	DirMode  fs.FileMode = 0o700
	FileMode fs.FileMode = 0o600
)

// FS is vfs.Default with these modes. vfs.Root of it is vfs.Default.
var FS vfs.FS = privateFS{vfs.Default}

type privateFS struct{ vfs.FS }

// Unwrap returns vfs.Default, for vfs.Root.
func (p privateFS) Unwrap() vfs.FS { return p.FS }

func (p privateFS) MkdirAll(dir string, perm os.FileMode) error {
	return p.FS.MkdirAll(dir, perm&DirMode)
}

// Create makes the file with its mode, so that nobody else opens it before it has that: a mode that
// is set later would come too late. Like vfs.Default, it replaces a file that exists, whose other
// links keep what they have.
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
	f, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, FileMode)
	if err != nil {
		return err
	}
	return f.Close()
}
