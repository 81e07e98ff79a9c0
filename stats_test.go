package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"path/filepath"
	"runtime"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// infoIn returns the Info of one queue, or zero if Info does not name the queue.
func infoIn(t *testing.T, q interface {
	Info(context.Context) ([]codeq.QueueInfo, error)
}, queue string) (info codeq.QueueInfo) {
	t.Helper()
	all, err := q.Info(t.Context())
	require.NoError(t, err)
	for i := range all {
		if i > 0 {
			require.Less(t, all[i-1].Queue, all[i].Queue)
		}
		if all[i].Queue == queue {
			info = all[i]
		}
	}
	return info
}

// TestInfo: every event of a task is counted once for its queue, and once for the day. The counts
// stay when the queue is closed or killed, and when all of its tasks have ended.
func TestInfo(t *testing.T) {
	for _, shards := range []int{1, 3} {
		t.Run(fmt.Sprint(shards, " shards"), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx := t.Context()
				disk := crashfs.New()
				open := func() *codeq.Queue {
					q, err := codeq.Open("queue", queuetest.OnDisk(disk, &codeq.Options{Shards: shards, MaxAttempts: 2, LeaseFor: time.Minute}))
					require.NoError(t, err)
					return q
				}
				q := open()
				defer func() { _ = q.Close() }()
				claim := func() codeq.Receipt {
					l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{"a"}, NoWait: true})
					require.NoError(t, err)
					return l.Receipt
				}
				day := time.Now().UTC().Truncate(24 * time.Hour)
				began := time.Now()
				queuetest.Produce(t, q, codeq.Task{Queue: "a"})
				time.Sleep(time.Second)
				queuetest.Produce(t, q, named(codeq.Task{Queue: "a"}, "1", "2", "3")...)
				queuetest.Produce(t, q, codeq.Task{Queue: "a", RunAt: time.Now().Add(24 * time.Hour)})
				require.NoError(t, q.Configure(ctx, "b", func(s *codeq.Settings) { s.Rate = 7 }))
				require.WithinDuration(t, began, infoIn(t, q, "a").OldestReady, 0)
				require.Equal(t, codeq.QueueInfo{Queue: "b", Settings: codeq.Settings{Rate: 7}}, infoIn(t, q, "b"))

				require.NoError(t, q.Complete(ctx, claim(), nil))
				require.NoError(t, q.Retry(ctx, claim(), codeq.RetryOptions{Err: errors.New("again")}))
				require.NoError(t, q.Release(ctx, claim(), 0))
				require.NoError(t, q.DeadLetter(ctx, claim(), errors.New("given up")))
				first := codeq.Totals{Produced: 5, Claimed: 4, Completed: 1, Retried: 1, Released: 1, Dead: 1}
				info := infoIn(t, q, "a")
				require.Equal(t, codeq.Counts{Ready: 1, Scheduled: 2, Dead: 1}, info.Counts)
				require.Equal(t, first, info.Totals)

				requireDays := func(want ...codeq.DayTotals) {
					t.Helper()
					got, err := q.TotalsByDay(ctx, "a")
					require.NoError(t, err)
					require.Equal(t, want, got)
				}
				killed := disk.Clone()
				require.NoError(t, q.Close())
				for _, disk = range []*crashfs.Disk{disk, killed} {
					r, err := codeq.OpenReadOnly("queue", queuetest.OnDisk(disk, new(codeq.ReaderOptions)))
					require.NoError(t, err)
					require.Equal(t, info, infoIn(t, r, "a"))
					got, err := r.TotalsByDay(ctx, "a")
					require.NoError(t, err)
					require.Equal(t, []codeq.DayTotals{{Day: day, Totals: first}}, got)
					require.NoError(t, r.Close())
					q = open()
					require.Equal(t, info, infoIn(t, q, "a"), "all that waits is found on disk")
					requireDays(codeq.DayTotals{Day: day, Totals: first})
					if disk != killed {
						require.NoError(t, q.Close())
					}
				}

				time.Sleep(25 * time.Hour)
				claim()
				time.Sleep(2 * time.Minute) // its lease expires
				for range 3 {
					require.NoError(t, q.Cancel(ctx, claim().ID))
				}
				second := codeq.Totals{Claimed: 4, Canceled: 3, Expired: 1}
				requireDays(codeq.DayTotals{Day: day, Totals: first}, codeq.DayTotals{Day: day.Add(24 * time.Hour), Totals: second})
				_, err := q.PurgeDead(ctx, codeq.DeadFilter{Queue: "a"})
				require.NoError(t, err)
				all := codeq.Totals{Produced: 5, Claimed: 8, Completed: 1, Retried: 1, Released: 1, Dead: 1, Canceled: 3, Expired: 1}
				require.Equal(t, codeq.QueueInfo{Queue: "a", Totals: all}, infoIn(t, q, "a"), "it has just become empty")
				time.Sleep(time.Hour)
				require.Empty(t, infoIn(t, q, "a").Queue)
				require.NoError(t, q.Close())

				q = open()
				require.Empty(t, infoIn(t, q, "a").Queue)
				requireDays(codeq.DayTotals{Day: day, Totals: first}, codeq.DayTotals{Day: day.Add(24 * time.Hour), Totals: second})
				all.Produced++
				queuetest.Produce(t, queuetest.StartingAt(q, 0), codeq.Task{Queue: "a"})
				require.Equal(t, all, infoIn(t, q, "a").Totals)
				queuetest.Quiesce(t, q)
				require.NoError(t, errors.Join(queuetest.CheckAll(q), q.Close()))
				require.True(t, queuetest.VerifyImage(t, disk, false).OK())
			})
		})
	}
}

// TestTotalsOfGoneQueues: memory and counters do not keep queues that come and go. The totals of
// such a queue go on when it comes back, and are forgotten after 90 days.
func TestTotalsOfGoneQueues(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		disk := crashfs.New()
		opts := queuetest.OnDisk(disk, &codeq.Options{Shards: 1})
		q, err := codeq.Open("queue", opts)
		require.NoError(t, err)
		defer func() { _ = q.Close() }()
		work := func(queue string) {
			queuetest.Produce(t, q, codeq.Task{Queue: queue})
			l, err := q.Claim(ctx, codeq.ClaimRequest{Queues: []string{queue}})
			require.NoError(t, err)
			require.NoError(t, q.Complete(ctx, l.Receipt, nil))
		}
		reopen := func() {
			require.NoError(t, q.Close())
			q, err = codeq.Open("queue", opts)
			require.NoError(t, err)
			queuetest.Quiesce(t, q)
		}
		const days = 100
		for range days {
			work("a")
			work("b")
			reopen() // only its tasks keep a queue in memory
			time.Sleep(24 * time.Hour)
		}
		require.Equal(t, 2*codeq.TotalsDays+1, queuetest.Stored(t, q, 0x0e), "the rows of each day, and when they were swept")
		got, err := q.TotalsByDay(ctx, "a")
		require.NoError(t, err)
		require.Len(t, got, codeq.TotalsDays-1, "and nothing today")
		work("a")
		require.EqualValues(t, days+1, infoIn(t, q, "a").Totals.Completed)
		require.Zero(t, infoIn(t, q, "b"))
		reopen()

		time.Sleep((codeq.TotalsDays - 1) * 24 * time.Hour)
		work("a")
		work("b")
		require.EqualValues(t, days+2, infoIn(t, q, "a").Totals.Completed)
		require.EqualValues(t, 1, infoIn(t, q, "b").Totals.Completed, "it was gone for too long")
		reopen()
		require.NoError(t, errors.Join(queuetest.CheckAll(q), queuetest.CheckMemory(q), q.Close()))
	})
}

// TestCacheBytes: readers have the whole block cache of Options, for any size of the memtables, and
// find earlier reads in it.
func TestCacheBytes(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	const cache, memTable, shards = 4 << 20, 1 << 20, 2
	q, err := codeq.Open(t.TempDir(), &codeq.Options{Shards: shards, CacheBytes: cache, MemTableBytes: memTable})
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	const payload = 8 << 10
	random := rand.NewChaCha8([32]byte{}) // nothing compresses it
	var ids []codeq.ID
	batch := make([]codeq.Task, 64)
	for n := range 24 << 20 / payload / len(batch) {
		for i := range batch {
			batch[i] = codeq.Task{Queue: "a", Payload: make([]byte, payload)}
			_, _ = random.Read(batch[i].Payload)
		}
		more, err := queuetest.StartingAt(q, n%shards).ProduceBatch(t.Context(), batch)
		require.NoError(t, err)
		ids = append(ids, more...)
	}
	read := func(ids []codeq.ID) (hits float64) {
		before, err := q.StorageStats()
		require.NoError(t, err)
		for _, id := range ids {
			_, err := q.Get(t.Context(), id)
			require.NoError(t, err)
		}
		after, err := q.StorageStats()
		require.NoError(t, err)
		require.LessOrEqual(t, after.CacheBytes, int64(cache+shards*memTable))
		n := after.CacheHits - before.CacheHits
		return float64(n) / float64(n+after.CacheMisses-before.CacheMisses)
	}
	read(ids)
	st, err := q.StorageStats()
	require.NoError(t, err)
	require.Greater(t, st.CacheBytes, int64(cache*3/4))
	some := ids[:cache/2/payload]
	read(some)
	require.Greater(t, read(some), 0.9)
}

// TestStorageStats compares the statistics of the stores with the directory.
func TestStorageStats(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	opts := &codeq.Options{Shards: 2, MemTableBytes: 256 << 10}
	q, err := codeq.Open(dir, opts)
	require.NoError(t, err)
	stats := func() (st *codeq.StorageStats) {
		require.Eventually(t, func() bool { // Pebble deletes files meanwhile
			st, err = q.StorageStats()
			require.NoError(t, err)
			require.Len(t, st.Shards, 2)
			disk, size := st.Shards[0].DiskBytes+st.Shards[1].DiskBytes, sizeOf(t, dir)
			return disk > size*9/10-16<<10 && disk < size*11/10+16<<10
		}, 10*time.Second, time.Millisecond)
		return st
	}
	empty := stats()
	payload := make([]byte, 8<<10)
	const tasks = 200 // 800 KiB for each shard: several memtables
	for range tasks / 2 {
		for i := range 2 {
			_, err := queuetest.StartingAt(q, i).ProduceBatch(t.Context(), []codeq.Task{{Queue: "a", Payload: payload}})
			require.NoError(t, err)
		}
	}
	full := stats()
	var logged int64
	for i, s := range full.Shards {
		require.Greater(t, s.DiskBytes, empty.Shards[i].DiskBytes)
		require.Positive(t, s.MemTableBytes)
		require.Positive(t, s.LogBytes)
		require.GreaterOrEqual(t, s.LoggedBytes, s.LogBytes)
		logged += s.LoggedBytes
	}
	require.GreaterOrEqual(t, logged, int64(tasks*len(payload)))
	require.Less(t, logged, int64(2*tasks*len(payload)))
	queuetest.Flush(t, q)
	flushed := stats()
	var tables int64
	for i, s := range flushed.Shards {
		require.Greater(t, s.Flushes, empty.Shards[i].Flushes)
		require.Positive(t, s.Tables)
		require.Positive(t, s.FlushedBytes)
		require.Positive(t, s.ReadAmp)
		require.LessOrEqual(t, s.L0Tables, s.Tables)
		require.Less(t, s.LogBytes, full.Shards[i].LogBytes)
		tables += s.TableBytes
	}
	require.NoError(t, q.Close())
	_, err = q.StorageStats()
	require.ErrorIs(t, err, codeq.ErrClosed)

	// Counters begin again, and sizes stay.
	q, err = codeq.Open(dir, opts)
	require.NoError(t, err)
	var reopened int64
	for i, s := range stats().Shards {
		require.Less(t, s.LoggedBytes, full.Shards[i].LoggedBytes)
		reopened += s.TableBytes
	}
	require.Positive(t, reopened)
	require.LessOrEqual(t, reopened, 2*tables)
	_, err = q.ClaimBatch(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}, Max: 10})
	require.NoError(t, err)
	st := stats()
	require.Positive(t, st.CacheHits+st.CacheMisses)
	require.Positive(t, st.CacheBytes)
	require.NoError(t, q.Close())
}

func sizeOf(t *testing.T, dir string) (bytes int64) {
	require.NoError(t, filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			var info fs.FileInfo
			if info, err = e.Info(); err == nil {
				bytes += info.Size()
			}
		}
		if errors.Is(err, fs.ErrNotExist) { // deleted meanwhile
			return nil
		}
		return err
	}))
	return bytes
}

// TestProcessInfo: the sum of the shards is as in Info. ProcessInfo also has the workers, the disk,
// the next tick of any schedule, also of one that cannot tick, and the number of lost events.
func TestProcessInfo(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := t.Context()
		disk := testkit.NewSmallDisk(1 << 40)
		q, err := codeq.Open("queue", queuetest.OnDisk(disk, &codeq.Options{Shards: 3}))
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
		queuetest.Produce(t, q, named(codeq.Task{Queue: "a"}, "1", "2", "3")...)
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

// TestLocalProcessInfo: a client beside the process gets the same ProcessInfo as the process
// itself.
func TestLocalProcessInfo(t *testing.T) {
	t.Parallel()
	s := openServed(t, filepath.Join(t.TempDir(), "queue"), codeq.Options{Shards: 2})
	s.serve(t)
	c := s.client(t)
	queuetest.Produce(t, s.Queue, named(codeq.Task{Queue: "a"}, "1", "2", "3")...)
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

// TestProcessInfoOfFailedShard: a shard that has failed, or does not answer in time, has an error.
// The other shards have their numbers.
func TestProcessInfoOfFailedShard(t *testing.T) {
	t.Parallel()
	q, err := codeq.Open(t.TempDir(), &codeq.Options{Shards: 2})
	require.NoError(t, err)
	defer func() { require.ErrorIs(t, q.Close(), codeq.ErrFailed) }()
	for i := range 2 {
		_, err := queuetest.StartingAt(q, i).ProduceBatch(t.Context(), []codeq.Task{{Queue: "a"}})
		require.NoError(t, err)
	}
	info := func(ctx context.Context) []codeq.ShardInfo {
		p, err := q.ProcessInfo(ctx)
		require.NoError(t, err)
		return p.Shards
	}
	require.NotEmpty(t, info(t.Context())[0].Queues)

	ctx, cancel := context.WithCancel(t.Context())
	held, release, stuck := make(chan struct{}), make(chan struct{}), make(chan error, 1)
	go func() {
		stuck <- inspect.Of(q).Owner(0, func(*inspect.Owner) error {
			close(held)
			<-release
			return nil
		})
	}()
	<-held
	shards := make(chan []codeq.ShardInfo)
	go func() {
		p, err := q.ProcessInfo(ctx)
		if err != nil {
			t.Error(err)
			p = &codeq.ProcessInfo{Shards: make([]codeq.ShardInfo, 2)}
		}
		shards <- p.Shards
	}()
	for inspect.Of(q).Waiting(0) == 0 {
		runtime.Gosched()
	}
	cancel()
	require.Equal(t, codeq.ShardInfo{LastError: "codeq: context canceled"}, (<-shards)[0])
	go func() {
		p, err := q.ProcessInfo(t.Context())
		if err != nil {
			t.Error(err)
			p = &codeq.ProcessInfo{Shards: make([]codeq.ShardInfo, 2)}
		}
		shards <- p.Shards
	}()
	for inspect.Of(q).Waiting(0) < 2 {
		runtime.Gosched()
	}
	close(release)
	require.Equal(t, 1, (<-shards)[0].Inbox, "the call that was given up")
	require.NoError(t, <-stuck)

	require.ErrorIs(t, inspect.Of(q).Owner(0, func(s *inspect.Owner) error {
		s.Rules.Break(errors.New("a broken disk"))
		return nil
	}), codeq.ErrUncertain)
	got := info(t.Context())
	require.False(t, got[0].Leads)
	require.Contains(t, got[0].LastError, "a broken disk")
	require.Empty(t, got[0].Queues)
	require.True(t, got[1].Leads)
	require.NotEmpty(t, got[1].Queues)
}
