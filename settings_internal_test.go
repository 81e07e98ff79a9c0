package codeq

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/call"
	"codeq/internal/keys"
)

// TestRefusedSettings: settings that another process or node has stored, but this one does not
// allow, are refused by an InvalidError.
func TestRefusedSettings(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		value := keys.SettingsValue{Version: 1, JSON: []byte(`{"Concurrency":-1}`)}.Append(nil)
		for _, op := range []request{
			rule(callAdopt, &call.Adopt{Queue: "a", Value: value}),
			rule(callConfigure, &call.Configure{Queue: "a", Value: value}),
		} {
			_, err := q.do(context.Background(), 0, op)
			var invalid *InvalidError
			require.ErrorAs(t, err, &invalid)
			require.ErrorIs(t, err, ErrInvalid)
			require.Equal(t, "Settings.Concurrency", invalid.Field)
		}
		_, err := q.do(context.Background(), 0, rule(callAdopt, &call.Adopt{Queue: "a", Value: value}))
		require.ErrorContains(t, err, `queue "a"`)
	})
}

// TestSchedulesInParts: one visit of the owner copies a part of the schedules, bounded by number
// and by bytes.
func TestSchedulesInParts(t *testing.T) {
	t.Parallel()
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		set := func(s Schedule) { require.NoError(t, q.SetSchedule(t.Context(), s)) }
		var names []string
		for i := range 2 * call.SchedulesStep {
			names = append(names, fmt.Sprintf("s%04d", i))
			set(Schedule{Name: names[i], Every: time.Hour, Task: Task{Queue: "a"}})
		}
		for i := range 6 {
			names = append(names, fmt.Sprint("t", i))
			set(Schedule{Name: fmt.Sprint("t", i), Every: time.Hour, Task: Task{Queue: "a", Payload: make([]byte, call.SchedulesBytes/2)}})
		}
		var parts []int
		part := new(schedulesPart)
		op := rule(callSchedules, part)
		for part.More = true; part.More; part.Infos = nil {
			require.NoError(t, q.ask(context.Background(), 0, op))
			parts = append(parts, len(part.Infos))
		}
		require.Equal(t, []int{call.SchedulesStep, call.SchedulesStep, 2, 2, 2}, parts)
		all, err := q.Schedules(context.Background())
		require.NoError(t, err)
		var got []string
		for _, s := range all {
			got = append(got, s.Name)
		}
		require.Equal(t, names, got)
	})
}
