package faults_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

// The tests of this file make images of a queue's disk. An image is the disk as a power loss at
// that moment might leave it: each unsynced 4 KiB block and each unsynced directory entry is kept
// or lost, at random. Under load, every image is compared with the history of the tasks; each
// change in a history has the interval of its call.

// TestPowerLossAtTheEndOfABlock: power fails when an unsynced log may lack a record in its middle.
// The operating system has written a block of the log while the last few bytes of the block were
// free. It has not written the block again after these bytes were used, but it has written the next
// block. In the log after the power loss, these bytes look like padding.
func TestPowerLossAtTheEndOfABlock(t *testing.T) {
	t.Parallel()
	const block, header, free = 32 << 10, 11, 15
	for _, level := range []codeq.Durability{codeq.DurabilityProcess, codeq.DurabilityNone} {
		t.Run(level.String(), func(t *testing.T) {
			disk := crashfs.New()
			q, err := codeq.Open("queue", inspect.With(&codeq.Options{Shards: 1, Durability: level}, inspect.Private{FS: disk}))
			require.NoError(t, err)
			defer func() { require.NoError(t, q.Close()) }()
			db := queuetest.StoreOf(q, 0).DB()
			produced := 0
			produce := func(bytes int) (logged int) { // logged: bytes of its record beside the payload
				before := db.Metrics().WAL.Size
				produced++
				payload := fmt.Appendf(nil, "%d %s", produced, strings.Repeat("x", bytes))[:bytes]
				queuetest.Produce(t, q, codeq.Task{Queue: "a", Payload: payload})
				return int(db.Metrics().WAL.Size-before) - bytes - header
			}
			written := func(n int) { // waits until n bytes of the log are written
				require.Eventually(t, func() bool { return testkit.LogSize(t, disk, "queue/shard-000") >= n }, 10*time.Second, time.Millisecond)
			}

			produce(10)
			more := produce(17_000)
			at := int(db.Metrics().WAL.Size)
			require.Less(t, at, block)
			produce(3*block - free - at - 3*header - more)
			require.EqualValues(t, 3*block-free, db.Metrics().WAL.Size)
			written(3*block - free)
			testkit.SyncLogs(t, disk, "queue/shard-000")
			for db.Metrics().WAL.Size <= 4*block {
				produce(100) // Pebble takes long to give up on larger records
			}
			written(4 * block)

			torn := 0
			for seed := range uint64(20) {
				img := disk.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 50, RNG: rand.New(rand.NewPCG(seed, 0))})
				q, err := codeq.Open("queue", inspect.With(&codeq.Options{}, inspect.Private{FS: img}))
				require.NoError(t, err)
				require.NoError(t, queuetest.CheckAll(q))
				tasks, err := queuetest.List(q)
				require.NoError(t, err)
				for _, info := range tasks {
					require.LessOrEqual(t, queuetest.SerialOf(info.Payload), len(tasks), "a gap, seed %d", seed)
				}
				if len(tasks) < produced {
					torn++
				}
				require.NoError(t, q.Close())
			}
			require.NotZero(t, torn)
		})
	}
}

// flowCut is a flow over three shards, until the power fails. The logs of the shards reach the disk
// at different moments.
type flowCut struct {
	*queuetest.FlowTest
	disk *crashfs.Disk
	rng  *rand.Rand
	n    int               // tasks, for their payloads
	next map[string]string // by completed task, its follow-up in another shard
}

// retentionOfParents is less than the time between the power loss and the work after it.
const retentionOfParents = time.Hour

// task returns a new task with its own payload. Tasks that are kept for ever show later how they
// ended.
func (c *flowCut) task(queue string) codeq.Task {
	c.n++
	t := codeq.Task{Queue: queue, Payload: fmt.Appendf(nil, "%s%d", queue, c.n), Retention: codeq.Forever}
	if queue == "parent" && c.rng.IntN(3) == 0 {
		t.Retention = retentionOfParents
	}
	return t
}

// work does a random step: it produces tasks with two or three parents, ends parents, or completes
// tasks with a follow-up in another shard. At times it syncs the log of one shard.
func (c *flowCut) work() {
	ctx := context.Background()
	switch c.rng.IntN(8) {
	case 0, 1:
		child := c.task("child")
		child.OnDead = []codeq.OnDead{codeq.CancelOnDead, codeq.RunOnDead}[c.rng.IntN(2)]
		for range 2 + c.rng.IntN(2) {
			child.After = append(child.After, c.ProduceAt(c.rng.IntN(3), c.task("parent")))
		}
		c.ProduceAt(c.rng.IntN(3), child)
	case 2, 3, 4, 5:
		l := queuetest.ClaimNow(c.T, c.Q, "parent", "child", "next")
		if l == nil {
			return
		}
		switch kind := c.rng.IntN(12); {
		case kind == 0 && l.Queue == "parent":
			require.NoError(c, c.Q.DeadLetter(ctx, l.Receipt, nil))
		case kind == 1 && l.Queue == "parent":
			require.NoError(c, c.Q.Cancel(ctx, l.ID))
		default:
			c.complete(l)
		}
	case 6:
		time.Sleep(time.Duration(c.rng.IntN(1500)) * time.Millisecond)
	case 7:
		testkit.SyncLogs(c, c.disk, fmt.Sprintf("queue/shard-%03d", c.rng.IntN(3)))
	}
}

// complete completes a task, perhaps with a follow-up in another shard.
func (c *flowCut) complete(l *codeq.Lease) {
	var next []codeq.Task
	key := string(l.Payload)
	if l.Queue != "next" && len(key)%2 == 0 {
		t := c.Bound("next", (queuetest.ShardOf(l.ID, 3)+1)%3, 1)[0]
		t.Payload, t.Retention, t.Unique = []byte("next of "+key), codeq.Forever, codeq.Unique{Key: key, For: 1000 * time.Hour}
		next, c.next[key] = append(next, t), string(t.Payload)
	}
	require.NoError(c, c.Q.Complete(context.Background(), l.Receipt, nil, next...))
}

// stored returns the tasks by payload, and checks that no payload is stored twice.
func (c *flowCut) stored() map[string]*codeq.TaskInfo {
	synctest.Wait()
	all, err := queuetest.List(c.Q)
	require.NoError(c, err)
	found := make(map[string]*codeq.TaskInfo)
	for _, t := range all {
		require.NotContains(c, found, string(t.Payload), "twice")
		found[string(t.Payload)] = t
	}
	return found
}

// checkAfterLoss works on the queue after a power loss. A follow-up is there if the task before it
// has been completed. A waiting task goes on when its parents have ended in their shards, and not
// before; the results of the parents are there.
func (c *flowCut) checkAfterLoss() {
	c.Check()
	left := c.stored()
	for before, next := range c.next {
		if t := left[before]; t != nil && t.State == codeq.Done {
			require.Contains(c, left, next, "the follow-up of %s is gone", before)
		}
	}
	time.Sleep(2 * retentionOfParents)
	for range 10_000 {
		synctest.Wait()
		l := queuetest.ClaimNow(c.T, c.Q, "parent", "child", "next")
		if l == nil {
			break
		}
		if t := left[string(l.Payload)]; t != nil && t.State == codeq.Blocked {
			for _, p := range t.After {
				parent, err := c.Q.Get(context.Background(), p)
				done := slices.ContainsFunc(slices.Collect(maps.Values(left)), func(t *codeq.TaskInfo) bool { return t.ID == p && t.State == codeq.Done })
				switch {
				case err == nil:
					require.True(c, parent.State == codeq.Done || parent.State == codeq.Dead && t.OnDead == codeq.RunOnDead, "%s runs, and its parent %s is %v", l.Payload, parent.Payload, parent.State)
				case done:
					require.NoError(c, err, "%s runs, and the result of its parent is gone", l.Payload)
				}
			}
		}
		c.complete(l)
	}
	end := c.stored()
	for payload, t := range end {
		require.NotEqual(c, codeq.Blocked, t.State, "%s hangs: %+v", payload, t)
	}
	require.NoError(c, c.Q.WaitIdle(context.Background()))
	time.Sleep(3 * retentionOfParents)
	for payload, t := range c.stored() {
		require.True(c, t.State != codeq.Done || t.Retention != retentionOfParents, "%s is kept for nobody", payload)
	}
	c.Check()
}

// cutFlow runs a flow, and then goes on from an image of its disk. It returns whether Verify finds
// that the shards of the image contradict each other.
func cutFlow(t *testing.T, seed uint64, level codeq.Durability, image func(c *flowCut) *crashfs.Disk) (contradict bool) {
	disk := crashfs.New()
	queuetest.InFlow(t, *inspect.With(&codeq.Options{Shards: 3, Durability: level, MemTableBytes: 256 << 10}, inspect.Private{FS: disk, Boot: "1"}), func(f *queuetest.FlowTest) {
		c := &flowCut{FlowTest: f, disk: disk, rng: rand.New(rand.NewPCG(seed, 0)), next: make(map[string]string)}
		img := &queuetest.FlowTest{T: t, Opts: f.Opts}
		disk := image(c)
		inspect.Options(&img.Opts).FS, inspect.Options(&img.Opts).Boot = disk, "2"
		report, err := codeq.Verify("queue", inspect.With(&codeq.VerifyOptions{}, inspect.Private{FS: disk}))
		require.NoError(t, err)
		contradict = !report.OK()
		img.Open()
		after := *c
		after.FlowTest = img
		after.checkAfterLoss()
		require.NoError(t, img.Q.Close())
		report, err = codeq.Verify("queue", inspect.With(&codeq.VerifyOptions{}, inspect.Private{FS: disk}))
		require.NoError(t, err)
		require.Empty(t, report.Problems)
	})
	return contradict
}

// eachCut calls cut with new seeds, and expects that some images contradict themselves.
func eachCut(t *testing.T, cut func(t *testing.T, seed uint64) bool) {
	rng := testkit.Seeded(t)
	contradict := 0
	for n := range testkit.Sized(20, 500) {
		seed := rng.Uint64()
		require.True(t, t.Run(fmt.Sprintf("%d-%x", n, seed), func(t *testing.T) {
			if cut(t, seed) {
				contradict++
			}
		}))
	}
	t.Logf("%d images whose shards contradict each other", contradict)
	require.Positive(t, contradict)
}

// TestPowerLossesOfFlows: power fails again and again, while tasks have parents and follow-ups in
// other shards. Each shard keeps its synced part, which may be newer or older than those of the
// others. No task hangs, no parent is counted twice, and Verify can list the contradictions before
// the queue is opened.
func TestPowerLossesOfFlows(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	eachCut(t, func(t *testing.T, seed uint64) bool {
		return cutFlow(t, seed, []codeq.Durability{codeq.DurabilityProcess, codeq.DurabilityNone}[seed%2], func(c *flowCut) *crashfs.Disk {
			for range 20 + c.rng.IntN(100) {
				c.work()
			}
			synctest.Wait()
			return c.disk.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 50 * c.rng.IntN(2), RNG: c.rng})
		})
	})
}

// TestShardsOfDifferentMoments puts a queue together from shards of any moments, like those of a
// node that goes on without a majority, or of a copy made while the queue worked. Verify lists
// messages that no shard has any more, with the tasks that they produced. Nevertheless no task
// hangs, and no parent is counted twice.
func TestShardsOfDifferentMoments(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	eachCut(t, func(t *testing.T, seed uint64) bool {
		return cutFlow(t, seed, codeq.DurabilityProcess, func(c *flowCut) *crashfs.Disk {
			images := []*crashfs.Disk{c.disk.Clone()}
			for range 20 + c.rng.IntN(100) {
				if c.work(); c.rng.IntN(10) == 0 {
					synctest.Wait()
					images = append(images, c.disk.Clone())
				}
			}
			synctest.Wait()
			image := c.disk.Clone()
			for i := range 3 {
				dir := fmt.Sprintf("queue/shard-%03d", i)
				require.NoError(t, image.RemoveAll(dir))
				_, err := vfs.Clone(images[c.rng.IntN(len(images))], image, dir, dir, vfs.CloneSync)
				require.NoError(t, err)
			}
			clear(c.next) // perhaps no shard has them
			return image
		})
	})
}

// change is a call that brought a task into a state.
type change struct {
	op       *changeOp
	token    uint64      // of the lease that the call granted or ended; 0: produced
	ended    bool        // the call ended the lease
	state    codeq.State // 0: the task is gone
	attempts int
}

// changeOp is a call. It may change several tasks of one shard: all or none.
type changeOp struct {
	shard      int
	start, end int64 // by powerLoad.clock
}

// history is the changes of one task.
type history []change

// sort orders the changes as their leases.
func (h history) sort() {
	slices.SortStableFunc(h, func(a, b change) int {
		switch {
		case a.token < b.token, a.token == b.token && !a.ended && b.ended:
			return -1
		case a.token > b.token, a.token == b.token && a.ended && !b.ended:
			return 1
		}
		return 0
	})
}

// diskImage is a disk after a power loss.
type diskImage struct {
	disk    *crashfs.Disk
	at      string // the operation that was about to begin
	percent int    // of the unsynced data is left
	// The image was made between these moments.
	from, to int64
}

// powerLoad is a queue under load on a disk, with images of that disk.
type powerLoad struct {
	t     *testing.T
	q     *codeq.Queue
	disk  *crashfs.Disk
	opts  codeq.Options
	clock atomic.Int64 // orders calls and images

	mu        sync.Mutex // guards the fields below
	rng       *rand.Rand
	odds      int // one of so many occasions makes an image; 0: none any more
	images    []diskImage
	histories map[int]history // by the serial number that is a task's payload
	serial    int

	logs atomic.Int64 // begun
}

// maxImages is the largest number of images of one load; its odds make about as many.
const maxImages = 12

func newPowerLoad(t *testing.T, level codeq.Durability, disk *crashfs.Disk, rng *rand.Rand) *powerLoad {
	p := &powerLoad{t: t, disk: disk, rng: rng, odds: 180, histories: make(map[int]history)}
	p.opts = *queuetest.OnDisk(&testkit.HookFS{FS: disk, Before: p.before, Wrote: p.wrote}, &codeq.Options{
		Shards: 2, Durability: level, LeaseFor: time.Hour, WindowTasks: 8,
		MemTableBytes: 256 << 10,
	})
	var err error
	p.q, err = codeq.Open("data/queue", &p.opts)
	require.NoError(t, err)
	return p
}

func (p *powerLoad) before(op, name string) error {
	if (op == "create" || op == "reuse") && path.Ext(name) == ".log" {
		p.logs.Add(1)
	}
	p.occasion(op + " " + name)
	return nil
}

// wrote acts as the operating system: it writes back unsynced data at a random time.
func (p *powerLoad) wrote(f vfs.File) {
	if p.chance(10) == 0 {
		if err := f.SyncData(); err != nil {
			panic(err)
		}
	}
}

// chance returns a random number below n.
func (p *powerLoad) chance(n int) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.rng.IntN(n)
}

// occasion makes an image with the odds of the load.
func (p *powerLoad) occasion(at string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.odds == 0 || len(p.images) == maxImages || p.rng.IntN(p.odds) > 0 {
		return
	}
	img := diskImage{at: at, percent: min(max(p.rng.IntN(160)-30, 0), 100), from: p.clock.Add(1)}
	img.disk = p.disk.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: img.percent, RNG: p.rng})
	img.to = p.clock.Add(1)
	p.images = append(p.images, img)
}

// do makes a call, and records its changes unless it failed.
func (p *powerLoad) do(call func(op *changeOp) (map[int]change, error)) error {
	op := &changeOp{start: p.clock.Add(1)}
	changes, err := call(op)
	if err != nil {
		return err
	}
	op.end = p.clock.Add(1)
	p.mu.Lock()
	for serial, c := range changes {
		c.op = op
		p.histories[serial] = append(p.histories[serial], c)
	}
	p.mu.Unlock()
	p.occasion("idle")
	return nil
}

// newTasks returns n tasks and their serial numbers.
func (p *powerLoad) newTasks(n int) (tasks []codeq.Task, serials []int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for range n {
		p.serial++
		t := codeq.Task{
			Queue:       []string{"a", "b"}[p.rng.IntN(2)],
			Tenant:      []string{"", "x"}[p.rng.IntN(2)],
			Priority:    p.rng.IntN(2),
			MaxAttempts: 100,
			Payload:     fmt.Appendf(nil, "%d %s", p.serial, strings.Repeat("x", p.rng.IntN(300))),
		}
		if p.rng.IntN(3) == 0 {
			t.Retention = codeq.Forever
		}
		if p.rng.IntN(20) == 0 {
			t.RunAt = time.Now().Add(time.Hour)
		}
		tasks, serials = append(tasks, t), append(serials, p.serial)
	}
	return tasks, serials
}

// firstState is the state of a new task.
func firstState(t *codeq.Task) codeq.State {
	if t.RunAt.IsZero() {
		return codeq.Ready
	}
	return codeq.Scheduled
}

// produce makes calls that produce n tasks.
func (p *powerLoad) produce(n int) error {
	for n > 0 {
		tasks, serials := p.newTasks(1 + p.chance(4))
		n -= len(tasks)
		err := p.do(func(op *changeOp) (map[int]change, error) {
			ids, err := p.q.ProduceBatch(context.Background(), tasks)
			if err != nil {
				return nil, err
			}
			op.shard = queuetest.ShardOf(ids[0], p.opts.Shards)
			changes := make(map[int]change)
			for i := range ids {
				changes[serials[i]] = change{state: firstState(&tasks[i])}
			}
			return changes, nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// work claims tasks and ends their leases in different ways, until ctx ends.
func (p *powerLoad) work(ctx context.Context) error {
	for {
		var leases []*codeq.Lease
		err := p.do(func(op *changeOp) (changes map[int]change, err error) {
			leases, err = p.q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{"a", "b"}, Max: 1 + p.chance(3)})
			if err != nil {
				return nil, err
			}
			op.shard = queuetest.ShardOf(leases[0].ID, p.opts.Shards)
			changes = make(map[int]change)
			for _, l := range leases {
				changes[queuetest.SerialOf(l.Payload)] = change{token: l.Receipt.Token, state: codeq.Leased, attempts: l.Attempt}
			}
			return changes, nil
		})
		if errors.Is(err, context.Canceled) {
			return nil
		}
		if err != nil {
			return err
		}
		for _, l := range leases {
			if err := p.finish(l); err != nil {
				return err
			}
		}
	}
}

func (p *powerLoad) finish(l *codeq.Lease) error {
	ctx := context.Background()
	kind := p.chance(20)
	if kind == 0 {
		return nil // its lease expires
	}
	return p.do(func(op *changeOp) (changes map[int]change, err error) {
		op.shard = queuetest.ShardOf(l.ID, p.opts.Shards)
		c := change{token: l.Receipt.Token, ended: true, state: codeq.Ready, attempts: l.Attempt}
		changes = make(map[int]change)
		switch kind {
		case 1:
			err = p.q.Retry(ctx, l.Receipt, codeq.RetryOptions{After: -1, Err: errors.New("again")})
		case 2:
			c.state = codeq.Scheduled
			err = p.q.Retry(ctx, l.Receipt, codeq.RetryOptions{After: time.Hour})
		case 3:
			c.attempts--
			err = p.q.Release(ctx, l.Receipt, 0)
		case 4:
			c.state = codeq.Dead
			err = p.q.DeadLetter(ctx, l.Receipt, errors.New("given up"))
		case 5: // its lease expires too
			c.state = codeq.Leased
			err = p.q.Extend(ctx, l.Receipt, 2*time.Hour)
		default:
			c.state = 0
			if l.Retention == codeq.Forever {
				c.state = codeq.Done
			}
			tasks, serials := p.newTasks(max(p.chance(8)-5, 0))
			for i := range tasks {
				changes[serials[i]] = change{state: firstState(&tasks[i])}
			}
			err = p.q.Complete(ctx, l.Receipt, nil, tasks...)
		}
		changes[queuetest.SerialOf(l.Payload)] = c
		return changes, err
	})
}

// run produces n tasks, and works on them at the same time.
func (p *powerLoad) run(n int) {
	const producers, workers = 3, 4
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var producing, working sync.WaitGroup
	errs := make(chan error, producers+workers)
	for range producers {
		producing.Go(func() { errs <- p.produce(n / producers) })
	}
	for range workers {
		working.Go(func() { errs <- p.work(ctx) })
	}
	producing.Wait()
	cancel()
	working.Wait()
	close(errs)
	for err := range errs {
		require.NoError(p.t, err)
	}
	p.mu.Lock()
	p.odds = 0
	p.mu.Unlock()
	require.NoError(p.t, p.q.Close())
	for _, h := range p.histories {
		h.sort()
	}
}

// found holds the tasks of an image, by serial number.
type found map[int]*codeq.TaskInfo

// check opens an image and compares it with the histories. It returns the tasks of the image, and
// the number of acknowledged calls that it lacks.
func (p *powerLoad) check(img *diskImage) (found, int, error) {
	opts := p.opts
	queuetest.OnDisk(img.disk, &opts)
	q, err := codeq.Open("data/queue", &opts)
	if err != nil {
		return nil, 0, err
	}
	tasks, err := queuetest.List(q)
	err = errors.Join(err, queuetest.CheckAll(q), queuetest.CheckMemory(q), q.Close())
	f := make(found)
	for _, t := range tasks {
		f[queuetest.SerialOf(t.Payload)] = t
	}
	v := p.judge(img, f)
	return f, v.lost, errors.Join(append(v.errs, err)...)
}

// judgement is the result of comparing an image with the histories.
type judgement struct {
	lost int // acknowledged calls that the image lacks
	errs []error
}

func (v *judgement) report(format string, args ...any) {
	v.errs = append(v.errs, fmt.Errorf(format, args...))
}

// judge compares an image with the histories: in each shard, it has all calls before some moment,
// and no call in part.
func (p *powerLoad) judge(img *diskImage, f found) (v judgement) {
	type extent struct {
		lastStart int64 // of the calls in the image
		firstEnd  int64 // of the missing calls
	}
	extents := make([]extent, p.opts.Shards)
	for i := range extents {
		extents[i].firstEnd = 1<<63 - 1
	}
	has, hasNot := make(map[*changeOp]int), make(map[*changeOp]int)
	for serial, h := range p.histories {
		first, last := h.places(f[serial])
		if first > last {
			v.report("task %d is %+v, which it never was", serial, f[serial])
			continue
		}
		for i, c := range h {
			e := &extents[c.op.shard]
			switch {
			case i <= first:
				has[c.op] = serial
				e.lastStart = max(e.lastStart, c.op.start)
				if c.op.start > img.to {
					v.report("task %d is %+v, after the image was made", serial, f[serial])
				}
			case i > last:
				hasNot[c.op] = serial
				e.firstEnd = min(e.firstEnd, c.op.end)
				if c.op.end < img.from {
					v.lost++
				}
			}
		}
	}
	for serial := range f {
		if p.histories[serial] == nil {
			v.report("task %d was never produced", serial)
		}
	}
	for shard, e := range extents {
		if e.firstEnd < e.lastStart {
			v.report("shard %d has a call of %d and lacks one that had ended at %d", shard, e.lastStart, e.firstEnd)
		}
	}
	for op, serial := range has {
		if other, ok := hasNot[op]; ok {
			v.report("of one call, task %d was changed and task %d not", serial, other)
		}
	}
	return v
}

// places returns the range of last changes that explain the found task t: the task has the changes
// up to first, and none after last. -1 is before the first change. If no place explains t, first >
// last.
func (h history) places(t *codeq.TaskInfo) (first, last int) {
	first, last = len(h), -2
	at := func(i int) { first, last = min(first, i), max(last, i) }
	if t == nil {
		at(-1)
	}
	for i, c := range h {
		if t == nil && c.state == 0 || t != nil && t.State == c.state && t.Attempts == c.attempts {
			at(i)
		}
	}
	return first, last
}

// inherit begins the histories with the tasks of an image.
func (p *powerLoad) inherit(f found) {
	for serial, t := range f {
		op := &changeOp{shard: queuetest.ShardOf(t.ID, p.opts.Shards)}
		p.histories[serial] = history{{op: op, state: t.State, attempts: t.Attempts}}
		p.serial = max(p.serial, serial)
	}
}

// TestPowerLoss: power fails under load, over and over; the next load begins with one of the
// images. At every level each image opens, does not contradict itself, and has in each shard all
// changes up to some moment. With DurabilityDisk these include every acknowledged change, and with
// DurabilityProcess too if the operating system survives.
func TestPowerLoss(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	for _, level := range []codeq.Durability{codeq.DurabilityProcess, codeq.DurabilityDisk, codeq.DurabilityNone} {
		t.Run(level.String(), func(t *testing.T) {
			rng := testkit.Seeded(t)
			disk := crashfs.New()
			var inherited found
			images, lossy, logs, shards := 0, 0, 0, 0
			for range 2 {
				p := newPowerLoad(t, level, disk, rng)
				p.inherit(inherited)
				p.run(2400)
				require.NotEmpty(t, p.images)
				closed := diskImage{disk: p.disk.CrashClone(vfs.CrashCloneCfg{}), at: "closed", from: p.clock.Add(1)}
				closed.to = p.clock.Add(1)
				_, lost, err := p.check(&closed)
				require.NoError(t, err)
				require.Zero(t, lost, "Close makes everything durable")
				next := rng.IntN(len(p.images))
				for i := range p.images {
					img := &p.images[i]
					if i == next {
						disk = img.disk.CrashClone(vfs.CrashCloneCfg{})
					}
					f, lost, err := p.check(img)
					require.NoError(t, err, "%d%% of what was not synced, at %q", img.percent, img.at)
					if level == codeq.DurabilityDisk || level == codeq.DurabilityProcess && img.percent == 100 {
						require.Zero(t, lost, "%d%% of what was not synced, at %q", img.percent, img.at)
					}
					if lost > 0 {
						lossy++
					}
					if i == next {
						inherited = f
					}
				}
				images, logs, shards = images+len(p.images), logs+int(p.logs.Load()), p.opts.Shards
			}
			t.Logf("%d images, %d without something that was acknowledged", images, lossy)
			require.GreaterOrEqual(t, images, maxImages/2) // without syncs there are fewer operations to crash at
			require.Greater(t, logs, 3*shards, "the load is too small to begin new logs; creation and two Opens do")
			require.Equal(t, level != codeq.DurabilityDisk, lossy > 0)
		})
	}
}
