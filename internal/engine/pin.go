package engine

import (
	"bytes"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/store"
)

// Pins keep the result of a task that is done until those that have waited for it have ended: a
// child reads its parents' results when it runs, and their retention may have passed by then.
//
// A child that is told of a parent that is kept for some time pins it: its shard has an entry in
// the range Pin, by child, and the parent's shard counts it in the range Pinned, by parent. As long
// as it is counted, the parent lies in the bucket that is never forgotten. When the child ends, its
// shard lets go of all that it pins, by messages; the last one puts the parent in the bucket of its
// retention. Tasks that are bound to none, and parents that are not kept or kept for ever, pay
// nothing.
//
// Every child that is told of a pinned parent unpins it once: when it ends, or at once if it has
// ended before. Telling the children of a parent pins it too, so that the last child may end before
// the others are told. A child that has died may be redriven: it pins its parents for as long as
// the dead letter is kept.
type pins struct {
	counts pinCache // by parent
	any    bool     // tasks of this shard may pin others
}

// pinCache has the range Pinned.
type pinCache = writeBackCache[keys.ID, keys.PinnedValue]

func newPins() pins {
	return pins{counts: pinCache{
		prefix: keys.Pinned,
		key:    func(dst []byte, id keys.ID) []byte { return keys.AppendByID(dst, keys.Pinned, id) },
		encode: keys.PinnedValue.Append,
		order:  func(a, b keys.ID) int { return bytes.Compare(a[:], b[:]) },
		parse: func(key, value []byte) (k keys.ID, v keys.PinnedValue, err error) {
			if k, err = keys.ParseByID(key); err == nil {
				v, err = keys.ParsePinned(value)
			}
			return k, v, err
		},
	}}
}

func (p *pins) load(r pebble.Reader) error {
	lower, upper := keys.Range(keys.Pin)
	it, err := r.NewIter(&pebble.IterOptions{LowerBound: lower, UpperBound: upper})
	if err != nil {
		return store.Error(err)
	}
	p.any = it.First()
	return store.Error(it.Close())
}

// pinByTelling keeps a task that is done until its children are told, and have ended. It returns
// the bucket in which the task lies until then.
func (s *State) pinByTelling(parent keys.ID, until uint64) uint64 {
	if until == keys.Forever {
		return until
	}
	s.pins.counts.put(s, parent, keys.PinnedValue{Count: 1, Until: until})
	return keys.Forever
}

// told is when all children of a task know that it has ended.
func (s *State) told(parent keys.ID) {
	if _, ok := s.pins.counts.get(s, parent); ok {
		s.send(s.config.Shard, &keys.Message{Kind: keys.MsgUnpin, Parent: parent})
	}
}

// pinFor counts a child that is told of a parent, if the parent is pinned. It returns the outcome
// to tell.
func (s *State) pinFor(parent keys.ID, outcome byte) byte {
	if outcome != parentDone {
		return outcome
	}
	v, ok := s.pins.counts.get(s, parent)
	if !ok {
		return outcome
	}
	v.Count++
	s.pins.counts.put(s, parent, v)
	return parentPinned
}

// repin keeps a task that is done already for one more child, which is told next.
// REQUIRES: the task is not moving.
func (s *State) repin(at *located) {
	if at.place.At == keys.Forever { // for ever, or pinned
		return
	}
	s.pins.counts.put(s, at.id, keys.PinnedValue{Until: at.place.At}) // the child counts
	s.unkeep(at)
	s.keep(at.lane.queue, keys.Done, at.id, keys.Forever, at.ended, &at.rec)
}

// pin notes that a child of this shard pins a parent.
func (s *State) pin(parent, child keys.ID) {
	s.pins.any = true
	s.Group.set(keys.AppendPin(nil, child, parent), nil)
}

// unpin has the shard of a parent count one pin less, and the parent kept until a time at least.
func (s *State) unpin(parent keys.ID, until uint64) {
	s.send(keys.ShardOf(parent, s.config.Shards), &keys.Message{Kind: keys.MsgUnpin, Parent: parent, Until: until})
}

// leave is the end of a task that has had parents. They are kept until a time at least. Another
// group looks which of them it pins: there may be thousands.
func (s *State) leave(child keys.ID, until uint64) {
	if s.pins.any {
		s.send(s.config.Shard, &keys.Message{Kind: keys.MsgLeft, Child: child, Until: until})
	}
}

// left lets go of what a task pins that has ended in an earlier group. It is false if it is not
// through.
func (s *State) left(child keys.ID, until uint64) bool {
	lower := keys.AppendPin(nil, child, keys.ID{})[:1+keys.IDLen]
	all := true
	err := s.walk(lower, keys.GroupEnd(lower), func(it *pebble.Iterator, n int) (bool, error) {
		if n > 0 && s.Spent() {
			all = false
			return false, nil
		}
		_, parent, err := keys.ParsePin(it.Key())
		if err != nil {
			return false, err
		}
		s.Group.delete(it.Key())
		s.unpin(parent, until)
		return true, nil
	})
	if err != nil {
		s.Broken = err
	}
	return all
}

// unpinned counts one pin of a task of this shard less. When it is the last one, the task is kept
// until its retention has passed. It is false if disk is behind with the task; then nothing was
// done.
func (s *State) unpinned(parent keys.ID, until uint64) bool {
	if s.isMoving(parent) {
		return false
	}
	v, ok := s.pins.counts.get(s, parent)
	if !ok {
		return true
	}
	v.Until = max(v.Until, until)
	if v.Count--; v.Count > 0 {
		s.pins.counts.put(s, parent, v)
		return true
	}
	at, err := s.locate(parent)
	if err == nil && (at == nil || at.state != Done) {
		err = fmt.Errorf("%w: task %s is pinned and is %+v", base.ErrCorrupt, keys.FormatID(parent), at)
	}
	if err != nil {
		s.Broken = err
		return true
	}
	s.pins.counts.drop(s, parent)
	s.unkeep(at)
	s.keep(at.lane.queue, keys.Done, parent, max(v.Until, BucketOf(s.Wall, 1)), at.ended, &at.rec)
	return true
}
