package engine

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"slices"
	"time"

	"codeq/internal/base"
	"codeq/internal/container/timeheap"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/recurrence"
	"codeq/internal/store"
)

// recurring is a Schedule in the memory of its shard.
//
// Invariant: disk has value once the group has persisted. Every tick up to value.After has produced
// its task or was skipped, and the same group stored so; next is the first tick after it; that of a
// paused one does not come.
type recurring struct {
	Name     string
	value    keys.ScheduleValue
	template record.Record       // of the tasks; its payload is part of value
	times    recurrence.Sequence // nil if Err is set
	Err      error               // why its ticks are not known
	next     uint64              // wall clock, ms

	place  int    // in recurringTable.waiting; negative: not there
	turned uint64 // when it was put into recurringTable.late; wall clock, ms
	gone   bool   // no longer in the table
}

func (r *recurring) Due() uint64 { return r.next }

func (r *recurring) Spot() *int { return &r.place }

// newRecurring decodes a stored schedule, which does not tick until begin.
func newRecurring(name string, v keys.ScheduleValue) (*recurring, error) {
	rec, err := record.Decode(v.Record)
	if err != nil {
		return nil, fmt.Errorf("%w: schedule %q: %w", base.ErrCorrupt, name, err)
	}
	if v.Priority > maxPriority || v.Missed > MissedAll {
		return nil, fmt.Errorf("%w: schedule %q: priority %d, missed %d", base.ErrCorrupt, name, v.Priority, v.Missed)
	}
	return &recurring{Name: name, value: v, template: rec, next: Never, place: -1}, nil
}

// The headers that the task of a tick has.
const (
	TickHeader     = "codeq-tick"     // the time of the tick: RFC 3339, UTC, milliseconds if any
	ScheduleHeader = "codeq-schedule" // the name of the schedule
)

// task returns the task of a tick.
func (r *recurring) task(tick uint64) NewTask {
	rec := r.template
	rec.Headers = make(map[string]string, len(r.template.Headers)+2)
	maps.Copy(rec.Headers, r.template.Headers)
	rec.Headers[TickHeader] = recurrence.Text(tick)
	rec.Headers[ScheduleHeader] = r.Name
	t := NewTask{Key: LaneKey{r.value.Queue, r.value.Tenant, r.value.Priority}}
	t.Encode(&rec, nil)
	return t
}

// begin sets when the schedule ticks.
func (r *recurring) begin(times recurrence.Sequence) {
	r.times = times
	if r.next = times.Next(r.value.After); r.value.Paused {
		r.next = Never
	}
}

// pass marks all ticks up to after as processed.
func (r *recurring) pass(after uint64) {
	r.value.After = after
	r.next = r.times.Next(after)
}

// isAhead reports whether the next tick lies more than a day and a period ahead of a time of the
// wall clock: that was wrong when the schedule came so far.
func (r *recurring) isAhead(wall uint64) bool {
	if r.Err != nil || r.value.After <= wall {
		return false
	}
	period := r.value.Every
	if period == 0 {
		first := r.times.Next(wall)
		if first == recurrence.Never {
			return false
		}
		period = r.times.Next(first) - first
	}
	ahead := r.times.Next(r.value.After) - wall
	return ahead > dayMillis && ahead-dayMillis > period
}

// recurringTable holds the schedules of a shard. Only its owner uses it.
//
// Invariant: each schedule in list is in exactly one of waiting and late. Those in late were due
// when their last turn ended.
type recurringTable struct {
	list    []*recurring              // by name
	waiting timeheap.Heap[*recurring] // those that wait for their next tick
	late    []*recurring              // by the times of their last turns; some are gone
	looked  uint64                    // how often a schedule got a turn
}

func (t *recurringTable) search(name string) (int, bool) {
	return slices.BinarySearchFunc(t.list, name, func(r *recurring, name string) int { return cmp.Compare(r.Name, name) })
}

// find returns the schedule with a name; nil if there is none.
func (t *recurringTable) find(name string) *recurring {
	if i, ok := t.search(name); ok {
		return t.list[i]
	}
	return nil
}

func (t *recurringTable) put(r *recurring) {
	i, ok := t.search(r.Name)
	if ok {
		t.drop(t.list[i])
		t.list[i] = r
	} else {
		t.list = slices.Insert(t.list, i, r)
	}
	t.waiting.Push(r)
}

// remove removes a schedule. REQUIRES: it exists.
func (t *recurringTable) remove(name string) {
	i, _ := t.search(name)
	t.drop(t.list[i])
	t.list = slices.Delete(t.list, i, i+1)
}

// drop excludes a schedule from further turns.
func (t *recurringTable) drop(r *recurring) {
	r.gone = true
	t.waiting.Remove(r)
}

// next returns when the next schedule gets a turn; 0: now, Never: none does. Wall clock, ms.
func (t *recurringTable) next() uint64 {
	if len(t.late) > 0 {
		return 0
	}
	return t.waiting.Next()
}

// nextTick returns the next tick of all schedules, which may be past; Never: there is none. Wall
// clock, ms.
func (t *recurringTable) nextTick() uint64 {
	next := t.waiting.Next()
	for _, r := range t.late {
		if !r.gone {
			next = min(next, r.next)
		}
	}
	return next
}

// NextTick returns the next tick of all schedules, which may be past; Never: there is none. Wall
// clock, ms.
func (tm *times) NextTick() uint64 { return tm.recurring.nextTick() }

// take returns the schedule with the turn, and removes it from waiting or late; nil: none is due.
// The schedule that has waited longest for its turn gets it: one with a year of missed ticks does
// not delay the others.
func (t *recurringTable) take(wall uint64) *recurring {
	for len(t.late) > 0 {
		if t.waiting.Next() <= min(wall, t.late[0].turned) {
			break
		}
		r := t.late[0]
		t.late[0] = nil
		t.late = t.late[1:]
		if !r.gone {
			return r
		}
	}
	if t.waiting.Next() > wall {
		return nil
	}
	return t.waiting.Pop()
}

// turn puts back a schedule from take, after its turn.
func (t *recurringTable) turn(r *recurring, wall uint64) {
	if r.next > wall {
		t.waiting.Push(r)
		return
	}
	r.turned = wall
	t.late = append(t.late, r)
}

// A tick that is later than missedAfter, in ms, is missed.
const missedAfter = 60_000

// turnTicks is how many ticks a schedule produces in one turn at most. Each turn stores the
// schedule.
const turnTicks = 64

// produceTicks produces the tasks of the schedules that are due, and does not look at others.
func (s *State) produceTicks() {
	t := &s.Times.recurring
	var held []*recurring // they wait for the next group
	for !s.Spent() {
		r := t.take(s.Wall)
		if r == nil {
			break
		}
		if t.looked++; s.recur(r) {
			t.turn(r, s.Wall)
		} else {
			held = append(held, r)
		}
	}
	for _, r := range held {
		t.turn(r, s.Wall)
	}
}

func (tm *times) TicksAreDue() bool { return tm.recurring.next() <= tm.Wall }

// recur is a turn of a schedule: it produces tasks, and stores how far the schedule has come. It
// returns false if a task has to wait for the next group.
func (s *State) recur(r *recurring) bool {
	admitted, begun := true, r.value.After
	for n := 0; n < turnTicks && r.next <= s.Wall && (n == 0 || !s.Spent()); n++ {
		tick := r.next
		if s.Wall-tick > missedAfter {
			switch r.value.Missed {
			case MissedSkip:
				r.pass(s.Wall - missedAfter - 1)
				continue
			case MissedOnce:
				tick = recurrence.Latest(r.times, tick, s.Wall-missedAfter-1)
			}
		}
		tasks := []NewTask{r.task(tick)}
		if admitted = s.Ties.canAdmit(tasks); !admitted {
			break
		}
		if s.produceTick(r, tick, tasks) {
			r.value.Last = tick
		}
		r.pass(tick)
	}
	if r.value.After != begun {
		s.Times.storeRecurring(r)
	}
	return admitted
}

// produceTick produces the task of a tick, and reports whether it is known to be stored: whether
// the key of a task is free is decided in the shard of the key, which tells by MsgTicked.
func (s *State) produceTick(r *recurring, tick uint64, task []NewTask) (stored bool) {
	if home, bound := task[0].Home(s.config.Shards); bound && home != s.config.Shard {
		m := task[0].message()
		m.Kind, m.Schedule, m.Tick = keys.MsgTick, r.Name, tick
		s.Mail.send(home, m)
		return false
	}
	_, refused := s.admitAll(task, nil, nil)
	return len(refused) == 0
}

// ticked notes that another shard has stored the task of a tick, unless the schedule has begun anew
// since.
func (tm *times) ticked(name string, tick uint64) {
	r := tm.recurring.find(name)
	if r == nil || tick <= max(r.value.Start, r.value.Last) || tick > r.value.After {
		return
	}
	r.value.Last = tick
	tm.storeRecurring(r)
}

func (tm *times) storeRecurring(r *recurring) {
	tm.Group.Set(keys.AppendSchedule(nil, r.Name), r.value.Append(nil))
}

// loadRecurring reads the schedules. If this process cannot compute the ticks of a schedule, the
// schedule does not tick, but the queue opens.
func (tm *times) loadRecurring() error {
	return store.Scan(tm.Store.DB(), keys.Schedule, func(key, value []byte) error {
		r, err := parseRecurring(key, bytes.Clone(value))
		if err != nil {
			return err
		}
		if times, err := TimesOf(&r.value); err == nil {
			r.begin(times)
		} else {
			r.Err = err
			tm.Effects.Resting = append(tm.Effects.Resting, r)
		}
		tm.recurring.put(r)
		return nil
	})
}

// TimesOf returns when a stored schedule ticks, or an *Invalid.
func TimesOf(v *keys.ScheduleValue) (recurrence.Sequence, error) {
	if v.Every != 0 {
		return recurrence.Every{Start: v.Start, Interval: v.Every}, nil
	}
	loc, err := recurrence.Zone(v.TimeZone)
	if err != nil {
		return nil, &Invalid{"Schedule.TimeZone", v.TimeZone, "an IANA name that this machine knows, such as Europe/Berlin; package time/tzdata has all"}
	}
	times, err := recurrence.ParseCron(v.Cron, loc)
	if err != nil {
		return nil, &Invalid{"Schedule.Cron", v.Cron, fmt.Sprintf("a cron expression: %v", err)}
	}
	return times, nil
}

const (
	minEvery = time.Second
	maxCron  = 1024 // bytes
)

// CheckTimes returns when a new schedule ticks, or an *Invalid.
func CheckTimes(cron, zone string, every time.Duration, now uint64) (recurrence.Sequence, error) {
	switch {
	case (cron == "") == (every == 0):
		return nil, &Invalid{"Schedule", fmt.Sprintf("Cron %q, Every %v", cron, every), "one of Cron and Every"}
	case every != 0 && every < minEvery:
		return nil, &Invalid{"Schedule.Every", every, fmt.Sprint(minEvery, " or more")}
	case every != 0 && zone != "":
		return nil, &Invalid{"Schedule.TimeZone", zone, "none, with Every"}
	case len(cron) > maxCron:
		return nil, &Invalid{"Schedule.Cron", fmt.Sprintf("%d bytes", len(cron)), fmt.Sprintf("at most %d bytes", maxCron)}
	}
	times, err := TimesOf(&keys.ScheduleValue{Cron: cron, TimeZone: zone, Start: now, Every: record.Millis(every)})
	switch {
	case err != nil || times.Next(now) != recurrence.Never:
		return times, err
	case every != 0:
		return nil, &Invalid{"Schedule.Every", every, "an interval that ends before the year 10000"}
	}
	return nil, &Invalid{"Schedule.Cron", cron, fmt.Sprintf("a time that clocks in %s show within forty years, "+
		"and do not skip each time; name another time of the day", cmp.Or(zone, "UTC"))}
}

// parseRecurring decodes an entry of the schedule range. The result keeps value.
func parseRecurring(key, value []byte) (*recurring, error) {
	name, err := keys.ParseSchedule(key)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", base.ErrCorrupt, err)
	}
	v, err := keys.ParseScheduleValue(value)
	if err != nil {
		return nil, fmt.Errorf("%w: schedule %q: %w", base.ErrCorrupt, name, err)
	}
	return newRecurring(name, v)
}

// CheckSchedule returns the name of a stored schedule, or the error in it.
func CheckSchedule(key, value []byte) (name string, err error) {
	r, err := parseRecurring(key, value)
	if err != nil {
		return "", err
	}
	return r.Name, nil
}

// SetSchedule stores a schedule; v has no position in time.
func (tm *times) SetSchedule(name string, v keys.ScheduleValue, times recurrence.Sequence) error {
	old := tm.recurring.find(name)
	fresh := old == nil || v.Cron != old.value.Cron || v.Every != old.value.Every || v.TimeZone != old.value.TimeZone ||
		old.isAhead(tm.Wall)
	if fresh {
		v.Start, v.After = tm.Wall, tm.Wall
	} else {
		v.Start, v.After, v.Last = old.value.Start, old.value.After, old.value.Last
	}
	if old != nil {
		v.Paused = old.value.Paused
	}
	if !fresh {
		if old.Err == nil && bytes.Equal(v.Append(nil), old.value.Append(nil)) {
			return nil
		}
	}
	if v.Every != 0 { // the start was not known before
		times = recurrence.Every{Start: v.Start, Interval: v.Every}
	}
	r, err := newRecurring(name, v)
	if err != nil { // it was encoded just now
		return err
	}
	if err := tm.names.hasLanes(1); err != nil {
		return err
	}
	// so that no tick lacks a lane
	tm.names.lane(LaneKey{Queue: v.Queue, Tenant: v.Tenant, Priority: v.Priority})
	r.begin(times)
	tm.recurring.put(r)
	tm.storeRecurring(r)
	return nil
}

// PauseSchedule stops the ticks of a schedule, or resumes them with the first tick after now.
func (tm *times) PauseSchedule(name string, paused bool) error {
	r := tm.recurring.find(name)
	switch {
	case r == nil:
		return fmt.Errorf("%w: schedule %q", base.ErrNotFound, name)
	case r.value.Paused == paused && (paused || !r.isAhead(tm.Wall)):
		return nil
	}
	next := *r
	next.value.Paused = paused
	next.value.After = max(r.value.After, tm.Wall)
	if !paused && r.isAhead(tm.Wall) {
		next.value.Start, next.value.After, next.value.Last = tm.Wall, tm.Wall, 0
		if next.value.Every != 0 {
			next.times = recurrence.Every{Start: tm.Wall, Interval: next.value.Every}
		}
	}
	if next.place, next.next = -1, Never; r.Err == nil {
		next.begin(next.times)
	}
	tm.recurring.put(&next)
	tm.storeRecurring(&next)
	return nil
}

// DeleteSchedule removes a schedule.
func (tm *times) DeleteSchedule(name string) error {
	if tm.recurring.find(name) == nil {
		return fmt.Errorf("%w: schedule %q", base.ErrNotFound, name)
	}
	tm.recurring.remove(name)
	tm.Group.Delete(keys.AppendSchedule(nil, name))
	return nil
}

// ScheduleInfo is the current state of a schedule.
type ScheduleInfo struct {
	Name  string
	Value keys.ScheduleValue
	Next  uint64 // wall clock, ms; Never: it does not tick
	Err   error  // why its ticks are not known
}

// Schedules visits the schedules after a name in the order of their names, until visit returns
// false.
func (tm *times) Schedules(after string, visit func(ScheduleInfo) (more bool)) {
	from, found := tm.recurring.search(after)
	if found {
		from++
	}
	for _, r := range tm.recurring.list[from:] {
		if !visit(ScheduleInfo{r.Name, r.value, r.next, r.Err}) {
			return
		}
	}
}
