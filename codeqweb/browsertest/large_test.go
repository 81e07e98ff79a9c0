package browsertest

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
)

// quick is the longest time for a page of a large queue, on a busy machine.
const quick = 15 * time.Second

// timed opens a page, and requires that it is quick.
func (w *tab) timed(path string) {
	w.t.Helper()
	begin := time.Now()
	w.open(path)
	took := time.Since(begin)
	w.t.Logf("%q came after %v", path, took.Round(time.Millisecond))
	require.Less(w.t, took, quick, path)
}

// TestManyTasks: 100,000 tasks, by pages and in bulk.
func TestManyTasks(t *testing.T) {
	t.Parallel()
	s := newSite(t, codeq.Options{Shards: 1, Durability: codeq.DurabilityProcess, Retention: time.Hour})
	s.fill(100_000, codeq.Task{Queue: "big", Tenant: "acme"})
	w := newTab(t, s)
	w.timed("")
	w.waitText("#total-ready", "100,000")
	for _, path := range []string{"queue?name=big", "tasks?queue=big", "tasks?state=ready&newest=true", "tasks?state=ready&tenant=nobody", "tasks?state=ready"} {
		w.timed(path)
		require.Empty(t, eval[[]string](w, faultsIn), path)
	}
	w.waitText("#tab-ready .count", "100,000")
	ids := make(map[string]bool)
	for page := range 3 {
		for _, id := range eval[[]string](w, `[...document.querySelectorAll("#tasks tbody tr")].map((r) => r.dataset.id)`) {
			ids[id] = true
		}
		require.Len(t, ids, 50*(page+1), "a page has 50 others")
		w.follow("#next")
	}
	w.follow("#first")

	w.press("#bulk summary")
	w.fill("#bulk-action", "cancel")
	w.followJob("#bulk-count")
	w.waitText("#matched", "100,000")
	w.open(eval[string](w, `"bulk?id=" + document.querySelector("#job").dataset.id`))
	w.followJob("#do-it")
	w.waitText("#changed", "100,000")
	counts := s.counts("big")
	require.EqualValues(t, 100_000, counts.Canceled)
	require.Zero(t, counts.Ready)
	w.timed("tasks?state=canceled")
	w.waitText("#tab-canceled .count", "100,000")
}

// TestManyQueues: 1,000 queues, by pages, found and ordered.
func TestManyQueues(t *testing.T) {
	t.Parallel()
	s := newSite(t, codeq.Options{Shards: 1, Durability: codeq.DurabilityProcess})
	var tasks []codeq.Task
	for i := range 1000 {
		tasks = append(tasks, codeq.Task{Queue: fmt.Sprintf("queue-%03d", i)})
	}
	_, err := s.q.ProduceBatch(context.Background(), tasks)
	require.NoError(t, err)
	s.fill(3, codeq.Task{Queue: "queue-707"})
	w := newTab(t, s)
	w.wait(`document.querySelector("h2").textContent.startsWith("1,000 queues")`)
	w.waitText("#total-ready", "1,003")
	w.timed("")
	rows := func() []string {
		return eval[[]string](w, `[...document.querySelectorAll("#queues tbody tr")].map((r) => r.dataset.queue)`)
	}
	require.Len(t, rows(), 50)
	require.Equal(t, "queue-000", rows()[0])
	require.Empty(t, eval[[]string](w, faultsIn))
	w.follow("#next")
	require.Equal(t, "queue-050", rows()[0])
	w.follow("#previous")
	require.Equal(t, "queue-000", rows()[0])
	w.follow("#queues thead th:nth-child(2) a")
	require.Equal(t, "queue-707", rows()[0], "the one with the most tasks")
	w.fill("#find", "UE-70")
	w.follow("#find-queue button")
	require.Len(t, rows(), 10)
	require.Equal(t, "queue-707", rows()[0], "the order stays")
	w.mark()
	w.waitText("#live-state", "live")
	s.fill(9, codeq.Task{Queue: "queue-701"})
	w.wait(`document.querySelector("#queues tbody tr").dataset.queue === "queue-701"`)
	w.same()
	w.open("?find=nothing-like-it")
	require.Contains(t, w.text("#empty"), "No queue has this")
}
