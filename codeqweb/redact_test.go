package codeqweb_test

import (
	"context"
	"errors"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqweb"
)

// TestRedactHidesFromFilters: a list does not reveal by its filter what Options.Redact removes, and
// the names of tenants that wait are those that it shows.
func TestRedactHidesFromFilters(t *testing.T) {
	t.Parallel()
	opts := as(codeqweb.All)
	opts.Redact = func(task *codeq.TaskInfo) {
		if task.Tenant == "hidden" {
			task.Tenant, task.Group, task.Kind, task.Unique, task.LastError, task.History = "some", "", "", codeq.Unique{}, "", nil
		}
	}
	s := open(t, codeq.Options{Shards: 1}, opts)
	task := func(tenant string) codeq.Task {
		return codeq.Task{Queue: "a", Tenant: tenant, Group: "group of " + tenant, Kind: "kind of " + tenant, Unique: codeq.Unique{Key: "key of " + tenant}}
	}
	for _, tenant := range []string{"hidden", "shown"} {
		s.dead(task(tenant), "failure of "+tenant)
	}
	for _, tenant := range []string{"hidden", "shown"} {
		waits := task(tenant)
		waits.Unique.Key, waits.Group = "", ""
		s.produce(waits)
	}
	for _, screen := range []string{"/tasks?", "/api/v1/tasks?", "/save?as=csv&", "/save?as=jsonl&"} {
		for name, value := range map[string]string{"group": "group of ", "kind": "kind of ", "key": "key of ", "error": "failure of ", "tenant": ""} {
			list := func(tenant string) string {
				return screen + url.Values{name: {value + tenant}, "queue": {"a"}, "state": {"dead"}}.Encode()
			}
			const id = `task\?id=|"ID":"|\n[0-9a-f]{8}-`
			require.NotRegexp(t, id, s.get(list("hidden")), list("hidden"))
			require.Regexp(t, id, s.get(list("shown")), list("shown"))
		}
	}
	var got struct{ Tenants []struct{ Name string } }
	require.Equal(t, http.StatusOK, s.api(http.MethodGet, "tenants?queue=a", "", &got))
	require.Len(t, got.Tenants, 2)
	for _, tenant := range got.Tenants {
		require.Contains(t, []string{"some", "shown"}, tenant.Name)
	}
	require.NotContains(t, s.get("/queue?name=a"), `data-tenant="hidden"`)
}

// TestRedactHidesHistory: attempts do not show the errors that Options.Redact removes from a task,
// but those that it writes.
func TestRedactHidesHistory(t *testing.T) {
	t.Parallel()
	long := "secret " + strings.Repeat("é", 200)
	for name, redact := range map[string]func(*codeq.TaskInfo){
		"cleared": func(task *codeq.TaskInfo) { task.LastError = "" },
		"changed": func(task *codeq.TaskInfo) { task.LastError = "a hidden error" },
		"own": func(task *codeq.TaskInfo) {
			task.LastError = "a hidden error"
			for i := range task.History {
				task.History[i].Error = "of an own attempt"
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			opts := as(codeqweb.All)
			opts.Redact = redact
			s := open(t, codeq.Options{Shards: 1}, opts)
			id := s.produce(codeq.Task{Queue: "a", MaxAttempts: 5})
			for _, cause := range []string{"first secret", long} {
				l, err := s.q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}})
				require.NoError(t, err)
				after := codeq.RetryOptions{Err: errors.New(cause), After: time.Millisecond}
				require.NoError(t, s.q.Retry(t.Context(), l.Receipt, after))
			}
			for _, path := range []string{"/task?id=" + id.String(), "/api/v1/task?id=" + id.String(), "/api/v1/tasks", "/save?as=jsonl"} {
				page := s.get(path)
				require.Contains(t, page, id.String(), path)
				require.NotContains(t, page, "secret", path)
				require.Equal(t, name == "own", strings.Contains(page, "of an own attempt"), path)
				require.Equal(t, name != "own", strings.Contains(page, "(redacted)"), path)
			}
			stored, err := s.q.Get(t.Context(), id)
			require.NoError(t, err)
			require.Equal(t, "first secret", stored.History[0].Error)
		})
	}
}

// TestRedactByPayload: Options.Redact gets the payload of each task that is shown with more than
// its place, and so may hide other parts by it.
func TestRedactByPayload(t *testing.T) {
	t.Parallel()
	const secret = "patient 17"
	opts := as(codeqweb.Read | codeqweb.Payloads)
	opts.Redact = func(task *codeq.TaskInfo) {
		if string(task.Payload) != "secret" {
			return
		}
		if task.Tenant != "" {
			task.Tenant = "hidden"
		}
		if task.LastError != "" {
			task.LastError = "hidden"
		}
		if task.Progress.Note != "" {
			task.Progress.Note = "hidden"
		}
	}
	s := open(t, codeq.Options{Shards: 1}, opts)
	ctx, payload := t.Context(), []byte("secret")
	s.dead(codeq.Task{Queue: "dead", Payload: payload}, secret)
	failed := s.produce(codeq.Task{Queue: "failed", Payload: payload})
	require.NoError(t, s.q.Retry(ctx, s.claim("failed").Receipt, codeq.RetryOptions{Err: errors.New(secret), After: time.Hour}))
	s.produce(codeq.Task{Queue: "failed", Payload: payload, Tenant: secret})
	s.produce(codeq.Task{Queue: "child", Payload: payload, Tenant: secret, After: []codeq.ID{failed}})
	require.NoError(t, s.q.SetSchedule(ctx, codeq.Schedule{Name: "nightly", Every: time.Hour, Task: codeq.Task{Queue: "runs", Payload: payload}}))
	_, err := s.q.TriggerSchedule(ctx, "nightly")
	require.NoError(t, err)
	require.NoError(t, s.q.DeadLetter(ctx, s.claim("runs").Receipt, errors.New(secret)))
	require.NoError(t, s.q.Configure(ctx, "held", func(set *codeq.Settings) { set.HoldGroups = true }))
	s.dead(codeq.Task{Queue: "held", Group: "g", Payload: payload}, secret)
	waits := s.produce(codeq.Task{Queue: "held", Group: "g"})
	runs, ends := make(chan struct{}), make(chan struct{})
	defer close(ends)
	s.work("w", "works", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
		err := codeq.ReportProgress(ctx, 1, 2, secret)
		close(runs)
		<-ends
		return err
	})
	s.produce(codeq.Task{Queue: "works", Payload: payload})
	<-runs

	plain := &site{t, s.q, codeqweb.Handler(s.q, as(codeqweb.Read|codeqweb.Payloads))}
	defer func() { require.NoError(t, plain.d.Close()) }()
	for _, path := range []string{
		"/tasks?state=dead", "/api/v1/tasks", "/save?as=csv", "/search?q=patient", "/dead", "/api/v1/dead", "/queue?name=failed", "/api/v1/tenants?queue=failed",
		"/api/v1/children?id=" + failed.String(), "/schedules", "/api/v1/schedules", "/task?id=" + waits.String(), "/workers", "/api/v1/workers",
	} {
		require.Regexp(t, "patient (17|#)", plain.get(path), path)
		require.NotRegexp(t, "patient (17|#)", s.get(path), path)
	}
	require.Contains(t, s.get("/queue?name=failed"), "hidden")
	require.Contains(t, s.get("/schedules"), "hidden")
}
