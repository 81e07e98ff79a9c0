package cluster

import (
	"context"
	"fmt"
	"net"
	"path/filepath"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/manifest"
)

// forgetful is a state machine: its store says that one name was removed.
type forgetful struct {
	notes
	forgotten string
}

func (m *forgetful) IsForgotten(name string) (bool, error) { return name == m.forgotten, nil }

// TestRemovalIsCertain: a node answers that another one was removed if its store says so, and the
// other one is no member as of the last entry in the store. It does not while the removal is under
// way, nor, when it was opened again, before it has read the members up to that entry.
func TestRemovalIsCertain(t *testing.T) {
	disk, votes := crashfs.New(), filepath.Join(t.TempDir(), "votes")
	require.NoError(t, disk.MkdirAll("dir", 0o700))
	x, b := Peer{"x", "x:1", manifest.NewID()}, Peer{"b", "b:1", manifest.NewID()}
	another, former := manifest.NewID(), manifest.NewID()
	var has, lacks raft.Configuration
	open := func(last Position) *Node {
		n := newLoneNode(t, disk, votes, &forgetful{notes{last: last}, string(x.ServerID())})
		if d := n.c.Directory; d.Cluster == "" {
			d.Cluster, d.Founders = manifest.NewID(), foundersOf([]Peer{n.self, b})
		}
		n.c.HeartbeatTimeout, n.c.ElectionTimeout = time.Hour, time.Hour
		n.c.Dial = func(context.Context, string) (net.Conn, error) { return nil, errBroken }
		lacks = configurationOf(foundersOf([]Peer{n.self, b}))
		has = configurationOf(foundersOf([]Peer{n.self, b, x}))
		require.NoError(t, n.Open())
		return n
	}
	removed := func(n *Node) bool {
		require.False(t, n.hasRemoved("x", []string{another}), "another directory has the name")
		require.False(t, n.hasRemoved("b", []string{b.ID}))
		for _, ids := range [][]string{{x.ID}, {former, x.ID}, {x.ID, another}} {
			require.Equal(t, n.hasRemoved("x", []string{x.ID}), n.hasRemoved("x", ids))
		}
		return n.hasRemoved("x", []string{x.ID})
	}
	change := func(index uint64, to raft.Configuration) *raft.Log {
		return &raft.Log{Index: index, Term: 5, Type: raft.LogConfiguration, Data: raft.EncodeConfiguration(to)}
	}

	n := open(Position{})
	log := []*raft.Log{entryOf(2, 5, 5, ""), change(3, has), entryOf(4, 5, 5, "")}
	require.True(t, sendEntries(t, n.Group(0), b, 5, 4, log...).Success)
	require.NoError(t, n.Group(0).AwaitApplied(t.Context(), 4))
	require.False(t, removed(n), "it is a member")
	require.NoError(t, n.Close())

	n = open(Position{4, 5})
	require.False(t, removed(n), "the members are not known yet")
	log = append(log, change(5, lacks))
	require.True(t, sendEntries(t, n.Group(0), b, 5, 4, log...).Success)
	require.False(t, removed(n), "the removal is not committed")
	log = append(log, entryOf(6, 5, 5, ""))
	require.True(t, sendEntries(t, n.Group(0), b, 5, 6, log...).Success)
	require.NoError(t, n.Group(0).AwaitApplied(t.Context(), 6))
	require.True(t, removed(n))
	require.NoError(t, n.Close())

	n = open(Position{6, 5})
	require.False(t, removed(n), "the members are not known yet")
	require.True(t, sendEntries(t, n.Group(0), b, 5, 6, log...).Success)
	require.Eventually(t, func() bool { return n.hasRemoved("x", []string{x.ID}) }, 10*time.Second, time.Millisecond, "nothing new has come")
	require.True(t, removed(n))
	require.NoError(t, n.Close())
}

// TestIsRemoval: a removal is found under what wraps it; to ask costs no allocation.
func TestIsRemoval(t *testing.T) {
	err := fmt.Errorf("call: %w", &removalError{RemovedError(1, "a")})
	require.True(t, IsRemoval(err))
	require.False(t, IsRemoval(RemovedError(1, "a")))
	require.Zero(t, testing.AllocsPerRun(100, func() { IsRemoval(nil); IsRemoval(err) }))
}
