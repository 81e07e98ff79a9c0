package codeqweb

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"time"

	"codeq"
)

// The bounds of the groups on a page.
const (
	groupsMax     = 200
	lookUps       = 50  // dead letters looked up by the kind of their error, for Options.Redact
	restQueues    = 4   // queues with most of the rest, to look for kinds among their newest tasks
	restTasks     = 250 // of each
	restKinds     = 20  // shown
	otherErrors   = "(other errors)"
	redactedError = "(redacted)"
)

// deadDays is for how many days a group has counts.
const deadDays = len(codeq.DeadKind{}.Days)

// deadGroup has the dead letters with the same error except for numbers, identifiers and quoted
// values, of all dead letters that there are.
type deadGroup struct {
	ErrorKind string
	Count     uint64
	Share     float64          // of all, 0 to 1
	Days      [deadDays]uint64 // by UTC day of the death: Days[0] today, Days[1] yesterday
	Queues    []string         // some, those with the most first
	Newest    time.Time        `json:",omitzero"` // when the last one died, as codeq.DeadKind.LastAt
	Example   codeq.ID         `json:",omitzero"` // it, if it still is a dead letter
	Other     bool             `json:",omitzero"` // the rest, or those with hidden errors
}

// deadView is the content of the page of dead letters.
type deadView struct {
	Groups []*deadGroup // the most first, those with Other last
	Queue  string
	Dead   uint64 // all of them
	// Rest has kinds that are counted in the group of others: of the newest dead letters of the
	// queues with most of these. Looked is how many were looked at.
	Rest   []*restKind
	Looked int
}

// restKind is a kind of errors among the dead letters that no kind counts.
type restKind struct {
	ErrorKind string
	Tasks     int // of those that were looked at
	Queue     string
	Newest    time.Time
	Example   codeq.ID
}

// deadGroups returns the dead letters of a queue, or of all, by error.
func (d *Dashboard) deadGroups(ctx context.Context, r *request, queue string) (v deadView, err error) {
	v.Queue, v.Groups = queue, []*deadGroup{}
	kinds, err := d.q.DeadKinds(ctx, queue)
	if err != nil {
		return v, err
	}
	var other, hidden *deadGroup
	into := func(g **deadGroup, name string) *deadGroup {
		if *g == nil {
			*g = &deadGroup{ErrorKind: name, Other: true}
		}
		return *g
	}
	now, left := time.Now(), lookUps
	for i := range kinds {
		k := &kinds[i]
		v.Dead += k.Count
		switch {
		case k.Other || len(v.Groups) == groupsMax:
			into(&other, otherErrors).add(k, now)
			continue
		case d.opts.Redact != nil:
			shown, err := d.showsKind(ctx, r, k, &left)
			if err != nil {
				return v, err
			}
			if !shown {
				into(&hidden, redactedError).add(k, now)
				continue
			}
		}
		g := &deadGroup{ErrorKind: k.Kind, Queues: k.Queues, Newest: k.LastAt, Example: k.Last}
		g.add(k, now)
		v.Groups = append(v.Groups, g)
	}
	for _, g := range []*deadGroup{hidden, other} {
		if g != nil {
			v.Groups = append(v.Groups, g)
		}
	}
	for _, g := range v.Groups {
		g.Share = float64(g.Count) / float64(max(v.Dead, 1))
	}
	if n := len(kinds); n > 0 && kinds[n-1].Other {
		err = d.lookAtRest(ctx, r, &v, kinds[n-1].Queues)
	}
	return v, err
}

// lookAtRest finds the most frequent kinds that no group has. The kinds that are counted are those
// that came first, so that the error of today may be among the others.
func (d *Dashboard) lookAtRest(ctx context.Context, r *request, v *deadView, queues []string) error {
	known := make(map[string]*restKind)
	for _, g := range v.Groups {
		known[g.ErrorKind] = nil
	}
	for _, queue := range queues[:min(restQueues, len(queues))] {
		page, err := d.q.ListPage(ctx, codeq.PageOptions{
			TaskFilter: codeq.TaskFilter{States: []codeq.State{codeq.Dead}, Queue: queue}, Newest: true, NoPayload: d.leavesPayloads(), Limit: restTasks,
		})
		if err != nil {
			return err
		}
		v.Looked += len(page.Tasks)
		for _, t := range page.Tasks {
			kind := codeq.ErrorKind(t.LastError)
			if shown := d.shown(r, t); codeq.ErrorKind(shown.LastError) != kind || shown.Queue != queue {
				continue // Options.Redact hides it
			}
			k, isKnown := known[kind]
			if isKnown && k == nil {
				continue
			}
			if k == nil {
				k = &restKind{ErrorKind: kind, Queue: queue, Newest: t.At, Example: t.ID}
				known[kind] = k
				v.Rest = append(v.Rest, k)
			}
			k.Tasks++
		}
	}
	slices.SortStableFunc(v.Rest, func(a, b *restKind) int { return b.Tasks - a.Tasks })
	v.Rest = v.Rest[:min(restKinds, len(v.Rest))]
	return nil
}

// add adds the counts of a kind.
func (g *deadGroup) add(k *codeq.DeadKind, now time.Time) {
	const day = 24 * time.Hour
	g.Count += k.Count
	if k.LastAt.IsZero() {
		return
	}
	ago := max(0, int(now.Truncate(day).Sub(k.LastAt.Truncate(day))/day))
	for i := 0; i+ago < deadDays; i++ {
		g.Days[i+ago] += k.Days[i]
	}
}

// showsKind reports whether Options.Redact leaves the kind of an error as it is, alone and in a
// dead letter of the kind: a kind may hide from Redact what makes it remove the rest. The kind of
// an error without such a dead letter is not shown.
func (d *Dashboard) showsKind(ctx context.Context, r *request, k *codeq.DeadKind, left *int) (bool, error) {
	alone := codeq.TaskInfo{State: codeq.Dead, LastError: k.Kind}
	if len(k.Queues) > 0 {
		alone.Queue = k.Queues[0]
	}
	if d.redact(&alone); alone.LastError != k.Kind {
		return false, nil
	}
	t, err := d.deadOf(ctx, k, left)
	return t != nil && codeq.ErrorKind(d.shown(r, t).LastError) == k.Kind, err
}

// deadOf returns a dead letter of a kind; nil: none was found.
func (d *Dashboard) deadOf(ctx context.Context, k *codeq.DeadKind, left *int) (*codeq.TaskInfo, error) {
	if k.Last != (codeq.ID{}) {
		t, err := d.q.Get(ctx, k.Last)
		if err == nil && t.State == codeq.Dead && codeq.ErrorKind(t.LastError) == k.Kind {
			return t, nil
		} else if err != nil && !errors.Is(err, codeq.ErrNotFound) {
			return nil, err
		}
	}
	if *left--; *left < 0 || k.Kind == "" || len(k.Queues) == 0 {
		return nil, nil
	}
	page, err := d.q.ListPage(ctx, codeq.PageOptions{
		TaskFilter: codeq.TaskFilter{States: []codeq.State{codeq.Dead}, Queue: k.Queues[0], ErrorKind: k.Kind}, NoPayload: d.leavesPayloads(), Limit: 1,
	})
	if err != nil || len(page.Tasks) == 0 {
		return nil, err
	}
	return page.Tasks[0], nil
}

// Percent is the share as text.
func (g *deadGroup) Percent() string {
	if g.Share < 0.01 {
		return "<1 %"
	}
	return fmt.Sprintf("%.0f %%", 100*g.Share)
}

// sparkStep and sparkHeight are the width of a day, and the height of the highest bar.
const sparkStep, sparkHeight = 5, 16

// Bars returns an SVG path with a bar for each day, today at the right.
func (g *deadGroup) Bars() string {
	most := uint64(1)
	for _, n := range g.Days {
		most = max(most, n)
	}
	var b strings.Builder
	for i, n := range g.Days {
		if n > 0 {
			h := max(1, float64(sparkHeight)*float64(n)/float64(most))
			fmt.Fprintf(&b, "M%d %dv-%.1fh%dv%.1fz", sparkStep*(deadDays-1-i), sparkHeight, h, sparkStep-1, h)
		}
	}
	return b.String()
}

// Told describes the days in words.
func (g *deadGroup) Told() string {
	week := uint64(0)
	for _, n := range g.Days[:7] {
		week += n
	}
	return fmt.Sprintf("%s died today, %s in 7 days (UTC), of those that are still dead letters", number(g.Days[0]), number(week))
}

func (d *Dashboard) deadPage(w http.ResponseWriter, r *request) error {
	v, err := d.deadGroups(r.Context(), r, r.params.Get("queue"))
	if err != nil {
		return err
	}
	return d.show(w, r, page{Title: "Dead letters", Screen: "dead", Refresh: 10, Body: v})
}
