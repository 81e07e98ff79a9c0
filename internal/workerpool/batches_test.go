package workerpool_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/workerpool"
)

type (
	batches = workerpool.Batches[string, int, *job]
	joining = workerpool.Joining[string, int, *job]
)

// join adds tasks with a key, whose jobs are the given numbers. It returns those that open a batch.
func join(bs *batches, key string, most int, jobs ...int) (opened []int, tasks []*job) {
	var all []joining
	for _, n := range jobs {
		t := new(job)
		tasks = append(tasks, t)
		all = append(all, joining{Key: key, Max: most, Job: n, Task: t})
	}
	bs.Join(all, func(i int) { opened = append(opened, jobs[i]) })
	return opened, tasks
}

// TestBatches: tasks join the open batch of their key until it is full or has begun. Those that
// wait for a worker bound the claims that fill others.
func TestBatches(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		bs := workerpool.NewBatches[string, int, *job]()
		opened, _ := join(bs, "a", 3, 1, 2, 3, 4)
		require.Equal(t, []int{1, 4}, opened)
		opened, _ = join(bs, "b", 3, 5)
		require.Equal(t, []int{5}, opened)
		require.Nil(t, bs.Take(2))
		full, open := bs.Take(1), bs.Take(4)
		require.Nil(t, bs.Take(4), "it has a worker")
		stopped := false
		require.Equal(t, -1, bs.Room(full, nil))
		require.Equal(t, 2, bs.Room(open, func() { stopped = true }))
		join(bs, "b", 3, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
		require.Equal(t, 1, bs.Room(open, func() { stopped = true }), "11 wait")
		join(bs, "b", 3, 16)
		require.Zero(t, bs.Room(open, func() { stopped = true }))
		opened, _ = join(bs, "a", 3, 17, 18)
		require.Empty(t, opened)
		require.True(t, stopped)
		for i, task := range bs.End(full) {
			require.False(t, task.Over, i)
		}
		for i, task := range bs.End(full) {
			require.True(t, task.Over, i)
		}

		b := bs.Take(16)
		require.Nil(t, b)
		b = bs.Take(14)
		begun := 0
		bs.Begin(b, func(*job) time.Duration { begun++; return time.Duration(3-begun) * time.Minute })
		require.Equal(t, 3, begun)
		end, ok := b.Deadline()
		require.True(t, ok)
		require.Equal(t, time.Minute, time.Until(end), "the shortest")
		bs.Drop(b)
	})
}

// TestBatchesLose: a task that is lost before its batch has begun leaves it; later it is over. With
// the last one the context of the batch ends.
func TestBatchesLose(t *testing.T) {
	lost := errors.New("lost")
	bs := workerpool.NewBatches[string, int, *job]()
	_, tasks := join(bs, "a", 4, 1, 2, 3)
	lose := func(which *job) {
		losses := bs.Lose(func(t *job) error {
			if t == which {
				return lost
			}
			return nil
		})
		require.Len(t, losses, 1)
		losses[0].End()
		require.Equal(t, lost, context.Cause(which))
	}
	lose(tasks[0])
	b := bs.Take(1)
	require.Equal(t, 2, bs.Room(b, nil))
	var left []*job
	bs.Begin(b, func(t *job) time.Duration { left = append(left, t); return 0 })
	require.Equal(t, tasks[1:], left)
	lose(tasks[1])
	require.NoError(t, b.Err())
	require.False(t, bs.IsAtWork(b, 0))
	require.True(t, bs.IsAtWork(b, 1))
	bs.AtWork(func(at *job) { require.Same(t, tasks[2], at) })
	lose(tasks[2])
	require.Equal(t, lost, context.Cause(b))
	require.Empty(t, bs.Lose(func(*job) error { return lost }))
}
