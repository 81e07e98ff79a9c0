package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/test/queuetest"
)

// TestKindsShareGroup: the tasks of a group follow each other over the handlers of their kinds,
// each with its own type, and over retries.
func TestKindsShareGroup(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Shards: 2, Backoff: codeq.Backoff{Base: time.Second}})
		var mu sync.Mutex
		done := make(map[string][]string) // by group
		note := func(l *codeq.Lease, what string) error {
			mu.Lock()
			defer mu.Unlock()
			if l.Kind == "ship" && l.Attempt < 3 {
				return errors.New("no van")
			}
			done[l.Group] = append(done[l.Group], what)
			return nil
		}
		type charge struct{ Cents int }
		type ship struct{ To string }
		var m codeq.Mux
		codeq.HandleKind(&m, "orders", "charge", func(_ context.Context, j *codeq.Job[charge]) error {
			return note(j.Lease, fmt.Sprint("charged ", j.Args.Cents))
		})
		codeq.HandleKind(&m, "orders", "ship", func(_ context.Context, j *codeq.Job[ship]) error {
			return note(j.Lease, "shipped to "+j.Args.To)
		})
		codeq.Handle(&m, "orders", func(_ context.Context, j *codeq.Job[string]) error {
			return note(j.Lease, "closed "+j.Args)
		})
		require.Equal(t, []string{"orders"}, m.Queues())
		var tasks []codeq.Task
		add := func(group, kind string, task codeq.Task, err error) {
			require.NoError(t, err)
			task.Group, task.Kind = group, kind
			tasks = append(tasks, task)
		}
		for i := range 5 {
			group := fmt.Sprint("order ", i)
			task, err := codeq.NewTask("orders", charge{100 * i})
			add(group, "charge", task, err)
			task, err = codeq.NewTask("orders", ship{"ann"})
			add(group, "ship", task, err)
			task, err = codeq.NewTask("orders", group)
			add(group, "", task, err)
		}
		queuetest.Produce(t, q, tasks...)
		run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 8})
		require.NoError(t, q.WaitIdle(t.Context(), "orders"))
		require.NoError(t, run.End(nil))
		require.Len(t, done, 5)
		for i := range 5 {
			group := fmt.Sprint("order ", i)
			require.Equal(t, []string{fmt.Sprint("charged ", 100*i), "shipped to ann", "closed " + group}, done[group])
		}
		require.Zero(t, infoOfQueue(t, q, "orders").Totals.Unhandled)
	})
}

// infoOfQueue returns what Info says of a queue.
func infoOfQueue(t *testing.T, q *codeq.Queue, name string) codeq.QueueInfo {
	t.Helper()
	infos, err := q.Info(t.Context())
	require.NoError(t, err)
	for _, info := range infos {
		if info.Queue == name {
			return info
		}
	}
	return codeq.QueueInfo{}
}

// TestUnhandledKind: a task without a handler of its kind waits longer and longer, up to a minute,
// holds its turn, counts no attempt, and is done by a Run that knows its kind. Tasks of other kinds
// go on.
func TestUnhandledKind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rec := newRecorder()
		var samples atomic.Int64
		q := queuetest.OpenForRun(t, codeq.Options{
			Shards: 2, Logger: slog.New(rec), MaxAttempts: 1,
			Observer: func(o *codeq.Observation) { samples.Add(int64(len(o.Handlers))) },
		})
		sub, err := q.Subscribe(codeq.SubscribeOptions{Kinds: []codeq.EventKind{codeq.EventUnhandled}})
		require.NoError(t, err)
		defer sub.Close()
		var charged, shipped atomic.Int64
		var old codeq.Mux
		old.Use(func(next codeq.Handler) codeq.Handler {
			return func(ctx context.Context, l *codeq.Lease) error {
				require.Equal(t, "charge", l.Kind)
				return next(ctx, l)
			}
		})
		charge := func(context.Context, *codeq.Job[[]byte]) error { charged.Add(1); return nil }
		codeq.HandleKind(&old, "orders", "charge", charge)
		ids := queuetest.Produce(t, q,
			codeq.Task{Queue: "orders", Kind: "ship", Group: "7"}, codeq.Task{Queue: "orders", Kind: "charge", Group: "7"},
			codeq.Task{Queue: "orders", Kind: "charge"},
		)
		began := time.Now()
		run := startRun(t, q, &old, codeq.RunOptions{Name: "old"})
		var waits []time.Duration
		for range 9 {
			e, err := sub.Next(t.Context())
			require.NoError(t, err)
			require.Equal(t, codeq.Event{Kind: codeq.EventUnhandled, ID: ids[0], Queue: "orders", Time: e.Time}, e)
			synctest.Wait()
			info := queuetest.InfoOf(t, q, ids[0])
			require.Equal(t, codeq.Scheduled, info.State)
			waits = append(waits, time.Until(info.At).Round(time.Second))
		}
		require.Equal(t, []time.Duration{1, 1, 2, 4, 8, 16, 32, 60, 60}, inSeconds(waits))
		require.EqualValues(t, 1, charged.Load(), "the other one of the group waits for its turn")
		got := queuetest.InfoOf(t, q, ids[0])
		require.Zero(t, got.Attempts)
		require.Empty(t, got.LastError)
		require.Len(t, got.History, 1)
		require.Equal(t, codeq.EventUnhandled, got.History[0].Outcome)
		require.WithinDuration(t, began, got.History[0].Start, time.Second)
		require.WithinDuration(t, time.Now(), got.History[0].End, time.Second)
		info := infoOfQueue(t, q, "orders")
		require.EqualValues(t, 9, info.Totals.Unhandled)
		require.Zero(t, info.Totals.Released)
		days, err := q.TotalsByDay(t.Context(), "orders")
		require.NoError(t, err)
		require.EqualValues(t, 9, days[len(days)-1].Unhandled)
		require.Equal(t, 1, strings.Count(rec.text.String(), "no handler for a kind"), rec.text.String())

		var m codeq.Mux
		codeq.HandleKind(&m, "orders", "charge", charge)
		codeq.HandleKind(&m, "orders", "ship", func(_ context.Context, j *codeq.Job[[]byte]) error {
			require.Equal(t, 1, j.Attempt)
			shipped.Add(1)
			return nil
		})
		require.NoError(t, run.End(nil))
		require.Empty(t, run.Reported())
		startRun(t, q, &m, codeq.RunOptions{})
		time.Sleep(61 * time.Second)
		require.EqualValues(t, 1, shipped.Load())
		require.EqualValues(t, 2, charged.Load())
		require.EqualValues(t, 3, samples.Load(), "of handlers")
		require.Zero(t, queuetest.CountsOf(t, q, "orders"))
	})
}

func inSeconds(all []time.Duration) (n []time.Duration) {
	for _, d := range all {
		n = append(n, d/time.Second)
	}
	return n
}

// TestUnhandledFor: a task becomes a dead letter when it has gone too long without a handler of its
// kind; redriven, it waits as long again.
func TestUnhandledFor(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{})
		var m codeq.Mux
		codeq.HandleKind(&m, "orders", "charge", func(context.Context, *codeq.Job[[]byte]) error { return nil })
		ids := queuetest.Produce(t, q, codeq.Task{Queue: "orders", Kind: "ship", Group: "7"}, codeq.Task{Queue: "orders", Kind: "charge", Group: "7"})
		startRun(t, q, &m, codeq.RunOptions{UnhandledFor: 10 * time.Second})
		for range 2 {
			time.Sleep(9 * time.Second)
			synctest.Wait()
			require.Equal(t, codeq.Scheduled, queuetest.InfoOf(t, q, ids[0]).State)
			time.Sleep(10 * time.Second)
			synctest.Wait()
			got := queuetest.InfoOf(t, q, ids[0])
			require.Equal(t, codeq.Dead, got.State)
			require.Zero(t, got.Attempts)
			require.Equal(t, `codeq: no handler: kind "ship" of queue "orders"`, got.LastError)
			last := got.History[len(got.History)-1]
			require.Equal(t, codeq.EventDeadLettered, last.Outcome)
			require.Equal(t, got.LastError, last.Error)
			require.NoError(t, q.RedriveDead(t.Context(), ids[0]))
		}
		_, err := q.Get(t.Context(), ids[1])
		require.ErrorIs(t, err, codeq.ErrNotFound, "it had the turn")
		require.ErrorIs(t, q.Run(t.Context(), &m, &codeq.RunOptions{UnhandledFor: -1}), codeq.ErrInvalid)
	})
}

// TestKindsAreExact: Handle gets tasks without a kind only, HandleKind those of its kind only, and
// HandleBatch leaves tasks with a kind to HandleKind.
func TestKindsAreExact(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Shards: 2})
		var mu sync.Mutex
		got := make(map[string]int)
		note := func(by string, l *codeq.Lease) {
			mu.Lock()
			defer mu.Unlock()
			got[by+" "+l.Queue+" "+l.Kind]++
		}
		var m codeq.Mux
		one := func(_ context.Context, j *codeq.Job[[]byte]) error { note("one", j.Lease); return nil }
		codeq.Handle(&m, "plain", one)
		codeq.HandleKind(&m, "kinds", "k", one)
		codeq.Handle(&m, "both", one)
		codeq.HandleKind(&m, "both", "k", one)
		codeq.HandleKind(&m, "batch", "k", one)
		codeq.HandleBatch(&m, "batch", codeq.BatchOptions{Linger: time.Second}, func(_ context.Context, jobs []*codeq.Job[[]byte]) []error {
			for _, j := range jobs {
				note("batch", j.Lease)
			}
			return nil
		})
		for range 10 {
			for _, queue := range m.Queues() {
				for _, kind := range []string{"", "k", "other"} {
					queuetest.Produce(t, q, codeq.Task{Queue: queue, Kind: kind})
				}
			}
		}
		run := startRun(t, q, &m, codeq.RunOptions{})
		time.Sleep(time.Minute)
		require.NoError(t, run.End(nil))
		require.Equal(t, map[string]int{
			"one plain ": 10, "one kinds k": 10, "one both ": 10, "one both k": 10, "batch batch ": 10, "one batch k": 10,
		}, got)
		for queue, left := range map[string]uint64{"plain": 20, "kinds": 20, "both": 10, "batch": 10} {
			require.Equal(t, left, queuetest.CountsOf(t, q, queue).Scheduled, queue)
		}
		page, err := q.ListPage(t.Context(), codeq.PageOptions{TaskFilter: codeq.TaskFilter{Queue: "plain", Kind: "k"}})
		require.NoError(t, err)
		require.Len(t, page.Tasks, 10)
		for _, info := range page.Tasks {
			require.Equal(t, "k", info.Kind)
		}
		r, err := q.Bulk(t.Context(), codeq.BulkOptions{
			TaskFilter: codeq.TaskFilter{Queue: "kinds", Kind: "other", States: []codeq.State{codeq.Scheduled}}, Action: codeq.BulkCancel,
		})
		require.NoError(t, err)
		require.EqualValues(t, 10, r.Changed)
		require.EqualValues(t, 10, queuetest.CountsOf(t, q, "kinds").Scheduled)
	})
}

// TestRefusedKinds: Run refuses a Mux with an invalid kind, and Produce a task with one.
func TestRefusedKinds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Limits: codeq.Limits{Name: 10}})
		h := func(context.Context, *codeq.Job[[]byte]) error { return nil }
		for field, fill := range map[string]func(m *codeq.Mux){
			`HandleKind queue`:                          func(m *codeq.Mux) { codeq.HandleKind(m, "a", "k", h) },
			`HandleKind kind of queue "b"`:              func(m *codeq.Mux) { codeq.HandleKind(m, "b", "", h) },
			`HandleKind kind of queue "c"`:              func(m *codeq.Mux) { codeq.HandleKind(m, "c", "\xff", h) },
			`HandleKind handler of queue "b", kind "k"`: func(m *codeq.Mux) { codeq.HandleKind[int](m, "b", "k", nil) },
			`WithCodec codec`:                           func(m *codeq.Mux) { codeq.HandleKind(m, "b", "k", h, codeq.WithCodec(nil)) },
		} {
			var m codeq.Mux
			codeq.HandleKind(&m, "a", "k", h)
			fill(&m)
			var invalid *codeq.InvalidError
			require.ErrorAs(t, q.Run(t.Context(), &m, nil), &invalid, field)
			require.Equal(t, field, invalid.Field)
		}
		for _, kind := range []string{strings.Repeat("k", 11), "\xff"} {
			_, err := q.Produce(t.Context(), codeq.Task{Queue: "a", Kind: kind})
			require.ErrorIs(t, err, codeq.ErrInvalid)
		}
	})
}
