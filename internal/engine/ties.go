package engine

import (
	"errors"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/store"
)

// ties holds the ties between tasks: idempotency keys, the turns of groups, parents and children,
// the pins of results, the limits of keys, and the wakeups of the tasks that wait for any of these.
type ties struct {
	*round
	names  *names
	mail   *mail
	leases *leases

	uniques   uniqueCache
	nextFreed dueCursor // the first idempotency key to become free
	turns     turnCache
	limits    limitTable
	pending   pendingCache // numbers of parents
	notices   childNotices
	pins      pins

	wakeups  wakeupList // of blocked tasks that may go on
	cursors  scanCursors
	blocked  rangeReader
	children rangeReader // tasks that wait for parents
}

func newTies(r *round, ns *names, ml *mail, le *leases) ties {
	return ties{
		round: r, names: ns, mail: ml, leases: le,
		uniques: newUniqueCache(), nextFreed: nothingDue, turns: newTurnCache(), limits: make(limitTable),
		pending: newPendingCache(), notices: newChildNotices(), pins: newPins(),
		cursors: scanCursors{group: 1}, blocked: rangeReader{prefix: keys.Blocked}, children: rangeReader{prefix: keys.Dependent},
	}
}

// holder returns the task that has an idempotency key.
func (ti *ties) holder(hash [keys.UniqueLen]byte) (id keys.ID, taken bool) {
	if hash == [keys.UniqueLen]byte{} {
		return keys.ID{}, false
	}
	v, ok := ti.uniques.get(ti.round, hash)
	return v.ID, ok
}

// isHolderMoving is isMoving for the task that has an idempotency key; the group may have produced
// it.
func (ti *ties) isHolderMoving(hash [keys.UniqueLen]byte, id keys.ID) bool {
	return ti.leases.isMoving(id) || ti.uniques.hasChanged(hash) && ti.Group.find(id) == nil
}

// takeKey gives a free key to a task, for its time from now on.
func (ti *ties) takeKey(id keys.ID, t *record.Ties) { ti.takeKeyFrom(id, t, ti.periods.now) }

// takeKeyFrom is takeKey for its time from a moment on, but not before the one in the ID: endKey
// relies on it.
func (ti *ties) takeKeyFrom(id keys.ID, t *record.Ties, from uint64) {
	v := keys.UniqueValue{ID: id}
	if t.UniqueFor != 0 { // freeKeys looks at it once its time has passed, even if that is now
		ti.periods.made = true
		v.Until = keys.KeyUntil(id, from, t.UniqueFor)
		ti.scratch = keys.AppendFreed(ti.scratch[:0], v.Until, t.Unique)
		ti.Group.set(ti.scratch, nil)
		ti.nextFreed.lower(v.Until, t.Unique)
	}
	ti.uniques.put(ti.round, t.Unique, v)
}

// freeKey takes a key from its holder.
func (ti *ties) freeKey(hash [keys.UniqueLen]byte, v keys.UniqueValue) {
	ti.uniques.drop(ti.round, hash)
	if v.Until != 0 {
		ti.Group.delete(keys.AppendFreed(nil, v.Until, hash))
	}
}

// endKey is called for the key of a task that ends. Before the clock of periods has passed the
// key's time there is nothing to do, unless the end releases the key: freeKeys will find that the
// task has ended.
func (ti *ties) endKey(id keys.ID, t *record.Ties, release uint8) {
	if t.Flags&release == 0 && t.UniqueFor != 0 && keys.KeyUntil(id, 0, t.UniqueFor) > ti.periods.now {
		return
	}
	if t.Flags&record.HoldsKey != 0 && t.UniqueFor == 0 {
		ti.uniques.dropBlind(t.Unique)
		return
	}
	v, ok := ti.uniques.get(ti.round, t.Unique)
	if !ok || v.ID != keys.ID(id) { // released, and perhaps taken by another task
		return
	}
	if v.Until == 0 || t.Flags&release != 0 {
		ti.freeKey(t.Unique, v)
	}
}

// freeKeys looks at idempotency keys after their time: those of ended tasks become free, the others
// when their tasks end.
// REQUIRES: the group has ended no task.
func (ti *ties) freeKeys() {
	lower := keys.AppendFreed(nil, ti.nextFreed.at, ti.nextFreed.name)
	_, upper := keys.Range(keys.Freed)
	ti.nextFreed = nothingDue
	ti.Broken = ti.walk(lower, upper, func(it *pebble.Iterator, _ int) (bool, error) {
		at, hash, err := keys.ParseFreed(it.Key())
		if err != nil {
			return false, err
		}
		if !ti.past(at) || ti.Spent() {
			ti.nextFreed.lower(at, hash)
			return false, nil
		}
		ti.Group.delete(it.Key())
		v, ok := ti.uniques.get(ti.round, hash)
		if !ok || v.Until != at {
			return false, fmt.Errorf("idempotency key %x should be free at %d, and has value %+v", hash, at, v)
		}
		if lives, err := ti.leases.lives(v.ID); err != nil {
			return false, err
			// endKey compares with the clock of periods, which never goes back
		} else if lives {
			v.Until = 0
			ti.uniques.put(ti.round, hash, v)
			ti.periods.made = true
			l, err := ti.names.laneNumbered(keys.LaneOf(v.ID))
			if err != nil {
				return false, err
			}
			ti.names.touch(l.queue)
		} else {
			ti.uniques.drop(ti.round, hash)
		}
		return true, nil
	})
}

func (ti *ties) freeKeysIsDue() bool { return ti.past(ti.nextFreed.at) }

// lives reports whether a task has not ended.
// REQUIRES: the group has not ended the task.
func (le *leases) lives(id keys.ID) (bool, error) {
	if le.byID[id] != nil {
		return true, nil
	}
	if base.Invariants && le.Group.hasChanged(id) && le.Group.find(id) == nil {
		base.Violated("the group has ended task %s, which is on disk", keys.FormatID(id))
	}
	p, indexed, err := store.PlaceOf(le.Store.DB(), id)
	if err != nil || indexed {
		return indexed, err
	}
	_, closer, err := le.Store.DB().Get(p.AppendKey(nil, id))
	if errors.Is(err, pebble.ErrNotFound) {
		return false, nil
	}
	if err != nil {
		return false, store.Error(err)
	}
	return true, closer.Close()
}
