package recurrence

import (
	"cmp"
	"fmt"
	"time"

	"codeq/internal/base"
	"codeq/internal/keys"
	"codeq/internal/record"
)

// Of returns when a stored schedule ticks, or a *base.Invalid.
func Of(v *keys.ScheduleValue) (Sequence, error) {
	if v.Every != 0 {
		return Every{Start: v.Start, Interval: v.Every}, nil
	}
	loc, err := Zone(v.TimeZone)
	if err != nil {
		return nil, base.NewInvalid("Schedule.TimeZone", base.Shortly(v.TimeZone), "an IANA name that this machine knows, such as Europe/Berlin; package time/tzdata has all")
	}
	times, err := ParseCron(v.Cron, loc)
	if err != nil {
		return nil, base.NewInvalid("Schedule.Cron", v.Cron, fmt.Sprintf("a cron expression: %v", err))
	}
	return times, nil
}

// Upcoming returns the next n ticks of a schedule, whose Start is one, from that on: fewer if there
// are no more, and none if it is not known when it ticks.
func Upcoming(v *keys.ScheduleValue, n int) (ticks []uint64) {
	all, err := Of(v)
	if err != nil {
		return nil
	}
	for tick := v.Start; len(ticks) < n && tick != Never; tick = all.Next(tick) {
		ticks = append(ticks, tick)
	}
	return ticks
}

const (
	minEvery  = 10 * time.Millisecond
	maxJitter = 24 * time.Hour
	maxCron   = 1024 // bytes
)

// Check returns when a new schedule ticks, or a *base.Invalid.
func Check(cron, zone string, every, jitter time.Duration, now uint64) (Sequence, error) {
	switch {
	case (cron == "") == (every == 0):
		return nil, base.NewInvalid("Schedule", fmt.Sprintf("Cron %q, Every %v", cron, every), "one of Cron and Every")
	case every != 0 && every < minEvery:
		return nil, base.NewInvalid("Schedule.Every", every, fmt.Sprint(minEvery, " or more"))
	case jitter < 0 || jitter > maxJitter:
		return nil, base.NewInvalid("Schedule.Jitter", jitter, fmt.Sprint("0 to ", maxJitter))
	case every != 0 && zone != "":
		return nil, base.NewInvalid("Schedule.TimeZone", zone, "none, with Every")
	case len(cron) > maxCron:
		return nil, base.NewInvalid("Schedule.Cron", fmt.Sprintf("%d bytes", len(cron)), fmt.Sprintf("at most %d bytes", maxCron))
	}
	times, err := Of(&keys.ScheduleValue{Cron: cron, TimeZone: zone, Start: now, Every: record.Millis(every)})
	switch {
	case err != nil || times.Next(now) != Never:
		return times, err
	case every != 0:
		return nil, base.NewInvalid("Schedule.Every", every, "an interval that ends before the year 10000")
	}
	return nil, base.NewInvalid("Schedule.Cron", cron, fmt.Sprintf("a time that clocks in %s show within forty years, "+
		"and do not skip each time; name another time of the day", cmp.Or(zone, "UTC")))
}
