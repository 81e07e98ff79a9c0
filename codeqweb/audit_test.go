package codeqweb_test

import (
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqweb"
	"codeq/internal/testbase"
)

// TestAuditTargets: entries have the target of a change, also for a denied request if its URL has
// it.
func TestAuditTargets(t *testing.T) {
	var told []codeqweb.Entry
	for _, access := range []codeqweb.Access{codeqweb.All, codeqweb.Read} {
		opts := as(access)
		opts.Audit = func(_ *http.Request, e *codeqweb.Entry) { told = append(told, *e) }
		s := open(t, codeq.Options{}, opts)
		s.api(http.MethodPost, "schedules", `{"Name": "nightly", "Every": 3600000000000, "Task": {"Queue": "z"}}`, nil)
		for _, path := range []string{"/workers/quiet?all=true", "/pause?queue=mail", "/schedule/trigger?name=nightly&queue=z"} {
			s.do(request(http.MethodPost, path, form()))
		}
	}
	var got []string
	for _, e := range told {
		got = append(got, strings.TrimSpace(e.Action+" "+e.Target+" "+strings.SplitN(e.Detail, ",", 2)[0]))
	}
	require.Len(t, got, 8)
	require.Equal(t, "schedules nightly every 1h0m0s", got[0])
	require.Equal(t, "schedules", got[4], "its body was not read")
	require.Equal(t, got[1:4], got[5:])
	require.Equal(t, "workers/quiet  all true", got[1])
	require.Equal(t, "pause mail", got[2])
	require.Equal(t, "schedule/trigger nightly queue z", got[3])
}

// TestAuditIsSmall: entries do not keep their requests in memory.
func TestAuditIsSmall(t *testing.T) {
	testbase.SkipUnderRace(t)
	s := open(t, codeq.Options{}, as(codeqweb.All))
	heap := func() uint64 {
		runtime.GC()
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before := heap()
	for range 50 {
		r := httptest.NewRequest(http.MethodPost, "http://localhost/api/v1/task/cancel?id="+strings.Repeat("x", 1<<20), nil)
		r.Header.Set("Sec-Fetch-Site", "same-origin")
		require.Equal(t, http.StatusBadRequest, s.do(r).Code)
	}
	require.Less(t, int64(heap()-before), int64(10<<20))
}

// TestUserCodePanics: a function of the application that panics or calls Goexit does no harm: its
// change is done, and tasks that it should redact are not shown.
func TestUserCodePanics(t *testing.T) {
	exits := false
	opts := as(codeqweb.All)
	opts.Audit = func(*http.Request, *codeqweb.Entry) {
		if exits {
			runtime.Goexit()
		}
		panic("no audit")
	}
	opts.Redact = func(*codeq.TaskInfo) { panic("no redaction") }
	opts.Format = func(string, []byte) string { panic("no format") }
	s := open(t, codeq.Options{Shards: 1}, opts)
	id := s.produce(codeq.Task{Queue: "a", Payload: []byte("secret")})
	for range 10 { // more than run at a time
		var j jsonJob
		require.Equal(t, http.StatusAccepted, s.api(http.MethodPost, "bulk", `{"Action": "cancel", "States": ["ready"], "DryRun": true}`, &j))
		require.Equal(t, http.StatusOK, s.api(http.MethodGet, "bulk?wait=10s&id="+j.ID, "", &j))
		require.Equal(t, 1, j.Result.Matched)
		require.Equal(t, http.StatusOK, s.api(http.MethodPost, "bulk/stop?id="+j.ID, "", nil))
	}
	exits = true
	for range 10 {
		var j jsonJob
		require.Equal(t, http.StatusAccepted, s.api(http.MethodPost, "bulk", `{"Action": "cancel", "States": ["ready"], "DryRun": true}`, &j))
		require.Equal(t, http.StatusOK, s.api(http.MethodGet, "bulk?wait=10s&id="+j.ID, "", &j))
		require.False(t, j.Ended.IsZero())
	}
	exits = false
	require.Contains(t, s.get("/audit"), "Options.Audit has panicked: no audit")
	page := s.get("/task?id=" + id.String())
	require.Contains(t, page, "Options.Redact has panicked: no redaction")
	require.NotContains(t, page, "secret")
	require.NotContains(t, s.get("/api/v1/tasks?payloads=true"), "c2VjcmV0")

	denying := open(t, codeq.Options{Shards: 1}, &codeqweb.Options{Access: func(*http.Request) codeqweb.Access { panic("no access") }})
	require.Equal(t, http.StatusInternalServerError, denying.do(request(http.MethodGet, "/", nil)).Code)
}
