package listing

import (
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/store"
	"codeq/internal/wire"
)

// Use has everything that a shard has of a queue besides its settings.
type Use struct {
	Queue  string `json:"-"`
	Counts keys.Counts
	Keys   int    // idempotency keys with a time limit, independent of their tasks
	Claims int    // claims that wait for its tasks; the caller of Visit counts them
	now    uint64 // by the clock of periods, at the time of Visit
}

// Visit counts the tasks.
func (u *Use) Visit(rules *engine.State, _ *store.Snapshot) {
	u.Keys, u.Counts, u.now = 0, keys.Counts{}, rules.Clock().Periods
	if q := rules.Names.Queues[u.Queue]; q != nil {
		u.Counts = q.Counts
	}
}

// errStopped: the read of a Use was stopped.
var errStopped = errors.New("the shard has ended")

// usedAtOnce is the number of keys between two calls of stop.
const usedAtOnce = 1024

// Look counts the idempotency keys. It reads those of all queues.
func (u *Use) Look(v *store.Snapshot, stop func() bool) (again bool, err error) {
	read := 0
	return false, store.Scan(v.Reader(), keys.Freed, func(key, _ []byte) error {
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
		if err == nil && lane.Queue == u.Queue {
			u.Keys++
		}
		return err
	})
}

// Append appends the name of the queue.
func (u *Use) Append(dst []byte) []byte { return wire.AppendBytes(dst, u.Queue) }

func (u *Use) Read(r *wire.Reader) { u.Queue = r.String() }

// AppendReply appends the use.
func (u *Use) AppendReply(dst []byte) []byte { return wire.AppendJSON(dst, u) }

// ReadReply is the reverse of AppendReply.
func (u *Use) ReadReply(r *wire.Reader) { r.JSON(r.Rest(), u) }

// Again does nothing: Visit begins anew.
func (u *Use) Again() {}
