package cluster

import (
	"testing"
	"testing/synctest"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/manifest"
)

// TestChangeOfWhatHasChanged: Raft refuses a change if the members have changed since the decision.
func TestChangeOfWhatHasChanged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nodes, _ := openTrio(t, 1)
		g := nodes[0].Group(0)
		index, before := g.configuration.get()
		add := func(name string, index uint64) error {
			return g.reconfigure(func() raft.Future {
				return g.raft.AddNonvoter(raft.ServerID(name), raft.ServerAddress(name), index, configTimeout)
			})
		}
		require.NoError(t, add("x", index))
		require.ErrorIs(t, add("y", index), errReconfigured)
		index, after := g.configuration.get()
		require.Len(t, after, len(before)+1)
		require.NoError(t, add("y", index))
		closeAll(t, nodes)
	})
}

// asked is a state machine that calls a function when it is asked about a removed node.
type asked struct {
	lead
	then func()
}

func (m *asked) IsForgotten(name string) (bool, error) {
	if m.then != nil {
		m.then()
	}
	return m.lead.IsForgotten(name)
}

// TestChangeIsDecidedAgain: if the members change during a decision, it is made again with the new
// ones: one name is never added with two directories.
func TestChangeIsDecidedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m := new(asked)
		nodes, _ := openTrioWith(t, 1, func(i int, c *Config) {
			if i == 0 {
				c.Machines = []StateMachine{m}
			}
		})
		g := nodes[0].Group(0)
		x, other := Peer{"x", "x", manifest.NewID()}, Peer{"x", "elsewhere", manifest.NewID()}
		decided := 0
		m.then = func() {
			if decided++; decided == 1 {
				id, address := other.ServerID(), raft.ServerAddress(other.Address)
				require.NoError(t, g.raft.AddNonvoter(id, address, 0, configTimeout).Error())
			}
		}
		change := func(p Peer) error {
			outcome := make(chan error, 1)
			g.Change(AddNode, p, nil, func(err error) { outcome <- err })
			return <-outcome
		}
		require.ErrorIs(t, change(x), base.ErrNotMember)
		_, members := g.configuration.get()
		require.Len(t, members, 4)

		decided = 0
		other = Peer{"z", "z", manifest.NewID()} // it is another one: x may be added beside it
		x.Node, x.Address = "y", "y"
		require.NoError(t, change(x))
		require.Equal(t, 2, decided)
		closeAll(t, nodes)
	})
}
