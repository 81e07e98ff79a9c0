package queuetest

import (
	"context"
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"hash/fnv"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/inspect"
)

// CopyLoad is a queue at work while copies are made. Payloads name the work of its producers and
// workers, so that the content of a copy can be checked.
type CopyLoad struct {
	T      *testing.T
	Queues []*codeq.Queue // of the nodes, or a standalone one
	Opts   codeq.Options  // of a standalone queue
	keys   []string       // by shard, a LimitKey of its tasks

	mu        sync.Mutex // guards the fields below
	rng       *rand.Rand
	steps     [][][]string // by producer, call: the payloads that it stores, all or none
	Acked     []int        // by producer, calls that have returned
	completed []string     // payloads, by calls that have returned
	left      int          // calls until reached is closed
	reached   chan struct{}
}

var Copies = flag.Int("checkpoint.copies", 2, "how many copies TestCheckpointIsOneCut makes of each load")

const (
	copyProducers = 4
	copyWorkers   = 6
)

func NewCopyLoad(t *testing.T, opts codeq.Options, seed uint64) *CopyLoad {
	l := &CopyLoad{
		T: t, Opts: opts, rng: rand.New(rand.NewPCG(seed, 0)),
		steps: make([][][]string, copyProducers), Acked: make([]int, copyProducers),
	}
	for shard := range opts.Shards {
		l.keys = append(l.keys, KeyOf("a", shard, opts.Shards))
	}
	return l
}

// Run keeps producers and workers at work on all queues until during has returned.
func (l *CopyLoad) Run(during func()) {
	ctx, stop := context.WithCancel(l.T.Context())
	var load sync.WaitGroup
	for i := range copyProducers {
		load.Go(func() { require.NoError(l.T, l.Produce(ctx, i)) })
	}
	for i := range copyWorkers {
		load.Go(func() {
			require.NoError(l.T, l.Work(ctx, l.Queues[i%len(l.Queues)], func(payload string) {
				l.mu.Lock()
				defer l.mu.Unlock()
				l.completed = append(l.completed, payload)
			}))
		})
	}
	during()
	l.After(100)
	stop()
	load.Wait()
}

func (l *CopyLoad) Chance(n int) int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.rng.IntN(n)
}

// task is the task of a payload. Those that are not produced by a batch belong to some
// shard, whichever their producer is in.
func (l *CopyLoad) Task(payload string) codeq.Task {
	t := codeq.Task{Queue: "a", Payload: []byte(payload), MaxAttempts: 1000, Priority: len(payload) % 3}
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
func (l *CopyLoad) Call(producer int, after []codeq.ID, payloads ...string) ([]codeq.ID, error) {
	var tasks []codeq.Task
	for _, p := range payloads {
		t := l.Task(p)
		t.After = after
		tasks = append(tasks, t)
	}
	l.mu.Lock()
	l.steps[producer] = append(l.steps[producer], payloads)
	l.mu.Unlock()
	ids, err := l.Queues[producer%len(l.Queues)].ProduceBatch(context.Background(), tasks)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.Acked[producer]++
	if l.left--; l.left == 0 {
		close(l.reached)
	}
	return ids, err
}

func (l *CopyLoad) Produce(ctx context.Context, producer int) error {
	for n := 0; ctx.Err() == nil; n++ {
		name := func(kind string) string { return fmt.Sprint(kind, " ", producer, " ", n, " ") }
		switch n % 3 {
		case 0:
			if _, err := l.Call(producer, nil, name("single")); err != nil {
				return err
			}
		case 1:
			if _, err := l.Call(producer, nil, name("batch")+"x", name("batch")+"y", name("batch")+"z"); err != nil {
				return err
			}
		case 2: // parents, and a child of both
			var parents []codeq.ID
			for _, which := range []string{"father", "mother"} {
				ids, err := l.Call(producer, nil, name(which))
				if err != nil {
					return err
				}
				parents = append(parents, ids...)
			}
			if _, err := l.Call(producer, parents, name("child")); err != nil {
				return err
			}
		}
	}
	return nil
}

// work does q's tasks until ctx ends.
func (l *CopyLoad) Work(ctx context.Context, q *codeq.Queue, note func(payload string)) error {
	for {
		leases, err := q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{"a"}, Max: 1 + l.Chance(4)})
		if errors.Is(err, context.Canceled) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, lease := range leases {
			if l.Chance(10) == 0 {
				if err := q.Retry(context.Background(), lease.Receipt, codeq.RetryOptions{After: -1}); err != nil {
					return err
				}
				continue
			}
			var follow []codeq.Task
			for _, p := range next(string(lease.Payload)) {
				follow = append(follow, l.Task(p))
			}
			if err := q.Complete(context.Background(), lease.Receipt, nil, follow...); err != nil {
				return err
			}
			note(string(lease.Payload))
		}
	}
}

// Copied is a copy, and the calls before and after it was made.
type Copied struct {
	FS           vfs.FS
	Dir          string
	Acked, Begun []int // calls, by producer
	completed    []string
	Files        map[string][sha256.Size]byte
}

// after waits until the producers have made n more calls.
func (l *CopyLoad) After(n int) {
	l.mu.Lock()
	l.left, l.reached = n, make(chan struct{})
	reached := l.reached
	l.mu.Unlock()
	<-reached
}

// checkpoint copies q to a directory of its file system.
func (l *CopyLoad) Checkpoint(q *codeq.Queue, dir string) Copied {
	c := Copied{FS: inspect.Options(inspect.Of(q).Options()).FS, Dir: dir}
	l.mu.Lock()
	c.Acked, c.completed = slices.Clone(l.Acked), slices.Clone(l.completed)
	l.mu.Unlock()
	require.NoError(l.T, q.Checkpoint(l.T.Context(), dir))
	l.mu.Lock()
	for _, steps := range l.steps {
		c.Begun = append(c.Begun, len(steps))
	}
	l.mu.Unlock()
	c.Files = hashes(l.T, c.FS, dir)
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
func payloadsOfAll(t *testing.T, q *codeq.Queue, state codeq.State) (all, inState map[string]int) {
	tasks, err := List(q)
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
func (l *CopyLoad) Drain(q *codeq.Queue, calls []int) {
	t := l.T
	ctx, cancel := context.WithCancel(t.Context())
	var workers sync.WaitGroup
	for range copyWorkers {
		workers.Go(func() {
			if err := l.Work(ctx, q, func(string) {}); err != nil {
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
	_, done := payloadsOfAll(t, q, codeq.Done)
	require.Equal(t, want, done)
	synctest.Wait()
	require.NoError(t, CheckAll(q))
	require.NoError(t, CheckMemory(q))
}

// Check opens a copy and compares it with the calls up to its making.
func (l *CopyLoad) Check(c *Copied) {
	t := l.T
	require.Equal(t, c.Files, hashes(t, c.FS, c.Dir), "files of %s", c.Dir)
	opts := l.Opts
	inspect.Options(&opts).FS = c.FS
	q, err := codeq.Open(c.Dir, &opts)
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	require.NoError(t, CheckAll(q))
	all, done := payloadsOfAll(t, q, codeq.Done)
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
		require.GreaterOrEqual(t, n, c.Acked[producer], "calls of producer %d that had returned before", producer)
		require.LessOrEqual(t, n, c.Begun[producer], "calls of producer %d that had begun before the end", producer)
		calls = append(calls, n)
	}
	for _, p := range c.completed {
		require.Equal(t, 1, done[p], "payload %q had been completed before", p)
	}
	for p, n := range all {
		require.Equal(t, 1, n, "payload %q", p)
	}
	l.Drain(q, calls)
}
