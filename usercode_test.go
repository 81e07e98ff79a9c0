package codeq

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// myErr is an error type of a user; of a nil *myErr every method panics.
type myErr struct{ text string }

func (e *myErr) Error() string { return e.text }

// hostileErr panics whatever it is asked.
type hostileErr struct{}

func (hostileErr) Error() string        { panic("Error") }
func (hostileErr) Unwrap() error        { panic("Unwrap") }
func (hostileErr) Is(error) bool        { panic("Is") }
func (hostileErr) As(any) bool          { panic("As") }
func (hostileErr) String() string       { panic("String") }
func (hostileErr) LogValue() slog.Value { panic("LogValue") }

// TestErrorsThatPanic: whatever error a handler returns, its attempt has failed as the handler says, and Run goes on.
func TestErrorsThatPanic(t *testing.T) {
	var null *myErr
	for name, tc := range map[string]struct {
		err   func() error
		state State
		text  string // in LastError
	}{
		"nil pointer":          {func() error { return null }, Scheduled, "*codeq.myErr"},
		"retry":                {func() error { return RetryAfter(time.Hour, null) }, Scheduled, "*codeq.myErr"},
		"dead letter":          {func() error { return DeadLetter(null) }, Dead, "*codeq.myErr"},
		"wrapped dead letter":  {func() error { return fmt.Errorf("x: %w", DeadLetter(null)) }, Dead, "x: "},
		"joined":               {func() error { return errors.Join(DeadLetter(null), null) }, Dead, "*errors.joinError"},
		"retry of dead letter": {func() error { return RetryAfter(time.Hour, DeadLetter(null)) }, Scheduled, "*codeq.myErr"},
		"snooze":               {func() error { return errors.Join(Snooze(time.Hour), null) }, Scheduled, ""},
		"hostile":              {func() error { return hostileErr{} }, Scheduled, "codeq.hostileErr"},
		"hostile dead letter":  {func() error { return DeadLetter(hostileErr{}) }, Dead, "codeq.hostileErr"},
		"panic":                {func() error { panic(null) }, Scheduled, "panic: "},
		"hostile panic":        {func() error { panic(hostileErr{}) }, Scheduled, "panic: "},
	} {
		for _, middleware := range []bool{false, true} {
			t.Run(fmt.Sprint(name, middleware), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					q := openForRun(t, Options{})
					var m Mux
					if middleware {
						m.Use(func(next Handler) Handler { return func(ctx context.Context, l *Lease) error { return next(ctx, l) } })
					}
					Handle(&m, "a", func(_ context.Context, j *Job[string]) error {
						if j.Args == "well" {
							return nil
						}
						return tc.err()
					})
					run := startRun(t, q, &m, RunOptions{Concurrency: 1})
					id := produce(t, q, Task{Queue: "a", Payload: []byte(`"ill"`)})[0]
					synctest.Wait()
					info := infoOf(t, q, id)
					require.Equal(t, tc.state, info.State)
					require.Contains(t, info.LastError, tc.text)
					produce(t, q, Task{Queue: "a", Payload: []byte(`"well"`)})
					synctest.Wait()
					require.Zero(t, countsOf(t, q, "a").Ready)
					require.NoError(t, run.end(nil))
				})
			})
		}
	}
}

// TestCausesThatPanic: the same for the verbs.
func TestCausesThatPanic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, Options{})
		for _, cause := range []error{(*myErr)(nil), hostileErr{}} {
			id := produce(t, q, Task{Queue: "a"})[0]
			claim := func() Receipt {
				l, err := q.Claim(t.Context(), ClaimRequest{Queues: []string{"a"}, NoWait: true})
				require.NoError(t, err)
				return l.Receipt
			}
			require.NoError(t, q.Retry(t.Context(), claim(), RetryOptions{Err: cause, After: -1}))
			require.Contains(t, infoOf(t, q, id).LastError, fmt.Sprintf("%T", cause))
			require.NoError(t, q.DeadLetter(t.Context(), claim(), cause))
			require.Equal(t, Dead, infoOf(t, q, id).State)
		}
	})
}

// TestOnErrorEnds: an OnError that panics, or ends its goroutine, keeps no attempt from being stored, and no worker
// from working.
func TestOnErrorEnds(t *testing.T) {
	for name, end := range map[string]func(){"panic": func() { panic("OnError") }, "Goexit": runtime.Goexit} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				rec := newRecorder()
				q := openForRun(t, Options{Logger: slog.New(rec)})
				var m Mux
				Handle(&m, "a", func(_ context.Context, j *Job[[]byte]) error {
					switch string(j.Args) {
					case "dead":
						return DeadLetter(errors.New("boom"))
					case "goexit":
						runtime.Goexit()
					case "lost":
						loseLease(t, q, j.ID)
					}
					return nil
				})
				ctx, cancel := context.WithCancel(t.Context())
				ended := make(chan error)
				var mu sync.Mutex
				told := 0
				go func() {
					ended <- q.Run(ctx, &m, &RunOptions{Concurrency: 2, OnError: func(*Lease, error) {
						mu.Lock()
						told++
						mu.Unlock()
						end()
					}})
				}()
				for range 3 { // more than there are workers
					produce(t, q, Task{Queue: "a", Payload: []byte("dead")}, Task{Queue: "a", Payload: []byte("goexit"), MaxAttempts: 1},
						Task{Queue: "a", Payload: []byte("lost")}, Task{Queue: "a"})
				}
				time.Sleep(time.Minute)
				synctest.Wait()
				require.EqualValues(t, 9, countsOf(t, q, "a").Dead)
				require.Zero(t, countsOf(t, q, "a").Ready)
				cancel()
				require.NoError(t, <-ended)
				require.GreaterOrEqual(t, told, 9)
				require.Equal(t, name == "panic", strings.Contains(rec.text.String(), "OnError has panicked"))
			})
		})
	}
}

// panickyCodec panics, or ends its goroutine.
type panickyCodec struct{ end func() }

func (c panickyCodec) Marshal(any) ([]byte, error) { c.end(); return nil, nil }
func (c panickyCodec) Unmarshal([]byte, any) error { c.end(); return nil }

// TestHandlersThatEnd: codecs and middleware that panic, or end the goroutine, fail the attempt and nothing else.
func TestHandlersThatEnd(t *testing.T) {
	for name, end := range map[string]func(){"panic": func() { panic("user") }, "Goexit": runtime.Goexit} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := openForRun(t, Options{MaxAttempts: 1})
				var m Mux
				m.Use(func(next Handler) Handler {
					return func(ctx context.Context, l *Lease) error {
						if l.Queue == "middleware" {
							end()
						}
						return next(ctx, l)
					}
				})
				Handle(&m, "middleware", func(context.Context, *Job[[]byte]) error { return nil })
				Handle(&m, "unmarshal", func(context.Context, *Job[int]) error { return nil }, WithCodec(panickyCodec{end}))
				Handle(&m, "marshal", func(_ context.Context, j *Job[[]byte]) error { return j.SetResultValue(1) }, WithCodec(panickyCodec{end}))
				run := startRun(t, q, &m, RunOptions{Concurrency: 2})
				for _, queue := range m.Queues() {
					for range 3 {
						produce(t, q, Task{Queue: queue, Payload: []byte("1")})
					}
				}
				synctest.Wait()
				for _, queue := range m.Queues() {
					require.Equal(t, Counts{Dead: 3}, countsOf(t, q, queue), queue)
				}
				require.Len(t, run.reported(), 9)
				require.NoError(t, run.end(nil))
			})
		})
	}
}

// TestCallersFunctionsEnd: a function that a caller hands in panics, or ends the goroutine, in the caller's
// call; nothing is left of that call, and all that follow work.
func TestCallersFunctionsEnd(t *testing.T) {
	for name, call := range map[string]func(q *Queue, end func()){
		"Configure": func(q *Queue, end func()) { _ = q.Configure(context.Background(), "a", func(*Settings) { end() }) },
		"Match": func(q *Queue, end func()) {
			_, _ = q.RedriveAllDead(context.Background(), DeadFilter{Match: func(*TaskInfo) bool { end(); return true }})
		},
		"List": func(q *Queue, end func()) {
			for range q.List(context.Background(), ListOptions{State: Dead}) {
				end()
			}
		},
		"All": func(q *Queue, end func()) {
			sub, _ := q.Subscribe(SubscribeOptions{})
			defer sub.Close()
			_, _ = q.Produce(context.Background(), Task{Queue: "seen"})
			for range sub.All(context.Background()) {
				end()
			}
		},
	} {
		for how, end := range map[string]func(){"panic": func() { panic("user") }, "Goexit": runtime.Goexit} {
			t.Run(name+" "+how, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					q := openForRun(t, Options{Shards: 2})
					for range 600 { // more than a page
						id := produce(t, q, Task{Queue: "dead"})[0]
						l, err := q.Claim(t.Context(), ClaimRequest{Queues: []string{"dead"}})
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
					n, err := q.PurgeDead(t.Context(), DeadFilter{})
					require.NoError(t, err)
					require.Equal(t, 600, n)
					require.Zero(t, len(q.events.all()))
					require.NoError(t, q.Close())
				})
			})
		}
	}
}

// TestConfigureWithinItself: it would wait for its own end; or, of another queue, perhaps for who waits for it.
func TestConfigureWithinItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, other := openForRun(t, Options{}), openForRun(t, Options{})
		var inner []error
		err := q.Configure(t.Context(), "a", func(s *Settings) {
			s.Concurrency = 3
			inner = append(inner, q.Pause(t.Context(), "a"), q.Resume(t.Context(), "b"),
				q.Configure(t.Context(), "a", func(*Settings) { t.Error("called") }),
				other.Pause(t.Context(), "a"))
		})
		require.NoError(t, err)
		require.Len(t, inner, 4)
		for _, err := range inner {
			require.ErrorIs(t, err, ErrInvalid)
			require.ErrorContains(t, err, "within the function")
		}
		s, err := q.Settings("a")
		require.NoError(t, err)
		require.Equal(t, Settings{Concurrency: 3}, s)
	})
}

// userHandler is a slog.Handler of a user.
type userHandler struct {
	before func(message string) // each record
	mu     *sync.Mutex
	seen   *[]string
}

func newUserHandler(before func(string)) userHandler {
	return userHandler{before, new(sync.Mutex), new([]string)}
}

func (h userHandler) Enabled(context.Context, slog.Level) bool { return true }
func (h userHandler) WithAttrs([]slog.Attr) slog.Handler       { return h }
func (h userHandler) WithGroup(string) slog.Handler            { return h }

func (h userHandler) Handle(_ context.Context, r slog.Record) error {
	h.before(r.Message)
	text := r.Message
	r.Attrs(func(a slog.Attr) bool { text += " " + a.String(); return true })
	h.mu.Lock()
	defer h.mu.Unlock()
	*h.seen = append(*h.seen, text)
	return nil
}

// TestLoggerBlocks: nothing waits for a handler of log records, and what it was not in time for is counted.
func TestLoggerBlocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		h := newUserHandler(func(string) { <-gate })
		q := openForRun(t, Options{Logger: slog.New(h)})
		const records = 1024 + 500
		s := q.led()[0]
		for range records { // the owner logs
			require.NoError(t, s.probe(func(s *shard) error { s.opts.log.Info("from the owner"); return nil }))
		}
		produce(t, q, Task{Queue: "a"})
		close(gate)
		synctest.Wait()
		const taken = 1024 + 1 // one was in its hands when the queue was full
		require.Equal(t, []string{"log records lost, as the handler did not take them count=499"}, (*h.seen)[taken:])
		require.Equal(t, slices.Repeat([]string{"from the owner"}, taken), (*h.seen)[:taken])
		require.NoError(t, q.Close())
	})
}

// TestLoggerBlocksClose: Close gives the handler a second.
func TestLoggerBlocksClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		q := openForRun(t, Options{Logger: slog.New(newUserHandler(func(string) { <-gate }))})
		q.opts.log.Info("first")
		q.opts.log.Info("second")
		begun := time.Now()
		require.NoError(t, q.Close())
		require.Equal(t, time.Second, time.Since(begun))
		close(gate) // its goroutine ends, or the bubble does not
	})
}

// TestLoggerEnds: a handler that panics, or ends its goroutine, is called for the next record.
func TestLoggerEnds(t *testing.T) {
	for name, end := range map[string]func(){"panic": func() { panic("user") }, "Goexit": runtime.Goexit} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				h := newUserHandler(func(message string) {
					if message == "bad" {
						end()
					}
				})
				q := openForRun(t, Options{Logger: slog.New(h)})
				for _, message := range []string{"good", "bad", "bad", "good"} {
					q.opts.log.With("shard", 1).Info(message)
					synctest.Wait()
				}
				lost := "log records lost, as the handler did not take them count="
				require.Equal(t, []string{"good", lost + "1", lost + "1", "good"}, *h.seen)
				require.NoError(t, q.Close())
			})
		})
	}
}
