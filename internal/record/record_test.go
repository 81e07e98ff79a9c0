package record

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"maps"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

// golden are records and what lies on disk of them.
var golden = []struct {
	name string
	rec  Record
	want string
}{
	{"nothing", Record{}, "00"},
	{"payload", Record{Payload: []byte("ab")}, "00 6162"},
	{"attempts and leases", Record{Head: Head{Attempts: 1, Leases: 300}, Payload: []byte("a")}, "01 01 ac02 61"},
	{"leases alone", Record{Head: Head{Leases: 1}}, "01 00 01"},
	{"max attempts", Record{Head: Head{MaxAttempts: 25}}, "02 19"},
	{"lease", Record{Head: Head{Lease: 30_000}}, "04 b0ea01"},
	{"timeout", Record{Head: Head{Timeout: 1}}, "08 01"},
	{"retention", Record{Head: Head{Retention: 1}}, "10 02"},
	{"retention for ever", Record{Head: Head{Retention: -1}}, "10 01"},
	{"run at", Record{Head: Head{RunAt: 1 << 14}}, "20 808001"},
	{"error", Record{Error: "no"}, "40 02 6e6f"},
	{"headers", Record{Headers: map[string]string{"b": "2", "a": "", "": "3"}, Payload: []byte("p")}, "80 03 00 0133 0161 00 0162 0132 70"},
	{"empty headers", Record{Headers: map[string]string{}}, "00"},
	{
		"everything",
		Record{
			Head:  Head{Attempts: 2, Leases: 3, MaxAttempts: 4, Lease: 5, Timeout: 6, Retention: -1, RunAt: 7},
			Error: "e", Headers: map[string]string{"k": "v"}, Payload: []byte{0xff},
		},
		"ff 02 03 04 05 06 01 07 0165 01 016b 0176 ff",
	},
}

func unhex(s string) []byte {
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		panic(err)
	}
	return b
}

// TestGolden pins the stored form, both ways.
func TestGolden(t *testing.T) {
	for _, g := range golden {
		require.Equal(t, hex.EncodeToString(unhex(g.want)), hex.EncodeToString(g.rec.Encode()), g.name)
		got, err := Decode(unhex(g.want))
		require.NoError(t, err, g.name)
		requireSame(t, &g.rec, &got)
	}
}

// requireSame compares records; a nil slice or map is as good as an empty one.
func requireSame(t require.TestingT, want, got *Record) {
	require.Equal(t, want.Head, got.Head)
	require.Equal(t, want.Error, got.Error)
	require.True(t, maps.Equal(want.Headers, got.Headers), "headers: want %q, got %q", want.Headers, got.Headers)
	require.True(t, bytes.Equal(want.Payload, got.Payload), "payload: want %x, got %x", want.Payload, got.Payload)
}

// drawRecord draws a record in which any field may be missing.
func drawRecord(t *rapid.T) Record {
	small := rapid.OneOf(rapid.Just(uint32(0)), rapid.Uint32Range(0, 300), rapid.Just(uint32(math.MaxUint32)))
	large := rapid.OneOf(rapid.Just(uint64(0)), rapid.Uint64Range(0, 1<<48), rapid.Just(uint64(math.MaxUint64)))
	signed := rapid.OneOf(rapid.SampledFrom([]int64{0, -1, math.MinInt64, math.MaxInt64}), rapid.Int64Range(0, 1<<48))
	bytesOrNone := rapid.OneOf(rapid.Just([]byte(nil)), rapid.SliceOfN(rapid.Byte(), 0, 300))
	return Record{
		Head: Head{
			Attempts:    small.Draw(t, "attempts"),
			Leases:      small.Draw(t, "leases"),
			MaxAttempts: small.Draw(t, "max attempts"),
			Lease:       large.Draw(t, "lease"),
			Timeout:     large.Draw(t, "timeout"),
			Retention:   signed.Draw(t, "retention"),
			RunAt:       large.Draw(t, "run at"),
		},
		Error: string(bytesOrNone.Draw(t, "error")),
		Headers: rapid.OneOf(
			rapid.Just(map[string]string(nil)), rapid.MapOfN(rapid.String(), rapid.String(), 0, 4),
		).Draw(t, "headers"),
		Payload: bytesOrNone.Draw(t, "payload"),
	}
}

func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := drawRecord(t)
		b := r.Encode()
		require.LessOrEqual(t, len(b), r.MaxSize())
		require.Equal(t, b, r.Encode(), "equal records have equal forms")
		require.Equal(t, append([]byte("before"), b...), r.Append([]byte("before")))
		got, err := Decode(b)
		require.NoError(t, err)
		requireSame(t, &r, &got)
		h, err := DecodeHead(b)
		require.NoError(t, err)
		require.Equal(t, r.Head, h)
	})
}

// TestTruncated: a record that ends before its payload begins is refused, by
// Decode wherever it ends, by DecodeHead if it ends in the head.
func TestTruncated(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := drawRecord(t)
		head := Record{Head: r.Head, Payload: nil}
		headLen := len(head.Encode())
		r.Payload = nil
		b := r.Encode()
		for n := range b {
			_, err := Decode(b[:n])
			require.ErrorIs(t, err, ErrMalformed, "%d of %d bytes", n, len(b))
			_, err = DecodeHead(b[:n])
			if n < headLen {
				require.ErrorIs(t, err, ErrMalformed, "%d of %d bytes", n, len(b))
			} else {
				require.NoError(t, err, "%d of %d bytes", n, len(b))
			}
		}
	})
}

func TestMaxSize(t *testing.T) {
	for _, n := range []int{0, 1, 100, 1 << 20} {
		r := Record{Payload: make([]byte, n)}
		require.Equal(t, 1+n, r.MaxSize())
		require.Len(t, r.Encode(), 1+n)
		require.Equal(t, 1+n, cap(r.Encode()))
	}
	most := Record{
		Head: Head{
			Attempts: math.MaxUint32, Leases: math.MaxUint32, MaxAttempts: math.MaxUint32, Lease: math.MaxUint64,
			Timeout: math.MaxUint64, Retention: math.MinInt64, RunAt: math.MaxUint64,
		},
		Error:   strings.Repeat("e", 1<<20),
		Headers: map[string]string{strings.Repeat("k", 1<<14): strings.Repeat("v", 1<<20)},
		Payload: make([]byte, 1000),
	}
	require.LessOrEqual(t, len(most.Encode()), most.MaxSize())
}

// TestRefusals: fields that announce more than there is, or are out of range.
func TestRefusals(t *testing.T) {
	uvarint := func(flags byte, values ...uint64) []byte {
		b := []byte{flags}
		for _, v := range values {
			b = binary.AppendUvarint(b, v)
		}
		return b
	}
	endless := bytes.Repeat([]byte{0xff}, 11)
	for _, c := range []struct {
		name string
		b    []byte
		head bool // DecodeHead refuses it, too
	}{
		{"nothing", nil, true},
		{"2^32 attempts", uvarint(hasHistory, 1<<32, 1), true},
		{"2^32 leases", uvarint(hasHistory, 1, 1<<32), true},
		{"2^32 max attempts", uvarint(hasMaxAttempts, 1<<32), true},
		{"endless attempts", append([]byte{hasHistory}, endless...), true},
		{"endless lease", append([]byte{hasLease}, endless...), true},
		{"endless retention", append([]byte{hasRetention}, endless...), true},
		{"an error of 2^63 bytes", uvarint(hasError, 1<<63, 1), false},
		{"an error of one byte more than there are", append(uvarint(hasError, 3), "no"...), false},
		{"more headers than bytes", append(uvarint(hasHeaders, 1<<40), "abcdef"...), false},
		{"a header without a value", append(uvarint(hasHeaders, 1), 1, 'k'), false},
		{"a header's name beyond the end", append(uvarint(hasHeaders, 1), 9, 'k'), false},
	} {
		r, err := Decode(c.b)
		require.ErrorIs(t, err, ErrMalformed, c.name)
		require.Zero(t, r, c.name)
		_, err = DecodeHead(c.b)
		require.Equal(t, c.head, err != nil, c.name)
	}
}

// TestPayloadAliases: Decode copies everything but the payload.
func TestPayloadAliases(t *testing.T) {
	r := Record{Error: "e", Headers: map[string]string{"k": "v"}, Payload: []byte("payload")}
	b := r.Encode()
	got, err := Decode(b)
	require.NoError(t, err)
	for i := range b {
		b[i] = 'x'
	}
	require.Equal(t, "e", got.Error)
	require.Equal(t, map[string]string{"k": "v"}, got.Headers)
	require.Equal(t, "xxxxxxx", string(got.Payload))
}

func TestAllocations(t *testing.T) {
	allocs := func(f func()) int { return int(testing.AllocsPerRun(100, f)) }
	plain := Record{Payload: make([]byte, 100)}
	full := Record{Head: Head{Attempts: 1, Leases: 1, MaxAttempts: 2, Lease: 3, Timeout: 4, Retention: 5, RunAt: 6}}
	buf := make([]byte, 0, max(plain.MaxSize(), full.MaxSize()))
	var sink []byte
	require.Equal(t, 1, allocs(func() { sink = plain.Encode() }), "Encode allocates what it returns")
	require.Equal(t, 0, allocs(func() { sink = plain.Append(buf) }))
	require.Equal(t, 0, allocs(func() { sink = full.Append(buf) }))
	for _, b := range [][]byte{plain.Encode(), full.Encode()} {
		require.Equal(t, 0, allocs(func() {
			if _, err := DecodeHead(b); err != nil {
				panic(err)
			}
		}))
		require.Equal(t, 0, allocs(func() {
			if _, err := Decode(b); err != nil {
				panic(err)
			}
		}), "what has no strings is decoded in place")
	}
	require.NotEmpty(t, sink)
}

// FuzzDecode: no input makes Decode panic; what it accepts has a form that is
// no longer, decodes to the same record, and does not change any more.
func FuzzDecode(f *testing.F) {
	for _, g := range golden {
		f.Add(unhex(g.want))
	}
	f.Add([]byte{hasHistory, 0, 0, 'p'})                    // announces zeros
	f.Add([]byte{hasHeaders, 2, 1, 'k', 0, 1, 'k', 1, 'v'}) // one name twice
	f.Fuzz(func(t *testing.T, b []byte) {
		r, err := Decode(b)
		h, headErr := DecodeHead(b)
		if err != nil {
			require.ErrorIs(t, err, ErrMalformed)
			return
		}
		require.NoError(t, headErr)
		require.Equal(t, r.Head, h)
		again := r.Encode()
		require.LessOrEqual(t, len(again), min(len(b), r.MaxSize()))
		got, err := Decode(again)
		require.NoError(t, err)
		requireSame(t, &r, &got)
		require.Equal(t, again, got.Encode())
	})
}
