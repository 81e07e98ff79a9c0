package codeq_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/offline"
	"codeq/internal/testkit"
)

// handlerCall is what a handler has seen.
type handlerCall struct {
	after     time.Duration // since the recorder was made
	id        codeq.ID
	queue     string
	attempt   int
	lastError string
}

// callRecorder keeps what handlers have seen, in order.
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
	reports []error    // what OnError was told
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

// End ends the context of Run and returns what Run returns.
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

// untilCancelled is a handler that is slow and obedient.
func untilCancelled(ctx context.Context, _ *codeq.Job[[]byte]) error {
	<-ctx.Done()
	return ctx.Err()
}

// TestVerdicts: what a handler returns decides what becomes of its task.
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
				q := openForRun(t, codeq.Options{Retention: time.Hour, Backoff: codeq.Backoff{Base: 8 * time.Second}})
				calls := newCallRecorder()
				var m codeq.Mux
				codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
					if calls.add(j.Lease) == 1 {
						return tc.verdict
					}
					return untilCancelled(ctx, j)
				})
				run := startRun(t, q, &m, codeq.RunOptions{Grace: -1})
				id := produce(t, q, codeq.Task{Queue: "a"})[0]
				synctest.Wait()

				got := infoOf(t, q, id)
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
		q := openForRun(t, codeq.Options{Backoff: codeq.Backoff{Base: time.Second, Max: 5 * time.Second, Factor: 3}})
		calls := newCallRecorder()
		var m codeq.Mux
		codeq.Handle(&m, "a", func(_ context.Context, j *codeq.Job[[]byte]) error {
			calls.add(j.Lease)
			return fmt.Errorf("attempt %d", j.Attempt)
		})
		run := startRun(t, q, &m, codeq.RunOptions{})
		id := produce(t, q, codeq.Task{Queue: "a", MaxAttempts: 5})[0]
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
		require.Equal(t, codeq.Dead, infoOf(t, q, id).State)
		require.Len(t, run.Reported(), 5)
	})
}

// TestPanic: a panic is an error that counts, and says where it came from.
func TestPanic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, codeq.Options{Retention: time.Hour})
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
		id := produce(t, q, codeq.Task{Queue: "a"})[0]
		synctest.Wait()
		got := infoOf(t, q, id)
		require.Equal(t, codeq.Scheduled, got.State)
		require.Equal(t, 1, got.Attempts)
		require.True(t, strings.HasPrefix(got.LastError, "panic: kaboom\n"), got.LastError)
		require.Contains(t, got.LastError, "panicOfTest")
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Equal(t, codeq.Done, infoOf(t, q, id).State)
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
			require.Contains(t, string(p.Stack), "run_api_test.go")
		}
		require.ErrorIs(t, reports[1], io.ErrUnexpectedEOF)
		var fault runtime.Error
		require.ErrorAs(t, reports[2], &fault)
	})
}

//go:noinline
func panicOfTest(v any) { panic(v) }

// TestGoexit: a handler that ends its goroutine has failed, and costs no worker.
func TestGoexit(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, codeq.Options{Retention: time.Hour})
		var m codeq.Mux
		codeq.Handle(&m, "a", func(_ context.Context, j *codeq.Job[[]byte]) error {
			if j.Attempt < 4 {
				runtime.Goexit()
			}
			return nil
		})
		run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 1})
		id := produce(t, q, codeq.Task{Queue: "a"})[0]
		synctest.Wait()
		got := infoOf(t, q, id)
		require.Equal(t, codeq.Scheduled, got.State)
		require.Equal(t, 1, got.Attempts)
		require.NotEmpty(t, got.LastError)
		time.Sleep(time.Minute)
		synctest.Wait()
		require.Equal(t, codeq.Done, infoOf(t, q, id).State)
		require.Len(t, run.Reported(), 3)
		require.NoError(t, run.End(nil))
		require.Zero(t, run.Took)
	})
}

// TestOutOfAttempts: whatever way an attempt fails, if it counts and was the
// last, the task becomes a dead letter.
func TestOutOfAttempts(t *testing.T) {
	boom := errors.New("boom")
	for name, fail := range map[string]func() error{
		"error":       func() error { return boom },
		"retry after": func() error { return codeq.RetryAfter(time.Second, boom) },
		"panic":       func() error { panic(boom) },
	} {
		for byTask, max := range map[bool]int{false: 3, true: 2} {
			t.Run(fmt.Sprintf("%s, by task %t", name, byTask), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					q := openForRun(t, codeq.Options{MaxAttempts: 3})
					var m codeq.Mux
					calls := newCallRecorder()
					codeq.Handle(&m, "a", func(_ context.Context, j *codeq.Job[[]byte]) error {
						if calls.add(j.Lease) == 1 {
							return codeq.Snooze(time.Second) // does not count
						}
						return fail()
					})
					startRun(t, q, &m, codeq.RunOptions{})
					task := codeq.Task{Queue: "a"}
					if byTask {
						task.MaxAttempts = max
					}
					id := produce(t, q, task)[0]
					time.Sleep(time.Hour)
					synctest.Wait()
					got := infoOf(t, q, id)
					require.Equal(t, codeq.Dead, got.State)
					require.Equal(t, max, got.Attempts)
					require.Contains(t, got.LastError, "boom")
					require.Len(t, calls.all(), 1+max)
					require.Equal(t, codeq.Counts{Dead: 1}, countsOf(t, q, "a"))
				})
			})
		}
	}
}

// TestPayloads: Args is the payload, decoded unless it is asked for as bytes.
func TestPayloads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, codeq.Options{})
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
		produce(t, q,
			codeq.Task{Queue: "json", Payload: []byte(`{"Name":"x","List":[1,2]}`)},
			codeq.Task{Queue: "json", Payload: []byte(`{}`)}) // nothing of the task before is left
		synctest.Wait()
		produce(t, q, codeq.Task{Queue: "pointer", Payload: []byte(`{"Name":"p"}`)})
		produce(t, q, codeq.Task{Queue: "bytes", Payload: []byte("\x00{not json")})
		produce(t, q, codeq.Task{Queue: "raw", Payload: []byte(`[1]`)})
		synctest.Wait()
		require.Empty(t, run.Reported())
		require.Equal(t, []args{{"x", []int{1, 2}}, {}, {Name: "p"}}, gotArgs)
		require.Equal(t, [][]byte{[]byte("\x00{not json")}, gotBytes)
		require.Equal(t, []json.RawMessage{json.RawMessage(`[1]`)}, gotRaw)

		for i, payload := range []string{`{"Name":`, `{"Name":7}`, "{} {}"} {
			id := produce(t, q, codeq.Task{Queue: "json", Payload: []byte(payload)})[0]
			synctest.Wait()
			got := infoOf(t, q, id)
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

// TestFollowUpIsHandled: a chain of follow-ups runs to its end.
func TestFollowUpIsHandled(t *testing.T) {
	for _, shards := range []int{1, 3} {
		synctest.Test(t, func(t *testing.T) {
			q := openForRun(t, codeq.Options{Shards: shards})
			var m codeq.Mux
			var handled atomic.Int64
			codeq.Handle(&m, "a", func(_ context.Context, j *codeq.Job[int]) error {
				handled.Add(1)
				for range 2 {
					if j.Args > 0 {
						j.FollowUp(codeq.Task{Queue: "a", Payload: []byte(fmt.Sprint(j.Args - 1))})
					}
				}
				return nil
			})
			startRun(t, q, &m, codeq.RunOptions{Concurrency: 5})
			produce(t, q, codeq.Task{Queue: "a", Payload: []byte("7")})
			synctest.Wait()
			require.EqualValues(t, 1<<8-1, handled.Load())
			require.Equal(t, codeq.Counts{}, countsOf(t, q, "a"))
		})
	}
}

// TestOutputBeyondLimits: a task whose handler wants to have stored what can
// never be is a dead letter, and nothing of it is stored.
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
				q := openForRun(t, codeq.Options{
					Retention: time.Hour,
					Limits:    codeq.Limits{Payload: 10, Batch: 3, BatchBytes: 20},
				})
				var m codeq.Mux
				codeq.Handle(&m, "a", func(_ context.Context, j *codeq.Job[[]byte]) error {
					output(j)
					return nil
				})
				run := startRun(t, q, &m, codeq.RunOptions{})
				id := produce(t, q, codeq.Task{Queue: "a"})[0]
				synctest.Wait()
				got := infoOf(t, q, id)
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
				require.Equal(t, codeq.Counts{}, countsOf(t, q, "b"))
			})
		})
	}
}

// TestRefusedFollowUp: output that is refused since a parent is gone is a failed attempt, whose
// error is that of Complete.
func TestRefusedFollowUp(t *testing.T) {
	for _, shards := range []int{1, 3} {
		synctest.Test(t, func(t *testing.T) {
			q := openForRun(t, codeq.Options{Shards: shards, MaxAttempts: 2})
			gone := produce(t, q, codeq.Task{Queue: "gone"})[0]
			require.NoError(t, q.Cancel(t.Context(), gone))
			var m codeq.Mux
			codeq.Handle(&m, "a", func(_ context.Context, j *codeq.Job[[]byte]) error {
				j.FollowUp(codeq.Task{Queue: "b"}, codeq.Task{Queue: "b", After: []codeq.ID{gone}, OnMissing: codeq.RefuseOnMissing})
				return nil
			})
			run := startRun(t, q, &m, codeq.RunOptions{})
			id := produce(t, q, codeq.Task{Queue: "a"})[0]
			time.Sleep(time.Hour)
			synctest.Wait()
			got := infoOf(t, q, id)
			require.Equal(t, codeq.Dead, got.State)
			require.Equal(t, 2, got.Attempts)
			require.Len(t, run.Reported(), 2)
			for _, err := range run.Reported() {
				require.ErrorIs(t, err, codeq.ErrNotFound)
				requirePrefix(t, "a follow-up", err)
				require.Equal(t, got.LastError, err.Error())
			}
			require.Equal(t, codeq.Counts{}, countsOf(t, q, "b"))
		})
	}
}

// orderOfRun produces tasks in the queues a, b and c and returns the order in
// which a Run with one worker takes them.
func orderOfRun(t *testing.T, each int, opts codeq.RunOptions) (order []string) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, codeq.Options{})
		var m codeq.Mux
		for _, name := range []string{"c", "a", "b"} {
			codeq.Handle(&m, name, func(_ context.Context, j *codeq.Job[[]byte]) error {
				order = append(order, j.Queue)
				return nil
			})
			_, err := q.ProduceBatch(t.Context(), slices.Repeat([]codeq.Task{{Queue: name}}, each))
			require.NoError(t, err)
		}
		opts.Concurrency = 1
		run := startRun(t, q, &m, opts)
		synctest.Wait()
		require.NoError(t, run.End(nil))
	})
	return order
}

func occurrences(order []string, name string) (n int) {
	for _, o := range order {
		if o == name {
			n++
		}
	}
	return n
}

// TestShareOfQueues: several queues are worked on equally, in strict order, or
// in proportion to weights. The bounds are six standard deviations wide.
func TestShareOfQueues(t *testing.T) {
	t.Run("equal by default", func(t *testing.T) {
		order := orderOfRun(t, 400, codeq.RunOptions{})
		require.Len(t, order, 1200)
		for _, name := range []string{"a", "b", "c"} {
			require.InDelta(t, 200, occurrences(order[:600], name), 70, name)
		}
	})
	t.Run("strict", func(t *testing.T) {
		order := orderOfRun(t, 20, codeq.RunOptions{Queues: []string{"b", "c", "a"}})
		want := slices.Concat(
			slices.Repeat([]string{"b"}, 20), slices.Repeat([]string{"c"}, 20), slices.Repeat([]string{"a"}, 20))
		require.Equal(t, want, order)
	})
	t.Run("some of the mux", func(t *testing.T) {
		order := orderOfRun(t, 5, codeq.RunOptions{Queues: []string{"b"}})
		require.Equal(t, slices.Repeat([]string{"b"}, 5), order)
	})
	t.Run("weights", func(t *testing.T) {
		order := orderOfRun(t, 400, codeq.RunOptions{Queues: []string{"a", "b", "c"}, Weights: map[string]int{"a": 6, "b": 3}})
		require.Len(t, order, 1200)
		require.InDelta(t, 300, occurrences(order[:500], "a"), 66)
		require.InDelta(t, 150, occurrences(order[:500], "b"), 62)
		require.InDelta(t, 50, occurrences(order[:500], "c"), 41)
	})
	t.Run("weights of all queues", func(t *testing.T) {
		order := orderOfRun(t, 400, codeq.RunOptions{Weights: map[string]int{"a": 6, "b": 3}})
		require.Len(t, order, 1200)
		require.InDelta(t, 300, occurrences(order[:500], "a"), 66)
		require.InDelta(t, 150, occurrences(order[:500], "b"), 62)
		require.InDelta(t, 50, occurrences(order[:500], "c"), 41)
	})
}

// TestSharesOverShards: the shares of queues are those of their weights, however their tasks lie in
// the shards, also while another one is paused. The bounds are six standard deviations wide.
func TestSharesOverShards(t *testing.T) {
	for _, more := range []int{0, 20, 1000} { // with them, the list is a long one
		t.Run(fmt.Sprint(more, " more queues"), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := openForRun(t, codeq.Options{Shards: 4})
				req := codeq.ClaimRequest{Queues: []string{"critical", "paused", "bulk"}, Weights: map[string]int{"critical": 9, "paused": 5}, NoWait: true}
				for n := range more {
					req.Queues = append(req.Queues, fmt.Sprint("idle", n))
				}
				require.NoError(t, q.Pause(t.Context(), "paused"))
				_, err := q.ProduceBatch(t.Context(), slices.Repeat([]codeq.Task{{Queue: "critical"}}, 700)) // in one shard
				require.NoError(t, err)
				for shard := range 4 {
					produce(t, startingAt(q, shard), slices.Repeat([]codeq.Task{{Queue: "paused"}, {Queue: "bulk"}}, 300)...)
				}
				counts := make(map[string]int)
				for range 600 {
					l, err := q.Claim(t.Context(), req)
					require.NoError(t, err)
					counts[l.Queue]++
					require.NoError(t, q.Complete(t.Context(), l.Receipt, nil))
				}
				require.InDelta(t, 540, counts["critical"], 44, "%v", counts)
				require.Equal(t, 600, counts["critical"]+counts["bulk"])
			})
		})
	}
}

// TestSharesOfLongRun: a Run of many queues, few of them with tasks, works on these in proportion
// to their weights, however their tasks lie in the shards.
func TestSharesOfLongRun(t *testing.T) {
	t.Parallel()
	for _, queues := range []int{10, 1000} {
		t.Run(fmt.Sprint(queues, " queues"), func(t *testing.T) {
			bubble(t, codeq.Options{Shards: 4}, func(t *testing.T, q *codeq.Queue) {
				_, err := q.ProduceBatch(t.Context(), slices.Repeat([]codeq.Task{{Queue: "heavy"}}, 1000)) // in one shard
				require.NoError(t, err)
				for shard := range 4 {
					produce(t, startingAt(q, shard), slices.Repeat([]codeq.Task{{Queue: "light"}}, 250)...)
				}
				const most = 800
				var handled, heavy atomic.Int64
				ctx, cancel := context.WithCancel(t.Context())
				var m codeq.Mux
				handle := func(_ context.Context, j *codeq.Job[[]byte]) error {
					time.Sleep(time.Second)
					if n := handled.Add(1); n == most {
						cancel()
					} else if n < most && j.Queue == "heavy" {
						heavy.Add(1)
					}
					return nil
				}
				codeq.Handle(&m, "heavy", handle)
				codeq.Handle(&m, "light", handle)
				for n := range queues - 2 {
					codeq.Handle(&m, fmt.Sprint("idle", n), handle)
				}
				require.NoError(t, q.Run(ctx, &m, &codeq.RunOptions{Concurrency: 4, Weights: map[string]int{"heavy": 9}}))
				require.InDelta(t, most*9/10, heavy.Load(), 6*math.Sqrt(most*.09))
			})
		})
	}
}

// TestSharesBehindLimits: claims get the places that are free by the weights of the queues, however
// their tasks lie in the shards, if the limits of both keep claims from them now and then.
func TestSharesBehindLimits(t *testing.T) {
	for _, more := range []int{0, 20} { // with them, the list is a long one
		t.Run(fmt.Sprint(more, " more queues"), func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				q := openForRun(t, codeq.Options{Shards: 4})
				req := codeq.ClaimRequest{Queues: []string{"critical", "bulk"}, Weights: map[string]int{"critical": 9}}
				for n := range more {
					req.Queues = append(req.Queues, fmt.Sprint("idle", n))
				}
				for _, name := range req.Queues[:2] {
					configure(t, q, name, func(s *codeq.Settings) { s.Concurrency = 5 })
				}
				_, err := q.ProduceBatch(t.Context(), slices.Repeat([]codeq.Task{{Queue: "critical"}}, 3200)) // in one shard
				require.NoError(t, err)
				for shard := range 4 {
					produce(t, startingAt(q, shard), slices.Repeat([]codeq.Task{{Queue: "bulk"}}, 800)...)
				}
				const claims = 3000
				var made, critical atomic.Int64
				var workers sync.WaitGroup
				for range 6 {
					workers.Go(func() {
						for made.Add(1) <= claims {
							l, err := q.Claim(t.Context(), req)
							require.NoError(t, err)
							if l.Queue == "critical" {
								critical.Add(1)
							}
							time.Sleep(time.Duration(rand.ExpFloat64() * float64(time.Millisecond)))
							require.NoError(t, q.Complete(t.Context(), l.Receipt, nil))
						}
					})
				}
				workers.Wait()
				// Of six tasks at work, 5, 4 or 3 are critical with the probabilities 0.757,
				// 0.210 and 0.031, if a claim takes a critical one nine times of ten while
				// both have places.
				require.InDelta(t, claims*0.787, critical.Load(), claims*0.04)
			})
		})
	}
}

// TestStrictOrderHolds: a task of an earlier queue overtakes those of a later
// one that wait already.
func TestStrictOrderHolds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, codeq.Options{})
		var m codeq.Mux
		var order []string
		step := make(chan struct{})
		for _, name := range []string{"first", "second"} {
			codeq.Handle(&m, name, func(_ context.Context, j *codeq.Job[[]byte]) error {
				order = append(order, j.Queue)
				<-step
				return nil
			})
		}
		startRun(t, q, &m, codeq.RunOptions{Concurrency: 1, Queues: []string{"first", "second"}})
		produce(t, q, codeq.Task{Queue: "second"}, codeq.Task{Queue: "second"})
		synctest.Wait()
		produce(t, q, codeq.Task{Queue: "first"})
		for range 3 {
			step <- struct{}{}
			synctest.Wait()
		}
		require.Equal(t, []string{"second", "first", "second"}, order)
	})
}

// TestConcurrency: as many handlers run at a time as are allowed, and no more.
func TestConcurrency(t *testing.T) {
	t.Parallel()
	for _, shards := range []int{1, 3} {
		for _, concurrency := range []int{0, 1, 2, 7, 40} {
			for _, batch := range []bool{false, true} {
				t.Run(fmt.Sprintf("%d on %d shards, batch %t", concurrency, shards, batch), func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						q := openForRun(t, codeq.Options{Shards: shards})
						want := concurrency
						if want == 0 {
							want = 4 * runtime.GOMAXPROCS(0)
						}
						total := 3*want + 1
						var m codeq.Mux
						var running, done atomic.Int64
						step := make(chan struct{})
						codeq.Handle(&m, "a", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
							assert.LessOrEqual(t, running.Add(1), int64(want))
							<-step
							running.Add(-1)
							done.Add(1)
							return nil
						})
						run := startRun(t, q, &m, codeq.RunOptions{Concurrency: concurrency})
						tasks := slices.Repeat([]codeq.Task{{Queue: "a"}}, total)
						if batch {
							_, err := q.ProduceBatch(t.Context(), tasks)
							require.NoError(t, err)
						} else {
							produce(t, q, tasks...)
						}
						for left := total; left > 0; left-- {
							synctest.Wait()
							require.EqualValues(t, min(left, want), running.Load(), "with %d tasks left", left)
							require.EqualValues(t, min(left, want), countsOf(t, q, "a").Leased,
								"nothing is claimed for which no worker is free")
							step <- struct{}{}
						}
						synctest.Wait()
						require.NoError(t, run.End(nil))
						require.EqualValues(t, total, done.Load())
						require.Equal(t, codeq.Counts{}, countsOf(t, q, "a"))
					})
				})
			}
		}
	}
}

// TestTwoRuns: several calls of Run share a queue, and each task is handled once.
func TestTwoRuns(t *testing.T) {
	for _, shards := range []int{1, 3} {
		synctest.Test(t, func(t *testing.T) {
			q := openForRun(t, codeq.Options{Shards: shards})
			seen := newCallRecorder()
			step := make(chan struct{})
			var runs [2]*activeRun
			var running [2]atomic.Int64
			for i := range runs {
				var m codeq.Mux
				codeq.Handle(&m, "a", func(_ context.Context, j *codeq.Job[[]byte]) error {
					seen.add(j.Lease)
					running[i].Add(1)
					defer running[i].Add(-1)
					<-step
					return nil
				})
				runs[i] = startRun(t, q, &m, codeq.RunOptions{Concurrency: 3})
			}
			produce(t, q, slices.Repeat([]codeq.Task{{Queue: "a"}}, 50)...)
			synctest.Wait()
			require.EqualValues(t, 3, running[0].Load())
			require.EqualValues(t, 3, running[1].Load())
			for range 20 {
				step <- struct{}{}
			}
			synctest.Wait()
			ended := make(chan error)
			go func() { ended <- runs[0].End(nil) }()
			close(step)
			require.NoError(t, <-ended)
			synctest.Wait()
			require.NoError(t, runs[1].End(nil))
			ids := make(map[codeq.ID]bool)
			for _, c := range seen.all() {
				require.False(t, ids[c.id], "a task is handled twice")
				require.Equal(t, 1, c.attempt)
				ids[c.id] = true
			}
			require.Len(t, ids, 50)
		})
	}
}

// TestHeartbeat: handlers that run for many lengths of a lease keep their
// tasks, and nothing is written for it.
func TestHeartbeat(t *testing.T) {
	t.Parallel()
	for _, shards := range []int{1, 3} {
		synctest.Test(t, func(t *testing.T) {
			q := openForRun(t, codeq.Options{Shards: shards})
			calls := newCallRecorder()
			var m codeq.Mux
			codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
				calls.add(j.Lease)
				assert.Equal(t, time.Now().UTC().Add(time.Second), j.Deadline)
				time.Sleep(20 * time.Minute)
				return ctx.Err()
			})
			run := startRun(t, q, &m, codeq.RunOptions{LeaseFor: time.Second, Concurrency: 9})
			produce(t, q, slices.Repeat([]codeq.Task{{Queue: "a", LeaseFor: 10 * time.Millisecond}}, 8)...)
			synctest.Wait()
			commits := inspect.Of(q).Commits()
			time.Sleep(19 * time.Minute)
			synctest.Wait()
			require.Equal(t, codeq.Counts{Leased: 8}, countsOf(t, q, "a"))
			require.Equal(t, commits, inspect.Of(q).Commits())
			time.Sleep(time.Minute)
			synctest.Wait()
			require.Equal(t, codeq.Counts{}, countsOf(t, q, "a"))
			require.Len(t, calls.all(), 8)
			require.Empty(t, run.Reported())

			// The renewer, which has rested, goes on for a task that comes late.
			time.Sleep(time.Hour)
			produce(t, q, codeq.Task{Queue: "a"})
			time.Sleep(time.Minute)
			require.Equal(t, codeq.Counts{Leased: 1}, countsOf(t, q, "a"))
			time.Sleep(time.Hour)
			require.Len(t, calls.all(), 9)
			require.Empty(t, run.Reported())
		})
	}
}

// TestHeartbeatOfStaggeredTasks: leases last whenever between two
// renewals they begin.
func TestHeartbeatOfStaggeredTasks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, codeq.Options{})
		var m codeq.Mux
		codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			time.Sleep(time.Duration(1+j.ID[15]%20) * 100 * time.Millisecond)
			return ctx.Err()
		})
		run := startRun(t, q, &m, codeq.RunOptions{LeaseFor: 300 * time.Millisecond, Concurrency: 3})
		for range 200 {
			produce(t, q, codeq.Task{Queue: "a"})
			time.Sleep(130 * time.Millisecond)
		}
		time.Sleep(time.Hour)
		require.Empty(t, run.Reported())
		require.Equal(t, codeq.Counts{}, countsOf(t, q, "a"))
	})
}

// TestLeaseLostToHandler: a handler whose lease is lost is told by its
// context, and what it returns is of no consequence.
func TestLeaseLostToHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, codeq.Options{Retention: time.Hour})
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
		id := produce(t, q, codeq.Task{Queue: "a"})[0]
		time.Sleep(time.Minute)
		synctest.Wait()
		loseLease(t, q, id)
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
		require.Equal(t, codeq.Counts{Done: 1}, countsOf(t, q, "a"))
		require.Equal(t, codeq.Counts{}, countsOf(t, q, "b"))
		require.Equal(t, 2, infoOf(t, q, id).Attempts)
	})
}

// TestLeaseLostAtTheEnd: the outcome of a handler that ends before it is told of the
// loss of its lease is refused, whatever it is.
func TestLeaseLostAtTheEnd(t *testing.T) {
	boom := errors.New("boom")
	for name, verdict := range map[string]error{"completed": nil, "failed": boom, "snoozed": codeq.Snooze(time.Hour)} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := openForRun(t, codeq.Options{})
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
				id := produce(t, q, codeq.Task{Queue: "a"})[0]
				synctest.Wait()
				loseLease(t, q, id)
				close(step)
				synctest.Wait()
				reports := run.Reported()
				require.NotEmpty(t, reports)
				require.ErrorIs(t, reports[len(reports)-1], codeq.ErrLeaseLost)
				got := infoOf(t, q, id)
				require.Equal(t, codeq.Leased, got.State)
				require.Equal(t, 2, got.Attempts)
				require.Equal(t, "lease expired", got.LastError)
				require.Equal(t, codeq.Counts{}, countsOf(t, q, "b"))
			})
		})
	}
}

// TestTimeout: a handler has no longer than its task's Timeout.
func TestTimeout(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, codeq.Options{Retention: codeq.Forever})
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
		ids := produce(t, q, codeq.Task{Queue: "a", Timeout: 5 * time.Second}, codeq.Task{Queue: "unbounded"})
		time.Sleep(5 * time.Second)
		synctest.Wait()
		got := infoOf(t, q, ids[0])
		require.Equal(t, codeq.Scheduled, got.State)
		require.Equal(t, 1, got.Attempts)
		require.Equal(t, context.DeadlineExceeded.Error(), got.LastError)
		require.Equal(t, []error{context.DeadlineExceeded}, run.Reported())
		time.Sleep(2 * time.Hour)
		synctest.Wait()
		require.Equal(t, codeq.Done, infoOf(t, q, ids[0]).State)
		require.Equal(t, codeq.Done, infoOf(t, q, ids[1]).State)
		require.Equal(t, []handlerCall{
			{0, ids[0], "a", 1, ""},
			{6 * time.Second, ids[0], "a", 2, context.DeadlineExceeded.Error()},
		}, calls.all())
	})
}

// TestGraceLetsHandlersEnd: when ctx ends nothing more is claimed, and what
// runs is completed.
func TestGraceLetsHandlersEnd(t *testing.T) {
	for _, shards := range []int{1, 3} {
		synctest.Test(t, func(t *testing.T) {
			q := openForRun(t, codeq.Options{Shards: shards, Retention: time.Hour})
			var m codeq.Mux
			codeq.Handle(&m, "a", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
				time.Sleep(10 * time.Second)
				return ctx.Err()
			})
			run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 5, LeaseFor: time.Second})
			produce(t, q, slices.Repeat([]codeq.Task{{Queue: "a"}}, 20)...)
			time.Sleep(time.Second)
			synctest.Wait()
			require.NoError(t, run.End(errors.New("enough")))
			require.Equal(t, 9*time.Second, run.Took)
			require.Equal(t, codeq.Counts{Done: 5, Ready: 15}, countsOf(t, q, "a"))
			require.Empty(t, run.Reported())
		})
	}
}

// TestGraceCountsFailures: an attempt that fails by itself while Run waits
// fails as ever.
func TestGraceCountsFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, codeq.Options{})
		var m codeq.Mux
		codeq.Handle(&m, "a", func(context.Context, *codeq.Job[[]byte]) error {
			time.Sleep(5 * time.Second)
			return errors.New("boom")
		})
		run := startRun(t, q, &m, codeq.RunOptions{})
		id := produce(t, q, codeq.Task{Queue: "a"})[0]
		synctest.Wait()
		require.NoError(t, run.End(nil))
		got := infoOf(t, q, id)
		require.Equal(t, codeq.Scheduled, got.State)
		require.Equal(t, 1, got.Attempts)
		require.Equal(t, "boom", got.LastError)
	})
}

// TestGraceEnds: after the grace period handlers are cancelled, and their
// tasks are given back as if they had never been claimed.
func TestGraceEnds(t *testing.T) {
	enough := errors.New("enough")
	for _, tc := range []struct{ grace, took time.Duration }{
		{0, 10 * time.Second}, {time.Minute, time.Minute}, {-1, 0},
	} {
		for _, shards := range []int{1, 3} {
			t.Run(fmt.Sprintf("%v on %d shards", tc.grace, shards), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					q := openForRun(t, codeq.Options{Shards: shards, Backoff: codeq.Backoff{Base: time.Millisecond}})
					var m codeq.Mux
					var mu sync.Mutex
					var causes []error
					codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
						if j.Attempt == 1 {
							return errors.New("boom") // the attempts of a task are not forgotten
						}
						<-ctx.Done()
						mu.Lock()
						defer mu.Unlock()
						causes = append(causes, context.Cause(ctx))
						j.FollowUp(codeq.Task{Queue: "b"})
						if len(causes) == 1 {
							return nil // comes too late, like any error
						}
						return codeq.DeadLetter(ctx.Err())
					})
					run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 4, Grace: tc.grace, LeaseFor: time.Second})
					first := startingAt(q, shards-1)
					var ids []codeq.ID
					for range 4 {
						ids = append(ids, produce(t, first, codeq.Task{Queue: "a"})...)
						time.Sleep(time.Second)
					}
					ids = append(ids, produce(t, first, codeq.Task{Queue: "a"})...)
					synctest.Wait()
					require.Equal(t, codeq.Counts{Leased: 4, Ready: 1}, countsOf(t, q, "a"))
					require.NoError(t, run.End(enough))
					require.Equal(t, tc.took, run.Took)
					require.Equal(t, []error{enough, enough, enough, enough}, causes)
					require.Len(t, run.Reported(), 4, "of the first attempts only")

					require.Equal(t, codeq.Counts{Ready: 5}, countsOf(t, q, "a"))
					require.Equal(t, codeq.Counts{}, countsOf(t, q, "b"))
					for i, id := range ids {
						l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}, NoWait: true})
						require.NoError(t, err)
						require.Equal(t, id, l.ID, "tasks keep their places")
						if i < 4 {
							require.Equal(t, 2, l.Attempt)
							require.Equal(t, "boom", l.LastError)
						} else {
							require.Equal(t, 1, l.Attempt)
						}
					}
					require.NoError(t, checkAll(q))
				})
			})
		}
	}
}

// TestHandlersRunning: Run does not wait for ever for handlers that ignore
// their context. Their tasks are given back, and what they return later is of
// no consequence.
func TestHandlersRunning(t *testing.T) {
	for _, tc := range []struct{ grace, took time.Duration }{
		{0, 20 * time.Second}, {time.Millisecond, time.Second + time.Millisecond}, {-1, time.Second},
	} {
		t.Run(fmt.Sprint(tc.grace), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := openForRun(t, codeq.Options{Retention: time.Hour})
				var m codeq.Mux
				step := make(chan struct{})
				codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[string]) error {
					switch j.Args {
					case "obedient":
						<-ctx.Done()
					default:
						<-step
					}
					j.FollowUp(codeq.Task{Queue: "b"})
					if j.Args == "fails" {
						return errors.New("boom")
					}
					return nil
				})
				run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 4, Grace: tc.grace})
				for _, kind := range []string{`"obedient"`, `"fails"`, `"completes"`} {
					produce(t, q, codeq.Task{Queue: "a", Payload: []byte(kind)})
				}
				synctest.Wait()
				err := run.End(nil)
				require.ErrorIs(t, err, codeq.ErrHandlersRunning)
				require.ErrorContains(t, err, ": 2")
				require.Equal(t, tc.took, run.Took)
				require.Equal(t, codeq.Counts{Ready: 3}, countsOf(t, q, "a"))
				close(step)
				synctest.Wait()
				require.Equal(t, codeq.Counts{Ready: 3}, countsOf(t, q, "a"))
				require.Equal(t, codeq.Counts{}, countsOf(t, q, "b"))
				require.Empty(t, run.Reported())
			})
		})
	}
}

// TestCloseDuringRun: Close ends Run as the end of its context does.
func TestCloseDuringRun(t *testing.T) {
	for _, shards := range []int{1, 3} {
		synctest.Test(t, func(t *testing.T) {
			disk := crashfs.New()
			opts := *onDisk(disk, &codeq.Options{Shards: shards, Retention: time.Hour})
			q := openForRun(t, opts)
			var m codeq.Mux
			var cause error
			codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[int]) error {
				select {
				case <-ctx.Done():
					cause = context.Cause(ctx)
				case <-time.After(time.Duration(j.Args) * time.Second):
				}
				return ctx.Err()
			})
			busy := startRun(t, q, &m, codeq.RunOptions{Concurrency: 2, LeaseFor: time.Second})
			var idle codeq.Mux
			codeq.Handle(&idle, "idle", untilCancelled)
			waiting := startRun(t, q, &idle, codeq.RunOptions{})
			produce(t, q, codeq.Task{Queue: "a", Payload: []byte("5")}, codeq.Task{Queue: "a", Payload: []byte("20")})
			synctest.Wait()
			start := time.Now()
			require.NoError(t, q.Close())
			require.Equal(t, 10*time.Second, time.Since(start))
			require.ErrorIs(t, waiting.Wait(), codeq.ErrClosed)
			require.ErrorIs(t, busy.Wait(), codeq.ErrClosed)
			require.ErrorIs(t, cause, codeq.ErrClosed)
			require.ErrorIs(t, q.Run(t.Context(), &m, nil), codeq.ErrClosed, "after Close")

			q = openForRun(t, opts)
			require.Equal(t, codeq.Counts{Done: 1, Ready: 1}, countsOf(t, q, "a"))
			l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}})
			require.NoError(t, err)
			require.Equal(t, 1, l.Attempt)
		})
	}
}

// TestRunWithEndedContext: Run does nothing and returns nil.
func TestRunWithEndedContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, codeq.Options{Shards: 3})
		var m codeq.Mux
		codeq.Handle(&m, "a", untilCancelled)
		produce(t, q, codeq.Task{Queue: "a"})
		ctx, cancel := context.WithTimeout(t.Context(), -1)
		defer cancel()
		require.NoError(t, q.Run(ctx, &m, nil))
		require.Equal(t, codeq.Counts{Ready: 1}, countsOf(t, q, "a"))
	})
}

// TestRunKeepsOptions: the caller's options are not written to.
func TestRunKeepsOptions(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, codeq.Options{})
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

// TestValuesReachHandlers: handlers see the values of Run's ctx, and not its end.
func TestValuesReachHandlers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, codeq.Options{})
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
		produce(t, q, codeq.Task{Queue: "a", Headers: map[string]string{"h": "v"}})
		require.NoError(t, q.Run(ctx, &m, nil))
		require.Equal(t, codeq.Counts{}, countsOf(t, q, "a"))
	})
}

// abandonedRun opens the queue on disk, lets Run start its tasks, and returns
// the disk as the end of the process at that moment leaves it.
func abandonedRun(t *testing.T, disk *crashfs.Disk, shards int) (*crashfs.Disk, []handlerCall) {
	t.Helper()
	var crashed *crashfs.Disk
	calls := newCallRecorder()
	t.Run("process", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			q := openForRun(t, *onDisk(disk, &codeq.Options{Shards: shards, Durability: codeq.DurabilityDisk, LeaseFor: time.Hour}))
			var m codeq.Mux
			codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
				calls.add(j.Lease)
				return untilCancelled(ctx, j)
			})
			startRun(t, q, &m, codeq.RunOptions{Grace: -1})
			time.Sleep(time.Minute) // heartbeats renew leases, which no disk shows
			synctest.Wait()
			crashed = disk.CrashClone(vfs.CrashCloneCfg{})
		})
	})
	return crashed, calls.all()
}

// TestAbandonedRun: the leases of a Run whose process is no more are over at
// the next Open, one after the other, and no attempt has counted.
func TestAbandonedRun(t *testing.T) {
	for _, shards := range []int{1, 3} {
		disk := crashfs.New()
		opts := *onDisk(disk, &codeq.Options{Shards: shards, Durability: codeq.DurabilityDisk})
		var ids []codeq.ID
		synctest.Test(t, func(t *testing.T) {
			q := openForRun(t, opts)
			ids = produce(t, q, slices.Repeat([]codeq.Task{{Queue: "a"}}, 5)...)
			// A lease of Claim survives its process, and is there to tell the difference.
			id := produce(t, q, codeq.Task{Queue: "claimed"})[0]
			l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"claimed"}, LeaseFor: 24 * time.Hour})
			require.NoError(t, err)
			require.Equal(t, id, l.ID)
		})
		crashed, calls := abandonedRun(t, disk, shards)
		require.Len(t, calls, 5)
		synctest.Test(t, func(t *testing.T) {
			inspect.Options(&opts).FS = crashed
			q := openForRun(t, opts)
			start := time.Now()
			var again []codeq.ID
			for range ids {
				l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}})
				require.NoError(t, err)
				require.Equal(t, 1, l.Attempt)
				require.Equal(t, "the process died", l.LastError)
				again = append(again, l.ID)
				require.NoError(t, q.Complete(t.Context(), l.Receipt, nil))
			}
			require.Zero(t, time.Since(start), "nothing but the others delays them")
			require.ElementsMatch(t, ids, again)
			require.Equal(t, codeq.Counts{Leased: 1}, countsOf(t, q, "claimed"))
			require.NoError(t, checkAll(q))
		})
	}
}

// TestPoisonTask: a task that ends the process whenever it is handled becomes
// a dead letter.
func TestPoisonTask(t *testing.T) {
	const maxAttempts = 4
	disk := crashfs.New()
	var id codeq.ID
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, *onDisk(disk, &codeq.Options{Durability: codeq.DurabilityDisk}))
		id = produce(t, q, codeq.Task{Queue: "a", MaxAttempts: maxAttempts})[0]
	})
	for life := range maxAttempts + 2 { // the first crash makes it a suspect, and is no attempt
		crashed, calls := abandonedRun(t, disk, 1)
		disk = crashed
		if life <= maxAttempts {
			require.Len(t, calls, 1)
			require.Equal(t, max(1, life), calls[0].attempt)
		} else {
			require.Empty(t, calls)
		}
	}
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, *onDisk(disk, &codeq.Options{}))
		got := infoOf(t, q, id)
		require.Equal(t, codeq.Dead, got.State)
		require.Equal(t, maxAttempts, got.Attempts)
		require.Equal(t, 1, got.Crashes)
		require.Equal(t, "the process died", got.LastError)
	})
}

// TestCrashIsTold: what was at work in a crash is told by the tasks, the process and the log, once,
// though a tool has had the queue open meanwhile.
func TestCrashIsTold(t *testing.T) {
	disk := crashfs.New()
	var ids []codeq.ID
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, *onDisk(disk, &codeq.Options{Shards: 2}))
		ids = produce(t, q, slices.Repeat([]codeq.Task{{Queue: "a"}}, 5)...)
	})
	disk, calls := abandonedRun(t, disk, 2)
	require.Len(t, calls, 5)
	synctest.Test(t, func(t *testing.T) {
		q, err := codeq.Open("q", onDisk(disk, &codeq.Options{Tool: true}))
		require.NoError(t, err)
		require.Equal(t, codeq.Counts{Leased: 5}, countsOf(t, q, "a"))
		require.NoError(t, q.Close())
	})
	for life := range 2 {
		synctest.Test(t, func(t *testing.T) {
			var log bytes.Buffer
			q := openForRun(t, *onDisk(disk, &codeq.Options{Shards: 2, Logger: slog.New(slog.NewTextHandler(&log, nil))}))
			synctest.Wait()
			require.Equal(t, codeq.Counts{Blocked: 5}, countsOf(t, q, "a"))
			for _, id := range ids {
				info := infoOf(t, q, id)
				require.True(t, info.Suspect)
				require.Equal(t, 1, info.Crashes)
				require.Zero(t, info.Attempts)
				require.Equal(t, "the process died", info.History[0].Error)
			}
			p, err := q.ProcessInfo(t.Context())
			require.NoError(t, err)
			require.NoError(t, q.Close())
			if life == 0 {
				require.EqualValues(t, 5, p.Crashed)
				require.Contains(t, log.String(), `msg="tasks were at work when the process died" tasks=5 suspects=0`)
			} else {
				require.Zero(t, p.Crashed)
				require.NotContains(t, log.String(), "died")
			}
		})
	}
}

// TestNoCrash: neither Close nor a copy of whatever kind, made while tasks are at work, counts an
// attempt of theirs, unless its Timeout had passed, or makes suspects, or is told as a crash.
func TestNoCrash(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		disk := crashfs.New()
		q := openForRun(t, *onDisk(disk, &codeq.Options{Shards: 2}))
		produce(t, q, codeq.Task{Queue: "run", MaxAttempts: 1}, codeq.Task{Queue: "claim", MaxAttempts: 1},
			codeq.Task{Queue: "overdue", MaxAttempts: 2, Timeout: time.Second})
		_, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"claim"}, Local: true})
		require.NoError(t, err)
		var m codeq.Mux
		codeq.Handle(&m, "run", untilCancelled)
		end := make(chan struct{})
		codeq.Handle(&m, "overdue", func(context.Context, *codeq.Job[[]byte]) error { <-end; return nil })
		run := startRun(t, q, &m, codeq.RunOptions{Grace: -1, Concurrency: 2})
		time.Sleep(2 * time.Second)
		require.NoError(t, q.Checkpoint(t.Context(), "links"))
		require.NoError(t, q.Checkpoint(t.Context(), "files", codeq.CheckpointOptions{Copy: true}))
		close(end)
		synctest.Wait()
		require.NoError(t, run.End(errBubbleOver))
		require.NoError(t, q.Close())
		moved(t, disk, "links", "moved", 3)
		for dir, attempts := range map[string]map[string]int{
			"q":     {"run": 0, "claim": 0},
			"links": {"run": 0, "claim": 0, "overdue": 1}, "files": {"run": 0, "claim": 0, "overdue": 1}, "moved": {"run": 0, "claim": 0, "overdue": 1},
		} {
			var log bytes.Buffer
			q, err := codeq.Open(dir, onDisk(disk, &codeq.Options{Logger: slog.New(slog.NewTextHandler(&log, nil))}))
			require.NoError(t, err)
			synctest.Wait()
			got := make(map[string]int)
			for info, err := range q.List(t.Context(), codeq.ListOptions{State: codeq.Ready}) {
				require.NoError(t, err)
				require.False(t, info.Suspect)
				require.Zero(t, info.Crashes)
				got[info.Queue] = info.Attempts
			}
			require.Equal(t, attempts, got, dir)
			require.NoError(t, q.Close())
			require.NotContains(t, log.String(), "died")
		}
	})
}

// moved exports a queue, and imports it into another directory, with so many shards.
func moved(t *testing.T, disk *crashfs.Disk, from, to string, shards int) {
	t.Helper()
	var lines bytes.Buffer
	_, err := offline.Export(t.Context(), disk, from, true, &lines, nil)
	require.NoError(t, err)
	_, err = offline.Import(t.Context(), disk, to, &lines, offline.ImportConfig{Shards: shards})
	require.NoError(t, err)
}

// TestCopyOfSuspect: a suspect that is alone at work pays with an attempt if the process dies, also
// if what is left is exported first, or copied by a tool. In a copy of the living queue it stays a
// suspect, and pays nothing.
func TestCopyOfSuspect(t *testing.T) {
	t.Parallel()
	disk := crashfs.New()
	synctest.Test(t, func(t *testing.T) {
		produce(t, openForRun(t, *onDisk(disk, &codeq.Options{})), codeq.Task{Queue: "a", MaxAttempts: 1})
	})
	disk, _ = abandonedRun(t, disk, 1)
	killed := make(map[string]*crashfs.Disk)
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, *onDisk(disk, &codeq.Options{}))
		var m codeq.Mux
		codeq.Handle(&m, "a", untilCancelled)
		startRun(t, q, &m, codeq.RunOptions{Grace: -1})
		time.Sleep(time.Second)
		require.EqualValues(t, 1, countsOf(t, q, "a").Leased)
		for _, dir := range []string{"q", "moved", "of the killed"} {
			killed[dir] = disk.Clone()
		}
		require.NoError(t, q.Checkpoint(t.Context(), "copy"))
		killed["copy"] = disk.Clone()
		killed["moved copy"] = disk.Clone()
	})
	synctest.Test(t, func(t *testing.T) {
		moved(t, killed["moved"], "q", "moved", 2)
		moved(t, killed["moved copy"], "copy", "moved copy", 2)
		tool, err := codeq.Open("q", onDisk(killed["of the killed"], &codeq.Options{Tool: true}))
		require.NoError(t, err)
		require.NoError(t, tool.Checkpoint(t.Context(), "of the killed"))
		require.NoError(t, tool.Close())
		for dir, disk := range killed {
			q, err := codeq.Open(dir, onDisk(disk, &codeq.Options{}))
			require.NoError(t, err)
			synctest.Wait()
			want := codeq.Dead
			if strings.Contains(dir, "copy") {
				want = codeq.Blocked
			}
			for info, err := range q.List(t.Context(), codeq.ListOptions{State: want}) {
				require.NoError(t, err)
				require.Equal(t, want == codeq.Blocked, info.Suspect)
				require.Equal(t, want == codeq.Dead, info.Attempts == 1)
				require.Equal(t, 1, info.Crashes)
				want = 0
			}
			require.Zero(t, want, "%s: %+v", dir, countsOf(t, q, "a"))
			require.NoError(t, q.Close())
		}
	})
}

// TestSuspectsStartBesideOthers: suspects that are at work hold up other suspects, for SuspectFor,
// and no other task.
func TestSuspectsStartBesideOthers(t *testing.T) {
	disk := crashfs.New()
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, *onDisk(disk, &codeq.Options{Shards: 2}))
		produce(t, q, slices.Repeat([]codeq.Task{{Queue: "a"}}, 7)...)
	})
	disk, _ = abandonedRun(t, disk, 2)
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, *onDisk(disk, &codeq.Options{Shards: 2, SuspectFor: time.Second}))
		var suspects, others atomic.Int32
		var m codeq.Mux
		codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			if string(j.Args) == "other" {
				others.Add(1)
				return nil
			}
			suspects.Add(1)
			return untilCancelled(ctx, j)
		})
		startRun(t, q, &m, codeq.RunOptions{Grace: -1, Concurrency: 16})
		for round, want := range []int32{1, 3, 7} {
			synctest.Wait()
			require.Equal(t, want, suspects.Load())
			produce(t, q, slices.Repeat([]codeq.Task{{Queue: "a", Payload: []byte("other")}}, 4)...)
			synctest.Wait()
			require.EqualValues(t, 4*(round+1), others.Load())
			p, err := q.ProcessInfo(t.Context())
			require.NoError(t, err)
			require.Equal(t, 1<<round, p.Suspects)
			time.Sleep(time.Second)
		}
	})
}

// TestSuspectsStartBesideBacklog: each suspect starts in bounded time while there is always more
// work than workers in other shards, and in other queues of the same weight.
func TestSuspectsStartBesideBacklog(t *testing.T) {
	disk := crashfs.New()
	const suspects = 8
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, *onDisk(disk, &codeq.Options{Shards: 4}))
		for i := range suspects { // a LimitKey has a shard
			produce(t, q, codeq.Task{Queue: "a", LimitKey: fmt.Sprint("key ", i)})
		}
	})
	crashed, calls := abandonedRun(t, disk, 4)
	require.Len(t, calls, suspects)
	for _, backlog := range []string{"a", "b"} {
		disk := crashed.CrashClone(vfs.CrashCloneCfg{})
		synctest.Test(t, func(t *testing.T) {
			q := openForRun(t, *onDisk(disk, &codeq.Options{Shards: 4, SuspectFor: time.Second}))
			var started, others atomic.Int32
			all := make(chan struct{})
			var m codeq.Mux
			for _, queue := range []string{"a", "b"} {
				codeq.Handle(&m, queue, func(_ context.Context, j *codeq.Job[[]byte]) error {
					if string(j.Args) == "other" {
						others.Add(1)
						time.Sleep(10 * time.Millisecond)
					} else if started.Add(1) == suspects {
						close(all)
					}
					return nil
				})
			}
			feed := func() {
				for range 50 {
					produce(t, q, codeq.Task{Queue: backlog, LimitKey: "key 0", Payload: []byte("other")})
				}
			}
			feed()
			begun := time.Now()
			startRun(t, q, &m, codeq.RunOptions{Grace: -1, Concurrency: 2})
			for tick := time.NewTicker(100 * time.Millisecond); ; {
				select {
				case <-tick.C:
					require.Less(t, time.Since(begun), 20*time.Second, "%d of %d suspects have started", started.Load(), suspects)
					if countsOf(t, q, backlog).Ready < 30 {
						feed()
					}
					continue
				case <-all:
				}
				tick.Stop()
				break
			}
			require.Greater(t, others.Load(), int32(suspects))
			t.Logf("queue %s: all after %v, beside %d others", backlog, time.Since(begun), others.Load())
		})
	}
}

// TestOutputOfHandler: results and follow-ups are stored with the completion,
// and are dropped when the handler fails.
func TestOutputOfHandler(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, codeq.Options{Shards: 3, Retention: time.Hour})
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
		ids := produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a", Payload: []byte("silent")})
		time.Sleep(time.Minute)
		synctest.Wait()
		for i, want := range []string{"result", ""} {
			got := infoOf(t, q, ids[i])
			require.Equal(t, codeq.Done, got.State)
			require.Equal(t, want, string(got.Result))
		}
		require.Equal(t, codeq.Counts{Scheduled: 1}, countsOf(t, q, "c"))
		require.Equal(t, codeq.Counts{Ready: 2}, countsOf(t, q, "b"))
		var payloads []string
		for task, err := range q.List(t.Context(), codeq.ListOptions{State: codeq.Ready}) {
			require.NoError(t, err)
			require.Equal(t, shardOf(ids[0], 3), shardOf(task.ID, 3), "follow-ups lie beside their parent")
			payloads = append(payloads, string(task.Payload))
		}
		require.Equal(t, []string{"1", "2"}, payloads)
		require.NoError(t, checkAll(q))
	})
}

// TestRunOnFailedShard: when a shard fails, Run ends with its error, handlers
// with tasks of other shards end in peace, and those of the failed shard are
// told.
func TestRunOnFailedShard(t *testing.T) {
	for _, concurrency := range []int{6, 7} { // with and without claims that wait
		t.Run(fmt.Sprint(concurrency), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := openForRun(t, codeq.Options{Shards: 3})
				var m codeq.Mux
				var mu sync.Mutex
				causes := make(map[int][]error)
				codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
					select {
					case <-ctx.Done():
					case <-time.After(20 * time.Second):
					}
					mu.Lock()
					defer mu.Unlock()
					shard := shardOf(j.ID, 3)
					causes[shard] = append(causes[shard], context.Cause(ctx))
					return ctx.Err()
				})
				run := startRun(t, q, &m, codeq.RunOptions{LeaseFor: 15 * time.Second, Grace: time.Minute, Concurrency: concurrency})
				for i := range 3 {
					produce(t, startingAt(q, i), codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
				}
				synctest.Wait()
				failShard(t, q, 1)
				_, err := startingAt(q, 1).Produce(t.Context(), codeq.Task{Queue: "b"})
				require.ErrorIs(t, err, codeq.ErrUncertain)
				require.ErrorIs(t, err, testkit.ErrDisk)

				err = run.Wait()
				require.ErrorIs(t, err, codeq.ErrFailed)
				require.ErrorIs(t, err, testkit.ErrDisk)
				require.Equal(t, []error{nil, nil}, causes[0])
				require.Equal(t, []error{nil, nil}, causes[2])
				require.Len(t, causes[1], 2)
				for _, cause := range causes[1] {
					require.ErrorIs(t, cause, codeq.ErrFailed)
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
		q := openForRun(t, codeq.Options{})
		var m codeq.Mux
		step := make(chan struct{})
		var handled atomic.Int64
		codeq.Handle(&m, "a", func(context.Context, *codeq.Job[[]byte]) error {
			<-step
			handled.Add(1)
			return nil
		})
		run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 2})
		produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
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
		require.Equal(t, codeq.Counts{}, countsOf(t, q, "a"))
	})
}

// TestStuckShardDelaysNoCancel: at the end of the grace period all handlers are
// cancelled, even if a shard takes its time to have a task back.
func TestStuckShardDelaysNoCancel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, codeq.Options{Shards: 2})
		var m codeq.Mux
		var cancelled atomic.Int64
		codeq.Handle(&m, "a", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
			<-ctx.Done()
			cancelled.Add(1)
			return nil
		})
		run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 4, Grace: 10 * time.Second})
		for i := range 2 {
			produce(t, startingAt(q, i), codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
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
		require.Equal(t, codeq.Counts{Ready: 4}, countsOf(t, q, "a"))
	})
}

// TestRefusedRuns: Run refuses what it cannot do before it begins.
func TestRefusedRuns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, codeq.Options{})
		var m, empty codeq.Mux
		codeq.Handle(&m, "a", untilCancelled)
		codeq.Handle(&m, "b", untilCancelled)
		produce(t, q, codeq.Task{Queue: "a"})
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
		require.Equal(t, codeq.Counts{Ready: 1}, countsOf(t, q, "a"))
	})
}

// TestManyWorkers: a Run of very many workers costs no more than its tasks need, and obeys its
// context and Close from the beginning.
func TestManyWorkers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, codeq.Options{})
		var m codeq.Mux
		began, gate := make(chan struct{}, 30), make(chan struct{})
		codeq.Handle(&m, "a", func(context.Context, *codeq.Job[[]byte]) error {
			began <- struct{}{}
			<-gate
			return nil
		})
		before := runtime.NumGoroutine()
		first := startRun(t, q, &m, codeq.RunOptions{Concurrency: 1_000_000})
		second := startRun(t, q, &m, codeq.RunOptions{Concurrency: 1_000_000})
		synctest.Wait()
		require.Less(t, runtime.NumGoroutine(), before+50)
		for range cap(began) {
			produce(t, q, codeq.Task{Queue: "a"})
		}
		synctest.Wait()
		require.Len(t, began, cap(began), "all at once")
		close(gate)
		first.Cancel(context.Canceled)
		<-first.Done
		require.NoError(t, first.Err)
		require.NoError(t, q.Close())
		<-second.Done
		require.ErrorIs(t, second.Err, codeq.ErrClosed)
	})
}

// errorThatPanics panics when it is unwrapped.
type errorThatPanics struct{}

func (errorThatPanics) Error() string { return "panics" }
func (errorThatPanics) Is(error) bool { panic("Is") }
func (errorThatPanics) Unwrap() error { panic("Unwrap") }

// TestVerdictOf: what an error means, as a middleware sees it, is what Run makes of it.
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

	// Of a task that is canceled while its handler runs.
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, codeq.Options{})
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
			{func(id codeq.ID) { loseLease(t, q, id) }, codeq.VerdictLeaseLost},
		} {
			id := produce(t, q, codeq.Task{Queue: "a", MaxAttempts: 1})[0]
			synctest.Wait()
			end.do(id)
			require.Equal(t, [2]codeq.Verdict{codeq.VerdictRetry, end.want}, <-seen)
		}
		require.NoError(t, run.End(nil))
	})
}
