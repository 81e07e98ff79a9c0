package codeqweb

import (
	"log/slog"
	"slices"
	"strings"
	"time"

	"codeq"
)

// attemptView is an attempt with what its handler has said, the first first.
type attemptView struct {
	codeq.Attempt
	Took    time.Duration
	Class   string // of the timeline
	Left    int    // attempts before it that are left out
	Unknown bool   // no attempt: what belongs to none that is kept
	Notes   []noteView
}

// noteView is a line of the log, or a step.
type noteView struct {
	At    time.Time
	Level slog.Level
	Text  string
	Step  *stepView // nil: a line
}

// foldedText is the size from that on an error is folded.
const foldedText = 160

// Long reports whether the error is folded.
func (a attemptView) Long() bool {
	return len(a.Error) > foldedText || strings.Count(a.Error, "\n") > 2
}

// Bad reports whether a line is about a failure.
func (n noteView) Bad() bool { return n.Step == nil && n.Level >= slog.LevelError }

// attempts returns the attempts, the newest first, each with the log lines and steps from its start
// to that of the next one.
func attempts(t *codeq.TaskInfo, steps []stepView, now time.Time) (views []attemptView) {
	var notes []noteView
	for _, l := range t.Logs {
		notes = append(notes, noteView{At: l.At, Level: l.Level, Text: l.Text})
	}
	for i := range steps {
		notes = append(notes, noteView{At: steps[i].At, Step: &steps[i]})
	}
	slices.SortStableFunc(notes, func(a, b noteView) int { return a.At.Compare(b.At) })
	until := func(end time.Time) (before []noteView) { // zero: all
		n := len(notes)
		if !end.IsZero() {
			n, _ = slices.BinarySearchFunc(notes, end, func(n noteView, end time.Time) int { return n.At.Compare(end) })
		}
		before, notes = notes[:n], notes[n:]
		return before
	}
	for i, a := range t.History {
		if before := until(a.Start); i == 0 && len(before) > 0 {
			views = append(views, attemptView{Unknown: true, Notes: before})
		} else if i > 0 {
			views[len(views)-1].Notes = before
		}
		v := attemptView{Attempt: a, Took: a.End.Sub(a.Start), Class: classOf(&a)}
		if a.End.IsZero() {
			v.Took = now.Sub(a.Start)
		}
		if i == 2 {
			v.Left = t.HistoryDropped
		}
		views = append(views, v)
	}
	if rest := until(time.Time{}); len(views) > 0 {
		views[len(views)-1].Notes = rest
	} else if len(rest) > 0 {
		views = append(views, attemptView{Unknown: true, Notes: rest})
	}
	slices.Reverse(views)
	return views
}

// classOf returns the color of an attempt.
func classOf(a *codeq.Attempt) string {
	switch {
	case a.End.IsZero():
		return "run"
	case a.Outcome == codeq.EventCompleted:
		return "good"
	case a.Outcome == codeq.EventReleased:
		return "back"
	case a.Outcome == codeq.EventSuspended, a.Outcome == codeq.EventUnhandled:
		return "hold"
	}
	return "bad"
}
