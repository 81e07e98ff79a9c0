package codeq

import (
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"hash/fnv"
	"io"
	"io/fs"
	"math/rand/v2"
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

	"codeq/internal/checkpoint"
	"codeq/internal/manifest"
	"codeq/internal/testkit"
)

// copyLoad is a queue at work of which copies are made. What its producers and
// workers do is named by payloads, so that what a copy must have can be counted.
type copyLoad struct {
	t      *testing.T
	queues []*Queue // of the nodes, or one by itself
	opts   Options  // of a queue by itself
	keys   []string // by shard, a LimitKey whose tasks belong there

	mu        sync.Mutex // guards what follows
	rng       *rand.Rand
	steps     [][][]string // by producer, call: the payloads that it stores, all or none
	acked     []int        // by producer, calls that have returned
	completed []string     // payloads, by calls that have returned
	left      int          // calls until reached is closed
	reached   chan struct{}
}

var copiesFlag = flag.Int("checkpoint.copies", 2, "how many copies TestCheckpointIsOneCut makes of each load")

const (
	copyProducers = 4
	copyWorkers   = 6
)

func newCopyLoad(t *testing.T, opts Options, seed uint64) *copyLoad {
	l := &copyLoad{
		t: t, opts: opts, rng: rand.New(rand.NewPCG(seed, 0)),
		steps: make([][][]string, copyProducers), acked: make([]int, copyProducers),
	}
	for shard := range opts.Shards {
		l.keys = append(l.keys, keyOf("a", shard, opts.Shards))
	}
	return l
}

// run has producers and workers at work, on all queues, until during has returned.
func (l *copyLoad) run(during func()) {
	ctx, stop := context.WithCancel(l.t.Context())
	var load sync.WaitGroup
	for i := range copyProducers {
		load.Go(func() { require.NoError(l.t, l.produce(ctx, i)) })
	}
	for i := range copyWorkers {
		load.Go(func() {
			require.NoError(l.t, l.work(ctx, l.queues[i%len(l.queues)], func(payload string) {
				l.mu.Lock()
				defer l.mu.Unlock()
				l.completed = append(l.completed, payload)
			}))
		})
	}
	during()
	l.after(100)
	stop()
	load.Wait()
}

func (l *copyLoad) chance(n int) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.rng.IntN(n)
}

// task is the task of a payload. Those that are not produced by a batch belong to some
// shard, whichever their producer is in.
func (l *copyLoad) task(payload string) Task {
	t := Task{Queue: "a", Payload: []byte(payload), MaxAttempts: 1000, Priority: len(payload) % 3}
	if !strings.HasPrefix(payload, "batch") {
		t.LimitKey = l.keys[hashOf(payload)%uint32(len(l.keys))]
	}
	return t
}

func hashOf(payload string) uint32 {
	h := fnv.New32a()
	_, _ = io.WriteString(h, payload)
	return h.Sum32()
}

// next is the payloads of a task's follow-ups.
func next(payload string) []string {
	if strings.Count(payload, ">") == 2 {
		return nil
	}
	follow := []string{payload + ">left"}
	if hashOf(payload)%2 == 0 {
		follow = append(follow, payload+">right")
	}
	return follow
}

// call stores the tasks with the payloads, in one shard.
func (l *copyLoad) call(producer int, after []ID, payloads ...string) ([]ID, error) {
	var tasks []Task
	for _, p := range payloads {
		t := l.task(p)
		t.After = after
		tasks = append(tasks, t)
	}
	l.mu.Lock()
	l.steps[producer] = append(l.steps[producer], payloads)
	l.mu.Unlock()
	ids, err := l.queues[producer%len(l.queues)].ProduceBatch(context.Background(), tasks)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.acked[producer]++
	if l.left--; l.left == 0 {
		close(l.reached)
	}
	return ids, err
}

func (l *copyLoad) produce(ctx context.Context, producer int) error {
	for n := 0; ctx.Err() == nil; n++ {
		name := func(kind string) string { return fmt.Sprint(kind, " ", producer, " ", n, " ") }
		switch n % 3 {
		case 0:
			if _, err := l.call(producer, nil, name("single")); err != nil {
				return err
			}
		case 1:
			if _, err := l.call(producer, nil, name("batch")+"x", name("batch")+"y", name("batch")+"z"); err != nil {
				return err
			}
		case 2: // parents, and a child of both
			var parents []ID
			for _, which := range []string{"father", "mother"} {
				ids, err := l.call(producer, nil, name(which))
				if err != nil {
					return err
				}
				parents = append(parents, ids...)
			}
			if _, err := l.call(producer, parents, name("child")); err != nil {
				return err
			}
		}
	}
	return nil
}

// work has q's tasks done until ctx ends.
func (l *copyLoad) work(ctx context.Context, q *Queue, note func(payload string)) error {
	for {
		leases, err := q.ClaimBatch(ctx, ClaimRequest{Queues: []string{"a"}, Max: 1 + l.chance(4)})
		if errors.Is(err, context.Canceled) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, lease := range leases {
			if l.chance(10) == 0 {
				if err := q.Retry(context.Background(), lease.Receipt, RetryOptions{After: -1}); err != nil {
					return err
				}
				continue
			}
			var follow []Task
			for _, p := range next(string(lease.Payload)) {
				follow = append(follow, l.task(p))
			}
			if err := q.Complete(context.Background(), lease.Receipt, nil, follow...); err != nil {
				return err
			}
			note(string(lease.Payload))
		}
	}
}

// copied is a copy, and what had happened before and after it was made.
type copied struct {
	fs           vfs.FS
	dir          string
	acked, begun []int // calls, by producer
	completed    []string
	files        map[string][sha256.Size]byte
}

// after waits until the producers have made n more calls.
func (l *copyLoad) after(n int) {
	l.mu.Lock()
	l.left, l.reached = n, make(chan struct{})
	reached := l.reached
	l.mu.Unlock()
	<-reached
}

// checkpoint has q copied to a directory of its file system.
func (l *copyLoad) checkpoint(q *Queue, dir string) copied {
	c := copied{fs: q.opts.fs, dir: dir}
	l.mu.Lock()
	c.acked, c.completed = slices.Clone(l.acked), slices.Clone(l.completed)
	l.mu.Unlock()
	require.NoError(l.t, q.Checkpoint(l.t.Context(), dir))
	l.mu.Lock()
	for _, steps := range l.steps {
		c.begun = append(c.begun, len(steps))
	}
	l.mu.Unlock()
	c.files = hashes(l.t, c.fs, dir)
	return c
}

// hashes is the hashes of all files in a directory, by their names.
func hashes(t *testing.T, fsys vfs.FS, dir string) map[string][sha256.Size]byte {
	found := make(map[string][sha256.Size]byte)
	names, err := fsys.List(dir)
	require.NoError(t, err)
	for _, name := range names {
		name = fsys.PathJoin(dir, name)
		info, err := fsys.Stat(name)
		require.NoError(t, err)
		if info.IsDir() {
			for name, hash := range hashes(t, fsys, name) {
				found[name] = hash
			}
			continue
		}
		f, err := fsys.Open(name)
		require.NoError(t, err)
		b, err := io.ReadAll(f)
		require.NoError(t, errors.Join(err, f.Close()))
		found[name] = sha256.Sum256(b)
	}
	return found
}

// payloadsOfAll is how often each payload is in a queue, and that of a task in the state.
func payloadsOfAll(t *testing.T, q *Queue, state State) (all, inState map[string]int) {
	tasks, err := q.list()
	require.NoError(t, err)
	all, inState = make(map[string]int), make(map[string]int)
	for _, task := range tasks {
		all[string(task.Payload)]++
		if task.State == state {
			inState[string(task.Payload)]++
		}
	}
	return all, inState
}

// drain has all tasks of a queue done, and checks that they are those of the
// first calls of each producer, with all that follows from them, each once.
func (l *copyLoad) drain(q *Queue, calls []int) {
	t := l.t
	ctx, cancel := context.WithCancel(t.Context())
	var workers sync.WaitGroup
	for range copyWorkers {
		workers.Go(func() {
			if err := l.work(ctx, q, func(string) {}); err != nil {
				t.Error(err)
				cancel()
			}
		})
	}
	require.NoError(t, q.WaitIdle(ctx))
	cancel()
	workers.Wait()
	want := make(map[string]int)
	var add func(payload string)
	add = func(payload string) {
		want[payload]++
		for _, p := range next(payload) {
			add(p)
		}
	}
	for producer, n := range calls {
		for _, payloads := range l.steps[producer][:n] {
			for _, p := range payloads {
				add(p)
			}
		}
	}
	_, done := payloadsOfAll(t, q, Done)
	require.Equal(t, want, done)
	synctest.Wait()
	require.NoError(t, q.checkAll())
	require.NoError(t, q.checkMemory())
}

// check opens a copy and compares it with what had been done when it was made.
func (l *copyLoad) check(c *copied) {
	t := l.t
	require.Equal(t, c.files, hashes(t, c.fs, c.dir), "files of %s", c.dir)
	opts := l.opts
	opts.fs = c.fs
	q, err := Open(c.dir, &opts)
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	require.NoError(t, q.checkAll())
	all, done := payloadsOfAll(t, q, Done)
	var calls []int
	for producer, steps := range l.steps {
		n := 0
		for n < len(steps) && all[steps[n][0]] > 0 {
			n++
		}
		for i, payloads := range steps {
			for _, p := range payloads {
				require.Equal(t, i < n, all[p] == 1, "payload %q of call %d of producer %d, of which the copy has %d calls", p, i, producer, n)
			}
		}
		require.GreaterOrEqual(t, n, c.acked[producer], "calls of producer %d that had returned before", producer)
		require.LessOrEqual(t, n, c.begun[producer], "calls of producer %d that had begun before the end", producer)
		calls = append(calls, n)
	}
	for _, p := range c.completed {
		require.Equal(t, 1, done[p], "payload %q had been completed before", p)
	}
	for p, n := range all {
		require.Equal(t, 1, n, "payload %q", p)
	}
	l.drain(q, calls)
}

// TestCheckpointIsOneCut: a copy that is made under load has what had been done
// before, and nothing of what was begun later; what it has of each producer is a
// prefix of its calls, over all shards; and when its tasks are done, everything
// that follows from them has been done once. The queue itself is as if nothing had
// happened, and the copies stay what they are while it goes on.
func TestCheckpointIsOneCut(t *testing.T) {
	levels := []Durability{DurabilityProcess, DurabilityDisk, DurabilityNone}
	if testing.Short() {
		levels = levels[:1]
	}
	for _, level := range levels {
		t.Run(level.String(), func(t *testing.T) {
			seed := testkit.Seed()
			t.Logf("-seed %d", seed)
			synctest.Test(t, func(t *testing.T) {
				l := newCopyLoad(t, Options{
					Shards: 3, Durability: level, Retention: Forever, WindowTasks: 64,
					MemTableBytes: 256 << 10, fs: vfs.NewMem(),
				}, seed)
				q, err := Open("queue", &l.opts)
				require.NoError(t, err)
				l.queues = []*Queue{q}
				var made []copied
				l.run(func() {
					for i := range *copiesFlag {
						l.after(50 + l.chance(300))
						made = append(made, l.checkpoint(q, fmt.Sprint("copies/", i)))
					}
				})
				l.drain(q, l.acked)
				require.NoError(t, q.Close())
				for i := range made {
					l.check(&made[i])
				}
			})
		})
	}
}

// linkFS is a file system that refuses to link files while err is set.
type linkFS struct {
	vfs.FS
	err error
	of  string // only files whose names end so
}

func (fs *linkFS) Link(oldname, newname string) error {
	if fs.err != nil && strings.HasSuffix(newname, fs.of) {
		return fs.err
	}
	return fs.FS.Link(oldname, newname)
}

// TestCheckpointRefuses: what stands in the way is named, and nothing is changed.
func TestCheckpointRefuses(t *testing.T) {
	root := t.TempDir()
	q, err := Open(filepath.Join(root, "queue"), nil)
	require.NoError(t, err)
	require.NoError(t, os.MkdirAll(filepath.Join(root, "full"), 0o755))
	writeFile(t, filepath.Join(root, "full", "letter"), "dear")
	require.NoError(t, os.MkdirAll(filepath.Join(root, "left"), 0o755))
	writeFile(t, filepath.Join(root, "left", checkpoint.Unfinished), "{}")
	require.NoError(t, os.Symlink(filepath.Join(root, "queue"), filepath.Join(root, "alias")))
	require.NoError(t, os.MkdirAll(filepath.Join(root, "locked"), 0o755))
	lock, err := vfs.Default.Lock(filepath.Join(root, "locked", manifest.LockName))
	require.NoError(t, err)
	for _, c := range []struct {
		dir  string
		want error
		text string
	}{
		{"full", fs.ErrExist, `it holds "letter"`},
		{"full/letter", fs.ErrExist, "not a directory"},
		{"left", fs.ErrExist, "unfinished checkpoint"},
		{"queue", ErrInvalid, "outside of the queue"},
		{"queue/a/b", ErrInvalid, "outside of the queue"},
		{"alias/copy", ErrInvalid, "outside of the queue"},
		{"locked", ErrLocked, ""},
	} {
		before := recursiveListing(t, root)
		err := q.Checkpoint(t.Context(), filepath.Join(root, c.dir))
		require.ErrorIs(t, err, c.want, c.dir)
		require.ErrorContains(t, err, c.text)
		require.Equal(t, before, recursiveListing(t, root), c.dir)
	}
	require.NoError(t, lock.Close())
	require.NoError(t, q.Checkpoint(t.Context(), filepath.Join(root, "queue2")), "a name that begins like the queue's")
	err = q.Checkpoint(t.Context(), filepath.Join(root, "queue2"))
	require.ErrorIs(t, err, fs.ErrExist)
	require.NoError(t, q.Close())
	require.ErrorIs(t, q.Checkpoint(t.Context(), filepath.Join(root, "late")), ErrClosed)
	require.NoDirExists(t, filepath.Join(root, "late"))
}

// TestCheckpointOnAnotherFileSystem: it is refused, not made by copying everything
// while the shards stand still.
func TestCheckpointOnAnotherFileSystem(t *testing.T) {
	disk := &linkFS{FS: vfs.NewMem()}
	q, err := Open("queue", &Options{fs: disk})
	require.NoError(t, err)
	defer q.Close()
	disk.err = errors.New("cross-device link")
	err = q.Checkpoint(t.Context(), "copy")
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorIs(t, err, disk.err)
	_, err = disk.Stat("copy")
	require.ErrorIs(t, err, fs.ErrNotExist)
	disk.err = nil
	require.NoError(t, q.Checkpoint(t.Context(), "copy"))
}

// TestCheckpointCopiesWhatCannotBeLinked: a table that has too many links, for one, is
// copied, and the copy is as durable as the rest.
func TestCheckpointCopiesWhatCannotBeLinked(t *testing.T) {
	disk := vfs.NewCrashableMem()
	opts := &Options{Shards: 2, fs: &linkFS{FS: disk, err: errors.New("too many links"), of: ".sst"}}
	q, err := Open("queue", opts)
	require.NoError(t, err)
	var tasks []ID
	for range 20 {
		tasks = append(tasks, produce(t, q, Task{Queue: "a"})...)
	}
	require.NoError(t, q.Checkpoint(t.Context(), "copy"))
	tables, err := disk.List("copy/shard-000")
	require.NoError(t, err)
	require.True(t, slices.ContainsFunc(tables, func(name string) bool { return strings.HasSuffix(name, ".sst") }))
	crashed := &Options{fs: disk.CrashClone(vfs.CrashCloneCfg{})}
	require.NoError(t, q.Close())
	requireTasks(t, "copy", crashed, tasks)
}

// TestCheckpointLinks: on a real file system too the copy is a queue, shares the tables,
// and has an identity of its own.
func TestCheckpointLinks(t *testing.T) {
	root := t.TempDir()
	t.Chdir(root)
	q, err := Open("queue", &Options{Shards: 2, Durability: DurabilityNone})
	require.NoError(t, err)
	tasks := []ID{}
	for i := range 100 {
		tasks = append(tasks, produce(t, q, Task{Queue: "a", Payload: fmt.Append(nil, i)})...)
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
		require.NoFileExists(t, filepath.Join(dir, checkpoint.Unfinished))
		requireTasks(t, dir, nil, tasks)
	}
	require.NoError(t, q.Close())
	require.NoError(t, os.RemoveAll("queue/shard-001"))
	require.NoError(t, os.CopyFS("queue/shard-001", os.DirFS("empty/shard-001")))
	_, err = Open("queue", nil)
	require.ErrorIs(t, err, ErrCorrupt, "shards of two copies are mixed")
}

// TestCheckpointWaitsForBusyShard: while one shard cannot stop the other one
// waits, and goes on when the call gives up, which leaves nothing behind.
func TestCheckpointWaitsForBusyShard(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := vfs.NewMem()
		q := openForRun(t, Options{Shards: 2, fs: disk})
		commit := shut(t, q.shard(1))
		busy := make(chan error, 1)
		go func() {
			_, err := q.startingAt(1).Produce(context.Background(), Task{Queue: "a"})
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
			_, err := q.startingAt(0).Produce(context.Background(), Task{Queue: "a"})
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
		require.ErrorIs(t, <-made, ErrClosed)
		synctest.Wait()
		require.Empty(t, closed)
		close(commit)
		require.NoError(t, <-busy)
		require.NoError(t, <-closed)
		_, err := disk.Stat("copy")
		require.ErrorIs(t, err, fs.ErrNotExist)
	})
}

// TestCheckpointsAtOnce: they follow each other, and all are made.
func TestCheckpointsAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := vfs.NewMem()
		q := openForRun(t, Options{Shards: 3, fs: disk})
		tasks := produce(t, q, Task{Queue: "a"}, Task{Queue: "a"})
		var calls sync.WaitGroup
		for i := range 5 {
			calls.Go(func() { require.NoError(t, q.Checkpoint(t.Context(), fmt.Sprint("copy", i))) })
		}
		calls.Wait()
		require.NoError(t, q.Close())
		for i := range 5 {
			requireTasks(t, fmt.Sprint("copy", i), &Options{fs: disk}, tasks)
		}
	})
}

// TestCheckpointOfFailedShard: the error says which shard has failed, and the
// others go on.
func TestCheckpointOfFailedShard(t *testing.T) {
	f := newFailingQueue(t, DurabilityProcess, vfs.NewMem())
	err := f.Queue.shard(1).probe(func(s *shard) error {
		s.Broken = errBroken
		return nil
	})
	require.ErrorIs(t, err, errBroken)
	err = f.Checkpoint(t.Context(), "copy")
	require.ErrorIs(t, err, ErrFailed)
	require.ErrorContains(t, err, "shard 1")
	_, err = f.opts.fs.Stat("copy")
	require.ErrorIs(t, err, fs.ErrNotExist)
	_, err = f.startingAt(0).Produce(t.Context(), Task{Queue: "a"})
	require.NoError(t, err)
	_ = f.Close()
}

// TestCheckpointErrors: whichever change of the copy's directory fails while its stores are
// closed, the call says so and leaves nothing behind, the queue goes on, and the next call
// succeeds.
func TestCheckpointErrors(t *testing.T) {
	var mu sync.Mutex // guards what follows
	n, fail := 0, 0   // operations; the one that fails
	// By directory: a store is open. When it cannot be written is tested elsewhere.
	open := make(map[string]bool)
	disk := vfs.NewMem()
	hook := &testkit.HookFS{FS: disk, Before: func(op, name string) error {
		mu.Lock()
		defer mu.Unlock()
		dir := path.Dir(name)
		switch {
		case !strings.HasPrefix(name, "copy"), op == "remove":
			return nil
		case op == "close":
			if path.Ext(name) == ".log" { // the last file that is copied
				open[dir] = true
			}
			return nil
		case op == "open": // to be synced
			open[dir] = false
		case open[dir] || open[name]:
			return nil
		}
		if n++; n == fail {
			return fmt.Errorf("%w: %s %s", errBroken, op, name)
		}
		return nil
	}}
	opts := Options{Shards: 1, Durability: DurabilityDisk, fs: hook}
	q, err := Open("queue", &opts)
	require.NoError(t, err)
	var tasks []ID
	for fail = 1; ; fail++ {
		tasks = append(tasks, produce(t, q, Task{Queue: "a"})...)
		n = 0
		clear(open)
		err := q.Checkpoint(t.Context(), "copy")
		if n < fail {
			require.NoError(t, err)
			break
		}
		require.ErrorContains(t, err, errBroken.Error(), "operation %d", fail) // Pebble does not wrap it everywhere
		_, statErr := disk.Stat("copy")
		require.ErrorIs(t, statErr, fs.ErrNotExist, err)
	}
	require.Greater(t, fail, 20)
	mu.Lock()
	fail = 0
	mu.Unlock()
	require.NoError(t, q.checkAll())
	require.NoError(t, q.Close())
	requireTasks(t, "copy", &opts, tasks)
	requireTasks(t, "queue", &opts, tasks)
}

// uncloned keeps a MemFS from being cloned in the middle of operations in which it
// would wait for itself.
type uncloned struct {
	*vfs.MemFS
	cloning *sync.Mutex
}

func (fs uncloned) Link(from, to string) error {
	fs.cloning.Lock()
	defer fs.cloning.Unlock()
	return fs.MemFS.Link(from, to)
}

func (fs uncloned) ReuseForWrite(from, to string, c vfs.DiskWriteCategory) (vfs.File, error) {
	fs.cloning.Lock()
	defer fs.cloning.Unlock()
	return fs.MemFS.ReuseForWrite(from, to, c)
}

func (fs uncloned) Lock(name string) (io.Closer, error) {
	fs.cloning.Lock()
	defer fs.cloning.Unlock()
	return fs.MemFS.Lock(name)
}

// TestCheckpointPowerLoss: at whatever moment of a Checkpoint the power fails, the
// queue is as ever, and the copy is complete, or refused by Open and by the next
// Checkpoint, or has not been begun.
func TestCheckpointPowerLoss(t *testing.T) {
	rng := testkit.Seeded(t)
	disk := vfs.NewCrashableMem()
	var images []*vfs.MemFS
	var mu sync.Mutex
	armed := false
	hook := &testkit.HookFS{FS: uncloned{disk, &mu}, Before: func(string, string) error {
		mu.Lock()
		defer mu.Unlock()
		if armed {
			images = append(images, disk.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 50, RNG: rng}))
		}
		return nil
	}}
	opts := Options{Shards: 2, Durability: DurabilityDisk, fs: hook}
	q, err := Open("queue", &opts)
	require.NoError(t, err)
	var tasks []ID
	for range 20 {
		tasks = append(tasks, produce(t, q, Task{Queue: "a", Payload: make([]byte, 1000)})...)
	}
	armed = true
	require.NoError(t, q.Checkpoint(t.Context(), "copy"))
	mu.Lock()
	armed = false
	images = append(images, disk.CrashClone(vfs.CrashCloneCfg{RNG: rng})) // it had returned
	mu.Unlock()
	require.NoError(t, q.Close())
	outcomes := make(map[string]int)
	for i, img := range images {
		opts := Options{fs: img}
		names, err := img.List("copy")
		switch outcome := ""; {
		case err != nil:
			outcomes["not begun"]++
		default:
			c, err := Open("copy", &opts)
			if outcome = "refused"; err == nil {
				require.NoError(t, c.checkAll())
				require.NoError(t, c.Close())
				requireTasks(t, "copy", &opts, tasks)
				outcome = "complete"
			} else {
				require.ErrorIs(t, err, ErrNotQueue, "image %d has %q", i, names)
			}
			outcomes[outcome]++
			q, err := Open("queue", &opts)
			require.NoError(t, err)
			require.ErrorIs(t, q.Checkpoint(t.Context(), "copy"), fs.ErrExist)
			require.NoError(t, q.Close())
		}
		requireTasks(t, "queue", &opts, tasks)
		if i == len(images)-1 {
			require.Positive(t, outcomes["complete"], "what Checkpoint has returned is durable")
		}
	}
	t.Log(outcomes)
	require.Greater(t, outcomes["refused"], 10)
}

// TestCheckpointLeases: a copy has the leases of its moment. Tasks of Run are
// ready when it is opened, others when their leases expire.
func TestCheckpointLeases(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		disk := vfs.NewMem()
		opts := Options{Shards: 2, Retention: Forever, fs: disk}
		q, err := Open("queue", &opts)
		require.NoError(t, err)
		produce(t, q, Task{Queue: "claimed"}, Task{Queue: "run"}, Task{Queue: "other"})
		claimed, err := q.Claim(t.Context(), ClaimRequest{Queues: []string{"claimed"}, LeaseFor: time.Minute})
		require.NoError(t, err)
		other, err := q.Claim(t.Context(), ClaimRequest{Queues: []string{"other"}, LeaseFor: time.Minute})
		require.NoError(t, err)
		var m Mux
		begun, end := make(chan struct{}), make(chan struct{})
		Handle(&m, "run", func(context.Context, *Job[[]byte]) error {
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
		require.ErrorIs(t, <-run, ErrClosed)

		opts.fs = disk
		q, err = Open("copy", &opts)
		require.NoError(t, err)
		start := time.Now()
		l, err := q.Claim(t.Context(), ClaimRequest{Queues: []string{"run"}})
		require.NoError(t, err)
		require.Equal(t, 2, l.Attempt)
		require.Zero(t, time.Since(start))
		require.NoError(t, q.Complete(t.Context(), other.Receipt, nil), "a lease goes on in the copy")
		l, err = q.Claim(t.Context(), ClaimRequest{Queues: []string{"claimed"}})
		require.NoError(t, err)
		require.Equal(t, 2, l.Attempt)
		require.InDelta(t, 40*time.Second, time.Since(start), float64(time.Second))
		require.NoError(t, q.Close())
	})
}

// TestCheckpointKeepsLimits: what a shard that has stopped would let others do
// happens after the cut: in a copy, too, a queue has no more leases than its
// settings allow.
func TestCheckpointKeepsLimits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		opts := Options{Shards: 2, GroupCap: 1, fs: vfs.NewMem()} // each operation has a commit of its own
		q, err := Open("queue", &opts)
		require.NoError(t, err)
		require.NoError(t, q.Configure(t.Context(), "a", func(s *Settings) { s.Concurrency = 1 }))
		produce(t, q.startingAt(0), Task{Queue: "a"})
		first, err := q.Claim(t.Context(), ClaimRequest{Queues: []string{"a"}})
		require.NoError(t, err)
		produce(t, q.startingAt(1), Task{Queue: "a"})

		commit := shut(t, q.shard(1))
		var calls sync.WaitGroup
		calls.Go(func() { produce(t, q.startingAt(1), Task{Queue: "b"}) })
		synctest.Wait()
		calls.Go(func() {
			_, err := q.startingAt(1).Claim(t.Context(), ClaimRequest{Queues: []string{"a"}})
			require.NoError(t, err)
		})
		synctest.Wait()
		calls.Go(func() { require.NoError(t, q.Checkpoint(t.Context(), "copy")) })
		synctest.Wait() // shard 0 has stopped; shard 1 has yet to look at the claim
		calls.Go(func() { require.NoError(t, q.Complete(t.Context(), first.Receipt, nil)) })
		synctest.Wait()
		close(commit)
		calls.Wait()
		require.NoError(t, q.Close())

		q, err = Open("copy", &opts)
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		counts, err := q.Stats(t.Context())
		require.NoError(t, err)
		require.Equal(t, Counts{Leased: 1, Ready: 1}, counts["a"])
	})
}
