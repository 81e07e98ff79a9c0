package cluster

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/manifest"
)

// trioLeaders changes the groups of three nodes where they are led.
type trioLeaders struct {
	nodes   []*Node
	checked func() // called when the first group has answered CheckMember
	fails   int    // changes of this shard fail; -1: of all, when they forget the node
	with    error
	forgets func() // nil, or called then
}

func (l *trioLeaders) Change(_ context.Context, shard int, how Change, p Peer, former ...string) error {
	if how == RemoveNode && l.fails > 0 && shard == l.fails {
		return l.with
	}
	for _, n := range l.nodes {
		if g := n.Group(shard); g.leads() {
			outcome := make(chan error, 1)
			g.Change(how, p, former, func(err error) { outcome <- err })
			err := <-outcome
			if how == CheckMember {
				l.checked()
			}
			return err
		}
	}
	return errNotBegun
}

func (l *trioLeaders) Applied(context.Context, int) (uint64, error) { return 0, nil }

func (l *trioLeaders) Forget(_ context.Context, shard int, name string) error {
	if l.fails < 0 && !strings.Contains(name, idSeparator) {
		if l.forgets != nil {
			l.forgets()
		}
		return l.with
	}
	return nil
}

// TestRemovalEndsHalfway: a removal that ends after the first change does not match an error that
// says that nothing was done.
func TestRemovalEndsHalfway(t *testing.T) {
	for _, with := range []error{base.ErrClosed, base.ErrNoMajority} {
		for _, fails := range []int{1, -1} {
			synctest.Test(t, func(t *testing.T) {
				nodes, _ := openTrio(t, 2)
				l := &trioLeaders{nodes: nodes, fails: fails, with: with}
				for _, n := range nodes {
					n.c.Leaders = l
				}
				err := nodes[0].Remove(t.Context(), "c")
				require.ErrorIs(t, err, base.ErrUncertain)
				require.ErrorContains(t, err, with.Error())
				require.NotErrorIs(t, err, with)
				closeAll(t, nodes)
			})
		}
	}
}

// TestNodeRemovesItself: a node that has removed itself, and so has no leader any more, has not
// failed.
func TestNodeRemovesItself(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nodes, _ := openTrio(t, 1)
		l := &trioLeaders{nodes: nodes, fails: -1, with: base.ErrNotLeader, forgets: func() {
			nodes[2].Group(0).removed.Store(true)
		}}
		for _, n := range nodes {
			n.c.Leaders = l
		}
		require.NoError(t, nodes[2].Remove(t.Context(), "c"))
		closeAll(t, nodes)
	})
}

// TestAdditionAmidRemoval: a node that another shard is adding while it is removed from the first
// one is removed from both.
func TestAdditionAmidRemoval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nodes, _ := openTrio(t, 2)
		asked, goOn := make(chan struct{}), make(chan struct{})
		l := &trioLeaders{nodes: nodes, checked: func() { close(asked); <-goOn }}
		for _, n := range nodes {
			n.c.Leaders = l
		}
		x, ctx := Peer{"x", "x", manifest.NewID()}, t.Context()
		require.NoError(t, l.Change(ctx, 0, AddNode, x))
		added, removed := make(chan error, 1), make(chan error, 1)
		go func() { added <- l.Change(ctx, 1, AddNode, x) }()
		<-asked
		require.NoError(t, l.Change(ctx, 0, RemoveNode, Peer{Node: "x"}))
		go func() { removed <- l.Change(ctx, 1, RemoveNode, Peer{Node: "x"}) }()
		synctest.Wait()
		close(goOn)
		require.NoError(t, <-added)
		require.NoError(t, <-removed)
		for shard := range 2 {
			members, err := nodes[shard].Group(shard).members()
			require.NoError(t, err)
			require.Len(t, members, 3)
		}
		closeAll(t, nodes)
	})
}

// TestVoteOfRemovedNode: the wait for a node that does not answer ends when the node was removed.
func TestVoteOfRemovedNode(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		nodes, _ := openTrio(t, 1)
		l := &trioLeaders{nodes: nodes, checked: func() {}}
		for _, n := range nodes {
			n.c.Leaders = l
		}
		x := Peer{"x", "x", manifest.NewID()}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		outcome := make(chan error, 1)
		go func() { outcome <- nodes[1].add(ctx, x) }()
		time.Sleep(10 * time.Second)
		require.Empty(t, outcome)
		require.NoError(t, nodes[2].Remove(ctx, "x"))
		require.ErrorIs(t, <-outcome, base.ErrNotMember)
		closeAll(t, nodes)
	})
}
