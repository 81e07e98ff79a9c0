package codeq_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/inspect"
	"codeq/test/queuetest"
)

// handlerCall is one call of a handler.
type handlerCall struct {
	after     time.Duration // since the recorder was made
	id        codeq.ID
	queue     string
	attempt   int
	lastError string
}

// callRecorder keeps the calls of handlers, in order.
type callRecorder struct {
	start time.Time
	mu    sync.Mutex // guards calls
	calls []handlerCall
}

func newCallRecorder() *callRecorder { return &callRecorder{start: time.Now()} }

func (r *callRecorder) add(l *codeq.Lease) (nth int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls = append(r.calls, handlerCall{time.Since(r.start), l.ID, l.Queue, l.Attempt, l.LastError})
	return len(r.calls)
}

func (r *callRecorder) all() []handlerCall {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.calls)
}

// activeRun is a call of Run in a goroutine of its own.
type activeRun struct {
	Cancel context.CancelCauseFunc
	Done   chan struct{} // closed when Run has returned
	Err    error         // of Run; valid once done is closed
	Took   time.Duration // from the end of its context, or of waiting for it, until Run returned

	mu      sync.Mutex // guards reports
	reports []error    // the reports to OnError
}

// startRun calls Run until the test's bubble ends.
func startRun(t *testing.T, q *codeq.Queue, m *codeq.Mux, opts codeq.RunOptions) *activeRun {
	t.Helper()
	ctx, cancel := context.WithCancelCause(t.Context())
	r := &activeRun{Cancel: cancel, Done: make(chan struct{})}
	opts.OnError = func(l *codeq.Lease, err error) {
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

// End ends the context of Run and returns its result.
func (r *activeRun) End(cause error) error {
	r.Cancel(cause)
	return r.Wait()
}

func (r *activeRun) Wait() error {
	start := time.Now()
	<-r.Done
	r.Took = time.Since(start)
	return r.Err
}

func (r *activeRun) Reported() []error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.reports)
}

// untilCancelled is a slow handler that obeys its context.
func untilCancelled(ctx context.Context, _ *codeq.Job[[]byte]) error {
	<-ctx.Done()
	return ctx.Err()
}

// TestVerdicts: the return value of a handler decides the outcome of its task.
func TestVerdicts(t *testing.T) {
	boom := errors.New("boom")
	const never = -1
	for _, tc := range []struct {
		name      string
		verdict   error
		state     codeq.State // after the first attempt
		attempts  int
		lastError string
		again     time.Duration // when the task is tried again
	}{
		{"nil", nil, codeq.Done, 1, "", never},
		{"error", boom, codeq.Scheduled, 1, "boom", 8 * time.Second},
		{"wrapped error", fmt.Errorf("outer: %w", boom), codeq.Scheduled, 1, "outer: boom", 8 * time.Second},
		{"snooze", codeq.Snooze(5 * time.Second), codeq.Scheduled, 0, "", 5 * time.Second},
		{"wrapped snooze", fmt.Errorf("outer: %w", codeq.Snooze(5*time.Second)), codeq.Scheduled, 0, "", 5 * time.Second},
		{"snooze for no time", codeq.Snooze(0), codeq.Leased, 1, "", 0},
		{"snooze for less than no time", codeq.Snooze(-time.Hour), codeq.Leased, 1, "", 0},
		{"retry after", codeq.RetryAfter(time.Minute, boom), codeq.Scheduled, 1, "boom", time.Minute},
		{"retry at once", codeq.RetryAfter(0, boom), codeq.Leased, 2, "boom", 0},
		{"retry without a reason", codeq.RetryAfter(time.Minute, nil), codeq.Scheduled, 1, "", time.Minute},
		{"wrapped retry", fmt.Errorf("%w", codeq.RetryAfter(time.Minute, boom)), codeq.Scheduled, 1, "boom", time.Minute},
		{"dead letter", codeq.DeadLetter(boom), codeq.Dead, 1, "boom", never},
		{"dead letter without a reason", codeq.DeadLetter(nil), codeq.Dead, 1, "", never},
		{"wrapped dead letter", fmt.Errorf("%w", codeq.DeadLetter(boom)), codeq.Dead, 1, "boom", never},
	} {
		t.Run(tc.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := queuetest.OpenForRun(t, codeq.Options{Retention: time.Hour, Backoff: codeq.Backoff{Base: 8 * time.Second}})
				calls := newCallRecorder()
				var m codeq.Mux
				codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
					if calls.add(j.Lease) == 1 {
						return tc.verdict
					}
					return untilCancelled(ctx, j)
				})
				run := startRun(t, q, &m, codeq.RunOptions{Grace: -1})
				id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
				synctest.Wait()

				got := queuetest.InfoOf(t, q, id)
				require.Equal(t, tc.state, got.State)
				require.Equal(t, tc.attempts, got.Attempts)
				require.Equal(t, tc.lastError, got.LastError)
				switch {
				case tc.verdict == nil, tc.attempts == 0, tc.state == codeq.Leased && tc.attempts == 1:
					require.Empty(t, run.Reported(), "no attempt has failed")
				default:
					require.Equal(t, []error{tc.verdict}, run.Reported())
				}
				want := []handlerCall{{id: id, queue: "a", attempt: 1}}
				if tc.again != never {
					attempt := tc.attempts
					if tc.state != codeq.Leased {
						attempt++
					}
					want = append(want, handlerCall{tc.again, id, "a", attempt, tc.lastError})
				}
				time.Sleep(30 * time.Minute)
				synctest.Wait()
				require.Equal(t, want, calls.all())
			})
		})
	}
}

// TestBackoffOfRun: the waits after errors grow as Options.Backoff says.
func TestBackoffOfRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Backoff: codeq.Backoff{Base: time.Second, Max: 5 * time.Second, Factor: 3}})
		calls := newCallRecorder()
		var m codeq.Mux
		codeq.Handle(&m, "a", func(_ context.Context, j *codeq.Job[[]byte]) error {
			calls.add(j.Lease)
			return fmt.Errorf("attempt %d", j.Attempt)
		})
		run := startRun(t, q, &m, codeq.RunOptions{})
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a", MaxAttempts: 5})[0]
		time.Sleep(time.Hour)
		synctest.Wait()
		require.NoError(t, run.End(nil))
		require.Equal(t, []handlerCall{
			{0 * time.Second, id, "a", 1, ""},
			{1 * time.Second, id, "a", 2, "attempt 1"},
			{4 * time.Second, id, "a", 3, "attempt 2"},
			{9 * time.Second, id, "a", 4, "attempt 3"},
			{14 * time.Second, id, "a", 5, "attempt 4"},
		}, calls.all())
		require.Equal(t, codeq.Dead, queuetest.InfoOf(t, q, id).State)
		require.Len(t, run.Reported(), 5)
	})
}

// TestPanic: a panic is an error that counts, and names its place.
func TestPanic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Retention: time.Hour})
		calls := newCallRecorder()
		var m codeq.Mux
		var none []int
		codeq.Handle(&m, "a", func(_ context.Context, j *codeq.Job[[]byte]) error {
			switch calls.add(j.Lease) {
			case 1:
				panicOfTest("kaboom")
			case 2:
				panicOfTest(io.ErrUnexpectedEOF)
			case 3:
				none[j.Attempt] = 1
			}
			return nil
		})
		run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 1})
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		synctest.Wait()
		got := queuetest.InfoOf(t, q, id)
		require.Equal(t, codeq.Scheduled, got.State)
		require.Equal(t, 1, got.Attempts)
		require.True(t, strings.HasPrefix(got.LastError, "panic: kaboom\n"), got.LastError)
		require.Contains(t, got.LastError, "panicOfTest")
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Equal(t, codeq.Done, queuetest.InfoOf(t, q, id).State)
		require.Len(t, calls.all(), 4, "the worker goes on after a panic")

		reports := run.Reported()
		require.Len(t, reports, 3)
		for i, value := range []any{"kaboom", io.ErrUnexpectedEOF, nil} {
			var p *codeq.PanicError
			require.ErrorAs(t, reports[i], &p)
			if value != nil {
				require.Equal(t, value, p.Value)
				require.Contains(t, string(p.Stack), "panicOfTest")
			}
			require.Contains(t, string(p.Stack), "run_test.go")
		}
		require.ErrorIs(t, reports[1], io.ErrUnexpectedEOF)
		var fault runtime.Error
		require.ErrorAs(t, reports[2], &fault)
	})
}

//go:noinline
func panicOfTest(v any) { panic(v) }

// TestGoexit: a handler that ends its goroutine has failed, and no worker is lost.
func TestGoexit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Retention: time.Hour})
		var m codeq.Mux
		codeq.Handle(&m, "a", func(_ context.Context, j *codeq.Job[[]byte]) error {
			if j.Attempt < 4 {
				runtime.Goexit()
			}
			return nil
		})
		run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 1})
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		synctest.Wait()
		got := queuetest.InfoOf(t, q, id)
		require.Equal(t, codeq.Scheduled, got.State)
		require.Equal(t, 1, got.Attempts)
		require.NotEmpty(t, got.LastError)
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Equal(t, codeq.Done, queuetest.InfoOf(t, q, id).State)
		require.Len(t, run.Reported(), 3)
		require.NoError(t, run.End(nil))
		require.Zero(t, run.Took)
	})
}

// TestPayloads: Args is the decoded payload, or the payload itself if its type is bytes.
func TestPayloads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{})
		type args struct {
			Name string
			List []int
		}
		var m codeq.Mux
		var gotArgs []args
		var gotBytes [][]byte
		var gotRaw []json.RawMessage
		codeq.Handle(&m, "json", func(_ context.Context, j *codeq.Job[args]) error {
			gotArgs = append(gotArgs, j.Args)
			return nil
		})
		codeq.Handle(&m, "pointer", func(_ context.Context, j *codeq.Job[*args]) error {
			gotArgs = append(gotArgs, *j.Args)
			return nil
		})
		codeq.Handle(&m, "bytes", func(_ context.Context, j *codeq.Job[[]byte]) error {
			gotBytes = append(gotBytes, j.Args)
			assert.Equal(t, j.Payload, j.Args)
			return nil
		})
		codeq.Handle(&m, "raw", func(_ context.Context, j *codeq.Job[json.RawMessage]) error {
			gotRaw = append(gotRaw, j.Args)
			return nil
		})
		run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 1})
		queuetest.Produce(t, q,
			codeq.Task{Queue: "json", Payload: []byte(`{"Name":"x","List":[1,2]}`)},
			codeq.Task{Queue: "json", Payload: []byte(`{}`)}) // nothing of the task before is left
		synctest.Wait()
		queuetest.Produce(t, q, codeq.Task{Queue: "pointer", Payload: []byte(`{"Name":"p"}`)})
		queuetest.Produce(t, q, codeq.Task{Queue: "bytes", Payload: []byte("\x00{not json")})
		queuetest.Produce(t, q, codeq.Task{Queue: "raw", Payload: []byte(`[1]`)})
		synctest.Wait()
		require.Empty(t, run.Reported())
		require.Equal(t, []args{{"x", []int{1, 2}}, {}, {Name: "p"}}, gotArgs)
		require.Equal(t, [][]byte{[]byte("\x00{not json")}, gotBytes)
		require.Equal(t, []json.RawMessage{json.RawMessage(`[1]`)}, gotRaw)

		for i, payload := range []string{`{"Name":`, `{"Name":7}`, "{} {}"} {
			id := queuetest.Produce(t, q, codeq.Task{Queue: "json", Payload: []byte(payload)})[0]
			synctest.Wait()
			got := queuetest.InfoOf(t, q, id)
			require.Equal(t, codeq.Dead, got.State, payload)
			require.Equal(t, 1, got.Attempts)
			require.Contains(t, got.LastError, "json")
			require.Len(t, run.Reported(), i+1)
		}
		var wrongType *json.UnmarshalTypeError
		require.ErrorAs(t, run.Reported()[1], &wrongType)
		require.Len(t, gotArgs, 3, "a handler does not see what cannot be decoded")
	})
}

// TestOutputBeyondLimits: a task becomes a dead letter if the output of its handler can never be
// stored, and no part of the output is stored.
func TestOutputBeyondLimits(t *testing.T) {
	follow := func(n int, payload string) (tasks []codeq.Task) {
		for range n {
			tasks = append(tasks, codeq.Task{Queue: "b", Payload: []byte(payload)})
		}
		return tasks
	}
	for field, output := range map[string]func(j *codeq.Job[[]byte]){
		"Complete result":   func(j *codeq.Job[[]byte]) { j.SetResult(make([]byte, 11)) },
		"Complete tasks":    func(j *codeq.Job[[]byte]) { j.FollowUp(follow(4, "")...) },
		"Complete payloads": func(j *codeq.Job[[]byte]) { j.FollowUp(follow(3, "1234567")...) },
		"Task.Payload":      func(j *codeq.Job[[]byte]) { j.FollowUp(follow(1, "12345678901")...) },
		"Task.Priority":     func(j *codeq.Job[[]byte]) { j.FollowUp(codeq.Task{Queue: "b"}, codeq.Task{Queue: "b", Priority: 10}) },
		"Task.Queue":        func(j *codeq.Job[[]byte]) { j.FollowUp(codeq.Task{}) },
	} {
		t.Run(field, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := queuetest.OpenForRun(t, codeq.Options{
					Retention: time.Hour,
					Limits:    codeq.Limits{Payload: 10, Batch: 3, BatchBytes: 20},
				})
				var m codeq.Mux
				codeq.Handle(&m, "a", func(_ context.Context, j *codeq.Job[[]byte]) error {
					output(j)
					return nil
				})
				run := startRun(t, q, &m, codeq.RunOptions{})
				id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
				synctest.Wait()
				got := queuetest.InfoOf(t, q, id)
				require.Equal(t, codeq.Dead, got.State)
				require.Equal(t, 1, got.Attempts)
				require.Contains(t, got.LastError, field)
				reports := run.Reported()
				require.Len(t, reports, 1)
				var invalid *codeq.InvalidError
				require.ErrorAs(t, reports[0], &invalid)
				require.Equal(t, field, invalid.Field)
				requirePrefix(t, field, reports[0])
				require.Equal(t, reports[0].Error(), got.LastError)
				require.Equal(t, codeq.Counts{}, queuetest.CountsOf(t, q, "b"))
			})
		})
	}
}

// TestRefusedFollowUp: output that is refused because a parent is gone makes the attempt fail, with
// the error of Complete.
func TestRefusedFollowUp(t *testing.T) {
	for _, shards := range []int{1, 3} {
		synctest.Test(t, func(t *testing.T) {
			q := queuetest.OpenForRun(t, codeq.Options{Shards: shards, MaxAttempts: 2})
			gone := queuetest.Produce(t, q, codeq.Task{Queue: "gone"})[0]
			require.NoError(t, q.Cancel(t.Context(), gone))
			var m codeq.Mux
			codeq.Handle(&m, "a", func(_ context.Context, j *codeq.Job[[]byte]) error {
				j.FollowUp(codeq.Task{Queue: "b"}, codeq.Task{Queue: "b", After: []codeq.ID{gone}, OnMissing: codeq.RefuseOnMissing})
				return nil
			})
			run := startRun(t, q, &m, codeq.RunOptions{})
			id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
			time.Sleep(time.Hour)
			synctest.Wait()
			got := queuetest.InfoOf(t, q, id)
			require.Equal(t, codeq.Dead, got.State)
			require.Equal(t, 2, got.Attempts)
			require.Len(t, run.Reported(), 2)
			for _, err := range run.Reported() {
				require.ErrorIs(t, err, codeq.ErrNotFound)
				requirePrefix(t, "a follow-up", err)
				require.Equal(t, got.LastError, err.Error())
			}
			require.Equal(t, codeq.Counts{}, queuetest.CountsOf(t, q, "b"))
		})
	}
}

// TestHeartbeat: handlers that run for many lengths of a lease keep their tasks, without any
// writes.
func TestHeartbeat(t *testing.T) {
	t.Parallel()
	for _, shards := range []int{1, 3} {
		synctest.Test(t, func(t *testing.T) {
			q := queuetest.OpenForRun(t, codeq.Options{Shards: shards})
			calls := newCallRecorder()
			var m codeq.Mux
			codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
				calls.add(j.Lease)
				assert.Equal(t, time.Now().UTC().Add(time.Second), j.Deadline)
				time.Sleep(20 * time.Minute)
				return ctx.Err()
			})
			run := startRun(t, q, &m, codeq.RunOptions{LeaseFor: time.Second, Concurrency: 9})
			queuetest.Produce(t, q, slices.Repeat([]codeq.Task{{Queue: "a", LeaseFor: 10 * time.Millisecond}}, 8)...)
			synctest.Wait()
			commits := inspect.Of(q).Commits()
			time.Sleep(19 * time.Minute)
			synctest.Wait()
			require.Equal(t, codeq.Counts{Leased: 8}, queuetest.CountsOf(t, q, "a"))
			require.Equal(t, commits, inspect.Of(q).Commits())
			time.Sleep(time.Minute)
			synctest.Wait()
			require.Equal(t, codeq.Counts{}, queuetest.CountsOf(t, q, "a"))
			require.Len(t, calls.all(), 8)
			require.Empty(t, run.Reported())

			// The renewer, which has rested, goes on for a task that comes late.
			time.Sleep(time.Hour)
			queuetest.Produce(t, q, codeq.Task{Queue: "a"})
			time.Sleep(time.Minute)
			require.Equal(t, codeq.Counts{Leased: 1}, queuetest.CountsOf(t, q, "a"))
			time.Sleep(time.Hour)
			require.Len(t, calls.all(), 9)
			require.Empty(t, run.Reported())
		})
	}
}

// TestHeartbeatOfStaggeredTasks: leases last, at whichever moment between two renewals they begin.
func TestHeartbeatOfStaggeredTasks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{})
		var m codeq.Mux
		codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			time.Sleep(time.Duration(1+j.ID[15]%20) * 100 * time.Millisecond)
			return ctx.Err()
		})
		run := startRun(t, q, &m, codeq.RunOptions{LeaseFor: 300 * time.Millisecond, Concurrency: 3})
		for range 200 {
			queuetest.Produce(t, q, codeq.Task{Queue: "a"})
			time.Sleep(130 * time.Millisecond)
		}
		time.Sleep(time.Hour)
		require.Empty(t, run.Reported())
		require.Equal(t, codeq.Counts{}, queuetest.CountsOf(t, q, "a"))
	})
}

// TestLeaseLostToHandler: when a handler loses its lease, its context ends, and its later result
// has no effect.
func TestLeaseLostToHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Retention: time.Hour})
		var m codeq.Mux
		calls := newCallRecorder()
		var told time.Duration
		var cause error
		codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			if calls.add(j.Lease) == 1 {
				<-ctx.Done()
				told, cause = time.Since(calls.start), context.Cause(ctx)
				j.FollowUp(codeq.Task{Queue: "b"})
			}
			return nil
		})
		run := startRun(t, q, &m, codeq.RunOptions{LeaseFor: 30 * time.Second})
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		time.Sleep(time.Minute)
		synctest.Wait()
		queuetest.LoseLease(t, q, id)
		time.Sleep(time.Minute)
		synctest.Wait()

		require.ErrorIs(t, cause, codeq.ErrLeaseLost)
		require.LessOrEqual(t, told, 70*time.Second, "a heartbeat comes every 10 s")
		require.Equal(t, []handlerCall{
			{0, id, "a", 1, ""},
			{time.Minute, id, "a", 2, "lease expired"},
		}, calls.all())
		reports := run.Reported()
		require.Len(t, reports, 1)
		require.ErrorIs(t, reports[0], codeq.ErrLeaseLost)
		require.Equal(t, codeq.Counts{Done: 1}, queuetest.CountsOf(t, q, "a"))
		require.Equal(t, codeq.Counts{}, queuetest.CountsOf(t, q, "b"))
		require.Equal(t, 2, queuetest.InfoOf(t, q, id).Attempts)
	})
}

// TestLeaseLostAtTheEnd: a handler ends after the loss of its lease, but before its context says
// so. Any outcome of this handler is refused.
func TestLeaseLostAtTheEnd(t *testing.T) {
	boom := errors.New("boom")
	for name, verdict := range map[string]error{"completed": nil, "failed": boom, "snoozed": codeq.Snooze(time.Hour)} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := queuetest.OpenForRun(t, codeq.Options{})
				var m codeq.Mux
				step := make(chan struct{})
				codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
					if j.Attempt == 2 {
						return untilCancelled(ctx, j)
					}
					<-step
					j.FollowUp(codeq.Task{Queue: "b"})
					return verdict
				})
				run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 2, Grace: -1})
				id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
				synctest.Wait()
				queuetest.LoseLease(t, q, id)
				close(step)
				synctest.Wait()
				reports := run.Reported()
				require.NotEmpty(t, reports)
				require.ErrorIs(t, reports[len(reports)-1], codeq.ErrLeaseLost)
				got := queuetest.InfoOf(t, q, id)
				require.Equal(t, codeq.Leased, got.State)
				require.Equal(t, 2, got.Attempts)
				require.Equal(t, "lease expired", got.LastError)
				require.Equal(t, codeq.Counts{}, queuetest.CountsOf(t, q, "b"))
			})
		})
	}
}

// TestTimeout: a handler has no more time than the Timeout of its task.
func TestTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Retention: codeq.Forever})
		var m codeq.Mux
		calls := newCallRecorder()
		codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			nth := calls.add(j.Lease)
			deadline, ok := ctx.Deadline()
			assert.True(t, ok)
			assert.Equal(t, 5*time.Second, time.Until(deadline))
			if nth == 2 {
				return nil
			}
			<-ctx.Done()
			assert.Equal(t, context.DeadlineExceeded, ctx.Err())
			assert.Equal(t, context.DeadlineExceeded, context.Cause(ctx))
			return ctx.Err()
		})
		codeq.Handle(&m, "unbounded", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
			_, ok := ctx.Deadline()
			assert.False(t, ok)
			time.Sleep(time.Hour)
			return ctx.Err()
		})
		run := startRun(t, q, &m, codeq.RunOptions{})
		ids := queuetest.Produce(t, q, codeq.Task{Queue: "a", Timeout: 5 * time.Second}, codeq.Task{Queue: "unbounded"})
		time.Sleep(5 * time.Second)
		synctest.Wait()
		got := queuetest.InfoOf(t, q, ids[0])
		require.Equal(t, codeq.Scheduled, got.State)
		require.Equal(t, 1, got.Attempts)
		require.Equal(t, context.DeadlineExceeded.Error(), got.LastError)
		require.Equal(t, []error{context.DeadlineExceeded}, run.Reported())
		time.Sleep(2 * time.Hour)
		synctest.Wait()
		require.Equal(t, codeq.Done, queuetest.InfoOf(t, q, ids[0]).State)
		require.Equal(t, codeq.Done, queuetest.InfoOf(t, q, ids[1]).State)
		require.Equal(t, []handlerCall{
			{0, ids[0], "a", 1, ""},
			{6 * time.Second, ids[0], "a", 2, context.DeadlineExceeded.Error()},
		}, calls.all())
	})
}

// TestRunKeepsOptions: Run does not write to the options of its caller.
func TestRunKeepsOptions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{})
		var m codeq.Mux
		codeq.Handle(&m, "a", untilCancelled)
		codeq.Handle(&m, "b", untilCancelled)
		weights := map[string]int{}
		opts := codeq.RunOptions{Weights: weights}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		require.NoError(t, q.Run(ctx, &m, &opts))
		require.Empty(t, weights)
		require.Zero(t, opts.Concurrency)
		require.Empty(t, opts.Queues)
	})
}

// TestValuesReachHandlers: handlers see the values of Run's ctx, but not its end.
func TestValuesReachHandlers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{})
		type key struct{}
		ctx, cancel := context.WithTimeout(context.WithValue(t.Context(), key{}, "value"), time.Second)
		defer cancel()
		var m codeq.Mux
		codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			assert.Equal(t, "value", ctx.Value(key{}))
			_, bounded := ctx.Deadline()
			assert.False(t, bounded)
			assert.Equal(t, map[string]string{"h": "v"}, j.Headers)
			time.Sleep(5 * time.Second)
			assert.NoError(t, ctx.Err())
			return nil
		})
		queuetest.Produce(t, q, codeq.Task{Queue: "a", Headers: map[string]string{"h": "v"}})
		require.NoError(t, q.Run(ctx, &m, nil))
		require.Equal(t, codeq.Counts{}, queuetest.CountsOf(t, q, "a"))
	})
}

// TestOutputOfHandler: results and follow-ups are stored with the completion,
// and are dropped when the handler fails.
func TestOutputOfHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Shards: 3, Retention: time.Hour})
		var m codeq.Mux
		codeq.Handle(&m, "a", func(_ context.Context, j *codeq.Job[[]byte]) error {
			if j.Attempt < 3 {
				j.SetResult([]byte("of a failed attempt"))
				j.FollowUp(codeq.Task{Queue: "b", Payload: []byte("of a failed attempt")})
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
			j.FollowUp(codeq.Task{Queue: "b", Payload: []byte("1")})
			j.FollowUp(codeq.Task{Queue: "b", Payload: []byte("2")}, codeq.Task{Queue: "c", Payload: []byte("3"), RunAt: time.Now().Add(time.Hour)})
			return nil
		})
		startRun(t, q, &m, codeq.RunOptions{})
		ids := queuetest.Produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a", Payload: []byte("silent")})
		time.Sleep(time.Minute)
		synctest.Wait()
		for i, want := range []string{"result", ""} {
			got := queuetest.InfoOf(t, q, ids[i])
			require.Equal(t, codeq.Done, got.State)
			require.Equal(t, want, string(got.Result))
		}
		require.Equal(t, codeq.Counts{Scheduled: 1}, queuetest.CountsOf(t, q, "c"))
		require.Equal(t, codeq.Counts{Ready: 2}, queuetest.CountsOf(t, q, "b"))
		var payloads []string
		for task, err := range q.List(t.Context(), codeq.ListOptions{State: codeq.Ready}) {
			require.NoError(t, err)
			require.Equal(t, queuetest.ShardOf(ids[0], 3), queuetest.ShardOf(task.ID, 3), "follow-ups lie beside their parent")
			payloads = append(payloads, string(task.Payload))
		}
		require.Equal(t, []string{"1", "2"}, payloads)
		require.NoError(t, queuetest.CheckAll(q))
	})
}

// TestRefusedRuns: Run refuses impossible options before it begins.
func TestRefusedRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{})
		var m, empty codeq.Mux
		codeq.Handle(&m, "a", untilCancelled)
		codeq.Handle(&m, "b", untilCancelled)
		queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		ended, cancel := context.WithCancel(t.Context())
		cancel() // Run returns even if it does not refuse
		for _, tc := range []struct {
			mux   *codeq.Mux
			opts  codeq.RunOptions
			want  error
			field string
		}{
			{nil, codeq.RunOptions{}, codeq.ErrNoHandler, ""},
			{&empty, codeq.RunOptions{}, codeq.ErrNoHandler, ""},
			{&empty, codeq.RunOptions{Queues: []string{"a"}}, codeq.ErrNoHandler, ""},
			{&m, codeq.RunOptions{Queues: []string{"a", "z"}}, codeq.ErrNoHandler, ""},
			{&m, codeq.RunOptions{Concurrency: 1_000_001}, codeq.ErrInvalid, "RunOptions.Concurrency"},
			{&m, codeq.RunOptions{Concurrency: -1}, codeq.ErrInvalid, "RunOptions.Concurrency"},
			{&m, codeq.RunOptions{LeaseFor: shortestLease - 1}, codeq.ErrInvalid, "RunOptions.LeaseFor"},
			{&m, codeq.RunOptions{LeaseFor: -time.Second}, codeq.ErrInvalid, "RunOptions.LeaseFor"},
			{&m, codeq.RunOptions{LeaseFor: longestLease + 1}, codeq.ErrInvalid, "RunOptions.LeaseFor"},
			{&m, codeq.RunOptions{Queues: []string{"a", "b"}, Weights: map[string]int{"z": 1}}, codeq.ErrInvalid, "RunOptions.Weights"},
			{&m, codeq.RunOptions{Queues: []string{"a", "b"}, Weights: map[string]int{"b": 0}}, codeq.ErrInvalid, "RunOptions.Weights of b"},
			{&m, codeq.RunOptions{Queues: []string{"a", "b"}, Weights: map[string]int{"b": -2}}, codeq.ErrInvalid, "RunOptions.Weights of b"},
			{&m, codeq.RunOptions{Queues: []string{"a"}, Weights: map[string]int{"a": 1, "b": 2}}, codeq.ErrInvalid, "RunOptions.Weights"},
			{&m, codeq.RunOptions{Queues: []string{"a"}, Weights: map[string]int{"a": -1}}, codeq.ErrInvalid, "RunOptions.Weights of a"},
			{&m, codeq.RunOptions{Weights: map[string]int{"z": 1}}, codeq.ErrInvalid, "RunOptions.Weights"},
			{&m, codeq.RunOptions{Weights: map[string]int{"a": 0}}, codeq.ErrInvalid, "RunOptions.Weights of a"},
		} {
			err := q.Run(ended, tc.mux, &tc.opts)
			require.ErrorIs(t, err, tc.want, "%+v", tc.opts)
			if tc.field != "" {
				var invalid *codeq.InvalidError
				require.ErrorAs(t, err, &invalid)
				require.Equal(t, tc.field, invalid.Field, "%+v", tc.opts)
			}
		}
		require.Equal(t, codeq.Counts{Ready: 1}, queuetest.CountsOf(t, q, "a"))
	})
}

// errorThatPanics panics when it is unwrapped.
type errorThatPanics struct{}

func (errorThatPanics) Error() string { return "panics" }
func (errorThatPanics) Is(error) bool { panic("Is") }
func (errorThatPanics) Unwrap() error { panic("Unwrap") }

// TestVerdictOf: in a middleware, VerdictOf returns the verdict that Run gives an error.
func TestVerdictOf(t *testing.T) {
	boom := errors.New("boom")
	lost := fmt.Errorf("%w: 1", codeq.ErrLeaseLost)
	for _, c := range []struct {
		err  error
		want codeq.Verdict
	}{
		{nil, codeq.VerdictCompleted},
		{boom, codeq.VerdictRetry},
		{context.Canceled, codeq.VerdictRetry},
		{context.DeadlineExceeded, codeq.VerdictRetry},
		{&codeq.PanicError{Value: boom}, codeq.VerdictRetry},
		{errorThatPanics{}, codeq.VerdictRetry},
		{codeq.RetryAfter(0, boom), codeq.VerdictRetryAfter},
		{fmt.Errorf("x: %w", codeq.RetryAfter(time.Hour, nil)), codeq.VerdictRetryAfter},
		{codeq.Snooze(time.Hour), codeq.VerdictReleased},
		{errors.Join(boom, codeq.Snooze(0)), codeq.VerdictReleased},
		{codeq.DeadLetter(nil), codeq.VerdictDeadLetter},
		{fmt.Errorf("x: %w", codeq.DeadLetter(boom)), codeq.VerdictDeadLetter},
		{codeq.DeadLetter(lost), codeq.VerdictDeadLetter},
		{lost, codeq.VerdictLeaseLost},
		{errors.Join(lost, codeq.ErrCanceled), codeq.VerdictCanceled},
		{fmt.Errorf("x: %w", codeq.ErrCanceled), codeq.VerdictCanceled},
	} {
		require.Equal(t, c.want, codeq.VerdictOf(c.err), "%v", c.err)
	}

	// The verdict for a task that is canceled while its handler runs.
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{})
		seen := make(chan [2]codeq.Verdict, 1)
		var m codeq.Mux
		m.Use(func(next codeq.Handler) codeq.Handler {
			return func(ctx context.Context, l *codeq.Lease) error {
				err := next(ctx, l)
				seen <- [2]codeq.Verdict{codeq.VerdictOf(err), codeq.VerdictOf(context.Cause(ctx))}
				return err
			}
		})
		codeq.Handle(&m, "a", untilCancelled)
		run := startRun(t, q, &m, codeq.RunOptions{})
		for _, end := range []struct {
			do   func(codeq.ID)
			want codeq.Verdict
		}{
			{func(id codeq.ID) { require.NoError(t, q.Cancel(t.Context(), id)) }, codeq.VerdictCanceled},
			{func(id codeq.ID) { queuetest.LoseLease(t, q, id) }, codeq.VerdictLeaseLost},
		} {
			id := queuetest.Produce(t, q, codeq.Task{Queue: "a", MaxAttempts: 1})[0]
			synctest.Wait()
			end.do(id)
			require.Equal(t, [2]codeq.Verdict{codeq.VerdictRetry, end.want}, <-seen)
		}
		require.NoError(t, run.End(nil))
	})
}
