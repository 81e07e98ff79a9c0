// Package heldkeys carries idempotency keys from the directory of one closed queue to that of
// another: those that are taken for a time by tasks that do not exist any more. Only the hashes of
// keys are stored, so that no produce can take such a key.
//
// The hash does not say which shard its tasks are in. So a key is carried to all shards, with the
// zero ID as its holder. Only one of them ever frees it before its time (ReleaseKey), or gives it
// to another task: a key that has the zero ID in some shards only is not taken.
package heldkeys

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"slices"

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
	memTableBytes = 1 << 20
	batchBytes    = 256 << 10
)

// Read returns the keys of a directory in the order of their times. Those whose time has passed may
// be among them.
func Read(fsys vfs.FS, path string) (held []Key, err error) {
	d, err := manifest.OpenReadOnly(fsys, path)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, d.Close()) }()
	caches := store.NewCaches(cacheBytes, 0, d.Shards)
	defer caches.Close()
	carried := make(map[Key]int) // in how many shards they are
	for i := range d.Shards {
		err := readShard(d, i, caches, func(k Key, holder keys.ID) {
			switch {
			case holder != keys.ID{}:
				held = append(held, k)
			case carried[k] == d.Shards-1:
				held = append(held, k)
			default:
				carried[k]++
			}
		})
		if err != nil {
			return nil, fmt.Errorf("idempotency keys of shard %d: %w", i, err)
		}
	}
	slices.SortFunc(held, func(a, b Key) int {
		return cmp.Or(cmp.Compare(a.Until, b.Until), bytes.Compare(a.Hash[:], b.Hash[:]))
	})
	return held, nil
}

// readShard visits the keys of a shard.
func readShard(d *manifest.Directory, i int, caches *store.Caches, visit func(k Key, holder keys.ID)) error {
	dir, err := fsck.StoreDir(d.FS, d.Path, i)
	if err != nil {
		return err
	}
	st, err := store.OpenReadOnly(d.FS, dir, slog.New(slog.DiscardHandler), caches)
	if err != nil {
		return err
	}
	err = st.Read(func() error {
		tasks := schema.NewSnapshot(st.DB())
		return schema.Scan(st.DB(), keys.Freed, func(key, _ []byte) error {
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
			_, task, err := tasks.Find(v.ID)
			if err == nil && task == nil {
				visit(Key{hash, at}, v.ID)
			}
			return err
		})
	})
	return errors.Join(err, st.Close())
}

// Write stores keys in the directory of a queue by itself. A key that is taken there stays as it
// is. If Write fails, some of the keys may be stored.
func Write(fsys vfs.FS, path string, held []Key) (err error) {
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
		if err := writeShard(d, i, caches, held); err != nil {
			return fmt.Errorf("idempotency keys of shard %d: %w", i, err)
		}
	}
	return d.End()
}

func writeShard(d *manifest.Directory, i int, caches *store.Caches, held []Key) error {
	st, err := store.Open(manifest.ShardDir(d.FS, d.Path, i), store.Config{
		FS: d.FS, Log: slog.New(slog.DiscardHandler), Durability: store.Disk,
		Format: manifest.PebbleFormat(d.Format), MemTableBytes: memTableBytes, ReclaimFrom: -1, Still: true,
	}, caches, false)
	if err != nil {
		return err
	}
	for len(held) > 0 && err == nil {
		held, err = writeBatch(st, held)
	}
	return errors.Join(err, st.Close())
}

// writeBatch stores the first keys, and returns the others.
func writeBatch(st *store.Store, held []Key) (rest []Key, err error) {
	b := st.DB().NewBatch()
	defer func() { err = errors.Join(err, b.Close()) }()
	for rest = held; len(rest) > 0 && b.Len() < batchBytes; rest = rest[1:] {
		k := &rest[0]
		key := keys.AppendHashed(nil, k.Hash)
		taken, err := schema.Lookup(st.DB(), key)
		if err != nil {
			return nil, err
		}
		if taken != nil {
			continue
		}
		err = errors.Join(
			b.Set(key, keys.UniqueValue{Until: k.Until}.Append(nil), nil),
			b.Set(keys.AppendFreed(nil, k.Until, k.Hash), nil, nil))
		if err != nil {
			return nil, err
		}
	}
	if b.Empty() {
		return rest, nil
	}
	return rest, st.Commit(b)
}
