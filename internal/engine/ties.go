package engine

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"slices"

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

	uniques   uniqueCache     // by hash of the key
	nextFreed store.DueCursor // the first idempotency key to become free
	turns     turnCache       // by scope
	limits    limitTable
	pending   idCache[uint64] // numbers of parents
	notices   childNotices
	pins      pins

	wakeups  wakeupList // of blocked tasks that may go on
	blocked  store.Waiting
	children store.RangeReader // tasks that wait for parents
}

// The caches of ranges.
type (
	uniqueCache    = store.WriteBackCache[[keys.UniqueLen]byte, keys.UniqueValue]
	turnCache      = store.WriteBackCache[uint64, keys.GroupValue]
	idCache[V any] = store.WriteBackCache[keys.ID, V]
)

func newTies(r *round, ns *names, ml *mail, le *leases) ties {
	return ties{
		round: r, names: ns, mail: ml, leases: le, nextFreed: store.NothingDue, limits: make(limitTable),
		uniques: store.NewWriteBackCache(&r.Reads, r.config.Seed, store.Form[[keys.UniqueLen]byte, keys.UniqueValue]{
			Prefix: keys.Unique, Key: keys.AppendHashed, ParseKey: keys.ParseHashed, Order: compareIDs,
			Append: keys.UniqueValue.Append, Parse: keys.ParseUnique,
		}),
		turns: store.NewWriteBackCache(&r.Reads, r.config.Seed, store.Form[uint64, keys.GroupValue]{
			Prefix: keys.Group, Key: keys.AppendScope, ParseKey: keys.ParseScope, Order: cmp.Compare[uint64],
			Append: keys.GroupValue.Append, Parse: keys.ParseGroup,
		}),
		pending: newIDCache(r, keys.Pending, func(n uint64, dst []byte) []byte { return keys.AppendNumber(dst, n) }, keys.ParseNumber),
		notices: childNotices{ends: newIDCache(r, keys.Telling, func(end byte, dst []byte) []byte { return append(dst, end) }, keys.ParseEnd)},
		pins:    pins{counts: newIDCache(r, keys.Pinned, keys.PinnedValue.Append, keys.ParsePinned)},
		blocked: store.NewWaiting(&r.Reads), children: r.Range(keys.Dependent),
	}
}

// newIDCache returns the cache of a range by ID.
func newIDCache[V any](r *round, prefix byte, encode func(V, []byte) []byte, parse func([]byte) (V, error)) idCache[V] {
	return store.NewWriteBackCache(&r.Reads, r.config.Seed, store.Form[keys.ID, V]{
		Prefix: prefix, Key: func(dst []byte, id keys.ID) []byte { return keys.AppendByID(dst, prefix, id) },
		ParseKey: keys.ParseByID, Order: compareIDs, Append: encode, Parse: parse,
	})
}

func compareIDs(a, b [keys.IDLen]byte) int { return bytes.Compare(a[:], b[:]) }

// rangeCache is a cache of any entries.
type rangeCache interface {
	Load(r pebble.Reader) error
	ListIsDue() bool
	List(spent func() bool) error
	Close()
	Seal(w *store.Writes)
	Trim()
	HasChanges() bool
	Forget()
	Check(disk pebble.Reader, what string) []error
}

// caches returns all caches, in the order of their writes in a group.
func (ti *ties) caches() [5]rangeCache {
	return [...]rangeCache{&ti.uniques, &ti.turns, &ti.pending, &ti.notices.ends, &ti.pins.counts}
}

// listKeys lists more keys of all caches.
func (ti *ties) listKeys() {
	for _, m := range ti.caches() {
		if m.ListIsDue() && ti.Broken == nil {
			ti.Broken = m.List(ti.Spent)
		}
	}
}

func (ti *ties) listKeysIsDue() bool {
	all := ti.caches()
	return slices.ContainsFunc(all[:], rangeCache.ListIsDue)
}

// holder returns the task that has an idempotency key.
func (ti *ties) holder(hash [keys.UniqueLen]byte) (id keys.ID, taken bool) {
	if hash == [keys.UniqueLen]byte{} {
		return keys.ID{}, false
	}
	v, ok := ti.uniques.Get(hash)
	return v.ID, ok
}

// isHolderMoving is isMoving for the task that has an idempotency key; the group may have produced
// it.
func (ti *ties) isHolderMoving(hash [keys.UniqueLen]byte, id keys.ID) bool {
	return ti.leases.isMoving(id) || ti.uniques.HasChanged(hash) && ti.Group.Find(id) == nil
}

// takeKey gives a free key to a task, for its time from now on.
func (ti *ties) takeKey(id keys.ID, t *record.Ties) { ti.takeKeyFrom(id, t, ti.periods.Now) }

// takeKeyFrom is takeKey for its time from a moment on, but not before the one in the ID: endKey
// relies on it.
func (ti *ties) takeKeyFrom(id keys.ID, t *record.Ties, from uint64) {
	v := keys.UniqueValue{ID: id}
	if t.UniqueFor != 0 { // freeKeys looks at it once its time has passed, even if that is now
		ti.periods.Made = true
		v.Until = keys.KeyUntil(id, from, t.UniqueFor)
		ti.scratch = keys.AppendFreed(ti.scratch[:0], v.Until, t.Unique)
		ti.Group.Set(ti.scratch, nil)
		ti.nextFreed.Lower(v.Until, t.Unique)
	}
	ti.uniques.Put(t.Unique, v)
}

// freeKey takes a key from its holder.
func (ti *ties) freeKey(hash [keys.UniqueLen]byte, v keys.UniqueValue) {
	ti.uniques.Drop(hash)
	if v.Until != 0 {
		ti.Group.Delete(keys.AppendFreed(nil, v.Until, hash))
	}
}

// endKey is called for the key of a task that ends. Before the clock of periods has passed the
// key's time there is nothing to do, unless the end releases the key: freeKeys will find that the
// task has ended.
func (ti *ties) endKey(id keys.ID, t *record.Ties, release uint8) {
	if t.Flags&release == 0 && t.UniqueFor != 0 && keys.KeyUntil(id, 0, t.UniqueFor) > ti.periods.Now {
		return
	}
	if t.Flags&record.HoldsKey != 0 && t.UniqueFor == 0 {
		ti.uniques.DropBlind(t.Unique)
		return
	}
	v, ok := ti.uniques.Get(t.Unique)
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
	lower := keys.AppendFreed(nil, ti.nextFreed.At, ti.nextFreed.Name)
	_, upper := keys.Range(keys.Freed)
	ti.nextFreed = store.NothingDue
	ti.Broken = ti.Walk(lower, upper, func(it *pebble.Iterator, _ int) (bool, error) {
		at, hash, err := keys.ParseFreed(it.Key())
		if err != nil {
			return false, err
		}
		if !ti.past(at) || ti.Spent() {
			ti.nextFreed.Lower(at, hash)
			return false, nil
		}
		ti.Group.Delete(it.Key())
		v, ok := ti.uniques.Get(hash)
		if !ok || v.Until != at {
			return false, fmt.Errorf("idempotency key %x should be free at %d, and has value %+v", hash, at, v)
		}
		if lives, err := ti.leases.lives(v.ID); err != nil {
			return false, err
			// endKey compares with the clock of periods, which never goes back
		} else if lives {
			v.Until = 0
			ti.uniques.Put(hash, v)
			ti.periods.Made = true
			l, err := ti.names.laneNumbered(keys.LaneOf(v.ID))
			if err != nil {
				return false, err
			}
			ti.names.touch(l.queue)
		} else {
			ti.uniques.Drop(hash)
		}
		return true, nil
	})
}

func (ti *ties) freeKeysIsDue() bool { return ti.past(ti.nextFreed.At) }

// lives reports whether a task has not ended.
// REQUIRES: the group has not ended the task.
func (le *leases) lives(id keys.ID) (bool, error) {
	if le.byID[id] != nil {
		return true, nil
	}
	if base.Invariants && le.Group.hasChanged(id) && le.Group.Find(id) == nil {
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
