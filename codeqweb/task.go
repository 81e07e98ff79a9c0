package codeqweb

import (
	"context"
	"errors"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"time"

	"codeq"
)

// The family of a task as it is drawn and listed.
const (
	familyDrawn  = 12     // parents and children at the most
	parentsRead  = 100    // of Task.After
	childrenRead = 10_000 // blocked tasks that are read to find children
	childrenMax  = 100
)

// relative is a task that is bound to another one.
type relative struct {
	ID    codeq.ID
	Task  *codeq.TaskInfo // nil: it has ended and is not kept
	State string
	Queue string
}

// family are the parents and the live children of a task.
type family struct {
	Parents, Children []relative
	MoreParents       int  // that are not in Parents
	MoreChildren      bool // not all blocked tasks were looked at, or there are too many
	Drawing           *drawing
}

// drawing is the graph of a family: boxes in three columns, and lines between them.
type drawing struct {
	Width, Height int
	Boxes         []box
	Edges         []edge
}

type box struct {
	X, Y, Width, Height int
	URL                 string // "": the task itself
	Line1, Line2        string
	State, Title        string
}

type edge struct{ X1, Y1, X2, Y2 int }

// taskView is what the page of a task shows.
type taskView struct {
	Task            *codeq.TaskInfo
	Hidden          bool
	Payload, Result payloadView
	Headers         []namedValue
	Metadata        []namedValue
	Family          family
	Timeline        []slice
	Attempts        []attemptView
	Progress        int // percent; negative: not known
	// what may be done to it
	Waits, MayCancel, MayRedrive, MayForget bool
}

// attemptView is an attempt, with how long it took.
type attemptView struct {
	codeq.Attempt
	Took    time.Duration
	Running bool
}

// slice is a part of the drawn life of a task, in units of chartWidth.
type slice struct {
	X, Width     float64
	Class, Title string
}

func (d *Dashboard) taskPage(w http.ResponseWriter, r *request) error {
	id, err := codeq.ParseID(r.params.Get("id"))
	if err != nil {
		return err
	}
	ctx := r.Context()
	t, err := d.q.Get(ctx, id)
	if err != nil {
		return err
	}
	t = d.shown(r, t)
	v := taskView{Task: t, Hidden: !r.access.Has(Payloads), Progress: -1}
	if !v.Hidden {
		v.Payload, v.Result = d.payload(t.Queue, t.Payload), d.payload(t.Queue, t.Result)
		v.Headers, v.Metadata = sorted(t.Headers), sorted(t.Metadata)
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
	if v.Family, err = d.family(ctx, t); err != nil {
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
	return d.show(w, r, page{Title: "Task " + id.String(), Screen: "task", Refresh: 2, Body: v})
}

func sorted(m map[string]string) (list []namedValue) {
	for _, name := range slices.Sorted(maps.Keys(m)) {
		list = append(list, namedValue{name, m[name]})
	}
	return list
}

// timeline draws the life of a task: how it has waited, and its attempts.
func timeline(t *codeq.TaskInfo, now time.Time) (slices []slice) {
	begin, end := t.ID.Time(), now
	switch t.State {
	case codeq.Dead, codeq.Done, codeq.Canceled:
		end = t.At
	case codeq.Scheduled:
		if t.At.After(now) {
			end = t.At
		}
	}
	length := end.Sub(begin)
	if length <= 0 {
		return nil
	}
	add := func(from, to time.Time, class, title string) {
		from, to = latest(from, begin), earliest(to, end)
		if !to.After(from) && class == "wait" {
			return
		}
		x, width := chartWidth*float64(from.Sub(begin))/float64(length), chartWidth*float64(to.Sub(from))/float64(length)
		slices = append(slices, slice{min(x, chartWidth-2), max(2, width), class, title + ": " + span(to.Sub(from))})
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
		}
		add(a.Start, to, class, "attempt "+strconv.Itoa(a.Number)+" "+outcome(a.Outcome))
		at = to
	}
	add(at, end, "wait", "waits")
	return slices
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

// childList is what was found of the children of a task.
type childList struct {
	Tasks   []*codeq.TaskInfo
	Scanned int
	More    bool
}

// children finds the tasks that wait for a task. Nothing lists them: blocked tasks are read, up to
// a bound.
func (d *Dashboard) children(ctx context.Context, id codeq.ID) (c childList, err error) {
	opts := codeq.PageOptions{TaskFilter: codeq.TaskFilter{States: []codeq.State{codeq.Blocked}}, NoPayload: true, Limit: codeq.MaxPage}
	for {
		tasks, err := d.q.ListPage(ctx, opts)
		if err != nil {
			return c, err
		}
		c.Scanned += tasks.Scanned
		for _, t := range tasks.Tasks {
			if !slices.Contains(t.After, id) {
				continue
			}
			if len(c.Tasks) == childrenMax {
				c.More = true
				return c, nil
			}
			c.Tasks = append(c.Tasks, t)
		}
		if opts.Cursor = tasks.Next; opts.Cursor == "" {
			return c, nil
		}
		if c.Scanned >= childrenRead {
			c.More = true
			return c, nil
		}
	}
}

// family finds the relatives of a task.
func (d *Dashboard) family(ctx context.Context, t *codeq.TaskInfo) (f family, err error) {
	for i, id := range t.After {
		if i == parentsRead {
			f.MoreParents = len(t.After) - parentsRead
			break
		}
		parent, err := d.q.Get(ctx, id)
		if err != nil && !errors.Is(err, codeq.ErrNotFound) {
			return f, err
		}
		f.Parents = append(f.Parents, relativeOf(id, parent))
	}
	switch t.State {
	case codeq.Done, codeq.Canceled: // nobody waits for it any more
	default:
		c, err := d.children(ctx, t.ID)
		if err != nil {
			return f, err
		}
		f.MoreChildren = c.More
		for _, child := range c.Tasks {
			f.Children = append(f.Children, relativeOf(child.ID, child))
		}
	}
	if len(f.Parents)+len(f.Children) > 0 {
		f.Drawing = draw(t, f)
	}
	return f, nil
}

func relativeOf(id codeq.ID, t *codeq.TaskInfo) relative {
	if t == nil {
		return relative{ID: id, State: "gone"}
	}
	return relative{id, t, t.State.String(), t.Queue}
}

// draw draws a family: parents at the left, children at the right.
func draw(t *codeq.TaskInfo, f family) *drawing {
	const width, height, gap, column = 200, 40, 12, 260
	parents, children := f.Parents[:min(len(f.Parents), familyDrawn)], f.Children[:min(len(f.Children), familyDrawn)]
	rows := max(len(parents), len(children), 1)
	g := &drawing{Width: 2*column + width + 2, Height: rows*(height+gap) - gap + 2}
	top := func(i, of int) int { return 1 + (g.Height-2-(of*(height+gap)-gap))/2 + i*(height+gap) }
	put := func(r relative, col, i, of int, link string) box {
		b := box{
			X: 1 + col*column, Y: top(i, of), Width: width, Height: height, URL: link, State: r.State,
			Line1: clip(visible(r.Queue), 20), Line2: "…" + r.ID.String()[24:] + " " + r.State, Title: r.Queue + " " + r.ID.String() + " " + r.State,
		}
		if r.Task == nil {
			b.Line1 = "not kept"
		}
		g.Boxes = append(g.Boxes, b)
		return b
	}
	self := put(relativeOf(t.ID, t), 1, 0, 1, "")
	for i, r := range parents {
		b := put(r, 0, i, len(parents), link("task", "id", r.ID))
		g.Edges = append(g.Edges, edge{b.X + width, b.Y + height/2, self.X, self.Y + height/2})
	}
	for i, r := range children {
		b := put(r, 2, i, len(children), link("task", "id", r.ID))
		g.Edges = append(g.Edges, edge{self.X + width, self.Y + height/2, b.X, b.Y + height/2})
	}
	return g
}

// download sends a payload or a result as a file, which no browser runs.
func (d *Dashboard) download(w http.ResponseWriter, r *request) error {
	id, err := codeq.ParseID(r.params.Get("id"))
	if err != nil {
		return err
	}
	t, err := d.q.Get(r.Context(), id)
	if err != nil {
		return err
	}
	t = d.shown(r, t)
	data, name := t.Payload, "payload-"
	if r.params.Get("of") == "result" {
		data, name = t.Result, "result-"
	}
	h := w.Header()
	h.Set("Content-Type", "application/octet-stream")
	h.Set("Content-Disposition", `attachment; filename="`+name+id.String()+`.bin"`)
	h.Set("Content-Security-Policy", "sandbox; default-src 'none'")
	_, _ = w.Write(data)
	return nil
}
