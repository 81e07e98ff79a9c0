package faults_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

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
