// Package heldkeys carries idempotency keys from the directory of one closed queue to that of
// another: those that are taken for a time by tasks that do not exist any more. Only the hashes of
// keys are stored, so that no produce can take such a key.
//
// The hash does not say which shard its tasks are in, which may be that of their group. So a key is
// carried to all shards, with keys.Gone as its holder. Only the shard of its tasks ever frees it
// before its time (ReleaseKey), or gives it to another task: a key that is Gone's in some shards
// only is not taken.
package heldkeys

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"

	"codeq/internal/base"
	"codeq/internal/fsck"
	"codeq/internal/keys"
	"codeq/internal/manifest"
	"codeq/internal/schema"
	"codeq/internal/store"
)

// Key is an idempotency key that is taken by a task that does not exist any more.
type Key struct {
	Hash  [keys.UniqueLen]byte
	Until uint64 // ms since 1970
}

const (
	cacheBytes    = 8 << 20
	memTableBytes = 16 << 20
	batchBytes    = 256 << 10
	lookEvery     = 4096 // keys, after which ctx is looked at
)

// Read returns the keys of a directory in the order of their times. Those whose time has passed may
// be among them.
func Read(ctx context.Context, fsys vfs.FS, path string) (held []Key, err error) {
	d, err := manifest.OpenReadOnly(fsys, path)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	if d.Node != "" {
		return nil, fmt.Errorf("idempotency keys of %s: it is the directory of node %q", path, d.Node)
	}
	caches := store.NewCaches(cacheBytes, 0, d.Shards)
	defer caches.Close()
	carried := make(map[Key]int) // in how many shards they are
	for i := range d.Shards {
		err := readShard(ctx, d, i, caches, func(k Key, holder keys.ID) {
			if holder == keys.Gone {
				carried[k]++
			}
			if holder != keys.Gone || carried[k] == d.Shards {
				held = append(held, k)
			}
		})
		if err != nil {
			return nil, fmt.Errorf("idempotency keys of shard %d: %w", i, err)
		}
	}
	slices.SortFunc(held, byTime)
	return held, nil
}

func byTime(a, b Key) int {
	return cmp.Or(cmp.Compare(a.Until, b.Until), bytes.Compare(a.Hash[:], b.Hash[:]))
}

// readShard visits the keys of a shard.
func readShard(ctx context.Context, d *manifest.Directory, i int, caches *store.Caches, visit func(k Key, holder keys.ID)) error {
	dir, err := fsck.StoreDir(d.FS, d.Path, i)
	if err != nil {
		return err
	}
	st, err := store.OpenReadOnly(d.FS, dir, slog.New(slog.DiscardHandler), caches)
	if err != nil {
		return err
	}
	err = st.Read(func() error {
		tasks, n := schema.NewSnapshot(st.DB()), 0
		return schema.Scan(st.DB(), keys.Freed, func(key, _ []byte) error {
			if n++; n%lookEvery == 0 && ctx.Err() != nil {
				return base.EndOf(ctx)
			}
			at, hash, err := keys.ParseFreed(key)
			if err != nil {
				return fmt.Errorf("%w: %w", base.ErrCorrupt, err)
			}
			b, err := schema.Lookup(st.DB(), keys.AppendHashed(nil, hash))
			if err != nil {
				return err
			}
			v, err := keys.ParseUnique(b)
			if err != nil {
				return fmt.Errorf("%w: idempotency key %x: %w", base.ErrCorrupt, hash, err)
			}
			if v.ID != keys.Gone {
				if _, task, err := tasks.Find(v.ID); err != nil || task != nil {
					return err
				}
			}
			visit(Key{hash, at}, v.ID)
			return nil
		})
	})
	return errors.Join(err, st.Close())
}

// Write stores keys in the directory of a queue by itself. A key that is taken there stays as it
// is; of a key that is given twice, the later time counts. If Write fails, the directory may
// contradict itself.
func Write(ctx context.Context, fsys vfs.FS, path string, held []Key) (err error) {
	if len(held) == 0 {
		return nil
	}
	held = slices.Clone(held)
	slices.SortFunc(held, func(a, b Key) int { // so that what is written at once lies together
		return cmp.Or(bytes.Compare(a.Hash[:], b.Hash[:]), cmp.Compare(b.Until, a.Until))
	})
	held = slices.CompactFunc(held, func(a, b Key) bool { return a.Hash == b.Hash })
	d, err := manifest.Open(fsys, path, manifest.Want{Exists: true})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	if err := d.Take(false, "", nil); err != nil {
		return err
	}
	caches := store.NewCaches(cacheBytes, memTableBytes, d.Shards)
	defer caches.Close()
	for i := range d.Shards {
		if err := writeShard(ctx, d, i, caches, held); err != nil {
			return fmt.Errorf("idempotency keys of shard %d: %w", i, err)
		}
	}
	return d.End()
}

func writeShard(ctx context.Context, d *manifest.Directory, i int, caches *store.Caches, held []Key) error {
	st, err := store.Open(manifest.ShardDir(d.FS, d.Path, i), store.Config{
		FS: d.FS, Log: slog.New(slog.DiscardHandler), Durability: store.Disk,
		Format: manifest.PebbleFormat(d.Format), MemTableBytes: memTableBytes, ReclaimFrom: -1, Still: true,
	}, caches, false)
	if err != nil {
		return err
	}
	free, err := freeOf(ctx, st, held)
	if err == nil {
		w := writer{ctx: ctx, store: st, batch: st.DB().NewBatch()}
		err = errors.Join(w.write(free), w.batch.Close())
	}
	return errors.Join(err, st.Close())
}

// freeOf returns those of the keys, which are in the order of their hashes, that nobody has.
func freeOf(ctx context.Context, st *store.Store, held []Key) (free []Key, err error) {
	err = st.Read(func() error {
		lower, upper := keys.Range(keys.Unique)
		it, err := st.DB().NewIter(&pebble.IterOptions{LowerBound: lower, UpperBound: upper})
		if err != nil {
			return store.Error(err)
		}
		defer func() { _ = it.Close() }() // its error is that of it.Error
		var key []byte
		for i, k := range held {
			if i%lookEvery == 0 && ctx.Err() != nil {
				return base.EndOf(ctx)
			}
			key = keys.AppendHashed(key[:0], k.Hash)
			if !it.SeekGE(key) || !bytes.Equal(it.Key(), key) {
				free = append(free, k)
			}
		}
		return store.Error(it.Error())
	})
	return free, err
}

// writer writes to a store in batches.
type writer struct {
	ctx   context.Context
	store *store.Store
	batch *pebble.Batch
}

func (w *writer) write(held []Key) error {
	for _, k := range held {
		if err := w.set(keys.AppendHashed(nil, k.Hash), keys.UniqueValue{ID: keys.Gone, Until: k.Until}.Append(nil)); err != nil {
			return err
		}
	}
	slices.SortFunc(held, byTime)
	for _, k := range held {
		if err := w.set(keys.AppendFreed(nil, k.Until, k.Hash), nil); err != nil {
			return err
		}
	}
	return w.flush()
}

func (w *writer) set(key, value []byte) error {
	if err := w.batch.Set(key, value, nil); err != nil || w.batch.Len() < batchBytes {
		return err
	}
	return w.flush()
}

func (w *writer) flush() error {
	switch {
	case w.ctx.Err() != nil:
		return base.EndOf(w.ctx)
	case w.batch.Empty():
		return nil
	}
	err := errors.Join(w.store.Commit(w.batch), w.batch.Close())
	w.batch = w.store.DB().NewBatch()
	return err
}
