package codeq_test

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/convert"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/manifest"
	"codeq/internal/platform"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// linkFS is a file system. Its Link fails while err is set.
type linkFS struct {
	vfs.FS
	err error
	of  string // only for names with this suffix
}

func (fs *linkFS) Link(oldname, newname string) error {
	if fs.err != nil && strings.HasSuffix(newname, fs.of) {
		return fs.err
	}
	return fs.FS.Link(oldname, newname)
}

// TestCheckpointRefuses: the error names the obstacle, and Checkpoint changes nothing.
func TestCheckpointRefuses(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	q, err := codeq.Open(filepath.Join(root, "queue"), nil)
	require.NoError(t, err)
	require.NoError(t, os.MkdirAll(filepath.Join(root, "full"), 0o755))
	testkit.WriteFile(t, filepath.Join(root, "full", "letter"), "dear")
	require.NoError(t, os.MkdirAll(filepath.Join(root, "left"), 0o755))
	testkit.WriteFile(t, filepath.Join(root, "left", convert.Unfinished), "{}")
	require.NoError(t, os.Symlink(filepath.Join(root, "queue"), filepath.Join(root, "alias")))
	require.NoError(t, os.MkdirAll(filepath.Join(root, "locked"), 0o755))
	lock, err := platform.FS.Lock(filepath.Join(root, "locked", manifest.LockName))
	require.NoError(t, err)
	for _, c := range []struct {
		dir  string
		want error
		text string
	}{
		{"full", fs.ErrExist, `it holds "letter"`},
		{"full/letter", fs.ErrExist, "letter is no directory"},
		{"full/letter/below", fs.ErrExist, "letter is no directory"},
		{"left", fs.ErrExist, "unfinished checkpoint"},
		{"queue", codeq.ErrInvalid, "outside of the queue"},
		{"queue/a/b", codeq.ErrInvalid, "outside of the queue"},
		{"alias/copy", codeq.ErrInvalid, "outside of the queue"},
		{"locked", codeq.ErrLocked, ""},
	} {
		before := testkit.RecursiveListing(t, root)
		err := q.Checkpoint(t.Context(), filepath.Join(root, c.dir))
		require.ErrorIs(t, err, c.want, c.dir)
		require.ErrorContains(t, err, c.text)
		require.Equal(t, before, testkit.RecursiveListing(t, root), c.dir)
	}
	require.NoError(t, lock.Close())
	require.NoError(t, q.Checkpoint(t.Context(), filepath.Join(root, "queue2")), "a name that begins like the queue's")
	err = q.Checkpoint(t.Context(), filepath.Join(root, "queue2"))
	require.ErrorIs(t, err, fs.ErrExist)
	require.NoError(t, q.Close())
	require.ErrorIs(t, q.Checkpoint(t.Context(), filepath.Join(root, "late")), codeq.ErrClosed)
	require.NoDirExists(t, filepath.Join(root, "late"))
}

// TestCheckpointOnAnotherFileSystem: Checkpoint refuses another file system. Otherwise it would
// copy every file while the shards are stopped.
func TestCheckpointOnAnotherFileSystem(t *testing.T) {
	disk := &linkFS{FS: crashfs.New()}
	q, err := codeq.Open("queue", queuetest.OnDisk(disk, &codeq.Options{}))
	require.NoError(t, err)
	defer q.Close()
	disk.err = errors.New("cross-device link")
	err = q.Checkpoint(t.Context(), "copy")
	require.ErrorIs(t, err, codeq.ErrInvalid)
	require.ErrorIs(t, err, disk.err)
	_, err = disk.Stat("copy")
	require.ErrorIs(t, err, fs.ErrNotExist)
	disk.err = nil
	require.NoError(t, q.Checkpoint(t.Context(), "copy"))
}

// TestCheckpointCopiesWhatCannotBeLinked: Checkpoint copies a file that it cannot link, for example
// a table with too many links. This copy is as durable as the other files.
func TestCheckpointCopiesWhatCannotBeLinked(t *testing.T) {
	disk := crashfs.New()
	opts := queuetest.OnDisk(&linkFS{FS: disk, err: errors.New("too many links"), of: ".sst"}, &codeq.Options{Shards: 2})
	q, err := codeq.Open("queue", opts)
	require.NoError(t, err)
	var tasks []codeq.ID
	for range 20 {
		tasks = append(tasks, queuetest.Produce(t, q, codeq.Task{Queue: "a"})...)
	}
	require.NoError(t, q.Checkpoint(t.Context(), "copy"))
	tables, err := disk.List("copy/shard-000")
	require.NoError(t, err)
	require.True(t, slices.ContainsFunc(tables, func(name string) bool { return strings.HasSuffix(name, ".sst") }))
	crashed := queuetest.OnDisk(disk.CrashClone(vfs.CrashCloneCfg{}), &codeq.Options{})
	require.NoError(t, q.Close())
	queuetest.RequireTasks(t, "copy", crashed, tasks)
}

// TestCheckpointLinks: the copy is a queue on a real file system, too. It shares the tables with
// the original and has an identity of its own.
func TestCheckpointLinks(t *testing.T) {
	root := t.TempDir()
	t.Chdir(root)
	q, err := codeq.Open("queue", &codeq.Options{Shards: 2, Durability: codeq.DurabilityNone})
	require.NoError(t, err)
	tasks := []codeq.ID{}
	for i := range 100 {
		tasks = append(tasks, queuetest.Produce(t, q, codeq.Task{Queue: "a", Payload: fmt.Append(nil, i)})...)
	}
	require.NoError(t, os.Mkdir("empty", 0o755))
	for _, dir := range []string{"empty", "new/copy"} {
		require.NoError(t, q.Checkpoint(t.Context(), dir))
		linked := 0
		tables, err := filepath.Glob("queue/shard-*/*.sst")
		require.NoError(t, err)
		for _, table := range tables {
			original, err := os.Stat(table)
			require.NoError(t, err)
			if copied, err := os.Stat(filepath.Join(dir, strings.TrimPrefix(table, "queue"))); err == nil {
				require.True(t, os.SameFile(original, copied), table)
				linked++
			}
		}
		require.Positive(t, linked)
		require.NoFileExists(t, filepath.Join(dir, convert.Unfinished))
		queuetest.RequireTasks(t, dir, nil, tasks)
	}
	require.NoError(t, q.Close())
	require.NoError(t, os.RemoveAll("queue/shard-001"))
	require.NoError(t, os.CopyFS("queue/shard-001", os.DirFS("empty/shard-001")))
	_, err = codeq.Open("queue", nil)
	require.ErrorIs(t, err, codeq.ErrCorrupt, "shards of two copies are mixed")
}

// sharedFiles returns the number of files that two directories share.
func sharedFiles(t *testing.T, one, other string) (n int) {
	t.Helper()
	filesOf := func(dir string) (infos []fs.FileInfo) {
		require.NoError(t, filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
			if err != nil || e.IsDir() {
				return err
			}
			info, err := e.Info()
			infos = append(infos, info)
			return err
		}))
		return infos
	}
	others := filesOf(other)
	for _, file := range filesOf(one) {
		if slices.ContainsFunc(others, func(o fs.FileInfo) bool { return os.SameFile(file, o) }) {
			n++
		}
	}
	return n
}

// TestCheckpointShares: a copy by links shares files with the queue. A copy with
// CheckpointOptions.Copy shares none, and changes of its files do not affect the queue.
func TestCheckpointShares(t *testing.T) {
	t.Parallel()
	root := t.TempDir()
	dir, linked, copied := filepath.Join(root, "queue"), filepath.Join(root, "linked"), filepath.Join(root, "copied")
	q, err := codeq.Open(dir, &codeq.Options{Shards: 2})
	require.NoError(t, err)
	var tasks []codeq.ID
	for i := range 100 {
		tasks = append(tasks, queuetest.Produce(t, q, codeq.Task{Queue: "a", Payload: fmt.Append(nil, i)})...)
	}
	require.NoError(t, q.Checkpoint(t.Context(), linked, codeq.CheckpointOptions{}))
	require.Positive(t, sharedFiles(t, dir, linked))
	require.NoError(t, os.RemoveAll(linked))
	require.NoError(t, q.Checkpoint(t.Context(), copied, codeq.CheckpointOptions{Copy: true}))
	require.Zero(t, sharedFiles(t, dir, copied))
	stats, err := q.StorageStats()
	require.NoError(t, err)
	for _, s := range stats.Shards {
		require.Zero(t, s.LinkedBytes)
	}
	queuetest.RequireTasks(t, copied, nil, tasks)

	require.NoError(t, filepath.WalkDir(copied, func(file string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		return errors.Join(os.WriteFile(file, []byte("changed"), 0), os.Chmod(file, 0))
	}))
	tasks = append(tasks, queuetest.Produce(t, q, codeq.Task{Queue: "a"})...)
	require.NoError(t, q.Close())
	queuetest.RequireTasks(t, dir, nil, tasks)
}

// TestCheckpointCopyErrors: any step of a file copy may fail, or ctx may end at that step.
// Checkpoint then returns the error and leaves nothing behind, and the next call succeeds.
func TestCheckpointCopyErrors(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		steps, fail := 0, 0 // number of operations on the copied files; the failing operation
		var end func()      // called instead of the failure
		disk := crashfs.New()
		hook := &testkit.HookFS{FS: disk, Before: func(op, name string) error {
			if !strings.HasSuffix(name, ".own") || op == "close" { // already synced
				return nil
			}
			if steps++; steps != fail {
				return nil
			}
			if end != nil {
				end()
				return nil
			}
			return fmt.Errorf("%w: %s %s", queuetest.ErrBroken, op, name)
		}}
		opts := *queuetest.OnDisk(hook, &codeq.Options{Shards: 2, Durability: codeq.DurabilityDisk})
		q, err := codeq.Open("queue", &opts)
		require.NoError(t, err)
		tasks := queuetest.Produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
		isRemoved := func(why error) {
			_, err := disk.Stat("copy")
			require.ErrorIs(t, err, fs.ErrNotExist, why)
		}
		whole := codeq.CheckpointOptions{Copy: true}
		for fail = 1; ; fail++ {
			steps = 0
			err := q.Checkpoint(t.Context(), "copy", whole)
			if steps < fail {
				require.NoError(t, err)
				break
			}
			require.ErrorIs(t, err, queuetest.ErrBroken, "operation %d", fail)
			isRemoved(err)
		}
		require.Greater(t, fail, 20)
		queuetest.RequireTasks(t, "copy", queuetest.OnDisk(disk.CrashClone(vfs.CrashCloneCfg{}), &codeq.Options{}), tasks)
		require.NoError(t, disk.RemoveAll("copy"))

		ctx, cancel := context.WithCancelCause(t.Context())
		steps, fail, end = 0, 1, func() { cancel(errors.New("enough")) }
		err = q.Checkpoint(ctx, "copy", whole)
		require.ErrorContains(t, err, "enough")
		require.ErrorIs(t, err, context.Canceled)
		isRemoved(err)
		require.NoError(t, q.Close())
		queuetest.RequireTasks(t, "queue", &opts, tasks)
	})
}

// narrowFS is a file system that reports free as the number of free bytes for the copy.
type narrowFS struct {
	vfs.FS
	free uint64
}

func (fs *narrowFS) GetDiskUsage(name string) (vfs.DiskUsage, error) {
	if name == "copy" {
		return vfs.DiskUsage{AvailBytes: fs.free}, nil
	}
	return fs.FS.GetDiskUsage(name)
}

// TestCheckpointCopyNeedsRoom: a copy of all files leaves MinFreeBytes free, or Checkpoint refuses
// it before it writes the first file.
func TestCheckpointCopyNeedsRoom(t *testing.T) {
	t.Parallel()
	disk := &narrowFS{FS: crashfs.New(), free: 1<<20 + 1000}
	q, err := codeq.Open("queue", queuetest.OnDisk(disk, &codeq.Options{MinFreeBytes: 1 << 20}))
	require.NoError(t, err)
	queuetest.Produce(t, q, codeq.Task{Queue: "a", Payload: make([]byte, 1000)})
	whole := codeq.CheckpointOptions{Copy: true}
	err = q.Checkpoint(t.Context(), "copy", whole)
	require.ErrorIs(t, err, codeq.ErrDiskFull)
	require.ErrorContains(t, err, "1049576 bytes are free")
	_, err = disk.Stat("copy")
	require.ErrorIs(t, err, fs.ErrNotExist)
	disk.free = 2 << 30
	require.NoError(t, q.Checkpoint(t.Context(), "copy", whole))
	require.NoError(t, q.Close())
}

// TestCheckpointsAtOnce: simultaneous calls run one after the other, and all succeed.
func TestCheckpointsAtOnce(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		disk := crashfs.New()
		q := queuetest.OpenForRun(t, *queuetest.OnDisk(disk, &codeq.Options{Shards: 3}))
		tasks := queuetest.Produce(t, q, codeq.Task{Queue: "a"}, codeq.Task{Queue: "a"})
		var calls sync.WaitGroup
		for i := range 5 {
			calls.Go(func() { require.NoError(t, q.Checkpoint(t.Context(), fmt.Sprint("copy", i))) })
		}
		calls.Wait()
		require.NoError(t, q.Close())
		for i := range 5 {
			queuetest.RequireTasks(t, fmt.Sprint("copy", i), queuetest.OnDisk(disk, &codeq.Options{}), tasks)
		}
	})
}

// TestCheckpointErrors: any change of the copy's directory may fail while the copy's stores are
// closed. The call then returns the error and leaves nothing behind, the queue continues, and the
// next call succeeds.
func TestCheckpointErrors(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var mu sync.Mutex // guards n, fail and open
		n, fail := 0, 0   // number of operations; the failing operation
		// True for a directory while its store is open. Other tests cover write errors of an open
		// store.
		open := make(map[string]bool)
		disk := crashfs.New()
		hook := &testkit.HookFS{FS: disk, Before: func(op, name string) error {
			mu.Lock()
			defer mu.Unlock()
			dir := path.Dir(name)
			switch {
			case !strings.HasPrefix(name, "copy"), op == "remove":
				return nil
			case op == "close":
				if path.Ext(name) == ".log" { // the last copied file
					open[dir] = true
				}
				return nil
			case op == "open": // for a sync
				open[dir] = false
			case open[dir] || open[name]:
				return nil
			}
			if n++; n == fail {
				return fmt.Errorf("%w: %s %s", queuetest.ErrBroken, op, name)
			}
			return nil
		}}
		opts := *queuetest.OnDisk(hook, &codeq.Options{Shards: 1, Durability: codeq.DurabilityDisk})
		q, err := codeq.Open("queue", &opts)
		require.NoError(t, err)
		var tasks []codeq.ID
		for fail = 1; ; fail++ {
			tasks = append(tasks, queuetest.Produce(t, q, codeq.Task{Queue: "a"})...)
			n = 0
			clear(open)
			err := q.Checkpoint(t.Context(), "copy")
			if n < fail {
				require.NoError(t, err)
				break
			}
			require.ErrorContains(t, err, queuetest.ErrBroken.Error(), "operation %d", fail) // Pebble does not wrap it everywhere
			_, statErr := disk.Stat("copy")
			require.ErrorIs(t, statErr, fs.ErrNotExist, err)
		}
		require.Greater(t, fail, 20)
		mu.Lock()
		fail = 0
		mu.Unlock()
		require.NoError(t, queuetest.CheckAll(q))
		require.NoError(t, q.Close())
		queuetest.RequireTasks(t, "copy", &opts, tasks)
		queuetest.RequireTasks(t, "queue", &opts, tasks)
	})
}

// TestCheckpointPowerLoss: the power fails at each moment of a Checkpoint. The queue keeps its
// tasks. The copy is complete, or Open and the next Checkpoint refuse it, or its directory does not
// exist yet.
func TestCheckpointPowerLoss(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		rng := testkit.Seeded(t)
		disk := crashfs.New()
		var images []*crashfs.Disk
		var mu sync.Mutex
		armed := false
		hook := &testkit.HookFS{FS: disk, Before: func(string, string) error {
			mu.Lock()
			defer mu.Unlock()
			if armed {
				images = append(images, disk.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 50, RNG: rng}))
			}
			return nil
		}}
		opts := *queuetest.OnDisk(hook, &codeq.Options{Shards: 2, Durability: codeq.DurabilityDisk})
		q, err := codeq.Open("queue", &opts)
		require.NoError(t, err)
		var tasks []codeq.ID
		for range 20 {
			tasks = append(tasks, queuetest.Produce(t, q, codeq.Task{Queue: "a", Payload: make([]byte, 1000)})...)
		}
		armed = true
		require.NoError(t, q.Checkpoint(t.Context(), "copy"))
		mu.Lock()
		armed = false
		// After Checkpoint returned.
		images = append(images, disk.CrashClone(vfs.CrashCloneCfg{RNG: rng}))
		mu.Unlock()
		require.NoError(t, q.Close())
		outcomes := make(map[string]int)
		for i, img := range images {
			if i%testkit.Sized(2, 1) != 0 && i < len(images)-1 {
				continue
			}
			opts := *queuetest.OnDisk(img, &codeq.Options{})
			names, err := img.List("copy")
			switch outcome := ""; {
			case err != nil:
				outcomes["not begun"]++
			default:
				c, err := codeq.Open("copy", &opts)
				if outcome = "refused"; err == nil {
					require.NoError(t, queuetest.CheckAll(c))
					require.NoError(t, c.Close())
					queuetest.RequireTasks(t, "copy", &opts, tasks)
					outcome = "complete"
				} else {
					require.ErrorIs(t, err, codeq.ErrNotQueue, "image %d has %q", i, names)
				}
				outcomes[outcome]++
				q, err := codeq.Open("queue", &opts)
				require.NoError(t, err)
				require.ErrorIs(t, q.Checkpoint(t.Context(), "copy"), fs.ErrExist)
				require.NoError(t, q.Close())
			}
			queuetest.RequireTasks(t, "queue", &opts, tasks)
			if i == len(images)-1 {
				require.Positive(t, outcomes["complete"], "what Checkpoint has returned is durable")
			}
		}
		t.Log(outcomes)
		require.Greater(t, outcomes["refused"], 10)
	})
}

// TestCheckpointLeases: a copy has the leases of its moment. Tasks of Run are ready when the copy
// is opened, other tasks when their leases expire.
func TestCheckpointLeases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := crashfs.New()
		opts := *queuetest.OnDisk(disk, &codeq.Options{Shards: 2, Retention: codeq.Forever})
		q, err := codeq.Open("queue", &opts)
		require.NoError(t, err)
		queuetest.Produce(t, q, codeq.Task{Queue: "claimed"}, codeq.Task{Queue: "run"}, codeq.Task{Queue: "other"})
		claimed, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"claimed"}, LeaseFor: time.Minute})
		require.NoError(t, err)
		other, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"other"}, LeaseFor: time.Minute})
		require.NoError(t, err)
		var m codeq.Mux
		begun, end := make(chan struct{}), make(chan struct{})
		codeq.Handle(&m, "run", func(context.Context, *codeq.Job[[]byte]) error {
			close(begun)
			<-end
			return nil
		})
		run := make(chan error, 1)
		go func() { run <- q.Run(context.Background(), &m, nil) }()
		<-begun
		time.Sleep(20 * time.Second)
		require.NoError(t, q.Checkpoint(t.Context(), "copy"))
		close(end)
		require.NoError(t, q.Complete(t.Context(), claimed.Receipt, nil))
		require.NoError(t, q.Close())
		require.ErrorIs(t, <-run, codeq.ErrClosed)

		inspect.Options(&opts).FS = disk
		q, err = codeq.Open("copy", &opts)
		require.NoError(t, err)
		start := time.Now()
		l, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"run"}})
		require.NoError(t, err)
		require.Equal(t, 1, l.Attempt, "nothing has died")
		require.Zero(t, time.Since(start))
		require.NoError(t, q.Complete(t.Context(), other.Receipt, nil), "a lease goes on in the copy")
		l, err = q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"claimed"}})
		require.NoError(t, err)
		require.Equal(t, 2, l.Attempt)
		require.InDelta(t, 40*time.Second, time.Since(start), float64(time.Second))
		require.NoError(t, q.Close())
	})
}

// TestCheckpointWaitsForBusyShard: one shard is busy and cannot stop, so the other shard waits.
// When the call is given up, the waiting shard continues, and the call leaves nothing behind.
func TestCheckpointWaitsForBusyShard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := crashfs.New()
		q := queuetest.OpenForRun(t, *queuetest.OnDisk(disk, &codeq.Options{Shards: 2}))
		commit := queuetest.Shut(t, q, 1)
		busy := make(chan error, 1)
		go func() {
			_, err := queuetest.StartingAt(q, 1).Produce(context.Background(), codeq.Task{Queue: "a"})
			busy <- err
		}()
		synctest.Wait()
		ctx, cancel := context.WithCancelCause(t.Context())
		made := make(chan error, 2)
		go func() { made <- q.Checkpoint(ctx, "copy") }()
		synctest.Wait()
		require.Empty(t, made)
		held := make(chan error, 1)
		go func() {
			_, err := queuetest.StartingAt(q, 0).Produce(context.Background(), codeq.Task{Queue: "a"})
			held <- err
		}()
		second, cancelSecond := context.WithCancel(t.Context())
		go func() { made <- q.Checkpoint(second, "other") }()
		synctest.Wait()
		require.Empty(t, held, "shard 0 goes on before the cut")
		cancelSecond()
		require.ErrorIs(t, <-made, context.Canceled, "it waits for the first one")

		cancel(errors.New("enough"))
		require.ErrorContains(t, <-made, "enough")
		require.NoError(t, <-held)
		require.Empty(t, busy)
		for _, dir := range []string{"copy", "other"} {
			_, err := disk.Stat(dir)
			require.ErrorIs(t, err, fs.ErrNotExist)
		}

		go func() { made <- q.Checkpoint(t.Context(), "copy") }()
		synctest.Wait()
		closed := make(chan error, 1)
		go func() { closed <- q.Close() }()
		err := <-made
		require.ErrorIs(t, err, codeq.ErrClosed)
		require.NotErrorIs(t, err, context.Canceled, "its ctx goes on")
		synctest.Wait()
		require.Empty(t, closed)
		close(commit)
		require.NoError(t, <-busy)
		require.NoError(t, <-closed)
		_, err = disk.Stat("copy")
		require.ErrorIs(t, err, fs.ErrNotExist)
	})
}

// TestCheckpointKeepsLimits: a stopped shard completes a task only after the cut. Before the cut,
// no other shard can use the free place in the limit. So in a copy, too, a queue has no more leases
// than its settings allow.
func TestCheckpointKeepsLimits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		// GroupCap: one operation per commit.
		opts := *queuetest.OnDisk(crashfs.New(), &codeq.Options{Shards: 2, GroupCap: 1})
		q, err := codeq.Open("queue", &opts)
		require.NoError(t, err)
		require.NoError(t, q.Configure(t.Context(), "a", func(s *codeq.Settings) { s.Concurrency = 1 }))
		queuetest.Produce(t, queuetest.StartingAt(q, 0), codeq.Task{Queue: "a"})
		first, err := q.Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}})
		require.NoError(t, err)
		queuetest.Produce(t, queuetest.StartingAt(q, 1), codeq.Task{Queue: "a"})

		commit := queuetest.Shut(t, q, 1)
		var calls sync.WaitGroup
		calls.Go(func() { queuetest.Produce(t, queuetest.StartingAt(q, 1), codeq.Task{Queue: "b"}) })
		synctest.Wait()
		calls.Go(func() {
			_, err := queuetest.StartingAt(q, 1).Claim(t.Context(), codeq.ClaimRequest{Queues: []string{"a"}})
			require.NoError(t, err)
		})
		synctest.Wait()
		calls.Go(func() { require.NoError(t, q.Checkpoint(t.Context(), "copy")) })
		synctest.Wait() // shard 0 has stopped; shard 1 has not seen the claim yet
		calls.Go(func() { require.NoError(t, q.Complete(t.Context(), first.Receipt, nil)) })
		synctest.Wait()
		close(commit)
		calls.Wait()
		require.NoError(t, q.Close())

		q, err = codeq.Open("copy", &opts)
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		counts, err := q.Stats(t.Context())
		require.NoError(t, err)
		require.Equal(t, codeq.Counts{Leased: 1, Ready: 1}, counts["a"])
	})
}

// TestCheckpointIsOneCut: a copy under load contains every operation that ended before the
// checkpoint, and no operation that began after the checkpoint. For each producer, the copy
// contains a prefix of the producer's calls, over all shards. When the tasks of the copy are done,
// each of their follow-ups is done exactly once. The checkpoint does not affect the queue, and
// later changes of the queue do not affect the copies.
func TestCheckpointIsOneCut(t *testing.T) {
	t.Parallel()
	levels := []codeq.Durability{codeq.DurabilityProcess, codeq.DurabilityDisk, codeq.DurabilityNone}
	for _, level := range levels[:testkit.Sized(1, 3)] {
		t.Run(level.String(), func(t *testing.T) {
			seed := testkit.Seed()
			t.Logf("-seed %d", seed)
			synctest.Test(t, func(t *testing.T) {
				l := queuetest.NewCopyLoad(t, *inspect.With(&codeq.Options{
					Shards: 3, Durability: level, Retention: codeq.Forever, WindowTasks: 64,
					MemTableBytes: 256 << 10,
				}, inspect.Private{FS: crashfs.New()}), seed)
				q, err := codeq.Open("queue", &l.Opts)
				require.NoError(t, err)
				l.Queues = []*codeq.Queue{q}
				var made []queuetest.Copied
				l.Run(func() {
					for i := range *queuetest.Copies {
						l.After(50 + l.Chance(300))
						made = append(made, l.Checkpoint(q, fmt.Sprint("copies/", i)))
					}
				})
				l.Drain(q, l.Acked)
				require.NoError(t, q.Close())
				for i := range made {
					l.Check(&made[i])
				}
			})
		})
	}
}

// TestCheckpointOfFailedShard: the error names the failed shard, and the other shards continue.
func TestCheckpointOfFailedShard(t *testing.T) {
	f := queuetest.NewFailingQueue(t, codeq.DurabilityProcess, crashfs.New())
	err := inspect.Of(f.Queue).Owner(1, func(o *inspect.Owner) error {
		o.Rules.Break(queuetest.ErrBroken)
		return nil
	})
	require.ErrorIs(t, err, queuetest.ErrBroken)
	err = f.Checkpoint(t.Context(), "copy")
	require.ErrorIs(t, err, codeq.ErrFailed)
	require.ErrorContains(t, err, "shard 1")
	_, err = inspect.Options(&f.Opts).FS.Stat("copy")
	require.ErrorIs(t, err, fs.ErrNotExist)
	_, err = queuetest.StartingAt(f.Queue, 0).Produce(t.Context(), codeq.Task{Queue: "a"})
	require.NoError(t, err)
	_ = f.Close()
}
