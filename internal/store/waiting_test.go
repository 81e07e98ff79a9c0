package store

import (
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/keys"
)

// TestCursorOfGroup: the cursor does not pass a task that disk does not have yet.
func TestCursorOfGroup(t *testing.T) {
	id := func(n byte) keys.ID { return keys.ID{15: n} }
	f := NewWaiting(new(Reads))
	add := func(n byte) { f.Add(1, id(n), nil) }
	advance := func(n byte) { f.advance(f.at(1), id(n)) }
	require.Zero(t, f.cursorOf(1))
	add(5)
	require.Zero(t, f.cursorOf(1), "there may be others before it")
	advance(7)
	require.Equal(t, id(5), f.cursorOf(1))
	f.Next()
	advance(7)
	require.Equal(t, id(7), f.cursorOf(1))
	add(9)
	add(3)
	add(4)
	require.Equal(t, id(3), f.cursorOf(1))
	advance(8)
	require.Equal(t, id(3), f.cursorOf(1))
	require.Zero(t, f.cursorOf(2))

	for scope := range uint64(cursorsCap + 1) {
		f.at(scope)
	}
	f.Next()
	require.Len(t, f.byScope, cursorsCap)
}
