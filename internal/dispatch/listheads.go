package dispatch

import (
	"slices"
	"sync"
	"sync/atomic"
)

// listHeads is the queues of a List with weights that have heads in any shard of the process, so
// that a claim draws one of these, however long the list. The shards that have a set of the list
// share it; the last one takes it apart. It is updated as the first head of a queue appears in the
// process, and as the last one goes. It is safe for concurrent use.
type listHeads struct {
	list  *List
	board *Board
	users int // shards that have a set of the list; guarded by the board's mu

	joining sync.Mutex // of the shard that adds or removes a name
	mu      sync.Mutex // guards the fields below; locked after queueLists.mu
	heads   []*queueHeads
	shown   lottery // by index
}

// queueLists are the lists of claims that contain a queue.
//
// Invariant: if there are any, and while no owner is changing a head, shown says whether a shard
// has a head of the queue, and so do the lists.
type queueLists struct {
	n       atomic.Int32 // number of entries
	mu      sync.Mutex   // guards the fields below
	shown   bool
	entries []listEntry
}

// listEntry is one of the lists that contain a queue, and the queue's index there.
type listEntry struct {
	list *listHeads
	at   int
}

// holdList returns the heads of a list for a shard that builds a set of it, until leaveList.
func (b *Board) holdList(list *List) *listHeads {
	b.mu.Lock()
	defer b.mu.Unlock()
	v, ok := b.lists.Load(list.Digest)
	if !ok {
		v = &listHeads{list: list, board: b, shown: newLottery(list)}
		b.lists.Store(list.Digest, v)
	}
	l := v.(*listHeads)
	l.users++
	return l
}

// quit ends a hold. It returns true if it was the last: then the caller calls leaveOne until that
// returns false.
func (l *listHeads) quit() (last bool) {
	l.board.mu.Lock()
	defer l.board.mu.Unlock()
	if l.users--; l.users > 0 {
		return false
	}
	l.board.lists.Delete(l.list.Digest)
	return true
}

// join adds the first so many names of the list that are not there yet.
func (l *listHeads) join(names, shards int) {
	for l.joinOne(names, shards) {
	}
}

func (l *listHeads) joinOne(names, shards int) bool {
	l.joining.Lock()
	defer l.joining.Unlock()
	at := len(l.heads) // only joinOne and leaveOne change it
	if at >= names {
		return false
	}
	h := l.board.hold(l.list.names[at], shards)
	l.mu.Lock()
	l.heads = append(l.heads, h)
	l.mu.Unlock()
	h.enter(listEntry{l, at})
	return true
}

// leaveOne removes the last name; false: there is none.
func (l *listHeads) leaveOne() bool {
	l.joining.Lock()
	defer l.joining.Unlock()
	at := len(l.heads) - 1
	if at < 0 {
		return false
	}
	h := l.heads[at]
	h.leave(listEntry{l, at})
	l.mu.Lock()
	l.heads = l.heads[:at]
	l.mu.Unlock()
	l.board.drop(l.list.names[at], h)
	return true
}

// show says whether the queue at an index has a head.
func (l *listHeads) show(at int, has bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if has {
		l.shown.add(at)
	} else {
		l.shown.remove(at)
	}
}

// listLooks is how many queues with closed gates a claim draws at most.
const listLooks = 64

// draw draws a queue that may have a task for a claim, in proportion to the weights; nil: none was
// found, or the list is not complete yet.
func (l *listHeads) draw() (at int, h *queueHeads) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.heads) < len(l.list.names) {
		return 0, nil
	}
	var closed [listLooks]int
	n := 0
	for ; n < listLooks && l.shown.len() > 0; n++ {
		at = l.shown.draw()
		if h = l.heads[at]; h.best(-1) >= 0 {
			break
		}
		l.shown.remove(at)
		closed[n], h = at, nil
	}
	for _, at := range closed[:n] {
		l.shown.add(at)
	}
	return at, h
}

func (q *queueHeads) enter(e listEntry) {
	t := &q.lists
	t.mu.Lock()
	defer t.mu.Unlock()
	t.entries = append(t.entries, e)
	t.n.Add(1) // before the heads are read: an owner that writes one later sees it
	if !q.show() && t.shown {
		e.list.show(e.at, true)
	}
}

func (q *queueHeads) leave(e listEntry) {
	t := &q.lists
	t.mu.Lock()
	defer t.mu.Unlock()
	if i := slices.Index(t.entries, e); i >= 0 {
		last := len(t.entries) - 1
		t.entries[i], t.entries[last] = t.entries[last], listEntry{}
		t.entries = t.entries[:last]
		t.n.Add(-1)
	}
}

// setHead writes the head of a shard. Only its owner calls it.
func (q *queueHeads) setHead(shard int, h head) {
	word := &q.shards[shard].word
	before := head(word.Load())
	if before == h {
		return
	}
	word.Store(uint64(h))
	if (before == 0) != (h == 0) && q.lists.n.Load() > 0 {
		q.lists.mu.Lock()
		defer q.lists.mu.Unlock()
		q.show()
	}
}

// show tells the lists whether any shard has a head, if they do not know. REQUIRES: lists.mu.
func (q *queueHeads) show() (changed bool) {
	has := q.hasHead()
	if has == q.lists.shown {
		return false
	}
	q.lists.shown = has
	for _, e := range q.lists.entries {
		e.list.show(e.at, has)
	}
	return true
}

// hasHead reports whether a shard has a head, also behind a closed gate.
func (q *queueHeads) hasHead() bool {
	for i := range q.shards {
		if q.shards[i].word.Load() != 0 {
			return true
		}
	}
	return false
}
