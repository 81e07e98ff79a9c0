package dispatch

import (
	"slices"

	"codeq/internal/engine"
	"codeq/internal/record"
)

// refusals are, by kind of task, the processes that had no handler for a task of a queue. While a
// claim of another process waits, it gets such tasks. When all have refused, all are asked anew:
// their handlers may be others by now.
type refusals map[string][]uint64

// maxRefusals bounds the kinds of a queue, and the processes of each, that are remembered.
const maxRefusals = 64

// Refused is called before a lease ends because its holder has no handler of the task's kind.
func (d *Dispatcher) Refused(r engine.Receipt) {
	of, kind, process := d.rules.Leases.HolderOf(r)
	if of == nil || process == 0 {
		return
	}
	q := d.Of(of)
	if q.refusals == nil || len(q.refusals) >= maxRefusals {
		q.refusals = make(refusals)
	}
	if by := q.refusals[kind]; len(by) < maxRefusals && !slices.Contains(by, process) {
		q.refusals[kind] = append(by, process)
	}
}

// pick removes the ticket of the claim that gets the first task of a lane.
func (q *Queue) pick(from *lines, l *engine.Lane) Ticket {
	if len(q.refusals) == 0 {
		return from.front().Pop()
	}
	kind := ""
	if next := l.NextRecord(); record.HasKind(next) {
		rec, _ := record.Decode(next) // Grant reports a record that cannot be read
		kind = rec.Kind
	}
	by := q.refusals[kind]
	if len(by) == 0 {
		return from.front().Pop()
	}
	for _, list := range []*waitList{&from.waiters, &from.remote} {
		if t, ok := list.popOther(by); ok {
			return t
		}
	}
	delete(q.refusals, kind)
	return from.front().Pop()
}
