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

// markList is the marks that the groups before have left: those in memory, and those
// that are found by walking the range on from a cursor, so that nobody steps over the
// tombstones of all that were there.
//
// Invariant: a mark is in memory, or at or after the cursor if onDisk is set.
type markList struct {
	how    map[mark]byte
	order  []mark
	onDisk bool
	from   []byte // the cursor; nil: the beginning of the range
	busy   bool   // marks are being obeyed: those that this makes are held in memory
}

// marksCap is how many marks memory holds at the most between two groups, but for those
// that come of obeying others.
const marksCap = 1 << 12

func (s *shard) markKey(m mark) []byte {
	s.scratch = keys.AppendGrouped(s.scratch[:0], keys.Wake, m.queue.number, m.scope, m.id)
	return s.scratch
}

// wake lets tasks go on that wait in a scope; id is the task in scope 0.
func (s *shard) wake(q *queueState, scope uint64, id ID, how byte) {
	m := mark{q, scope, id}
	key := s.markKey(m)
	s.group.set(key, []byte{how})
	q.hasMarks = true
	s.marks.note(m, key, how)
}

// note adds a mark.
func (l *markList) note(m mark, key []byte, how byte) {
	if _, ok := l.how[m]; !ok {
		beyond := l.onDisk && bytes.Compare(key, l.from) >= 0
		if !l.busy && (beyond || len(l.order) >= marksCap) {
			if !beyond {
				l.onDisk, l.from = true, bytes.Clone(key)
			}
			return
		}
		l.order = append(l.order, m)
	}
	if l.how == nil {
		l.how = make(map[mark]byte)
	}
	l.how[m] = how
}

// queues returns those that have marks in memory.
func (l *markList) queues() map[*queueState]bool {
	marked := make(map[*queueState]bool)
	for _, m := range l.order {
		marked[m.queue] = true
	}
	return marked
}

// wakeBlocked does what the marks say. REQUIRES: the group is empty but for
// what has become due. Of that, tasks may have begun to wait for a turn that a
// mark is about; giveTurn sees to it.
func (s *shard) wakeBlocked() {
	todo := s.marks
	s.marks = markList{onDisk: todo.onDisk, from: todo.from, busy: true}
	n := 0
	for ; n < len(todo.order) && s.broken == nil && !s.spent(); n++ {
		m := todo.order[n]
		if _, newer := s.marks.how[m]; !newer { // else it is for the next group
			s.broken = s.obeyMark(m, todo.how[m])
		}
	}
	for _, m := range todo.order[n:] {
		if _, newer := s.marks.how[m]; !newer {
			s.marks.note(m, s.markKey(m), todo.how[m])
		}
	}
	if s.marks.onDisk && n == len(todo.order) && s.broken == nil {
		s.walkMarks(todo.how)
	}
	s.marks.busy = false
}

func (s *shard) wakeIsDue() bool { return s.marks.onDisk || len(s.marks.order) > 0 }

// walkMarks does what the marks on disk say, but for those that the group has obeyed or made.
func (s *shard) walkMarks(obeyed map[mark]byte) {
	lower, upper := keys.Range(keys.Wake)
	if s.marks.from != nil {
		lower = s.marks.from
	}
	s.marks.onDisk, s.marks.from = false, nil
	s.broken = s.walk(lower, upper, func(it *pebble.Iterator, _ int) (bool, error) {
		if s.spent() {
			s.marks.onDisk, s.marks.from = true, bytes.Clone(it.Key())
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
		q := s.numbers.At(int(number))
		if len(v) != 1 || q == nil {
			return false, fmt.Errorf("mark %x is %x", it.Key(), v)
		}
		m := mark{q, scope, id}
		_, done := obeyed[m]
		_, newer := s.marks.how[m]
		if done || newer {
			return true, nil
		}
		return true, s.obeyMark(m, v[0])
	})
}

// obeyMark does what a mark says, and removes it.
func (s *shard) obeyMark(m mark, how byte) error {
	s.group.delete(s.markKey(m))
	s.rest(m.queue)
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
