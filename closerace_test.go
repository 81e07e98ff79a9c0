package codeq_test

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"io/fs"
	"iter"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/testkit"
)

var closeRounds = flag.Int("close.rounds", 0, "how many queues TestCloseRaces closes; 0: 30, 200 with -long")

// TestCloseRaces: whatever the moment at which a queue is closed, verbs are
// carried out or refused, and what was acknowledged is there when it is opened
// again.
func TestCloseRaces(t *testing.T) {
	t.Parallel()
	rounds := cmp.Or(*closeRounds, testkit.Sized(30, 30, 200))
	calls := int64(0)
	for round := range rounds {
		calls += closeRace(t, 1+round%3, int64(1+round%30*8))
	}
	t.Logf("%d calls in %d rounds", calls, rounds)
}

// closeRace closes a queue when so many calls of all verbs have begun, while
// they go on. It returns how many there were.
func closeRace(t *testing.T, shards int, after int64) int64 {
	opts := *onDisk(crashfs.New(), &codeq.Options{Shards: shards, LeaseFor: time.Hour, Retention: codeq.Forever, InboxDepth: 2})
	q, err := codeq.Open("q", &opts)
	require.NoError(t, err)
	var m codeq.Mux
	codeq.Handle(&m, "run", func(context.Context, *codeq.Job[[]byte]) error { return nil })

	var calls atomic.Int64
	reached := make(chan struct{})
	var workers sync.WaitGroup
	var mu sync.Mutex // guards what was acknowledged, by queue
	made, done := make(map[string]int), make(map[string]int)
	work := func(cycle func() error) {
		workers.Go(func() {
			for {
				if calls.Add(1) == after {
					close(reached)
				}
				if err := cycle(); err != nil {
					if !errors.Is(err, codeq.ErrClosed) || errors.Is(err, codeq.ErrUncertain) {
						t.Errorf("refused with %v", err)
					}
					return
				}
			}
		})
	}
	acknowledged := func(counts map[string]int, name string, n int) {
		mu.Lock()
		defer mu.Unlock()
		counts[name] += n
	}
	ctx := context.Background()
	cancellable, cancel := context.WithCancel(ctx)
	defer cancel()
	for _, name := range []string{"a", "run"} {
		work(func() error {
			_, err := q.Produce(cancellable, codeq.Task{Queue: name})
			if err == nil {
				acknowledged(made, name, 1)
			}
			return err
		})
	}
	work(func() error {
		_, err := q.ProduceBatch(ctx, []codeq.Task{{Queue: "a"}, {Queue: "a"}, {Queue: "a"}})
		if err == nil {
			acknowledged(made, "a", 3)
		}
		return err
	})
	for i := range 4 { // claim, and finish in every way
		work(func() error {
			leases, err := q.ClaimBatch(cancellable, codeq.ClaimRequest{Queues: []string{"a"}, Max: 3})
			if err != nil {
				return err
			}
			for n, l := range leases {
				switch (i + n) % 4 {
				case 0, 1:
					if err = q.Complete(ctx, l.Receipt, nil, codeq.Task{Queue: "next"}); err == nil {
						acknowledged(done, "a", 1)
						acknowledged(made, "next", 1)
					}
				case 2:
					err = q.Retry(cancellable, l.Receipt, codeq.RetryOptions{After: -1})
				default:
					if err = q.Extend(ctx, l.Receipt, time.Hour); err == nil {
						err = q.Release(ctx, l.Receipt, 0)
					}
				}
				if err != nil {
					return err
				}
			}
			return nil
		})
	}
	work(func() error {
		_, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"never"}})
		return err
	})
	work(func() error {
		err := q.Configure(ctx, "configured", func(s *codeq.Settings) { s.Burst++ })
		if err == nil {
			acknowledged(made, "configured", 1)
		}
		return err
	})
	others := everyVerb(t, q, &m)
	for name, verb := range others {
		work(func() error {
			err := verb(cancellable)
			for _, answer := range []error{codeq.ErrNotFound, codeq.ErrNotWaiting, codeq.ErrLeaseLost, codeq.ErrEmpty, codeq.ErrDuplicate, codeq.ErrNotEmpty, fs.ErrExist} {
				if errors.Is(err, answer) {
					return nil
				}
			}
			if errors.Is(err, codeq.ErrNoCluster) || errors.Is(err, errors.ErrUnsupported) { // is all that it ever says
				return codeq.ErrClosed
			}
			if err != nil && !errors.Is(err, codeq.ErrClosed) {
				t.Errorf("%s: %v", name, err)
			}
			return err
		})
	}
	<-reached
	var closers sync.WaitGroup
	for range 2 {
		closers.Go(func() { assert.NoError(t, q.Close()) })
	}
	closers.Wait()
	workers.Wait()

	q, err = codeq.Open("q", &opts)
	require.NoError(t, err)
	counts, err := q.Stats(ctx)
	require.NoError(t, err)
	for _, name := range []string{"a", "run", "next"} {
		require.EqualValues(t, made[name], counts[name].Total(), "tasks of queue %s", name)
	}
	require.EqualValues(t, done["a"], counts["a"].Done)
	require.Zero(t, counts["run"].Leased, "Run has ended in peace")
	set, err := q.Settings("configured")
	require.NoError(t, err)
	require.Equal(t, made["configured"], set.Burst)
	require.NoError(t, checkAll(q))
	require.NoError(t, q.Close())
	return calls.Load()
}

// everyVerb is all methods of a Queue but Close, by name, with arguments that
// make sense for their types. What they return is read to its end.
func everyVerb(t *testing.T, q *codeq.Queue, m *codeq.Mux) map[string]func(context.Context) error {
	tasks := []codeq.Task{
		{Queue: "verbs", Retention: time.Hour, Unique: codeq.Unique{Key: "k"}},
		{Queue: "verbs", RunAt: time.Now().Add(time.Hour)},
		{Queue: "verbs", Group: "g", LimitKey: "l"},
	}
	ids := make([]codeq.ID, len(tasks))
	for i := range tasks {
		var err error
		ids[i], err = q.Produce(context.Background(), tasks[i])
		require.NoError(t, err)
	}
	sub, err := q.Subscribe(codeq.SubscribeOptions{})
	require.NoError(t, err)
	t.Cleanup(sub.Close)
	return verbsOf(t, q, m, tasks, ids)
}

// verbsOf is everyVerb with arguments of the caller's. The verbs are given a nil context
// as they are any other.
func verbsOf(t *testing.T, q *codeq.Queue, m *codeq.Mux, tasks []codeq.Task, ids []codeq.ID) map[string]func(context.Context) error {
	var turn atomic.Int64
	next := func() int { return int(turn.Add(1)) % len(ids) }
	arguments := map[reflect.Type]func() any{
		reflect.TypeFor[codeq.ID]():           func() any { return ids[next()] },
		reflect.TypeFor[codeq.Receipt]():      func() any { return codeq.Receipt{ids[next()], 1} },
		reflect.TypeFor[codeq.UniqueKey]():    func() any { return codeq.UniqueKey{Queue: "verbs", Key: "k"} },
		reflect.TypeFor[codeq.Task]():         func() any { return tasks[0] },
		reflect.TypeFor[[]codeq.Task]():       func() any { return tasks },
		reflect.TypeFor[codeq.ClaimRequest](): func() any { return codeq.ClaimRequest{Queues: []string{"verbs"}, NoWait: next() > 0} },
		reflect.TypeFor[codeq.RetryOptions](): func() any { return codeq.RetryOptions{} },
		reflect.TypeFor[codeq.ListOptions]():  func() any { return codeq.ListOptions{State: codeq.Ready} },
		reflect.TypeFor[codeq.PageOptions]():  func() any { return codeq.PageOptions{Limit: 2} },
		reflect.TypeFor[codeq.BulkOptions](): func() any {
			return codeq.BulkOptions{Action: codeq.BulkSetPriority, Priority: 1, TaskFilter: codeq.TaskFilter{Queue: "verbs"}}
		},
		reflect.TypeFor[codeq.DeadFilter]():       func() any { return codeq.DeadFilter{Queue: "verbs"} },
		reflect.TypeFor[codeq.SubscribeOptions](): func() any { return codeq.SubscribeOptions{} },
		reflect.TypeFor[codeq.Schedule]():         func() any { return codeq.Schedule{Name: "verbs", Every: time.Hour, Task: codeq.Task{Queue: "verbs"}} },
		reflect.TypeFor[codeq.Peer]():             func() any { return codeq.Peer{"peer", "address"} },
		reflect.TypeFor[*codeq.Mux]():             func() any { return m },
		reflect.TypeFor[*codeq.RunOptions]():      func() any { return &codeq.RunOptions{} },
		reflect.TypeFor[func(*codeq.Settings)]():  func() any { return func(s *codeq.Settings) { s.Retention = time.Hour } },
		reflect.TypeFor[string]():                 func() any { return "verbs" },
		reflect.TypeFor[[]string]():               func() any { return []string{"verbs"} },
		reflect.TypeFor[[]byte]():                 func() any { return []byte("result") },
		reflect.TypeFor[error]():                  func() any { return errors.New("cause") },
		reflect.TypeFor[time.Duration]():          func() any { return time.Hour },
		reflect.TypeFor[time.Time]():              func() any { return time.Now().Add(time.Hour) },
		reflect.TypeFor[int]():                    func() any { return next() },
	}
	verbs := make(map[string]func(context.Context) error)
	typ := reflect.TypeFor[*codeq.Queue]()
	for i := range typ.NumMethod() {
		method := typ.Method(i)
		if method.Name == "Close" {
			continue
		}
		verbs[method.Name] = func(ctx context.Context) error {
			args := []reflect.Value{reflect.ValueOf(q)}
			for n := 1; n < method.Type.NumIn(); n++ {
				in := method.Type.In(n)
				if in == reflect.TypeFor[context.Context]() {
					args = append(args, reflect.ValueOf(&ctx).Elem())
				} else if f := arguments[in]; f != nil {
					args = append(args, reflect.ValueOf(f()))
				} else {
					return errors.New("no argument of type " + in.String())
				}
			}
			call := method.Func.Call
			if method.Type.IsVariadic() {
				call = method.Func.CallSlice
			}
			var err error
			for _, result := range call(args) {
				err = errors.Join(err, exhaust(ctx, result.Interface()))
			}
			return err
		}
	}
	copies := filepath.Join(t.TempDir(), "verbs") // it is the only verb that takes a path
	verbs["Checkpoint"] = func(ctx context.Context) error { return q.Checkpoint(ctx, copies) }
	return verbs
}

// exhaust reads a result to its end. It returns the error that the result is, or has.
func exhaust(ctx context.Context, result any) error {
	switch r := result.(type) {
	case error:
		return r
	case iter.Seq2[*codeq.TaskInfo, error]:
		for _, err := range r {
			if err != nil {
				return err
			}
		}
	case *codeq.Subscription:
		if r == nil {
			return nil
		}
		defer r.Close()
		for range 10 {
			if _, err := r.Next(ctx); err != nil {
				return err
			}
		}
	default:
		if name := reflect.TypeOf(result); name != nil && strings.HasPrefix(name.String(), "iter.") {
			return errors.New("nobody reads " + name.String())
		}
	}
	return nil
}
