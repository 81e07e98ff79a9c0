package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/test/queuetest"
)

// seen notes the calls of a middleware.
type seen struct {
	mu    sync.Mutex
	calls []codeq.Producing
}

// take returns the calls since the last take.
func (s *seen) take() []codeq.Producing {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer func() { s.calls = nil }()
	return s.calls
}

// prefixing returns a middleware that puts a text before each payload.
func (s *seen) prefixing(text string) codeq.ProduceMiddleware {
	return func(next codeq.ProduceFunc) codeq.ProduceFunc {
		return func(ctx context.Context, p codeq.Producing) ([]codeq.ID, error) {
			s.mu.Lock()
			s.calls = append(s.calls, codeq.Producing{FollowUp: p.FollowUp, Schedule: p.Schedule, Tasks: slices.Clone(p.Tasks)})
			s.mu.Unlock()
			for i := range p.Tasks {
				p.Tasks[i].Payload = append([]byte(text), p.Tasks[i].Payload...)
			}
			return next(ctx, p)
		}
	}
}

// TestProduceMiddleware: all ways to store tasks go through the middleware, the first one
// outermost, and the caller's tasks stay as they are.
func TestProduceMiddleware(t *testing.T) {
	var s seen
	producing := []codeq.ProduceMiddleware{s.prefixing("outer "), s.prefixing("inner ")}
	queuetest.Bubble(t, codeq.Options{Shards: 2, Producing: producing}, func(t *testing.T, q *codeq.Queue) {
		ctx := t.Context()
		task := codeq.Task{Queue: "a", Payload: []byte("x")}
		take := func(followUp bool, schedule string) *codeq.Lease {
			t.Helper()
			l := queuetest.ClaimNow(t, q, "a")
			require.NotNil(t, l)
			require.Equal(t, "inner outer x", string(l.Payload))
			require.Equal(t, "x", string(task.Payload))
			calls := s.take()
			require.Len(t, calls, 2)
			for _, p := range calls {
				require.Equal(t, followUp, p.FollowUp)
				require.Equal(t, schedule, p.Schedule)
			}
			return l
		}
		_, err := q.Produce(ctx, task)
		require.NoError(t, err)
		require.NoError(t, q.Complete(ctx, take(false, "").Receipt, nil, task))
		require.NoError(t, q.CompleteBatch(ctx, []codeq.Completion{{Receipt: take(true, "").Receipt, Next: []codeq.Task{task}}}))
		require.NoError(t, q.Complete(ctx, take(true, "").Receipt, nil))

		batch := []codeq.Task{task, task}
		_, err = q.ProduceBatch(ctx, batch)
		require.NoError(t, err)
		require.Equal(t, "x", string(batch[1].Payload))
		first := queuetest.ClaimNow(t, q, "a").Receipt
		require.NoError(t, q.Complete(ctx, first, nil))
		require.NoError(t, q.Complete(ctx, take(false, "").Receipt, nil))

		called := make(chan error)
		go func() {
			_, err := codeq.Call[int](ctx, q, task)
			called <- err
		}()
		synctest.Wait()
		require.NoError(t, q.Complete(ctx, take(false, "").Receipt, nil))
		require.NoError(t, <-called)

		require.NoError(t, q.SetSchedule(ctx, codeq.Schedule{Name: "s", Every: time.Second, Task: task}))
		l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}})
		require.NoError(t, err)
		require.Equal(t, "inner outer x", string(l.Payload))
		calls := s.take()
		require.Len(t, calls, 2)
		require.Equal(t, "s", calls[0].Schedule)
		require.NoError(t, q.DeleteSchedule(ctx, "s"))

		m := new(codeq.Mux)
		codeq.Handle(m, "b", func(ctx context.Context, j *codeq.Job[[]byte]) error {
			j.FollowUp(task)
			return nil
		})
		_, err = q.Produce(ctx, codeq.Task{Queue: "b"})
		require.NoError(t, err)
		s.take()
		run, stop := context.WithCancel(ctx)
		ended := make(chan error)
		go func() { ended <- q.Run(run, m, nil) }()
		synctest.Wait()
		take(true, "")
		stop()
		require.NoError(t, <-ended)
	})
}

// TestProduceMiddlewareRefuses: an error of a middleware stores nothing, and is the caller's. That
// of a follow-up decides about the handler's task.
func TestProduceMiddlewareRefuses(t *testing.T) {
	errDown := errors.New("no key to encrypt by")
	var down atomic.Bool
	down.Store(true)
	refusing := func(next codeq.ProduceFunc) codeq.ProduceFunc {
		return func(ctx context.Context, p codeq.Producing) ([]codeq.ID, error) {
			if down.Load() && p.Tasks[0].Queue == "a" {
				return nil, errDown
			}
			return next(ctx, p)
		}
	}
	opts := codeq.Options{Shards: 1, Backoff: codeq.Backoff{Base: time.Second, Max: time.Second}, Producing: []codeq.ProduceMiddleware{refusing}}
	queuetest.Bubble(t, opts, func(t *testing.T, q *codeq.Queue) {
		ctx := t.Context()
		task := codeq.Task{Queue: "a"}
		_, err := q.Produce(ctx, task)
		require.ErrorIs(t, err, errDown)
		_, err = q.ProduceBatch(ctx, []codeq.Task{task})
		require.ErrorIs(t, err, errDown)
		_, err = codeq.Call[int](ctx, q, task)
		require.ErrorIs(t, err, errDown)
		require.ErrorIs(t, q.SetSchedule(ctx, codeq.Schedule{Name: "s", Every: time.Second, Task: task}), errDown)
		id := queuetest.Produce(t, q, codeq.Task{Queue: "b"})[0]
		require.ErrorIs(t, q.Complete(ctx, queuetest.ClaimNow(t, q, "b").Receipt, nil, task), errDown)
		require.Equal(t, codeq.Leased, queuetest.InfoOf(t, q, id).State)
		require.NoError(t, q.Cancel(ctx, id))

		for name, add := range map[string]func(*codeq.Mux, string){
			"handler": func(m *codeq.Mux, queue string) {
				codeq.Handle(m, queue, func(_ context.Context, j *codeq.Job[[]byte]) error {
					j.FollowUp(task)
					return nil
				})
			},
			"batch": func(m *codeq.Mux, queue string) {
				codeq.HandleBatch(m, queue, codeq.BatchOptions{}, func(_ context.Context, jobs []*codeq.Job[[]byte]) []error {
					jobs[0].FollowUp(task)
					return nil
				})
			},
		} {
			down.Store(true)
			m := new(codeq.Mux)
			add(m, name)
			id := queuetest.Produce(t, q, codeq.Task{Queue: name})[0]
			run, stop := context.WithCancel(ctx)
			ended := make(chan error)
			go func() { ended <- q.Run(run, m, nil) }()
			synctest.Wait()
			info := queuetest.InfoOf(t, q, id)
			require.Equal(t, codeq.Scheduled, info.State, "it is tried again")
			require.Equal(t, errDown.Error(), info.LastError)
			require.Zero(t, queuetest.CountsOf(t, q, "a").Total())
			down.Store(false)
			time.Sleep(2 * time.Second)
			require.NoError(t, q.Complete(ctx, queuetest.ClaimNow(t, q, "a").Receipt, nil))
			stop()
			require.NoError(t, <-ended)
		}
	})
}

// TestProduceMiddlewareTriesAgain: a middleware calls next again after an error: what the first
// call had is not stored.
func TestProduceMiddlewareTriesAgain(t *testing.T) {
	again := func(next codeq.ProduceFunc) codeq.ProduceFunc {
		return func(ctx context.Context, p codeq.Producing) ([]codeq.ID, error) {
			ids, err := next(ctx, p)
			if errors.Is(err, codeq.ErrInvalid) {
				p.Tasks[len(p.Tasks)-1].Priority = 0
				return next(ctx, p)
			}
			return ids, err
		}
	}
	queuetest.Bubble(t, codeq.Options{Shards: 1, Producing: []codeq.ProduceMiddleware{again}}, func(t *testing.T, q *codeq.Queue) {
		tasks := []codeq.Task{{Queue: "a"}, {Queue: "a", Priority: -1}}
		m := new(codeq.Mux)
		codeq.Handle(m, "b", func(_ context.Context, j *codeq.Job[[]byte]) error {
			j.FollowUp(tasks...)
			j.FollowUp(tasks...)
			return nil
		})
		id := queuetest.Produce(t, q, codeq.Task{Queue: "b", Retention: codeq.Forever})[0]
		run, stop := context.WithCancel(t.Context())
		ended := make(chan error)
		go func() { ended <- q.Run(run, m, nil) }()
		synctest.Wait()
		require.Equal(t, codeq.Done, queuetest.InfoOf(t, q, id).State)
		require.EqualValues(t, 4, queuetest.CountsOf(t, q, "a").Ready)
		queuetest.Produce(t, q, codeq.Task{Queue: "c"})
		require.NoError(t, q.Complete(t.Context(), queuetest.ClaimNow(t, q, "c").Receipt, nil, tasks...))
		require.EqualValues(t, 6, queuetest.CountsOf(t, q, "a").Ready)
		stop()
		require.NoError(t, <-ended)
	})
}

// TestProduceMiddlewareMisuse: mistakes of a middleware are refused.
func TestProduceMiddlewareMisuse(t *testing.T) {
	type produce = func(next codeq.ProduceFunc, ctx context.Context, p codeq.Producing) ([]codeq.ID, error)
	var do produce
	mw := func(next codeq.ProduceFunc) codeq.ProduceFunc {
		if do == nil {
			return nil
		}
		return func(ctx context.Context, p codeq.Producing) ([]codeq.ID, error) { return do(next, ctx, p) }
	}
	queuetest.Bubble(t, codeq.Options{Shards: 1, Producing: []codeq.ProduceMiddleware{mw}}, func(t *testing.T, q *codeq.Queue) {
		ctx := t.Context()
		task := codeq.Task{Queue: "a"}
		lease := func() codeq.Receipt {
			t.Helper()
			do = func(next codeq.ProduceFunc, ctx context.Context, p codeq.Producing) ([]codeq.ID, error) {
				return next(ctx, p)
			}
			queuetest.Produce(t, q, codeq.Task{Queue: "b"})
			return queuetest.ClaimNow(t, q, "b").Receipt
		}
		first, second := lease(), lease()
		calls := []func() error{
			func() error { _, err := q.Produce(ctx, task); return err },
			func() error { _, err := q.ProduceBatch(ctx, []codeq.Task{task}); return err },
			func() error { _, err := codeq.Call[int](ctx, q, task); return err },
			func() error { return q.SetSchedule(ctx, codeq.Schedule{Name: "s", Every: time.Hour, Task: task}) },
			func() error { return q.Complete(ctx, first, nil, task) },
			func() error {
				return q.CompleteBatch(ctx, []codeq.Completion{{Receipt: second, Next: []codeq.Task{task}}})
			},
		}
		for _, do = range []produce{
			nil,
			func(codeq.ProduceFunc, context.Context, codeq.Producing) ([]codeq.ID, error) { return nil, nil },
			func(next codeq.ProduceFunc, ctx context.Context, p codeq.Producing) ([]codeq.ID, error) {
				p.Tasks = append(p.Tasks, task)
				return next(ctx, p)
			},
			func(next codeq.ProduceFunc, ctx context.Context, p codeq.Producing) ([]codeq.ID, error) {
				p.Tasks[0].Priority = -1
				_, _ = next(ctx, p) // it hides the error
				return make([]codeq.ID, 1), nil
			},
		} {
			for _, call := range calls {
				require.ErrorIs(t, call(), codeq.ErrInvalid)
			}
		}
		require.Zero(t, queuetest.CountsOf(t, q, "a").Total())

		do = func(next codeq.ProduceFunc, ctx context.Context, p codeq.Producing) ([]codeq.ID, error) {
			_, err := next(ctx, p)
			return nil, err
		}
		id, err := q.Produce(ctx, task)
		require.NoError(t, err)
		require.Equal(t, codeq.Ready, queuetest.InfoOf(t, q, id).State, "its ID is that of next")

		errLate := errors.New("after next")
		do = func(next codeq.ProduceFunc, ctx context.Context, p codeq.Producing) ([]codeq.ID, error) {
			ids, err := next(ctx, p)
			require.NoError(t, err)
			_, err = next(ctx, p)
			require.ErrorIs(t, err, codeq.ErrInvalid, "it is stored")
			return ids, errLate
		}
		_, err = codeq.Call[int](ctx, q, task)
		require.ErrorIs(t, err, errLate)
		var stored *codeq.CallError
		require.ErrorAs(t, err, &stored)
		require.Equal(t, codeq.Ready, queuetest.InfoOf(t, q, stored.ID).State)

		do = func(next codeq.ProduceFunc, ctx context.Context, p codeq.Producing) ([]codeq.ID, error) {
			_, _ = next(ctx, p)
			panic("of a middleware")
		}
		require.Panics(t, func() { _, _ = codeq.Call[int](ctx, q, task) })
		require.Equal(t, 3, int(queuetest.CountsOf(t, q, "a").Ready))
	})
	_, err := codeq.Open(t.TempDir(), &codeq.Options{Producing: []codeq.ProduceMiddleware{nil}})
	require.ErrorIs(t, err, codeq.ErrInvalid)
}

// TestFollowUpMiddlewarePanics: a panic of the middleware fails the task with the follow-up, and no
// other one of a batch.
func TestFollowUpMiddlewarePanics(t *testing.T) {
	poisoned := func(next codeq.ProduceFunc) codeq.ProduceFunc {
		return func(ctx context.Context, p codeq.Producing) ([]codeq.ID, error) {
			if p.FollowUp && string(p.Tasks[0].Payload) == "7" {
				panic("boom")
			}
			return next(ctx, p)
		}
	}
	opts := codeq.Options{Shards: 1, MaxAttempts: 1, Producing: []codeq.ProduceMiddleware{poisoned}}
	queuetest.Bubble(t, opts, func(t *testing.T, q *codeq.Queue) {
		var m codeq.Mux
		codeq.HandleBatch(&m, "a", codeq.BatchOptions{}, func(_ context.Context, jobs []*codeq.Job[[]byte]) []error {
			for _, j := range jobs {
				j.FollowUp(codeq.Task{Queue: "next", Payload: j.Payload})
			}
			return nil
		})
		for i := range 20 {
			queuetest.Produce(t, q, codeq.Task{Queue: "a", Payload: fmt.Append(nil, i)})
		}
		startRun(t, q, &m, codeq.RunOptions{})
		synctest.Wait()
		require.EqualValues(t, 1, queuetest.CountsOf(t, q, "a").Dead)
		require.EqualValues(t, 19, queuetest.CountsOf(t, q, "next").Ready)
	})
}
