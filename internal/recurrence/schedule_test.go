package recurrence

import (
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
