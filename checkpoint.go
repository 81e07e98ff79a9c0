package codeq

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"golang.org/x/sync/errgroup"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/manifest"
	"codeq/internal/store"
)

// Checkpoint copies the queue, which goes on working meanwhile, to dir. The copy
// is the whole queue at one moment during the call: everything that had been
// acknowledged before the call, in all shards, and nothing that began after it.
// It is durable when Checkpoint returns, and a queue of its own: Open it where
// it is, or copy it to where it is needed. To move it off the machine, copy the
// directory by whatever means; nobody writes it until it is opened.
//
// What is large is shared by hard links, so dir must be on the file system of
// the queue. A copy takes next to no space at first, and as much as the queue
// had in the end, when compactions have rewritten all of it. All shards stand
// still together while the rest is copied, for some hundredths of a second; calls
// wait meanwhile.
//
// dir must not exist, or be empty. It becomes a queue in the last step: what is left of a
// Checkpoint that a crash has ended is refused by Open, and by the next Checkpoint, until it is
// removed. (If dir did not exist, it appears with a first file in it; before, an empty directory
// beside it may be left, whose name ends with ".unfinished".) A Checkpoint that returns an error
// has removed what it had made, but for empty directories.
//
// In the copy, the tasks that workers had at that moment are leased: those of
// Run are ready again as soon as the copy is opened, others when their leases
// expire. Whoever opens the copy while the original is at work does its tasks
// twice. The copy has an identity of its own, so that its shards cannot
// be mixed with those of the original.
//
// In a cluster it may be called on any node, which copies what it has itself: all
// shards, once it has caught up with their leaders, for which they stand still as well: 5 s
// at the most. When a leader is lost meanwhile, Checkpoint begins again, twice at the
// most. The copy is that of a queue by itself, without [Options.Cluster].
//
// Checkpoint returns an error that matches [ErrInvalid] if dir is within the queue or on another
// file system, fs.ErrExist if it is not empty, [ErrLocked] if somebody else is about to make a
// queue of it, [ErrDiskFull] below half of [Options.MinFreeBytes] or if the copy finds no room,
// [ErrFailed] if a shard has failed, [ErrClosed] if the queue is closed before all shards stand
// still, or, in a cluster, [ErrNotLeader] or [ErrUncertain] if they did not stand still for as long
// as it takes. If ctx ends before they do, it returns its cause. It is safe for concurrent use;
// calls follow each other.
func (q *Queue) Checkpoint(ctx context.Context, dir string) (err error) {
	defer public(&err)
	if err := q.checkCall(ctx); err != nil {
		return err
	}
	if err := q.enter(); err != nil {
		return err
	}
	defer q.calls.Done()
	ctx, cancel := context.WithCancelCause(ctx)
	var closer sync.WaitGroup
	defer closer.Wait()
	defer cancel(nil)
	closer.Go(func() {
		contain(q.opts.log, "watch of Checkpoint", func() {
			select {
			case <-q.closing:
				cancel(ErrClosed)
			case <-ctx.Done():
			}
		}, cancel)
	})
	select {
	case q.copying <- struct{}{}:
		defer func() { <-q.copying }()
	case <-ctx.Done():
		return base.EndOf(ctx)
	}
	if err := q.checkpoint(ctx, dir); err != nil {
		return fmt.Errorf("codeq: checkpoint to %s: %w", dir, diskFull(err))
	}
	return nil
}

// unfinishedName is the name of a file that the directory of a copy has until it
// is complete: a link to the manifest of the original, since a file system that
// links this one will link the others. It comes first, so that the directory is at no
// moment one of which Open would make a new queue. The copy is not made under
// another name and then renamed: dir may be there already, and be what cannot be replaced (the root
// of a volume, or in a directory that may not be written).
const unfinishedName = "UNFINISHED"

func (q *Queue) checkpoint(ctx context.Context, dir string) (err error) {
	c, err := q.beginCopy(dir)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.remove())
		}
		err = errors.Join(err, c.Close())
	}()
	// What is in memory is written while the shards are at work, so that little is
	// left to be copied while they are not.
	err = q.eachReplica(func(r *replica) error {
		return r.use(func(st *store.Store) error { return st.Flush(ctx) })
	})
	if err != nil {
		return err
	}
	if err := c.cut(ctx, q); err != nil {
		return err
	}
	if err := q.eachReplica(func(r *replica) error { return c.adopt(r.index, q) }); err != nil {
		return err
	}
	if err := c.FS.Remove(c.FS.PathJoin(c.Path, unfinishedName)); err != nil {
		return err
	}
	if err := manifest.SyncDirectory(c.FS, c.Path); err != nil { // the shards' names
		return err
	}
	return c.Write()
}

// eachReplica calls do for all shards at the same time.
func (q *Queue) eachReplica(do func(r *replica) error) error {
	var g errgroup.Group
	for i, r := range q.replicas {
		g.Go(func() error {
			err := guarded(q.opts.log, "copy of a shard", func() error { return do(r) })
			if err != nil {
				return fmt.Errorf("shard %d: %w", i, err)
			}
			return nil
		})
	}
	return g.Wait()
}

// queueCopy is the directory of a copy, locked until it is complete.
type queueCopy struct {
	*manifest.Directory
	existed bool // and was empty
}

// beginCopy makes the directory of a copy.
func (q *Queue) beginCopy(dir string) (*queueCopy, error) {
	fsys := q.opts.fs
	path, err := placeFor(fsys, dir)
	if err != nil {
		return nil, err
	}
	rel, err := filepath.Rel(q.dir.Path, path)
	if dir == "" || err == nil && rel != ".." && !strings.HasPrefix(rel, ".."+string(filepath.Separator)) {
		return nil, &InvalidError{"Checkpoint dir", dir, "outside of the queue, " + q.dir.Path}
	}
	c := &queueCopy{Directory: manifest.New(fsys, path, manifest.Manifest{
		Format: manifest.Format, Shards: len(q.replicas), ID: manifest.NewID(),
	})}
	if c.existed, err = isEmpty(fsys, path); err != nil {
		return nil, err
	}
	if err := c.mark(fsys.PathJoin(q.dir.Path, manifest.Name)); errors.Is(err, fs.ErrExist) {
		return nil, err
	} else if err != nil {
		return nil, fmt.Errorf("%w: %w", &InvalidError{"Checkpoint dir", dir, "one on the file system of the queue"}, err)
	}
	if err := c.Lock(); err != nil {
		return nil, errors.Join(err, fsys.Remove(fsys.PathJoin(path, unfinishedName)))
	}
	return c, nil
}

// mark makes the directory with a link to the manifest of the queue in it, durably, or puts that into
// the empty one that exists.
func (c *queueCopy) mark(original string) error {
	if c.existed {
		return errors.Join(c.FS.Link(original, c.FS.PathJoin(c.Path, unfinishedName)), manifest.SyncDirectory(c.FS, c.Path))
	}
	temp := c.Path + "." + c.ID[:8] + ".unfinished"
	if err := manifest.MakeDirectory(c.FS, temp); err != nil {
		return err
	}
	err := errors.Join(c.FS.Link(original, c.FS.PathJoin(temp, unfinishedName)), manifest.SyncDirectory(c.FS, temp))
	if err == nil {
		if err = c.FS.Rename(temp, c.Path); err == nil {
			return manifest.SyncDirectory(c.FS, c.FS.PathDir(c.Path))
		}
		if _, emptyErr := isEmpty(c.FS, c.Path); emptyErr != nil { // somebody else has been faster
			err = emptyErr
		}
	}
	return errors.Join(err, c.FS.RemoveAll(temp))
}

// isEmpty reports whether a directory exists, and makes sure that nothing is in it.
func isEmpty(fsys vfs.FS, path string) (exists bool, err error) {
	names, err := fsys.List(path)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	if info, statErr := fsys.Stat(path); statErr == nil && !info.IsDir() {
		return false, fmt.Errorf("%w: not a directory", fs.ErrExist)
	}
	if err != nil {
		return false, err
	}
	for _, name := range names {
		switch name {
		case manifest.LockName:
		case unfinishedName:
			return true, fmt.Errorf("%w: it holds what is left of an unfinished checkpoint", fs.ErrExist)
		default:
			return true, fmt.Errorf("%w: it holds %q", fs.ErrExist, name)
		}
	}
	return true, nil
}

// placeFor makes two names of one directory equal, as manifest.Open does. It need not exist.
func placeFor(fsys vfs.FS, dir string) (string, error) {
	if fsys != vfs.Default {
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
			return "", err
		}
	}
}

// remove removes what beginCopy and its callers have made. The manifest goes
// first: without it the rest is no queue.
func (c *queueCopy) remove() error {
	_ = c.FS.Remove(c.FS.PathJoin(c.Path, manifest.Name)) // does not exist, as a rule
	if !c.existed {
		return c.FS.RemoveAll(c.Path)
	}
	names, err := c.FS.List(c.Path)
	errs := []error{err}
	for _, name := range names {
		errs = append(errs, c.FS.RemoveAll(c.FS.PathJoin(c.Path, name)))
	}
	return errors.Join(errs...)
}

// cutTries is how often a copy is begun whose shards have not stood still to the end.
const cutTries = 3

// cut copies the stores at one moment: while all shards stand still, so that no
// copy has anything that was done after another one's; above all, no message has been
// taken in one of them and not been sent in another.
func (c *queueCopy) cut(ctx context.Context, q *Queue) error {
	for tries := 1; ; tries++ {
		err := c.tryCut(ctx, q)
		if q.node == nil || tries == cutTries || !errors.Is(err, ErrNotLeader) && !errors.Is(err, ErrUncertain) {
			return err
		}
		for i := range q.replicas {
			if err := c.FS.RemoveAll(manifest.ShardDir(c.FS, c.Path, i)); err != nil {
				return err
			}
		}
	}
}

func (c *queueCopy) tryCut(ctx context.Context, q *Queue) error {
	h, err := q.hold(ctx)
	if err != nil {
		return err
	}
	began := time.Now()
	err = q.eachReplica(func(r *replica) error {
		if err := r.reach(h.applied[r.index]); err != nil {
			return err
		}
		return r.use(func(st *store.Store) error {
			return st.CheckpointUnsynced(c.Path, manifest.ShardDir(c.FS, c.Path, r.index))
		})
	})
	if err := errors.Join(err, h.resume()); err != nil {
		return err
	}
	q.opts.log.Info("shards stood still for a checkpoint", "dir", c.Path, "for", time.Since(began))
	return nil
}

// adopt opens the copy of a shard, gives it the identity of the copy, which is a queue by
// itself, and makes it durable.
func (c *queueCopy) adopt(index int, q *Queue) error {
	dir := manifest.ShardDir(c.FS, c.Path, index)
	config := q.opts.storeConfig()
	config.FS, config.Durability, config.Still = store.DeferSync(c.FS, dir), store.Disk, true
	st, err := store.Open(dir, config, q.caches, false)
	if err != nil {
		return err
	}
	b := st.DB().NewBatch()
	_ = b.Set([]byte{keys.Meta}, []byte(c.Identity(index)), nil) // fails for indexed batches only
	err = secede(st.DB(), b)
	if err == nil {
		err = st.Commit(b)
	}
	if err := errors.Join(err, b.Close(), st.Close()); err != nil {
		return err
	}
	return syncFiles(c.FS, dir)
}

// secede deletes what a store has of a cluster.
func secede(db *pebble.DB, b *pebble.Batch) error {
	for _, kind := range []byte{keys.Applied, keys.Session, keys.Interest} {
		it, err := db.NewIter(&pebble.IterOptions{LowerBound: []byte{kind}, UpperBound: []byte{kind + 1}})
		if err != nil {
			return store.Error(err)
		}
		for valid := it.First(); valid; valid = it.Next() {
			_ = b.Delete(it.Key(), nil) // fails for indexed batches only
		}
		if err := it.Close(); err != nil {
			return store.Error(err)
		}
	}
	return nil
}

// syncFiles syncs a directory and the files in it, but for tables, which are synced.
func syncFiles(fsys vfs.FS, dir string) error {
	names, err := fsys.List(dir)
	if err != nil {
		return err
	}
	for _, name := range names {
		if strings.HasSuffix(name, store.TableSuffix) {
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
	return manifest.SyncDirectory(fsys, dir)
}
