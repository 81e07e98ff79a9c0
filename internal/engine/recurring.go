package engine

import (
	"bytes"
	"cmp"
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

// NextTick returns the next tick of all schedules, which may be past, by the wall clock; or Never.
func (tm *times) NextTick() uint64 { return tm.recurring.NextTick() }

// turnTicks bounds the ticks that a schedule produces in one turn, which stores it.
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
		tick, ok := r.Tick(s.Wall)
		if !ok {
			continue
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

// ticked notes that another shard has stored a tick, unless the schedule has begun anew since.
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
	r, err := recurrence.Replace(tm.recurring.Find(name), name, v, times, tm.Wall)
	if r == nil || err != nil {
		return err
	}
	if v.Jitter != 0 && tm.Format < keys.FormatOfSteps {
		return fmt.Errorf("%w: the shard has format %d, and the jitter of schedules needs %d", base.ErrFormat, tm.Format, keys.FormatOfSteps)
	}
	if err := cmp.Or(tm.names.knows(v.Record), tm.names.hasLanes(1)); err != nil {
		return err
	}
	// so that no tick lacks a lane
	tm.names.lane(LaneKey{Queue: v.Queue, Tenant: v.Tenant, Priority: v.Priority})
	tm.recurring.Put(r)
	tm.storeRecurring(r)
	return nil
}

// PauseSchedule stops the ticks of a schedule, or resumes them with the first tick after now.
func (tm *times) PauseSchedule(name string, paused bool) error {
	r, err := tm.FindSchedule(name)
	if err != nil {
		return err
	}
	if next := r.Pause(paused, tm.Wall); next != r {
		tm.recurring.Put(next)
		tm.storeRecurring(next)
	}
	return nil
}

// DeleteSchedule removes a schedule.
func (tm *times) DeleteSchedule(name string) error {
	if _, err := tm.FindSchedule(name); err != nil {
		return err
	}
	tm.recurring.Remove(name)
	tm.Group.Delete(keys.AppendSchedule(nil, name))
	return nil
}

// FindSchedule returns the schedule with a name, or ErrNotFound.
func (tm *times) FindSchedule(name string) (*recurrence.Schedule, error) {
	if r := tm.recurring.Find(name); r != nil {
		return r, nil
	}
	return nil, fmt.Errorf("%w: schedule %q", base.ErrNotFound, name)
}

// Schedules visits the schedules after a name, by name, until visit returns false.
func (tm *times) Schedules(after string, visit func(*recurrence.Schedule) (more bool)) {
	for _, r := range tm.recurring.After(after) {
		if !visit(r) {
			return
		}
	}
}
