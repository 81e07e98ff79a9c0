package codeq

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/engine"
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

// TestCanceledParentInCluster: a task goes with its parent while the shards of both get other
// leaders.
func TestCanceledParentInCluster(t *testing.T) {
	drainCase(t, func(t *testing.T, c *simCluster) {
		ctx := context.Background()
		for i := range 12 {
			q, of, at := simQueue(c.nodes[i%3]), i%3, (i+1+i/6)%3
			parent, err := q.Produce(ctx, Task{Queue: "parent", LimitKey: keyOf("parent", of, 3)})
			require.NoError(t, err)
			moved := make(chan error, 2)
			for _, shard := range []int{of, at} {
				go func() { moved <- q.TransferLeadership(ctx, shard, "") }()
			}
			child, err := q.Produce(ctx, Task{Queue: "child", LimitKey: keyOf("child", at, 3), After: []ID{parent}, Retention: Forever})
			require.NoError(t, err)
			require.NoError(t, q.Cancel(ctx, parent))
			o, err := q.Await(ctx, child)
			require.NoError(t, err)
			require.Equal(t, Canceled, o.State)
			<-moved
			<-moved
		}
	})
}
