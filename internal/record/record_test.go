package record

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"maps"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"codeq/internal/testbase"
)

// golden has records and their stored forms.
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
	{"error", Record{Error: "no"}, "20 02 6e6f"},
	{"headers", Record{Headers: map[string]string{"b": "2", "a": "", "": "3"}, Payload: []byte("p")}, "40 03 00 0133 0161 00 0162 0132 70"},
	{"empty headers", Record{Headers: map[string]string{}}, "00"},
	{"run at", Record{Head: Head{RunAt: 1 << 14}}, "8001 808001"},
	{
		"idempotency key",
		Record{Head: Head{Ties: Ties{Unique: hash16, UniqueFor: 300, Flags: 5}}, UniqueKey: "k"},
		"8002 01000000000000000000000000000002 ac02 05 016b",
	},
	{"group", Record{Head: Head{Ties: Ties{Group: 7}}, GroupKey: "g"}, "8004 0000000000000007 0167"},
	{"limit", Record{Head: Head{Ties: Ties{Limit: 8}}, LimitKey: "l"}, "8008 0000000000000008 016c"},
	{"parents", Record{Parents: [][IDLen]byte{hash16}, OnDead: 2}, "8010 02 01 01000000000000000000000000000002"},
	{"missing parents", Record{Parents: [][IDLen]byte{hash16}, OnDead: 1, OnMissing: 2}, "8010 21 01 01000000000000000000000000000002"},
	{"is a parent", Record{Head: Head{Ties: Ties{Parent: true}}, Payload: []byte("p")}, "8020 70"},
	{"rewritten", Record{Head: Head{Rewritten: true}}, "8040"},
	{"expired", Record{Head: Head{Attempts: 1, Leases: 1, Expired: true}}, "8180010101"},
	{"holds the turn", Record{Head: Head{HoldsTurn: true}}, "808002"},
	{"retries first", Record{Head: Head{RetryFirst: true}}, "80808010"},
	{"counted as of a kind of errors", Record{Head: Head{DeadKind: 300}}, "80808020 ac02"},
	{
		"history",
		Record{Head: Head{Leases: 2}, History: &History{FirstReady: 300, Attempts: []Attempt{
			{Number: 1, How: 4, Start: 301, End: 311, Worker: "w", Error: "no"}, {Number: 1, How: 5, Start: 310, End: 310},
		}}, Payload: []byte("p")},
		"818004 00 02 ac02 00 02 01 04 02 14 0177 026e6f 01 05 01 00 00 00 70",
	},
	{"history without its middle", Record{History: &History{Dropped: 300}}, "808004 00 ac02 00"},
	{
		"notes", Record{Notes: &Notes{Done: 1, Total: -1, Text: "t", At: 300, Metadata: map[string]string{"b": "2", "a": ""}}},
		"808008 02 01 ac02 0174 02 0161 00 0162 0132",
	},
	{"kind", Record{Kind: "ship", Payload: []byte("p")}, "80808001 0473686970 70"},
	{
		"logs", Record{Notes: &Notes{Logs: []LogLine{{At: 300, Level: -4, Attempt: 2, Text: "t"}, {}}}},
		"80808802 0000000000 02 ac02 07 02 0174 00000000",
	},
	{
		"everything",
		Record{
			Head: Head{
				Attempts: 2, Leases: 3, MaxAttempts: 4, Lease: 5, Timeout: 6, Retention: -1, RunAt: 7,
				Ties: Ties{Unique: hash16, UniqueFor: 1, Flags: 2, Group: 3, Limit: 4, Parent: true}, Rewritten: true, Expired: true, HoldsTurn: true,
			},
			Error: "e", Headers: map[string]string{"k": "v"}, Payload: []byte{0xff},
			UniqueKey: "u", GroupKey: "g", LimitKey: "l", Parents: [][IDLen]byte{hash16},
			History: &History{}, Notes: &Notes{},
		},
		"ffff0f 02 03 04 05 06 01 07" +
			"01000000000000000000000000000002 01 02 0000000000000003 0000000000000004" +
			"0165 01 016b 0176 0175 0167 016c 00 01 01000000000000000000000000000002 000000 0000000000 ff",
	},
}

var hash16 = [16]byte{0: 1, 15: 2}

// TestGolden fixes the stored form, in both directions.
func TestGolden(t *testing.T) {
	for _, g := range golden {
		require.Equal(t, hex.EncodeToString(testbase.Unhex(g.want)), hex.EncodeToString(g.rec.Encode()), g.name)
		got, err := Decode(testbase.Unhex(g.want))
		require.NoError(t, err, g.name)
		requireSame(t, &g.rec, &got)
	}
}

// requireSame compares records; a nil slice or map equals an empty one.
func requireSame(t require.TestingT, want, got *Record) {
	head := want.Head
	head.Child = len(want.Parents) != 0
	require.Equal(t, head, got.Head)
	require.Equal(t, want.Error, got.Error)
	require.True(t, maps.Equal(want.Headers, got.Headers), "headers: want %q, got %q", want.Headers, got.Headers)
	require.Equal(t, want.UniqueKey, got.UniqueKey)
	require.Equal(t, want.GroupKey, got.GroupKey)
	require.Equal(t, want.LimitKey, got.LimitKey)
	require.Equal(t, want.Kind, got.Kind)
	require.Equal(t, want.OnDead, got.OnDead)
	require.Equal(t, want.OnMissing, got.OnMissing)
	require.True(t, slices.Equal(want.Parents, got.Parents), "parents: want %x, got %x", want.Parents, got.Parents)
	require.Equal(t, want.History, got.History)
	require.Equal(t, want.Notes == nil, got.Notes == nil)
	if want.Notes != nil {
		w, g := *want.Notes, *got.Notes
		require.True(t, maps.Equal(w.Metadata, g.Metadata), "metadata: want %q, got %q", w.Metadata, g.Metadata)
		w.Metadata, g.Metadata = nil, nil
		require.Equal(t, w, g)
	}
	require.True(t, bytes.Equal(want.Payload, got.Payload), "payload: want %x, got %x", want.Payload, got.Payload)
}

// drawRecord draws a record; any field may be missing.
func drawRecord(t *rapid.T) Record {
	small := rapid.OneOf(rapid.Just(uint32(0)), rapid.Uint32Range(0, 300), rapid.Just(uint32(math.MaxUint32)))
	large := rapid.OneOf(rapid.Just(uint64(0)), rapid.Uint64Range(0, 1<<48), rapid.Just(uint64(math.MaxUint64)))
	signed := rapid.OneOf(rapid.SampledFrom([]int64{0, -1, math.MinInt64, math.MaxInt64}), rapid.Int64Range(0, 1<<48))
	bytesOrNone := rapid.OneOf(rapid.Just([]byte(nil)), rapid.SliceOfN(rapid.Byte(), 0, 300))
	r := Record{
		Head: Head{
			Attempts:    small.Draw(t, "attempts"),
			Leases:      small.Draw(t, "leases"),
			MaxAttempts: small.Draw(t, "max attempts"),
			Lease:       large.Draw(t, "lease"),
			Timeout:     large.Draw(t, "timeout"),
			Retention:   signed.Draw(t, "retention"),
			RunAt:       large.Draw(t, "run at"),
			Rewritten:   rapid.Bool().Draw(t, "rewritten"),
			Expired:     rapid.Bool().Draw(t, "expired"),
			HoldsTurn:   rapid.Bool().Draw(t, "holds the turn"),
			RetryFirst:  rapid.Bool().Draw(t, "retries first"),
			DeadKind:    rapid.Uint32Range(0, 300).Draw(t, "kind of errors"),
		},
		Error: string(bytesOrNone.Draw(t, "error")),
		Headers: rapid.OneOf(
			rapid.Just(map[string]string(nil)), rapid.MapOfN(rapid.String(), rapid.String(), 0, 4),
		).Draw(t, "headers"),
		Payload: bytesOrNone.Draw(t, "payload"),
	}
	r.Parent = rapid.Bool().Draw(t, "parent")
	if rapid.Bool().Draw(t, "has an idempotency key") {
		copy(r.Unique[:], rapid.SliceOfN(rapid.Byte(), UniqueLen, UniqueLen).Draw(t, "unique"))
		r.Unique[3] |= 1
		r.UniqueFor, r.Flags = large.Draw(t, "unique for"), rapid.Byte().Draw(t, "flags")&^hasMaxWait
		r.MaxWait = large.Draw(t, "max wait")
		r.UniqueKey = string(bytesOrNone.Draw(t, "unique key"))
	}
	if r.Group = large.Draw(t, "group"); r.Group != 0 {
		r.GroupKey = string(bytesOrNone.Draw(t, "group key"))
	}
	if r.Limit = large.Draw(t, "limit"); r.Limit != 0 {
		r.LimitKey = string(bytesOrNone.Draw(t, "limit key"))
	}
	r.Kind = string(bytesOrNone.Draw(t, "kind"))
	if rapid.Bool().Draw(t, "has a history") {
		r.History = &History{FirstReady: large.Draw(t, "first ready"), Dropped: small.Draw(t, "dropped")}
		for range rapid.IntRange(0, 3).Draw(t, "ended attempts") {
			r.History.Attempts = append(r.History.Attempts, Attempt{
				Number: small.Draw(t, "number"), How: rapid.Byte().Draw(t, "how"),
				Start: large.Draw(t, "start"), End: large.Draw(t, "end"),
				Worker: string(bytesOrNone.Draw(t, "worker")), Error: string(bytesOrNone.Draw(t, "its error")),
			})
		}
	}
	if rapid.Bool().Draw(t, "has notes") {
		r.Notes = &Notes{
			Done: signed.Draw(t, "done"), Total: signed.Draw(t, "total"), At: large.Draw(t, "said at"), Text: string(bytesOrNone.Draw(t, "text")),
			Metadata: rapid.MapOfN(rapid.String(), rapid.String(), 0, 4).Draw(t, "metadata"),
		}
		for range rapid.IntRange(0, 3).Draw(t, "lines of a log") {
			r.Notes.Logs = append(r.Notes.Logs, LogLine{
				At: large.Draw(t, "at"), Level: int(signed.Draw(t, "level")), Attempt: small.Draw(t, "of attempt"), Text: string(bytesOrNone.Draw(t, "line")),
			})
		}
	}
	for range rapid.IntRange(0, 3).Draw(t, "parents") {
		r.OnDead, r.OnMissing = 1, 2
		r.Child = true
		r.Parents = append(r.Parents, [IDLen]byte(rapid.SliceOfN(rapid.Byte(), IDLen, IDLen).Draw(t, "a parent")))
	}
	return r
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

// headLen returns the number of bytes of a stored record that DecodeHead reads.
func headLen(r *Record) int {
	head := Record{Head: r.Head}
	n := len(head.Encode()) - len(binary.AppendUvarint(nil, head.flags())) + len(binary.AppendUvarint(nil, r.flags()))
	for _, set := range []bool{r.Unique != [UniqueLen]byte{}, r.Group != 0, r.Limit != 0} {
		if set {
			n-- // the length of an empty key
		}
	}
	return n
}

// TestTruncated: Decode refuses a record that ends at any point before its payload; DecodeHead
// refuses a record that ends in the head.
func TestTruncated(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := drawRecord(t)
		r.Payload = nil
		b := r.Encode()
		headLen := headLen(&r)
		for n := range b {
			_, err := Decode(b[:n])
			require.ErrorIs(t, err, errMalformed, "%d of %d bytes", n, len(b))
			_, err = DecodeHead(b[:n])
			if n < headLen {
				require.ErrorIs(t, err, errMalformed, "%d of %d bytes", n, len(b))
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
			Ties: Ties{Unique: hash16, UniqueFor: math.MaxUint64, Group: math.MaxUint64, Limit: math.MaxUint64, Parent: true},
		},
		UniqueKey: strings.Repeat("u", 1<<14), GroupKey: strings.Repeat("u", 1<<14), LimitKey: strings.Repeat("u", 1<<14),
		Parents: make([][IDLen]byte, 1<<14),
		Error:   strings.Repeat("e", 1<<20),
		Headers: map[string]string{strings.Repeat("k", 1<<14): strings.Repeat("v", 1<<20)},
		Payload: make([]byte, 1000),
	}
	require.LessOrEqual(t, len(most.Encode()), most.MaxSize())
}

// TestRefusals: decoders refuse fields that announce more bytes than there are, and fields out of
// range.
func TestRefusals(t *testing.T) {
	uvarint := func(flags uint64, values ...uint64) []byte {
		b := binary.AppendUvarint(nil, flags)
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
		{"unknown flags", uvarint(retriesFirst << 1), true},
		{"logs without notes", append(uvarint(hasLogs, 1), make([]byte, leastLogLine)...), false},
		{"logs without lines", append(uvarint(hasNotes|hasLogs), make([]byte, 6)...), false},
		{"more lines than bytes", append(append(uvarint(hasNotes|hasLogs), make([]byte, 5)...), 2, 0, 0, 0, 0, 0, 0, 0), false},
		{"a kind that is none", uvarint(hasKind, 0), false},
		{"half a hash", append(uvarint(hasGroup), 1, 2, 3, 4), true},
		{"a group that is none", append(uvarint(hasGroup), make([]byte, 9)...), true},
		{"a key that is none", append(uvarint(hasUnique), make([]byte, 19)...), true},
		{"more parents than bytes", append(uvarint(hasParents, 0, 2), make([]byte, 31)...), false},
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
		{"more attempts than bytes", append(uvarint(hasAttempts, 0, 0, 2), make([]byte, 2*leastAttempt-1)...), false},
		{"2^32 dropped attempts", uvarint(hasAttempts, 0, 1<<32, 0), false},
		{"an attempt with half an error", append(uvarint(hasAttempts, 0, 0, 1, 1), 1, 0, 0, 0, 2, 'e'), false},
		{"more metadata than bytes", uvarint(hasNotes, 0, 0, 0, 0, 1<<40), false},
		{"a header's name beyond the end", append(uvarint(hasHeaders, 1), 9, 'k'), false},
	} {
		r, err := Decode(c.b)
		require.ErrorIs(t, err, errMalformed, c.name)
		require.Zero(t, r, c.name)
		_, err = DecodeHead(c.b)
		require.Equal(t, c.head, err != nil, c.name)
	}
}

// TestPayloadAliases: Decode copies everything except the payload.
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

// FuzzDecode: no input makes Decode panic. An accepted record encodes to a form that is not longer,
// decodes to the same record, and does not change again.
func FuzzDecode(f *testing.F) {
	for _, g := range golden {
		f.Add(testbase.Unhex(g.want))
	}
	f.Add([]byte{hasHistory, 0, 0, 'p'})                    // announces zeros
	f.Add([]byte{hasHeaders, 2, 1, 'k', 0, 1, 'k', 1, 'v'}) // one name twice
	f.Fuzz(func(t *testing.T, b []byte) {
		var r Record
		var err error
		testbase.BoundDecode(t, len(b), func() { r, err = Decode(b) })
		h, headErr := DecodeHead(b)
		if err != nil {
			require.ErrorIs(t, err, errMalformed)
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

// TestHistoryIsBounded: a history keeps the first and the last ones of many attempts, and cuts
// their texts between characters.
func TestHistoryIsBounded(t *testing.T) {
	h := History{FirstReady: 1 << 40}
	for n := range uint32(300) {
		h.Add(Attempt{
			Number: n + 1, How: 4, Start: 1<<41 + uint64(n), End: 1<<42 + uint64(n),
			Worker: strings.Repeat("w", 2*MaxWorker), Error: "e" + strings.Repeat("é", maxAttemptError),
		})
	}
	var numbers []uint32
	for _, a := range h.Attempts {
		numbers = append(numbers, a.Number)
		require.Equal(t, strings.Repeat("w", MaxWorker), a.Worker)
		require.Equal(t, "e"+strings.Repeat("é", maxAttemptError/2-1), a.Error)
	}
	require.Equal(t, []uint32{1, 2, 293, 294, 295, 296, 297, 298, 299, 300}, numbers)
	require.EqualValues(t, 290, h.Dropped)
	require.Less(t, len((&Record{History: &h}).Encode()), 4608)
}

// TestLogsAreBounded: notes keep the newest lines, by number and bytes. Earlier notes keep theirs.
func TestLogsAreBounded(t *testing.T) {
	var n Notes
	var all []Notes
	for i := range 200 {
		n.Log(LogLine{Attempt: uint32(i), Text: "line"})
		all = append(all, n)
	}
	for i := range all {
		logs := all[i].Logs
		require.Len(t, logs, min(i+1, MaxLogLines))
		require.EqualValues(t, i, logs[len(logs)-1].Attempt)
		require.EqualValues(t, max(0, i+1-MaxLogLines), logs[0].Attempt)
	}
	for i := range 20 {
		n.Log(LogLine{Attempt: uint32(i), Text: "x" + strings.Repeat("é", MaxLogLine)})
	}
	require.Len(t, n.Logs, MaxLogBytes/(MaxLogLine-1))
	require.NoError(t, SoundLogs(n.Logs))
	require.Error(t, SoundLogs(make([]LogLine, MaxLogLines+1)))
	require.Error(t, SoundLogs([]LogLine{{Text: "\xff"}}))
	require.Error(t, SoundLogs([]LogLine{{Text: strings.Repeat("x", MaxLogLine+1)}}))
	r := Record{Notes: &n}
	require.LessOrEqual(t, len(r.Encode()), r.MaxSize())
	require.Nil(t, n.WithoutLogs().Logs)
	require.NotNil(t, n.Logs)
	require.Nil(t, (*Notes)(nil).WithoutLogs())
}
