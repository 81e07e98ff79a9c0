package recurrence

import (
	"archive/zip"
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
	_ "time/tzdata" // the machine may have none

	"github.com/robfig/cron/v3"
	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"codeq/internal/record"
	"codeq/internal/testkit"
)

func zone(t require.TestingT, name string) *time.Location {
	loc, err := Zone(name)
	require.NoError(t, err)
	return loc
}

func parse(t require.TestingT, expr, zoneName string) *Cron {
	c, err := ParseCron(expr, zone(t, zoneName))
	require.NoError(t, err)
	return c
}

func ms(t require.TestingT, s string) uint64 {
	at, err := time.Parse(time.RFC3339, s)
	require.NoError(t, err)
	return uint64(at.UnixMilli())
}

func TestCron(t *testing.T) {
	for _, c := range []struct {
		name, expr, zone, after string
		want                    []string // by the clock of the zone
	}{
		{
			"the tick itself is over", "0 12 * * *", "UTC", "2026-01-01T12:00:00Z",
			[]string{"2026-01-02T12:00:00Z"},
		},
		{
			"a list, a range, a step", "0,30 9-11/2 * * *", "UTC", "2026-01-01T00:00:00Z",
			[]string{"2026-01-01T09:00:00Z", "2026-01-01T09:30:00Z", "2026-01-01T11:00:00Z", "2026-01-01T11:30:00Z", "2026-01-02T09:00:00Z"},
		},
		{
			"either of two days", "0 0 13 * fri", "UTC", "2026-02-01T00:00:00Z",
			[]string{"2026-02-06T00:00:00Z", "2026-02-13T00:00:00Z", "2026-02-20T00:00:00Z", "2026-02-27T00:00:00Z", "2026-03-06T00:00:00Z", "2026-03-13T00:00:00Z"},
		},
		{
			"a leap day", "0 0 29 2 *", "UTC", "2026-01-01T00:00:00Z",
			[]string{"2028-02-29T00:00:00Z", "2032-02-29T00:00:00Z"},
		},
		{
			"@weekly", "@weekly", "Asia/Kolkata", "2026-01-01T00:00:00Z",
			[]string{"2026-01-04T00:00:00+05:30", "2026-01-11T00:00:00+05:30"},
		},
		{
			"in the gap: not on this day", "30 2 * * *", "Europe/Berlin", "2026-03-28T00:00:00Z",
			[]string{"2026-03-28T02:30:00+01:00", "2026-03-30T02:30:00+02:00"},
		},
		{
			"in the overlap: twice on this day", "30 2 * * *", "Europe/Berlin", "2026-10-24T12:00:00Z",
			[]string{"2026-10-25T02:30:00+02:00", "2026-10-25T02:30:00+01:00", "2026-10-26T02:30:00+01:00"},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			seq := parse(t, c.expr, c.zone)
			at := ms(t, c.after)
			var got []string
			for range c.want {
				at = seq.Next(at)
				got = append(got, time.UnixMilli(int64(at)).In(zone(t, c.zone)).Format(time.RFC3339))
			}
			require.Equal(t, c.want, got)
		})
	}
}

// TestCronShows: around every change of the clock, the ticks are exactly the minutes when a clock
// in the zone matches the expression.
func TestCronShows(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.SampledFrom([]string{
			"UTC", "Europe/Berlin", "America/New_York", "America/Santiago", "Africa/Cairo",
			"Australia/Lord_Howe", "Asia/Kathmandu", "Africa/Casablanca", "Pacific/Apia",
		}).Draw(t, "zone")
		field := func(name string, low, high int) string {
			n := rapid.IntRange(low, high)
			return rapid.OneOf(
				rapid.Just("*"),
				rapid.Map(n, func(n int) string { return fmt.Sprint(n) }),
				rapid.Map(rapid.IntRange(2, 20), func(n int) string { return fmt.Sprint("*/", n) }),
			).Draw(t, name)
		}
		expr := fmt.Sprintf("%s %s %s * %s", field("minute", 0, 59), field("hour", 0, 5), field("day", 1, 31), field("weekday", 0, 6))
		seq := parse(t, expr, name)
		loc := zone(t, name)
		year := rapid.IntRange(2011, 2030).Draw(t, "year")
		_, change := time.Date(year, time.Month(rapid.SampledFrom([]int{2, 8}).Draw(t, "month")), 15, 0, 0, 0, 0, loc).ZoneBounds()
		if change.IsZero() {
			change = time.Date(year, 3, 1, 0, 0, 0, 0, loc)
		}
		from, to := change.Add(-30*time.Hour), change.Add(30*time.Hour)
		at := uint64(from.UnixMilli())
		for minute := from.Add(time.Minute).Truncate(time.Minute); minute.Before(to); minute = minute.Add(time.Minute) {
			if shows(seq.shown, minute.In(loc)) {
				at = seq.Next(at)
				require.Equal(t, minute.UTC(), time.UnixMilli(int64(at)).UTC(), "%q in %s", expr, name)
			}
		}
		require.LessOrEqual(t, uint64(to.UnixMilli()), seq.Next(at), "%q in %s", expr, name)
	})
}

// shows reports whether a clock matches an expression.
func shows(s *cron.SpecSchedule, at time.Time) bool {
	day, weekday := has(s.Dom, at.Day()), has(s.Dow, int(at.Weekday()))
	days := day || weekday
	if s.Dom&star != 0 || s.Dow&star != 0 {
		days = day && weekday
	}
	return days && has(s.Month, int(at.Month())) && has(s.Hour, at.Hour()) && has(s.Minute, at.Minute())
}

// TestCronNeverComes: the zone skips a time on its date each year, as Iran did with this rule.
func TestCronNeverComes(t *testing.T) {
	tehran, err := time.LoadLocationFromTZData("Tehran", posixZone("<+0330>-3:30<+0430>,J79/24,J263/24"))
	require.NoError(t, err)
	for expr, want := range map[string]uint64{"30 0 21 3 *": Never, "30 1 21 3 *": ms(t, "2026-03-21T01:30:00+04:30")} {
		c, err := ParseCron(expr, tehran)
		require.NoError(t, err)
		require.Equal(t, want, c.Next(ms(t, "2026-01-01T00:00:00Z")), expr)
	}
}

// TestCronErrors: an error of an expression names the wrong field, and the allowed values.
func TestCronErrors(t *testing.T) {
	const forms = ", * for all, ranges (1-5), steps (*/2) and lists (1,3)"
	for expr, want := range map[string]string{
		"-1 * * * *":     `the minute is "-1": allowed are 0 to 59` + forms,
		"* 24 * * *":     `the hour is "24": allowed are 0 to 23` + forms,
		"0 0 L * *":      `the day of month is "L": allowed are 1 to 31` + forms,
		"0 0 1 FOO *":    `the month is "FOO": allowed are 1 to 12 or JAN to DEC` + forms,
		"0 0 * * 7":      `the day of week is "7": allowed are 0 to 6 (Sunday is 0) or SUN to SAT` + forms,
		"0 0 * * 5-1":    `the day of week is "5-1": allowed are 0 to 6 (Sunday is 0) or SUN to SAT` + forms,
		"* * * *":        "it has 4 fields instead of five: minute, hour, day of month, month and day of week",
		"0 * * * * *":    "it has 6 fields instead of five: minute, hour, day of month, month and day of week",
		" ":              "it has 0 fields instead of five: minute, hour, day of month, month and day of week",
		"@fortnightly":   `"@fortnightly" is not one of @yearly, @annually, @monthly, @weekly, @daily, @midnight and @hourly`,
		"@every 1h":      "@every 1h is an interval: use Every",
		"@every x":       `"@every x" is not one of @yearly, @annually, @monthly, @weekly, @daily, @midnight and @hourly`,
		"0 0 , * *":      "a field is empty",
		"TZ=UTC * * * *": "the time zone is not part of the expression",
	} {
		_, err := ParseCron(expr, time.UTC)
		require.EqualError(t, err, want, expr)
	}
}

// posixZone returns a file of a zone with a rule and no table: RFC 9636.
func posixZone(rule string) []byte {
	const isUTC, hasRule = "TZif2", "\n"
	header := isUTC + strings.Repeat("\x00", 15) + strings.Repeat("\x00", 4*4) + "\x00\x00\x00\x01" + "\x00\x00\x00\x04"
	block := strings.Repeat("\x00", 6) + "UTC\x00"
	return []byte(header + block + header + block + hasRule + rule + "\n")
}

// TestLastTick: a recurrence has no ticks after the year 9999, because such ticks have no text.
func TestLastTick(t *testing.T) {
	last := ms(t, "9999-12-31T23:59:00Z")
	for _, name := range []string{"UTC", "Europe/Berlin", "Pacific/Kiritimati", "Pacific/Midway"} {
		c := parse(t, "* * * * *", name)
		require.Equal(t, last, c.Next(last-1), name)
		for _, after := range []uint64{last, last + 1, record.LastTime, record.LastTime + 1, 1 << 62, Never - 1, Never} {
			require.Equal(t, uint64(Never), c.Next(after), "%s after %d", name, after)
		}
	}
	require.Equal(t, uint64(record.LastTime), Every{record.LastTime - 10, 5}.Next(record.LastTime-1))
	require.Equal(t, uint64(Never), Every{record.LastTime - 10, 5}.Next(record.LastTime))
	require.Equal(t, uint64(Never), Every{record.LastTime + 1, 5}.Next(0))
}

// zonesOf are the zones of the data that Go embeds (the tree of Go has these data as a file), and
// the zones of the system, if it has some.
type zonesOf struct {
	names []string
	zones []*time.Location
}

var allZones = sync.OnceValues(func() (all zonesOf, err error) {
	root, err := exec.Command("go", "env", "GOROOT").Output()
	if err != nil {
		return all, err
	}
	embedded, err := zip.OpenReader(filepath.Join(strings.TrimSpace(string(root)), "lib", "time", "zoneinfo.zip"))
	if err != nil {
		return all, err
	}
	defer embedded.Close()
	for _, kind := range []struct {
		name  string
		files fs.FS
	}{{"embedded", embedded}, {"system", os.DirFS("/usr/share/zoneinfo")}} {
		same := make(map[string]bool) // files seen before
		err := fs.WalkDir(kind.files, ".", func(path string, d fs.DirEntry, err error) error {
			if path == "." && errors.Is(err, fs.ErrNotExist) {
				return nil
			} else if err != nil || !d.Type().IsRegular() { // a link leads to a file of the tree
				return err
			}
			data, err := fs.ReadFile(kind.files, path)
			if err != nil || !bytes.HasPrefix(data, []byte("TZif")) || same[string(data)] {
				return err
			}
			same[string(data)] = true
			zone, err := time.LoadLocationFromTZData(path, data)
			all.names, all.zones = append(all.names, kind.name+" "+path), append(all.zones, zone)
			return err
		})
		if err != nil {
			return all, err
		}
	}
	return all, nil
})

// TestPeriods: in every fourth zone (-long: in every zone), each period begins at the end of the
// last one, ends after its beginning, and has one offset. The years to 2440 show all: the last rule
// of a zone begins before 2040, and the calendar repeats itself after 400 years. Some zones, and
// all with -long, go on to 9999.
func TestPeriods(t *testing.T) {
	t.Parallel()
	all, err := allZones()
	require.NoError(t, err)
	require.Greater(t, len(all.zones), 300)
	for i, zone := range all.zones {
		if i%testkit.Sized(4, 1) != 0 {
			continue
		}
		reach := int64(record.LastTime / 1000)
		if i%testkit.Sized(32, 1) != 0 {
			reach = time.Date(2440, 1, 1, 0, 0, 0, 0, time.UTC).Unix()
		}
		for at := int64(0); at <= reach; {
			offset, end := period(zone, at)
			if end <= at {
				t.Fatalf("%s: the period at %d ends at %d", all.names[i], at, end)
			}
			for _, within := range []int64{at + (end-at)/3, at + (end-at)/3*2, end - 1} {
				if _, seconds := time.Unix(within, 0).In(zone).Zone(); int64(seconds) != offset {
					t.Fatalf("%s: in the period from %d to %d with offset %d, it is %d at %d", all.names[i], at, end, offset, seconds, within)
				}
			}
			at = end
		}
	}
}

// checkNext: the next tick of an expression is later than after, and the clock of its zone matches
// the expression. No minute before the tick matches: the check covers the days behind after and
// before the tick.
func checkNext(t *testing.T, name string, zone *time.Location, expr string, after uint64) {
	c, err := ParseCron(expr, zone)
	if err != nil {
		return
	}
	next := c.Next(after)
	if next <= after && next != Never {
		t.Fatalf("%q in %s after %d: %d", expr, name, after, next)
	}
	last := min(next, record.LastTime+1)
	none := func(from, to uint64) {
		for at := (from/60_000 + 1) * 60_000; at < to; at += 60_000 {
			if minute := time.UnixMilli(int64(at)).In(zone); shows(c.shown, minute) && minute.Second() == 0 {
				t.Fatalf("%q in %s after %d: %d, and not %v", expr, name, after, next, minute)
			}
		}
	}
	const days = 3 * 24 * 3600 * 1000
	if none(after, min(last, after+days)); next == Never {
		return
	}
	none(max(after, next-days), next)
	if !shows(c.shown, time.UnixMilli(int64(next)).In(zone)) {
		t.Fatalf("%q in %s after %d: %d is not shown", expr, name, after, next)
	}
}

// TestNextInEveryZone: the next tick around the ends of years, and around the begins and ends of
// the periods of a zone.
func TestNextInEveryZone(t *testing.T) {
	t.Parallel()
	all, err := allZones()
	require.NoError(t, err)
	for i, zone := range all.zones {
		if i%testkit.Sized(4, 1) != 0 {
			continue
		}
		at := func(year, day, hour, minute int) uint64 {
			return uint64(time.Date(year, 12, day, hour, minute, 0, 0, time.UTC).UnixMilli())
		}
		checkNext(t, all.names[i], zone, "0 0 1 1 *", at(2028, 31, 12, 0))
		checkNext(t, all.names[i], zone, "0 0 29 2 *", at(2096+400*(i%18), 31, i%24, i%60))
		checkNext(t, all.names[i], zone, "30 2 31 12 *", at(1970+i, 30, i%24, 0))
	}
}

// FuzzCron: the next tick in any zone, from any time on.
func FuzzCron(f *testing.F) {
	all, err := allZones()
	require.NoError(f, err)
	f.Add(uint16(0), "* * * * *", uint64(record.LastTime-1))
	f.Add(uint16(0), "@monthly", uint64(Never-1))
	for i, expr := range []string{"0,30 9-11/2 * jan-mar mon", "@daily", "TZ=", "0 0 30 2 *", "? ? ? ? ?"} {
		f.Add(uint16(i), expr, uint64(1<<40))
	}
	f.Add(uint16(len(all.zones)/2), "0 0 29 2 *", uint64(time.Date(2096, 12, 31, 0, 0, 0, 0, time.UTC).UnixMilli()))
	f.Fuzz(func(t *testing.T, number uint16, expr string, after uint64) {
		i := int(number) % len(all.zones)
		checkNext(t, all.names[i], all.zones[i], expr, after)
	})
}

func TestZone(t *testing.T) {
	require.Equal(t, time.UTC, zone(t, ""))
	require.Equal(t, time.UTC, zone(t, "UTC"))
	require.Same(t, zone(t, "Asia/Tokyo"), zone(t, "Asia/Tokyo"), "it is read once")
	for _, name := range []string{"Local", "Nowhere", "../UTC", "/etc/localtime", "CEST+1"} {
		for range 2 {
			_, err := Zone(name)
			require.Error(t, err, name)
		}
	}
}

func TestParseCronRefuses(t *testing.T) {
	for _, expr := range []string{
		"", " ", "@", "@every 1s", "@every 1h30m", "@fortnightly", "* * * *", "* * * * * *", "60 * * * *", "* 24 * * *",
		"* * 0 * *", "* * * 13 *", "* * * * 7", "5-1 * * * *", "*/0 * * * *", "-1 * * * *", "a * * * *",
		"0 0 30 2 *", "0 0 31 feb,apr,jun,sep,nov *", "0 0 31 4/5 ?", "TZ=UTC * * * * *", "CRON_TZ=UTC * * * * *", "TZ=UTC", "TZ=", "1-2-3 * * * *", "1/2/3 * * * *", ", * * * *", "* , * * *", "* * * * ,,",
	} {
		_, err := ParseCron(expr, time.UTC)
		require.Error(t, err, expr)
	}
}

// TestDatesThatDoNotExist: the error proposes other dates. With any day of the week, a date exists.
func TestDatesThatDoNotExist(t *testing.T) {
	for expr, want := range map[string]string{
		"0 0 31 2 *":      "none of its months has a day 31: name a day up to 29, or a longer month",
		"0 0 30,31 2 *":   "none of its months has a day 30: name a day up to 29, or a longer month",
		"0 0 31 4,6,11 *": "none of its months has a day 31: name a day up to 30, or a longer month",
		"0 0 31 2 mon":    "", "0 0 31 2 */2": "", "0 0 29 2 *": "", "0 0 31 2,3 *": "", "0 0 * 2 *": "", "0 0 */30 2 *": "",
	} {
		if _, err := ParseCron(expr, time.UTC); want == "" {
			require.NoError(t, err, expr)
		} else {
			require.EqualError(t, err, want, expr)
		}
	}
}

func TestEvery(t *testing.T) {
	e := Every{Start: 1000, Interval: 300}
	for _, c := range []struct{ after, want uint64 }{
		{0, 1300}, {999, 1300}, {1000, 1300}, {1299, 1300}, {1300, 1600}, {1301, 1600}, {1900, 2200},
	} {
		require.Equal(t, c.want, e.Next(c.after), "after %d", c.after)
	}
	for _, e := range []Every{{Never, 1}, {5, 1 << 63}, {Never - 10, 6}} {
		require.Equal(t, uint64(Never), e.Next(e.Next(e.Start)), "%+v: there is no time beyond", e)
	}
	require.Equal(t, uint64(Never), Every{0, 1}.Next(Never))
}

// TestLatest: the latest tick is the last one in a loop over all ticks.
func TestLatest(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var s Sequence = Every{Start: rapid.Uint64Range(0, 5000).Draw(t, "start"), Interval: rapid.Uint64Range(1, 3000).Draw(t, "interval")}
		reach := uint64(20_000)
		if rapid.Bool().Draw(t, "cron") {
			s = parse(t, rapid.SampledFrom([]string{"30 2 * * *", "* 3 1 * *", "0 0 29 2 *", "*/7 2,3 * * sun"}).Draw(t, "expr"), "Europe/Berlin")
			reach = 100 * 24 * 3600 * 1000
		}
		first := s.Next(rapid.Uint64Range(0, reach).Draw(t, "after"))
		now := first + rapid.Uint64Range(0, reach).Draw(t, "later")
		want := first
		for next := s.Next(want); next <= now; next = s.Next(want) {
			want = next
		}
		require.Equal(t, want, Latest(s, first, now))
	})
}
