package codeq

import (
	"bytes"
	"fmt"

	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/keys"
)

// Blocked tasks wait for others, each in a scope: 0 for tasks that wait for
// their parents, that of a group for tasks that wait for their turn in it, and
// that of a limit for tasks that found no room in it when they were to be
// leased. What lets them go on leaves a mark in the range Wake, in its own
// commit; the next group reads who waits, and moves them.

// block has a task wait in a scope.
func (s *shard) block(l *lane, scope uint64, id ID, rec []byte) {
	q := l.queue
	if scope != 0 {
		s.fronts.lower(scope, id)
	}
	s.scratch = keys.AppendGrouped(s.scratch[:0], keys.Blocked, q.number, scope, id)
	s.group.set(s.scratch, s.withLane(l, rec))
	s.setIndex(id, l, keys.Place{Range: keys.Blocked, Group: q.number, At: scope}, rec)
	q.counts.Blocked++
	s.touch(q)
}

// What a mark has to say.
const (
	wakeUp     = iota // who waits may go on
	wakeCancel        // the task is to be canceled
)

// mark names who may go on: an entry of the range Wake.
type mark struct {
	queue *queueState
	scope uint64
	id    ID // the task in scope 0
}

// markList is the marks that the groups before have left, in memory, so that the
// range need not be read over and over: between its live entries lie the
// tombstones of all that were there.
//
// Invariant: it holds all marks, or shard.wakes is set and it holds none.
type markList struct {
	how   map[mark]byte
	order []mark
}

// marksCap is how many marks memory holds at the most.
const marksCap = 1 << 12

// wake lets tasks go on that wait in a scope; id is the task in scope 0.
func (s *shard) wake(q *queueState, scope uint64, id ID, how byte) {
	s.scratch = keys.AppendGrouped(s.scratch[:0], keys.Wake, q.number, scope, id)
	s.group.set(s.scratch, []byte{how})
	s.note(mark{q, scope, id}, how)
}

// note adds a mark to the list.
func (s *shard) note(m mark, how byte) {
	if s.wakes {
		return
	}
	if len(s.marks.order) == marksCap {
		s.marks, s.wakes = markList{}, true
		return
	}
	if s.marks.how == nil {
		s.marks.how = make(map[mark]byte)
	}
	if _, ok := s.marks.how[m]; !ok {
		s.marks.order = append(s.marks.order, m)
	}
	s.marks.how[m] = how
}

// wakeBlocked does what the marks say. REQUIRES: the group is empty but for
// what has become due. Of that, tasks may have begun to wait for a turn that a
// mark is about; giveTurn sees to it.
func (s *shard) wakeBlocked() {
	if s.wakes {
		s.readMarks()
	} else if len(s.marks.order) > 0 {
		todo := s.marks
		s.marks = markList{} // for those that this group leaves
		for n, m := range todo.order {
			if s.broken != nil || s.spent() {
				for _, m := range todo.order[n:] {
					if _, ok := s.marks.how[m]; !ok { // else it is newer
						s.note(m, todo.how[m])
					}
				}
				break
			}
			s.broken = s.obeyMark(m, todo.how[m])
		}
	}
}

func (s *shard) wakeIsDue() bool { return s.wakes || len(s.marks.order) > 0 }

// readMarks is wakeBlocked for marks that memory does not hold.
func (s *shard) readMarks() {
	s.wakes = false
	lower, upper := keys.Range(keys.Wake)
	s.broken = s.walk(lower, upper, func(it *pebble.Iterator, _ int) (bool, error) {
		if s.spent() {
			s.marks, s.wakes = markList{}, true
			return false, nil
		}
		number, scope, id, err := keys.ParseGrouped(it.Key())
		if err != nil {
			return false, err
		}
		v, err := it.ValueAndErr()
		if err != nil {
			return false, err
		}
		if len(v) != 1 || int(number) >= len(s.numbers) {
			return false, fmt.Errorf("mark %x is %x", it.Key(), v)
		}
		return true, s.obeyMark(mark{s.numbers[number], scope, id}, v[0])
	})
}

// obeyMark does what a mark says, and removes it.
func (s *shard) obeyMark(m mark, how byte) error {
	s.scratch = keys.AppendGrouped(s.scratch[:0], keys.Wake, m.queue.number, m.scope, m.id)
	s.group.delete(s.scratch)
	switch {
	case m.scope == 0:
		return s.wakeTask(m.queue, m.id, how)
	case m.scope&groupBit != 0:
		return s.giveTurn(m.queue, m.scope)
	default:
		return s.fillLimit(m.queue, m.scope)
	}
}

// wakeTask lets a task go on whose parents have ended, or cancels it.
func (s *shard) wakeTask(q *queueState, id ID, how byte) error {
	key := keys.AppendGrouped(nil, keys.Blocked, q.number, 0, id)
	value, err := s.read(key)
	if err != nil || value == nil || s.group.hasChanged(id) { // nil: it was canceled meanwhile
		return err
	}
	at := &located{id: id, place: keys.Place{Range: keys.Blocked, Group: q.number}, indexed: true}
	if err := s.decode(at, value); err != nil {
		return err
	}
	if how == wakeCancel {
		s.cancel(at)
		return nil
	}
	s.unblock(at)
	s.proceed(at.lane, id, &at.rec.Head, at.rec.Encode())
	return nil
}

// unblock takes a task out of its scope, on its way elsewhere.
func (s *shard) unblock(at *located) {
	s.group.delete(at.place.AppendKey(nil, at.id))
	at.lane.queue.counts.Blocked--
	s.touch(at.lane.queue)
}

// waiting visits the tasks that wait in a scope, in the order of their IDs,
// until visit returns false. REQUIRES: those for which it returns true are moved
// to elsewhere in this group.
func (s *shard) waiting(q *queueState, scope uint64, visit func(n int, at *located) bool) error {
	upper := keys.GroupEnd(keys.AppendGroup(nil, keys.Blocked, q.number, scope))
	front := s.fronts.of(scope)
	lower := keys.AppendGrouped(nil, keys.Blocked, q.number, scope, front)
	err := s.walk(lower, upper, func(it *pebble.Iterator, n int) (bool, error) {
		_, _, id, err := keys.ParseGrouped(it.Key())
		if err != nil {
			return false, err
		}
		v, err := it.ValueAndErr()
		if err != nil {
			return false, err
		}
		front = id
		at := &located{id: id, place: keys.Place{Range: keys.Blocked, Group: q.number, At: scope}, indexed: true}
		if err := s.decode(at, append([]byte(nil), v...)); err != nil {
			return false, err
		}
		return visit(n, at), nil
	})
	s.fronts.advance(scope, front)
	return err
}

// frontTable is how far the tasks that waited in a scope have gone on, for some of
// the scopes: those that wait are not looked for among the tombstones of those
// that did.
//
// Invariant: no task that waits in the scope has an ID before the front.
type frontTable struct {
	byScope map[uint64]front
	group   uint64 // counts groups
}

type front struct {
	id    ID
	low   ID     // smallest ID of a task that began to wait in that group:
	group uint64 // disk does not have it yet
}

// frontsCap is how many fronts memory holds between two groups.
const frontsCap = 1 << 12

// of returns where the tasks begin that wait in a scope.
func (t *frontTable) of(scope uint64) ID { return t.byScope[scope].id }

// lower has the front of a scope include a task that begins to wait.
func (t *frontTable) lower(scope uint64, id ID) {
	if t.byScope == nil {
		t.byScope = make(map[uint64]front)
	}
	f := t.byScope[scope]
	if f.group != t.group || bytes.Compare(id[:], f.low[:]) < 0 {
		f.low, f.group = id, t.group
	}
	if bytes.Compare(id[:], f.id[:]) < 0 {
		f.id = id
	}
	t.byScope[scope] = f
}

// advance moves the front of a scope to a task that disk has, with none before it.
func (t *frontTable) advance(scope uint64, id ID) {
	if t.byScope == nil {
		t.byScope = make(map[uint64]front)
	}
	f := t.byScope[scope]
	if f.id = id; f.group == t.group && bytes.Compare(f.low[:], id[:]) < 0 {
		f.id = f.low
	}
	t.byScope[scope] = f
}

// next begins a group, and bounds the memory.
func (t *frontTable) next() {
	t.group++
	if len(t.byScope) > frontsCap {
		clear(t.byScope)
	}
}
