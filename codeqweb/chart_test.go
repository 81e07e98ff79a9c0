package codeqweb

import (
	"encoding/json"
	"math"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
)

// minutesFrom returns points at minutes after begin, each with so many completed tasks.
func minutesFrom(begin time.Time, completed uint32, at ...int) (points []point) {
	for _, minute := range at {
		points = append(points, point{at: uint32(begin.Unix()) + 60*uint32(minute), ready: 7, completed: completed, oldest: 90})
	}
	return points
}

// TestGaps: where nothing was measured, a chart has no value; the first point after a gap has no
// rate, since its counts are those of the whole gap.
func TestGaps(t *testing.T) {
	begin := time.Unix(1_800_000_000, 0)
	c := pointCharts(minutesFrom(begin, 120, 0, 1, 2, 30, 31), spans[1], begin.Add(31*time.Minute))
	require.Len(t, c.Times, 6)
	require.IsIncreasing(t, c.Times)
	completed, ready := c.Charts[0].Series[1], c.Charts[1].Series[1]
	require.Equal(t, "completed", completed.Name)
	text, err := json.Marshal(completed.Values)
	require.NoError(t, err)
	require.JSONEq(t, `[null, 2, 2, null, null, 2]`, string(text))
	text, err = json.Marshal(ready.Values)
	require.NoError(t, err)
	require.JSONEq(t, `[7, 7, 7, null, 7, 7]`, string(text))
	require.Equal(t, "waits the day before –, waits 90 s", c.Charts[2].Now())
	require.Empty(t, pointCharts(nil, spans[0], begin).Rows())
	require.Equal(t, "completed –, produced –, failed –", pointCharts(nil, spans[0], begin).Charts[0].Now())
}

// TestDayBefore: a value has that of 24 hours before behind it, unless nothing was measured then.
func TestDayBefore(t *testing.T) {
	begin := time.Unix(1_800_000_000, 0)
	points := append(minutesFrom(begin, 60, 0, 1, 2, 3), minutesFrom(begin.Add(24*time.Hour), 240, 1, 2, 3, 4, 5, 6, 7)...)
	c := pointCharts(points, spans[2], begin.Add(24*time.Hour+7*time.Minute))
	text, err := json.Marshal(c.Charts[0].Series[0].Values)
	require.NoError(t, err)
	require.Equal(t, "completed the day before", c.Charts[0].Series[0].Name)
	// the first two points, and the gap before today, are within 24 hours, too
	n := len(c.Times)
	require.JSONEq(t, `[1, 1, 1, null, null, null, null]`, string(mustTail(t, text, n, 7)))
}

// mustTail returns the last values of a JSON list.
func mustTail(t *testing.T, text []byte, n, last int) []byte {
	var all []any
	require.NoError(t, json.Unmarshal(text, &all))
	require.Len(t, all, n)
	text, err := json.Marshal(all[n-last:])
	require.NoError(t, err)
	return text
}

// TestDayCharts: each day since the first one has a value, also if nothing has happened.
func TestDayCharts(t *testing.T) {
	day := time.Date(2026, 3, 1, 0, 0, 0, 0, time.UTC)
	c := dayCharts([]codeq.DayTotals{
		{Day: day, Totals: codeq.Totals{Produced: 5, Completed: 4, Retried: 1, Dead: 1}}, {Day: day.AddDate(0, 0, 2), Totals: codeq.Totals{Completed: 1}},
	}, day.AddDate(0, 0, 3).Add(time.Hour))
	require.Len(t, c.Times, 4)
	require.Equal(t, values{4, 0, 1, 0}, c.Charts[0].Series[0].Values)
	require.Equal(t, values{5, 0, 0, 0}, c.Charts[0].Series[1].Values)
	require.Equal(t, values{2, 0, 0, 0}, c.Charts[0].Series[2].Values)
	require.Equal(t, []string{"0", "0", "0"}, c.Rows()[0].Values)
}

// TestChartTable: the table has the newest value, and so many others at even distances.
func TestChartTable(t *testing.T) {
	begin := time.Unix(1_800_000_000, 0)
	at := make([]int, 100)
	for i := range at {
		at[i] = i
	}
	rows := pointCharts(minutesFrom(begin, 60, at...), spans[2], begin.Add(99*time.Minute)).Rows()
	require.Len(t, rows, chartRows)
	require.Equal(t, begin.Add(99*time.Minute).UTC(), rows[0].At)
	require.Equal(t, []string{"–", "1.0/s", "0/s", "0/s", "–", "7", "0", "0", "–", "90 s"}, rows[0].Values)
}

// TestTrouble: a queue is compared with itself.
func TestTrouble(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	waits := func(d time.Duration) row { return row{Counts: codeq.Counts{Ready: 1200}, Oldest: now.Add(-d)} }
	quiet := row{}
	of := troubleOf(&quiet, now, false)
	require.Empty(t, of.Words, "nothing waits")
	r := waits(4 * time.Minute)
	require.Equal(t, "no worker takes its tasks", troubleOf(&r, now, false).String())
	require.Empty(t, troubleOf(&r, now, true).Words, "it is not known what is usual")
	r.normal = normal{wait: 100, watched: usualFor}
	require.Empty(t, troubleOf(&r, now, true).Words, "that is usual")
	r.normal.wait = 2
	require.Equal(t, "behind: the oldest waits 4 min, usually 2.0 s", troubleOf(&r, now, true).String())
	r.normal.failed, r.normal.completed, r.normal.failing = 3, 1, true
	both := troubleOf(&r, now, true)
	require.Equal(t, []string{"behind: the oldest waits 4 min, usually 2.0 s", "75 % of its last attempts failed"}, both.Words)
	r.Paused = true
	paused := troubleOf(&r, now, true)
	require.Contains(t, paused.String(), "paused while 1,200 wait")
	fine := waits(time.Second)
	fine.normal.completed = 10
	require.Negative(t, compareTrouble(&row{Trouble: both}, &fine))
	require.Empty(t, troubleOf(&fine, now, false).Words, "a worker that calls Claim is not listed")
}

// TestSlowFailures: a queue with few attempts that all fail stays in trouble between them, and for
// a while afterwards.
func TestSlowFailures(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	var r row
	inTrouble := func(failed float64) bool {
		r.Failed = failed
		r.normal = r.normal.after(&r, now, 10)
		return len(troubleOf(&r, now, true).Words) > 0
	}
	var told []bool
	for i := range 60 {
		told = append(told, inTrouble(map[bool]float64{true: 0.1}[i%4 == 0]))
	}
	first := slices.Index(told, true)
	require.InDelta(t, 5, first, 4)
	require.NotContains(t, told[first:], false)
	for range 30 {
		require.True(t, inTrouble(100))
	}
	quiet := 1
	for inTrouble(0) {
		quiet++
	}
	require.Equal(t, 12, quiet, "two minutes without a failure")
}

// TestUsual: the average of a short time is that of the time; later, it follows within hours.
func TestUsual(t *testing.T) {
	now := time.Unix(1_800_000_000, 0)
	var n normal
	r := row{Counts: codeq.Counts{Ready: 1}, Oldest: now.Add(-10 * time.Second)}
	for range 60 {
		n = n.after(&r, now, 10)
	}
	require.InDelta(t, 10, n.wait, 0.1)
	require.InDelta(t, 600, n.watched, 0.1)
	for range 24 * 360 {
		n = n.after(&row{}, now, 10)
	}
	require.InDelta(t, 0, n.wait, 0.3)
	require.InDelta(t, usualFor, n.watched, 0.1)
	require.Equal(t, n, n.after(&r, now, 0))
	require.False(t, math.IsNaN(float64(n.failed)))
}

// TestSpark: the line of the last hour begins at the left and ends at the right.
func TestSpark(t *testing.T) {
	require.Nil(t, sparkOf(minutesFrom(time.Unix(0, 0), 0, 1)))
	s := sparkOf([]point{{at: 60}, {at: 120, ready: 5}, {at: 180, ready: 10}})
	require.Equal(t, "M0 19L50 10L100 1", s.D)
	require.Equal(t, "0 to 10 ready in the last hour", s.Text)
}

// TestLimits: a limit names the tasks that it holds back.
func TestLimits(t *testing.T) {
	r := row{Counts: codeq.Counts{Ready: 40, Leased: 3, Blocked: 2}, Held: 1, limits: limits{Concurrency: 4, Rate: 10, ConcurrencyPerKey: 1}}
	r.normal.completed = 9.5
	all := limitsOf(&r)
	require.Equal(t, "40 ready tasks wait for a place", all[0].Holds)
	require.Equal(t, "40 ready tasks wait for the rate", all[1].Holds)
	require.Contains(t, all[2].Holds, "2 blocked tasks")
	r.Counts = codeq.Counts{Leased: 3}
	for _, l := range limitsOf(&r) {
		require.Empty(t, l.Holds, l.Name)
	}
}
