package codeq

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// openForRun opens a queue that is closed when the test's bubble ends.
func openForRun(t *testing.T, opts Options) *Queue {
	t.Helper()
	opts.Shards = cmp.Or(opts.Shards, 1)
	opts.Backoff.Jitter = -1
	if opts.fs == nil {
		opts.fs = vfs.NewMem()
	}
	q, err := Open("q", &opts)
	require.NoError(t, err)
	t.Cleanup(func() { assert.NoError(t, q.Close()) })
	return q
}

// countsOf returns the counts of one queue.
func countsOf(t *testing.T, q *Queue, name string) Counts {
	t.Helper()
	counts, err := q.Stats(context.Background())
	require.NoError(t, err)
	return counts[name]
}

func infoOf(t *testing.T, q *Queue, id ID) *TaskInfo {
	t.Helper()
	i, err := q.Get(context.Background(), id)
	require.NoError(t, err)
	return i
}

// ActiveRun is a call of Run in a goroutine of its own.
type ActiveRun struct {
	Cancel context.CancelCauseFunc
	Done   chan struct{} // closed when Run has returned
	Err    error         // of Run; valid once done is closed
	Took   time.Duration // from the end of its context, or of waiting for it, until Run returned

	mu      sync.Mutex // guards reports
	reports []error    // what OnError was told
}

// startRun calls Run until the test's bubble ends.
func startRun(t *testing.T, q *Queue, m *Mux, opts RunOptions) *ActiveRun {
	t.Helper()
	ctx, cancel := context.WithCancelCause(t.Context())
	r := &ActiveRun{Cancel: cancel, Done: make(chan struct{})}
	opts.OnError = func(l *Lease, err error) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.reports = append(r.reports, err)
	}
	go func() {
		defer close(r.Done)
		r.Err = q.Run(ctx, m, &opts)
	}()
	t.Cleanup(func() { _ = r.End(errBubbleOver) }) // a test that cares has ended it
	return r
}

var errBubbleOver = errors.New("the test is over")

// End ends the context of Run and returns what Run returns.
func (r *ActiveRun) End(cause error) error {
	r.Cancel(cause)
	return r.Wait()
}

func (r *ActiveRun) Wait() error {
	start := time.Now()
	<-r.Done
	r.Took = time.Since(start)
	return r.Err
}

func (r *ActiveRun) Reported() []error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.reports)
}

// untilCancelled is a handler that is slow and obedient.
func untilCancelled(ctx context.Context, _ *Job[[]byte]) error {
	<-ctx.Done()
	return ctx.Err()
}

// TestOutputOfHandler: results and follow-ups are stored with the completion,
// and are dropped when the handler fails.
func TestOutputOfHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, Options{Shards: 3, Retention: time.Hour})
		var m Mux
		Handle(&m, "a", func(_ context.Context, j *Job[[]byte]) error {
			if j.Attempt < 3 {
				j.SetResult([]byte("of a failed attempt"))
				j.FollowUp(Task{Queue: "b", Payload: []byte("of a failed attempt")})
			}
			switch j.Attempt {
			case 1:
				return errors.New("boom")
			case 2:
				panic("boom")
			case 4:
				return nil
			}
			if string(j.Args) == "silent" {
				return nil
			}
			j.SetResult([]byte("first thought"))
			j.SetResult([]byte("result"))
			j.FollowUp(Task{Queue: "b", Payload: []byte("1")})
			j.FollowUp(Task{Queue: "b", Payload: []byte("2")}, Task{Queue: "c", Payload: []byte("3"), RunAt: time.Now().Add(time.Hour)})
			return nil
		})
		startRun(t, q, &m, RunOptions{})
		ids := produce(t, q, Task{Queue: "a"}, Task{Queue: "a", Payload: []byte("silent")})
		time.Sleep(time.Minute)
		synctest.Wait()
		for i, want := range []string{"result", ""} {
			got := infoOf(t, q, ids[i])
			require.Equal(t, Done, got.State)
			require.Equal(t, want, string(got.Result))
		}
		require.Equal(t, Counts{Scheduled: 1}, countsOf(t, q, "c"))
		require.Equal(t, Counts{Ready: 2}, countsOf(t, q, "b"))
		var payloads []string
		for task, err := range q.List(t.Context(), ListOptions{State: Ready}) {
			require.NoError(t, err)
			require.Equal(t, ids[0].shard(3), task.ID.shard(3), "follow-ups lie beside their parent")
			payloads = append(payloads, string(task.Payload))
		}
		require.Equal(t, []string{"1", "2"}, payloads)
		require.NoError(t, q.checkAll())
	})
}

// countCommits counts the commits of all shards from now on.
func countCommits(t *testing.T, q *Queue) (sum func() int) {
	counters := make([]countingCommitter, len(q.replicas))
	for i, s := range q.led() {
		require.NoError(t, s.probe(func(s *shard) error {
			counters[i].committer = s.commit
			s.commit = &counters[i]
			return nil
		}))
	}
	return func() (n int) {
		for i, s := range q.led() {
			require.NoError(t, s.probe(func(*shard) error {
				n += counters[i].commits
				return nil
			}))
		}
		return n
	}
}

// loseLease ends a lease as if its deadline had passed.
func loseLease(t *testing.T, q *Queue, id ID) {
	t.Helper()
	require.NoError(t, q.shard(q.shardOf(id)).probe(func(s *shard) error {
		if !s.Probe().Expire(id) {
			return ErrNotFound
		}
		return nil
	}))
}

// burningCommitter refuses every batch.
type burningCommitter struct{}

var errDisk = errors.New("disk on fire")

func (burningCommitter) Commit(*pebble.Batch) error { return errDisk }
func (burningCommitter) Confirm() error             { return nil }

// failShard makes the next commit of a shard fail.
func failShard(t *testing.T, q *Queue, index int) {
	t.Helper()
	require.NoError(t, q.shard(index).probe(func(s *shard) error {
		s.commit = burningCommitter{}
		return nil
	}))
}

// TestRunOnFailedShard: when a shard fails, Run ends with its error, handlers
// with tasks of other shards end in peace, and those of the failed shard are
// told.
func TestRunOnFailedShard(t *testing.T) {
	for _, concurrency := range []int{6, 7} { // with and without claims that wait
		t.Run(fmt.Sprint(concurrency), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := openForRun(t, Options{Shards: 3})
				var m Mux
				var mu sync.Mutex
				causes := make(map[int][]error)
				Handle(&m, "a", func(ctx context.Context, j *Job[[]byte]) error {
					select {
					case <-ctx.Done():
					case <-time.After(20 * time.Second):
					}
					mu.Lock()
					defer mu.Unlock()
					shard := j.ID.shard(3)
					causes[shard] = append(causes[shard], context.Cause(ctx))
					return ctx.Err()
				})
				run := startRun(t, q, &m, RunOptions{LeaseFor: 15 * time.Second, Grace: time.Minute, Concurrency: concurrency})
				for i := range 3 {
					produce(t, q.startingAt(i), Task{Queue: "a"}, Task{Queue: "a"})
				}
				synctest.Wait()
				failShard(t, q, 1)
				_, err := q.startingAt(1).Produce(t.Context(), Task{Queue: "b"})
				require.ErrorIs(t, err, ErrUncertain)
				require.ErrorIs(t, err, errDisk)

				err = run.Wait()
				require.ErrorIs(t, err, ErrFailed)
				require.ErrorIs(t, err, errDisk)
				require.Equal(t, []error{nil, nil}, causes[0])
				require.Equal(t, []error{nil, nil}, causes[2])
				require.Len(t, causes[1], 2)
				for _, cause := range causes[1] {
					require.ErrorIs(t, cause, ErrFailed)
				}
				require.NotEmpty(t, run.Reported())
			})
		})
	}
}

// TestRunWaitsForCommits: workers do not wait for the commit of a completion,
// but Run does.
func TestRunWaitsForCommits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, Options{})
		var m Mux
		step := make(chan struct{})
		var handled atomic.Int64
		Handle(&m, "a", func(context.Context, *Job[[]byte]) error {
			<-step
			handled.Add(1)
			return nil
		})
		run := startRun(t, q, &m, RunOptions{Concurrency: 2})
		produce(t, q, Task{Queue: "a"}, Task{Queue: "a"})
		synctest.Wait()
		open := shut(t, q, 0)
		close(step)
		synctest.Wait()
		require.EqualValues(t, 2, handled.Load())
		run.Cancel(nil)
		time.Sleep(25 * time.Second) // longer than the grace, shorter than a lease
		synctest.Wait()
		select {
		case <-run.Done:
			t.Fatal("Run has returned before the last commit")
		default:
		}
		close(open)
		require.NoError(t, run.Wait())
		require.Equal(t, Counts{}, countsOf(t, q, "a"))
	})
}

// TestStuckShardDelaysNoCancel: at the end of the grace period all handlers are
// cancelled, even if a shard takes its time to have a task back.
func TestStuckShardDelaysNoCancel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, Options{Shards: 2})
		var m Mux
		var cancelled atomic.Int64
		Handle(&m, "a", func(ctx context.Context, _ *Job[[]byte]) error {
			<-ctx.Done()
			cancelled.Add(1)
			return nil
		})
		run := startRun(t, q, &m, RunOptions{Concurrency: 4, Grace: 10 * time.Second})
		for i := range 2 {
			produce(t, q.startingAt(i), Task{Queue: "a"}, Task{Queue: "a"})
		}
		synctest.Wait()
		var gates []chan struct{}
		for i := range 2 {
			gates = append(gates, shut(t, q, i))
		}
		run.Cancel(nil)
		time.Sleep(10 * time.Second)
		synctest.Wait()
		require.EqualValues(t, 4, cancelled.Load())
		for _, g := range gates {
			close(g)
		}
		require.NoError(t, run.Wait())
		require.Equal(t, Counts{Ready: 4}, countsOf(t, q, "a"))
	})
}

// TestClaimedButNotStarted: tasks that no worker has begun when Run is to end are given back
// uncounted and in their places.
func TestClaimedButNotStarted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, Options{})
		var m Mux
		Handle(&m, "a", untilCancelled)
		ids := produce(t, q, slices.Repeat([]Task{{Queue: "a"}}, 6)...)
		r, err := q.newRun(t.Context(), &m, &RunOptions{Concurrency: 4})
		require.NoError(t, err)
		n, err := r.Claim(t.Context(), 4) // and no workers
		require.NoError(t, err)
		require.Equal(t, 4, n)
		require.Equal(t, Counts{Leased: 4, Ready: 2}, countsOf(t, q, "a"))
		require.Zero(t, r.pool.Drain(context.Canceled))
		require.Equal(t, Counts{Ready: 6}, countsOf(t, q, "a"))
		for _, id := range ids {
			l, err := q.Claim(t.Context(), ClaimRequest{Queues: []string{"a"}, NoWait: true})
			require.NoError(t, err)
			require.Equal(t, id, l.ID)
			require.Equal(t, 1, l.Attempt)
		}
	})
}

// TestStoppedWorker: a task that a worker takes at the moment in which Run
// cancels its handlers is given back without being handled.
func TestStoppedWorker(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, Options{})
		var m Mux
		Handle(&m, "a", func(context.Context, *Job[[]byte]) error {
			t.Error("a stopped worker runs a handler")
			return nil
		})
		id := produce(t, q, Task{Queue: "a"})[0]
		r, err := q.newRun(t.Context(), &m, nil)
		require.NoError(t, err)
		op, err := q.claim(t.Context(), &r.req, r)
		require.NoError(t, err)
		w := r.pool.Workers()[0]
		_, hasTask := w.Stop(ErrClosed)
		require.False(t, hasTask)
		r.Do(w, &op.Grants[0])
		op.unref()
		got := infoOf(t, q, id)
		require.Equal(t, Ready, got.State)
		require.Zero(t, got.Attempts)
	})
}

// TestRefusedRuns: Run refuses what it cannot do before it begins.
func TestRefusedRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, Options{})
		var m, empty Mux
		Handle(&m, "a", untilCancelled)
		Handle(&m, "b", untilCancelled)
		produce(t, q, Task{Queue: "a"})
		ended, cancel := context.WithCancel(t.Context())
		cancel() // Run returns even if it does not refuse
		for _, tc := range []struct {
			mux   *Mux
			opts  RunOptions
			want  error
			field string
		}{
			{nil, RunOptions{}, ErrNoHandler, ""},
			{&empty, RunOptions{}, ErrNoHandler, ""},
			{&empty, RunOptions{Queues: []string{"a"}}, ErrNoHandler, ""},
			{&m, RunOptions{Queues: []string{"a", "z"}}, ErrNoHandler, ""},
			{&m, RunOptions{Concurrency: -1}, ErrInvalid, "RunOptions.Concurrency"},
			{&m, RunOptions{LeaseFor: shortestLease - 1}, ErrInvalid, "ClaimRequest.LeaseFor"},
			{&m, RunOptions{LeaseFor: -time.Second}, ErrInvalid, "ClaimRequest.LeaseFor"},
			{&m, RunOptions{LeaseFor: longestLease + 1}, ErrInvalid, "ClaimRequest.LeaseFor"},
			{&m, RunOptions{Queues: []string{"a", "b"}, Weights: map[string]int{"z": 1}}, ErrInvalid, "ClaimRequest.Weights"},
			{&m, RunOptions{Queues: []string{"a", "b"}, Weights: map[string]int{"b": 0}}, ErrInvalid, "ClaimRequest.Weights of b"},
			{&m, RunOptions{Queues: []string{"a", "b"}, Weights: map[string]int{"b": -2}}, ErrInvalid, "ClaimRequest.Weights of b"},
			{&m, RunOptions{Queues: []string{"a"}, Weights: map[string]int{"a": 1, "b": 2}}, ErrInvalid, "ClaimRequest.Weights"},
			{&m, RunOptions{Queues: []string{"a"}, Weights: map[string]int{"a": -1}}, ErrInvalid, "ClaimRequest.Weights of a"},
			{&m, RunOptions{Weights: map[string]int{"z": 1}}, ErrInvalid, "ClaimRequest.Weights"},
			{&m, RunOptions{Weights: map[string]int{"a": 0}}, ErrInvalid, "ClaimRequest.Weights of a"},
		} {
			err := q.Run(ended, tc.mux, &tc.opts)
			require.ErrorIs(t, err, tc.want, "%+v", tc.opts)
			if tc.field != "" {
				var invalid *InvalidError
				require.ErrorAs(t, err, &invalid)
				require.Equal(t, tc.field, invalid.Field, "%+v", tc.opts)
			}
		}
		require.Equal(t, Counts{Ready: 1}, countsOf(t, q, "a"))
	})
}
