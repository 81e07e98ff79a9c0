package faults_test

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"maps"
	"path"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/manifest"
	"codeq/internal/simtest"
	"codeq/internal/testbase"
	"codeq/internal/testkit"
	"codeq/test/queuetest"
)

var (
	corruptFor = flag.Duration("corrupt.for", 0, "how long TestCorruption, TestCorruptionOfANode (for each image) and TestRepairOfFiles flip bits; 0: some of each kind of file. If positive, TestRepairInterrupted and TestRaiseInterrupted cut the power at each operation")
	corruptAll = flag.Bool("corrupt.all", false, "TestCorruption flips every bit of every file")
)

// corruptible is an image of a disk with a varied queue. The test flips its bits.
type corruptible struct {
	*testkit.Image
	t    *testing.T
	want string // the result of readAll
}

func newCorruptible(t *testing.T, disk *crashfs.Disk) *corruptible {
	c := &corruptible{Image: testkit.ImageOf(t, disk, "queue"), t: t}
	q, err := codeq.Open("queue", queuetest.VariedOptions(disk.Clone()))
	require.NoError(t, err)
	require.NoError(t, queuetest.CheckAll(q))
	c.want, err = queuetest.ReadAll(q)
	require.NoError(t, err)
	require.NoError(t, q.Close())
	return c
}

// try opens the image with a flipped bit and reads everything. It returns whether the queue
// detected the bit.
func (c *corruptible) try(name string, bit int) bool {
	t, what := c.t, fmt.Sprintf("%s, bit %d of %d", name, bit, 8*len(c.Content[name]))
	disk := c.Flip(t, name, bit)
	var q *codeq.Queue
	var seen string
	err := testkit.InTime(t, what, func() (err error) {
		if q, err = codeq.Open("queue", queuetest.VariedOptions(disk)); err != nil {
			return err
		}
		seen, err = queuetest.ReadAll(q)
		return errors.Join(err, ignoreFailed(q.Close(), err))
	})
	if err == nil {
		require.Empty(t, otherLines(c.want, seen), what)
		return false
	}
	if path.Base(name) == manifest.Name {
		require.True(t, errors.Is(err, codeq.ErrCorrupt) || errors.Is(err, codeq.ErrNotQueue), "%s: %v", what, err)
	} else {
		require.ErrorIs(t, err, codeq.ErrCorrupt, what)
		require.ErrorContains(t, err, path.Base(path.Dir(name)), what) // the shard
	}
	if kindOf(name) != "OPTIONS-" && !c.namesNewTable(err) { // Pebble does not say which one
		require.ErrorContains(t, err, path.Base(name), what)
	}
	return true
}

// namesNewTable reports whether an error names a table that is not in the image: a compaction has
// read the damaged one, and the error names the table that it was writing.
func (c *corruptible) namesNewTable(err error) bool {
	table := regexp.MustCompile(`[^ :]*\.sst`).FindString(err.Error())
	return table != "" && !slices.ContainsFunc(c.Files, func(name string) bool { return strings.HasSuffix(name, table) })
}

// otherLines returns the first three lines that differ between two texts.
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

// kindOf returns the kind of a file by its name.
func kindOf(name string) string {
	base := strings.TrimRight(path.Base(name), "0123456789")
	if ext := path.Ext(name); ext != "" && !strings.HasPrefix(base, "marker") {
		base = ext
	}
	return base
}

// TestCorruption flips single bits in the files of a queue, after a close and after a kill of its
// process. Each flipped bit is reported with its file, or does no harm.
func TestCorruption(t *testing.T) {
	testbase.SkipUnderRace(t)
	testkit.AbandonsStores(t)
	disk := crashfs.New()
	q := queuetest.VariedQueue(t, disk)
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
					return // a power loss also leaves unreadable parts in logs
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

// TestCorruptionOfOptions: a flipped bit in OPTIONS makes Pebble read the next line as the
// directory of the log.
func TestCorruptionOfOptions(t *testing.T) {
	t.Parallel()
	disk := crashfs.New()
	q := queuetest.VariedQueue(t, disk)
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

// panickyFS panics at each read of a table, as Pebble does at some kinds of damage.
type panickyFS struct {
	vfs.FS
	armed *atomic.Bool
	hit   *atomic.Int64
}

type panickyFile struct {
	vfs.File
	fs panickyFS
}

func (fs panickyFS) Open(name string, opts ...vfs.OpenOption) (vfs.File, error) {
	f, err := fs.FS.Open(name, opts...)
	if err == nil && strings.HasSuffix(name, ".sst") {
		f = panickyFile{f, fs}
	}
	return f, err
}

func (f panickyFile) ReadAt(p []byte, off int64) (int, error) {
	if f.fs.armed.Load() && strings.Contains(string(debug.Stack()), "failstop.(*Latch).Read(") {
		f.fs.hit.Add(1)
		panic("slice bounds out of range")
	}
	return f.File.ReadAt(p, off)
}

// TestDamageThatPanics: if damage makes Pebble panic while a store opens, Open returns an error.
func TestDamageThatPanics(t *testing.T) {
	testkit.AbandonsStores(t)
	for name, open := range map[string]func(vfs.FS) (*codeq.Queue, error){
		"alone": func(fs vfs.FS) (*codeq.Queue, error) {
			return codeq.Open("queue", inspect.With(&codeq.Options{Shards: 1}, inspect.Private{FS: fs}))
		},
		"node": func() func(vfs.FS) (*codeq.Queue, error) {
			votes := simtest.NewVotes()
			return func(fs vfs.FS) (*codeq.Queue, error) { return queuetest.OneNode(fs, votes) }
		}(),
	} {
		t.Run(name, func(t *testing.T) {
			disk := panickyFS{crashfs.New(), new(atomic.Bool), new(atomic.Int64)}
			q, err := open(disk)
			require.NoError(t, err)
			queuetest.Produce(t, q, codeq.Task{Queue: "a"})
			require.NoError(t, q.Close())
			disk.armed.Store(true)
			err = testkit.InTime(t, "Open", func() error {
				q, err := open(disk)
				if err == nil {
					err = errors.Join(err, q.Close())
				}
				return err
			})
			require.ErrorIs(t, err, codeq.ErrCorrupt)
			require.ErrorContains(t, err, "slice bounds")
			require.Positive(t, disk.hit.Load())
			disk.armed.Store(false)
			q, err = open(disk)
			require.NoError(t, err)
			queuetest.Claim(t, q, "a")
			require.NoError(t, q.Close())
		})
	}
}

// readNode returns a node's view of its tasks, and the first error.
func readNode(q *codeq.Queue) (seen []string, err error) {
	ctx := context.Background()
	for state := codeq.Ready; state <= codeq.Canceled; state++ {
		for t, err := range q.List(ctx, codeq.ListOptions{State: state}) {
			if err != nil {
				return nil, err
			}
			seen = append(seen, fmt.Sprintf("%s %s %s", t.ID, t.State, t.Payload))
		}
	}
	_, err = q.Produce(ctx, codeq.Task{Queue: "later"})
	return seen, err
}

// TestCorruptionOfANode flips single bits in the files of a cluster node. The node refuses to open
// and returns the reason, or it has all its tasks.
func TestCorruptionOfANode(t *testing.T) {
	testbase.SkipUnderRace(t)
	t.Parallel()
	disk, votes := crashfs.New(), simtest.NewVotes()
	q, err := queuetest.OneNode(disk, votes)
	require.NoError(t, err)
	require.Eventually(t, func() bool { // earlier writes of a founder make many small files
		m, err := manifest.Read(disk, "queue")
		return err == nil && len(m.Founders) == 0 && inspect.Of(q).Leads(0) && inspect.Of(q).Leads(1)
	}, 20*time.Second, time.Millisecond)
	for i := range 60 {
		queuetest.Produce(t, q, codeq.Task{Queue: "a", Payload: fmt.Append(nil, i, strings.Repeat("x", 100))})
		if i == 30 {
			for shard := range inspect.Of(q).Shards() {
				require.NoError(t, inspect.Of(q).Group(shard).Raft().Snapshot().Error())
			}
		}
	}
	for range 10 {
		queuetest.Complete(t, q, queuetest.Claim(t, q, "a"))
	}
	killed := disk.Clone()
	require.NoError(t, q.Close())
	q, err = queuetest.OneNode(disk.Clone(), votes)
	require.NoError(t, err)
	want, err := readNode(q)
	require.NoError(t, errors.Join(err, q.Close()))
	require.Len(t, want, 50)
	r := queuetest.VerifyImage(t, disk, false)
	require.True(t, r.OK(), "%v", r.Problems)
	require.Equal(t, "a", r.Node)
	require.True(t, queuetest.VerifyImage(t, killed, false).OK())

	rng := testkit.Seeded(t)
	for _, image := range []*crashfs.Disk{disk, killed} {
		c := testkit.ImageOf(t, image, "queue")
		c.Files = slices.DeleteFunc(c.Files, func(name string) bool {
			return strings.Contains(name, "OPTIONS-") || path.Base(name) == manifest.Name || image == killed && path.Ext(name) == ".log" // a power loss, too, leaves logs with parts that cannot be read
		})
		noticed := make(map[string]int)
		for begun, n := time.Now(), 0; n < 2*len(c.Files) || time.Since(begun) < *corruptFor; n++ {
			name := c.Files[n%len(c.Files)]
			bit := rng.IntN(8 * len(c.Content[name]))
			what := fmt.Sprintf("%s, bit %d of %d", name, bit, 8*len(c.Content[name]))
			disk := c.Flip(t, name, bit)
			report := queuetest.VerifyImage(t, disk.Clone(), true)
			var seen []string
			err := testkit.InTime(t, what, func() error {
				q, err := queuetest.OneNode(disk, votes)
				if err != nil {
					return err
				}
				seen, err = readNode(q)
				return errors.Join(err, ignoreFailed(q.Close(), err))
			})
			if err == nil {
				require.Equal(t, want, seen, what)
				continue
			}
			require.ErrorIs(t, err, codeq.ErrCorrupt, what)
			require.ErrorContains(t, err, path.Base(path.Dir(name)), what)
			noticed[strings.NewReplacer("000", "", "001", "").Replace(path.Base(path.Dir(name)))+"/"+kindOf(name)]++
			require.False(t, report.OK(), "%s: %v", what, err)
			require.Contains(t, fmt.Sprint(report.Problems), path.Base(name), what)
		}
		t.Logf("noticed: %v", noticed)
		require.NotZero(t, noticed["shard-.raft/snapshot"])
		require.NotZero(t, noticed["raft/.log"]+noticed["raft/MANIFEST-"])
		require.NotZero(t, noticed["shard-/MANIFEST-"])
		require.NotZero(t, noticed["shard-/.sst"])
	}
}
