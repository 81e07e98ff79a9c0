package browsertest

import (
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
)

// TestCharts: charts are drawn under the policy of the page, follow the queue, show the values
// under the pointer, and have a table that says the same.
func TestCharts(t *testing.T) {
	t.Parallel()
	s := newSite(t, codeq.Options{Shards: 1})
	s.fill(3, codeq.Task{Queue: "mail"})
	w := newTab(t, s)
	for _, path := range []string{"", "queue?name=mail"} {
		w.open(path)
		w.wait(`document.querySelector("#charts").dataset.drawn === "5m"`)
		require.Equal(t, 3, w.count("#charts .plot canvas"), path)
		require.Equal(t, 3, w.count(`#charts .plot[role=img][aria-label]`), path)
	}
	w.mark()
	w.waitText("#chart-waiting .key b", "3")
	s.fill(4, codeq.Task{Queue: "mail"})
	w.waitText("#chart-waiting .key b", "7")
	w.same()

	// The newest points are at the right end.
	require.Empty(t, w.text("#chart-waiting .when-at"))
	eval[bool](w, `(() => {
		const over = document.querySelector("#chart-waiting .u-over"), box = over.getBoundingClientRect();
		over.dispatchEvent(new MouseEvent("mouseenter", {clientX: box.right - 1, clientY: box.top + 20}));
		over.dispatchEvent(new MouseEvent("mousemove", {clientX: box.right - 1, clientY: box.top + 20}));
		return true;
	})()`)
	w.wait(`document.querySelector("#chart-waiting .when-at").textContent !== ""`)
	w.wait(`document.querySelector("#chart-throughput .when-at").textContent !== ""`) // the same moment in all

	require.Zero(t, w.count("#values[open]"))
	w.press("#values summary")
	w.wait(`document.querySelector("#values[open] tbody tr td:nth-child(5)").textContent === "7"`)
	for span, charts := range map[string]int{"1h": 3, "24h": 3, "7d": 3, "90d": 1} {
		w.open("?span=" + span)
		w.wait(`document.querySelector("#charts").dataset.drawn === ` + quoted(span))
		require.Equal(t, charts, w.count("#charts .plot canvas"), span)
		if span == "90d" { // the newest values are of a day
			require.NotEmpty(t, w.text("#chart-throughput .when-at"))
		}
	}
}
