package convert

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"

	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/base"
	"codeq/internal/failstop"
	"codeq/internal/integrity"
	"codeq/internal/keys"
	"codeq/internal/manifest"
	"codeq/internal/platform"
	"codeq/internal/store"
)

// Unfinished is the name of a file in the directory of a copy until the copy is complete. It is a
// link to the manifest of the original, since a file system that links this file will link the
// others. It is made first, so that Open would never make a new queue of the directory. The copy is
// not made under another name and then renamed, since the directory may exist already, and it may
// be impossible to replace it (the root of a volume, or in a directory that may not be written).
const Unfinished = "UNFINISHED"

// Copy is the directory of a copy, locked until it is complete.
type Copy struct {
	*manifest.Directory
	existed bool   // the directory existed, and was empty
	unwatch func() // ends the watch of the disk for the directory, and for the one above it
}

var (
	// ErrElsewhere: the directory is on another file system than the original, or cannot be linked
	// to it.
	ErrElsewhere = errors.New("the file system is not that of the queue")
	// ErrInside: the directory is that of the original, or below it.
	ErrInside = errors.New("the directory is within the queue")
)

// BeginCopy makes dir, the directory of a copy of the queue in original, which has so many shards,
// and these options of its application, if it knows them. It returns an error that matches
// fs.ErrExist if dir is not empty, base.ErrLocked if another call or process is about to make a
// queue of it, ErrInside and ErrElsewhere. REQUIRES: original is the path of an open
// manifest.Directory.
func BeginCopy(fsys vfs.FS, dir, original string, shards int, options *manifest.Options) (_ *Copy, err error) {
	path, err := place(fsys, dir)
	if err != nil {
		return nil, err
	}
	rel, err := filepath.Rel(original, path)
	if err == nil && rel != ".." && !strings.HasPrefix(rel, ".."+string(filepath.Separator)) {
		return nil, ErrInside
	}
	c := &Copy{Directory: manifest.New(fsys, path, manifest.Manifest{
		Format: manifest.Format, Shards: shards, ID: manifest.NewID(), Options: options,
	})}
	c.unwatch = failstop.WatchAlso(fsys, fsys.PathDir(path))
	defer func() {
		if err != nil {
			c.unwatch()
		}
	}()
	if c.existed, err = isEmpty(fsys, path); err != nil {
		return nil, err
	}
	if err := c.mark(fsys.PathJoin(original, manifest.Name)); errors.Is(err, fs.ErrExist) {
		return nil, err
	} else if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrElsewhere, err)
	}
	if err := c.Lock(); err != nil {
		return nil, errors.Join(err, fsys.Remove(fsys.PathJoin(path, Unfinished)))
	}
	return c, nil
}

// Close unlocks the directory.
func (c *Copy) Close() error {
	defer c.unwatch()
	return c.Directory.Close()
}

// ShardDir returns the directory of a shard of the copy.
func (c *Copy) ShardDir(shard int) string { return manifest.ShardDir(c.FS, c.Path, shard) }

// Empty removes the copied shards.
func (c *Copy) Empty() error {
	for i := range c.Shards {
		if err := c.FS.RemoveAll(c.ShardDir(i)); err != nil {
			return err
		}
	}
	return nil
}

// Unshare replaces each file of the shards by one of its own, as links share mode, owner and
// content with the original. It leaves so many bytes free on the disk, or returns an error that
// matches base.ErrDiskFull. It ends with ctx. REQUIRES: the shards were copied, and none has been
// adopted.
func (c *Copy) Unshare(ctx context.Context, spare uint64) error {
	var files []string
	var total uint64
	for i := range c.Shards {
		dir := c.ShardDir(i)
		names, err := c.FS.List(dir)
		if err != nil {
			return err
		}
		for _, name := range names {
			file := c.FS.PathJoin(dir, name)
			info, err := c.FS.Stat(file)
			if err != nil {
				return err
			}
			files, total = append(files, file), total+uint64(info.Size())
		}
	}
	// The room is the disk's: others use it meanwhile, and so it is asked for again.
	for copied, file := range files {
		if copied%16 == 0 {
			if usage, err := c.FS.GetDiskUsage(c.Path); err == nil && usage.AvailBytes < total+spare {
				return fmt.Errorf("%w: %d bytes are free, the copy needs %d of them and leaves %d",
					base.ErrDiskFull, usage.AvailBytes, total, spare)
			}
		}
		size, err := c.unshare(ctx, file)
		if err != nil {
			return err
		}
		total -= min(size, total)
	}
	return nil
}

// unshare replaces a file by a durable copy, and returns its size.
func (c *Copy) unshare(ctx context.Context, file string) (size uint64, err error) {
	if ctx.Err() != nil {
		return 0, base.EndOf(ctx)
	}
	own := file + ".own"
	if err := vfs.Copy(c.FS, file, own); err != nil {
		return 0, err
	}
	info, err := c.FS.Stat(own)
	if err != nil {
		return 0, err
	}
	return uint64(info.Size()), c.FS.Rename(own, file)
}

// Finish makes the directory a queue, durably. REQUIRES: each shard has been adopted.
func (c *Copy) Finish() error {
	if err := c.FS.Remove(c.FS.PathJoin(c.Path, Unfinished)); err != nil {
		return err
	}
	if err := platform.SyncDirectory(c.FS, c.Path); err != nil { // the directories of the shards
		return err
	}
	return c.Write()
}

// mark durably links the manifest of the original into the directory, which it makes, or which
// exists and is empty.
func (c *Copy) mark(original string) error {
	if c.existed {
		return errors.Join(c.FS.Link(original, c.FS.PathJoin(c.Path, Unfinished)), platform.SyncDirectory(c.FS, c.Path))
	}
	temp := c.Path + "." + c.ID[:8] + ".unfinished"
	if err := manifest.MakeDirectory(c.FS, temp); err != nil {
		return err
	}
	err := errors.Join(c.FS.Link(original, c.FS.PathJoin(temp, Unfinished)), platform.SyncDirectory(c.FS, temp))
	if err == nil {
		if err = c.FS.Rename(temp, c.Path); err == nil {
			return manifest.SyncName(c.FS, c.Path)
		}
		if _, emptyErr := isEmpty(c.FS, c.Path); emptyErr != nil { // another one was faster
			err = emptyErr
		}
	}
	return errors.Join(err, c.FS.RemoveAll(temp))
}

// throughFile explains an error about a path that leads through a file.
func throughFile(fsys vfs.FS, path string, err error) error {
	if file := manifest.FileIn(fsys, path); file != "" {
		err = fmt.Errorf("%w: %s is no directory; name one that is empty or missing", fs.ErrExist, file)
	}
	return err
}

// isEmpty reports whether a directory exists, and returns an error if it is not empty.
func isEmpty(fsys vfs.FS, path string) (exists bool, err error) {
	names, err := fsys.List(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, throughFile(fsys, path, err)
	}
	for _, name := range names {
		switch name {
		case manifest.LockName:
		case Unfinished:
			return true, fmt.Errorf("%w: it holds files of an unfinished checkpoint", fs.ErrExist)
		default:
			if !manifest.IsOfVolume(fsys, path, name) {
				return true, fmt.Errorf("%w: it holds %q; name one that is empty or missing", fs.ErrExist, name)
			}
		}
	}
	return true, nil
}

// place returns the same path for all names of a directory, as manifest.Open does. The directory
// need not exist.
func place(fsys vfs.FS, dir string) (string, error) {
	if vfs.Root(fsys) != vfs.Default {
		return filepath.Clean(dir), nil
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	for missing := ""; ; dir, missing = filepath.Dir(dir), filepath.Join(filepath.Base(dir), missing) {
		real, err := filepath.EvalSymlinks(dir)
		if err == nil {
			return filepath.Join(real, missing), nil
		}
		if !errors.Is(err, fs.ErrNotExist) || filepath.Dir(dir) == dir {
			return "", throughFile(fsys, dir, err)
		}
		if err := platform.DanglingLink(dir); err != nil {
			return "", err
		}
	}
}

// Remove removes everything that BeginCopy and its callers have made. It removes the manifest
// first: without it the rest is no queue.
func (c *Copy) Remove() error {
	_ = c.FS.Remove(c.FS.PathJoin(c.Path, manifest.Name)) // usually does not exist
	if !c.existed {
		return c.FS.RemoveAll(c.Path)
	}
	names, err := c.FS.List(c.Path)
	errs := []error{err}
	for _, name := range names {
		if !manifest.IsOfVolume(c.FS, c.Path, name) {
			errs = append(errs, c.FS.RemoveAll(c.FS.PathJoin(c.Path, name)))
		}
	}
	return errors.Join(errs...)
}

// Adopt opens the copy of a shard, gives it the identity of the copy, removes what belongs to a
// cluster, and makes it durable.
func (c *Copy) Adopt(shard int, config store.Config, caches *store.Caches) error {
	dir := c.ShardDir(shard)
	config.FS, config.Durability, config.Still = store.DeferSync(c.FS, dir), store.Disk, true
	st, err := store.Open(dir, config, caches, false)
	if err != nil {
		return err
	}
	b := st.DB().NewBatch()
	_ = b.Set([]byte{keys.Meta}, []byte(c.Identity(shard)), nil) // fails for indexed batches only
	err = secede(st.DB(), b)
	if err == nil {
		err = st.Commit(b)
	}
	if err := errors.Join(err, b.Close(), st.Close()); err != nil {
		return err
	}
	return syncFiles(c.FS, dir)
}

// syncFiles syncs a directory and the files in it, except tables, which are synced already.
func syncFiles(fsys vfs.FS, dir string) error {
	names, err := fsys.List(dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		if integrity.IsTable(name) {
			continue
		}
		f, err := fsys.OpenReadWrite(fsys.PathJoin(dir, name), vfs.WriteCategoryUnspecified)
		if err != nil {
			return err
		}
		if err := errors.Join(f.Sync(), f.Close()); err != nil {
			return err
		}
	}
	return platform.SyncDirectory(fsys, dir)
}
