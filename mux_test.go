package codeq_test

import (
	"bytes"
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/test/queuetest"
)

// naming is middleware that records its begin and end.
func naming(trail *[]string, name string) codeq.Middleware {
	return func(next codeq.Handler) codeq.Handler {
		return func(ctx context.Context, l *codeq.Lease) error {
			*trail = append(*trail, name+" in")
			err := next(ctx, l)
			*trail = append(*trail, name+" out")
			return err
		}
	}
}

// TestOrderOfMiddleware: the first middleware is the outermost, over all calls
// of Use, for handlers registered before and after it.
func TestOrderOfMiddleware(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{})
		var m codeq.Mux
		var trail []string
		handle := func(_ context.Context, j *codeq.Job[[]byte]) error {
			trail = append(trail, j.Queue)
			return nil
		}
		codeq.Handle(&m, "before", handle)
		m.Use(naming(&trail, "1"), naming(&trail, "2"))
		m.Use()
		m.Use(naming(&trail, "3"))
		codeq.Handle(&m, "after", handle)
		startRun(t, q, &m, codeq.RunOptions{Concurrency: 1})
		for _, name := range []string{"before", "after"} {
			trail = nil
			queuetest.Produce(t, q, codeq.Task{Queue: name})
			synctest.Wait()
			require.Equal(t, []string{"1 in", "2 in", "3 in", name, "3 out", "2 out", "1 out"}, trail)
		}
	})
}

// TestMiddlewareIsComposedOnce: each Run composes middleware once for each queue, not for each
// task.
func TestMiddlewareIsComposedOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{})
		var m codeq.Mux
		composed, called := 0, 0
		m.Use(func(next codeq.Handler) codeq.Handler {
			composed++
			return func(ctx context.Context, l *codeq.Lease) error {
				called++
				return next(ctx, l)
			}
		})
		for _, name := range []string{"a", "b"} {
			codeq.Handle(&m, name, func(context.Context, *codeq.Job[[]byte]) error { return nil })
		}
		for runs := range 2 {
			run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 1})
			queuetest.Produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"}, codeq.Task{Queue: "b"})
			synctest.Wait()
			require.NoError(t, run.End(nil))
			require.Equal(t, 2*(runs+1), composed)
			require.Equal(t, 3*(runs+1), called)
		}
	})
}

// TestMiddlewareSeesOutcomes: middleware gets the error of the handler itself, and errors for a
// panic and for an undecodable payload.
func TestMiddlewareSeesOutcomes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Retention: time.Hour})
		boom, snooze := errors.New("boom"), codeq.Snooze(time.Hour)
		var m codeq.Mux
		var seen error
		m.Use(func(next codeq.Handler) codeq.Handler {
			return func(ctx context.Context, l *codeq.Lease) error {
				seen = next(ctx, l)
				return seen
			}
		})
		codeq.Handle(&m, "a", func(_ context.Context, j *codeq.Job[string]) error {
			switch j.Args {
			case "boom":
				return boom
			case "snooze":
				return snooze
			case "panic":
				panicOfTest(boom)
			}
			return nil
		})
		run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 1})
		outcome := func(payload string) codeq.State {
			seen = errors.New("the middleware was not called")
			id := queuetest.Produce(t, q, codeq.Task{Queue: "a", Payload: []byte(payload)})[0]
			synctest.Wait()
			return queuetest.InfoOf(t, q, id).State
		}

		require.Equal(t, codeq.Done, outcome(`"fine"`))
		require.NoError(t, seen)
		require.Equal(t, codeq.Scheduled, outcome(`"boom"`))
		require.Equal(t, boom, seen)
		require.Equal(t, codeq.Scheduled, outcome(`"snooze"`))
		require.Equal(t, snooze, seen)
		require.Equal(t, codeq.Dead, outcome(`{`))
		require.ErrorContains(t, seen, "payload of queue a into string")

		require.Equal(t, codeq.Scheduled, outcome(`"panic"`))
		var p *codeq.PanicError
		require.ErrorAs(t, seen, &p)
		require.ErrorIs(t, seen, boom)
		require.Contains(t, string(p.Stack), "panicOfTest")
		require.Equal(t, seen, run.Reported()[2], "and it is reported as such")
	})
}

// TestOutputOfLastCall: if middleware calls a handler again, only the output of the last call
// counts, and only if that succeeded.
func TestOutputOfLastCall(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Retention: time.Hour})
		var m codeq.Mux
		m.Use(func(next codeq.Handler) codeq.Handler {
			return func(ctx context.Context, l *codeq.Lease) error {
				for range len(l.Payload) {
					_ = next(ctx, l)
				}
				return nil
			}
		})
		var outcomes []string
		call := 0
		codeq.Handle(&m, "a", func(_ context.Context, j *codeq.Job[[]byte]) error {
			outcome := j.Args[call]
			call++
			j.FollowUp(codeq.Task{Queue: "b"})
			if outcome == 'S' { // another result than the call before
				j.SetResult([]byte(fmt.Sprint("call ", call)))
				return nil
			}
			if outcome == 'P' {
				panic("later than its output")
			}
			if outcome == 's' {
				return nil
			}
			return errors.New("boom")
		})
		startRun(t, q, &m, codeq.RunOptions{Concurrency: 1, Queues: []string{"a"}})
		for _, calls := range []string{"fS", "SS", "Ss", "Sf", "SP"} {
			call = 0
			before := queuetest.CountsOf(t, q, "b").Ready
			id := queuetest.Produce(t, q, codeq.Task{Queue: "a", Payload: []byte(calls)})[0]
			synctest.Wait()
			got := queuetest.InfoOf(t, q, id)
			require.Equal(t, codeq.Done, got.State)
			outcomes = append(outcomes, fmt.Sprintf("%s: %q and %d", calls, got.Result, queuetest.CountsOf(t, q, "b").Ready-before))
		}
		require.Equal(t, []string{`fS: "call 2" and 1`, `SS: "call 2" and 1`, `Ss: "" and 1`, `Sf: "" and 0`, `SP: "" and 0`}, outcomes)
	})
}

// TestMiddlewareReplaces: the next handler sees the payload, headers and context values that a
// middleware sets, in the lease or in a copy of it.
func TestMiddlewareReplaces(t *testing.T) {
	type key struct{}
	for _, copied := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			q := queuetest.OpenForRun(t, codeq.Options{})
			var m codeq.Mux
			m.Use(func(next codeq.Handler) codeq.Handler {
				return func(ctx context.Context, l *codeq.Lease) error {
					if copied {
						clone := *l
						l = &clone
					}
					l.Payload = bytes.ToUpper(l.Payload)
					l.Headers = map[string]string{"traceparent": "inner"}
					return next(context.WithValue(ctx, key{}, "value"), l)
				}
			})
			codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
				assert.Equal(t, "HELLO", string(j.Args))
				assert.Equal(t, "value", ctx.Value(key{}))
				j.FollowUp(codeq.Task{Queue: "b"})
				return nil
			})
			run := startRun(t, q, &m, codeq.RunOptions{})
			queuetest.Produce(t, q, codeq.Task{Queue: "a", Payload: []byte("hello"), Headers: map[string]string{"traceparent": "outer"}})
			synctest.Wait()
			require.Empty(t, run.Reported())
			l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"b"}, NoWait: true})
			require.NoError(t, err)
			require.Equal(t, map[string]string{"traceparent": "inner"}, l.Headers)
		})
	}
}

// TestRefusedMux: Run reports every fault of a Mux, and claims no task.
func TestRefusedMux(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{})
		queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		for name, tc := range map[string]struct {
			fill func(m *codeq.Mux)
			want []string
		}{
			"second handler": {func(m *codeq.Mux) {
				codeq.Handle(m, "a", untilCancelled)
			}, []string{`invalid Handle queue: "a" (allowed: one handler for each queue)`}},
			"nil handler": {func(m *codeq.Mux) {
				codeq.Handle[int](m, "b", nil)
			}, []string{`invalid Handle handler of queue "b": nil`}},
			"nil codec": {func(m *codeq.Mux) {
				codeq.Handle(m, "b", untilCancelled, codeq.WithCodec(nil))
			}, []string{`handler of queue "b": invalid WithCodec codec: nil`}},
			"nil option": {func(m *codeq.Mux) {
				codeq.Handle(m, "b", untilCancelled, nil)
			}, []string{`handler of queue "b": invalid PayloadOption: nil`}},
			"nil payload option": {func(m *codeq.Mux) {
				codeq.Handle(m, "b", untilCancelled, codeq.PayloadOption(nil))
			}, []string{`handler of queue "b": invalid PayloadOption: nil`}},
			"invalid policy": {func(m *codeq.Mux) {
				codeq.Handle(m, "b", untilCancelled, codeq.Policy{MaxAttempts: -1})
			}, []string{`handler of queue "b": invalid Policy.MaxAttempts: -1`}},
			"nil middleware": {func(m *codeq.Mux) {
				m.Use(nil)
			}, []string{"invalid Use middleware 1: nil"}},
			"nil from middleware": {func(m *codeq.Mux) {
				m.Use(func(codeq.Handler) codeq.Handler { return nil })
			}, []string{"invalid Use middleware 1: returned nil"}},
			"two mistakes": {func(m *codeq.Mux) {
				m.Use(nil)
				codeq.Handle(m, "a", untilCancelled)
			}, []string{"invalid Use middleware 1", "invalid Handle queue"}},
		} {
			var m codeq.Mux
			m.Use(func(next codeq.Handler) codeq.Handler { return next })
			codeq.Handle(&m, "a", untilCancelled)
			tc.fill(&m)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute) // of a Run that is not refused
			err := q.Run(ctx, &m, nil)
			cancel()
			require.ErrorIs(t, err, codeq.ErrInvalid, name)
			var invalid *codeq.InvalidError
			require.ErrorAs(t, err, &invalid, name)
			for _, want := range tc.want {
				require.ErrorContains(t, err, want, name)
			}
			require.Equal(t, codeq.Counts{Ready: 1}, queuetest.CountsOf(t, q, "a"), name)
		}

		var m codeq.Mux
		codeq.Handle(&m, "a", untilCancelled)
		m.Use(func(codeq.Handler) codeq.Handler { panicOfTest("of middleware"); return nil })
		err := q.Run(t.Context(), &m, nil)
		var p *codeq.PanicError
		require.ErrorAs(t, err, &p)
		require.Contains(t, string(p.Stack), "panicOfTest")
	})
}

// TestUnknownQueues: tasks of queues without a handler wait for one, and do not delay other tasks.
func TestUnknownQueues(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{})
		done := func(context.Context, *codeq.Job[[]byte]) error { return nil }
		var m codeq.Mux
		codeq.Handle(&m, "known", func(_ context.Context, j *codeq.Job[[]byte]) error {
			j.FollowUp(codeq.Task{Queue: "unknown"})
			return nil
		})
		ids := queuetest.Produce(t, q, codeq.Task{Queue: "unknown", Priority: 9}, codeq.Task{Queue: "known"})
		run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 1})
		synctest.Wait()
		require.NoError(t, run.End(nil))
		require.Equal(t, codeq.Counts{}, queuetest.CountsOf(t, q, "known"))
		require.Equal(t, codeq.Counts{Ready: 2}, queuetest.CountsOf(t, q, "unknown"))
		require.Zero(t, queuetest.InfoOf(t, q, ids[0]).Attempts)

		codeq.Handle(&m, "unknown", done)
		startRun(t, q, &m, codeq.RunOptions{})
		synctest.Wait()
		require.Equal(t, codeq.Counts{}, queuetest.CountsOf(t, q, "unknown"))
	})
}

// recorder is a slog.Handler that keeps its records as text, without times and levels, and counts
// the calls of WithAttrs.
type recorder struct {
	slog.Handler
	*recorded
}

type recorded struct {
	mu      sync.Mutex
	text    bytes.Buffer
	derived int
}

func newRecorder() recorder {
	r := new(recorded)
	text := slog.NewTextHandler(&r.text, &slog.HandlerOptions{ReplaceAttr: func(_ []string, a slog.Attr) slog.Attr {
		if a.Key == slog.TimeKey || a.Key == slog.LevelKey {
			return slog.Attr{}
		}
		return a
	}})
	return recorder{text, r}
}

func (r recorder) WithAttrs(attrs []slog.Attr) slog.Handler {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.derived++
	return recorder{r.Handler.WithAttrs(attrs), r.recorded}
}

func (r recorder) Handle(ctx context.Context, rec slog.Record) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.Handler.Handle(ctx, rec)
}

// TestLogger: the logger of a task writes to Options.Logger and names the task. It is made once,
// and only for tasks that log.
func TestLogger(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		rec := newRecorder()
		q := queuetest.OpenForRun(t, codeq.Options{Logger: slog.New(rec)})
		var m codeq.Mux
		type key struct{}
		m.Use(func(next codeq.Handler) codeq.Handler {
			return func(ctx context.Context, l *codeq.Lease) error {
				if l.Headers["log"] != "" {
					codeq.LoggerFrom(ctx).Info("begin")
				}
				return next(ctx, l)
			}
		})
		codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			if j.Headers["log"] == "" {
				return nil
			}
			inner, cancel := context.WithTimeout(context.WithValue(ctx, key{}, 1), time.Hour)
			defer cancel()
			codeq.LoggerFrom(inner).Info("inside", "x", 7)
			if j.Attempt == 1 {
				return codeq.RetryAfter(0, errors.New("boom"))
			}
			return nil
		})
		run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 1})
		rec.derived, rec.text = 0, bytes.Buffer{} // of Open
		queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		synctest.Wait()
		require.Zero(t, rec.derived, "a task that does not log")
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a", Headers: map[string]string{"log": "yes"}})[0]
		synctest.Wait()
		require.Equal(t, 2, rec.derived, "one for each attempt")
		tenant := queuetest.Produce(t, q, codeq.Task{Queue: "a", Tenant: "blue", Headers: map[string]string{"log": "yes"}})[0]
		synctest.Wait()
		require.NoError(t, run.End(nil))
		var want []string
		for _, of := range []struct{ id, tenant string }{{id.String(), ""}, {tenant.String(), " tenant=blue"}} {
			for attempt := 1; attempt <= 2; attempt++ {
				attrs := fmt.Sprintf("task=%s queue=a attempt=%d%s", of.id, attempt, of.tenant)
				want = append(want, "msg=begin "+attrs, "msg=inside "+attrs+" x=7")
			}
		}
		require.Equal(t, want, strings.Split(strings.TrimSpace(rec.text.String()), "\n"))
	})
}

// TestContextOfTask: a context has the task of the handler that it was made for, also in a Run
// within a handler. Other contexts have no task.
func TestContextOfTask(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{})
		var m, nested codeq.Mux
		var kept context.Context
		nestedDone := make(chan struct{})
		codeq.Handle(&nested, "b", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			l, ok := codeq.LeaseFrom(ctx)
			assert.True(t, ok)
			assert.Equal(t, "b", l.Queue)
			assert.Same(t, j.Lease, l)
			close(nestedDone)
			return nil
		})
		codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			kept = ctx
			l, ok := codeq.LeaseFrom(ctx)
			assert.True(t, ok)
			assert.Same(t, j.Lease, l)
			assert.Equal(t, map[string]string{"h": "v"}, l.Headers)

			ctx, cancel := context.WithCancel(ctx)
			run := make(chan error)
			go func() { run <- q.Run(ctx, &nested, nil) }()
			<-nestedDone
			cancel()
			assert.NoError(t, <-run)
			return nil
		})
		queuetest.Produce(t, q, codeq.Task{Queue: "a", Headers: map[string]string{"h": "v"}}, codeq.Task{Queue: "b"})
		run := startRun(t, q, &m, codeq.RunOptions{})
		synctest.Wait()
		require.NoError(t, run.End(nil))
		require.Equal(t, codeq.Counts{}, queuetest.CountsOf(t, q, "b"))

		l, ok := codeq.LeaseFrom(kept)
		require.True(t, ok, "after the handler, too")
		require.Equal(t, "a", l.Queue)
		require.Error(t, kept.Err())
		_, ok = codeq.LeaseFrom(t.Context())
		require.False(t, ok)
		require.False(t, codeq.LoggerFrom(t.Context()).Enabled(t.Context(), slog.LevelError))
	})
}

// TestDeadlineOfContext: Task.Timeout is the deadline of the handler's context
// and of those derived from it; without it there is none.
func TestDeadlineOfContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{})
		var m codeq.Mux
		var left []time.Duration
		m.Use(func(next codeq.Handler) codeq.Handler {
			return func(ctx context.Context, l *codeq.Lease) error {
				return next(context.WithValue(ctx, t, t), l)
			}
		})
		codeq.Handle(&m, "a", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			deadline, ok := ctx.Deadline()
			assert.Equal(t, j.Timeout > 0, ok)
			if ok {
				left = append(left, time.Until(deadline))
				<-ctx.Done()
				assert.ErrorIs(t, context.Cause(ctx), context.DeadlineExceeded)
			}
			return nil
		})
		startRun(t, q, &m, codeq.RunOptions{Concurrency: 1})
		queuetest.Produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a", Timeout: 90 * time.Second})
		time.Sleep(time.Hour)
		synctest.Wait()
		require.Equal(t, []time.Duration{90 * time.Second}, left)
		require.Equal(t, codeq.Counts{}, queuetest.CountsOf(t, q, "a"))
	})
}

// TestMiddlewareDecides: the result of the outermost middleware decides the outcome of the task.
func TestMiddlewareDecides(t *testing.T) {
	boom := errors.New("boom")
	for name, tc := range map[string]struct {
		mw      codeq.Middleware
		state   codeq.State
		handled int
		report  string // of each attempt
	}{
		"swallows": {func(next codeq.Handler) codeq.Handler {
			return func(ctx context.Context, l *codeq.Lease) error { _ = next(ctx, l); return nil }
		}, codeq.Done, 1, ""},
		"gives up": {func(next codeq.Handler) codeq.Handler {
			return func(ctx context.Context, l *codeq.Lease) error { return codeq.DeadLetter(next(ctx, l)) }
		}, codeq.Dead, 1, "boom"},
		"skips": {func(codeq.Handler) codeq.Handler {
			return func(context.Context, *codeq.Lease) error { return nil }
		}, codeq.Done, 0, ""},
		"refuses": {func(codeq.Handler) codeq.Handler {
			return func(context.Context, *codeq.Lease) error { return codeq.Snooze(time.Hour) }
		}, codeq.Scheduled, 0, ""},
		"panics": {func(next codeq.Handler) codeq.Handler {
			return func(ctx context.Context, l *codeq.Lease) error { _ = next(ctx, l); panic("of middleware") }
		}, codeq.Scheduled, 1, "panic: of middleware"},
		"ends the goroutine": {func(next codeq.Handler) codeq.Handler {
			return func(ctx context.Context, l *codeq.Lease) error { runtime.Goexit(); return next(ctx, l) }
		}, codeq.Scheduled, 0, "the handler ended its goroutine"},
		"loses the context": {func(next codeq.Handler) codeq.Handler {
			return func(_ context.Context, l *codeq.Lease) error { return next(context.Background(), l) }
		}, codeq.Scheduled, 0, "a context that is not derived from the task's"},
		"loses the lease": {func(next codeq.Handler) codeq.Handler {
			return func(ctx context.Context, _ *codeq.Lease) error { return next(ctx, nil) }
		}, codeq.Scheduled, 0, "panic: runtime error: invalid memory address"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := queuetest.OpenForRun(t, codeq.Options{Retention: time.Hour})
				var m codeq.Mux
				handled := 0
				m.Use(tc.mw)
				codeq.Handle(&m, "a", func(context.Context, *codeq.Job[[]byte]) error {
					handled++
					return boom
				})
				run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 1})
				ids := queuetest.Produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
				synctest.Wait()
				for _, id := range ids {
					require.Equal(t, tc.state, queuetest.InfoOf(t, q, id).State)
				}
				require.Equal(t, 2*tc.handled, handled, "of both tasks: the worker goes on")
				require.NoError(t, run.End(nil))
				if tc.report == "" {
					require.Empty(t, run.Reported())
					return
				}
				require.Len(t, run.Reported(), 2)
				for _, err := range run.Reported() {
					require.ErrorContains(t, err, tc.report)
				}
			})
		})
	}
}

// xmlCodec is a codec that cannot be taken for JSON.
type xmlCodec struct{}

func (xmlCodec) Marshal(v any) ([]byte, error)      { return xml.Marshal(v) }
func (xmlCodec) Unmarshal(data []byte, v any) error { return xml.Unmarshal(data, v) }

// brokenCodec refuses everything.
type brokenCodec struct{ err error }

func (c brokenCodec) Marshal(any) ([]byte, error) { return nil, c.err }
func (c brokenCodec) Unmarshal([]byte, any) error { return c.err }

type shape struct{ Sides int }

// TestCodecs: the queues of one Mux may have different codecs, for payloads and for results.
func TestCodecs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Retention: time.Hour})
		var m codeq.Mux
		double := func(_ context.Context, j *codeq.Job[shape]) error {
			return j.SetResultValue(shape{2 * j.Args.Sides})
		}
		codeq.Handle(&m, "json", double)
		codeq.Handle(&m, "named", double, codeq.WithCodec(codeq.JSON{}))
		codeq.Handle(&m, "xml", double, codeq.WithCodec(xmlCodec{}))
		run := startRun(t, q, &m, codeq.RunOptions{})
		for _, tc := range []struct {
			queue, payload, result string
			opts                   []codeq.PayloadOption
		}{
			{"json", `{"Sides":3}`, `{"Sides":6}`, nil},
			{"named", `{"Sides":3}`, `{"Sides":6}`, nil},
			{"xml", `<shape><Sides>3</Sides></shape>`, `<shape><Sides>6</Sides></shape>`, []codeq.PayloadOption{codeq.WithCodec(xmlCodec{})}},
		} {
			task, err := codeq.NewTask(tc.queue, shape{3}, tc.opts...)
			require.NoError(t, err)
			require.Equal(t, codeq.Task{Queue: tc.queue, Payload: []byte(tc.payload)}, task)
			id := queuetest.Produce(t, q, task)[0]
			synctest.Wait()
			require.Empty(t, run.Reported())
			done := queuetest.InfoOf(t, q, id)
			require.Equal(t, tc.result, string(done.Result))
			got, err := codeq.ResultAs[shape](done, tc.opts...)
			require.NoError(t, err)
			require.Equal(t, shape{6}, got)
		}
	})
}

// TestCodecIsNotAsked: bytes are their own encoding, and an empty payload is the zero value,
// without a call of the codec.
func TestCodecIsNotAsked(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Retention: time.Hour})
		refuse := codeq.WithCodec(brokenCodec{errors.New("asked")})
		var m codeq.Mux
		var gotBytes []byte
		gotShape := shape{-1}
		codeq.Handle(&m, "bytes", func(_ context.Context, j *codeq.Job[[]byte]) error {
			gotBytes = j.Args
			return j.SetResultValue([]byte("raw result"))
		}, refuse)
		codeq.Handle(&m, "empty", func(_ context.Context, j *codeq.Job[shape]) error {
			gotShape = j.Args
			return nil
		}, refuse)
		run := startRun(t, q, &m, codeq.RunOptions{})
		task, err := codeq.NewTask("bytes", []byte("raw"), refuse)
		require.NoError(t, err)
		ids := queuetest.Produce(t, q, task, codeq.Task{Queue: "empty"})
		synctest.Wait()
		require.Empty(t, run.Reported())
		require.Equal(t, "raw", string(gotBytes))
		require.Equal(t, shape{}, gotShape)
		result, err := codeq.ResultAs[[]byte](queuetest.InfoOf(t, q, ids[0]), refuse)
		require.NoError(t, err)
		require.Equal(t, "raw result", string(result))
		none, err := codeq.ResultAs[shape](queuetest.InfoOf(t, q, ids[1]), refuse)
		require.NoError(t, err)
		require.Zero(t, none)
	})
}

// TestCodecErrors: an error of a codec reaches the producer. A task becomes a dead letter if the
// codec refuses its payload or its result.
func TestCodecErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Retention: time.Hour})
		broken := errors.New("broken codec")
		refuse := codeq.WithCodec(brokenCodec{broken})
		_, err := codeq.NewTask("a", shape{1}, refuse)
		require.ErrorIs(t, err, broken)
		require.EqualError(t, err, "codeq: payload of queue a from codeq_test.shape: broken codec")

		var m codeq.Mux
		codeq.Handle(&m, "payload", func(context.Context, *codeq.Job[shape]) error { return nil }, refuse)
		codeq.Handle(&m, "result", func(_ context.Context, j *codeq.Job[[]byte]) error {
			return j.SetResultValue(shape{})
		}, refuse)
		run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 1})
		for i, tc := range []struct{ queue, want string }{
			{"payload", "codeq: payload of queue payload into codeq_test.shape: broken codec"},
			{"result", "codeq: result of queue result from codeq_test.shape: broken codec"},
		} {
			id := queuetest.Produce(t, q, codeq.Task{Queue: tc.queue, Payload: []byte("x")})[0]
			synctest.Wait()
			got := queuetest.InfoOf(t, q, id)
			require.Equal(t, codeq.Dead, got.State)
			require.Equal(t, tc.want, got.LastError)
			require.ErrorIs(t, run.Reported()[i], broken)
		}

		done := &codeq.TaskInfo{Task: codeq.Task{Queue: "a"}, State: codeq.Done, Result: []byte("{")}
		_, err = codeq.ResultAs[shape](done)
		require.ErrorContains(t, err, "codeq: result of queue a into codeq_test.shape: ")
		for _, opt := range []codeq.PayloadOption{nil, codeq.WithCodec(nil)} {
			_, err = codeq.NewTask("a", shape{}, opt)
			require.ErrorIs(t, err, codeq.ErrInvalid)
			_, err = codeq.ResultAs[shape](done, opt)
			require.ErrorIs(t, err, codeq.ErrInvalid)
		}
		for _, state := range []codeq.State{codeq.Ready, codeq.Scheduled, codeq.Leased, codeq.Dead} {
			_, err = codeq.ResultAs[shape](&codeq.TaskInfo{State: state})
			require.ErrorIs(t, err, codeq.ErrInvalid, "a %s task has no result yet", state)
		}
	})
}
