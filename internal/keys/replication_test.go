package keys

import (
	"encoding/hex"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/testbase"
	"codeq/internal/wire"
)

// TestReplicationGolden: the layout of the entries of replication.
func TestReplicationGolden(t *testing.T) {
	b := make([]byte, AppliedLen)
	PutApplied(b, 5, 3)
	require.Equal(t, "00000000000000050000000000000003", hex.EncodeToString(b))
	index, term, err := ParseApplied(b)
	require.NoError(t, err)
	require.Equal(t, []uint64{5, 3}, []uint64{index, term})
	_, _, err = ParseApplied(b[1:])
	require.Error(t, err)

	require.Equal(t, "0b6e31", hex.EncodeToString(AppendNamed(nil, Session, "n1")))
	v := SessionValue{Incarnation: 1, Low: 2, Calls: []SessionCall{{Seq: 3, IDs: []ID{{15: 9}}, Duplicates: []int{0}}}}
	require.Equal(t, "0000000000000001"+"02"+"01"+"03"+"01"+"00000000000000000000000000000009"+"01"+"00", hex.EncodeToString(v.Append(nil)))
	gone := SessionValue{Incarnation: 1, Gone: 5}
	require.Equal(t, "0000000000000001"+"00"+"00"+"05", hex.EncodeToString(gone.Append(nil)))
}

func FuzzParseSession(f *testing.F) {
	v := SessionValue{Incarnation: 1, Low: 2, Calls: []SessionCall{{Seq: 3, IDs: []ID{{15: 9}}, Duplicates: []int{0}}}}
	f.Add(v.Append(nil))
	f.Add((&SessionValue{Incarnation: 1, Gone: 5}).Append(nil))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		var v SessionValue
		var err error
		testbase.BoundDecode(t, len(b), func() { v, err = ParseSession(b) })
		if err != nil {
			require.ErrorIs(t, err, wire.ErrMalformed)
			return
		}
		again := v.Append(nil)
		sameOrShorter(t, b, again)
		got, err := ParseSession(again)
		require.NoError(t, err)
		require.Equal(t, v, got)
	})
}
