package queuetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
)

// VariedNow is when the clock of a varied queue stands still.
var VariedNow = time.UnixMilli(1_800_000_000_000)

// VariedOptions are those of a queue that variedQueue has filled. Its clock
// stands still, so that nothing becomes due.
func VariedOptions(fs vfs.FS) *codeq.Options {
	return inspect.With(&codeq.Options{
		Shards: 2, MemTableBytes: 256 << 10, LeaseFor: 24 * time.Hour, CacheBytes: 4 << 20,
	}, inspect.Private{FS: fs, Wall: func() time.Time { return VariedNow }})
}

// VariedQueue fills a queue with all that a queue may have, in tables and in logs.
func VariedQueue(t *testing.T, fs vfs.FS) *codeq.Queue {
	t.Helper()
	ctx := context.Background()
	opts := VariedOptions(fs)
	q, err := codeq.Open("queue", opts)
	require.NoError(t, err)
	require.NoError(t, q.Configure(ctx, "a", func(s *codeq.Settings) { s.Retention = time.Hour }))
	require.NoError(t, q.Configure(ctx, "limited", func(s *codeq.Settings) { s.ConcurrencyPerKey = 1 }))
	require.NoError(t, q.SetSchedule(ctx, codeq.Schedule{Name: "hourly", Every: time.Hour, Task: codeq.Task{Queue: "ticks"}}))
	rng := rand.New(rand.NewPCG(5, 6))
	for round := range 4 {
		var tasks []codeq.Task
		for i := range 120 {
			payload := make([]byte, 20+rng.IntN(300))
			for j := range payload {
				payload[j] = "abcdefgh"[rng.IntN(8)]
			}
			task := codeq.Task{
				Queue: []string{"a", "b"}[i%2], Tenant: []string{"", "x"}[i%4/2], Priority: i % 3, Payload: payload,
				Headers: map[string]string{"n": fmt.Sprint(round, i)},
			}
			name := fmt.Sprint(round, " ", i)
			switch i % 12 {
			case 3:
				task.RunAt = VariedNow.Add(time.Hour)
			case 5:
				task.Unique = codeq.Unique{Key: name, For: time.Hour}
			case 7:
				task.Unique.Key = name
			case 8:
				task.Group = fmt.Sprint(i % 5)
			case 9:
				task.Queue, task.LimitKey = "limited", fmt.Sprint(i%5)
			case 10:
				task.Retention = codeq.Forever
			}
			tasks = append(tasks, task)
		}
		ids, err := q.ProduceBatch(ctx, tasks)
		require.NoError(t, err)
		require.NoError(t, q.Cancel(ctx, ids[0]))
		for i := 1; i < len(ids); i += 11 {
			_, err := q.Produce(ctx, codeq.Task{Queue: "children", After: []codeq.ID{ids[i], ids[i-1]}, Payload: []byte("child")})
			require.NoError(t, err)
		}
		for range 3 {
			leases, err := q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{"a", "b", "limited"}, Max: 12, NoWait: true})
			require.NoError(t, err)
			for i, l := range leases {
				switch i % 6 {
				case 0:
					require.NoError(t, q.Retry(ctx, l.Receipt, codeq.RetryOptions{After: time.Hour, Err: errors.New("again")}))
				case 1:
					require.NoError(t, q.DeadLetter(ctx, l.Receipt, errors.New("given up")))
				case 2:
					require.NoError(t, q.Release(ctx, l.Receipt, 0))
				case 3: // stays leased
				default:
					require.NoError(t, q.Complete(ctx, l.Receipt, []byte("result "+l.Headers["n"]), codeq.Task{Queue: "follow-ups"}))
				}
			}
		}
		if round < 2 {
			Flush(t, q)
		}
	}
	Quiesce(t, q)
	return q
}

// ReadAll returns the visible content of a queue, by reading and then by claiming everything.
func ReadAll(q *codeq.Queue) (seen string, err error) {
	ctx := context.Background()
	var b bytes.Buffer
	for state := codeq.Ready; state <= codeq.Canceled; state++ {
		for t, err := range q.List(ctx, codeq.ListOptions{State: state}) {
			if err != nil {
				return "", err
			}
			// A clock that stands still seems to be set back when Open takes long.
			t.At, t.Until = t.At.UTC().Round(time.Minute), t.Until.UTC().Round(time.Minute)
			fmt.Fprintf(&b, "%+v\n", *t)
			got, err := q.Get(ctx, t.ID)
			if err != nil {
				return "", err
			}
			if !bytes.Equal(got.Payload, t.Payload) {
				return "", fmt.Errorf("task %s is another one by its ID", t.ID)
			}
		}
	}
	stats, err := q.Stats(ctx)
	if err != nil {
		return "", err
	}
	schedules, err := q.Schedules(ctx)
	if err != nil {
		return "", err
	}
	fmt.Fprintf(&b, "%+v %+v\n", stats, schedules)
	for _, name := range []string{"a", "limited"} {
		s, err := q.Settings(name)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(&b, "%+v\n", s)
	}
	_, err = q.Produce(ctx, codeq.Task{Queue: "b", Unique: codeq.Unique{Key: "0 5"}})
	fmt.Fprintf(&b, "%v\n", err)
	if err != nil && !errors.Is(err, codeq.ErrDuplicate) {
		return "", err
	}
	var claimed []string
	for {
		leases, err := q.ClaimBatch(ctx, codeq.ClaimRequest{Queues: []string{"a", "b", "limited", "follow-ups"}, Max: 100, NoWait: true})
		if errors.Is(err, codeq.ErrEmpty) {
			break
		}
		if err != nil {
			return "", err
		}
		for _, l := range leases {
			claimed = append(claimed, fmt.Sprintf("%s %s %d %s %s", l.ID, l.Queue, l.Attempt, l.Payload, l.Headers))
		}
	}
	slices.Sort(claimed) // which shard is asked first is by lot
	return b.String() + strings.Join(claimed, "\n"), nil
}

func VerifyImage(t *testing.T, disk vfs.FS, repair bool) *codeq.VerifyReport {
	t.Helper()
	r, err := codeq.Verify("queue", inspect.With(&codeq.VerifyOptions{Repair: repair}, inspect.Private{FS: disk}))
	require.NoError(t, err)
	return r
}

// TasksOf opens an image, checks it, and returns its tasks.
func TasksOf(t *testing.T, disk *crashfs.Disk) map[codeq.ID]*codeq.TaskInfo {
	t.Helper()
	q, err := codeq.Open("queue", VariedOptions(disk))
	require.NoError(t, err)
	tasks, err := List(q)
	require.NoError(t, errors.Join(err, CheckAll(q), CheckMemory(q), q.Close()))
	return tasks
}

// VariedDisk is a disk with a queue that was closed in order, and its tasks.
func VariedDisk(t *testing.T) (disk *crashfs.Disk, tasks map[codeq.ID]*codeq.TaskInfo) {
	t.Helper()
	disk = crashfs.New()
	q := VariedQueue(t, disk)
	tasks, err := List(q)
	require.NoError(t, errors.Join(err, q.Close()))
	return disk, tasks
}
