package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"codeq"
)

// remote is a client of the JSON API, version 1, of a dashboard of codeqweb. Its methods are like
// those of codeq.Queue.
type remote struct {
	base   *url.URL // of the API, with a "/" at its end
	header http.Header
	client *http.Client
	// hidden: the last tasks or schedules came without their contents, as the user has no right to
	// see them (Payloads).
	hidden bool
}

// dial returns a client of the dashboard of a target. It sends nothing yet.
func (t *target) dial() (*remote, error) {
	u, err := url.Parse(t.url)
	if err != nil {
		return nil, coded(exitUsage, fmt.Errorf("-url %q: %w", t.url, err))
	}
	if u.Scheme != "http" && u.Scheme != "https" || u.Host == "" || u.RawQuery != "" || u.Fragment != "" {
		return nil, coded(exitUsage, fmt.Errorf("-url %q is not like https://host/path/", t.url))
	}
	if u.User != nil { // other users can see the command line
		return nil, coded(exitUsage, errors.New("-url has credentials: set CODEQ_USER and CODEQ_PASSWORD, or CODEQ_TOKEN, in the environment"))
	}
	header := http.Header{"Accept": {"application/json"}}
	token, user, password := t.app.env("CODEQ_TOKEN"), t.app.env("CODEQ_USER"), t.app.env("CODEQ_PASSWORD")
	switch {
	case token != "" && (user != "" || password != ""):
		return nil, coded(exitUsage, errors.New("CODEQ_TOKEN, and CODEQ_USER with CODEQ_PASSWORD, exclude each other"))
	case token != "":
		header.Set("Authorization", "Bearer "+token)
	case user != "" || password != "":
		r := http.Request{Header: header}
		r.SetBasicAuth(user, password)
	}
	client := &http.Client{CheckRedirect: func(r *http.Request, via []*http.Request) error {
		// The credentials are for the host of -url, and a change is sent once.
		if r.URL.Host != via[0].URL.Host || r.URL.Scheme != via[0].URL.Scheme || via[0].Method != http.MethodGet || len(via) > 4 {
			return fmt.Errorf("it redirects to %s", r.URL)
		}
		return nil
	}}
	return &remote{base: u.JoinPath("api/v1/"), header: header, client: client}, nil
}

// Close ends the connections.
func (r *remote) Close() error {
	r.client.CloseIdleConnections()
	return nil
}

// maxReply bounds the bytes read of an answer.
const maxReply = 1 << 30

// kinds maps the error kinds of the API to errors.
var kinds = map[string]error{
	"invalid": codeq.ErrInvalid, "not-found": codeq.ErrNotFound, "duplicate": codeq.ErrDuplicate, "not-waiting": codeq.ErrNotWaiting, "not-empty": codeq.ErrNotEmpty,
	"cannot-lead": codeq.ErrCannotLead, "no-cluster": codeq.ErrNoCluster, "disk-full": codeq.ErrDiskFull, "uncertain": codeq.ErrUncertain,
	"not-leader": codeq.ErrNotLeader, "not-served": codeq.ErrNotServed, "closed": codeq.ErrClosed, "failed": codeq.ErrFailed, "stalled": codeq.ErrStalled,
	"corrupt": codeq.ErrCorrupt, "format": codeq.ErrFormat, "denied": fs.ErrPermission, "host": fs.ErrPermission, "busy": errNoAnswer, "canceled": errNoAnswer,
}

// errNoAnswer: the dashboard had no time for an answer.
var errNoAnswer = coded(exitNotNow, errors.New("no answer in time"))

// apiError is an error in an answer of the API.
type apiError struct {
	text string
	is   error      // nil: of a kind that has no error of its own
	ids  []codeq.ID // of a batch of tasks that is stored in part; zero: that one is not
}

// errorOfKind returns an error of the API. A change may have been made although its answer is
// "canceled" or "closed".
func errorOfKind(kind, text string, change bool) *apiError {
	if change && (kind == "canceled" || kind == "closed") {
		return &apiError{text: codeq.ErrUncertain.Error() + ": " + text, is: codeq.ErrUncertain}
	}
	return &apiError{text: text, is: kinds[kind]}
}

func (e *apiError) Error() string { return e.text }
func (e *apiError) Unwrap() error { return e.is }

// uncertain returns the error of a change that may have been made. It precedes the exit codes in
// err.
func uncertain(err error) error {
	return coded(exitUncertain, fmt.Errorf("%w: %w", codeq.ErrUncertain, err))
}

// send sends a request. It returns an error if there is no answer, or if the answer is not a
// success.
func (r *remote) send(ctx context.Context, method, route string, query url.Values, body any) (*http.Response, error) {
	if err := ctx.Err(); err != nil {
		return nil, err // nothing was sent
	}
	var from io.Reader
	if body != nil {
		b, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		from = bytes.NewReader(b)
	}
	u := r.base.JoinPath(route)
	u.RawQuery = query.Encode()
	req, err := http.NewRequestWithContext(ctx, method, u.String(), from)
	if err != nil {
		return nil, err
	}
	req.Header = r.header.Clone()
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := r.client.Do(req)
	if err != nil {
		if ctx.Err() != nil {
			err = errors.Join(err, ctx.Err())
		}
		dial := (*net.OpError)(nil)
		sent := !errors.As(err, &dial) || dial.Op != "dial"
		switch {
		case method == http.MethodPost && sent:
			return nil, uncertain(err) // it may have arrived
		case ctx.Err() != nil:
			return nil, err
		}
		return nil, coded(exitNoQueue, err)
	}
	if resp.StatusCode/100 == 2 {
		return resp, nil
	}
	defer func() { _ = resp.Body.Close() }() // already read as far as needed
	return nil, errorOf(resp)
}

// errorOf reads the error of an answer.
func errorOf(resp *http.Response) error {
	change := resp.Request.Method == http.MethodPost
	var e struct {
		Error, Kind string
		IDs         []codeq.ID
	}
	text, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err == nil && json.Unmarshal(text, &e) == nil && e.Kind != "" {
		of := errorOfKind(e.Kind, e.Error, change)
		of.ids = e.IDs
		return of
	}
	err = fmt.Errorf("%s %s: %s", resp.Request.Method, resp.Request.URL.Redacted(), resp.Status)
	switch resp.StatusCode {
	case http.StatusUnauthorized, http.StatusForbidden, http.StatusProxyAuthRequired:
		return coded(exitDenied, err)
	case http.StatusNotFound:
		return coded(exitNoQueue, fmt.Errorf("%w: no dashboard is there", err))
	case http.StatusBadGateway, http.StatusGatewayTimeout:
		if change {
			return uncertain(err)
		}
		return coded(exitNotNow, err)
	case http.StatusServiceUnavailable, http.StatusTooManyRequests:
		return coded(exitNotNow, err)
	}
	return err
}

// do sends a request and decodes the answer; with a nil reply it ignores the answer.
func (r *remote) do(ctx context.Context, method, route string, query url.Values, body, reply any) error {
	resp, err := r.send(ctx, method, route, query, body)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }() // already read as far as needed
	if !strings.HasPrefix(resp.Header.Get("Content-Type"), "application/json") {
		return coded(exitNoQueue, fmt.Errorf("%s answers %q and no JSON: it is no dashboard, or behind a page to log in",
			r.base.Redacted(), resp.Header.Get("Content-Type")))
	}
	if reply == nil {
		return nil
	}
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxReply)).Decode(reply); err != nil {
		err = fmt.Errorf("%s: %w", route, err)
		if method == http.MethodPost {
			err = uncertain(err)
		}
		return err
	}
	return nil
}

func (r *remote) get(ctx context.Context, route string, query url.Values, reply any) error {
	return r.do(ctx, http.MethodGet, route, query, nil, reply)
}

func (r *remote) post(ctx context.Context, route string, query url.Values, body, reply any) error {
	return r.do(ctx, http.MethodPost, route, query, body, reply)
}

// of returns a query of pairs of names and values, without empty values.
func of(pairs ...string) url.Values {
	v := make(url.Values)
	for i := 0; i < len(pairs); i += 2 {
		if pairs[i+1] != "" {
			v.Set(pairs[i], pairs[i+1])
		}
	}
	return v
}

func (r *remote) Info(ctx context.Context) ([]codeq.QueueInfo, error) {
	var reply struct{ Queues []codeq.QueueInfo }
	err := r.get(ctx, "info", nil, &reply)
	return reply.Queues, err
}

func (r *remote) TotalsByDay(ctx context.Context, queue string) ([]codeq.DayTotals, error) {
	var reply struct{ Days []codeq.DayTotals }
	err := r.get(ctx, "days", of("queue", queue), &reply)
	return reply.Days, err
}

func (r *remote) Get(ctx context.Context, id codeq.ID) (*codeq.TaskInfo, error) {
	return r.task(ctx, "task", of("id", id.String()))
}

func (r *remote) FindByKey(ctx context.Context, k codeq.UniqueKey) (*codeq.TaskInfo, error) {
	return r.task(ctx, "find", of("queue", k.Queue, "tenant", k.Tenant, "group", k.Group, "limit-key", k.LimitKey, "key", k.Key))
}

func (r *remote) task(ctx context.Context, route string, query url.Values) (*codeq.TaskInfo, error) {
	var reply struct {
		Task   *codeq.TaskInfo
		Hidden bool
	}
	if err := r.get(ctx, route, query, &reply); err != nil {
		return nil, err
	}
	r.hidden = reply.Hidden
	if reply.Task == nil {
		return nil, errors.New("the dashboard has answered without a task")
	}
	return reply.Task, nil
}

func (r *remote) ListPage(ctx context.Context, o codeq.PageOptions) (*codeq.Page, error) {
	q := of("queue", o.Queue, "kind", o.Kind, "group", o.Group, "key", o.Key, "error", o.ErrorKind, "text", o.Text, "cursor", o.Cursor)
	for _, s := range o.States {
		q.Add("state", s.String())
	}
	for _, t := range o.Tenants {
		q.Add("tenant", t)
	}
	for name, at := range map[string]time.Time{"from": o.From, "to": o.To} {
		if !at.IsZero() {
			q.Set(name, at.UTC().Format(time.RFC3339Nano))
		}
	}
	if o.Contents {
		q.Set("contents", "true")
	}
	if o.Newest {
		q.Set("newest", "true")
	}
	if !o.NoPayload {
		q.Set("payloads", "true")
	}
	if o.Limit != 0 {
		q.Set("limit", strconv.Itoa(o.Limit))
	}
	var reply struct {
		codeq.Page
		Hidden bool
	}
	if err := r.get(ctx, "tasks", q, &reply); err != nil {
		return nil, err
	}
	r.hidden = reply.Hidden
	return &reply.Page, nil
}

func (r *remote) Schedules(ctx context.Context) ([]codeq.ScheduleInfo, error) {
	var reply struct {
		Schedules []codeq.ScheduleInfo
		Hidden    bool
	}
	err := r.get(ctx, "schedules", nil, &reply)
	r.hidden = reply.Hidden
	return reply.Schedules, err
}

func (r *remote) Settings(queue string) (s codeq.Settings, err error) {
	err = r.get(context.Background(), "settings", of("queue", queue), &s)
	return s, err
}

func (r *remote) StorageStats() (*codeq.StorageStats, error) {
	s := new(codeq.StorageStats)
	err := r.get(context.Background(), "storage", nil, s)
	return s, err
}

// ProduceBatch returns the same IDs and errors as codeq.Queue.ProduceBatch; but if only a part is
// stored, one error is that of the whole rest.
func (r *remote) ProduceBatch(ctx context.Context, tasks []codeq.Task) ([]codeq.ID, error) {
	var reply struct {
		IDs        []codeq.ID
		Duplicates []*codeq.DuplicateError
	}
	if err := r.post(ctx, "tasks", nil, struct{ Tasks []codeq.Task }{tasks}, &reply); err != nil {
		if e, ok := errors.AsType[*apiError](err); ok && len(e.ids) == len(tasks) {
			return e.ids, err
		}
		return nil, err
	}
	if len(reply.Duplicates) == 0 {
		return reply.IDs, nil
	}
	taken := &codeq.BatchError{Errors: make([]error, len(tasks))}
	for _, d := range reply.Duplicates {
		if d.Index >= 0 && d.Index < len(tasks) {
			taken.Errors[d.Index] = d
		}
	}
	return reply.IDs, taken
}

func (r *remote) Cancel(ctx context.Context, id codeq.ID) error {
	return r.post(ctx, "task/cancel", of("id", id.String()), nil, nil)
}

func (r *remote) RedriveDeadFrom(ctx context.Context, id codeq.ID, step string) error {
	return r.post(ctx, "task/redrive", of("id", id.String(), "step", step), nil, nil)
}

func (r *remote) Forget(ctx context.Context, id codeq.ID) error {
	return r.post(ctx, "task/forget", of("id", id.String()), nil, nil)
}

func (r *remote) SetPriority(ctx context.Context, id codeq.ID, priority int) error {
	return r.post(ctx, "task/priority", of("id", id.String(), "priority", strconv.Itoa(priority)), nil, nil)
}

func (r *remote) SetRunAt(ctx context.Context, id codeq.ID, t time.Time) error {
	at := "" // now
	if !t.IsZero() {
		at = t.UTC().Format(time.RFC3339Nano)
	}
	return r.post(ctx, "task/run-at", of("id", id.String(), "at", at), nil, nil)
}

// bulkJob is a bulk change in the dashboard's process.
type bulkJob struct {
	ID          string
	Ended       time.Time
	Result      codeq.BulkResult
	Error, Kind string
}

// err returns the error of the job.
func (j *bulkJob) err() error {
	if j.Error == "" {
		return nil
	}
	return errorOfKind(j.Kind, j.Error, true)
}

// bulkWait bounds the time that one request waits for the end of a job.
const bulkWait = "20s"

// Bulk starts a job and waits for its end. If ctx ends first, it stops the job.
func (r *remote) Bulk(ctx context.Context, o codeq.BulkOptions) (codeq.BulkResult, error) {
	body := struct {
		Action                codeq.BulkAction
		States                []codeq.State
		Queue                 string    `json:",omitzero"`
		Tenants               []string  `json:",omitempty"`
		Group, Key, ErrorKind string    `json:",omitzero"`
		Kind, Text            string    `json:",omitzero"`
		Contents              bool      `json:",omitzero"`
		From, To              time.Time `json:",omitzero"`
		Priority              int       `json:",omitzero"`
		ToQueue               string    `json:",omitzero"`
		Rate                  float64   `json:",omitzero"`
		DryRun                bool      `json:",omitzero"`
		Cursor                string    `json:",omitzero"`
	}{
		o.Action, o.States, o.Queue, o.Tenants, o.Group, o.Key, o.ErrorKind, o.Kind, o.Text, o.Contents, o.From.UTC(), o.To.UTC(),
		o.Priority, o.ToQueue, o.Rate, o.DryRun, o.Cursor,
	}
	var job bulkJob
	if err := r.post(ctx, "bulk", nil, body, &job); err != nil {
		return codeq.BulkResult{}, err
	}
	for job.Ended.IsZero() {
		err := r.get(ctx, "bulk", of("id", job.ID, "wait", bulkWait), &job)
		if err == nil {
			continue
		}
		if ctx.Err() == nil {
			return job.Result, uncertain(fmt.Errorf("bulk %s: %w", job.ID, err))
		}
		late, stop := context.WithTimeout(context.WithoutCancel(ctx), 10*time.Second)
		defer stop()
		stopped := r.post(late, "bulk/stop", of("id", job.ID), nil, nil)
		if stopped == nil {
			stopped = r.get(late, "bulk", of("id", job.ID, "wait", "5s"), &job)
		}
		if stopped != nil || job.Ended.IsZero() {
			return job.Result, uncertain(fmt.Errorf("bulk %s: %w", job.ID, ctx.Err()))
		}
		return job.Result, errors.Join(job.err(), ctx.Err())
	}
	return job.Result, job.err()
}

// Configure sends only the settings that change alters, so that concurrent changes of others stay.
func (r *remote) Configure(ctx context.Context, queue string, change func(*codeq.Settings)) error {
	old, err := r.Settings(queue)
	if err != nil {
		return err
	}
	now := old
	change(&now)
	fields := make(map[string]any)
	set := func(name string, differs bool, value any) {
		if differs {
			fields[name] = value
		}
	}
	set("Paused", old.Paused != now.Paused, now.Paused)
	set("Concurrency", old.Concurrency != now.Concurrency, now.Concurrency)
	set("ConcurrencyPerKey", old.ConcurrencyPerKey != now.ConcurrencyPerKey, now.ConcurrencyPerKey)
	set("Rate", old.Rate != now.Rate, now.Rate)
	set("Burst", old.Burst != now.Burst, now.Burst)
	set("TenantWeights", !maps.Equal(old.TenantWeights, now.TenantWeights), now.TenantWeights)
	set("Retention", old.Retention != now.Retention, now.Retention)
	set("MaxAttempts", old.MaxAttempts != now.MaxAttempts, now.MaxAttempts)
	set("Backoff", old.Backoff != now.Backoff, now.Backoff)
	set("Timeout", old.Timeout != now.Timeout, now.Timeout)
	set("RetryFirst", old.RetryFirst != now.RetryFirst, now.RetryFirst)
	set("DeadRetention", old.DeadRetention != now.DeadRetention, now.DeadRetention)
	set("DeadLetterQueue", old.DeadLetterQueue != now.DeadLetterQueue, now.DeadLetterQueue)
	set("HoldGroups", old.HoldGroups != now.HoldGroups, now.HoldGroups)
	if len(fields) == 0 {
		return nil
	}
	return r.post(ctx, "settings", of("queue", queue), fields, nil)
}

func (r *remote) SetSchedule(ctx context.Context, s codeq.Schedule) error {
	return r.post(ctx, "schedules", nil, s, nil)
}

func (r *remote) DeleteQueue(ctx context.Context, queue string) error {
	return r.post(ctx, "queue/delete", of("queue", queue), nil, nil)
}

func (r *remote) DeleteSchedule(ctx context.Context, name string) error {
	return r.post(ctx, "schedule/delete", of("name", name), nil, nil)
}

func (r *remote) TriggerSchedule(ctx context.Context, name string) (codeq.ID, error) {
	var reply struct{ ID codeq.ID }
	err := r.post(ctx, "schedule/trigger", of("name", name), nil, &reply)
	return reply.ID, err
}

// Workers leaves out programs that claim by themselves, as codeq.Queue.Workers does.
func (r *remote) Workers(ctx context.Context) (list []codeq.WorkerInfo, err error) {
	var reply struct {
		Workers []struct {
			codeq.WorkerInfo
			Claims bool
		}
	}
	err = r.get(ctx, "workers", nil, &reply)
	for _, w := range reply.Workers {
		if !w.Claims {
			list = append(list, w.WorkerInfo)
		}
	}
	return list, err
}

func (r *remote) QuietWorkers(ctx context.Context, name string) error {
	return r.post(ctx, "workers/quiet", workersQuery(name), nil, nil)
}

func (r *remote) ResumeWorkers(ctx context.Context, name string) error {
	return r.post(ctx, "workers/resume", workersQuery(name), nil, nil)
}

func workersQuery(name string) url.Values {
	if name == "" {
		return of("all", "true")
	}
	return of("name", name)
}

func (r *remote) ClusterStatus(ctx context.Context) (*codeq.ClusterStatus, error) {
	s := new(codeq.ClusterStatus)
	if err := r.get(ctx, "cluster", nil, s); err != nil {
		return nil, err
	}
	return s, nil
}

func (r *remote) TransferLeadership(ctx context.Context, shard int, node string) error {
	return r.post(ctx, "cluster/transfer", of("shard", strconv.Itoa(shard), "node", node), nil, nil)
}

func (r *remote) Drain(ctx context.Context) error {
	return r.post(ctx, "cluster/drain", nil, nil, nil)
}

func (r *remote) Undrain(ctx context.Context) error {
	return r.post(ctx, "cluster/undrain", nil, nil, nil)
}

// stream is a subscription by server-sent events.
type stream struct {
	body io.ReadCloser
	in   *bufio.Scanner
	lost uint64
}

// maxEvent bounds a line of a stream.
const maxEvent = 1 << 20

// subscribe starts a stream of events. It ends with ctx.
func (r *remote) subscribe(ctx context.Context, o codeq.SubscribeOptions) (*stream, error) {
	q := url.Values{"queue": o.Queues}
	for _, k := range o.Kinds {
		q.Add("kind", k.String())
	}
	resp, err := r.send(ctx, http.MethodGet, "events", q, nil)
	if err != nil {
		return nil, err
	}
	if !strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
		_ = resp.Body.Close() // nothing to read
		return nil, coded(exitNoQueue, fmt.Errorf("%s answers no events", r.base.Redacted()))
	}
	s := &stream{body: resp.Body, in: bufio.NewScanner(resp.Body)}
	s.in.Buffer(nil, maxEvent)
	return s, nil
}

func (s *stream) Lost() uint64 { return s.lost }
func (s *stream) Close()       { _ = s.body.Close() } // it was only read

// Next returns the next event. It returns ErrNotServed at the end of the stream, which comes after
// some minutes: the caller may subscribe again.
func (s *stream) Next(ctx context.Context) (e codeq.Event, err error) {
	kind, data := "", ""
	for s.in.Scan() {
		line := s.in.Text()
		name, value, _ := strings.Cut(line, ":")
		value = strings.TrimPrefix(value, " ")
		switch {
		case name == "event":
			kind = value
		case name == "data":
			data += value
		case line != "":
		case kind == "task":
			return e, json.Unmarshal([]byte(data), &e)
		case kind == "lost":
			if s.lost, err = strconv.ParseUint(data, 10, 64); err != nil {
				return e, err
			}
			kind, data = "", ""
		case kind == "end":
			return e, fmt.Errorf("%w: the dashboard has ended the events: %s", codeq.ErrNotServed, data)
		default:
			kind, data = "", ""
		}
	}
	if ctx.Err() != nil {
		return e, ctx.Err()
	}
	return e, errors.Join(fmt.Errorf("%w: the stream of events has ended", codeq.ErrNotServed), s.in.Err())
}
