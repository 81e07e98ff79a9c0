package keys

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"codeq/internal/window"
)

// The values of the golden tests.
const (
	goldenLane  = 0x000102
	goldenQueue = 7
	goldenTime  = 0x0193b3c01235
	goldenSeq   = 0x0193b3c012345003
	goldenIDHex = "0193b3c012347abc 85 000102 deadbeef"
)

var goldenID = ID(unhex(goldenIDHex))

// unhex reads hexadecimal digits; blanks separate the fields.
func unhex(s string) []byte {
	b, err := hex.DecodeString(strings.ReplaceAll(s, " ", ""))
	if err != nil {
		panic(err)
	}
	return b
}

func freshEntry() LeaseEntry {
	return LeaseEntry{
		ID: goldenID, Lane: goldenLane, Since: SinceOf(goldenID), Token: goldenSeq,
		Leases: 1, Attempts: 1, Duration: 30_000,
	}
}

func fullEntry() LeaseEntry {
	return LeaseEntry{
		ID: goldenID, Lane: goldenLane, Since: MovedSince(goldenTime), Token: goldenSeq - 1,
		Leases: 300, Attempts: 2, Duration: 30_000,
	}
}

// TestGolden pins every form that lies on disk.
func TestGolden(t *testing.T) {
	task := make([]byte, TaskLen(SinceOf(goldenID)))
	PutTask(task, goldenLane, SinceOf(goldenID), goldenID)
	lease := make([]byte, LeaseLen)
	PutLease(lease, goldenSeq)
	counters := make([]byte, CountersLen)
	CountersValue{Clock: 6, Counts: Counts{Ready: 1, Scheduled: 2, Leased: 3, Dead: 4, Done: 1 << 40}}.Put(counters)
	leases := LeaseHeader{Deadline: goldenTime}.Append(nil)
	leases = freshEntry().Append(leases, goldenSeq)
	leases = fullEntry().Append(leases, goldenSeq)

	for _, c := range []struct {
		name string
		got  []byte
		want string
	}{
		{"meta", []byte{Meta}, "01"},
		{"queue", AppendNumbered(nil, Queue, goldenQueue), "02 00000007"},
		{"lane", AppendNumbered(nil, Lane, goldenLane), "03 00000102"},
		{"counters", AppendNumbered(nil, Counters, goldenQueue), "04 00000007"},
		{"task fresh", task, "10 00000102" + goldenIDHex},
		{"task moved", AppendTask(nil, goldenLane, MovedSince(goldenTime), goldenID), "10 00000102 0193b3c01235 8000" + goldenIDHex},
		{"lane prefix", AppendLane(nil, goldenLane), "10 00000102"},
		{"from the head", AppendFrom(nil, goldenLane, 0, ID{}), "10 00000102"},
		{"from a fresh task", AppendFrom(nil, goldenLane, SinceOf(goldenID), goldenID), "10 00000102" + goldenIDHex},
		{"from a moved task", AppendFrom(nil, goldenLane, MovedSince(1), goldenID), "10 00000102 000000000001 8000" + goldenIDHex},
		{"lease", lease, "11 0193b3c012345003"},
		{"scheduled", AppendTimed(nil, Scheduled, goldenTime, goldenID), "12 00000193b3c01235" + goldenIDHex},
		{"dead", AppendDead(nil, goldenQueue, goldenTime, goldenID), "13 00000007 00000193b3c01235" + goldenIDHex},
		{"done", AppendTimed(nil, Done, goldenTime, goldenID), "14 00000193b3c01235" + goldenIDHex},
		{"index", AppendIndex(nil, goldenID), "15" + goldenIDHex},

		{"place key, task", FirstPlace(goldenLane, goldenID).AppendKey(nil, goldenID), "10 00000102" + goldenIDHex},
		{"place key, scheduled", Place{Range: Scheduled, At: 1}.AppendKey(nil, goldenID), "12 0000000000000001" + goldenIDHex},
		{"place key, dead", Place{Range: Dead, Group: 7, At: 1}.AppendKey(nil, goldenID), "13 00000007 0000000000000001" + goldenIDHex},
		{"place key, done", Place{Range: Done, At: 1}.AppendKey(nil, goldenID), "14 0000000000000001" + goldenIDHex},

		{"lane value", LaneValue{Queue: goldenQueue, Priority: 9, Tenant: "acme"}.Append(nil), "00000007 09 61636d65"},
		{"lane value without a tenant", LaneValue{Queue: goldenQueue}.Append(nil), "00000007 00"},
		{
			"counters value", counters,
			"0000000000000006 0000000000000001 0000000000000002 0000000000000003 0000000000000004 0000010000000000",
		},
		{"place, first", FirstPlace(goldenLane, goldenID).Append(nil), "10 00000102 0193b3c012347abc"},
		{"place, dead", Place{Range: Dead, Group: goldenQueue, At: goldenTime}.Append(nil), "13 00000007 00000193b3c01235"},
		{"lane number", AppendLaneNumber(nil, goldenLane), "00000102"},
		{
			"done value", DoneValue{Lane: goldenLane, At: goldenTime, Result: []byte("ok")}.Append(nil),
			"00000102 00000193b3c01235 02 6f6b",
		},
		{"done value without a result", DoneValue{Lane: goldenLane, At: goldenTime}.Append(nil), "00000102 00000193b3c01235 00"},
		{"local lease record", LeaseHeader{Local: true, Deadline: goldenTime}.Append(nil), "01 00000193b3c01235"},
		{
			"lease record", leases,
			"00 00000193b3c01235" +
				"01" + goldenIDHex + "b0ea01" +
				"00" + goldenIDHex + "b0ea01 00000102 0193b3c012358000 0193b3c012345002 ac02 02",
		},
	} {
		require.Equal(t, hex.EncodeToString(unhex(c.want)), hex.EncodeToString(c.got), c.name)
	}
	lower, upper := Range(Dead)
	require.Equal(t, []byte{0x13}, lower)
	require.Equal(t, []byte{0x14}, upper)
}

// TestAppendKeepsWhatIsThere: encoders leave the bytes before theirs alone.
func TestAppendKeepsWhatIsThere(t *testing.T) {
	before := []byte("before")
	for _, c := range []struct {
		name   string
		append func([]byte) []byte
	}{
		{"task", func(b []byte) []byte { return AppendTask(b, 1, 2, goldenID) }},
		{"lane", func(b []byte) []byte { return AppendLane(b, 1) }},
		{"timed", func(b []byte) []byte { return AppendTimed(b, Done, 1, goldenID) }},
		{"dead", func(b []byte) []byte { return AppendDead(b, 1, 2, goldenID) }},
		{"index", func(b []byte) []byte { return AppendIndex(b, goldenID) }},
		{"numbered", func(b []byte) []byte { return AppendNumbered(b, Lane, 1) }},
		{"place", func(b []byte) []byte { return Place{Range: Task}.Append(b) }},
		{"lane number", func(b []byte) []byte { return AppendLaneNumber(b, 1) }},
		{"lane value", func(b []byte) []byte { return LaneValue{Tenant: "t"}.Append(b) }},
		{"done value", func(b []byte) []byte { return DoneValue{Result: []byte("r")}.Append(b) }},
		{"lease header", func(b []byte) []byte { return LeaseHeader{}.Append(b) }},
		{"fresh entry", func(b []byte) []byte { return freshEntry().Append(b, goldenSeq) }},
		{"full entry", func(b []byte) []byte { return fullEntry().Append(b, goldenSeq) }},
	} {
		require.Equal(t, append(bytes.Clone(before), c.append(nil)...), c.append(bytes.Clone(before)), c.name)
	}
}

// drawID draws a UUIDv7. Few different times make for many ties.
func drawID(t *rapid.T) (id ID) {
	ms := rapid.OneOf(rapid.Uint64Range(0, 3), rapid.Uint64Range(0, 1<<48-1)).Draw(t, "ms")
	counter := rapid.SampledFrom([]uint64{0, 1, 0x7ff, 0xfff}).Draw(t, "counter")
	binary.BigEndian.PutUint64(id[:], ms<<16|kindFresh|counter)
	rest := rapid.OneOf(rapid.Uint64Range(0, 3), rapid.Uint64()).Draw(t, "rest")
	binary.BigEndian.PutUint64(id[8:], rest&(1<<62-1)|1<<63)
	return id
}

// drawSince draws where a task may stand: in its first place, or moved.
func drawSince(t *rapid.T, id ID) uint64 {
	if rapid.Bool().Draw(t, "fresh") {
		return SinceOf(id)
	}
	return MovedSince(rapid.OneOf(rapid.Uint64Range(0, 3), rapid.Uint64Range(0, 1<<48-1)).Draw(t, "moved at"))
}

func drawUint32(t *rapid.T, name string) uint32 {
	return rapid.OneOf(rapid.Uint32Range(0, 2), rapid.Uint32()).Draw(t, name)
}

func TestSince(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		id := drawID(t)
		id[0] &= 0x7f // leaves room for the next millisecond
		since := SinceOf(id)
		ms := since >> 16
		require.True(t, Fresh(since))
		require.Equal(t, ms, SinceMillis(since))
		moved := MovedSince(ms)
		require.False(t, Fresh(moved))
		require.Equal(t, ms, SinceMillis(moved))
		require.Greater(t, moved, since, "a task that becomes ready again stands behind the new ones of its millisecond")
		require.Less(t, moved, (ms+1)<<16|kindFresh, "and before those of the next")
	})
}

// TestOrder: the byte order of task keys is the order of lanes, then of
// positions as the windows have it, in whatever form the keys are.
func TestOrder(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		draw := func() (lane uint32, p window.Pos) {
			id := drawID(t)
			return drawUint32(t, "lane"), window.Pos{Since: drawSince(t, id), ID: id}
		}
		laneA, a := draw()
		laneB, b := draw()
		keyA := AppendTask(nil, laneA, a.Since, a.ID)
		keyB := AppendTask(nil, laneB, b.Since, b.ID)
		want := cmp.Or(cmp.Compare(laneA, laneB), a.Compare(b))
		require.Equal(t, want, bytes.Compare(keyA, keyB), "%x, %x", keyA, keyB)

		require.True(t, bytes.HasPrefix(keyA, AppendLane(nil, laneA)))
		require.LessOrEqual(t, bytes.Compare(AppendFrom(nil, laneA, 0, ID{}), keyA), 0, "the head of the lane comes first")
		next := a.Next()
		from := AppendFrom(nil, laneA, next.Since, next.ID)
		require.Negative(t, bytes.Compare(keyA, from), "a refill does not read its last task again")
		if laneA == laneB && b.Compare(a) > 0 {
			require.LessOrEqual(t, bytes.Compare(from, keyB), 0, "nor leaves one out")
		}
	})
}

// TestOrderOfOtherKeys: a range is ordered by number, by group and time, by time.
func TestOrderOfOtherKeys(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		type parts struct {
			group uint32
			at    uint64
			id    ID
		}
		draw := func() parts {
			at := rapid.OneOf(rapid.Uint64Range(0, 2), rapid.Uint64()).Draw(t, "at")
			return parts{drawUint32(t, "group"), at, drawID(t)}
		}
		a, b := draw(), draw()
		byID := bytes.Compare(a.id[:], b.id[:])
		byTime := cmp.Or(cmp.Compare(a.at, b.at), byID)
		byGroup := cmp.Compare(a.group, b.group)
		require.Equal(t, byTime, bytes.Compare(AppendTimed(nil, Scheduled, a.at, a.id), AppendTimed(nil, Scheduled, b.at, b.id)))
		require.Equal(t, cmp.Or(byGroup, byTime), bytes.Compare(AppendDead(nil, a.group, a.at, a.id), AppendDead(nil, b.group, b.at, b.id)))
		require.Equal(t, byID, bytes.Compare(AppendIndex(nil, a.id), AppendIndex(nil, b.id)))
		require.Equal(t, byGroup, bytes.Compare(AppendNumbered(nil, Lane, a.group), AppendNumbered(nil, Lane, b.group)))
		var leaseA, leaseB [LeaseLen]byte
		PutLease(leaseA[:], a.at)
		PutLease(leaseB[:], b.at)
		require.Equal(t, cmp.Compare(a.at, b.at), bytes.Compare(leaseA[:], leaseB[:]))

		p := Place{Range: rapid.SampledFrom([]byte{Task, Scheduled, Dead, Done}).Draw(t, "range"), Group: a.group, At: a.at}
		key := p.AppendKey(nil, a.id)
		lower, upper := Range(p.Range)
		require.LessOrEqual(t, bytes.Compare(lower, key), 0)
		require.Negative(t, bytes.Compare(key, upper))
	})
}

func TestKeysRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		id, group, at := drawID(t), drawUint32(t, "group"), rapid.Uint64().Draw(t, "at")
		since := drawSince(t, id)

		key := AppendTask(nil, group, since, id)
		require.Len(t, key, TaskLen(since))
		lane, gotSince, gotID, err := ParseTask(key)
		require.NoError(t, err)
		require.Equal(t, group, lane)
		require.Equal(t, since, gotSince)
		require.Equal(t, id, gotID)

		for _, prefix := range []byte{Scheduled, Done} {
			gotAt, gotID, err := ParseTimed(AppendTimed(nil, prefix, at, id))
			require.NoError(t, err)
			require.Equal(t, at, gotAt)
			require.Equal(t, id, gotID)
		}

		queue, gotAt, gotID, err := ParseDead(AppendDead(nil, group, at, id))
		require.NoError(t, err)
		require.Equal(t, group, queue)
		require.Equal(t, at, gotAt)
		require.Equal(t, id, gotID)

		gotID, err = ParseIndex(AppendIndex(nil, id))
		require.NoError(t, err)
		require.Equal(t, id, gotID)

		var lease [LeaseLen]byte
		PutLease(lease[:], at)
		seq, err := ParseLease(lease[:])
		require.NoError(t, err)
		require.Equal(t, at, seq)

		n, err := ParseNumbered(AppendNumbered(nil, Counters, group))
		require.NoError(t, err)
		require.Equal(t, group, n)

		for _, p := range []Place{
			{Range: Task, Group: group, At: since},
			{Range: Scheduled, At: at},
			{Range: Dead, Group: group, At: at},
			{Range: Done, At: at},
		} {
			gotID, got, err := ParsePlaceKey(p.AppendKey(nil, id))
			require.NoError(t, err)
			require.Equal(t, id, gotID)
			require.Equal(t, p, got)
			b := p.Append(nil)
			require.Len(t, b, PlaceLen)
			got, err = ParsePlace(b)
			require.NoError(t, err)
			require.Equal(t, p, got)
		}
	})
}

func TestValuesRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rec := rapid.SliceOf(rapid.Byte()).Draw(t, "record")
		group := drawUint32(t, "group")

		l := LaneValue{Queue: group, Priority: rapid.Byte().Draw(t, "priority"), Tenant: rapid.String().Draw(t, "tenant")}
		gotLane, err := ParseLaneValue(l.Append(nil))
		require.NoError(t, err)
		require.Equal(t, l, gotLane)

		number := rapid.Uint64()
		c := CountersValue{Clock: number.Draw(t, "clock"), Counts: Counts{
			Ready: number.Draw(t, "ready"), Scheduled: number.Draw(t, "scheduled"), Leased: number.Draw(t, "leased"),
			Dead: number.Draw(t, "dead"), Done: number.Draw(t, "done"),
		}}
		var b [CountersLen]byte
		c.Put(b[:])
		gotCounters, err := ParseCounters(b[:])
		require.NoError(t, err)
		require.Equal(t, c, gotCounters)

		lane, gotRec, err := SplitLane(append(AppendLaneNumber(nil, group), rec...))
		require.NoError(t, err)
		require.Equal(t, group, lane)
		require.True(t, bytes.Equal(rec, gotRec))

		d := DoneValue{Lane: group, At: number.Draw(t, "at"), Result: rapid.SliceOfN(rapid.Byte(), 0, 300).Draw(t, "result")}
		gotDone, gotRec, err := ParseDone(append(d.Append(nil), rec...))
		require.NoError(t, err)
		require.Equal(t, d.Lane, gotDone.Lane)
		require.Equal(t, d.At, gotDone.At)
		require.True(t, bytes.Equal(d.Result, gotDone.Result))
		require.True(t, bytes.Equal(rec, gotRec))
	})
}

// drawEntry draws a lease, often the first one of a task in its first place or
// almost that.
func drawEntry(t *rapid.T, seq uint64) LeaseEntry {
	id := drawID(t)
	e := LeaseEntry{
		ID: id, Lane: LaneOf(id), Since: SinceOf(id), Token: seq, Leases: 1, Attempts: 1,
		Duration: rapid.Uint64().Draw(t, "duration"),
	}
	switch rapid.IntRange(0, 7).Draw(t, "what differs") {
	case 1:
		e.Lane = drawUint32(t, "lane")
	case 2:
		e.Since = drawSince(t, id)
	case 3:
		e.Token = rapid.Uint64().Draw(t, "token")
	case 4:
		e.Leases = rapid.Uint32().Draw(t, "leases")
	case 5:
		e.Attempts = rapid.Uint32().Draw(t, "attempts")
	case 6:
		e.Lane, e.Since = drawUint32(t, "lane"), drawSince(t, id)
		e.Token, e.Leases, e.Attempts = rapid.Uint64().Draw(t, "token"), rapid.Uint32().Draw(t, "leases"), rapid.Uint32().Draw(t, "attempts")
	}
	return e
}

func TestLeasesRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		seq := rapid.Uint64().Draw(t, "seq")
		h := LeaseHeader{Local: rapid.Bool().Draw(t, "local"), Deadline: rapid.Uint64().Draw(t, "deadline")}
		b := h.Append(nil)
		var entries []LeaseEntry
		for range rapid.IntRange(0, 5).Draw(t, "entries") {
			e := drawEntry(t, seq)
			entries = append(entries, e)
			b = e.Append(b, seq)
		}
		gotHeader, got, err := ParseLeases(seq, b)
		require.NoError(t, err)
		require.Equal(t, h, gotHeader)
		require.Equal(t, entries, got)
	})
}

func TestLaneOf(t *testing.T) {
	require.EqualValues(t, goldenLane, LaneOf(goldenID))
	require.EqualValues(t, MaxLane, LaneOf(ID{9: 0xff, 10: 0xff, 11: 0xff}))
}

func TestCountsAdd(t *testing.T) {
	c := Counts{Ready: 1, Scheduled: 2, Leased: 3, Dead: 4, Done: 5}
	c.Add(Counts{Ready: 10, Scheduled: 20, Leased: 30, Dead: 40, Done: 50})
	require.Equal(t, Counts{Ready: 11, Scheduled: 22, Leased: 33, Dead: 44, Done: 55}, c)
}

// parsers are those of forms with a fixed length.
var parsers = []struct {
	name  string
	valid []byte
	parse func([]byte) error
	tag   bool // the first byte is the range
}{
	{"task fresh", AppendTask(nil, 1, SinceOf(goldenID), goldenID), func(b []byte) error { _, _, _, err := ParseTask(b); return err }, true},
	{"task moved", AppendTask(nil, 1, MovedSince(2), goldenID), func(b []byte) error { _, _, _, err := ParseTask(b); return err }, true},
	{"scheduled", AppendTimed(nil, Scheduled, 1, goldenID), func(b []byte) error { _, _, err := ParseTimed(b); return err }, true},
	{"done", AppendTimed(nil, Done, 1, goldenID), func(b []byte) error { _, _, err := ParseTimed(b); return err }, true},
	{"dead", AppendDead(nil, 1, 2, goldenID), func(b []byte) error { _, _, _, err := ParseDead(b); return err }, true},
	{"index", AppendIndex(nil, goldenID), func(b []byte) error { _, err := ParseIndex(b); return err }, true},
	{"lease", []byte{Lease, 0, 0, 0, 0, 0, 0, 0, 1}, func(b []byte) error { _, err := ParseLease(b); return err }, true},
	{"numbered", AppendNumbered(nil, Queue, 1), func(b []byte) error { _, err := ParseNumbered(b); return err }, false},
	{"place key, task", AppendTask(nil, 1, SinceOf(goldenID), goldenID), func(b []byte) error { _, _, err := ParsePlaceKey(b); return err }, true},
	{"place key, moved", AppendTask(nil, 1, MovedSince(2), goldenID), func(b []byte) error { _, _, err := ParsePlaceKey(b); return err }, true},
	{"place key, dead", AppendDead(nil, 1, 2, goldenID), func(b []byte) error { _, _, err := ParsePlaceKey(b); return err }, true},
	{"place key, done", AppendTimed(nil, Done, 1, goldenID), func(b []byte) error { _, _, err := ParsePlaceKey(b); return err }, true},
	{"place", Place{Range: Task}.Append(nil), func(b []byte) error { _, err := ParsePlace(b); return err }, true},
	{"counters", make([]byte, CountersLen), func(b []byte) error { _, err := ParseCounters(b); return err }, false},
}

// TestRefusals: what is too short, too long, or of another range is refused.
func TestRefusals(t *testing.T) {
	for _, p := range parsers {
		require.NoError(t, p.parse(p.valid), p.name)
		for n := range p.valid {
			require.Error(t, p.parse(p.valid[:n]), "%s, %d bytes", p.name, n)
		}
		require.Error(t, p.parse(nil), p.name)
		for _, n := range []int{1, 8, 16, 100} {
			require.Error(t, p.parse(append(bytes.Clone(p.valid), make([]byte, n)...)), "%s, %d bytes too many", p.name, n)
		}
		if p.tag {
			for _, tag := range []byte{0, Meta, Queue, Lane, Counters, Task - 1, Index + 1, 0xff} {
				b := bytes.Clone(p.valid)
				b[0] = tag
				require.Error(t, p.parse(b), "%s in range %#x", p.name, tag)
			}
		}
	}
	for _, tag := range []byte{Lease, Index} {
		b := make([]byte, PlaceLen)
		b[0] = tag
		_, err := ParsePlace(b)
		require.Error(t, err, "no record lies in range %#x", tag)
	}
}

// TestErrorsNameWhatIsRefused: an error says of what form the bytes were to be
// and shows them.
func TestErrorsNameWhatIsRefused(t *testing.T) {
	_, _, _, err := ParseTask([]byte{Task, 0xab})
	require.EqualError(t, err, "malformed task: 10ab")
}

func TestValueRefusals(t *testing.T) {
	for n := range 5 {
		_, err := ParseLaneValue(make([]byte, n))
		require.Error(t, err, "lane value of %d bytes", n)
	}
	for n := range 4 {
		_, _, err := SplitLane(make([]byte, n))
		require.Error(t, err, "record with lane of %d bytes", n)
	}

	done := DoneValue{Lane: 1, At: 2, Result: make([]byte, 200)}.Append(nil)
	for n := range done {
		_, _, err := ParseDone(done[:n])
		require.Error(t, err, "result of %d bytes", n)
	}
	for _, length := range []uint64{1, math.MaxInt32, math.MaxInt64, math.MaxUint64} {
		_, _, err := ParseDone(binary.AppendUvarint(make([]byte, 12), length))
		require.Error(t, err, "length %d of nothing", length)
	}
	_, _, err := ParseDone(append(make([]byte, 12), bytes.Repeat([]byte{0xff}, 11)...))
	require.Error(t, err, "a length that does not end")
}

func TestLeaseRefusals(t *testing.T) {
	refused := func(b []byte, why string, args ...any) {
		t.Helper()
		h, entries, err := ParseLeases(goldenSeq, b)
		require.Error(t, err, append([]any{why}, args...)...)
		require.Zero(t, h)
		require.Empty(t, entries)
	}
	b := LeaseHeader{Deadline: 1}.Append(nil)
	border := map[int]bool{len(b): true}
	for _, e := range []LeaseEntry{freshEntry(), fullEntry(), freshEntry()} {
		b = e.Append(b, goldenSeq)
		border[len(b)] = true
	}
	for n := range b {
		if !border[n] {
			refused(b[:n], "%d bytes", n)
		}
	}
	refused(append([]byte{2}, b[1:]...), "unknown flags")
	refused(append(bytes.Clone(b), 2), "a form without an ID")
	unknown := bytes.Clone(b)
	unknown[leaseHeaderLen] = 2
	refused(unknown, "an unknown form")

	large := LeaseHeader{}.Append(nil)
	large = append(append(large, entryFull), goldenID[:]...)
	large = append(large, 0)                      // duration
	large = append(large, make([]byte, 4+8+8)...) // lane, since, token
	refused(binary.AppendUvarint(binary.AppendUvarint(bytes.Clone(large), 1<<32), 1), "2^32 leases")
	refused(binary.AppendUvarint(binary.AppendUvarint(bytes.Clone(large), 1), 1<<32), "2^32 attempts")
	_, entries, err := ParseLeases(goldenSeq, binary.AppendUvarint(binary.AppendUvarint(large, 1<<32-1), 1<<32-1))
	require.NoError(t, err)
	require.EqualValues(t, math.MaxUint32, entries[0].Leases)
	require.EqualValues(t, math.MaxUint32, entries[0].Attempts)
}

// sameOrShorter checks the second encoding of something that was parsed: it
// may be shorter, since numbers and entries have longer forms that are read as
// well, but if it is as long it is the same.
func sameOrShorter(t *testing.T, given, again []byte) {
	t.Helper()
	require.LessOrEqual(t, len(again), len(given))
	if len(again) == len(given) {
		require.Equal(t, given, again)
	}
}

// The fuzz targets: no input makes a parser panic, and what it accepts encodes
// to the same bytes.

func addKeys(f *testing.F) {
	f.Add([]byte(nil))
	for _, p := range parsers {
		f.Add(p.valid)
		f.Add(p.valid[:len(p.valid)-1])
	}
}

func FuzzParseTask(f *testing.F) {
	addKeys(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		if lane, since, id, err := ParseTask(b); err == nil {
			require.Equal(t, b, AppendTask(nil, lane, since, id))
		}
	})
}

func FuzzParseTimed(f *testing.F) {
	addKeys(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		if at, id, err := ParseTimed(b); err == nil {
			require.Equal(t, b, AppendTimed(nil, b[0], at, id))
		}
	})
}

func FuzzParseDead(f *testing.F) {
	addKeys(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		if queue, at, id, err := ParseDead(b); err == nil {
			require.Equal(t, b, AppendDead(nil, queue, at, id))
		}
	})
}

func FuzzParsePlaceKey(f *testing.F) {
	addKeys(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		if id, p, err := ParsePlaceKey(b); err == nil {
			require.Equal(t, b, p.AppendKey(nil, id))
		}
	})
}

func FuzzParsePlace(f *testing.F) {
	addKeys(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		if p, err := ParsePlace(b); err == nil {
			require.Equal(t, b, p.Append(nil))
		}
	})
}

func FuzzParseCounters(f *testing.F) {
	addKeys(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		if v, err := ParseCounters(b); err == nil {
			again := make([]byte, CountersLen)
			v.Put(again)
			require.Equal(t, b, again)
		}
	})
}

func FuzzParseLaneValue(f *testing.F) {
	f.Add(LaneValue{Queue: 1, Priority: 2, Tenant: "t"}.Append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		if v, err := ParseLaneValue(b); err == nil {
			require.Equal(t, b, v.Append(nil))
		}
	})
}

func FuzzSplitLane(f *testing.F) {
	f.Add(append(AppendLaneNumber(nil, 1), "record"...))
	f.Fuzz(func(t *testing.T, b []byte) {
		if lane, rec, err := SplitLane(b); err == nil {
			require.Equal(t, b, append(AppendLaneNumber(nil, lane), rec...))
		}
	})
}

func FuzzParseDone(f *testing.F) {
	f.Add(append(DoneValue{Lane: 1, At: 2, Result: []byte("r")}.Append(nil), "record"...))
	f.Add(append(make([]byte, 12), 0x80, 0)) // a zero that takes two bytes
	f.Fuzz(func(t *testing.T, b []byte) {
		if v, rec, err := ParseDone(b); err == nil {
			sameOrShorter(t, b, append(v.Append(nil), rec...))
		}
	})
}

func FuzzParseLeases(f *testing.F) {
	b := LeaseHeader{Local: true, Deadline: 1}.Append(nil)
	f.Add(uint64(goldenSeq), b)
	b = freshEntry().Append(b, goldenSeq)
	f.Add(uint64(goldenSeq), b)
	f.Add(uint64(1), fullEntry().Append(b, goldenSeq))
	f.Fuzz(func(t *testing.T, seq uint64, b []byte) {
		h, entries, err := ParseLeases(seq, b)
		if err != nil {
			return
		}
		again := h.Append(nil)
		for _, e := range entries {
			again = e.Append(again, seq)
		}
		sameOrShorter(t, b, again)
		gotHeader, got, err := ParseLeases(seq, again)
		require.NoError(t, err)
		require.Equal(t, h, gotHeader)
		require.Equal(t, entries, got)
	})
}
