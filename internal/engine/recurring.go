package engine

import (
	"bytes"
	"fmt"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/recurrence"
	"codeq/internal/store"
)

// taskOf returns the task of a tick.
func taskOf(r *recurrence.Schedule, tick uint64) NewTask {
	rec := r.RecordOf(tick)
	t := NewTask{Key: LaneKey{r.Value.Queue, r.Value.Tenant, r.Value.Priority}}
	t.Encode(&rec, nil)
	return t
}

// NextTick returns the next tick of all schedules, which may be past; Never: there is none. Wall
// clock, ms.
func (tm *times) NextTick() uint64 { return tm.recurring.NextTick() }

// A tick that is later than missedAfter, in ms, is missed.
const missedAfter = 60_000

// turnTicks is how many ticks a schedule produces in one turn at most. Each turn stores the
// schedule.
const turnTicks = 64

// produceTicks produces the tasks of the schedules that are due, and does not look at others.
func (s *State) produceTicks() {
	t := &s.Times.recurring
	var held []*recurrence.Schedule // they wait for the next group
	for !s.Spent() {
		r := t.Take(s.Wall)
		if r == nil {
			break
		}
		if s.recur(r) {
			t.Turn(r, s.Wall)
		} else {
			held = append(held, r)
		}
	}
	for _, r := range held {
		t.Turn(r, s.Wall)
	}
}

func (tm *times) TicksAreDue() bool { return tm.recurring.Due() <= tm.Wall }

// recur is a turn of a schedule: it produces tasks, and stores how far the schedule has come. It
// returns false if a task has to wait for the next group.
func (s *State) recur(r *recurrence.Schedule) bool {
	admitted, begun := true, r.Value.After
	for n := 0; n < turnTicks && r.Next <= s.Wall && (n == 0 || !s.Spent()); n++ {
		tick := r.Next
		if s.Wall-tick > missedAfter {
			switch r.Value.Missed {
			case recurrence.MissedSkip:
				r.Pass(s.Wall - missedAfter - 1)
				continue
			case recurrence.MissedOnce:
				tick = recurrence.Latest(r.Times, tick, s.Wall-missedAfter-1)
			}
		}
		tasks := []NewTask{taskOf(r, tick)}
		if admitted = s.Ties.canAdmit(tasks); !admitted {
			break
		}
		if s.produceTick(r, tick, tasks) {
			r.Value.Last = tick
		}
		r.Pass(tick)
	}
	if r.Value.After != begun {
		s.Times.storeRecurring(r)
	}
	return admitted
}

// produceTick produces the task of a tick, and reports whether it is known to be stored: whether
// the key of a task is free is decided in the shard of the key, which tells by MsgTicked.
func (s *State) produceTick(r *recurrence.Schedule, tick uint64, task []NewTask) (stored bool) {
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
	r := tm.recurring.Find(name)
	if r == nil || tick <= max(r.Value.Start, r.Value.Last) || tick > r.Value.After {
		return
	}
	r.Value.Last = tick
	tm.storeRecurring(r)
}

func (tm *times) storeRecurring(r *recurrence.Schedule) {
	tm.Group.Set(keys.AppendSchedule(nil, r.Name), r.Value.Append(nil))
}

// loadRecurring reads the schedules. If this process cannot compute the ticks of a schedule, the
// schedule does not tick, but the queue opens.
func (tm *times) loadRecurring() error {
	return store.Scan(tm.Store.DB(), keys.Schedule, func(key, value []byte) error {
		r, err := recurrence.Parse(key, bytes.Clone(value))
		if err != nil {
			return err
		}
		if times, err := recurrence.Of(&r.Value); err == nil {
			r.Begin(times)
		} else {
			r.Err = err
			tm.Effects.Resting = append(tm.Effects.Resting, r)
		}
		tm.recurring.Put(r)
		return nil
	})
}

// SetSchedule stores a schedule; v has no position in time.
func (tm *times) SetSchedule(name string, v keys.ScheduleValue, times recurrence.Sequence) error {
	old := tm.recurring.Find(name)
	fresh := old == nil || v.Cron != old.Value.Cron || v.Every != old.Value.Every || v.TimeZone != old.Value.TimeZone ||
		old.IsAhead(tm.Wall)
	if fresh {
		v.Start, v.After = tm.Wall, tm.Wall
	} else {
		v.Start, v.After, v.Last = old.Value.Start, old.Value.After, old.Value.Last
	}
	if old != nil {
		v.Paused = old.Value.Paused
	}
	if !fresh {
		if old.Err == nil && bytes.Equal(v.Append(nil), old.Value.Append(nil)) {
			return nil
		}
	}
	if v.Every != 0 { // the start was not known before
		times = recurrence.Every{Start: v.Start, Interval: v.Every}
	}
	r, err := recurrence.New(name, v)
	if err != nil { // it was encoded just now
		return err
	}
	if err := tm.names.hasLanes(1); err != nil {
		return err
	}
	// so that no tick lacks a lane
	tm.names.lane(LaneKey{Queue: v.Queue, Tenant: v.Tenant, Priority: v.Priority})
	r.Begin(times)
	tm.recurring.Put(r)
	tm.storeRecurring(r)
	return nil
}

// PauseSchedule stops the ticks of a schedule, or resumes them with the first tick after now.
func (tm *times) PauseSchedule(name string, paused bool) error {
	r := tm.recurring.Find(name)
	switch {
	case r == nil:
		return fmt.Errorf("%w: schedule %q", base.ErrNotFound, name)
	case r.Value.Paused == paused && (paused || !r.IsAhead(tm.Wall)):
		return nil
	}
	next := *r
	next.Value.Paused = paused
	next.Value.After = max(r.Value.After, tm.Wall)
	if !paused && r.IsAhead(tm.Wall) {
		next.Value.Start, next.Value.After, next.Value.Last = tm.Wall, tm.Wall, 0
		if next.Value.Every != 0 {
			next.Times = recurrence.Every{Start: tm.Wall, Interval: next.Value.Every}
		}
	}
	if next.Next = Never; r.Err == nil {
		next.Begin(next.Times)
	}
	tm.recurring.Put(&next)
	tm.storeRecurring(&next)
	return nil
}

// DeleteSchedule removes a schedule.
func (tm *times) DeleteSchedule(name string) error {
	if tm.recurring.Find(name) == nil {
		return fmt.Errorf("%w: schedule %q", base.ErrNotFound, name)
	}
	tm.recurring.Remove(name)
	tm.Group.Delete(keys.AppendSchedule(nil, name))
	return nil
}

// Schedules visits the schedules after a name in the order of their names, until visit returns
// false.
func (tm *times) Schedules(after string, visit func(*recurrence.Schedule) (more bool)) {
	for _, r := range tm.recurring.After(after) {
		if !visit(r) {
			return
		}
	}
}
