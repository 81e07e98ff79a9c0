package recurrence

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/record"
)

// FuzzSchedule: the shard refuses a stored schedule, or the schedule rests, or its following ticks
// are in ascending order.
func FuzzSchedule(f *testing.F) {
	rec := record.Record{Payload: []byte("p"), Headers: map[string]string{"h": "v"}}
	for _, v := range []keys.ScheduleValue{
		{Cron: "*/5 3 * * mon", TimeZone: "Europe/Berlin", Queue: "a", Record: rec.Encode()},
		{Every: 60_000, Missed: MissedAll, Queue: "a", Record: rec.Encode()},
	} {
		v.Start, v.After = 1<<40, 1<<40+5
		f.Add(v.Append(nil), uint64(1<<40+1<<30))
	}
	leap := keys.ScheduleValue{Cron: "0 0 1 1 *", TimeZone: "Europe/Berlin", Queue: "a", Record: rec.Encode()}
	leap.After = 1_861_833_600_000 // 2028-12-31
	f.Add(leap.Append(nil), leap.After)
	huge := keys.ScheduleValue{Start: Never, After: Never - 1, Every: Never, Queue: "a", Record: []byte{0}}
	f.Add(huge.Append(nil), uint64(1<<44))
	huge = keys.ScheduleValue{Start: 5, Every: 1 << 63, Queue: "a", Record: []byte{0}}
	f.Add(huge.Append(nil), uint64(1<<44))
	f.Fuzz(func(t *testing.T, value []byte, now uint64) {
		r, err := Parse(keys.AppendSchedule(nil, "s"), value)
		if err != nil {
			require.ErrorIs(t, err, base.ErrCorrupt)
			return
		}
		times, err := Of(&r.Value)
		if err != nil {
			return
		}
		r.Begin(times)
		for range 3 {
			if r.Next == Never {
				break
			}
			require.Greater(t, r.Next, r.Value.After)
			if r.Next > now {
				break
			}
			r.Pass(r.Next)
		}
	})
}

// TestNextTick: the next tick is the first tick of all schedules, both waiting and late ones, but
// not of a deleted one.
func TestNextTick(t *testing.T) {
	var table Table
	put := func(name string, next uint64) { table.Put(&Schedule{Name: name, Next: next}) }
	require.Equal(t, uint64(Never), table.NextTick())
	put("a", 70)
	put("b", 50)
	require.EqualValues(t, 50, table.NextTick())
	r := table.Take(60)
	require.Equal(t, "b", r.Name)
	require.EqualValues(t, 70, table.NextTick())
	r.Next = 55
	table.Turn(r, 60)
	require.EqualValues(t, 55, table.NextTick(), "it is late")
	table.Remove("b")
	require.EqualValues(t, 70, table.NextTick())
}

// TestMissedTicks: a tick that is late by more than MissedAfter is missed, so that at most 60 ticks
// of a short interval come together.
func TestMissedTicks(t *testing.T) {
	t.Parallel()
	for _, interval := range []uint64{10, 10_000} {
		t.Run(fmt.Sprint(interval), func(t *testing.T) { t.Parallel(); testMissedTicks(t, interval) })
	}
	require.EqualValues(t, 600, MissedAfter(10))
	require.EqualValues(t, 60_000, MissedAfter(10_000))
	require.EqualValues(t, 60_000, MissedAfter(0))
}

func testMissedTicks(t *testing.T, interval uint64) {
	at := func(missed uint8) *Schedule {
		r, err := New("s", keys.ScheduleValue{Every: interval, Missed: missed, Record: new(record.Record).Encode()})
		require.NoError(t, err)
		r.Begin(Every{Interval: interval})
		return r
	}
	for missed := range MissedAll + 1 {
		tick, ok := at(missed).Tick(interval + MissedAfter(interval))
		require.True(t, ok)
		require.EqualValues(t, interval, tick, "not missed")
	}
	wall := 10*interval + MissedAfter(interval)
	tick, ok := at(MissedOnce).Tick(wall)
	require.True(t, ok)
	require.EqualValues(t, 9*interval, tick, "the latest of those that are missed")
	tick, ok = at(MissedAll).Tick(wall)
	require.True(t, ok)
	require.EqualValues(t, interval, tick)
	r := at(MissedSkip)
	_, ok = r.Tick(wall)
	require.False(t, ok)
	require.EqualValues(t, 10*interval, r.Next)
}

// TestReplace: a schedule that is set again keeps its position, unless it ticks at other times or
// is far ahead.
func TestReplace(t *testing.T) {
	t.Parallel()
	const interval, first = 10_000, 1_000_000
	v := keys.ScheduleValue{Every: interval, Queue: "a", Record: new(record.Record).Encode()}
	set := func(old *Schedule, v keys.ScheduleValue, wall uint64) *Schedule {
		r, err := Replace(old, "s", v, nil, wall)
		require.NoError(t, err)
		return r
	}
	r := set(nil, v, first)
	require.EqualValues(t, first+interval, r.Next)
	r.Pass(r.Next)
	require.Nil(t, set(r, v, first+interval+5), "nothing changes")
	v.Queue = "b"
	next := set(r, v, first+interval+5)
	require.EqualValues(t, first+2*interval, next.Next)
	v.Every = 2 * interval
	require.EqualValues(t, first+5+2*interval, set(next, v, first+5).Next)

	r.Pass(first + 3*day)
	require.NotNil(t, set(r, r.Value, first), "it is ahead, by a wrong clock")
	paused := r.Pause(true, first)
	require.EqualValues(t, uint64(Never), paused.Next)
	require.Same(t, paused, paused.Pause(true, first))
	again := paused.Pause(false, first+4*day)
	require.EqualValues(t, first+4*day+interval, again.Next)
	require.Same(t, again, again.Pause(false, first+4*day))
	require.EqualValues(t, first+7+interval, paused.Pause(false, first+7).Next, "it begins again")
	require.EqualValues(t, first+3*day, paused.Value.After, "the one before stays as it was")
}

// TestUpcoming: the ticks follow each other from the first one on.
func TestUpcoming(t *testing.T) {
	t.Parallel()
	const minute = 60_000
	v := keys.ScheduleValue{Cron: "*/2 * * * *", Start: 2 * minute}
	require.Equal(t, []uint64{2 * minute, 4 * minute, 6 * minute}, Upcoming(&v, 3))
	require.Empty(t, Upcoming(&v, 0))
	v.Cron = "nonsense"
	require.Empty(t, Upcoming(&v, 3))
	v = keys.ScheduleValue{Every: 1, Start: record.LastTime}
	require.Len(t, Upcoming(&v, 3), 1, "there are no more")
}
