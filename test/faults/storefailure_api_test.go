package faults_test

import (
	"context"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// TestStoreFailure makes the log of a shard fail in the middle of a load.
func TestStoreFailure(t *testing.T) {
	for _, tc := range []struct {
		level codeq.Durability
		op    string
	}{
		{codeq.DurabilityProcess, "write"},
		{codeq.DurabilityDisk, "write"},
		{codeq.DurabilityDisk, "sync"},
	} {
		t.Run(tc.level.String()+" "+tc.op, func(t *testing.T) {
			disk := crashfs.New()
			fs, broken := testkit.Breakable(disk, tc.op, ".log", queuetest.ErrBroken)
			f := queuetest.NewFailingQueue(t, tc.level, fs)
			broken.Store(true)
			err := f.Store(10)
			require.ErrorIs(t, err, codeq.ErrUncertain)
			require.ErrorContains(t, err, queuetest.ErrBroken.Error())
			f.RequireFailed()
			require.Error(t, testkit.InTime(t, "Close", f.Close))
			_, err = f.Produce(context.Background(), codeq.Task{Queue: "a"})
			require.Error(t, err)
			broken.Store(false)
			f.RequireStored(disk, true)
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

// TestStoreFailureWithoutSync: with DurabilityNone, calls see the failure only when a block of the
// log is full. The tasks since the last full block may be lost.
func TestStoreFailureWithoutSync(t *testing.T) {
	disk := crashfs.New()
	fs, broken := testkit.Breakable(disk, "write", ".log", queuetest.ErrBroken)
	f := queuetest.NewFailingQueue(t, codeq.DurabilityNone, fs)
	broken.Store(true)
	var err error
	for n := 0; err == nil && n < 1000; n++ {
		err = f.Store(1000)
	}
	require.ErrorIs(t, err, codeq.ErrUncertain)
	require.ErrorContains(t, err, queuetest.ErrBroken.Error())
	f.RequireFailed()
	broken.Store(false)
	require.ErrorIs(t, testkit.InTime(t, "Close", f.Close), queuetest.ErrBroken)
	f.RequireStored(disk, false)
}

// TestStoreFailureAtNewLog: a shard fails if it cannot begin a new log or end the old one, as with
// any other failure. It loses no acknowledged change.
func TestStoreFailureAtNewLog(t *testing.T) {
	t.Parallel()
	for _, tc := range []struct {
		level codeq.Durability
		op    string
	}{
		{codeq.DurabilityProcess, "begin"},
		{codeq.DurabilityProcess, "sync"}, // of the old log
		{codeq.DurabilityDisk, "begin"},
		{codeq.DurabilityNone, "begin"},
	} {
		t.Run(tc.level.String()+" "+tc.op, func(t *testing.T) {
			const tooMany = 2000
			disk := crashfs.New()
			fs, broken := testkit.Breakable(disk, tc.op, ".log", queuetest.ErrBroken)
			opts := *queuetest.OnDisk(fs, &codeq.Options{Shards: 2, Durability: tc.level, MemTableBytes: 256 << 10})
			q, err := codeq.Open("queue", &opts)
			require.NoError(t, err)
			broken.Store(true)
			acked := 0
			for ; err == nil && acked < tooMany; acked++ {
				_, err = queuetest.StartingAt(q, 0).Produce(context.Background(), codeq.Task{Queue: "a", Payload: fmt.Appendf(nil, "%d %1000s", acked+1, "")})
			}
			acked--
			require.ErrorIs(t, err, codeq.ErrUncertain)
			require.ErrorContains(t, err, queuetest.ErrBroken.Error())
			_, err = queuetest.StartingAt(q, 0).Produce(context.Background(), codeq.Task{Queue: "a"})
			require.ErrorIs(t, err, codeq.ErrFailed)
			_, err = queuetest.StartingAt(q, 1).Produce(context.Background(), codeq.Task{Queue: "b"})
			require.NoError(t, err)
			err = testkit.InTime(t, "Close", q.Close)
			require.ErrorIs(t, err, queuetest.ErrBroken)
			require.ErrorContains(t, err, "close shard 0")

			queuetest.OnDisk(disk, &opts)
			q, err = codeq.Open("queue", &opts)
			require.NoError(t, err)
			defer func() { require.NoError(t, q.Close()) }()
			require.NoError(t, queuetest.CheckAll(q))
			stored := 0
			for info, err := range q.List(context.Background(), codeq.ListOptions{Queue: "a", State: codeq.Ready}) {
				require.NoError(t, err)
				stored++
				require.Equal(t, stored, queuetest.SerialOf(info.Payload), "a gap")
			}
			require.LessOrEqual(t, stored, acked+1)
			if tc.level != codeq.DurabilityNone {
				require.GreaterOrEqual(t, stored, acked)
			}
		})
	}
}
