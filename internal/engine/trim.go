package engine

import "codeq/internal/keys"

// The defaults of Config.TrimBytes and Config.TrimLane: see ready.Config.
const (
	TrimBytes = 16 << 20
	TrimLane  = 256 << 10
)

func (s *State) trimIsDue() bool { return s.ready.TrimAt(s.Tight) <= s.Uptime }

// trim deletes by range what is dead in the ranges Task and Scheduled, before all other keys.
func (s *State) trim() {
	if !s.Group.Batch.Empty() || len(s.Group.tasks) > 0 { // load has put something into it
		return
	}
	_, end := keys.Range(keys.Scheduled)
	if first := s.firstScheduled(); first != nothingDue {
		end = keys.AppendScheduled(nil, first.at, first.name)
	}
	if s.ready.Trim(s.Group.Batch, end, s.Spent) > 0 {
		s.Group.Ranged, s.Group.Trimmed = true, true
	}
}
