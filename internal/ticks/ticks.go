// Package ticks computes when something that recurs comes next: by a cron expression in a time
// zone, or at an interval. Times are milliseconds since 1970.
package ticks

import (
	"errors"
	"fmt"
	"math"
	"strings"
	"sync"
	"time"

	"github.com/robfig/cron/v3"
)

// Never is the time of a tick that does not come.
const Never = math.MaxUint64

// Sequence is an ascending sequence of ticks.
type Sequence interface {
	// Next returns the first tick later than after, or Never.
	Next(after uint64) uint64
}

// Every ticks at Start + Interval, Start + 2 * Interval, and so on.
type Every struct{ Start, Interval uint64 }

// Next returns the first tick later than after; Never, if there is no such time.
func (e Every) Next(after uint64) uint64 {
	n := uint64(0) // ticks until after
	if after >= e.Start {
		n = (after - e.Start) / e.Interval
	}
	if n >= (Never-e.Start)/e.Interval {
		return Never
	}
	return e.Start + (n+1)*e.Interval
}

var zones sync.Map // *time.Location by name: each takes some kilobytes, and a file has to be read

// Zone returns the time zone of an IANA name; "" is UTC.
func Zone(name string) (*time.Location, error) {
	if loc, ok := zones.Load(name); ok {
		return loc.(*time.Location), nil
	}
	if name == "Local" { // another zone on every machine
		return nil, errors.New("not a name of the IANA")
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
	shown *cron.SpecSchedule // as if what a clock shows were UTC
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
		return nil, err
	}
	shown, ok := parsed.(*cron.SpecSchedule)
	if !ok {
		return nil, fmt.Errorf("%s is an interval", expr)
	}
	for _, field := range []uint64{shown.Minute, shown.Hour, shown.Dom, shown.Month, shown.Dow} {
		if field == 0 { // the parser accepts a lone comma
			return nil, errors.New("a field is empty")
		}
	}
	shown.Location = time.UTC
	return &Cron{shown, zone}, nil
}

// Next returns the first tick later than after; Never, if none comes within five years.
//
// The parser's own Next steps through local time, and loses ticks where a clock is set by half an
// hour or at midnight. So it is called in UTC, for one period with a constant offset of the zone
// after the other.
func (c *Cron) Next(after uint64) uint64 {
	from := int64(after / 1000) // the following is in seconds; ticks are later than from
	for at := from; ; {
		stretch := time.Unix(at, 0).In(c.zone)
		_, offset := stretch.Zone()
		_, end := stretch.ZoneBounds()
		shown := c.shown.Next(time.Unix(from+int64(offset), 0).UTC())
		if shown.IsZero() {
			return Never
		}
		tick := shown.Unix() - int64(offset)
		if end.IsZero() || tick < end.Unix() {
			return uint64(tick) * 1000
		}
		at = end.Unix()
		from = at - 1
	}
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
