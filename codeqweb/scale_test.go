package codeqweb_test

import (
	"fmt"
	"html"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqweb"
)

// TestManyTasks: with 100,000 tasks and 1,000 queues every page is short and quick.
func TestManyTasks(t *testing.T) {
	if testing.Short() {
		t.Skip("long with the race detector")
	}
	s := open(t, codeq.Options{Shards: 1}, as(codeqweb.All))
	batch := make([]codeq.Task, 10_000)
	var some codeq.ID
	for n := range 10 {
		for i := range batch {
			batch[i] = codeq.Task{Queue: fmt.Sprintf("queue-%03d", i%1000), Tenant: fmt.Sprint(i % 7), RunAt: time.Now().Add(time.Hour * time.Duration(n%2))}
		}
		ids, err := s.q.ProduceBatch(t.Context(), batch)
		require.NoError(t, err)
		some = ids[0]
	}
	timed := func(path string) string {
		begin := time.Now()
		page := s.get(path)
		require.Less(t, time.Since(begin), 10*time.Second, path)
		require.Less(t, len(page), 256<<10, path)
		t.Logf("%s: %v, %d bytes", path, time.Since(begin), len(page))
		return page
	}
	for !strings.Contains(s.get("/"), "1,000 queues") { // the sample may be a second old
	}
	page := timed("/")
	require.Equal(t, 50, strings.Count(page, "<tr data-queue"))
	require.Contains(t, page, "1,000 queues")
	require.Contains(t, page, `<tr data-queue="queue-000"`)
	require.NotContains(t, page, `id="previous"`)
	s.produce(codeq.Task{Queue: "queue-707"})
	for !strings.Contains(firstRow(timed("/?find=UE-70&order=ready")), "queue-707") { // the sample may be a second old
	}
	require.Contains(t, firstRow(timed("/?from=50")), "queue-050")
	require.Contains(t, timed("/?from=950&order=ready"), `id="previous"`)
	require.Contains(t, timed("/?find=queue-77"), "10 found")
	require.Contains(t, timed("/?find=nothing-like-it"), "No queue has this")
	for _, path := range []string{"/tasks", "/tasks?state=ready", "/tasks?state=scheduled&newest=true", "/queue?name=queue-500", "/dead", "/task?id=" + some.String(), "/tasks?tenant=nobody", "/tasks?state=ready&group=none"} {
		timed(path)
	}
	ids, next := make(map[string]bool), "/tasks?state=ready"
	for n := range 3 {
		page = timed(next)
		for _, row := range regexp.MustCompile(`<tr data-id="([^"]+)"`).FindAllStringSubmatch(page, -1) {
			ids[row[1]] = true
		}
		require.Len(t, ids, 50*(n+1), "a page has 50 others")
		next = "/" + html.UnescapeString(regexp.MustCompile(`href="([^"]+)" id="next"`).FindStringSubmatch(page)[1])
	}
	require.Equal(t, http.StatusOK, s.api(http.MethodGet, "info", "", nil))

	var j jsonJob
	require.Equal(t, http.StatusAccepted, s.api(http.MethodPost, "bulk", `{"Action": "cancel", "States": ["ready", "scheduled"], "DryRun": true}`, &j))
	for j.Ended.IsZero() {
		require.Equal(t, http.StatusOK, s.api(http.MethodGet, "bulk?wait=10s&id="+j.ID, "", &j))
	}
	require.Equal(t, 100_001, j.Result.Matched)
}

// firstRow returns the beginning of the first row of the overview.
func firstRow(page string) string {
	_, row, _ := strings.Cut(page, "<tr data-queue=")
	return row[:min(len(row), 40)]
}
