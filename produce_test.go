package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/engine"
	"codeq/internal/inspect"
	"codeq/internal/store"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// buffers is memory of a caller that writes to it as soon as the verb has returned.
type buffers struct{ overwrite []func() }

func (b *buffers) bytes(s string) []byte {
	buf := append(make([]byte, 0, len(s)+8), s...)
	b.overwrite = append(b.overwrite, func() {
		for i := range buf[:cap(buf)] {
			buf[:cap(buf)][i] = 'X'
		}
	})
	return buf
}

func (b *buffers) headers() map[string]string {
	m := map[string]string{"k": "v"}
	b.overwrite = append(b.overwrite, func() { maps.Copy(m, map[string]string{"k": "X", "x": "X"}) })
	return m
}

// weights returns a copy of a map, and scribble later changes the copy.
func (b *buffers) weights(of map[string]int) map[string]int {
	m := maps.Clone(of)
	b.overwrite = append(b.overwrite, func() {
		for queue := range m {
			m[queue] = 0
		}
		m["X"] = 0
	})
	return m
}

// list returns a copy of a slice, and scribble later overwrites the elements of the copy with
// other.
func list[T any](b *buffers, values []T, other T) []T {
	s := slices.Clone(values)
	b.overwrite = append(b.overwrite, func() {
		for i := range s {
			s[i] = other
		}
	})
	return s
}

// task has every field that is a reference.
func (b *buffers) task(queue string, after ...codeq.ID) codeq.Task {
	return codeq.Task{
		Queue: queue, Payload: b.bytes("payload"), Headers: b.headers(),
		After: list(b, after, codeq.ID{15: 1}), Retention: time.Hour,
	}
}

func (b *buffers) tasks(queue string, after ...codeq.ID) []codeq.Task {
	return list(b, []codeq.Task{b.task(queue, after...), b.task(queue, after...)}, codeq.Task{Queue: "X"})
}

func (b *buffers) scribble() {
	for _, f := range b.overwrite {
		f()
	}
}

// bufferTest is a queue with a leased task, others that wait for it, and dead letters of the
// tenants t and u.
type bufferTest struct {
	*codeq.Queue
	t      *testing.T
	parent *codeq.Lease
	other  codeq.ID // of a task that waits for its time
}

func newBufferTest(t *testing.T) *bufferTest {
	bt := &bufferTest{Queue: queuetest.OpenForRun(t, codeq.Options{Retention: time.Hour}), t: t}
	queuetest.Produce(t, bt.Queue, codeq.Task{Queue: "parent"})
	bt.parent = bt.claim("parent")
	bt.other = queuetest.Produce(t, bt.Queue, codeq.Task{Queue: "other", RunAt: time.Now().Add(time.Hour)})[0]
	for _, tenant := range []string{"t", "u"} {
		queuetest.Produce(t, bt.Queue, codeq.Task{Queue: "dead", Tenant: tenant})
		require.NoError(t, bt.DeadLetter(t.Context(), bt.claim("dead").Receipt, nil))
	}
	time.Sleep(time.Second) // bulk verbs take only tasks that died before
	return bt
}

func (bt *bufferTest) claim(queue string) *codeq.Lease {
	bt.t.Helper()
	l, err := bt.Claim(bt.t.Context(), codeq.ClaimRequest{Queues: []string{queue}, NoWait: true})
	require.NoError(bt.t, err)
	return l
}

// requireTasks requires that all tasks of a queue are as their caller meant them.
func (bt *bufferTest) requireTasks(queue string, state codeq.State, count int, after ...codeq.ID) {
	bt.t.Helper()
	n := 0
	for info, err := range bt.List(bt.t.Context(), codeq.ListOptions{State: state, Queue: queue}) {
		require.NoError(bt.t, err)
		require.Equal(bt.t, "payload", string(info.Payload))
		require.Equal(bt.t, map[string]string{"k": "v"}, info.Headers)
		require.Equal(bt.t, after, info.After)
		n++
	}
	require.Equal(bt.t, count, n)
}

// bufferCalls are the verbs that take references. Each call returns a check that the verb, if it
// was carried out, used the original values of the caller.
var bufferCalls = map[string]func(ctx context.Context, bt *bufferTest, b *buffers) (check func(), err error){
	"Produce": func(ctx context.Context, bt *bufferTest, b *buffers) (func(), error) {
		_, err := bt.Produce(ctx, b.task("a", bt.parent.ID))
		return func() { bt.requireTasks("a", codeq.Blocked, 1, bt.parent.ID) }, err
	},
	"ProduceBatch": func(ctx context.Context, bt *bufferTest, b *buffers) (func(), error) {
		_, err := bt.ProduceBatch(ctx, b.tasks("a", bt.parent.ID))
		return func() { bt.requireTasks("a", codeq.Blocked, 2, bt.parent.ID) }, err
	},
	"NewTask": func(ctx context.Context, bt *bufferTest, b *buffers) (func(), error) {
		task, err := codeq.NewTask("a", b.bytes("payload"))
		require.NoError(bt.t, err)
		b.scribble()
		task.Headers = map[string]string{"k": "v"}
		_, err = bt.Produce(ctx, task)
		return func() { bt.requireTasks("a", codeq.Ready, 1) }, err
	},
	"Complete": func(ctx context.Context, bt *bufferTest, b *buffers) (func(), error) {
		err := bt.Complete(ctx, bt.parent.Receipt, b.bytes("result"), b.tasks("a", bt.other)...)
		return func() {
			require.Equal(bt.t, "result", string(queuetest.InfoOf(bt.t, bt.Queue, bt.parent.ID).Result))
			bt.requireTasks("a", codeq.Blocked, 2, bt.other)
		}, err
	},
	"SetSchedule": func(ctx context.Context, bt *bufferTest, b *buffers) (func(), error) {
		err := bt.SetSchedule(ctx, codeq.Schedule{Name: "s", Every: time.Minute, Task: b.task("a", bt.parent.ID)})
		return func() {
			all, err := bt.Schedules(bt.t.Context())
			require.NoError(bt.t, err)
			require.Len(bt.t, all, 1)
			require.Equal(bt.t, "payload", string(all[0].Task.Payload))
			require.Equal(bt.t, map[string]string{"k": "v"}, all[0].Task.Headers)
			require.Equal(bt.t, []codeq.ID{bt.parent.ID}, all[0].Task.After)
		}, err
	},
	"Configure": func(ctx context.Context, bt *bufferTest, b *buffers) (func(), error) {
		weights := map[string]int{"t": 2}
		b.overwrite = append(b.overwrite, func() { weights["t"], weights["x"] = 7, 7 })
		err := bt.Configure(ctx, "a", func(s *codeq.Settings) { s.TenantWeights = weights })
		return func() {
			s, err := bt.Settings("a")
			require.NoError(bt.t, err)
			require.Equal(bt.t, map[string]int{"t": 2}, s.TenantWeights)
		}, err
	},
	"RedriveAllDead": func(ctx context.Context, bt *bufferTest, b *buffers) (func(), error) {
		n, err := bt.RedriveAllDead(ctx, codeq.DeadFilter{Queue: "dead", Tenants: list(b, []string{"t"}, "u")})
		return func() {
			require.LessOrEqual(bt.t, n, 1)
			for info, err := range bt.List(bt.t.Context(), codeq.ListOptions{State: codeq.Ready, Queue: "dead"}) {
				require.NoError(bt.t, err)
				require.Equal(bt.t, "t", info.Tenant)
			}
		}, err
	},
	"PurgeDead": func(ctx context.Context, bt *bufferTest, b *buffers) (func(), error) {
		_, err := bt.PurgeDead(ctx, codeq.DeadFilter{Tenants: list(b, []string{"t"}, "u")})
		return func() {
			left := 0
			for range bt.List(bt.t.Context(), codeq.ListOptions{State: codeq.Dead, Tenants: []string{"u"}}) {
				left++
			}
			require.Equal(bt.t, 1, left)
		}, err
	},
	"List": func(ctx context.Context, bt *bufferTest, b *buffers) (func(), error) {
		tasks := bt.List(ctx, codeq.ListOptions{State: codeq.Dead, Tenants: list(b, []string{"t"}, "u")})
		b.scribble()
		n := 0
		var failed error
		for info, err := range tasks {
			if failed = err; err == nil {
				require.Equal(bt.t, "t", info.Tenant)
				n++
			}
		}
		return func() { require.Equal(bt.t, 1, n) }, failed
	},
	"Claim": func(ctx context.Context, bt *bufferTest, b *buffers) (func(), error) {
		_, err := bt.Claim(ctx, codeq.ClaimRequest{
			Queues:  list(b, []string{"none", "none too"}, "a"),
			Weights: b.weights(map[string]int{"none": 1, "none too": 2}), NoWait: ctx.Done() == nil,
		})
		return func() {}, err
	},
	"WaitIdle": func(ctx context.Context, bt *bufferTest, b *buffers) (func(), error) {
		return func() {}, bt.WaitIdle(ctx, list(b, []string{"none", "none too"}, "parent")...)
	},
	"Subscribe": func(_ context.Context, bt *bufferTest, b *buffers) (func(), error) {
		sub, err := bt.Subscribe(codeq.SubscribeOptions{
			Queues: list(b, []string{"a"}, "b"), Kinds: list(b, []codeq.EventKind{codeq.EventProduced}, codeq.EventClaimed),
		})
		return func() {
			defer sub.Close()
			queuetest.Produce(bt.t, bt.Queue, codeq.Task{Queue: "a"}, codeq.Task{Queue: "b"})
			e, err := sub.Next(bt.t.Context())
			require.NoError(bt.t, err)
			require.Equal(bt.t, "a", e.Queue)
			require.Empty(bt.t, queuetest.Buffered(sub))
		}, err
	},
}

// TestBuffersAreTheCallers: a caller may overwrite all arguments as soon as the verb has returned,
// even if the operation is still under way because ctx has ended.
func TestBuffersAreTheCallers(t *testing.T) {
	for name, call := range bufferCalls {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				bt, b := newBufferTest(t), new(buffers)
				check, err := call(context.Background(), bt, b)
				if name == "Claim" {
					require.ErrorIs(t, err, codeq.ErrEmpty)
				} else if name != "WaitIdle" {
					require.NoError(t, err)
				}
				b.scribble()
				check()
				require.NoError(t, queuetest.CheckAll(bt.Queue))
			})
		})
		t.Run(name+", whose ctx ends", func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				bt, b := newBufferTest(t), new(buffers)
				goOn := queuetest.Hold(bt.Queue, 0)
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				check, err := call(ctx, bt, b)
				if name != "Subscribe" { // which asks no owner
					require.ErrorIs(t, err, context.DeadlineExceeded)
				}
				b.scribble()
				goOn()
				synctest.Wait()
				if err == nil || errors.Is(err, codeq.ErrUncertain) {
					check()
				}
				require.NoError(t, queuetest.CheckAll(bt.Queue))
			})
		})
	}
}

// TestBuffersAreTheHandlers: a handler may overwrite its results and follow-ups before it returns.
// If their memory goes back to a pool, the next user may overwrite it at any time.
func TestBuffersAreTheHandlers(t *testing.T) {
	for name, middleware := range map[string][]codeq.Middleware{
		"": nil, "middleware": {func(next codeq.Handler) codeq.Handler { return next }},
	} {
		for _, value := range []bool{false, true} {
			t.Run(fmt.Sprint(name, value), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					bt := newBufferTest(t)
					var m codeq.Mux
					m.Use(middleware...)
					codeq.Handle(&m, "h", func(_ context.Context, j *codeq.Job[[]byte]) error {
						b := new(buffers)
						defer b.scribble()
						j.FollowUp(b.tasks("a", bt.other)...)
						if value {
							return j.SetResultValue(b.bytes("result"))
						}
						j.SetResult(b.bytes("result"))
						return nil
					})
					go func() { _ = bt.Run(t.Context(), &m, &codeq.RunOptions{Concurrency: 2}) }()
					synctest.Wait()
					ids := queuetest.Produce(t, bt.Queue, codeq.Task{Queue: "h"}, codeq.Task{Queue: "h"}, codeq.Task{Queue: "h"})
					synctest.Wait()
					for _, id := range ids {
						require.Equal(t, "result", string(queuetest.InfoOf(t, bt.Queue, id).Result))
					}
					bt.requireTasks("a", codeq.Blocked, 6, bt.other)
					require.NoError(t, queuetest.CheckAll(bt.Queue))
				})
			})
		}
	}
}

// TestBuffersOfReceivers: a receiver may overwrite its values and append to them. Neither other
// receivers nor the queue see that.
func TestBuffersOfReceivers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := queuetest.OpenForRun(t, codeq.Options{Retention: time.Hour})
		b := new(buffers)
		task := b.task("a")
		task.MaxAttempts = 3 // a record of more than its payload
		_, err := q.ProduceBatch(t.Context(), []codeq.Task{task, task, {Queue: "a", Payload: task.Payload}})
		require.NoError(t, err)
		require.NoError(t, q.SetSchedule(t.Context(), codeq.Schedule{Name: "s", Every: time.Hour, Task: task}))
		overwrite := func(p []byte) {
			for i := range p {
				p[i] = 'X'
			}
			_ = append(p, "XXXXXXXX"...)
		}
		spoil := func(t *codeq.Task) {
			overwrite(t.Payload)
			if t.Headers != nil {
				t.Headers["k"] = "X"
			}
		}
		var leases []*codeq.Lease
		for range 3 {
			l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}})
			require.NoError(t, err)
			require.Equal(t, "payload", string(l.Payload))
			spoil(&l.Task)
			leases = append(leases, l)
		}
		for range 2 {
			for _, l := range leases {
				info := queuetest.InfoOf(t, q, l.ID)
				require.Equal(t, "payload", string(info.Payload))
				spoil(&info.Task)
			}
			all, err := q.Schedules(t.Context())
			require.NoError(t, err)
			require.Equal(t, "payload", string(all[0].Task.Payload))
			require.Equal(t, "v", all[0].Task.Headers["k"])
			spoil(&all[0].Task)
		}
		outcomes := make(chan *codeq.Outcome)
		for range 2 {
			go func() {
				o, err := q.Await(t.Context(), leases[0].ID)
				require.NoError(t, err)
				outcomes <- o
			}()
		}
		synctest.Wait()
		require.NoError(t, q.Complete(t.Context(), leases[0].Receipt, []byte("result")))
		for range 2 {
			o := <-outcomes
			require.Equal(t, "result", string(o.Result))
			overwrite(o.Result)
		}
		info := queuetest.InfoOf(t, q, leases[0].ID)
		require.Equal(t, "result", string(info.Result))
		overwrite(info.Result)
		require.Equal(t, "payload", string(info.Payload))
		for _, l := range leases[1:] {
			require.NoError(t, q.Release(t.Context(), l.Receipt, 0))
		}
		for range 2 {
			l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}})
			require.NoError(t, err)
			require.Equal(t, "payload", string(l.Payload))
		}
	})
}

// TestClaimsThatGiveUp: a claim ends with its ctx while the owner of a shard works on it, and then
// the caller writes to the list of queues. The test is for the race detector.
func TestClaimsThatGiveUp(t *testing.T) {
	t.Parallel()
	q := queuetest.OpenForRun(t, codeq.Options{Shards: 2})
	for i := range 40 {
		b := new(buffers)
		names, weights := make([]string, 2000), make(map[string]int)
		for i := range names {
			names[i] = fmt.Sprint("queue ", i)
			weights[names[i]] = 1
		}
		req := codeq.ClaimRequest{Queues: list(b, names, "X"), Weights: b.weights(weights)}
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*50*time.Microsecond)
		_, err := q.Claim(ctx, req)
		b.scribble()
		require.ErrorIs(t, err, context.DeadlineExceeded)
		cancel()
	}
}

// sizedCommitter delays each large commit.
type sizedCommitter struct {
	inspect.Committer
	takes time.Duration
}

func (c sizedCommitter) Commit(b *pebble.Batch) error {
	if b.Len() > engine.GroupBytes {
		time.Sleep(c.takes)
	}
	return c.Committer.Commit(b)
}

// TestSmallPassLarge: a small operation waits for at most one large one, however many there are.
// Large ones go on, however many small ones come.
func TestSmallPassLarge(t *testing.T) {
	t.Parallel()
	queuetest.Bubble(t, codeq.Options{Shards: 1}, func(t *testing.T, q *codeq.Queue) {
		const commit = 10 * time.Millisecond // of a large one; the others take no time
		require.NoError(t, inspect.Of(q).Owner(0, func(s *inspect.Owner) error {
			s.Commit = sizedCommitter{s.Commit, commit}
			return nil
		}))
		produceOne := func(queue string, size int, took *time.Duration) {
			begun := time.Now()
			_, err := q.Produce(t.Context(), codeq.Task{Queue: queue, Payload: make([]byte, size)})
			if err != nil {
				t.Error(err)
			}
			*took = time.Since(begun)
		}
		const large = 20
		var took [large]time.Duration
		for i := range took {
			go produceOne("large", engine.GroupBytes, &took[i])
		}
		synctest.Wait()
		for range 3 * large { // without a pause between them
			var small time.Duration
			produceOne("small", 10, &small)
			require.LessOrEqual(t, small, commit)
		}
		synctest.Wait()
		for i := range took {
			require.NotZero(t, took[i], i)
			require.LessOrEqual(t, took[i], 2*large*commit+commit, i)
		}
	})
}

// stalledFS makes no table until a channel is closed: flushes wait.
type stalledFS struct {
	vfs.FS
	until *atomic.Pointer[chan struct{}] // nil: none does
}

func (fs stalledFS) Create(name string, category vfs.DiskWriteCategory) (vfs.File, error) {
	if until := fs.until.Load(); until != nil && strings.HasSuffix(name, ".sst") {
		<-*until
	}
	return fs.FS.Create(name, category)
}

// TestLargeWaitForFlushes: large operations wait while memtables are flushed, and small ones do
// not.
func TestLargeWaitForFlushes(t *testing.T) {
	t.Parallel()
	fs := stalledFS{crashfs.New(), new(atomic.Pointer[chan struct{}])}
	queuetest.Bubble(t, *inspect.With(&codeq.Options{Shards: 1, MemTableBytes: 1 << 20}, inspect.Private{FS: fs}), func(t *testing.T, q *codeq.Queue) {
		flushed := make(chan struct{})
		flush := sync.OnceFunc(func() { close(flushed) })
		defer flush()
		fs.until.Store(&flushed)
		const large = 3 * store.MemTables
		done := make(chan error, large)
		for range large {
			go func() {
				_, err := q.Produce(t.Context(), codeq.Task{Queue: "large", Payload: make([]byte, 400<<10)})
				done <- err
			}()
		}
		for range 50 {
			begun := time.Now()
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			_, err := q.Produce(ctx, codeq.Task{Queue: "small"})
			cancel()
			require.NoError(t, err)
			require.Zero(t, time.Since(begun))
			time.Sleep(10 * time.Millisecond)
		}
		require.Less(t, queuetest.StoreOf(q, 0).DB().Metrics().MemTable.Size, uint64(store.MemTables<<20))
		require.Less(t, len(done), large)
		flush()
		for range large {
			require.NoError(t, <-done)
		}
		queuetest.RequireSettled(t, q)
	})
}

// TestLargeAtTheEnd: large operations that wait are decided before the queue closes, or refused if
// the shard fails.
func TestLargeAtTheEnd(t *testing.T) {
	t.Parallel()
	for _, fails := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			q, err := codeq.Open("q", inspect.With(&codeq.Options{Shards: 1}, inspect.Private{FS: crashfs.New()}))
			require.NoError(t, err)
			goOn := make(chan struct{})
			go func() {
				_ = inspect.Of(q).Owner(0, func(s *inspect.Owner) error {
					if <-goOn; fails {
						s.Rules.Break(queuetest.ErrBroken)
					}
					return nil
				})
			}()
			synctest.Wait()
			errs := make(chan error, 10)
			for range cap(errs) {
				go func() {
					_, err := q.Produce(t.Context(), codeq.Task{Queue: "a", Payload: make([]byte, engine.GroupBytes)})
					errs <- err
				}()
			}
			synctest.Wait()
			closed := make(chan error, 1)
			if !fails {
				go func() { closed <- q.Close() }()
				synctest.Wait()
			}
			close(goOn)
			for range cap(errs) {
				if err := <-errs; fails {
					require.ErrorIs(t, err, codeq.ErrFailed)
				} else {
					require.NoError(t, err)
				}
			}
			if fails {
				require.ErrorIs(t, q.Close(), codeq.ErrFailed)
			} else {
				require.NoError(t, <-closed)
			}
		})
	}
}

// TestLargeAmidClose: the queue closes while large operations wait for memtables.
func TestLargeAmidClose(t *testing.T) {
	t.Parallel()
	for round := range testkit.Sized(3, 10) {
		q, err := codeq.Open(t.TempDir(), &codeq.Options{Shards: 1, MemTableBytes: 1 << 20})
		require.NoError(t, err)
		var producers sync.WaitGroup
		for range 20 {
			producers.Go(func() {
				for {
					if _, err := q.Produce(context.Background(), codeq.Task{Queue: "large", Payload: make([]byte, 400<<10)}); err != nil {
						return
					}
				}
			})
		}
		for waits := false; !waits; { // some of them do
			require.NoError(t, inspect.Of(q).Owner(0, func(o *inspect.Owner) error { waits = o.Large > 0; return nil }))
		}
		require.NoError(t, q.Close(), round)
		producers.Wait()
	}
}
