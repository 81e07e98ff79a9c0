package codeqweb

import (
	"fmt"
	"strings"
	"time"

	"codeq"
)

const (
	changeAhead = 8 * 24 * time.Hour // how far changes of clocks are said before
	changeTicks = 24 * 60            // at most, of one change
	changeNamed = 4                  // ticks named one by one
)

// clockNotes says which ticks of a schedule the next changes of its clock skip or double.
func clockNotes(s *codeq.ScheduleInfo, now time.Time) (notes []string) {
	if s.Cron == "" || s.TimeZone == "" || s.Paused || s.LastError != "" {
		return nil
	}
	zone, err := time.LoadLocation(s.TimeZone)
	if err != nil {
		return nil
	}
	for at := now; ; {
		_, change := at.In(zone).ZoneBounds()
		if !change.After(at) || change.After(now.Add(changeAhead)) {
			return notes
		}
		if note := changeNote(s, change, zone); note != "" {
			notes = append(notes, note)
		}
		at = change
	}
}

// changeNote says which ticks a change of the clock skips or doubles; "": none.
func changeNote(s *codeq.ScheduleInfo, change time.Time, zone *time.Location) string {
	before, after := shows(change.Add(-time.Second), zone).Add(time.Second), shows(change, zone)
	from, to := before, after // the local times that it skips
	if after.Before(before) { // the local times that come twice
		from, to = after, before
	}
	ticks := cronTicks(s.Cron, from, to)
	if len(ticks) == 0 {
		return ""
	}
	const clock = "15:04"
	var named []string
	for _, t := range ticks[:min(len(ticks), changeNamed)] {
		named = append(named, t.Format(clock))
	}
	which, one := "", len(ticks) == 1
	switch {
	case one:
		which = named[0]
	case len(ticks) <= changeNamed:
		which = strings.Join(named[:len(named)-1], ", ") + " and " + named[len(named)-1]
	default:
		which = fmt.Sprintf("%d ticks from %s to %s", len(ticks), named[0], ticks[len(ticks)-1].Format(clock))
	}
	direction, what := "forward", "do not exist, and do not tick"
	switch {
	case after.Before(before) && one:
		direction, what = "back", "comes twice, and ticks twice"
	case after.Before(before):
		direction, what = "back", "come twice, and tick twice"
	case one:
		what = "does not exist, and does not tick"
	}
	return fmt.Sprintf("On %s the clock in %s is set %s, from %s to %s: %s %s.",
		before.Format("Monday 2 January 2006"), s.TimeZone, direction, before.Format(clock), after.Format(clock), which, what)
}

// shows returns the local time of a zone at a time, as if it were in UTC.
func shows(t time.Time, zone *time.Location) time.Time {
	_, offset := t.In(zone).Zone()
	return t.UTC().Add(time.Duration(offset) * time.Second)
}

// cronTicks returns the times that match a cron expression, from one time until before another, of
// a clock that is never set.
func cronTicks(cron string, from, to time.Time) []time.Time {
	s := codeq.ScheduleInfo{Schedule: codeq.Schedule{Cron: cron, TimeZone: "UTC"}, Next: from.Add(-time.Millisecond)}
	ticks := s.Upcoming(1 + changeTicks)
	for i, t := range ticks {
		if !t.Before(to) {
			ticks = ticks[:i]
			break
		}
	}
	return ticks[min(1, len(ticks)):] // the first one is Next
}
