package codeqweb

import (
	"log/slog"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
)

// TestAttempts: attempts come the newest first, each with the lines and steps of its time.
func TestAttempts(t *testing.T) {
	begin := time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	at := func(second int) time.Time { return begin.Add(time.Duration(second) * time.Second) }
	attempt := func(n, from, to int, how codeq.EventKind) codeq.Attempt {
		return codeq.Attempt{Number: n, Start: at(from), End: at(to), Outcome: how}
	}
	info := &codeq.TaskInfo{
		HistoryDropped: 4,
		History: []codeq.Attempt{
			attempt(1, 10, 12, codeq.EventRetried), attempt(2, 20, 21, codeq.EventSuspended), attempt(7, 30, 33, codeq.EventReleased),
			{Number: 7, Start: at(40), Worker: "w"},
		},
		Logs: []codeq.LogLine{
			{At: at(5), Text: "early"}, {At: at(11), Text: "first"}, {At: at(25), Level: slog.LevelError, Text: "between"}, {At: at(41), Text: "now"},
		},
	}
	steps := []stepView{{StepInfo: codeq.StepInfo{Name: "charge", At: at(10)}}, {StepInfo: codeq.StepInfo{Name: "ship", At: at(40)}}}
	type row struct {
		number int
		class  string
		took   time.Duration
		left   int
		notes  string
	}
	var rows []row
	for _, a := range attempts(info, steps, at(45)) {
		r := row{a.Number, a.Class, a.Took, a.Left, ""}
		for _, n := range a.Notes {
			if n.Step != nil {
				r.notes += n.Step.Name + " "
			} else {
				r.notes += n.Text + " "
			}
		}
		rows = append(rows, r)
		require.Equal(t, a.Number == 0, a.Unknown)
	}
	require.Equal(t, []row{
		{7, "run", 5 * time.Second, 0, "ship now "}, {7, "back", 3 * time.Second, 4, ""}, {2, "hold", time.Second, 0, "between "},
		{1, "bad", 2 * time.Second, 0, "charge first "}, {0, "", 0, 0, "early "},
	}, rows)
	require.Empty(t, attempts(&codeq.TaskInfo{}, nil, begin))
	require.Len(t, attempts(&codeq.TaskInfo{Logs: info.Logs}, nil, begin)[0].Notes, 4)
}
