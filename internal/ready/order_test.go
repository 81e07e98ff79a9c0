package ready

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"codeq/internal/keys"
)

// TestOrder: the byte order of task keys is the order of lanes, then of positions in windows, in
// any form of the keys.
func TestOrder(t *testing.T) {
	times := rapid.OneOf(rapid.Uint64Range(0, 3), rapid.Uint64Range(0, 1<<48-1))
	halves := rapid.OneOf(rapid.Uint64Range(0, 3), rapid.Uint64Range(0, 1<<62-1))
	lanes := rapid.OneOf(rapid.Uint32Range(0, 2), rapid.Uint32())
	rapid.Check(t, func(t *rapid.T) {
		draw := func() (lane uint32, p Pos) {
			counter := rapid.SampledFrom([]uint64{0, 1, 0x7ff, 0xfff}).Draw(t, "counter")
			binary.BigEndian.PutUint64(p.ID[:], times.Draw(t, "ms")<<16|7<<12|counter) // a UUIDv7
			binary.BigEndian.PutUint64(p.ID[8:], halves.Draw(t, "rest")|1<<63)
			if p.Since = keys.SinceOf(p.ID); rapid.Bool().Draw(t, "moved") {
				p.Since = keys.MovedSince(times.Draw(t, "moved at"))
			}
			return lanes.Draw(t, "lane"), p
		}
		laneA, a := draw()
		laneB, b := draw()
		keyA := keys.AppendTask(nil, laneA, a.Since, a.ID)
		keyB := keys.AppendTask(nil, laneB, b.Since, b.ID)
		want := cmp.Or(cmp.Compare(laneA, laneB), a.compare(b))
		require.Equal(t, want, bytes.Compare(keyA, keyB), "%x, %x", keyA, keyB)

		require.True(t, bytes.HasPrefix(keyA, keys.AppendLane(nil, laneA)))
		first := keys.AppendFrom(nil, laneA, 0, keys.ID{})
		require.LessOrEqual(t, bytes.Compare(first, keyA), 0, "the head of the lane comes first")
		next := a.next()
		from := keys.AppendFrom(nil, laneA, next.Since, next.ID)
		require.Negative(t, bytes.Compare(keyA, from), "a refill does not read its last task again")
		if laneA == laneB && b.compare(a) > 0 {
			require.LessOrEqual(t, bytes.Compare(from, keyB), 0, "nor leaves one out")
		}
	})
}
