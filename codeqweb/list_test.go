package codeqweb_test

import (
	"context"
	"encoding/base64"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqweb"
)

// redactAll removes all that a filter can look at from tasks whose payload is secret.
func redactAll(task *codeq.TaskInfo) {
	if !strings.HasPrefix(string(task.Payload), "secret") {
		return
	}
	task.Kind, task.Tenant, task.Group, task.LimitKey, task.Unique, task.LastError = "", "", "", "", codeq.Unique{}, ""
	task.Payload, task.Result, task.Headers, task.Metadata, task.History = nil, nil, nil, nil, nil
}

// secrets makes a dashboard with Options.Redact, and tasks of the queue "a" that have parts with
// the words secret and shown. The values of guesses are those of a filter with the word GUESS in
// place of one of these words.
func secrets(t *testing.T, redact func(*codeq.TaskInfo)) (s *site, guesses []url.Values) {
	opts := as(codeqweb.All)
	opts.Redact = redact
	s = open(t, codeq.Options{Shards: 2, Retention: time.Hour}, opts)
	for _, word := range []string{"secret", "shown"} {
		task := codeq.Task{
			Queue: "a", Kind: word + "-kind", Tenant: word + "-tenant", Group: word + "-group", LimitKey: word + "-limit", Payload: []byte(word + "-payload"),
			Headers: map[string]string{"h": word + "-header"}, Unique: codeq.Unique{Key: word + "-key"},
		}
		s.dead(task, word+"-error")
		s.produce(codeq.Task{Queue: "a", Payload: []byte(word)})
		require.NoError(t, s.q.Complete(t.Context(), s.claim("a").Receipt, []byte(word+"-result")))
	}
	s.work("w", "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
		return codeq.SetMetadata(ctx, "m", string(j.Payload)+"-metadata")
	})
	for _, word := range []string{"secret", "shown"} {
		id := s.produce(codeq.Task{Queue: "a", Payload: []byte(word)})
		require.Eventually(t, func() bool { return s.task(id).State == codeq.Done }, 10*time.Second, time.Millisecond)
	}
	for _, f := range [][2]string{{"kind", "kind"}, {"tenant", "tenant"}, {"group", "group"}, {"key", "key"}, {"error", "error"}} {
		guesses = append(guesses, url.Values{f[0]: {"GUESS-" + f[1]}})
	}
	for _, part := range []string{"kind", "tenant", "group", "limit", "key", "error", "payload", "header", "result", "metadata"} {
		guesses = append(guesses, url.Values{"text": {"GUESS-" + part}, "contents": {"true"}})
	}
	return s, guesses
}

func guess(of url.Values, word string) string {
	return strings.ReplaceAll(of.Encode(), "GUESS", word)
}

// TestFiltersRevealNothing: the answer to a filter with a part that Options.Redact removes is that
// to one that no task has: with the same number of looked at tasks, and a next page or none.
func TestFiltersRevealNothing(t *testing.T) {
	t.Parallel()
	s, guesses := secrets(t, redactAll)
	random := regexp.MustCompile(`cursor=[\w-]+|"Next":"[\w-]+"`)
	answer := func(path string, of url.Values, word string) string {
		return random.ReplaceAllString(strings.ReplaceAll(s.get(path+guess(of, word)), word, "GUESS"), "CURSOR")
	}
	for _, path := range []string{
		"/api/v1/tasks?limit=1&", "/api/v1/tasks?limit=1&queue=a&state=dead&", "/api/v1/tasks?limit=2&newest=true&payloads=true&", "/tasks?queue=a&", "/save?as=csv&", "/save?as=jsonl&",
	} {
		for _, of := range guesses {
			require.Equal(t, answer(path, of, "sacred"), answer(path, of, "secret"), path+of.Encode())
			if !strings.Contains(path, "state=") {
				require.NotEqual(t, answer(path, of, "sacred"), answer(path, of, "shown"), path+of.Encode())
			}
		}
	}
	for _, of := range guesses {
		if text := of.Get("text"); text != "" {
			q := url.Values{"q": {text}}
			require.Equal(t, answer("/search?", q, "sacred"), answer("/search?", q, "secret"), text)
			require.Contains(t, answer("/search?", q, "shown"), "data-id=", text)
		}
	}
}

// TestRedactedPages: a list that Options.Redact selects has each task once, however many its pages
// are, and however many tasks a page leaves out; it reads a bounded number of them.
func TestRedactedPages(t *testing.T) {
	t.Parallel()
	opts := as(codeqweb.All)
	opts.Redact = func(task *codeq.TaskInfo) {
		if string(task.Payload) == "secret" {
			task.Kind, task.Tenant = "", ""
		}
	}
	s := open(t, codeq.Options{Shards: 2}, opts)
	var batch []codeq.Task
	for i := range 700 {
		task := codeq.Task{Queue: "a", Kind: "some", Tenant: fmt.Sprint("tenant-", i%3), Payload: []byte("open")}
		if i%7 != 0 {
			task.Tenant, task.Payload = fmt.Sprint("hidden-", i%3), []byte("secret")
		}
		batch = append(batch, task)
	}
	ids, err := s.q.ProduceBatch(t.Context(), batch)
	require.NoError(t, err)
	for _, filter := range []string{"kind=some", "kind=some&newest=true&state=ready", "queue=a"} {
		for _, limit := range []int{1, 9, 300} {
			seen, scanned := make(map[codeq.ID]int), 0
			for cursor := ""; ; {
				var page codeq.Page
				require.Equal(t, http.StatusOK, s.api(http.MethodGet, fmt.Sprintf("tasks?%s&limit=%d&cursor=%s", filter, limit, cursor), "", &page))
				require.LessOrEqual(t, len(page.Tasks), limit)
				for _, task := range page.Tasks {
					seen[task.ID]++
				}
				scanned += page.Scanned
				if cursor = page.Next; cursor == "" {
					break
				}
			}
			require.GreaterOrEqual(t, scanned, len(ids))
			for i, id := range ids {
				wanted := 1
				if i%7 != 0 && filter != "queue=a" {
					wanted = 0
				}
				require.Equal(t, wanted, seen[id], "%s, limit %d, task %d", filter, limit, i)
			}
		}
	}
	for range 8 {
		_, err := s.q.ProduceBatch(t.Context(), batch)
		require.NoError(t, err)
	}
	scanned := make(map[int]bool)
	for _, filter := range []string{"kind=none", "tenant=hidden-0", "tenant=none"} {
		var page codeq.Page
		require.Equal(t, http.StatusOK, s.api(http.MethodGet, "tasks?"+filter, "", &page))
		require.Empty(t, page.Tasks)
		require.NotEmpty(t, page.Next)
		require.Greater(t, page.Scanned, 4000)
		require.Less(t, page.Scanned, 5000)
		scanned[page.Scanned] = true
	}
	require.Len(t, scanned, 1, "a hidden part makes no difference")
	for _, bad := range []string{"limit=-1", "limit=1001", "text=" + strings.Repeat("x", 257)} {
		require.Equal(t, http.StatusBadRequest, s.api(http.MethodGet, "tasks?"+bad, "", nil), bad)
	}
}

// TestSealedCursors: with Options.Redact a cursor does not have the names of the task before it; it
// is for one list of one dashboard, and an error does not show its contents.
func TestSealedCursors(t *testing.T) {
	t.Parallel()
	s, _ := secrets(t, redactAll)
	names := regexp.MustCompile(`secret|shown`)
	cursors := regexp.MustCompile(`(?:cursor=|"Next":")([\w-]+)`)
	plain := codeqweb.Handler(s.q, as(codeqweb.All))
	defer func() { require.NoError(t, plain.Close()) }()
	next := func(s *site, path string) (cursor, text string) {
		found := cursors.FindStringSubmatch(s.get(path))
		require.NotNil(t, found, path)
		b, err := base64.RawURLEncoding.DecodeString(found[1])
		require.NoError(t, err)
		return found[1], string(b)
	}
	const list = "/api/v1/tasks?limit=1&state=dead"
	_, text := next(&site{t, s.q, plain}, list)
	require.Regexp(t, names, text)
	cursor, text := next(s, list)
	require.NotRegexp(t, names, text)
	again, _ := next(s, list)
	require.NotEqual(t, cursor, again)
	require.Equal(t, http.StatusOK, s.do(request(http.MethodGet, list+"&cursor="+cursor, nil)).Code)

	other, _ := next(s, "/api/v1/tasks?limit=1&state=ready&state=dead")
	require.Equal(t, http.StatusBadRequest, s.api(http.MethodPost, "bulk", `{"Action": "redrive", "States": ["dead"], "Cursor": "`+other+`"}`, nil))

	later := codeqweb.Handler(s.q, &codeqweb.Options{Redact: redactAll})
	defer func() { require.NoError(t, later.Close()) }()
	for path, s := range map[string]*site{
		list + "&newest=true": s, "/api/v1/tasks?state=done": s, "/api/v1/tasks?state=dead&kind=x": s, "/tasks?queue=a": s, "/save?as=csv": s, list: {t, s.q, later},
	} {
		w := s.do(request(http.MethodGet, path+"&cursor="+cursor, nil))
		require.Equal(t, http.StatusBadRequest, w.Code, path)
		require.Contains(t, w.Body.String(), "since the start of its process", path)
	}
}

// TestKeysRevealNothing: a key that Options.Redact hides is as one that no task has, and is not
// released.
func TestKeysRevealNothing(t *testing.T) {
	t.Parallel()
	for part, redact := range map[string]func(*codeq.TaskInfo){
		"Key":      func(task *codeq.TaskInfo) { task.Unique = codeq.Unique{} },
		"Tenant":   func(task *codeq.TaskInfo) { task.Tenant = "" },
		"Group":    func(task *codeq.TaskInfo) { task.Group = "" },
		"LimitKey": func(task *codeq.TaskInfo) { task.LimitKey = "" },
		"Queue":    func(task *codeq.TaskInfo) { task.Queue = "" },
	} {
		t.Run(part, func(t *testing.T) {
			opts := as(codeqweb.All)
			opts.Redact = func(task *codeq.TaskInfo) {
				if string(task.Payload) == "secret" {
					redact(task)
				}
			}
			s := open(t, codeq.Options{Shards: 1}, opts)
			key := func(word string) string {
				return url.Values{"queue": {"a"}, "tenant": {word}, "group": {"g"}, "limit-key": {"l"}, "key": {word}}.Encode()
			}
			for _, word := range []string{"secret", "shown"} {
				s.produce(codeq.Task{Queue: "a", Tenant: word, Group: "g", LimitKey: "l", Unique: codeq.Unique{Key: word}, Payload: []byte(word)})
			}
			for method, path := range map[string]string{http.MethodGet: "/api/v1/find?", http.MethodPost: "/api/v1/release-key?"} {
				hidden, none := s.do(request(method, path+key("secret"), nil)), s.do(request(method, path+key("sacred"), nil))
				require.Equal(t, http.StatusNotFound, hidden.Code, path)
				require.Equal(t, none.Body.String(), hidden.Body.String(), path)
			}
			stored, err := s.q.FindByKey(t.Context(), codeq.UniqueKey{Queue: "a", Tenant: "secret", Group: "g", LimitKey: "l", Key: "secret"})
			require.NoError(t, err)
			require.Equal(t, "secret", stored.Unique.Key)
			require.Contains(t, s.get("/api/v1/find?"+key("shown")), `"Key":"shown"`)
			require.Equal(t, http.StatusOK, s.do(request(http.MethodPost, "/api/v1/release-key?"+key("shown"), nil)).Code)
		})
	}
}

// TestBulkRevealsNothing: a bulk change neither counts nor alters tasks by a part that
// Options.Redact removes. It goes on by the parts that are shown, and by queue and state.
func TestBulkRevealsNothing(t *testing.T) {
	t.Parallel()
	s, guesses := secrets(t, redactAll)
	bulk := func(filter url.Values, dry string) codeq.BulkResult {
		p := url.Values{"action": {"purge"}, "state": {"dead", "done"}, "queue": {"a"}, "dry": {dry}}
		for name, value := range filter {
			p[name] = value
		}
		_, id, _ := strings.Cut(s.post("/bulk?"+p.Encode()), "id=")
		var j jsonJob
		require.Equal(t, http.StatusOK, s.api(http.MethodGet, "bulk?wait=10s&id="+id, "", &j))
		require.Empty(t, j.Error)
		return *j.Result
	}
	with := func(of url.Values, word string) url.Values {
		p, err := url.ParseQuery(guess(of, word))
		require.NoError(t, err)
		return p
	}
	for _, of := range guesses {
		require.Zero(t, bulk(with(of, "secret"), "true").Matched, of)
		require.Zero(t, bulk(with(of, "secret"), "false").Changed, of)
		require.Positive(t, bulk(with(of, "shown"), "true").Matched, of)
	}
	require.Equal(t, 6, bulk(nil, "true").Matched)
	require.Equal(t, 1, bulk(url.Values{"error": {"shown-error"}}, "false").Changed)
	require.Equal(t, 5, bulk(nil, "false").Changed)
}

// TestSealedBulkCursor: with Options.Redact a change that was stopped has a cursor without names,
// and another change goes on with it.
func TestSealedBulkCursor(t *testing.T) {
	t.Parallel()
	opts := as(codeqweb.All)
	opts.Redact = func(task *codeq.TaskInfo) { task.Tenant = "" }
	s := open(t, codeq.Options{Shards: 1}, opts)
	for range 3 {
		s.produce(codeq.Task{Queue: "a", Tenant: "secret"})
	}
	var j jsonJob
	const body = `{"Action": "cancel", "States": ["ready"], "Queue": "a", "Rate": %s, "Cursor": "%s"}`
	require.Equal(t, http.StatusAccepted, s.api(http.MethodPost, "bulk", fmt.Sprintf(body, "0.01", ""), &j))
	require.Eventually(t, func() bool {
		tasks, err := s.q.ListPage(t.Context(), codeq.PageOptions{TaskFilter: codeq.TaskFilter{States: []codeq.State{codeq.Ready}}})
		return err == nil && len(tasks.Tasks) == 2
	}, 10*time.Second, time.Millisecond)
	require.Equal(t, http.StatusOK, s.api(http.MethodPost, "bulk/stop?id="+j.ID, "", &j))
	next := j.Result.Next
	b, err := base64.RawURLEncoding.DecodeString(next)
	require.NoError(t, err)
	require.NotEmpty(t, b)
	require.NotContains(t, string(b), "secret")
	j = jsonJob{}
	require.Equal(t, http.StatusAccepted, s.api(http.MethodPost, "bulk", fmt.Sprintf(body, "0", next), &j))
	require.Equal(t, http.StatusOK, s.api(http.MethodGet, "bulk?wait=10s&id="+j.ID, "", &j))
	require.Empty(t, j.Error)
	require.Equal(t, 2, j.Result.Changed)
}
