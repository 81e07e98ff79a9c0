package cluster

import (
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
)

// TestAnswersPanicTwice: a callback that panics with the answers of nodes, and without them, does
// not end the process.
func TestAnswersPanicTwice(t *testing.T) {
	n := loneGroup(crashfs.New(), nil).node
	var calls [][][]byte
	n.AskNodesAside(nil, func(bodies [][]byte) {
		calls = append(calls, bodies)
		panic("again")
	})
	n.background.Wait()
	require.Len(t, calls, 2)
	require.Empty(t, calls[1])
}
