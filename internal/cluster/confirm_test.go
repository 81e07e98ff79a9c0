package cluster

import (
	"testing"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"
)

// TestWhoConfirms: a question is answered by a majority of the voters, in its own term.
func TestWhoConfirms(t *testing.T) {
	members := []raft.Server{{ID: "a"}, {ID: "b"}, {ID: "c"}, {ID: "d"}, {ID: "e"}, {ID: "learner", Suffrage: raft.Nonvoter}}
	answer := func(c *confirming, voter raft.ServerID, term uint64, success bool) bool {
		asked, to := c.next(voter)
		require.Equal(t, voter, to.ID)
		return c.answer(voter, asked, &raft.AppendEntriesResponse{Term: term, Success: success})
	}
	ask := func(c *confirming, self raft.ServerID, members []raft.Server) *question {
		q := newQuestion(7, self, members)
		c.add(q)
		return q
	}
	t.Run("majority", func(t *testing.T) {
		var c confirming
		q := newQuestion(7, "a", members)
		require.Len(t, c.add(q), 4, "voters to be asked")
		require.True(t, answer(&c, "b", 7, true))
		require.False(t, answer(&c, "c", 7, false), "that says nothing")
		require.False(t, answer(&c, "c", 6, true))
		require.Empty(t, q.outcome)
		require.True(t, answer(&c, "d", 7, true))
		require.NoError(t, <-q.outcome)
		asked, _ := c.next("b")
		require.Empty(t, asked, "one answer of each counts")
	})
	t.Run("without this node", func(t *testing.T) { // it has removed itself
		var c confirming
		q := ask(&c, "learner", members)
		answer(&c, "a", 7, true)
		answer(&c, "b", 7, true)
		require.Empty(t, q.outcome)
		answer(&c, "c", 7, true)
		require.NoError(t, <-q.outcome)
	})
	t.Run("successor", func(t *testing.T) {
		var c confirming
		q := ask(&c, "a", members)
		answer(&c, "b", 7, true)
		answer(&c, "c", 8, false)
		require.ErrorContains(t, <-q.outcome, "term 8")
	})
	t.Run("alone", func(t *testing.T) {
		require.Zero(t, newQuestion(7, "a", members[:1]).needed)
	})
	t.Run("questions that come meanwhile", func(t *testing.T) {
		var c confirming
		first := ask(&c, "a", members[:3])
		asked, _ := c.next("b")
		second := newQuestion(7, "a", members[:3])
		require.Empty(t, c.add(second), "both voters are being asked")
		third := ask(&c, "a", members[:3])
		c.answer("b", asked, &raft.AppendEntriesResponse{Term: 7, Success: true})
		require.NoError(t, <-first.outcome)
		require.Empty(t, second.outcome, "the message was sent before")
		c.drop(first)
		answer(&c, "b", 7, true)
		require.NoError(t, <-second.outcome)
		require.NoError(t, <-third.outcome)
		c.drop(second)
		c.drop(third)
		for _, voter := range []raft.ServerID{"b", "c"} {
			asked, _ := c.next(voter)
			require.Empty(t, asked)
		}
		require.Len(t, c.add(newQuestion(8, "a", members[:3])), 2, "they are asked again")
	})
}
