package codeqweb

import (
	"cmp"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"path"
	"slices"
	"strconv"
	"time"

	"codeq"
)

// taskView is the content of the page of a task.
type taskView struct {
	Task            *codeq.TaskInfo
	Hidden          bool
	Why             []sentence
	Payload, Result treeView
	Headers         []namedValue
	Metadata        []namedValue
	Steps           []stepView
	Cursors         []cursorView
	Family          family
	Timeline        []slice
	Attempts        []attemptView
	Progress        int    // percent; negative: not known
	List            string // link to the list that the viewer comes from
	// the possible actions
	Waits, MayCancel, MayRedrive, MayForget bool
}

// cursorView is a cursor of a task.
type cursorView struct {
	Name  string
	Value payloadView
}

// stepView is a finished step with its result.
type stepView struct {
	codeq.StepInfo
	Result payloadView
}

// Child is the task that a step of codeq.Child has produced, or zero.
func (s stepView) Child() (id codeq.ID) {
	if s.Kind == codeq.StepChild {
		id, _ = codeq.ParseID(string(s.StepInfo.Result))
	}
	return id
}

// IsChild reports whether the step has produced a task.
func (s stepView) IsChild() bool { return s.Child() != codeq.ID{} }

// timelineWidth is the width of the timeline of a task, in units of its viewBox.
const timelineWidth = 600

// slice is a part of the timeline of a task, in units of timelineWidth.
type slice struct {
	X, Width     float64
	Class, Title string
}

// stored returns the task of the parameter id, and as the request may see it.
func (d *Dashboard) stored(r *request) (stored, shown *codeq.TaskInfo, err error) {
	id, err := codeq.ParseID(r.params.Get("id"))
	if err != nil {
		return nil, nil, err
	}
	if stored, err = d.q.Get(r.Context(), id); err != nil {
		return nil, nil, err
	}
	return stored, d.shown(r, stored), nil
}

// task returns the task of the parameter id, without the parts that the request may not see.
func (d *Dashboard) task(r *request) (*codeq.TaskInfo, error) {
	_, t, err := d.stored(r)
	return t, err
}

func (d *Dashboard) taskPage(w http.ResponseWriter, r *request) error {
	stored, t, err := d.stored(r)
	if err != nil {
		return err
	}
	v := taskView{Task: t, Hidden: !r.access.Has(Payloads), Progress: -1, List: listOf(r, t)}
	if !v.Hidden {
		v.Payload, v.Result = d.tree(t.Queue, t.Payload), d.tree(t.Queue, t.Result)
		v.Payload.URL, v.Result.URL = link("payload", "id", t.ID), link("payload", "id", t.ID, "of", "result")
		v.Headers, v.Metadata = sorted(t.Headers), sorted(t.Metadata)
		for _, name := range slices.Sorted(maps.Keys(t.Cursors)) {
			v.Cursors = append(v.Cursors, cursorView{name, d.payload(t.Queue, t.Cursors[name])})
		}
		for i, s := range t.Steps {
			p := d.payload(t.Queue, s.Result)
			p.All = link("payload", "id", t.ID, "of", "step", "index", i)
			v.Steps = append(v.Steps, stepView{s, p})
		}
	}
	if p := t.Progress; p.Total > 0 && p.Done >= 0 {
		v.Progress = int(min(100, 100*float64(p.Done)/float64(p.Total)))
	}
	now := time.Now()
	v.Attempts, v.Timeline = attempts(t, v.Steps, now), timeline(t, now)
	if v.Family, err = d.family(r.Context(), stored); err != nil {
		return err
	}
	v.Why = d.why(r.Context(), stored, t, v.Family)
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
	return d.show(w, r, page{Title: "Task " + t.ID.String(), Screen: "task", Loads: []string{"tree.js"}, Refresh: 2, Body: v})
}

// listOf returns the link to the list with its filter that the viewer comes from; by default to the
// tasks with the state of this one.
func listOf(r *request, t *codeq.TaskInfo) string {
	if from, err := url.Parse(r.Referer()); err == nil {
		if screen := path.Base(from.Path); screen == "tasks" || screen == "search" || screen == "dead" {
			return screen + "?" + from.RawQuery
		}
	}
	return link("tasks", "state", t.State)
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
		x, width := timelineWidth*seconds(begin, from)/length, timelineWidth*seconds(from, to)/length
		slices = append(slices, slice{min(x, timelineWidth-2), max(2, width), class, title + ": " + between(from, to)})
	}
	at := begin
	if !t.FirstReady.IsZero() && t.FirstReady.After(begin) {
		add(begin, t.FirstReady, "hold", "not ready yet")
		at = t.FirstReady
	}
	for _, a := range t.History {
		add(at, a.Start, "wait", "waits")
		to := a.End
		if to.IsZero() {
			to = now
		}
		add(a.Start, to, classOf(&a), "attempt "+strconv.Itoa(a.Number)+" "+outcome(a.Outcome))
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
		return "running"
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

// download sends a part of a task as a file that no browser runs.
func (d *Dashboard) download(w http.ResponseWriter, r *request) error {
	t, err := d.task(r)
	if err != nil {
		return err
	}
	var data []byte
	of := cmp.Or(r.params.Get("of"), "payload")
	switch of {
	case "payload":
		data = t.Payload
	case "result":
		data = t.Result
	case "step":
		i, err := intParam(r.params, "index") // several steps may have one name
		if err != nil {
			return err
		}
		if i < 0 || i >= len(t.Steps) {
			return fmt.Errorf("%w: the task has no step with index %d", codeq.ErrNotFound, i)
		}
		data = t.Steps[i].Result
	default:
		return invalid("of", `"payload", "result" or "step"`)
	}
	h := w.Header()
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Content-Disposition", `attachment; filename="`+of+"-"+t.ID.String()+`.bin"`)
	h.Set("Content-Security-Policy", "sandbox; default-src 'none'")
	_, _ = w.Write(data)
	return nil
}
