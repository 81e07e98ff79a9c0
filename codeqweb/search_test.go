package codeqweb_test

import (
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqweb"
)

// TestSearch: the page finds IDs, names, errors and payloads, and reports the number of searched
// tasks.
func TestSearch(t *testing.T) {
	s := open(t, codeq.Options{Shards: 2}, as(codeqweb.All))
	ada := s.produce(codeq.Task{Queue: "mails", Payload: []byte(`{"customer":"Ada <Löwe>"}`)})
	eve := s.produce(codeq.Task{Queue: "mails", Tenant: "eve & co"})
	s.produce(codeq.Task{Queue: "other", Payload: []byte("\xff\xfe")})
	find := func(text string) string { return s.get("/search?q=" + url.QueryEscape(text)) }
	require.Contains(t, s.get("/search"), "or of a payload")

	w := s.do(request(http.MethodGet, "/search?q=+"+ada.String()+"+", nil))
	require.Equal(t, http.StatusSeeOther, w.Code)
	require.Equal(t, "./task?id="+ada.String(), w.Header().Get("Location"))

	page := find("ada <löWE>")
	require.Contains(t, page, `data-id="`+ada.String())
	require.NotContains(t, page, eve.String())
	require.Contains(t, page, "Looked through all 3 tasks")
	require.Contains(t, page, "Some have a payload or a result that is no text")
	require.Contains(t, find(ada.String()[:18]), `data-id="`+ada.String(), "the beginning of an ID")
	require.Contains(t, find("EVE & C"), `data-id="`+eve.String())
	page = find("mail")
	require.Contains(t, page, `<p id="found-queues">Queues: <a href="queue?name=mails"`)
	require.Contains(t, page, "No task has this text.")
	require.Contains(t, s.get("/search?q=ada&queue=other"), "Looked through all 1 tasks of queue")
	require.Equal(t, http.StatusBadRequest, s.do(request(http.MethodGet, "/search?q="+strings.Repeat("x", 257), nil)).Code)

	for _, path := range []string{"/tasks?text=CUSTOMER&contents=true", "/api/v1/tasks?text=CUSTOMER&contents=true"} {
		page := s.get(path)
		require.Contains(t, page, ada.String(), path)
		require.NotContains(t, page, eve.String(), path)
	}
	require.NotContains(t, s.get("/tasks?text=CUSTOMER"), `data-id="`)
}

// TestSearchInPages: a search with many results goes on where it has stopped, and counts all.
func TestSearchInPages(t *testing.T) {
	s := open(t, codeq.Options{Shards: 3}, as(codeqweb.All))
	const tasks = 60
	for i := range tasks {
		s.produce(codeq.Task{Queue: "a", Payload: []byte("needle " + strconv.Itoa(i))})
	}
	found := make(map[string]bool)
	for path := "/search?q=needle"; path != ""; {
		page := s.get(path)
		for _, row := range strings.Split(page, `data-id="`)[1:] {
			id := row[:36]
			require.False(t, found[id])
			found[id] = true
		}
		_, next, more := strings.Cut(page, `<a href="search`)
		if path = ""; more {
			next, _, _ = strings.Cut(next, `"`)
			path = "/search" + strings.ReplaceAll(next, "&amp;", "&")
		} else {
			require.Contains(t, page, "Looked through all 60 tasks")
		}
	}
	require.Len(t, found, tasks)
}

// TestSearchEnds: the last page of a search that has found tasks says that there are no more.
func TestSearchEnds(t *testing.T) {
	t.Parallel()
	s := open(t, codeq.Options{Shards: 1}, as(codeqweb.All))
	var ids []codeq.ID
	for range 30 {
		ids = append(ids, s.produce(codeq.Task{Queue: "a", Payload: []byte("needle")}))
	}
	page := s.get("/search?q=needle")
	_, next, more := strings.Cut(page, `<a href="search`)
	require.True(t, more)
	next, _, _ = strings.Cut(next, `"`)
	for _, id := range ids {
		require.NoError(t, s.q.Cancel(t.Context(), id))
	}
	page = s.get("/search" + strings.ReplaceAll(next, "&amp;", "&"))
	require.Contains(t, page, "No more tasks have this text.")
	require.NotContains(t, page, "No task has this text.")
	require.Contains(t, s.get("/search?q=needle"), "No task has this text.")
}

// TestSearchShowsNoSecrets: without the right to see payloads they are not searched, and parts that
// the application hides are not found.
func TestSearchShowsNoSecrets(t *testing.T) {
	opts := as(codeqweb.Read | codeqweb.Act)
	s := open(t, codeq.Options{Shards: 1}, opts)
	s.produce(codeq.Task{Queue: "a", Payload: []byte("secret"), Headers: map[string]string{"a": "secret"}})
	page := s.get("/search?q=secret")
	require.NotContains(t, page, `data-id="`)
	require.Contains(t, page, "not in payloads, which you may not see")
	for _, path := range []string{"/tasks?text=secret&contents=true", "/api/v1/tasks?text=secret&contents=true"} {
		require.Equal(t, http.StatusForbidden, s.do(request(http.MethodGet, path, nil)).Code, path)
	}
	bulk := url.Values{"action": {"cancel"}, "dry": {"true"}, "state": {"ready"}, "text": {"secret"}, "contents": {"true"}}
	require.Equal(t, http.StatusForbidden, s.do(request(http.MethodPost, "/bulk", bulk)).Code)

	opts = as(codeqweb.All)
	opts.Redact = func(task *codeq.TaskInfo) {
		if strings.Contains(string(task.Payload), "secret") {
			task.Payload = []byte("hidden")
		}
		task.Tenant = ""
	}
	s = open(t, codeq.Options{Shards: 1}, opts)
	s.produce(codeq.Task{Queue: "a", Tenant: "tenant", Payload: []byte("secret")})
	shown := s.produce(codeq.Task{Queue: "a", Payload: []byte("shown")})
	for _, path := range []string{"/search?q=", "/tasks?contents=true&text=", "/api/v1/tasks?contents=true&text="} {
		for _, text := range []string{"secret", "tenant"} {
			page := s.get(path + text)
			require.NotContains(t, page, `data-id="`, path)
			require.NotContains(t, page, `"ID"`, path)
		}
		require.Contains(t, s.get(path+"shown"), shown.String(), path)
	}
}
