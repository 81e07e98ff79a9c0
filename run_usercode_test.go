package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// TestOnErrorEnds: if OnError panics, or ends its goroutine, the attempt is still stored, and the
// worker goes on.
func TestOnErrorEnds(t *testing.T) {
	for name, end := range map[string]func(){"panic": func() { panic("OnError") }, "Goexit": runtime.Goexit} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				rec := newRecorder()
				q := queuetest.OpenForRun(t, codeq.Options{Logger: slog.New(rec)})
				var m codeq.Mux
				codeq.Handle(&m, "a", func(_ context.Context, j *codeq.Job[[]byte]) error {
					switch string(j.Args) {
					case "dead":
						return codeq.DeadLetter(errors.New("boom"))
					case "goexit":
						runtime.Goexit()
					case "lost":
						queuetest.LoseLease(t, q, j.ID)
					}
					return nil
				})
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan error)
				var mu sync.Mutex
				told := 0
				go func() {
					ended <- q.Run(ctx, &m, &codeq.RunOptions{Concurrency: 2, OnError: func(*codeq.Lease, error) {
						mu.Lock()
						told++
						mu.Unlock()
						end()
					}})
				}()
				for range 3 { // more than there are workers
					queuetest.Produce(t, q, codeq.Task{Queue: "a", Payload: []byte("dead")}, codeq.Task{Queue: "a", Payload: []byte("goexit"), MaxAttempts: 1},
						codeq.Task{Queue: "a", Payload: []byte("lost")}, codeq.Task{Queue: "a"})
				}
				time.Sleep(time.Minute)
				synctest.Wait()
				require.EqualValues(t, 9, queuetest.CountsOf(t, q, "a").Dead)
				require.Zero(t, queuetest.CountsOf(t, q, "a").Ready)
				cancel()
				require.NoError(t, <-ended)
				require.GreaterOrEqual(t, told, 9)
				require.Equal(t, name == "panic", strings.Contains(rec.text.String(), "OnError has panicked"))
			})
		})
	}
}

// endingError ends its goroutine, in one of its methods.
type endingError struct{ in string }

func (e endingError) end(in string) {
	if e.in == in {
		runtime.Goexit()
	}
}

func (e endingError) Error() string        { e.end("Error"); return "ending" }
func (e endingError) Unwrap() error        { e.end("Unwrap"); return nil }
func (e endingError) Is(target error) bool { e.end("Is"); return false }
func (e endingError) As(any) bool          { e.end("As"); return false }

// TestErrorsThatEnd: if a method of a handler's error ends the goroutine, the attempt fails, and no
// worker is lost.
func TestErrorsThatEnd(t *testing.T) {
	for _, in := range []string{"Error", "Unwrap", "Is", "As"} {
		for name, wrap := range map[string]func(error) error{
			"returned": func(err error) error { return err },
			"wrapped":  func(err error) error { return fmt.Errorf("why: %w", codeq.DeadLetter(err)) },
			"panic":    func(err error) error { panic(err) },
		} {
			if name == "wrapped" && in == "Error" {
				continue // it ends the handler
			}
			t.Run(in+" "+name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					q := queuetest.OpenForRun(t, codeq.Options{MaxAttempts: 1, Observer: func(*codeq.Observation) {}})
					var m codeq.Mux
					codeq.Handle(&m, "a", func(context.Context, *codeq.Job[[]byte]) error { return wrap(endingError{in}) })
					run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 2})
					for range 5 {
						queuetest.Produce(t, q, codeq.Task{Queue: "a"})
					}
					synctest.Wait()
					require.Equal(t, codeq.Counts{Dead: 5}, queuetest.CountsOf(t, q, "a"))
					require.Len(t, run.Reported(), 5)
					require.NoError(t, run.End(nil))
				})
			})
		}
	}
}

// panickyCodec panics, or ends its goroutine.
type panickyCodec struct{ end func() }

func (c panickyCodec) Marshal(any) ([]byte, error) { c.end(); return nil, nil }

func (c panickyCodec) Unmarshal([]byte, any) error { c.end(); return nil }

// TestHandlersThatEnd: codecs and middleware that panic, or end the goroutine, fail the attempt and
// nothing else.
func TestHandlersThatEnd(t *testing.T) {
	for name, end := range map[string]func(){"panic": func() { panic("user") }, "Goexit": runtime.Goexit} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := queuetest.OpenForRun(t, codeq.Options{MaxAttempts: 1})
				var m codeq.Mux
				m.Use(func(next codeq.Handler) codeq.Handler {
					return func(ctx context.Context, l *codeq.Lease) error {
						if l.Queue == "middleware" {
							end()
						}
						return next(ctx, l)
					}
				})
				codeq.Handle(&m, "middleware", func(context.Context, *codeq.Job[[]byte]) error { return nil })
				codeq.Handle(&m, "unmarshal", func(context.Context, *codeq.Job[int]) error { return nil }, codeq.WithCodec(panickyCodec{end}))
				codeq.Handle(&m, "marshal", func(_ context.Context, j *codeq.Job[[]byte]) error { return j.SetResultValue(1) }, codeq.WithCodec(panickyCodec{end}))
				run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 2})
				for _, queue := range m.Queues() {
					for range 3 {
						queuetest.Produce(t, q, codeq.Task{Queue: queue, Payload: []byte("1")})
					}
				}
				synctest.Wait()
				for _, queue := range m.Queues() {
					require.Equal(t, codeq.Counts{Dead: 3}, queuetest.CountsOf(t, q, queue), queue)
				}
				require.Len(t, run.Reported(), 9)
				require.NoError(t, run.End(nil))
			})
		})
	}
}

// TestConfigureWithinItself: a call within the function of Configure is refused: it would wait for
// its own end or, on another queue, perhaps for a call that waits for this one.
func TestConfigureWithinItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, other := queuetest.OpenForRun(t, codeq.Options{}), queuetest.OpenForRun(t, codeq.Options{})
		var inner []error
		err := q.Configure(t.Context(), "a", func(s *codeq.Settings) {
			s.Concurrency = 3
			inner = append(inner, q.Pause(t.Context(), "a"), q.Resume(t.Context(), "b"),
				q.Configure(t.Context(), "a", func(*codeq.Settings) { t.Error("called") }),
				other.Pause(t.Context(), "a"))
		})
		require.NoError(t, err)
		require.Len(t, inner, 4)
		for _, err := range inner {
			require.ErrorIs(t, err, codeq.ErrInvalid)
			require.ErrorContains(t, err, "within the function")
		}
		s, err := q.Settings("a")
		require.NoError(t, err)
		require.Equal(t, codeq.Settings{Concurrency: 3}, s)
	})
}

// TestErrorsThatPanic: for any error of a handler, the attempt fails as the handler says, and Run
// goes on.
func TestErrorsThatPanic(t *testing.T) {
	var null *testkit.MyErr
	for name, tc := range map[string]struct {
		err   func() error
		state codeq.State
		text  string // in LastError
	}{
		"nil pointer":          {func() error { return null }, codeq.Scheduled, "*testkit.MyErr"},
		"retry":                {func() error { return codeq.RetryAfter(time.Hour, null) }, codeq.Scheduled, "*testkit.MyErr"},
		"dead letter":          {func() error { return codeq.DeadLetter(null) }, codeq.Dead, "*testkit.MyErr"},
		"wrapped dead letter":  {func() error { return fmt.Errorf("x: %w", codeq.DeadLetter(null)) }, codeq.Dead, "x: "},
		"joined":               {func() error { return errors.Join(codeq.DeadLetter(null), null) }, codeq.Dead, "*errors.joinError"},
		"retry of dead letter": {func() error { return codeq.RetryAfter(time.Hour, codeq.DeadLetter(null)) }, codeq.Scheduled, "*testkit.MyErr"},
		"snooze":               {func() error { return errors.Join(codeq.Snooze(time.Hour), null) }, codeq.Scheduled, ""},
		"hostile":              {func() error { return testkit.HostileErr{} }, codeq.Scheduled, "testkit.HostileErr"},
		"hostile dead letter":  {func() error { return codeq.DeadLetter(testkit.HostileErr{}) }, codeq.Dead, "testkit.HostileErr"},
		"panic":                {func() error { panic(null) }, codeq.Scheduled, "panic: "},
		"hostile panic":        {func() error { panic(testkit.HostileErr{}) }, codeq.Scheduled, "panic: "},
	} {
		for _, middleware := range []bool{false, true} {
			t.Run(fmt.Sprint(name, middleware), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					q := queuetest.OpenForRun(t, codeq.Options{})
					var m codeq.Mux
					if middleware {
						m.Use(func(next codeq.Handler) codeq.Handler {
							return func(ctx context.Context, l *codeq.Lease) error { return next(ctx, l) }
						})
					}
					codeq.Handle(&m, "a", func(_ context.Context, j *codeq.Job[string]) error {
						if j.Args == "well" {
							return nil
						}
						return tc.err()
					})
					run := startRun(t, q, &m, codeq.RunOptions{Concurrency: 1})
					id := queuetest.Produce(t, q, codeq.Task{Queue: "a", Payload: []byte(`"ill"`)})[0]
					synctest.Wait()
					info := queuetest.InfoOf(t, q, id)
					require.Equal(t, tc.state, info.State)
					require.Contains(t, info.LastError, tc.text)
					queuetest.Produce(t, q, codeq.Task{Queue: "a", Payload: []byte(`"well"`)})
					synctest.Wait()
					require.Zero(t, queuetest.CountsOf(t, q, "a").Ready)
					require.NoError(t, run.End(nil))
				})
			})
		}
	}
}

// TestCausesThatPanic: verbs accept any cause in the same way.
func TestCausesThatPanic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{})
		for _, cause := range []error{(*testkit.MyErr)(nil), testkit.HostileErr{}} {
			id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
			claim := func() codeq.Receipt {
				l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}, NoWait: true})
				require.NoError(t, err)
				return l.Receipt
			}
			require.NoError(t, q.Retry(t.Context(), claim(), codeq.RetryOptions{Err: cause, After: -1}))
			require.Contains(t, queuetest.InfoOf(t, q, id).LastError, fmt.Sprintf("%T", cause))
			require.NoError(t, q.DeadLetter(t.Context(), claim(), cause))
			require.Equal(t, codeq.Dead, queuetest.InfoOf(t, q, id).State)
		}
	})
}

// TestCallersFunctionsEnd: if a function of a caller panics, or ends the goroutine, this happens in
// the call of that caller. Nothing is left of that call, and all later calls work.
func TestCallersFunctionsEnd(t *testing.T) {
	t.Parallel()
	for name, call := range map[string]func(q *codeq.Queue, end func()){
		"Configure": func(q *codeq.Queue, end func()) {
			_ = q.Configure(context.Background(), "a", func(*codeq.Settings) { end() })
		},
		"Match": func(q *codeq.Queue, end func()) {
			_, _ = q.RedriveAllDead(context.Background(), codeq.DeadFilter{Match: func(*codeq.TaskInfo) bool { end(); return true }})
		},
		"List": func(q *codeq.Queue, end func()) {
			for range q.List(context.Background(), codeq.ListOptions{State: codeq.Dead}) {
				end()
			}
		},
		"All": func(q *codeq.Queue, end func()) {
			sub, _ := q.Subscribe(codeq.SubscribeOptions{})
			defer sub.Close()
			_, _ = q.Produce(context.Background(), codeq.Task{Queue: "seen"})
			for range sub.All(context.Background()) {
				end()
			}
		},
	} {
		for how, end := range map[string]func(){"panic": func() { panic("user") }, "Goexit": runtime.Goexit} {
			t.Run(name+" "+how, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					q := queuetest.OpenForRun(t, codeq.Options{Shards: 2})
					for range 600 { // more than a page
						id := queuetest.Produce(t, q, codeq.Task{Queue: "dead"})[0]
						l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"dead"}})
						require.NoError(t, err)
						require.Equal(t, id, l.ID)
						require.NoError(t, q.DeadLetter(t.Context(), l.Receipt, nil))
					}
					time.Sleep(time.Second)
					for range 3 {
						var caught any
						var gone sync.WaitGroup
						gone.Go(func() {
							defer func() { caught = recover() }()
							call(q, end)
						})
						gone.Wait()
						require.Equal(t, how == "panic", caught != nil)
					}
					require.NoError(t, q.Pause(t.Context(), "a"))
					n, err := q.PurgeDead(t.Context(), codeq.DeadFilter{})
					require.NoError(t, err)
					require.Equal(t, 600, n)
					require.False(t, queuetest.Watched(q))
					require.NoError(t, q.Close())
				})
			})
		}
	}
}
