package codeqweb_test

import (
	"context"
	"errors"
	"fmt"
	"html"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqweb"
)

// TestTaskActions: forms and JSON requests change tasks.
func TestTaskActions(t *testing.T) {
	ways := map[string]func(s *site, action string, id codeq.ID, pairs ...string) string{
		"page": func(s *site, action string, id codeq.ID, pairs ...string) string {
			return s.post("/task/"+action, append(pairs, "id", id.String(), "back", "task?id="+id.String())...)
		},
		"api": func(s *site, action string, id codeq.ID, pairs ...string) string {
			p := url.Values{"id": {id.String()}}
			for i := 0; i < len(pairs); i += 2 {
				p.Set(pairs[i], pairs[i+1])
			}
			var answer struct{ ID codeq.ID }
			require.Equal(s.t, http.StatusOK, s.api(http.MethodPost, "task/"+action+"?"+p.Encode(), "", &answer))
			return "id=" + answer.ID.String()
		},
	}
	for name, act := range ways {
		t.Run(name, func(t *testing.T) {
			s, ids := loaded(t, as(codeqweb.Read|codeqweb.Act))
			act(s, "cancel", ids["leased"])
			require.Equal(t, codeq.Canceled, s.task(ids["leased"]).State)
			act(s, "forget", ids["canceled"])
			_, err := s.q.Get(t.Context(), ids["canceled"])
			require.ErrorIs(t, err, codeq.ErrNotFound)
			require.Equal(t, http.StatusBadRequest, s.api(http.MethodPost, "task/redrive?step=x&id="+ids["dead"].String(), "", nil), "it has no steps")
			act(s, "redrive", ids["dead"])
			require.Equal(t, codeq.Ready, s.task(ids["dead"]).State)
			act(s, "run-at", ids["scheduled"], "at", "2099-01-02T03:04:05Z")
			require.Equal(t, "2099-01-02T03:04:05Z", s.task(ids["scheduled"]).At.UTC().Format(time.RFC3339))
			act(s, "run-at", ids["scheduled"])
			require.Equal(t, codeq.Ready, s.task(ids["scheduled"]).State)
			act(s, "priority", ids["ready"], "priority", "9")
			require.Equal(t, 9, s.task(ids["ready"]).Priority)

			where := act(s, "clone", ids["ready"], "queue", "other", "priority", "1")
			id, err := codeq.ParseID(where[strings.LastIndex(where, "id=")+3:][:36])
			require.NoError(t, err)
			require.NotEqual(t, ids["ready"], id)
			made := s.task(id)
			require.Equal(t, "other", made.Queue)
			require.Equal(t, 1, made.Priority)
			require.Equal(t, `{"secret":"xyzzy"}`, string(made.Payload))
			require.Equal(t, map[string]string{"trace": "t-1"}, made.Headers)
			require.Empty(t, made.Unique.Key)
		})
	}
}

// TestBack: after a change the browser goes only to the page that the form names.
func TestBack(t *testing.T) {
	s, _ := loaded(t, as(codeqweb.All))
	for back, want := range map[string]string{
		"queue?name=mail&span=1h": "./queue?did=pause&name=mail&span=1h",
		"":                        "./?did=pause",
		"https://example.com/":    "./?did=pause",
		"//example.com/tasks":     "./?did=pause",
		"javascript:alert(1)":     "./?did=pause",
		"../../etc":               "./?did=pause",
		"task/cancel":             "./?did=pause",
		"/tasks":                  "./?did=pause",
	} {
		require.Equal(t, want, s.post("/pause", "queue", "mail", "back", back), back)
	}
	require.Contains(t, s.get("/queue?name=mail&did=pause"), "The queue is paused.")
	require.NotContains(t, s.get("/queue?name=mail&did=nonsense"), "nonsense")
	require.Equal(t, "./../tasks?did=task%2Fcancel&state=ready", s.post("/task/cancel", "id", s.produce(codeq.Task{Queue: "a"}).String(), "back", "tasks?state=ready"))
}

// TestBackToList: after a task is deleted, the list that led to it keeps its filter.
func TestBackToList(t *testing.T) {
	s, ids := loaded(t, as(codeqweb.All))
	back := func(from string) string {
		r := request(http.MethodGet, "/task?id="+ids["done"].String(), nil)
		r.Header.Set("Referer", from)
		_, forget, _ := strings.Cut(s.do(r).Body.String(), `action="task/forget`)
		_, value, _ := strings.Cut(forget, `name="back" value="`)
		value, _, _ = strings.Cut(value, `"`)
		return html.UnescapeString(value)
	}
	for from, want := range map[string]string{
		"https://jobs.example.com/codeq/tasks?kind=a%26b&tenant=acme": "tasks?kind=a%26b&tenant=acme",
		"http://localhost/search?q=%22%3E":                            "search?q=%22%3E",
		"http://localhost/dead?":                                      "dead?",
		"http://localhost/task?id=1":                                  "tasks?state=done",
		"":                                                            "tasks?state=done",
		"http://localhost/%zz":                                        "tasks?state=done",
	} {
		require.Equal(t, want, back(from), from)
	}
}

// TestQueueActions: settings and pauses.
func TestQueueActions(t *testing.T) {
	s, _ := loaded(t, as(codeqweb.All))
	settings := func() codeq.Settings {
		set, err := s.q.Settings("mail")
		require.NoError(t, err)
		return set
	}
	s.post("/pause", "queue", "mail")
	require.True(t, settings().Paused)
	require.Contains(t, s.get("/queue?name=mail"), "This queue is paused")
	s.post("/settings", "queue", "mail", "concurrency", "5", "concurrency-per-key", "2", "rate", "1.5", "burst", "3", "retention", "7d",
		"dead-retention", "forever", "hold-groups", "true", "tenant-weights", "acme=3\r\nodd=name=2\r\n", "max-attempts", "4", "timeout", "1m",
		"backoff-base", "2s", "backoff-factor", "1.5", "retry-first", "true", "dead-letter-queue", "failed")
	want := codeq.Settings{
		Paused: true, Concurrency: 5, ConcurrencyPerKey: 2, Rate: 1.5, Burst: 3, DeadRetention: codeq.Forever, DeadLetterQueue: "failed",
		Policy: codeq.Policy{
			MaxAttempts: 4, Timeout: time.Minute, Backoff: codeq.Backoff{Base: 2 * time.Second, Factor: 1.5}, Retention: 7 * 24 * time.Hour, RetryFirst: true,
		},
		HoldGroups: true, TenantWeights: map[string]int{"acme": 3, "odd=name": 2},
	}
	require.Equal(t, want, settings())
	require.Contains(t, s.get("/queue?name=mail"), "odd=name=2")
	s.post("/resume", "queue", "mail")
	want.Paused = false
	require.Equal(t, want, settings())

	var got codeq.Settings
	require.Equal(t, http.StatusOK, s.api(http.MethodPost, "settings?queue=mail", `{"Concurrency": 7}`, &got))
	want.Concurrency = 7
	require.Equal(t, want, got, "what is not named stays")
	require.Equal(t, want, settings())
	require.Equal(t, http.StatusOK, s.api(http.MethodPost, "settings?queue=mail", `{"TenantWeights": {"b": 2}, "HoldGroups": false, "Backoff": {"Step": 5}}`, &got))
	want.TenantWeights, want.HoldGroups, want.Backoff = map[string]int{"b": 2}, false, codeq.Backoff{Step: 5}
	require.Equal(t, want, settings())
	for _, body := range []string{`{"Nonsense": 1}`, `[]`, ``, `{"Rate": -1}`, `{} {}`} {
		require.Equal(t, http.StatusBadRequest, s.api(http.MethodPost, "settings?queue=mail", body, nil), body)
	}
	require.Equal(t, want, settings())
	require.Equal(t, http.StatusOK, s.api(http.MethodPost, "pause?queue=mail", "", &got))
	require.True(t, got.Paused)
	for _, bad := range [][]string{{"concurrency", "x"}, {"rate", "NaN"}, {"retention", "-1h"}, {"tenant-weights", "acme"}, {"tenant-weights", "acme=x"}} {
		w := s.do(request(http.MethodPost, "/settings", form(append(bad, "queue", "mail")...)))
		require.Equal(t, http.StatusBadRequest, w.Code, bad)
	}
}

// TestStaleSettings: a form changes its edited fields only, and does not undo a concurrent change.
func TestStaleSettings(t *testing.T) {
	s := open(t, codeq.Options{Shards: 1}, as(codeqweb.All))
	configure := func(f func(*codeq.Settings)) { require.NoError(t, s.q.Configure(t.Context(), "a", f)) }
	settings := func() codeq.Settings {
		set, err := s.q.Settings("a")
		require.NoError(t, err)
		return set
	}
	configure(func(set *codeq.Settings) {
		set.Concurrency, set.Rate, set.HoldGroups, set.Retention = 5, 2.5, true, 90*time.Minute
		set.TenantWeights = map[string]int{"x": 2, "y": 3}
	})
	filled := form("queue", "a")
	for _, field := range regexp.MustCompile(`name="was-([a-z-]+)" value="([^"]*)"`).FindAllStringSubmatch(s.get("/queue?name=a"), -1) {
		filled.Set("was-"+field[1], field[2])
		if field[2] != "false" { // a box that is not checked is not sent
			filled.Set(field[1], strings.ReplaceAll(field[2], "\n", "\r\n"))
		}
	}
	require.Len(t, filled, 1+2*16-1)
	sent := func(pairs ...string) *httptest.ResponseRecorder {
		f := maps.Clone(filled)
		for i := 0; i < len(pairs); i += 2 {
			f.Set(pairs[i], pairs[i+1])
		}
		return s.do(request(http.MethodPost, "/settings", f))
	}
	want := settings()
	require.Equal(t, http.StatusSeeOther, sent().Code)
	require.Equal(t, want, settings())

	configure(func(set *codeq.Settings) { set.Concurrency = 7 })
	want.Concurrency, want.Rate = 7, 9
	require.Equal(t, http.StatusSeeOther, sent("rate", "9").Code)
	require.Equal(t, want, settings(), "the concurrency that another one has set stays")
	w := sent("concurrency", "6", "burst", "4")
	require.Equal(t, http.StatusConflict, w.Code)
	require.Contains(t, w.Body.String(), "concurrency has become")
	require.Equal(t, want, settings())

	s.post("/settings", "queue", "a", "burst", "4")
	want.Burst = 4
	require.Equal(t, want, settings(), "what a form lacks stays")
	filled.Del("hold-groups")
	want.HoldGroups = false
	filled.Set("was-burst", "4")
	require.Equal(t, http.StatusSeeOther, sent("burst", "4").Code, "a box that is not checked is not sent")
	require.Equal(t, want, settings())
}

// TestScheduleActions: trigger, pause, resume, delete, set.
func TestScheduleActions(t *testing.T) {
	s, _ := loaded(t, as(codeqweb.All))
	schedule := func() codeq.ScheduleInfo {
		all, err := s.q.Schedules(t.Context())
		require.NoError(t, err)
		return all[0]
	}
	page := s.get("/schedules")
	first := schedule()
	for _, at := range first.Upcoming(5) {
		require.Contains(t, page, at.UTC().Format("2006-01-02 15:04:05"))
	}
	s.post("/schedule/pause", "name", "nightly")
	require.True(t, schedule().Paused)
	require.Contains(t, s.get("/schedules"), "paused")
	s.post("/schedule/resume", "name", "nightly")
	require.False(t, schedule().Paused)
	s.post("/schedule/trigger", "name", "nightly")
	l := s.claim("report")
	require.Equal(t, "xyzzy", string(l.Payload))
	require.Equal(t, "nightly", l.Headers[codeq.ScheduleHeader])
	_, err := time.Parse(time.RFC3339, l.Headers[codeq.TickHeader])
	require.NoError(t, err)
	s.post("/schedule/delete", "name", "nightly")
	require.Equal(t, http.StatusNotFound, s.do(request(http.MethodPost, "/schedule/trigger", form("name", "nightly"))).Code)

	require.Equal(t, http.StatusOK, s.api(http.MethodPost, "schedules", `{"Name": "often", "Every": 60000000000, "Task": {"Queue": "a"}}`, nil))
	var all struct {
		Schedules []struct {
			codeq.ScheduleInfo
			Upcoming []time.Time
		}
	}
	require.Equal(t, http.StatusOK, s.api(http.MethodGet, "schedules", "", &all))
	require.Equal(t, "often", all.Schedules[0].Name)
	require.Len(t, all.Schedules[0].Upcoming, 5)
	require.Equal(t, http.StatusBadRequest, s.api(http.MethodPost, "schedules", `{"Name": "bad"}`, nil))
}

// TestWorkerActions: one worker becomes quiet and goes on; so do all of them.
func TestWorkerActions(t *testing.T) {
	s, _ := loaded(t, as(codeqweb.All))
	s.work("worker-2", "other", func(context.Context, *codeq.Job[[]byte]) error { return nil })
	quiet := func() (names string) {
		workers, err := s.q.Workers(t.Context())
		require.NoError(t, err)
		for _, w := range workers {
			if w.Quiet {
				names += w.Name + " "
			}
		}
		return names
	}
	s.post("/workers/quiet", "name", "worker-2")
	require.Equal(t, "worker-2 ", quiet())
	require.Contains(t, s.get("/workers"), "quiet</span>")
	s.post("/workers/resume", "name", "worker-2")
	require.Empty(t, quiet())
	require.Equal(t, http.StatusOK, s.api(http.MethodPost, "workers/quiet?all=true", "", nil))
	require.Equal(t, "worker-1 worker-2 ", quiet())
	s.post("/workers/resume", "all", "true")
	require.Empty(t, quiet())
	require.Equal(t, http.StatusBadRequest, s.api(http.MethodPost, "workers/quiet", "", nil))
	require.Equal(t, http.StatusNotFound, s.api(http.MethodPost, "workers/quiet?name=nobody", "", nil))
}

// TestBulk: a form counts first, and then changes the counted tasks.
func TestBulk(t *testing.T) {
	s, ids := loaded(t, as(codeqweb.All))
	require.Contains(t, s.get("/dead"), "user # is unknown")
	where := s.post("/bulk", "state", "dead", "error", "user # is unknown", "action", "redrive", "rate", "1000", "dry", "true")
	page := s.get("/" + strings.TrimPrefix(where, "./"))
	require.Contains(t, page, `id="matched">2<`)
	require.Equal(t, codeq.Dead, s.task(ids["dead"]).State, "nothing has changed")
	again := page[strings.Index(page, `id="really"`):]
	again = again[strings.Index(again, `action="`)+8:]
	again = html.UnescapeString(again[:strings.Index(again, `"`)])
	require.NotContains(t, again, "dry")
	w := s.do(request(http.MethodPost, "/"+again, url.Values{}))
	require.Equal(t, http.StatusSeeOther, w.Code, "%s: %s", again, w.Body)
	page = s.get("/" + strings.TrimPrefix(w.Header().Get("Location"), "./"))
	require.Contains(t, page, `id="changed">2<`)
	require.Equal(t, codeq.Ready, s.task(ids["dead"]).State)
	require.Equal(t, codeq.Ready, s.task(ids["dead2"]).State)
	require.Contains(t, s.get("/bulks"), "redrive")

	s.post("/bulk", "state", "scheduled", "queue", "mail", "action", "move", "to-queue", "elsewhere")
	s.post("/bulk", "state", "ready", "queue", "mail", "tenant", "acme", "action", "set-priority", "to-priority", "8")
	require.Equal(t, 8, s.task(ids["dead"]).Priority)
	require.Equal(t, http.StatusBadRequest, s.do(request(http.MethodPost, "/bulk", form("state", "dead", "action", "nonsense"))).Code)

	// All of the filter is said before the change is confirmed.
	where = s.post("/bulk?state=done&text=no+such&contents=true&no-tenant=true&action=purge&dry=true")
	require.Contains(t, s.get("/"+strings.TrimPrefix(where, "./")), "<bdi> done, text no such, also in contents, no tenant</bdi>")
}

type jsonJob struct {
	ID      string
	Ended   time.Time
	Seen    int
	DryRun  bool
	Result  *codeq.BulkResult
	Error   string
	Kind    string
	Started time.Time
}

// TestBulkJobs: a program begins a change, waits for it, and stops it; few run at a time.
func TestBulkJobs(t *testing.T) {
	s := open(t, codeq.Options{Shards: 1}, as(codeqweb.All))
	for range 100 {
		s.produce(codeq.Task{Queue: "a"})
	}
	var j jsonJob
	require.Equal(t, http.StatusAccepted, s.api(http.MethodPost, "bulk", `{"Action": "cancel", "States": ["ready"], "DryRun": true}`, &j))
	require.Equal(t, http.StatusOK, s.api(http.MethodGet, "bulk?wait=10s&id="+j.ID, "", &j))
	require.False(t, j.Ended.IsZero())
	require.Equal(t, 100, j.Result.Matched)
	require.Equal(t, http.StatusBadRequest, s.api(http.MethodPost, "bulk", `{"Action": "nonsense"}`, nil))

	j = jsonJob{}
	require.Equal(t, http.StatusAccepted, s.api(http.MethodPost, "bulk", `{"Action": "cancel", "States": ["ready"], "Rate": 0.1}`, &j))
	for range 3 {
		require.Equal(t, http.StatusAccepted, s.api(http.MethodPost, "bulk", `{"Action": "cancel", "States": ["ready"], "Rate": 0.1}`, nil))
	}
	require.Equal(t, http.StatusServiceUnavailable, s.api(http.MethodPost, "bulk", `{"Action": "cancel", "States": ["ready"], "Rate": 0.1}`, nil))
	require.Equal(t, http.StatusOK, s.api(http.MethodPost, "bulk/stop?id="+j.ID, "", &j))
	require.Equal(t, "canceled", j.Kind)
	require.Less(t, j.Result.Changed, 100)
	var all struct{ Jobs []jsonJob }
	require.Equal(t, http.StatusOK, s.api(http.MethodGet, "bulk", "", &all))
	require.Len(t, all.Jobs, 5)
	require.Equal(t, "5", all.Jobs[0].ID)
	require.Equal(t, http.StatusNotFound, s.api(http.MethodGet, "bulk?id=77", "", nil))
	require.NoError(t, s.d.Close(), "it ends those that run")
	require.Equal(t, http.StatusServiceUnavailable, s.api(http.MethodPost, "bulk", `{"Action": "cancel", "States": ["ready"]}`, nil))
}

// TestBulkProgress: a running change says how far it is, at what rate, and how long it takes.
func TestBulkProgress(t *testing.T) {
	s := open(t, codeq.Options{Shards: 1}, as(codeqweb.All))
	_, err := s.q.ProduceBatch(t.Context(), slices.Repeat([]codeq.Task{{Queue: "a"}}, 50))
	require.NoError(t, err)
	s.post("/bulk", "action", "cancel", "state", "ready", "rate", "2", "expected", "50")
	progress := regexp.MustCompile(`it runs; \d+ of 50, [0-9.]+ a second, \d+ s left <progress max="50" value="\d+"`)
	require.Eventually(t, func() bool { return progress.MatchString(s.get("/bulk?id=1")) }, 10*time.Second, 10*time.Millisecond)
	require.Equal(t, http.StatusBadRequest, s.do(request(http.MethodPost, "/bulk", form("action", "cancel", "expected", "many"))).Code)
}

// TestSlowDryRun: the live part of a bulk page has the buttons: a page opened before the end gets
// the final ones later.
func TestSlowDryRun(t *testing.T) {
	s := open(t, codeq.Options{Shards: 1}, as(codeqweb.All))
	for range 3 {
		s.produce(codeq.Task{Queue: "a"})
	}
	follows := func(id, button string) {
		t.Helper()
		require.Regexp(t, `(?s)<div id="live">.*id="`+button+`".*</div>\n<p><a href="bulks">`, s.get("/bulk?id="+id))
	}
	require.Equal(t, http.StatusAccepted, s.api(http.MethodPost, "bulk", `{"Action": "cancel", "States": ["ready"], "Rate": 0.1}`, nil))
	follows("1", "stop")
	s.post("/bulk", "action", "cancel", "state", "ready", "dry", "true")
	follows("2", "do-it")
	require.NotContains(t, s.get("/bulk?id=2"), `id="stop"`)
}

// TestAudit: every change is audited with its user; refused ones only by the hook.
func TestAudit(t *testing.T) {
	var told []codeqweb.Entry
	access := codeqweb.All
	s := open(t, codeq.Options{}, &codeqweb.Options{
		Access: func(*http.Request) codeqweb.Access { return access },
		Audit: func(r *http.Request, e *codeqweb.Entry) {
			e.User = r.Header.Get("User")
			told = append(told, *e)
		},
	})
	id := s.produce(codeq.Task{Queue: "a"})
	r := request(http.MethodPost, "/task/priority", form("id", id.String(), "priority", "4"))
	r.Header.Set("User", "ada <b>")
	require.Equal(t, http.StatusSeeOther, s.do(r).Code)
	require.Equal(t, http.StatusNotFound, s.api(http.MethodPost, "task/redrive?id="+id.String(), "", nil))
	access = codeqweb.Read
	require.Equal(t, http.StatusForbidden, s.do(request(http.MethodPost, "/task/cancel", form("id", id.String()))).Code)
	access = codeqweb.All

	require.Len(t, told, 3)
	require.Equal(t, "task/priority", told[0].Action)
	require.Equal(t, "ada <b>", told[0].User)
	require.Equal(t, id.String(), told[0].Target)
	require.Equal(t, "priority 4", told[0].Detail)
	require.Empty(t, told[0].Error)
	require.WithinDuration(t, time.Now(), told[0].Time, time.Minute)
	require.Equal(t, "task/redrive", told[1].Action)
	require.Contains(t, told[1].Error, "not found")
	require.True(t, told[2].Refused)

	var kept struct{ Entries []codeqweb.Entry }
	require.Equal(t, http.StatusOK, s.api(http.MethodGet, "audit", "", &kept))
	require.Len(t, kept.Entries, 2)
	require.Equal(t, "task/redrive", kept.Entries[0].Action, "the newest first")
	page := s.get("/audit")
	require.Contains(t, page, "ada &lt;b&gt;")
	for n := range 1100 {
		require.Equal(t, http.StatusNotFound, s.api(http.MethodPost, fmt.Sprint("schedule/delete?name=", n), "", nil))
	}
	require.Equal(t, http.StatusOK, s.api(http.MethodGet, "audit", "", &kept))
	require.Len(t, kept.Entries, 1000)
	require.Equal(t, "1099", kept.Entries[0].Target)
}

// TestProduce: a program produces tasks, and gets the duplicates.
func TestProduce(t *testing.T) {
	s := open(t, codeq.Options{Shards: 1}, as(codeqweb.All))
	var made struct {
		IDs        []codeq.ID
		Duplicates []codeq.DuplicateError
	}
	body := `{"Tasks": [{"Queue": "a", "Payload": "aGk="}, {"Queue": "a", "Unique": {"Key": "k"}}]}`
	require.Equal(t, http.StatusOK, s.api(http.MethodPost, "tasks", body, &made))
	require.Len(t, made.IDs, 2)
	require.Empty(t, made.Duplicates)
	require.Equal(t, "hi", string(s.task(made.IDs[0]).Payload))
	first := made.IDs[1]
	require.Equal(t, http.StatusOK, s.api(http.MethodPost, "tasks", body, &made))
	require.Equal(t, []codeq.DuplicateError{{Key: "k", ID: first, Index: 1}}, made.Duplicates)
	var found struct{ Task codeq.TaskInfo }
	require.Equal(t, http.StatusOK, s.api(http.MethodGet, "find?queue=a&key=k", "", &found))
	require.Equal(t, first, found.Task.ID)
	require.Equal(t, http.StatusOK, s.api(http.MethodPost, "release-key?queue=a&key=k", "", nil))
	require.Equal(t, http.StatusNotFound, s.api(http.MethodGet, "find?queue=a&key=k", "", nil))
	for _, bad := range []string{`{}`, `{"Tasks": [{}]}`, `{"Tasks": [{"Queue": "a", "Priority": 10}]}`, `nonsense`} {
		require.Equal(t, http.StatusBadRequest, s.api(http.MethodPost, "tasks", bad, nil), bad)
	}
	r := httptest.NewRequest(http.MethodPost, "http://localhost/api/v1/settings?queue=a", strings.NewReader(`{"Rate": 1`+strings.Repeat(" ", 2<<20)+`}`))
	require.Equal(t, http.StatusRequestEntityTooLarge, s.do(r).Code)
}

// TestFarTimes: times of the year 9999 are shown, listed and accepted in every local zone; times
// that JSON cannot write in UTC are refused.
func TestFarTimes(t *testing.T) {
	s := open(t, codeq.Options{Shards: 1}, as(codeqweb.All))
	var made struct{ IDs []codeq.ID }
	require.Equal(t, http.StatusOK, s.api(http.MethodPost, "tasks", `{"Tasks": [{"Queue": "a", "RunAt": "9999-12-31T23:59:59Z"}]}`, &made))
	var page codeq.Page
	const bounds = "from=9999-12-31T23:59:59Z&to=9999-12-31T23:59:59.999Z"
	require.Equal(t, http.StatusOK, s.api(http.MethodGet, "tasks?state=scheduled&"+bounds, "", &page))
	require.Len(t, page.Tasks, 1)
	require.Equal(t, http.StatusOK, s.api(http.MethodGet, "task?id="+made.IDs[0].String(), "", nil))
	const early, late = `"0000-01-01T00:00:00+01:00"`, `"9999-12-31T23:59:59-12:00"`
	require.Equal(t, http.StatusAccepted, s.api(http.MethodPost, "bulk",
		`{"Action": "cancel", "States": ["scheduled"], "DryRun": true, "From": "9999-12-31T23:59:59+12:00", "To": "9999-12-31T23:59:59Z"}`, nil))
	require.Equal(t, http.StatusOK, s.api(http.MethodGet, "bulk", "", nil))
	for _, at := range []string{early, late} {
		for _, field := range []string{"From", "To"} {
			require.Equal(t, http.StatusBadRequest, s.api(http.MethodPost, "bulk", fmt.Sprintf(`{"Action": "cancel", "States": ["scheduled"], "%s": %s}`, field, at), nil))
		}
		require.Equal(t, http.StatusBadRequest, s.api(http.MethodGet, "tasks?state=scheduled&from="+url.QueryEscape(strings.Trim(at, `"`)), "", nil))
		require.Equal(t, http.StatusBadRequest, s.api(http.MethodPost, "tasks", `{"Tasks": [{"Queue": "a", "RunAt": `+late+`}]}`, nil))
	}
}

// TestRunAtYears: the time of a task is of the years 1970 to 9999; an empty one means now.
func TestRunAtYears(t *testing.T) {
	t.Parallel()
	s := open(t, codeq.Options{Shards: 1}, as(codeqweb.All))
	at := time.Date(2099, 1, 2, 3, 4, 5, 0, time.UTC)
	id := s.produce(codeq.Task{Queue: "a", RunAt: at})
	wrong := []string{"0001-01-01T00:00", "0001-01-01T00:00:00Z", "1969-12-31T23:59:59Z", "9999-12-31T23:59:59-01:00", "10000-01-01T00:00"}
	for _, text := range wrong {
		for _, path := range []string{"/task/run-at", "/api/v1/task/run-at", "/task/clone", "/api/v1/task/clone"} {
			w := s.do(request(http.MethodPost, path+"?"+url.Values{"id": {id.String()}, "at": {text}}.Encode(), nil))
			require.Equal(t, http.StatusBadRequest, w.Code, "%s %s", path, text)
			require.Contains(t, w.Body.String(), "must be a time", "%s %s", path, text)
		}
	}
	stored, err := s.q.Get(t.Context(), id)
	require.NoError(t, err)
	require.True(t, at.Equal(stored.RunAt))
	require.NotContains(t, s.get("/tasks?state=ready"), "data-id=", "nothing was cloned")
	s.post("/task/run-at?id="+id.String(), "at", "1970-01-01T00:00")
	s.post("/task/run-at?id="+id.String(), "at", "")
	require.Contains(t, s.get("/tasks?state=ready"), id.String())
}

// TestDryRunWithCursor: the form after a dry run alters the tasks that were counted, those behind
// the cursor.
func TestDryRunWithCursor(t *testing.T) {
	t.Parallel()
	s := open(t, codeq.Options{Shards: 1}, as(codeqweb.All))
	for range 5 {
		s.dead(codeq.Task{Queue: "a"}, "e")
	}
	var list codeq.Page
	require.Equal(t, http.StatusOK, s.api(http.MethodGet, "tasks?queue=a&state=dead&limit=3", "", &list))
	var j jsonJob
	body := `{"Action": "purge", "States": ["dead"], "Queue": "a", "DryRun": true, "Cursor": "` + list.Next + `"}`
	require.Equal(t, http.StatusAccepted, s.api(http.MethodPost, "bulk", body, &j))
	require.Equal(t, http.StatusOK, s.api(http.MethodGet, "bulk?wait=10s&id="+j.ID, "", &j))
	require.Equal(t, 2, j.Result.Matched)
	again := regexp.MustCompile(`id="really"[^>]* action="([^"]*)"`).FindStringSubmatch(s.get("/bulk?id=" + j.ID))
	require.NotNil(t, again)
	_, id, _ := strings.Cut(s.post("/"+html.UnescapeString(again[1])), "id=")
	j = jsonJob{}
	require.Equal(t, http.StatusOK, s.api(http.MethodGet, "bulk?wait=10s&id="+id, "", &j))
	require.Equal(t, 2, j.Result.Changed)
	for _, task := range list.Tasks {
		require.Equal(t, codeq.Dead, s.task(task.ID).State)
	}
}

// TestRedriveFromStep: the form of a dead letter sends the exact name of a step.
func TestRedriveFromStep(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"charge", "charge  the\ncard\r\t+%41&\"", strings.Repeat("é", 64), "zero\x00width\u200b"} {
		s := open(t, codeq.Options{Shards: 1}, as(codeqweb.All))
		var runs atomic.Int64
		s.work("w", "a", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
			_, err := codeq.Step(ctx, name, func(context.Context) (int64, error) { return runs.Add(1), nil })
			return errors.Join(err, errors.New("bad"))
		})
		id := s.produce(codeq.Task{Queue: "a", MaxAttempts: 1})
		dies := func() {
			require.Eventually(t, func() bool { return s.task(id).State == codeq.Dead }, 10*time.Second, time.Millisecond)
		}
		dies()
		option := regexp.MustCompile(`<select name="([^"]*)"[^>]*><option value="">[^<]*</option><option value="([^"]*)">`).FindStringSubmatch(s.get("/task?id=" + id.String()))
		require.NotNil(t, option)
		value := html.UnescapeString(option[2])
		require.Regexp(t, `^[ -~]+$`, value, "no browser changes it")
		s.post("/task/redrive?id="+id.String(), option[1], value)
		require.Eventually(t, func() bool { return runs.Load() == 2 }, 10*time.Second, time.Millisecond)
		dies()
		require.Equal(t, http.StatusBadRequest, s.do(request(http.MethodPost, "/task/redrive?id="+id.String(), form(option[1], "%"))).Code)
	}
}

// TestJSONInUTC: JSON has no time of the local zone.
func TestJSONInUTC(t *testing.T) {
	s, ids := loaded(t, as(codeqweb.All))
	s.post("/pause", "queue", "mail")
	var j jsonJob
	require.Equal(t, http.StatusAccepted, s.api(http.MethodPost, "bulk", `{"Action": "redrive", "DryRun": true}`, &j))
	id := "id=" + ids["dead"].String()
	for _, path := range []string{
		"bulk?wait=10s&id=" + j.ID, "bulk", "audit", "info", "samples?queue=mail", "charts?queue=mail", "days?queue=mail", "tasks?payloads=true", "task?" + id, "flow?" + id,
		"children?" + id, "dead", "schedules", "workers", "storage", "usage",
	} {
		require.NotRegexp(t, `"\d{4}-\d\d-\d\dT[\d:.]+[+-][\d:]+"`, s.get("/api/v1/"+path), path)
	}
	require.Regexp(t, `"Time":"\d{4}-\d\d-\d\dT[\d:.]+Z"`, s.get("/api/v1/audit"))
	require.Regexp(t, `"Started":"\d{4}-\d\d-\d\dT[\d:.]+Z","Ended":"\d{4}-\d\d-\d\dT[\d:.]+Z"`, s.get("/api/v1/bulk"))
}
