package codeq

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/engine"
)

// FlowTest is a queue in memory whose tasks depend on each other.
type FlowTest struct {
	*testing.T
	Opts Options
	Q    *Queue
}

// inFlow runs a test in fake time, and checks what is stored when it ends.
func inFlow(t *testing.T, opts Options, test func(f *FlowTest)) {
	synctest.Test(t, func(t *testing.T) {
		if opts.fs == nil {
			opts.fs = vfs.NewMem()
		}
		f := &FlowTest{T: t, Opts: opts}
		f.Open()
		defer func() { require.NoError(t, f.Q.Close()) }()
		test(f)
		f.Check()
	})
}

func (f *FlowTest) Open() {
	f.Helper()
	var err error
	f.Q, err = Open("queue", &f.Opts)
	require.NoError(f, err)
}

func (f *FlowTest) Reopen() {
	f.Helper()
	f.Check()
	require.NoError(f, f.Q.Close())
	f.Open()
	f.Check()
}

// Check waits until nothing is under way, and lets the checkers look.
func (f *FlowTest) Check() {
	f.Helper()
	synctest.Wait()
	require.NoError(f, f.Q.checkAll())
	require.NoError(f, f.Q.checkMemory())
}

// ProduceAt stores a task in a shard that does not belong to another one.
func (f *FlowTest) ProduceAt(shard int, task Task) ID {
	f.Helper()
	return produce(f.T, f.Q.startingAt(shard), task)[0]
}

func (f *FlowTest) Batch(tasks ...Task) []ID {
	f.Helper()
	ids, err := f.Q.ProduceBatch(context.Background(), tasks)
	require.NoError(f, err)
	return ids
}

// Claim leases the next task of a queue.
func (f *FlowTest) Claim(queue string) *Lease {
	f.Helper()
	synctest.Wait()
	l := claimNow(f.T, f.Q, queue)
	require.NotNil(f, l, "nothing is ready in %q", queue)
	return l
}

// Complete claims the next task of a queue and completes it.
func (f *FlowTest) Complete(queue string, next ...Task) {
	f.Helper()
	require.NoError(f, f.Q.Complete(context.Background(), f.Claim(queue).Receipt, nil, next...))
	f.Check()
}

// Die claims the next task of a queue and makes it a dead letter.
func (f *FlowTest) Die(queue string) {
	f.Helper()
	require.NoError(f, f.Q.DeadLetter(context.Background(), f.Claim(queue).Receipt, errors.New("broken")))
	f.Check()
}

func (f *FlowTest) Cancel(id ID) {
	f.Helper()
	require.NoError(f, f.Q.Cancel(context.Background(), id))
	f.Check()
}

// gone stands for a task that does not exist.
const gone State = 0

func (f *FlowTest) State(id ID) State {
	f.Helper()
	synctest.Wait()
	info, err := f.Q.Get(context.Background(), id)
	if errors.Is(err, ErrNotFound) {
		return gone
	}
	require.NoError(f, err)
	return info.State
}

func (f *FlowTest) RequireState(want State, ids ...ID) {
	f.Helper()
	for i, id := range ids {
		require.Equal(f, want, f.State(id), "task %d of %d", i, len(ids))
	}
}

func (f *FlowTest) Counts(queue string) Counts {
	f.Helper()
	synctest.Wait()
	stats, err := f.Q.Stats(context.Background())
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
	t.Parallel()
	ctx := context.Background()
	ready := func(f *FlowTest, queue string) ID { return f.ProduceAt(0, Task{Queue: queue, Retention: Forever}) }
	dead := func(f *FlowTest, queue string) ID {
		id := ready(f, queue)
		f.Die(queue)
		return id
	}
	completeIt := func(f *FlowTest, queue string, _ ID) { f.Complete(queue) }
	cancelIt := func(f *FlowTest, _ string, id ID) { f.Cancel(id) }
	purgeIt := func(f *FlowTest, queue string, _ ID) {
		n, err := f.Q.PurgeDead(ctx, DeadFilter{Queue: queue})
		require.NoError(f, err)
		require.Equal(f, 1, n)
	}
	redriveIt := func(f *FlowTest, queue string, id ID) {
		require.NoError(f, f.Q.RedriveDead(ctx, id))
		f.Complete(queue)
	}
	for _, l := range flowLayouts {
		t.Run(l.name, func(t *testing.T) {
			inFlow(t, Options{Shards: l.shards}, func(f *FlowTest) {
				for _, c := range []struct {
					parent string
					make   func(f *FlowTest, queue string) ID
					onDead OnDead
					first  State // of the child
					then   func(f *FlowTest, queue string, parent ID)
					last   State // of the child
				}{
					{"ready", ready, HoldOnDead, Blocked, completeIt, Ready},
					{"ready, canceled", ready, RunOnDead, Blocked, cancelIt, Canceled},
					{"scheduled", func(f *FlowTest, queue string) ID {
						return f.ProduceAt(0, Task{Queue: queue, RunAt: time.Now().Add(time.Minute)})
					}, HoldOnDead, Blocked, func(f *FlowTest, queue string, _ ID) {
						time.Sleep(time.Minute)
						f.Complete(queue)
					}, Ready},
					{"blocked", func(f *FlowTest, queue string) ID {
						first := f.ProduceAt(0, Task{Queue: queue + ", before"})
						return f.ProduceAt(0, Task{Queue: queue, After: []ID{first}})
					}, HoldOnDead, Blocked, func(f *FlowTest, queue string, _ ID) {
						f.Complete(queue + ", before")
						f.Complete(queue)
					}, Ready},
					{"leased", func(f *FlowTest, queue string) ID {
						ready(f, queue)
						return f.Claim(queue).ID
					}, HoldOnDead, Blocked, func(f *FlowTest, queue string, _ ID) {
						time.Sleep(time.Minute) // the lease expires: the second attempt ends it
						f.Complete(queue)
					}, Ready},
					{"leased, canceled", func(f *FlowTest, queue string) ID {
						ready(f, queue)
						return f.Claim(queue).ID
					}, HoldOnDead, Blocked, cancelIt, Canceled},
					{"done", func(f *FlowTest, queue string) ID {
						id := ready(f, queue)
						f.Complete(queue)
						f.RequireState(Done, id)
						return id
					}, HoldOnDead, Ready, nil, 0},
					{"done and gone", func(f *FlowTest, queue string) ID {
						id := f.ProduceAt(0, Task{Queue: queue})
						f.Complete(queue)
						f.RequireState(gone, id)
						return id
					}, HoldOnDead, Ready, nil, 0},
					{"dead, redriven", dead, HoldOnDead, Blocked, redriveIt, Ready},
					{"dead, purged", dead, HoldOnDead, Blocked, purgeIt, Canceled},
					{"dead, canceled", dead, HoldOnDead, Blocked, cancelIt, Canceled},
					{"dead, cancel", dead, CancelOnDead, Canceled, nil, 0},
					{"dead, run", dead, RunOnDead, Ready, nil, 0},
					{"canceled", func(f *FlowTest, queue string) ID {
						id := ready(f, queue)
						f.Cancel(id)
						return id
					}, RunOnDead, Canceled, nil, 0},
					{"canceled and gone", func(f *FlowTest, queue string) ID {
						id := f.ProduceAt(0, Task{Queue: queue})
						f.Cancel(id)
						return id
					}, HoldOnDead, Ready, nil, 0},
					{"unknown", func(f *FlowTest, queue string) ID {
						return ID{1, 2, 3, 4, 5, 6, 0x70, 0, 0x80, 0xff, 0xff, 0xff}
					}, CancelOnDead, Ready, nil, 0},
				} {
					queue := "parent " + c.parent
					parent := c.make(f, queue)
					child := f.ProduceAt(l.child, Task{Queue: "child " + c.parent, After: []ID{parent}, OnDead: c.onDead, Retention: Forever})
					f.Check()
					require.Equal(f, c.first, f.State(child), "parent %s", c.parent)
					if c.then != nil {
						c.then(f, queue, parent)
						f.Check()
						require.Equal(f, c.last, f.State(child), "parent %s, afterwards", c.parent)
					}
					info, err := f.Q.Get(ctx, child)
					require.NoError(f, err)
					require.Equal(f, []ID{parent}, info.After)
					require.Equal(f, c.onDead, info.OnDead)
				}
			})
		})
	}
}

// FinishDiamond works on a diamond, and makes sure that nothing is early.
func (f *FlowTest) FinishDiamond() {
	f.Helper()
	none := func(queues ...string) {
		f.Helper()
		synctest.Wait()
		require.Nil(f, claimNow(f.T, f.Q, queues...))
	}
	none("left", "right", "bottom")
	f.Complete("top")
	none("bottom")
	f.Complete("right")
	none("bottom")
	f.Complete("left")
	f.Complete("bottom")
	none("top", "left", "right", "bottom")
}

// TestOnDead: what becomes of a task when a parent dies that it waits for.
func TestOnDead(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	for _, l := range flowLayouts {
		t.Run(l.name, func(t *testing.T) {
			inFlow(t, Options{Shards: l.shards}, func(f *FlowTest) {
				parent := f.ProduceAt(0, Task{Queue: "parent"})
				children := make(map[OnDead]ID)
				for _, onDead := range []OnDead{HoldOnDead, CancelOnDead, RunOnDead} {
					children[onDead] = f.ProduceAt(l.child, Task{
						Queue: "child", After: []ID{parent}, OnDead: onDead, Retention: Forever,
					})
				}
				f.Check()
				f.Die("parent")
				f.RequireState(Blocked, children[HoldOnDead])
				f.RequireState(Canceled, children[CancelOnDead])
				f.RequireState(Ready, children[RunOnDead])
				f.Reopen()
				for range 2 { // it dies again
					require.NoError(f, f.Q.RedriveDead(ctx, parent))
					f.Check()
					f.RequireState(Blocked, children[HoldOnDead])
					f.Die("parent")
				}
				n, err := f.Q.RedriveAllDead(ctx, DeadFilter{Queue: "parent"})
				require.NoError(f, err)
				require.Equal(f, 1, n)
				f.Complete("parent")
				f.RequireState(Ready, children[HoldOnDead])
				f.RequireState(Canceled, children[CancelOnDead])
			})
		})
	}
}

// TestDeadParentIsKept: a dead letter that others wait for does not expire,
// whether they began to wait before its death or after.
func TestDeadParentIsKept(t *testing.T) {
	ctx := context.Background()
	for _, l := range flowLayouts {
		t.Run(l.name, func(t *testing.T) {
			inFlow(t, Options{Shards: l.shards}, func(f *FlowTest) {
				for _, queue := range []string{"before", "after", "lonely"} {
					require.NoError(f, f.Q.Configure(ctx, queue, func(s *Settings) { s.DeadRetention = time.Hour }))
				}
				before := f.ProduceAt(0, Task{Queue: "before"})
				after := f.ProduceAt(0, Task{Queue: "after"})
				lonely := f.ProduceAt(0, Task{Queue: "lonely"})
				child1 := f.ProduceAt(l.child, Task{Queue: "child", After: []ID{before}})
				f.Check()
				f.Die("before")
				f.Die("after")
				f.Die("lonely")
				time.Sleep(30 * time.Minute)
				child2 := f.ProduceAt(l.child, Task{Queue: "child", After: []ID{after}})
				f.Check()
				time.Sleep(24 * time.Hour)
				f.Check()
				f.RequireState(gone, lonely)
				f.RequireState(Dead, before, after)
				f.RequireState(Blocked, child1, child2)
				f.Reopen()
				for _, id := range []ID{before, after} {
					require.NoError(f, f.Q.RedriveDead(ctx, id))
				}
				f.Complete("before")
				f.Complete("after")
				f.RequireState(Ready, child1, child2)
			})
		})
	}
}

// TestCanceledChildIsForgotten: a parent ends in peace whose child was canceled
// and is not kept.
func TestCanceledChildIsForgotten(t *testing.T) {
	for _, l := range flowLayouts {
		inFlow(t, Options{Shards: l.shards}, func(f *FlowTest) {
			parent := f.ProduceAt(0, Task{Queue: "parent"})
			child := f.ProduceAt(l.child, Task{Queue: "child", After: []ID{parent}})
			sibling := f.ProduceAt(l.child, Task{Queue: "child", After: []ID{parent}})
			f.Check()
			f.Cancel(child)
			f.RequireState(gone, child)
			f.Reopen()
			f.Complete("parent")
			f.RequireState(gone, child)
			f.RequireState(Ready, sibling)
		})
	}
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

// TestAlterAsParentsEnd: a task is altered in the group in which the last of its parents
// ends. It goes on in the next one, and nothing says any more that it waits.
func TestAlterAsParentsEnd(t *testing.T) {
	ctx := context.Background()
	for _, c := range []struct {
		name  string
		alter func(f *FlowTest, child ID) error
		want  State
	}{
		{"priority", func(f *FlowTest, child ID) error { return f.Q.SetPriority(ctx, child, 7) }, Ready},
		{"later", func(f *FlowTest, child ID) error { return f.Q.SetRunAt(ctx, child, time.Now().Add(time.Hour)) }, Scheduled},
		{"now", func(f *FlowTest, child ID) error { return f.Q.SetRunAt(ctx, child, time.Time{}) }, Ready},
		{"replace", func(f *FlowTest, child ID) error {
			id, err := f.Q.Produce(ctx, Task{Queue: "b", Priority: 7, Unique: Unique{Key: "k", Replace: true}})
			require.Equal(f, child, id)
			return err
		}, Ready},
		{"cancel", func(f *FlowTest, child ID) error { return f.Q.Cancel(ctx, child) }, Canceled},
	} {
		t.Run(c.name, func(t *testing.T) {
			inFlow(t, Options{Shards: 1, Retention: Forever}, func(f *FlowTest) {
				parent := f.ProduceAt(0, Task{Queue: "a"})
				child := f.ProduceAt(0, Task{Queue: "b", After: []ID{parent}, Unique: Unique{Key: "k", Replace: true}})
				last := f.ProduceAt(0, Task{Queue: "c", After: []ID{child}, OnDead: RunOnDead})
				synctest.Wait()
				l := f.Claim("a")
				goOn := hold(f.Q, 0)
				synctest.Wait()
				done := make(chan error, 2)
				go func() { done <- f.Q.Complete(ctx, l.Receipt, nil) }()
				synctest.Wait()
				go func() { done <- c.alter(f, child) }()
				synctest.Wait()
				goOn()
				require.NoError(f, errors.Join(<-done, <-done))
				synctest.Wait()
				f.RequireState(c.want, child)
				f.Check()
				f.Reopen()
				if c.want == Scheduled {
					time.Sleep(2 * time.Hour)
				}
				if c.want != Canceled {
					f.Complete("b")
					synctest.Wait()
					f.RequireState(Ready, last)
				}
			})
		})
	}
}

// TestChildrenGoOnInOneCommit: the end of a task lets the first of those go on that wait for nobody
// else, in its own commit, and looks up nothing but their records; one that waits for another
// parent too goes on with the last of them.
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
