package codeqweb_test

import (
	"errors"
	"fmt"
	"html"
	"net/http"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqweb"
)

// die makes so many tasks of a queue dead letters, with the errors that cause returns.
func (s *site) die(queue string, n int, cause func(i int) string) {
	s.t.Helper()
	const most = 500
	for from := 0; from < n; from += most {
		tasks := make([]codeq.Task, min(most, n-from))
		for i := range tasks {
			tasks[i].Queue = queue
		}
		_, err := s.q.ProduceBatch(s.t.Context(), tasks)
		require.NoError(s.t, err)
		for ended := 0; ended < len(tasks); {
			leases, err := s.q.ClaimBatch(s.t.Context(), codeq.ClaimRequest{Queues: []string{queue}, Max: len(tasks) - ended})
			require.NoError(s.t, err)
			failures := make([]codeq.Failure, len(leases))
			for i, l := range leases {
				failures[i] = codeq.Failure{Receipt: l.Receipt, Err: errors.New(cause(from + ended + i))}
			}
			require.NoError(s.t, s.q.DeadLetterBatch(s.t.Context(), failures))
			ended += len(leases)
		}
	}
}

type jsonGroups struct {
	Groups []struct {
		ErrorKind string
		Count     uint64
		Share     float64
		Days      []uint64
		Queues    []string
		Other     bool
	}
	Dead uint64
}

// TestDeadGroups: all dead letters are grouped, each group with its share and its days in one row;
// a redrive is one step away, a purge looks dangerous, and both count first.
func TestDeadGroups(t *testing.T) {
	s := open(t, codeq.Options{Shards: 2}, as(codeqweb.All))
	s.die("a", 9000, func(i int) string {
		return []string{"timeout ", `disk "x" is full: `, "refused "}[i%3] + fmt.Sprint(i)
	})
	s.die("b", 1000, func(i int) string { return fmt.Sprintf("timeout %d%d", i, i) })
	page := s.get("/dead")
	require.Contains(t, page, "10,000 dead letters")
	rows := regexp.MustCompile(`(?s) data-kind="(.*?)">(.*?)</tr>`).FindAllStringSubmatch(page, -1)
	require.Len(t, rows, 3)
	require.Contains(t, rows[0][2], `<td class="num" data-label="Tasks">4,000</td>`)
	require.Contains(t, rows[0][2], "40 %")
	require.Contains(t, rows[0][2], `<path d="M65 16v-16.0h4v16.0z"/>`, "today")
	require.Contains(t, rows[0][2], "4,000 died today")
	for _, row := range rows {
		require.Regexp(t, `action=redrive[^"]*dry=true|dry=true[^"]*action=redrive`, strings.ReplaceAll(row[2], "&amp;", "&"))
		require.Contains(t, row[2], `<button class="danger" data-action="purge">`)
		require.NotContains(t, row[2], "<br")
	}
	var all jsonGroups
	require.Equal(t, http.StatusOK, s.api(http.MethodGet, "dead", "", &all))
	require.Equal(t, uint64(10_000), all.Dead)
	require.Equal(t, "timeout #", all.Groups[0].ErrorKind)
	require.InDelta(t, 0.4, all.Groups[0].Share, 1e-9)
	require.ElementsMatch(t, []string{"a", "b"}, all.Groups[0].Queues)
	require.Equal(t, uint64(4000), all.Groups[0].Days[0])
	var of jsonGroups
	require.Equal(t, http.StatusOK, s.api(http.MethodGet, "dead?queue=b", "", &of))
	require.Equal(t, uint64(1000), of.Dead)
	require.Len(t, of.Groups, 1)
}

// TestDeadGroupsAreFew: groups beyond those that a page has are one row without actions.
func TestDeadGroupsAreFew(t *testing.T) {
	s := open(t, codeq.Options{Shards: 1}, as(codeqweb.All))
	for n := range 5 {
		s.die(fmt.Sprint("q", n), 60, func(i int) string { return fmt.Sprintf("error%c%c%c", 'a'+n, 'a'+i/26, 'a'+i%26) })
	}
	var all jsonGroups
	require.Equal(t, http.StatusOK, s.api(http.MethodGet, "dead", "", &all))
	require.Len(t, all.Groups, 201)
	last := all.Groups[200]
	require.True(t, last.Other)
	require.Equal(t, uint64(100), last.Count)
	page := s.get("/dead")
	require.Equal(t, 200, strings.Count(page, `data-action="redrive"`))
	require.Contains(t, page, "(other errors)")
}

// TestRedactedKinds: kinds of errors that Redact changes are in one row without
// actions, also if Redact recognizes only the whole error, and if the last dead letter has gone. A
// kind without any dead letter to ask about is not shown.
func TestRedactedKinds(t *testing.T) {
	secret := regexp.MustCompile(`card [0-9]+ of \w+|pin \S+`)
	s := open(t, codeq.Options{Shards: 1}, &codeqweb.Options{
		Access: func(*http.Request) codeqweb.Access { return codeqweb.All },
		Redact: func(t *codeq.TaskInfo) { t.LastError = secret.ReplaceAllString(t.LastError, "***") },
	})
	s.dead(codeq.Task{Queue: "a"}, "refused: card 4711 of Smith")
	s.dead(codeq.Task{Queue: "a"}, "refused: card 4712 of Smith")
	s.dead(codeq.Task{Queue: "a"}, "wrong pin hunter")
	s.dead(codeq.Task{Queue: "a"}, "disk full")
	last := s.dead(codeq.Task{Queue: "a"}, "disk full")
	check := func(disks uint64) {
		t.Helper()
		page := s.get("/dead")
		require.NotContains(t, page, "Smith")
		require.NotContains(t, page, "hunter")
		var all jsonGroups
		require.Equal(t, http.StatusOK, s.api(http.MethodGet, "dead", "", &all))
		require.Len(t, all.Groups, 2)
		require.Equal(t, "disk full", all.Groups[0].ErrorKind)
		require.Equal(t, disks, all.Groups[0].Count)
		require.Equal(t, "(redacted)", all.Groups[1].ErrorKind)
		require.Equal(t, uint64(3), all.Groups[1].Count)
		require.True(t, all.Groups[1].Other)
		require.Equal(t, 1, strings.Count(page, `data-action="purge"`))
	}
	check(2)
	require.NoError(t, s.q.Forget(t.Context(), last))
	check(1)
}

// TestManyDeadQueues: the page costs by the queues with dead letters.
func TestManyDeadQueues(t *testing.T) {
	if testing.Short() {
		t.Skip("it measures")
	}
	s := open(t, codeq.Options{Shards: 1}, as(codeqweb.All))
	const queues = 5000
	tasks := make([]codeq.Task, queues)
	for i := range tasks {
		tasks[i].Queue = fmt.Sprint("queue-", i)
	}
	_, err := s.q.ProduceBatch(t.Context(), tasks)
	require.NoError(t, err)
	for i := range tasks {
		l := s.claim(tasks[i].Queue)
		require.NoError(t, s.q.DeadLetter(t.Context(), l.Receipt, fmt.Errorf("error of %d", i)))
	}
	s.get("/dead")
	begin := time.Now()
	require.Contains(t, s.get("/dead"), "5,000 dead letters")
	t.Logf("page in %v", time.Since(begin))
	began := time.Now()
	_, err = s.q.DeadKinds(t.Context(), "")
	require.NoError(t, err)
	t.Logf("counts in %v", time.Since(began))
	require.Less(t, time.Since(begin), 5*time.Second)
}

// TestDeadRest: the error of most dead letters is named, although 64 rare ones came before it, and
// may be redriven; Options.Redact hides it here, too.
func TestDeadRest(t *testing.T) {
	hides := false
	opts := as(codeqweb.All)
	opts.Redact = func(info *codeq.TaskInfo) {
		if hides {
			info.LastError = strings.ReplaceAll(info.LastError, "database", "…")
		}
	}
	s := open(t, codeq.Options{Shards: 1}, opts)
	s.die("a", 64, func(i int) string { return "rare " + string(rune('a'+i/8)) + string(rune('a'+i%8)) })
	s.die("a", 300, func(int) string { return "database is down" })
	page := s.get("/dead")
	_, rest, found := strings.Cut(page, `id="rest"`)
	require.True(t, found)
	require.Contains(t, page, "Of the newest 250 dead letters")
	require.Contains(t, html.UnescapeString(rest), `action="bulk?action=redrive&dry=true&error=database+is+down&state=dead"`)
	var g struct {
		Dead   int
		Looked int
		Rest   []struct {
			ErrorKind string
			Tasks     int
		}
	}
	require.Equal(t, http.StatusOK, s.api(http.MethodGet, "dead", "", &g))
	require.Equal(t, 364, g.Dead)
	require.Equal(t, 250, g.Looked)
	require.Len(t, g.Rest, 1)
	require.Equal(t, "database is down", g.Rest[0].ErrorKind)
	require.Equal(t, 250, g.Rest[0].Tasks)
	hides = true
	require.NotContains(t, s.get("/dead"), "database")
}
