package codeqweb

import (
	"context"
	"net/http"

	"codeq"
)

// flowView is the content of the page of a flow.
type flowView struct {
	*flow
	Task     *codeq.TaskInfo
	Rows     []flowRow
	HasCalls bool // one of the edges leads to a task that a handler has produced
}

// flowRow is a node with the nodes that wait for it, and the changes that a viewer can make.
type flowRow struct {
	flowNode
	To, Calls                     []codeq.ID // of nodes
	MayCancel, MayRedrive, MayRun bool
}

// flowOf returns the flow of the task of the parameter id.
func (d *Dashboard) flowOf(ctx context.Context, r *request) (*codeq.TaskInfo, *flow, error) {
	id, err := codeq.ParseID(r.params.Get("id"))
	if err != nil {
		return nil, nil, err
	}
	t, err := d.q.Get(ctx, id)
	if err != nil {
		return nil, nil, err
	}
	f, err := d.flows.of(ctx, id, func(ctx context.Context) (*flow, error) {
		w, err := d.walk(ctx, t)
		if err != nil {
			return nil, err
		}
		return w.fold(), nil
	})
	if err == nil && f == nil {
		err = &refusal{http.StatusServiceUnavailable, "busy", "the flow could not be read a moment ago; it is read again soon"}
	}
	return t, f, err
}

func (d *Dashboard) apiFlow(ctx context.Context, r *request) (any, error) {
	_, f, err := d.flowOf(ctx, r)
	return f, err
}

func (d *Dashboard) flowPage(w http.ResponseWriter, r *request) error {
	t, f, err := d.flowOf(r.Context(), r)
	if err != nil {
		return err
	}
	v := flowView{flow: f, Task: d.shown(r, t), Rows: make([]flowRow, len(f.Nodes))}
	for i, n := range f.Nodes {
		v.Rows[i] = flowRow{flowNode: n}
		if row := &v.Rows[i]; n.Count == 1 {
			row.MayRedrive, row.MayRun = n.State == "dead", n.State == "scheduled"
			switch n.State {
			case "ready", "scheduled", "blocked", "leased", "dead":
				row.MayCancel = true
			}
		}
	}
	for _, l := range f.Edges {
		if row, to := &v.Rows[l.From], f.Nodes[l.To].ID; l.Calls {
			row.Calls, v.HasCalls = append(row.Calls, to), true
		} else {
			row.To = append(row.To, to)
		}
	}
	return d.show(w, r, page{
		Title: "Flow of task " + t.ID.String(), Screen: "flow", Loads: []string{"lib/dagre.js", "flow.js"}, Refresh: 5, Body: v,
	})
}

// Short is the end of the ID.
func (n flowNode) Short() string { return short(n.ID) }
