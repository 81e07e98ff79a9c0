package chunked

import (
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// TestListAgainstSlice: a list behaves like a slice, around the ends of chunks too.
func TestListAgainstSlice(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var l List[int]
		var want []int
		for range rapid.IntRange(1, 8).Draw(t, "steps") {
			n := rapid.SampledFrom([]int{0, 1, chunkLen - 1, chunkLen, chunkLen + 1, 2*chunkLen + 3}).Draw(t, "n")
			if rapid.Bool().Draw(t, "append") {
				for range n {
					l.Append(len(want))
					want = append(want, len(want))
				}
			} else {
				for range min(n, len(want)) {
					end := len(want) - 1
					require.Equal(t, want[end], l.Pop())
					want = want[:end]
				}
			}
			if len(want) > 0 {
				i := rapid.IntRange(0, len(want)-1).Draw(t, "set")
				l.Set(i, -i)
				want[i] = -i
			}
			require.Equal(t, len(want), l.Len())
			require.Zero(t, l.At(len(want)))
			if n := len(want); n > 0 {
				i := rapid.IntRange(0, n-1).Draw(t, "remove")
				moved, ok := l.Remove(i)
				require.Equal(t, i < n-1, ok)
				if ok {
					require.Equal(t, want[n-1], moved)
					want[i] = moved
				}
				want = want[:n-1]
			}
			n = 0
			for i, v := range l.All() {
				require.Equal(t, n, i)
				require.Equal(t, want[i], v)
				require.Equal(t, want[i], l.At(i))
				n++
			}
			require.Equal(t, len(want), n)
		}
	})
}

// TestListGrowsByChunks: no chunk is larger than it should be, and empty ones are released.
func TestListGrowsByChunks(t *testing.T) {
	var l List[*int]
	for range 300 * chunkLen {
		l.Append(new(int))
	}
	for _, chunk := range l.rest {
		require.Equal(t, chunkLen, cap(chunk))
	}
	require.LessOrEqual(t, cap(l.first), 2*chunkLen)
	for range 300*chunkLen - 1 {
		l.Pop()
	}
	require.Empty(t, l.rest)
	require.Equal(t, 1, l.Len())
}

// TestListReleases: the garbage collector can free popped elements.
func TestListReleases(t *testing.T) {
	var l List[*int]
	for range chunkLen + 1 {
		l.Append(new(int))
	}
	l.Pop()
	l.Pop()
	require.Nil(t, l.first[:chunkLen][chunkLen-1])
	require.Nil(t, l.rest[:1][0][:1][0])
	for range 2 * chunkLen {
		l.Append(new(int))
	}
	for range 2 * chunkLen {
		l.Pop()
	}
	require.Nil(t, l.rest[:2][1], "one chunk stays")
}

// TestListAtTheEndOfAChunk: a list that grows and shrinks around the end of a chunk allocates
// nothing.
func TestListAtTheEndOfAChunk(t *testing.T) {
	var l List[int]
	for range 3 * chunkLen {
		l.Append(0)
	}
	require.Zero(t, testing.AllocsPerRun(100, func() {
		l.Append(0)
		l.Pop()
	}))
}

// TestPlaces: elements stay in their places, and those of removed ones are used again.
func TestPlaces(t *testing.T) {
	var p Places[string]
	for i, v := range []string{"a", "b", "c"} {
		require.Equal(t, i, p.Put(v))
	}
	p.Empty(0)
	p.Empty(2)
	require.Equal(t, 2, p.Put("d"))
	require.Equal(t, 0, p.Put("e"))
	require.Equal(t, 3, p.Put("f"))
	p.Empty(1)
	var all []string
	for _, v := range p.All() {
		all = append(all, v)
	}
	require.Equal(t, []string{"e", "", "d", "f"}, all)
}
