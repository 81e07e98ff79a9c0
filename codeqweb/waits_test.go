package codeqweb_test

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqweb"
	"codeq/internal/crashfs"
	"codeq/test/queuetest"
)

// why returns the sentences about a task, with names for IDs.
func (s *site) why(id codeq.ID, names ...any) string {
	s.t.Helper()
	var answer struct{ Why []string }
	require.Equal(s.t, http.StatusOK, s.api(http.MethodGet, "why?id="+id.String(), "", &answer))
	text := strings.Join(answer.Why, " ")
	for i := 0; i < len(names); i += 2 {
		text = strings.ReplaceAll(text, fmt.Sprint(names[i]), fmt.Sprint(names[i+1]))
	}
	require.Contains(s.t, s.get("/task?id="+id.String()), `<ul class="why" id="why"><li>`)
	return text
}

const some = `\d+(\.\d+)? [mµ]?s` // a short time

// TestWhyScheduled: a task that waits for a time says why.
func TestWhyScheduled(t *testing.T) {
	s := open(t, codeq.Options{Shards: 1, Retention: time.Hour}, as(codeqweb.All))
	ctx := t.Context()
	require.Regexp(t, `^It is scheduled; it becomes ready in 59 min\.$`, s.why(s.produce(codeq.Task{Queue: "a", RunAt: time.Now().Add(time.Hour)})))
	id := s.produce(codeq.Task{Queue: "a", MaxAttempts: 5})
	require.NoError(t, s.q.Retry(ctx, s.claim("a").Receipt, codeq.RetryOptions{Err: errors.New("row 17 is locked"), After: 4 * time.Minute}))
	require.Regexp(t, `^Attempt 1 of 5 has failed: row 17 is locked; it is tried again in [34] min\.$`, s.why(id))
	require.NoError(t, s.q.Cancel(ctx, id))
	id = s.produce(codeq.Task{Queue: "a"})
	require.NoError(t, s.q.Release(ctx, s.claim("a").Receipt, time.Hour))
	require.Regexp(t, `^It was given back; it is ready again in \d+ min\.$`, s.why(id))

	var child codeq.ID
	suspended := func(queue string, step func(context.Context) error) codeq.ID {
		id := s.produce(codeq.Task{Queue: queue})
		s.work(queue, queue, func(ctx context.Context, _ *codeq.Job[[]byte]) error { return step(ctx) })
		require.Eventually(t, func() bool { return s.task(id).State == codeq.Scheduled }, time.Minute, time.Millisecond)
		return id
	}
	sleeps := suspended("sleep", func(ctx context.Context) error { return codeq.Sleep(ctx, "a night", time.Hour) })
	require.Regexp(t, `^Its handler sleeps in the step a night; it goes on in 59 min\.$`, s.why(sleeps))
	waits := suspended("signal", func(ctx context.Context) error {
		_, err := codeq.WaitSignal[string](ctx, "packed", time.Hour)
		return err
	})
	require.Regexp(t, `^Its handler waits for the signal packed; it goes on without it in 59 min\.$`, s.why(waits))
	calls := suspended("call", func(ctx context.Context) error {
		_, err := codeq.Child[string](ctx, "charge", codeq.Task{Queue: "bank", RunAt: time.Now().Add(time.Hour)})
		return err
	})
	steps := s.task(calls).Steps
	child, err := codeq.ParseID(string(steps[len(steps)-1].Result))
	require.NoError(t, err)
	require.Regexp(t, `^Its handler waits in the step charge for the result of CHILD, which is due in 59 min\.$`, s.why(calls, child, "CHILD"))
	require.Regexp(t, `Its result is for PARENT, whose handler has produced it\.$`, s.why(child, calls, "PARENT"))

	// A viewer without payloads does not learn the names of steps.
	hidden := &site{t, s.q, codeqweb.Handler(s.q, as(codeqweb.Read))}
	t.Cleanup(func() { require.NoError(t, hidden.d.Close()) })
	require.Regexp(t, `^Its handler waits between two steps; it goes on in 59 min\.$`, hidden.why(sleeps))
}

// TestWhyUnhandled: a task without a handler of its kind says so.
func TestWhyUnhandled(t *testing.T) {
	s := open(t, codeq.Options{Shards: 1}, as(codeqweb.All))
	id := s.produce(codeq.Task{Queue: "a", Kind: "ship"})
	ctx, cancel := context.WithCancel(t.Context())
	var mux codeq.Mux
	codeq.HandleKind(&mux, "a", "charge", func(context.Context, *codeq.Job[[]byte]) error { return nil })
	ended := make(chan error, 1)
	go func() { ended <- s.q.Run(ctx, &mux, nil) }()
	require.Eventually(t, func() bool { return len(s.task(id).History) > 0 && s.task(id).State == codeq.Scheduled }, time.Minute, time.Millisecond)
	require.Contains(t, s.why(id), "has no handler of its kind ship")
	cancel()
	require.NoError(t, <-ended)
}

// TestWhyBlocked: a blocked task names its parents, the one that has the turn of its group, or
// those that have the places of its limit.
func TestWhyBlocked(t *testing.T) {
	s := open(t, codeq.Options{Shards: 1}, as(codeqweb.All))
	ctx := t.Context()
	dead, ready := s.dead(codeq.Task{Queue: "p"}, "broken"), s.produce(codeq.Task{Queue: "p"})
	child := s.produce(codeq.Task{Queue: "c", After: []codeq.ID{dead, ready}})
	require.Equal(t, "It waits for 2 of its 2 parents: DEAD dead, READY ready. "+
		"It does not go on by itself: 1 parent is a dead letter, to be redriven, or canceled, which cancels this task.", s.why(child, dead, "DEAD", ready, "READY"))
	require.Contains(t, s.why(dead), "1 task waits for it, and goes on when it is redriven and completed.")

	group := codeq.Task{Queue: "g", Group: "acme's"}
	first, second, third := s.produce(group), s.produce(group), s.produce(group)
	l := s.claim("g")
	require.Equal(t, first, l.ID)
	require.Regexp(t, "^It is second in group acme's, behind FIRST, which w-1 has worked on for "+some+`\.$`, s.why(second, first, "FIRST"))
	require.NoError(t, s.q.Retry(ctx, l.Receipt, codeq.RetryOptions{Err: errors.New("no"), After: 4 * time.Minute}))
	require.Regexp(t, `^It is second in group acme's, behind FIRST, which retries in [34] min\.$`, s.why(second, first, "FIRST"))
	require.Regexp(t, `^It is third in group acme's, 1 task waits before it, behind FIRST, which retries in [34] min\.$`, s.why(third, first, "FIRST"))
	require.NoError(t, s.q.Configure(ctx, "g", func(set *codeq.Settings) { set.HoldGroups = true }))
	require.NoError(t, s.q.SetRunAt(ctx, first, time.Time{}))
	require.NoError(t, s.q.DeadLetter(ctx, s.claim("g").Receipt, errors.New("refused")))
	require.Regexp(t, `^It is second in group acme's, behind FIRST, which died `+some+` ago: refused\. The group does not go on by itself: `, s.why(second, first, "FIRST"))
	require.Contains(t, s.why(first), "Its group may wait for it")

	// A tenant's group of the same name is another one.
	group.Tenant = "other"
	own, next := s.produce(group), s.produce(group)
	require.Regexp(t, `^It is second in group acme's, behind OWN, which has been ready for `, s.why(next, own, "OWN"))
	fill(t, s.q, 150, group)
	late := s.produce(group)
	require.Regexp(t, `^It waits behind more than 100 tasks in group acme's, behind OWN, `, s.why(late, own, "OWN"))

	require.NoError(t, s.q.Configure(ctx, "l", func(set *codeq.Settings) { set.ConcurrencyPerKey = 1 }))
	limited := codeq.Task{Queue: "l", LimitKey: "host-1"}
	holds, blocked := s.produce(limited), s.produce(limited)
	require.Equal(t, holds, s.claim("l").ID)
	_, err := s.q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"l"}, NoWait: true})
	require.ErrorIs(t, err, codeq.ErrEmpty)
	require.Regexp(t, `^It waits for a place of limit key host-1, which has 1 place, taken by HOLDS, which w-1 has worked on for `+some+`\.$`, s.why(blocked, holds, "HOLDS"))
}

func fill(t *testing.T, q *codeq.Queue, n int, task codeq.Task) {
	t.Helper()
	batch := make([]codeq.Task, n)
	for i := range batch {
		batch[i] = task
	}
	_, err := q.ProduceBatch(t.Context(), batch)
	require.NoError(t, err)
}

// TestWhyReady: a ready task says how many go before it, and what holds back its queue.
func TestWhyReady(t *testing.T) {
	s := open(t, codeq.Options{Shards: 1}, as(codeqweb.All))
	ctx := t.Context()
	first, second := s.produce(codeq.Task{Queue: "a", Tenant: "x"}), s.produce(codeq.Task{Queue: "a", Tenant: "x"})
	require.Regexp(t, `^It has been ready for `+some+`; it goes next in its tenant\. No Queue\.Run works for the queue a\.`, s.why(first))
	require.Regexp(t, `; 1 ready task goes before it in its tenant\.`, s.why(second))
	fill(t, s.q, 150, codeq.Task{Queue: "a", Tenant: "x", Priority: 3})
	require.Regexp(t, `; more than 100 ready tasks go before it in its tenant\.`, s.why(second))
	require.NoError(t, s.q.Configure(ctx, "a", func(set *codeq.Settings) { set.Concurrency, set.Rate = 1, 2.5 }))
	s.claim("a")
	require.Eventually(t, func() bool { // the sample may be a second old
		return strings.Contains(s.why(second), "All 1 place of the queue a are taken (Concurrency). At most 2.5 tasks a second are claimed from the queue a (Rate).")
	}, time.Minute, 100*time.Millisecond)
	require.NoError(t, s.q.Pause(ctx, "a"))
	require.Regexp(t, `\. The queue a is paused: nothing is claimed from it\.$`, s.why(second))
}

// TestWhyNoWorker: a ready task says whether workers are quiet or busy.
func TestWhyNoWorker(t *testing.T) {
	q, err := codeq.Open(t.TempDir(), &codeq.Options{Shards: 1})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, q.Close()) })
	s := &site{t: t, q: q}
	end := make(chan struct{})
	s.work("worker-1", "a", func(context.Context, *codeq.Job[[]byte]) error { <-end; return nil })
	t.Cleanup(func() { close(end) })
	fill(t, q, 2, codeq.Task{Queue: "a"})
	look := func() string { // with new workers: a dashboard looks at them every some seconds
		d := &site{t, q, codeqweb.Handler(q, as(codeqweb.All))}
		defer func() { require.NoError(t, d.d.Close()) }()
		return d.why(s.produce(codeq.Task{Queue: "a"}))
	}
	require.Eventually(t, func() bool { return strings.Contains(look(), "All 2 handlers for the queue a are busy.") }, time.Minute, time.Millisecond)
	require.NoError(t, q.QuietWorkers(t.Context(), ""))
	require.Contains(t, look(), "All workers of the queue a are quiet: they take no new tasks.")
}

// TestWhyLeased: a leased task names its worker, and says for how long it has it, and whether its
// time is over.
func TestWhyLeased(t *testing.T) {
	s := open(t, codeq.Options{Shards: 1}, as(codeqweb.All))
	id := s.produce(codeq.Task{Queue: "a", Timeout: time.Hour, MaxAttempts: 3})
	s.claim("a")
	require.Regexp(t, `^w-1 has worked on it for `+some+`, in attempt 1 of 3; its lease ends in (59|60) s, unless it is renewed\. Its timeout of 60 min ends in 59 min\.$`, s.why(id))
	id = s.produce(codeq.Task{Queue: "a", Timeout: time.Millisecond})
	s.claim("a")
	require.Eventually(t, func() bool { return strings.Contains(s.why(id), " beyond its timeout of 1 ms.") }, time.Minute, time.Millisecond)
}

// TestWhyEnded: a task that has ended says how.
func TestWhyEnded(t *testing.T) {
	s, ids := loaded(t, as(codeqweb.All))
	ctx := t.Context()
	require.Regexp(t, `^It was completed `+some+` ago by w-1, in attempt 1, `+some+` after it was produced\.$`, s.why(ids["done"]))
	require.Regexp(t, `^It was canceled `+some+` ago, before its first attempt\.$`, s.why(ids["canceled"]))
	require.NoError(t, s.q.Cancel(ctx, ids["leased"]))
	require.Regexp(t, `^It was canceled `+some+` ago, while it was at work by w-1\.$`, s.why(ids["leased"]))
	require.Regexp(t, `^It was given up, without another, in attempt 1 of 2, `+some+` ago by w-1: user 17 is unknown\.$`, s.why(ids["dead"]))
	require.NoError(t, s.q.Configure(ctx, "b", func(set *codeq.Settings) { set.DeadLetterQueue = "graves" }))
	dead := s.produce(codeq.Task{Queue: "b", MaxAttempts: 1})
	require.NoError(t, s.q.Retry(ctx, s.claim("b").Receipt, codeq.RetryOptions{Err: errors.New("no")}))
	require.Regexp(t, `^It ran out of attempts with attempt 1 of 1, `+some+` ago by w-1: no\.$`, s.why(dead))
	require.Regexp(t, `It tells of the death of DEAD in the queue b\.$`, s.why(s.claim("graves").ID, dead, "DEAD"))
}

// TestWhySuspect: a suspect says that it starts slowly.
func TestWhySuspect(t *testing.T) {
	disk := crashfs.New()
	q := queuetest.OpenForRun(t, *queuetest.OnDisk(disk, &codeq.Options{Durability: codeq.DurabilityDisk}))
	s := &site{t: t, q: q}
	began, end := make(chan struct{}, 2), make(chan struct{})
	s.work("worker-1", "a", func(context.Context, *codeq.Job[[]byte]) error { began <- struct{}{}; <-end; return nil })
	t.Cleanup(func() { close(end) })
	ids := []codeq.ID{s.produce(codeq.Task{Queue: "a"}), s.produce(codeq.Task{Queue: "a"})}
	<-began
	<-began
	q = queuetest.OpenForRun(t, *queuetest.OnDisk(disk.CrashClone(vfs.CrashCloneCfg{}), &codeq.Options{}))
	again := &site{t, q, codeqweb.Handler(q, as(codeqweb.All))}
	t.Cleanup(func() { require.NoError(t, again.d.Close()) })
	for _, id := range ids {
		if again.task(id).State == codeq.Blocked {
			require.Contains(t, again.why(id), "It is a suspect: its process died with it at work")
			return
		}
	}
	require.Fail(t, "none is a suspect")
}
