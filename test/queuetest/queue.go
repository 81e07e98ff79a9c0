package queuetest

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/call"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/testkit"
)

// Bubble runs a test in fake time on a queue in memory, and checks the stored state at its end.
func Bubble(t *testing.T, opts codeq.Options, test func(t *testing.T, q *codeq.Queue)) {
	synctest.Test(t, func(t *testing.T) {
		if inspect.Options(&opts).FS == nil {
			inspect.Options(&opts).FS = crashfs.New()
		}
		q, err := codeq.Open("queue", &opts)
		require.NoError(t, err)
		defer func() { require.NoError(t, q.Close()) }()
		test(t, q)
		synctest.Wait()
		require.NoError(t, CheckAll(q))
	})
}

func Produce(t *testing.T, q *codeq.Queue, tasks ...codeq.Task) []codeq.ID {
	t.Helper()
	var ids []codeq.ID
	for _, task := range tasks {
		id, err := q.Produce(context.Background(), task)
		require.NoError(t, err)
		ids = append(ids, id)
	}
	return ids
}

// ClaimNow claims without waiting; nil when nothing is ready.
func ClaimNow(t *testing.T, q *codeq.Queue, queues ...string) *codeq.Lease {
	t.Helper()
	l, err := q.Claim(context.Background(), codeq.ClaimRequest{Queues: queues, NoWait: true})
	if errors.Is(err, codeq.ErrEmpty) {
		return nil
	}
	require.NoError(t, err)
	return l
}

// Claim waits for a lease of a queue.
func Claim(t *testing.T, q *codeq.Queue, queue string) *codeq.Lease {
	t.Helper()
	l, err := q.Claim(context.Background(), codeq.ClaimRequest{Queues: []string{queue}})
	require.NoError(t, err)
	return l
}

// Producing produces a task beside the caller, and returns the outcome later.
func Producing(q *codeq.Queue, task codeq.Task) (outcome <-chan error) {
	done := make(chan error, 1)
	go func() {
		_, err := q.Produce(context.Background(), task)
		done <- err
	}()
	return done
}

// Run makes a queue run handlers until stop is called, which returns the error of Run.
func Run(q *codeq.Queue, m *codeq.Mux, opts codeq.RunOptions) (stop func() error) {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- q.Run(ctx, m, &opts) }()
	return func() error {
		cancel()
		return <-ended
	}
}

// Configure is Configure that has to succeed.
func Configure(t *testing.T, q *codeq.Queue, queue string, change func(*codeq.Settings)) {
	t.Helper()
	require.NoError(t, q.Configure(context.Background(), queue, change))
}

// Complete is Complete that has to succeed.
func Complete(t *testing.T, q *codeq.Queue, l *codeq.Lease) {
	t.Helper()
	require.NotNil(t, l, "nothing to complete")
	require.NoError(t, q.Complete(context.Background(), l.Receipt, nil))
}

// ClosedQueue creates a queue with one task in every shard.
func ClosedQueue(t *testing.T, dir string, shards int) (tasks []codeq.ID) {
	t.Helper()
	q, err := codeq.Open(dir, &codeq.Options{Shards: shards})
	require.NoError(t, err)
	for shard := range shards {
		id, err := StartingAt(q, shard).Produce(context.Background(), codeq.Task{Queue: "a"})
		require.NoError(t, err)
		tasks = append(tasks, id)
	}
	require.NoError(t, q.Close())
	return tasks
}

// RequireTasks opens a queue and looks for its tasks.
func RequireTasks(t *testing.T, dir string, opts *codeq.Options, tasks []codeq.ID) {
	t.Helper()
	q, err := codeq.Open(dir, opts)
	require.NoError(t, err)
	defer func() { require.NoError(t, q.Close()) }()
	for _, id := range tasks {
		_, err := q.Get(context.Background(), id)
		require.NoError(t, err)
	}
	counts, err := q.Stats(context.Background())
	require.NoError(t, err)
	require.EqualValues(t, len(tasks), counts["a"].Ready)
	require.NoError(t, CheckAll(q))
}

// SerialOf is the serial number in a payload.
func SerialOf(payload []byte) int {
	digits, _, _ := strings.Cut(string(payload), " ")
	n, err := strconv.Atoi(digits)
	if err != nil {
		panic(err)
	}
	return n
}

// OpenForRun opens a queue that is closed when the test's bubble ends.
func OpenForRun(t *testing.T, opts codeq.Options) *codeq.Queue {
	t.Helper()
	opts.Shards = cmp.Or(opts.Shards, 1)
	opts.Backoff.Jitter = -1
	if inspect.Options(&opts).FS == nil {
		inspect.Options(&opts).FS = crashfs.New()
	}
	q, err := codeq.Open("q", &opts)
	require.NoError(t, err)
	t.Cleanup(func() {
		if err := q.Close(); !errors.Is(err, testkit.ErrDisk) { // see failShard
			assert.NoError(t, err)
		}
	})
	return q
}

// CountsOf returns the counts of one queue.
func CountsOf(t *testing.T, q *codeq.Queue, name string) codeq.Counts {
	t.Helper()
	counts, err := q.Stats(context.Background())
	require.NoError(t, err)
	return counts[name]
}

func InfoOf(t *testing.T, q *codeq.Queue, id codeq.ID) *codeq.TaskInfo {
	t.Helper()
	i, err := q.Get(context.Background(), id)
	require.NoError(t, err)
	return i
}

var ErrBroken = testkit.ErrBroken

func Keyed(key string) codeq.Task { return codeq.Task{Queue: "a", Unique: codeq.Unique{Key: key}} }

// KeyOf returns a LimitKey for tasks of a queue in a given shard.
func KeyOf(queue string, shard, shards int) string {
	for i := 0; ; i++ {
		key := fmt.Sprint("key ", i)
		ties := record.Ties{Limit: keys.LimitScope(queue, key)}
		if home, _ := ties.Home(shards); home == shard {
			return key
		}
	}
}

// TakeSettings makes the first shard take settings, as after a Configure with a caller that has
// gone.
func TakeSettings(t *testing.T, q *codeq.Queue, queue string, version uint64, set string) {
	t.Helper()
	value := keys.SettingsValue{Version: version, JSON: []byte(set)}.Append(nil)
	c := &call.Configure{Queue: queue, Value: value}
	require.NoError(t, inspect.Of(q).Owner(0, func(o *inspect.Owner) error {
		_, err := c.Decide(o.Rules)
		return err
	}))
	require.False(t, c.Late)
}

// Buffered reads the buffered events of a subscription, without waiting for more.
func Buffered(sub *codeq.Subscription) (events []codeq.Event) {
	for {
		e, err := sub.Next(&oneLook{Context: context.Background()})
		if err != nil {
			return events
		}
		events = append(events, e)
	}
}

// oneLook is a context that ends as soon as a goroutine waits for its end.
type oneLook struct {
	context.Context
	over bool
}

func (c *oneLook) Done() <-chan struct{} {
	c.over = true
	done := make(chan struct{})
	close(done)
	return done
}

func (c *oneLook) Err() error {
	if c.over {
		return context.Canceled
	}
	return nil
}

// OnDisk returns opts, of a queue that lies in fs.
func OnDisk[O codeq.Options | codeq.VerifyOptions | codeq.ReaderOptions](fs vfs.FS, opts *O) *O {
	inspect.Options(opts).FS = fs
	return opts
}

// ShardOf returns the shard of a task, among so many.
func ShardOf(id codeq.ID, shards int) int { return keys.ShardOf(keys.ID(id), shards) }

// TiesOf returns the ties of a task that decide its shard.
func TiesOf(t *codeq.Task) (ties record.Ties) {
	ties.Limit, ties.Group = keys.LimitScope(t.Queue, t.LimitKey), keys.GroupScope(t.Queue, t.Tenant, t.LimitKey, t.Group)
	if t.Unique.Key != "" {
		ties.Unique = keys.UniqueHash(t.Queue, t.Tenant, t.LimitKey, t.Group, t.Unique.Key)
	}
	return ties
}
