package codeqweb

import (
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
)

// dashboardOf opens an empty queue with a dashboard for an administrator.
func dashboardOf(t *testing.T) (*codeq.Queue, *Dashboard) {
	q, err := codeq.Open(t.TempDir(), nil)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, q.Close()) })
	d := Handler(q, &Options{Access: func(*http.Request) Access { return All }})
	t.Cleanup(func() { require.NoError(t, d.Close()) })
	return q, d
}

// TestAPIDocumented: API.md has each path of the JSON API with its method, rights and parameters.
func TestAPIDocumented(t *testing.T) {
	_, d := dashboardOf(t)
	served := make(map[string]string)
	for path, methods := range d.routes {
		for method, rt := range methods {
			if path = strings.TrimSuffix(path, "/"); strings.HasPrefix(path, "api/") {
				needs := rt.needs
				if needs != Read {
					needs &^= Read
				}
				takes := slices.Clone(rt.takes)
				slices.Sort(takes)
				served[method+" "+path] = needs.String() + ": " + strings.Join(takes, " ")
			}
		}
	}
	text, err := os.ReadFile("API.md")
	require.NoError(t, err)
	documented, required := make(map[string]string), make(map[string]bool)
	for _, row := range regexp.MustCompile("(?m)^\\| `((?:GET|POST) [^`]+)` \\| (\\w+) \\|([^|]*)\\|(.*)").FindAllStringSubmatch(string(text), -1) {
		var takes []string
		for _, name := range regexp.MustCompile("`([^`]+)`(?:\\*\\*)?(\\+?)").FindAllStringSubmatch(row[3], -1) {
			takes = append(takes, name[1]+name[2])
		}
		if !strings.Contains(row[4], "body") {
			required[row[1]] = strings.Contains(row[3], "**")
		}
		slices.Sort(takes)
		documented[row[1]] = row[2] + ": " + strings.Join(takes, " ")
	}
	require.Equal(t, served, documented)
	for at, is := range required {
		method, path, _ := strings.Cut(at, " ")
		if path == "api/v1/events" || strings.HasPrefix(path, "api/v1/cluster/") {
			continue // a stream, and what needs a cluster
		}
		w := httptest.NewRecorder()
		d.ServeHTTP(w, httptest.NewRequest(method, "http://localhost/"+path, strings.NewReader("{}")))
		require.Equal(t, is, w.Code == http.StatusBadRequest || w.Code == http.StatusNotFound, "%s without parameters: %s", at, w.Body)
	}
}

// TestUnknownParameter: a slip in the name of a parameter is refused before anything is read or
// changed. A page ignores it.
func TestUnknownParameter(t *testing.T) {
	q, d := dashboardOf(t)
	id, err := q.Produce(t.Context(), codeq.Task{Queue: "a"})
	require.NoError(t, err)
	for _, c := range []struct {
		method, path string
		status       int
		text         string
	}{
		{http.MethodGet, "/api/v1/tasks?tenent=a", http.StatusBadRequest, `parameter \"tenent\": api/v1/tasks takes state, queue, kind`},
		{http.MethodGet, "/api/v1/workers?queue=a", http.StatusBadRequest, `api/v1/workers takes none`},
		{http.MethodPost, "/api/v1/task/cancel?id=" + id.String() + "&force=true", http.StatusBadRequest, `api/v1/task/cancel takes id`},
		{http.MethodGet, "/api/v1/events?queues=a", http.StatusBadRequest, `takes queue, kind`},
		{http.MethodGet, "/api/v1/tasks?queue=a&queue=b", http.StatusBadRequest, `parameter \"queue\": must be given once`},
		{http.MethodGet, "/api/v1/tasks?state=ready&state=dead&tenant=a&tenant=", http.StatusOK, ""},
		{http.MethodGet, "/api/v1/tasks?newest=1", http.StatusBadRequest, `parameter \"newest\": must be true or false`},
		{http.MethodGet, "/api/v1/charts?span=90", http.StatusBadRequest, `parameter \"span\"`},
		{http.MethodGet, "/api/v1/tasks?state=dead;queue=x", http.StatusBadRequest, "cannot be read"},
		{http.MethodGet, "/api/v1/tasks?queue=100%", http.StatusBadRequest, "cannot be read"},
		{http.MethodPost, "/api/v1/task/run-at?id=" + id.String() + "&at=2030-01-01T00:00:00%2", http.StatusBadRequest, "cannot be read"},
		{http.MethodPost, "/task/cancel?id=" + id.String() + "&a=%2", http.StatusBadRequest, "cannot be read"},
		{http.MethodGet, "/tasks?tenent=a&utm_source=mail&a=100%", http.StatusOK, ""},
	} {
		w := httptest.NewRecorder()
		d.ServeHTTP(w, httptest.NewRequest(c.method, "http://localhost"+c.path, http.NoBody))
		require.Equal(t, c.status, w.Code, c.path)
		require.Contains(t, w.Body.String(), c.text)
	}
	info, err := q.Get(t.Context(), id)
	require.NoError(t, err)
	require.Equal(t, codeq.Ready, info.State)
}

// TestPartlyStored: the error of a batch that is stored in part has the IDs of that part.
func TestPartlyStored(t *testing.T) {
	_, d := dashboardOf(t)
	w := httptest.NewRecorder()
	d.refuse(w, &request{api: true}, &partlyStored{codeq.ErrDiskFull, []codeq.ID{{15: 1}, {}}})
	require.Equal(t, http.StatusInsufficientStorage, w.Code)
	require.Contains(t, w.Body.String(), `"Kind":"disk-full","IDs":["00000000-0000-0000-0000-000000000001","00000000-0000-0000-0000-000000000000"]`)
}
