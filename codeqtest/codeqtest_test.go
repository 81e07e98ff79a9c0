package codeqtest_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/codeqtest"
)

func produce(t *testing.T, q *codeqtest.Queue, tasks ...codeq.Task) {
	t.Helper()
	for _, task := range tasks {
		_, err := q.Produce(context.Background(), task)
		require.NoError(t, err)
	}
}

// handle returns a mux with one handler, which is given the payload.
func handle(queue string, h func(payload string, job *codeq.Job[[]byte]) error) *codeq.Mux {
	mux := new(codeq.Mux)
	codeq.Handle(mux, queue, func(_ context.Context, job *codeq.Job[[]byte]) error { return h(string(job.Args), job) })
	return mux
}

// record returns a mux with a handler that notes the payloads.
func record(queue string) (*codeq.Mux, *[]string) {
	got := new([]string)
	return handle(queue, func(payload string, _ *codeq.Job[[]byte]) error {
		*got = append(*got, payload)
		return nil
	}), got
}

// failed is a testing.TB. A fatal failure ends check, but not the test.
type failed struct {
	testing.TB
	messages []string
}

func (f *failed) Errorf(format string, args ...any) {
	f.messages = append(f.messages, fmt.Sprintf(format, args...))
}

func (f *failed) Fatalf(format string, args ...any) {
	f.Errorf(format, args...)
	panic(f)
}

// failure calls check with a TB of its own, and returns the messages of its failures; "" if it does
// not fail.
func failure(t *testing.T, check func(t testing.TB)) (message string) {
	t.Helper()
	tb := &failed{TB: t}
	defer func() {
		if p := recover(); p != nil && p != any(tb) {
			panic(p)
		}
		message = strings.Join(tb.messages, "\n")
	}()
	check(tb)
	return
}

func TestWorkLeavesWhatIsScheduled(t *testing.T) {
	codeqtest.Test(t, nil, func(t *testing.T, q *codeqtest.Queue) {
		start := time.Now()
		produce(t, q,
			codeq.Task{Queue: "a", Payload: []byte("in an hour"), RunAt: start.Add(time.Hour)},
			codeq.Task{Queue: "a", Payload: []byte("now")},
			codeq.Task{Queue: "other", Payload: []byte("no handler")})
		mux, got := record("a")

		q.Work(mux)
		require.Equal(t, []string{"now"}, *got)
		require.Equal(t, start, time.Now(), "no time has passed")

		q.Advance(time.Hour - time.Millisecond)
		q.Work(mux)
		require.Len(t, *got, 1)

		q.Advance(time.Millisecond)
		q.Work(mux)
		require.Equal(t, []string{"now", "in an hour"}, *got)
		require.Equal(t, start.Add(time.Hour), time.Now())
	})
}

// TestWorkWaitsForHandlers: sleeping handlers run to their end, and Work also runs their
// follow-ups.
func TestWorkWaitsForHandlers(t *testing.T) {
	codeqtest.Test(t, nil, func(t *testing.T, q *codeqtest.Queue) {
		start := time.Now()
		produce(t, q, codeq.Task{Queue: "a", Payload: []byte("1")}, codeq.Task{Queue: "a", Payload: []byte("2")})
		var got []string
		q.Work(handle("a", func(payload string, job *codeq.Job[[]byte]) error {
			time.Sleep(time.Hour)
			got = append(got, payload)
			if len(payload) == 1 {
				job.FollowUp(codeq.Task{Queue: "a", Payload: []byte(payload + "'")})
			}
			return nil
		}))
		require.Equal(t, []string{"1", "2", "1'", "2'"}, got)
		require.Equal(t, 4*time.Hour, time.Since(start), "one handler at a time")
		codeqtest.RequireAllDone(t, q)
	})
}

// TestOrder: queues are worked on in the order of their names.
func TestOrder(t *testing.T) {
	codeqtest.Test(t, nil, func(t *testing.T, q *codeqtest.Queue) {
		var mux codeq.Mux
		var got string
		for _, queue := range []string{"c", "a", "b"} {
			codeq.Handle(&mux, queue, func(_ context.Context, job *codeq.Job[[]byte]) error {
				got += job.Queue
				return nil
			})
			for range 3 {
				produce(t, q, codeq.Task{Queue: queue})
			}
		}
		q.Drain(&mux)
		require.Equal(t, "aaabbbccc", got)
	})
}

// TestDrainRetries: a day of backoff takes no real time, and exactly a day in the bubble.
func TestDrainRetries(t *testing.T) {
	realStart := time.Now()
	backoff := codeq.Backoff{Base: time.Hour, Max: 12 * time.Hour}
	codeqtest.Test(t, &codeq.Options{Backoff: backoff, MaxAttempts: 6}, func(t *testing.T, q *codeqtest.Queue) {
		start := time.Now()
		produce(t, q,
			codeq.Task{Queue: "a", Payload: []byte("fails")}, codeq.Task{Queue: "a", Payload: []byte("works")})
		var failures []string
		q.RunOptions.OnError = func(l *codeq.Lease, err error) { failures = append(failures, err.Error()) }
		q.Drain(handle("a", func(payload string, job *codeq.Job[[]byte]) error {
			if payload == "fails" {
				return fmt.Errorf("attempt %d", job.Attempt)
			}
			return nil
		}))
		require.Equal(t, (1+2+4+8+12)*time.Hour, time.Since(start))
		require.Len(t, failures, 6)
		dead := codeqtest.RequireDead(t, q, "a", func(payload []byte) bool { return string(payload) == "fails" })
		require.Equal(t, "attempt 6", dead.LastError)
		works := func(payload []byte) bool { return string(payload) == "works" }
		require.Equal(t, codeq.Done, codeqtest.RequireProduced(t, q, "a", works).State)
	})
	require.Less(t, time.Since(realStart), time.Minute)
}

// TestDrainWaitsForLeases: a task that the test has claimed comes back when its lease expires.
func TestDrainWaitsForLeases(t *testing.T) {
	codeqtest.Test(t, nil, func(t *testing.T, q *codeqtest.Queue) {
		produce(t, q, codeq.Task{Queue: "a", Payload: []byte("lost")})
		l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}, LeaseFor: time.Hour})
		require.NoError(t, err)
		mux, got := record("a")
		q.Work(mux)
		require.Empty(t, *got, "Work does not wait for leases")
		q.Drain(mux)
		require.Equal(t, []string{"lost"}, *got)
		require.False(t, time.Now().Before(l.Deadline))
	})
}

// TestWorkLeavesWhatIsHeldBack: tasks held back by a pause or a limit stay, and Work runs the
// others.
func TestWorkLeavesWhatIsHeldBack(t *testing.T) {
	for name, tc := range map[string]struct {
		set   codeq.Settings
		first int // tasks of 3 that are done before the pause or limit ends
		end   func(t *testing.T, q *codeqtest.Queue)
	}{
		"paused": {
			codeq.Settings{Paused: true}, 0,
			func(t *testing.T, q *codeqtest.Queue) { require.NoError(t, q.Resume(t.Context(), "a")) },
		},
		"rate": {
			codeq.Settings{Rate: 0.1, Burst: 2}, 2,
			func(_ *testing.T, q *codeqtest.Queue) { q.Advance(10 * time.Second) },
		},
		"concurrency": {
			codeq.Settings{Concurrency: 1}, 0,
			func(_ *testing.T, q *codeqtest.Queue) { q.Advance(time.Hour) }, // the lease of the test expires
		},
	} {
		t.Run(name, func(t *testing.T) {
			codeqtest.Test(t, &codeq.Options{Shards: 2}, func(t *testing.T, q *codeqtest.Queue) {
				if tc.set.Concurrency > 0 {
					produce(t, q, codeq.Task{Queue: "a", Payload: []byte("lost")})
					_, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}, LeaseFor: time.Hour})
					require.NoError(t, err)
				}
				require.NoError(t, q.Configure(t.Context(), "a", func(s *codeq.Settings) { *s = tc.set }))
				q.Advance(time.Minute) // a bucket is empty at first
				a, b := codeq.Task{Queue: "a"}, codeq.Task{Queue: "b"}
				produce(t, q, a, a, a, b)
				done := make(map[string]int)
				var mux codeq.Mux
				for _, queue := range []string{"a", "b"} {
					codeq.Handle(&mux, queue, func(_ context.Context, job *codeq.Job[[]byte]) error {
						done[queue]++
						return nil
					})
				}
				start := time.Now()
				q.Work(&mux)
				require.Equal(t, map[string]int{"b": 1, "a": tc.first}, map[string]int{"b": done["b"], "a": done["a"]})
				require.Equal(t, start, time.Now(), "no time has passed")
				q.Work(&mux)
				require.Equal(t, tc.first, done["a"])
				tc.end(t, q)
				q.Work(&mux)
				require.GreaterOrEqual(t, done["a"], 3)
				codeqtest.RequireAllDone(t, q)
			})
		})
	}
}

// TestWorkOverShards: Work includes the follow-ups in other shards, in a bubble and in real time.
func TestWorkOverShards(t *testing.T) {
	opts := &codeq.Options{Shards: 4}
	work := func(t *testing.T, q *codeqtest.Queue) {
		produce(t, q, codeq.Task{Queue: "a", Payload: []byte("x")})
		mux, got := new(codeq.Mux), 0
		codeq.Handle(mux, "a", func(_ context.Context, job *codeq.Job[[]byte]) error {
			if got++; got < 30 {
				job.FollowUp(codeq.Task{Queue: "a", Group: fmt.Sprint(got)})
			}
			return nil
		})
		q.Work(mux)
		require.Equal(t, 30, got)
		codeqtest.RequireAllDone(t, q)
	}
	t.Run("bubble", func(t *testing.T) { codeqtest.Test(t, opts, work) })
	t.Run("real time", func(t *testing.T) { work(t, codeqtest.Open(t, opts)) })
}

// TestDrainOfRate: Drain advances the clock as a rate limit requires.
func TestDrainOfRate(t *testing.T) {
	codeqtest.Test(t, nil, func(t *testing.T, q *codeqtest.Queue) {
		require.NoError(t, q.Configure(t.Context(), "a", func(s *codeq.Settings) { s.Rate, s.Burst = 0.1, 1 }))
		start := time.Now()
		for range 5 {
			produce(t, q, codeq.Task{Queue: "a"})
		}
		mux, got := record("a")
		q.Drain(mux)
		require.Len(t, *got, 5)
		require.GreaterOrEqual(t, time.Since(start), 40*time.Second)
		require.Less(t, time.Since(start), time.Minute)
	})
}

func TestDrainFails(t *testing.T) {
	forever := handle("a", func(string, *codeq.Job[[]byte]) error { return codeq.Snooze(25 * time.Hour) })
	for name, test := range map[string]struct {
		drain func(t testing.TB, q *codeqtest.Queue)
		want  []string
	}{
		"not idle": {
			func(_ testing.TB, q *codeqtest.Queue) { q.Drain(forever) },
			[]string{"366 days", "a scheduled", "for ever"},
		},
		"handler that waits for its context": {
			func(_ testing.TB, q *codeqtest.Queue) {
				mux := new(codeq.Mux)
				codeq.Handle(mux, "a", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
					<-ctx.Done()
					return ctx.Err()
				})
				q.RunOptions.LeaseFor = time.Hour
				q.Work(mux)
			},
			[]string{"366 days", "a ready", "for ever"},
		},
		"paused": {
			func(t testing.TB, q *codeqtest.Queue) {
				require.NoError(t, q.Pause(context.Background(), "a"))
				q.Drain(forever)
			},
			[]string{"366 days", "a ready", "for ever", `paused: "a"`},
		},
		"no handlers": {
			func(_ testing.TB, q *codeqtest.Queue) { q.Drain(nil) },
			[]string{codeq.ErrNoHandler.Error()},
		},
		"closed": {
			func(t testing.TB, q *codeqtest.Queue) {
				require.NoError(t, q.Close())
				q.Work(forever)
			},
			[]string{codeq.ErrClosed.Error()},
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				message := failure(t, func(tb testing.TB) {
					q := codeqtest.Open(tb, nil)
					produce(t, q, codeq.Task{Queue: "a", Payload: []byte("for ever")})
					test.drain(tb, q)
				})
				for _, want := range test.want {
					require.Contains(t, message, want)
				}
			})
		})
	}
}

func TestReopen(t *testing.T) {
	codeqtest.Test(t, nil, func(t *testing.T, q *codeqtest.Queue) {
		produce(t, q,
			codeq.Task{Queue: "a", Payload: []byte("1")},
			codeq.Task{Queue: "a", Payload: []byte("2"), RunAt: time.Now().Add(time.Hour)})
		mux, got := record("a")
		q.Work(mux)

		old := q.Queue
		q.Reopen()
		_, err := old.Produce(t.Context(), codeq.Task{Queue: "a"})
		require.ErrorIs(t, err, codeq.ErrClosed)
		require.Len(t, codeqtest.Produced[[]byte](t, q, "a"), 2)

		q.Drain(mux)
		require.Equal(t, []string{"1", "2"}, *got)
		codeqtest.RequireAllDone(t, q)
	})
}

// TestCrash: after a crash, acknowledged tasks are there at each durability that promises it. Later
// changes of the old process are not there.
func TestCrash(t *testing.T) {
	for _, level := range []codeq.Durability{codeq.DurabilityProcess, codeq.DurabilityDisk} {
		t.Run(level.String(), func(t *testing.T) {
			codeqtest.Test(t, &codeq.Options{Durability: level, Shards: 2}, func(t *testing.T, q *codeqtest.Queue) {
				running := codeq.Task{Queue: "run", Payload: []byte("x")}
				produce(t, q, codeq.Task{Queue: "claimed"}, running, codeq.Task{Queue: "ready"})
				l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"claimed"}, LeaseFor: time.Hour})
				require.NoError(t, err)

				finished := false
				go q.Run(t.Context(), handle("run", func(string, *codeq.Job[[]byte]) error {
					time.Sleep(time.Second)
					finished = true
					return nil
				}), nil)
				synctest.Wait()
				q.Crash()
				require.True(t, finished, "the old handler has ended")

				task := codeqtest.RequireProduced[[]byte](t, q, "run", nil)
				require.Equal(t, codeq.Blocked, task.State, "until a claim starts it: it may have been the reason")
				require.True(t, task.Suspect)
				require.Equal(t, 1, task.Crashes)
				require.Zero(t, task.Attempts)
				require.Equal(t, codeq.Leased, codeqtest.RequireProduced[[]byte](t, q, "claimed", nil).State)
				require.NoError(t, q.Complete(t.Context(), l.Receipt, nil))
				q.Crash()
				require.Equal(t, codeq.Done, codeqtest.RequireProduced[[]byte](t, q, "claimed", nil).State)
				require.Equal(t, codeq.Ready, codeqtest.RequireProduced[[]byte](t, q, "ready", nil).State)
			})
		})
	}
}

// TestProduced: Produced returns tasks from every way to produce them, and in any state.
func TestProduced(t *testing.T) {
	codeqtest.Test(t, nil, func(t *testing.T, q *codeqtest.Queue) {
		_, err := q.ProduceBatch(t.Context(), []codeq.Task{
			{Queue: "a", Payload: []byte(`"follow"`), Priority: 1},
			{Queue: "a", Payload: []byte(`"die"`)},
			{Queue: "b", Payload: []byte(`"other"`)},
		})
		require.NoError(t, err)
		produce(t, q, codeq.Task{Queue: "a", RunAt: time.Now().Add(time.Hour)})
		var mux codeq.Mux
		codeq.Handle(&mux, "a", func(_ context.Context, job *codeq.Job[string]) error {
			if job.Args == "die" {
				return codeq.DeadLetter(errors.New("enough"))
			}
			job.FollowUp(codeq.Task{Queue: "a", Payload: []byte(`"later"`), RunAt: time.Now().Add(time.Hour)})
			return nil
		})
		q.Work(&mux)

		var got []string
		for _, task := range codeqtest.Produced[string](t, q, "a") {
			got = append(got, fmt.Sprint(task.Args, " ", task.State))
		}
		require.Equal(t, []string{"follow done", "die dead", " scheduled", "later scheduled"}, got)
		codeqtest.RequireDead[string](t, q, "a", nil)
		codeqtest.RequireNotProduced(t, q, "a", func(s string) bool { return s == "other" })
		codeqtest.RequireNotProduced[string](t, q, "c", nil)
	})
}

func TestAssertionsFail(t *testing.T) {
	codeqtest.Test(t, nil, func(t *testing.T, q *codeqtest.Queue) {
		produce(t, q,
			codeq.Task{Queue: "mail", Payload: []byte(`{"To":"x"}`), Tenant: "acme", Priority: 3},
			codeq.Task{Queue: "mail", Payload: []byte(`{"To":"y"}`), RunAt: time.Now().Add(time.Hour)},
			codeq.Task{Queue: "mail", Payload: []byte("no\njson")},
			codeq.Task{Queue: "dead"})
		q.Work(handle("dead", func(string, *codeq.Job[[]byte]) error { return codeq.DeadLetter(errors.New("enough")) }))
		to := func(address string) func(Mail) bool { return func(m Mail) bool { return m.To == address } }
		atHour := time.Now().Add(time.Hour).Format(time.RFC3339)

		for name, test := range map[string]struct {
			check func(t testing.TB)
			want  []string // in the message; none: check succeeds
		}{
			"produced":         {func(t testing.TB) { codeqtest.RequireProduced(t, q, "mail", to("x")) }, nil},
			"produced, by nil": {func(t testing.TB) { codeqtest.RequireProduced[Mail](t, q, "dead", nil) }, nil},
			"not produced": {
				func(t testing.TB) { codeqtest.RequireProduced(t, q, "mail", to("z")) },
				[]string{
					`0 produced tasks of queue "mail" match`,
					"mail ready ", `{"To":"x"}, tenant "acme", priority 3` + "\n",
					"mail scheduled ", `{"To":"y"}, until ` + atHour, `"no\njson"`,
				},
			},
			"wrong queue": {
				func(t testing.TB) { codeqtest.RequireProduced(t, q, "mial", to("x")) },
				[]string{`0 produced tasks of queue "mial" match`, `queues with tasks: "dead", "mail"`},
			},
			"produced twice": {
				func(t testing.TB) { codeqtest.RequireProduced(t, q, "mail", func(Mail) bool { return true }) },
				[]string{`2 produced tasks of queue "mail" match`},
			},
			"absent": {func(t testing.TB) { codeqtest.RequireNotProduced(t, q, "mail", to("z")) }, nil},
			"not absent": {
				func(t testing.TB) { codeqtest.RequireNotProduced(t, q, "mail", to("y")) },
				[]string{`1 tasks of queue "mail" match, want none`, `{"To":"y"}`},
			},
			"not absent, by nil": {
				func(t testing.TB) { codeqtest.RequireNotProduced[Mail](t, q, "mail", nil) },
				[]string{`3 tasks of queue "mail" match, want none`},
			},
			"dead": {func(t testing.TB) { codeqtest.RequireDead[Mail](t, q, "dead", nil) }, nil},
			"not dead": {
				func(t testing.TB) { codeqtest.RequireDead(t, q, "mail", to("x")) },
				[]string{`0 dead tasks of queue "mail" match`, `{"To":"x"}`},
			},
			"done": {func(t testing.TB) { codeqtest.RequireAllDone(t, q, "unknown") }, nil},
			"not done": {
				func(t testing.TB) { codeqtest.RequireAllDone(t, q) },
				[]string{"not all tasks are done", `{"To":"x"}`, "dead dead ", "attempts: 1, last error: enough"},
			},
			"dead is not done": {
				func(t testing.TB) { codeqtest.RequireAllDone(t, q, "unknown", "dead") },
				[]string{"last error: enough"},
			},
			"not decoded": {
				func(t testing.TB) { codeqtest.Produced[Mail](t, q, "mail") },
				[]string{"payload into codeqtest_test.Mail", "invalid character"},
			},
		} {
			message := failure(t, test.check)
			require.Equal(t, len(test.want) > 0, message != "", "%s: %s", name, message)
			for _, want := range test.want {
				require.Contains(t, message, want, name)
			}
		}

		for i := range 30 {
			produce(t, q, codeq.Task{Queue: "many", Payload: []byte(strings.Repeat("long", 100) + fmt.Sprint(i))})
		}
		message := failure(t, func(t testing.TB) { codeqtest.RequireAllDone(t, q, "many") })
		require.Equal(t, 1+1+20+1, strings.Count(message, "\n"))
		require.Contains(t, message, "and 10 more")
		require.Contains(t, message, "longlong...\n")
	})
}

// TestRealTime: without a bubble, too, Drain and Work end when the work does.
func TestRealTime(t *testing.T) {
	q := codeqtest.Open(t, &codeq.Options{Backoff: codeq.Backoff{Base: 10 * time.Millisecond}})
	produce(t, q,
		codeq.Task{Queue: "a", Payload: []byte("1")},
		codeq.Task{Queue: "a", Payload: []byte("2"), RunAt: time.Now().Add(time.Hour)})
	tries := 0
	mux := handle("a", func(payload string, job *codeq.Job[[]byte]) error {
		if payload == "1" {
			job.FollowUp(codeq.Task{Queue: "a", Payload: []byte("1'")}, codeq.Task{Queue: "b", Payload: []byte("b")})
		}
		return nil
	})
	q.Work(mux)
	require.Len(t, codeqtest.Produced[[]byte](t, q, "a"), 3)
	follows := func(p []byte) bool { return string(p) == "1'" }
	require.Equal(t, codeq.Done, codeqtest.RequireProduced(t, q, "a", follows).State)
	codeqtest.RequireProduced[[]byte](t, q, "b", nil)

	q.Drain(handle("b", func(string, *codeq.Job[[]byte]) error {
		if tries++; tries < 3 {
			return errors.New("not yet")
		}
		return nil
	}))
	require.Equal(t, 3, tries)
	codeqtest.RequireAllDone(t, q, "b")

	require.NoError(t, q.Pause(t.Context(), "paused"))
	require.NoError(t, q.Configure(t.Context(), "limited", func(s *codeq.Settings) { s.Rate = 1e-3 }))
	for range 2 {
		produce(t, q, codeq.Task{Queue: "paused"}, codeq.Task{Queue: "limited"})
	}
	for queue, want := range map[string]int{"paused": 0, "limited": 1} { // a second one in a quarter of an hour
		mux, got := record(queue)
		q.Work(mux)
		require.Len(t, *got, want, queue)
	}
	require.Panics(t, func() { q.Advance(time.Hour) })
}

// TestOpenOfCluster: a queue in memory cannot be a node.
func TestOpenOfCluster(t *testing.T) {
	message := failure(t, func(tb testing.TB) {
		codeqtest.Open(tb, &codeq.Options{Cluster: &codeq.Cluster{Node: "a", Listen: "127.0.0.1:0"}})
	})
	require.Contains(t, message, "codeqtest: open the queue: ")
	require.Contains(t, message, "Options.Cluster")
	require.Contains(t, message, "codeq.Open")
}

// TestOptions: options of the test override the defaults of Open.
func TestOptions(t *testing.T) {
	opts := &codeq.Options{Shards: 3, Retention: time.Minute, Backoff: codeq.Backoff{Base: time.Hour, Jitter: 1}}
	given := *opts
	codeqtest.Test(t, opts, func(t *testing.T, q *codeqtest.Queue) {
		q.RunOptions = codeq.RunOptions{Concurrency: 5, Queues: []string{"b"}}
		for range 5 {
			produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "b"})
		}
		start := time.Now()
		mux := handle("b", func(string, *codeq.Job[[]byte]) error {
			time.Sleep(time.Second)
			return nil
		})
		codeq.Handle(mux, "a", func(context.Context, *codeq.Job[[]byte]) error {
			return errors.New("not in RunOptions.Queues")
		})
		q.Drain(mux)
		require.Equal(t, time.Second, time.Since(start), "five at a time")
		require.Len(t, codeqtest.Produced[[]byte](t, q, "b"), 5)
		q.Advance(time.Minute * 9 / 8)
		require.Empty(t, codeqtest.Produced[[]byte](t, q, "b"), "kept for a minute")

		q.RunOptions.Queues = nil
		q.Work(mux)
		waits := make(map[time.Time]bool)
		for _, task := range codeqtest.Produced[[]byte](t, q, "a") {
			waits[task.At] = true
		}
		require.Greater(t, len(waits), 1, "jitter")
	})
	require.Equal(t, given, *opts)
}

// TestHeldPlaces: a queue works on one task at a time, and a handler runs on after the cancel of
// its task. Work and Drain begin no other task until the handler has returned.
func TestHeldPlaces(t *testing.T) {
	for name, work := range map[string]func(*codeqtest.Queue, *codeq.Mux){
		"work": (*codeqtest.Queue).Work, "drain": (*codeqtest.Queue).Drain,
	} {
		t.Run(name, func(t *testing.T) {
			codeqtest.Test(t, nil, func(t *testing.T, q *codeqtest.Queue) {
				q.RunOptions.Concurrency = 4
				require.NoError(t, q.Configure(t.Context(), "a", func(s *codeq.Settings) { s.Concurrency = 1 }))
				produce(t, q, codeq.Task{Queue: "a", Payload: []byte("1")}, codeq.Task{Queue: "a", Payload: []byte("2")})
				atWork, got := 0, ""
				work(q, handle("a", func(payload string, job *codeq.Job[[]byte]) error {
					atWork++
					defer func() { atWork-- }()
					assert.Equal(t, 1, atWork)
					if got += payload; payload == "1" {
						assert.NoError(t, q.Cancel(context.Background(), job.ID))
						time.Sleep(10 * time.Second) // less than the lease has left
						infos, err := q.Info(context.Background())
						assert.NoError(t, err)
						assert.Equal(t, 1, infos[0].Held)
					}
					return nil
				}))
				require.Equal(t, "12", got)
			})
		})
	}
}

// TestBatches: Work and Drain run batch handlers, without a wait for more tasks than there are.
func TestBatches(t *testing.T) {
	codeqtest.Test(t, nil, func(t *testing.T, q *codeqtest.Queue) {
		var sizes []int
		mux := new(codeq.Mux)
		codeq.HandleBatch(mux, "a", codeq.BatchOptions{Linger: time.Second}, func(_ context.Context, jobs []*codeq.Job[[]byte]) []error {
			sizes = append(sizes, len(jobs))
			errs := make([]error, len(jobs))
			if jobs[0].Attempt == 1 {
				errs[0] = errors.New("again")
			}
			return errs
		})
		tasks := make([]codeq.Task, 250)
		for i := range tasks {
			tasks[i].Queue = "a"
		}
		produce(t, q, tasks...)
		begun := time.Now()
		q.Work(mux)
		require.Equal(t, []int{100, 100, 50}, sizes)
		require.Zero(t, time.Since(begun))
		sizes = nil
		q.Drain(mux)
		require.Equal(t, []int{3}, sizes, "each of the three is tried again, within the Linger")
	})
}
