package raftlog

import (
	"bytes"
	"encoding/hex"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"

	"codeq/internal/testbase"
)

func TestFormat(t *testing.T) {
	at := time.Date(2026, 1, 2, 3, 4, 5, 678, time.UTC)
	for _, tc := range []struct {
		name       string
		log        raft.Log
		key, value string
	}{
		{
			"zero", raft.Log{Index: 1},
			"000000070000000000000001",
			"d4cc4b95" + "00" + "00" + "ffdb8ff9ce03" + "00" + "00",
		},
		{
			"everything",
			raft.Log{Index: 0x0102, Term: 300, Type: raft.LogConfiguration, AppendedAt: at, Extensions: []byte("ex"), Data: []byte("data")},
			"000000070000000000000102",
			"dac4326c" + "05" + "ac02" + "cad6b9950d" + "a605" + "02" + "6578" + "64617461",
		},
	} {
		t.Run(tc.name, func(t *testing.T) {
			value := appendValue(nil, 7, &tc.log)
			require.Equal(t, tc.key, hex.EncodeToString(appendKey(nil, 7, tc.log.Index)))
			require.Equal(t, tc.value, hex.EncodeToString(value))
			require.Equal(t, len(value), valueBytes(&tc.log))
			var got raft.Log
			require.NoError(t, decodeValue(7, tc.log.Index, value, &got))
			require.Equal(t, tc.log, got)
			clear(value) // the entry shares no memory with it
			require.Equal(t, tc.log, got)
		})
	}
}

func TestDecodeRefusesDamage(t *testing.T) {
	log := raft.Log{Index: 9, Term: 300, Type: raft.LogNoop, AppendedAt: time.Unix(1, 2), Extensions: []byte("ex"), Data: []byte("data")}
	value := appendValue(nil, 7, &log)
	refused := func(group uint32, index uint64, value []byte) {
		t.Helper()
		got := raft.Log{Term: 42}
		require.ErrorIs(t, decodeValue(group, index, value, &got), ErrCorrupt)
		require.Equal(t, raft.Log{Term: 42}, got)
	}
	refused(8, 9, value)
	refused(7, 8, value)
	refused(7, 9, append(bytes.Clone(value), 0))
	for n := range value {
		refused(7, 9, value[:n])
		for bit := range 8 {
			damaged := bytes.Clone(value)
			damaged[n] ^= 1 << bit
			refused(7, 9, damaged)
		}
	}
	// Malformed, with a right checksum.
	for _, rest := range []string{
		"",
		"00",                       // no term
		"00ffffffffffffffffff02",   // term of more than 64 bits
		"0000",                     // no time
		"000000",                   // no nanoseconds
		"0000008094ebdc03",         // a second of nanoseconds
		"00000000",                 // no length of extensions
		"0000000001",               // no extensions
		"00000000ffffffffffffff7f", // far too few
	} {
		refused(7, 9, withChecksum(t, 7, 9, rest))
	}
	require.NoError(t, decodeValue(7, 9, withChecksum(t, 7, 9, "000000ff93ebdc0300"), &log))
}

func withChecksum(t *testing.T, group uint32, index uint64, rest string) []byte {
	b, err := hex.DecodeString(rest)
	require.NoError(t, err)
	sum := checksum(group, index, b)
	return append([]byte{byte(sum), byte(sum >> 8), byte(sum >> 16), byte(sum >> 24)}, b...)
}

// FuzzDecode gives the decoder any bytes with a right checksum: it must not panic, and an accepted
// entry must decode to the same again from its encoding.
func FuzzDecode(f *testing.F) {
	for _, log := range []raft.Log{
		{},
		{Term: 1 << 40, Type: raft.LogConfiguration, AppendedAt: time.Unix(1e9, 5), Extensions: []byte("ex"), Data: []byte("data")},
		{Data: bytes.Repeat([]byte{1}, 300)},
	} {
		f.Add(uint32(7), uint64(9), appendValue(nil, 7, &log)[checksumBytes:])
	}
	f.Add(uint32(0), uint64(0), []byte{0, 0, 0, 0x80, 0x94, 0xeb, 0xdc, 0x03})
	f.Fuzz(func(t *testing.T, group uint32, index uint64, rest []byte) {
		var log, again raft.Log
		var err error
		given := withChecksum(t, group, index, hex.EncodeToString(rest))
		testbase.BoundDecode(t, len(given), func() { err = decodeValue(group, index, given, &log) })
		if err != nil {
			require.ErrorIs(t, err, ErrCorrupt)
			return
		}
		value := appendValue(nil, group, &log)
		require.LessOrEqual(t, len(value), checksumBytes+len(rest))
		require.NoError(t, decodeValue(group, index, value, &again))
		require.Equal(t, log, again)
	})
}
