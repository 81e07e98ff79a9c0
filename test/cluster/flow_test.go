package cluster_test

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/test/queuetest"
)

// ownCluster runs a story on one node that leads two shards.
func ownCluster(t *testing.T, story func(t *testing.T, q *codeq.Queue)) {
	simNodes(t, 1, codeq.Options{Shards: 2}, func(t *testing.T, c *simCluster) { story(t, simQueue(c.nodes[0])) })
}

// TestUntakenParents: the tasks of a call are stored, but their parents do not learn of them. The
// call is uncertain, whichever wait ends first.
func TestUntakenParents(t *testing.T) {
	t.Parallel()
	produce := map[string]func(*codeq.Queue, context.Context, codeq.Task) ([]codeq.ID, error){
		"Produce": func(q *codeq.Queue, ctx context.Context, task codeq.Task) ([]codeq.ID, error) {
			id, err := q.Produce(ctx, task)
			return []codeq.ID{id}, err
		},
		"ProduceBatch": func(q *codeq.Queue, ctx context.Context, task codeq.Task) ([]codeq.ID, error) {
			return q.ProduceBatch(ctx, []codeq.Task{task})
		},
	}
	for name, produce := range produce {
		t.Run(name, func(t *testing.T) {
			ownCluster(t, func(t *testing.T, q *codeq.Queue) {
				var parent codeq.ID
				for parent == (codeq.ID{}) || shardOf(q, parent) != 1 {
					id := queuetest.Produce(t, q, codeq.Task{Queue: "parents"})[0]
					parent = id
				}
				time.Sleep(time.Minute)
				queuetest.SlowDown(t, q, 0, 10*time.Millisecond)
				goOn := queuetest.Hold(q, 1)
				for i := 0; ; i++ {
					ids, err := produce(q, t.Context(), codeq.Task{Queue: "children", After: []codeq.ID{parent}, Unique: codeq.Unique{Key: fmt.Sprint(i)}})
					require.Error(t, err)
					if ids[0] != (codeq.ID{}) && shardOf(q, ids[0]) == 0 {
						require.ErrorIs(t, err, codeq.ErrUncertain)
						break
					}
				}
				goOn()
			})
		})
	}
}

// TestCanceledParentInCluster: a task is canceled with its parent, however the parent ends, while
// the shards of both get other leaders, by a transfer or by a crash.
func TestCanceledParentInCluster(t *testing.T) {
	drainCase(t, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		canceled := 0 // children
		for i := range 30 {
			q, of, at := simQueue(c.nodes[i%3]), i%3, (i+1+i/15)%3
			produce := func(task codeq.Task, shard int) codeq.ID {
				task.LimitKey = queuetest.KeyOf(task.Queue, shard, 3)
				id := queuetest.Produce(t, q, task)[0]
				return id
			}
			claim := func(queue string) codeq.Receipt {
				l := queuetest.Claim(t, q, queue)
				return l.Receipt
			}
			settle := func(call func() error) { // calls again if the outcome is unknown
				err := call()
				if errors.Is(err, codeq.ErrUncertain) {
					if err = call(); errors.Is(err, codeq.ErrNotFound) || errors.Is(err, codeq.ErrLeaseLost) {
						err = nil
					}
				}
				require.NoError(t, err)
			}
			parent := produce(codeq.Task{Queue: "parent"}, of)
			var before codeq.Receipt
			if i%5 == 1 {
				produce(codeq.Task{Queue: "before"}, (at+1)%3)
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
					disturbed.Go(func() { _ = q.TransferLeadership(ctx, shard, "") }) // the shard may be moving already
				}
			}
			child, end := codeq.Task{Queue: "child", After: []codeq.ID{parent}, Retention: codeq.Forever}, func() error { return q.Cancel(ctx, parent) }
			var children []codeq.ID
			switch i % 5 {
			case 0:
				children = []codeq.ID{produce(child, at)}
			case 1: // a follow-up goes to another shard first
				child.LimitKey = queuetest.KeyOf("child", at, 3)
				settle(func() error { return q.Complete(ctx, before, nil, child) })
				canceled++
			case 2: // a dead letter
				l := claim("parent")
				settle(func() error { return q.DeadLetter(ctx, l, nil) })
				children = []codeq.ID{produce(child, at)}
				end = func() error {
					_, err := q.PurgeDead(ctx, codeq.DeadFilter{Queue: "parent"})
					return err
				}
			case 3: // a batch over all shards
				var batch []codeq.Task
				for shard := range 3 {
					child.LimitKey = queuetest.KeyOf("child", shard, 3)
					batch = append(batch, child)
				}
				ids, err := q.ProduceBatch(ctx, batch)
				require.NoError(t, err)
				children = ids
			default: // the parent is missing
				settle(end)
				end = func() error { return nil }
				child.OnMissing = codeq.RefuseOnMissing
				_, err := q.Produce(ctx, child)
				require.ErrorIs(t, err, codeq.ErrNotFound, "round %d", i)
				child.OnMissing = codeq.CancelOnMissing
				children = []codeq.ID{produce(child, at)}
			}
			settle(end)
			canceled += len(children)
			for _, id := range children {
				o, err := q.Await(ctx, id)
				require.NoError(t, err)
				require.Equal(t, codeq.Canceled, o.State, "case %d, round %d", i%5, i)
			}
			disturbed.Wait()
			c.awaitReady()
		}
		c.until("all children are canceled", func() bool {
			stats, err := simQueue(c.nodes[0]).Stats(ctx)
			return err == nil && stats["child"] == codeq.Counts{Canceled: uint64(canceled)}
		})
	})
}
