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

// MyErr is an error type of a user; of a nil *MyErr every method panics.
type MyErr struct{ text string }

func (e *MyErr) Error() string { return e.text }

// HostileErr panics whatever it is asked.
type HostileErr struct{}

func (HostileErr) Error() string        { panic("Error") }
func (HostileErr) Unwrap() error        { panic("Unwrap") }
func (HostileErr) Is(error) bool        { panic("Is") }
func (HostileErr) As(any) bool          { panic("As") }
func (HostileErr) String() string       { panic("String") }
func (HostileErr) LogValue() slog.Value { panic("LogValue") }

// TestErrorsThatPanic: whatever error a handler returns, its attempt has failed as the handler
// says, and Run goes on.
func TestErrorsThatPanic(t *testing.T) {
	var null *MyErr
	for name, tc := range map[string]struct {
		err   func() error
		state State
		text  string // in LastError
	}{
		"nil pointer":          {func() error { return null }, Scheduled, "*codeq.MyErr"},
		"retry":                {func() error { return RetryAfter(time.Hour, null) }, Scheduled, "*codeq.MyErr"},
		"dead letter":          {func() error { return DeadLetter(null) }, Dead, "*codeq.MyErr"},
		"wrapped dead letter":  {func() error { return fmt.Errorf("x: %w", DeadLetter(null)) }, Dead, "x: "},
		"joined":               {func() error { return errors.Join(DeadLetter(null), null) }, Dead, "*errors.joinError"},
		"retry of dead letter": {func() error { return RetryAfter(time.Hour, DeadLetter(null)) }, Scheduled, "*codeq.MyErr"},
		"snooze":               {func() error { return errors.Join(Snooze(time.Hour), null) }, Scheduled, ""},
		"hostile":              {func() error { return HostileErr{} }, Scheduled, "codeq.HostileErr"},
		"hostile dead letter":  {func() error { return DeadLetter(HostileErr{}) }, Dead, "codeq.HostileErr"},
		"panic":                {func() error { panic(null) }, Scheduled, "panic: "},
		"hostile panic":        {func() error { panic(HostileErr{}) }, Scheduled, "panic: "},
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
					require.NoError(t, run.End(nil))
				})
			})
		}
	}
}

// TestCausesThatPanic: the same for the verbs.
func TestCausesThatPanic(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, Options{})
		for _, cause := range []error{(*MyErr)(nil), HostileErr{}} {
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

// TestCallersFunctionsEnd: a function that a caller hands in panics, or ends the goroutine, in the
// caller's call; nothing is left of that call, and all that follow work.
func TestCallersFunctionsEnd(t *testing.T) {
	t.Parallel()
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
					require.False(t, watched(q))
					require.NoError(t, q.Close())
				})
			})
		}
	}
}

// userHandler is a slog.Handler of a user.
type userHandler struct {
	before func(message string) // each record
	mu     *sync.Mutex
	Seen   *[]string
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
	*h.Seen = append(*h.Seen, text)
	return nil
}

// about returns the records that begin with some text, sorted.
func (h userHandler) about(text string) []string {
	h.mu.Lock()
	defer h.mu.Unlock()
	records := slices.DeleteFunc(slices.Clone(*h.Seen), func(r string) bool { return !strings.HasPrefix(r, text) })
	slices.Sort(records)
	return records
}

// TestLoggerBlocks: nothing waits for a handler of log records, and what it was not in time for is
// counted.
func TestLoggerBlocks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		h := newUserHandler(func(string) { <-gate })
		q := openForRun(t, Options{Logger: slog.New(h)})
		const records = 1024 + 500
		for range records { // the owner logs
			logFromOwner(t, q, 0, "from the owner")
		}
		produce(t, q, Task{Queue: "a"})
		close(gate)
		synctest.Wait()
		const taken = 1024 + 1 // one was in its hands when the queue was full
		require.Equal(t, []string{"log records lost, as the handler did not take them count=499"}, (*h.Seen)[taken:])
		require.Equal(t, slices.Repeat([]string{"from the owner"}, taken), (*h.Seen)[:taken])
		require.NoError(t, q.Close())
	})
}

// TestLoggerBlocksClose: Close gives the handler a second.
func TestLoggerBlocksClose(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		gate := make(chan struct{})
		q := openForRun(t, Options{Logger: slog.New(newUserHandler(func(string) { <-gate }))})
		logOf(q).Info("first")
		logOf(q).Info("second")
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
					logOf(q).With("shard", 1).Info(message)
					synctest.Wait()
				}
				lost := "log records lost, as the handler did not take them count="
				require.Equal(t, []string{"good", lost + "1", lost + "1", "good"}, *h.Seen)
				require.NoError(t, q.Close())
			})
		})
	}
}
