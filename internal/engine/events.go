package engine

import (
	"strings"
	"time"

	"codeq/internal/keys"
)

// emit counts what has happened to a task, and adds an event for subscribers to the effects, if
// somebody wants its kind. attempt is the task's count after the change.
func (ns *names) emit(kind EventKind, l *Lane, id keys.ID, attempt uint32, cause string) {
	ns.count(l.queue, kind)
	if ns.Wanted>>kind&1 != 0 {
		ns.collect(kind, l, id, attempt, cause)
	}
}

func (r *round) collect(kind EventKind, l *Lane, id keys.ID, attempt uint32, cause string) {
	r.Effects.Events = append(r.Effects.Events, Event{
		Kind:      kind,
		ID:        id,
		Queue:     l.queue.Name,
		Tenant:    l.Tenant,
		Attempt:   attempt,
		Time:      time.UnixMilli(int64(r.Wall)).UTC(),
		LastError: strings.Clone(cause), // it may be a part of a long string
	})
}
