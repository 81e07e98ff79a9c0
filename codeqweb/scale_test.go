package codeqweb_test

import (
	"flag"
	"fmt"
	"html"
	"net/http"
	"net/http/httptest"
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
	require.Equal(t, 50, strings.Count(page, " data-queue="))
	require.Contains(t, page, "1,000 queues")
	require.NotContains(t, page, `id="previous"`)
	require.Contains(t, firstRow(timed("/?order=name")), "queue-000")
	s.produce(codeq.Task{Queue: "queue-707"})
	for !strings.Contains(firstRow(timed("/?find=UE-70&order=ready")), "queue-707") { // the sample may be a second old
	}
	require.Contains(t, firstRow(timed("/?from=50&order=name")), "queue-050")
	require.Contains(t, timed("/?from=950&order=ready"), `id="previous"`)
	require.Contains(t, timed("/?find=queue-77"), "10 found")
	require.Contains(t, timed("/?find=nothing-like-it"), "No queue has this")
	for _, path := range []string{"/tasks", "/tasks?state=ready", "/tasks?state=scheduled&newest=true", "/queue?name=queue-500", "/dead", "/task?id=" + some.String(), "/tasks?tenant=nobody", "/tasks?state=ready&group=none"} {
		timed(path)
	}
	ids, next := make(map[string]bool), "/tasks?state=ready"
	for n := range 3 {
		page = timed(next)
		for _, row := range regexp.MustCompile(`data-id="([^"]+)"`).FindAllStringSubmatch(page, -1) {
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
	_, row, _ := strings.Cut(page, " data-queue=")
	return row[:min(len(row), 40)]
}

var (
	pageTasks  = flag.Int("page.tasks", 217_000, "the tasks of BenchmarkPages and BenchmarkSearch")
	pageQueues = flag.Int("page.queues", 62, "the queues of BenchmarkPages and BenchmarkSearch")
)

// fillPages produces the tasks of a benchmark, and returns the ID of one, and the bytes of all
// payloads.
func fillPages(b *testing.B, q *codeq.Queue, tenants int) (some codeq.ID, bytes int) {
	batch := make([]codeq.Task, 1000)
	for n := range *pageTasks / 1000 {
		for i := range batch {
			k := 1000*n + i
			batch[i] = codeq.Task{
				Queue: fmt.Sprintf("queue-%02d", k%*pageQueues), Tenant: fmt.Sprint("tenant-", k%tenants), RunAt: time.Now().Add(time.Hour * time.Duration(k%2)),
				Payload: fmt.Appendf(nil, `{"customer": "c-%d", "order": %d, "text": "%0200d"}`, k%5000, k, k),
			}
			bytes += len(batch[i].Payload)
			if k%2 == 0 {
				batch[i].Group = fmt.Sprint("group-", k%9000)
			}
		}
		ids, err := q.ProduceBatch(b.Context(), batch)
		require.NoError(b, err)
		some = ids[500]
	}
	return some, bytes
}

// BenchmarkPages measures pages of many tasks: the time, which is that of one processor, and the
// compressed bytes.
func BenchmarkPages(b *testing.B) {
	q, err := codeq.Open(b.TempDir(), &codeq.Options{Shards: 2})
	require.NoError(b, err)
	defer func() { require.NoError(b, q.Close()) }()
	d := codeqweb.Handler(q, as(codeqweb.All))
	defer func() { require.NoError(b, d.Close()) }()
	some, _ := fillPages(b, q, 700)
	for _, path := range []string{
		"/", "/?span=24h", "/queue?name=queue-07", "/tasks", "/tasks?state=scheduled&newest=true", "/tasks?queue=queue-07&tenant=tenant-7", "/task?id=" + some.String(),
		"/dead", "/schedules", "/workers", "/storage", "/cluster", "/search?q=c-4711",
	} {
		b.Run(strings.Trim(strings.NewReplacer("/", "", "=", "-", "?", "-", "&", "-").Replace(path), "-")+".", func(b *testing.B) {
			size := 0
			for b.Loop() {
				r := request(http.MethodGet, path, nil)
				r.Header.Set("Accept-Encoding", "gzip")
				w := httptest.NewRecorder()
				d.ServeHTTP(w, r)
				require.Equal(b, http.StatusOK, w.Code, path)
				size = w.Body.Len()
			}
			b.ReportMetric(float64(size), "gzip-B")
		})
	}
}

// BenchmarkSearch measures a search in all payloads: their bytes a second. With many tenants, it
// goes from one short lane of a queue to the next.
func BenchmarkSearch(b *testing.B) {
	for _, tenants := range []int{1, 700} {
		b.Run(fmt.Sprint("tenants=", tenants), func(b *testing.B) {
			q, err := codeq.Open(b.TempDir(), &codeq.Options{Shards: 2})
			require.NoError(b, err)
			defer func() { require.NoError(b, q.Close()) }()
			_, bytes := fillPages(b, q, tenants)
			b.SetBytes(int64(bytes))
			for b.Loop() {
				for o := (codeq.PageOptions{TaskFilter: codeq.TaskFilter{Text: "nobody has this", Contents: true}, NoPayload: true}); ; {
					p, err := q.ListPage(b.Context(), o)
					require.NoError(b, err)
					require.Empty(b, p.Tasks)
					if o.Cursor = p.Next; o.Cursor == "" {
						break
					}
				}
			}
		})
	}
}
