package engine

import "codeq/internal/keys"

// The defaults of Config.TrimBytes and Config.TrimLane: see ready.Config.
const (
	TrimBytes = 16 << 20
	TrimLane  = 256 << 10
)

func (tm *times) trimIsDue() bool { return tm.names.ready.TrimAt(tm.Tight) <= tm.Uptime }

// trim deletes by range what is dead in the ranges Task and Scheduled, before all other keys.
func (tm *times) trim() {
	if !tm.Group.Batch.Empty() || len(tm.Group.tasks) > 0 { // load has put something into it
		return
	}
	_, end := keys.Range(keys.Scheduled)
	if first := tm.firstScheduled(); first != nothingDue {
		end = keys.AppendScheduled(nil, first.at, first.name)
	}
	if tm.names.ready.Trim(tm.Group.Batch, end, tm.Spent) > 0 {
		tm.Group.Ranged, tm.Group.Trimmed = true, true
	}
}
