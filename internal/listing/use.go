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

// Use is what a shard has of a queue beside its settings.
type Use struct {
	Counts keys.Counts
	Keys   int    // idempotency keys that are taken for some time, whatever becomes of their tasks
	Claims int    // that wait for its tasks
	now    uint64 // by the clock of periods, when the shard was asked
}

// UseOf returns what the rules of a shard know of the use of a queue, for which so many claims
// wait.
func UseOf(s *engine.State, queue string, claims int) Use {
	u := Use{Claims: claims, now: s.Clock().Periods}
	if q := s.Names.Queues[queue]; q != nil {
		u.Counts = q.Counts
	}
	return u
}

// errStopped: the read of a Use was stopped.
var errStopped = errors.New("the shard has ended")

// usedAtOnce is after how many keys CountKeys asks whether to stop.
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
		if held.ID == keys.Gone { // which queue it is of, nobody knows
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
