package queuetest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
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
	"codeq/internal/keys"
)

// FlowTest is a queue in memory with tasks that depend on each other.
type FlowTest struct {
	*testing.T
	Opts codeq.Options
	Q    *codeq.Queue
}

// InFlow runs a test in fake time, and checks the stored state at its end.
func InFlow(t *testing.T, opts codeq.Options, test func(f *FlowTest)) {
	synctest.Test(t, func(t *testing.T) {
		if inspect.Options(&opts).FS == nil {
			inspect.Options(&opts).FS = crashfs.New()
		}
		f := &FlowTest{T: t, Opts: opts}
		f.Open()
		defer func() { require.NoError(t, f.Q.Close()) }()
		test(f)
		f.Check()
	})
}

func (f *FlowTest) Open() {
	f.Helper()
	var err error
	f.Q, err = codeq.Open("queue", &f.Opts)
	require.NoError(f, err)
}

func (f *FlowTest) Reopen() {
	f.Helper()
	f.Check()
	require.NoError(f, f.Q.Close())
	f.Open()
	f.Check()
}

// Check waits until nothing is under way, and runs the checkers.
func (f *FlowTest) Check() {
	f.Helper()
	synctest.Wait()
	require.NoError(f, CheckAll(f.Q))
	require.NoError(f, CheckMemory(f.Q))
}

// ProduceAt stores a task in a shard that does not belong to another one.
func (f *FlowTest) ProduceAt(shard int, task codeq.Task) codeq.ID {
	f.Helper()
	return Produce(f.T, StartingAt(f.Q, shard), task)[0]
}

func (f *FlowTest) Batch(tasks ...codeq.Task) []codeq.ID {
	f.Helper()
	ids, err := f.Q.ProduceBatch(context.Background(), tasks)
	require.NoError(f, err)
	return ids
}

// Claim leases the next task of a queue.
func (f *FlowTest) Claim(queue string) *codeq.Lease {
	f.Helper()
	synctest.Wait()
	l := ClaimNow(f.T, f.Q, queue)
	require.NotNil(f, l, "nothing is ready in %q", queue)
	return l
}

// Complete claims the next task of a queue and completes it.
func (f *FlowTest) Complete(queue string, next ...codeq.Task) {
	f.Helper()
	require.NoError(f, f.Q.Complete(context.Background(), f.Claim(queue).Receipt, nil, next...))
	f.Check()
}

func (f *FlowTest) Cancel(id codeq.ID) {
	f.Helper()
	require.NoError(f, f.Q.Cancel(context.Background(), id))
	f.Check()
}

// State returns where a task is; 0 if it does not exist.
func (f *FlowTest) State(id codeq.ID) codeq.State {
	f.Helper()
	synctest.Wait()
	info, err := f.Q.Get(context.Background(), id)
	if errors.Is(err, codeq.ErrNotFound) {
		return 0
	}
	require.NoError(f, err)
	return info.State
}

func (f *FlowTest) RequireState(want codeq.State, ids ...codeq.ID) {
	f.Helper()
	for i, id := range ids {
		require.Equal(f, want, f.State(id), "task %d of %d", i, len(ids))
	}
}

// RequireGone makes sure that tasks do not exist.
func (f *FlowTest) RequireGone(ids ...codeq.ID) {
	f.Helper()
	f.RequireState(0, ids...)
}

func (f *FlowTest) Counts(queue string) codeq.Counts {
	f.Helper()
	synctest.Wait()
	stats, err := f.Q.Stats(context.Background())
	require.NoError(f, err)
	return stats[queue]
}

// KeyOf returns a LimitKey for tasks of a queue in a given shard.
func (f *FlowTest) KeyOf(queue string, shard int) string { return KeyOf(queue, shard, f.Opts.Shards) }

// Bound returns n tasks of a queue that belong to a shard, with payloads that tell them apart.
func (f *FlowTest) Bound(queue string, shard, n int) []codeq.Task {
	tasks := make([]codeq.Task, n)
	key := f.KeyOf(queue, shard)
	for i := range tasks {
		tasks[i] = codeq.Task{Queue: queue, LimitKey: key, Payload: fmt.Appendf(nil, "%s %d.%d", queue, shard, i)}
	}
	return tasks
}

// Collect returns the payloads of the tasks of a list.
func Collect(t *testing.T, list iter.Seq2[*codeq.TaskInfo, error]) (payloads []string) {
	t.Helper()
	for info, err := range list {
		require.NoError(t, err)
		payloads = append(payloads, string(info.Payload))
	}
	return payloads
}

// Listed returns the payloads of the tasks that List yields.
func (f *FlowTest) Listed(o codeq.ListOptions) []string {
	f.Helper()
	synctest.Wait()
	return Collect(f.T, f.Q.List(context.Background(), o))
}

// Spread produces tasks, with their names as payloads, in one shard after the
// other, a millisecond apart.
func (f *FlowTest) Spread(tasks ...codeq.Task) (ids []codeq.ID) {
	f.Helper()
	for i, task := range tasks {
		ids = append(ids, f.ProduceAt(i%f.Opts.Shards, task))
		time.Sleep(time.Millisecond)
	}
	return ids
}

// Payloads returns those of the tasks that are stored, in order.
func (f *FlowTest) Payloads() (all []string) {
	f.Helper()
	tasks, err := List(f.Q)
	require.NoError(f, err)
	for _, t := range tasks {
		all = append(all, string(t.Payload))
	}
	slices.SortFunc(all, ByLength)
	return all
}

// ByLength orders strings by their length, and those of one length as ever.
func ByLength(a, b string) int { return cmp.Or(cmp.Compare(len(a), len(b)), strings.Compare(a, b)) }

// Kept returns how many messages of a shard are stored.
func (f *FlowTest) Kept(from int) int {
	f.Helper()
	synctest.Wait()
	return StoredIn(f.T, f.Q, from, keys.Outbound)
}

// UnderWay is how many messages of a shard are not confirmed.
func (f *FlowTest) UnderWay(from int) (n uint64) {
	f.Helper()
	require.NoError(f, inspect.Of(f.Q).Owner(from, func(o *inspect.Owner) error {
		for _, waiting := range o.Rules.Probe().Usage().Out.Waiting {
			n += waiting
		}
		return nil
	}))
	return n
}

// Crash goes on with the content of the disk after a power failure at this moment.
func (f *FlowTest) Crash(disk *crashfs.Disk) *FlowTest {
	f.Helper()
	img := &FlowTest{T: f.T, Opts: f.Opts}
	inspect.Options(&img.Opts).FS, inspect.Options(&img.Opts).Boot = disk.CrashClone(vfs.CrashCloneCfg{}), "after "+inspect.Options(&f.Opts).Boot
	img.Open()
	img.Check()
	return img
}
