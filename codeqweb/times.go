package codeqweb

import (
	"net/url"
	"time"
)

// Pages have times in UTC. Where its script runs, a page shows them in the viewer's zone, and sends
// the times of its fields in RFC 3339: assets/times.js.

// exact formats a time in full, in UTC.
func exact(t time.Time) string {
	if t.IsZero() {
		return "no time"
	}
	return t.UTC().Format("2006-01-02 15:04:05.000 MST")
}

// machine formats a time for the datetime attribute.
func machine(t time.Time) string { return t.UTC().Format(time.RFC3339Nano) }

// fieldTime formats a time for a field of a form, in UTC; zero: "".
func fieldTime(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return t.UTC().Format("2006-01-02T15:04:05.999")
}

// inZone formats a time by the clock of a zone; "": UTC, as for one that this machine does not
// know.
func inZone(t time.Time, zone string) string {
	loc, err := time.LoadLocation(zone)
	if err != nil {
		loc = time.UTC
	}
	return t.In(loc).Format("Mon 2 Jan 2006, 15:04:05 MST")
}

// timeParam reads a time: in RFC 3339, or in the format of a form's field, in UTC. Zero: it is
// empty.
func timeParam(p url.Values, name string) (time.Time, error) {
	text := p.Get(name)
	if text == "" {
		return time.Time{}, nil
	}
	if at, err := time.Parse(time.RFC3339Nano, text); err == nil {
		return inUTC(name, at)
	}
	for _, form := range []string{"2006-01-02T15:04", "2006-01-02T15:04:05", "2006-01-02 15:04", "2006-01-02 15:04:05", "2006-01-02"} {
		if at, err := time.Parse(form, text); err == nil {
			return inUTC(name, at)
		}
	}
	return time.Time{}, invalid(name, "a time in RFC 3339")
}

// inUTC returns a time in UTC, and refuses one that JSON could not show there.
func inUTC(name string, at time.Time) (time.Time, error) {
	at = at.UTC()
	if at.Year() < 0 || at.Year() > 9999 {
		return at, invalid(name, "a time of the years 0 to 9999 in UTC")
	}
	return at, nil
}

// runAtParam reads the time of a task. Zero: it is empty, which means now; a written year 1 is a
// mistake.
func runAtParam(p url.Values) (time.Time, error) {
	const name = "at"
	at, err := timeParam(p, name)
	if err == nil && p.Get(name) != "" && at.Year() < 1970 {
		err = invalid(name, "a time of the years 1970 to 9999 in UTC")
	}
	return at, err
}
