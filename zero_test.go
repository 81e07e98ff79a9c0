package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
)

// takesContext reports whether a method of *Queue has a context among its arguments.
func takesContext(name string) bool {
	method, _ := reflect.TypeFor[*codeq.Queue]().MethodByName(name)
	return method.Type.NumIn() > 1 && method.Type.In(1) == reflect.TypeFor[context.Context]()
}

// outcome is the error of a call, or what it panics with.
func outcome(call func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("panic: %v", v)
		}
	}()
	return call()
}

// TestQueueNotOpened: every method of a nil Queue, and of a zero one, says what is wrong.
func TestQueueNotOpened(t *testing.T) {
	var mux codeq.Mux
	codeq.Handle(&mux, "verbs", func(context.Context, *codeq.Job[[]byte]) error { return nil })
	task := codeq.Task{Queue: "verbs", Unique: codeq.Unique{Key: "k"}}
	for name, q := range map[string]*codeq.Queue{"nil": nil, "zero": new(codeq.Queue)} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				verbs := verbsOf(t, q, &mux, []codeq.Task{task}, []codeq.ID{{1}, {2}})
				require.Len(t, verbs, reflect.TypeFor[*codeq.Queue]().NumMethod()-1)
				verbs["Close"] = func(context.Context) error { return q.Close() }
				for verb, call := range verbs {
					for range 2 {
						err := outcome(func() error { return call(context.Background()) })
						require.ErrorIs(t, err, codeq.ErrClosed, verb)
						require.ErrorContains(t, err, "Open", verb)
						require.NotErrorIs(t, err, codeq.ErrUncertain, verb)
					}
				}
				ids, err := q.ProduceBatch(t.Context(), nil)
				require.Empty(t, ids)
				require.ErrorIs(t, err, codeq.ErrClosed)
			})
		})
	}
}

// TestNilContext: every method with a context refuses a nil one, and does nothing.
func TestNilContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, codeq.Options{Shards: 2})
		var mux codeq.Mux
		codeq.Handle(&mux, "verbs", func(context.Context, *codeq.Job[[]byte]) error { return errors.New("called") })
		verbs := everyVerb(t, q, &mux)
		before, err := q.Stats(t.Context())
		require.NoError(t, err)
		var none context.Context
		refused := func(name string, call func(ctx context.Context) error) {
			err := outcome(func() error { return call(none) })
			var invalid *codeq.InvalidError
			require.ErrorAs(t, err, &invalid, name)
			require.Equal(t, "ctx", invalid.Field, name)
		}
		for name, call := range verbs {
			if takesContext(name) {
				refused(name, call)
			}
		}
		sub, err := q.Subscribe(codeq.SubscribeOptions{})
		require.NoError(t, err)
		defer sub.Close()
		refused("Next", func(ctx context.Context) error { _, err := sub.Next(ctx); return err })
		refused("All", func(ctx context.Context) (err error) {
			for _, err = range sub.All(ctx) {
			}
			return err
		})
		_, ok := codeq.LeaseFrom(none)
		require.False(t, ok)
		require.Equal(t, slog.New(slog.DiscardHandler), codeq.LoggerFrom(none))
		after, err := q.Stats(t.Context())
		require.NoError(t, err)
		require.Equal(t, before, after)
		require.ErrorIs(t, q.Configure(t.Context(), "verbs", nil), codeq.ErrInvalid)
		require.NoError(t, q.Pause(t.Context(), "verbs"), "nothing was left behind")
	})
}

// TestZeroSubscription: one that Subscribe has not made has ended.
func TestZeroSubscription(t *testing.T) {
	for name, sub := range map[string]*codeq.Subscription{"nil": nil, "zero": new(codeq.Subscription)} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				for range 2 {
					_, err := sub.Next(t.Context())
					require.ErrorIs(t, err, codeq.ErrClosed)
					require.ErrorContains(t, err, "Subscribe")
					n := 0
					for _, err := range sub.All(t.Context()) {
						require.ErrorIs(t, err, codeq.ErrClosed)
						n++
					}
					require.Equal(t, 1, n)
					require.Zero(t, sub.Lost())
					sub.Close()
				}
			})
		})
	}
}

// TestZeroJob: a Job that a program has made itself, as in a test of its handlers, says so.
func TestZeroJob(t *testing.T) {
	for name, job := range map[string]*codeq.Job[string]{
		"nil": nil, "zero": {}, "with a lease": {Lease: &codeq.Lease{Task: codeq.Task{Queue: "a"}}, Args: "a"},
	} {
		t.Run(name, func(t *testing.T) {
			const want = "codeq: this Job was not made by Handle"
			require.PanicsWithValue(t, want, func() { job.SetResult(nil) })
			require.PanicsWithValue(t, want, func() { job.FollowUp(codeq.Task{Queue: "b"}) })
			require.EqualError(t, job.SetResultValue(time.Hour), want)
		})
	}
}

// panickyContext panics when it is asked whether it has ended.
type panickyContext struct{ context.Context }

func (panickyContext) Err() error { panic("Err") }

// TestContextThatPanics ends the call that it was given to, and keeps no other from the shard.
func TestContextThatPanics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, codeq.Options{})
		ctx := panickyContext{t.Context()}
		for name, call := range map[string]func() error{
			"Produce": func() error { _, err := q.Produce(ctx, codeq.Task{Queue: "a"}); return err },
			"Claim":   func() error { _, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}}); return err },
			"Stats":   func() error { _, err := q.Stats(ctx); return err },
		} {
			require.EqualError(t, outcome(call), "panic: Err", name)
		}
		id := produce(t, q, codeq.Task{Queue: "a"})[0]
		l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}})
		require.NoError(t, err)
		require.Equal(t, id, l.ID)
		require.NoError(t, q.Complete(t.Context(), l.Receipt, nil))
	})
}
