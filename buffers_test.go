package codeq

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// buffers is memory of a caller, who writes to it as soon as the verb that it was
// handed to has returned.
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

// weights hands out a map that becomes another one.
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

// list hands out a slice whose elements become those of another one.
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
func (b *buffers) task(queue string, after ...ID) Task {
	return Task{
		Queue: queue, Payload: b.bytes("payload"), Headers: b.headers(),
		After: list(b, after, ID{15: 1}), Retention: time.Hour,
	}
}

func (b *buffers) tasks(queue string, after ...ID) []Task {
	return list(b, []Task{b.task(queue, after...), b.task(queue, after...)}, Task{Queue: "X"})
}

func (b *buffers) scribble() {
	for _, f := range b.overwrite {
		f()
	}
}

// bufferTest is a queue with a task in the hands of a worker, which others wait for,
// and dead letters of the tenants t and u.
type bufferTest struct {
	*Queue
	t      *testing.T
	parent *Lease
	other  ID // of a task that waits for its time
}

func newBufferTest(t *testing.T) *bufferTest {
	bt := &bufferTest{Queue: openForRun(t, Options{Retention: time.Hour}), t: t}
	produce(t, bt.Queue, Task{Queue: "parent"})
	bt.parent = bt.claim("parent")
	bt.other = produce(t, bt.Queue, Task{Queue: "other", RunAt: time.Now().Add(time.Hour)})[0]
	for _, tenant := range []string{"t", "u"} {
		produce(t, bt.Queue, Task{Queue: "dead", Tenant: tenant})
		require.NoError(t, bt.DeadLetter(t.Context(), bt.claim("dead").Receipt, nil))
	}
	time.Sleep(time.Second) // bulk verbs are about what died before
	return bt
}

func (bt *bufferTest) claim(queue string) *Lease {
	bt.t.Helper()
	l, err := bt.Claim(bt.t.Context(), ClaimRequest{Queues: []string{queue}, NoWait: true})
	require.NoError(bt.t, err)
	return l
}

// requireTasks makes sure that all tasks of a queue are as the caller meant them.
func (bt *bufferTest) requireTasks(queue string, state State, count int, after ...ID) {
	bt.t.Helper()
	n := 0
	for info, err := range bt.List(bt.t.Context(), ListOptions{State: state, Queue: queue}) {
		require.NoError(bt.t, err)
		require.Equal(bt.t, "payload", string(info.Payload))
		require.Equal(bt.t, map[string]string{"k": "v"}, info.Headers)
		require.Equal(bt.t, after, info.After)
		n++
	}
	require.Equal(bt.t, count, n)
}

// bufferCalls are the verbs that take references. Each returns what makes sure that they did
// what the caller had asked for, if it was done.
var bufferCalls = map[string]func(ctx context.Context, bt *bufferTest, b *buffers) (check func(), err error){
	"Produce": func(ctx context.Context, bt *bufferTest, b *buffers) (func(), error) {
		_, err := bt.Produce(ctx, b.task("a", bt.parent.ID))
		return func() { bt.requireTasks("a", Blocked, 1, bt.parent.ID) }, err
	},
	"ProduceBatch": func(ctx context.Context, bt *bufferTest, b *buffers) (func(), error) {
		_, err := bt.ProduceBatch(ctx, b.tasks("a", bt.parent.ID))
		return func() { bt.requireTasks("a", Blocked, 2, bt.parent.ID) }, err
	},
	"NewTask": func(ctx context.Context, bt *bufferTest, b *buffers) (func(), error) {
		task, err := NewTask("a", b.bytes("payload"))
		require.NoError(bt.t, err)
		b.scribble()
		task.Headers = map[string]string{"k": "v"}
		_, err = bt.Produce(ctx, task)
		return func() { bt.requireTasks("a", Ready, 1) }, err
	},
	"Complete": func(ctx context.Context, bt *bufferTest, b *buffers) (func(), error) {
		err := bt.Complete(ctx, bt.parent.Receipt, b.bytes("result"), b.tasks("a", bt.other)...)
		return func() {
			require.Equal(bt.t, "result", string(infoOf(bt.t, bt.Queue, bt.parent.ID).Result))
			bt.requireTasks("a", Blocked, 2, bt.other)
		}, err
	},
	"SetSchedule": func(ctx context.Context, bt *bufferTest, b *buffers) (func(), error) {
		err := bt.SetSchedule(ctx, Schedule{Name: "s", Every: time.Minute, Task: b.task("a", bt.parent.ID)})
		return func() {
			all, err := bt.Schedules(bt.t.Context())
			require.NoError(bt.t, err)
			require.Len(bt.t, all, 1)
			require.Equal(bt.t, "payload", string(all[0].Task.Payload))
			require.Equal(bt.t, map[string]string{"k": "v"}, all[0].Task.Headers)
			require.Equal(bt.t, []ID{bt.parent.ID}, all[0].Task.After)
		}, err
	},
	"Configure": func(ctx context.Context, bt *bufferTest, b *buffers) (func(), error) {
		weights := map[string]int{"t": 2}
		b.overwrite = append(b.overwrite, func() { weights["t"], weights["x"] = 7, 7 })
		err := bt.Configure(ctx, "a", func(s *Settings) { s.TenantWeights = weights })
		return func() {
			s, err := bt.Settings("a")
			require.NoError(bt.t, err)
			require.Equal(bt.t, map[string]int{"t": 2}, s.TenantWeights)
		}, err
	},
	"RedriveAllDead": func(ctx context.Context, bt *bufferTest, b *buffers) (func(), error) {
		n, err := bt.RedriveAllDead(ctx, DeadFilter{Queue: "dead", Tenants: list(b, []string{"t"}, "u")})
		return func() {
			require.LessOrEqual(bt.t, n, 1)
			for info, err := range bt.List(bt.t.Context(), ListOptions{State: Ready, Queue: "dead"}) {
				require.NoError(bt.t, err)
				require.Equal(bt.t, "t", info.Tenant)
			}
		}, err
	},
	"PurgeDead": func(ctx context.Context, bt *bufferTest, b *buffers) (func(), error) {
		_, err := bt.PurgeDead(ctx, DeadFilter{Tenants: list(b, []string{"t"}, "u")})
		return func() {
			left := 0
			for range bt.List(bt.t.Context(), ListOptions{State: Dead, Tenants: []string{"u"}}) {
				left++
			}
			require.Equal(bt.t, 1, left)
		}, err
	},
	"List": func(ctx context.Context, bt *bufferTest, b *buffers) (func(), error) {
		tasks := bt.List(ctx, ListOptions{State: Dead, Tenants: list(b, []string{"t"}, "u")})
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
		_, err := bt.Claim(ctx, ClaimRequest{
			Queues:  list(b, []string{"none", "none too"}, "a"),
			Weights: b.weights(map[string]int{"none": 1, "none too": 2}), NoWait: ctx.Done() == nil,
		})
		return func() {}, err
	},
	"WaitIdle": func(ctx context.Context, bt *bufferTest, b *buffers) (func(), error) {
		return func() {}, bt.WaitIdle(ctx, list(b, []string{"none", "none too"}, "parent")...)
	},
	"Subscribe": func(_ context.Context, bt *bufferTest, b *buffers) (func(), error) {
		sub, err := bt.Subscribe(SubscribeOptions{
			Queues: list(b, []string{"a"}, "b"), Kinds: list(b, []EventKind{EventProduced}, EventClaimed),
		})
		return func() {
			defer sub.Close()
			produce(bt.t, bt.Queue, Task{Queue: "a"}, Task{Queue: "b"})
			e, err := sub.Next(bt.t.Context())
			require.NoError(bt.t, err)
			require.Equal(bt.t, "a", e.Queue)
			_, more, _ := sub.events.Take()
			require.False(bt.t, more)
		}, err
	},
}

// TestBuffersAreTheCallers: whatever a caller hands in, the caller may overwrite as soon as the
// verb has returned, even if the operation is still under way because ctx has ended.
func TestBuffersAreTheCallers(t *testing.T) {
	for name, call := range bufferCalls {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				bt, b := newBufferTest(t), new(buffers)
				check, err := call(context.Background(), bt, b)
				if name == "Claim" {
					require.ErrorIs(t, err, ErrEmpty)
				} else if name != "WaitIdle" {
					require.NoError(t, err)
				}
				b.scribble()
				check()
				require.NoError(t, bt.checkAll())
			})
		})
		t.Run(name+", whose ctx ends", func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				bt, b := newBufferTest(t), new(buffers)
				goOn := standStill(bt.led()[0])
				ctx, cancel := context.WithTimeout(t.Context(), time.Second)
				defer cancel()
				check, err := call(ctx, bt, b)
				if name != "Subscribe" { // which asks no owner
					require.ErrorIs(t, err, context.DeadlineExceeded)
				}
				b.scribble()
				goOn()
				synctest.Wait()
				if err == nil || errors.Is(err, ErrUncertain) {
					check()
				}
				require.NoError(t, bt.checkAll())
			})
		})
	}
}

// TestBuffersAreTheHandlers: what a handler hands over as a result or follow-up, it may overwrite
// before it returns, and whoever gets the memory back that it took from a pool may do so at any
// time.
func TestBuffersAreTheHandlers(t *testing.T) {
	for name, middleware := range map[string][]Middleware{
		"": nil, "middleware": {func(next Handler) Handler { return next }},
	} {
		for _, value := range []bool{false, true} {
			t.Run(fmt.Sprint(name, value), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					bt := newBufferTest(t)
					var m Mux
					m.Use(middleware...)
					Handle(&m, "h", func(_ context.Context, j *Job[[]byte]) error {
						b := new(buffers)
						defer b.scribble()
						j.FollowUp(b.tasks("a", bt.other)...)
						if value {
							return j.SetResultValue(b.bytes("result"))
						}
						j.SetResult(b.bytes("result"))
						return nil
					})
					startRun(t, bt.Queue, &m, RunOptions{Concurrency: 2})
					synctest.Wait()
					ids := produce(t, bt.Queue, Task{Queue: "h"}, Task{Queue: "h"}, Task{Queue: "h"})
					synctest.Wait()
					for _, id := range ids {
						require.Equal(t, "result", string(infoOf(t, bt.Queue, id).Result))
					}
					bt.requireTasks("a", Blocked, 6, bt.other)
					require.NoError(t, bt.checkAll())
				})
			})
		}
	}
}

// TestBuffersOfReceivers: what one receiver is given, it may overwrite and append to; no other one
// sees it, nor does the queue.
func TestBuffersOfReceivers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		q := openForRun(t, Options{Retention: time.Hour})
		b := new(buffers)
		task := b.task("a")
		task.MaxAttempts = 3 // a record of more than its payload
		_, err := q.ProduceBatch(t.Context(), []Task{task, task, {Queue: "a", Payload: task.Payload}})
		require.NoError(t, err)
		require.NoError(t, q.SetSchedule(t.Context(), Schedule{Name: "s", Every: time.Hour, Task: task}))
		overwrite := func(p []byte) {
			for i := range p {
				p[i] = 'X'
			}
			_ = append(p, "XXXXXXXX"...)
		}
		spoil := func(t *Task) {
			overwrite(t.Payload)
			if t.Headers != nil {
				t.Headers["k"] = "X"
			}
		}
		var leases []*Lease
		for range 3 {
			l, err := q.Claim(t.Context(), ClaimRequest{Queues: []string{"a"}})
			require.NoError(t, err)
			require.Equal(t, "payload", string(l.Payload))
			spoil(&l.Task)
			leases = append(leases, l)
		}
		for range 2 {
			for _, l := range leases {
				info := infoOf(t, q, l.ID)
				require.Equal(t, "payload", string(info.Payload))
				spoil(&info.Task)
			}
			all, err := q.Schedules(t.Context())
			require.NoError(t, err)
			require.Equal(t, "payload", string(all[0].Task.Payload))
			require.Equal(t, "v", all[0].Task.Headers["k"])
			spoil(&all[0].Task)
		}
		outcomes := make(chan *Outcome)
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
		info := infoOf(t, q, leases[0].ID)
		require.Equal(t, "result", string(info.Result))
		overwrite(info.Result)
		require.Equal(t, "payload", string(info.Payload))
		for _, l := range leases[1:] {
			require.NoError(t, q.Release(t.Context(), l.Receipt, 0))
		}
		for range 2 {
			l, err := q.Claim(t.Context(), ClaimRequest{Queues: []string{"a"}})
			require.NoError(t, err)
			require.Equal(t, "payload", string(l.Payload))
		}
	})
}

// TestClaimsThatGiveUp: the owner of a shard may be amid a claim whose caller gives up, and then
// writes to the list of queues. It is for the race detector.
func TestClaimsThatGiveUp(t *testing.T) {
	t.Parallel()
	q := openForRun(t, Options{Shards: 2})
	for i := range 40 {
		b := new(buffers)
		names, weights := make([]string, 2000), make(map[string]int)
		for i := range names {
			names[i] = fmt.Sprint("queue ", i)
			weights[names[i]] = 1
		}
		req := ClaimRequest{Queues: list(b, names, "X"), Weights: b.weights(weights)}
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*50*time.Microsecond)
		_, err := q.Claim(ctx, req)
		b.scribble()
		require.ErrorIs(t, err, context.DeadlineExceeded)
		cancel()
	}
}
