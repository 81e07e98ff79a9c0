package codeqweb_test

import (
	"bytes"
	"context"
	"fmt"
	"html"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqweb"
)

// posts are all changes, with the access that each needs.
var posts = map[string]codeqweb.Access{
	"task/cancel": codeqweb.Act, "task/redrive": codeqweb.Act, "task/forget": codeqweb.Act, "task/run-at": codeqweb.Act,
	"task/priority": codeqweb.Act, "task/clone": codeqweb.Act, "release-key": codeqweb.Act, "bulk": codeqweb.Act, "bulk/stop": codeqweb.Act,
	"schedule/trigger": codeqweb.Act, "schedule/delete": codeqweb.Admin, "schedule/pause": codeqweb.Admin, "schedule/resume": codeqweb.Admin,
	"pause": codeqweb.Admin, "resume": codeqweb.Admin, "queue/delete": codeqweb.Admin, "settings": codeqweb.Admin, "workers/quiet": codeqweb.Admin, "workers/resume": codeqweb.Admin,
	"cluster/transfer": codeqweb.Admin, "cluster/drain": codeqweb.Admin, "cluster/undrain": codeqweb.Admin,
}

// TestReadOnly: without Act and Admin, and with zero Options, no path and method changes anything.
func TestReadOnly(t *testing.T) {
	for name, opts := range map[string]*codeqweb.Options{"zero": nil, "read": as(codeqweb.Read), "payloads": as(codeqweb.Read | codeqweb.Payloads)} {
		t.Run(name, func(t *testing.T) {
			s, ids := loaded(t, opts)
			before, err := s.q.Info(t.Context())
			require.NoError(t, err)
			for path := range posts {
				f := form("id", ids["ready"].String(), "queue", "mail", "name", "nightly", "all", "true", "state", "ready", "action", "cancel", "priority", "9", "shard", "0")
				for _, where := range []string{"/" + path, "/api/v1/" + path} {
					for _, method := range []string{http.MethodPost, http.MethodPut, http.MethodDelete, http.MethodPatch, http.MethodGet} {
						w := s.do(request(method, where+"?"+f.Encode(), f))
						switch method {
						case http.MethodPost:
							require.Equal(t, http.StatusForbidden, w.Code, where)
						case http.MethodGet: // some have a page or an answer of the same path, which may take other parameters
							require.Contains(t, []int{200, 400, 403, 405}, w.Code, where)
						default:
							require.Contains(t, []int{404, 405}, w.Code, "%s %s", method, where)
						}
					}
				}
			}
			require.Equal(t, http.StatusForbidden, s.api(http.MethodPost, "tasks", `{"Tasks": [{"Queue": "mail"}]}`, nil))
			require.Equal(t, http.StatusForbidden, s.api(http.MethodPost, "schedules", `{}`, nil))
			after, err := s.q.Info(t.Context())
			require.NoError(t, err)
			require.Equal(t, before, after)
			for _, page := range []string{"audit", "bulks", "bulk?id=1", "api/v1/audit", "api/v1/bulk"} {
				require.Equal(t, http.StatusForbidden, s.do(request(http.MethodGet, "/"+page, nil)).Code, page)
			}
		})
	}
}

// TestBits: each change needs its bit, and Read; the others do not help.
func TestBits(t *testing.T) {
	access := codeqweb.None
	s := open(t, codeq.Options{}, &codeqweb.Options{Access: func(*http.Request) codeqweb.Access { return access }})
	for path, needs := range posts {
		for a := codeqweb.None; a <= codeqweb.All; a++ {
			access = a
			for _, where := range []string{"/" + path, "/api/v1/" + path} {
				w := s.do(request(http.MethodPost, where, url.Values{}))
				require.Equal(t, !a.Has(needs|codeqweb.Read), w.Code == http.StatusForbidden, "%s with %v: %d", where, a, w.Code)
			}
		}
	}
	access = codeqweb.All &^ codeqweb.Read
	for _, page := range append(pages(nil), "/live", "/payload", "/api/v1/", "/api/v1/info", "/api/v1/events") {
		w := s.do(request(http.MethodGet, page, nil))
		require.Equal(t, http.StatusForbidden, w.Code, page)
		require.Less(t, w.Body.Len(), 200, "nothing is shown")
	}
	require.Equal(t, "read+act", (codeqweb.Read | codeqweb.Act).String())
	require.Equal(t, "none", codeqweb.None.String())
}

// TestHiddenPayloads: all pages with tasks show payloads, results, headers and metadata only with
// Payloads.
func TestHiddenPayloads(t *testing.T) {
	for _, access := range []codeqweb.Access{codeqweb.Read, codeqweb.All &^ codeqweb.Payloads, codeqweb.All} {
		s := open(t, codeq.Options{Shards: 1}, as(access))
		secret := []byte("s3cr3t")
		task := codeq.Task{Queue: "a", Payload: secret, Headers: map[string]string{"h": "s3cr3t"}}
		id := s.produce(task)
		kept := task
		kept.Retention = codeq.Forever
		kept.Queue = "b"
		done := s.produce(kept)
		require.NoError(t, s.q.Complete(t.Context(), s.claim("b").Receipt, secret))
		child := s.produce(codeq.Task{Queue: "a", Payload: secret, After: []codeq.ID{id}})
		s.dead(codeq.Task{Queue: "c", Payload: secret}, "failed")
		logged := s.produce(codeq.Task{Queue: "d", Retention: codeq.Forever})
		ctx, stop := context.WithCancel(t.Context())
		var mux codeq.Mux
		codeq.Handle(&mux, "d", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
			defer stop()
			codeq.LoggerFrom(ctx).Info("s3cr3t")
			return nil
		})
		require.NoError(t, s.q.Run(ctx, &mux, &codeq.RunOptions{KeepLogs: slog.LevelInfo}))
		require.Equal(t, access.Has(codeqweb.Payloads), strings.Contains(s.get("/task?id="+logged.String()), `class="log"`))
		require.NoError(t, s.q.SetSchedule(t.Context(), codeq.Schedule{Name: "s", Cron: "@daily", Task: task}))
		found := 0
		for _, path := range []string{
			"task?id=" + id.String(), "task?id=" + done.String(), "task?id=" + child.String(), "tasks", "tasks?payloads=true", "dead", "schedules", "queue?name=a",
			"payload?id=" + id.String(), "payload?of=result&id=" + done.String(), "api/v1/task?id=" + id.String(), "api/v1/task?id=" + done.String(), "task?id=" + logged.String(), "api/v1/task?id=" + logged.String(),
			"api/v1/tasks", "api/v1/tasks?payloads=true", "api/v1/dead", "api/v1/schedules", "api/v1/children?id=" + id.String(), "flow?id=" + id.String(), "api/v1/flow?id=" + id.String(), "api/v1/why?id=" + child.String(), "api/v1/tenants?queue=a", "api/v1/find?queue=a&key=k",
		} {
			body := s.do(request(http.MethodGet, "/"+path, nil)).Body.String()
			if strings.Contains(body, "s3cr3t") || strings.Contains(body, "czNjcjN0") { // in base64
				found++
				require.True(t, access.Has(codeqweb.Payloads), path)
			}
		}
		if access.Has(codeqweb.Payloads) {
			require.GreaterOrEqual(t, found, 10)
		}
	}
}

// TestRedactAndFormat: redacted values appear nowhere, and payloads are shown by Format.
func TestRedactAndFormat(t *testing.T) {
	s, ids := loaded(t, &codeqweb.Options{
		Access: func(*http.Request) codeqweb.Access { return codeqweb.All },
		Redact: func(t *codeq.TaskInfo) {
			t.Payload = bytes.ReplaceAll(t.Payload, []byte("xyzzy"), []byte("***"))
			t.LastError = strings.ReplaceAll(t.LastError, "unknown", "***")
			for i := range t.History {
				t.History[i].Error = ""
			}
		},
		Format: func(queue string, data []byte) string {
			if bytes.Equal(data, []byte("at work")) {
				return queue + " <as told>"
			}
			return ""
		},
	})
	for _, path := range pages(ids) {
		page := s.get(path)
		require.NotContains(t, page, "xyzzy", path)
		require.NotContains(t, page, "unknown", path)
	}
	require.Contains(t, s.get("/task?id="+ids["ready"].String()), "***")
	require.Contains(t, s.get("/task?id="+ids["leased"].String()), "mail &lt;as told&gt;")
	require.NotContains(t, s.get("/api/v1/tasks?payloads=true"), "eHl6enk")
	require.NotContains(t, s.get("/payload?id="+ids["ready"].String()), "xyzzy")
	require.Equal(t, `{"secret":"xyzzy"}`, string(s.task(ids["ready"]).Payload), "the task itself stays")
}

// TestHosts: every request with a Host that is neither listed nor loopback is refused: a foreign
// page cannot bind its name to this address.
func TestHosts(t *testing.T) {
	s := open(t, codeq.Options{}, &codeqweb.Options{Hosts: []string{"Jobs.Example.com", "ops.example.com:8443", "10.0.0.7", "[fd00::7]"}})
	for host, ok := range map[string]bool{
		"localhost": true, "localhost:8080": true, "LOCALHOST": true, "127.0.0.1": true, "127.9.9.9:80": true, "[::1]": true, "[::1]:8080": true,
		"::1": true, "jobs.example.com": true, "JOBS.example.com:99": true, "jobs.example.com.": true, "ops.example.com:8443": true, "10.0.0.7:80": true,
		"[fd00::7]:80": true, "[::ffff:127.0.0.1]": true,
		"ops.example.com": false, "ops.example.com:80": false, "evil.example": false, "localhost.evil.example": false, "127.0.0.1.evil.example": false,
		"": false, "evil.example:8080": false, "jobs.example.com.evil.example": false, "xjobs.example.com": false, "10.0.0.8": false, "0.0.0.0": false,
		"localhost@evil.example": false, "169.254.169.254": false, "[::]": false,
	} {
		for _, path := range []string{"/", "/tasks", "/api/v1/info", "/live", "/assets/style.css", "/nonsense"} {
			r := request(http.MethodGet, path, nil)
			r.Host = host
			if ok && path == "/live" {
				continue // it lasts
			}
			w := s.do(r)
			require.Equal(t, !ok, w.Code == http.StatusMisdirectedRequest, "%q %s: %d", host, path, w.Code)
			if !ok {
				require.NotContains(t, w.Body.String(), "evil")
				require.Less(t, w.Body.Len(), 200)
			}
		}
		r := request(http.MethodGet, "/healthz", nil)
		r.Host = host
		require.Equal(t, http.StatusOK, s.do(r).Code, "a probe has any host")
	}
}

// TestOrigins: a change from another site is refused. A change from the page or a program is not.
func TestOrigins(t *testing.T) {
	s := open(t, codeq.Options{}, as(codeqweb.All))
	for _, c := range []struct {
		header, value string
		ok            bool
	}{
		{"Sec-Fetch-Site", "same-origin", true}, {"Sec-Fetch-Site", "none", true}, {"Sec-Fetch-Site", "cross-site", false}, {"Sec-Fetch-Site", "same-site", false},
		{"Origin", "http://localhost", true}, {"Origin", "https://evil.example", false}, {"Origin", "null", false}, {"Origin", "http://localhost:81", false}, {"X", "", true},
	} {
		for path := range posts {
			for _, where := range []string{"/" + path, "/api/v1/" + path} {
				r := request(http.MethodPost, where, url.Values{})
				r.Header.Del("Sec-Fetch-Site")
				r.Header.Set(c.header, c.value)
				w := s.do(r)
				require.Equal(t, !c.ok, w.Code == http.StatusForbidden, "%v %s: %d", c, where, w.Code)
			}
		}
	}
	require.Equal(t, http.StatusForbidden, func() int {
		r := httptest.NewRequest(http.MethodPost, "http://localhost/api/v1/tasks", strings.NewReader(`{"Tasks": [{"Queue": "a"}]}`))
		r.Header.Set("Content-Type", "text/plain") // browsers send this without a preflight request
		r.Header.Set("Origin", "https://evil.example")
		return s.do(r).Code
	}())
}

// TestSecurityHeaders: every answer has them, refusals too, and pages have nothing inline.
func TestSecurityHeaders(t *testing.T) {
	s, ids := loaded(t, as(codeqweb.All))
	for _, path := range append(pages(ids), "/nonsense", "/task?id=x", "/healthz", "/api/v1/info", "/api/v1/nonsense", assetPath(s, "live.js")) {
		w := s.do(request(http.MethodGet, path, nil))
		h := w.Header()
		csp := h.Get("Content-Security-Policy")
		for _, part := range []string{"default-src 'none'", "script-src 'self'", "style-src 'self'", "frame-ancestors 'none'", "base-uri 'none'", "form-action 'self'"} {
			require.Contains(t, csp, part, path)
		}
		require.NotContains(t, csp, "unsafe", path)
		require.Equal(t, "nosniff", h.Get("X-Content-Type-Options"), path)
		require.Equal(t, "same-origin", h.Get("Referrer-Policy"), path)
		if !strings.HasPrefix(path, "/assets/") {
			require.Equal(t, "no-store", h.Get("Cache-Control"), path)
			body := w.Body.String()
			require.Equal(t, strings.Count(body, "<script"), strings.Count(body, `<script src="assets/`), path)
			for _, inline := range []string{" style=", " onclick", " onload", "<style", "javascript:", "http://", "https://"} {
				require.NotContains(t, body, inline, path)
			}
		}
	}
	w := s.do(request(http.MethodGet, "/payload?id="+ids["ready"].String(), nil))
	require.Equal(t, "application/octet-stream", w.Header().Get("Content-Type"))
	require.Contains(t, w.Header().Get("Content-Disposition"), "attachment")
	require.Contains(t, w.Header().Get("Content-Security-Policy"), "sandbox")
}

// assetPath returns the path of an asset, as the overview has it.
func assetPath(s *site, name string) string {
	name, ext, _ := strings.Cut(name, ".")
	return "/" + regexp.MustCompile(`assets/`+name+`\.[0-9a-f]{12}\.`+ext).FindString(s.get("/"))
}

// TestPaths: no path leads to a file. Only the routes have answers.
func TestPaths(t *testing.T) {
	s := open(t, codeq.Options{}, as(codeqweb.All))
	for _, path := range []string{
		"/../etc/passwd", "/assets/../dashboard.go", "/assets/", "/assets/layout.html", "/assets/%2e%2e/dashboard.go", "//etc/passwd", "/tasks/", "/tasks/../audit",
		"/api/v1/../../audit", "/api/v2/info", "/api/v1/checkpoint", "/api/v1/cluster/add", "/api/v1/cluster/remove", "/api/v1/cluster/replace", "/api/v1/verify",
		"/cluster/add", "/.git/config", "/debug/pprof/", "/task%00", "/..%2f..%2fetc%2fpasswd", `/..\..\etc\passwd`, "/assets//style.css", "/GET tasks", "/POST bulk",
	} {
		u, err := url.Parse("http://localhost")
		require.NoError(t, err)
		u.Path, err = url.PathUnescape(path)
		require.NoError(t, err)
		for _, method := range []string{http.MethodGet, http.MethodPost} {
			r := httptest.NewRequest(method, "http://localhost/", nil)
			r.URL = u
			w := s.do(r)
			require.Equal(t, http.StatusNotFound, w.Code, path)
			require.Contains(t, w.Body.String(), "there is no such page", path)
			require.Equal(t, strings.HasPrefix(w.Body.String(), "<!DOCTYPE html>"), !strings.HasPrefix(strings.TrimPrefix(u.Path, "/"), "api/"), path)
		}
	}
	for _, path := range []string{"/task?id=../../etc/passwd", "/payload?id=../../etc/passwd", "/api/v1/task?id=%00"} {
		require.Equal(t, http.StatusBadRequest, s.do(request(http.MethodGet, path, nil)).Code, path)
	}
}

// hostile has untrusted texts. Each has a part that no page may contain.
var hostile = []struct{ text, never string }{
	{`<script>alert(1)</script>`, "<script>alert"},
	{`"><img src=x onerror=alert(1)>`, "<img"},
	{`'><svg/onload=alert(1)>`, "<svg/onload"},
	{`javascript:alert(1)`, `href="javascript`},
	{`{{.Body}}</textarea></script><b>`, "</script><b>"},
	{"\u202egnp.exe\u2066\u200f", "\u202e"},
	{"\xff\xfe invalid \xc3\x28", "\xff"},
	{"nul \x00 bell \a escape \x1b[31m", "\x1b"},
	{"line\r\nevent: live\r\ndata: <b>x</b>", "<b>x"},
	{strings.Repeat("long ", 50), ""},
}

// nameOf makes a name from a text: valid UTF-8.
func nameOf(text string) string { return strings.ToValidUTF8(text[:min(len(text), 250)], "?") }

// TestHostileTexts: untrusted names, errors and payloads are shown, and never become markup.
func TestHostileTexts(t *testing.T) {
	s := open(t, codeq.Options{Shards: 1}, as(codeqweb.All))
	ids := make(map[string]codeq.ID)
	for n, h := range hostile {
		text := nameOf(h.text)
		ids[fmt.Sprint("ready", n)] = s.produce(codeq.Task{
			Queue: text, Tenant: text, Group: text, LimitKey: text, Unique: codeq.Unique{Key: text}, Payload: []byte(h.text), Headers: map[string]string{text: text},
		})
		ids[fmt.Sprint("dead", n)] = s.dead(codeq.Task{Queue: "d" + text, Payload: []byte(h.text)}, h.text)
		require.NoError(t, s.q.SetSchedule(t.Context(), codeq.Schedule{Name: text, Cron: "@daily", Task: codeq.Task{Queue: text, Tenant: text, Payload: []byte(text)}}))
		require.NoError(t, s.q.Configure(t.Context(), text, func(set *codeq.Settings) {
			set.TenantWeights = map[string]int{text: 2}
		}))
	}
	check := func(path, page string) {
		for _, h := range hostile {
			if h.never != "" {
				require.NotContains(t, page, h.never, path)
			}
		}
		for _, never := range []string{"ZgotmplZ", "\u2066", "\u200f", "\x00", "\a", "\xc3\x28"} {
			require.NotContains(t, page, never, path)
		}
	}
	for _, path := range pages(ids) {
		check(path, s.get(path))
	}
	for _, h := range hostile {
		text := nameOf(h.text)
		q := url.QueryEscape(text)
		for _, path := range []string{
			"/queue?name=" + q, "/tasks?queue=" + q, "/tasks?state=ready&queue=" + q + "&tenant=" + q, "/dead?queue=d" + q, "/?find=" + q, "/tasks?group=" + q + "&key=" + q + "&error=" + q,
		} {
			check(path, s.get(path))
		}
		require.Contains(t, s.get("/tasks?queue="+q), `data-id="`, "its link leads to it: %q", text)
		for _, path := range []string{"/task?id=" + q, "/tasks?state=" + q, "/tasks?from=" + q, "/tasks?cursor=" + q, "/bulk?id=" + q, "/payload?id=" + q, "/nonsense?" + q} {
			w := s.do(request(http.MethodGet, path, nil))
			require.Contains(t, []int{400, 404}, w.Code, path)
			check(path, w.Body.String())
		}
		s.post("/pause?queue="+q, "back", "queue?name="+q)
		set, err := s.q.Settings(text)
		require.NoError(t, err)
		require.True(t, set.Paused, "%q", text)
	}
	check("/audit", s.get("/audit"))
}

// TestLargePayload: a page shows the kind and the beginning of a large payload, and offers a
// download of all of it. It shows a small payload as a whole.
func TestLargePayload(t *testing.T) {
	s := open(t, codeq.Options{Shards: 1}, as(codeqweb.All))
	for payload, shown := range map[string]string{
		`{"a":"` + strings.Repeat("<b>x", 1<<18-10) + `"}`:    "JSON",
		strings.Repeat("[", 9000) + strings.Repeat("]", 9000): "JSON",
		strings.Repeat("\xff\x00\x01", 1<<18):                 "binary",
		strings.Repeat("\u202e", 1<<18):                       "text",
		"":                                                    "empty, 0 bytes",
		`{"a":{"b":[1,"<i>"]}}`:                               `<bdi class="prop">b</bdi><span class="size">2 items</span></summary><div class="leaf"><span class="prop index">0</span><bdi class="value number">1</bdi></div>`,
		"<i>bold</i>\r\n\u202egnp.exe\u200b":                  `<i>bold</i>\x0d` + "\n" + `\u202egnp.exe\u200b`,
		"\x89PNG\xff\xfe<script>":                             "89 50 4e 47 ff fe 3c 73",
	} {
		name := payload[:min(len(payload), 10)]
		id := s.produce(codeq.Task{Queue: "a", Payload: []byte(payload)})
		page := s.get("/task?id=" + id.String())
		require.Contains(t, html.UnescapeString(page), shown, name)
		require.Less(t, len(page), 256<<10, name)
		if len(payload) > 64<<10 {
			require.Contains(t, page, "only the beginning is shown", name)
		}
		require.NotContains(t, page, "<b>x", name)
		w := s.do(request(http.MethodGet, "/payload?id="+id.String(), nil))
		require.True(t, payload == w.Body.String(), name)
	}
}

// TestLargeStep: the page of a task shows the beginning of the large result of a step, with a link
// to all of it, also if several steps have one name. Without the right to see payloads there is
// neither.
func TestLargeStep(t *testing.T) {
	for _, access := range []codeqweb.Access{codeqweb.All, codeqweb.Read} {
		s := open(t, codeq.Options{}, as(access))
		id := s.produce(codeq.Task{Queue: "a", Retention: time.Hour})
		results := []string{strings.Repeat("long ", 15_000), strings.Repeat("other ", 15_000)}
		ctx, stop := context.WithCancel(t.Context())
		var mux codeq.Mux
		codeq.Handle(&mux, "a", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
			defer stop()
			for _, result := range results {
				if _, err := codeq.Step(ctx, "page", func(context.Context) (string, error) { return result, nil }); err != nil {
					return err
				}
			}
			return nil
		})
		require.NoError(t, s.q.Run(ctx, &mux, nil))
		links := regexp.MustCompile(`only the beginning is shown: <a href="([^"]+)">`).FindAllStringSubmatch(s.get("/task?id="+id.String()), -1)
		if !access.Has(codeqweb.Payloads) {
			require.Empty(t, links)
			require.Equal(t, http.StatusForbidden, s.do(request(http.MethodGet, "/payload?of=step&index=0&id="+id.String(), nil)).Code)
			continue
		}
		require.Len(t, links, len(results))
		for i, link := range links {
			require.Equal(t, strconv.Quote(results[i]), s.do(request(http.MethodGet, "/"+html.UnescapeString(link[1]), nil)).Body.String())
		}
		for query, status := range map[string]int{"of=step&index=2": 404, "of=step&index=-1": 404, "of=step": 400, "of=steps": 400} {
			require.Equal(t, status, s.do(request(http.MethodGet, "/payload?"+query+"&id="+id.String(), nil)).Code, query)
		}
	}
}
