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

// holder returns the task that has an idempotency key.
func (s *State) holder(hash [keys.UniqueLen]byte) (id keys.ID, taken bool) {
	if hash == [keys.UniqueLen]byte{} {
		return keys.ID{}, false
	}
	v, ok := s.uniques.get(&s.round, hash)
	return v.ID, ok
}

// isHolderMoving is isMoving for the task that has an idempotency key; the group may have produced
// it.
func (s *State) isHolderMoving(hash [keys.UniqueLen]byte, id keys.ID) bool {
	return s.isMoving(id) || s.uniques.hasChanged(hash) && s.Group.find(id) == nil
}

// takeKey gives a free key to a task, for its time from now on.
func (s *State) takeKey(id keys.ID, t *record.Ties) { s.takeKeyFrom(id, t, s.periods.now) }

// takeKeyFrom is takeKey for its time from a moment on, but not before the one in the ID: endKey
// relies on it.
func (s *State) takeKeyFrom(id keys.ID, t *record.Ties, from uint64) {
	v := keys.UniqueValue{ID: id}
	if t.UniqueFor != 0 { // freeKeys looks at it once its time has passed, even if that is now
		s.periods.made = true
		v.Until = keys.Later(max(from, mintedAt(id)), t.UniqueFor)
		s.scratch = keys.AppendFreed(s.scratch[:0], v.Until, t.Unique)
		s.Group.set(s.scratch, nil)
		s.nextFreed.lower(v.Until, t.Unique)
	}
	s.uniques.put(&s.round, t.Unique, v)
}

// freeKey takes a key from its holder.
func (s *State) freeKey(hash [keys.UniqueLen]byte, v keys.UniqueValue) {
	s.uniques.drop(&s.round, hash)
	if v.Until != 0 {
		s.Group.delete(keys.AppendFreed(nil, v.Until, hash))
	}
}

// endKey is called for the key of a task that ends. Before the clock of periods has passed the
// key's time there is nothing to do, unless the end releases the key: freeKeys will find that the
// task has ended.
func (s *State) endKey(id keys.ID, t *record.Ties, release uint8) {
	if t.Flags&release == 0 && t.UniqueFor != 0 && keys.Later(mintedAt(id), t.UniqueFor) > s.periods.now {
		return
	}
	if t.Flags&record.HoldsKey != 0 && t.UniqueFor == 0 {
		s.uniques.dropBlind(t.Unique)
		return
	}
	v, ok := s.uniques.get(&s.round, t.Unique)
	if !ok || v.ID != keys.ID(id) { // released, and perhaps taken by another task
		return
	}
	if v.Until == 0 || t.Flags&release != 0 {
		s.freeKey(t.Unique, v)
	}
}

func mintedAt(id keys.ID) uint64 { return keys.SinceMillis(keys.SinceOf(keys.ID(id))) }

// freeKeys looks at idempotency keys whose time has passed: those of ended tasks become free, the
// others when their tasks end.
// REQUIRES: the group has ended no task.
func (s *State) freeKeys() {
	lower := keys.AppendFreed(nil, s.nextFreed.at, s.nextFreed.name)
	_, upper := keys.Range(keys.Freed)
	s.nextFreed = nothingDue
	s.Broken = s.walk(lower, upper, func(it *pebble.Iterator, _ int) (bool, error) {
		at, hash, err := keys.ParseFreed(it.Key())
		if err != nil {
			return false, err
		}
		if !s.past(at) || s.Spent() {
			s.nextFreed.lower(at, hash)
			return false, nil
		}
		s.Group.delete(it.Key())
		v, ok := s.uniques.get(&s.round, hash)
		if !ok || v.Until != at {
			return false, fmt.Errorf("idempotency key %x should be free at %d, and has value %+v", hash, at, v)
		}
		if lives, err := s.lives(v.ID); err != nil {
			return false, err
			// endKey compares with the clock of periods, which never goes back
		} else if lives {
			v.Until = 0
			s.uniques.put(&s.round, hash, v)
			s.periods.made = true
			l, err := s.laneNumbered(keys.LaneOf(v.ID))
			if err != nil {
				return false, err
			}
			s.touch(l.queue)
		} else {
			s.uniques.drop(&s.round, hash)
		}
		return true, nil
	})
}

func (s *State) freeKeysIsDue() bool { return s.past(s.nextFreed.at) }

// lives reports whether a task has not ended.
// REQUIRES: disk has the latest state of the task.
func (le *leases) lives(id keys.ID) (bool, error) {
	if le.byID[id] != nil {
		return true, nil
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

// ReleaseKey frees an idempotency key; name is used in the error.
func (s *State) ReleaseKey(hash [keys.UniqueLen]byte, name string) (Verdict, error) {
	v, ok := s.uniques.get(&s.round, hash)
	if ok && s.isHolderMoving(hash, v.ID) {
		return Again, nil
	}
	if !ok {
		return Decided, fmt.Errorf("%w: nobody has idempotency key %q", base.ErrNotFound, name)
	}
	at, err := s.locateUnended(v.ID)
	if err != nil {
		s.Broken = err
		return Decided, nil
	}
	if at != nil && at.rec.Flags&record.HoldsKey != 0 {
		if !s.HasRoom(RoomScarce) {
			return Decided, ErrNoRoom
		}
		at.rec.Flags &^= record.HoldsKey
		s.rewrite(at)
	}
	s.freeKey(hash, v)
	return Decided, nil
}
