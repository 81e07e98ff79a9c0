package engine

import (
	"strings"
	"time"

	"codeq/internal/keys"
)

// emit adds an event to the effects, for subscribers if somebody wants its kind, and to the counts
// if they are wanted. attempt is the task's count after the change.
func (s *State) emit(kind EventKind, l *Lane, id keys.ID, attempt uint32, cause string) {
	if s.Wanted&(1<<kind|WantCounts) != 0 {
		s.collect(kind, l, id, attempt, cause)
	}
}

func (s *State) collect(kind EventKind, l *Lane, id keys.ID, attempt uint32, cause string) {
	if s.Wanted&WantCounts != 0 {
		s.count(kind, l.queue)
	}
	if s.Wanted>>kind&1 == 0 {
		return
	}
	s.Effects.Events = append(s.Effects.Events, Event{
		Kind:      kind,
		ID:        id,
		Queue:     l.queue.Name,
		Tenant:    l.Tenant,
		Attempt:   attempt,
		Time:      time.UnixMilli(int64(s.Wall)),
		LastError: strings.Clone(cause), // it may be a part of a long string
	})
}

// count adds an event to the counts of the group.
func (s *State) count(kind EventKind, q *Queue) {
	if q.counted == 0 {
		s.Effects.Counted = append(s.Effects.Counted, Counted{Queue: q})
		q.counted = uint32(len(s.Effects.Counted))
	}
	s.Effects.Counted[q.counted-1].Of[kind]++
}
