package engine

import (
	"time"

	"codeq/internal/keys"
	"codeq/internal/record"
)

// What a task's record says of its attempts, and what its handlers say of their work. Both are
// written only where the record is written anyway: when an attempt ends and the task stays.

// noteAttempt adds the attempt of a lease, which ends, to the record of its task, and what its
// handler has said.
func (le *leases) noteAttempt(ls *lease, rec *record.Record, end attemptEnd) {
	if ls.notes != nil {
		rec.Notes = ls.notes
	}
	if rec.History == nil {
		rec.History = new(record.History)
		if ls.leases == 1 {
			rec.History.FirstReady = keys.SinceMillis(ls.since)
		}
	}
	start := keys.GrantedAt(ls.token)
	a := record.Attempt{Number: ls.attempts, How: uint8(end.how), Start: start, End: max(start, le.stamp()), Worker: ls.worker}
	if end.how != EventExpired || end.cause == causeCrash {
		a.Error = end.cause
	}
	rec.History.Add(a)
}

// Note lets a lease have what its handler says; it is written with the end of the attempt, if the
// task stays, and lost with the memory of the shard before.
func (le *leases) Note(r Receipt, n *record.Notes) error {
	ls := le.held(r)
	if ls == nil {
		return le.leaseLost(r)
	}
	if ls.notes == nil || n.At > ls.notes.At {
		le.emitProgress(ls, n)
	}
	ls.notes = n
	return nil
}

func (le *leases) emitProgress(ls *lease, n *record.Notes) {
	if n.At == 0 || le.Wanted>>EventProgress&1 == 0 {
		return
	}
	le.Effects.Events = append(le.Effects.Events, Event{
		Kind: EventProgress, ID: ls.id, Queue: ls.lane.queue.Name, Tenant: ls.lane.Tenant, Attempt: ls.attempts,
		Time: time.UnixMilli(int64(le.Wall)).UTC(), Progress: n,
	})
}
