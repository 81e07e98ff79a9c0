package manifest

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"slices"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/base"
	"codeq/internal/platform"
)

// An owner locks LOCK exclusively, by FS.Lock, and readers share it. That alone would not exclude a
// second owner after LOCK is removed or replaced, since it would lock another file. So an owner or
// reader also checks that no process holds the lock of a store, and locks the directory itself if
// the system can.

// locks are released the last one first.
type locks []io.Closer

func (l locks) Close() error {
	var errs []error
	for _, lock := range slices.Backward(l) {
		errs = append(errs, lock.Close())
	}
	return errors.Join(errs...)
}

// lockExclusively locks a directory for an owner.
func lockExclusively(fsys vfs.FS, dir string) (io.Closer, error) {
	return lock(fsys, dir, false, func() (io.Closer, error) { return fsys.Lock(fsys.PathJoin(dir, LockName)) })
}

// lockShared locks a directory against owners, and changes nothing. A copy may lack LOCK.
func lockShared(fsys vfs.FS, dir string) (io.Closer, error) {
	return lock(fsys, dir, true, func() (io.Closer, error) {
		l, err := platform.LockShared(fsys, fsys.PathJoin(dir, LockName))
		if errors.Is(err, fs.ErrNotExist) {
			return io.NopCloser(nil), nil
		}
		return l, err
	})
}

func lock(fsys vfs.FS, dir string, reads bool, own func() (io.Closer, error)) (io.Closer, error) {
	var held locks
	for _, step := range []func() (io.Closer, error){
		own,
		func() (io.Closer, error) { return io.NopCloser(nil), noStoreIsOpen(fsys, dir) },
		func() (io.Closer, error) { return platform.LockDirectory(fsys, dir, reads) },
	} {
		l, err := step()
		if errors.Is(err, platform.ErrHeld) {
			err = fmt.Errorf("%w: %w; one process at a time opens a queue: close it there, or call it by OpenLocal", base.ErrLocked, err)
		}
		if err != nil {
			return nil, errors.Join(err, held.Close())
		}
		held = append(held, l)
	}
	return held, nil
}

// noStoreIsOpen returns an error that matches platform.ErrHeld if a process has a store of a
// directory open for writing.
func noStoreIsOpen(fsys vfs.FS, dir string) error {
	names, err := fsys.List(dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		if !isStore(name) {
			continue
		}
		l, err := platform.LockShared(fsys, fsys.PathJoin(dir, name, LockName))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err == nil {
			err = l.Close()
		}
		if err != nil {
			return err
		}
	}
	return nil
}
