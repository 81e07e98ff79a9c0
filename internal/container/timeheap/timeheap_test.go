package timeheap

import (
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

type timedThing struct {
	at    uint64
	index int
}

func (x *timedThing) Due() uint64 { return x.at }
func (x *timedThing) Spot() *int  { return &x.index }

// TestTimeHeap: after any additions and removals, the item that is due first is first, and all
// items know their places.
func TestTimeHeap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var h Heap[*timedThing]
		var in []*timedThing
		for range rapid.IntRange(1, 100).Draw(t, "steps") {
			if len(in) == 0 || rapid.Bool().Draw(t, "add") {
				x := &timedThing{rapid.Uint64Range(0, 20).Draw(t, "due"), -1}
				in = append(in, x)
				h.Push(x)
			} else {
				var gone *timedThing
				if first := h.Next(); rapid.Bool().Draw(t, "pop") {
					gone = h.Pop()
					require.Equal(t, first, gone.at)
				} else {
					gone = rapid.SampledFrom(in).Draw(t, "removed")
					h.Remove(gone)
				}
				h.Remove(gone) // it is no longer there
				require.Negative(t, gone.index)
				in = slices.DeleteFunc(in, func(x *timedThing) bool { return x == gone })
			}
			require.Equal(t, len(in), h.Len())
			first := uint64(Never)
			for _, x := range in {
				require.Same(t, x, h.items[x.index])
				first = min(first, x.at)
			}
			require.Equal(t, first, h.Next())
		}
	})
}
