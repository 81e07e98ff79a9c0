package engine

import (
	"github.com/cockroachdb/pebble/v2"

	"codeq/internal/container/timeheap"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/recurrence"
	"codeq/internal/store"
)

// times holds the work that becomes due by time: scheduled tasks become ready, kept tasks are
// deleted, and schedules tick.
type times struct {
	*round
	names *names

	nextDue   store.DueCursor        // the first scheduled task that waits for a time of day
	nextWait  store.DueCursor        // the first scheduled task that waits between attempts
	expiries  timeheap.Heap[*bucket] // buckets of ended tasks
	recurring recurrence.Table

	uncounted []*bucket // with dead letters that no kind counts
	countFrom []byte    // where countKinds goes on in the last of them; nil: at its beginning
}

// Tasks of two kinds are in the range Scheduled, by when they are due: those that wait for a time
// of day, by the wall clock, and those that wait between attempts, by the clock of periods. The
// wall clock may be far behind the other one, or ahead of it in a cluster. Up to the earlier of the
// two all tasks are due; between them, those of one kind are, and the cursors say how far they have
// gone. So each task is read at most twice, however many there are.

// firstScheduled is the beginning of the range Scheduled.
func (tm *times) firstScheduled() store.DueCursor {
	first := tm.nextDue
	first.Lower(tm.nextWait.At, tm.nextWait.Name)
	return first
}

func (tm *times) promoteIsDue() bool { return tm.nextDue.At <= tm.Wall || tm.past(tm.nextWait.At) }

// The defaults of Config.TrimBytes and Config.TrimLane: see ready.Config.
const (
	TrimBytes = 16 << 20
	TrimLane  = 256 << 10
)

func (tm *times) trimIsDue() bool { return tm.names.ready.TrimAt(tm.Tight) <= tm.Uptime }

// trim deletes dead records of the ranges Task and Scheduled by range, before all other keys.
func (tm *times) trim() {
	if !tm.Group.Batch.Empty() || tm.Group.tasks.Len() > 0 { // load has put something into it
		return
	}
	_, end := keys.Range(keys.Scheduled)
	if first := tm.firstScheduled(); first != store.NothingDue {
		end = keys.AppendScheduled(nil, first.At, first.Name)
	}
	if tm.names.ready.Trim(tm.Group.Batch, end, tm.Spent) > 0 {
		tm.Group.Ranged, tm.Group.Trimmed = true, true
	}
}

// promoteDue moves on the scheduled tasks that are due.
// REQUIRES: the group has scheduled no task, and moved no scheduled one: the cursors take the state
// on disk.
func (s *State) promoteDue() {
	until := min(s.Wall, s.periods.Now)
	reached := s.promoteFrom(s.Times.firstScheduled(), until)
	s.Times.nextDue.Raise(reached)
	s.Times.nextWait.Raise(reached)
	if s.Broken != nil || reached.At <= until || !s.Times.promoteIsDue() { // the budget was spent first
		return
	}
	later := &s.Times.nextWait
	if s.Wall > s.periods.Now {
		later = &s.Times.nextDue
	}
	*later = s.promoteFrom(*later, max(s.Wall, s.periods.Now))
}

// promoteFrom moves on the tasks that are due, of the entries from a position up to a time. It
// returns the beginning of the others.
func (s *State) promoteFrom(from store.DueCursor, until uint64) (reached store.DueCursor) {
	if reached = store.NothingDue; from == reached {
		return reached
	}
	lower := keys.AppendScheduled(nil, from.At, from.Name)
	_, upper := keys.Range(keys.Scheduled)
	s.Broken = s.Walk(lower, upper, func(it *pebble.Iterator, _ int) (bool, error) {
		due, id, err := keys.ParseScheduled(it.Key())
		if err != nil {
			return false, err
		}
		if due > until || s.Spent() {
			reached = store.DueCursor{At: due, Name: id}
			return false, nil
		}
		v, err := it.ValueAndErr()
		if err != nil {
			return false, err
		}
		number, rec, err := keys.SplitLane(v)
		if err != nil {
			return false, err
		}
		head, err := record.DecodeHead(rec)
		if err != nil {
			return false, err
		}
		if head.IsWait(due) && due > s.periods.Now || !head.IsWait(due) && due > s.Wall {
			return true, nil
		}
		l, err := s.Names.laneNumbered(number)
		if err != nil {
			return false, err
		}
		s.promote(it.Key(), due, id, l, &head, append([]byte(nil), rec...))
		return true, nil
	})
	return reached
}

// promote moves on a scheduled task that is due. key is its place.
func (s *State) promote(key []byte, due uint64, id keys.ID, l *Lane, head *record.Head, rec []byte) {
	s.Group.Delete(key)
	s.Names.ready.Promoted(len(rec))
	l.queue.Counts.Scheduled--
	s.Names.touch(l.queue)
	passed := s.Wall - min(s.Wall, due)
	if head.IsWait(due) {
		passed = s.periods.Now - due
	}
	since := s.mint.SinceAgo(passed)
	if head.RetryFirst && head.IsWait(due) {
		since = keys.FrontSince(id)
	}
	s.enter(l, since, id, head, rec)
}
