package codeq_test

import (
	"archive/tar"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/failstop"
	"codeq/internal/inspect"
	"codeq/internal/integrity"
	"codeq/internal/keys"
	"codeq/internal/manifest"
	"codeq/internal/platform"
	"codeq/internal/simtest"
	"codeq/internal/store"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

var writeGolden = flag.Bool("golden", false, "TestFormats writes the golden directories of the current format")

// goldenTasks is the file in a golden archive that has each task as its queue showed it.
const goldenTasks = "tasks.json"

// goldenOptions are the options of a golden queue. Its clock stands still.
func goldenOptions(fs vfs.FS) *codeq.Options {
	opts := queuetest.OnDisk(fs, &codeq.Options{Shards: 3, MemTableBytes: 256 << 10, LeaseFor: 24 * time.Hour})
	inspect.Options(opts).Wall = func() time.Time { return queuetest.VariedNow }
	return opts
}

var goldenSchedule = codeq.Schedule{Name: "hourly", Every: time.Hour, Task: codeq.Task{Queue: "ticks", Payload: []byte("tick")}}

// goldenQueue fills a queue with every kind of entry that a store may have. Half of the entries are
// in tables. A message stays under way until take is called, because the last shard is held until
// then.
func goldenQueue(t *testing.T, fs vfs.FS) (q *codeq.Queue, take func()) {
	t.Helper()
	ctx := context.Background()
	opts := goldenOptions(fs)
	now := queuetest.VariedNow
	q, err := codeq.Open("queue", opts)
	require.NoError(t, err)
	require.NoError(t, q.Configure(ctx, "a", func(s *codeq.Settings) { s.Retention = time.Hour }))
	require.NoError(t, q.Configure(ctx, "limited", func(s *codeq.Settings) { s.ConcurrencyPerKey = 1 }))
	require.NoError(t, q.Configure(ctx, "paused", func(s *codeq.Settings) { s.Paused = true }))
	require.NoError(t, q.Configure(ctx, "holding", func(s *codeq.Settings) { s.HoldGroups = true }))
	require.NoError(t, q.SetSchedule(ctx, goldenSchedule))
	for round := range 2 {
		for shard := range opts.Shards {
			name := fmt.Sprint(round, shard)
			produce := func(task codeq.Task) codeq.ID {
				task.Payload = append([]byte(task.Queue), name...)
				task.Headers = map[string]string{"round": fmt.Sprint(round)}
				id, err := queuetest.StartingAt(q, shard).Produce(ctx, task)
				require.NoError(t, err)
				return id
			}
			claim := func(queue string) *codeq.Lease {
				l, err := queuetest.StartingAt(q, shard).Claim(ctx, codeq.ClaimRequest{Queues: []string{queue}, NoWait: true})
				require.NoError(t, err)
				return l
			}
			for i := range 3 {
				produce(codeq.Task{Queue: "a", Tenant: []string{"", "x"}[i%2], Priority: i})
				produce(codeq.Task{Queue: "grouped", Group: name})
				produce(codeq.Task{Queue: "limited", LimitKey: name})
				produce(codeq.Task{Queue: "local"})
			}
			produce(codeq.Task{Queue: "a", RunAt: now.Add(time.Hour)})
			produce(codeq.Task{Queue: "unique", Unique: codeq.Unique{Key: name}})
			produce(codeq.Task{Queue: "unique", Unique: codeq.Unique{Key: "for " + name, For: time.Hour}})
			produce(codeq.Task{Queue: "debounced", Unique: codeq.Unique{Key: name, Replace: true}, RunAt: now.Add(time.Minute)})
			kept := codeq.Task{Queue: "kept", Retention: codeq.Forever}
			produce(kept)
			require.NoError(t, q.Complete(ctx, claim("kept").Receipt, []byte("result "+name), codeq.Task{Queue: "follow-ups"}))
			require.NoError(t, q.Cancel(ctx, produce(kept)))
			for range 3 {
				produce(codeq.Task{Queue: "tried", MaxAttempts: 3})
			}
			require.NoError(t, q.Retry(ctx, claim("tried").Receipt, codeq.RetryOptions{After: time.Hour, Err: errors.New("again")}))
			require.NoError(t, q.DeadLetter(ctx, claim("tried").Receipt, errors.New("given up")))
			require.NoError(t, q.Release(ctx, claim("tried").Receipt, 0))
			claim("tried") // and is leased
			parent := produce(codeq.Task{Queue: "parents"})
			dead := produce(codeq.Task{Queue: "dying"})
			require.NoError(t, q.DeadLetter(ctx, claim("dying").Receipt, errors.New("given up")))
			other, err := queuetest.StartingAt(q, (shard+1)%3).Produce(ctx, codeq.Task{Queue: "parents"})
			require.NoError(t, err)
			produce(codeq.Task{Queue: "children", After: []codeq.ID{parent, other}})
			produce(codeq.Task{Queue: "children", After: []codeq.ID{dead}, OnDead: codeq.HoldOnDead})
			pinned := produce(codeq.Task{Queue: "pinned", Retention: time.Hour})
			produce(codeq.Task{Queue: "children", After: []codeq.ID{pinned, parent}})
			require.NoError(t, q.Complete(ctx, claim("pinned").Receipt, []byte("pinned "+name)))
			for range 3 {
				produce(codeq.Task{Queue: "holding", Group: name})
			}
			queuetest.Quiesce(t, q) // tasks of a group may be on their way to the shard of the group
			require.NoError(t, q.DeadLetter(ctx, claim("holding").Receipt, errors.New("given up")))
			claim("grouped")
			for range 2 {
				_, _ = queuetest.StartingAt(q, shard).ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{"limited"}, Max: 4, NoWait: true})
			}
		}
		queuetest.Quiesce(t, q)
		if round == 0 {
			queuetest.Flush(t, q)
		}
	}
	parent, err := queuetest.StartingAt(q, 2).Produce(ctx, codeq.Task{Queue: "parents"})
	require.NoError(t, err)
	goOn := queuetest.Hold(q, 2)
	_, err = queuetest.StartingAt(q, 0).Produce(ctx, codeq.Task{Queue: "children", After: []codeq.ID{parent}})
	require.NoError(t, err)
	return q, func() {
		goOn()
		queuetest.Quiesce(t, q)
	}
}

// golden returns the path of the archive of a closed or of a killed queue.
func golden(how string) string {
	return filepath.Join("testdata", fmt.Sprintf("format-%d-%s.tar.gz", manifest.OldestFormat, how))
}

// makeGolden writes the archives of the current format.
func makeGolden(t *testing.T) {
	t.Helper()
	disk := crashfs.New()
	q, take := goldenQueue(t, disk)
	tasks, err := queuetest.List(q)
	require.NoError(t, err)
	archive(t, golden("killed"), disk.Clone(), tasks)
	take()
	tasks, err = queuetest.List(q)
	require.NoError(t, errors.Join(err, q.Close()))
	archive(t, golden("closed"), disk, tasks)
}

func archive(t *testing.T, name string, disk *crashfs.Disk, tasks map[codeq.ID]*codeq.TaskInfo) {
	t.Helper()
	files := simtest.StoreContents(t, disk, "queue")
	b, err := json.MarshalIndent(tasks, "", " ")
	require.NoError(t, err)
	files[goldenTasks] = string(b)
	f, err := os.Create(name)
	require.NoError(t, err)
	zipped, err := gzip.NewWriterLevel(f, gzip.BestCompression)
	require.NoError(t, err)
	w := tar.NewWriter(zipped)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		require.NoError(t, w.WriteHeader(&tar.Header{Name: name, Size: int64(len(files[name])), Mode: 0o644}))
		_, err := io.WriteString(w, files[name])
		require.NoError(t, err)
	}
	require.NoError(t, errors.Join(w.Close(), zipped.Close(), f.Close()))
}

// readGolden calls do for each file of the queue in an archive, and returns its tasks.
func readGolden(t *testing.T, archive string, do func(name string, content []byte)) (tasks map[codeq.ID]*codeq.TaskInfo) {
	t.Helper()
	f, err := os.Open(archive)
	require.NoError(t, err)
	zipped, err := gzip.NewReader(f)
	require.NoError(t, err)
	for r := tar.NewReader(zipped); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		b, err := io.ReadAll(r)
		require.NoError(t, err)
		if h.Name == goldenTasks {
			require.NoError(t, json.Unmarshal(b, &tasks))
		} else {
			do(h.Name, b)
		}
	}
	require.NoError(t, f.Close())
	return tasks
}

// unpack returns a disk with the queue of an archive, and its tasks.
func unpack(t *testing.T, archive string) (disk *crashfs.Disk, tasks map[codeq.ID]*codeq.TaskInfo) {
	t.Helper()
	disk = crashfs.New()
	tasks = readGolden(t, archive, func(name string, content []byte) {
		require.NoError(t, disk.MkdirAll(path.Dir(name), 0o755))
		to, err := disk.Create(name, vfs.WriteCategoryUnspecified)
		require.NoError(t, err)
		_, err = to.Write(content)
		require.NoError(t, errors.Join(err, to.Sync(), to.Close()))
	})
	for _, dir := range []string{"", "queue", "queue/shard-000", "queue/shard-001", "queue/shard-002"} {
		require.NoError(t, platform.SyncDirectory(disk, dir))
	}
	return disk, tasks
}

// asInJSON changes tasks to the form that an archive gives back: times in UTC, and nil for empty
// bytes.
func asInJSON(tasks map[codeq.ID]*codeq.TaskInfo) map[codeq.ID]*codeq.TaskInfo {
	for _, info := range tasks {
		info.At = info.At.UTC()
		times := []*time.Time{&info.RunAt, &info.Until, &info.FirstReady, &info.Progress.At}
		for i := range info.History {
			times = append(times, &info.History[i].Start, &info.History[i].End)
		}
		for _, at := range times {
			if !at.IsZero() {
				*at = at.UTC()
			}
		}
		for _, b := range []*[]byte{&info.Payload, &info.Result} {
			if len(*b) == 0 {
				*b = nil
			}
		}
	}
	return tasks
}

// TestFormats opens golden directories: each task is in its former place, and all of them can be
// finished.
func TestFormats(t *testing.T) {
	t.Parallel()
	if *writeGolden {
		makeGolden(t)
	}
	for _, how := range []string{"closed", "killed"} {
		t.Run(how, func(t *testing.T) {
			disk, want := unpack(t, golden(how))
			if how == "killed" {
				requireOutbound(t, disk)
			}
			simtest.RequirePebbleFormat(t, disk, manifest.PebbleFormat(manifest.OldestFormat))
			before := simtest.StoreContents(t, disk, "queue")
			r := queuetest.VerifyImage(t, disk, false)
			require.True(t, r.OK(), "%v", r.Problems)
			require.Equal(t, before, simtest.StoreContents(t, disk, "queue"))

			q, err := codeq.Open("queue", goldenOptions(disk))
			require.NoError(t, err)
			got, err := queuetest.List(q)
			require.NoError(t, errors.Join(err, queuetest.CheckAll(q)))
			require.Equal(t, asInJSON(want), asInJSON(got))
			for state := codeq.Ready; state <= codeq.Canceled; state++ {
				require.True(t, slices.ContainsFunc(slices.Collect(maps.Values(want)), func(i *codeq.TaskInfo) bool { return i.State == state }), state)
			}
			requireGoldenSettings(t, q)
			queuetest.Quiesce(t, q)
			require.NoError(t, errors.Join(queuetest.CheckAll(q), queuetest.CheckMemory(q), q.Close()))

			m, err := manifest.Read(disk, "queue")
			require.NoError(t, err)
			require.Equal(t, manifest.Format, m.Format)
			simtest.RequirePebbleFormat(t, disk, manifest.PebbleFormat(manifest.Format))
			r = queuetest.VerifyImage(t, disk, false)
			require.True(t, r.OK(), "%v", r.Problems)
			finishGolden(t, disk)
		})
	}
}

// requireOutbound requires that a message is under way from the first shard.
func requireOutbound(t *testing.T, disk vfs.FS) {
	t.Helper()
	db, err := store.OpenForReading(disk, manifest.ShardDir(disk, "queue", 0))
	require.NoError(t, err)
	queuetest.First(t, db, keys.Outbound, nil)
	require.NoError(t, db.Close())
}

func requireGoldenSettings(t *testing.T, q *codeq.Queue) {
	t.Helper()
	ctx := context.Background()
	for queue, want := range map[string]codeq.Settings{
		"a": {Policy: codeq.Policy{Retention: time.Hour}}, "limited": {ConcurrencyPerKey: 1}, "paused": {Paused: true},
	} {
		got, err := q.Settings(queue)
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	schedules, err := q.Schedules(ctx)
	require.NoError(t, err)
	require.Len(t, schedules, 1)
	require.Equal(t, goldenSchedule.Name, schedules[0].Name)
	require.Equal(t, goldenSchedule.Task.Payload, schedules[0].Task.Payload)
	_, err = q.Produce(ctx, codeq.Task{Queue: "unique", Unique: codeq.Unique{Key: "0 0"}})
	require.ErrorIs(t, err, codeq.ErrDuplicate)
}

// finishGolden completes all tasks of a golden queue, a day later.
func finishGolden(t *testing.T, disk *crashfs.Disk) {
	t.Helper()
	ctx := context.Background()
	opts := goldenOptions(disk)
	inspect.Options(opts).Wall = func() time.Time { return queuetest.VariedNow.Add(48 * time.Hour) }
	q, err := codeq.Open("queue", opts)
	require.NoError(t, err)
	require.NoError(t, q.DeleteSchedule(ctx, goldenSchedule.Name))
	for redriven := false; ; redriven = true {
		queues := slices.Sorted(maps.Keys(queuetest.MustStats(t, q)))
		require.Eventually(t, func() bool {
			leases, err := q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: queues, Max: 1000, NoWait: true})
			for _, l := range leases {
				require.NoError(t, q.Complete(ctx, l.Receipt, nil))
			}
			if err == nil {
				return false
			}
			require.ErrorIs(t, err, codeq.ErrEmpty)
			waiting := 0
			for _, c := range queuetest.MustStats(t, q) {
				waiting += int(c.Ready + c.Scheduled + c.Leased)
			}
			return waiting == 0
		}, 20*time.Second, time.Millisecond)
		queuetest.Quiesce(t, q)
		if redriven {
			break
		}
		for _, queue := range queues {
			_, err := q.RedriveAllDead(ctx, codeq.DeadFilter{Queue: queue})
			require.NoError(t, err)
		}
	}
	for queue, c := range queuetest.MustStats(t, q) {
		require.Zero(t, c.Blocked+c.Dead, queue)
	}
	require.NoError(t, errors.Join(queuetest.CheckAll(q), queuetest.CheckMemory(q), q.Close()))
}

// TestRaiseInterrupted cuts the power at changes of files while a directory of an older format is
// raised; with -corrupt.for, at each change. The next Open finishes the work, and no task is lost.
func TestRaiseInterrupted(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		rng := testkit.Seeded(t)
		for _, how := range []string{"closed", "killed"} {
			golden, want := unpack(t, golden(how))
			want = asInJSON(want)
			formats := make(map[int]int)
			step := func(stop int) int { return 1 + stop/3 } // the manifest comes first
			if testkit.Sized(0, 1) > 0 {
				step = func(int) int { return 1 }
			}
			for stop := 1; ; stop += step(stop) {
				disk := golden.Clone()
				n := 0
				var image *crashfs.Disk
				var mu sync.Mutex // shards are opened at the same time
				q, err := codeq.Open("queue", goldenOptions(&testkit.HookFS{FS: disk, Before: func(string, string) error {
					mu.Lock()
					defer mu.Unlock()
					if n++; n >= stop && image == nil {
						image = disk.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 100 * rng.IntN(2), RNG: rng})
					}
					return nil
				}}))
				require.NoError(t, err)
				mu.Lock()
				last := image == nil
				mu.Unlock()
				require.NoError(t, q.Close())
				if last {
					break
				}
				m, err := manifest.Read(image, "queue")
				require.NoError(t, err)
				formats[m.Format]++
				r := queuetest.VerifyImage(t, image, false)
				require.True(t, r.OK(), "stopped at %d: %v", stop, r.Problems)
				q, err = codeq.Open("queue", goldenOptions(image))
				require.NoError(t, err)
				got, err := queuetest.List(q)
				require.NoError(t, errors.Join(err, queuetest.CheckAll(q), q.Close()))
				require.Equal(t, want, asInJSON(got))
				r = queuetest.VerifyImage(t, image, false)
				require.True(t, r.OK(), "%v", r.Problems)
			}
			require.Len(t, formats, 1+manifest.Format-manifest.OldestFormat)
		}
	})
}

// TestRaiseByRepair: a repair puts the current format into the manifest, and then writes in that
// format.
func TestRaiseByRepair(t *testing.T) {
	disk, want := unpack(t, golden("closed"))
	simtest.AlterStore(t, disk, func(db *pebble.DB) {
		key, _ := queuetest.First(t, db, keys.Counters, nil)
		require.NoError(t, db.Delete(key, nil))
	})
	r := queuetest.VerifyImage(t, disk, true)
	require.True(t, r.OK(), "%v", r.Problems)
	m, err := manifest.Read(disk, "queue")
	require.NoError(t, err)
	require.Equal(t, manifest.Format, m.Format)
	q, err := codeq.Open("queue", goldenOptions(disk))
	require.NoError(t, err)
	got, err := queuetest.List(q)
	require.NoError(t, errors.Join(err, queuetest.CheckAll(q), q.Close()))
	require.Equal(t, asInJSON(want), asInJSON(got))
}

// ofOldFormat changes the directory of a closed node to an older format.
func ofOldFormat(t *testing.T, disk vfs.FS, format int) {
	t.Helper()
	m, err := manifest.Read(disk, "queue")
	require.NoError(t, err)
	for i := range m.Shards {
		dir := manifest.ShardDir(disk, "queue", i)
		db, err := failstop.New(slog.New(slog.DiscardHandler), "store").Open(dir, &pebble.Options{FS: disk, FormatMajorVersion: store.Format})
		require.NoError(t, err)
		require.NoError(t, db.Set([]byte{keys.Meta}, []byte(manifest.ReplicaIdentity(format, i, m.Shards)), nil))
		require.NoError(t, errors.Join(db.Flush(), db.Close(), integrity.Seal(disk, dir)))
	}
	m.Format = format
	require.NoError(t, manifest.New(disk, "queue", *m).Write())
}

// TestRaiseOfNode: a node of a cluster of an older format is raised, and its leaders raise the
// shards.
func TestRaiseOfNode(t *testing.T) {
	t.Parallel()
	ctx := context.Background()
	disk, votes := crashfs.New(), simtest.NewVotes()
	q, err := queuetest.OneNode(disk, votes)
	require.NoError(t, err)
	id, err := q.Produce(ctx, codeq.Task{Queue: "a"})
	require.NoError(t, errors.Join(err, q.Close()))
	unknown := disk.Clone()
	ofOldFormat(t, unknown, manifest.OldestOfNodes-1)
	_, err = queuetest.OneNode(unknown, votes)
	require.ErrorIs(t, err, codeq.ErrFormat)
	require.ErrorContains(t, err, "6, this version knows 7 to")
	ofOldFormat(t, disk, manifest.OldestOfNodes)
	r := queuetest.VerifyImage(t, disk, false)
	require.True(t, r.OK(), "%v", r.Problems)

	q, err = queuetest.OneNode(disk, votes)
	require.NoError(t, err)
	info, err := q.Get(ctx, id)
	require.NoError(t, err)
	require.Equal(t, codeq.Ready, info.State)
	for i := range inspect.Of(q).Shards() {
		require.Eventually(t, func() bool {
			st, err := q.ClusterStatus(ctx)
			return err == nil && st.Shards[i].Format == manifest.Format
		}, 20*time.Second, time.Millisecond)
		require.Eventually(t, func() bool { // it applies the raise after it is known
			got, err := store.Lookup(queuetest.StoreOf(q, i).DB(), []byte{keys.Meta})
			return err == nil && string(got) == manifest.ReplicaIdentity(manifest.Format, i, inspect.Of(q).Shards())
		}, 20*time.Second, time.Millisecond)
	}
	require.NoError(t, q.Close())
	m, err := manifest.Read(disk, "queue")
	require.NoError(t, err)
	require.Equal(t, manifest.Format, m.Format)
	r = queuetest.VerifyImage(t, disk, false)
	require.True(t, r.OK(), "%v", r.Problems)
}
