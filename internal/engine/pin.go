package engine

import (
	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/keys"
)

// Pins keep the result of a completed task until its children have ended: a child reads its
// parents' results when it runs, and their retention may have passed by then.
//
// A child that is told of a parent that is kept for some time pins the parent: the child's shard
// has an entry in the range Pin, by child, and the parent's shard counts it in the range Pinned, by
// parent. While the count is above zero, the parent lies in the bucket that never expires. When the
// child ends, its shard releases all its pins, by messages; the last one moves the parent to the
// bucket of its retention. Tasks without ties, and parents that are not kept or kept for ever, pay
// nothing.
//
// Every child that is told of a pinned parent unpins it once: when it ends, or at once if it has
// ended before. The parent is also pinned while its children are told, so that the last child may
// end before the others know. A dead child may be redriven: it pins its parents for as long as the
// dead letter is kept.
type pins struct {
	counts idCache[keys.PinnedValue] // by parent
	any    bool                      // tasks of this shard may pin others
}

func (ti *ties) loadPins() error {
	lower, upper := keys.Range(keys.Pin)
	return ti.Walk(lower, upper, func(*pebble.Iterator, int) (bool, error) {
		ti.pins.any = true
		return false, nil
	})
}

// pinForChildren keeps a completed task until its children are told of its end, and have ended. It
// returns the bucket of the task until then.
func (ti *ties) pinForChildren(parent keys.ID, until uint64) uint64 {
	if until == keys.Forever {
		return until
	}
	ti.pins.counts.Put(parent, keys.PinnedValue{Count: 1, Until: until})
	return keys.Forever
}

// allTold is called when all children of a task know that it has ended.
func (ti *ties) allTold(parent keys.ID) {
	if _, ok := ti.pins.counts.Get(parent); ok {
		ti.mail.send(ti.config.Shard, &keys.Message{Kind: keys.MsgUnpin, Parent: parent})
	}
}

// pinFor counts a child that is told of a parent, if the parent is pinned. It returns the outcome
// to tell.
func (ti *ties) pinFor(parent keys.ID, outcome byte) byte {
	if outcome != keys.ParentDone {
		return outcome
	}
	v, ok := ti.pins.counts.Get(parent)
	if !ok {
		return outcome
	}
	v.Count++
	ti.pins.counts.Put(parent, v)
	return keys.ParentPinned
}

// pin notes that a child of this shard pins a parent.
func (ti *ties) pin(parent, child keys.ID) {
	ti.pins.any = true
	ti.Group.Set(keys.AppendPin(nil, child, parent), nil)
}

// unpin tells the shard of a parent to count one pin less, and to keep it until a time at least.
func (ti *ties) unpin(parent keys.ID, until uint64) {
	ti.mail.send(keys.ShardOf(parent, ti.config.Shards), &keys.Message{Kind: keys.MsgUnpin, Parent: parent, Until: until})
}

// releaseParents is called when a task with parents has ended. They are kept until a time at least.
// Another group looks for those that the task pins: there may be thousands.
func (ti *ties) releaseParents(child keys.ID, until uint64) {
	if ti.pins.any {
		ti.mail.send(ti.config.Shard, &keys.Message{Kind: keys.MsgLeft, Child: child, Until: until})
	}
}

// unpinParents releases the pins of a task that ended in an earlier group; false: some are left.
func (ti *ties) unpinParents(child keys.ID, until uint64) bool {
	lower := keys.AppendPin(nil, child, keys.ID{})[:1+keys.IDLen]
	all := true
	err := ti.Walk(lower, keys.GroupEnd(lower), func(it *pebble.Iterator, n int) (bool, error) {
		if n > 0 && ti.Spent() {
			all = false
			return false, nil
		}
		_, parent, err := keys.ParsePin(it.Key())
		if err != nil {
			return false, err
		}
		ti.Group.Delete(it.Key())
		ti.unpin(parent, until)
		return true, nil
	})
	if err != nil {
		ti.Broken = err
	}
	return all
}
