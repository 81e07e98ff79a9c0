package codeq_test

import (
	"context"
	texts "encoding"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/dispatch"
	"codeq/test/queuetest"
)

// requirePrefix requires that an error begins with the name of the package and contains it once.
// The same holds for each line of joined errors.
func requirePrefix(t *testing.T, what string, err error) {
	t.Helper()
	require.Error(t, err, what)
	for line := range strings.Lines(err.Error()) {
		require.True(t, strings.HasPrefix(line, "codeq: "), "%s: %v", what, err)
		require.Equal(t, 1, strings.Count(line, "codeq: "), "%s: %v", what, err)
	}
}

// TestErrorPrefix: each exported function and method returns errors with the prefix when it refuses
// a call.
func TestErrorPrefix(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Shards: 2})
		sub, err := q.Subscribe(codeq.SubscribeOptions{})
		require.NoError(t, err)
		defer sub.Close()
		live := queuetest.Produce(t, q, codeq.Task{Queue: "live", RunAt: time.Now().Add(24 * time.Hour)})[0]
		_, err = q.ProduceBatch(t.Context(), []codeq.Task{queuetest.Keyed("k"), queuetest.Keyed("k"), queuetest.Keyed("k")})
		require.ErrorIs(t, err, codeq.ErrDuplicate)
		requirePrefix(t, "duplicates", err)

		var m codeq.Mux
		codeq.Handle(&m, "verbs", func(context.Context, *codeq.Job[[]byte]) error { return nil })
		// verb calls a method with zero values.
		verb := func(name string, ctx context.Context) (err error) {
			method := reflect.ValueOf(q).MethodByName(name)
			args := []reflect.Value{reflect.ValueOf(&ctx).Elem()}
			for i := range method.Type().NumIn() {
				if in := method.Type().In(i); in != reflect.TypeFor[context.Context]() && !(i > 0 && method.Type().IsVariadic() && i == method.Type().NumIn()-1) {
					args = append(args, reflect.Zero(in))
				}
			}
			if !queuetest.TakesContext(name) {
				args = args[1:]
			}
			out := method.Call(args)
			last := out[len(out)-1]
			if last.Kind() == reflect.Func { // an iterator
				for _, v := range last.Seq2() {
					err, _ = v.Interface().(error)
				}
				return err
			}
			err, _ = last.Interface().(error)
			return err
		}
		mayWork := map[string]bool{
			"CompleteBatch": true, "RetryBatch": true, "DeadLetterBatch": true, "ReleaseBatch": true,
			"Apply": true, "Close": true, "DeadKinds": true, "Health": true, "Info": true, "ListPage": true, "ProduceBatch": true, "ProcessInfo": true, "PurgeDead": true, "QuietWorkers": true, "RedriveAllDead": true,
			"ResumeWorkers": true, "Schedules": true, "Stats": true, "StorageStats": true, "Subscribe": true, "WaitIdle": true, "WaitReady": true, "Workers": true,
		}
		typ := reflect.TypeFor[*codeq.Queue]()
		for i := range typ.NumMethod() {
			if name := typ.Method(i).Name; !mayWork[name] {
				requirePrefix(t, name, verb(name, t.Context()))
			}
		}

		ended, cancel := context.WithCancelCause(t.Context())
		cancel(fmt.Errorf("%w: shard 7: %w", codeq.ErrFailed, errors.New("a cause")))
		for name, call := range queuetest.VerbsOf(t, q, &m, []codeq.Task{{Queue: "verbs"}}, []codeq.ID{live, live}) {
			if queuetest.TakesContext(name) {
				requirePrefix(t, name, call(nil))
				if name != "Run" {
					requirePrefix(t, name, call(ended))
				}
			}
		}
		_, err = sub.Next(ended)
		requirePrefix(t, "Next", err)
		require.EqualError(t, err, "codeq: context canceled: shard failed: shard 7: a cause")
		require.ErrorIs(t, err, codeq.ErrFailed)

		require.NoError(t, q.Close())
		for name, call := range queuetest.VerbsOf(t, q, &m, []codeq.Task{{Queue: "verbs"}}, []codeq.ID{live, live}) {
			requirePrefix(t, name, call(context.Background()))
		}
	})

	file := filepath.Join(t.TempDir(), "file")
	require.NoError(t, os.WriteFile(file, nil, 0o600))
	strange := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(strange, "strange"), nil, 0o600))
	damaged := t.TempDir()
	require.NoError(t, os.WriteFile(filepath.Join(damaged, "CODEQ"), []byte("{"), 0o600))
	for _, dir := range []string{"", file, strange, damaged, filepath.Join(file, "below")} {
		q, err := codeq.Open(dir, nil)
		require.Nil(t, q)
		requirePrefix(t, "Open", err)
		_, err = codeq.Verify(dir, nil)
		requirePrefix(t, "Verify", err)
		requirePrefix(t, "RecoverCluster", codeq.RecoverCluster(dir, nil))
	}
	_, err := codeq.Open(t.TempDir(), &codeq.Options{Shards: -1})
	requirePrefix(t, "Open", err)

	_, err = codeq.NewTask("a", make(chan int))
	requirePrefix(t, "NewTask", err)
	_, err = codeq.ResultAs[int](&codeq.TaskInfo{})
	requirePrefix(t, "ResultAs", err)
	_, err = codeq.ResultAs[int](&codeq.TaskInfo{State: codeq.Done, Result: []byte("x")})
	requirePrefix(t, "ResultAs", err)
	_, err = codeq.ParseID("x")
	requirePrefix(t, "ParseID", err)
	requirePrefix(t, "Receipt", new(codeq.Receipt).UnmarshalText(nil))
	requirePrefix(t, "State", new(codeq.State).UnmarshalText(nil))
}

// outcome returns the error of a call, or its panic as an error.
func outcome(call func() error) (err error) {
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("panic: %v", v)
		}
	}()
	return call()
}

// TestQueueNotOpened: every method of a nil or zero Queue returns an error that names Open.
func TestQueueNotOpened(t *testing.T) {
	var mux codeq.Mux
	codeq.Handle(&mux, "verbs", func(context.Context, *codeq.Job[[]byte]) error { return nil })
	task := codeq.Task{Queue: "verbs", Unique: codeq.Unique{Key: "k"}}
	for name, q := range map[string]*codeq.Queue{"nil": nil, "zero": new(codeq.Queue)} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				verbs := queuetest.VerbsOf(t, q, &mux, []codeq.Task{task}, []codeq.ID{{1}, {2}})
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

// TestNilContext: every method with a context refuses a nil context and has no effect.
func TestNilContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Shards: 2})
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
			if queuetest.TakesContext(name) {
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

// TestZeroSubscription: a Subscription that Subscribe did not create has ended.
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

// TestZeroJob: a Job that Handle did not create, for example in a test of a handler, says so.
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

// panickyContext panics in Err.
type panickyContext struct{ context.Context }

func (panickyContext) Err() error { panic("Err") }

// TestContextThatPanics: the panic of a context ends its own call, and the shard serves all other
// calls.
func TestContextThatPanics(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{})
		ctx := panickyContext{t.Context()}
		for name, call := range map[string]func() error{
			"Produce": func() error { _, err := q.Produce(ctx, codeq.Task{Queue: "a"}); return err },
			"Claim":   func() error { _, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}}); return err },
			"Stats":   func() error { _, err := q.Stats(ctx); return err },
		} {
			require.EqualError(t, outcome(call), "panic: Err", name)
		}
		id := queuetest.Produce(t, q, codeq.Task{Queue: "a"})[0]
		l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}})
		require.NoError(t, err)
		require.Equal(t, id, l.ID)
		require.NoError(t, q.Complete(t.Context(), l.Receipt, nil))
	})
}

// enumValue has the methods of a pointer to an enum value.
type enumValue[T any] interface {
	*T
	fmt.Stringer
	texts.TextMarshaler
	texts.TextUnmarshaler
}

// testEnum tests the texts of consecutive values, beginning with first.
func testEnum[T ~uint8, P enumValue[T]](t *testing.T, first T, names ...string) {
	t.Run(fmt.Sprintf("%T", first), func(t *testing.T) {
		values := make(map[T]bool)
		for i, text := range names {
			v := first + T(i)
			values[v] = true
			require.Equal(t, text, P(&v).String())
			b, err := P(&v).MarshalText()
			require.NoError(t, err)
			require.Equal(t, text, string(b))
			var back T
			require.NoError(t, P(&back).UnmarshalText(b))
			require.Equal(t, v, back)
		}
		for n := range 256 {
			v := T(n)
			if values[v] {
				continue
			}
			require.Regexp(t, fmt.Sprintf(`^\w+\(%d\)$`, n), P(&v).String())
			_, err := P(&v).MarshalText()
			require.ErrorIs(t, err, codeq.ErrInvalid)
		}
		for _, text := range []string{"", "other", names[0] + " ", "Ready", "State(1)", "0"} {
			v := first
			require.ErrorIs(t, P(&v).UnmarshalText([]byte(text)), codeq.ErrInvalid, "%q", text)
			require.Equal(t, first, v, "an error changes nothing")
		}
	})
}

// TestEnums: each value has a text that can be read back. No other text and no other number is a
// value.
func TestEnums(t *testing.T) {
	testEnum(t, codeq.Ready, "ready", "scheduled", "blocked", "leased", "dead", "done", "canceled")
	testEnum(t, codeq.BulkCancel, "cancel", "redrive", "purge", "set-priority", "move")
	testEnum(t, codeq.HoldOnDead, "hold", "cancel", "run")
	testEnum(t, codeq.RunOnMissing, "run", "cancel", "refuse")
	testEnum(t, codeq.MissedOnce, "once", "skip", "all")
	testEnum(t, codeq.DurabilityDefault, "default", "process", "disk", "none")
	testEnum(t, codeq.EventProduced,
		"produced", "claimed", "completed", "retried", "released", "dead", "canceled", "expired", "progress",
		"suspended", "unhandled")

	testEnum(t, codeq.VerdictCompleted,
		"completed", "retry", "retry-after", "released", "dead-letter", "canceled", "lease-lost", "suspended")

	var s codeq.State
	require.EqualError(t, s.UnmarshalText([]byte("redy")),
		`codeq: invalid State: "redy" (allowed: ready, scheduled, blocked, leased, dead, done or canceled)`)
}

// TestEndOfContext: the error of a call with an ended ctx matches the error of ctx and its cause.
func TestEndOfContext(t *testing.T) {
	cause := errors.New("the user left")
	queuetest.Bubble(t, codeq.Options{Shards: 2, MinFreeBytes: -1}, func(t *testing.T, q *codeq.Queue) {
		sub, err := q.Subscribe(codeq.SubscribeOptions{})
		require.NoError(t, err)
		defer sub.Close()
		live := queuetest.Produce(t, q, codeq.Task{Queue: "live", RunAt: time.Now().Add(24 * time.Hour)})[0]
		for range 9 {
			queuetest.Produce(t, q, codeq.Task{Queue: "dead"})
			require.NoError(t, q.DeadLetter(t.Context(), queuetest.ClaimNow(t, q, "dead").Receipt, nil))
		}
		var m codeq.Mux
		codeq.Handle(&m, "verbs", func(context.Context, *codeq.Job[[]byte]) error { return nil })
		tasks := []codeq.Task{{Queue: "verbs"}, {Queue: "verbs"}}
		verbs := queuetest.VerbsOf(t, q, &m, tasks, []codeq.ID{live, live})
		delete(verbs, "Run") // returns nil
		delete(verbs, "ServeLocal")
		for name := range verbs {
			if !queuetest.TakesContext(name) {
				delete(verbs, name)
			}
		}
		verbs["Next"] = func(ctx context.Context) error { _, err := sub.Next(ctx); return err }
		verbs["All"] = func(ctx context.Context) (err error) {
			for _, err = range sub.All(ctx) {
			}
			return err
		}
		// The methods that wait.
		waiting := map[string]func(context.Context) error{
			"Claim": func(ctx context.Context) error {
				_, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"none"}})
				return err
			},
			"Claim of many": func(ctx context.Context) error {
				req := codeq.ClaimRequest{Max: 2}
				for i := range 2 * dispatch.ShortList {
					req.Queues = append(req.Queues, fmt.Sprint("none ", i))
				}
				_, err := q.ClaimBatch(ctx, req)
				return err
			},
			"Await":    func(ctx context.Context) error { _, err := q.Await(ctx, live); return err },
			"WaitIdle": func(ctx context.Context) error { return q.WaitIdle(ctx, "live") },
			"PurgeDead": func(ctx context.Context) error {
				_, err := q.PurgeDead(ctx, codeq.DeadFilter{Queue: "dead", Rate: 0.001})
				return err
			},
			"Next": func(ctx context.Context) error {
				for {
					if _, err := sub.Next(ctx); err != nil {
						return err
					}
				}
			},
		}
		matches := func(name string, err, how error) {
			require.ErrorIs(t, err, how, name)
			require.ErrorIs(t, err, cause, name)
		}
		ended, cancel := context.WithCancelCause(t.Context())
		cancel(cause)
		late, stop := context.WithDeadlineCause(t.Context(), time.Now().Add(-time.Second), cause)
		defer stop()
		for name, verb := range verbs {
			switch name {
			case "ClusterStatus", "AddNode", "RemoveNode", "ReplaceNode", "TransferLeadership", "Drain", "Undrain":
				continue // refused without a cluster
			}
			matches(name, verb(ended), context.Canceled)
			matches(name, verb(late), context.DeadlineExceeded)
		}
		for name, verb := range waiting {
			ctx, cancel := context.WithCancelCause(t.Context())
			time.AfterFunc(time.Second, func() { cancel(cause) })
			matches(name, verb(ctx), context.Canceled)
			if name == "PurgeDead" {
				continue // returns earlier if the deadline is too near
			}
			ctx, stop := context.WithTimeoutCause(t.Context(), time.Second, cause)
			matches(name, verb(ctx), context.DeadlineExceeded)
			stop()
		}
	})
}
