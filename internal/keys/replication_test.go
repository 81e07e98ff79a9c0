package keys

import (
	"encoding/hex"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/testbase"
	"codeq/internal/wire"
)

// TestReplicationGolden fixes the stored form of sessions.
func TestReplicationGolden(t *testing.T) {
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
