package broadcast

import (
	"context"
	"sync/atomic"

	"codeq/internal/base"
	"codeq/internal/engine"
)

// Interests is what a node wants to hear of, which is stored in every shard.
type Interests struct {
	turn   chan struct{}  // capacity 1: held by who changes stored
	stored engine.KindSet // in every shard, unless doubtful is set; guarded by turn
	// doubtful is whether a set may be stored in some shards and not in others; guarded by turn.
	doubtful bool
	kept     atomic.Uint32 // KindSet of what is never given back
}

// NewInterests returns those of a node that has just been opened.
func NewInterests() *Interests { return &Interests{turn: make(chan struct{}, 1)} }

// Keep makes all shards tell the node of kinds from the next change on, for good. publish is as Set
// with these kinds.
func (w *Interests) Keep(kinds engine.KindSet, publish func() error) error {
	if engine.KindSet(w.kept.Load())&kinds == kinds {
		return nil
	}
	if err := publish(); err != nil {
		return err
	}
	w.kept.Or(uint32(kinds))
	return nil
}

// Set makes the shards tell the node of kinds, of what is kept, and of what wanted adds. store
// stores the set in each shard; calls of it take turns.
func (w *Interests) Set(ctx context.Context, kinds engine.KindSet, wanted func() engine.KindSet, store func(engine.KindSet) error) error {
	select {
	case w.turn <- struct{}{}:
		defer func() { <-w.turn }()
	case <-ctx.Done():
		return base.EndOf(ctx)
	}
	kinds |= engine.KindSet(w.kept.Load()) | wanted()
	if kinds == w.stored && !w.doubtful {
		return nil
	}
	w.doubtful = true
	if err := store(kinds); err != nil {
		return err
	}
	w.stored, w.doubtful = kinds, false
	return nil
}
