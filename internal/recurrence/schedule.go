package recurrence

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"hash/fnv"
	"maps"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/record"
)

// Schedule is a schedule in the memory of its shard.
//
// Invariant: disk has Value once the group has persisted. Every tick up to Value.After has produced
// its task or was skipped, and the same group stored so; Next is the first tick after it; that of a
// paused one does not come.
type Schedule struct {
	Name     string
	Value    keys.ScheduleValue
	template record.Record // of the tasks; its payload is part of Value
	Times    Sequence      // nil if Err is set
	Err      error         // why its ticks are not known
	Next     uint64        // wall clock, ms

	place  int    // in Table.waiting; negative: not there
	turned uint64 // when it was put into Table.late; wall clock, ms
	gone   bool   // no longer in the table
}

func (r *Schedule) Due() uint64 { return r.Next }

func (r *Schedule) Spot() *int { return &r.place }

// New decodes a stored schedule, which does not tick until Begin.
func New(name string, v keys.ScheduleValue) (*Schedule, error) {
	rec, err := record.Decode(v.Record)
	if err != nil {
		return nil, fmt.Errorf("%w: schedule %q: %w", base.ErrCorrupt, name, err)
	}
	if v.Priority > keys.MaxPriority || v.Missed > MissedAll {
		return nil, fmt.Errorf("%w: schedule %q: priority %d, missed %d", base.ErrCorrupt, name, v.Priority, v.Missed)
	}
	return &Schedule{Name: name, Value: v, template: rec, Next: Never}, nil
}

// The headers that the task of a tick has.
const (
	TickHeader     = "codeq-tick"     // the time of the tick: RFC 3339, UTC, milliseconds if any
	ScheduleHeader = "codeq-schedule" // the name of the schedule
)

// The rules for missed ticks.
const (
	MissedOnce uint8 = iota // the latest of them is produced
	MissedSkip              // none is produced
	MissedAll               // all are produced
)

// RecordOf returns the record of the task of a tick.
func (r *Schedule) RecordOf(tick uint64) record.Record {
	rec := r.template
	rec.Headers = Headers(rec.Headers, r.Name, tick)
	if r.Value.Jitter != 0 { // its task does not come after that of the next tick
		rec.RunAt = tick + jitterOf(r.Name, tick)%min(r.Value.Jitter, r.Times.Next(tick)-tick)
	}
	return rec
}

// jitterOf returns a number for a tick of a schedule, the same one in each process.
func jitterOf(name string, tick uint64) uint64 {
	h := fnv.New64a()
	_, _ = h.Write(binary.BigEndian.AppendUint64([]byte(name), tick)) // it does not fail
	return h.Sum64()
}

// Headers returns the headers of the task of a tick, by those of the template.
func Headers(template map[string]string, name string, tick uint64) map[string]string {
	h := make(map[string]string, len(template)+2)
	maps.Copy(h, template)
	h[TickHeader], h[ScheduleHeader] = Text(tick), name
	return h
}

// Begin sets when the schedule ticks.
func (r *Schedule) Begin(times Sequence) {
	r.Times = times
	if r.Next = times.Next(r.Value.After); r.Value.Paused {
		r.Next = Never
	}
}

// Pass marks all ticks up to after as processed.
func (r *Schedule) Pass(after uint64) {
	r.Value.After = after
	r.Next = r.Times.Next(after)
}

// MissedAfter returns how late a tick is missed: after a minute, or after 60 ticks if that is less.
// every is the time between two ticks, 0 for those of Cron; all in ms.
func MissedAfter(every uint64) uint64 {
	if every == 0 {
		return 60_000
	}
	return min(60_000, 60*every)
}

// Tick returns the tick that is next to produce its task, at a time of the wall clock. If that is
// none of the missed ones, they have passed, and ok is false. REQUIRES: Next is not later than
// wall.
func (r *Schedule) Tick(wall uint64) (tick uint64, ok bool) {
	late := MissedAfter(r.Value.Every)
	if wall-r.Next <= late || r.Value.Missed == MissedAll {
		return r.Next, true
	}
	last := wall - late - 1
	if r.Value.Missed == MissedSkip {
		r.Pass(last)
		return 0, false
	}
	return Latest(r.Times, r.Next, last), true
}

// Replace returns the schedule that follows an old one, nil if there is none, when it is set at a
// time of the wall clock; v has no position in time. It returns nil if nothing changes.
func Replace(old *Schedule, name string, v keys.ScheduleValue, times Sequence, wall uint64) (*Schedule, error) {
	fresh := old == nil || v.Cron != old.Value.Cron || v.Every != old.Value.Every || v.TimeZone != old.Value.TimeZone ||
		old.IsAhead(wall)
	if fresh {
		v.Start, v.After = wall, wall
	} else {
		v.Start, v.After, v.Last = old.Value.Start, old.Value.After, old.Value.Last
	}
	if old != nil {
		v.Paused = old.Value.Paused
	}
	if !fresh && old.Err == nil && bytes.Equal(v.Append(nil), old.Value.Append(nil)) {
		return nil, nil
	}
	if v.Every != 0 { // the start was not known before
		times = Every{Start: v.Start, Interval: v.Every}
	}
	r, err := New(name, v)
	if err != nil { // it was encoded just now
		return nil, err
	}
	r.Begin(times)
	return r, nil
}

// Pause returns the schedule as it is after a pause, or when it goes on with the first tick after
// wall: the same one if nothing changes.
func (r *Schedule) Pause(paused bool, wall uint64) *Schedule {
	ahead := !paused && r.IsAhead(wall)
	if r.Value.Paused == paused && !ahead {
		return r
	}
	next := *r
	next.Value.Paused, next.Value.After = paused, max(r.Value.After, wall)
	if ahead {
		next.Value.Start, next.Value.After, next.Value.Last = wall, wall, 0
		if next.Value.Every != 0 {
			next.Times = Every{Start: wall, Interval: next.Value.Every}
		}
	}
	if next.Next = Never; r.Err == nil {
		next.Begin(next.Times)
	}
	return &next
}

const day = 24 * 60 * 60 * 1000 // ms

// IsAhead reports whether the next tick lies more than a day and a period ahead of a time of the
// wall clock: that was wrong when the schedule came so far.
func (r *Schedule) IsAhead(wall uint64) bool {
	if r.Err != nil || r.Value.After <= wall {
		return false
	}
	period := r.Value.Every
	if period == 0 {
		first := r.Times.Next(wall)
		if first == Never {
			return false
		}
		period = r.Times.Next(first) - first
	}
	ahead := r.Times.Next(r.Value.After) - wall
	return ahead > day && ahead-day > period
}

// Parse decodes an entry of the schedule range. The result keeps value.
func Parse(key, value []byte) (*Schedule, error) {
	name, err := keys.ParseSchedule(key)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", base.ErrCorrupt, err)
	}
	v, err := keys.ParseScheduleValue(value)
	if err != nil {
		return nil, fmt.Errorf("%w: schedule %q: %w", base.ErrCorrupt, name, err)
	}
	return New(name, v)
}

// CheckStored returns the name of a stored schedule, or the error in it.
func CheckStored(key, value []byte) (name string, err error) {
	r, err := Parse(key, value)
	if err != nil {
		return "", err
	}
	return r.Name, nil
}
