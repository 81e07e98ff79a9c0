package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqweb"
)

// dashboard is a dashboard of codeqweb below /admin/ with all rights. Its method events streams
// events, the notice of its end, and the number of lost events.
type dashboard struct {
	*httptest.Server
	q     *codeq.Queue
	check func(*http.Request) int // a status other than 200 refuses a request
}

func newDashboard(t *testing.T, q *codeq.Queue) *dashboard {
	d := &dashboard{q: q, check: func(*http.Request) int { return 200 }}
	all := codeqweb.Handler(q, &codeqweb.Options{
		Access: func(*http.Request) codeqweb.Access {
			return codeqweb.Read | codeqweb.Payloads | codeqweb.Act | codeqweb.Admin
		},
	})
	t.Cleanup(func() { require.NoError(t, all.Close()) })
	d.Server = httptest.NewServer(http.StripPrefix("/admin", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if status := d.check(r); status != 200 {
			http.Error(w, "not you", status)
			return
		}
		if r.URL.Path == "/api/v1/events" {
			d.events(r.Context(), w, r.URL.Query()["queue"])
			return
		}
		all.ServeHTTP(w, r)
	})))
	t.Cleanup(d.Close)
	return d
}

// events streams until the client disconnects, or until an event of the queue "end".
func (d *dashboard) events(ctx context.Context, w http.ResponseWriter, queues []string) {
	s, err := d.q.Subscribe(codeq.SubscribeOptions{Queues: queues})
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	defer s.Close()
	w.Header().Set("Content-Type", "text/event-stream")
	_, _ = io.WriteString(w, ":\n\n")
	for {
		_ = http.NewResponseController(w).Flush()
		e, err := s.Next(ctx)
		if err != nil {
			return
		}
		if e.Queue == "end" {
			_, _ = io.WriteString(w, "event: end\ndata: {\"Error\":\"enough\",\"Kind\":\"closed\"}\n\n")
			return
		}
		b, _ := json.Marshal(e)
		_, _ = fmt.Fprintf(w, "event: lost\ndata: 7\n\nevent: task\ndata: %s\n\n", b)
	}
}

// TestCredentials: credentials come from the environment, not from the command line, and are sent
// only to the dashboard.
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

// TestNoDashboard: the exit code distinguishes other servers, errors and silence.
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
