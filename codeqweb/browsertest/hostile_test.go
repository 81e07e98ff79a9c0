package browsertest

import (
	"context"
	"encoding/json"
	"errors"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
)

// hostile does harm where a text becomes a part of the page, reverses the text around it, and has
// invisible characters.
const hostile = `"'></pre></svg><script>window.harm=1</script><img src=x onerror=window.harm=1><a href=javascript:harm>` + "\u202e\u2066\x00"

// seen is hostile as pages show it: all of it, with escapes for invisible characters.
const seen = `"'></pre></svg><script>window.harm=1</script><img src=x onerror=window.harm=1><a href=javascript:harm>\u202e\u2066\x00`

// harmless requires that no part of hostile ran in a page.
func (w *tab) harmless(path string) {
	w.t.Helper()
	require.False(w.t, eval[bool](w, "window.harm !== undefined"), path)
	require.Zero(w.t, w.count(`script:not([src^="assets/"])`), path)
	require.Zero(w.t, w.count(`img, iframe, object, style, [style]:not(.uplot, .uplot *), a[href^="javascript:"], [onerror], [onclick]`), path)
	require.Empty(w.t, w.asked(true), path)
	require.NotRegexp(w.t, "[\u202a-\u202e\u2066-\u2069]", eval[string](w, "document.documentElement.outerHTML"), path)
}

// TestHostile: hostile texts, in every field that strangers can set, are shown and not run.
func TestHostile(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	s := newSite(t, codeq.Options{Shards: 1, Retention: time.Hour})
	bad := codeq.Task{
		Queue: hostile, Tenant: hostile, Group: hostile, LimitKey: hostile, Payload: []byte(hostile + "\xff"),
		Headers: map[string]string{hostile: hostile}, Unique: codeq.Unique{Key: hostile},
	}
	id := s.produce(bad)
	// The worker of a task writes a note about it, and then dead-letters it.
	said := make(chan struct{})
	s.work("run\u202e<script>window.harm=1</script>", hostile, func(ctx context.Context, _ *codeq.Job[[]byte]) error {
		defer close(said)
		return errors.Join(codeq.ReportProgress(ctx, 1, 2, hostile), codeq.SetMetadata(ctx, hostile, hostile), codeq.DeadLetter(errors.New(hostile)))
	})
	<-said
	require.Eventually(t, func() bool { return s.task(id).State == codeq.Dead }, patience, time.Millisecond)
	bad.Unique, bad.Group, bad.Queue = codeq.Unique{}, "", hostile+"2"
	child := s.produce(bad)
	bad.After = []codeq.ID{child}
	s.produce(bad)
	done := s.produce(codeq.Task{Queue: "done"})
	require.NoError(t, s.q.Complete(ctx, s.claim("done").Receipt, []byte(hostile)))
	text, err := json.Marshal(map[string]any{strings.ToValidUTF8(hostile, ""): []string{hostile}})
	require.NoError(t, err)
	tree := s.produce(codeq.Task{Queue: "tree", Payload: text})
	bad.After = nil
	name := strings.ToValidUTF8(hostile, "")
	require.NoError(t, s.q.SetSchedule(ctx, codeq.Schedule{Name: name, Every: time.Hour, Task: bad}))
	require.NoError(t, s.q.Configure(ctx, hostile, func(settings *codeq.Settings) {
		settings.TenantWeights = map[string]int{"</textarea><script>window.harm=1</script>": 2}
	}))

	w := newTab(t, s)
	escaped := url.QueryEscape(hostile)
	for _, path := range []string{
		"", "?find=" + escaped, "tasks", "tasks?state=dead&queue=" + escaped + "&tenant=" + escaped + "&group=" + escaped + "&error=" + escaped + "&key=" + escaped,
		"task?id=" + id.String(), "task?id=" + child.String(), "task?id=" + done.String(), "task?id=" + tree.String(), "flow?id=" + child.String(), "dead", "dead?queue=" + escaped, "schedules", "workers",
		"queue?name=" + escaped, "queue?name=" + escaped + "&did=%3Cscript%3E",
	} {
		w.open(path)
		w.harmless(path)
		require.Empty(t, eval[[]string](w, faultsIn), path)
	}
	w.allow("400")
	for _, path := range []string{"tasks?id=" + escaped, "tasks?from=" + escaped, "tasks?cursor=" + escaped, "task?id=" + escaped, "tasks?state=" + escaped} {
		w.open(path)
		w.harmless(path)
		require.Equal(t, 1, w.count("#error"), path)
	}

	// It is shown in full.
	w.open("task?id=" + child.String())
	require.Contains(t, w.text("#payload .kind"), "binary", "it is not UTF-8")
	require.Contains(t, w.text("#payload pre"), `|"'></pre></svg><|`)
	require.Contains(t, w.text("#headers th"), seen)
	require.Contains(t, w.text("#task"), seen)
	w.open("task?id=" + id.String())
	require.Equal(t, seen, w.text("#last-error"))
	require.Contains(t, w.text("#metadata td"), seen)
	require.Contains(t, w.text("#progress"), seen)
	require.Contains(t, w.text("#attempts"), `run\u202e<script>window.harm=1</script>`)
	w.open("task?id=" + tree.String())
	require.Equal(t, seen, w.text("#payload summary .prop"))
	require.Contains(t, w.text("#payload .value"), seen)
	w.open("schedules")
	require.Equal(t, 1, w.count("#schedules tbody tr"))

	// Links and forms keep the name byte for byte.
	w.open("?order=name")
	w.follow("#queues tbody tr a") // the shorter one of two names
	require.Equal(t, "Queue "+seen, w.text("h1"))
	require.Zero(t, w.count("#empty"))
	w.submit("#pause-button", "The queue is paused.")
	require.Len(t, w.asked(true), 1)
	require.True(t, s.settings(hostile).Paused)
	w.press("#settings-folded summary")
	w.submit("#settings button", "The settings were changed.")
	require.Equal(t, 2, s.settings(hostile).TenantWeights["</textarea><script>window.harm=1</script>"])
	w.submit("#resume-button", "The queue goes on.")
	w.open("dead")
	w.followJob("#dead [data-action=redrive]")
	require.Equal(t, "1", w.text("#matched"), "its error selects it")
	w.harmless("bulk")
	w.open("schedules")
	w.submit("#schedules [data-action=delete]", "The schedule was deleted.")
	require.Len(t, w.asked(true), 1)
	w.open("audit")
	w.harmless("audit")
	w.open("bulks")
	w.harmless("bulks")
}
