package engine

import (
	"bytes"
	"cmp"

	"codeq/internal/container/timeheap"
	"codeq/internal/keys"
)

// times holds what happens because its time has come: scheduled tasks become ready, kept tasks are
// deleted, and schedules tick.
type times struct {
	*round
	names *names

	nextDue   dueCursor              // the first scheduled task that waits for a time of day
	nextWait  dueCursor              // the first scheduled task that waits between attempts
	expiries  timeheap.Heap[*bucket] // buckets of ended tasks
	recurring recurringTable
}

// dueCursor is where a range that is ordered by time begins: no entry lies before it. It is as
// precise as a key, since many entries may have the same time, and tombstones lie before it.
type dueCursor struct {
	at   uint64 // ms; Never: the range is empty
	name [keys.IDLen]byte
}

var nothingDue = dueCursor{at: Never}

func (c *dueCursor) compare(o *dueCursor) int {
	return cmp.Or(cmp.Compare(c.at, o.at), bytes.Compare(c.name[:], o.name[:]))
}

// lower makes the range begin no later than at an entry.
func (c *dueCursor) lower(at uint64, name [keys.IDLen]byte) {
	if o := (dueCursor{at, name}); o.compare(c) < 0 {
		*c = o
	}
}

// raise makes the range begin no earlier than at another position.
func (c *dueCursor) raise(o dueCursor) {
	if c.compare(&o) < 0 {
		*c = o
	}
}

// Tasks of two kinds are in the range Scheduled, by when they are due: those that wait for a time
// of day, by the wall clock, and those that wait between attempts, by the clock of periods. The
// wall clock may be far behind the other one, or ahead of it in a cluster. Up to the earlier of the
// two all tasks are due; between them, those of one kind are, and the cursors say how far they have
// gone. So each task is read at most twice, however many there are.

// firstScheduled is where the range Scheduled begins.
func (tm *times) firstScheduled() dueCursor {
	first := tm.nextDue
	first.lower(tm.nextWait.at, tm.nextWait.name)
	return first
}

func (tm *times) promoteIsDue() bool { return tm.nextDue.at <= tm.Wall || tm.past(tm.nextWait.at) }

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
