package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqweb"
)

// dashboard is a dashboard of codeqweb below /admin/ with all rights. Its method events streams
// events, the notice of its end, and the number of lost events.
type dashboard struct {
	*httptest.Server
	q      *codeq.Queue
	check  func(*http.Request) int // a status other than 200 refuses a request
	access codeqweb.Access
}

func newDashboard(t *testing.T, q *codeq.Queue) *dashboard {
	d := &dashboard{q: q, check: func(*http.Request) int { return 200 }, access: codeqweb.All}
	all := codeqweb.Handler(q, &codeqweb.Options{Access: func(*http.Request) codeqweb.Access { return d.access }})
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

// answers is a server that answers all requests alike.
type answers struct {
	*httptest.Server
	status     int
	kind, text string
}

func newAnswers(t *testing.T) *answers {
	a := new(answers)
	a.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		w.Header().Set("Content-Type", a.kind)
		w.WriteHeader(a.status)
		_, _ = io.WriteString(w, a.text)
	}))
	t.Cleanup(a.Close)
	return a
}

// TestNoDashboard: the exit code distinguishes other servers, errors and silence, and changes that
// may have been made.
func TestNoDashboard(t *testing.T) {
	s := newAnswers(t)
	for _, c := range []struct {
		status, read, change int
		kind, text           string
	}{
		{200, exitNoQueue, exitNoQueue, "text/html", "<h1>log in</h1>"},
		{404, exitNoQueue, exitNoQueue, "text/html", "nothing"},
		{403, exitDenied, exitDenied, "text/plain", "no"},
		{403, exitDenied, exitDenied, "application/json", `{"Error":"act \u001b[31m","Kind":"denied"}`},
		{502, exitNotNow, exitUncertain, "text/plain", ""},
		{503, exitNotNow, exitNotNow, "text/plain", ""},
		{504, exitNotNow, exitUncertain, "text/plain", ""},
		{200, exitOther, exitOK, "application/json", `{"Queues":`},
	} {
		s.status, s.kind, s.text = c.status, c.kind, c.text
		r := call(t, "-url", s.URL, "info")
		require.Equal(t, c.read, r.code, "%+v: %s", c, r.err)
		requireHarmless(t, r)
		r = call(t, "-url", s.URL, "cancel", codeq.ID{1}.String())
		require.Equal(t, c.change, r.code, "%+v: %s", c, r.err)
		requireHarmless(t, r)
	}
	s.Close()
	require.Equal(t, exitNoQueue, call(t, "-url", s.URL, "info").code)
	require.Equal(t, exitNoQueue, call(t, "-url", s.URL, "pause", "mail").code, "certainly not applied")
	require.Equal(t, exitUsage, call(t, "-url", s.URL, "verify").code)
	require.Equal(t, exitUsage, call(t, "-url", s.URL, "checkpoint", "x").code)
	require.Equal(t, exitUsage, call(t, "-url", s.URL, "cluster", "remove", "n1").code)
}

// TestKindsOfAPI: each kind of errors of the API has its exit code, for a request that reads and
// for a change.
func TestKindsOfAPI(t *testing.T) {
	doc, err := os.ReadFile("../../codeqweb/API.md")
	require.NoError(t, err)
	_, table, _ := strings.Cut(string(doc), "\n| status | kind |\n")
	table, _, _ = strings.Cut(table, "\n\n")
	table = regexp.MustCompile(`\([^)]*\)`).ReplaceAllString(table, "") // remarks
	known := make(map[string]bool)
	for _, m := range regexp.MustCompile("`([a-z-]+)`").FindAllStringSubmatch(table, -1) {
		known[m[1]] = true
	}
	codes := map[string][2]int{ // of a request that reads, and of a change
		"invalid": {exitUsage, exitUsage}, "denied": {exitDenied, exitDenied}, "not-found": {exitNotFound, exitNotFound}, "method": {exitOther, exitOther},
		"duplicate": {exitRefused, exitRefused}, "not-waiting": {exitRefused, exitRefused}, "not-empty": {exitRefused, exitRefused},
		"cannot-lead": {exitRefused, exitRefused}, "no-cluster": {exitRefused, exitRefused}, "host": {exitDenied, exitDenied}, "busy": {exitNotNow, exitNotNow},
		"corrupt": {exitDamaged, exitDamaged}, "internal": {exitOther, exitOther}, "format": {exitDamaged, exitDamaged},
		"uncertain": {exitUncertain, exitUncertain}, "not-leader": {exitNotNow, exitNotNow}, "not-served": {exitInUse, exitInUse},
		"closed": {exitNotNow, exitUncertain}, "failed": {exitNotNow, exitNotNow}, "stalled": {exitNotNow, exitNotNow},
		"canceled": {exitNotNow, exitUncertain}, "disk-full": {exitNotNow, exitNotNow},
	}
	require.ElementsMatch(t, slices.Collect(maps.Keys(codes)), slices.Collect(maps.Keys(known)))
	s := newAnswers(t)
	s.status, s.kind = 503, "application/json"
	for kind, code := range codes {
		s.text = fmt.Sprintf(`{"Error":"because","Kind":%q}`, kind)
		for i, args := range [][]string{{"info"}, {"cancel", codeq.ID{1}.String()}} {
			r := call(t, with([]string{"-url", s.URL}, args...)...)
			require.Equal(t, code[i], r.code, "%s: %v: %s", kind, args, r.err)
			require.Contains(t, r.err, "because")
		}
	}
}

// TestBulkWithoutEnd: a change of many tasks may have been made if the client does not hear of its
// end, with any error.
func TestBulkWithoutEnd(t *testing.T) {
	end := ""
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch {
		case r.Method == http.MethodPost:
			_, _ = io.WriteString(w, `{"ID":"1"}`)
		case end != "":
			_, _ = io.WriteString(w, end)
		default:
			w.WriteHeader(http.StatusTooManyRequests)
			_, _ = io.WriteString(w, `{"Error":"many","Kind":"busy"}`)
		}
	}))
	defer s.Close()
	cancel := []string{"-url", s.URL, "cancel", "-all"}
	require.Equal(t, exitUncertain, call(t, cancel...).code)
	end = `{"ID":"1","Ended":"2030-01-02T03:04:05Z","Result":{"Matched":3,"Changed":2,"Next":"c"},"Error":"stopped","Kind":"canceled"}`
	r := call(t, cancel...)
	require.Equal(t, exitUncertain, r.code, "another client has stopped it")
	require.Contains(t, r.out, "2 tasks of 3 canceled")
	require.Contains(t, r.err, "-cursor c")
}

// TestPartOfBatch: of a batch that is stored in part, the command writes the IDs of that part.
func TestPartOfBatch(t *testing.T) {
	s := newAnswers(t)
	id := codeq.ID{1, 2, 3}
	s.status, s.kind = 507, "application/json"
	for ids, out := range map[string]string{
		fmt.Sprintf(`["%s","%s"]`, codeq.ID{}, id): id.String() + "\n",
		fmt.Sprintf(`["%s"]`, id):                  "", // of another number of tasks
		`[]`:                                       "",
	} {
		s.text = `{"Error":"codeq: 1 of a batch of 2; 0: disk full","Kind":"disk-full","IDs":` + ids + `}`
		r := run(t.Context(), nil, []byte("a\nb\n"), "-url", s.URL, "produce", "-queue", "mail", "-lines", "-file", "-")
		require.Equal(t, exitNotNow, r.code)
		require.Equal(t, out, r.out)
		require.Contains(t, r.err, "1 of a batch of 2; 0: disk full")
	}
}

// TestHiddenContents: hidden contents are not shown as empty ones.
func TestHiddenContents(t *testing.T) {
	q, _ := serve(t, newQueue(t, nil))
	d := newDashboard(t, q)
	id := produce(t, q, codeq.Task{Queue: "mail", Payload: []byte("hello"), Unique: codeq.Unique{Key: "k"}}).String()
	require.NoError(t, q.SetSchedule(t.Context(), codeq.Schedule{Name: "daily", Cron: "@daily", Task: codeq.Task{Queue: "report", Payload: []byte("hello")}}))
	at := []string{"-url", d.URL + "/admin/"}
	type hidden struct{ Hidden bool }
	lists := [][]string{{"get", id}, {"get", "-queue", "mail", "-key", "k"}, {"ls"}, {"schedules"}}
	for _, args := range lists {
		require.NotContains(t, ok(t, with(at, append([]string{"-json"}, args...)...)...), "Hidden")
	}
	require.Equal(t, "hello", ok(t, with(at, "get", "-raw", id)...))
	require.Empty(t, call(t, with(at, "get", id)...).err)

	d.access = codeqweb.Read
	for _, args := range lists {
		require.True(t, decoded[hidden](t, with(at, args...)...).Hidden, args)
	}
	for _, args := range [][]string{{id}, {"-result", id}, {"-queue", "mail", "-key", "k"}} {
		r := call(t, with(at, append([]string{"get", "-raw"}, args...)...)...)
		require.Equal(t, exitDenied, r.code)
		require.Empty(t, r.out)
	}
	r := call(t, with(at, "get", id)...)
	require.Zero(t, r.code)
	require.Contains(t, r.err, "does not show the contents of task "+id)
	require.Contains(t, r.out, "mail")
	require.Equal(t, exitDenied, call(t, with(at, "ls", "-payload")...).code)
}

// TestProgramsThatClaim: a program that claims without Run is no worker, wherever the queue is.
func TestProgramsThatClaim(t *testing.T) {
	dir := newQueue(t, nil)
	q, _ := serve(t, dir)
	produce(t, q, mail(0))
	_, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"mail"}, Worker: "box", LeaseFor: time.Hour})
	require.NoError(t, err)
	for _, at := range [][]string{{"-dir", dir}, {"-url", newDashboard(t, q).URL + "/admin/"}} {
		require.Empty(t, decoded[infoResult](t, with(at, "info")...).Workers)
		require.NotContains(t, ok(t, with(at, "info")...), "box")
		require.Empty(t, decoded[sample](t, with(at, "top", "-n", "1")...).Workers)
		require.Empty(t, decoded[workersResult](t, with(at, "quiet")...).Workers)
		require.Equal(t, exitNotFound, call(t, with(at, "quiet", "-dry-run", "box")...).code)
	}
}
