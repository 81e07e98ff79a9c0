package codeqweb

import (
	"testing"
	"time"
	_ "time/tzdata" // the machine may have none

	"github.com/stretchr/testify/require"

	"codeq"
)

// TestClockNotes: the ticks that a change of clocks skips or doubles are said a week before, as the
// schedule really ticks.
func TestClockNotes(t *testing.T) {
	const (
		spring = "On Sunday 29 March 2026 the clock in Europe/Berlin is set forward, from 02:00 to 03:00: "
		autumn = "On Sunday 25 October 2026 the clock in Europe/Berlin is set back, from 03:00 to 02:00: "
	)
	for _, c := range []struct {
		cron, zone, now string
		want            []string
	}{
		{"30 2 * * *", "Europe/Berlin", "2026-03-25T12:00:00Z", []string{spring + "02:30 does not exist, and does not tick."}},
		{"30 2 * * *", "Europe/Berlin", "2026-03-21T00:59:00Z", nil}, // more than eight days before
		{"30 2 * * *", "Europe/Berlin", "2026-03-29T01:00:00Z", nil}, // after it
		{"0 3 * * *", "Europe/Berlin", "2026-03-25T12:00:00Z", nil},
		{"0 2 * * *", "Europe/Berlin", "2026-03-25T12:00:00Z", []string{spring + "02:00 does not exist, and does not tick."}},
		{"30 2 * * mon", "Europe/Berlin", "2026-03-25T12:00:00Z", nil},
		{"*/20 2 * * *", "Europe/Berlin", "2026-03-25T12:00:00Z", []string{spring + "02:00, 02:20 and 02:40 do not exist, and do not tick."}},
		{"*/5 * * * *", "Europe/Berlin", "2026-03-25T12:00:00Z", []string{spring + "12 ticks from 02:00 to 02:55 do not exist, and do not tick."}},
		{"30 2 * * *", "Europe/Berlin", "2026-10-20T12:00:00Z", []string{autumn + "02:30 comes twice, and ticks twice."}},
		{"0 3 * * *", "Europe/Berlin", "2026-10-20T12:00:00Z", nil},
		{"0,30 2,3 * * *", "Europe/Berlin", "2026-10-20T12:00:00Z", []string{autumn + "02:00 and 02:30 come twice, and tick twice."}},
		{"15 2 * * *", "Australia/Lord_Howe", "2026-10-01T00:00:00Z", []string{
			"On Sunday 4 October 2026 the clock in Australia/Lord_Howe is set forward, from 02:00 to 02:30: 02:15 does not exist, and does not tick."}},
		{"30 2 * * *", "", "2026-03-25T12:00:00Z", nil},
		{"30 2 * * *", "Asia/Tokyo", "2026-03-25T12:00:00Z", nil},
	} {
		now, err := time.Parse(time.RFC3339, c.now)
		require.NoError(t, err)
		s := codeq.ScheduleInfo{Schedule: codeq.Schedule{Cron: c.cron, TimeZone: c.zone}}
		require.Equal(t, c.want, clockNotes(&s, now), "%s in %s at %s", c.cron, c.zone, c.now)
		s.Paused = true
		require.Empty(t, clockNotes(&s, now))
	}

	// This is how the library ticks then.
	zone, err := time.LoadLocation("Europe/Berlin")
	require.NoError(t, err)
	for next, want := range map[time.Time][]string{
		time.Date(2026, 3, 28, 2, 30, 0, 0, zone):  {"28 02:30 CET", "30 02:30 CEST"},
		time.Date(2026, 10, 24, 2, 30, 0, 0, zone): {"24 02:30 CEST", "25 02:30 CEST", "25 02:30 CET"},
	} {
		s := codeq.ScheduleInfo{Schedule: codeq.Schedule{Cron: "30 2 * * *", TimeZone: "Europe/Berlin"}, Next: next}
		for i, at := range s.Upcoming(len(want)) {
			require.Equal(t, want[i], at.In(zone).Format("2 15:04 MST"))
		}
	}
}

// TestInZone: a time is shown by the clock of a zone, and in UTC if the machine does not know it.
func TestInZone(t *testing.T) {
	at := time.Date(2026, 3, 30, 0, 30, 0, 0, time.UTC)
	require.Equal(t, "Mon 30 Mar 2026, 02:30:00 CEST", inZone(at, "Europe/Berlin"))
	require.Equal(t, "Mon 30 Mar 2026, 00:30:00 UTC", inZone(at, ""))
	require.Equal(t, "Mon 30 Mar 2026, 00:30:00 UTC", inZone(at, "Nowhere/Town"))
}
