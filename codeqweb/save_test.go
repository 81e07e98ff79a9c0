package codeqweb_test

import (
	"encoding/csv"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqweb"
)

// TestSave: a list is saved as it is filtered, with more than a page, and without what the viewer
// may not see. No cell is a formula.
func TestSave(t *testing.T) {
	opts := as(codeqweb.All)
	opts.Redact = func(task *codeq.TaskInfo) {
		task.History = nil
		task.LastError = strings.ReplaceAll(task.LastError, "secret", "…")
	}
	s := open(t, codeq.Options{Shards: 2}, opts)
	batch := make([]codeq.Task, 1500)
	for i := range batch {
		batch[i] = codeq.Task{Queue: "a", Tenant: "=1+1", Payload: fmt.Append(nil, "payload ", i), Headers: map[string]string{"h": "v"}}
	}
	_, err := s.q.ProduceBatch(t.Context(), batch)
	require.NoError(t, err)
	s.produce(codeq.Task{Queue: "b"})
	id := s.dead(codeq.Task{Queue: "c"}, "a secret failure\nof two lines")

	w := s.do(request(http.MethodGet, "/save?as=csv&queue=a", nil))
	require.Equal(t, http.StatusOK, w.Code)
	require.Equal(t, `attachment; filename="tasks.csv"`, w.Header().Get("Content-Disposition"))
	rows, err := csv.NewReader(w.Body).ReadAll()
	require.NoError(t, err)
	require.Len(t, rows, 1501)
	require.Equal(t, []string{"ID", "Queue", "Kind", "State", "At", "Tenant"}, rows[0][:6])
	require.Equal(t, "'=1+1", rows[1][5])

	lines := strings.Split(strings.TrimSpace(s.get("/save?as=jsonl&state=dead&text=failure")), "\n")
	require.Len(t, lines, 1)
	require.Contains(t, lines[0], id.String())
	require.NotContains(t, lines[0], "secret")
	require.NotContains(t, s.get("/save?as=jsonl&text=secret"), "ID", "what Redact removes is not found")
	require.NotContains(t, s.get("/save?as=jsonl&queue=a"), "Payload")
	require.Equal(t, http.StatusBadRequest, s.do(request(http.MethodGet, "/save?as=pdf", nil)).Code)
	require.Contains(t, s.get("/tasks?queue=a&newest=true"), `href="save?as=csv&amp;newest=true&amp;queue=a"`)

	reader := &site{t, s.q, codeqweb.Handler(s.q, nil)}
	defer func() { require.NoError(t, reader.d.Close()) }()
	require.NotContains(t, reader.get("/save?as=jsonl&queue=a"), "Headers")
	require.Equal(t, http.StatusForbidden, reader.do(request(http.MethodGet, "/save?as=csv&text=payload&contents=true", nil)).Code)
}

// TestSaveGoesOn: a list that is longer than a file goes on in the next one, and an empty one has
// the names of its columns.
func TestSaveGoesOn(t *testing.T) {
	t.Parallel()
	s := open(t, codeq.Options{Shards: 2}, as(codeqweb.Read))
	const tasks = 20_500
	for made := 0; made < tasks; made += 500 {
		batch := make([]codeq.Task, 500)
		for i := range batch {
			batch[i] = codeq.Task{Queue: "a", Tenant: "t"}
		}
		_, err := s.q.ProduceBatch(t.Context(), batch)
		require.NoError(t, err)
	}
	save := func(path string) (rows [][]string, name, next string) {
		w := s.do(request(http.MethodGet, path, nil))
		require.Equal(t, http.StatusOK, w.Code, w.Body)
		rows, err := csv.NewReader(w.Body).ReadAll()
		require.NoError(t, err)
		require.Equal(t, "ID", rows[0][0])
		return rows[1:], w.Header().Get("Content-Disposition"), w.Header().Get("Link")
	}
	seen, saved := make(map[string]bool), 0
	var names []string
	for path := "/save?as=csv&queue=a&tenant=t&newest=true&state=ready"; path != ""; {
		rows, name, next := save(path)
		require.LessOrEqual(t, len(rows), 20_000)
		for _, row := range rows {
			seen[row[0]] = true
		}
		saved += len(rows)
		names = append(names, name)
		if path = ""; next != "" {
			require.Regexp(t, `^<save\?[^<>]*>; rel="next"$`, next)
			path = "/" + next[1:strings.Index(next, ">")]
			require.Contains(t, path, "newest=true&queue=a&state=ready&tenant=t")
		}
	}
	require.Equal(t, tasks, saved)
	require.Len(t, seen, tasks)
	require.Greater(t, len(names), 1)
	require.Contains(t, names[0], `filename="the first `)
	require.Contains(t, names[len(names)-1], `filename="the last `)

	rows, name, next := save("/save?as=csv&queue=none")
	require.Empty(t, rows)
	require.Equal(t, `attachment; filename="tasks.csv"`, name)
	require.Empty(t, next)
	w := s.do(request(http.MethodGet, "/save?as=csv&cursor=nonsense", nil))
	require.Equal(t, http.StatusBadRequest, w.Code)
	require.NotContains(t, w.Body.String(), "ID,Queue", "an error is no part of a file")
	require.Contains(t, s.get("/tasks"), "Save without payloads, at most 20,000 tasks: ")
}
