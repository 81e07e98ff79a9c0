package browsertest

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
)

// formsIn returns the forms of a page that change something: their target below the dashboard, with
// the query, and the values of their fields.
const formsIn = `[...document.querySelectorAll("form")].filter((f) => f.method === "post").map((f) => ({
	To: new URL(f.getAttribute("action"), location).href, Fields: new URLSearchParams(new FormData(f)).toString(),
}))`

type form struct{ To, Fields string }

// forms returns the changes that the screens of a loaded site offer, by their path.
func forms(w *tab, paths []string) map[string]form {
	w.t.Helper()
	all := make(map[string]form)
	for _, path := range paths {
		w.open(path)
		for _, f := range eval[[]form](w, formsIn) {
			action, _, _ := strings.Cut(strings.TrimPrefix(f.To, w.root), "?")
			all[action] = f
		}
	}
	return all
}

// TestActions: the test makes each change of each screen by its button, and sees it in the queue.
func TestActions(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	s, ids := loaded(t)
	w := newTab(t, s)
	offered := slices.Collect(maps.Keys(forms(w, screens(ids))))
	require.Greater(t, len(offered), 12)
	open := func(id codeq.ID) { w.open("task?id=" + id.String()) }
	part := func(name string, do func(t *testing.T)) {
		t.Run(name, func(t *testing.T) {
			w.asked(true)
			s.t, w.t = t, t
			do(t)
		})
		s.t, w.t = t, t
	}

	part("task", func(t *testing.T) {
		id := s.produce(codeq.Task{Queue: "work", Payload: []byte("p"), Headers: map[string]string{"h": "1"}, RunAt: time.Now().Add(time.Hour)})
		open(id)
		w.submit("#run-now", "The time of the task was changed.")
		require.Equal(t, codeq.Ready, s.task(id).State)
		w.fill("#actions [name=at]", "2099-05-06T07:08")
		w.submit("#run-at", "The time of the task was changed.")
		require.Equal(t, time.Date(2099, 5, 6, 7, 8, 0, 0, time.Local), s.task(id).RunAt.Local())
		w.fill("#actions [name=priority]", "7")
		w.submit("#set-priority", "The priority was changed.")
		require.Equal(t, 7, s.task(id).Priority)

		w.fill(`form[action^="task/clone"] [name=queue]`, "copies")
		w.submit("#clone", "The task was produced again, as this one.")
		copied, err := codeq.ParseID(eval[string](w, `document.querySelector("#task").dataset.id`))
		require.NoError(t, err)
		require.NotEqual(t, id, copied)
		require.Equal(t, "copies", s.task(copied).Queue)
		require.Equal(t, map[string]string{"h": "1"}, s.task(copied).Headers)
		require.Equal(t, codeq.Ready, s.task(copied).State)

		open(id)
		w.asked(false)
		w.press("#cancel")
		w.wait("true") // the page has gone on after the question
		require.Equal(t, []string{"Cancel this task for good? OK cancels it."}, w.asked(true))
		require.Equal(t, codeq.Scheduled, s.task(id).State, "no was answered")
		w.submit("#cancel", "The task was canceled.")
		require.Equal(t, []string{"Cancel this task for good? OK cancels it."}, w.asked(true))
		require.Equal(t, codeq.Canceled, s.task(id).State)
		w.submit("#forget", "The task was deleted.")
		require.Equal(t, "Tasks", w.text("h1"))
		_, err = s.q.Get(ctx, id)
		require.ErrorIs(t, err, codeq.ErrNotFound)

		open(ids["dead"])
		w.submit("#redrive", "The dead letter was redriven.")
		require.Equal(t, codeq.Ready, s.task(ids["dead"]).State)

		// After a concurrent change, the page reports it, and does nothing.
		open(ids["dead2"])
		require.NoError(t, s.q.RedriveDead(ctx, ids["dead2"]))
		w.allow("404")
		w.follow("#redrive")
		require.Equal(t, "not-found", eval[string](w, `document.querySelector("#error").dataset.kind`))
	})

	part("queue", func(t *testing.T) {
		w.open("queue?name=work")
		w.submit("#pause-button", "The queue is paused.")
		require.True(t, s.settings("work").Paused)
		require.Contains(t, w.text("#paused"), "nothing is claimed")
		w.press("#settings-folded summary")
		for name, value := range map[string]string{
			"concurrency": "5", "concurrency-per-key": "2", "rate": "12.5", "burst": "20", "retention": "1h30m", "dead-retention": "7d",
			"max-attempts": "4", "backoff-step": "1s", "retry-first": "true", "hold-groups": "true", "tenant-weights": "acme=3\nb=c=2\n",
		} {
			w.fill("#settings [name="+name+"]", value)
		}
		w.submit("#settings button", "The settings were changed.")
		require.Equal(t, codeq.Settings{
			Paused: true, Concurrency: 5, ConcurrencyPerKey: 2, Rate: 12.5, Burst: 20, DeadRetention: 7 * 24 * time.Hour,
			Policy:     codeq.Policy{MaxAttempts: 4, Backoff: codeq.Backoff{Step: time.Second}, Retention: 90 * time.Minute, RetryFirst: true},
			HoldGroups: true, TenantWeights: map[string]int{"acme": 3, "b=c": 2},
		}, s.settings("work"))
		before := s.settings("work")
		w.submit("#settings button", "The settings were changed.") // with the current values
		require.Equal(t, before, s.settings("work"))
		w.submit("#resume-button", "The queue goes on.")
		require.False(t, s.settings("work").Paused)

		require.NoError(t, s.q.Configure(ctx, "unused", func(set *codeq.Settings) { set.Concurrency = 5 }))
		w.open("queue?name=unused")
		w.asked(true)
		w.submit("#delete-button", "The queue was deleted.")
		require.Equal(t, []string{"Delete the queue with its settings?"}, w.asked(true))
		require.Equal(t, codeq.Settings{}, s.settings("unused"))
	})

	part("schedule", func(t *testing.T) {
		w.open("schedules")
		button := func(action string) string { return `tr[data-schedule="nightly"] [data-action=` + action + `]` }
		before := s.counts("report").Ready
		w.submit(button("trigger"), "The task of the schedule was produced.")
		require.Equal(t, before+1, s.counts("report").Ready)
		w.submit(button("pause"), "The schedule is paused.")
		require.True(t, s.scheduled("nightly").Paused)
		w.submit(button("resume"), "The schedule goes on, with its next tick after now.")
		require.False(t, s.scheduled("nightly").Paused)
		w.submit(button("delete"), "The schedule was deleted.")
		require.Empty(t, s.scheduled("nightly").Name)
		require.Equal(t, []string{"Produce the task of schedule nightly now?", "Delete schedule nightly?"}, w.asked(true))
	})

	part("workers", func(t *testing.T) {
		w.open("workers")
		held := s.produce(codeq.Task{Queue: "held"})
		require.Equal(t, held, s.claim("held").ID)
		w.submit(`tr[data-task="`+held.String()+`"] [data-action=cancel]`, "The task was canceled.")
		require.Equal(t, codeq.Canceled, s.task(held).State)
		require.Equal(t, "Workers", w.text("h1"))
		require.Equal(t, []string{"Cancel task …" + held.String()[28:] + " of queue held for good? OK cancels it."}, w.asked(true))
		w.submit(`tr[data-worker="worker-1"] [data-action=quiet]`, "The workers take no new tasks.")
		require.Equal(t, "quiet", s.quiet("worker-1"))
		w.submit(`tr[data-worker="worker-1"] [data-action=resume]`, "The workers take tasks again.")
		require.Equal(t, "works", s.quiet("worker-1"))
		w.submit("#quiet-all", "The workers take no new tasks.")
		require.Equal(t, "quiet", s.quiet("worker-1"))
		w.submit("#resume-all", "The workers take tasks again.")
		require.Equal(t, "works", s.quiet("worker-1"))
		require.Equal(t, []string{"Quiet all workers? None takes new tasks."}, w.asked(true))
	})

	part("bulk", func(t *testing.T) {
		// change counts the tasks of a queue in a state, and then changes them.
		change := func(queue, state, action, field, value, button string) {
			t.Helper()
			n := w.openBulk(queue, state)
			w.fill("#bulk-action", action)
			if field != "" {
				w.fill("#bulk [name="+field+"]", value)
			}
			w.followJob("#bulk-count")
			require.Equal(t, n, w.text("#matched"))
			require.Equal(t, button, w.text("#do-it"))
			w.followJob("#do-it")
			require.Equal(t, n, w.text("#changed"))
		}
		s.fill(5, codeq.Task{Queue: "lot"})
		change("lot", "ready", "set-priority", "to-priority", "4", "set-priority 5 tasks")
		require.Equal(t, 4, s.claim("lot").Priority)
		change("lot", "ready", "move", "to-queue", "lot2", "move 4 tasks")
		require.EqualValues(t, 4, s.counts("lot2").Ready)
		change("lot2", "ready", "cancel", "", "", "cancel 4 tasks")
		require.EqualValues(t, 4, s.counts("lot2").Canceled)
		change("lot2", "canceled", "purge", "", "", "purge 4 tasks")
		require.Zero(t, s.counts("lot2").Total())
		change("lot", "leased", "cancel", "", "", "cancel 1 tasks")

		// Dead letters, by their error.
		for range 3 {
			s.dead(codeq.Task{Queue: "lot3"}, `the bank said "no" 3 times`)
		}
		other := s.dead(codeq.Task{Queue: "lot3"}, "disk")
		row := `tr[data-kind='the bank said "?" # times'] `
		w.open("dead?queue=lot3")
		require.Equal(t, 2, w.count("#dead tbody tr"))
		w.followJob(row + "[data-action=redrive]")
		require.Equal(t, "3", w.text("#matched"))
		require.EqualValues(t, 4, s.counts("lot3").Dead, "they were only counted")
		w.followJob("#do-it")
		require.Equal(t, "3", w.text("#changed"))
		require.EqualValues(t, 3, s.counts("lot3").Ready)
		w.open("dead?queue=lot3")
		w.followJob("#purge-all")
		w.followJob("#do-it")
		require.Equal(t, "1", w.text("#changed"))
		_, err := s.q.Get(ctx, other)
		require.ErrorIs(t, err, codeq.ErrNotFound)

		// At a rate, and stopped.
		for range 3 {
			l := s.claim("lot3")
			require.NoError(t, s.q.DeadLetter(ctx, l.Receipt, errors.New("again")))
		}
		w.open("dead?queue=lot3")
		w.fill("#dead-all [name=rate]", "0.01")
		w.follow("#redrive-all")
		w.follow("#do-it")
		require.Contains(t, w.text("#job"), "0.01 a second")
		w.submit("#stop", "The change was stopped.")
		w.wait(`document.querySelector("#job").dataset.ended === "true"`)
		require.Contains(t, w.text("#job"), "stopped")
		require.NotZero(t, s.counts("lot3").Dead)
		w.open("bulks")
		require.Positive(t, w.count("#jobs tbody tr"))
	})

	// Every offered change was made, and the audit log names its user.
	done := make(map[string]bool)
	for _, e := range s.log() {
		done[e.Action] = true
		require.False(t, e.Refused)
	}
	for _, action := range offered {
		require.True(t, done[action], "%s was not tried: %v", action, done)
	}
	w.open("audit")
	require.Contains(t, w.text("#audit"), "ann")
	require.Contains(t, w.text("#audit"), "schedule/delete")
	require.Empty(t, eval[[]string](w, faultsIn))
}

// openBulk opens the form that changes all tasks of a queue in a state, and returns their number on
// the page.
func (w *tab) openBulk(queue, state string) string {
	w.t.Helper()
	w.open("tasks?state=" + state + "&queue=" + queue)
	w.press("#bulk summary")
	return eval[string](w, `String(document.querySelectorAll("#tasks tbody tr").length)`)
}

// TestClusterActions: leaders are shown, and changed.
func TestClusterActions(t *testing.T) {
	t.Parallel()
	s := cluster(t)
	w := newTab(t, s)
	leader := func(shard int) string {
		st, err := s.q.ClusterStatus(context.Background())
		require.NoError(t, err)
		return st.Shards[shard].Leader
	}
	w.open("cluster")
	require.Equal(t, "ann", w.text("#node"))
	require.Equal(t, 3, w.count(`table[data-shard="0"] tbody tr`))
	require.Equal(t, 3, w.count("#nodes tbody tr"))
	require.Equal(t, 2, w.count("#shards tbody tr"))
	for _, node := range []string{"ann", "bob", "cid"} { // each has measured its disk
		w.wait(`/iB of [\d.]+ .iB/.test(document.querySelector("#nodes tr[data-name=` + node + `]").textContent)`)
	}
	require.Empty(t, eval[[]string](w, faultsIn))
	next := "bob"
	if leader(0) == "bob" {
		next = "cid"
	}
	w.submit(`table[data-shard="0"] tr[data-node=`+next+`] [data-action=transfer]`, "The leader was changed.")
	soon := func(is func() bool) { // a node learns by messages which node leads
		t.Helper()
		require.Eventually(t, is, patience, 10*time.Millisecond)
	}
	soon(func() bool { return leader(0) == next })
	w.wait(`document.querySelector("table[data-shard='0'] tr[data-node=` + next + `]").textContent.includes("leader")`)
	// The page shows the place after the leader.
	w.wait(`document.querySelector("table[data-shard='0'] [data-action=undo]")`)
	w.submit(`table[data-shard="0"] [data-action=undo]`, "The leader was changed.")
	w.submit("#drain", "The node leads no shard.")
	soon(func() bool { return leader(0) != "ann" && leader(1) != "ann" })
	w.submit("#undrain", "The node leads its share again, after a while.")
	asked := []string{"Make " + next + " the leader of shard 0?", "Hand over all shards that this node leads?"}
	require.Equal(t, asked, w.asked(true))
	var actions []string
	for _, e := range s.log() {
		actions = append(actions, e.Action)
	}
	require.Equal(t, []string{"cluster/transfer", "cluster/transfer", "cluster/drain", "cluster/undrain"}, actions)
}
