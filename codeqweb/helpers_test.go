package codeqweb_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqweb"
)

// The local time zone of the tests is the easternmost one.
func init() { time.Local = time.FixedZone("east", 14*3600) }

// site is a dashboard of a queue, as a browser sees it.
type site struct {
	t *testing.T
	q *codeq.Queue
	d *codeqweb.Dashboard
}

// open makes a dashboard of a new queue.
func open(t *testing.T, queue codeq.Options, opts *codeqweb.Options) *site {
	t.Helper()
	q, err := codeq.Open(t.TempDir(), &queue)
	require.NoError(t, err)
	s := &site{t, q, codeqweb.Handler(q, opts)}
	t.Cleanup(func() {
		require.NoError(t, s.d.Close())
		require.NoError(t, q.Close())
	})
	return s
}

// as returns options that give every request an access.
func as(a codeqweb.Access) *codeqweb.Options {
	return &codeqweb.Options{Access: func(*http.Request) codeqweb.Access { return a }}
}

// request builds a request of a browser that shows the dashboard.
func request(method, path string, form url.Values) *http.Request {
	var body io.Reader
	if form != nil {
		body = strings.NewReader(form.Encode())
	}
	r := httptest.NewRequest(method, "http://localhost"+path, body)
	if form != nil {
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	}
	if method != http.MethodGet {
		r.Header.Set("Sec-Fetch-Site", "same-origin")
	}
	return r
}

func (s *site) do(r *http.Request) *httptest.ResponseRecorder {
	w := httptest.NewRecorder()
	s.d.ServeHTTP(w, r)
	return w
}

// get returns a page.
func (s *site) get(path string) string {
	s.t.Helper()
	w := s.do(request(http.MethodGet, path, nil))
	require.Equal(s.t, http.StatusOK, w.Code, "%s: %s", path, w.Body)
	return w.Body.String()
}

// post sends a form, and returns where the browser goes next.
func (s *site) post(path string, pairs ...string) string {
	s.t.Helper()
	w := s.do(request(http.MethodPost, path, form(pairs...)))
	require.Equal(s.t, http.StatusSeeOther, w.Code, "%s: %s", path, w.Body)
	return w.Header().Get("Location")
}

func form(pairs ...string) url.Values {
	f := make(url.Values)
	for i := 0; i < len(pairs); i += 2 {
		f.Add(pairs[i], pairs[i+1])
	}
	return f
}

// api asks for JSON, and decodes it.
func (s *site) api(method, path string, body string, into any) int {
	s.t.Helper()
	r := httptest.NewRequest(method, "http://localhost/api/v1/"+path, strings.NewReader(body))
	w := s.do(r)
	require.Equal(s.t, "application/json", w.Header().Get("Content-Type"), "%s: %s", path, w.Body)
	if into != nil {
		require.NoError(s.t, json.Unmarshal(w.Body.Bytes(), into), "%s: %s", path, w.Body)
	}
	return w.Code
}

// produce produces a task.
func (s *site) produce(task codeq.Task) codeq.ID {
	s.t.Helper()
	id, err := s.q.Produce(s.t.Context(), task)
	require.NoError(s.t, err)
	return id
}

// dead makes a dead letter.
func (s *site) dead(task codeq.Task, cause string) codeq.ID {
	s.t.Helper()
	id := s.produce(task)
	l := s.claim(task.Queue)
	require.Equal(s.t, id, l.ID)
	require.NoError(s.t, s.q.DeadLetter(s.t.Context(), l.Receipt, errors.New(cause)))
	return id
}

func (s *site) claim(queue string) *codeq.Lease {
	s.t.Helper()
	l, err := s.q.Claim(s.t.Context(), codeq.ClaimRequest{Queues: []string{queue}, NoWait: true, Worker: "w-1", LeaseFor: time.Minute})
	require.NoError(s.t, err)
	return l
}

func (s *site) task(id codeq.ID) *codeq.TaskInfo {
	s.t.Helper()
	info, err := s.q.Get(s.t.Context(), id)
	require.NoError(s.t, err)
	return info
}

// work runs handlers for a queue until the test ends.
func (s *site) work(name, queue string, h func(context.Context, *codeq.Job[[]byte]) error) {
	ctx, cancel := context.WithCancel(context.Background())
	var mux codeq.Mux
	codeq.Handle(&mux, queue, h)
	ended := make(chan error, 1)
	go func() { ended <- s.q.Run(ctx, &mux, &codeq.RunOptions{Name: name, Concurrency: 2}) }()
	s.t.Cleanup(func() {
		cancel()
		require.NoError(s.t, <-ended)
	})
	for {
		workers, err := s.q.Workers(s.t.Context())
		require.NoError(s.t, err)
		for _, w := range workers {
			if w.Name == name {
				return
			}
		}
	}
}

// loaded makes a dashboard of a queue with content for every screen.
func loaded(t *testing.T, opts *codeqweb.Options) (s *site, ids map[string]codeq.ID) {
	s = open(t, codeq.Options{Shards: 1, Retention: time.Hour}, opts)
	ids = make(map[string]codeq.ID)
	ids["dead"] = s.dead(codeq.Task{Queue: "mail", Tenant: "acme", MaxAttempts: 2}, "user 17 is unknown")
	ids["dead2"] = s.dead(codeq.Task{Queue: "mail"}, "user 18 is unknown")
	ids["done"] = s.produce(codeq.Task{Queue: "mail", Payload: []byte(`{"a":1}`)})
	l := s.claim("mail")
	require.NoError(t, s.q.Complete(t.Context(), l.Receipt, []byte("sent")))
	ids["canceled"] = s.produce(codeq.Task{Queue: "mail"})
	require.NoError(t, s.q.Cancel(t.Context(), ids["canceled"]))
	ids["leased"] = s.produce(codeq.Task{Queue: "mail", Payload: []byte("at work")})
	s.claim("mail")
	ids["ready"] = s.produce(codeq.Task{
		Queue: "mail", Tenant: "acme", Priority: 3, Payload: []byte(`{"secret":"xyzzy"}`), Headers: map[string]string{"trace": "t-1"},
		Unique: codeq.Unique{Key: "order-1"},
	})
	ids["scheduled"] = s.produce(codeq.Task{Queue: "mail", RunAt: time.Now().Add(time.Hour)})
	ids["child"] = s.produce(codeq.Task{Queue: "report", After: []codeq.ID{ids["ready"], ids["scheduled"]}})
	require.NoError(t, s.q.SetSchedule(t.Context(), codeq.Schedule{
		Name: "nightly", Cron: "30 4 * * *", TimeZone: "UTC", Task: codeq.Task{Queue: "report", Payload: []byte("xyzzy")},
	}))
	s.work("worker-1", "idle", func(context.Context, *codeq.Job[[]byte]) error { return nil })
	return s, ids
}

// pages returns the paths of all screens, with parameters for loaded.
func pages(ids map[string]codeq.ID) []string {
	list := []string{
		"/", "/?span=24h&order=dead&find=m", "/?span=90d", "/queue?name=mail&span=90d", "/queue?name=mail", "/queue?name=nobody", "/tasks", "/dead", "/dead?queue=mail", "/schedules",
		"/workers", "/storage", "/cluster", "/audit", "/bulks", "/search", "/search?q=mail",
	}
	for _, state := range []string{"ready", "scheduled", "blocked", "leased", "dead", "done", "canceled"} {
		list = append(list, "/tasks?state="+state, "/tasks?newest=true&queue=mail&state="+state)
	}
	for _, id := range ids {
		list = append(list, fmt.Sprint("/task?id=", id), fmt.Sprint("/flow?id=", id))
	}
	return list
}
