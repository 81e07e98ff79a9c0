package entries

import (
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/engine"
	"codeq/internal/keys"
)

// TestOutcomesOfANode: one log entry tells all callers of a node the end of a task. They share no
// memory of it.
func TestOutcomesOfANode(t *testing.T) {
	var a Awaiting
	id := keys.ID{1}
	heard := 0
	listeners := []*Listener{a.Listen(id, func() { heard++ }), a.Listen(id, func() { heard++ })}
	a.Tell([]engine.Ending{{ID: id, Outcome: engine.Outcome{State: engine.Done, Result: []byte("result")}}})
	require.Equal(t, 2, heard)
	first := a.Leave(id, listeners[0])
	first.Result[0] = 'X'
	require.Equal(t, "result", string(a.Leave(id, listeners[1]).Result))
}
