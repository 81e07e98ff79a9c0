package codeq

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
	"time"

	"github.com/cockroachdb/pebble/v2"
	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/failstop"
	"codeq/internal/hook"
	"codeq/internal/integrity"
	"codeq/internal/keys"
	"codeq/internal/manifest"
	"codeq/internal/schema"
	"codeq/internal/store"
	"codeq/internal/testkit"
)

var writeGolden = flag.Bool("golden", false, "TestFormats writes the golden directories of the current format")

// goldenTasks is the file of a golden archive with what its queue shows of each task.
const goldenTasks = "tasks.json"

// goldenOptions are those of a golden queue. Its clock stands still.
func goldenOptions(fs vfs.FS) *Options {
	opts := &Options{Shards: 3, fs: fs, MemTableBytes: 256 << 10, LeaseFor: 24 * time.Hour}
	hook.SetWall(opts, func() time.Time { return variedNow })
	return opts
}

var goldenSchedule = Schedule{Name: "hourly", Every: time.Hour, Task: Task{Queue: "ticks", Payload: []byte("tick")}}

// goldenQueue fills a queue with something of all that a store may have. Half of it is in
// tables. A message stays under way, while nobody takes it: take lets the last shard go on.
func goldenQueue(t *testing.T, fs vfs.FS) (q *Queue, take func()) {
	t.Helper()
	ctx := context.Background()
	opts := goldenOptions(fs)
	now := variedNow
	q, err := Open("queue", opts)
	require.NoError(t, err)
	require.NoError(t, q.Configure(ctx, "a", func(s *Settings) { s.Retention = time.Hour }))
	require.NoError(t, q.Configure(ctx, "limited", func(s *Settings) { s.ConcurrencyPerKey = 1 }))
	require.NoError(t, q.Configure(ctx, "paused", func(s *Settings) { s.Paused = true }))
	require.NoError(t, q.Configure(ctx, "holding", func(s *Settings) { s.HoldGroups = true }))
	require.NoError(t, q.SetSchedule(ctx, goldenSchedule))
	for round := range 2 {
		for shard := range opts.Shards {
			name := fmt.Sprint(round, shard)
			produce := func(task Task) ID {
				task.Payload = append([]byte(task.Queue), name...)
				task.Headers = map[string]string{"round": fmt.Sprint(round)}
				id, err := q.startingAt(shard).Produce(ctx, task)
				require.NoError(t, err)
				return id
			}
			claim := func(queue string) *Lease {
				l, err := q.startingAt(shard).Claim(ctx, ClaimRequest{Queues: []string{queue}, NoWait: true})
				require.NoError(t, err)
				return l
			}
			for i := range 3 {
				produce(Task{Queue: "a", Tenant: []string{"", "x"}[i%2], Priority: i})
				produce(Task{Queue: "grouped", Group: name})
				produce(Task{Queue: "limited", LimitKey: name})
				produce(Task{Queue: "local"})
			}
			produce(Task{Queue: "a", RunAt: now.Add(time.Hour)})
			produce(Task{Queue: "unique", Unique: Unique{Key: name}})
			produce(Task{Queue: "unique", Unique: Unique{Key: "for " + name, For: time.Hour}})
			produce(Task{Queue: "debounced", Unique: Unique{Key: name, Replace: true}, RunAt: now.Add(time.Minute)})
			kept := Task{Queue: "kept", Retention: Forever}
			produce(kept)
			require.NoError(t, q.Complete(ctx, claim("kept").Receipt, []byte("result "+name), Task{Queue: "follow-ups"}))
			require.NoError(t, q.Cancel(ctx, produce(kept)))
			for range 3 {
				produce(Task{Queue: "tried", MaxAttempts: 3})
			}
			require.NoError(t, q.Retry(ctx, claim("tried").Receipt, RetryOptions{After: time.Hour, Err: errors.New("again")}))
			require.NoError(t, q.DeadLetter(ctx, claim("tried").Receipt, errors.New("given up")))
			require.NoError(t, q.Release(ctx, claim("tried").Receipt, 0))
			claim("tried") // and is leased
			parent := produce(Task{Queue: "parents"})
			dead := produce(Task{Queue: "dying"})
			require.NoError(t, q.DeadLetter(ctx, claim("dying").Receipt, errors.New("given up")))
			other, err := q.startingAt((shard+1)%3).Produce(ctx, Task{Queue: "parents"})
			require.NoError(t, err)
			produce(Task{Queue: "children", After: []ID{parent, other}})
			produce(Task{Queue: "children", After: []ID{dead}, OnDead: HoldOnDead})
			pinned := produce(Task{Queue: "pinned", Retention: time.Hour})
			produce(Task{Queue: "children", After: []ID{pinned, parent}})
			require.NoError(t, q.Complete(ctx, claim("pinned").Receipt, []byte("pinned "+name)))
			for range 3 {
				produce(Task{Queue: "holding", Group: name})
			}
			require.NoError(t, q.DeadLetter(ctx, claim("holding").Receipt, errors.New("given up")))
			claim("grouped")
			for range 2 {
				_, _ = q.startingAt(shard).ClaimBatch(ctx, ClaimRequest{Queues: []string{"limited"}, Max: 4, NoWait: true})
			}
		}
		q.quiesce(t)
		if round == 0 {
			flush(t, q)
		}
	}
	parent, err := q.startingAt(2).Produce(ctx, Task{Queue: "parents"})
	require.NoError(t, err)
	goOn := hold(q, 2)
	_, err = q.startingAt(0).Produce(ctx, Task{Queue: "children", After: []ID{parent}})
	require.NoError(t, err)
	return q, func() {
		goOn()
		q.quiesce(t)
	}
}

// golden names the archive of a queue that was closed in order, or whose process was killed.
func golden(format int, how string) string {
	return filepath.Join("testdata", fmt.Sprintf("format-%d-%s.tar.gz", format, how))
}

// makeGolden writes the archives of the current format.
func makeGolden(t *testing.T) {
	t.Helper()
	disk := vfs.NewCrashableMem()
	q, take := goldenQueue(t, disk)
	tasks, err := q.list()
	require.NoError(t, err)
	archive(t, golden(manifest.Format, "killed"), cloneOf(disk), tasks)
	take()
	tasks, err = q.list()
	require.NoError(t, errors.Join(err, q.Close()))
	archive(t, golden(manifest.Format, "closed"), disk, tasks)
}

func archive(t *testing.T, name string, disk *vfs.MemFS, tasks map[ID]*TaskInfo) {
	t.Helper()
	files := filesBelow(t, disk, "queue")
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

// filesBelow is the content of all files below a directory, by name, but for the lock.
func filesBelow(t *testing.T, disk vfs.FS, dir string) map[string]string {
	t.Helper()
	names, err := disk.List(dir)
	require.NoError(t, err)
	files := make(map[string]string)
	for _, name := range names {
		name = path.Join(dir, name)
		info, err := disk.Stat(name)
		require.NoError(t, err)
		switch {
		case info.IsDir():
			maps.Copy(files, filesBelow(t, disk, name))
		case path.Base(name) != manifest.LockName:
			f, err := disk.Open(name)
			require.NoError(t, err)
			b, err := io.ReadAll(f)
			require.NoError(t, errors.Join(err, f.Close()))
			files[name] = string(b)
		}
	}
	return files
}

// unpack returns a disk with the queue of an archive, and its tasks.
func unpack(t *testing.T, name string) (disk *vfs.MemFS, tasks map[ID]*TaskInfo) {
	t.Helper()
	f, err := os.Open(name)
	require.NoError(t, err)
	zipped, err := gzip.NewReader(f)
	require.NoError(t, err)
	disk = vfs.NewCrashableMem()
	r := tar.NewReader(zipped)
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		require.NoError(t, err)
		b, err := io.ReadAll(r)
		require.NoError(t, err)
		if h.Name == goldenTasks {
			tasks = goldenInfos(t, b)
			continue
		}
		require.NoError(t, disk.MkdirAll(path.Dir(h.Name), 0o755))
		to, err := disk.Create(h.Name, vfs.WriteCategoryUnspecified)
		require.NoError(t, err)
		_, err = to.Write(b)
		require.NoError(t, errors.Join(err, to.Sync(), to.Close()))
	}
	require.NoError(t, f.Close())
	for _, dir := range []string{"", "queue", "queue/shard-000", "queue/shard-001", "queue/shard-002"} {
		require.NoError(t, manifest.SyncDirectory(disk, dir))
	}
	return disk, tasks
}

// asInJSON lets tasks be as they are when an archive is read: its times are in UTC, and it does not
// tell empty bytes from none.
func asInJSON(tasks map[ID]*TaskInfo) map[ID]*TaskInfo {
	for _, info := range tasks {
		info.At = info.At.UTC()
		if !info.RunAt.IsZero() {
			info.RunAt = info.RunAt.UTC()
		}
		for _, b := range []*[]byte{&info.Payload, &info.Result} {
			if len(*b) == 0 {
				*b = nil
			}
		}
	}
	return tasks
}

// TestFormats opens golden directories of all formats: each task is where it was, and all of them
// can be finished.
func TestFormats(t *testing.T) {
	t.Parallel()
	if *writeGolden {
		makeGolden(t)
	}
	for f := manifest.OldestFormat; f <= manifest.Format; f++ {
		for _, how := range []string{"closed", "killed"} {
			t.Run(fmt.Sprint(f, " ", how), func(t *testing.T) {
				disk, want := unpack(t, golden(f, how))
				if how == "killed" {
					requireOutbound(t, disk)
				}
				requirePebbleFormat(t, disk, manifest.PebbleFormat(f))
				before := filesBelow(t, disk, "queue")
				r := verifyImage(t, disk, false)
				require.True(t, r.OK(), "%v", r.Problems)
				require.Equal(t, before, filesBelow(t, disk, "queue"))

				q, err := Open("queue", goldenOptions(disk))
				require.NoError(t, err)
				got, err := q.list()
				require.NoError(t, errors.Join(err, q.checkAll()))
				require.Equal(t, asInJSON(want), asInJSON(got))
				for state := Ready; state <= Canceled; state++ {
					require.True(t, slices.ContainsFunc(slices.Collect(maps.Values(want)), func(i *TaskInfo) bool { return i.State == state }), state)
				}
				requireGoldenSettings(t, q)
				q.quiesce(t)
				require.NoError(t, errors.Join(q.checkAll(), q.checkMemory(), q.Close()))

				m, err := manifest.Read(disk, "queue")
				require.NoError(t, err)
				require.Equal(t, manifest.Format, m.Format)
				requirePebbleFormat(t, disk, manifest.PebbleFormat(manifest.Format))
				r = verifyImage(t, disk, false)
				require.True(t, r.OK(), "%v", r.Problems)
				finishGolden(t, disk)
			})
		}
	}
}

// requirePebbleFormat makes sure of the format of all Pebble stores of a directory.
func requirePebbleFormat(t *testing.T, disk vfs.FS, format pebble.FormatMajorVersion) {
	t.Helper()
	m, err := manifest.Read(disk, "queue")
	require.NoError(t, err)
	var stores []string
	for shard := range m.Shards {
		stores = append(stores, manifest.ShardDir(disk, "queue", shard))
	}
	if m.Node != "" {
		stores = append(stores, disk.PathJoin("queue", manifest.RaftDir))
	}
	for _, dir := range stores {
		desc, err := pebble.Peek(dir, disk)
		require.NoError(t, err)
		require.Equal(t, format, desc.FormatMajorVersion, dir)
	}
}

// requireOutbound makes sure that a message is under way from the first shard.
func requireOutbound(t *testing.T, disk vfs.FS) {
	t.Helper()
	db, err := store.OpenForReading(disk, manifest.ShardDir(disk, "queue", 0))
	require.NoError(t, err)
	first(t, db, keys.Outbound, nil)
	require.NoError(t, db.Close())
}

func requireGoldenSettings(t *testing.T, q *Queue) {
	t.Helper()
	ctx := context.Background()
	for queue, want := range map[string]Settings{
		"a": {Retention: time.Hour}, "limited": {ConcurrencyPerKey: 1}, "paused": {Paused: true},
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
	_, err = q.Produce(ctx, Task{Queue: "unique", Unique: Unique{Key: "0 0"}})
	require.ErrorIs(t, err, ErrDuplicate)
}

// finishGolden works through all tasks of a golden queue, a day later.
func finishGolden(t *testing.T, disk *vfs.MemFS) {
	t.Helper()
	ctx := context.Background()
	opts := goldenOptions(disk)
	hook.SetWall(opts, func() time.Time { return variedNow.Add(48 * time.Hour) })
	q, err := Open("queue", opts)
	require.NoError(t, err)
	require.NoError(t, q.DeleteSchedule(ctx, goldenSchedule.Name))
	for redriven := false; ; redriven = true {
		queues := slices.Sorted(maps.Keys(mustStats(t, q)))
		require.Eventually(t, func() bool {
			leases, err := q.ClaimBatch(ctx, ClaimRequest{Queues: queues, Max: 1000, NoWait: true})
			for _, l := range leases {
				require.NoError(t, q.Complete(ctx, l.Receipt, nil))
			}
			if err == nil {
				return false
			}
			require.ErrorIs(t, err, ErrEmpty)
			waiting := 0
			for _, c := range mustStats(t, q) {
				waiting += int(c.Ready + c.Scheduled + c.Leased)
			}
			return waiting == 0
		}, 20*time.Second, time.Millisecond)
		q.quiesce(t)
		if redriven {
			break
		}
		for _, queue := range queues {
			_, err := q.RedriveAllDead(ctx, DeadFilter{Queue: queue})
			require.NoError(t, err)
		}
	}
	for queue, c := range mustStats(t, q) {
		require.Zero(t, c.Blocked+c.Dead, queue)
	}
	require.NoError(t, errors.Join(q.checkAll(), q.checkMemory(), q.Close()))
}

// TestRaiseInterrupted cuts the power at changes of files while a directory of an older
// format is raised, with -corrupt.for at each: the next Open does what is left of it, and no task
// is lost.
func TestRaiseInterrupted(t *testing.T) {
	t.Parallel()
	rng := testkit.Seeded(t)
	for _, how := range []string{"closed", "killed"} {
		golden, want := unpack(t, golden(manifest.OldestFormat, how))
		want = asInJSON(want)
		formats := make(map[int]int)
		step := func(stop int) int { return 1 + stop/3 } // the manifest comes first
		if *corruptFor > 0 {
			step = func(int) int { return 1 }
		}
		for stop := 1; ; stop += step(stop) {
			disk := cloneOf(golden)
			n := 0
			var image *vfs.MemFS
			var mu sync.Mutex // shards are opened at the same time
			q, err := Open("queue", goldenOptions(&testkit.HookFS{FS: disk, Before: func(string, string) error {
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
			r := verifyImage(t, image, false)
			require.True(t, r.OK(), "stopped at %d: %v", stop, r.Problems)
			q, err = Open("queue", goldenOptions(image))
			require.NoError(t, err)
			got, err := q.list()
			require.NoError(t, errors.Join(err, q.checkAll(), q.Close()))
			require.Equal(t, want, asInJSON(got))
			r = verifyImage(t, image, false)
			require.True(t, r.OK(), "%v", r.Problems)
		}
		require.Len(t, formats, 2)
	}
}

// ofOldFormat makes the directory of a closed node one of an older format.
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
	disk, votes := vfs.NewCrashableMem(), newSimVotes()
	q, err := oneNode(disk, votes)
	require.NoError(t, err)
	id, err := q.Produce(ctx, Task{Queue: "a"})
	require.NoError(t, errors.Join(err, q.Close()))
	ofOldFormat(t, disk, manifest.OldestOfNodes-1)
	_, err = oneNode(disk, votes)
	require.ErrorIs(t, err, ErrFormat)
	require.ErrorContains(t, err, "3 of a node, this version knows 4 to 5")
	ofOldFormat(t, disk, manifest.OldestOfNodes)
	r := verifyImage(t, disk, false)
	require.True(t, r.OK(), "%v", r.Problems)

	q, err = oneNode(disk, votes)
	require.NoError(t, err)
	info, err := q.Get(ctx, id)
	require.NoError(t, err)
	require.Equal(t, Ready, info.State)
	for i, r := range q.replicas {
		require.Eventually(t, func() bool { return formatOf(t, q, i) == manifest.Format }, 20*time.Second, time.Millisecond)
		got, err := schema.Lookup(r.store.DB(), []byte{keys.Meta})
		require.NoError(t, err)
		require.Equal(t, manifest.ReplicaIdentity(manifest.Format, i, len(q.replicas)), string(got))
	}
	require.NoError(t, q.Close())
	m, err := manifest.Read(disk, "queue")
	require.NoError(t, err)
	require.Equal(t, manifest.Format, m.Format)
	r = verifyImage(t, disk, false)
	require.True(t, r.OK(), "%v", r.Problems)
}

// TestRaiseByRepair: a repair writes the current format, and says so before.
func TestRaiseByRepair(t *testing.T) {
	disk, want := unpack(t, golden(manifest.OldestFormat, "closed"))
	alter(t, disk, func(db *pebble.DB) map[ID]bool {
		key, _ := first(t, db, keys.Counters, nil)
		require.NoError(t, db.Delete(key, nil))
		return nil
	})
	r := verifyImage(t, disk, true)
	require.True(t, r.OK(), "%v", r.Problems)
	m, err := manifest.Read(disk, "queue")
	require.NoError(t, err)
	require.Equal(t, manifest.Format, m.Format)
	q, err := Open("queue", goldenOptions(disk))
	require.NoError(t, err)
	got, err := q.list()
	require.NoError(t, errors.Join(err, q.checkAll(), q.Close()))
	require.Equal(t, asInJSON(want), asInJSON(got))
}

// goldenInfos reads the tasks of an archive, in which states and the like are numbers.
func goldenInfos(t *testing.T, b []byte) map[ID]*TaskInfo {
	t.Helper()
	var raw map[ID]map[string]json.RawMessage
	require.NoError(t, json.Unmarshal(b, &raw))
	tasks := make(map[ID]*TaskInfo)
	for id, fields := range raw {
		text := func(name string, of func(uint8) ([]byte, error)) {
			var n uint8
			if v, ok := fields[name]; ok && json.Unmarshal(v, &n) == nil {
				text, err := of(n)
				require.NoError(t, err)
				fields[name], err = json.Marshal(string(text))
				require.NoError(t, err)
			}
		}
		text("State", func(n uint8) ([]byte, error) { return State(n).MarshalText() })
		text("OnDead", func(n uint8) ([]byte, error) { return OnDead(n).MarshalText() })
		b, err := json.Marshal(fields)
		require.NoError(t, err)
		tasks[id] = new(TaskInfo)
		require.NoError(t, json.Unmarshal(b, tasks[id]))
	}
	return tasks
}
