package fsck

import (
	"context"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/convert"
	"codeq/internal/keys"
	"codeq/internal/manifest"
	"codeq/internal/store"
)

// OpenStore opens the store of a shard of a queue by itself, or creates it.
func OpenStore(d *manifest.Directory, shard int, c store.Config, shared *store.Caches) (*store.Store, error) {
	dir := manifest.ShardDir(d.FS, d.Path, shard)
	if d.Creating { // by an Open that did not return: its files may not even be a store
		if err := d.FS.RemoveAll(dir); err != nil {
			return nil, err
		}
	}
	if err := FinishRepair(d.FS, d.Path, shard); err != nil {
		return nil, err
	}
	st, err := store.Open(dir, c, shared, d.Creating)
	if err != nil {
		return nil, err
	}
	if err := st.Read(func() error { return identify(st, d, shard) }); err != nil {
		_ = st.Close() // the error of identify is the one that matters
		return nil, err
	}
	return st, nil
}

// identify makes sure that the store is this shard of this queue, and of the current format.
func identify(st *store.Store, d *manifest.Directory, shard int) error {
	if d.Left {
		if err := convert.FromReplica(st, &d.Manifest, shard); err != nil {
			return err
		}
	}
	got, err := store.Lookup(st.DB(), []byte{keys.Meta})
	if err != nil {
		return err
	}
	if got == nil {
		if !d.Creating {
			return fmt.Errorf("%w: no identity, expected %q", base.ErrCorrupt, d.Identity(shard))
		}
		if err := st.DB().Set([]byte{keys.Meta}, []byte(d.Identity(shard)), pebble.Sync); err != nil {
			return store.Error(err)
		}
		// The manifest is about to say that this shard exists, and must not
		// outlive that: a flush is durable at every level of durability.
		return st.Flush(context.Background())
	}
	old, err := d.CheckIdentity(shard, got)
	if err != nil || !old {
		return err
	}
	b := st.DB().NewBatch()
	defer func() { _ = b.Close() }() // it does no more than to recycle memory
	if err := b.Set([]byte{keys.Meta}, []byte(d.Identity(shard)), nil); err != nil {
		return store.Error(err)
	}
	return st.Commit(b)
}
