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
	var listeners [2]*Listener
	for i := range listeners {
		listeners[i] = new(Listener)
		a.Listen(id, listeners[i], func() { heard++ })
	}
	a.Tell([]engine.Ending{{ID: id, Outcome: engine.Outcome{State: engine.Done, Result: []byte("result")}}})
	require.Equal(t, 2, heard)
	first := a.Leave(listeners[0])
	first.Result[0] = 'X'
	require.Equal(t, "result", string(a.Leave(listeners[1]).Result))
}

// TestOutcomesOfCalls: the commit of a produce tells the ID of its task to the caller that expects
// it, before the end of the task. Calls of another incarnation, and refused ones, are not heard.
func TestOutcomesOfCalls(t *testing.T) {
	var a Awaiting
	first, second, taken := new(Listener), new(Listener), new(Listener)
	a.Expect(3, 6, first) // an incarnation that is refused
	a.Expect(4, 7, first)
	a.Expect(4, 8, second)
	a.Expect(4, 9, taken)
	answer := func(incarnation uint64, seqs ...uint64) {
		v := keys.SessionValue{Incarnation: incarnation}
		for _, seq := range seqs {
			v.Calls = append(v.Calls, keys.SessionCall{Seq: seq, IDs: []keys.ID{{byte(seq)}}})
			if seq == 9 {
				v.Calls[len(v.Calls)-1].Duplicates = []int{0}
			}
		}
		require.NoError(t, a.Answered(v.Append(nil)))
	}
	end := func(seq byte) {
		a.Tell([]engine.Ending{{ID: keys.ID{seq}, Outcome: engine.Outcome{State: engine.Done, Attempts: int(seq)}}})
	}
	answer(3, 6, 7, 8)
	answer(4, 7, 9)
	end(6)
	end(8)
	end(9)
	end(7)
	heard := 0
	a.Listen(keys.ID{7}, first, func() { heard++ }) // the answer to the caller comes late
	require.Equal(t, 1, heard)
	require.Equal(t, 7, a.Leave(first).Attempts)
	answer(4, 7, 8, 9)
	end(8)
	require.Equal(t, 8, a.Leave(second).Attempts)
	require.Nil(t, a.Leave(taken))
	require.Empty(t, a.byTask)
	require.Empty(t, a.byCall)
	require.NoError(t, a.Answered([]byte("malformed")), "nobody expects an answer")
}
