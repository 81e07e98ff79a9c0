package codeq

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"
)

// smallDisk is a file system with so much room and no more.
type smallDisk struct {
	vfs.FS
	size  atomic.Int64
	used  atomic.Int64
	asked atomic.Int64 // calls of GetDiskUsage
	only  string       // what has room of its own is not this; "": everything counts
}

func newSmallDisk(size int64) *smallDisk {
	d := &smallDisk{FS: vfs.NewMem()}
	d.size.Store(size)
	return d
}

func (d *smallDisk) GetDiskUsage(string) (vfs.DiskUsage, error) {
	d.asked.Add(1)
	return vfs.DiskUsage{AvailBytes: uint64(max(d.size.Load()-d.used.Load(), 0)), TotalBytes: uint64(d.size.Load())}, nil
}

func (d *smallDisk) Create(name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	f, err := d.FS.Create(name, c)
	return &smallDiskFile{f, d, name}, err
}

func (d *smallDisk) ReuseForWrite(old, name string, c vfs.DiskWriteCategory) (vfs.File, error) {
	d.forget(old)
	f, err := d.FS.ReuseForWrite(old, name, c)
	return &smallDiskFile{f, d, name}, err
}

func (d *smallDisk) Remove(name string) error {
	d.forget(name)
	return d.FS.Remove(name)
}

func (d *smallDisk) forget(name string) {
	if info, err := d.Stat(name); err == nil {
		d.used.Add(-info.Size())
	}
}

type smallDiskFile struct {
	vfs.File
	disk *smallDisk
	name string
}

func (f *smallDiskFile) Write(p []byte) (int, error) {
	if used := f.disk.used.Add(int64(len(p))); used > f.disk.size.Load() && strings.HasSuffix(f.name, f.disk.only) {
		f.disk.used.Add(-int64(len(p)))
		return 0, syscall.ENOSPC
	}
	return f.File.Write(p)
}

const diskTestFree = 4 << 20

func openOnSmallDisk(t *testing.T, d *smallDisk, change func(*Options)) *Queue {
	o := &Options{Shards: 2, fs: d, MemTableBytes: 256 << 10, MinFreeBytes: diskTestFree, LeaseFor: time.Hour}
	if change != nil {
		change(o)
	}
	q, err := Open("queue", o)
	require.NoError(t, err)
	return q
}

// fill produces until the disk is full.
func (d *smallDisk) fill(t *testing.T, q *Queue) (produced int) {
	for {
		_, err := q.Produce(t.Context(), Task{Queue: "a", Payload: bytes.Repeat([]byte("x"), 20<<10)})
		if errors.Is(err, ErrDiskFull) {
			return produced
		}
		require.NoError(t, err)
		produced++
		require.Less(t, produced, 10_000)
		time.Sleep(10 * time.Millisecond)
	}
}

// free makes so much room.
func (d *smallDisk) free(bytes int64) { d.size.Store(d.used.Load() + bytes) }

// TestDiskFull: below MinFreeBytes nothing is added, below half of it nothing is
// written, what reads goes on, and everything does when there is room.
func TestDiskFull(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		disk := newSmallDisk(8 << 20)
		q := openOnSmallDisk(t, disk, nil)
		produced := disk.fill(t, q)
		require.Greater(t, produced, 30)
		time.Sleep(time.Second)
		disk.free(diskTestFree - 1)

		task := Task{Queue: "a", Payload: []byte("more")}
		for shard := range 2 {
			_, err := q.startingAt(shard).Produce(ctx, task)
			require.ErrorIs(t, err, ErrDiskFull)
			require.ErrorContains(t, err, fmt.Sprint("shard ", shard))
			_, err = q.startingAt(shard).ProduceBatch(ctx, []Task{task})
			require.ErrorIs(t, err, ErrDiskFull)
		}
		require.ErrorIs(t, q.SetSchedule(ctx, Schedule{Name: "s", Cron: "@daily", Task: task}), ErrDiskFull)
		l, err := q.Claim(ctx, ClaimRequest{Queues: []string{"a"}})
		require.NoError(t, err)
		require.ErrorIs(t, q.Complete(ctx, l.Receipt, nil, task), ErrDiskFull)
		require.NoError(t, q.Extend(ctx, l.Receipt, time.Hour))
		require.NoError(t, q.Complete(ctx, l.Receipt, nil))
		kept, err := q.Claim(ctx, ClaimRequest{Queues: []string{"a"}})
		require.NoError(t, err)

		disk.free(diskTestFree/2 - 1)
		time.Sleep(time.Second)
		require.ErrorIs(t, q.Complete(ctx, kept.Receipt, nil), ErrDiskFull)
		require.ErrorIs(t, q.Retry(ctx, kept.Receipt, RetryOptions{}), ErrDiskFull)
		_, err = q.Claim(ctx, ClaimRequest{Queues: []string{"a"}, NoWait: true})
		require.ErrorIs(t, err, ErrDiskFull)
		short, cancel := context.WithTimeout(ctx, time.Minute)
		defer cancel()
		_, err = q.Claim(short, ClaimRequest{Queues: []string{"a"}})
		require.ErrorIs(t, err, context.DeadlineExceeded)
		waiting := make(chan error, 1)
		go func() {
			_, err := q.Claim(ctx, ClaimRequest{Queues: []string{"a"}})
			waiting <- err
		}()
		stats, err := q.Stats(ctx)
		require.NoError(t, err)
		require.EqualValues(t, produced-2, stats["a"].Ready)
		info, err := q.Get(ctx, kept.ID)
		require.NoError(t, err)
		require.Equal(t, Leased, info.State)
		listed := 0
		for _, err := range q.List(ctx, ListOptions{Queue: "a", State: Ready}) {
			require.NoError(t, err)
			listed++
		}
		require.Equal(t, produced-2, listed)
		synctest.Wait()
		require.Empty(t, waiting)
		require.ErrorIs(t, q.Checkpoint(ctx, "copy"), ErrDiskFull)

		disk.free(64 << 20)
		require.NoError(t, <-waiting, "nobody has called")
		require.NoError(t, q.Complete(ctx, kept.Receipt, nil, task))
		for shard := range 2 {
			_, err = q.startingAt(shard).Produce(ctx, task)
			require.NoError(t, err)
		}
		require.NoError(t, q.checkAll())
		require.NoError(t, q.checkMemory())
		require.NoError(t, q.Close())
		require.NoError(t, openOnSmallDisk(t, disk, nil).Close())
	})
}

// TestDiskFullForTimes: ticks and expired leases wait for room, without more than
// a look now and then, and nothing of them is lost.
func TestDiskFullForTimes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		disk := newSmallDisk(64 << 20)
		q := openOnSmallDisk(t, disk, func(o *Options) { o.Shards = 1 })
		require.NoError(t, q.SetSchedule(ctx, Schedule{Name: "s", Every: 10 * time.Second, Missed: MissedAll, Task: Task{Queue: "ticks"}}))
		_, err := q.Produce(ctx, Task{Queue: "a"})
		require.NoError(t, err)
		_, err = q.Produce(ctx, Task{Queue: "later", RunAt: time.Now().Add(time.Minute)})
		require.NoError(t, err)
		_, err = q.Claim(ctx, ClaimRequest{Queues: []string{"a"}, LeaseFor: time.Minute})
		require.NoError(t, err)
		counts := func() (ticks, leased, scheduled int) {
			stats, err := q.Stats(ctx)
			require.NoError(t, err)
			return int(stats["ticks"].Ready), int(stats["a"].Leased), int(stats["later"].Scheduled)
		}
		for _, free := range []int64{diskTestFree - 1, diskTestFree/2 - 1} {
			ticks, _, _ := counts()
			disk.free(free)
			time.Sleep(2 * time.Second)
			asked := disk.asked.Load()
			time.Sleep(10 * time.Minute)
			require.Less(t, disk.asked.Load()-asked, int64(700))
			now, leased, scheduled := counts()
			require.LessOrEqual(t, now, ticks+1)
			if free < diskTestFree/2 {
				require.Equal(t, 1, leased)
				require.Equal(t, 1, scheduled)
			} else { // they go on
				require.Zero(t, leased)
				require.Zero(t, scheduled)
				_, err = q.Claim(ctx, ClaimRequest{Queues: []string{"a"}, LeaseFor: time.Minute})
				require.NoError(t, err)
				id, err := q.Claim(ctx, ClaimRequest{Queues: []string{"later"}})
				require.NoError(t, err)
				require.NoError(t, q.Release(ctx, id.Receipt, time.Minute))
			}
			if free < diskTestFree/2 {
				disk.free(64 << 20)
				time.Sleep(10 * time.Second)
				now, leased, scheduled = counts()
				require.Greater(t, now, 110, "every tick")
				require.Zero(t, leased)
				require.Zero(t, scheduled)
			}
		}
		require.NoError(t, q.Close())
	})
}

// TestDiskFullForRun: Run waits for room, and goes on.
func TestDiskFullForRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const tasks = 100
		ctx, cancel := context.WithCancel(t.Context())
		disk := newSmallDisk(64 << 20)
		q := openOnSmallDisk(t, disk, nil)
		for range tasks {
			_, err := q.Produce(ctx, Task{Queue: "a"})
			require.NoError(t, err)
		}
		disk.free(diskTestFree/2 - 1)
		time.Sleep(2 * time.Second)
		var done atomic.Int64
		mux := new(Mux)
		Handle(mux, "a", func(context.Context, *Job[[]byte]) error {
			done.Add(1)
			return nil
		})
		ended := make(chan error, 1)
		go func() { ended <- q.Run(ctx, mux, &RunOptions{Concurrency: 4}) }()
		asked := disk.asked.Load()
		time.Sleep(time.Minute)
		require.Empty(t, ended)
		require.Zero(t, done.Load())
		require.Less(t, disk.asked.Load()-asked, int64(200))
		disk.free(64 << 20)
		time.Sleep(2 * time.Second)
		require.EqualValues(t, tasks, done.Load())
		cancel()
		require.NoError(t, <-ended)
		require.NoError(t, q.Close())
	})
}

// TestDiskReallyFull: without a limit, callers keep their deadlines while no more
// tables can be written, work goes on when there is room, and Close does not wait for it.
func TestDiskReallyFull(t *testing.T) {
	for _, room := range []bool{true, false} {
		t.Run(fmt.Sprint("room ", room), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				disk := newSmallDisk(1 << 20)
				disk.only = ".sst"
				q := openOnSmallDisk(t, disk, func(o *Options) { o.MinFreeBytes = -1 })
				produced, payload := 0, bytes.Repeat([]byte("x"), 20<<10)
				for {
					begin := time.Now()
					ctx, cancel := context.WithTimeout(t.Context(), time.Second)
					_, err := q.startingAt(0).Produce(ctx, Task{Queue: "a", Payload: payload})
					cancel()
					if err == nil {
						produced++
						require.Less(t, produced, 1000)
						continue
					}
					require.ErrorIs(t, err, ErrUncertain)
					require.ErrorIs(t, err, context.DeadlineExceeded)
					require.Equal(t, time.Second, time.Since(begin))
					break
				}
				_, err := q.startingAt(1).Produce(t.Context(), Task{Queue: "b"})
				require.NoError(t, err)
				if room {
					disk.free(64 << 20)
					_, err = q.startingAt(0).Produce(t.Context(), Task{Queue: "b"})
					require.NoError(t, err)
					require.NoError(t, q.Close())
				} else {
					require.ErrorIs(t, q.Close(), syscall.ENOSPC)
					_, err := Open("queue", &Options{fs: disk})
					require.ErrorIs(t, err, syscall.ENOSPC)
					disk.free(64 << 20)
				}
				q = openOnSmallDisk(t, disk, nil)
				stats, err := q.Stats(t.Context())
				require.NoError(t, err)
				require.GreaterOrEqual(t, int(stats["a"].Ready), produced)
				require.LessOrEqual(t, int(stats["a"].Ready), produced+1)
				require.NoError(t, q.checkAll())
				require.NoError(t, q.Close())
			})
		})
	}
}

// TestMinFreeBytes: the default is there, and a negative number is no limit.
func TestMinFreeBytes(t *testing.T) {
	for free, want := range map[int64]error{0: ErrDiskFull, -1: nil, 32 << 20: ErrDiskFull, 16 << 20: nil} {
		disk := newSmallDisk(28 << 20)
		q := openOnSmallDisk(t, disk, func(o *Options) { o.MinFreeBytes = free })
		_, err := q.Produce(t.Context(), Task{Queue: "a"})
		require.ErrorIs(t, err, want, free)
		require.NoError(t, q.Close())
	}
}
