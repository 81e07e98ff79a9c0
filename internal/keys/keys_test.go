package keys

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"math"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"codeq/internal/testbase"
)

// The values of the golden tests.
const (
	goldenLane    = 0x000102
	goldenQueue   = 7
	goldenTime    = 0x0193b3c01235
	goldenScope   = 0xfedcba9876543210
	goldenSeq     = 0x0193b3c012345003
	goldenIDHex   = "0193b3c012347abc 85 000102 deadbeef"
	otherIDHex    = "0193b3c012357001 80 000001 01020304"
	goldenHashHex = "000102030405060708090a0b0c0d0e0f"
)

var (
	goldenID   = ID(testbase.Unhex(goldenIDHex))
	goldenHash = [UniqueLen]byte(testbase.Unhex(goldenHashHex))
	otherID    = ID(testbase.Unhex(otherIDHex))
)

// grouped are the ranges of keys of AppendGrouped.
var grouped = []byte{Blocked, Dead, Done, Canceled, Wake}

func goldenTotals() TotalsValue {
	return TotalsValue{Day: 20_000, All: Totals{1, 2, 3, 4, 5, 6, 7, 300}, OfDay: Totals{1, 0, 0, 0, 0, 0, 7, 299}}
}

func goldenCounters() CountersValue {
	return CountersValue{Clock: 8, Counts: Counts{
		Ready: 1, Scheduled: 2, Blocked: 3, Leased: 4, Dead: 5, Done: 1 << 40, Canceled: 7,
	}}
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

func settingsValue() SettingsValue {
	return SettingsValue{Version: 300, JSON: []byte(`{"Rate":2}`)}
}

// drawID draws a UUIDv7. Few different times make for many ties.
func drawID(t *rapid.T) (id ID) {
	ms := rapid.OneOf(rapid.Uint64Range(0, 3), rapid.Uint64Range(0, 1<<48-1)).Draw(t, "ms")
	counter := rapid.SampledFrom([]uint64{0, 1, 0x7ff, 0xfff}).Draw(t, "counter")
	binary.BigEndian.PutUint64(id[:], ms<<16|kindFirst|counter)
	rest := rapid.OneOf(rapid.Uint64Range(0, 3), rapid.Uint64()).Draw(t, "rest")
	binary.BigEndian.PutUint64(id[8:], rest&(1<<62-1)|1<<63)
	return id
}

// drawSince draws a since of a task: in its first place, or moved.
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
		require.True(t, IsFirstPlace(since))
		require.Equal(t, ms, SinceMillis(since))
		moved := MovedSince(ms)
		require.False(t, IsFirstPlace(moved))
		require.Equal(t, ms, SinceMillis(moved))
		require.Greater(t, moved, since, "a task that becomes ready again stands behind the new ones of its millisecond")
		require.Less(t, moved, (ms+1)<<16|kindFirst, "and before those of the next")
	})
}

// drawUint64 draws numbers with frequent ties and carries.
func drawUint64(t *rapid.T, name string) uint64 {
	return rapid.OneOf(
		rapid.Uint64Range(0, 2), rapid.SampledFrom([]uint64{0xff, 0xffff, 1<<32 - 1, 1<<63 - 1, 1 << 63, math.MaxUint64}), rapid.Uint64(),
	).Draw(t, name)
}

func drawHash(t *rapid.T) (hash [UniqueLen]byte) {
	binary.BigEndian.PutUint64(hash[:], drawUint64(t, "hash, first half"))
	binary.BigEndian.PutUint64(hash[8:], drawUint64(t, "hash, second half"))
	return hash
}

// TestOrderOfOtherKeys: the order of keys in a range is the order of their parts in the layout. The
// keys lie after the first key of a scan for their first parts.
func TestOrderOfOtherKeys(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		type parts struct {
			prefix byte
			group  uint32
			at     uint64
			id     ID
			other  ID
			hash   [UniqueLen]byte
		}
		ended := []byte{Dead, Done, Canceled}
		draw := func() parts {
			return parts{
				rapid.SampledFrom(ended).Draw(t, "range of the bucket"),
				drawUint32(t, "group"), drawUint64(t, "at"), drawID(t), drawID(t), drawHash(t),
			}
		}
		a, b := draw(), draw()
		byGroup := cmp.Compare(a.group, b.group)
		byAt := cmp.Compare(a.at, b.at)
		byID := bytes.Compare(a.id[:], b.id[:])
		byHash := bytes.Compare(a.hash[:], b.hash[:])
		put := func(seq uint64) []byte {
			key := make([]byte, LeaseLen)
			PutLease(key, seq)
			return key
		}
		type order struct {
			name string
			want int
			key  func(parts) []byte
		}
		orders := []order{
			{"lease", byAt, func(p parts) []byte { return put(p.at) }},
			{"scheduled", cmp.Or(byAt, byID), func(p parts) []byte { return AppendScheduled(nil, p.at, p.id) }},
			{
				"bucket", cmp.Or(cmp.Compare(a.prefix, b.prefix), byGroup, byAt),
				func(p parts) []byte { return AppendBucket(nil, p.prefix, p.group, p.at) },
			},
			{"unique", byHash, func(p parts) []byte { return AppendHashed(nil, p.hash) }},
			{"freed", cmp.Or(byAt, byHash), func(p parts) []byte { return AppendFreed(nil, p.at, p.hash) }},
			{"group", byAt, func(p parts) []byte { return AppendScope(nil, p.at) }},
			{
				"dependent", cmp.Or(byID, bytes.Compare(a.other[:], b.other[:])),
				func(p parts) []byte { return AppendDependent(nil, p.id, p.other) },
			},
			{"outbound", cmp.Or(byGroup, byAt), func(p parts) []byte { return AppendOutbound(nil, p.group, p.at) }},
		}
		for _, prefix := range grouped {
			orders = append(orders, order{
				"grouped", cmp.Or(byGroup, byAt, byID),
				func(p parts) []byte { return AppendGrouped(nil, prefix, p.group, p.at, p.id) },
			})
		}
		for _, prefix := range []byte{Index, Pending, Telling, Pinned} {
			orders = append(orders, order{"by ID", byID, func(p parts) []byte { return AppendByID(nil, prefix, p.id) }})
		}
		for _, prefix := range []byte{Queue, Lane, Counters, Inbound, Sent} {
			orders = append(orders, order{"numbered", byGroup, func(p parts) []byte { return AppendNumbered(nil, prefix, p.group) }})
		}
		seen := make(map[byte]bool)
		for _, o := range orders {
			keyA, keyB := o.key(a), o.key(b)
			require.Equal(t, o.want, bytes.Compare(keyA, keyB), "%s: %x, %x", o.name, keyA, keyB)
			require.False(t, seen[keyA[0]], "%s shares its range", o.name)
			seen[keyA[0]] = true
			lower, upper := Range(keyA[0])
			require.LessOrEqual(t, bytes.Compare(lower, keyA), 0, o.name)
			require.Negative(t, bytes.Compare(keyA, upper), o.name)
		}

		for _, prefix := range grouped {
			key, group := AppendGrouped(nil, prefix, a.group, a.at, a.id), AppendGroup(nil, prefix, a.group, a.at)
			require.True(t, bytes.HasPrefix(key, group))
			require.True(t, bytes.HasPrefix(group, AppendNumbered(nil, prefix, a.group)), "the keys of a queue lie together")
		}
		require.True(t, bytes.HasPrefix(AppendBucket(nil, a.prefix, a.group, a.at), AppendBuckets(nil, a.prefix, a.group)))
		require.True(t, bytes.HasPrefix(AppendOutbound(nil, a.group, a.at), AppendNumbered(nil, Outbound, a.group)))
		require.True(t, bytes.HasPrefix(AppendDependent(nil, a.id, a.other), AppendByID(nil, Dependent, a.id)))
	})
}

// TestGroupEndBoundsAGroup: among the keys that are as long as a group or longer, the keys from the
// group up to its end are exactly the keys that begin with it.
func TestGroupEndBoundsAGroup(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		prefix := rapid.SampledFrom(grouped).Draw(t, "range")
		queue := rapid.OneOf(rapid.SampledFrom([]uint32{0xff, 0xffffff, math.MaxUint32}), rapid.Uint32()).Draw(t, "queue")
		at := drawUint64(t, "at")
		parent := drawID(t)
		lower, upper := Range(prefix)
		require.Equal(t, upper, GroupEnd(lower))
		require.NotEqual(t, upper, lower, "the group stays as it is")
		for _, group := range [][]byte{
			lower,
			AppendNumbered(nil, prefix, queue),
			AppendGroup(nil, prefix, queue, at),
			AppendBuckets(nil, Canceled, queue),
			AppendLane(nil, queue),
			AppendByID(nil, Dependent, parent),
		} {
			end := GroupEnd(group)
			tail := rapid.OneOf(
				rapid.SampledFrom([][]byte{nil, {0}, bytes.Repeat([]byte{0xff}, IDLen)}), rapid.SliceOfN(rapid.Byte(), 0, IDLen),
			).Draw(t, "tail")
			near := bytes.Clone(group)
			near[rapid.IntRange(0, len(near)-1).Draw(t, "which byte")] += rapid.Byte().Draw(t, "by what")
			for _, head := range [][]byte{group, end, near} {
				key := append(bytes.Clone(head), tail...)
				within := bytes.Compare(group, key) <= 0 && bytes.Compare(key, end) < 0
				require.Equal(t, bytes.HasPrefix(key, group), within, "%x in %x to %x", key, group, end)
			}
		}
	})
}

// TestAliases: values that alias the parsed bytes by their documentation do so.
func TestAliases(t *testing.T) {
	b := append(EndedValue{Result: []byte("result")}.Append(nil), "record"...)
	v, rec, err := ParseEnded(b)
	require.NoError(t, err)
	require.Same(t, &b[13], &v.Result[0])
	require.Same(t, &b[19], &rec[0])

	b = (&Message{Kind: MsgAdmit, Record: []byte("record")}).Append(nil)
	m, err := ParseMessage(b)
	require.NoError(t, err)
	require.Same(t, &b[len(b)-len("record")], &m.Record[0])

	b = (&Message{Kind: MsgSettings, Queue: "mail", Settings: settingsValue().Append(nil)}).Append(nil)
	m, err = ParseMessage(b)
	require.NoError(t, err)
	require.Same(t, &b[6], &m.Settings[0])
	set, err := ParseSettings(m.Settings)
	require.NoError(t, err)
	require.Same(t, &b[14], &set.JSON[0])
}

// TestLeases fixes the stored form of leases.
func TestLeases(t *testing.T) {
	head := LeaseHeader{Deadline: goldenTime}
	named := freshEntry()
	named.Worker = "w"
	for _, c := range []struct {
		entries []LeaseEntry
		got     []byte
		want    string
	}{
		{
			[]LeaseEntry{freshEntry(), fullEntry()}, fullEntry().Append(freshEntry().Append(head.Append(nil), goldenSeq), goldenSeq),
			"00 00000193b3c01235" +
				"01" + goldenIDHex + "b0ea01" +
				"00" + goldenIDHex + "b0ea01 00000102 0193b3c012358000 0193b3c012345002 ac02 02",
		},
		{
			[]LeaseEntry{named}, named.Append(AppendWorker(head.Append(nil), "w"), goldenSeq),
			"00 00000193b3c01235 02 01 77 01" + goldenIDHex + "b0ea01",
		},
	} {
		require.Equal(t, testbase.Unhex(c.want), c.got)
		h, entries, err := ParseLeases(goldenSeq, c.got)
		require.NoError(t, err)
		require.Equal(t, head, h)
		require.Equal(t, c.entries, entries)
	}
}

// drawEntry draws a lease, often the first one of a task in its first place or almost that.
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
		h := LeaseHeader{
			Local: rapid.Bool().Draw(t, "local"), Deadline: rapid.Uint64().Draw(t, "deadline"),
			Ends: rapid.OneOf(rapid.Just[uint64](0), rapid.Uint64()).Draw(t, "ends"),
		}
		b := h.Append(nil)
		var entries []LeaseEntry
		worker := ""
		for range rapid.IntRange(0, 5).Draw(t, "entries") {
			e := drawEntry(t, seq)
			if e.Worker = rapid.SampledFrom([]string{worker, "", "w1", "w2"}).Draw(t, "worker"); e.Worker != worker {
				worker = e.Worker
				b = AppendWorker(b, worker)
			}
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
	c := Counts{Ready: 1, Scheduled: 2, Blocked: 3, Leased: 4, Dead: 5, Done: 6, Canceled: 7}
	c.Add(Counts{Ready: 10, Scheduled: 20, Blocked: 30, Leased: 40, Dead: 50, Done: 60, Canceled: 70})
	require.Equal(t, Counts{Ready: 11, Scheduled: 22, Blocked: 33, Leased: 44, Dead: 55, Done: 66, Canceled: 77}, c)
}

func TestCountsEnded(t *testing.T) {
	var c Counts
	*c.Ended(Dead) += 1
	*c.Ended(Done) += 2
	*c.Ended(Canceled) += 3
	require.Equal(t, Counts{Dead: 1, Done: 2, Canceled: 3}, c)
}

func TestEnded(t *testing.T) {
	var ended []byte
	for prefix := range 256 {
		if Ended(byte(prefix)) {
			ended = append(ended, byte(prefix))
		}
	}
	require.Equal(t, []byte{Dead, Done, Canceled}, ended)
}

// TestRefusalsWithinAForm: if only few values of a byte are valid, parsers refuse the other values.
func TestRefusalsWithinAForm(t *testing.T) {
	for tag := range 256 {
		b := byte(tag)
		_, _, _, err := ParseBucket(AppendBucket(nil, b, 1, 2))
		require.Equal(t, b != Dead && b != Done && b != Canceled, err != nil, "bucket of range %#x", b)

		group := GroupValue{Holder: goldenID}.Append(nil)
		group[len(group)-1] = b
		_, err = ParseGroup(group)
		require.Equal(t, b > 1, err != nil, "Waiting is %d", b)
	}
	fresh := AppendTask(nil, 1, SinceOf(goldenID), goldenID)
	binary.BigEndian.PutUint64(fresh[5:], MovedSince(1))
	_, _, _, err := ParseTask(fresh)
	require.Error(t, err, "a since that is not the head of an ID")
	moved := AppendTask(nil, 1, MovedSince(1), goldenID)
	binary.BigEndian.PutUint64(moved[5:], SinceOf(goldenID))
	_, _, _, err = ParseTask(moved)
	require.Error(t, err, "a since that is written twice")
}

// TestErrorsNameWhatIsRefused: an error names the expected form and shows the bytes.
func TestErrorsNameWhatIsRefused(t *testing.T) {
	_, _, _, err := ParseTask([]byte{Task, 0xab})
	require.EqualError(t, err, "malformed task: 10ab")
}

func TestValueRefusals(t *testing.T) {
	totaled := goldenCounters()
	totaled.Totals = goldenTotals()
	for _, c := range []struct {
		valid []byte
		parse func(b []byte) error
	}{
		{totaled.Append(nil), func(b []byte) error { _, err := ParseCounters(b); return err }},
		{(&TotalsValue{Day: 1, All: Totals{Unhandled: 2}, OfDay: Totals{Unhandled: 1}}).Append(nil), func(b []byte) error { _, err := ParseTotals(b); return err }},
		{totaled.Totals.Append(nil), func(b []byte) error { _, err := ParseTotals(b); return err }},
		{AppendTotals(nil, "mail", 1), func(b []byte) error { _, _, err := ParseTotalsKey(b); return err }},
	} {
		require.NoError(t, c.parse(c.valid))
		for n := range c.valid {
			if n != CountersLen {
				require.Error(t, c.parse(c.valid[:n]), "%x", c.valid[:n])
			}
		}
		require.Error(t, c.parse(append(bytes.Clone(c.valid), 0)))
	}
	require.Error(t, func() error { _, _, err := ParseTotalsKey(AppendNumbered(nil, Task, 1)); return err }())
	for n := range 5 {
		_, err := ParseLaneValue(make([]byte, n))
		require.Error(t, err, "lane value of %d bytes", n)
	}
	for n := range 4 {
		_, _, err := SplitLane(make([]byte, n))
		require.Error(t, err, "record with lane of %d bytes", n)
	}
	for n := range 9 {
		_, err := ParseSettings(settingsValue().Append(nil)[:n])
		require.Error(t, err, "settings of %d bytes", n)
	}
	for _, version := range []uint64{0, 1 << 56, '{'<<56 - 1, math.MaxUint64} {
		_, err := ParseSettings(SettingsValue{Version: version, JSON: []byte("{}")}.Append(nil))
		require.Error(t, err, "version %d", version)
	}
	_, err := ParseSettings(SettingsValue{Version: 1, JSON: []byte("[]")}.Append(nil))
	require.Error(t, err, "settings that are no object")

	ended := EndedValue{Lane: 1, At: 2, Result: make([]byte, 200)}.Append(nil)
	for n := range ended {
		v, rec, err := ParseEnded(ended[:n])
		require.Error(t, err, "result of %d bytes", n)
		require.Zero(t, v)
		require.Nil(t, rec)
	}
	for _, length := range []uint64{1, math.MaxInt32, math.MaxInt64, math.MaxUint64} {
		_, _, err := ParseEnded(binary.AppendUvarint(make([]byte, 12), length))
		require.Error(t, err, "length %d of nothing", length)
	}
	_, _, err = ParseEnded(append(make([]byte, 12), bytes.Repeat([]byte{0xff}, 11)...))
	require.Error(t, err, "a length that does not end")
}

func TestMessageRefusals(t *testing.T) {
	refused := func(b []byte, why string, args ...any) {
		t.Helper()
		m, err := ParseMessage(b)
		require.Error(t, err, append([]any{why}, args...)...)
		require.Zero(t, m)
	}
	admit := (&Message{Kind: MsgAdmit, Queue: "mail", Tenant: strings.Repeat("t", 200), Priority: 9}).Append(nil)
	for n := range admit {
		refused(admit[:n], "%d bytes", n)
	}
	ended := (&Message{Kind: MsgEnded, Parent: goldenID, Child: otherID, Outcome: 2}).Append(nil)
	for n := range ended {
		refused(ended[:n], "%d bytes", n)
	}
	refused(append(bytes.Clone(ended), 0), "a byte too many")
	for kind := range 256 {
		if b := byte(kind); b == 0 || b > MsgTicked {
			refused(append([]byte{b}, admit[1:]...), "kind %d", kind)
		}
		if b := byte(kind); b != MsgDepend && b != MsgEnded && b != MsgSettings {
			refused(append([]byte{b}, ended[1:]...), "kind %d", kind)
		}
	}
	for _, head := range [][]byte{
		{MsgAdmit, 0},
		{MsgAdmit, 0, 1, 'q'},
		{MsgSettings},
	} {
		for _, length := range []uint64{1, math.MaxInt32, math.MaxInt64, math.MaxUint64} {
			refused(binary.AppendUvarint(bytes.Clone(head), length), "length %d of nothing", length)
		}
		refused(append(bytes.Clone(head), bytes.Repeat([]byte{0xff}, 11)...), "a length that does not end")
	}
}

func TestLeaseRefusals(t *testing.T) {
	refused := func(b []byte, why string, args ...any) {
		t.Helper()
		h, entries, err := ParseLeases(goldenSeq, b)
		require.Error(t, err, append([]any{why}, args...)...)
		require.Zero(t, h)
		require.Empty(t, entries)
	}
	var b []byte
	for _, ends := range []uint64{2, 0} {
		b = LeaseHeader{Deadline: 1, Ends: ends}.Append(nil)
		border := map[int]bool{len(b): true}
		for _, e := range []LeaseEntry{freshEntry(), fullEntry(), freshEntry()} {
			b = e.Append(b, goldenSeq)
			border[len(b)] = true
			b = AppendWorker(b, "worker")
			border[len(b)] = true
		}
		for n := range b {
			if !border[n] {
				refused(b[:n], "%d bytes", n)
			}
		}
	}
	refused(append([]byte{4}, b[1:]...), "unknown flags")
	refused(append([]byte{leaseEnds}, make([]byte, 8+8)...), "an end at 0")
	refused(append(bytes.Clone(b), 1), "a form without an ID")
	unknown := bytes.Clone(b)
	unknown[1+8] = 3
	refused(unknown, "an unknown form")

	large := LeaseHeader{}.Append(nil)
	large = append(append(large, entryFull), goldenID[:]...)
	large = append(large, 0)                      // duration
	large = append(large, make([]byte, 4+8+8)...) // lane, since, token
	refused(binary.AppendUvarint(binary.AppendUvarint(bytes.Clone(large), 1<<32), 1), "2^32 leases")
	refused(binary.AppendUvarint(binary.AppendUvarint(bytes.Clone(large), 1), 1<<32), "2^32 attempts")
	_, entries, err := ParseLeases(goldenSeq, binary.AppendUvarint(binary.AppendUvarint(large, 1<<32-1), 1<<32-1))
	require.NoError(t, err)
	require.EqualValues(t, uint32(math.MaxUint32), entries[0].Leases)
	require.EqualValues(t, uint32(math.MaxUint32), entries[0].Attempts)
}

// sameOrShorter checks the second encoding of a parsed value. It may be shorter, because parsers
// also accept longer forms of numbers and entries. If it has the same length, it has the same
// bytes.
func sameOrShorter(t *testing.T, given, again []byte) {
	t.Helper()
	require.LessOrEqual(t, len(again), len(given))
	if len(again) == len(given) {
		require.Equal(t, given, again)
	}
}

func FuzzParseTotals(f *testing.F) {
	addKeys(f)
	v, totals := goldenCounters(), goldenTotals()
	f.Add(totals.Append(v.Append(nil)))
	f.Add(append(totals.Append(nil)[:19], 0x80, 0)) // a zero that takes two bytes
	f.Fuzz(func(t *testing.T, b []byte) {
		if v, err := ParseTotals(b); err == nil {
			sameOrShorter(t, b, v.Append(nil))
		}
		if v, err := ParseCounters(b); err == nil {
			sameOrShorter(t, b, v.Append(nil))
		}
		if queue, day, err := ParseTotalsKey(b); err == nil {
			sameOrShorter(t, b, AppendTotals(nil, string(queue), day))
		}
	})
}

func FuzzParseEnded(f *testing.F) {
	f.Add(append(EndedValue{Lane: 1, At: 2, Result: []byte("r")}.Append(nil), "record"...))
	f.Add(append(make([]byte, 12), 0x80, 0)) // a zero that takes two bytes
	f.Fuzz(func(t *testing.T, b []byte) {
		var v EndedValue
		var rec []byte
		var err error
		testbase.BoundDecode(t, len(b), func() { v, rec, err = ParseEnded(b) })
		if err == nil {
			sameOrShorter(t, b, append(v.Append(nil), rec...))
		}
	})
}

func FuzzParseMessage(f *testing.F) {
	addKeys(f)
	for _, c := range messages {
		f.Add(testbase.Unhex(c.want))
	}
	f.Add([]byte{MsgSettings, 0x80, 0})
	f.Add([]byte{MsgAdmit, 0, 0x80, 0, 0}) // a zero that takes two bytes
	f.Fuzz(func(t *testing.T, b []byte) {
		var m Message
		var err error
		testbase.BoundDecode(t, len(b), func() { m, err = ParseMessage(b) })
		if err != nil {
			return
		}
		again := m.Append(nil)
		sameOrShorter(t, b, again)
		got, err := ParseMessage(again)
		require.NoError(t, err)
		require.Equal(t, m, got)
	})
}

func FuzzParseSettings(f *testing.F) {
	addKeys(f)
	f.Add(settingsValue().Append(nil))
	f.Add([]byte("{}"))
	f.Fuzz(func(t *testing.T, b []byte) {
		v, err := ParseSettings(b)
		if err != nil {
			return
		}
		again := v.Append(nil)
		require.True(t, bytes.HasSuffix(again, b), "a version may have been put before it")
		got, err := ParseSettings(again)
		require.NoError(t, err)
		require.Equal(t, v, got)
	})
}

func FuzzParseLeases(f *testing.F) {
	b := LeaseHeader{Local: true, Deadline: 1}.Append(nil)
	f.Add(uint64(goldenSeq), b)
	b = freshEntry().Append(b, goldenSeq)
	f.Add(uint64(goldenSeq), b)
	f.Add(uint64(1), fullEntry().Append(b, goldenSeq))
	f.Add(uint64(goldenSeq), freshEntry().Append(AppendWorker(bytes.Clone(b), "w"), goldenSeq))
	f.Add(uint64(goldenSeq), freshEntry().Append(LeaseHeader{Local: true, Deadline: 1, Ends: 2}.Append(nil), goldenSeq))
	f.Fuzz(func(t *testing.T, seq uint64, b []byte) {
		var h LeaseHeader
		var entries []LeaseEntry
		var err error
		testbase.BoundDecode(t, len(b), func() { h, entries, err = ParseLeases(seq, b) })
		if err != nil {
			return
		}
		again := h.Append(nil)
		worker := ""
		for _, e := range entries {
			if e.Worker != worker {
				worker = e.Worker
				again = AppendWorker(again, worker)
			}
			again = e.Append(again, seq)
		}
		sameOrShorter(t, b, again)
		gotHeader, got, err := ParseLeases(seq, again)
		require.NoError(t, err)
		require.Equal(t, h, gotHeader)
		require.Equal(t, entries, got)
	})
}

// TestBucketOf: a bucket does not end before the retention of its tasks, and at most an eighth of
// the retention, or a second, later. A retention has few buckets.
func TestBucketOf(t *testing.T) {
	const second = 1000
	walls := []uint64{0, 1, 999, 1000, 1_700_000_000_000, 1_700_000_000_001, 1_700_000_123_456, 1<<48 - 1}
	var retentions []int64
	for _, r := range []int64{1, second, 8 * second, 16 * second, 60 * second, 3600 * second, 86400 * second, 365 * 86400 * second} {
		retentions = append(retentions, r-1, r, r+1)
	}
	for bit := range 53 {
		retentions = append(retentions, 1<<bit-1, 1<<bit, 1<<bit+1, 1<<bit+1<<bit/3)
	}
	retentions = append(retentions, math.MaxInt64/1_000_000)
	for _, wall := range walls {
		for _, r := range retentions {
			until := BucketOf(wall, r)
			require.GreaterOrEqual(t, until, wall+uint64(r), "wall %d, retention %d", wall, r)
			require.LessOrEqual(t, until, wall+uint64(r)+max(uint64(r)/8, second), "wall %d, retention %d", wall, r)
		}
		require.Equal(t, uint64(Forever), BucketOf(wall, -1))
	}
	for _, r := range retentions[1:] {
		if r < second {
			continue
		}
		buckets := make(map[uint64]bool)
		for i := range int64(200) { // over the time of one retention
			buckets[BucketOf(1_700_000_000_000+uint64(r/200*i), r)] = true
		}
		require.LessOrEqual(t, len(buckets), 18, "retention %d", r)
	}
}

// TestLeaseTime: a parser gets the clock of leases as it was encoded, with crashes and without.
func TestLeaseTime(t *testing.T) {
	for _, v := range []LeaseTimeValue{
		{Clock: 7},
		{Clock: 7, Crashes: []CrashValue{{Process: 1 << 63, Until: 2, Suspects: 3, Partial: true}, {Until: 4}}},
	} {
		b := v.Append(nil)
		got, err := ParseLeaseTime(b)
		require.NoError(t, err)
		require.Equal(t, v, got)
		for _, wrong := range [][]byte{b[1:], append(b, 0), nil} {
			_, err := ParseLeaseTime(wrong)
			require.Error(t, err)
		}
	}
}
