package entries

import (
	"context"
	"sync"
	"time"

	"codeq/internal/base"
	"codeq/internal/engine"
	"codeq/internal/keys"
)

// Interests is the kinds of events that a node wants from every shard: the sum of those that its
// calls and subscriptions want. New kinds are stored in the shards before the call or the
// subscription goes on. Unused kinds are removed there after a while (Withdraw).
//
// Invariant: while a call or a subscription goes on, every shard has stored its kinds. Sets have
// numbers, so that one that arrives late does not replace a later one.
type Interests struct {
	incarnation uint64                                          // of the node
	wanted      func() engine.KindSet                           // by subscriptions
	store       func(context.Context, keys.InterestValue) error // stores a set in each shard; calls take turns

	turn chan struct{} // capacity 1: held during a change of the stored kinds
	less chan struct{} // capacity 1: something is wanted by one less

	stored   engine.KindSet // in every shard, unless doubtful is set; guarded by turn
	doubtful bool           // likewise: shards may have another set, at first that of an earlier incarnation
	number   uint64         // likewise: of the last set

	mu    sync.Mutex // guards the fields below
	users map[engine.KindSet]int
	sure  engine.KindSet // is stored in every shard, and not about to be given back
}

// NewInterests returns those of a node that has just been opened. wanted are the kinds of its
// subscriptions, and store stores a set in each shard.
func NewInterests(incarnation uint64, wanted func() engine.KindSet, store func(context.Context, keys.InterestValue) error) *Interests {
	return &Interests{
		incarnation: incarnation, wanted: wanted, store: store, turn: make(chan struct{}, 1), less: make(chan struct{}, 1), doubtful: true,
		users: make(map[engine.KindSet]int),
	}
}

// Keep makes all shards tell the node of kinds, from the next change on until Release is called.
func (w *Interests) Keep(ctx context.Context, kinds engine.KindSet) error {
	w.mu.Lock()
	w.users[kinds]++
	sure := w.sure&kinds == kinds
	w.mu.Unlock()
	if sure {
		return nil
	}
	err := w.Publish(ctx)
	if err != nil {
		w.Release(kinds)
	}
	return err
}

// Release ends what Keep has begun.
func (w *Interests) Release(kinds engine.KindSet) {
	w.mu.Lock()
	w.users[kinds]--
	last := w.users[kinds] == 0
	w.mu.Unlock()
	if last {
		w.Less()
	}
}

// Less is called when less may be wanted than before.
func (w *Interests) Less() {
	select {
	case w.less <- struct{}{}:
	default:
	}
}

// Publish makes the shards tell the node about the kept kinds, and those of its subscriptions.
func (w *Interests) Publish(ctx context.Context) error {
	select {
	case w.turn <- struct{}{}:
		defer func() { <-w.turn }()
	case <-ctx.Done():
		return base.EndOf(ctx)
	}
	w.mu.Lock()
	kinds := w.wanted()
	for kept, users := range w.users {
		if users > 0 {
			kinds |= kept
		}
	}
	w.sure &= kinds
	w.mu.Unlock()
	if kinds == w.stored && !w.doubtful {
		return nil
	}
	w.doubtful = true
	w.number++
	if err := w.store(ctx, keys.InterestValue{Kinds: uint64(kinds), Incarnation: w.incarnation, Number: w.number}); err != nil {
		return err
	}
	w.stored, w.doubtful = kinds, false
	w.mu.Lock()
	w.sure = kinds
	w.mu.Unlock()
	return nil
}

// withdrawAfter is how long unused kinds stay stored: they may soon be wanted again.
const withdrawAfter = 10 * time.Second

// Withdraw removes unused kinds from the shards, until ctx ends; at first those of an earlier
// incarnation of the node.
func (w *Interests) Withdraw(ctx context.Context) {
	wait := time.NewTimer(withdrawAfter)
	defer wait.Stop()
	for {
		select {
		case <-wait.C:
		case <-ctx.Done():
			return
		}
		if w.Publish(ctx) == nil {
			select {
			case <-w.less:
			case <-ctx.Done():
				return
			}
		}
		wait.Reset(withdrawAfter)
	}
}
