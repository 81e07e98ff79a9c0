package browsertest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
)

// operator does the work of an operator in a browser, from the overview, and counts clicks: each
// press of a button or a link, of Enter, and of a dialog's OK.
type operator struct {
	*tab
	clicks int
	report []string
}

// job does one piece of work. Each takes three clicks at most.
func (o *operator) job(what string, do func()) {
	o.t.Helper()
	o.open("")
	o.asked(true)
	o.clicks = 0
	begin := time.Now()
	do()
	o.clicks += len(o.asked(true))
	o.report = append(o.report, fmt.Sprintf("%-46s %d clicks, %.1f s", what, o.clicks, time.Since(begin).Seconds()))
	require.LessOrEqual(o.t, o.clicks, 3, what)
}

func (o *operator) click(selector string) {
	o.t.Helper()
	o.clicks++
	o.follow(selector)
}

// TestOperator: the work of an operator takes seconds, and three clicks at most.
func TestOperator(t *testing.T) {
	t.Parallel()
	s := newSite(t, codeq.Options{Shards: 1, Retention: time.Hour})
	ctx := context.Background()
	s.fill(40, codeq.Task{Queue: "newsletter", Payload: []byte(strings.Repeat("x", 10_000))})
	wanda := s.produce(codeq.Task{Queue: "invoices", Tenant: "acme", MaxAttempts: 1, Payload: []byte(`{"customer": "wanda@example.com", "total": 42}`)})
	require.NoError(t, s.q.DeadLetter(ctx, s.claim("invoices").Receipt, errors.New("bank: account 4711 is closed")))
	for i := range 5 {
		s.dead(codeq.Task{Queue: "mail"}, fmt.Sprintf("mailbox %d is full", i))
	}
	s.schedule("nightly")
	begun := make(chan struct{}, 2)
	ends := make(chan struct{})
	s.work("gpu-1", "video", func(ctx context.Context, j *codeq.Job[[]byte]) error {
		begun <- struct{}{}
		if string(j.Args) == "stuck" {
			<-ends
			return nil
		}
		<-ctx.Done()
		return ctx.Err()
	})
	t.Cleanup(func() { close(ends) }) // before the worker ends
	s.produce(codeq.Task{Queue: "video", Payload: []byte("stuck"), Timeout: 100 * time.Millisecond})
	runs := s.produce(codeq.Task{Queue: "video", Payload: []byte("long")})
	<-begun
	<-begun

	o := &operator{tab: newTab(t, s)}
	o.job("which queue is behind, and why", func() {
		o.wait(`document.querySelector("#queues tbody tr").dataset.queue === "newsletter"`)
		require.Contains(t, o.text("#worst"), "newsletter: no worker takes its tasks")
	})
	o.job("a customer's task, by a word of its payload", func() {
		o.fill("#find-text", "wanda@example")
		o.clicks++
		o.mark()
		o.keys("\r")
		o.loaded()
		require.Equal(t, 1, o.count("#tasks tbody tr"))
		o.click("#tasks .id")
		require.Equal(t, wanda.String(), eval[string](o.tab, `document.querySelector("#task").dataset.id`))
	})
	o.job("why it failed", func() {
		o.click("#nav-dead")
		o.click(`#dead a[href*="` + wanda.String() + `"]`)
		require.Contains(t, o.text("#task"), "account 4711 is closed")
	})
	o.job("redrive one kind of error at a rate", func() {
		o.click("#nav-dead")
		row := `#dead tr[data-kind="mailbox # is full"] `
		o.fill(row+"[name=rate]", "100")
		o.clicks++
		o.followJob(row + "[data-action=redrive]")
		o.clicks++
		o.followJob("#do-it")
		require.Equal(t, uint64(5), s.counts("mail").Ready)
	})
	o.job("pause a queue", func() {
		o.click(`#queues tr[data-queue="newsletter"] a`)
		o.click("#pause-button")
		require.True(t, s.settings("newsletter").Paused)
	})
	o.job("cancel what runs", func() {
		o.click("#nav-workers")
		o.click(`tr[data-task="` + runs.String() + `"] [data-action=cancel]`)
		require.Eventually(t, func() bool { return s.task(runs).State == codeq.Canceled }, patience, time.Millisecond)
	})
	o.job("find the stuck worker", func() {
		o.click("#nav-workers")
		require.Equal(t, "gpu-1", eval[string](o.tab, `document.querySelector("tr[data-worker]").dataset.worker`))
		require.Contains(t, o.text("tr.overdue"), "beyond its timeout by")
	})
	o.job("the next run of a schedule, and one now", func() {
		o.click("#nav-schedules")
		require.Contains(t, o.text(`tr[data-schedule="nightly"]`), "in ")
		o.click(`tr[data-schedule="nightly"] [data-action=trigger]`)
		require.Equal(t, uint64(1), s.counts("report").Ready)
	})
	o.job("what takes the disk", func() {
		o.click("#nav-storage")
		require.Equal(t, "newsletter ready", eval[string](o.tab, `document.querySelector("tr[data-usage]").dataset.usage`))
	})
	o.job("yesterday beside today", func() {
		o.click(`#charts .tabs a[href*="24h"]`)
		o.wait(`document.querySelector("#charts").dataset.drawn === "24h"`)
		require.Equal(t, 3, o.count("#charts .key.before"))
	})
	t.Log("\n" + strings.Join(o.report, "\n"))
}
