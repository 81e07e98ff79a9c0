package codeq

import (
	"codeq/internal/engine"
	"codeq/internal/fsck"
	"codeq/internal/keys"
	"codeq/internal/manifest"
	"codeq/internal/schema"
	"codeq/internal/store"
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/cockroachdb/pebble/v2"
)

// openShard opens a shard's store and loads its memory from it.
func openShard(index int, opts *Options, d *manifest.Directory, shared *store.Caches, gates *gateTable) (*shard, error) {
	dir := manifest.ShardDir(d.FS, d.Path, index)
	if d.Creating { // by an Open that did not return: what it left may not even be a store
		if err := d.FS.RemoveAll(dir); err != nil {
			return nil, err
		}
	}
	if err := fsck.FinishRepair(d.FS, d.Path, index); err != nil {
		return nil, err
	}
	st, err := store.Open(dir, opts.storeConfig(), shared, d.Creating)
	if err != nil {
		return nil, err
	}
	s := newShard(index, opts, st, gates)
	if err := errors.Join(st.Read(func() error { return s.identify(d) }), s.load()); err != nil {
		_ = st.Close() // the error of load is the one that matters
		return nil, err
	}
	return s, nil
}

// identify makes sure that the store is this shard of this queue, and of the current format.
func (s *shard) identify(d *manifest.Directory) error {
	got, err := schema.Lookup(s.Store.DB(), []byte{keys.Meta})
	if err != nil {
		return err
	}
	if got == nil {
		if !d.Creating {
			return fmt.Errorf("%w: no identity, expected %q", ErrCorrupt, d.Identity(s.index))
		}
		if err := s.Store.DB().Set([]byte{keys.Meta}, []byte(d.Identity(s.index)), pebble.Sync); err != nil {
			return store.Error(err)
		}
		// The manifest is about to say that this shard exists, and must not
		// outlive that: a flush is durable at every level of durability.
		return s.Store.Flush(context.Background())
	}
	old, err := d.CheckIdentity(s.index, got)
	if err != nil || !old {
		return err
	}
	b := s.Store.DB().NewBatch()
	defer func() { _ = b.Close() }() // it does no more than to recycle memory
	if err := b.Set([]byte{keys.Meta}, []byte(d.Identity(s.index)), nil); err != nil {
		return store.Error(err)
	}
	return s.Store.Commit(b)
}

// join makes the shard one of those of a queue.
// REQUIRES: all are loaded, and none runs.
func (s *shard) join(peers []*shard) {
	s.peers = peers
	states := make([]*engine.State, len(peers))
	for i, peer := range peers {
		states[i] = &peer.State
	}
	s.Meet(states)
	s.follow()
	s.feedAll()
}

// load builds the shard's memory from disk.
func (s *shard) load() error {
	s.tick()
	s.look()
	if err := s.State.Load(); err != nil {
		return err
	}
	for _, r := range s.Effects.Resting {
		s.opts.log.Error("schedule rests", "schedule", r.Name, "err", r.Err)
	}
	s.Effects.Resting = nil
	s.follow()
	return nil
}

// configOf is what the rules of a shard go by.
func configOf(index int, o *Options, seed [32]byte, elapsed func() time.Duration) engine.Config {
	return engine.Config{
		Shard: index, Shards: o.Shards, Replicated: o.Cluster != nil, Seed: seed, Elapsed: elapsed,
		WindowTasks: o.WindowTasks, WindowBytes: o.WindowBytes, MaxAttempts: o.MaxAttempts, Backoff: o.Backoff.Delay,
		Retention: o.Retention, IdleLanes: o.idleLanes, SweepLanes: o.sweepLanes, GroupBytes: o.groupBytes,
		TrimBytes: o.trimBytes, TrimLane: o.trimLane,
	}
}
