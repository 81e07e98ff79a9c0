package recurrence

import (
	"fmt"
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
	rec.Headers = make(map[string]string, len(r.template.Headers)+2)
	maps.Copy(rec.Headers, r.template.Headers)
	rec.Headers[TickHeader] = Text(tick)
	rec.Headers[ScheduleHeader] = r.Name
	return rec
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
