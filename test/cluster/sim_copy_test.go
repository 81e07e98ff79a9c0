package cluster_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/crashfs"
	"codeq/internal/inspect"
	"codeq/internal/manifest"
	"codeq/internal/simtest"
)

// These tests replace the directory of a node by an older copy: see manifest.Incarnations.

// simImage is a copy of a node's directory.
type simImage struct {
	disk  *crashfs.Disk
	votes *simtest.Votes
	id    string // ID of the directory
	life  uint64
}

// image copies the directory of a node; the node may be open.
func (n *simNode) image() simImage {
	m := n.queueDirectory()
	disk, votes := n.machine.Image()
	return simImage{disk, votes, m.ID, m.Incarnation}
}

// putBack replaces the directory of a node that is down by an image.
func (n *simNode) putBack(image simImage) {
	n.machine.Put(image.disk.Clone(), image.votes.Clone())
}

// isSeenAfter reports whether all other nodes have stored a life of the node after the given one.
func (c *simCluster) isSeenAfter(n *simNode, life uint64) bool {
	id := n.queueDirectory().ID
	return !slices.ContainsFunc(c.members(), func(o *simNode) bool { return o != n && o.queueDirectory().Seen[id] <= life })
}

func (c *simCluster) awaitSeenAfter(n *simNode, life uint64) {
	c.until("news of the life of "+n.name, func() bool { return c.isSeenAfter(n, life) })
}

// requireOldCopy waits until a node has failed because its directory is an older copy, and closes
// the node.
func (n *simNode) requireOldCopy(t *testing.T) {
	t.Helper()
	time.Sleep(10 * time.Second)
	_, err := simQueue(n).Produce(context.Background(), codeq.Task{Queue: "a"})
	require.ErrorIs(t, err, codeq.ErrFailed)
	require.ErrorIs(t, err, codeq.ErrOldCopy)
	require.ErrorIs(t, n.close(), codeq.ErrOldCopy)
}

// TestOlderCopyIsPutBack: the directory of a node is an older copy. While the node lacks the newer
// entries, it neither votes nor acknowledges, even if the copy was opened undetected before. It
// reports the old copy; at its next start it comes back without help.
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
			simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
				left, behind := c.lead()
				n := c.third(left, behind)
				image := copied(c, n)
				c.awaitSeenAfter(n, image.life)
				c.net.Isolate(behind.name, c.names())
				n.produce(t, 50)
				n.stop()
				left.crash(100)
				n.putBack(image)
				for range 3 {
					n.start() // it reaches no other node
					n.stop()
				}
				c.net.Heal(true)
				n.start()
				n.requireOldCopy(t)
				_, err := simQueue(behind).Produce(t.Context(), codeq.Task{Queue: "a"})
				require.ErrorIs(t, err, codeq.ErrNotLeader)
				require.ErrorContains(t, err, "node "+n.name)

				left.start()
				n.start()
				require.NotEqual(t, image.id, n.id())
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

// TestCopyIsPutBack: a copy of a closed directory may be put back if the node has not run since.
// Older copies of all nodes may be put back together. No node fails.
func TestCopyIsPutBack(t *testing.T) {
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
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
			each(c.members(), (*simNode).start)
			c.members()[0].produce(t, 10)
			each(c.members(), (*simNode).stop)
		})
		require.Equal(t, 6, c.members()[0].count(t))
	})
}

// TestOlderCopyGoesOnAlone: RecoverCluster takes an older copy, whether it was noticed or not.
func TestOlderCopyGoesOnAlone(t *testing.T) {
	for _, noticed := range []bool{false, true} {
		simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
			_, n := c.lead()
			n.produce(t, 10)
			c.rest()
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
			each(c.members(), (*simNode).stop)
			require.NoError(t, c.recover(n))
			n.start()
			require.Equal(t, 10, n.count(t))
			require.Equal(t, 10, c.another().count(t))
		})
	}
}

// TestCopyFromBeforeTheCluster: a copy from before its directory joined a cluster is detected too.
func TestCopyFromBeforeTheCluster(t *testing.T) {
	simNodes(t, 0, codeq.Options{}, func(t *testing.T, c *simCluster) {
		c.found(3)
		n := c.nodes[2]
		n.start() // alone
		image := n.image()
		require.Empty(t, n.queueDirectory().Cluster)
		c.nodes[0].start()
		c.nodes[1].start()
		n.produce(t, 10)
		n.stop()
		n.start()
		c.awaitSeenAfter(n, image.life)
		n.stop()
		n.putBack(image)
		n.start()
		n.requireOldCopy(t)
		n.start()
		require.NotEqual(t, image.id, n.id())
		c.awaitVotes()
		require.Equal(t, 10, n.count(t))
	})
}

// TestCopyIsPutBackAgain: an older copy does not contain the ID under which its node came back
// later. It takes the place of that node nevertheless. It does not take the place of a directory
// that has replaced a removed one.
func TestCopyIsPutBackAgain(t *testing.T) {
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		_, n := c.lead()
		n.stop()
		image := n.image()
		n.start()
		c.awaitSeenAfter(n, image.life)
		n.produce(t, 10)
		for range 3 {
			n.stop()
			n.putBack(image)
			n.start()
			n.requireOldCopy(t)
			n.start()
			c.awaitVotes()
			require.Equal(t, 10, n.count(t))
		}
		leader, removed := c.lead()
		c.until("the node has noted that it is back", removed.isBack)
		image = removed.image()
		removed.stop()
		removed.start()
		c.awaitSeenAfter(removed, image.life)
		require.NoError(t, simQueue(leader).RemoveNode(t.Context(), removed.name))
		replace := func(image simImage, join bool) {
			removed.stop()
			removed.putBack(image)
			removed.join = join
			removed.start()
		}
		replace(simImage{disk: crashfs.New(), votes: simtest.NewVotes()}, true)
		c.awaitVotes()
		members := membersOf(leader, 0)
		replace(image, false)
		removed.requireOldCopy(t)
		removed.start()
		time.Sleep(time.Minute)
		require.Equal(t, members, membersOf(leader, 0))
		c.drop(removed)
	})
}

// TestMachineIsPutBack: a machine is put back together with its memory, so its process continues
// from an earlier moment. That is an older copy too, although all nodes knew the process's life
// then.
func TestMachineIsPutBack(t *testing.T) {
	simCase(t, codeq.Options{}, func(t *testing.T, c *simCluster) {
		_, n := c.lead()
		time.Sleep(time.Minute)
		id := n.id()
		for _, o := range c.members() {
			if o != n {
				o.stop()
				d := manifest.New(o.machine.Disk(), "queue", *o.queueDirectory())
				d.Seen[id] = manifest.IncarnationAfter(d.Seen[id])
				require.NoError(t, d.Write())
				o.start()
			}
		}
		time.Sleep(time.Minute)
		n.requireOldCopy(t)
		n.start()
		require.NotEqual(t, id, n.id())
		c.awaitVotes()
	})
}

// simOlderCopy replaces the directory of a node by an older copy. After that the node reaches only
// nodes that may lack the changes that it has acknowledged since the copy.
var simOlderCopy = simFault{"older copy", 2, func(s *schedule) bool {
	n := s.someNode()
	if n.broken.Load() || !n.isBack() || !s.canLose(n) || !s.moving.CompareAndSwap(false, true) {
		return false
	}
	s.note("the directory of %s is copied", n.name)
	n.stop()
	image := n.image()
	others := slices.DeleteFunc(s.members(), func(o *simNode) bool { return o == n })
	s.rng.Shuffle(len(others), func(i, j int) { others[i], others[j] = others[j], others[i] })
	busy, away := s.upTo(5*time.Second), s.upTo(10*time.Second)
	s.done.Go(func() {
		defer s.moving.Store(false)
		n.raise()
		if s.putBackLater(n, image, others[:len(others)/2], others[len(others)/2:], busy, away) {
			s.happened("older copy")
		}
	})
	return false
}}

// putBackLater puts an image of a node back after two conditions: all others know a later life of
// the node, and the node has worked for the time busy without the nodes behind. Then the others are
// cut off for the time away. It returns false if the others do not learn of the later life.
func (s *schedule) putBackLater(n *simNode, image simImage, behind, others []*simNode, busy, away time.Duration) bool {
	for end := time.Now().Add(20 * time.Second); !s.isSeenAfter(n, image.life); time.Sleep(200 * time.Millisecond) {
		if s.over.Load() || time.Now().After(end) {
			s.note("not all have seen %s again", n.name)
			return false
		}
	}
	cut := func(cut bool) {
		for _, b := range behind {
			for _, o := range append(slices.Clone(others), n) {
				s.net.SetCut(b.name, o.name, cut)
				s.net.SetCut(o.name, b.name, cut)
			}
		}
	}
	cut(true)
	time.Sleep(busy)
	release := n.hold() // a node that is opening would not crash
	s.note("the older copy of %s is put back, %d nodes crash", n.name, len(others))
	each(append(others, n), func(n *simNode) { n.crash(100) })
	s.h.Breaks()
	s.keepCopies(n)
	n.putBack(image)
	release()
	cut(false)
	n.raise()
	time.Sleep(away)
	for _, o := range others {
		o.raise()
	}
	s.awaitRenewal(n, image)
	return true
}

// awaitRenewal waits until a node with an older copy is back, and opens it again when it has
// detected the copy.
func (s *schedule) awaitRenewal(n *simNode, image simImage) {
	var over time.Time
	for ; !n.isBack() || n.id() == image.id; time.Sleep(500 * time.Millisecond) {
		if q, _ := n.queue(); q != nil && errors.Is(inspect.Of(q).Group(0).Failure(), codeq.ErrOldCopy) {
			n.stop()
			n.raise()
		}
		if over.IsZero() && s.over.Load() {
			over = time.Now()
		} else if !over.IsZero() && time.Since(over) > 2*simPatience {
			s.hangs("the return of " + n.name)
		}
	}
	s.note("%s is back", n.name)
}
