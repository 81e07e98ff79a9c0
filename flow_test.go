package codeq

import (
	"codeq/internal/engine"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
)

// flowTest is a queue in memory whose tasks depend on each other.
type flowTest struct {
	*testing.T
	opts Options
	q    *Queue
}

// inFlow runs a test in fake time, and checks what is stored when it ends.
func inFlow(t *testing.T, opts Options, test func(f *flowTest)) {
	synctest.Test(t, func(t *testing.T) {
		if opts.fs == nil {
			opts.fs = vfs.NewMem()
		}
		f := &flowTest{T: t, opts: opts}
		f.open()
		defer func() { require.NoError(t, f.q.Close()) }()
		test(f)
		f.check()
	})
}

func (f *flowTest) open() {
	f.Helper()
	var err error
	f.q, err = Open("queue", &f.opts)
	require.NoError(f, err)
}

func (f *flowTest) reopen() {
	f.Helper()
	f.check()
	require.NoError(f, f.q.Close())
	f.open()
	f.check()
}

// check waits until nothing is under way, and has the checkers look.
func (f *flowTest) check() {
	f.Helper()
	synctest.Wait()
	require.NoError(f, f.q.checkAll())
	require.NoError(f, f.q.checkMemory())
}

// produceAt stores a task in a shard that does not belong to another one.
func (f *flowTest) produceAt(shard int, task Task) ID {
	f.Helper()
	return produce(f.T, f.q.startingAt(shard), task)[0]
}

func (f *flowTest) batch(tasks ...Task) []ID {
	f.Helper()
	ids, err := f.q.ProduceBatch(context.Background(), tasks)
	require.NoError(f, err)
	return ids
}

// claim leases the next task of a queue.
func (f *flowTest) claim(queue string) *Lease {
	f.Helper()
	synctest.Wait()
	l := claimNow(f.T, f.q, queue)
	require.NotNil(f, l, "nothing is ready in %q", queue)
	return l
}

// complete claims the next task of a queue and completes it.
func (f *flowTest) complete(queue string, next ...Task) {
	f.Helper()
	require.NoError(f, f.q.Complete(context.Background(), f.claim(queue).Receipt, nil, next...))
	f.check()
}

// die claims the next task of a queue and makes it a dead letter.
func (f *flowTest) die(queue string) {
	f.Helper()
	require.NoError(f, f.q.DeadLetter(context.Background(), f.claim(queue).Receipt, errors.New("broken")))
	f.check()
}

func (f *flowTest) cancel(id ID) {
	f.Helper()
	require.NoError(f, f.q.Cancel(context.Background(), id))
	f.check()
}

// gone stands for a task that does not exist.
const gone State = 0

func (f *flowTest) state(id ID) State {
	f.Helper()
	synctest.Wait()
	info, err := f.q.Get(context.Background(), id)
	if errors.Is(err, ErrNotFound) {
		return gone
	}
	require.NoError(f, err)
	return info.State
}

func (f *flowTest) requireState(want State, ids ...ID) {
	f.Helper()
	for i, id := range ids {
		require.Equal(f, want, f.state(id), "task %d of %d", i, len(ids))
	}
}

func (f *flowTest) counts(queue string) Counts {
	f.Helper()
	synctest.Wait()
	stats, err := f.q.Stats(context.Background())
	require.NoError(f, err)
	return stats[queue]
}

// flowLayouts are where a parent, in shard 0, and its child may lie.
var flowLayouts = []struct {
	name          string
	shards, child int
}{{"one shard", 1, 0}, {"same shard of three", 3, 0}, {"another shard", 3, 2}}

// TestAfterExistingTask: a task may wait for one that is already stored, in
// whatever state that is.
func TestAfterExistingTask(t *testing.T) {
	ctx := context.Background()
	ready := func(f *flowTest, queue string) ID { return f.produceAt(0, Task{Queue: queue, Retention: Forever}) }
	dead := func(f *flowTest, queue string) ID {
		id := ready(f, queue)
		f.die(queue)
		return id
	}
	completeIt := func(f *flowTest, queue string, _ ID) { f.complete(queue) }
	cancelIt := func(f *flowTest, _ string, id ID) { f.cancel(id) }
	purgeIt := func(f *flowTest, queue string, _ ID) {
		n, err := f.q.PurgeDead(ctx, DeadFilter{Queue: queue})
		require.NoError(f, err)
		require.Equal(f, 1, n)
	}
	redriveIt := func(f *flowTest, queue string, id ID) {
		require.NoError(f, f.q.RedriveDead(ctx, id))
		f.complete(queue)
	}
	for _, l := range flowLayouts {
		t.Run(l.name, func(t *testing.T) {
			inFlow(t, Options{Shards: l.shards}, func(f *flowTest) {
				for _, c := range []struct {
					parent string
					make   func(f *flowTest, queue string) ID
					onDead OnDead
					first  State // of the child
					then   func(f *flowTest, queue string, parent ID)
					last   State // of the child
				}{
					{"ready", ready, HoldOnDead, Blocked, completeIt, Ready},
					{"ready, canceled", ready, RunOnDead, Blocked, cancelIt, Canceled},
					{"scheduled", func(f *flowTest, queue string) ID {
						return f.produceAt(0, Task{Queue: queue, RunAt: time.Now().Add(time.Minute)})
					}, HoldOnDead, Blocked, func(f *flowTest, queue string, _ ID) {
						time.Sleep(time.Minute)
						f.complete(queue)
					}, Ready},
					{"blocked", func(f *flowTest, queue string) ID {
						first := f.produceAt(0, Task{Queue: queue + ", before"})
						return f.produceAt(0, Task{Queue: queue, After: []ID{first}})
					}, HoldOnDead, Blocked, func(f *flowTest, queue string, _ ID) {
						f.complete(queue + ", before")
						f.complete(queue)
					}, Ready},
					{"leased", func(f *flowTest, queue string) ID {
						ready(f, queue)
						return f.claim(queue).ID
					}, HoldOnDead, Blocked, func(f *flowTest, queue string, _ ID) {
						time.Sleep(time.Minute) // the lease expires: the second attempt ends it
						f.complete(queue)
					}, Ready},
					{"leased, canceled", func(f *flowTest, queue string) ID {
						ready(f, queue)
						return f.claim(queue).ID
					}, HoldOnDead, Blocked, cancelIt, Canceled},
					{"done", func(f *flowTest, queue string) ID {
						id := ready(f, queue)
						f.complete(queue)
						f.requireState(Done, id)
						return id
					}, HoldOnDead, Ready, nil, 0},
					{"done and gone", func(f *flowTest, queue string) ID {
						id := f.produceAt(0, Task{Queue: queue})
						f.complete(queue)
						f.requireState(gone, id)
						return id
					}, HoldOnDead, Ready, nil, 0},
					{"dead, redriven", dead, HoldOnDead, Blocked, redriveIt, Ready},
					{"dead, purged", dead, HoldOnDead, Blocked, purgeIt, Canceled},
					{"dead, canceled", dead, HoldOnDead, Blocked, cancelIt, Canceled},
					{"dead, cancel", dead, CancelOnDead, Canceled, nil, 0},
					{"dead, run", dead, RunOnDead, Ready, nil, 0},
					{"canceled", func(f *flowTest, queue string) ID {
						id := ready(f, queue)
						f.cancel(id)
						return id
					}, RunOnDead, Canceled, nil, 0},
					{"canceled and gone", func(f *flowTest, queue string) ID {
						id := f.produceAt(0, Task{Queue: queue})
						f.cancel(id)
						return id
					}, HoldOnDead, Ready, nil, 0},
					{"unknown", func(f *flowTest, queue string) ID {
						return ID{1, 2, 3, 4, 5, 6, 0x70, 0, 0x80, 0xff, 0xff, 0xff}
					}, CancelOnDead, Ready, nil, 0},
				} {
					queue := "parent " + c.parent
					parent := c.make(f, queue)
					child := f.produceAt(l.child, Task{Queue: "child " + c.parent, After: []ID{parent}, OnDead: c.onDead, Retention: Forever})
					f.check()
					require.Equal(f, c.first, f.state(child), "parent %s", c.parent)
					if c.then != nil {
						c.then(f, queue, parent)
						f.check()
						require.Equal(f, c.last, f.state(child), "parent %s, afterwards", c.parent)
					}
					info, err := f.q.Get(ctx, child)
					require.NoError(f, err)
					require.Equal(f, []ID{parent}, info.After)
					require.Equal(f, c.onDead, info.OnDead)
				}
			})
		})
	}
}

// diamond is a task, two that wait for it, and one that waits for both.
func diamond() []Task {
	return []Task{
		{Queue: "top"},
		{Queue: "left", After: []ID{Nth(0)}},
		{Queue: "right", After: []ID{Nth(0)}},
		{Queue: "bottom", After: []ID{Nth(1), Nth(2), Nth(1)}},
	}
}

// finishDiamond works on a diamond, and makes sure that nothing is early.
func (f *flowTest) finishDiamond() {
	f.Helper()
	none := func(queues ...string) {
		f.Helper()
		synctest.Wait()
		require.Nil(f, claimNow(f.T, f.q, queues...))
	}
	none("left", "right", "bottom")
	f.complete("top")
	none("bottom")
	f.complete("right")
	none("bottom")
	f.complete("left")
	f.complete("bottom")
	none("top", "left", "right", "bottom")
}

// TestNth: a batch, or the follow-ups of a completion, is stored as a flow whole.
func TestNth(t *testing.T) {
	for _, shards := range []int{1, 3} {
		inFlow(t, Options{Shards: shards}, func(f *flowTest) {
			ids := f.batch(diamond()...)
			f.requireState(Ready, ids[0])
			f.requireState(Blocked, ids[1:]...)
			bottom, err := f.q.Get(context.Background(), ids[3])
			require.NoError(f, err)
			require.Equal(f, []ID{ids[1], ids[2], ids[1]}, bottom.After, "the IDs have taken the place of Nth")
			f.finishDiamond()

			f.produceAt(0, Task{Queue: "start"})
			f.complete("start", diamond()...)
			require.EqualValues(f, 1, f.counts("bottom").Blocked)
			f.reopen()
			f.finishDiamond()
		})
	}
}

// TestNthTogetherWithIDs: siblings and tasks that exist already are parents of
// one task, in whatever shards these are.
func TestNthTogetherWithIDs(t *testing.T) {
	inFlow(t, Options{Shards: 3}, func(f *flowTest) {
		var old []ID
		for shard := range 3 {
			old = append(old, f.produceAt(shard, Task{Queue: "old"}))
		}
		ids := f.batch(Task{Queue: "new"}, Task{Queue: "join", After: append([]ID{Nth(0)}, old...)})
		f.complete("new")
		f.complete("old")
		f.complete("old")
		f.requireState(Blocked, ids[1])
		f.reopen()
		f.complete("old")
		f.complete("join")
	})
}

func TestChain(t *testing.T) {
	for _, shards := range []int{1, 3} {
		inFlow(t, Options{Shards: shards}, func(f *flowTest) {
			const n = 40
			var ids []ID
			for i := range n {
				task := Task{Queue: "chain", Payload: []byte{byte(i)}}
				if i > 0 {
					task.After = []ID{ids[i-1]}
				}
				ids = append(ids, f.produceAt(i%shards, task))
			}
			for i := range n {
				l := f.claim("chain")
				require.Equal(f, []byte{byte(i)}, l.Payload)
				require.Nil(f, claimNow(f.T, f.q, "chain"), "one at a time")
				require.NoError(f, f.q.Complete(context.Background(), l.Receipt, nil))
			}
		})
	}
}

// TestFanOutAndIn: a thousand tasks wait for one, and one waits for them all.
func TestFanOutAndIn(t *testing.T) {
	const n = 1000
	ctx := context.Background()
	work := func(f *flowTest, queue string, n int) {
		for n > 0 {
			leases, err := f.q.ClaimBatch(ctx, ClaimRequest{Queues: []string{queue}, Max: min(n, 100)})
			require.NoError(f, err)
			for _, l := range leases {
				require.NoError(f, f.q.Complete(ctx, l.Receipt, nil))
			}
			n -= len(leases)
		}
		f.check()
	}
	for _, shards := range []int{1, 3} {
		t.Run(fmt.Sprint("one batch, ", shards, " shards"), func(t *testing.T) {
			inFlow(t, Options{Shards: shards}, func(f *flowTest) {
				tasks := []Task{{Queue: "first"}}
				join := Task{Queue: "last"}
				for i := range n {
					tasks = append(tasks, Task{Queue: "middle", After: []ID{Nth(0)}})
					join.After = append(join.After, Nth(i+1))
				}
				f.batch(append(tasks, join)...)
				require.EqualValues(f, n, f.counts("middle").Blocked)
				f.complete("first")
				require.EqualValues(f, n, f.counts("middle").Ready)
				work(f, "middle", n-1)
				require.EqualValues(f, 1, f.counts("last").Blocked)
				work(f, "middle", 1)
				f.complete("last")
			})
		})
	}
	t.Run("over shards", func(t *testing.T) {
		inFlow(t, Options{Shards: 3}, func(f *flowTest) {
			first := f.produceAt(0, Task{Queue: "first"})
			join := Task{Queue: "last"}
			for shard := range 3 {
				var tasks []Task
				for i := shard; i < n; i += 3 {
					tasks = append(tasks, Task{Queue: "middle", After: []ID{first}})
				}
				ids, err := f.q.startingAt(shard).ProduceBatch(ctx, tasks)
				require.NoError(f, err)
				join.After = append(join.After, ids...)
			}
			last := f.produceAt(1, join)
			f.check()
			f.complete("first")
			require.EqualValues(f, n, f.counts("middle").Ready)
			work(f, "middle", n-1)
			f.requireState(Blocked, last)
			work(f, "middle", 1)
			f.requireState(Ready, last)
		})
	})
}

// TestOnDead: what becomes of a task when a parent dies that it waits for.
func TestOnDead(t *testing.T) {
	ctx := context.Background()
	for _, l := range flowLayouts {
		t.Run(l.name, func(t *testing.T) {
			inFlow(t, Options{Shards: l.shards}, func(f *flowTest) {
				parent := f.produceAt(0, Task{Queue: "parent"})
				children := make(map[OnDead]ID)
				for _, onDead := range []OnDead{HoldOnDead, CancelOnDead, RunOnDead} {
					children[onDead] = f.produceAt(l.child, Task{
						Queue: "child", After: []ID{parent}, OnDead: onDead, Retention: Forever,
					})
				}
				f.check()
				f.die("parent")
				f.requireState(Blocked, children[HoldOnDead])
				f.requireState(Canceled, children[CancelOnDead])
				f.requireState(Ready, children[RunOnDead])
				f.reopen()
				for range 2 { // it dies again
					require.NoError(f, f.q.RedriveDead(ctx, parent))
					f.check()
					f.requireState(Blocked, children[HoldOnDead])
					f.die("parent")
				}
				n, err := f.q.RedriveAllDead(ctx, DeadFilter{Queue: "parent"})
				require.NoError(f, err)
				require.Equal(f, 1, n)
				f.complete("parent")
				f.requireState(Ready, children[HoldOnDead])
				f.requireState(Canceled, children[CancelOnDead])
			})
		})
	}
}

// TestOnDeadOfSeveralParents: one parent is enough to cancel, and all have to
// end for the task to go on.
func TestOnDeadOfSeveralParents(t *testing.T) {
	for _, shards := range []int{1, 3} {
		inFlow(t, Options{Shards: shards}, func(f *flowTest) {
			var parents []ID
			for i := range 3 {
				parents = append(parents, f.produceAt(i%shards, Task{Queue: fmt.Sprint(i)}))
			}
			hold := f.produceAt(0, Task{Queue: "hold", After: parents, Retention: Forever})
			run := f.produceAt(0, Task{Queue: "run", After: parents, OnDead: RunOnDead, Retention: Forever})
			stop := f.produceAt(0, Task{Queue: "stop", After: parents, OnDead: CancelOnDead, Retention: Forever})
			f.complete("0")
			f.die("1")
			f.requireState(Blocked, hold, run)
			f.requireState(Canceled, stop)
			f.die("2")
			f.requireState(Blocked, hold)
			f.requireState(Ready, run)
			f.cancel(parents[1])
			f.requireState(Canceled, hold)
			require.NoError(f, f.q.RedriveDead(context.Background(), parents[2]))
			f.complete("2")
			f.requireState(Canceled, hold, stop)
		})
	}
}

// TestDeadParentIsKept: a dead letter that others wait for does not expire,
// whether they began to wait before its death or after.
func TestDeadParentIsKept(t *testing.T) {
	ctx := context.Background()
	for _, l := range flowLayouts {
		t.Run(l.name, func(t *testing.T) {
			inFlow(t, Options{Shards: l.shards}, func(f *flowTest) {
				for _, queue := range []string{"before", "after", "lonely"} {
					require.NoError(f, f.q.Configure(ctx, queue, func(s *Settings) { s.DeadRetention = time.Hour }))
				}
				before := f.produceAt(0, Task{Queue: "before"})
				after := f.produceAt(0, Task{Queue: "after"})
				lonely := f.produceAt(0, Task{Queue: "lonely"})
				child1 := f.produceAt(l.child, Task{Queue: "child", After: []ID{before}})
				f.check()
				f.die("before")
				f.die("after")
				f.die("lonely")
				time.Sleep(30 * time.Minute)
				child2 := f.produceAt(l.child, Task{Queue: "child", After: []ID{after}})
				f.check()
				time.Sleep(24 * time.Hour)
				f.check()
				f.requireState(gone, lonely)
				f.requireState(Dead, before, after)
				f.requireState(Blocked, child1, child2)
				f.reopen()
				for _, id := range []ID{before, after} {
					require.NoError(f, f.q.RedriveDead(ctx, id))
				}
				f.complete("before")
				f.complete("after")
				f.requireState(Ready, child1, child2)
			})
		})
	}
}

// TestChildWaitsForMore: when its parents have ended, a task may still have to
// wait for its time, its turn, or room.
func TestChildWaitsForMore(t *testing.T) {
	ctx := context.Background()
	for _, shards := range []int{1, 3} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			inFlow(t, Options{Shards: shards, LeaseFor: 24 * time.Hour}, func(f *flowTest) {
				after := func(task Task) ID { // a child of a task of the queue parent
					parent := produce(f.T, f.q, Task{Queue: "parent"})[0]
					task.After = []ID{parent}
					id := produce(f.T, f.q, task)[0]
					f.check()
					f.requireState(Blocked, id)
					return id
				}

				later := after(Task{Queue: "later", RunAt: time.Now().Add(time.Hour)})
				f.complete("parent")
				f.requireState(Scheduled, later)
				time.Sleep(time.Hour)
				f.requireState(Ready, later)
				late := after(Task{Queue: "later", RunAt: time.Now().Add(time.Minute)})
				time.Sleep(time.Hour)
				f.requireState(Blocked, late)
				f.complete("parent")
				f.requireState(Ready, late)

				rival := produce(f.T, f.q, Task{Queue: "group", Group: "g"})[0]
				inGroup := after(Task{Queue: "group", Group: "g"})
				f.complete("parent")
				f.requireState(Blocked, inGroup)
				f.requireState(Ready, rival)
				f.complete("group")
				f.requireState(Ready, inGroup)
				second := produce(f.T, f.q, Task{Queue: "group", Group: "g"})[0]
				f.requireState(Blocked, second)
				f.complete("group")
				f.requireState(Ready, second)
				waits := after(Task{Queue: "group2", Group: "g"})
				third := produce(f.T, f.q, Task{Queue: "group2", Group: "g"})[0]
				f.requireState(Ready, third) // who waits for parents does not have the turn
				f.cancel(third)
				f.requireState(Blocked, waits)
				f.complete("parent")
				f.complete("group2")

				require.NoError(f, f.q.Configure(ctx, "limited", func(s *Settings) { s.ConcurrencyPerKey = 1 }))
				produce(f.T, f.q, Task{Queue: "limited", LimitKey: "k"})
				lease := f.claim("limited")
				limited := after(Task{Queue: "limited", LimitKey: "k"})
				f.complete("parent")
				require.Nil(f, claimNow(f.T, f.q, "limited"))
				f.requireState(Blocked, limited)
				require.NoError(f, f.q.Complete(ctx, lease.Receipt, nil))
				f.complete("limited")

				unique := after(Task{Queue: "unique", Unique: Unique{Key: "k"}})
				id, err := f.q.Produce(ctx, Task{Queue: "unique", Unique: Unique{Key: "k"}})
				require.ErrorIs(f, err, ErrDuplicate)
				require.Equal(f, unique, id)
				id, err = f.q.Produce(ctx, Task{Queue: "unique", Payload: []byte("new"), Unique: Unique{Key: "k", Replace: true}})
				require.NoError(f, err)
				require.Equal(f, unique, id)
				f.check()
				f.requireState(Blocked, unique) // it waits for its parent still
				info, err := f.q.Get(ctx, unique)
				require.NoError(f, err)
				require.Len(f, info.After, 1)
				f.complete("parent")
				require.Equal(f, "new", string(f.claim("unique").Payload))
			})
		})
	}
}

// TestBlockedTaskIsChanged: a task keeps its parents when it gets another
// priority or time.
func TestBlockedTaskIsChanged(t *testing.T) {
	ctx := context.Background()
	for _, shards := range []int{1, 3} {
		inFlow(t, Options{Shards: shards}, func(f *flowTest) {
			p1, p2 := f.produceAt(0, Task{Queue: "p1"}), f.produceAt(shards-1, Task{Queue: "p2"})
			child := f.produceAt(0, Task{Queue: "child", After: []ID{p1, p2}})
			rival := f.produceAt(0, Task{Queue: "child", Priority: 3})
			require.NoError(f, f.q.SetPriority(ctx, child, 7))
			f.check()
			f.complete("p1")
			require.NoError(f, f.q.SetRunAt(ctx, child, time.Now().Add(time.Hour)))
			f.check()
			f.requireState(Blocked, child)
			f.reopen()
			f.complete("p2")
			f.requireState(Scheduled, child)
			require.NoError(f, f.q.SetRunAt(ctx, child, time.Time{}))
			f.check()
			require.Equal(f, child, f.claim("child").ID)
			require.Equal(f, rival, f.claim("child").ID)
		})
	}
}

// TestCancelInFlow: the cancel of a task takes those with it that wait for it,
// and those that wait for them, and nothing else.
func TestCancelInFlow(t *testing.T) {
	for _, shards := range []int{1, 3} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			inFlow(t, Options{Shards: shards, Retention: Forever}, func(f *flowTest) {
				root := f.produceAt(0, Task{Queue: "root"})
				other := f.produceAt(0, Task{Queue: "other"})
				var ids []ID // a chain below root
				for i := range 6 {
					parent := root
					if i > 0 {
						parent = ids[i-1]
					}
					ids = append(ids, f.produceAt(i%shards, Task{Queue: "chain", After: []ID{parent, other}}))
				}
				beside := f.produceAt(shards-1, Task{Queue: "beside", After: []ID{root}})
				f.check()

				f.cancel(ids[3])
				f.requireState(Canceled, ids[3:]...)
				f.requireState(Blocked, ids[:3]...)
				f.requireState(Blocked, beside)
				require.ErrorIs(f, f.q.Cancel(context.Background(), ids[5]), ErrNotWaiting)

				f.cancel(root)
				f.requireState(Canceled, ids...)
				f.requireState(Canceled, beside)
				f.requireState(Ready, other)
				f.complete("other") // children that are canceled do not mind
				require.EqualValues(f, Counts{Canceled: 6}, f.counts("chain"))
			})
		})
	}
}

// TestCanceledChildIsForgotten: a parent ends in peace whose child was canceled
// and is not kept.
func TestCanceledChildIsForgotten(t *testing.T) {
	for _, l := range flowLayouts {
		inFlow(t, Options{Shards: l.shards}, func(f *flowTest) {
			parent := f.produceAt(0, Task{Queue: "parent"})
			child := f.produceAt(l.child, Task{Queue: "child", After: []ID{parent}})
			sibling := f.produceAt(l.child, Task{Queue: "child", After: []ID{parent}})
			f.check()
			f.cancel(child)
			f.requireState(gone, child)
			f.reopen()
			f.complete("parent")
			f.requireState(gone, child)
			f.requireState(Ready, sibling)
		})
	}
}

func TestNthIsRefused(t *testing.T) {
	ctx := context.Background()
	inFlow(t, Options{Shards: 3}, func(f *flowTest) {
		refused := func(err error, field string) {
			f.Helper()
			var invalid *InvalidError
			require.ErrorAs(f, err, &invalid)
			require.Equal(f, field, invalid.Field)
		}
		_, err := f.q.Produce(ctx, Task{Queue: "a", After: []ID{Nth(0)}})
		refused(err, "Task.After")
		_, err = f.q.Produce(ctx, Task{Queue: "a", After: []ID{{}}})
		refused(err, "Task.After")
		_, err = f.q.Produce(ctx, Task{Queue: "a", After: make([]ID, MaxParents+1)})
		refused(err, "Task.After")
		_, err = f.q.Produce(ctx, Task{Queue: "a", OnDead: RunOnDead + 1})
		refused(err, "Task.OnDead")
		for _, after := range []ID{Nth(1), Nth(2), Nth(-1), {}} {
			_, err = f.q.ProduceBatch(ctx, []Task{{Queue: "a"}, {Queue: "a", After: []ID{after}}})
			refused(err, "Task.After")
			require.ErrorContains(f, err, "task 1")
		}

		// Tasks that refer to each other, and belong to different shards.
		scattered := []Task{{Queue: "a", LimitKey: keyOf("a", 0, 3)}, {Queue: "a", LimitKey: keyOf("a", 1, 3), After: []ID{Nth(0)}}}
		_, err = f.q.ProduceBatch(ctx, scattered)
		refused(err, "ProduceBatch tasks")
		f.produceAt(0, Task{Queue: "start"})
		l := f.claim("start")
		refused(f.q.Complete(ctx, l.Receipt, nil, scattered...), "Complete tasks")
		refused(f.q.Complete(ctx, l.Receipt, nil, Task{Queue: "a", After: []ID{Nth(0)}}), "Task.After")
		stats, err := f.q.Stats(ctx)
		require.NoError(f, err)
		require.Equal(f, map[string]Counts{"start": {Leased: 1}}, stats, "nothing was stored")

		// Of one shard they may be.
		together := []Task{{Queue: "a"}, {Queue: "a", LimitKey: keyOf("a", 0, 3), After: []ID{Nth(0)}}}
		f.batch(together...)
		f.complete("a")
		f.complete("a")
		require.NoError(f, f.q.Complete(ctx, l.Receipt, nil, together...))
		f.complete("a")
		f.complete("a")
	})
}

// keyOf returns a LimitKey whose tasks of a queue belong to a shard.
func keyOf(queue string, shard, shards int) string {
	for i := 0; ; i++ {
		t := Task{Queue: queue, LimitKey: fmt.Sprint("key ", i)}
		rec := t.record()
		if home, _ := rec.Ties.Home(shards); home == shard {
			return t.LimitKey
		}
	}
}

// TestNthOfTaskThatExisted: who waits for a task of the batch whose idempotency
// key was taken waits for the task that has the key.
func TestNthOfTaskThatExisted(t *testing.T) {
	for _, replace := range []bool{false, true} {
		inFlow(t, Options{Shards: 3}, func(f *flowTest) {
			first := Task{Queue: "first", Unique: Unique{Key: "k", Replace: replace}}
			old := produce(f.T, f.q, first)[0]
			ids, err := f.q.ProduceBatch(context.Background(), []Task{first, {Queue: "second", After: []ID{Nth(0)}}})
			require.Equal(f, !replace, errors.Is(err, ErrDuplicate))
			require.Equal(f, old, ids[0])
			f.check()
			f.requireState(Blocked, ids[1])
			f.complete("first")
			f.complete("second")
		})
	}
}

// TestFollowUpOfItself: a follow-up may wait for the task that is completed,
// and for others.
func TestFollowUpOfItself(t *testing.T) {
	for _, retention := range []time.Duration{0, time.Hour} {
		inFlow(t, Options{Shards: 3, Retention: retention}, func(f *flowTest) {
			f.produceAt(0, Task{Queue: "start"})
			other := f.produceAt(1, Task{Queue: "other"})
			l := f.claim("start")
			require.NoError(f, f.q.Complete(context.Background(), l.Receipt, nil, Task{Queue: "next", After: []ID{l.ID, l.ID, other}}))
			f.check()
			require.EqualValues(f, 1, f.counts("next").Blocked)
			f.complete("other")
			f.complete("next")
		})
	}
}

// TestFlowSurvivesReopen: who waits, and for how many, is on disk.
func TestFlowSurvivesReopen(t *testing.T) {
	for _, shards := range []int{1, 3} {
		inFlow(t, Options{Shards: shards, LeaseFor: 24 * time.Hour}, func(f *flowTest) {
			var parents []ID
			for i := range 5 {
				parents = append(parents, f.produceAt(i%shards, Task{Queue: "parent"}))
			}
			l := f.claim("parent")
			child := f.produceAt(0, Task{Queue: "child", After: append(parents, parents...)}) // each counts once
			f.reopen()
			for range 4 {
				f.complete("parent")
				f.reopen()
				f.requireState(Blocked, child)
			}
			require.NoError(f, f.q.Complete(context.Background(), l.Receipt, nil), "a lease from before")
			f.reopen()
			f.requireState(Ready, child)
		})
	}
}

// TestParentResults: what the parents leave behind is read by their IDs.
func TestParentResults(t *testing.T) {
	inFlow(t, Options{Shards: 3, Retention: time.Hour}, func(f *flowTest) {
		var m Mux
		Handle(&m, "part", func(_ context.Context, j *Job[[]byte]) error {
			j.SetResult([]byte(strings.ToUpper(string(j.Payload))))
			return nil
		})
		var joined atomic.Pointer[string]
		Handle(&m, "join", func(ctx context.Context, j *Job[[]byte]) error {
			var parts []string
			for _, id := range j.After {
				parent, err := f.q.Get(ctx, id)
				if err != nil {
					return DeadLetter(err)
				}
				parts = append(parts, string(parent.Result))
			}
			text := strings.Join(parts, " ")
			joined.Store(&text)
			return nil
		})
		old := f.produceAt(2, Task{Queue: "part", Payload: []byte("zero")})
		f.batch(
			Task{Queue: "part", Payload: []byte("one")},
			Task{Queue: "part", Payload: []byte("two")},
			Task{Queue: "join", After: []ID{old, Nth(0), Nth(1)}},
		)
		ctx, stop := context.WithCancel(context.Background())
		ended := make(chan error)
		go func() { ended <- f.q.Run(ctx, &m, nil) }()
		require.NoError(f, f.q.WaitIdle(context.Background()))
		stop()
		require.NoError(f, <-ended)
		require.Equal(f, "ZERO ONE TWO", *joined.Load())
	})
}

// TestNthOfTwin: of two tasks of a batch with one idempotency key the first is
// stored, and who waits for the second waits for it.
func TestNthOfTwin(t *testing.T) {
	for _, shards := range []int{1, 3} {
		inFlow(t, Options{Shards: shards}, func(f *flowTest) {
			twin := Task{Queue: "twin", Unique: Unique{Key: "k"}}
			ids, err := f.q.ProduceBatch(context.Background(), []Task{twin, twin, {Queue: "child", After: []ID{Nth(1)}}})
			require.ErrorIs(f, err, ErrDuplicate)
			require.Equal(f, ids[0], ids[1])
			f.check()
			f.requireState(Blocked, ids[2])
			f.complete("twin")
			f.complete("child")
		})
	}
}

// TestFollowUpReplacesItself: a task whose idempotency key outlives it, and
// whose follow-up has the same key and Replace, is completed; the follow-up is
// a duplicate, since there is nothing left that waits.
func TestFollowUpReplacesItself(t *testing.T) {
	inFlow(t, Options{Shards: 1}, func(f *flowTest) {
		task := Task{Queue: "a", Unique: Unique{Key: "k", For: time.Hour, Replace: true}}
		produce(f.T, f.q, task)
		f.complete("a", task, Task{Queue: "b"})
		require.Equal(f, Counts{}, f.counts("a"))
		require.Equal(f, Counts{Ready: 1}, f.counts("b"))
		time.Sleep(time.Hour)
		produce(f.T, f.q, task)
		require.Equal(f, Counts{Ready: 1}, f.counts("a"))
	})
}

// TestNewParentsStayWithinMemory: a task that becomes a parent takes more room
// in its window.
func TestNewParentsStayWithinMemory(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		ids := produce(t, q, Task{Queue: "a"}, Task{Queue: "a", Tenant: "x"})
		s := q.shard(0)
		require.NoError(t, s.probe(func(s *shard) error { s.Probe().LimitWindows(); return nil }))
		produce(t, q, Task{Queue: "b", After: ids[:1], RunAt: time.Now().Add(time.Hour)})
		requireSettled(t, q)
	})
}

// TestAlterAsParentsEnd: a task is altered in the group in which the last of its parents
// ends. It goes on in the next one, and nothing says any more that it waits.
func TestAlterAsParentsEnd(t *testing.T) {
	ctx := context.Background()
	for _, c := range []struct {
		name  string
		alter func(f *flowTest, child ID) error
		want  State
	}{
		{"priority", func(f *flowTest, child ID) error { return f.q.SetPriority(ctx, child, 7) }, Ready},
		{"later", func(f *flowTest, child ID) error { return f.q.SetRunAt(ctx, child, time.Now().Add(time.Hour)) }, Scheduled},
		{"now", func(f *flowTest, child ID) error { return f.q.SetRunAt(ctx, child, time.Time{}) }, Ready},
		{"replace", func(f *flowTest, child ID) error {
			id, err := f.q.Produce(ctx, Task{Queue: "b", Priority: 7, Unique: Unique{Key: "k", Replace: true}})
			require.Equal(f, child, id)
			return err
		}, Ready},
		{"cancel", func(f *flowTest, child ID) error { return f.q.Cancel(ctx, child) }, Canceled},
	} {
		t.Run(c.name, func(t *testing.T) {
			inFlow(t, Options{Shards: 1, Retention: Forever}, func(f *flowTest) {
				parent := f.produceAt(0, Task{Queue: "a"})
				child := f.produceAt(0, Task{Queue: "b", After: []ID{parent}, Unique: Unique{Key: "k", Replace: true}})
				last := f.produceAt(0, Task{Queue: "c", After: []ID{child}, OnDead: RunOnDead})
				synctest.Wait()
				l := f.claim("a")
				held := make(chan struct{})
				go func() { _ = f.q.shard(0).probe(func(*shard) error { <-held; return nil }) }()
				synctest.Wait()
				done := make(chan error, 2)
				go func() { done <- f.q.Complete(ctx, l.Receipt, nil) }()
				synctest.Wait()
				go func() { done <- c.alter(f, child) }()
				synctest.Wait()
				close(held)
				require.NoError(f, errors.Join(<-done, <-done))
				synctest.Wait()
				f.requireState(c.want, child)
				f.check()
				f.reopen()
				if c.want == Scheduled {
					time.Sleep(2 * time.Hour)
				}
				if c.want != Canceled {
					f.complete("b")
					synctest.Wait()
					f.requireState(Ready, last)
				}
			})
		})
	}
}

// TestChildrenGoOnInOneCommit: the end of a task lets the first of those go on that wait for nobody else, in its own
// commit, and looks up nothing but their records; one that waits for another parent too goes on with the last of them.
func TestChildrenGoOnInOneCommit(t *testing.T) {
	bubble(t, Options{Shards: 1}, func(t *testing.T, q *Queue) {
		family := []Task{{Queue: "parent"}, {Queue: "parent"}, {Queue: "both", After: []ID{Nth(0), Nth(1)}}}
		for range engine.TellAtOnce / 2 {
			family = append(family, Task{Queue: "child", After: []ID{Nth(0), Nth(0)}})
		}
		_, err := q.ProduceBatch(t.Context(), family)
		require.NoError(t, err)
		requireSettled(t, q)
		end := func() (reads int, commits uint64) {
			l := claimNow(t, q, "parent")
			s := q.shard(0)
			reads, commits = q.readsOf(t), s.commits.Load()
			complete(t, q, l)
			synctest.Wait()
			return q.readsOf(t) - reads, s.commits.Load() - commits
		}
		reads, commits := end()
		require.EqualValues(t, 1, commits)
		require.LessOrEqual(t, reads, 2*(engine.TellAtOnce/2+1), "a dependent and a record each")
		require.EqualValues(t, engine.TellAtOnce/2, countsOf(t, q, "child").Ready)
		require.Equal(t, Counts{Blocked: 1}, countsOf(t, q, "both"))
		_, commits = end()
		require.EqualValues(t, 1, commits)
		require.Equal(t, Counts{Ready: 1}, countsOf(t, q, "both"))
	})
}
