package codeq

import (
	"codeq/internal/keys"
	"strings"
	"time"
)

// emit has subscribers told of a change of state, if there are any and the
// group persists. attempt is the task's count after the change.
func (s *state) emit(kind XEventKind, l *lane, id keys.ID, attempt uint32, cause string) {
	if s.wanted>>kind&1 != 0 {
		s.collect(kind, l, id, attempt, cause)
	}
}

func (s *state) collect(kind XEventKind, l *lane, id keys.ID, attempt uint32, cause string) {
	s.effects.events = append(s.effects.events, XEvent{
		Kind:      kind,
		ID:        id,
		Queue:     l.queue.name,
		Tenant:    l.tenant,
		Attempt:   attempt,
		Time:      time.UnixMilli(int64(s.wall)),
		LastError: strings.Clone(cause), // may be the first bytes of something long
	})
}
