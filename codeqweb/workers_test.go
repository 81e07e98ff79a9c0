package codeqweb_test

import (
	"context"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqweb"
)

// runningTask is a task of a worker in the JSON form.
type runningTask struct {
	ID              codeq.ID
	Queue           string
	State           codeq.State
	Attempt         int
	Since, Heard    time.Time
	LeaseEnds       time.Time
	Beyond, HungFor time.Duration
	Progress        codeq.Progress
}

type jsonWorker struct {
	codeq.WorkerInfo
	Claims     bool
	Same, Left int
	Tasks      []runningTask
}

// workers returns the workers, and the part of the page that shows them.
func (s *site) workers() (all []jsonWorker, page string) {
	s.t.Helper()
	var v struct{ Workers []jsonWorker }
	require.Equal(s.t, http.StatusOK, s.api(http.MethodGet, "workers", "", &v))
	_, page, _ = strings.Cut(s.get("/workers"), `<div id="live">`)
	return v.Workers, page
}

// row returns the part of a page from a mark to the end of its row.
func row(t *testing.T, page, mark string) string {
	t.Helper()
	_, row, ok := strings.Cut(page, mark)
	require.True(t, ok, "%s in %s", mark, page)
	row, _, _ = strings.Cut(row, "</tr>")
	return row
}

// TestWorkersOfClaims: tasks of programs that claim by themselves are listed by their names, those
// beyond their Timeout first.
func TestWorkersOfClaims(t *testing.T) {
	for _, access := range []codeqweb.Access{codeqweb.Read, codeqweb.Read | codeqweb.Act} {
		t.Run(access.String(), func(t *testing.T) {
			t.Parallel()
			s := open(t, codeq.Options{Shards: 1}, as(access))
			require.NoError(t, s.q.Configure(t.Context(), "strict", func(set *codeq.Settings) { set.Timeout = time.Millisecond }))
			first := s.produce(codeq.Task{Queue: "mail", LeaseFor: time.Hour})
			require.Equal(t, first, s.claim("mail").ID)
			late := s.produce(codeq.Task{Queue: "mail", Timeout: time.Millisecond})
			require.Equal(t, late, s.claim("mail").ID)
			byQueue := s.produce(codeq.Task{Queue: "strict"})
			require.Equal(t, byQueue, s.claim("strict").ID)
			var all []jsonWorker
			var page string
			overdue := regexp.MustCompile(`beyond its timeout by \d+ ms`)
			require.Eventually(t, func() bool {
				all, page = s.workers()
				return len(overdue.FindAllString(page, -1)) == 2
			}, 10*time.Second, time.Millisecond, "%s", page)
			require.Len(t, all, 1)
			require.Equal(t, "w-1", all[0].Name)
			require.True(t, all[0].Claims)
			require.Len(t, all[0].Tasks, 3)
			require.Equal(t, []codeq.ID{late, byQueue, first}, []codeq.ID{all[0].Tasks[0].ID, all[0].Tasks[1].ID, all[0].Tasks[2].ID})
			require.Positive(t, all[0].Tasks[0].Beyond)
			require.Positive(t, all[0].Tasks[1].Beyond)
			of := all[0].Tasks[2]
			require.Zero(t, of.Beyond)
			require.Equal(t, 1, of.Attempt)
			require.WithinDuration(t, time.Now(), of.Since, time.Minute)
			require.WithinDuration(t, of.LeaseEnds.Add(-time.Hour), of.Heard, time.Minute, "the last renewal")

			require.Contains(t, page, "2 tasks are beyond their timeouts")
			require.Regexp(t, overdue, row(t, page, `data-task="`+late.String()+`"`))
			require.NotContains(t, row(t, page, `data-task="`+first.String()+`"`), "beyond")
			require.Less(t, strings.Index(page, late.String()), strings.Index(page, first.String()))
			cancel := `action="task/cancel?id=` + first.String() + `" data-confirm="Cancel task …` + first.String()[28:] + ` of queue mail for good? OK cancels it."><input type="hidden" name="back" value="workers">`
			require.Equal(t, access.Has(codeqweb.Act), strings.Contains(page, cancel))
			if access.Has(codeqweb.Act) {
				require.Equal(t, "./../workers?did=task%2Fcancel", s.post("/task/cancel?id="+first.String(), "back", "workers"))
				_, page = s.workers()
				require.NotContains(t, page, first.String())
			}
		})
	}
}

// TestWorkersOfRun: a worker has its tasks below it, with their progress, and those of its hung
// handlers, also when these tasks have been canceled.
func TestWorkersOfRun(t *testing.T) {
	t.Parallel()
	s := open(t, codeq.Options{Shards: 1}, as(codeqweb.All&^codeqweb.Payloads))
	begun, release := make(chan codeq.ID, 3), make(chan struct{})
	work := func(ctx context.Context, j *codeq.Job[[]byte]) error {
		if j.Timeout > 0 || string(j.Payload) == "canceled" {
			<-ctx.Done()
		} else if err := codeq.ReportProgress(ctx, 1, 4, "secret"); err != nil {
			return err
		}
		begun <- j.ID
		<-release
		return nil
	}
	s.work("calm", "a", work)
	s.work("late", "b", work)
	s.work("late", "c", work)
	defer close(release)
	goes := s.produce(codeq.Task{Queue: "a"})
	require.Equal(t, goes, <-begun)
	hangs := s.produce(codeq.Task{Queue: "b", Timeout: time.Millisecond})
	require.Equal(t, hangs, <-begun)
	canceled := s.produce(codeq.Task{Queue: "b", Payload: []byte("canceled")})
	require.Eventually(t, func() bool { return s.task(canceled).State == codeq.Leased }, 10*time.Second, time.Millisecond)
	require.NoError(t, s.q.Cancel(t.Context(), canceled))
	require.Equal(t, canceled, <-begun)
	var all []jsonWorker
	var page string
	require.Eventually(t, func() bool { // a worker notices soon that a handler hangs, and a shard its progress
		all, page = s.workers()
		return strings.Count(page, `class="task overdue"`) == 2 && strings.Contains(page, "25 %")
	}, 10*time.Second, time.Millisecond, "%s", page)

	require.Len(t, all, 3)
	require.Equal(t, []string{"late", "late", "calm"}, []string{all[0].Name, all[1].Name, all[2].Name}, "overdue ones first")
	require.Equal(t, 2, all[0].Same)
	require.Zero(t, all[2].Same)
	of := make(map[codeq.ID]runningTask)
	for _, w := range all {
		for _, task := range w.Tasks {
			of[task.ID] = task
		}
	}
	require.Len(t, of, 3)
	require.Positive(t, of[hangs].Beyond)
	require.Equal(t, of[hangs].Beyond, of[hangs].HungFor)
	require.Positive(t, of[canceled].HungFor)
	require.Zero(t, of[canceled].Beyond)
	require.Zero(t, of[canceled].State, "it is gone")
	require.EqualValues(t, 1, of[goes].Progress.Done)

	require.Regexp(t, `beyond its timeout by \d+`, row(t, page, `data-task="`+hangs.String()+`"`))
	require.Contains(t, page, "task/cancel?id="+hangs.String())
	require.Regexp(t, `(?s)hung: goes on .*; the task is gone`, row(t, page, `data-task="`+canceled.String()+`"`))
	require.NotContains(t, page, "task/cancel?id="+canceled.String(), "it cannot be canceled again")
	require.Contains(t, row(t, page, `data-task="`+goes.String()+`"`), `<progress max="100" value="25">25 %</progress> 1 of 4`)
	require.NotContains(t, page, "secret", "notes need the right to see payloads")
	require.Contains(t, page, "2 workers have this name; the tasks of all of them are here.")
}
