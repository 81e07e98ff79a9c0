package main

import (
	"fmt"
	"maps"
	"slices"

	"codeq"
)

// history describes the attempts of a task, with the messages of its handlers.
func history(a *app, t *codeq.TaskInfo) []field {
	fields := []field{{"first ready", a.time(t.FirstReady)}}
	for i, try := range t.History {
		if i == 2 && t.HistoryDropped > 0 {
			fields = append(fields, field{"attempts left out", t.HistoryDropped})
		}
		text := a.time(try.Start)
		if try.End.IsZero() {
			text += ", goes on"
		} else {
			text += fmt.Sprintf(", %s after %s", try.Outcome, short(try.End.Sub(try.Start)))
		}
		if try.Worker != "" {
			text += ", by " + try.Worker
		}
		if try.Error != "" {
			text += ": " + try.Error
		}
		fields = append(fields, field{fmt.Sprintf("attempt %d", try.Number), text})
	}
	if p := t.Progress; !p.At.IsZero() {
		fields = append(fields, field{"progress", progressText(p) + ", at " + a.time(p.At)})
	}
	for _, name := range slices.Sorted(maps.Keys(t.Metadata)) {
		fields = append(fields, field{"metadata " + safe(name), t.Metadata[name]})
	}
	return fields
}

// logs describes what the handlers of a task have logged.
func logs(a *app, t *codeq.TaskInfo) (fields []field) {
	for i, l := range t.Logs {
		text := fmt.Sprintf("%s, attempt %d, %s: %s", a.time(l.At), l.Attempt, l.Level, l.Text)
		fields = append(fields, field{fmt.Sprintf("log %d", i+1), text})
	}
	return fields
}

func progressText(p codeq.Progress) string {
	text := fmt.Sprintf("%d of %d", p.Done, p.Total)
	if p.Note != "" {
		text += ": " + p.Note
	}
	return text
}

// steps describes the finished steps of a task, and its cursors; content is the text of a result.
func steps(a *app, t *codeq.TaskInfo, content func([]byte) string) (fields []field) {
	for i, s := range t.Steps {
		text := s.Name + ", " + a.time(s.At)
		switch {
		case s.Kind == codeq.StepSleep:
			text += ", sleeps"
		case s.Kind == codeq.StepNoSignal:
			text += ", no signal"
		case len(s.Result) > 0:
			text += ": " + content(s.Result)
		}
		fields = append(fields, field{fmt.Sprintf("step %d", i+1), text})
	}
	for _, name := range slices.Sorted(maps.Keys(t.Cursors)) {
		fields = append(fields, field{"cursor " + safe(name), content(t.Cursors[name])})
	}
	return fields
}
