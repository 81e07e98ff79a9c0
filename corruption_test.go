package codeq

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"path"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/manifest"
	"codeq/internal/testkit"
)

var (
	corruptFor = flag.Duration("corrupt.for", 0, "how long TestCorruption, TestCorruptionOfANode (for each image) and TestRepairOfFiles flip bits; 0: some of each kind of file. If positive, TestRepairInterrupted and TestRaiseInterrupted cut the power at each operation")
	corruptAll = flag.Bool("corrupt.all", false, "TestCorruption flips every bit of every file")
)

// variedNow is when the clock of a varied queue stands still.
var variedNow = time.UnixMilli(1_800_000_000_000)

// variedOptions are those of a queue that variedQueue has filled. Its clock
// stands still, so that nothing becomes due.
func variedOptions(fs vfs.FS) *Options {
	return inspect.With(&Options{
		Shards: 2, MemTableBytes: 256 << 10, LeaseFor: 24 * time.Hour, CacheBytes: 4 << 20,
	}, inspect.Private{FS: fs, Wall: func() time.Time { return variedNow }})
}

// variedQueue fills a queue with all that a queue may have, in tables and in logs.
func variedQueue(t *testing.T, fs vfs.FS) *Queue {
	t.Helper()
	ctx := context.Background()
	opts := variedOptions(fs)
	q, err := Open("queue", opts)
	require.NoError(t, err)
	require.NoError(t, q.Configure(ctx, "a", func(s *Settings) { s.Retention = time.Hour }))
	require.NoError(t, q.Configure(ctx, "limited", func(s *Settings) { s.ConcurrencyPerKey = 1 }))
	require.NoError(t, q.SetSchedule(ctx, Schedule{Name: "hourly", Every: time.Hour, Task: Task{Queue: "ticks"}}))
	rng := rand.New(rand.NewPCG(5, 6))
	for round := range 4 {
		var tasks []Task
		for i := range 120 {
			payload := make([]byte, 20+rng.IntN(300))
			for j := range payload {
				payload[j] = "abcdefgh"[rng.IntN(8)]
			}
			task := Task{
				Queue: []string{"a", "b"}[i%2], Tenant: []string{"", "x"}[i%4/2], Priority: i % 3, Payload: payload,
				Headers: map[string]string{"n": fmt.Sprint(round, i)},
			}
			name := fmt.Sprint(round, " ", i)
			switch i % 12 {
			case 3:
				task.RunAt = variedNow.Add(time.Hour)
			case 5:
				task.Unique = Unique{Key: name, For: time.Hour}
			case 7:
				task.Unique.Key = name
			case 8:
				task.Group = fmt.Sprint(i % 5)
			case 9:
				task.Queue, task.LimitKey = "limited", fmt.Sprint(i%5)
			case 10:
				task.Retention = Forever
			}
			tasks = append(tasks, task)
		}
		ids, err := q.ProduceBatch(ctx, tasks)
		require.NoError(t, err)
		require.NoError(t, q.Cancel(ctx, ids[0]))
		for i := 1; i < len(ids); i += 11 {
			_, err := q.Produce(ctx, Task{Queue: "children", After: []ID{ids[i], ids[i-1]}, Payload: []byte("child")})
			require.NoError(t, err)
		}
		for range 3 {
			leases, err := q.ClaimBatch(ctx, ClaimRequest{Queues: []string{"a", "b", "limited"}, Max: 12, NoWait: true})
			require.NoError(t, err)
			for i, l := range leases {
				switch i % 6 {
				case 0:
					require.NoError(t, q.Retry(ctx, l.Receipt, RetryOptions{After: time.Hour, Err: errors.New("again")}))
				case 1:
					require.NoError(t, q.DeadLetter(ctx, l.Receipt, errors.New("given up")))
				case 2:
					require.NoError(t, q.Release(ctx, l.Receipt, 0))
				case 3: // stays leased
				default:
					require.NoError(t, q.Complete(ctx, l.Receipt, []byte("result "+l.Headers["n"]), Task{Queue: "follow-ups"}))
				}
			}
		}
		if round < 2 {
			flush(t, q)
		}
	}
	q.quiesce(t)
	return q
}

// quiesce waits until nothing is under way between the shards.
func (q *Queue) quiesce(t *testing.T) {
	t.Helper()
	for range 2 { // what one shard sends may make another one send
		for _, s := range q.led() {
			require.Eventually(t, func() bool {
				idle := false
				require.NoError(t, s.probe(func(s *shard) error {
					idle = !s.isSending() && !s.due()
					return nil
				}))
				return idle
			}, 20*time.Second, time.Millisecond)
		}
	}
}

// readAll is what a queue shows to its user, by reading and then by claiming everything.
func (q *Queue) readAll() (seen string, err error) {
	ctx := context.Background()
	var b bytes.Buffer
	for state := Ready; state <= Canceled; state++ {
		for t, err := range q.List(ctx, ListOptions{State: state}) {
			if err != nil {
				return "", err
			}
			t.At = t.At.UTC()
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
	_, err = q.Produce(ctx, Task{Queue: "b", Unique: Unique{Key: "0 5"}})
	fmt.Fprintf(&b, "%v\n", err)
	if err != nil && !errors.Is(err, ErrDuplicate) {
		return "", err
	}
	var claimed []string
	for {
		leases, err := q.ClaimBatch(ctx, ClaimRequest{Queues: []string{"a", "b", "limited", "follow-ups"}, Max: 100, NoWait: true})
		if errors.Is(err, ErrEmpty) {
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

// corruptible is an image of a disk with a varied queue, whose bits are flipped.
type corruptible struct {
	*testkit.Image
	t    *testing.T
	want string // what readAll shows
}

func newCorruptible(t *testing.T, disk *crashfs.Disk) *corruptible {
	c := &corruptible{Image: testkit.ImageOf(t, disk, "queue"), t: t}
	q, err := Open("queue", variedOptions(disk.Clone()))
	require.NoError(t, err)
	require.NoError(t, q.checkAll())
	c.want, err = q.readAll()
	require.NoError(t, err)
	require.NoError(t, q.Close())
	return c
}

// try opens the image with a flipped bit and reads everything. It returns
// whether the bit was noticed.
func (c *corruptible) try(name string, bit int) bool {
	t, what := c.t, fmt.Sprintf("%s, bit %d of %d", name, bit, 8*len(c.Content[name]))
	disk := c.Flip(t, name, bit)
	var q *Queue
	var seen string
	err := testkit.InTime(t, what, func() (err error) {
		if q, err = Open("queue", variedOptions(disk)); err != nil {
			return err
		}
		seen, err = q.readAll()
		return errors.Join(err, ignoreFailed(q.Close(), err))
	})
	if err == nil {
		require.Empty(t, otherLines(c.want, seen), what)
		return false
	}
	if path.Base(name) == manifest.Name {
		require.True(t, errors.Is(err, ErrCorrupt) || errors.Is(err, ErrNotQueue), "%s: %v", what, err)
	} else {
		require.ErrorIs(t, err, ErrCorrupt, what)
		require.ErrorContains(t, err, path.Base(path.Dir(name)), what) // the shard
	}
	if kindOf(name) != "OPTIONS-" { // Pebble does not say which one
		require.ErrorContains(t, err, path.Base(name), what)
	}
	return true
}

// otherLines is the lines in which two texts differ, up to the third.
func otherLines(want, got string) (other []string) {
	a, b := strings.Split(want, "\n"), strings.Split(got, "\n")
	for i := range max(len(a), len(b)) {
		if i >= len(a) || i >= len(b) || a[i] != b[i] {
			other = append(other, strings.Join(a[min(i, len(a)):min(i+1, len(a))], ""), strings.Join(b[min(i, len(b)):min(i+1, len(b))], ""))
		}
		if len(other) == 6 {
			break
		}
	}
	return other
}

// ignoreFailed drops the error of a Close that follows another error.
func ignoreFailed(err, before error) error {
	if before != nil {
		return nil
	}
	return err
}

// kindOf is what kind of a file one is, by its name.
func kindOf(name string) string {
	base := strings.TrimRight(path.Base(name), "0123456789")
	if ext := path.Ext(name); ext != "" && !strings.HasPrefix(base, "marker") {
		base = ext
	}
	return base
}

// TestCorruption flips single bits in the files of a closed queue, and of one
// whose process was killed: each is reported with its file, or does no harm.
func TestCorruption(t *testing.T) {
	testkit.AbandonsStores(t)
	disk := crashfs.New()
	q := variedQueue(t, disk)
	killed := disk.Clone()
	require.NoError(t, q.Close())
	for _, image := range []struct {
		name string
		disk *crashfs.Disk
	}{{"closed", disk}, {"killed", killed}} {
		t.Run(image.name, func(t *testing.T) {
			c := newCorruptible(t, image.disk)
			rng := testkit.Seeded(t)
			tried, noticed := make(map[string]int), make(map[string]int)
			try := func(name string, bit int) {
				if image.name == "killed" && path.Ext(name) == ".log" {
					return // a power loss, too, leaves logs with parts that cannot be read
				}
				tried[kindOf(name)]++
				if c.try(name, bit) {
					noticed[kindOf(name)]++
				}
			}
			switch {
			case *corruptAll:
				for _, name := range c.Files {
					for bit := range 8 * len(c.Content[name]) {
						try(name, bit)
					}
				}
			default:
				kinds := make(map[string][]string)
				for _, name := range c.Files {
					kinds[kindOf(name)] = append(kinds[kindOf(name)], name)
				}
				order := slices.Sorted(maps.Keys(kinds))
				for begun, n := time.Now(), 0; *corruptFor == 0 && n < 15*len(order) || time.Since(begun) < *corruptFor; n++ {
					files := kinds[order[n%len(order)]]
					name := files[rng.IntN(len(files))]
					try(name, rng.IntN(8*len(c.Content[name])))
				}
			}
			t.Logf("tried %v, noticed %v", tried, noticed)
			for _, kind := range []string{".sst", ".log", "MANIFEST-", "OPTIONS-", manifest.Name} {
				require.True(t, tried[kind] > 0 || image.name == "killed" && kind == ".log", kind)
				if image.name == "closed" {
					require.NotZero(t, noticed[kind], kind)
				}
			}
		})
	}
}

// TestCorruptionOfOptions: a flipped bit in OPTIONS makes Pebble take the next line for the
// directory of the log.
func TestCorruptionOfOptions(t *testing.T) {
	t.Parallel()
	disk := crashfs.New()
	q := variedQueue(t, disk)
	killed := disk.Clone()
	require.NoError(t, q.Close())
	c := newCorruptible(t, killed)
	const line = "wal_dir=\n"
	tried := 0
	for _, name := range c.Files {
		if at := bytes.Index(c.Content[name], []byte(line)); at >= 0 && kindOf(name) == "OPTIONS-" {
			tried++
			require.True(t, c.try(name, 8*(at+len(line)-1)+3), name)
		}
	}
	require.NotZero(t, tried)
}
