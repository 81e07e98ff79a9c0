package codeqweb_test

import (
	"fmt"
	"html"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqweb"
)

// TestPages: every screen is shown, with all rights, and with some: then without the forms of the
// others.
func TestPages(t *testing.T) {
	for _, access := range []codeqweb.Access{codeqweb.All, codeqweb.Read, codeqweb.Read | codeqweb.Act} {
		t.Run(access.String(), func(t *testing.T) {
			s, ids := loaded(t, as(access))
			for _, path := range pages(ids) {
				if path == "/audit" && !access.Has(codeqweb.Admin) || path == "/bulks" && !access.Has(codeqweb.Act) {
					continue
				}
				page := s.get(path)
				require.Contains(t, page, "</html>", path)
				require.NotContains(t, page, "<no value>", path)
				require.NotContains(t, page, "ZgotmplZ", path)
				require.NotContains(t, page, "style=", path)
				require.NotRegexp(t, `action="task/[a-z-]+"`, page, "a change that is denied is audited without its form")
				if !access.Has(codeqweb.Payloads) {
					require.NotContains(t, page, "xyzzy", path)
				}
				for _, form := range regexp.MustCompile(`<form[^>]* method="post"[^>]*action="([a-z/-]+)`).FindAllStringSubmatch(page, -1) {
					require.True(t, access.Has(posts[form[1]]), "%s has a form of %s", path, form[1])
				}
				if access == codeqweb.Read {
					require.NotContains(t, page, `method="post"`, path)
				}
			}
		})
	}
}

// TestTabs: the tabs have numbers where those are of the list, and a later page that has become
// empty does not say that there are no tasks.
func TestTabs(t *testing.T) {
	s, _ := loaded(t, as(codeqweb.All))
	for path, counted := range map[string]bool{
		"/tasks": true, "/tasks?queue=mail": true, "/tasks?queue=mail&state=dead&newest=true": true,
		"/tasks?tenant=acme": false, "/tasks?queue=mail&text=17": false, "/tasks?no-tenant=true": false, "/tasks?from=2020-01-01": false,
	} {
		require.Equal(t, counted, strings.Contains(s.get(path), `class="count"`), path)
	}
	ids := make([]codeq.ID, 51)
	for i := range ids {
		ids[i] = s.produce(codeq.Task{Queue: "many"})
	}
	next := regexp.MustCompile(`href="([^"]+)" id="next"`).FindStringSubmatch(s.get("/tasks?queue=many&state=ready"))
	require.NotNil(t, next)
	require.NoError(t, s.q.Cancel(t.Context(), ids[50]))
	page := s.get("/" + html.UnescapeString(next[1]))
	require.Contains(t, page, "on this page any more")
	require.NotContains(t, page, "No task is here")
	require.Contains(t, page, `id="first"`)
}

// TestEmpty: screens of an empty queue say what to do.
func TestEmpty(t *testing.T) {
	s := open(t, codeq.Options{Shards: 1}, as(codeqweb.All))
	for path, says := range map[string]string{
		"/": "q.Produce(", "/tasks": "q.Produce(", "/tasks?state=done": "Retention", "/dead": "last attempt fails", "/schedules": "q.SetSchedule(",
		"/workers": "No Queue.Run works", "/cluster": "Options.Cluster", "/audit": "Nobody has changed", "/bulks": "Begin one",
		"/queue?name=mail": "when a task is produced",
	} {
		_, empty, _ := strings.Cut(s.get(path), `id="empty"`)
		require.Contains(t, html.UnescapeString(empty), says, path)
	}
}

// TestDistantTimes: pages show every time that a task may have.
func TestDistantTimes(t *testing.T) {
	s := open(t, codeq.Options{Shards: 1}, as(codeqweb.All))
	for _, year := range []int{2300, 2316, 2319, 5000, 9999} {
		id := s.produce(codeq.Task{Queue: "a", RunAt: time.Date(year, 6, 1, 0, 0, 0, 0, time.UTC)})
		require.Contains(t, s.get("/task?id="+id.String()), strconv.Itoa(year)+"-06-01")
	}
	require.NoError(t, s.q.SetSchedule(t.Context(), codeq.Schedule{Name: "far", Every: time.Hour, Task: codeq.Task{Queue: "a"}}))
	for _, path := range []string{"/tasks", "/tasks?state=scheduled", "/schedules", "/api/v1/tasks"} {
		require.NotEmpty(t, s.get(path), path)
	}
	require.Contains(t, s.get("/tasks?state=scheduled"), "years")
	require.Contains(t, s.get("/tasks?state=scheduled"), fmt.Sprintf("in 7,%d years", 9999-7000-time.Now().Year()))
}

// TestFreeDisk: the overview warns before a disk is so full that no tasks are accepted.
func TestFreeDisk(t *testing.T) {
	const tile = `<div class="%s" title="of the disk of this process; it accepts no tasks below %s"><dt>Disk free</dt>`
	require.Contains(t, open(t, codeq.Options{MinFreeBytes: 1 << 20}, nil).get("/"), fmt.Sprintf(tile, "", "1.0 MiB"))
	require.Contains(t, open(t, codeq.Options{MinFreeBytes: 1 << 60}, nil).get("/"), fmt.Sprintf(tile, "bad", "1.0 EiB"))
}

// TestTenants: tenants with waiting tasks or a weight are listed, by the number of waiting tasks.
func TestTenants(t *testing.T) {
	s := open(t, codeq.Options{}, nil)
	ctx := t.Context()
	require.NoError(t, s.q.Configure(ctx, "a", func(settings *codeq.Settings) {
		settings.TenantWeights = map[string]int{"x": 3, "idle": 2}
	}))
	for _, tenant := range []string{"", "x", "y", "x", "y", "x"} {
		_, err := s.q.Produce(ctx, codeq.Task{Queue: "a", Tenant: tenant})
		require.NoError(t, err)
	}
	require.JSONEq(t, `{"Tenants": [
		{"Name": "x", "Ready": 3, "Weight": 3}, {"Name": "y", "Ready": 2, "Weight": 1}, {"Name": "", "Ready": 1, "Weight": 1},
		{"Name": "idle", "Ready": 0, "Weight": 2}
	], "Read": 6, "All": true}`, s.get("/api/v1/tenants?queue=a"))
	require.Contains(t, s.get("/queue?name=a"), `<tr data-tenant="x">`)
	require.JSONEq(t, `{"Tenants": [], "Read": 0, "All": true}`, s.get("/api/v1/tenants?queue=none"))
}

// TestKinds: tasks are filtered by their kind, which is shown.
func TestKinds(t *testing.T) {
	s := open(t, codeq.Options{Shards: 1}, as(codeqweb.All))
	ship, charge := s.produce(codeq.Task{Queue: "a", Kind: "<ship>"}), s.produce(codeq.Task{Queue: "a", Kind: "charge"})
	require.Contains(t, s.get("/task?id="+ship.String()), `<a href="tasks?kind=%3Cship%3E&amp;queue=a" id="kind"><bdi>&lt;ship&gt;</bdi></a>`)
	for _, path := range []string{"/tasks?kind=%3Cship%3E", "/api/v1/tasks?kind=%3Cship%3E"} {
		page := s.get(path)
		require.Contains(t, page, ship.String(), path)
		require.NotContains(t, page, charge.String(), path)
	}
	require.Contains(t, s.get("/tasks?kind=%3Cship%3E"), `name="kind" value="&lt;ship&gt;"`)
}
