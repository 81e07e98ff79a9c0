package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/test/queuetest"
)

// deadLetter returns the only dead letter.
func deadLetter(t *testing.T, q *codeq.Queue) (dead *codeq.TaskInfo) {
	t.Helper()
	for info, err := range q.List(t.Context(), codeq.ListOptions{State: codeq.Dead}) {
		require.NoError(t, err)
		require.Nil(t, dead)
		dead = info
	}
	return dead
}

// TestHistory: Get and List show each attempt of a task with its worker, times and outcome, over
// retries, a death, a redrive, and the completion.
func TestHistory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{MaxAttempts: 3, Retention: time.Hour, Backoff: codeq.Backoff{Base: time.Minute, Factor: 1}})
		long := errors.New(strings.Repeat("e", 1000))
		outcomes := []error{long, codeq.Snooze(time.Second), errors.New("boom"), codeq.DeadLetter(errors.New("poison")), nil}
		var m codeq.Mux
		codeq.Handle(&m, "a", func(context.Context, *codeq.Job[[]byte]) error {
			time.Sleep(2 * time.Second)
			err := outcomes[0]
			outcomes = outcomes[1:]
			return err
		})
		begin := time.Now().UTC()
		at := func(s int) time.Time { return begin.Add(time.Duration(s) * time.Second) }
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a", RunAt: at(60)})[0]
		require.Zero(t, queuetest.InfoOf(t, q, id).FirstReady)
		startRun(t, q, &m, codeq.RunOptions{Name: "w"})
		time.Sleep(61 * time.Second)
		info := queuetest.InfoOf(t, q, id)
		require.Equal(t, at(0), info.ID.Time())
		require.Equal(t, at(60), info.FirstReady)
		require.Equal(t, []codeq.Attempt{{Number: 1, Start: at(60), Worker: "w"}}, info.History)

		want := []codeq.Attempt{
			{1, at(60), at(62), codeq.EventRetried, "w", long.Error()[:256]},
			{2, at(122), at(124), codeq.EventReleased, "w", ""},
			{2, at(125), at(127), codeq.EventRetried, "w", "boom"},
			{3, at(187), at(189), codeq.EventDeadLettered, "w", "codeq: given up by the handler: poison"},
		}
		time.Sleep(5 * time.Minute)
		info = queuetest.InfoOf(t, q, id)
		require.Equal(t, codeq.Dead, info.State)
		want[3].Error = info.LastError
		require.Contains(t, info.LastError, "poison")
		require.Equal(t, want, info.History)
		require.Equal(t, info, deadLetter(t, q))

		require.NoError(t, q.RedriveDead(t.Context(), id))
		time.Sleep(time.Minute)
		info = queuetest.InfoOf(t, q, id)
		require.Equal(t, codeq.Done, info.State)
		want = append(want, codeq.Attempt{1, at(361), at(363), codeq.EventCompleted, "w", ""})
		require.Equal(t, want, info.History)
		require.Equal(t, at(60), info.FirstReady)
	})
}

// TestHistoryIsBounded: of many attempts, Get shows the first ones, the last ones, and the number
// of the others.
func TestHistoryIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{MaxAttempts: 100})
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		for range 30 {
			l := queuetest.ClaimNow(t, q, "a")
			require.NoError(t, q.Retry(t.Context(), l.Receipt, codeq.RetryOptions{Err: errors.New("again"), After: -1}))
		}
		info := queuetest.InfoOf(t, q, id)
		require.Equal(t, 20, info.HistoryDropped)
		require.Len(t, info.History, 10)
		for i, number := range []int{1, 2, 23, 24, 25, 26, 27, 28, 29, 30} {
			require.Equal(t, number, info.History[i].Number)
		}
	})
}

// TestWorkersOfHistory: a worker has the name from its options. Run has a default name, and a claim
// without Run needs no name.
func TestWorkersOfHistory(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{})
		worker := func(queue string) string {
			for info, err := range q.List(t.Context(), codeq.ListOptions{State: codeq.Leased, Queue: queue}) {
				require.NoError(t, err)
				return info.History[0].Worker
			}
			return "nobody"
		}
		for _, name := range []string{"", "w1", strings.Repeat("w", 128)} {
			queuetest.Produce(t, q, codeq.Task{Queue: "by hand"})
			l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"by hand"}, Worker: name})
			require.NoError(t, err)
			require.Equal(t, name, worker("by hand"))
			queuetest.Complete(t, q, l)
		}
		_, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"by hand"}, Worker: strings.Repeat("w", 129)})
		require.ErrorIs(t, err, codeq.ErrInvalid)
		var m codeq.Mux
		codeq.Handle(&m, "a", func(context.Context, *codeq.Job[[]byte]) error {
			time.Sleep(time.Second)
			return nil
		})
		require.ErrorIs(t, q.Run(t.Context(), &m, &codeq.RunOptions{Name: strings.Repeat("w", 129)}), codeq.ErrInvalid)
		startRun(t, q, &m, codeq.RunOptions{})
		queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		synctest.Wait()
		require.Regexp(t, fmt.Sprintf("^.+:%d$", os.Getpid()), worker("a"))
	})
}

// TestProgress: the shard gets the first report at once, then one report per second, and the last
// report, too. The task keeps its progress and its metadata.
func TestProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Retention: time.Hour, Backoff: codeq.Backoff{Base: time.Minute}})
		sub, err := q.Subscribe(codeq.SubscribeOptions{Kinds: []codeq.EventKind{codeq.EventProgress}})
		require.NoError(t, err)
		defer sub.Close()
		var m codeq.Mux
		var found []map[string]string
		codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			found = append(found, j.Metadata)
			for n := range int64(30) { // the last report comes after 2.6 s
				require.NoError(t, codeq.ReportProgress(ctx, n+1, 30, "step"))
				time.Sleep(90 * time.Millisecond)
			}
			require.NoError(t, codeq.SetMetadata(ctx, "attempt", fmt.Sprint(j.Attempt)))
			require.NoError(t, codeq.SetMetadata(ctx, "gone", "soon"))
			require.NoError(t, codeq.SetMetadata(ctx, "gone", ""))
			if j.Attempt == 1 {
				return errors.New("once more")
			}
			require.NoError(t, codeq.ReportProgress(ctx, 31, 30, "done"))
			return nil
		})
		startRun(t, q, &m, codeq.RunOptions{})
		begin := time.Now().UTC()
		at := func(ms int) time.Time { return begin.Add(time.Duration(ms) * time.Millisecond) }
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		for i, want := range []codeq.Progress{{1, 30, "step", at(0)}, {12, 30, "step", at(990)}, {23, 30, "step", at(1980)}} {
			time.Sleep(time.Until(at(1000*i + 500)))
			require.Equal(t, want, queuetest.InfoOf(t, q, id).Progress)
			e, err := sub.Next(t.Context())
			require.NoError(t, err)
			require.Equal(t, codeq.Event{
				Kind: codeq.EventProgress, ID: id, Queue: "a", Attempt: 1, Time: at(1000 * i), Progress: want,
			}, e)
		}
		time.Sleep(10 * time.Second)
		info := queuetest.InfoOf(t, q, id)
		require.Equal(t, codeq.Scheduled, info.State)
		require.Equal(t, codeq.Progress{30, 30, "step", at(2610)}, info.Progress, "the last one is stored with the outcome")
		require.Equal(t, map[string]string{"attempt": "1"}, info.Metadata)
		time.Sleep(time.Minute)
		info = queuetest.InfoOf(t, q, id)
		require.Equal(t, codeq.Done, info.State)
		require.Equal(t, codeq.Progress{31, 30, "done", at(62700 + 2700)}, info.Progress)
		require.Equal(t, map[string]string{"attempt": "2"}, info.Metadata)
		require.Equal(t, []map[string]string{nil, {"attempt": "1"}}, found)
	})
}

// TestNotesOfGivenBack: a handler continues after Run has ended. Its task has the last report from
// before the end.
func TestNotesOfGivenBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{})
		var m codeq.Mux
		codeq.Handle(&m, "a", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
			for page := range int64(6000) { // a minute
				require.NoError(t, codeq.ReportProgress(ctx, page, 6000, ""))
				time.Sleep(10 * time.Millisecond)
			}
			return nil
		})
		run := startRun(t, q, &m, codeq.RunOptions{Grace: -1})
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		time.Sleep(500 * time.Millisecond)
		require.ErrorContains(t, run.End(errors.New("enough")), "handlers still running")
		defer time.Sleep(time.Hour) // until the handlers have returned
		info := queuetest.InfoOf(t, q, id)
		require.Equal(t, codeq.Ready, info.State)
		attempt := info.History[0]
		require.Equal(t, codeq.EventReleased, attempt.Outcome)
		require.InDelta(t, attempt.End.Sub(attempt.Start)/(10*time.Millisecond), info.Progress.Done, 1)
	})
}

// TestProgressBounds: a note or metadata that is too long is refused, and the earlier values stay.
// Outside of a handler, and after its end, the calls have no effect.
func TestProgressBounds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Retention: time.Hour})
		var m codeq.Mux
		var after context.Context
		codeq.Handle(&m, "a", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
			after = ctx
			require.NoError(t, codeq.SetMetadata(ctx, "key", strings.Repeat("v", 4000)))
			require.NoError(t, codeq.ReportProgress(ctx, 1, 2, strings.Repeat("n", 93)))
			require.ErrorIs(t, codeq.ReportProgress(ctx, 2, 2, strings.Repeat("n", 94)), codeq.ErrInvalid)
			require.ErrorIs(t, codeq.SetMetadata(ctx, "k", ""), nil)
			require.ErrorIs(t, codeq.SetMetadata(ctx, "k", "v"), codeq.ErrInvalid)
			return nil
		})
		startRun(t, q, &m, codeq.RunOptions{})
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		synctest.Wait()
		info := queuetest.InfoOf(t, q, id)
		require.EqualValues(t, 1, info.Progress.Done)
		require.Len(t, info.Metadata["key"], 4000)
		require.NoError(t, codeq.ReportProgress(after, 2, 2, ""))
		time.Sleep(time.Minute)
		require.EqualValues(t, 1, queuetest.InfoOf(t, q, id).Progress.Done)
		require.NoError(t, codeq.ReportProgress(t.Context(), 1, 1, ""))
		require.NoError(t, codeq.SetMetadata(t.Context(), "k", "v"))
	})
}

// allocated returns the number of bytes that the program allocates while f runs.
func allocated(f func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// fillQueue produces tasks into a queue, and leases some of them.
func fillQueue(t *testing.T, q *codeq.Queue, queue string, tasks, leases int) (ids []codeq.ID) {
	t.Helper()
	ctx := context.Background()
	for len(ids) < tasks {
		batch := make([]codeq.Task, min(1000, tasks-len(ids)))
		for i := range batch {
			batch[i] = codeq.Task{Queue: queue, Payload: []byte("x")}
		}
		made, err := q.ProduceBatch(ctx, batch)
		require.NoError(t, err)
		ids = append(ids, made...)
	}
	for n := 0; n < leases; {
		got, err := q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{queue}, Max: min(1000, leases-n), LeaseFor: time.Hour})
		require.NoError(t, err)
		n += len(got)
	}
	return ids
}

// TestReadsCostByWhatTheyYield: Get and List read and keep only their results. Other leased tasks,
// ready tasks and queues add no cost.
func TestReadsCostByWhatTheyYield(t *testing.T) {
	const backlog, few = 20_000, 20
	ctx := context.Background()
	q, err := codeq.Open(t.TempDir(), &codeq.Options{Shards: 1})
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()

	leased := fillQueue(t, q, "leased", backlog, backlog-few) // the last few are ready
	ready := fillQueue(t, q, "ready", backlog, few)           // the first few are leased
	count := func(o codeq.ListOptions) (n int) {
		for info, err := range q.List(ctx, o) {
			require.NoError(t, err)
			require.Equal(t, o.State, info.State)
			n++
		}
		return n
	}
	for name, c := range map[string]func(){
		"Get of a ready task": func() {
			info, err := q.Get(ctx, ready[backlog-1])
			require.NoError(t, err)
			require.Equal(t, codeq.Ready, info.State)
		},
		"Get of a leased task": func() {
			info, err := q.Get(ctx, leased[0])
			require.NoError(t, err)
			require.Equal(t, codeq.Leased, info.State)
			require.WithinDuration(t, time.Now().Add(time.Hour), info.At, time.Minute)
		},
		"List of the ready tasks behind leases": func() { require.Equal(t, few, count(codeq.ListOptions{State: codeq.Ready, Queue: "leased"})) },
		"List of the leased tasks of a backlog": func() { require.Equal(t, few, count(codeq.ListOptions{State: codeq.Leased, Queue: "ready"})) },
		"List of a queue without tasks": func() {
			for _, state := range []codeq.State{codeq.Ready, codeq.Leased, codeq.Scheduled, codeq.Blocked, codeq.Dead, codeq.Done, codeq.Canceled} {
				require.Zero(t, count(codeq.ListOptions{State: state, Queue: "none"}))
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			c()
			require.Less(t, allocated(c), uint64(1<<20), fmt.Sprint("bytes, beside ", backlog, " leases and ready tasks"))
		})
	}
}
