package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// orphanStory has a handler that goes on after its task was canceled or given back.
type orphanStory struct {
	start   time.Time
	release chan struct{} // closed: the handler may return

	mu      sync.Mutex    // guards the fields below
	calls   []string      // of handlers: the payload, and the time
	receipt codeq.Receipt // of the first call
}

func newOrphanStory() *orphanStory {
	return &orphanStory{start: time.Now(), release: make(chan struct{})}
}

// limited are ways to limit a queue to one task at a time.
var limited = map[string]struct {
	set  func(*codeq.Settings)
	task codeq.Task
}{
	"concurrency": {func(s *codeq.Settings) { s.Concurrency = 1 }, codeq.Task{Queue: "a"}},
	"limit key":   {func(s *codeq.Settings) { s.ConcurrencyPerKey = 1 }, codeq.Task{Queue: "a", LimitKey: "k"}},
	"group":       {func(*codeq.Settings) {}, codeq.Task{Queue: "a", Group: "g"}},
}

// run works on the queue. The first handler call ignores its context.
func (s *orphanStory) run(q *codeq.Queue, opts codeq.RunOptions) (stop func() error) {
	var m codeq.Mux
	codeq.Handle(&m, "a", func(_ context.Context, j *codeq.Job[[]byte]) error {
		s.mu.Lock()
		s.calls = append(s.calls, fmt.Sprintf("%s after %v", j.Args, time.Since(s.start)))
		first := len(s.calls) == 1
		if first {
			s.receipt = j.Receipt
		}
		s.mu.Unlock()
		if first {
			<-s.release
		}
		return nil
	})
	return queuetest.Run(q, &m, opts)
}

func (s *orphanStory) seen() []string {
	synctest.Wait()
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.calls)
}

// produceNamed produces tasks like the given one, with names as payloads.
func produceNamed(t *testing.T, q *codeq.Queue, like codeq.Task, names ...string) (ids []codeq.ID) {
	for _, name := range names {
		task := like
		task.Payload = []byte(name)
		ids = append(ids, queuetest.Produce(t, q, task)...)
	}
	return ids
}

// TestHandlerKeepsItsPlace: a task is canceled, given back or ended, and its handler goes on. The
// place of the task in limits and groups becomes free when the handler has returned, or when its
// lease would have ended. A second use of the receipt does not free it, and neither does the report
// of the handler as overdue. The queue shows the held place, also without tasks.
func TestHandlerKeepsItsPlace(t *testing.T) {
	ctx := context.Background()
	ends := map[string]func(*codeq.Queue, codeq.Receipt) error{
		"cancel": func(q *codeq.Queue, r codeq.Receipt) error { return q.Cancel(ctx, r.ID) },
		"bulk": func(q *codeq.Queue, _ codeq.Receipt) error {
			_, err := q.Bulk(ctx, codeq.BulkOptions{Action: codeq.BulkCancel, TaskFilter: codeq.TaskFilter{Queue: "a", States: []codeq.State{codeq.Leased}}})
			return err
		},
		"retry":       func(q *codeq.Queue, r codeq.Receipt) error { return q.Retry(ctx, r, codeq.RetryOptions{After: -1}) },
		"release":     func(q *codeq.Queue, r codeq.Receipt) error { return q.Release(ctx, r, 0) },
		"dead letter": func(q *codeq.Queue, r codeq.Receipt) error { return q.DeadLetter(ctx, r, nil) },
		"complete":    func(q *codeq.Queue, r codeq.Receipt) error { return q.Complete(ctx, r, nil) },
	}
	for name, limit := range limited {
		for how, end := range ends {
			for _, returns := range []bool{true, false} {
				t.Run(fmt.Sprintf("%s/%s/returns %v", name, how, returns), func(t *testing.T) {
					queuetest.Bubble(t, codeq.Options{Shards: 2}, func(t *testing.T, q *codeq.Queue) {
						s := newOrphanStory()
						queuetest.Configure(t, q, "a", limit.set)
						task := limit.task
						task.Timeout = 7 * time.Second
						produceNamed(t, q, task, "first")
						stop := s.run(q, codeq.RunOptions{Concurrency: 4, Grace: time.Hour})
						time.Sleep(5 * time.Second)
						require.Len(t, s.seen(), 1)
						require.NoError(t, end(q, s.receipt))
						require.ErrorIs(t, q.Retry(ctx, s.receipt, codeq.RetryOptions{}), codeq.ErrLeaseLost)
						requireHeld(t, q, "a", 1)
						produceNamed(t, q, limit.task, "second", "third")
						time.Sleep(5*time.Second - time.Millisecond)
						require.Equal(t, []string{"first after 0s"}, s.seen())
						require.Equal(t, []int{1}, orphansOf(t, q, "a"))
						requireHeld(t, q, "a", 1)
						begins := "10s"
						if returns {
							time.Sleep(time.Millisecond)
							close(s.release)
						} else {
							begins = "30s" // the lease of 30 s was not renewed before the end
							time.Sleep(20 * time.Second)
							require.Equal(t, []string{"first after 0s"}, s.seen())
							time.Sleep(time.Millisecond)
							defer close(s.release)
						}
						want := []string{"first after 0s", "second after " + begins, "third after " + begins}
						if how == "retry" || how == "release" {
							want = append(want, "first after "+begins)
						}
						require.ElementsMatch(t, want, s.seen())
						require.Empty(t, orphansOf(t, q, "a"))
						requireHeld(t, q, "a", 0)
						if returns {
							require.NoError(t, stop())
						}
					})
				})
			}
		}
	}
}

// requireHeld checks the number of handlers that hold places of a queue, as Info says.
func requireHeld(t *testing.T, q *codeq.Queue, queue string, want int) {
	t.Helper()
	infos, err := q.Info(t.Context())
	require.NoError(t, err)
	got := 0
	for _, info := range infos {
		if info.Queue == queue {
			got = info.Held
		}
	}
	require.Equal(t, want, got)
}

// orphansOf returns the number of handlers of a queue that go on without a lease, for each shard
// that has some.
func orphansOf(t *testing.T, q *codeq.Queue, queue string) (n []int) {
	in := inspect.Of(q)
	for shard := range in.Shards() {
		if !in.Leads(shard) {
			continue
		}
		require.NoError(t, in.Owner(shard, func(o *inspect.Owner) error {
			if q := o.Rules.Names.Queues[queue]; q != nil && q.Orphans > 0 {
				n = append(n, q.Orphans)
			}
			return nil
		}))
	}
	return n
}

// TestHandlerOfTaskGivenBackKeepsItsPlace: Run ends before a handler. The task of the handler, and
// the next tasks of its limits and its group, begin in another Run when the handler has returned,
// or when its lease would have ended.
func TestHandlerOfTaskGivenBackKeepsItsPlace(t *testing.T) {
	for name, limit := range limited {
		for _, end := range []string{"returns", "lease ends", "reopened"} {
			t.Run(name+"/"+end, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					opts := *inspect.With(&codeq.Options{Shards: 1}, inspect.Private{FS: crashfs.New()})
					q := queuetest.OpenForRun(t, opts)
					s := newOrphanStory()
					queuetest.Configure(t, q, "a", limit.set)
					first := produceNamed(t, q, limit.task, "first")[0]
					stop := s.run(q, codeq.RunOptions{Grace: -1})
					synctest.Wait()
					produceNamed(t, q, limit.task, "second")
					time.Sleep(4 * time.Second)
					require.ErrorIs(t, stop(), codeq.ErrHandlersRunning) // after a second
					require.Equal(t, codeq.Ready, queuetest.InfoOf(t, q, first).State)
					stop = s.run(q, codeq.RunOptions{})
					time.Sleep(5*time.Second - time.Millisecond)
					require.Equal(t, []string{"first after 0s"}, s.seen())
					require.Equal(t, []int{1}, orphansOf(t, q, "a"))
					begins := "10s"
					switch end {
					case "reopened":
						require.NoError(t, stop())
						require.NoError(t, q.Close())
						q = queuetest.OpenForRun(t, opts)
						stop = s.run(q, codeq.RunOptions{})
						begins = "9.999s"
						defer close(s.release)
					case "returns":
						time.Sleep(time.Millisecond)
						close(s.release)
					default:
						begins = "30s"
						time.Sleep(20 * time.Second)
						require.Equal(t, []string{"first after 0s"}, s.seen())
						time.Sleep(time.Millisecond)
						defer close(s.release)
					}
					require.Equal(t, []string{"first after 0s", "first after " + begins, "second after " + begins}, s.seen())
					require.NoError(t, stop())
					require.Empty(t, orphansOf(t, q, "a"))
					require.NoError(t, queuetest.CheckAll(q))
				})
			})
		}
	}
}

// TestClaimKeepsNoPlace: Claim leased a task. When the task is canceled, its place in limits and
// groups is free at once.
func TestClaimKeepsNoPlace(t *testing.T) {
	ctx := context.Background()
	for name, limit := range limited {
		for _, local := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/local %v", name, local), func(t *testing.T) {
				queuetest.Bubble(t, codeq.Options{Shards: 2}, func(t *testing.T, q *codeq.Queue) {
					queuetest.Configure(t, q, "a", limit.set)
					ids := produceNamed(t, q, limit.task, "first", "second")
					for range ids {
						l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}, Local: local})
						require.NoError(t, err)
						require.Nil(t, queuetest.ClaimNow(t, q, "a"))
						require.NoError(t, q.Cancel(ctx, l.ID))
					}
				})
			})
		}
	}
}

// TestPlacesOfHandlersInCluster: a handler goes on after the cancel of its task, on any node. The
// leader of the shard keeps the handler's place, and the next leader does not.
func TestPlacesOfHandlersInCluster(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	limits := slices.Sorted(maps.Keys(limited))
	for i, end := range []string{"returns", "lease ends", "next leader"} {
		for _, atLeader := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/at leader %v", end, atLeader), func(t *testing.T) {
				limit := limited[limits[i]]
				simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
					leader, other := c.lead()
					at := other
					if atLeader {
						at = leader
					}
					s := newOrphanStory()
					queuetest.Configure(t, simQueue(other), "a", limit.set)
					ids := produceNamed(t, simQueue(other), limit.task, "first")
					stop := s.run(simQueue(at), codeq.RunOptions{Concurrency: 4, Grace: -1})
					for len(s.seen()) == 0 {
						time.Sleep(100 * time.Millisecond)
					}
					produceNamed(t, simQueue(other), limit.task, "second")
					time.Sleep(time.Second)
					require.NoError(t, simQueue(other).Cancel(ctx, ids[0]))
					time.Sleep(15 * time.Second)
					require.Len(t, s.seen(), 1)
					requireHeld(t, simQueue(other), "a", 1)
					requireHeld(t, simQueue(leader), "a", 1)
					switch end {
					case "returns":
						close(s.release)
					case "lease ends":
						time.Sleep(15 * time.Second) // no renewal since the cancel
					case "next leader":
						c.transfer(leader, 0, other)
					}
					time.Sleep(5 * time.Second) // a transfer may take a while
					require.Len(t, s.seen(), 2)
					if end != "returns" {
						close(s.release)
					}
					require.NoError(t, simQueue(other).WaitIdle(ctx))
					require.NoError(t, stop())
				})
			})
		}
	}
}

// TestHungHandlerCounts: a handler goes on after its Timeout. Its attempt counts when its task is
// given back, and when its process dies. OnError gets one error, the log has one record, and
// Workers shows the handler.
func TestHungHandlerCounts(t *testing.T) {
	for name, tc := range map[string]struct {
		killed bool
		after  time.Duration // since the Timeout
	}{"given back at once": {false, 0}, "given back": {false, time.Minute}, "killed": {true, time.Minute}} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				disk, release := crashfs.New(), make(chan struct{})
				defer close(release)
				var id codeq.ID
				for life := 1; life <= 3; life++ {
					var said atomic.Int64
					log := slog.New(testkit.NewUserHandler(func(text string) {
						if strings.Contains(text, "after its Timeout") {
							said.Add(1)
						}
					}))
					q := queuetest.OpenForRun(t, *inspect.With(&codeq.Options{MaxAttempts: 3, Logger: log}, inspect.Private{FS: disk}))
					if life == 1 {
						id = queuetest.Produce(t, q, codeq.Task{Queue: "a", Timeout: 2 * time.Second})[0]
					}
					var m codeq.Mux
					begun := make(chan time.Time, 1)
					codeq.Handle(&m, "a", func(context.Context, *codeq.Job[[]byte]) error {
						begun <- time.Now()
						<-release
						return nil
					})
					var reports []error
					ctx, stop := context.WithCancel(t.Context())
					ended := make(chan error, 1)
					go func() {
						ended <- q.Run(ctx, &m, &codeq.RunOptions{Grace: -1, OnError: func(l *codeq.Lease, err error) {
							require.Equal(t, id, l.ID)
							reports = append(reports, err)
						}})
					}()
					at := <-begun
					time.Sleep(2 * time.Second)
					synctest.Wait()
					require.Empty(t, reports)
					ws, err := q.Workers(ctx)
					require.NoError(t, err)
					require.Equal(t, []codeq.HungHandler{{ID: id, Queue: "a", Attempt: life, Since: at.Add(2 * time.Second).UTC()}}, ws[0].Hung)
					time.Sleep(tc.after)
					synctest.Wait()
					if tc.after > 0 {
						require.Len(t, reports, 1)
					}
					if tc.killed {
						disk = disk.Clone()
					} else {
						stop()
						require.ErrorIs(t, <-ended, codeq.ErrHandlersRunning)
						require.NoError(t, q.Close())
					}
					require.Len(t, reports, 1)
					require.ErrorIs(t, reports[0], codeq.ErrHandlersRunning)
					require.ErrorIs(t, reports[0], context.DeadlineExceeded)
					require.Equal(t, int64(1), said.Load())
					stop()
				}
				q := queuetest.OpenForRun(t, *inspect.With(&codeq.Options{MaxAttempts: 3}, inspect.Private{FS: disk}))
				time.Sleep(time.Second)
				info := queuetest.InfoOf(t, q, id)
				require.Equal(t, codeq.Dead, info.State)
				require.Equal(t, 3, info.Attempts)
			})
		})
	}
}

// TestHungHandlerCountsInCluster: TestHungHandlerCounts in a cluster, for a handler on any node,
// and with a new leader by the time when the task is given back.
func TestHungHandlerCountsInCluster(t *testing.T) {
	t.Parallel()
	for _, atLeader := range []bool{true, false} {
		simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
			leader, other := c.lead()
			at := other
			if atLeader {
				at = leader
			}
			s := newOrphanStory()
			id := produceNamed(t, simQueue(other), codeq.Task{Queue: "a", Timeout: time.Second}, "first")[0]
			stop := s.run(simQueue(at), codeq.RunOptions{Grace: -1})
			for len(s.seen()) == 0 {
				time.Sleep(100 * time.Millisecond)
			}
			time.Sleep(5 * time.Second)
			c.transfer(leader, 0, other)
			time.Sleep(5 * time.Second)
			require.ErrorIs(t, stop(), codeq.ErrHandlersRunning)
			info := queuetest.InfoOf(t, simQueue(other), id)
			require.Equal(t, 1, info.Attempts)
			require.Contains(t, info.LastError, "Timeout of 1s")
			close(s.release)
		})
	}
}

// TestDeleteQueueBesideHandler: a queue without tasks is deleted while the handler of a canceled
// task goes on. When the queue is used again, its limits hold. After the handler has returned,
// nothing of it is left.
func TestDeleteQueueBesideHandler(t *testing.T) {
	for name, limit := range limited {
		t.Run(name, func(t *testing.T) {
			queuetest.Bubble(t, codeq.Options{Shards: 2}, func(t *testing.T, q *codeq.Queue) {
				ctx, s := t.Context(), newOrphanStory()
				queuetest.Configure(t, q, "a", limit.set)
				stop := s.run(q, codeq.RunOptions{Concurrency: 3})
				first := produceNamed(t, q, limit.task, "first")[0]
				require.Len(t, s.seen(), 1)
				require.NoError(t, q.Cancel(ctx, first))
				_ = stop() // stop reports the handler that goes on
				require.NoError(t, q.DeleteQueue(ctx, "a"))

				queuetest.Configure(t, q, "a", limit.set)
				stop = s.run(q, codeq.RunOptions{Concurrency: 3})
				produceNamed(t, q, limit.task, "second", "third")
				time.Sleep(time.Minute) // the lease from before the cancel has ended
				require.Len(t, s.seen(), 3)
				close(s.release)
				synctest.Wait()
				require.NoError(t, stop())
				infos, err := q.Info(ctx)
				require.NoError(t, err)
				for _, info := range infos {
					require.Zero(t, info.Held)
				}
				require.NoError(t, q.DeleteQueue(ctx, "a"))
				require.NoError(t, queuetest.CheckMemory(q))
			})
		})
	}
}

// TestWhileHandlerHangs: a handler goes on after its Timeout, and meanwhile something happens to
// its task, its queue, its lease or its Run. Its result counts. The attempt counts once, unless the
// handler snoozes; OnError and the log get the Timeout once, and Workers shows the handler and the
// begin of its overtime until the handler returns.
func TestWhileHandlerHangs(t *testing.T) {
	ctx := context.Background()
	nothing := func(*codeq.Queue, codeq.Receipt) error { return nil }
	for name, tc := range map[string]struct {
		happens func(q *codeq.Queue, r codeq.Receipt) error
		stops   bool // Run stops
		returns func() error
		state   codeq.State
		told    int // errors: the Timeout, and the end of the lease or the error of the handler
	}{
		"canceled":  {func(q *codeq.Queue, r codeq.Receipt) error { return q.Cancel(ctx, r.ID) }, false, func() error { return nil }, codeq.Canceled, 2},
		"paused":    {func(q *codeq.Queue, _ codeq.Receipt) error { return q.Pause(ctx, "a") }, false, func() error { return nil }, codeq.Done, 1},
		"quiet":     {func(q *codeq.Queue, _ codeq.Receipt) error { return q.QuietWorkers(ctx, "") }, false, func() error { return nil }, codeq.Done, 1},
		"extended":  {func(q *codeq.Queue, r codeq.Receipt) error { return q.Extend(ctx, r, time.Minute) }, false, func() error { return nil }, codeq.Done, 1},
		"completed": {func(q *codeq.Queue, r codeq.Receipt) error { return q.Complete(ctx, r, nil) }, false, func() error { return nil }, codeq.Done, 2},
		"stopped":   {nothing, true, func() error { return nil }, codeq.Done, 1},
		"fails":     {nothing, false, func() error { return errors.New("boom") }, codeq.Scheduled, 2},
		"panics":    {nothing, false, func() error { panic("boom") }, codeq.Scheduled, 2},
		"exits":     {nothing, false, func() error { runtime.Goexit(); return nil }, codeq.Scheduled, 2},
		"snoozes":   {nothing, false, func() error { return codeq.Snooze(time.Hour) }, codeq.Scheduled, 1},
		"gives up":  {nothing, false, func() error { return codeq.DeadLetter(nil) }, codeq.Dead, 2},
	} {
		t.Run(name, func(t *testing.T) {
			var said atomic.Int64
			log := slog.New(testkit.NewUserHandler(func(text string) {
				if strings.Contains(text, "after its Timeout") {
					said.Add(1)
				}
			}))
			queuetest.Bubble(t, codeq.Options{Retention: codeq.Forever, Logger: log}, func(t *testing.T, q *codeq.Queue) {
				id := queuetest.Produce(t, q, codeq.Task{Queue: "a", Timeout: 2 * time.Second})[0]
				release, receipt := make(chan struct{}), make(chan codeq.Receipt, 2)
				var m codeq.Mux
				codeq.Handle(&m, "a", func(_ context.Context, j *codeq.Job[[]byte]) error {
					receipt <- j.Receipt
					<-release
					return tc.returns()
				})
				var mu sync.Mutex
				var reports []error
				told := func() []error {
					mu.Lock()
					defer mu.Unlock()
					return slices.Clone(reports)
				}
				runCtx, stop := context.WithCancel(ctx)
				ended := make(chan error, 1)
				go func() {
					ended <- q.Run(runCtx, &m, &codeq.RunOptions{Grace: time.Hour, OnError: func(_ *codeq.Lease, err error) {
						mu.Lock()
						defer mu.Unlock()
						reports = append(reports, err)
					}})
				}()
				r := <-receipt
				began := time.Now()
				time.Sleep(5 * time.Second)
				require.NoError(t, tc.happens(q, r))
				if tc.stops {
					stop()
				}
				time.Sleep(time.Minute)
				synctest.Wait()
				require.ErrorIs(t, told()[0], codeq.ErrHandlersRunning)
				ws, err := q.Workers(ctx)
				require.NoError(t, err)
				require.Equal(t, []codeq.HungHandler{{ID: id, Queue: "a", Attempt: 1, Since: began.Add(2 * time.Second).UTC()}}, ws[0].Hung)
				close(release)
				time.Sleep(time.Millisecond)
				synctest.Wait()
				require.Len(t, told(), tc.told, "%v", told())
				for _, err := range told()[1:] {
					require.NotErrorIs(t, err, codeq.ErrHandlersRunning)
				}
				require.EqualValues(t, 1, said.Load())
				info := queuetest.InfoOf(t, q, id)
				require.Equal(t, tc.state, info.State)
				require.Equal(t, name != "snoozes", info.Attempts == 1)
				if !tc.stops {
					ws, err = q.Workers(ctx)
					require.NoError(t, err)
					require.Empty(t, ws[0].Hung)
					requireHeld(t, q, "a", 0)
				}
				stop()
				require.NoError(t, <-ended)
			})
		})
	}
}
