package browsertest

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/input"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqweb"
)

// pointAt moves the mouse to the middle of an element.
func (w *tab) pointAt(selector string) {
	w.t.Helper()
	at := eval[[]float64](w, `(() => {
		const box = document.querySelector(`+quoted(selector)+`).getBoundingClientRect();
		return [box.x + box.width / 2, box.y + box.height / 2];
	})()`)
	w.do(func(ctx context.Context, t *chromedp.Target) (v chromedp.Void, err error) {
		_, err = cdp.Call(ctx, t, input.DispatchMouseEvent, input.DispatchMouseEventParams{
			Type: input.DispatchMouseEventTypeMouseMoved, X: at[0], Y: at[1], PointerType: input.DispatchMouseEventPointerTypeMouse,
		})
		return v, err
	})
}

// ticks waits until the page has heard from the queue n times more.
func (w *tab) ticks(n string) {
	w.t.Helper()
	w.do(chromedp.Evaluate[chromedp.Void]("window.until = Number(document.body.dataset.ticks || 0) + " + n))
	w.wait("Number(document.body.dataset.ticks) >= window.until")
}

// TestLiveParts: numbers, buttons and results outside of the live part of a page follow, too.
func TestLiveParts(t *testing.T) {
	t.Parallel()
	s := newSite(t, codeq.Options{Shards: 1})
	require.NoError(t, s.q.Configure(context.Background(), "mail", func(set *codeq.Settings) { set.Retention = codeq.Forever }))
	id := s.produce(codeq.Task{Queue: "mail", MaxAttempts: 1})
	w := newTab(t, s)
	w.open("task?id=" + id.String())
	w.mark()
	w.wait(`document.querySelector("#run-now")`)
	require.NoError(t, s.q.DeadLetter(context.Background(), s.claim("mail").Receipt, errors.New("no")))
	w.wait(`document.querySelector("#redrive") && !document.querySelector("#run-now")`)
	require.NoError(t, s.q.RedriveDead(context.Background(), id))
	require.NoError(t, s.q.Complete(context.Background(), s.claim("mail").Receipt, []byte(`{"total":42}`)))
	w.wait(`document.querySelector("#result .leaf")?.textContent === "total42"`)
	w.wait(`document.querySelector("#result input")?.checkVisibility()`)
	w.fill("#result input", "tot")
	w.do(chromedp.Evaluate[chromedp.Void](`document.querySelector("#result input").dispatchEvent(new Event("input", {bubbles: true}))`))
	require.Equal(t, "1 found", w.text("#result output"))
	w.do(chromedp.Evaluate[chromedp.Void]("document.activeElement.blur()"))
	w.ticks("4")
	require.Equal(t, "1 found", w.text("#result output"), "the search stays")
	require.True(t, eval[bool](w, `document.querySelector("#result input").checkVisibility()`))
	w.same()

	w.open("tasks?queue=mail")
	w.mark()
	w.waitText("#tab-ready .count", "0")
	s.fill(3, codeq.Task{Queue: "mail"})
	w.waitText("#tab-ready .count", "3")
	w.same()

	w.open("queue?name=mail")
	w.mark()
	s.fill(2, codeq.Task{Queue: "mail", Tenant: "acme"})
	require.NoError(t, s.q.Pause(context.Background(), "mail"))
	w.waitText(`#waiting [data-tenant="acme"] td.num`, "2")
	w.wait(`document.querySelector("#resume-button")`)
	w.same()

	w.open("dead")
	w.mark()
	require.Zero(t, w.count("#purge-all"))
	s.dead(codeq.Task{Queue: "bank"}, "closed")
	w.wait(`document.querySelector("#purge-all")`)
	w.same()
}

// TestLiveKeepsOpen: an opened error stays open when a new attempt comes before it.
func TestLiveKeepsOpen(t *testing.T) {
	t.Parallel()
	s := newSite(t, codeq.Options{Shards: 1})
	id := s.produce(codeq.Task{Queue: "mail"})
	fail := func() {
		err := errors.New("trace\n" + strings.Repeat("at a line\n", 30))
		require.NoError(t, s.q.Retry(context.Background(), s.claim("mail").Receipt, codeq.RetryOptions{Err: err, After: -1}))
	}
	fail()
	w := newTab(t, s)
	w.open("task?id=" + id.String())
	w.press("#attempts details summary")
	require.True(t, eval[bool](w, `document.querySelector("#attempts details").open`))
	fail()
	w.wait(`document.querySelectorAll("#attempts .attempt").length === 2`)
	require.Equal(t, []bool{false, true}, eval[[]bool](w, `[...document.querySelectorAll("#attempts details")].map((d) => d.open)`))
}

// TestLiveRows: filled fields and the focus stay with a row when others come before it.
func TestLiveRows(t *testing.T) {
	t.Parallel()
	s := newSite(t, codeq.Options{Shards: 1})
	s.dead(codeq.Task{Queue: "mail"}, "zebra")
	s.schedule("nightly")
	w := newTab(t, s)
	w.open("dead")
	w.fill("#dead [name=rate]", "7")
	w.do(chromedp.Evaluate[chromedp.Void]("document.activeElement.blur()"))
	for range 2 {
		s.dead(codeq.Task{Queue: "mail"}, "apple")
	}
	w.wait(`document.querySelector("#dead tbody tr").dataset.kind === "apple"`)
	require.Equal(t, []string{"", "7"}, eval[[]string](w, `[...document.querySelectorAll("#dead [name=rate]")].map((f) => f.value)`))

	w.open("schedules")
	w.do(chromedp.Evaluate[chromedp.Void](`document.querySelector("[data-schedule=nightly] [data-action=trigger]").focus()`))
	s.schedule("hourly")
	w.wait(`document.querySelector("#schedules tbody tr").dataset.schedule === "hourly"`)
	require.Equal(t, "nightly", eval[string](w, `document.activeElement.closest("tr")?.dataset.schedule`))
	require.NoError(t, s.q.DeleteSchedule(context.Background(), "nightly"))
	w.wait(`document.querySelectorAll("#schedules tbody tr").length === 1`)
	require.Equal(t, "BODY", eval[string](w, "document.activeElement.tagName"), "no other row has the focus")
}

// TestLiveForms: the focus on a button never goes over to the button of another task.
func TestLiveForms(t *testing.T) {
	t.Parallel()
	s := newSite(t, codeq.Options{Shards: 1})
	first := s.produce(codeq.Task{Queue: "mail", RunAt: time.Now().Add(time.Hour)})
	second := s.produce(codeq.Task{Queue: "mail", After: []codeq.ID{first}})
	third := s.produce(codeq.Task{Queue: "mail", After: []codeq.ID{second}})
	w := newTab(t, s)
	w.open("flow?id=" + second.String())
	w.press("#levels summary")
	cancel := `[action="task/cancel?id=` + third.String() + `"] button`
	w.do(chromedp.Evaluate[chromedp.Void]("document.querySelector(" + quoted(cancel) + ").focus()"))
	require.True(t, eval[bool](w, "document.activeElement.matches("+quoted(cancel)+")"))
	s.produce(codeq.Task{Queue: "mail", After: []codeq.ID{first}})
	w.wait(`document.querySelectorAll("#nodes tbody tr").length === 4`)
	require.True(t, eval[bool](w, "document.activeElement.matches("+quoted(cancel)+")"))

	idle := func(context.Context, *codeq.Job[[]byte]) error { return nil }
	s.work("worker-2", "idle", idle)
	w.open("workers")
	w.do(chromedp.Evaluate[chromedp.Void](`document.querySelector("[data-worker=worker-2] button").focus()`))
	s.work("worker-1", "idle", idle)
	w.wait(`document.querySelector("[data-worker=worker-1] button")`)
	require.Equal(t, "worker-2", eval[string](w, `document.activeElement.closest("tr")?.dataset.worker`))
}

// TestLiveAfterReading: an update that came while the pointer was on a list is not lost.
func TestLiveAfterReading(t *testing.T) {
	t.Parallel()
	s := newSite(t, codeq.Options{Shards: 1})
	id := s.produce(codeq.Task{Queue: "mail"})
	w := newTab(t, s)
	w.open("tasks?state=ready")
	w.pointAt("#tasks tbody td")
	w.ticks("1")
	require.NoError(t, s.q.Cancel(context.Background(), id))
	w.ticks("7")
	require.Equal(t, 1, w.count("#tasks tbody tr"), "the rows under the pointer stay")
	w.pointAt("footer")
	w.wait(`document.querySelector("#empty")`)
}

// TestLiveEnds: a page says that its task is gone, and that it is live again after a fault.
func TestLiveEnds(t *testing.T) {
	t.Parallel()
	s := newSite(t, codeq.Options{Shards: 1})
	id := s.produce(codeq.Task{Queue: "mail", Payload: []byte("letter")})
	w := newTab(t, s)
	w.open("task?id=" + id.String())
	w.waitText("#live-state", "live")
	w.allow("403")
	s.access.Store(uint32(codeqweb.None))
	w.waitText("#live-state", "not live")
	s.access.Store(uint32(codeqweb.All))
	w.waitText("#live-state", "live")
	w.allow("404")
	require.NoError(t, s.q.Complete(context.Background(), s.claim("mail").Receipt, nil))
	w.waitText("#live-state", "gone")
	require.Contains(t, w.text("#main"), "A task that has ended is gone unless it is kept")
	require.Equal(t, "letter", w.text("#payload pre"), "the rest is left")
	require.Equal(t, 1, w.count("#error"))
}
