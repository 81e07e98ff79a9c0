package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
)

// dashboard answers as the API of codeqweb does, for one queue, below /admin/.
type dashboard struct {
	*httptest.Server
	q     *codeq.Queue
	check func(*http.Request) int // a status other than 200 refuses a request
	mu    sync.Mutex
	jobs  []*job
}

type job struct {
	ID      string
	Started time.Time
	Ended   time.Time `json:",omitzero"`
	Result  codeq.BulkResult
	Error   string `json:",omitzero"`
	Kind    string `json:",omitzero"`
	stop    context.CancelFunc
	ended   chan struct{}
}

var errorKinds = []struct {
	err    error
	kind   string
	status int
}{
	{codeq.ErrDuplicate, "duplicate", 409}, {codeq.ErrNotWaiting, "not-waiting", 409}, {codeq.ErrNotFound, "not-found", 404},
	{codeq.ErrNoCluster, "no-cluster", 409}, {codeq.ErrInvalid, "invalid", 400}, {codeq.ErrClosed, "closed", 503},
	{codeq.ErrUncertain, "uncertain", 503}, {context.Canceled, "canceled", 504},
}

func newDashboard(t *testing.T, q *codeq.Queue) *dashboard {
	d := &dashboard{q: q, check: func(*http.Request) int { return 200 }}
	d.Server = httptest.NewServer(http.StripPrefix("/admin/api/v1/", http.HandlerFunc(d.serve)))
	t.Cleanup(d.Close)
	return d
}

func answer(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v)
}

func (d *dashboard) serve(w http.ResponseWriter, r *http.Request) {
	if status := d.check(r); status != 200 {
		http.Error(w, "not you", status)
		return
	}
	v, err := d.route(w, r)
	if err != nil {
		for _, k := range errorKinds {
			if errors.Is(err, k.err) {
				answer(w, k.status, map[string]string{"Error": err.Error(), "Kind": k.kind})
				return
			}
		}
		answer(w, 500, map[string]string{"Error": err.Error(), "Kind": "internal"})
		return
	}
	if v != nil {
		answer(w, 200, v)
	}
}

type empty = struct{}

func (d *dashboard) route(w http.ResponseWriter, r *http.Request) (v any, err error) {
	ctx, q, p := r.Context(), d.q, r.URL.Query()
	body := func(v any) {
		dec := json.NewDecoder(r.Body)
		dec.DisallowUnknownFields()
		if e := dec.Decode(v); e != nil {
			err = fmt.Errorf("%w: %w", codeq.ErrInvalid, e)
		}
	}
	id, idErr := codeq.ParseID(p.Get("id"))
	one := func(f func(context.Context, codeq.ID) error) (any, error) {
		if idErr != nil {
			return nil, idErr
		}
		return map[string]codeq.ID{"ID": id}, f(ctx, id)
	}
	switch r.Method + " " + r.URL.Path {
	case "GET info":
		list, err := q.Info(ctx)
		return map[string]any{"Queues": list}, err
	case "GET days":
		days, err := q.TotalsByDay(ctx, p.Get("queue"))
		return map[string]any{"Days": days}, err
	case "GET settings":
		return q.Settings(p.Get("queue"))
	case "POST settings":
		text, _ := io.ReadAll(r.Body)
		err := q.Configure(ctx, p.Get("queue"), func(s *codeq.Settings) { _ = json.Unmarshal(text, s) })
		if err != nil {
			return nil, err
		}
		return q.Settings(p.Get("queue"))
	case "GET tasks":
		o := codeq.PageOptions{
			TaskFilter: codeq.TaskFilter{Queue: p.Get("queue"), Tenants: p["tenant"], Group: p.Get("group"), Key: p.Get("key"), ErrorKind: p.Get("error")},
			Newest:     p.Get("newest") == "true", NoPayload: p.Get("payloads") != "true", Cursor: p.Get("cursor"),
		}
		for _, name := range p["state"] {
			var s codeq.State
			if err := s.UnmarshalText([]byte(name)); err != nil {
				return nil, err
			}
			o.States = append(o.States, s)
		}
		o.From, _ = time.Parse(time.RFC3339Nano, p.Get("from"))
		o.To, _ = time.Parse(time.RFC3339Nano, p.Get("to"))
		o.Limit, _ = strconv.Atoi(p.Get("limit"))
		return q.ListPage(ctx, o)
	case "GET task":
		t, err := q.Get(ctx, id)
		return map[string]any{"Task": t}, errors.Join(err, idErr)
	case "GET find":
		t, err := q.FindByKey(ctx, codeq.UniqueKey{
			Queue: p.Get("queue"), Tenant: p.Get("tenant"), Group: p.Get("group"), LimitKey: p.Get("limit-key"), Key: p.Get("key"),
		})
		return map[string]any{"Task": t}, err
	case "POST tasks":
		var in struct{ Tasks []codeq.Task }
		if body(&in); err != nil {
			return nil, err
		}
		stored, err := q.ProduceBatch(ctx, in.Tasks)
		taken := duplicatesOf(err)
		if len(taken) > 0 {
			err = nil
		}
		return map[string]any{"IDs": stored, "Duplicates": taken}, err
	case "POST task/cancel":
		return one(q.Cancel)
	case "POST task/redrive":
		return one(q.RedriveDead)
	case "POST task/forget":
		return one(q.Forget)
	case "POST task/priority":
		n, _ := strconv.Atoi(p.Get("priority"))
		return one(func(ctx context.Context, id codeq.ID) error { return q.SetPriority(ctx, id, n) })
	case "POST task/run-at":
		at, _ := time.Parse(time.RFC3339Nano, p.Get("at"))
		return one(func(ctx context.Context, id codeq.ID) error { return q.SetRunAt(ctx, id, at) })
	case "POST bulk":
		return d.bulk(body, &err)
	case "GET bulk", "POST bulk/stop":
		d.mu.Lock()
		n, _ := strconv.Atoi(p.Get("id"))
		j := d.jobs[n]
		d.mu.Unlock()
		if r.Method == "POST" {
			j.stop()
		}
		if p.Has("wait") {
			select {
			case <-j.ended:
			case <-ctx.Done():
			}
		}
		d.mu.Lock()
		defer d.mu.Unlock()
		return *j, nil
	case "GET schedules":
		list, err := q.Schedules(ctx)
		return map[string]any{"Schedules": list, "Hidden": false}, err
	case "POST schedules":
		var s codeq.Schedule
		if body(&s); err != nil {
			return nil, err
		}
		return empty{}, q.SetSchedule(ctx, s)
	case "POST schedule/delete":
		return empty{}, q.DeleteSchedule(ctx, p.Get("name"))
	case "POST schedule/trigger":
		s, err := findSchedule(ctx, q, p.Get("name"))
		if err != nil {
			return nil, err
		}
		id, err := q.Produce(ctx, s.Task)
		return map[string]codeq.ID{"ID": id}, err
	case "GET workers":
		list, err := q.Workers(ctx)
		return map[string]any{"Workers": list}, err
	case "POST workers/quiet":
		return empty{}, q.QuietWorkers(ctx, p.Get("name"))
	case "POST workers/resume":
		return empty{}, q.ResumeWorkers(ctx, p.Get("name"))
	case "GET storage":
		return q.StorageStats()
	case "GET cluster":
		return q.ClusterStatus(ctx)
	case "POST cluster/transfer":
		n, _ := strconv.Atoi(p.Get("shard"))
		return empty{}, q.TransferLeadership(ctx, n, p.Get("node"))
	case "GET events":
		return nil, d.events(ctx, w, p["queue"])
	}
	return nil, fmt.Errorf("%w: route %s %s", codeq.ErrNotFound, r.Method, r.URL.Path)
}

func (d *dashboard) bulk(body func(any), bodyErr *error) (any, error) {
	var in struct {
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
	if body(&in); *bodyErr != nil {
		return nil, *bodyErr
	}
	ctx, stop := context.WithCancel(context.Background())
	d.mu.Lock()
	defer d.mu.Unlock()
	j := &job{ID: strconv.Itoa(len(d.jobs)), Started: time.Now(), stop: stop, ended: make(chan struct{})}
	d.jobs = append(d.jobs, j)
	go func() {
		r, err := d.q.Bulk(ctx, codeq.BulkOptions{
			TaskFilter: codeq.TaskFilter{
				States: in.States, Queue: in.Queue, Tenants: in.Tenants, Group: in.Group, Key: in.Key, ErrorKind: in.ErrorKind, From: in.From, To: in.To,
			},
			Action: in.Action, Priority: in.Priority, ToQueue: in.ToQueue, Rate: in.Rate, DryRun: in.DryRun, Cursor: in.Cursor,
		})
		d.mu.Lock()
		defer d.mu.Unlock()
		j.Ended, j.Result = time.Now(), r
		if err != nil {
			j.Error, j.Kind = err.Error(), "internal"
			for _, k := range errorKinds {
				if errors.Is(err, k.err) {
					j.Kind = k.kind
				}
			}
		}
		close(j.ended)
	}()
	return *j, nil
}

// events streams until the client goes, or an event's queue is "end".
func (d *dashboard) events(ctx context.Context, w http.ResponseWriter, queues []string) error {
	s, err := d.q.Subscribe(codeq.SubscribeOptions{Queues: queues})
	if err != nil {
		return err
	}
	defer s.Close()
	w.Header().Set("Content-Type", "text/event-stream")
	_, _ = io.WriteString(w, ":\n\n")
	for {
		_ = http.NewResponseController(w).Flush()
		e, err := s.Next(ctx)
		if err != nil {
			return nil
		}
		if e.Queue == "end" {
			_, _ = io.WriteString(w, "event: end\ndata: {\"Error\":\"enough\",\"Kind\":\"closed\"}\n\n")
			return nil
		}
		b, _ := json.Marshal(e)
		_, _ = fmt.Fprintf(w, "event: lost\ndata: 7\n\nevent: task\ndata: %s\n\n", b)
	}
}

// TestCredentials: they come from the environment, are sent to the dashboard only, and not from
// the command line.
func TestCredentials(t *testing.T) {
	q, _ := serve(t, newQueue(t, nil))
	d := newDashboard(t, q)
	want := "Bearer secret"
	d.check = func(r *http.Request) int {
		if r.Header.Get("Authorization") != want {
			return http.StatusUnauthorized
		}
		return 200
	}
	url := d.URL + "/admin/"
	require.Equal(t, exitDenied, call(t, "-url", url, "info").code)
	env := map[string]string{"CODEQ_TOKEN": "secret"}
	require.Zero(t, run(t.Context(), env, nil, "-url", url, "info").code)
	env["CODEQ_URL"] = url
	require.Zero(t, run(t.Context(), env, nil, "info").code)
	env["CODEQ_USER"] = "ann"
	require.Equal(t, exitUsage, run(t.Context(), env, nil, "info").code, "two kinds")
	delete(env, "CODEQ_TOKEN")
	env["CODEQ_PASSWORD"], want = "pw", "Basic YW5uOnB3"
	require.Zero(t, run(t.Context(), env, nil, "info").code)

	r := call(t, "-url", strings.Replace(url, "http://", "http://ann:pw@", 1), "info")
	require.Equal(t, exitUsage, r.code)
	require.NotContains(t, r.err, "ann:pw")
	require.Equal(t, exitUsage, call(t, "-url", "ftp://x/", "info").code)

	other := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		t.Error("the request has left the host that was named", r.Header)
	}))
	defer other.Close()
	moved := httptest.NewServer(http.RedirectHandler(other.URL, http.StatusTemporaryRedirect))
	defer moved.Close()
	r = run(t.Context(), env, nil, "-url", moved.URL, "info")
	require.Equal(t, exitNoQueue, r.code)
	require.Contains(t, r.err, "redirects")
}

// TestNoDashboard: what answers, or does not, is told apart by the exit code.
func TestNoDashboard(t *testing.T) {
	status, kind, text := 0, "text/html", "<h1>\x1b[31mlog in</h1>"
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", kind)
		w.WriteHeader(status)
		_, _ = io.WriteString(w, text)
	}))
	for _, c := range []struct {
		status, code int
		kind, text   string
	}{
		{200, exitNoQueue, "text/html", "<h1>log in</h1>"},
		{404, exitNoQueue, "text/html", "nothing"},
		{403, exitDenied, "text/plain", "no"},
		{403, exitDenied, "application/json", `{"Error":"act \u001b[31m","Kind":"denied"}`},
		{421, exitDenied, "application/json", `{"Error":"host","Kind":"host"}`},
		{503, exitNotNow, "application/json", `{"Error":"many","Kind":"busy"}`},
		{507, exitNotNow, "application/json", `{"Error":"full","Kind":"disk-full"}`},
		{503, exitUncertain, "application/json", `{"Error":"perhaps","Kind":"uncertain"}`},
		{500, exitDamaged, "application/json", `{"Error":"broken","Kind":"corrupt"}`},
		{500, exitOther, "application/json", `{"Error":"broken","Kind":"internal"}`},
		{502, exitUncertain, "text/plain", ""},
		{200, exitOther, "application/json", `{"Queues":`},
	} {
		status, kind, text = c.status, c.kind, c.text
		r := call(t, "-url", s.URL, "info")
		require.Equal(t, c.code, r.code, "%+v: %s", c, r.err)
		requireHarmless(t, r)
	}
	s.Close()
	require.Equal(t, exitNoQueue, call(t, "-url", s.URL, "info").code)
	require.Equal(t, exitNoQueue, call(t, "-url", s.URL, "pause", "mail").code, "certainly not applied")
	require.Equal(t, exitUsage, call(t, "-url", s.URL, "verify").code)
	require.Equal(t, exitUsage, call(t, "-url", s.URL, "checkpoint", "x").code)
	require.Equal(t, exitUsage, call(t, "-url", s.URL, "cluster", "remove", "n1").code)
}
