package faults_test

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/manifest"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// TestStoreFailure makes the log of a shard fail in the middle of a load: when it is written or
// synced, or when a new one begins and the old one ends. With DurabilityNone, calls see the failure
// only when a block of the log is full; the tasks since the last full block may be lost.
func TestStoreFailure(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		level codeq.Durability
		op    string
		bytes int // of a payload
	}{
		{codeq.DurabilityProcess, "write", 10},
		{codeq.DurabilityDisk, "write", 10},
		{codeq.DurabilityDisk, "sync", 10},
		{codeq.DurabilityNone, "write", 1000},
		{codeq.DurabilityProcess, "begin", 1000},
		{codeq.DurabilityProcess, "sync", 1000}, // of the old log
		{codeq.DurabilityDisk, "begin", 1000},
		{codeq.DurabilityNone, "begin", 1000},
	} {
		t.Run(tc.level.String()+" "+tc.op, func(t *testing.T) {
			disk := crashfs.New()
			fs, broken := testkit.Breakable(disk, tc.op, ".log", queuetest.ErrBroken)
			f := queuetest.NewFailingQueue(t, tc.level, fs)
			broken.Store(true)
			err := f.Store(tc.bytes)
			if tc.bytes > 10 {
				require.NoError(t, err)
			}
			for n := 0; err == nil && n < 2000; n++ {
				err = f.Store(tc.bytes)
			}
			require.ErrorIs(t, err, codeq.ErrUncertain)
			require.ErrorContains(t, err, queuetest.ErrBroken.Error())
			f.RequireFailed()
			require.ErrorIs(t, testkit.InTime(t, "Close", f.Close), queuetest.ErrBroken)
			_, err = f.Produce(context.Background(), codeq.Task{Queue: "a"})
			require.Error(t, err)
			broken.Store(false)
			f.RequireStored(disk, tc.level != codeq.DurabilityNone)
		})
	}
}

// TestStoreFailureAtClose: levels that do not sync the log for each group report a failed sync at
// Close.
func TestStoreFailureAtClose(t *testing.T) {
	for _, level := range []codeq.Durability{codeq.DurabilityProcess, codeq.DurabilityNone} {
		t.Run(level.String(), func(t *testing.T) {
			disk := crashfs.New()
			fs, broken := testkit.Breakable(disk, "sync", ".log", queuetest.ErrBroken)
			f := queuetest.NewFailingQueue(t, level, fs)
			broken.Store(true)
			for range 10 {
				require.NoError(t, f.Store(10))
			}
			require.ErrorIs(t, testkit.InTime(t, "Close", f.Close), queuetest.ErrBroken)
			broken.Store(false)
			f.RequireStored(disk, true)
		})
	}
}

// TestStoreFailureAtCreation: Open fails if it cannot create the whole queue, and the next Open
// completes the queue.
func TestStoreFailureAtCreation(t *testing.T) {
	t.Parallel()
	for _, level := range []codeq.Durability{codeq.DurabilityProcess, codeq.DurabilityDisk, codeq.DurabilityNone} {
		for _, what := range []struct{ op, extension string }{
			{"begin", "MANIFEST-000001"},
			{"begin", ".log"},
			{"write", ".log"},
			{"begin", ".sst"},
		} {
			t.Run(fmt.Sprint(level, what), func(t *testing.T) {
				disk := crashfs.New()
				fs, broken := testkit.Breakable(disk, what.op, what.extension, queuetest.ErrBroken)
				broken.Store(true)
				opts := *queuetest.OnDisk(fs, &codeq.Options{Shards: 2, Durability: level})
				err := testkit.InTime(t, "Open", func() error {
					_, err := codeq.Open("queue", &opts)
					return err
				})
				require.ErrorContains(t, err, queuetest.ErrBroken.Error())
				broken.Store(false)
				q, err := codeq.Open("queue", &opts)
				require.NoError(t, err)
				require.NoError(t, queuetest.CheckAll(q))
				require.NoError(t, q.Close())
			})
		}
	}
}

// TestStoreFailureInBackground: while no table can be written, logs keep the acknowledged changes.
func TestStoreFailureInBackground(t *testing.T) {
	t.Parallel()
	for _, level := range []codeq.Durability{codeq.DurabilityProcess, codeq.DurabilityDisk, codeq.DurabilityNone} {
		t.Run(level.String(), func(t *testing.T) {
			disk := crashfs.New()
			fs, broken := testkit.Breakable(disk, "begin", ".sst", queuetest.ErrBroken)
			f := queuetest.NewFailingQueue(t, level, fs)
			broken.Store(true)
			flushed, err := queuetest.StoreOf(f.Queue, 0).DB().AsyncFlush()
			require.NoError(t, err)
			for range 10 {
				require.NoError(t, f.Store(10))
			}
			select {
			case <-flushed:
				require.Fail(t, "the flush has succeeded")
			default:
			}
			broken.Store(false)
			require.NoError(t, testkit.InTime(t, "flush", func() error { <-flushed; return nil }))
			require.NoError(t, testkit.InTime(t, "Close", f.Close))
			f.RequireStored(disk, true)
		})
	}
}

// TestCrashLastsUntilStored: a crash is over when a process has stored all tasks that it took back,
// and has closed the queue. If a shard has failed, the crash is not over.
func TestCrashLastsUntilStored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := crashfs.New()
		q := queuetest.OpenForRun(t, *inspect.With(&codeq.Options{Shards: 2}, inspect.Private{FS: disk}))
		queuetest.Produce(t, q, codeq.Task{Queue: "a"})
		_, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}, Local: true})
		require.NoError(t, err)
		for _, fails := range []bool{true, false} {
			disk := disk.Clone()
			q := queuetest.OpenForRun(t, *inspect.With(&codeq.Options{Shards: 2}, inspect.Private{FS: disk}))
			synctest.Wait()
			if fails {
				queuetest.FailShard(t, q, 0)
				require.ErrorIs(t, q.Configure(t.Context(), "a", func(s *codeq.Settings) { s.Paused = true }), codeq.ErrUncertain)
			}
			require.Equal(t, fails, q.Close() != nil)
			m, err := manifest.Read(disk, "q")
			require.NoError(t, err)
			require.Equal(t, fails, m.Crashed)
		}
	})
}
