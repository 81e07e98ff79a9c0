package codeqweb

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"time"

	"codeq"
)

// allRoutes returns every path of the dashboard. No path has variable parts: names are parameters.
func (d *Dashboard) allRoutes() map[string]map[string]*route {
	routes := make(map[string]map[string]*route)
	add := func(method, path string, needs Access, kind routeKind, serve func(http.ResponseWriter, *request) error) {
		if routes[path] == nil {
			routes[path] = make(map[string]*route)
		}
		routes[path][method] = &route{needs, kind, serve}
	}
	for path, serve := range map[string]func(http.ResponseWriter, *request) error{
		"": d.overviewPage, "queue": d.queuePage, "tasks": d.tasksPage, "task": d.taskPage, "dead": d.deadPage, "schedules": d.schedulesPage,
		"workers": d.workersPage, "storage": d.storagePage, "cluster": d.clusterPage,
	} {
		add(http.MethodGet, path, Read, plainRoute, serve)
	}
	add(http.MethodGet, "audit", Admin, plainRoute, d.auditPage)
	add(http.MethodGet, "bulks", Act, plainRoute, d.bulksPage)
	add(http.MethodGet, "bulk", Act, plainRoute, d.bulkPage)
	add(http.MethodPost, "bulk", Act, waitRoute, d.bulkForm)
	add(http.MethodPost, "settings", Admin, plainRoute, d.settingsForm)
	add(http.MethodGet, "payload", Payloads, plainRoute, d.download)
	add(http.MethodGet, "live", Read, streamRoute, d.live)

	for name, a := range actions {
		if a.do == nil {
			continue
		}
		kind := plainRoute
		if name == "bulk/stop" || name == "cluster/drain" || name == "workers/quiet" { // they wait
			kind = waitRoute
		}
		serve := func(w http.ResponseWriter, r *request) error { return d.do(w, r, name, a) }
		add(http.MethodPost, name, a.needs, kind, serve)
		add(http.MethodPost, "api/v1/"+name, a.needs, kind, serve)
	}
	for path, ask := range map[string]func(context.Context, *request) (any, error){
		"": d.apiAccess, "info": d.apiInfo, "days": d.apiDays, "samples": d.apiSamples, "settings": d.apiSettings, "tasks": d.apiTasks,
		"task": d.apiTask, "find": d.apiFind, "children": d.apiChildren, "tenants": d.apiTenants, "dead": d.apiDead, "schedules": d.apiSchedules,
		"workers": d.apiWorkers, "storage": d.apiStorage, "cluster": d.apiCluster,
	} {
		add(http.MethodGet, "api/v1/"+path, Read, plainRoute, answering(ask))
	}
	add(http.MethodGet, "api/v1", Read, plainRoute, answering(d.apiAccess))
	add(http.MethodGet, "api/v1/audit", Admin, plainRoute, answering(d.apiAudit))
	add(http.MethodGet, "api/v1/events", Read, streamRoute, d.events)
	add(http.MethodGet, "api/v1/bulk", Act, waitRoute, answering(d.apiBulk))
	add(http.MethodPost, "api/v1/bulk", Act, waitRoute, d.apiStartBulk)
	add(http.MethodPost, "api/v1/tasks", Act, largeRoute, d.apiProduce)
	add(http.MethodPost, "api/v1/settings", Admin, plainRoute, d.apiConfigure)
	add(http.MethodPost, "api/v1/schedules", Admin, plainRoute, d.apiSetSchedule)
	return routes
}

// answering serves the result of ask as JSON.
func answering(ask func(context.Context, *request) (any, error)) func(http.ResponseWriter, *request) error {
	return func(w http.ResponseWriter, r *request) error {
		v, err := ask(r.Context(), r)
		if err != nil {
			return err
		}
		return writeJSON(w, http.StatusOK, v)
	}
}

func writeJSON(w http.ResponseWriter, status int, v any) error {
	b, err := json.Marshal(v)
	if err != nil {
		return err
	}
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_, _ = w.Write(append(b, '\n'))
	return nil
}

// readJSON reads the body of a request.
func readJSON(w http.ResponseWriter, r *request, limit int64, v any) error {
	defer limitBody(w)()
	d := json.NewDecoder(http.MaxBytesReader(underlying(w), r.Body, limit))
	d.DisallowUnknownFields()
	if err := d.Decode(v); err != nil {
		return unreadable(err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return &refusal{http.StatusBadRequest, "invalid", "the request has more than one value"}
	}
	return nil
}

func (d *Dashboard) apiAccess(_ context.Context, r *request) (any, error) {
	return struct {
		Version int
		Access  []string
	}{1, r.access.names()}, nil
}

func (d *Dashboard) apiInfo(ctx context.Context, r *request) (any, error) {
	infos, err := d.q.Info(ctx)
	if err != nil {
		return nil, err
	}
	wanted := r.params["queue"]
	queues := []codeq.QueueInfo{}
	for _, i := range infos {
		if len(wanted) == 0 || slices.Contains(wanted, i.Queue) {
			queues = append(queues, i)
		}
	}
	return struct{ Queues []codeq.QueueInfo }{queues}, nil
}

func (d *Dashboard) apiTenants(ctx context.Context, r *request) (any, error) {
	queue := r.params.Get("queue")
	settings, err := d.q.Settings(queue)
	if err != nil {
		return nil, err
	}
	return d.tenants(ctx, queue, settings.TenantWeights)
}

func (d *Dashboard) apiDays(ctx context.Context, r *request) (any, error) {
	days, err := d.q.TotalsByDay(ctx, r.params.Get("queue"))
	return struct{ Days []codeq.DayTotals }{days}, err
}

// apiSample is a point of a chart.
type apiSample struct {
	Time                                    time.Time
	Ready, Scheduled, Blocked, Leased, Dead uint32
	Produced, Completed, Failed             uint32
	OldestReady                             uint32 // s
}

func (d *Dashboard) apiSamples(ctx context.Context, r *request) (any, error) {
	step := time.Second
	switch r.params.Get("step") {
	case "minute":
		step = time.Minute
	case "", "second":
	default:
		return nil, invalid("step", `"second" or "minute"`)
	}
	if _, err := d.sampler.fresh(ctx, time.Second); err != nil {
		return nil, err
	}
	samples := []apiSample{}
	for _, p := range d.sampler.points(r.params.Get("queue"), step == time.Minute) {
		samples = append(samples, apiSample{
			time.Unix(int64(p.at), 0).UTC(), p.ready, p.scheduled, p.blocked, p.leased, p.dead, p.produced, p.completed, p.failed, p.oldest,
		})
	}
	return struct {
		Step    time.Duration
		Samples []apiSample
	}{step, samples}, nil
}

func (d *Dashboard) apiSettings(_ context.Context, r *request) (any, error) {
	return d.q.Settings(r.params.Get("queue"))
}

// apiConfigure changes the settings in the body. The other settings keep their values.
func (d *Dashboard) apiConfigure(w http.ResponseWriter, r *request) error {
	var raw json.RawMessage
	if err := readJSON(w, r, smallBody, &raw); err != nil {
		return err
	}
	queue := r.params.Get("queue")
	var refused error
	err := d.q.Configure(r.Context(), queue, func(s *codeq.Settings) {
		old := *s
		changes := json.NewDecoder(bytes.NewReader(raw))
		changes.DisallowUnknownFields()
		s.TenantWeights = nil // JSON would add to the map, and change it in place
		if refused = changes.Decode(s); refused != nil {
			*s = old
			return
		}
		var named struct{ TenantWeights json.RawMessage }
		if json.Unmarshal(raw, &named) == nil && named.TenantWeights == nil {
			s.TenantWeights = old.TenantWeights
		}
	})
	if err == nil && refused != nil {
		err = unreadable(refused)
	}
	p := url.Values{"queue": {queue}, "settings": {string(raw)}}
	d.audited(r, p, err, false)
	if err != nil {
		return err
	}
	s, err := d.q.Settings(queue)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, s)
}

// shownTasks has tasks without the parts that this request may not see.
type shownTasks struct {
	Tasks   []*codeq.TaskInfo
	Next    string
	Scanned int
	Hidden  bool
}

func (d *Dashboard) apiTasks(ctx context.Context, r *request) (any, error) {
	p := r.params
	filter, err := filterOf(p)
	if err != nil {
		return nil, err
	}
	filter.Tenants = p["tenant"]
	opts := codeq.PageOptions{TaskFilter: filter, Newest: p.Get("newest") == "true", NoPayload: true, Cursor: p.Get("cursor")}
	if p.Get("limit") != "" {
		if opts.Limit, err = intParam(p, "limit"); err != nil {
			return nil, err
		}
	}
	if p.Get("payloads") == "true" {
		if !r.access.Has(Payloads) {
			return nil, errDenied
		}
		opts.NoPayload = false
	}
	tasks, err := d.q.ListPage(ctx, opts)
	if err != nil {
		return nil, err
	}
	shown := shownTasks{Tasks: []*codeq.TaskInfo{}, Next: tasks.Next, Scanned: tasks.Scanned, Hidden: !r.access.Has(Payloads)}
	for _, t := range tasks.Tasks {
		shown.Tasks = append(shown.Tasks, d.shown(r, t))
	}
	return shown, nil
}

// shownTask is one task without the parts that this request may not see.
type shownTask struct {
	Task   *codeq.TaskInfo
	Hidden bool
}

func (d *Dashboard) apiTask(_ context.Context, r *request) (any, error) {
	t, err := d.task(r)
	return shownTask{t, !r.access.Has(Payloads)}, err
}

func (d *Dashboard) apiFind(ctx context.Context, r *request) (any, error) {
	t, err := d.q.FindByKey(ctx, keyParam(r.params))
	if err != nil {
		return nil, err
	}
	return shownTask{d.shown(r, t), !r.access.Has(Payloads)}, nil
}

func (d *Dashboard) apiChildren(ctx context.Context, r *request) (any, error) {
	id, err := codeq.ParseID(r.params.Get("id"))
	if err != nil {
		return nil, err
	}
	c, err := d.children(ctx, id)
	if err != nil {
		return nil, err
	}
	shown := []*codeq.TaskInfo{}
	for _, t := range c.Tasks {
		shown = append(shown, d.shown(&request{Request: r.Request, access: Read}, t))
	}
	return struct {
		Tasks   []*codeq.TaskInfo
		Scanned int
		More    bool
		Hidden  bool
	}{shown, c.Scanned, c.More, true}, nil
}

// apiProduce produces tasks.
func (d *Dashboard) apiProduce(w http.ResponseWriter, r *request) error {
	var body struct{ Tasks []codeq.Task }
	if err := readJSON(w, r, largeBody, &body); err != nil {
		return err
	}
	if len(body.Tasks) == 0 {
		return &refusal{http.StatusBadRequest, "invalid", "the request has no tasks"}
	}
	ids, err := d.q.ProduceBatch(r.Context(), body.Tasks)
	duplicates, only := duplicatesOf(err)
	if len(duplicates) > 0 && only && !errors.Is(err, codeq.ErrUncertain) {
		err = nil
	}
	p := url.Values{"queue": {body.Tasks[0].Queue}, "tasks": {strconv.Itoa(len(body.Tasks))}}
	d.audited(r, p, err, false)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, struct {
		IDs        []codeq.ID
		Duplicates []*codeq.DuplicateError
	}{ids, duplicates})
}

// duplicatesOf returns the duplicates that an error of ProduceBatch joins; only: it joins no other
// error.
func duplicatesOf(err error) (all []*codeq.DuplicateError, only bool) {
	all, only = []*codeq.DuplicateError{}, true
	each(err, func(err error) {
		if dup, ok := errors.AsType[*codeq.DuplicateError](err); ok {
			all = append(all, dup)
		} else {
			only = false
		}
	})
	return all, only
}

// each visits the errors that an error joins, at any depth.
func each(err error, visit func(error)) {
	switch e := err.(type) { //nolint:errorlint // it unwraps by itself
	case nil:
	case interface{ Unwrap() []error }:
		for _, part := range e.Unwrap() {
			each(part, visit)
		}
	case interface{ Unwrap() error }:
		if part := e.Unwrap(); part != nil {
			each(part, visit)
			return
		}
		visit(err)
	default:
		visit(err)
	}
}

// bulkBody is the body of api/v1/bulk: codeq.BulkOptions without Match.
type bulkBody struct {
	Action                codeq.BulkAction
	States                []codeq.State
	Queue                 string
	Tenants               []string
	Group, Key, ErrorKind string
	From, To              time.Time
	Priority              int
	ToQueue               string
	Rate                  float64
	DryRun                bool
	Cursor                string
}

func (d *Dashboard) apiStartBulk(w http.ResponseWriter, r *request) error {
	var b bulkBody
	if err := readJSON(w, r, smallBody, &b); err != nil {
		return err
	}
	var err error
	if b.From, err = inUTC("From", b.From); err != nil {
		return err
	}
	if b.To, err = inUTC("To", b.To); err != nil {
		return err
	}
	j, err := d.startBulk(r, codeq.BulkOptions{
		TaskFilter: codeq.TaskFilter{
			States: b.States, Queue: b.Queue, Tenants: b.Tenants, Group: b.Group, Key: b.Key, ErrorKind: b.ErrorKind, From: b.From, To: b.To,
		},
		Action: b.Action, Priority: b.Priority, ToQueue: b.ToQueue, Rate: b.Rate, DryRun: b.DryRun, Cursor: b.Cursor,
	})
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusAccepted, d.bulks.view(j))
}

func (d *Dashboard) apiBulk(ctx context.Context, r *request) (any, error) {
	id := r.params.Get("id")
	if id == "" {
		return struct{ Jobs []job }{d.bulks.newest()}, nil
	}
	j, err := d.bulks.find(id)
	if err != nil {
		return nil, err
	}
	if text := r.params.Get("wait"); text != "" {
		length, err := time.ParseDuration(text)
		if err != nil {
			return nil, invalid("wait", "a duration such as 10s")
		}
		await(ctx, j, min(length, bulkWait))
	}
	return d.bulks.view(j), nil
}

func (d *Dashboard) apiDead(ctx context.Context, r *request) (any, error) {
	g, err := d.deadGroups(ctx, r, r.params.Get("queue"))
	if err != nil {
		return nil, err
	}
	return struct {
		Groups  []*deadGroup
		Scanned int
		More    bool
	}{g.Groups, g.Scanned, g.More}, nil
}

// apiSchedule is a schedule with its next ticks.
type apiSchedule struct {
	codeq.ScheduleInfo
	Upcoming []time.Time
}

func (d *Dashboard) apiSchedules(ctx context.Context, r *request) (any, error) {
	all, err := d.schedules(ctx, r)
	if err != nil {
		return nil, err
	}
	shown := []apiSchedule{}
	for _, s := range all {
		shown = append(shown, apiSchedule{s.ScheduleInfo, s.Upcoming})
	}
	return struct {
		Schedules []apiSchedule
		Hidden    bool
	}{shown, !r.access.Has(Payloads)}, nil
}

func (d *Dashboard) apiSetSchedule(w http.ResponseWriter, r *request) error {
	var s codeq.Schedule
	if err := readJSON(w, r, largeBody, &s); err != nil {
		return err
	}
	err := d.q.SetSchedule(r.Context(), s)
	d.audited(r, url.Values{"name": {s.Name}, "cron": {s.Cron}, "every": {s.Every.String()}, "queue": {s.Task.Queue}}, err, false)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, nothing{})
}

func (d *Dashboard) apiWorkers(ctx context.Context, _ *request) (any, error) {
	workers, err := d.q.Workers(ctx)
	if workers == nil {
		workers = []codeq.WorkerInfo{}
	}
	return struct{ Workers []codeq.WorkerInfo }{workers}, err
}

func (d *Dashboard) apiStorage(context.Context, *request) (any, error) { return d.q.StorageStats() }

func (d *Dashboard) apiCluster(ctx context.Context, _ *request) (any, error) {
	return d.q.ClusterStatus(ctx)
}

func (d *Dashboard) apiAudit(context.Context, *request) (any, error) {
	entries := d.audit.newest()
	if entries == nil {
		entries = []Entry{}
	}
	return struct{ Entries []Entry }{entries}, nil
}
