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

// TestCount: what a message makes its reader allocate is bounded by its length.
func TestCount(t *testing.T) {
	r := NewReader(append(AppendUint(nil, 3), make([]byte, 11)...))
	require.Zero(t, r.Count(4))
	require.ErrorIs(t, r.Done(), ErrMalformed)
	require.Zero(t, r.Uint(), "everything after is zero")
}

func FuzzReader(f *testing.F) {
	f.Add([]byte{})
	f.Add(AppendBytes(AppendUint(nil, 300), "name"))
	f.Add([]byte{0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff})
	f.Fuzz(func(t *testing.T, b []byte) {
		for i := range 6 {
			r := NewReader(b)
			for range len(b) + 1 {
				switch i {
				case 0:
					r.Uint()
				case 1:
					r.Int()
				case 2:
					r.Bytes()
				case 3:
					r.Byte()
				case 4:
					r.Take(3)
				case 5:
					r.Count(2)
				}
			}
			if i != 5 {
				require.Error(t, r.Done(), "more was read than there is")
			}
		}
	})
}
