package store

import (
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/keys"
)

// TestSessionTable: the table keeps the recent produces of a node as long as its caller may ask for
// them.
func TestSessionTable(t *testing.T) {
	var table Sessions
	one := keys.CallNumber{Node: "n", Incarnation: 5, Seq: 1, Low: 1}
	done, err := table.Outcome(&one)
	require.NoError(t, err)
	require.Nil(t, done)
	table.Note(&one, []keys.ID{{1}}, []int{0})
	done, err = table.Outcome(&one)
	require.NoError(t, err)
	require.Equal(t, &keys.SessionCall{Seq: 1, IDs: []keys.ID{{1}}, Duplicates: []int{0}}, done)
	three := keys.CallNumber{Node: "n", Incarnation: 5, Seq: 3, Low: 2}
	table.Note(&three, []keys.ID{{3}}, nil)
	_, err = table.Outcome(&one)
	require.ErrorIs(t, err, base.ErrUncertain, "its caller knows its outcome")
	require.Len(t, table.byNode["n"].Calls, 1, "what nobody asks for is forgotten")
	later := keys.CallNumber{Node: "n", Incarnation: 6, Seq: 1, Low: 1}
	done, err = table.Outcome(&later)
	require.NoError(t, err)
	require.Nil(t, done, "another life of the node")
	table.Note(&later, []keys.ID{{9}}, nil)
	require.Len(t, table.byNode["n"].Calls, 1)
	_, err = table.Outcome(&three)
	require.Equal(t, &keys.IncarnationOverError{Node: "n", Latest: 6}, err)
	require.ErrorIs(t, err, base.ErrNotMember)
	require.NotErrorIs(t, err, base.ErrUncertain)
	v, err := keys.ParseSession(table.byNode["n"].Append(nil))
	require.NoError(t, err)
	require.Equal(t, *table.byNode["n"], v)
}
