package dispatch

import "slices"

// waitList is a list of tickets, first come, first served. Some of them may be stale. Its zero
// value is empty.
//
// Stale tickets are removed when they reach the head; when the list would grow, so that it never
// has more than twice as many tickets as waiting claims, plus a constant; when half of the tickets
// are known to be stale (noteStale); and by Sweep.
type waitList struct {
	tickets []Ticket
	head    int
	limit   int
	stale   int // tickets that are known to be stale; some of them may have been removed
}

const waitListMin = 64

// Len returns the number of tickets, stale ones included.
func (w *waitList) Len() int { return len(w.tickets) - w.head }

// All returns the tickets in order. The slice is valid until the list changes.
func (w *waitList) All() []Ticket { return w.tickets[w.head:] }

// Push adds a ticket at the end.
func (w *waitList) Push(t Ticket) {
	if len(w.tickets) >= max(w.limit, waitListMin) {
		w.Sweep()
	}
	w.tickets = append(w.tickets, t)
}

func (w *waitList) first() Ticket { return w.tickets[w.head] }

// Pop removes the first ticket. REQUIRES: Len() > 0.
func (w *waitList) Pop() Ticket {
	t := w.tickets[w.head]
	w.tickets[w.head] = Ticket{}
	w.head++
	if w.head == len(w.tickets) {
		w.empty()
	}
	return t
}

// popOther removes the first good ticket of a process that is not among some; ok is false if there
// is none among the first looksForOther tickets.
func (w *waitList) popOther(than []uint64) (t Ticket, ok bool) {
	for i, t := range w.All()[:min(w.Len(), looksForOther)] {
		if t.Good() && !slices.Contains(than, t.process) {
			copy(w.tickets[w.head+1:], w.tickets[w.head:w.head+i])
			w.tickets[w.head] = t
			return w.Pop(), true
		}
	}
	return t, false
}

const looksForOther = 64

// empty removes all tickets, and frees the memory if it is large.
func (w *waitList) empty() {
	if w.tickets = w.tickets[:0]; cap(w.tickets) > waitListMin {
		w.tickets = nil
	}
	w.head, w.limit, w.stale = 0, 0, 0
}

// Sweep drops the stale tickets.
func (w *waitList) Sweep() {
	good := w.tickets[:0]
	for _, t := range w.All() {
		if t.Good() {
			good = append(good, t)
		}
	}
	clear(w.tickets[len(good):])
	w.tickets, w.head, w.stale = good, 0, 0
	w.limit = 2 * len(good)
	if len(good) == 0 {
		w.empty()
	}
}

// noteStale notes that a ticket of the list is stale.
func (w *waitList) noteStale() {
	if w.stale++; 2*w.stale > w.Len() {
		w.Sweep()
	}
}

// AnyGood reports whether any claim waits. It drops the stale tickets at the head.
func (w *waitList) AnyGood() bool {
	for w.Len() > 0 && !w.first().Good() {
		w.Pop()
	}
	return w.Len() > 0
}

// Wants returns how many tasks the waiting claims want, at most most.
func (w *waitList) Wants(most int) (tasks int) {
	for _, t := range w.All() {
		if tasks >= most {
			break
		}
		if t.Good() {
			tasks += t.tasks
		}
	}
	return tasks
}

// Refuse empties the list, and settles its claims with a reason.
func (w *waitList) Refuse(reason error) {
	for w.Len() > 0 {
		w.Pop().Refuse(reason)
	}
}

// lines holds the claims that wait for a queue, or for a list of queues.
type lines struct {
	waiters waitList
	remote  waitList // claims of other nodes: served when no claim of this node waits
}

// line returns the list of a claim that waits; remote: it is of another node.
func (l *lines) line(remote bool) *waitList {
	if remote {
		return &l.remote
	}
	return &l.waiters
}

func (l *lines) isAwaited(remote bool) bool {
	return l.waiters.AnyGood() || remote && l.remote.AnyGood()
}

// front returns the list that is served next.
func (l *lines) front() *waitList {
	if l.waiters.Len() > 0 {
		return &l.waiters
	}
	return &l.remote
}

func (l *lines) sweep() {
	l.waiters.Sweep()
	l.remote.Sweep()
}

func (l *lines) tickets() int { return l.waiters.Len() + l.remote.Len() }

// claims returns how many claims wait.
func (l *lines) claims() int {
	l.sweep()
	return l.tickets()
}

// wants returns how many tasks the waiting claims want, at most most.
func (l *lines) wants(most int) int {
	n := l.waiters.Wants(most)
	return n + l.remote.Wants(most-n)
}

// refuse empties the lists. If local is nil, claims of this process are only removed, not settled.
func (l *lines) refuse(local, remote error) {
	if local == nil {
		l.waiters.empty()
	}
	l.waiters.Refuse(local)
	l.remote.Refuse(remote)
}
