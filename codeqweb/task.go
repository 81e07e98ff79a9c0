package codeqweb

import (
	"maps"
	"net/http"
	"slices"
	"strconv"
	"time"

	"codeq"
)

// taskView is the content of the page of a task.
type taskView struct {
	Task            *codeq.TaskInfo
	Hidden          bool
	Payload, Result payloadView
	Headers         []namedValue
	Metadata        []namedValue
	Steps           []stepView
	Family          family
	Timeline        []slice
	Attempts        []attemptView
	Progress        int // percent; negative: not known
	// the possible actions
	Waits, MayCancel, MayRedrive, MayForget bool
}

// attemptView is an attempt with its duration.
type attemptView struct {
	codeq.Attempt
	Took    time.Duration
	Running bool
}

// stepView is a finished step with its result.
type stepView struct {
	codeq.StepInfo
	Result payloadView
}

// slice is a part of the timeline of a task, in units of chartWidth.
type slice struct {
	X, Width     float64
	Class, Title string
}

// task returns the task of the parameter id, without the parts that the request may not see.
func (d *Dashboard) task(r *request) (*codeq.TaskInfo, error) {
	id, err := codeq.ParseID(r.params.Get("id"))
	if err != nil {
		return nil, err
	}
	t, err := d.q.Get(r.Context(), id)
	if err != nil {
		return nil, err
	}
	return d.shown(r, t), nil
}

func (d *Dashboard) taskPage(w http.ResponseWriter, r *request) error {
	t, err := d.task(r)
	if err != nil {
		return err
	}
	v := taskView{Task: t, Hidden: !r.access.Has(Payloads), Progress: -1}
	if !v.Hidden {
		v.Payload, v.Result = d.payload(t.Queue, t.Payload), d.payload(t.Queue, t.Result)
		v.Headers, v.Metadata = sorted(t.Headers), sorted(t.Metadata)
		for _, s := range t.Steps {
			v.Steps = append(v.Steps, stepView{s, d.payload(t.Queue, s.Result)})
		}
	}
	if p := t.Progress; p.Total > 0 && p.Done >= 0 {
		v.Progress = int(min(100, 100*float64(p.Done)/float64(p.Total)))
	}
	now := time.Now()
	for _, a := range t.History {
		view := attemptView{Attempt: a, Running: a.End.IsZero(), Took: a.End.Sub(a.Start)}
		if view.Running {
			view.Took = now.Sub(a.Start)
		}
		v.Attempts = append(v.Attempts, view)
	}
	v.Timeline = timeline(t, now)
	if v.Family, err = d.family(r.Context(), t); err != nil {
		return err
	}
	switch t.State {
	case codeq.Ready, codeq.Scheduled, codeq.Blocked:
		v.Waits, v.MayCancel = true, true
	case codeq.Leased:
		v.MayCancel = true
	case codeq.Dead:
		v.MayCancel, v.MayRedrive, v.MayForget = true, true, true
	case codeq.Done, codeq.Canceled:
		v.MayForget = true
	}
	return d.show(w, r, page{Title: "Task " + t.ID.String(), Screen: "task", Refresh: 2, Body: v})
}

func sorted(m map[string]string) (list []namedValue) {
	for _, name := range slices.Sorted(maps.Keys(m)) {
		list = append(list, namedValue{name, m[name]})
	}
	return list
}

// firstStart returns the start of the first known attempt, or zero.
func firstStart(t *codeq.TaskInfo) (at time.Time) {
	if len(t.History) > 0 {
		at = t.History[0].Start
	}
	return at
}

// timeline draws the waiting times and attempts of a task.
func timeline(t *codeq.TaskInfo, now time.Time) (slices []slice) {
	begin, end := t.ID.Time(), now
	for _, at := range []time.Time{t.FirstReady, firstStart(t)} { // the ID's clock may be ahead
		if !at.IsZero() {
			begin = earliest(begin, at)
		}
	}
	switch t.State {
	case codeq.Ready, codeq.Blocked, codeq.Leased: // until now
	case codeq.Dead, codeq.Done, codeq.Canceled:
		end = t.At
	case codeq.Scheduled:
		if t.At.After(now) {
			end = t.At
		}
	}
	length := seconds(begin, end)
	if length <= 0 {
		return nil
	}
	add := func(from, to time.Time, class, title string) {
		from, to = latest(from, begin), earliest(to, end)
		if !to.After(from) && class == "wait" {
			return
		}
		x, width := chartWidth*seconds(begin, from)/length, chartWidth*seconds(from, to)/length
		slices = append(slices, slice{min(x, chartWidth-2), max(2, width), class, title + ": " + between(from, to)})
	}
	at := begin
	if !t.FirstReady.IsZero() && t.FirstReady.After(begin) {
		add(begin, t.FirstReady, "hold", "not ready yet")
		at = t.FirstReady
	}
	for _, a := range t.History {
		add(at, a.Start, "wait", "waits")
		to, class := a.End, "bad"
		switch {
		case a.End.IsZero():
			to, class = now, "run"
		case a.Outcome == codeq.EventCompleted:
			class = "good"
		case a.Outcome == codeq.EventReleased:
			class = "back"
		case a.Outcome == codeq.EventSuspended:
			class = "hold"
		}
		add(a.Start, to, class, "attempt "+strconv.Itoa(a.Number)+" "+outcome(a.Outcome))
		at = to
	}
	add(at, end, "wait", "waits")
	return slices
}

// seconds returns the seconds between two times, also if they do not fit a time.Duration.
func seconds(from, to time.Time) float64 {
	return float64(to.Unix()-from.Unix()) + float64(to.Nanosecond()-from.Nanosecond())/1e9
}

func outcome(k codeq.EventKind) string {
	if k == 0 {
		return "goes on"
	}
	return k.String()
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

func earliest(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}

// download sends a payload or a result as a file that no browser runs.
func (d *Dashboard) download(w http.ResponseWriter, r *request) error {
	t, err := d.task(r)
	if err != nil {
		return err
	}
	data, name := t.Payload, "payload-"
	if r.params.Get("of") == "result" {
		data, name = t.Result, "result-"
	}
	h := w.Header()
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Content-Disposition", `attachment; filename="`+name+t.ID.String()+`.bin"`)
	h.Set("Content-Security-Policy", "sandbox; default-src 'none'")
	_, _ = w.Write(data)
	return nil
}
