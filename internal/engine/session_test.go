package engine

import (
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/keys"
)

// TestSessionTable: what a node has produced lately is known as long as its caller may ask.
func TestSessionTable(t *testing.T) {
	var table sessionTable
	one := CallNumber{Node: "n", Session: 5, Seq: 1, Low: 1}
	done, err := table.outcome(&one)
	require.NoError(t, err)
	require.Nil(t, done)
	table.note(&one, []keys.ID{{1}}, []int{0})
	done, err = table.outcome(&one)
	require.NoError(t, err)
	require.Equal(t, &keys.SessionCall{Seq: 1, IDs: []keys.ID{{1}}, Duplicates: []int{0}}, done)
	three := CallNumber{Node: "n", Session: 5, Seq: 3, Low: 2}
	table.note(&three, []keys.ID{{3}}, nil)
	_, err = table.outcome(&one)
	require.ErrorIs(t, err, base.ErrUncertain, "its caller knows its outcome")
	require.Len(t, table.byNode["n"].Calls, 1, "what nobody asks for is forgotten")
	other := CallNumber{Node: "n", Session: 6, Seq: 1, Low: 1}
	done, err = table.outcome(&other)
	require.NoError(t, err)
	require.Nil(t, done, "another life of the node")
	table.note(&other, []keys.ID{{9}}, nil)
	require.Len(t, table.byNode["n"].Calls, 1)
	v, err := keys.ParseSession(table.byNode["n"].Append(nil))
	require.NoError(t, err)
	require.Equal(t, *table.byNode["n"], v)
}
