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
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/inspect"
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

// run lets producers and workers work on all queues until during has returned.
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

// work does q's tasks until ctx ends.
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

// checkpoint copies q to a directory of its file system.
func (l *copyLoad) checkpoint(q *Queue, dir string) copied {
	c := copied{fs: inspect.Options(q.opts).FS, dir: dir}
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

// drain does all tasks of a queue, and checks that they are those of the
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
	inspect.Options(&opts).FS = c.fs
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
	t.Parallel()
	levels := []Durability{DurabilityProcess, DurabilityDisk, DurabilityNone}
	if testing.Short() {
		levels = levels[:1]
	}
	for _, level := range levels {
		t.Run(level.String(), func(t *testing.T) {
			seed := testkit.Seed()
			t.Logf("-seed %d", seed)
			synctest.Test(t, func(t *testing.T) {
				l := newCopyLoad(t, *inspect.With(&Options{
					Shards: 3, Durability: level, Retention: Forever, WindowTasks: 64,
					MemTableBytes: 256 << 10,
				}, inspect.Private{FS: crashfs.New()}), seed)
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

// TestCheckpointOfFailedShard: the error says which shard has failed, and the
// others go on.
func TestCheckpointOfFailedShard(t *testing.T) {
	f := newFailingQueue(t, DurabilityProcess, crashfs.New())
	err := f.Queue.shard(1).probe(func(s *shard) error {
		s.Broken = errBroken
		return nil
	})
	require.ErrorIs(t, err, errBroken)
	err = f.Checkpoint(t.Context(), "copy")
	require.ErrorIs(t, err, ErrFailed)
	require.ErrorContains(t, err, "shard 1")
	_, err = inspect.Options(&f.Opts).FS.Stat("copy")
	require.ErrorIs(t, err, fs.ErrNotExist)
	_, err = f.startingAt(0).Produce(t.Context(), Task{Queue: "a"})
	require.NoError(t, err)
	_ = f.Close()
}
