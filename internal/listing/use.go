package listing

import (
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/store"
)

// Use has everything that a shard has of a queue besides its settings.
type Use struct {
	Counts keys.Counts
	Keys   int    // idempotency keys with a time limit, independent of their tasks
	Claims int    // claims that wait for its tasks
	now    uint64 // by the clock of periods, at the time of UseOf
}

// UseOf returns the use of a queue by the rules of a shard, with a number of waiting claims.
func UseOf(s *engine.State, queue string, claims int) Use {
	u := Use{Claims: claims, now: s.Clock().Periods}
	if q := s.Names.Queues[queue]; q != nil {
		u.Counts = q.Counts
	}
	return u
}

// errStopped: the read of a Use was stopped.
var errStopped = errors.New("the shard has ended")

// usedAtOnce is the number of keys between two calls of stop.
const usedAtOnce = 1024

// CountKeys counts the idempotency keys of a queue. It reads the keys of all queues, and ends when
// stop returns true.
func (u *Use) CountKeys(v *store.Snapshot, queue string, stop func() bool) error {
	read := 0
	return store.Scan(v.Reader(), keys.Freed, func(key, _ []byte) error {
		if read++; read%usedAtOnce == 0 && stop() {
			return errStopped
		}
		at, hash, err := keys.ParseFreed(key)
		if err != nil {
			return fmt.Errorf("%w: %w", base.ErrCorrupt, err)
		}
		if at <= u.now {
			return nil
		}
		b, err := store.Lookup(v.Reader(), keys.AppendHashed(nil, hash))
		if err != nil || b == nil {
			return err
		}
		held, err := keys.ParseUnique(b)
		if err != nil {
			return fmt.Errorf("%w: idempotency key %x: %w", base.ErrCorrupt, hash, err)
		}
		if held.ID == keys.Gone { // its queue is unknown
			return nil
		}
		lane, err := v.Lane(keys.LaneOf(held.ID))
		if errors.Is(err, pebble.ErrNotFound) {
			return nil
		}
		if err == nil && lane.Queue == queue {
			u.Keys++
		}
		return err
	})
}
