package codeq_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/test/queuetest"
)

// inStates returns the filter for a queue and some states.
func inStates(queue string, states ...codeq.State) codeq.TaskFilter {
	return codeq.TaskFilter{Queue: queue, States: states}
}

// TestFindByKey: FindByKey finds the task with the key in every state, and no other task.
func TestFindByKey(t *testing.T) {
	t.Parallel()
	queuetest.ThroughSteps(t, codeq.Options{Shards: 3}, func(t *testing.T, p *queuetest.Process) {
		ctx := context.Background()
		find := func(task codeq.Task) (codeq.ID, error) {
			info, err := p.FindByKey(ctx, codeq.UniqueKey{Queue: task.Queue, Tenant: task.Tenant, Group: task.Group, LimitKey: task.LimitKey, Key: task.Unique.Key})
			if err != nil {
				require.Nil(t, info)
				return codeq.ID{}, err
			}
			got, err := p.Get(ctx, info.ID)
			require.NoError(t, err)
			require.Equal(t, got, info)
			return info.ID, nil
		}
		var tasks []codeq.Task
		ids := make(map[int]codeq.ID)
		for i := range 12 {
			task := codeq.Task{Queue: []string{"a", "b"}[i%2], Tenant: []string{"", "x"}[i/2%2], Unique: codeq.Unique{Key: "k", For: time.Hour}, Retention: time.Minute}
			switch i / 4 {
			case 1:
				task.Group = "g"
			case 2:
				task.LimitKey = "l"
			}
			if i%4 == 3 {
				task.RunAt = p.Now().Add(2 * time.Hour)
			}
			tasks = append(tasks, task)
			ids[i] = p.Store(task)
		}
		p.Step()
		for i, task := range tasks {
			got, err := find(task)
			require.NoError(t, err)
			require.Equal(t, ids[i], got)
		}
		_, err := find(codeq.Task{Queue: "a", Unique: codeq.Unique{Key: "other"}})
		require.ErrorIs(t, err, codeq.ErrNotFound)
		require.ErrorContains(t, err, `"other"`)
		l := p.Take("a")
		held := slices.Index(slices.Collect(func(yield func(codeq.ID) bool) {
			for i := range tasks {
				if !yield(ids[i]) {
					return
				}
			}
		}), l.ID)
		for _, end := range []func() error{
			func() error { return nil },
			func() error { return p.Complete(ctx, l.Receipt, nil) },
		} {
			require.NoError(t, end())
			p.Step()
			got, err := find(tasks[held])
			require.NoError(t, err)
			require.Equal(t, l.ID, got)
		}
		p.Pass(5 * time.Minute) // the task is gone, and its key is still taken
		_, err = find(tasks[held])
		require.ErrorIs(t, err, codeq.ErrNotFound)
		p.Taken(tasks[held], l.ID)
		_, err = p.FindByKey(ctx, codeq.UniqueKey{Queue: "a"})
		require.ErrorIs(t, err, codeq.ErrInvalid)
	})
}

// TestBulkActions: each action has the same effect on the selected tasks as the method for one
// task. A dry run counts the same tasks and changes nothing.
func TestBulkActions(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for _, shards := range []int{1, 3} {
		for _, c := range []struct {
			opts codeq.BulkOptions
			want codeq.BulkResult
			a, b codeq.Counts
		}{
			{
				codeq.BulkOptions{Action: codeq.BulkCancel, TaskFilter: inStates("a", codeq.Ready, codeq.Blocked, codeq.Leased)},
				codeq.BulkResult{Matched: 130, Changed: 130},
				codeq.Counts{Scheduled: 20, Dead: 30, Done: 40, Canceled: 180}, codeq.Counts{Ready: 5},
			},
			{
				codeq.BulkOptions{Action: codeq.BulkRedrive},
				codeq.BulkResult{Matched: 30, Changed: 29, Failed: 1},
				codeq.Counts{Ready: 129, Scheduled: 20, Blocked: 10, Leased: 20, Dead: 1, Done: 40, Canceled: 50}, codeq.Counts{Ready: 5},
			},
			{
				codeq.BulkOptions{Action: codeq.BulkRedrive, TaskFilter: codeq.TaskFilter{ErrorKind: codeq.ErrorKind("kind 7")}},
				codeq.BulkResult{Matched: 15, Changed: 14, Failed: 1},
				codeq.Counts{Ready: 114, Scheduled: 20, Blocked: 10, Leased: 20, Dead: 16, Done: 40, Canceled: 50}, codeq.Counts{Ready: 5},
			},
			{
				codeq.BulkOptions{Action: codeq.BulkPurge, TaskFilter: inStates("a", codeq.Done, codeq.Dead)},
				codeq.BulkResult{Matched: 70, Changed: 70},
				codeq.Counts{Ready: 100, Scheduled: 20, Blocked: 10, Leased: 20, Canceled: 50}, codeq.Counts{Ready: 5},
			},
			{
				codeq.BulkOptions{Action: codeq.BulkMove, ToQueue: "b", TaskFilter: inStates("a", codeq.Ready, codeq.Scheduled, codeq.Dead)},
				codeq.BulkResult{Matched: 150, Changed: 148, Failed: 2},
				codeq.Counts{Ready: 1, Blocked: 10, Leased: 20, Dead: 1, Done: 40, Canceled: 50}, codeq.Counts{Ready: 133, Scheduled: 20},
			},
			{
				codeq.BulkOptions{Action: codeq.BulkSetPriority, Priority: 3, TaskFilter: codeq.TaskFilter{Queue: "a"}},
				codeq.BulkResult{Matched: 90, Changed: 90},
				codeq.Counts{Ready: 100, Scheduled: 20, Blocked: 10, Leased: 20, Dead: 30, Done: 40, Canceled: 50}, codeq.Counts{Ready: 5},
			},
			{
				codeq.BulkOptions{Action: codeq.BulkCancel, TaskFilter: inStates("", codeq.Ready), Match: func(i *codeq.TaskInfo) bool { return string(i.Payload) == "b" }},
				codeq.BulkResult{Matched: 5, Changed: 5},
				codeq.Counts{Ready: 100, Scheduled: 20, Blocked: 10, Leased: 20, Dead: 30, Done: 40, Canceled: 50}, codeq.Counts{Canceled: 5},
			},
		} {
			t.Run(fmt.Sprint(c.opts.Action, " ", c.opts.States, c.opts.ErrorKind, " ", shards), func(t *testing.T) {
				queuetest.InFlow(t, codeq.Options{Shards: shards, LeaseFor: time.Hour, Retention: codeq.Forever}, func(f *queuetest.FlowTest) {
					claim := func(n int, end func(i int, l *codeq.Lease) error) {
						for i := range n {
							require.NoError(f, end(i, f.Claim("a")))
						}
					}
					produceAll := func(n int, task codeq.Task) {
						for i := range n {
							f.ProduceAt(i%shards, task)
						}
					}
					plain := codeq.Task{Queue: "a", Payload: []byte("a")}
					produceAll(29, plain)
					queuetest.Produce(f.T, f.Q, queuetest.Keyed("k"))
					kinds := 0
					claim(30, func(i int, l *codeq.Lease) error {
						if l.Unique.Key == "" && kinds == 14 {
							return f.Q.DeadLetter(ctx, l.Receipt, errors.New("other"))
						}
						if l.Unique.Key == "" {
							kinds++
						}
						return f.Q.DeadLetter(ctx, l.Receipt, fmt.Errorf("kind %d", i))
					})
					produceAll(40, plain)
					claim(40, func(_ int, l *codeq.Lease) error { return f.Q.Complete(ctx, l.Receipt, nil) })
					produceAll(20, plain)
					claim(20, func(int, *codeq.Lease) error { return nil })
					for range 50 {
						require.NoError(f, f.Q.Cancel(ctx, queuetest.Produce(f.T, f.Q, plain)[0]))
					}
					queuetest.Produce(f.T, f.Q, queuetest.Keyed("k")) // the same key as a dead letter
					produceAll(59, plain)
					high := plain
					high.Priority = 3
					produceAll(40, high)
					later := plain
					later.RunAt = time.Now().Add(time.Hour)
					produceAll(20, later)
					waiting := plain
					waiting.After = f.Spread(codeq.Task{Queue: "parents", RunAt: time.Now().Add(time.Hour)})
					produceAll(10, waiting)
					produceAll(5, codeq.Task{Queue: "b", Payload: []byte("b")})
					time.Sleep(time.Second)
					f.Check()

					before, err := f.Q.Stats(ctx)
					require.NoError(f, err)
					dry := c.opts
					dry.DryRun = true
					r, err := f.Q.Bulk(ctx, dry)
					require.NoError(f, err)
					require.Equal(f, codeq.BulkResult{Matched: c.want.Matched}, r)
					after, err := f.Q.Stats(ctx)
					require.NoError(f, err)
					require.Equal(f, before, after)

					r, err = f.Q.Bulk(ctx, c.opts)
					require.NoError(f, err)
					require.Equal(f, c.want, r)
					f.Check()
					require.Equal(f, c.a, f.Counts("a"))
					require.Equal(f, c.b, f.Counts("b"))
					if c.opts.Action == codeq.BulkMove {
						for i, err := range f.Q.List(ctx, codeq.ListOptions{State: codeq.Scheduled, Queue: "b"}) {
							require.NoError(f, err)
							require.WithinDuration(f, later.RunAt, i.At, time.Millisecond)
						}
					}
					f.Reopen()
				})
			})
		}
	}
}

// TestBulkSkips: a task that changes its state after Bulk has read it is skipped and counted.
func TestBulkSkips(t *testing.T) {
	t.Parallel()
	queuetest.Bubble(t, codeq.Options{Shards: 2, LeaseFor: time.Hour}, func(t *testing.T, q *codeq.Queue) {
		ctx := context.Background()
		for range 20 {
			queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		}
		time.Sleep(time.Second)
		claimed := false
		r, err := q.Bulk(ctx, codeq.BulkOptions{Action: codeq.BulkCancel, TaskFilter: inStates("a", codeq.Ready), Match: func(*codeq.TaskInfo) bool {
			if !claimed { // Bulk has read all tasks
				claimed = true
				for range 5 {
					require.NotNil(t, queuetest.ClaimNow(t, q, "a"))
				}
				queuetest.Produce(t, q, codeq.Task{Queue: "a"})
			}
			return true
		}})
		require.NoError(t, err)
		require.Equal(t, codeq.BulkResult{Matched: 20, Changed: 15, Skipped: 5}, r)
		require.Equal(t, codeq.Counts{Ready: 1, Leased: 5}, queuetest.CountsOf(t, q, "a"), "what came later is not selected")
	})
}

// TestBulkGoesOn: the changes of a call stay when its context or its process ends. With Next,
// another call does the rest, and does not read the finished tasks.
func TestBulkGoesOn(t *testing.T) {
	t.Parallel()
	queuetest.ThroughSteps(t, codeq.Options{Shards: 3}, func(t *testing.T, p *queuetest.Process) {
		const n = 100
		p.StoreDead(n, codeq.Task{Queue: "a"})
		p.Pass(time.Second)
		opts := codeq.BulkOptions{Action: codeq.BulkRedrive, Rate: 10}
		ctx, cancel := context.WithCancelCause(context.Background())
		type result struct {
			codeq.BulkResult
			err error
		}
		ended := make(chan result, 1)
		go func(q *codeq.Queue) {
			r, err := q.Bulk(ctx, opts)
			ended <- result{r, err}
		}(p.Queue)
		p.Pass(5 * time.Second)
		if !p.Ends() {
			cancel(errBubbleOver)
		}
		p.Step()
		first := <-ended
		cancel(nil)
		if p.Ends() {
			require.ErrorIs(t, first.err, codeq.ErrClosed)
		} else {
			require.ErrorIs(t, first.err, errBubbleOver)
		}
		require.NotEmpty(t, first.Next)
		require.InDelta(t, 51, first.Changed, 3)
		require.EqualValues(t, n-first.Changed, queuetest.CountsOf(t, p.Queue, "a").Dead)
		var seen int
		opts.Cursor, opts.Rate, opts.Match = first.Next, 0, func(*codeq.TaskInfo) bool { seen++; return true }
		rest, err := p.Bulk(context.Background(), opts)
		require.NoError(t, err)
		require.Equal(t, codeq.BulkResult{Matched: n - first.Changed, Changed: n - first.Changed}, rest)
		require.Equal(t, codeq.Counts{Ready: n}, queuetest.CountsOf(t, p.Queue, "a"))
	})
}

// TestBulkRate: after a first burst of a tenth of a second, the rate limits the changes per second.
func TestBulkRate(t *testing.T) {
	t.Parallel()
	for _, perSecond := range []float64{0.5, 10, 1000} {
		queuetest.Bubble(t, codeq.Options{Shards: 2}, func(t *testing.T, q *codeq.Queue) {
			const n = 50
			for range n {
				queuetest.Produce(t, q, codeq.Task{Queue: "a"})
			}
			time.Sleep(time.Second)
			start := time.Now()
			done := make(chan struct{})
			go func() {
				defer close(done)
				r, err := q.Bulk(context.Background(), codeq.BulkOptions{Action: codeq.BulkCancel, Rate: perSecond, TaskFilter: inStates("a", codeq.Ready)})
				require.NoError(t, err)
				require.Equal(t, codeq.BulkResult{Matched: n, Changed: n}, r)
			}()
			for ended := false; !ended; {
				synctest.Wait()
				gone := n - float64(queuetest.CountsOf(t, q, "a").Ready)
				most := max(1, perSecond/10) + perSecond*time.Since(start).Seconds()
				require.LessOrEqual(t, gone, most+1e-6)
				select {
				case <-done:
					ended = true
				case <-time.After(time.Duration(float64(time.Second) / perSecond / 3)):
				}
			}
			require.LessOrEqual(t, time.Since(start).Seconds(), 1.2*n/perSecond)
		})
	}
}

// TestBulkDieAgain: Bulk does not change a task twice, even if the task dies again or moves to a
// later position.
func TestBulkDieAgain(t *testing.T) {
	t.Parallel()
	queuetest.Bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		ctx, stop := context.WithCancel(context.Background())
		require.NoError(t, q.Configure(ctx, "a", func(s *codeq.Settings) { s.DeadRetention = time.Hour }))
		const n = 300
		for range n {
			queuetest.Produce(t, q, codeq.Task{Queue: "a"})
			require.NoError(t, q.DeadLetter(ctx, queuetest.ClaimNow(t, q, "a").Receipt, nil))
		}
		time.Sleep(time.Second)
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			for {
				l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}})
				if err != nil {
					return
				}
				require.NoError(t, q.DeadLetter(context.Background(), l.Receipt, nil))
			}
		}()
		r, err := q.Bulk(ctx, codeq.BulkOptions{Action: codeq.BulkRedrive, Rate: 1})
		require.NoError(t, err)
		require.Equal(t, codeq.BulkResult{Matched: n, Changed: n}, r)
		synctest.Wait()
		stop()
		<-ended
		require.Equal(t, codeq.Counts{Dead: n}, queuetest.CountsOf(t, q, "a"))
	})
}

// TestBulkRefused: Bulk refuses options that contradict each other or are out of bounds.
func TestBulkRefused(t *testing.T) {
	t.Parallel()
	q := openLimited(t)
	for field, opts := range map[string][]codeq.BulkOptions{
		"Action":   {{}, {Action: codeq.BulkMove + 1}},
		"States":   {{Action: codeq.BulkCancel}, {Action: codeq.BulkPurge}, {Action: codeq.BulkMove}, {Action: codeq.BulkRedrive, TaskFilter: inStates("", codeq.Ready)}, {Action: codeq.BulkPurge, TaskFilter: inStates("", codeq.Dead, codeq.Leased)}, {Action: codeq.BulkSetPriority, TaskFilter: inStates("", codeq.Leased)}, {Action: codeq.BulkRedrive, TaskFilter: inStates("", 99)}},
		"Priority": {{Action: codeq.BulkSetPriority, Priority: 10}, {Action: codeq.BulkSetPriority, Priority: -1}, {Action: codeq.BulkRedrive, Priority: 1}},
		"Rate":     {{Action: codeq.BulkRedrive, Rate: -1}, {Action: codeq.BulkRedrive, Rate: math.NaN()}, {Action: codeq.BulkRedrive, Rate: math.Inf(1)}},
		"Queue":    {{Action: codeq.BulkMove, ToQueue: "b", TaskFilter: inStates("", codeq.Ready)}},
		"ToQueue": {
			{Action: codeq.BulkMove, TaskFilter: inStates("a", codeq.Ready)}, {Action: codeq.BulkMove, ToQueue: "a", TaskFilter: inStates("a", codeq.Ready)},
			{Action: codeq.BulkRedrive, ToQueue: "b"}, {Action: codeq.BulkMove, ToQueue: string(make([]byte, 1<<20)), TaskFilter: inStates("a", codeq.Ready)},
		},
	} {
		for _, o := range opts {
			r, err := q.Bulk(context.Background(), o)
			var invalid *codeq.InvalidError
			require.ErrorAs(t, err, &invalid, "%+v", o)
			require.Equal(t, "BulkOptions."+field, invalid.Field, "%+v", o)
			require.Zero(t, r)
		}
	}
	var invalid *codeq.InvalidError
	_, err := q.Bulk(context.Background(), codeq.BulkOptions{Action: codeq.BulkRedrive, Cursor: "x"})
	require.ErrorAs(t, err, &invalid)
	require.Equal(t, "BulkOptions.Cursor", invalid.Field)
	_, err = q.Bulk(context.Background(), codeq.BulkOptions{
		Action: codeq.BulkCancel, TaskFilter: codeq.TaskFilter{States: []codeq.State{codeq.Ready, codeq.Ready}},
	})
	require.ErrorAs(t, err, &invalid)
	require.Equal(t, "BulkOptions.States", invalid.Field)
	ended, end := context.WithCancelCause(context.Background())
	end(errors.New("enough"))
	_, err = q.Bulk(ended, codeq.BulkOptions{Action: codeq.BulkRedrive})
	require.ErrorIs(t, err, context.Canceled)
}

// TestBulkProgress: Bulk reports its result after each few pages, with the last one at its end.
func TestBulkProgress(t *testing.T) {
	t.Parallel()
	queuetest.Bubble(t, codeq.Options{Shards: 2}, func(t *testing.T, q *codeq.Queue) {
		const n = 3000
		_, err := q.ProduceBatch(t.Context(), slices.Repeat([]codeq.Task{{Queue: "a"}}, n))
		require.NoError(t, err)
		time.Sleep(time.Second)
		for _, dry := range []bool{true, false} {
			var told []codeq.BulkResult
			r, err := q.Bulk(t.Context(), codeq.BulkOptions{
				Action: codeq.BulkCancel, TaskFilter: inStates("a", codeq.Ready), DryRun: dry,
				Progress: func(r codeq.BulkResult) { told = append(told, r) },
			})
			require.NoError(t, err)
			require.Equal(t, n, r.Matched)
			require.Greater(t, len(told), 5)
			require.Equal(t, r, told[len(told)-1])
			require.True(t, slices.IsSortedFunc(told, func(a, b codeq.BulkResult) int { return cmp.Compare(a.Matched, b.Matched) }))
			require.Less(t, told[0].Matched, n)
		}
	})
}
