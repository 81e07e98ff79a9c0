// Package recurrence computes the next ticks of schedules: by a cron expression in a time zone, or
// at an interval. A [Table] holds the schedules of a shard, and says which one has its turn. Times
// are milliseconds since 1970.
package recurrence

import (
	"errors"
	"fmt"
	"math"
	"math/bits"
	"strings"
	"sync"
	"time"

	"github.com/robfig/cron/v3"

	"codeq/internal/record"
)

// Never is the time of a tick that never comes.
const Never = math.MaxUint64

// Format is time.RFC3339 with the digits of the second that are needed.
const Format = "2006-01-02T15:04:05.999Z07:00"

// Text returns a tick as a text, in UTC.
func Text(tick uint64) string { return time.UnixMilli(int64(tick)).UTC().Format(Format) }

// Sequence is an ascending sequence of ticks.
type Sequence interface {
	// Next returns the first tick later than after, or Never.
	Next(after uint64) uint64
}

// Every ticks at Start + Interval, Start + 2 * Interval, and so on.
type Every struct{ Start, Interval uint64 }

// Next returns the first tick later than after; Never, if none comes before the year 10000.
func (e Every) Next(after uint64) uint64 {
	n := uint64(0) // ticks until after
	if after >= e.Start {
		n = (after - e.Start) / e.Interval
	}
	if e.Start > record.LastTime || n >= (record.LastTime-e.Start)/e.Interval {
		return Never
	}
	return e.Start + (n+1)*e.Interval
}

var zones sync.Map // *time.Location by name: each takes some kilobytes, and reads a file

// Zone returns the time zone of an IANA name; "" is UTC.
func Zone(name string) (*time.Location, error) {
	if loc, ok := zones.Load(name); ok {
		return loc.(*time.Location), nil
	}
	if name == "Local" { // another zone on every machine
		return nil, errors.New("not an IANA name")
	}
	loc, err := time.LoadLocation(name)
	if err != nil {
		return nil, err
	}
	zones.Store(name, loc)
	return loc, nil
}

// Cron ticks at the beginning of each minute at which a clock in its time zone matches the
// expression. Times that the clock skips when it is set forward do not tick; times that it shows
// twice when it is set back tick twice.
type Cron struct {
	shown *cron.SpecSchedule // by the clock; its own zone and second are not used
	zone  *time.Location
}

var parser = cron.NewParser(cron.Minute | cron.Hour | cron.Dom | cron.Month | cron.Dow | cron.Descriptor)

// ParseCron parses an expression of five fields or a descriptor such as @daily.
func ParseCron(expr string, zone *time.Location) (*Cron, error) {
	if strings.Contains(expr, "=") { // the parser takes the part before it as the name of a zone
		return nil, errors.New("the time zone is not part of the expression")
	}
	parsed, err := parser.Parse(expr)
	if err != nil {
		return nil, explained(expr, err)
	}
	shown, ok := parsed.(*cron.SpecSchedule)
	if !ok {
		return nil, fmt.Errorf("%s is an interval: use Every", expr)
	}
	for _, field := range []uint64{shown.Minute, shown.Hour, shown.Dom, shown.Month, shown.Dow} {
		if field == 0 { // the parser accepts a lone comma
			return nil, errors.New("a field is empty")
		}
	}
	if err := checkDates(shown); err != nil {
		return nil, err
	}
	return &Cron{shown, zone}, nil
}

// fields has the fields of an expression, with their allowed values.
var fields = [...]struct{ name, allowed string }{
	{"minute", "0 to 59"}, {"hour", "0 to 23"}, {"day of month", "1 to 31"}, {"month", "1 to 12 or JAN to DEC"},
	{"day of week", "0 to 6 (Sunday is 0) or SUN to SAT"},
}

// explained returns a better error for an expression that the parser refuses with err.
func explained(expr string, err error) error {
	if strings.HasPrefix(expr, "@") {
		return fmt.Errorf("%q is not one of @yearly, @annually, @monthly, @weekly, @daily, @midnight and @hourly", expr)
	}
	given := strings.Fields(expr)
	if len(given) != len(fields) {
		return fmt.Errorf("it has %d fields instead of five: minute, hour, day of month, month and day of week", len(given))
	}
	for i, f := range given {
		alone := []string{"*", "*", "*", "*", "*"}
		alone[i] = f
		if _, err := parser.Parse(strings.Join(alone, " ")); err != nil {
			return fmt.Errorf("the %s is %q: allowed are %s, * for all, ranges (1-5), steps (*/2) and lists (1,3)",
				fields[i].name, f, fields[i].allowed)
		}
	}
	return err
}

// star is the bit of a field that matches everything. It is in one of Dom and Dow if only the other
// one selects days.
const star = 1 << 63

// checkDates refuses an expression that matches no date of any year.
func checkDates(s *cron.SpecSchedule) error {
	if s.Dom&star == 0 && s.Dow&star == 0 { // one that matches is enough
		return nil
	}
	longest := 0 // of the months, in days
	for month := time.January; month <= time.December; month++ {
		if s.Month&(1<<month) != 0 {
			const leap = 2000
			longest = max(longest, time.Date(leap, month+1, 0, 0, 0, 0, 0, time.UTC).Day())
		}
	}
	if first := bits.TrailingZeros64(s.Dom); first > longest {
		return fmt.Errorf("none of its months has a day %d: name a day up to %d, or a longer month", first, longest)
	}
	return nil
}

// searchFor bounds the search for a tick, in seconds. A possible date comes within eight years. A
// time may be skipped when the clock is set forward, but rarely on all of its dates.
const searchFor = 40 * 366 * 24 * 3600

// Next returns the first tick later than after; Never, if none comes within forty years, or before
// the year 10000.
//
// The parser's own Next steps through local time, and loses ticks if a clock is set by half an hour
// or at midnight. So the search goes through the periods with a constant offset, and through the
// dates of each.
func (c *Cron) Next(after uint64) uint64 {
	if after >= record.LastTime {
		return Never
	}
	at := int64(after/1000) + 1 // this and the following are seconds
	last := min(at+searchFor, record.LastTime/1000)
	for at <= last {
		offset, end := period(c.zone, at)
		if shown, ok := c.find(at+offset, min(end, last+1)+offset); ok {
			return uint64(shown-offset) * 1000
		}
		at = end
	}
	return Never
}

// find returns the first matching local time from from until before to, all as if in UTC, in
// seconds. Each step goes forward.
func (c *Cron) find(from, to int64) (shown int64, ok bool) {
	const minute = 60
	t := time.Unix(from+minute-1, 0).UTC().Truncate(time.Minute)
	for t.Unix() < to {
		year, month, day := t.Date()
		switch {
		case !has(c.shown.Month, int(month)):
			t = time.Date(year, month+1, 1, 0, 0, 0, 0, time.UTC)
		case !hasDay(c.shown, t):
			t = time.Date(year, month, day+1, 0, 0, 0, 0, time.UTC)
		case !has(c.shown.Hour, t.Hour()):
			t = time.Date(year, month, day, t.Hour()+1, 0, 0, 0, time.UTC)
		case !has(c.shown.Minute, t.Minute()):
			t = t.Add(time.Minute)
		default:
			return t.Unix(), true
		}
	}
	return 0, false
}

func has(field uint64, n int) bool { return field&(1<<n) != 0 }

// hasDay reports whether the day of t matches. One of the two fields is enough, unless the other
// one is a star.
func hasDay(s *cron.SpecSchedule, t time.Time) bool {
	day, weekday := has(s.Dom, t.Day()), has(s.Dow, int(t.Weekday()))
	if s.Dom&star != 0 || s.Dow&star != 0 {
		return day && weekday
	}
	return day || weekday
}

// period returns the offset of a zone from UTC at a time, and the end of that offset; all in
// seconds. The end is later than at, and not after the year of at in UTC: if a zone has rules in
// place of a table, package time computes them for such a year, and ZoneBounds takes each year for
// 365 days, so that its end may be past on 31 December.
func period(zone *time.Location, at int64) (offset, end int64) {
	t := time.Unix(at, 0).In(zone)
	_, seconds := t.Zone()
	end = time.Date(t.UTC().Year()+1, time.January, 1, 0, 0, 0, 0, time.UTC).Unix()
	if _, change := t.ZoneBounds(); change.After(t) {
		end = min(end, change.Unix())
	}
	return int64(seconds), end
}

// Latest returns the last tick of s that is not later than now.
// REQUIRES: first is a tick, and not later than now.
func Latest(s Sequence, first, now uint64) uint64 {
	low, high := first, now // low is a tick, and none is later than high
	for low < high {
		middle := low + (high-low)/2
		if tick := s.Next(middle); tick <= now {
			low = tick
		} else {
			high = middle
		}
	}
	return low
}
