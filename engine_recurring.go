package codeq

import (
	"bytes"
	"cmp"
	"fmt"
	"maps"
	"slices"

	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/ticks"
)

// recurring is a Schedule as the owner of its shard has it.
//
// Invariant: value is what is on disk once the group has persisted. Every tick
// up to value.After has produced its task or been passed over, in the same
// group as it became so; next is the first tick after it.
type recurring struct {
	name  string
	value keys.ScheduleValue
	task  Task           // template; its payload is part of value
	times ticks.Sequence // nil if err is set
	err   error          // why it is not known when it ticks
	next  uint64         // wall clock, ms

	place  int    // in recurringTable.waiting; negative: not there
	turned uint64 // of one in recurringTable.late: when it got there; wall clock, ms
	gone   bool   // no longer in the table
}

func (r *recurring) due() uint64 { return r.next }
func (r *recurring) spot() *int  { return &r.place }

// newRecurring decodes a stored schedule, which is at rest until begin.
func newRecurring(name string, v keys.ScheduleValue) (*recurring, error) {
	rec, err := record.Decode(v.Record)
	if err != nil {
		return nil, fmt.Errorf("%w: schedule %q: %w", ErrCorrupt, name, err)
	}
	if v.Priority > MaxPriority || MissedPolicy(v.Missed) > MissedAll {
		return nil, fmt.Errorf("%w: schedule %q: priority %d, missed %d", ErrCorrupt, name, v.Priority, v.Missed)
	}
	l := laneKey{v.Queue, v.Tenant, v.Priority}
	return &recurring{name: name, value: v, task: task(l, &rec), next: never, place: -1}, nil
}

// begin says when the schedule ticks.
func (r *recurring) begin(times ticks.Sequence) {
	r.times = times
	r.next = times.Next(r.value.After)
}

// pass takes all ticks up to after for done.
func (r *recurring) pass(after uint64) {
	r.value.After = after
	r.next = r.times.Next(after)
}

func (r *recurring) info() ScheduleInfo {
	info := ScheduleInfo{
		Schedule: Schedule{
			Name: r.name, Cron: r.value.Cron, Every: duration(r.value.Every), TimeZone: r.value.TimeZone,
			Task: r.task, Missed: MissedPolicy(r.value.Missed),
		},
		Next: msTime(r.next),
	}
	if r.err != nil {
		info.LastError = r.err.Error()
	}
	info.Task.Payload = bytes.Clone(r.task.Payload)
	info.Task.Headers = maps.Clone(r.task.Headers)
	info.Task.After = slices.Clone(r.task.After)
	if r.value.Last != 0 {
		info.Last = msTime(r.value.Last)
	}
	return info
}

// recurringTable is the schedules of a shard. Its owner uses it.
//
// Invariant: each schedule of list is in exactly one of waiting and late. Those of
// late were due when their last turn ended.
type recurringTable struct {
	list    []*recurring         // by name
	waiting timeHeap[*recurring] // for their next tick
	late    []*recurring         // for another turn, in the order of their last turns; some are gone
	looked  uint64               // how often a schedule got a turn
}

func (t *recurringTable) search(name string) (int, bool) {
	return slices.BinarySearchFunc(t.list, name, func(r *recurring, name string) int { return cmp.Compare(r.name, name) })
}

// find returns nil if there is no schedule of this name.
func (t *recurringTable) find(name string) *recurring {
	if i, ok := t.search(name); ok {
		return t.list[i]
	}
	return nil
}

func (t *recurringTable) put(r *recurring) {
	i, ok := t.search(r.name)
	if ok {
		t.drop(t.list[i])
		t.list[i] = r
	} else {
		t.list = slices.Insert(t.list, i, r)
	}
	t.waiting.push(r)
}

// remove takes a schedule out. REQUIRES: it is there.
func (t *recurringTable) remove(name string) {
	i, _ := t.search(name)
	t.drop(t.list[i])
	t.list = slices.Delete(t.list, i, i+1)
}

// drop gives a schedule no more turns.
func (t *recurringTable) drop(r *recurring) {
	r.gone = true
	t.waiting.remove(r)
}

// next is when the next schedule is to get a turn; 0: now, never: none is.
// Wall clock, ms.
func (t *recurringTable) next() uint64 {
	if len(t.late) > 0 {
		return 0
	}
	return t.waiting.next()
}

// take returns the schedule whose turn it is, and takes it out of waiting or late;
// nil: none is due. The turn is of the one that has waited for it longest: one
// with a year of ticks to make up for does not delay the others.
func (t *recurringTable) take(wall uint64) *recurring {
	for len(t.late) > 0 {
		if t.waiting.next() <= min(wall, t.late[0].turned) {
			break
		}
		r := t.late[0]
		t.late[0] = nil
		t.late = t.late[1:]
		if !r.gone {
			return r
		}
	}
	if t.waiting.next() > wall {
		return nil
	}
	return t.waiting.pop()
}

// turn puts back what take has returned, once it has been looked at.
func (t *recurringTable) turn(r *recurring, wall uint64) {
	if r.next > wall {
		t.waiting.push(r)
		return
	}
	r.turned = wall
	t.late = append(t.late, r)
}

// missedAfter is how late a tick may be and not be missed, in ms.
const missedAfter = 60_000

// turnTicks bounds how many ticks a schedule produces in one turn. Each turn stores
// the schedule.
const turnTicks = 64

// produceTicks produces the tasks of the schedules that are due, and looks at no others.
func (s *state) produceTicks() {
	t := &s.recurring
	var held []*recurring // until the next group
	for !s.spent() {
		r := t.take(s.wall)
		if r == nil {
			break
		}
		if t.looked++; s.recur(r) {
			t.turn(r, s.wall)
		} else {
			held = append(held, r)
		}
	}
	for _, r := range held {
		t.turn(r, s.wall)
	}
}

func (s *state) ticksAreDue() bool { return s.recurring.next() <= s.wall }

// recur is a turn of a schedule: it produces tasks, and stores how far the schedule has come.
// It is false if a task has to wait for the next group.
func (s *state) recur(r *recurring) bool {
	admitted, begun := true, r.value.After
	for n := 0; n < turnTicks && r.next <= s.wall && (n == 0 || !s.spent()); n++ {
		tick := r.next
		if s.wall-tick > missedAfter {
			switch MissedPolicy(r.value.Missed) {
			case MissedSkip:
				r.pass(s.wall - missedAfter - 1)
				continue
			case MissedOnce:
				tick = ticks.Latest(r.times, tick, s.wall)
			}
		}
		t := tickTask(&r.task, r.name, tick)
		tasks := []newTask{prepare(&t, nil)}
		if admitted = s.canAdmit(tasks); !admitted {
			break
		}
		s.admitAll(tasks, nil, nil)
		r.value.Last = tick
		r.pass(tick)
	}
	if r.value.After != begun {
		s.storeRecurring(r)
	}
	return admitted
}

func (s *state) storeRecurring(r *recurring) {
	s.group.set(keys.AppendSchedule(nil, r.name), r.value.Append(nil))
}

// loadRecurring reads the schedules. One of which this process cannot say when
// it ticks rests: it must not keep the queue from opening.
func (s *state) loadRecurring() error {
	return scan(s.store.DB(), keys.Schedule, func(key, value []byte) error {
		r, err := parseRecurring(key, bytes.Clone(value))
		if err != nil {
			return err
		}
		if times, err := timesOf(&r.value); err == nil {
			r.begin(times)
		} else {
			r.err = err
			s.effects.resting = append(s.effects.resting, r)
		}
		s.recurring.put(r)
		return nil
	})
}

// timesOf is when a stored schedule ticks.
func timesOf(v *keys.ScheduleValue) (ticks.Sequence, error) {
	if v.Every != 0 {
		return ticks.Every{Start: v.Start, Interval: v.Every}, nil
	}
	return cronTimes(v.Cron, v.TimeZone)
}

// parseRecurring decodes an entry of the schedule range. The result keeps value.
func parseRecurring(key, value []byte) (*recurring, error) {
	name, err := keys.ParseSchedule(key)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCorrupt, err)
	}
	v, err := keys.ParseScheduleValue(value)
	if err != nil {
		return nil, fmt.Errorf("%w: schedule %q: %w", ErrCorrupt, name, err)
	}
	return newRecurring(name, v)
}
