package faults_test

import (
	"bytes"
	"errors"
	"flag"
	"fmt"
	"maps"
	"path"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/manifest"
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
	if kindOf(name) != "OPTIONS-" { // Pebble does not say which one
		require.ErrorContains(t, err, path.Base(name), what)
	}
	return true
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
