package codeq_test

import (
	"context"
	"errors"
	"log/slog"
	"runtime"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
)

// TestOnErrorEnds: an OnError that panics, or ends its goroutine, keeps no attempt from being
// stored, and no worker from working.
func TestOnErrorEnds(t *testing.T) {
	for name, end := range map[string]func(){"panic": func() { panic("OnError") }, "Goexit": runtime.Goexit} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				rec := newRecorder()
				q := openForRun(t, codeq.Options{Logger: slog.New(rec)})
				var m codeq.Mux
				codeq.Handle(&m, "a", func(_ context.Context, j *codeq.Job[[]byte]) error {
					switch string(j.Args) {
					case "dead":
						return codeq.DeadLetter(errors.New("boom"))
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
					ended <- q.Run(ctx, &m, &codeq.RunOptions{Concurrency: 2, OnError: func(*codeq.Lease, error) {
						mu.Lock()
						told++
						mu.Unlock()
						end()
					}})
				}()
				for range 3 { // more than there are workers
					produce(t, q, codeq.Task{Queue: "a", Payload: []byte("dead")}, codeq.Task{Queue: "a", Payload: []byte("goexit"), MaxAttempts: 1},
						codeq.Task{Queue: "a", Payload: []byte("lost")}, codeq.Task{Queue: "a"})
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

// TestHandlersThatEnd: codecs and middleware that panic, or end the goroutine, fail the attempt and
// nothing else.
func TestHandlersThatEnd(t *testing.T) {
	for name, end := range map[string]func(){"panic": func() { panic("user") }, "Goexit": runtime.Goexit} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				q := openForRun(t, codeq.Options{MaxAttempts: 1})
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
						produce(t, q, codeq.Task{Queue: queue, Payload: []byte("1")})
					}
				}
				synctest.Wait()
				for _, queue := range m.Queues() {
					require.Equal(t, codeq.Counts{Dead: 3}, countsOf(t, q, queue), queue)
				}
				require.Len(t, run.Reported(), 9)
				require.NoError(t, run.End(nil))
			})
		})
	}
}

// TestConfigureWithinItself: it would wait for its own end; or, of another queue, perhaps for who
// waits for it.
func TestConfigureWithinItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q, other := openForRun(t, codeq.Options{}), openForRun(t, codeq.Options{})
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
