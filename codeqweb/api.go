package codeqweb

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"codeq"
)

// allRoutes returns every path of the dashboard. No path has variable parts: names are parameters.
func (d *Dashboard) allRoutes() map[string]map[string]*route {
	routes := make(map[string]map[string]*route)
	add := func(method, path string, needs Access, kind routeKind, serve func(http.ResponseWriter, *request) error) *route {
		if routes[path] == nil {
			routes[path] = make(map[string]*route)
		}
		rt := &route{needs: needs, kind: kind, serve: serve}
		routes[path][method] = rt
		return rt
	}
	addJSON := func(method, path string, needs Access, kind routeKind, takes string, serve func(http.ResponseWriter, *request) error) {
		add(method, "api/v1"+path, needs, kind, serve).takes = strings.Fields(takes)
	}
	for path, serve := range map[string]func(http.ResponseWriter, *request) error{
		"": d.overviewPage, "queue": d.queuePage, "tasks": d.tasksPage, "task": d.taskPage, "flow": d.flowPage, "dead": d.deadPage, "schedules": d.schedulesPage,
		"workers": d.workersPage, "search": d.searchPage, "storage": d.storagePage, "cluster": d.clusterPage,
	} {
		add(http.MethodGet, path, Read, plainRoute, serve)
	}
	add(http.MethodGet, "audit", Admin, plainRoute, d.auditPage)
	add(http.MethodGet, "bulks", Act, plainRoute, d.bulksPage)
	add(http.MethodGet, "bulk", Act, plainRoute, d.bulkPage)
	add(http.MethodPost, "bulk", Act, waitRoute, d.bulkForm)
	add(http.MethodPost, "settings", Admin, plainRoute, d.settingsForm)
	add(http.MethodGet, "payload", Payloads, plainRoute, d.download)
	add(http.MethodGet, "save", Read, plainRoute, d.saveTasks)
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
		addJSON(http.MethodPost, "/"+name, a.needs, kind, a.takes, serve)
	}
	for path, of := range map[string]struct {
		takes string
		ask   func(context.Context, *request) (any, error)
	}{
		"": {"", d.apiAccess}, "/": {"", d.apiAccess}, "/info": {"queue+", d.apiInfo}, "/days": {"queue", d.apiDays}, "/charts": {"queue span", d.apiCharts},
		"/samples": {"queue step", d.apiSamples}, "/settings": {"queue", d.apiSettings}, "/tasks": {tasksParams, d.apiTasks}, "/task": {"id", d.apiTask},
		"/flow": {"id", d.apiFlow}, "/why": {"id", d.apiWhy}, "/find": {keyParams, d.apiFind}, "/children": {"id", d.apiChildren}, "/tenants": {"queue", d.apiTenants},
		"/dead": {"queue", d.apiDead}, "/schedules": {"", d.apiSchedules}, "/workers": {"", d.apiWorkers}, "/storage": {"", d.apiStorage},
		"/usage": {"", d.apiUsage}, "/cluster": {"", d.apiCluster},
	} {
		addJSON(http.MethodGet, path, Read, plainRoute, of.takes, answering(of.ask))
	}
	addJSON(http.MethodGet, "/audit", Admin, plainRoute, "", answering(d.apiAudit))
	addJSON(http.MethodGet, "/events", Read, streamRoute, "queue+ kind+", d.events)
	addJSON(http.MethodGet, "/bulk", Act, waitRoute, "id wait", answering(d.apiBulk))
	addJSON(http.MethodPost, "/bulk", Act, waitRoute, "", d.apiStartBulk)
	addJSON(http.MethodPost, "/tasks", Act, largeRoute, "", d.apiProduce)
	addJSON(http.MethodPost, "/settings", Admin, plainRoute, "queue", d.apiConfigure)
	addJSON(http.MethodPost, "/schedules", Admin, plainRoute, "", d.apiSetSchedule)
	return routes
}

// truths are the parameters that are true or false.
var truths = []string{"all", "contents", "newest", "payloads"}

// checkParams refuses a change or a JSON request with a malformed URL. It refuses a JSON request
// with an unknown parameter, or with a second value of one that is given once: with a slip in the
// name of a filter, all tasks would match.
func (rt *route) checkParams(r *request, malformed error) error {
	if malformed != nil && (r.api || r.Method == http.MethodPost) {
		return &refusal{http.StatusBadRequest, "invalid", "the parameters cannot be read: " + malformed.Error()}
	}
	if !r.api {
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(r.params)) {
		values := r.params[name]
		switch several := slices.Contains(rt.takes, name+"+"); {
		case !several && !slices.Contains(rt.takes, name):
			takes := strings.ReplaceAll(strings.Join(rt.takes, ", "), "+", "")
			return &refusal{http.StatusBadRequest, "invalid", fmt.Sprintf("parameter %q: %s takes %s", name, r.path, cmp.Or(takes, "none"))}
		case !several && len(values) > 1:
			return invalid(name, "given once")
		case slices.Contains(truths, name) && !slices.Contains([]string{"", "true", "false"}, values[0]):
			return invalid(name, "true or false")
		}
	}
	return nil
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

func (d *Dashboard) apiTenants(_ context.Context, r *request) (any, error) {
	queue := r.params.Get("queue")
	settings, err := d.q.Settings(queue)
	if err != nil {
		return nil, err
	}
	return d.tenants(r, queue, settings.TenantWeights)
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
	in := bySecond
	switch r.params.Get("step") {
	case "minute":
		in = byMinute
	case "", "second":
	default:
		return nil, invalid("step", `"second" or "minute"`)
	}
	if _, err := d.sampler.fresh(ctx, time.Second); err != nil {
		return nil, err
	}
	samples := []apiSample{}
	for _, p := range d.sampler.points(r.params.Get("queue"), in) {
		samples = append(samples, apiSample{
			time.Unix(int64(p.at), 0).UTC(), p.ready, p.scheduled, p.blocked, p.leased, p.dead, p.produced, p.completed, p.failed, p.oldest,
		})
	}
	return struct {
		Step    time.Duration
		Samples []apiSample
	}{resolutions[in].every, samples}, nil
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
		s.TenantWeights, s.Backoff = nil, codeq.Backoff{} // JSON would add to the old values
		if refused = changes.Decode(s); refused != nil {
			*s = old
			return
		}
		var named struct{ TenantWeights, Backoff json.RawMessage }
		if json.Unmarshal(raw, &named) != nil {
			return
		}
		if named.TenantWeights == nil {
			s.TenantWeights = old.TenantWeights
		}
		if named.Backoff == nil {
			s.Backoff = old.Backoff
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
	s, err := d.changedSettings(queue)
	if err != nil {
		return err
	}
	return writeJSON(w, http.StatusOK, s)
}

// changedSettings returns the settings of a queue after a change.
func (d *Dashboard) changedSettings(queue string) (s codeq.Settings, err error) {
	if s, err = d.q.Settings(queue); err != nil {
		err = fmt.Errorf("%w: changed, but not read afterwards: %w", codeq.ErrUncertain, err)
	}
	return s, err
}

// shownTasks has tasks without the parts that this request may not see.
type shownTasks struct {
	Tasks   []*codeq.TaskInfo
	Next    string
	Scanned int
	Hidden  bool
}

// tasksParams are the parameters of apiTasks.
const tasksParams = "state+ queue kind tenant+ group key error text contents from to limit cursor newest payloads"

func (d *Dashboard) apiTasks(_ context.Context, r *request) (any, error) {
	p := r.params
	filter, err := d.filterOf(r)
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
	tasks, err := d.list(r, opts)
	if err != nil {
		return nil, err
	}
	return shownTasks{append([]*codeq.TaskInfo{}, tasks.Tasks...), tasks.Next, tasks.Scanned, !r.access.Has(Payloads)}, nil
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
	t, err := d.findByKey(ctx, keyParam(r.params))
	if err != nil {
		return nil, noKey(err)
	}
	return shownTask{r.hide(t), !r.access.Has(Payloads)}, nil
}

// errNoKey is the refusal of a key that no task has, and of one that Options.Redact hides.
var errNoKey = &refusal{http.StatusNotFound, "not-found", "no task has this idempotency key"}

// noKey returns an error about a key; errNoKey for any that matches codeq.ErrNotFound.
func noKey(err error) error {
	if errors.Is(err, codeq.ErrNotFound) {
		return errNoKey
	}
	return err
}

// findByKey returns the task that has a key, as Options.Redact leaves it; errNoKey: without that
// key.
func (d *Dashboard) findByKey(ctx context.Context, k codeq.UniqueKey) (*codeq.TaskInfo, error) {
	t, err := d.q.FindByKey(ctx, k)
	if err != nil {
		return nil, err
	}
	t = d.redacted(t)
	if k != (codeq.UniqueKey{Queue: t.Queue, Tenant: t.Tenant, Group: t.Group, LimitKey: t.LimitKey, Key: t.Unique.Key}) {
		return nil, errNoKey
	}
	return t, nil
}

// releaseKey releases a key, unless Options.Redact hides it.
func (d *Dashboard) releaseKey(ctx context.Context, p url.Values) (any, error) {
	k := keyParam(p)
	if d.opts.Redact != nil {
		if _, err := d.findByKey(ctx, k); err != nil && !errors.Is(err, codeq.ErrNotFound) {
			return nil, err
		}
	}
	return nothing{}, noKey(d.q.ReleaseKey(ctx, k))
}

func (d *Dashboard) apiChildren(ctx context.Context, r *request) (any, error) {
	id, err := codeq.ParseID(r.params.Get("id"))
	if err != nil {
		return nil, err
	}
	if err := enter(ctx, d.kin.searching); err != nil {
		return nil, err
	}
	c, err := d.children(ctx, id)
	if <-d.kin.searching; err != nil {
		return nil, err
	}
	shown := []*codeq.TaskInfo{}
	for _, t := range c.Tasks {
		if !d.leavesPayloads() {
			if t, err = d.q.Get(ctx, t.ID); errors.Is(err, codeq.ErrNotFound) {
				continue
			} else if err != nil {
				return nil, err
			}
		}
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
	if only {
		err = nil
	}
	p := url.Values{"queue": {body.Tasks[0].Queue}, "tasks": {strconv.Itoa(len(body.Tasks))}}
	d.audited(r, p, err, false)
	if err != nil {
		if slices.ContainsFunc(ids, func(id codeq.ID) bool { return id != codeq.ID{} }) {
			err = &partlyStored{err, ids}
		}
		return err
	}
	return writeJSON(w, http.StatusOK, struct {
		IDs        []codeq.ID
		Duplicates []*codeq.DuplicateError
	}{ids, duplicates})
}

// partlyStored is the error of a batch that is stored in part.
type partlyStored struct {
	error
	ids []codeq.ID // zero: this task is not stored
}

func (p *partlyStored) Unwrap() error { return p.error }

// duplicatesOf returns the duplicates in an error of ProduceBatch; only: it has no other error.
func duplicatesOf(err error) (all []*codeq.DuplicateError, only bool) {
	all = []*codeq.DuplicateError{}
	batch, ok := errors.AsType[*codeq.BatchError](err)
	if !ok {
		return all, err == nil
	}
	for _, err := range batch.Errors {
		if dup, ok := errors.AsType[*codeq.DuplicateError](err); ok {
			all = append(all, dup)
		} else if err != nil {
			return all, false
		}
	}
	return all, true
}

// bulkBody is the body of api/v1/bulk: codeq.BulkOptions without functions.
type bulkBody struct {
	codeq.TaskFilter
	Action   codeq.BulkAction
	Priority int
	ToQueue  string
	Rate     float64
	DryRun   bool
	Cursor   string
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
		TaskFilter: b.TaskFilter, Action: b.Action, Priority: b.Priority, ToQueue: b.ToQueue, Rate: b.Rate, DryRun: b.DryRun, Cursor: b.Cursor,
	}, 0)
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
		Groups []*deadGroup
		Dead   uint64
		Rest   []*restKind `json:",omitempty"`
		Looked int         `json:",omitzero"`
	}{g.Groups, g.Dead, g.Rest, g.Looked}, nil
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

func (d *Dashboard) apiAudit(context.Context, *request) (any, error) {
	entries := d.audit.newest()
	if entries == nil {
		entries = []Entry{}
	}
	return struct{ Entries []Entry }{entries}, nil
}
