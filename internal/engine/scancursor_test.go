package engine

import (
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/keys"
)

// TestCursorOfGroup: the cursor does not pass a task that disk does not have yet.
func TestCursorOfGroup(t *testing.T) {
	id := func(n byte) keys.ID { return keys.ID{15: n} }
	f := scanCursors{group: 1}
	add := func(n byte) { f.add(1, id(n), nil) }
	advance := func(n byte) { f.advance(f.at(1), id(n)) }
	require.Zero(t, cursorOf(&f, 1))
	add(5)
	require.Zero(t, cursorOf(&f, 1), "there may be others before it")
	advance(7)
	require.Equal(t, id(5), cursorOf(&f, 1))
	f.next()
	advance(7)
	require.Equal(t, id(7), cursorOf(&f, 1))
	add(9)
	add(3)
	add(4)
	require.Equal(t, id(3), cursorOf(&f, 1))
	advance(8)
	require.Equal(t, id(3), cursorOf(&f, 1))
	require.Zero(t, cursorOf(&f, 2))

	for scope := range uint64(cursorsCap + 1) {
		f.at(scope)
	}
	f.next()
	require.Len(t, f.byScope, cursorsCap)
}
