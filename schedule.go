package codeq

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
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
	// minutes tick twice. For one tick a day, choose UTC, or a time that is neither.
	Cron string `json:",omitzero"`
	// Every is the time from tick to tick, in place of Cron: at least 10 ms, rounded up to the
	// millisecond. It counts from the [Queue.SetSchedule] that created the schedule or changed when
	// it ticks; the first tick is one interval later.
	Every time.Duration `json:",omitzero"`
	// TimeZone is the IANA name, such as "Europe/Berlin", of the time zone of Cron. "": UTC. The
	// machine must know the name, or the program must import time/tzdata.
	TimeZone string `json:",omitzero"`
	// Jitter, up to 24 h, spreads the schedules of one moment: the task of a tick is ready up to so
	// much later, and before the next tick. How much depends on Name and the tick only. 0: at once.
	Jitter time.Duration `json:",omitzero"`
	// Task is produced by each tick: RunAt must be zero. Two headers are added, [TickHeader] and
	// [ScheduleHeader]; Headers must not contain them.
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
// minute past, or 60 Every if that is less, when the queue processes it: because no process had the
// queue open, the machine was suspended, or the clock was set forward. Others produce their tasks.
type MissedPolicy uint8

const (
	// MissedOnce: one task is produced for all missed ticks, that of the latest one. The default.
	// The ticks after it, less late than missed ones, produce their tasks as well.
	MissedOnce MissedPolicy = iota
	// MissedSkip: no task is produced for a missed tick.
	MissedSkip
	// MissedAll: each missed tick produces its task, oldest first: for Every 10 ms 8,640,000 a day.
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
	v := keys.ScheduleValue{Cron: s.Cron, TimeZone: s.TimeZone, Start: uint64(s.Next.UnixMilli()), Every: record.Millis(s.Every)}
	for _, tick := range recurrence.Upcoming(&v, n) {
		times = append(times, msTime(tick))
	}
	return times
}

// SetSchedule stores a schedule, or replaces the one with the same name. Programs may call it at
// every start: a schedule that is replaced by an equal one goes on unchanged. It also keeps its
// position if only [Schedule.Task], Missed or Jitter differ; these apply from the next tick on. If
// Cron, Every or TimeZone differ it begins again, with the first tick after now. So it does if its
// next tick lies more than a day and a period ahead, since it has ticked by a wrong clock: a tick
// may then come again on its date.
//
// Errors: [ErrInvalid] (such as one that never ticks), [ErrNotFound] ([RefuseOnMissing]), those of
// changes (see [Queue]), and that of ctx.
func (q *Queue) SetSchedule(ctx context.Context, s Schedule) (err error) {
	defer public(&err)
	if err := q.checkCall(ctx); err != nil {
		return err
	}
	_, err = q.opts.through(ctx, Producing{Tasks: []Task{s.Task}, Schedule: s.Name}, func(ctx context.Context, tasks []Task) ([]ID, error) {
		s.Task = tasks[0]
		return nil, q.setSchedule(ctx, &s)
	})
	return err
}

// setSchedule stores a schedule.
func (q *Queue) setSchedule(ctx context.Context, s *Schedule) error {
	times, err := s.check(&q.opts.Limits, wallMillis(q.opts))
	if err != nil {
		return err
	}
	if err := q.checkParents(ctx, "", []engine.NewTask{prepare(&s.Task, nil)}); err != nil {
		return err
	}
	return q.doForSchedule(ctx, s.Name, rule(callSetSchedule, &call.SetSchedule{Name: s.Name, Value: s.value(), Times: times}))
}

// DeleteSchedule removes a schedule; the tasks that it has produced stay.
//
// Errors: [ErrNotFound], those of changes (see [Queue]), and that of ctx.
func (q *Queue) DeleteSchedule(ctx context.Context, name string) (err error) {
	defer public(&err)
	return q.doForSchedule(ctx, name, rule(callDeleteSchedule, &call.DeleteSchedule{Name: name}))
}

// PauseSchedule stops the ticks of a schedule until [Queue.ResumeSchedule]. It is stored, and
// [Queue.SetSchedule] leaves it as it is: programs that set schedules at every start keep it.
//
// Errors: [ErrNotFound], those of changes (see [Queue]), and that of ctx.
func (q *Queue) PauseSchedule(ctx context.Context, name string) (err error) {
	defer public(&err)
	return q.doForSchedule(ctx, name, rule(callPauseSchedule, &call.PauseSchedule{Name: name, Paused: true}))
}

// ResumeSchedule undoes [Queue.PauseSchedule]. The schedule goes on with the first tick after now:
// those of the time of its pause are not missed ones. If its next tick lies more than a day and a
// period ahead, it begins again, as by [Queue.SetSchedule], also if it is not paused.
//
// Errors: [ErrNotFound], those of changes (see [Queue]), and that of ctx.
func (q *Queue) ResumeSchedule(ctx context.Context, name string) (err error) {
	defer public(&err)
	return q.doForSchedule(ctx, name, rule(callPauseSchedule, &call.PauseSchedule{Name: name}))
}

// TriggerSchedule produces the task of a schedule at once, as a tick at this moment would, without
// Jitter, also if the schedule is paused. Its ticks come as without it. If it is called again after
// [ErrUncertain], there may be two tasks, unless that of the schedule has an idempotency key.
//
// Errors: [ErrNotFound] (no schedule has this name), [ErrDuplicate], [ErrNotMember], [ErrFormat]
// (of nodes that do not know it yet), those of changes (see [Queue]), and that of ctx.
func (q *Queue) TriggerSchedule(ctx context.Context, name string) (_ ID, err error) {
	defer public(&err)
	if err := q.checkCall(ctx); err != nil {
		return ID{}, err
	}
	of := &call.FindSchedule{Name: name}
	if err := q.ask(ctx, keys.ShardOfSchedule(name, len(q.replicas)), rule(callFindSchedule, of)); err != nil {
		return ID{}, err
	}
	t, err := templateOf(name, &of.Value)
	if err != nil {
		return ID{}, err
	}
	t.Headers = recurrence.Headers(t.Headers, name, wallMillis(q.opts))
	return q.produceOne(ctx, &t) // the task was stored behind the middleware
}

// Schedules returns all schedules, ordered by name. It copies some hundred at a time, those of one
// copy as of one moment; other calls go on meanwhile.
//
// Errors: those of reads (see [Queue]), such as [ErrFailed], and that of ctx.
func (q *Queue) Schedules(ctx context.Context) (_ []ScheduleInfo, err error) {
	defer public(&err)
	if ctx, err = q.begin(ctx); err != nil {
		return nil, err
	}
	var all []ScheduleInfo
	for i := range q.replicas {
		part := new(schedulesPart)
		op := rule(callSchedules, part)
		infos, err := part.All(func() error { return q.ask(ctx, i, op) })
		if err != nil {
			return nil, err
		}
		all = append(all, infos...)
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
	times, err := recurrence.Check(s.Cron, s.TimeZone, s.Every, s.Jitter, now)
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
	t := s.Task
	t.Headers = recurrence.Headers(t.Headers, s.Name, widest)
	return t.check(l, 0)
}

// value returns the stored form, without a position in time.
func (s *Schedule) value() keys.ScheduleValue {
	var rec record.Record
	s.Task.fill(&rec)
	return keys.ScheduleValue{
		Missed: uint8(s.Missed), Every: record.Millis(s.Every), Jitter: record.Millis(s.Jitter), Cron: s.Cron, TimeZone: s.TimeZone,
		Queue: s.Task.Queue, Tenant: s.Task.Tenant, Priority: uint8(s.Task.Priority), Record: rec.Encode(),
	}
}

// schedulesPart copies a part of the schedules of a shard.
type schedulesPart struct{ call.Schedules[ScheduleInfo] }

func (p *schedulesPart) Decide(s *engine.State) (engine.Verdict, error) {
	p.Copy(s, scheduleInfo)
	return engine.Decided, nil
}

// templateOf returns the task of a stored schedule.
func templateOf(name string, v *keys.ScheduleValue) (Task, error) {
	rec, err := record.Decode(bytes.Clone(v.Record))
	if err != nil {
		return Task{}, fmt.Errorf("%w: schedule %q: %w", ErrCorrupt, name, err)
	}
	return task(engine.LaneKey{Queue: v.Queue, Tenant: v.Tenant, Priority: v.Priority}, &rec), nil
}

// scheduleInfo converts a schedule of the engine.
func scheduleInfo(r *recurrence.Schedule) (ScheduleInfo, error) {
	v := &r.Value
	t, err := templateOf(r.Name, v)
	if err != nil {
		return ScheduleInfo{}, err
	}
	info := ScheduleInfo{
		Schedule: Schedule{
			Name: r.Name, Cron: v.Cron, Every: record.Duration(v.Every), TimeZone: v.TimeZone, Jitter: record.Duration(v.Jitter),
			Task: t, Missed: MissedPolicy(v.Missed),
		},
		Next: msTime(r.Next), Paused: v.Paused,
	}
	if r.Err != nil {
		info.LastError = translated(r.Err).Error()
	}
	if v.Last != 0 {
		info.Last = msTime(v.Last)
	}
	return info, nil
}
