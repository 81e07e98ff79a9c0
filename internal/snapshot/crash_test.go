package snapshot

import (
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/cockroachdb/pebble/v2/vfs/errorfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
)

// crasher is a file system that takes an image, as of a power loss, before each operation that
// changes it.
type crasher struct {
	mem    *crashfs.Disk
	fs     vfs.FS // the file system of the subject
	on     bool
	acked  uint64 // index of the newest snapshot after its Close has returned
	next   uint64 // index of the snapshot that may be published
	images []image
}

type image struct {
	mem         *crashfs.Disk
	acked, next uint64
	what        string
}

func newCrasher(mem *crashfs.Disk) *crasher {
	c := &crasher{mem: mem}
	c.fs = errorfs.Wrap(mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
		if op.Kind.ReadOrWrite() == errorfs.OpIsWrite {
			c.shoot(op)
		}
		return nil
	}))
	return c
}

func (c *crasher) shoot(op errorfs.Op) {
	if !c.on {
		return
	}
	n := uint64(len(c.images))
	for _, percent := range []int{0, 30, 70, 100} {
		clone := c.mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: percent, RNG: rand.New(rand.NewPCG(n, 1))})
		what := fmt.Sprintf("image %d before %v of %s, %d%%", n, op.Kind, op.Path, percent)
		c.images = append(c.images, image{clone, c.acked, c.next, what})
	}
}

// snapshot runs f, which publishes a snapshot of the index.
func (c *crasher) snapshot(index uint64, f func()) {
	c.on, c.next = true, index
	f()
	c.acked = index
}

// check opens every image and checks that metadata and state belong together, and that neither is
// older than the last acknowledgement.
func (c *crasher) check(t *testing.T) {
	t.Helper()
	c.on = false
	for _, i := range c.images {
		i.check(t)
	}
}

func (i image) check(t *testing.T) {
	t.Helper()
	n := openNode(t, i.mem)
	defer n.shard.close()
	index := n.newest(t).Index
	require.True(t, index == i.acked || index == i.next, "%s: index %d, not %d or %d", i.what, index, i.acked, i.next)
	require.GreaterOrEqual(t, n.shard.requireState(t), index, i.what)
	require.Equal(t, []string{recordName}, n.files(t), i.what)
}

func TestPowerLossBeforeEveryOperation(t *testing.T) {
	files := source(t, 60, 70).checkpoint(t)
	c := newCrasher(crashfs.New())
	n := openNodeAt(t, c.fs, 20)
	c.acked = 20

	n.shard.apply(t, 25)
	c.snapshot(25, func() { n.take(t, 25) })
	c.snapshot(60, func() {
		_, err := n.install(t, 60, files)
		require.NoError(t, err)
	})
	n.swap(t)
	n.shard.apply(t, 75)
	c.snapshot(75, func() { n.take(t, 75) })
	c.shoot(errorfs.Op{})

	t.Logf("%d images", len(c.images))
	require.Greater(t, len(c.images), 200)
	c.check(t)
}

// The steps after a crash are those before it, and may be interrupted as well.
func TestPowerLossDuringRecovery(t *testing.T) {
	c := source(t, 60, 70).checkpoint(t)
	mem := crashfs.New()
	n := openNodeAt(t, mem, 20)
	n.checkpoint(t) // never removed
	_, err := n.install(t, 60, c)
	require.NoError(t, err)
	require.NoError(t, n.receive(t, source(t, 70, 70).checkpoint(t))) // never installed

	for _, percent := range []int{0, 100} {
		c := newCrasher(mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: percent, RNG: rand.New(rand.NewPCG(1, 1))}))
		c.acked, c.next, c.on = 60, 60, true
		again := openNode(t, c.fs)
		again.shard.close()
		c.shoot(errorfs.Op{})
		require.Greater(t, len(c.images), 40)
		c.check(t)
	}
}

// If the metadata cannot be written the snapshot fails, and the previous one stays.
func TestFailureOfEveryOperation(t *testing.T) {
	c := source(t, 60, 60).checkpoint(t)
	for _, kind := range []string{"local", "install"} {
		t.Run(kind, func(t *testing.T) {
			failures := 0
			for at := 0; ; at++ {
				mem := crashfs.New()
				count, on := 0, false
				fs := errorfs.Wrap(mem, errorfs.InjectorFunc(func(op errorfs.Op) error {
					if on && op.Kind.ReadOrWrite() == errorfs.OpIsWrite {
						if count++; count == at+1 {
							return errBroken
						}
					}
					return nil
				}))
				n := openNodeAt(t, mem, 20)
				n.shard.apply(t, 60)
				n.store.fs = fs // the live store does not fail
				on = true
				var err error
				if kind == "local" {
					sink := n.create(t, 60)
					require.NoError(t, sink.Persist(n.live()))
					err = sink.Close()
				} else if err = n.receive(t, c); err == nil {
					_, err = n.publish(t, 60, c.Manifest)
				}
				if count <= at {
					require.NoError(t, err)
					break
				}
				on = false
				failures++
				require.ErrorIs(t, err, errBroken)
				require.Equal(t, uint64(20), n.newest(t).Index)
				for _, percent := range []int{0, 50, 100} {
					clone := mem.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: percent, RNG: rand.New(rand.NewPCG(1, 1))})
					image{clone, 20, 60, fmt.Sprintf("failure %d", at)}.check(t)
				}
				if current, err := readRecord(mem, raftDir); err == nil && current.Installed {
					_, err := mem.Stat(mem.PathJoin(raftDir, incomingName(current.Sequence)))
					require.NoError(t, err, "failure %d: metadata without its state", at)
				}
				// The next one succeeds.
				n.take(t, 60)
				image{mem.CrashClone(vfs.CrashCloneCfg{}), 60, 60, fmt.Sprintf("after failure %d", at)}.check(t)
				n.shard.close()
			}
			require.Greater(t, failures, 4)
		})
	}
}
