package codeqweb_test

import (
	"errors"
	"fmt"
	"html"
	"net/http"
	"strings"
	"testing"
	"time"
	_ "time/tzdata" // the machine may have none

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqweb"
)

// jsonSchedule is a schedule in the JSON form.
type jsonSchedule struct {
	codeq.ScheduleInfo
	Upcoming []time.Time
	Runs     []struct {
		ID       codeq.ID
		Tick     time.Time
		State    codeq.State
		Attempts int
		Error    string
	}
}

// schedules returns the schedules, as JSON and as page.
func (s *site) schedules() (all []jsonSchedule, page string) {
	s.t.Helper()
	var v struct{ Schedules []jsonSchedule }
	require.Equal(s.t, http.StatusOK, s.api(http.MethodGet, "schedules", "", &v))
	return v.Schedules, s.get("/schedules")
}

// TestScheduleRuns: the last runs of a schedule are shown with what has become of them, found among
// other tasks of its queue.
func TestScheduleRuns(t *testing.T) {
	t.Parallel()
	s := open(t, codeq.Options{Shards: 2, Retention: time.Hour}, as(codeqweb.Read))
	ctx := t.Context()
	set := func(sch codeq.Schedule) { require.NoError(t, s.q.SetSchedule(ctx, sch)) }
	set(codeq.Schedule{Name: "nightly", Cron: "30 2 * * *", TimeZone: "Europe/Berlin", Task: codeq.Task{Queue: "report"}, Missed: codeq.MissedSkip})
	set(codeq.Schedule{Name: "idle", Every: time.Hour, Task: codeq.Task{Queue: "report"}, Missed: codeq.MissedAll})
	set(codeq.Schedule{Name: "lost", Cron: "@daily", Task: codeq.Task{Queue: "brief", Retention: time.Millisecond}})
	require.NoError(t, s.q.Configure(ctx, "report", func(set *codeq.Settings) { set.DeadLetterQueue = "brief" }))
	run := func(name string) codeq.ID {
		id, err := s.q.TriggerSchedule(ctx, name)
		require.NoError(t, err)
		return id
	}
	claim := func(id codeq.ID) *codeq.Lease {
		l := s.claim("report")
		require.Equal(t, id, l.ID)
		return l
	}
	var ids []codeq.ID
	for i := range 7 {
		id := run("nightly")
		ids = append([]codeq.ID{id}, ids...)
		l := claim(id)
		switch i {
		case 3:
			require.NoError(t, s.q.DeadLetter(ctx, l.Receipt, errors.New("no disk")))
			copied := s.claim("brief") // it has the headers, and is no run
			require.Equal(t, "nightly", copied.Headers[codeq.ScheduleHeader])
		case 4:
			require.NoError(t, s.q.Retry(ctx, l.Receipt, codeq.RetryOptions{Err: errors.New("timeout"), After: time.Hour}))
		case 5:
			require.NoError(t, s.q.Cancel(ctx, id))
		case 6:
		default:
			require.NoError(t, s.q.Complete(ctx, l.Receipt, nil))
		}
		s.produce(codeq.Task{Queue: "report", RunAt: time.Now().Add(time.Hour)}) // not of the schedule
		for ended := time.Now().UnixMilli(); time.Now().UnixMilli() < ended+2; { // runs of one millisecond have no order
		}
	}

	all, page := s.schedules()
	require.Equal(t, []string{"idle", "lost", "nightly"}, []string{all[0].Name, all[1].Name, all[2].Name})
	require.Empty(t, all[0].Runs)
	var states, errs []string
	for i, r := range all[2].Runs {
		require.Equal(t, ids[i], r.ID)
		require.WithinDuration(t, time.Now(), r.Tick, time.Minute)
		states, errs = append(states, r.State.String()), append(errs, r.Error)
	}
	require.Equal(t, []string{"leased", "canceled", "scheduled", "dead", "done"}, states, "the newest first, five of them")
	require.Equal(t, []string{"", "", "timeout", "no disk", ""}, errs)

	nightly := row(t, page, `data-schedule="nightly"`)
	for i, says := range []string{"runs</span>", "canceled</span>", "failed, and is tried again</span>.*timeout", "failed</span>.*no disk", `completed</span>`} {
		_, item, ok := strings.Cut(nightly, `data-run="`+ids[i].String()+`"`)
		require.True(t, ok, "%d", i)
		item, _, _ = strings.Cut(item, "</li>")
		require.Regexp(t, says, item)
	}
	require.Contains(t, nightly, "of missed runs, none comes later")
	require.Contains(t, nightly, all[2].Next.In(berlin(t)).Format("Mon 2 Jan 2006, 15:04:05 MST"), "in the zone of the schedule")
	require.Contains(t, nightly, all[2].Next.Format("2006-01-02 15:04:05.000 UTC"))
	require.Contains(t, nightly, "<summary>the next 5</summary>")
	idle := row(t, page, `data-schedule="idle"`)
	require.Contains(t, idle, "It has not run by itself yet.")
	require.Contains(t, idle, "missed runs all come later")
	require.Contains(t, idle, "every 1h<br>")
	require.NotContains(t, idle, `class="zoned"`)
	require.Contains(t, row(t, page, `data-schedule="lost"`), "of missed runs, one comes later")
	require.NotContains(t, page, "<form method", "a reader has no actions")
}

// TestScheduleRunsBeyond: the page says that runs were not found, and among how many tasks.
func TestScheduleRunsBeyond(t *testing.T) {
	t.Parallel()
	s := open(t, codeq.Options{Shards: 1}, as(codeqweb.All))
	ctx := t.Context()
	require.NoError(t, s.q.SetSchedule(ctx, codeq.Schedule{Name: "often", Every: 10 * time.Millisecond, Task: codeq.Task{Queue: "a"}}))
	l, err := s.q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}})
	require.NoError(t, err)
	require.NoError(t, s.q.PauseSchedule(ctx, "often"))
	require.NoError(t, s.q.Complete(ctx, l.Receipt, nil)) // and it is not kept
	_, err = s.q.Bulk(ctx, codeq.BulkOptions{TaskFilter: codeq.TaskFilter{States: []codeq.State{codeq.Ready}}, Action: codeq.BulkCancel})
	require.NoError(t, err)
	often := row(t, s.get("/schedules"), `data-schedule="often"`)
	require.Contains(t, often, "Its tasks are not kept.")
	require.Contains(t, often, "last tick <time")
	require.Contains(t, often, "paused</span>")
	require.Contains(t, often, `<button data-action="trigger">Run now</button>`)
}

// TestSchedulesInPages: a page has a hundred schedules, found by a part of their names, and leads
// to the next; an action comes back to it.
func TestSchedulesInPages(t *testing.T) {
	t.Parallel()
	s := open(t, codeq.Options{Shards: 2}, as(codeqweb.All))
	set := func(name string) {
		err := s.q.SetSchedule(t.Context(), codeq.Schedule{Name: name, Every: time.Hour, Task: codeq.Task{Queue: "a"}})
		require.NoError(t, err)
	}
	for i := range 205 {
		set(fmt.Sprintf("Report & %03d", i))
	}
	set("other")
	pages := func(path string) (names [][]string) {
		for path != "" {
			page := s.get(path)
			require.Contains(t, page, `data-refresh="5"`)
			var on []string
			for _, row := range strings.Split(page, `data-schedule="`)[1:] {
				on = append(on, html.UnescapeString(row[:strings.Index(row, `"`)]))
			}
			names = append(names, on)
			before, _, more := strings.Cut(page, `" id="next" rel="next"`)
			if path = ""; more {
				path = "/" + html.UnescapeString(before[strings.LastIndex(before, `"`)+1:])
			}
		}
		return names
	}
	all := pages("/schedules")
	require.Len(t, all, 3)
	require.Equal(t, []int{100, 100, 6}, []int{len(all[0]), len(all[1]), len(all[2])})
	require.Equal(t, "Report & 000", all[0][0])
	require.Equal(t, "Report & 100", all[1][0])
	require.Equal(t, "other", all[2][5])
	found := pages("/schedules?find=rePORT+%26")
	require.Equal(t, []int{100, 100, 5}, []int{len(found[0]), len(found[1]), len(found[2])})
	require.Contains(t, s.get("/schedules?find=rePORT"), "205 schedules have <bdi>rePORT</bdi> in their names")
	require.Contains(t, s.get("/schedules?find=nothing"), "No schedule has this in its name.")
	require.Contains(t, s.get("/schedules?after=zzz"), `<a href="schedules" id="first">first page</a>`)
	require.Contains(t, s.get("/search?q=other"), `<a href="schedules?find=other">`)

	row := row(t, s.get("/schedules?after=Report+%26+199&find=report"), `data-schedule="Report &amp; 200"`)
	require.Equal(t, 3, strings.Count(row, `name="back" value="schedules?after=Report&#43;%26&#43;199&amp;find=report"`))
	to := s.post("/schedule/pause?name=Report+%26+200", "back", "schedules?after=Report+%26+199&find=report")
	require.Equal(t, "./../schedules?after=Report+%26+199&did=schedule%2Fpause&find=report", to)
	var v struct{ Schedules []jsonSchedule }
	require.Equal(t, http.StatusOK, s.api(http.MethodGet, "schedules", "", &v))
	require.Len(t, v.Schedules, 206, "JSON has all of them")
}

func berlin(t *testing.T) *time.Location {
	zone, err := time.LoadLocation("Europe/Berlin")
	require.NoError(t, err)
	return zone
}
