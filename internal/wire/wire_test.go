package wire

import (
	"math"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestRoundTrip(t *testing.T) {
	var b []byte
	b = AppendUint(b, math.MaxUint64)
	b = AppendInt(b, math.MinInt64)
	b = AppendBytes(b, "name")
	b = AppendBytes(b, []byte{})
	b = AppendBool(AppendBool(b, true), false)
	b = AppendUint(b, 2)
	b = append(b, 7, 8)
	r := NewReader(b)
	require.Equal(t, uint64(math.MaxUint64), r.Uint())
	require.Equal(t, int64(math.MinInt64), r.Int())
	require.Equal(t, "name", r.String())
	require.Empty(t, r.Bytes())
	require.True(t, r.Bool())
	require.False(t, r.Bool())
	require.Equal(t, 2, r.Count(1))
	require.Equal(t, byte(7), r.Byte())
	require.ErrorIs(t, r.Done(), ErrMalformed, "a byte is left")
	require.Equal(t, []byte{8}, r.Take(1))
	require.NoError(t, r.Done())
}

// TestCount: the length of a message limits what its reader allocates.
func TestCount(t *testing.T) {
	r := NewReader(append(AppendUint(nil, 3), make([]byte, 11)...))
	require.Zero(t, r.Count(4))
	require.ErrorIs(t, r.Done(), ErrMalformed)
	require.Zero(t, r.Uint(), "everything after is zero")
}

// FuzzReader reads a message in the order of steps. What was read and written again is the same, or
// shorter where a number took more bytes than necessary; after something that cannot be read
// everything is zero.
func FuzzReader(f *testing.F) {
	f.Add([]byte("unbtk"), []byte{})
	f.Add([]byte("ub"), AppendBytes(AppendUint(nil, 300), "name"))
	f.Add([]byte("bbbb"), []byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
	f.Add([]byte("ctir"), []byte{2, 7, 8, 9, 1, 5, 5})
	f.Fuzz(func(t *testing.T, steps, b []byte) {
		r := NewReader(b)
		var again []byte
		for _, step := range steps {
			switch step {
			case 'u':
				again = AppendUint(again, r.Uint())
			case 'i':
				again = AppendInt(again, r.Int())
			case 'b':
				again = AppendBytes(again, r.Bytes())
			case 's':
				again = AppendBytes(again, r.String())
			case 't':
				again = append(again, r.Take(3)...)
			case 'c':
				n := r.Count(2)
				require.LessOrEqual(t, n, len(b)/2)
				again = AppendUint(again, uint64(n))
			case 'r':
				again = append(again, r.Rest()...)
			default:
				again = append(again, r.Byte())
			}
		}
		if r.bad {
			require.Error(t, r.Done())
			require.Zero(t, r.Uint())
			require.Empty(t, r.Rest())
			return
		}
		read := b[:len(b)-len(r.rest)]
		require.LessOrEqual(t, len(again), len(read))
		if len(again) == len(read) {
			require.Equal(t, string(read), string(again))
		}
		require.Equal(t, len(r.rest) == 0, r.Done() == nil)
	})
}
