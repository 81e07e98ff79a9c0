package faults_test

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
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
