// Package convert turns the store of a shard of a queue by itself into that of the first node of
// a cluster, and back, and makes the stores of all shards agree with each other. Each change of a
// store is one durable step; before and after it the store is whole. It also makes the directory of
// a copy of a queue ([Copy]), which becomes a queue in its last step.
package convert

import (
	"context"
	"errors"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/keys"
	"codeq/internal/manifest"
	"codeq/internal/store"
)

// First log position of a shard when a standalone queue becomes a cluster. No log has the entries
// before it: other nodes get the store. They would ask for the log alone if it could begin with
// entry 1.
const (
	firstIndex = 2
	firstTerm  = 1
)

// ToReplica makes a store that of a replica, if it is that of the shard of a queue by itself.
// Unless the process that had the queue was killed, its leases say that it has ended.
func ToReplica(st *store.Store, m *manifest.Manifest, killed bool, shard int) error {
	got, err := store.Lookup(st.DB(), []byte{keys.Meta})
	if err != nil || got == nil {
		return err
	}
	if _, err := m.CheckIdentity(shard, got); err != nil {
		return nil // it is that of a replica, or of another queue, which its leader refuses
	}
	return convert(st, func(b *pebble.Batch) error {
		at := make([]byte, keys.AppliedLen)
		keys.PutApplied(at, firstIndex, firstTerm)
		var err error
		if !killed {
			err = endLocalLeases(st.DB(), b)
		}
		return errors.Join(err,
			b.Set([]byte{keys.Meta}, []byte(manifest.ReplicaIdentity(m.Format, shard, m.Shards)), nil),
			b.Set([]byte{keys.Applied}, at, nil))
	})
}

// endLocalLeases makes local leases end as soon as a leader has loaded them.
func endLocalLeases(db *pebble.DB, b *pebble.Batch) error {
	return store.Scan(db, keys.Lease, func(key, value []byte) error {
		if value = keys.EndLocalLeases(value); value == nil {
			return nil
		}
		return b.Set(key, value, nil)
	})
}

// FromReplica makes a store that of the shard of a queue by itself, if it is that of a replica.
func FromReplica(st *store.Store, m *manifest.Manifest, shard int) error {
	got, err := store.Lookup(st.DB(), []byte{keys.Meta})
	if err != nil {
		return err
	}
	if got != nil {
		if _, err := manifest.ReplicaFormat(shard, m.Shards, got); err != nil {
			return nil // it has been converted before, or is that of another queue, which Open refuses
		}
	}
	return convert(st, func(b *pebble.Batch) error {
		return errors.Join(b.Set([]byte{keys.Meta}, []byte(m.Identity(shard)), nil), secede(st.DB(), b))
	})
}

func convert(st *store.Store, fill func(*pebble.Batch) error) error {
	b := st.DB().NewBatch()
	err := fill(b)
	if err == nil {
		err = st.Commit(b)
	}
	if err := errors.Join(err, b.Close()); err != nil {
		return err
	}
	return st.Flush(context.Background()) // is durable at every level of durability
}

// secede deletes the entries that only a store in a cluster has.
func secede(db *pebble.DB, b *pebble.Batch) error {
	for _, kind := range []byte{keys.Applied, keys.Session, keys.Interest, keys.LeaseTime, keys.Placement} {
		if err := store.Scan(db, kind, func(key, _ []byte) error { return b.Delete(key, nil) }); err != nil {
			return err
		}
	}
	return nil
}
