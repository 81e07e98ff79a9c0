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
)

// TestAuditTargets: what was changed, or was to be, is told, also of a request that is denied, as
// far as its URL says so.
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

// TestAuditIsSmall: entries do not keep the requests of which they tell.
func TestAuditIsSmall(t *testing.T) {
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
