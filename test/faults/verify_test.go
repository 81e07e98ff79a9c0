package faults_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"math"
	"math/rand/v2"
	"path"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/failstop"
	"codeq/internal/inspect"
	"codeq/internal/integrity"
	"codeq/internal/keys"
	"codeq/internal/manifest"
	"codeq/internal/simtest"
	"codeq/internal/store"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// writeProtected makes a file system read-only; it does not even allow a lock.
func writeProtected(disk vfs.FS) vfs.FS {
	return errorfs.Wrap(disk, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if op.Kind != errorfs.OpFileClose && op.Kind.ReadOrWrite() == errorfs.OpIsWrite {
			return fs.ErrPermission
		}
		return nil
	}))
}

// TestVerifyWithoutPermission: a user with only read permission can verify a closed or killed
// queue. Only a repair needs write permission.
func TestVerifyWithoutPermission(t *testing.T) {
	disk := crashfs.New()
	q := queuetest.VariedQueue(t, disk)
	killed := disk.Clone()
	require.NoError(t, q.Close())
	for _, image := range []*crashfs.Disk{disk, killed} {
		r, err := codeq.Verify("queue", queuetest.OnDisk(writeProtected(image), &codeq.VerifyOptions{}))
		require.NoError(t, err)
		require.True(t, r.OK(), "%v", r.Problems)
		require.Len(t, r.Shards, 2)
		_, err = codeq.Verify("queue", queuetest.OnDisk(writeProtected(image), &codeq.VerifyOptions{Repair: true}))
		require.ErrorIs(t, err, fs.ErrPermission)
	}
}

// TestVerify finds no damage in a sound queue, and does not change it.
func TestVerify(t *testing.T) {
	disk := crashfs.New()
	q := queuetest.VariedQueue(t, disk)
	stats, err := q.Stats(context.Background())
	require.NoError(t, err)
	var want codeq.Counts
	for _, c := range stats {
		sum := keys.Counts(want)
		sum.Add(keys.Counts(c))
		want = codeq.Counts(sum)
	}
	killed := disk.Clone()
	_, err = codeq.Verify("queue", queuetest.OnDisk(disk, &codeq.VerifyOptions{}))
	require.ErrorIs(t, err, codeq.ErrLocked)
	require.NoError(t, q.Close())

	for _, image := range []*crashfs.Disk{disk, killed} {
		before := simtest.StoreContents(t, image, "queue")
		r := queuetest.VerifyImage(t, image, false)
		require.True(t, r.OK(), "%v", r.Problems)
		require.Len(t, r.Shards, 2)
		var got keys.Counts
		for _, s := range r.Shards {
			require.Equal(t, image == disk, s.Sealed)
			require.Greater(t, s.Files, 5)
			require.Greater(t, s.Bytes, int64(10_000))
			require.Empty(t, s.Kept)
			got.Add(keys.Counts(s.Tasks))
		}
		require.Equal(t, want, codeq.Counts(got))
		require.Equal(t, before, simtest.StoreContents(t, image, "queue"))
		require.True(t, queuetest.VerifyImage(t, image, true).OK())
		require.Equal(t, before, simtest.StoreContents(t, image, "queue"), "nothing is to be repaired")
	}
}

func TestVerifyRefuses(t *testing.T) {
	_, err := codeq.Verify("queue", queuetest.OnDisk(crashfs.New(), &codeq.VerifyOptions{}))
	require.ErrorIs(t, err, codeq.ErrNotQueue)
	root := t.TempDir()
	_, err = codeq.Verify(root, nil)
	require.ErrorIs(t, err, codeq.ErrNotQueue)
	queuetest.ClosedQueue(t, root, 1)
	r, err := codeq.Verify(root, nil)
	require.NoError(t, err)
	require.True(t, r.OK())
	testkit.WriteFile(t, root+"/"+manifest.Name, testkit.ReadFile(t, root+"/"+manifest.Name)+" ")
	_, err = codeq.Verify(root, nil)
	require.ErrorIs(t, err, codeq.ErrCorrupt)
}

// removeKey removes the holder of an idempotency key.
func removeKey(t *testing.T, db *pebble.DB, suits func(keys.UniqueValue) bool) {
	t.Helper()
	key, _ := queuetest.First(t, db, keys.Unique, func(_, value []byte) bool {
		v, err := keys.ParseUnique(value)
		return err == nil && suits(v)
	})
	require.NoError(t, db.Delete(key, nil))
}

// TestRepair damages a stored queue, and repairs it. All readable tasks are there and workers can
// complete them, even if the repair could not restore all data, or if shards exchange messages that
// it has written. TestRebuild (internal/fsck) has each kind of damage.
func TestRepair(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	disk, tasks := queuetest.VariedDisk(t)
	for _, c := range []struct {
		name   string
		damage func(t *testing.T, db *pebble.DB) (gone map[codeq.ID]bool)
	}{
		{"parents", func(t *testing.T, db *pebble.DB) map[codeq.ID]bool {
			require.NoError(t, db.DeleteRange([]byte{keys.Pending}, []byte{keys.Pending + 1}, nil))
			return nil
		}},
		{"idempotency key of a time", func(t *testing.T, db *pebble.DB) map[codeq.ID]bool {
			removeKey(t, db, func(v keys.UniqueValue) bool { return v.Until > 0 })
			return nil
		}},
		{"idempotency key of a task", func(t *testing.T, db *pebble.DB) map[codeq.ID]bool {
			removeKey(t, db, func(v keys.UniqueValue) bool { return v.Until == 0 })
			return nil
		}},
		{"last message, which is under way", func(t *testing.T, db *pebble.DB) map[codeq.ID]bool {
			key, value := queuetest.First(t, db, keys.Sent, nil)
			to, err := keys.ParseNumbered(key)
			require.NoError(t, err)
			n, err := keys.ParseNumber(value)
			require.NoError(t, err)
			m := keys.Message{Kind: keys.MsgEnded, Parent: keys.ID{1}, Child: keys.ID{2}} // already received
			require.NoError(t, db.Set(keys.AppendOutbound(nil, to, n), m.Append(nil), nil))
			require.NoError(t, db.Delete(key, nil))
			return nil
		}},
		{"lease record", func(t *testing.T, db *pebble.DB) map[codeq.ID]bool {
			key, value := queuetest.First(t, db, keys.Lease, nil)
			seq, err := keys.ParseLease(key)
			require.NoError(t, err)
			_, entries, err := keys.ParseLeases(seq, value)
			require.NoError(t, err)
			gone := make(map[codeq.ID]bool) // tasks that the damage changes
			for _, e := range entries {
				gone[e.ID] = true
			}
			require.NoError(t, db.Delete(key, nil))
			return gone
		}},
		{"record", func(t *testing.T, db *pebble.DB) map[codeq.ID]bool {
			key, _ := queuetest.First(t, db, keys.Done, nil)
			require.NoError(t, db.Set(key, []byte("nonsense"), nil))
			_, _, id, err := keys.ParseGrouped(key)
			require.NoError(t, err)
			return map[codeq.ID]bool{id: true}
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			disk := disk.Clone()
			var gone map[codeq.ID]bool
			simtest.AlterStore(t, disk, func(db *pebble.DB) { gone = c.damage(t, db) })
			before := simtest.StoreContents(t, disk, "queue")
			r := queuetest.VerifyImage(t, disk, false)
			require.False(t, r.OK())
			for _, p := range r.Problems {
				require.Zero(t, p.Shard)
				require.True(t, p.Repairable)
				require.False(t, p.Repaired)
			}
			require.Equal(t, before, simtest.StoreContents(t, disk, "queue"))
			r = queuetest.VerifyImage(t, disk, true)
			require.True(t, r.OK(), "%v", r.Problems)
			require.Equal(t, "shard-000.damaged-1", r.Shards[0].Kept)
			require.Empty(t, r.Shards[1].Kept)
			for name, b := range before { // the damaged store is kept
				if rest, ok := strings.CutPrefix(name, "queue/shard-000/"); ok {
					require.Equal(t, b, simtest.StoreContents(t, disk, "queue/shard-000.damaged-1")["queue/shard-000.damaged-1/"+rest])
				}
			}
			require.True(t, queuetest.VerifyImage(t, disk, false).OK())
			got := queuetest.TasksOf(t, disk)
			for id, want := range tasks {
				if gone[id] {
					delete(got, id)
					continue
				}
				require.Equal(t, want, got[id])
				delete(got, id)
			}
			require.Empty(t, got)
			finishAll(t, disk)
		})
	}
}

// finishAll works on a queue until all its tasks have ended.
func finishAll(t *testing.T, disk *crashfs.Disk) {
	t.Helper()
	ctx := context.Background()
	opts := queuetest.VariedOptions(disk)
	// Leases have expired, and scheduled tasks are due.
	inspect.Options(opts).Wall = func() time.Time { return queuetest.VariedNow.Add(48 * time.Hour) }
	q, err := codeq.Open("queue", opts)
	require.NoError(t, err)
	if err := q.DeleteSchedule(ctx, "hourly"); !errors.Is(err, codeq.ErrNotFound) { // it may be lost
		require.NoError(t, err)
	}
	queues := []string{"a", "b", "limited", "children", "follow-ups", "ticks"}
	require.Eventually(t, func() bool {
		leases, err := q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: queues, Max: 1000, NoWait: true})
		if !errors.Is(err, codeq.ErrEmpty) {
			require.NoError(t, err)
		}
		for _, l := range leases {
			queuetest.Complete(t, q, l)
		}
		if len(leases) > 0 {
			return false
		}
		for _, d := range queuetest.MustStats(t, q) {
			if d.Ready+d.Scheduled+d.Leased > 0 {
				return false
			}
		}
		return true
	}, 20*time.Second, time.Millisecond)
	_, err = q.RedriveAllDead(ctx, codeq.DeadFilter{Queue: "a"})
	require.NoError(t, err)
	require.NoError(t, queuetest.CheckAll(q))
	require.NoError(t, q.Close())
}

// TestRepairAroundBlocks damages blocks of a table, and then also a bit of the log. A repair
// restores each task with a readable record.
func TestRepairAroundBlocks(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	disk, _ := queuetest.VariedDisk(t)
	opts := &pebble.Options{FS: disk, FormatMajorVersion: store.Format}
	for i := range opts.Levels {
		opts.Levels[i].BlockSize, opts.Levels[i].IndexBlockSize = 1<<10, 100
	}
	db, err := failstop.New(slog.New(slog.DiscardHandler), "store").Open("queue/shard-000", opts)
	require.NoError(t, err)
	require.NoError(t, db.Compact(context.Background(), []byte{0}, []byte{0xff}, false))
	require.NoError(t, errors.Join(db.Close(), integrity.Seal(disk, "queue/shard-000")))
	q, err := codeq.Open("queue", queuetest.VariedOptions(disk))
	require.NoError(t, err)
	for range 40 {
		queuetest.Produce(t, q, codeq.Task{Queue: "of the log"})
	}
	require.NoError(t, q.Close())
	tasks := queuetest.TasksOf(t, disk.Clone())
	records := simtest.StoreRecords(t, disk, "queue/shard-000")
	var table, log, logged string
	var blocks, index []int64
	for name, b := range simtest.StoreContents(t, disk, "queue/shard-000") {
		switch {
		case path.Ext(name) == ".sst":
			r, err := store.OpenTable(disk, name)
			require.NoError(t, err)
			if data, of := testkit.Blocks(t, r); len(data) > len(blocks) {
				table, blocks, index = name, data, of
			}
		case path.Ext(name) == ".log" && bytes.Contains([]byte(b), []byte("of the log")):
			log, logged = name, b
		}
	}
	require.Greater(t, len(blocks), 40)
	require.Greater(t, len(index), 3)
	for _, c := range []struct {
		data, index []int
		log         bool
	}{
		{data: []int{7}},
		{data: []int{1, 3}},
		{data: []int{1, 31}}, // the second has the end of one range and the start of the next
		{data: []int{5, 12, 20}},
		{data: []int{9, 10, 11}},
		{data: []int{9}, log: true},
		{index: []int{2}},
		{index: []int{2}, data: []int{1}},
	} {
		t.Run(fmt.Sprintf("%+v", c), func(t *testing.T) {
			disk := disk.Clone()
			for _, i := range c.data {
				testkit.Overwrite(t, disk, table, blocks[i]+20, "damage")
			}
			for _, i := range c.index {
				testkit.Overwrite(t, disk, table, index[i]+20, "damage")
			}
			lost := simtest.UnreadableRecords(t, disk, "queue/shard-000", records)
			require.NotEmpty(t, lost)
			require.Less(t, len(lost), len(records)/2)
			if c.log {
				testkit.Overwrite(t, disk, log, 100, string([]byte{logged[100] ^ 4}))
			}
			r := queuetest.VerifyImage(t, disk, true)
			require.True(t, r.OK(), "%v", r.Problems)
			got := queuetest.TasksOf(t, disk)
			for id := range tasks {
				require.Equal(t, !lost[id], got[id] != nil, id)
			}
		})
	}
}

// TestRepairInterrupted cuts the power at file operations of a repair; with -corrupt.for at each of
// them. The queue is unchanged, or it is repaired, with ties that Open derives.
func TestRepairInterrupted(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		disk, tasks := queuetest.VariedDisk(t)
		simtest.AlterStore(t, disk, func(db *pebble.DB) {
			for _, prefix := range []byte{keys.Counters, keys.Dependent} {
				key, _ := queuetest.First(t, db, prefix, nil)
				require.NoError(t, db.Delete(key, nil))
			}
		})
		rng := rand.New(rand.NewPCG(1, 1))
		interrupted, finished := 0, 0
		step := 12
		if *corruptFor > 0 {
			step = 1
		}
		for stop := 1; ; stop += step {
			disk := disk.Clone()
			n := 0
			var image *crashfs.Disk
			_, err := codeq.Verify("queue", queuetest.OnDisk(&testkit.HookFS{FS: disk, Before: func(string, string) error {
				if n++; n >= stop && image == nil {
					image = disk.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: rng.IntN(101), RNG: rng})
				}
				return nil
			}}, &codeq.VerifyOptions{Repair: true}))
			require.NoError(t, err)
			if image == nil {
				break
			}
			interrupted++
			if q, err := codeq.Open("queue", queuetest.VariedOptions(image)); err == nil {
				sound := queuetest.CheckAll(q) == nil
				require.NoError(t, q.Close())
				if sound { // and Open has made the shards agree
					finished++
					r := queuetest.VerifyImage(t, image, false)
					require.True(t, r.OK(), "stopped at %d: %v", stop, r.Problems)
				}
			}
			r := queuetest.VerifyImage(t, image, true)
			require.True(t, r.OK(), "stopped at %d: %v", stop, r.Problems)
			require.Equal(t, tasks, queuetest.TasksOf(t, image))
		}
		require.Greater(t, interrupted, 3)
		require.Positive(t, finished)
		require.Less(t, finished, interrupted)
	})
}

// TestRepairOfMissingFiles removes or truncates files of each kind of a shard, with -long every
// file, after a close and after a kill. Open fails with ErrCorrupt, or the queue has all its tasks.
// Repair succeeds if Verify reports that it can, and the repaired queue does not contradict itself.
func TestRepairOfMissingFiles(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		disk := crashfs.New()
		q := queuetest.VariedQueue(t, disk)
		killed := disk.Clone()
		tasks, err := queuetest.List(q)
		require.NoError(t, errors.Join(err, q.Close()))
		for how, image := range map[string]*crashfs.Disk{"closed": disk, "killed": killed} {
			tried, repaired := make(map[string]int), make(map[string]int)
			names, err := image.List("queue/shard-000")
			require.NoError(t, err)
			for _, name := range names {
				file := path.Join("queue/shard-000", name)
				kind := kindOf(file)
				if tried[kind] >= testkit.Sized(2, math.MaxInt) {
					continue
				}
				info, err := image.Stat(file)
				require.NoError(t, err)
				for _, left := range []int64{-1, 0, info.Size() / 2} {
					what := fmt.Sprintf("%s, %s, %d bytes left", how, name, left)
					if left > 0 && left >= info.Size() || left == 0 && info.Size() == 0 {
						continue
					}
					disk := image.Clone()
					cut(t, disk, file, left)
					tried[kind]++
					opened := disk.Clone()
					if q, err := codeq.Open("queue", queuetest.VariedOptions(opened)); err != nil {
						require.ErrorIs(t, err, codeq.ErrCorrupt, what)
					} else {
						_, _ = queuetest.ReadAll(q)
						_ = q.Close()
					}
					r := queuetest.VerifyImage(t, disk, false)
					repairable := !slices.ContainsFunc(r.Problems, func(p codeq.Problem) bool { return !p.Repairable })
					if r.OK() { // the end of a log, or a file that belongs to no store
						continue
					}
					require.True(t, repairable, "%s: %v", what, r.Problems)
					r = queuetest.VerifyImage(t, disk, true)
					if !r.OK() { // see TestRepairOfFiles
						require.Contains(t, fmt.Sprint(r.Problems), "has scope", what)
						continue
					}
					repaired[kind]++
					got := queuetest.TasksOf(t, disk)
					if kind != ".sst" && kind != ".log" {
						for id := range tasks {
							require.NotNil(t, got[id], "%s: %s is lost", what, id)
						}
					}
					finishAll(t, disk)
				}
			}
			t.Logf("%s: tried %v, repaired %v", how, tried, repaired)
			for _, kind := range []string{".sst", "MANIFEST-", "OPTIONS-"} {
				require.Positive(t, tried[kind], kind)
			}
		}
	})
}

// TestRepairOfLostKeys: the holders of the idempotency keys are lost. After a repair, tasks that
// have not ended hold their keys again, for the same time as before.
func TestRepairOfLostKeys(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk, ctx := crashfs.New(), t.Context()
		open := func() *codeq.Queue {
			q, err := codeq.Open("queue", queuetest.OnDisk(disk, &codeq.Options{Shards: 1}))
			require.NoError(t, err)
			return q
		}
		q := open()
		hour := codeq.Task{Queue: "a", Unique: codeq.Unique{Key: "hour", For: time.Hour}}
		end := codeq.Task{Queue: "b", Unique: codeq.Unique{Key: "end"}}
		ids := queuetest.Produce(t, q, hour, end)
		require.NoError(t, q.Close())
		simtest.AlterStore(t, disk, func(db *pebble.DB) {
			for _, prefix := range []byte{keys.Unique, keys.Freed} {
				require.NoError(t, db.DeleteRange([]byte{prefix}, []byte{prefix + 1}, nil))
			}
		})
		names, err := disk.List("queue/shard-000")
		require.NoError(t, err)
		for _, name := range names {
			if strings.HasPrefix(name, "MANIFEST-") { // so that anything may be missing
				cut(t, disk, path.Join("queue/shard-000", name), -1)
			}
		}
		require.True(t, queuetest.VerifyImage(t, disk, true).OK())

		q = open()
		taken := func(task codeq.Task, by codeq.ID) {
			t.Helper()
			_, err := q.Produce(ctx, task)
			require.Equal(t, by, queuetest.Duplicates(t, err)[0])
		}
		taken(hour, ids[0])
		taken(end, ids[1])
		queuetest.Complete(t, q, queuetest.ClaimNow(t, q, "a"))
		queuetest.Complete(t, q, queuetest.ClaimNow(t, q, "b"))
		taken(hour, ids[0])
		queuetest.Produce(t, q, end)
		time.Sleep(time.Hour + time.Second)
		queuetest.Produce(t, q, hour)
		require.NoError(t, queuetest.CheckAll(q))
		require.NoError(t, q.Close())
	})
}

// cut truncates a file to left bytes; -1 removes it.
func cut(t *testing.T, disk *crashfs.Disk, name string, left int64) {
	t.Helper()
	f, err := disk.Open(name)
	require.NoError(t, err)
	b, err := io.ReadAll(f)
	require.NoError(t, errors.Join(err, f.Close()))
	require.NoError(t, disk.Remove(name))
	if left < 0 {
		return
	}
	f, err = disk.Create(name, vfs.WriteCategoryUnspecified)
	require.NoError(t, err)
	_, err = f.Write(b[:left])
	require.NoError(t, errors.Join(err, f.Sync(), f.Close()))
}

// TestRepairOfFiles flips bits in the files of a queue and repairs it: the queue then has its
// earlier contents.
func TestRepairOfFiles(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		disk, tasks := queuetest.VariedDisk(t)
		c := newCorruptible(t, disk)
		rng := testkit.Seeded(t)
		lost, repaired := 0, 0
		for begun := time.Now(); repaired < 8 || time.Since(begun) < *corruptFor; {
			name := c.Files[rng.IntN(len(c.Files))]
			if path.Base(name) == manifest.Name {
				continue
			}
			bit := rng.IntN(8 * len(c.Content[name]))
			what := fmt.Sprintf("%s, bit %d", name, bit)
			disk := c.Flip(t, name, bit)
			r := queuetest.VerifyImage(t, disk, false)
			if r.OK() { // the bit is in a table outside of the store, or in padding
				continue
			}
			for _, p := range r.Problems {
				require.True(t, strings.HasPrefix(name, path.Join("queue", p.File)), "%s: %v", what, p)
				require.True(t, p.Repairable, "%s: %v", what, p)
			}
			dir := path.Dir(name)
			mayLose := make(map[keys.ID]bool)
			if path.Ext(name) == ".sst" {
				mayLose = simtest.UnreadableRecords(t, disk, dir, simtest.StoreRecords(t, c.Disk, dir))
			}
			r = queuetest.VerifyImage(t, disk, true)
			if !r.OK() { // a lane has lost its name: its tasks get one that is not in their scopes
				require.Contains(t, fmt.Sprint(r.Problems), "has scope", what)
				continue
			}
			repaired++
			got := queuetest.TasksOf(t, disk)
			if path.Ext(name) != ".sst" {
				require.Equal(t, tasks, got, what)
			} else {
				for id, info := range got {
					require.Contains(t, tasks, id)
					if strings.HasPrefix(info.Tenant, "recovered-") || strings.HasPrefix(info.Queue, "recovered-") {
						continue
					}
					if was := tasks[id].State; info.State == codeq.Ready && (was == codeq.Leased || was == codeq.Blocked) {
						continue // the lease is lost, or the task that it waited for
					}
					require.Equal(t, tasks[id], info, what)
				}
			}
			for id := range tasks {
				require.True(t, got[id] != nil || mayLose[id], "%s: %s is lost", what, id)
			}
			lost += len(tasks) - len(got)
		}
		t.Logf("%d repaired, which lost %d tasks", repaired, lost)
	})
}
