package codeq_test

import (
	"context"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/testkit"
)

// TestProcessInfo: the shards together have what Info says; beside it are the workers, the disk,
// the next tick of any schedule, also of one that cannot tick, and the events that were lost.
func TestProcessInfo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		disk := testkit.NewSmallDisk(1 << 40)
		q, err := codeq.Open("queue", onDisk(disk, &codeq.Options{Shards: 3}))
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		began := time.Now()
		info := func() *codeq.ProcessInfo {
			p, err := q.ProcessInfo(ctx)
			require.NoError(t, err)
			require.Len(t, p.Shards, 3)
			for _, s := range p.Shards {
				require.True(t, s.Leads)
				require.Empty(t, s.LastError)
			}
			return p
		}
		require.Empty(t, info().Node)
		storage := func() *codeq.StorageStats {
			st, err := q.StorageStats()
			require.NoError(t, err)
			return st
		}
		require.Positive(t, storage().FreeBytes)
		require.EqualValues(t, 64<<20+3*4*16<<20, storage().MinFreeBytes)
		require.Zero(t, info().EventsLost)
		require.Empty(t, info().Workers)

		sub, err := q.Subscribe(codeq.SubscribeOptions{Buffer: 1})
		require.NoError(t, err)
		produce(t, q, named(codeq.Task{Queue: "a"}, "1", "2", "3")...)
		sub.Close()
		require.EqualValues(t, 2, info().EventsLost, "by one that has ended")
		for _, name := range []string{"x", "y", "z", "1", "2"} {
			every := time.Hour
			if name == "y" {
				every = time.Minute
			}
			require.NoError(t, q.SetSchedule(ctx, codeq.Schedule{Name: name, Every: every, Task: codeq.Task{Queue: "ticks"}}))
		}
		var sum codeq.Counts
		for _, s := range info().Shards {
			for _, of := range s.Queues {
				require.Equal(t, "a", of.Queue)
				require.Zero(t, of.Settings)
				sum.Ready += of.Counts.Ready
				require.WithinDuration(t, began, of.OldestReady, 0)
			}
		}
		require.EqualValues(t, 3, sum.Ready)
		next := func() (next time.Time) {
			for _, s := range info().Shards {
				if !s.NextTick.IsZero() && (next.IsZero() || s.NextTick.Before(next)) {
					next = s.NextTick
				}
			}
			return next
		}
		require.WithinDuration(t, began.Add(time.Minute), next(), 0)
		time.Sleep(time.Minute)
		synctest.Wait()
		require.WithinDuration(t, began.Add(2*time.Minute), next(), 0)

		disk.Size.Store(disk.Used.Load() + 60<<20)
		time.Sleep(5 * time.Minute)
		require.WithinDuration(t, began.Add(2*time.Minute), next(), 0, "it waits for room")
		require.LessOrEqual(t, storage().FreeBytes, int64(60<<20))
		disk.Size.Store(1 << 40)
		time.Sleep(time.Minute)
		require.True(t, next().After(time.Now()))

		running, stop := context.WithCancel(ctx)
		var m codeq.Mux
		codeq.Handle(&m, "a", func(ctx context.Context, _ *codeq.Job[[]byte]) error {
			<-ctx.Done()
			return ctx.Err()
		})
		done := make(chan error)
		go func() { done <- q.Run(running, &m, &codeq.RunOptions{Concurrency: 2, Grace: -1}) }()
		synctest.Wait()
		require.Len(t, info().Workers, 1)
		require.Equal(t, 2, info().Workers[0].Busy)
		stop()
		require.NoError(t, <-done)

		require.NoError(t, q.Close())
		_, err = q.ProcessInfo(ctx)
		require.ErrorIs(t, err, codeq.ErrClosed)
	})
}

// TestLocalProcessInfo: a program beside the process is told what the process knows.
func TestLocalProcessInfo(t *testing.T) {
	t.Parallel()
	s := openServed(t, filepath.Join(t.TempDir(), "queue"), codeq.Options{Shards: 2})
	s.serve(t)
	c := s.client(t)
	produce(t, s.Queue, named(codeq.Task{Queue: "a"}, "1", "2", "3")...)
	want, err := s.ProcessInfo(t.Context())
	require.NoError(t, err)
	got, err := c.ProcessInfo(t.Context())
	require.NoError(t, err)
	for i := range want.Shards {
		for k := range want.Shards[i].Queues {
			at := &want.Shards[i].Queues[k].OldestReady
			require.WithinDuration(t, *at, got.Shards[i].Queues[k].OldestReady, 0)
			*at = got.Shards[i].Queues[k].OldestReady
		}
	}
	require.Equal(t, want, got)
	own, err := s.StorageStats()
	require.NoError(t, err)
	told, err := c.StorageStats()
	require.NoError(t, err)
	require.Positive(t, told.FreeBytes)
	require.Equal(t, own.MinFreeBytes, told.MinFreeBytes)
	require.Positive(t, told.MinFreeBytes)
}
