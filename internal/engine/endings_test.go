package engine

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/keys"
)

// TestEndings: a shard keeps the ends of the last tasks for a while, in bounded memory, and without
// an allocation once this memory is full.
func TestEndings(t *testing.T) {
	var e endings
	id := func(n int) keys.ID { return keys.ID{byte(n >> 16), byte(n >> 8), byte(n), 1} }
	end := func(n, size int) *Outcome {
		if size == 0 {
			return &Outcome{State: Canceled, Attempts: n}
		}
		text := strings.Repeat(string(rune('a'+n%26)), size)
		return &Outcome{State: Done, Result: []byte(text), LastError: text[:size/2], Attempts: n}
	}
	add := func(n int, o *Outcome) { e.add(id(n), 1, o.State, uint32(o.Attempts), o.Result, o.LastError) }
	for n := range 3 * endingsHalf {
		add(n, end(n, n%50))
		for _, back := range []int{0, 1, endingsHalf - 1} {
			if past := n - back; past >= 0 {
				require.Equal(t, end(past, past%50), e.find(id(past), 1+endingsFor), "%d at %d", past, n)
			}
		}
	}
	require.Nil(t, e.find(id(3*endingsHalf-1), 2+endingsFor), "long ago")
	require.Nil(t, e.find(id(0), 1), "many ago")
	require.Nil(t, e.find(id(1<<20), 1))
	n := 0
	require.Zero(t, testing.AllocsPerRun(5*endingsHalf, func() { e.add(id(n), 1, Canceled, 1, nil, ""); n++ }))

	e = endings{}
	const size = endingsBytes / 4
	for n := range 9 {
		add(n, end(n, size))
		require.LessOrEqual(t, len(e.now.texts)+len(e.before.texts), 2*endingsBytes)
		require.Equal(t, end(n, size), e.find(id(n), 1))
		require.Equal(t, n > 0, e.find(id(n-1), 1) != nil)
	}
	add(9, end(9, endingsBytes))
	require.Nil(t, e.find(id(9), 1), "too long")
	require.NotNil(t, e.find(id(8), 1))
}
