package codeqweb

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"

	"codeq"
)

// action is a change, made from parameters by a form or a JSON request.
type action struct {
	needs     Access
	done      string // the message on the page afterwards
	otherwise string // the next page, if the form names none
	takes     string // the parameters of the JSON form
	do        func(d *Dashboard, ctx context.Context, p url.Values) (any, error)
}

// nothing is the answer of an action without a result.
type nothing struct{}

// idOnly is the answer of an action on a task.
type idOnly struct{ ID codeq.ID }

// actions maps the path of a form to its action. The JSON form has the same path below api/v1.
var actions = map[string]*action{
	"task/cancel": onTask("The task was canceled.", (*codeq.Queue).Cancel),
	"task/redrive": setsTask("The dead letter was redriven.", "id step", func(q *codeq.Queue, ctx context.Context, id codeq.ID, p url.Values) error {
		step := p.Get("step")
		if p.Has("escaped-step") { // of the page: a form changes line ends
			var err error
			if step, err = url.QueryUnescape(p.Get("escaped-step")); err != nil {
				return invalid("escaped-step", "an escaped name")
			}
		}
		return q.RedriveDeadFrom(ctx, id, step)
	}),
	"task/forget": onTask("The task was deleted.", (*codeq.Queue).Forget),
	"task/run-at": setsTask("The time of the task was changed.", "id at", func(q *codeq.Queue, ctx context.Context, id codeq.ID, p url.Values) error {
		at, err := runAtParam(p)
		if err != nil {
			return err
		}
		return q.SetRunAt(ctx, id, at)
	}),
	"task/priority": setsTask("The priority was changed.", "id priority", func(q *codeq.Queue, ctx context.Context, id codeq.ID, p url.Values) error {
		priority, err := intParam(p, "priority")
		if err != nil {
			return err
		}
		return q.SetPriority(ctx, id, priority)
	}),
	"task/clone":       {Act, "The task was produced again, as this one.", "tasks", "id at priority queue", (*Dashboard).clone},
	"release-key":      {Act, "The key was released.", "tasks", keyParams, (*Dashboard).releaseKey},
	"pause":            {Admin, "The queue is paused.", "", "queue", pausing((*codeq.Queue).Pause)},
	"resume":           {Admin, "The queue goes on.", "", "queue", pausing((*codeq.Queue).Resume)},
	"queue/delete":     {Admin, "The queue was deleted.", "", "queue", named("queue", (*codeq.Queue).DeleteQueue)},
	"schedule/delete":  {Admin, "The schedule was deleted.", "schedules", "name", named("name", (*codeq.Queue).DeleteSchedule)},
	"schedule/pause":   {Admin, "The schedule is paused.", "schedules", "name", named("name", (*codeq.Queue).PauseSchedule)},
	"schedule/resume":  {Admin, "The schedule goes on, with its next tick after now.", "schedules", "name", named("name", (*codeq.Queue).ResumeSchedule)},
	"schedule/trigger": {Act, "The task of the schedule was produced.", "schedules", "name", (*Dashboard).trigger},
	"workers/quiet":    {Admin, "The workers take no new tasks.", "workers", "name all", onWorkers((*codeq.Queue).QuietWorkers)},
	"workers/resume":   {Admin, "The workers take tasks again.", "workers", "name all", onWorkers((*codeq.Queue).ResumeWorkers)},
	"cluster/transfer": {Admin, "The leader was changed.", "cluster", "shard node", func(d *Dashboard, ctx context.Context, p url.Values) (any, error) {
		shard, err := intParam(p, "shard")
		if err != nil {
			return nil, err
		}
		return nothing{}, d.q.TransferLeadership(ctx, shard, p.Get("node"))
	}},
	"cluster/drain": {Admin, "The node leads no shard.", "cluster", "", func(d *Dashboard, ctx context.Context, _ url.Values) (any, error) {
		return nothing{}, d.q.Drain(ctx)
	}},
	"cluster/undrain": {Admin, "The node leads its share again, after a while.", "cluster", "", func(d *Dashboard, ctx context.Context, _ url.Values) (any, error) {
		return nothing{}, d.q.Undrain(ctx)
	}},
	"bulk/stop": {Act, "The change was stopped.", "bulks", "id", func(d *Dashboard, ctx context.Context, p url.Values) (any, error) {
		return d.bulks.stop(ctx, p.Get("id"))
	}},
	// these have forms of their own
	"settings": {Admin, "The settings were changed.", "", "", nil},
	"bulk":     {Act, "", "bulks", "", nil},
}

func onTask(done string, do func(*codeq.Queue, context.Context, codeq.ID) error) *action {
	return setsTask(done, "id", func(q *codeq.Queue, ctx context.Context, id codeq.ID, _ url.Values) error { return do(q, ctx, id) })
}

func setsTask(done, takes string, do func(*codeq.Queue, context.Context, codeq.ID, url.Values) error) *action {
	return &action{Act, done, "tasks", takes, func(d *Dashboard, ctx context.Context, p url.Values) (any, error) {
		id, err := codeq.ParseID(p.Get("id"))
		if err != nil {
			return nil, err
		}
		return idOnly{id}, do(d.q, ctx, id, p)
	}}
}

// named calls do with a parameter.
func named(param string, do func(*codeq.Queue, context.Context, string) error) func(*Dashboard, context.Context, url.Values) (any, error) {
	return func(d *Dashboard, ctx context.Context, p url.Values) (any, error) {
		return nothing{}, do(d.q, ctx, p.Get(param))
	}
}

func pausing(do func(*codeq.Queue, context.Context, string) error) func(*Dashboard, context.Context, url.Values) (any, error) {
	return func(d *Dashboard, ctx context.Context, p url.Values) (any, error) {
		if err := do(d.q, ctx, p.Get("queue")); err != nil {
			return nil, err
		}
		return d.changedSettings(p.Get("queue"))
	}
}

func onWorkers(do func(*codeq.Queue, context.Context, string) error) func(*Dashboard, context.Context, url.Values) (any, error) {
	return func(d *Dashboard, ctx context.Context, p url.Values) (any, error) {
		if all := p.Get("all") == "true"; all == (p.Get("name") != "") {
			return nil, invalid("name", "one of a name and all=true")
		}
		return nothing{}, do(d.q, ctx, p.Get("name"))
	}
}

// invalid returns the error of a refused parameter.
func invalid(name, limit string) error {
	return &refusal{http.StatusBadRequest, "invalid", fmt.Sprintf("parameter %q: must be %s", name, limit)}
}

func intParam(p url.Values, name string) (int, error) {
	n, err := strconv.Atoi(p.Get(name))
	if err != nil {
		return 0, invalid(name, "a number")
	}
	return n, nil
}

// keyParams are the parameters that keyParam reads.
const keyParams = "queue tenant group limit-key key"

func keyParam(p url.Values) codeq.UniqueKey {
	return codeq.UniqueKey{
		Queue: p.Get("queue"), Tenant: p.Get("tenant"), Group: p.Get("group"), LimitKey: p.Get("limit-key"), Key: p.Get("key"),
	}
}

// clone produces a copy of a task, without its idempotency key and parents.
func (d *Dashboard) clone(ctx context.Context, p url.Values) (any, error) {
	id, err := codeq.ParseID(p.Get("id"))
	if err != nil {
		return nil, err
	}
	of, err := d.q.Get(ctx, id)
	if err != nil {
		return nil, err
	}
	t := of.Task
	t.Unique, t.After, t.OnDead, t.OnMissing = codeq.Unique{}, nil, 0, 0
	if t.RunAt, err = runAtParam(p); err != nil {
		return nil, err
	}
	if p.Get("priority") != "" {
		if t.Priority, err = intParam(p, "priority"); err != nil {
			return nil, err
		}
	}
	if queue := p.Get("queue"); queue != "" {
		t.Queue = queue
	}
	made, err := d.q.Produce(ctx, t)
	return idOnly{made}, err
}

// do carries out an action for a form or a JSON request.
func (d *Dashboard) do(w http.ResponseWriter, r *request, name string, a *action) error {
	result, err := a.do(d, r.Context(), r.params)
	d.audited(r, r.params, err, false)
	switch {
	case err != nil:
		return err
	case r.api:
		return writeJSON(w, http.StatusOK, result)
	}
	otherwise := a.otherwise
	if made, ok := result.(idOnly); ok && name == "task/clone" {
		r.params.Set("back", link("task", "id", made.ID))
	}
	d.back(w, r, name, otherwise)
	return nil
}

// audited adds a change to the audit log.
func (d *Dashboard) audited(r *request, p url.Values, err error, refused bool) {
	if !refused {
		d.sampler.stale.Store(true)
		d.flows.clear()
	}
	e := Entry{Action: r.path, Refused: refused, User: r.name}
	if r.api && len(e.Action) > len("api/v1/") {
		e.Action = e.Action[len("api/v1/"):]
	}
	if err != nil {
		e.Error = refusalOf(err).text
	}
	rest := maps.Clone(p)
	rest.Del("back")
	for _, name := range []string{"id", "name", "queue", "node"} {
		if v := rest.Get(name); v != "" {
			e.Target = v
			rest.Del(name)
			break
		}
	}
	for _, name := range slices.Sorted(maps.Keys(rest)) {
		for _, v := range rest[name] {
			if v == "" {
				continue
			}
			if e.Detail != "" {
				e.Detail += ", "
			}
			e.Detail += name + " " + clip(v, auditText)
		}
	}
	d.audit.add(r.Request, e)
}
