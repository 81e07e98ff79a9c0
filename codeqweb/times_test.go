package codeqweb_test

import (
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqweb"
)

// TestTimesInUTC: without its script, a page shows times in UTC, says so, and takes them in UTC,
// whatever the zone of the process is.
func TestTimesInUTC(t *testing.T) {
	s := open(t, codeq.Options{Shards: 1}, as(codeqweb.All))
	at := time.Date(2099, 1, 2, 3, 4, 5, 0, time.UTC)
	id := s.produce(codeq.Task{Queue: "a", RunAt: at})
	path := "/task?id=" + id.String()
	page := s.get(path)
	require.Contains(t, page, `<time class="at" datetime="2099-01-02T03:04:05Z" title="in 26`)
	require.Contains(t, page, `>2099-01-02 03:04:05.000 UTC</time>`)
	require.Contains(t, page, `<span id="zone">Times are in UTC.</span>`)
	require.Contains(t, page, `<label>at <input name="at" type="datetime-local" autocomplete="off" required> <small class="zone">in UTC</small></label>`)
	for text, want := range map[string]string{
		"2098-05-06T07:08": "2098-05-06T07:08:00Z", "2098-05-06T07:08:09": "2098-05-06T07:08:09Z",
		"2098-05-06T07:08:09.25": "2098-05-06T07:08:09.25Z", "2098-05-06T07:08:00+02:00": "2098-05-06T05:08:00Z",
	} {
		s.post("/task/run-at", "id", id.String(), "at", text)
		require.Equal(t, want, s.task(id).RunAt.Format(time.RFC3339Nano), text)
	}
	require.Equal(t, http.StatusBadRequest, s.do(request(http.MethodPost, "/task/run-at", form("id", id.String(), "at", "tomorrow"))).Code)

	// The fields of a filter keep it.
	page = s.get("/tasks?from=2098-05-06T07:08:09.25%2B02:00&to=2099-01-01T00:00")
	require.Contains(t, page, `name="from" type="datetime-local" step="any" autocomplete="off" value="2098-05-06T05:08:09.25"> <small class="zone">in UTC</small>`)
	require.Contains(t, page, `value="2099-01-01T00:00:00"`)
}
