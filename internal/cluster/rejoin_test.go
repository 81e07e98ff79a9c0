package cluster

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq/internal/manifest"
)

// earlierLeaders are builds that take a node back with an address that is none.
type earlierLeaders struct{ trioLeaders }

func (l *earlierLeaders) Change(ctx context.Context, shard int, how Change, p Peer, former ...string) error {
	if how == Readmit {
		p.Address = p.ID
		how = AddNode
	}
	return l.trioLeaders.Change(ctx, shard, how, p, former...)
}

// TestReadmissionByEarlierBuild: a node that was taken back by a leader of an earlier build can be
// reached.
func TestReadmissionByEarlierBuild(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nodes, _ := openTrio(t, 2)
		l := &earlierLeaders{trioLeaders{nodes: nodes, checked: func() {}}}
		for _, n := range nodes {
			n.c.Leaders = l
		}
		x := Peer{"x", "x", manifest.NewID()}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		require.ErrorIs(t, nodes[0].admit(ctx, joining{Peer: x, Former: []string{manifest.NewID()}}), ErrBehind, "it is not there")
		for shard := range 2 {
			members, err := nodes[shard].Group(shard).members()
			require.NoError(t, err)
			require.Contains(t, members, raft.Server{Suffrage: raft.Nonvoter, ID: x.ServerID(), Address: "x"})
		}
		closeAll(t, nodes)
	})
}

// TestRejoinedIsCommitted: a node that is a voter by what is not committed is not taken back yet:
// it may be dropped again.
func TestRejoinedIsCommitted(t *testing.T) {
	n, other := openFollower(t)
	g := n.Group(0)
	require.True(t, n.votes())
	require.ErrorContains(t, n.askToRejoin(t.Context()), "nobody has taken this node back")
	require.True(t, sendEntries(t, g, other, 5, 2, entryOf(2, 5, 5, "")).Success)
	require.NoError(t, g.AwaitApplied(t.Context(), 2))
	require.NoError(t, n.askToRejoin(t.Context()))
}
