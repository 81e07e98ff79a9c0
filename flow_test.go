package codeq

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/engine"
	"codeq/internal/inspect"
	"codeq/internal/store"
	"codeq/internal/testkit"
)

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

// TestParentsThatDoNotAnswer: a call that cannot wait until a parent knows of its task says that
// the task is stored; the parent hears of it later.
func TestParentsThatDoNotAnswer(t *testing.T) {
	inFlow(t, Options{Shards: 2}, func(f *FlowTest) {
		parent := f.ProduceAt(0, Task{Queue: "parent"})
		goOn := hold(f.Q, 0)
		synctest.Wait()
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		child, err := f.Q.Produce(ctx, Task{Queue: "child", LimitKey: f.KeyOf("child", 1), After: []ID{parent}, Retention: Forever})
		require.ErrorIs(f, err, ErrUncertain)
		require.ErrorIs(f, err, context.DeadlineExceeded)
		require.ErrorContains(f, err, "it is stored")
		goOn()
		f.RequireState(Blocked, child)
		f.Cancel(parent)
		f.RequireState(Canceled, child)
	})
}

// TestParentsOnFullDisk: below the level on which messages go on, a call that has stored tasks does
// not wait until the parents know of them: neither one that comes then, nor one that waits already.
// They learn of it when there is room.
func TestParentsOnFullDisk(t *testing.T) {
	t.Parallel()
	disk := testkit.NewSmallDisk(testkit.FreeAt[engine.Roomy])
	inFlow(t, *inspect.With(&Options{Shards: 2, MinFreeBytes: testkit.MinFree, MemTableBytes: 256 << 10, LeaseFor: time.Hour}, inspect.Private{FS: disk}), func(f *FlowTest) {
		ctx, child := context.Background(), Task{Queue: "child", LimitKey: f.KeyOf("child", 1), Retention: Forever}
		stored := func(err error) {
			f.Helper()
			require.ErrorIs(f, err, ErrUncertain)
			require.NotErrorIs(f, err, ErrDiskFull, "which says that nothing was stored")
			require.ErrorContains(f, err, "make room on the disk")
		}
		room := func(level engine.Room) {
			time.Sleep(2 * store.LookEvery * time.Millisecond) // flushes end
			disk.Free(testkit.FreeAt[level])
			time.Sleep(2 * store.LookEvery * time.Millisecond)
		}
		parents := []ID{f.ProduceAt(0, Task{Queue: "parent"}), f.ProduceAt(0, Task{Queue: "parent"})}
		f.ProduceAt(1, Task{Queue: "work"})
		l := f.Claim("work")

		goOn := hold(f.Q, 0)
		waits := make(chan error, 1)
		var first ID
		go func() {
			task := child
			task.After = parents[:1]
			var err error
			first, err = f.Q.Produce(ctx, task)
			waits <- err
		}()
		synctest.Wait()
		require.Empty(f, waits)
		room(engine.RoomScarce)
		stored(<-waits)
		goOn()

		child.After = parents[1:]
		began := time.Now()
		stored(f.Q.Complete(ctx, l.Receipt, nil, child))
		require.Less(f, time.Since(began), time.Second)
		room(engine.Roomy)
		f.RequireState(Blocked, first)
		for _, parent := range parents {
			f.Cancel(parent)
		}
		f.RequireState(Canceled, first)
		require.Equal(f, Counts{Canceled: 2}, f.Counts("child"))
	})
}

// TestParentsOfFailedShard: nobody waits for a shard that takes no messages any more.
func TestParentsOfFailedShard(t *testing.T) {
	inFlow(t, Options{Shards: 2}, func(f *FlowTest) {
		parent := f.ProduceAt(0, Task{Queue: "parent"})
		s := f.Q.shard(0)
		_ = s.inbox.Pass(&crashOp{injected("of the test")})
		<-s.done
		for range 2 {
			id, err := f.Q.Produce(context.Background(), Task{Queue: "child", LimitKey: f.KeyOf("child", 1), After: []ID{parent}})
			require.ErrorIs(f, err, ErrUncertain)
			require.ErrorIs(f, err, ErrFailed)
			require.NotZero(f, id)
		}
		_ = f.Q.Close() // of a queue that has failed
		f.Open()
		synctest.Wait()
	})
}

// TestUntakenParents: a call whose tasks are stored, and whose parents do not learn of them, is
// uncertain, whatever ends first.
func TestUntakenParents(t *testing.T) {
	t.Parallel()
	produce := map[string]func(*Queue, context.Context, Task) ([]ID, error){
		"Produce": func(q *Queue, ctx context.Context, task Task) ([]ID, error) {
			id, err := q.Produce(ctx, task)
			return []ID{id}, err
		},
		"ProduceBatch": func(q *Queue, ctx context.Context, task Task) ([]ID, error) {
			return q.ProduceBatch(ctx, []Task{task})
		},
	}
	for name, produce := range produce {
		t.Run(name, func(t *testing.T) {
			ownCluster(t, func(t *testing.T, c *simCluster, q *Queue) {
				var parent ID
				for parent == (ID{}) || q.shardOf(parent) != 1 {
					id, err := q.Produce(t.Context(), Task{Queue: "parents"})
					require.NoError(t, err)
					parent = id
				}
				time.Sleep(time.Minute)
				slowDown(t, q, 0, 10*time.Millisecond)
				goOn := standStill(q.shard(1))
				for i := 0; ; i++ {
					ids, err := produce(q, t.Context(), Task{Queue: "children", After: []ID{parent}, Unique: Unique{Key: fmt.Sprint(i)}})
					require.Error(t, err)
					if ids[0] != (ID{}) && q.shardOf(ids[0]) == 0 {
						require.ErrorIs(t, err, ErrUncertain)
						break
					}
				}
				goOn()
			})
		})
	}
}

// TestCanceledParentInCluster: a task goes with its parent, however the parent ends, while the
// shards of both get other leaders, by a transfer or as their node crashes.
func TestCanceledParentInCluster(t *testing.T) {
	drainCase(t, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		canceled := 0 // children
		for i := range 30 {
			q, of, at := simQueue(c.nodes[i%3]), i%3, (i+1+i/15)%3
			produce := func(task Task, shard int) ID {
				task.LimitKey = keyOf(task.Queue, shard, 3)
				id, err := q.Produce(ctx, task)
				require.NoError(t, err)
				return id
			}
			claim := func(queue string) Receipt {
				l, err := q.Claim(ctx, ClaimRequest{Queues: []string{queue}})
				require.NoError(t, err)
				return l.Receipt
			}
			settle := func(call func() error) { // again, if it is not known whether it was done
				err := call()
				if errors.Is(err, ErrUncertain) {
					if err = call(); errors.Is(err, ErrNotFound) || errors.Is(err, ErrLeaseLost) {
						err = nil
					}
				}
				require.NoError(t, err)
			}
			parent := produce(Task{Queue: "parent"}, of)
			var before Receipt
			if i%5 == 1 {
				produce(Task{Queue: "before"}, (at+1)%3)
				before = claim("before")
			}

			var disturbed sync.WaitGroup
			if victim := c.leader([]int{of, at}[i/3%2]); i%2 == 0 && victim != nil && simQueue(victim) != q {
				disturbed.Go(func() {
					victim.crash(0)
					time.Sleep(3 * time.Second) // the others have elected another leader
					victim.raise()
				})
			} else {
				for _, shard := range []int{of, at} {
					disturbed.Go(func() { _ = q.TransferLeadership(ctx, shard, "") }) // it may be moving
				}
			}
			child, end := Task{Queue: "child", After: []ID{parent}, Retention: Forever}, func() error { return q.Cancel(ctx, parent) }
			var children []ID
			switch i % 5 {
			case 0:
				children = []ID{produce(child, at)}
			case 1: // a follow-up, which goes to another shard first
				child.LimitKey = keyOf("child", at, 3)
				settle(func() error { return q.Complete(ctx, before, nil, child) })
				canceled++
			case 2: // a dead letter
				l := claim("parent")
				settle(func() error { return q.DeadLetter(ctx, l, nil) })
				children = []ID{produce(child, at)}
				end = func() error {
					_, err := q.PurgeDead(ctx, DeadFilter{Queue: "parent"})
					return err
				}
			case 3: // a batch over all shards
				var batch []Task
				for shard := range 3 {
					child.LimitKey = keyOf("child", shard, 3)
					batch = append(batch, child)
				}
				ids, err := q.ProduceBatch(ctx, batch)
				require.NoError(t, err)
				children = ids
			default: // it is missing
				settle(end)
				end = func() error { return nil }
				child.OnMissing = RefuseOnMissing
				_, err := q.Produce(ctx, child)
				require.ErrorIs(t, err, ErrNotFound, "round %d", i)
				child.OnMissing = CancelOnMissing
				children = []ID{produce(child, at)}
			}
			settle(end)
			canceled += len(children)
			for _, id := range children {
				o, err := q.Await(ctx, id)
				require.NoError(t, err)
				require.Equal(t, Canceled, o.State, "case %d, round %d", i%5, i)
			}
			disturbed.Wait()
			c.awaitReady()
		}
		c.until("all children are canceled", func() bool {
			stats, err := simQueue(c.nodes[0]).Stats(ctx)
			return err == nil && stats["child"] == Counts{Canceled: uint64(canceled)}
		})
	})
}

// chainOver is tasks that wait for each other in turn, and belong to one shard after the other.
func chainOver(i int) (chain []Task) {
	for n := range 5 {
		task := Task{Queue: "chain", LimitKey: keyOf("chain", (i+n)%3, 3), Payload: fmt.Appendf(nil, "%d.%d", i, n)}
		if n > 0 {
			task.After = []ID{Nth(n - 1)}
		}
		chain = append(chain, task)
	}
	return append(chain, Task{Queue: "chain", Payload: fmt.Appendf(nil, "%d.5", i), After: []ID{Nth(0), Nth(2), Nth(4)}})
}

// TestFollowUpsInCluster: follow-ups that wait for each other in shards of several nodes are there
// once, and in their order, while leaders change.
func TestFollowUpsInCluster(t *testing.T) {
	drainCase(t, func(t *testing.T, c *simCluster) {
		const chains = 12
		ctx := t.Context()
		claim := func(q *Queue, queue string) *Lease {
			l, err := q.Claim(ctx, ClaimRequest{Queues: []string{queue}})
			require.NoError(t, err)
			return l
		}
		complete := func(q *Queue, l *Lease, next ...Task) {
			err := q.Complete(ctx, l.Receipt, nil, next...)
			for errors.Is(err, ErrUncertain) {
				err = q.Complete(ctx, l.Receipt, nil, next...)
				if errors.Is(err, ErrLeaseLost) {
					err = nil // it was done
				}
			}
			require.NoError(t, err)
		}
		for i := range chains {
			q := simQueue(c.nodes[i%3])
			_, err := q.Produce(ctx, Task{Queue: "start", LimitKey: keyOf("start", i/3%3, 3)})
			require.NoError(t, err)
			l := claim(q, "start")
			var moving sync.WaitGroup
			if i%2 == 1 {
				moving.Go(func() { _ = q.TransferLeadership(ctx, (i+1)%3, "") }) // it may be moving
			}
			complete(q, l, chainOver(i)...)
			moving.Wait()
		}
		done := make(map[int]int)
		for n := range 6 * chains {
			q := simQueue(c.nodes[n%3])
			l := claim(q, "chain")
			var i, at int
			_, err := fmt.Sscanf(string(l.Payload), "%d.%d", &i, &at)
			require.NoError(t, err)
			require.Equal(t, done[i], at, "chain %d", i)
			done[i]++
			complete(q, l)
		}
		require.NoError(t, simQueue(c.nodes[0]).WaitIdle(ctx))
	})
}
