package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/guard"
	"codeq/internal/inspect"
	"codeq/test/queuetest"
)

// tally adds up the observations of an Observer.
type tally struct {
	mu       sync.Mutex // guards the fields below
	queues   map[string]codeq.QueueDelta
	commits  []codeq.CommitSample
	handlers []codeq.HandlerSample
	missed   [2]uint64 // commits, handlers
	panics   uint64
	calls    int
}

// addTotals adds all that n counts to sum.
func addTotals(sum, n *codeq.Totals) {
	to := reflect.ValueOf(sum).Elem()
	for i := range to.NumField() {
		to.Field(i).SetUint(to.Field(i).Uint() + reflect.ValueOf(*n).Field(i).Uint())
	}
}

func (t *tally) observe(o *codeq.Observation) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.queues == nil {
		t.queues = make(map[string]codeq.QueueDelta)
	}
	seen := make(map[string]bool)
	for _, d := range o.Queues {
		if seen[d.Queue] {
			panic("queue " + d.Queue + " is there twice")
		}
		seen[d.Queue] = true
		sum := t.queues[d.Queue]
		sum.Queue = d.Queue
		addTotals(&sum.Totals, &d.Totals)
		t.queues[d.Queue] = sum
	}
	t.commits = append(t.commits, o.Commits...)
	t.handlers = append(t.handlers, o.Handlers...)
	t.missed[0] += o.MissedCommits
	t.missed[1] += o.MissedHandlers
	t.panics += o.Panics
	t.calls++
}

// told waits until everything that has happened in the bubble has been reported, and returns the
// tally.
func (t *tally) told() *tally {
	time.Sleep(guard.TellPause)
	synctest.Wait()
	t.mu.Lock()
	defer t.mu.Unlock()
	return &tally{queues: t.queues, commits: t.commits, handlers: t.handlers, missed: t.missed, panics: t.panics, calls: t.calls}
}

// TestObserver: every event is reported once: the changes of tasks by queue, the commits, and the
// handlers with their verdicts.
func TestObserver(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sum := new(tally)
		q := queuetest.OpenForRun(t, codeq.Options{Observer: sum.observe, Shards: 2, Retention: time.Hour})
		ctx := t.Context()
		var m codeq.Mux
		started := make(chan codeq.ID, 100)
		codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			started <- j.ID
			switch args := string(j.Args); args {
			case "retry":
				if j.Attempt == 1 {
					return errors.New("boom")
				}
			case "after":
				if j.Attempt == 1 {
					return codeq.RetryAfter(time.Second, errors.New("boom"))
				}
			case "snooze":
				if time.Now().Second() == 0 {
					return codeq.Snooze(time.Second)
				}
			case "dead":
				return codeq.DeadLetter(errors.New("boom"))
			case "large":
				j.SetResult(make([]byte, 2<<20))
			case "goexit":
				runtime.Goexit()
			case "panic":
				panic("boom")
			case "wait":
				<-ctx.Done()
				return ctx.Err()
			case "slow":
				time.Sleep(3 * time.Second)
			}
			return nil
		})
		run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 1, Grace: 2 * time.Second})
		// handle runs one task, and returns the samples of its handlers.
		handle := func(args string, between func(codeq.ID)) []codeq.HandlerSample {
			before := len(sum.told().handlers)
			time.Sleep(time.Until(time.Now().Truncate(time.Minute).Add(time.Minute)))
			id := queuetest.Produce(t, q, codeq.Task{Queue: "a", Tenant: "t-" + args, Payload: []byte(args), MaxAttempts: 2})[0]
			require.Equal(t, id, <-started)
			between(id)
			time.Sleep(10 * time.Second)
			synctest.Wait()
			for len(started) > 0 {
				require.Equal(t, id, <-started)
			}
			return sum.told().handlers[before:]
		}
		nothing := func(codeq.ID) {}
		of := func(args string, attempt int, v codeq.Verdict) codeq.HandlerSample {
			return codeq.HandlerSample{Queue: "a", Tenant: "t-" + args, Attempt: attempt, Verdict: v}
		}
		for _, c := range []struct {
			args    string
			between func(codeq.ID)
			want    []codeq.HandlerSample
		}{
			{"", nothing, []codeq.HandlerSample{of("", 1, codeq.VerdictCompleted)}},
			{"retry", nothing, []codeq.HandlerSample{of("retry", 1, codeq.VerdictRetry), of("retry", 2, codeq.VerdictCompleted)}},
			{"after", nothing, []codeq.HandlerSample{of("after", 1, codeq.VerdictRetryAfter), of("after", 2, codeq.VerdictCompleted)}},
			{"snooze", nothing, []codeq.HandlerSample{of("snooze", 1, codeq.VerdictReleased), of("snooze", 1, codeq.VerdictCompleted)}},
			{"dead", nothing, []codeq.HandlerSample{of("dead", 1, codeq.VerdictDeadLetter)}},
			{"large", nothing, []codeq.HandlerSample{of("large", 1, codeq.VerdictDeadLetter)}},
			{"goexit", nothing, []codeq.HandlerSample{of("goexit", 1, codeq.VerdictRetry), of("goexit", 2, codeq.VerdictRetry)}},
			{"panic", nothing, []codeq.HandlerSample{of("panic", 1, codeq.VerdictRetry), of("panic", 2, codeq.VerdictRetry)}},
			{"wait", func(id codeq.ID) { require.NoError(t, q.Cancel(ctx, id)) }, []codeq.HandlerSample{of("wait", 1, codeq.VerdictCanceled)}},
		} {
			got := handle(c.args, c.between)
			require.Equal(t, c.want, got, c.args)
		}
		// The lease of a handler is lost, and its second attempt is canceled.
		got := handle("wait", func(id codeq.ID) {
			queuetest.LoseLease(t, q, id)
			time.Sleep(time.Minute) // a renewal notices it, before the next attempt begins
			require.Equal(t, id, <-started)
			require.NoError(t, q.Cancel(ctx, id))
		})
		require.Len(t, got, 2)
		require.Equal(t, codeq.VerdictLeaseLost, got[0].Verdict)
		require.Equal(t, of("wait", 2, codeq.VerdictCanceled).Verdict, got[1].Verdict)

		// Two at once: the second one waits for the first.
		before := len(sum.told().handlers)
		slow := codeq.Task{Queue: "a", Payload: []byte("slow")}
		queuetest.Produce(t, q, slow, slow)
		time.Sleep(time.Minute)
		require.Equal(t, []codeq.HandlerSample{
			{Queue: "a", Attempt: 1, Took: 3 * time.Second, Verdict: codeq.VerdictCompleted},
			{Queue: "a", Attempt: 1, Took: 3 * time.Second, Wait: 3 * time.Second, Verdict: codeq.VerdictCompleted},
		}, sum.told().handlers[before:])

		// Tasks that no Run takes.
		ids := queuetest.Produce(t, q, codeq.Task{Queue: "b"}, codeq.Task{Queue: "b", RunAt: time.Now().Add(time.Hour)}, codeq.Task{Queue: "b"})
		require.NoError(t, q.Cancel(ctx, ids[1]))
		for range 2 {
			l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"b"}})
			require.NoError(t, err)
			if l.ID == ids[0] {
				require.NoError(t, q.Complete(ctx, l.Receipt, nil, codeq.Task{Queue: "c"}))
			}
		}
		time.Sleep(time.Minute) // the other lease expires

		// Run ends while the handler of a task still runs.
		before = len(sum.told().handlers)
		queuetest.Produce(t, q, slow)
		<-started
		<-started
		<-started
		require.NoError(t, run.End(errors.New("enough")))
		got = sum.told().handlers[before:]
		require.Equal(t, []codeq.HandlerSample{
			{Queue: "a", Attempt: 1, Took: 3 * time.Second, Verdict: codeq.VerdictReleased},
		}, got)

		all := sum.told()
		require.Equal(t, map[string]codeq.QueueDelta{
			// A second attempt of six tasks; dead, large, and two out of attempts are dead letters.
			"a": {"a", codeq.Totals{Produced: 13, Claimed: 19, Completed: 6, Retried: 4, Released: 2, Dead: 4, Canceled: 2, Expired: 1}},
			"b": {"b", codeq.Totals{Produced: 3, Claimed: 2, Completed: 1, Canceled: 1, Expired: 1}},
			"c": {"c", codeq.Totals{Produced: 1}},
		}, all.queues)
		require.Zero(t, all.missed)
		require.Zero(t, all.panics)
		require.EqualValues(t, inspect.Of(q).Commits(), len(all.commits), "each commit")
		operations := [2]int{}
		for _, c := range all.commits {
			operations[c.Shard] += c.Operations
		}
		require.Positive(t, operations[0])
		require.Positive(t, operations[1])
	})
}

// TestObserverOfCommits: the duration of a commit, and the number of its operations from callers.
func TestObserverOfCommits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sum := new(tally)
		q := queuetest.OpenForRun(t, codeq.Options{Observer: sum.observe})
		queuetest.SlowDown(t, q, 0, 7*time.Millisecond)
		queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		var calls sync.WaitGroup
		for range 5 {
			calls.Go(func() { _, _ = q.Produce(t.Context(), codeq.Task{Queue: "a"}) })
		}
		calls.Wait()
		all, operations := sum.told(), 0
		for _, c := range all.commits {
			require.Equal(t, 7*time.Millisecond, c.Took)
			operations += c.Operations
		}
		require.Equal(t, 6, operations)
		require.Less(t, len(all.commits), 6)
	})
}

// TestObserverThatBlocks: an Observer that blocks delays no call. Later events are reported when it
// goes on: no change is lost, and samples that are left out are counted.
func TestObserverThatBlocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		sum, goOn := new(tally), make(chan struct{})
		q := queuetest.OpenForRun(t, codeq.Options{Observer: func(o *codeq.Observation) {
			<-goOn
			sum.observe(o)
		}})
		const most, tasks = 8192, 9000
		queuetest.Produce(t, q, codeq.Task{Queue: "a"}) // the call that blocks
		synctest.Wait()
		var m codeq.Mux
		var handled atomic.Int64
		for _, queue := range []string{"a", "b"} {
			codeq.Handle(&m, queue, func(context.Context, *codeq.Job[[]byte]) error { handled.Add(1); return nil })
		}
		_, err := q.ProduceBatch(t.Context(), tasksFor(tasks, "b"))
		require.NoError(t, err)
		run := startRun(t, q, &m, codeq.RunOptions{})
		require.NoError(t, q.WaitIdle(t.Context()))
		synctest.Wait()
		require.EqualValues(t, tasks+1, handled.Load())
		for range most { // each a commit
			queuetest.Produce(t, q, codeq.Task{Queue: "c"})
		}
		require.NoError(t, run.End(nil))
		require.Zero(t, sum.told().calls)
		close(goOn)
		all := sum.told()
		require.Equal(t, 2, all.calls)
		require.Equal(t, map[string]codeq.QueueDelta{
			"a": {"a", codeq.Totals{Produced: 1, Claimed: 1, Completed: 1}},
			"b": {"b", codeq.Totals{Produced: tasks, Claimed: tasks, Completed: tasks}},
			"c": {"c", codeq.Totals{Produced: most}},
		}, all.queues)
		require.Len(t, all.handlers, most)
		require.EqualValues(t, tasks+1-most, all.missed[1])
		require.Len(t, all.commits, 1+most, "of both calls")
		require.EqualValues(t, inspect.Of(q).Commits(), len(all.commits)+int(all.missed[0]))
		require.Positive(t, all.missed[0])
	})
}

func tasksFor(n int, queue string) []codeq.Task {
	tasks := make([]codeq.Task, n)
	for i := range tasks {
		tasks[i].Queue = queue
	}
	return tasks
}

// TestObserverThatEnds: an Observer that panics, or ends its goroutine, is called again and gets
// the number of such calls. The queue goes on, and the log has the first of such calls in a row.
func TestObserverThatEnds(t *testing.T) {
	for name, end := range map[string]func(){"panic": func() { panic("boom") }, "Goexit": runtime.Goexit} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				rec, sum := newRecorder(), new(tally)
				bad := false
				q := queuetest.OpenForRun(t, codeq.Options{Logger: slog.New(rec), Observer: func(o *codeq.Observation) {
					if bad {
						end()
					}
					sum.observe(o)
				}})
				for i := range 9 { // two good, two bad, ...
					bad = i%4 > 1
					queuetest.Produce(t, q, codeq.Task{Queue: fmt.Sprint(i)})
					time.Sleep(guard.TellPause)
					synctest.Wait()
				}
				all := sum.told()
				require.Equal(t, 5, all.calls)
				require.EqualValues(t, 4, all.panics)
				for _, i := range []int{0, 1, 4, 5, 8} {
					require.EqualValues(t, 1, all.queues[fmt.Sprint(i)].Produced, i)
				}
				require.Len(t, all.queues, 5)
				require.Equal(t, 2, strings.Count(rec.text.String(), "Observer has panicked"))
			})
		})
	}
}

// TestObserverAtClose: Close waits for the last call of the Observer, but no longer than a second.
// No call comes after that.
func TestObserverAtClose(t *testing.T) {
	t.Run("told", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			var produced atomic.Int64
			q := queuetest.OpenForRun(t, codeq.Options{Observer: func(o *codeq.Observation) {
				time.Sleep(100 * time.Millisecond)
				for _, d := range o.Queues {
					produced.Add(int64(d.Produced))
				}
			}})
			for range 10 {
				queuetest.Produce(t, q, codeq.Task{Queue: "a"})
			}
			require.NoError(t, q.Close())
			require.EqualValues(t, 10, produced.Load())
		})
	})
	t.Run("blocked", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			var calls atomic.Int64
			goOn := make(chan struct{})
			q := queuetest.OpenForRun(t, codeq.Options{Observer: func(*codeq.Observation) {
				calls.Add(1)
				<-goOn
			}})
			queuetest.Produce(t, q, codeq.Task{Queue: "a"})
			synctest.Wait()
			queuetest.Produce(t, q, codeq.Task{Queue: "a"})
			begun := time.Now()
			require.NoError(t, q.Close())
			require.Equal(t, time.Second, time.Since(begun))
			close(goOn)
			synctest.Wait()
			require.EqualValues(t, 1, calls.Load())
		})
	})
	t.Run("idle", func(t *testing.T) { // has no goroutine
		synctest.Test(t, func(t *testing.T) {
			q := queuetest.OpenForRun(t, codeq.Options{Observer: func(*codeq.Observation) {}})
			require.NoError(t, q.Close())
		})
	})
}
