package browsertest

import (
	"context"
	"strings"
	"testing"
	"time"

	"github.com/chromedp/chromedp"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqweb"
)

// faultsIn finds the faults of a page: parts that a viewer cannot read, reach, or distinguish.
const faultsIn = `(() => {
	const faults = [], ids = new Set();
	const root = document.documentElement;
	if (root.scrollWidth > innerWidth) {
		const wide = [...document.querySelectorAll("main *, header *, footer *")].filter((e) =>
			e.getBoundingClientRect().right > innerWidth + 1 && !e.closest(".scroll, nav"));
		faults.push("it is " + root.scrollWidth + " wide: " + wide.slice(0, 3).map((e) => e.outerHTML.slice(0, 80)).join(", "));
	}
	if (document.querySelectorAll("h1").length !== 1) faults.push("not one h1");
	if (document.querySelectorAll("#nav [aria-current]").length > 1) faults.push("more than one current screen");
	for (const e of document.querySelectorAll("[id]")) {
		if (ids.has(e.id)) faults.push("twice the id " + e.id);
		ids.add(e.id);
	}
	for (const e of document.querySelectorAll("input:not([type=hidden]), select, textarea")) {
		if (!e.labels.length && !e.ariaLabel) faults.push("a field without a label: " + e.outerHTML);
	}
	for (const e of document.querySelectorAll("a, button")) {
		if (!e.textContent.trim() && !e.ariaLabel) faults.push("nothing to read on " + e.outerHTML);
	}
	for (const e of document.querySelectorAll("td, th")) {
		if (e.checkVisibility() && getComputedStyle(e).display !== "table-cell" && !(innerWidth <= 640 && e.closest(".cards"))) faults.push("a cell that is none: " + e.outerHTML.slice(0, 80));
	}
	for (const e of document.querySelectorAll("time")) {
		if (!e.title || isNaN(Date.parse(e.dateTime))) faults.push("a time without its full form: " + e.outerHTML);
	}
	for (const e of document.querySelectorAll(".id")) {
		if (e.title.length !== 36) faults.push("an ID without its full form: " + e.outerHTML);
	}
	// Text has to stand out from what is behind it: WCAG 2.1, 1.4.3.
	const parse = (text) => (text.match(/[\d.]+/g) || []).map(Number);
	const luminance = ([r, g, b]) => {
		const [x, y, z] = [r, g, b].map((v) => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
		return 0.2126 * x + 0.7152 * y + 0.0722 * z;
	};
	const behind = (e) => {
		for (; e; e = e.parentElement) {
			const color = parse(getComputedStyle(e).backgroundColor);
			if (color.length === 3 || color[3] > 0) return color;
		}
		return [255, 255, 255];
	};
	for (const e of document.querySelectorAll("body *")) {
		if (e instanceof SVGElement || !e.checkVisibility() || ![...e.childNodes].some((n) => n.nodeType === 3 && n.data.trim())) continue;
		const style = getComputedStyle(e), [a, b] = [luminance(parse(style.color)), luminance(behind(e))];
		const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
		if (contrast < (parseFloat(style.fontSize) >= 24 ? 3 : 4.5)) faults.push("contrast " + contrast.toFixed(1) + ": " + e.outerHTML.slice(0, 120));
	}
	return faults;
})()`

// TestScreens: every screen is shown with its heading, at a desk and on a phone, light and dark,
// and has no fault.
func TestScreens(t *testing.T) {
	t.Parallel()
	s, ids := loaded(t)
	w := newTab(t, s)
	for _, looks := range []struct {
		name, scheme string
		size         chromedp.Action[chromedp.Void]
		access       codeqweb.Access
	}{
		{"desk, light", "light", size(1280, 800, false), codeqweb.All},
		{"desk, dark", "dark", size(1280, 800, false), codeqweb.All},
		{"phone, light", "light", size(360, 740, true), codeqweb.All},
		{"a viewer", "light", size(1280, 800, false), codeqweb.Read},
	} {
		if s.access.Store(uint32(looks.access)); looks.access == codeqweb.Read {
			w.allow("403") // for some pages
		}
		w.do(looks.size, scheme(looks.scheme))
		for _, path := range append(screens(ids), "task?id=nonsense", "bulk?id=99", "tasks?limit=0&cursor=nonsense") {
			if strings.Contains(path, "nonsense") || strings.Contains(path, "99") {
				w.allow("Failed to load resource")
			}
			w.open(path)
			require.Empty(t, eval[[]string](w, faultsIn), "%s: %s", looks.name, path)
			require.NotEmpty(t, w.text("h1"))
			require.NotContains(t, eval[string](w, "document.body.innerText"), "<no value>")
			require.True(t, looks.access == codeqweb.All || len(eval[[]form](w, formsIn)) == 0, "forms on %s", path)
		}
	}
}

// TestColors: the page has the color scheme that the viewer prefers.
func TestColors(t *testing.T) {
	t.Parallel()
	w := newTab(t, newSite(t, codeq.Options{Shards: 1}))
	background := func(name string) int {
		w.do(scheme(name))
		return eval[int](w, `getComputedStyle(document.body).backgroundColor.match(/\d+/g).map(Number).reduce((a, b) => a + b)`)
	}
	require.Greater(t, background("light"), 3*200)
	require.Less(t, background("dark"), 3*60)
}

// TestWhatScreensShow: the screens show the content of the queue.
func TestWhatScreensShow(t *testing.T) {
	t.Parallel()
	s, ids := loaded(t)
	w := newTab(t, s)
	for tile, n := range map[string]string{"ready": "2", "leased": "1", "scheduled": "1", "blocked": "1", "dead": "2"} {
		w.waitText("#total-"+tile, n)
	}
	require.Equal(t, 2, w.count("#queues tbody tr"))
	require.Regexp(t, `^\d+(\.\d+)? m?s$`, w.text("#total-oldest"), "for how long")
	require.Regexp(t, `^not known$|iB$`, w.text("#free-disk"))
	w.follow(`#queues tr[data-queue="mail"] a`)
	require.Equal(t, "Queue mail", w.text("h1"))
	w.waitText("#count-dead", "2")
	require.Equal(t, 1, w.count(`#waiting tr[data-tenant="acme"]`))

	w.follow("#nav-tasks")
	require.Equal(t, 9, w.count("#tasks tbody tr"))
	w.follow("#tab-blocked")
	require.Equal(t, []string{ids["child"].String()}, eval[[]string](w, `[...document.querySelectorAll("#tasks tbody tr")].map((r) => r.dataset.id)`))
	w.follow("#tasks .id")
	require.Equal(t, 2, w.count("#family li"), "two parents")
	require.Contains(t, w.text("#why"), "It waits for 2 of its 2 parents: ")
	w.follow("#family a")
	require.Contains(t, []string{ids["ready"].String(), ids["scheduled"].String()}, eval[string](w, `document.querySelector("#task").dataset.id`))

	w.open("task?id=" + ids["ready"].String())
	require.Equal(t, `secret"xyzzy"`, w.text("#payload .leaf"))
	require.Contains(t, w.text("#headers"), "xyzzy")
	require.Contains(t, w.text("#task"), "order-1")
	w.open("task?id=" + ids["retried"].String())
	require.Equal(t, 3, w.count("#attempts .attempt"))
	require.Contains(t, w.text("#attempts"), "timeout")
	require.GreaterOrEqual(t, w.count("#timeline rect"), 3)
	w.open("task?id=" + ids["done"].String())
	require.Equal(t, "sent", w.text("#result pre"))

	w.open("dead")
	require.Equal(t, 1, w.count("#dead tbody tr"), "errors that differ by a number are one kind")
	require.Equal(t, "user # is unknown", w.text("#dead .text"))
	w.follow("#dead .text a")
	require.Equal(t, 2, w.count("#tasks tbody tr"))

	w.open("schedules")
	require.Equal(t, 5, w.count(`tr[data-schedule="nightly"] .ticks li`))
	w.open("workers")
	require.Equal(t, 1, w.count(`tr[data-worker="worker-1"]`))
	w.open("storage")
	require.Equal(t, 2, w.count("#shards tbody tr"))
	require.Positive(t, w.count("#upkeep-0 tbody tr"))

	// The field at the top finds a task by its ID.
	w.fill("#find-text", " "+ids["dead"].String()+" ")
	w.mark()
	w.keys("\r")
	w.loaded()
	require.Equal(t, ids["dead"].String(), eval[string](w, `document.querySelector("#task").dataset.id`))
	require.Equal(t, "user 17 is unknown", w.text("#last-error"))

	// A filter is kept in the fields.
	w.open("tasks")
	w.press("#filters summary")
	w.fill("#filters [name=queue]", "mail")
	w.fill("#filters [name=tenant]", "acme")
	w.follow("#filters button")
	require.Equal(t, 2, w.count("#tasks tbody tr"))
	require.Equal(t, "acme", eval[string](w, `document.querySelector("#filters [name=tenant]").value`))
}

// TestLive: pages follow the queue without being loaded again.
func TestLive(t *testing.T) {
	t.Parallel()
	s := newSite(t, codeq.Options{Shards: 1, Retention: time.Hour})
	id := s.produce(codeq.Task{Queue: "mail"})
	w := newTab(t, s)
	w.mark()
	w.waitText("#live-state", "live")
	s.fill(6, codeq.Task{Queue: "mail"})
	w.waitText("#total-ready", "7")
	s.produce(codeq.Task{Queue: "news"})
	w.waitText(`tr[data-queue="news"] td:nth-child(3)`, "1")
	w.same()

	// The key stops the updates and starts them again.
	w.keys("l")
	w.waitText("#live-state", "stopped")
	w.keys("l")
	w.waitText("#live-state", "live")

	// The pages of a task and of a list are updated. The input in a form stays.
	w.open("task?id=" + id.String())
	w.mark()
	w.fill("#actions [name=priority]", "8")
	l := s.claim("mail")
	require.Equal(t, id, l.ID)
	w.wait(`document.querySelector("#task").dataset.state === "leased"`)
	require.Equal(t, "8", eval[string](w, `document.querySelector("#actions [name=priority]").value`))
	require.NoError(t, s.q.Complete(context.Background(), l.Receipt, nil))
	w.wait(`document.querySelector("#task").dataset.state === "done"`)
	w.same()
	w.open("tasks?state=ready")
	w.mark()
	require.Equal(t, 7, w.count("#tasks tbody tr"))
	// The other rows move up as they are, and are not marked as changed.
	require.True(t, eval[bool](w, `(window.second = document.querySelectorAll("#tasks tbody tr")[1]) !== null`))
	require.NoError(t, s.q.Complete(context.Background(), s.claim("mail").Receipt, nil))
	w.wait(`document.querySelectorAll("#tasks tbody tr").length === 6`)
	require.True(t, eval[bool](w, `document.querySelector("#tasks tbody tr") === window.second`))
	require.Zero(t, w.count("#tasks tbody .changed:not(time)"))
	w.same()
}

// TestKeys: the keyboard reaches everything.
func TestKeys(t *testing.T) {
	t.Parallel()
	s := newSite(t, codeq.Options{Shards: 1})
	s.fill(60, codeq.Task{Queue: "mail"})
	w := newTab(t, s)
	leads := func(key, heading string) {
		t.Helper()
		w.mark()
		w.keys(key)
		w.loaded()
		require.True(t, strings.HasPrefix(w.text("h1"), heading), "%s leads to %s", key, w.text("h1"))
	}
	for i, heading := range []string{"Overview", "Tasks", "Dead letters", "Schedules", "Workers", "Storage", "Cluster", "Bulk changes", "Audit"} {
		leads(string(rune('1'+i)), heading)
	}
	w.open("tasks")
	require.Equal(t, 50, w.count("#tasks tbody tr"))
	w.keys("?")
	w.wait(`document.querySelector("#keys").open`)
	w.keys("?")
	w.wait(`!document.querySelector("#keys").open`)
	w.fill("#find-text", "")
	w.keys("j/") // the field gets the characters
	require.Equal(t, "j/", eval[string](w, "document.activeElement.value"))
	w.open("tasks")
	w.keys("jjk")
	w.wait(`document.activeElement === document.querySelector("#tasks tbody tr.on a")`)
	leads("\r", "Task ")
	w.open("tasks")
	leads("n", "Tasks")
	require.Equal(t, 10, w.count("#tasks tbody tr"))
	w.open("")
	w.keys("\t")
	require.Equal(t, "skip", eval[string](w, "document.activeElement.className"), "the first link skips what is above the content")
}
