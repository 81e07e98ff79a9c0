package codeqweb

import (
	"cmp"
	"context"
	"net/http"
	"slices"
	"time"

	"codeq"
)

// The bounds of grouping dead letters for a page.
const (
	deadRead   = 100_000
	deadTime   = time.Second
	groupsMax  = 200
	groupsOf   = 10 // queues listed for a group
	otherError = "(other errors)"
)

// deadGroup has dead letters with the same error except for numbers, identifiers and quoted values.
type deadGroup struct {
	ErrorKind string
	Count     int
	Queues    []string
	Newest    time.Time
	Example   codeq.ID
	Error     string // of the example
	Other     bool   `json:",omitzero"` // the rest, beyond groupsMax
}

// deadView is the content of the page of dead letters.
type deadView struct {
	Groups  []*deadGroup
	Queue   string
	Scanned int
	More    bool   // not all dead letters were read
	Dead    uint64 // as of the last sample
}

// deadGroups groups the newest dead letters.
func (d *Dashboard) deadGroups(ctx context.Context, r *request, queue string) (v deadView, err error) {
	v.Queue, v.Groups = queue, []*deadGroup{}
	opts := codeq.PageOptions{
		TaskFilter: codeq.TaskFilter{States: []codeq.State{codeq.Dead}, Queue: queue}, Newest: true, NoPayload: true, Limit: codeq.MaxPage,
	}
	groups := make(map[string]*deadGroup)
	for begin := time.Now(); ; {
		tasks, err := d.q.ListPage(ctx, opts)
		if err != nil {
			return v, err
		}
		for _, t := range tasks.Tasks {
			// Filters select by the stored error. Dead letters with a redacted error have their own
			// groups, without actions.
			stored := codeq.ErrorKind(t.LastError)
			t = d.shown(r, t)
			kind := codeq.ErrorKind(t.LastError)
			key, other := kind, kind != stored
			if other {
				key = "redacted\x00" + kind
			}
			g := groups[key]
			if g == nil {
				if len(groups) == groupsMax {
					kind, key, other = otherError, otherError, true
					g = groups[key]
				}
				if g == nil {
					g = &deadGroup{ErrorKind: kind, Other: other}
					groups[key] = g
				}
			}
			g.add(t)
		}
		v.Scanned += len(tasks.Tasks)
		opts.Cursor = tasks.Next
		if opts.Cursor == "" {
			break
		}
		if v.Scanned >= deadRead || time.Since(begin) > deadTime {
			v.More = true
			break
		}
	}
	for _, g := range groups {
		slices.Sort(g.Queues)
		v.Groups = append(v.Groups, g)
	}
	slices.SortFunc(v.Groups, func(a, b *deadGroup) int {
		return cmp.Or(cmp.Compare(b.Count, a.Count), cmp.Compare(a.ErrorKind, b.ErrorKind))
	})
	return v, nil
}

func (g *deadGroup) add(t *codeq.TaskInfo) {
	if g.Count++; g.Newest.Before(t.At) {
		g.Newest, g.Example, g.Error = t.At, t.ID, t.LastError
	}
	if len(g.Queues) < groupsOf && !slices.Contains(g.Queues, t.Queue) {
		g.Queues = append(g.Queues, t.Queue)
	}
}

func (d *Dashboard) deadPage(w http.ResponseWriter, r *request) error {
	v, err := d.deadGroups(r.Context(), r, r.params.Get("queue"))
	if err != nil {
		return err
	}
	if s, _ := d.sampler.fresh(r.Context(), time.Second); s != nil {
		v.Dead = s.counts(v.Queue).Dead
	}
	return d.show(w, r, page{Title: "Dead letters", Screen: "dead", Refresh: 10, Body: v})
}
