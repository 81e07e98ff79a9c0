package cluster

import (
	"fmt"
	"testing"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/manifest"
	"codeq/internal/raftlog"
)

// heldTerms are votes on a disk that hangs when it has to store a term of the other nodes.
type heldTerms struct {
	votesInMemory
	held, goOn chan struct{}
}

func (v heldTerms) Group(n uint32) raft.StableStore { return heldTerm{v.votesInMemory.Group(n), v} }

type heldTerm struct {
	raft.StableStore
	votes heldTerms
}

func (h heldTerm) SetUint64(key []byte, value uint64) error {
	if string(key) == keyCurrentTerm && value > 1 {
		h.votes.held <- struct{}{}
		<-h.votes.goOn
	}
	return h.StableStore.SetUint64(key, value)
}

// TestLeaderOfTermBeingStored: the first heartbeat of a later term waits for the disk. Calls go to
// its leader meanwhile, although the disk does not count as stalled.
func TestLeaderOfTermBeingStored(t *testing.T) {
	t.Parallel()
	votes := heldTerms{make(votesInMemory), make(chan struct{}), make(chan struct{})}
	n, other := openFollowerWith(t, func(c *Config) {
		c.Votes = func(string) (raftlog.Stables, error) { return votes, nil }
	})
	g, third := n.Group(0), Peer{"c", "c:1", manifest.NewID()}
	requireLeader := func(p Peer) {
		addr, id := g.leaderNow()
		require.Equal(t, p.ServerID(), id)
		require.EqualValues(t, p.Address, addr)
	}
	begin := func(leader Peer, term uint64) (end func()) {
		change, answer := g.Changed(), make(chan raft.RPCResponse, 1)
		go g.transport.heartbeat(raft.RPC{RespChan: answer, Command: &raft.AppendEntriesRequest{RPCHeader: headerOf(leader), Term: term}})
		<-votes.held
		requireLeader(leader)
		<-change
		require.Less(t, g.raft.CurrentTerm(), term)
		require.Zero(t, g.stalledFor())
		require.NotNil(t, g.termOwner.of(leader.ServerID()))
		require.ErrorContains(t, g.Late(base.ErrLate, false), fmt.Sprintf("node %q leads", leader.Node))
		return func() {
			votes.goOn <- struct{}{}
			require.NoError(t, (<-answer).Error)
			require.Equal(t, term, g.raft.CurrentTerm())
			requireLeader(leader)
		}
	}
	begin(other, 5)()
	end := begin(third, 6)
	g.broken.Store(&errBroken)
	require.False(t, g.HasLeader(), "calls on a replica that has failed go nowhere")
	g.broken.Store(nil)
	end()
}
