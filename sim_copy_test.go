package codeq

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/manifest"
)

// What becomes of a node whose directory is put back from an older copy: see manifest.Lives.

// simImage is a copy of a node's directory.
type simImage struct {
	disk  *vfs.MemFS
	votes *simVotes
	life  uint64
}

// image copies the directory of a node, which may be open.
func (n *simNode) image() simImage {
	n.mu.Lock()
	defer n.mu.Unlock()
	return simImage{cloned(n.disk), n.votes.clone(), n.manifest().Life}
}

// cloned is a copy of a disk.
func cloned(disk *vfs.MemFS) *vfs.MemFS {
	return disk.CrashClone(vfs.CrashCloneCfg{UnsyncedDataPercent: 100, RNG: rand.New(rand.NewPCG(1, 1))})
}

// putBack lets a node that is down have an image in place of its directory.
func (n *simNode) putBack(image simImage) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.disk, n.votes = cloned(image.disk), image.votes.clone()
}

// manifest is that on the node's disk. REQUIRES: mu is held.
func (n *simNode) manifest() *manifest.Manifest {
	m, err := manifest.Read(n.disk, "queue")
	if err != nil || m == nil {
		panic(fmt.Sprintf("the manifest of node %s: %v", n.name, err)) // the goroutines of the bubble would not end
	}
	return m
}

// isSeenAfter reports whether all other nodes have stored that they have seen a node in a life after a
// given one.
func (c *simCluster) isSeenAfter(n *simNode, life uint64) bool {
	n.mu.Lock()
	id := n.manifest().ID
	n.mu.Unlock()
	return !slices.ContainsFunc(c.members(), func(o *simNode) bool {
		o.mu.Lock()
		defer o.mu.Unlock()
		return o != n && o.manifest().Seen[id] <= life
	})
}

func (c *simCluster) awaitSeenAfter(n *simNode, life uint64) {
	for end := time.Now().Add(simPatience); !c.isSeenAfter(n, life); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(end) {
			c.hangs("news of the life of " + n.name)
		}
	}
}

// requireOldCopy waits until a node has failed as its directory is an older copy, and closes it.
func (n *simNode) requireOldCopy(t *testing.T) {
	t.Helper()
	time.Sleep(10 * time.Second)
	_, err := simQueue(n).Produce(context.Background(), Task{Queue: "a"})
	require.ErrorIs(t, err, ErrFailed)
	require.ErrorIs(t, err, ErrOldCopy)
	require.ErrorIs(t, n.close(), ErrOldCopy)
}

// TestOlderCopyIsPutBack: a node whose directory is an older copy neither elects nor acknowledges
// without what it lacks, although it may have been opened before without being noticed. It says so,
// and when it is opened again it comes back by itself.
func TestOlderCopyIsPutBack(t *testing.T) {
	t.Parallel()
	for what, copied := range map[string]func(c *simCluster, n *simNode) simImage{
		"closed": func(c *simCluster, n *simNode) simImage {
			n.stop()
			defer n.start()
			return n.image()
		},
		"amid a life": func(c *simCluster, n *simNode) simImage {
			defer time.Sleep(15 * time.Minute)
			return n.image()
		},
	} {
		t.Run(what, func(t *testing.T) {
			simCase(t, Options{}, func(t *testing.T, c *simCluster) {
				left, behind := c.lead()
				n := c.members()[slices.IndexFunc(c.members(), func(n *simNode) bool { return n != left && n != behind })]
				image := copied(c, n)
				c.awaitSeenAfter(n, image.life)
				c.net.Isolate(behind.name, c.names())
				n.produce(t, 50)
				n.stop()
				left.crash(100)
				n.putBack(image)
				for range 3 {
					n.start() // it meets nobody
					n.stop()
				}
				c.net.Heal(true)
				former := image.id(t)
				n.start()
				n.requireOldCopy(t)
				_, err := simQueue(behind).Produce(t.Context(), Task{Queue: "a"})
				require.ErrorIs(t, err, ErrNotLeader)
				require.ErrorContains(t, err, "node "+n.name)

				left.start()
				n.start()
				require.NotEqual(t, former, n.id())
				c.awaitVotes()
				require.Equal(t, 50, n.count(t))
				left.crash(100)
				n.produce(t, 10)
				left.start()
				require.Equal(t, 60, left.count(t))
			})
		})
	}
}

func (i simImage) id(t *testing.T) string {
	m, err := manifest.Read(i.disk, "queue")
	require.NoError(t, err)
	return m.ID
}

// TestCopyIsPutBack: a directory that was closed may be put back if nothing was done since, and those
// of all nodes together may be older. Nobody fails.
func TestCopyIsPutBack(t *testing.T) {
	simCase(t, Options{}, func(t *testing.T, c *simCluster) {
		restore := func(since func()) {
			images, ids := make(map[*simNode]simImage), make(map[*simNode]string)
			for _, n := range c.members() {
				ids[n] = n.id()
				n.stop()
				images[n] = n.image()
			}
			since()
			for _, n := range c.members() {
				n.putBack(images[n])
				n.start()
			}
			c.awaitLeaders()
			time.Sleep(time.Minute)
			for _, n := range c.members() {
				require.Equal(t, ids[n], n.id())
				n.produce(t, 1)
			}
		}
		restore(func() {})
		restore(func() {
			for _, n := range c.members() {
				n.start()
			}
			c.members()[0].produce(t, 10)
			for _, n := range c.members() {
				n.stop()
			}
		})
		require.Equal(t, 6, c.members()[0].count(t))
	})
}

// TestOlderCopyGoesOnAlone: RecoverCluster takes an older copy, whether it was noticed or not.
func TestOlderCopyGoesOnAlone(t *testing.T) {
	for _, noticed := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			c := newSimCluster(t, 1, 3, Options{Shards: 1})
			_, n := c.lead()
			n.produce(t, 10)
			n.stop()
			image := n.image()
			n.start()
			c.awaitSeenAfter(n, image.life)
			n.produce(t, 10)
			n.stop()
			n.putBack(image)
			if noticed {
				n.start()
				n.requireOldCopy(t)
			}
			for _, o := range c.members() {
				o.stop()
			}
			require.NoError(t, c.recover(n))
			n.start()
			require.Equal(t, 10, n.count(t))
			joins := c.node(true)
			joins.start()
			c.nodes = append(c.nodes, joins)
			require.Equal(t, 10, joins.count(t))
			c.close()
		})
	}
}
