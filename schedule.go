package codeq

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"

	"codeq/internal/call"
	"codeq/internal/engine"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/recurrence"
)

// Schedule produces tasks again and again: one for each of its ticks, however many processes and
// restarts there are. It is stored in the queue, and ticks while a process has the queue open.
//
// Its position in time is stored in the same commit as the tasks that it produces, and only goes
// forward. When the clock is set back, no tick happens twice: the schedule waits until the clock
// has caught up. [Queue.SetSchedule] says when it begins again.
type Schedule struct {
	// Name identifies the schedule in its queue directory. Required.
	Name string `json:",omitzero"`
	// Cron says when to tick, by the clock of TimeZone. Five fields: minute, hour, day of the
	// month, month (1 to 12, or jan to dec), day of the week (0 to 6 from Sunday, or sun to sat);
	// each *, a number, a range a-b, any of these with a step /n, or a list of these with commas.
	// When both days are given, one that matches is enough. Or one of @hourly, @daily (@midnight),
	// @weekly, @monthly, @yearly (@annually).
	//
	// A tick is the beginning of each minute that matches Cron. Where daylight saving sets clocks
	// forward, the skipped minutes do not tick on that day; where it sets them back, the repeated
	// minutes tick twice. For exactly one tick a day, choose a time that is never skipped or
	// repeated, or UTC.
	Cron string `json:",omitzero"`
	// Every is the time from tick to tick, in place of Cron: at least one second, rounded up to the
	// millisecond. It counts from the [Queue.SetSchedule] that created the schedule or changed when
	// it ticks; the first tick is one interval later.
	Every time.Duration `json:",omitzero"`
	// TimeZone is the IANA name, such as "Europe/Berlin", of the time zone of Cron. "": UTC. The
	// machine must know the name, or the program must import time/tzdata.
	TimeZone string `json:",omitzero"`
	// Task is produced by each tick, and is ready at once: RunAt must be zero. Two headers are
	// added, [TickHeader] and [ScheduleHeader]; Headers must not contain them.
	Task Task `json:",omitzero"`
	// Missed says what to do about missed ticks.
	Missed MissedPolicy `json:",omitzero"`
}

// Headers of a task that a schedule has produced.
const (
	TickHeader     = recurrence.TickHeader     // the time of the tick: RFC 3339 in UTC, with milliseconds if it has any
	ScheduleHeader = recurrence.ScheduleHeader // the name of the schedule
)

// MissedPolicy is how a schedule handles missed ticks. A tick is missed if its time is more than a
// minute past when the queue processes it: because no process had the queue open, the machine was
// suspended, or the clock was set forward. A tick that is less late produces its task.
type MissedPolicy uint8

const (
	// MissedOnce: one task is produced for all missed ticks, that of the latest one. The default.
	// The ticks of the last minute are not missed: each produces its task as well.
	MissedOnce MissedPolicy = iota
	// MissedSkip: no task is produced for a missed tick.
	MissedSkip
	// MissedAll: each missed tick produces its task, oldest first.
	MissedAll
)

var missedPolicies = newEnum[MissedPolicy]("MissedPolicy", "once", "skip", "all")

// String returns "once", "skip" or "all".
func (p MissedPolicy) String() string { return missedPolicies.Text(p) }

// MarshalText returns the text of String, and [ErrInvalid] for any other value.
func (p MissedPolicy) MarshalText() ([]byte, error) { return missedPolicies.Marshal(p) }

// UnmarshalText reads the text of MarshalText, and returns [ErrInvalid] for any other.
func (p *MissedPolicy) UnmarshalText(b []byte) error { return missedPolicies.Unmarshal(p, b) }

// ScheduleInfo is a stored schedule.
type ScheduleInfo struct {
	Schedule
	// Next is the next tick; zero if there is none within forty years or before the year 10000, or
	// LastError is set, or it is paused.
	Next time.Time `json:",omitzero"`
	// Paused: it does not tick, see [Queue.PauseSchedule].
	Paused bool `json:",omitzero"`
	// Last is the tick that produced the last task; zero if none has. A tick does not count if its
	// task was refused because the idempotency key was taken. With several shards, Last may follow
	// a moment after the task.
	Last time.Time `json:",omitzero"`
	// LastError says why this process does not know when the schedule ticks, for example because
	// the machine does not know its time zone. Until a process that knows it opens the queue, the
	// schedule does not tick. "": no error.
	LastError string `json:",omitzero"`
}

// Upcoming returns the next n ticks, from Next on; fewer if there are no more before the year
// 10000, or within forty years of each other, or LastError is set.
func (s *ScheduleInfo) Upcoming(n int) (times []time.Time) {
	if s.Next.IsZero() {
		return nil
	}
	start := uint64(s.Next.UnixMilli())
	all, err := recurrence.Of(&keys.ScheduleValue{Cron: s.Cron, TimeZone: s.TimeZone, Start: start, Every: record.Millis(s.Every)})
	if err != nil {
		return nil
	}
	for tick := start; len(times) < n && tick != recurrence.Never; tick = all.Next(tick) {
		times = append(times, msTime(tick))
	}
	return times
}

// SetSchedule stores a schedule, or replaces the one with the same name. Programs may call it at
// every start: a schedule that is replaced by an equal one goes on unchanged. It also keeps its
// position if only [Schedule.Task] or Missed differ; these apply from the next tick on. If Cron,
// Every or TimeZone differ it begins again, with the first tick after now. So it does if its next
// tick lies more than a day and a period ahead, since it has ticked by a wrong clock: a tick may
// then come again on its date.
//
// SetSchedule returns an [InvalidError] for an invalid schedule, such as one that never ticks. An
// error that matches [ErrUncertain] leaves open whether it was stored; after any other error it was
// not. SetSchedule is safe for concurrent use.
//
// Errors: [ErrInvalid], [ErrNotFound] ([RefuseOnMissing]), [ErrDiskFull], [ErrUncertain],
// [ErrFailed], [ErrNotLeader], [ErrClosed], and that of ctx.
func (q *Queue) SetSchedule(ctx context.Context, s Schedule) (err error) {
	defer public(&err)
	if err := q.checkCall(ctx); err != nil {
		return err
	}
	times, err := s.check(&q.opts.Limits, wallMillis(q.opts))
	if err != nil {
		return err
	}
	if err := q.checkParents(ctx, "", []engine.NewTask{prepare(&s.Task, nil)}); err != nil {
		return err
	}
	return q.doForSchedule(ctx, s.Name, rule(callSetSchedule, &call.SetSchedule{Name: s.Name, Value: s.value(), Times: times}))
}

// DeleteSchedule removes a schedule; the tasks that it has produced stay. It returns [ErrNotFound]
// if there is none with this name. DeleteSchedule is safe for concurrent use.
//
// Errors: [ErrInvalid], [ErrNotFound], [ErrDiskFull], [ErrUncertain], [ErrFailed], [ErrNotLeader],
// [ErrClosed], and that of ctx.
func (q *Queue) DeleteSchedule(ctx context.Context, name string) (err error) {
	defer public(&err)
	return q.doForSchedule(ctx, name, rule(callDeleteSchedule, &call.DeleteSchedule{Name: name}))
}

// PauseSchedule stops the ticks of a schedule until [Queue.ResumeSchedule]. It is stored, and
// [Queue.SetSchedule] leaves it as it is: programs that set their schedules at every start do not
// undo it. It returns [ErrNotFound] if there is no schedule with this name.
//
// Errors: [ErrInvalid], [ErrNotFound], [ErrDiskFull], [ErrUncertain], [ErrFailed], [ErrNotLeader],
// [ErrClosed], and that of ctx.
func (q *Queue) PauseSchedule(ctx context.Context, name string) (err error) {
	defer public(&err)
	return q.doForSchedule(ctx, name, rule(callPauseSchedule, &call.PauseSchedule{Name: name, Paused: true}))
}

// ResumeSchedule undoes [Queue.PauseSchedule]. The schedule goes on with the first tick after now:
// those of the time of its pause are not missed ones. If its next tick lies more than a day and a
// period ahead, it begins again, as by [Queue.SetSchedule], also if it is not paused.
//
// Errors: [ErrInvalid], [ErrNotFound], [ErrDiskFull], [ErrUncertain], [ErrFailed], [ErrNotLeader],
// [ErrClosed], and that of ctx.
func (q *Queue) ResumeSchedule(ctx context.Context, name string) (err error) {
	defer public(&err)
	return q.doForSchedule(ctx, name, rule(callPauseSchedule, &call.PauseSchedule{Name: name}))
}

// Schedules returns all schedules, ordered by name. It copies some hundred at a time, those of one
// copy as of one moment; other calls go on meanwhile. It is safe for concurrent use.
//
// Errors: [ErrInvalid], [ErrUncertain] and [ErrNotLeader] (in a cluster), [ErrFailed], [ErrClosed],
// and that of ctx.
func (q *Queue) Schedules(ctx context.Context) (_ []ScheduleInfo, err error) {
	defer public(&err)
	if ctx, err = q.begin(ctx); err != nil {
		return nil, err
	}
	var all []ScheduleInfo
	for i := range q.replicas {
		part := new(schedulesPart)
		op := rule(callSchedules, part)
		for part.More = true; part.More; {
			part.Next()
			if err := q.ask(ctx, i, op); err != nil {
				return nil, err
			}
			all = append(all, part.Infos...)
		}
	}
	slices.SortFunc(all, func(a, b ScheduleInfo) int { return cmp.Compare(a.Name, b.Name) })
	return all, nil
}

// doForSchedule is do for the shard that stores a schedule, after checkCall.
func (q *Queue) doForSchedule(ctx context.Context, name string, op request) error {
	if err := q.checkCall(ctx); err != nil {
		return err
	}
	_, err := q.do(ctx, keys.ShardOfSchedule(name, len(q.replicas)), op)
	return err
}

// check refuses an invalid schedule, and returns its ticks.
func (s *Schedule) check(l *Limits, now uint64) (recurrence.Sequence, error) {
	if s.Name == "" {
		return nil, &InvalidError{"Schedule.Name", `""`, "a name"}
	}
	if err := checkNewName("Schedule.Name", s.Name, l.Name); err != nil {
		return nil, err
	}
	if s.Missed > MissedAll {
		return nil, &InvalidError{"Schedule.Missed", s.Missed, "MissedOnce, MissedSkip, MissedAll"}
	}
	if err := s.checkTask(l); err != nil {
		return nil, err
	}
	times, err := recurrence.Check(s.Cron, s.TimeZone, s.Every, now)
	return times, translated(err)
}

// checkTask refuses a template if Produce would refuse its tasks.
func (s *Schedule) checkTask(l *Limits) error {
	if !s.Task.RunAt.IsZero() {
		return &InvalidError{"Schedule.Task.RunAt", s.Task.RunAt, "the zero time"}
	}
	for _, name := range []string{TickHeader, ScheduleHeader} {
		if _, ok := s.Task.Headers[name]; ok {
			return &InvalidError{"Schedule.Task.Headers", name, "names that the schedule does not add itself"}
		}
	}
	const widest = 999 // a tick with milliseconds
	t := tickTask(&s.Task, s.Name, widest)
	return t.check(l, 0)
}

// tickTask returns the task of a tick.
func tickTask(template *Task, name string, tick uint64) Task {
	t := *template
	t.Headers = make(map[string]string, len(template.Headers)+2)
	maps.Copy(t.Headers, template.Headers)
	t.Headers[TickHeader] = recurrence.Text(tick)
	t.Headers[ScheduleHeader] = name
	return t
}

// value returns the stored form, without a position in time.
func (s *Schedule) value() keys.ScheduleValue {
	var rec record.Record
	s.Task.fill(&rec)
	return keys.ScheduleValue{
		Missed: uint8(s.Missed), Every: record.Millis(s.Every), Cron: s.Cron, TimeZone: s.TimeZone,
		Queue: s.Task.Queue, Tenant: s.Task.Tenant, Priority: uint8(s.Task.Priority), Record: rec.Encode(),
	}
}

// schedulesPart copies a part of the schedules of a shard.
type schedulesPart struct{ call.Schedules[ScheduleInfo] }

func (p *schedulesPart) Decide(s *engine.State) (engine.Verdict, error) {
	p.Copy(s, scheduleInfo)
	return engine.Decided, nil
}

// scheduleInfo converts a schedule of the engine.
func scheduleInfo(r *recurrence.Schedule) (ScheduleInfo, error) {
	rec, err := record.Decode(bytes.Clone(r.Value.Record))
	if err != nil {
		return ScheduleInfo{}, fmt.Errorf("%w: schedule %q: %w", ErrCorrupt, r.Name, err)
	}
	lane := engine.LaneKey{Queue: r.Value.Queue, Tenant: r.Value.Tenant, Priority: r.Value.Priority}
	info := ScheduleInfo{
		Schedule: Schedule{
			Name: r.Name, Cron: r.Value.Cron, Every: record.Duration(r.Value.Every), TimeZone: r.Value.TimeZone,
			Task: task(lane, &rec), Missed: MissedPolicy(r.Value.Missed),
		},
		Next: msTime(r.Next), Paused: r.Value.Paused,
	}
	if r.Err != nil {
		info.LastError = translated(r.Err).Error()
	}
	if r.Value.Last != 0 {
		info.Last = msTime(r.Value.Last)
	}
	return info, nil
}
