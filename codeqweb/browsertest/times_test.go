package browsertest

import (
	"context"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/emulation"
	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"codeq"
)

// zone sets the time zone of the viewer.
func zone(name string) chromedp.Action[chromedp.Void] {
	return func(ctx context.Context, t *chromedp.Target) (v chromedp.Void, err error) {
		_, err = cdp.Call(ctx, t, emulation.SetTimezoneOverride, emulation.SetTimezoneOverrideParams{TimezoneID: name})
		return v, err
	}
}

// TestLocalTimes: times are those of the viewer's zone, with the zone and UTC under the pointer,
// and stay so while the page follows the queue.
func TestLocalTimes(t *testing.T) {
	t.Parallel()
	s := newSite(t, codeq.Options{Shards: 1, Retention: time.Hour})
	id := s.produce(codeq.Task{Queue: "mail", RunAt: time.Date(2099, 7, 2, 3, 4, 5, 0, time.UTC)})
	s.schedule("nightly")
	w := newTab(t, s)
	for name, want := range map[string]struct{ text, full, footer string }{
		"America/New_York": {"Jul 1, 2099, 23:04:05", "Wednesday, July 1, 2099 at 23:04:05, America/New_York, UTC−4", "Times are in America/New_York, now UTC−"},
		"Europe/Berlin":    {"Jul 2, 2099, 05:04:05", "Thursday, July 2, 2099 at 05:04:05, Europe/Berlin, UTC+2", "Times are in Europe/Berlin, now UTC+"},
		"Asia/Kabul":       {"Jul 2, 2099, 07:34:05", "Thursday, July 2, 2099 at 07:34:05, Asia/Kabul, UTC+4:30", "Times are in Asia/Kabul, now UTC+4:30"},
	} {
		w.do(zone(name))
		w.open("task?id=" + id.String())
		require.Contains(t, w.text("#zone"), want.footer)
		const at = `#task time.at[datetime="2099-07-02T03:04:05Z"]`
		require.Equal(t, want.text, w.text(at))
		require.Contains(t, eval[string](w, "document.querySelector("+quoted(at)+").title"), want.full+"\n2099-07-02 03:04:05 UTC\nin 26")
		const relative = `#task time:not(.at)[datetime="2099-07-02T03:04:05Z"]`
		require.Contains(t, w.text(relative), "days")
		require.Equal(t, want.full+"\n2099-07-02 03:04:05 UTC", eval[string](w, "document.querySelector("+quoted(relative)+").title"))
		for _, path := range []string{"", "tasks", "schedules", "audit", "task?id=" + id.String()} {
			w.open(path)
			require.Zero(t, w.count("time:not([data-local])"), path)
			require.NotContains(t, eval[string](w, `[...document.querySelectorAll("time:not(.zoned)")].map((e) => e.textContent).join()`), "UTC", path)
		}
	}

	// No text of the server comes back with an update: it would flicker.
	w.mark()
	w.do(chromedp.Evaluate[chromedp.Void](`(() => {
		window.changes = 0, window.foreign = [];
		const look = () => {
			for (const e of document.querySelectorAll("time.at")) if (e.textContent.includes("UTC") || !e.title.includes("UTC")) window.foreign.push(e.outerHTML);
		};
		new MutationObserver(() => { window.changes++; look(); }).observe(document.getElementById("live"), {subtree: true, childList: true, characterData: true, attributes: true});
	})()`))
	require.NoError(t, s.q.SetRunAt(context.Background(), id, time.Time{}))
	require.NoError(t, s.q.Complete(context.Background(), s.claim("mail").Receipt, nil))
	w.wait(`document.querySelector("#task").dataset.state === "done" && window.changes > 0`)
	w.same()
	require.Empty(t, eval[[]string](w, "window.foreign"))
	w.wait(`document.querySelector("#attempts time.at[data-local]")`)
	require.Zero(t, w.count("time:not([data-local])"))
}

// TestScheduleZones: the runs of a schedule are shown by its clock and by that of the viewer, and
// changes of its clock are said.
func TestScheduleZones(t *testing.T) {
	t.Parallel()
	s := newSite(t, codeq.Options{Shards: 1, Retention: time.Hour})
	berlin, err := time.LoadLocation("Europe/Berlin")
	require.NoError(t, err)
	require.NoError(t, s.q.SetSchedule(context.Background(), codeq.Schedule{
		Name: "report", Cron: "30 4 * * *", TimeZone: "Europe/Berlin", Task: codeq.Task{Queue: "report"},
	}))
	w := newTab(t, s)
	w.do(zone("America/New_York"))
	w.open("schedules")
	const cell = `tr[data-schedule="report"] td:nth-child(3) `
	next := s.scheduled("report").Next
	require.Equal(t, next.In(berlin).Format("Mon 2 Jan 2006, 15:04:05 MST"), w.text(cell+"time.zoned"))
	york, err := time.LoadLocation("America/New_York")
	require.NoError(t, err)
	require.Equal(t, next.In(york).Format("Jan 2, 2006, 15:04:05"), w.text(cell+"time.at"))
	require.False(t, eval[bool](w, "document.querySelector("+quoted(cell+".here")+").hidden"))
	require.Contains(t, eval[string](w, "document.querySelector("+quoted(cell+"time.zoned")+").title"), "America/New_York, UTC")
	require.Equal(t, 5, w.count(cell+".ticks li"))
	w.do(zone("Europe/Berlin"))
	w.open("schedules")
	require.True(t, eval[bool](w, "document.querySelector("+quoted(cell+".here")+").hidden"), "it is the same time")
	w.press(cell + "summary")
	w.submit(`tr[data-schedule="report"] [data-action=trigger]`, "The task of the schedule was produced.")
	w.wait(`document.querySelector('tr[data-schedule="report"] .runs li')?.textContent.includes("waits for a worker")`)
	require.Empty(t, eval[[]string](w, faultsIn))
}

// TestTimeFields: a field takes a time of the viewer's zone, and says which one it is in UTC. One
// that the clock skips is refused, and one that it shows twice is asked about.
func TestTimeFields(t *testing.T) {
	t.Parallel()
	s := newSite(t, codeq.Options{Shards: 1})
	id := s.produce(codeq.Task{Queue: "mail", RunAt: time.Now().Add(time.Hour)})
	w := newTab(t, s)
	const field, form = "#actions [name=at][required]", `form:has([name=at][required]) `
	enter := func(text string) {
		t.Helper()
		w.fill(field, text)
		w.do(chromedp.Evaluate[chromedp.Void]("document.querySelector(" + quoted(field) + `).dispatchEvent(new Event("input"))`))
	}
	send := func(want string) {
		t.Helper()
		w.submit("#run-at", "The time of the task was changed.")
		require.Equal(t, want, s.task(id).RunAt.UTC().Format(time.RFC3339))
	}
	show := func(name string) {
		w.do(zone(name))
		w.open("task?id=" + id.String())
	}
	show("Europe/Berlin")
	require.Equal(t, "in Europe/Berlin", w.text(form+".zone"))
	enter("2031-07-02T05:04")
	require.Equal(t, "in Europe/Berlin, UTC+2: 2031-07-02 03:04:00 UTC", w.text(form+".zone"))
	require.True(t, eval[bool](w, "document.querySelector("+quoted(form+".clock-note")+").hidden"))
	send("2031-07-02T03:04:00Z")

	enter("2031-03-30T02:30") // the clock goes from 02:00 to 03:00
	require.Equal(t, "02:30 does not exist on this day in Europe/Berlin: the clock is set forward by 1 h. Choose another time.", w.text(form+".clock-note"))
	require.Empty(t, eval[[]string](w, faultsIn))
	w.press("#run-at")
	require.False(t, eval[bool](w, "document.querySelector("+quoted(field)+").validity.valid"))
	require.Equal(t, "2031-07-02T03:04:00Z", s.task(id).RunAt.UTC().Format(time.RFC3339))
	enter("2031-03-30T03:00")
	require.Equal(t, "in Europe/Berlin, UTC+2: 2031-03-30 01:00:00 UTC", w.text(form+".zone"))
	send("2031-03-30T01:00:00Z")

	enter("2031-10-26T02:30") // it goes from 03:00 to 02:00
	require.Equal(t, "02:30 comes twice on this day in Europe/Berlin: the clock is set back by 1 h.", w.text(form+".clock-note"))
	require.Equal(t, "the first, UTC+2 the second, UTC+1", eval[string](w, `[...document.querySelectorAll("`+form+`select option")].map((o) => o.text).join(" ")`))
	require.Empty(t, eval[[]string](w, faultsIn))
	send("2031-10-26T00:30:00Z")
	enter("2031-10-26T02:30")
	w.do(chromedp.Evaluate[chromedp.Void](`(() => { const c = document.querySelector("` + form + `select"); c.value = "second"; c.dispatchEvent(new Event("change")); })()`))
	require.Equal(t, "in Europe/Berlin, UTC+1: 2031-10-26 01:30:00 UTC", w.text(form+".zone"))
	send("2031-10-26T01:30:00Z")

	show("Australia/Lord_Howe") // by half an hour
	enter("2031-10-05T02:15")
	require.Contains(t, w.text(form+".clock-note"), "does not exist on this day in Australia/Lord_Howe: the clock is set forward by 30 min")
	show("America/New_York")
	enter("2031-11-02T01:30")
	require.Contains(t, w.text(form+".clock-note"), "comes twice on this day in America/New_York")

	// A filter shows the times of its URL in the zone, and sends the same again.
	w.open("tasks?from=2031-10-26T00:30:00Z&to=2031-11-02T06:30:00.250Z")
	require.Equal(t, "2031-10-25T20:30", eval[string](w, `document.querySelector("[name=from]").value`))
	require.Equal(t, "2031-11-02T01:30:00.25", eval[string](w, `document.querySelector("[name=to]").value`))
	w.follow("#filters button")
	require.Equal(t, "2031-10-26T00:30:00Z", eval[string](w, `new URL(location).searchParams.get("from")`))
	require.Equal(t, "2031-11-02T06:30:00.250Z", eval[string](w, `new URL(location).searchParams.get("to")`))
	require.Empty(t, eval[string](w, `new URL(location).searchParams.get("queue")`))
}
