package faults_test

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"slices"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/internal/platform"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// TestSpaceComesBack: half a minute after large tasks have ended in any way, they use no more disk
// space. The same holds if the queue was killed or closed before that, and opened again; without
// -long, each of these follows some of the ways. Live tasks stay.
func TestSpaceComesBack(t *testing.T) {
	testbase.SkipUnderRace(t)
	tasks := testkit.Sized(320, 1024) // 5 MiB
	plain := func(int) codeq.Task { return codeq.Task{Queue: "a"} }
	ctx := context.Background()
	drain := func(t *testing.T, q *codeq.Queue, _ []codeq.ID) {
		require.Equal(t, tasks, queuetest.Drain(t, q, "a", queuetest.Completing(q)))
	}
	ways := map[string]struct {
		task   func(int) codeq.Task
		use    func(t *testing.T, q *codeq.Queue, ids []codeq.ID)
		live   int // tasks that are kept
		change func(*codeq.Options)
	}{
		"completed":    {task: plain, use: drain},
		"shards":       {task: plain, use: drain, change: func(o *codeq.Options) { o.Shards = 4 }},
		"lanes":        {task: func(i int) codeq.Task { return codeq.Task{Queue: "a", Tenant: fmt.Sprint(i % 50), Priority: i % 3} }, use: drain},
		"many tenants": {task: func(i int) codeq.Task { return codeq.Task{Queue: "a", Tenant: fmt.Sprint(i)} }, use: drain},
		"one in ten kept": {live: tasks / 10, use: drain, task: func(i int) codeq.Task {
			if i%10 == 0 {
				return codeq.Task{Queue: "a", Retention: time.Hour}
			}
			return plain(i)
		}},
		"retention": {task: plain, change: func(o *codeq.Options) { o.Retention = 5 * time.Second }, use: func(t *testing.T, q *codeq.Queue, _ []codeq.ID) {
			drain(t, q, nil)
			time.Sleep(10 * time.Second)
		}},
		"purged": {task: plain, change: func(o *codeq.Options) { o.MaxAttempts = 1 }, use: func(t *testing.T, q *codeq.Queue, _ []codeq.ID) {
			queuetest.Drain(t, q, "a", func(l *codeq.Lease) error { return q.Retry(ctx, l.Receipt, codeq.RetryOptions{}) })
			n, err := q.PurgeDead(ctx, codeq.DeadFilter{Queue: "a"})
			require.NoError(t, err)
			require.Equal(t, tasks, n)
		}},
		"canceled": {task: plain, live: tasks / 8, use: queuetest.CancelMost},
		"scheduled": {task: func(int) codeq.Task { return codeq.Task{Queue: "a", RunAt: time.Now().Add(time.Minute)} }, use: func(t *testing.T, q *codeq.Queue, _ []codeq.ID) {
			time.Sleep(time.Minute)
			synctest.Wait()
			drain(t, q, nil)
		}},
		"retried": {task: plain, use: func(t *testing.T, q *codeq.Queue, _ []codeq.ID) {
			queuetest.Drain(t, q, "a", func(l *codeq.Lease) error { return q.Release(ctx, l.Receipt, time.Second) })
			time.Sleep(2 * time.Second)
			synctest.Wait()
			drain(t, q, nil)
		}},
	}
	for i, name := range slices.Sorted(maps.Keys(ways)) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := ways[name]
			rng, hows := testkit.Seeded(t), []string{"goes on", "closed", "killed"}
			for n := range testkit.Sized(1, 3) {
				how := hows[(i+n)%3]
				t.Run(how, func(t *testing.T) {
					synctest.Test(t, func(t *testing.T) {
						opts := queuetest.ReclaimTest()
						fs := crashfs.New()
						inspect.Options(&opts).FS = fs
						if c.change != nil {
							c.change(&opts)
						}
						q, err := codeq.Open("queue", &opts)
						require.NoError(t, err)
						defer func() { require.NoError(t, q.Close()) }()
						ids := queuetest.ProduceMuch(t, q, tasks, c.task)
						queuetest.Flush(t, q)
						require.Greater(t, queuetest.StoresOf(t, q).TableBytes, int64(tasks*queuetest.ReclaimPayload*9/10))
						c.use(t, q, ids)
						switch how {
						case "closed":
							require.NoError(t, q.Close())
							q, err = codeq.Open("queue", &opts)
						case "killed":
							inspect.Options(&opts).FS = fs.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 100, RNG: rng})
							require.NoError(t, q.Close())
							q, err = codeq.Open("queue", &opts)
						}
						require.NoError(t, err)
						time.Sleep(30 * time.Second)
						live := int64(c.live * queuetest.ReclaimPayload)
						st := queuetest.StoresOf(t, q)
						require.LessOrEqual(t, st.TableBytes, live+live/10+2*int64(opts.Shards*inspect.Options(&opts).ReclaimFrom), "dead %d", st.DeadBytes)
						require.GreaterOrEqual(t, st.TableBytes, live)
						require.NoError(t, queuetest.CheckAll(q))

						synctest.Wait()
						before := queuetest.StoresOf(t, q)
						time.Sleep(time.Hour - time.Minute) // kept tasks stay
						after := queuetest.StoresOf(t, q)
						require.Equal(t, before.Flushes, after.Flushes, "an idle store writes nothing")
						require.Equal(t, before.Compactions, after.Compactions)
					})
				})
			}
		})
	}
}

// TestDeadTablesAreNotRead: during the drain of a deep lane its ended tasks are dropped, and
// compactions do not read them again.
func TestDeadTablesAreNotRead(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	if testing.Short() {
		t.Skip("takes 400 MiB of memory")
	}
	opts := queuetest.ReclaimTest()
	opts.MemTableBytes, inspect.Options(&opts).TrimBytes = 4<<20, 4<<20
	queuetest.Bubble(t, opts, func(t *testing.T, q *codeq.Queue) {
		const tasks = 20 << 10 // 320 MiB
		queuetest.ProduceMuch(t, q, tasks, func(int) codeq.Task { return codeq.Task{Queue: "a"} })
		filled := queuetest.StoresOf(t, q)
		left, most := tasks, int64(0)
		queuetest.Drain(t, q, "a", func(l *codeq.Lease) error {
			left--
			if left%256 == 0 {
				time.Sleep(time.Millisecond)
				synctest.Wait()
				most = max(most, queuetest.StoresOf(t, q).TableBytes-int64(left*queuetest.ReclaimPayload))
			}
			return q.Complete(context.Background(), l.Receipt, nil)
		})
		require.Less(t, most, int64(128<<20+32<<20), "as much as waits in the first level, and what is under way")
		time.Sleep(30 * time.Second)
		drained := queuetest.StoresOf(t, q)
		require.Less(t, drained.TableBytes, int64(1<<20))
		require.Less(t, drained.CompactedBytes-filled.CompactedBytes, int64(tasks*queuetest.ReclaimPayload))
	})
}

// TestLivingIsNotWrittenAgain: small tasks come and go among large ones that stay. Compactions do
// not write the large ones again and again.
func TestLivingIsNotWrittenAgain(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	const lanes, stay, come = 64, 16, 4
	const live = lanes * stay * queuetest.ReclaimPayload
	ctx := context.Background()
	large := func(i int) codeq.Task {
		return codeq.Task{Queue: "a", Tenant: fmt.Sprint(i % lanes), Payload: queuetest.Incompressible()}
	}
	small := func(i int) codeq.Task {
		return codeq.Task{Queue: "b", Tenant: fmt.Sprint(i % lanes), Payload: []byte("small")}
	}
	queuetest.Bubble(t, queuetest.ReclaimTest(), func(t *testing.T, q *codeq.Queue) {
		batches := func(n int, task func(int) codeq.Task) {
			for range n {
				tasks := make([]codeq.Task, lanes)
				for i := range tasks {
					tasks[i] = task(i)
				}
				_, err := q.ProduceBatch(ctx, tasks)
				require.NoError(t, err)
			}
		}
		for i := range lanes { // the lanes of both kinds alternate
			queuetest.Produce(t, q, large(i), small(i))
		}
		batches(stay-1, large)
		before := int64(0)
		for round := range 20 {
			queuetest.Drain(t, q, "b", queuetest.Completing(q))
			batches(come, small)
			time.Sleep(15 * time.Second)
			st := queuetest.StoresOf(t, q)
			if round == 3 {
				before = st.CompactedBytes
			}
			require.GreaterOrEqual(t, st.TableBytes, int64(live))
		}
		require.Less(t, queuetest.StoresOf(t, q).CompactedBytes-before, int64(4*live))
	})
}

// TestSmallDeletionsCompactNothing: deletions of small tasks count with their own size, not with
// that of the large tasks around them.
func TestSmallDeletionsCompactNothing(t *testing.T) {
	t.Parallel()
	queuetest.Bubble(t, queuetest.ReclaimTest(), func(t *testing.T, q *codeq.Queue) {
		ctx := context.Background()
		var small []codeq.ID
		for i := range 64 {
			small = append(small, queuetest.Produce(t, q, slices.Repeat([]codeq.Task{{Queue: "a", Tenant: fmt.Sprint(i)}}, 16)...)...)
			queuetest.ProduceMuch(t, q, 16, func(int) codeq.Task { return codeq.Task{Queue: "b", Tenant: fmt.Sprint(i)} })
		}
		st := queuetest.StoreOf(q, 0)
		require.NoError(t, st.Flush(ctx))
		lower, upper := keys.Range(keys.Task)
		require.NoError(t, st.DB().Compact(ctx, lower, upper, false)) // then Pebble sees nothing to merge
		before := queuetest.StoresOf(t, q)
		for _, id := range small {
			require.NoError(t, q.Cancel(ctx, id))
		}
		require.NoError(t, st.Flush(ctx))
		time.Sleep(time.Minute)
		after := queuetest.StoresOf(t, q)
		require.Less(t, after.CompactedBytes-before.CompactedBytes, int64(1<<20))
		require.Less(t, after.DeadBytes, int64(1<<20))
	})
}

// TestLargeAmongSmallGo: the space of ended large tasks comes back, whether the many small ones
// around them stay or end with them.
func TestLargeAmongSmallGo(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	for name, alsoSmall := range map[string]bool{"large": false, "and a hundred times as many small": true} {
		t.Run(name, func(t *testing.T) {
			queuetest.Bubble(t, queuetest.ReclaimTest(), func(t *testing.T, q *codeq.Queue) {
				const small, large = 40 << 10, 256
				ctx := context.Background()
				var gone []codeq.ID
				for range large / 8 {
					batch := make([]codeq.Task, small/(large/8))
					for i := range batch {
						batch[i] = codeq.Task{Queue: "a", Payload: fmt.Append(nil, rand.Uint64(), rand.Uint64(), rand.Uint64(), rand.Uint64())}
					}
					ids, err := q.ProduceBatch(ctx, batch)
					require.NoError(t, err)
					if alsoSmall {
						gone = append(gone, ids[:100*8]...)
					}
					gone = append(gone, queuetest.ProduceMuch(t, q, 8, func(int) codeq.Task { return codeq.Task{Queue: "a"} })...)
				}
				require.NoError(t, queuetest.StoreOf(q, 0).Flush(ctx))
				filled := queuetest.StoresOf(t, q).TableBytes
				for _, id := range gone {
					require.NoError(t, q.Cancel(ctx, id))
				}
				require.NoError(t, queuetest.StoreOf(q, 0).Flush(ctx))
				time.Sleep(30 * time.Second)
				require.Less(t, queuetest.StoresOf(t, q).TableBytes, filled-large*queuetest.ReclaimPayload*3/4)
			})
		})
	}
}

// TestTrimSparesTheLiving: a trim behind the front of a lane keeps leased tasks. It also keeps
// tasks that are released, woken or moved to a trimmed place. No ended task comes back.
func TestTrimSparesTheLiving(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		opts := queuetest.ReclaimTest()
		fs := crashfs.New()
		inspect.Options(&opts).FS, opts.Durability = fs, codeq.DurabilityDisk
		q, err := codeq.Open("queue", &opts)
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		ctx := context.Background()
		parent := queuetest.Produce(t, q, codeq.Task{Queue: "parents"})[0]
		const tasks = 1024
		all := make(map[codeq.ID]bool)
		for i := range 8 {
			for _, id := range queuetest.ProduceMuch(t, q, tasks/8, func(int) codeq.Task { return codeq.Task{Queue: "a"} }) {
				all[id] = true
			}
			child := codeq.Task{Queue: "a", Payload: []byte{byte(i)}, After: []codeq.ID{parent}} // its place in the lane is of now
			all[queuetest.Produce(t, q, child)[0]] = true
		}
		held := make(map[codeq.ID]*codeq.Lease)
		n := 0
		queuetest.Drain(t, q, "a", func(l *codeq.Lease) error {
			if n++; n%100 == 0 {
				held[l.ID] = l
				return nil
			}
			delete(all, l.ID)
			return q.Complete(ctx, l.Receipt, nil)
		})
		require.Len(t, held, tasks/100)
		time.Sleep(30 * time.Second)
		require.Less(t, queuetest.StoresOf(t, q).TableBytes, int64(tasks*queuetest.ReclaimPayload/4))
		require.NoError(t, queuetest.CheckAll(q))
		require.NoError(t, queuetest.CheckMemory(q))

		// One task is released, one moved, and the children become ready, all behind the front.
		var leases []*codeq.Lease
		for _, l := range held {
			leases = append(leases, l)
		}
		require.NoError(t, q.Release(ctx, leases[0].Receipt, 0))
		l := queuetest.ClaimNow(t, q, "parents")
		queuetest.Complete(t, q, l)
		synctest.Wait()
		for range 2 {
			for range 3 { // some tasks end, and the lane is trimmed again
				l := queuetest.ClaimNow(t, q, "a")
				require.True(t, all[l.ID])
				delete(all, l.ID)
				queuetest.Complete(t, q, l)
			}
			for _, id := range queuetest.ProduceMuch(t, q, 64, func(int) codeq.Task { return codeq.Task{Queue: "b"} }) {
				all[id] = true
			}
			time.Sleep(10 * time.Second)
			require.NoError(t, queuetest.CheckAll(q))
			require.NoError(t, queuetest.CheckMemory(q))

			inspect.Options(&opts).FS = fs.CrashClone(vfs.CrashCloneCfg{})
			require.NoError(t, q.Close())
			fs = inspect.Options(&opts).FS.(*crashfs.Disk)
			q, err = codeq.Open("queue", &opts)
			require.NoError(t, err)
			tasks, err := queuetest.List(q)
			require.NoError(t, err)
			require.Len(t, tasks, len(all))
			for id := range all {
				require.Contains(t, tasks, id)
			}
		}
	})
}

// TestTrimIsNoMisuse: a range deletion drops a task's table before the task's SINGLEDEL reaches it.
// The store stays correct.
func TestTrimIsNoMisuse(t *testing.T) {
	opts := queuetest.ReclaimTest()
	queuetest.Bubble(t, opts, func(t *testing.T, q *codeq.Queue) {
		db, ctx := queuetest.StoreOf(q, 0).DB(), context.Background()
		key := func(n int) []byte { return keys.AppendTask(nil, 1<<20, 0x7000+uint64(n)<<16, codeq.ID{}) }
		for n := range 64 {
			var id codeq.ID
			copy(id[:], key(n)[5:])
			require.NoError(t, db.Set(keys.AppendTask(nil, 1<<20, keys.SinceOf(id), id), queuetest.Incompressible(), pebble.NoSync))
		}
		lower, upper := keys.AppendLane(nil, 1<<20), keys.AppendLane(nil, 1<<20+1)
		require.NoError(t, db.Flush())
		require.NoError(t, db.Compact(ctx, lower, upper, false)) // the tasks are now in the last level
		for n := range 64 {
			var id codeq.ID
			copy(id[:], key(n)[5:])
			require.NoError(t, db.SingleDelete(keys.AppendTask(nil, 1<<20, keys.SinceOf(id), id), pebble.NoSync))
		}
		require.NoError(t, db.Flush()) // the SINGLEDELs are now above them
		require.NoError(t, db.DeleteRange(lower, upper, pebble.NoSync))
		require.NoError(t, db.Flush())
		time.Sleep(time.Second)
		synctest.Wait()
		require.Less(t, queuetest.StoresOf(t, q).TableBytes, int64(64*queuetest.ReclaimPayload/2), "the tables of the tasks have gone")
		require.NoError(t, db.Compact(ctx, lower, upper, false))
		require.NoError(t, queuetest.StoreOf(q, 0).Failure())
		queuetest.Produce(t, q, codeq.Task{Queue: "a"})
	})
}

// TestFullDiskIsReclaimed: a queue has filled its disk and is drained. It accepts tasks again
// within seconds, for every kind of full disk and every way in which tasks end.
func TestFullDiskIsReclaimed(t *testing.T) {
	testbase.SkipUnderRace(t)
	ctx := context.Background()
	complete := func(t *testing.T, q *codeq.Queue, _ []codeq.ID) { queuetest.Drain(t, q, "a", queuetest.Completing(q)) }
	really := func(err error) func(*codeq.Options, *testkit.SmallDisk) {
		return func(o *codeq.Options, d *testkit.SmallDisk) { o.MinFreeBytes, d.Err = -1, err }
	}
	size, rounds := int64(testkit.Sized(32, 128))<<20, testkit.Sized(1, 3)
	room := min(size*3/16, 12<<20)
	for name, c := range map[string]struct {
		change func(*codeq.Options, *testkit.SmallDisk)
		use    func(t *testing.T, q *codeq.Queue, ids []codeq.ID)
		room   int64 // bytes that the test frees when the disk is full
		nodes  int64 // files that the test removes then
	}{
		"completed": {use: complete},
		"shards":    {use: complete, change: func(o *codeq.Options, _ *testkit.SmallDisk) { o.Shards = 3 }},
		"released": {use: func(t *testing.T, q *codeq.Queue, _ []codeq.ID) { // and completed then
			released := make(map[codeq.ID]bool)
			queuetest.Drain(t, q, "a", func(l *codeq.Lease) error {
				if !released[l.ID] && l.ID[15]%8 == 0 {
					released[l.ID] = true
					return q.Release(ctx, l.Receipt, 0)
				}
				return q.Complete(ctx, l.Receipt, nil)
			})
		}},
		"kept": {change: func(o *codeq.Options, _ *testkit.SmallDisk) { o.Retention = 5 * time.Second }, use: func(t *testing.T, q *codeq.Queue, _ []codeq.ID) {
			complete(t, q, nil)
			time.Sleep(10 * time.Second)
		}},
		"purged": {change: func(o *codeq.Options, _ *testkit.SmallDisk) { o.MaxAttempts = 1 }, use: func(t *testing.T, q *codeq.Queue, ids []codeq.ID) {
			queuetest.Drain(t, q, "a", func(l *codeq.Lease) error { return q.Retry(ctx, l.Receipt, codeq.RetryOptions{}) })
			n, err := q.PurgeDead(ctx, codeq.DeadFilter{Queue: "a"})
			require.NoError(t, err)
			require.Equal(t, len(ids), n)
		}},
		"canceled": {use: func(t *testing.T, q *codeq.Queue, ids []codeq.ID) {
			for _, id := range ids {
				require.NoError(t, q.Cancel(ctx, id))
			}
		}},
		"no space": {use: complete, change: really(syscall.ENOSPC), room: room},
		"quota":    {use: complete, change: really(syscall.EDQUOT), room: room},
		// Until it ends, a compaction of all tables has each of them twice.
		"files": {nodes: 120, change: func(_ *codeq.Options, d *testkit.SmallDisk) {
			d.Nodes.Store(120)
			d.Size.Store(1 << 30)
		}, use: func(t *testing.T, q *codeq.Queue, _ []codeq.ID) { // not all at once: ended tasks need new files too
			queuetest.Drain(t, q, "a", func(l *codeq.Lease) error {
				time.Sleep(time.Millisecond)
				return q.Complete(ctx, l.Receipt, nil)
			})
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				opts := queuetest.ReclaimTest()
				disk := testkit.NewSmallDisk(size)
				inspect.Options(&opts).FS, opts.MinFreeBytes = disk, size/8
				if c.change != nil {
					c.change(&opts, disk)
				}
				q, err := codeq.Open("queue", &opts)
				require.NoError(t, err)
				defer func() { require.NoError(t, q.Close()) }()
				for range rounds {
					var ids []codeq.ID
					for {
						id, err := q.Produce(ctx, codeq.Task{Queue: "a", Payload: queuetest.Incompressible()})
						if err != nil {
							require.ErrorIs(t, err, codeq.ErrDiskFull)
							break
						}
						ids = append(ids, id)
						require.Less(t, len(ids), (1<<30)/queuetest.ReclaimPayload)
						time.Sleep(time.Millisecond)
					}
					require.Greater(t, len(ids), int(size/4)/queuetest.ReclaimPayload, "much of the disk has been used")
					disk.Size.Add(c.room)
					disk.Nodes.Add(c.nodes)
					time.Sleep(time.Second)
					c.use(t, q, ids)
					time.Sleep(5 * time.Second)
					queuetest.Produce(t, q, codeq.Task{Queue: "a", Payload: queuetest.Incompressible()})
					complete(t, q, nil)
					disk.Size.Add(-c.room)
					disk.Nodes.Add(-c.nodes)
					require.NoError(t, queuetest.CheckAll(q))
				}
			})
		})
	}
}

// TestCloseDuringReclaim: Close ends the work of the reclaimer.
func TestCloseDuringReclaim(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	for i := range testkit.Sized(10, 30) {
		synctest.Test(t, func(t *testing.T) {
			opts := queuetest.ReclaimTest()
			q, err := codeq.Open("queue", &opts)
			require.NoError(t, err)
			queuetest.ProduceMuch(t, q, 256, func(i int) codeq.Task { return codeq.Task{Queue: "a", Tenant: fmt.Sprint(i)} })
			queuetest.Drain(t, q, "a", queuetest.Completing(q))
			time.Sleep(time.Duration(i) * 1500 * time.Millisecond)
			require.NoError(t, q.Close())
			q, err = codeq.Open("queue", &opts)
			require.NoError(t, err)
			require.NoError(t, queuetest.CheckAll(q))
			require.NoError(t, q.Close())
		})
	}
}

// TestLinkedBytes: the space of dropped tables does not come back while a checkpoint links them.
func TestLinkedBytes(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	q, err := codeq.Open(dir+"/queue", &codeq.Options{Shards: 2, MemTableBytes: 256 << 10})
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	queuetest.ProduceMuch(t, q, 128, func(int) codeq.Task { return codeq.Task{Queue: "a"} })
	linked := func() (linked, tables int64) {
		st, err := q.StorageStats()
		require.NoError(t, err)
		for _, s := range st.Shards {
			linked, tables = linked+s.LinkedBytes, tables+s.TableBytes
		}
		return linked, tables
	}
	before, _ := linked()
	require.Zero(t, before)
	require.NoError(t, q.Checkpoint(t.Context(), dir+"/copy"))
	got, tables := linked()
	if inodesAreKnown(t, dir) {
		require.Greater(t, got, tables/2)
	}
	require.NoError(t, os.RemoveAll(dir+"/copy"))
	after, _ := linked()
	require.Zero(t, after)
}

func inodesAreKnown(t *testing.T, dir string) bool {
	info, err := os.Stat(dir)
	require.NoError(t, err)
	return platform.InodeNumber(info) != 0
}
