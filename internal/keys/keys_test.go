package keys

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"codeq/internal/testbase"
	"codeq/internal/testkit"
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
	goldenID   = ID(testkit.Unhex(goldenIDHex))
	goldenHash = [UniqueLen]byte(testkit.Unhex(goldenHashHex))
	otherID    = ID(testkit.Unhex(otherIDHex))
)

// grouped are the ranges of keys of AppendGrouped.
var grouped = []byte{Blocked, Dead, Done, Canceled, Wake}

func goldenTotals() TotalsValue {
	return TotalsValue{Day: 20_000, All: Totals{1, 2, 3, 4, 5, 6, 7, 300}, OfDay: Totals{1, 0, 0, 0, 0, 0, 7, 299}}
}

const goldenTotalsHex = "a09c01 01020304050607ac02 01000000000007ab02"

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

func admitMessage() *Message {
	return &Message{Kind: MsgAdmit, Queue: "mail", Tenant: "acme", Priority: 9, Record: []byte{0xab, 0xcd}}
}

func endedMessage() *Message {
	return &Message{Kind: MsgEnded, Parent: goldenID, Child: otherID, Outcome: 2}
}

func unpinMessage() *Message { return &Message{Kind: MsgUnpin, Parent: goldenID, Until: goldenTime} }

func leftMessage() *Message { return &Message{Kind: MsgLeft, Child: otherID, Until: goldenTime} }

func settingsValue() SettingsValue {
	return SettingsValue{Version: 300, JSON: []byte(`{"Rate":2}`)}
}

func settingsMessage() *Message {
	return &Message{Kind: MsgSettings, Queue: "mail", Settings: settingsValue().Append(nil)}
}

// TestGolden fixes every stored form.
func TestGolden(t *testing.T) {
	task := make([]byte, TaskLen(SinceOf(goldenID)))
	PutTask(task, goldenLane, SinceOf(goldenID), goldenID)
	lease := make([]byte, LeaseLen)
	PutLease(lease, goldenSeq)
	counters := CountersValue{Clock: 8, Counts: Counts{
		Ready: 1, Scheduled: 2, Blocked: 3, Leased: 4, Dead: 5, Done: 1 << 40, Canceled: 7,
	}}
	untotaled := counters.Append(nil)
	counters.Totals = goldenTotals()
	leases := LeaseHeader{Deadline: goldenTime}.Append(nil)
	leases = freshEntry().Append(leases, goldenSeq)
	leases = fullEntry().Append(leases, goldenSeq)
	longName := strings.Repeat("q", 200)

	for _, c := range []struct {
		name string
		got  []byte
		want string
	}{
		{"meta", []byte{Meta}, "01"},
		{"queue", AppendNumbered(nil, Queue, goldenQueue), "02 00000007"},
		{"lane", AppendNumbered(nil, Lane, goldenLane), "03 00000102"},
		{"counters", AppendNumbered(nil, Counters, goldenQueue), "04 00000007"},
		{"bucket of dead letters", AppendBucket(nil, Dead, goldenQueue, goldenTime), "05 14 00000007 00000193b3c01235"},
		{"bucket of completed tasks", AppendBucket(nil, Done, goldenQueue, goldenTime), "05 15 00000007 00000193b3c01235"},
		{"bucket of canceled tasks", AppendBucket(nil, Canceled, goldenQueue, goldenTime), "05 16 00000007 00000193b3c01235"},
		{"buckets of a queue", AppendBuckets(nil, Canceled, goldenQueue), "05 16 00000007"},
		{"settings", append([]byte{Settings}, "mail"...), "06 6d61696c"},
		{"inbound", AppendNumbered(nil, Inbound, 3), "07 00000003"},
		{"sent", AppendNumbered(nil, Sent, 3), "09 00000003"},
		{"lease time", []byte{LeaseTime}, "0d"},
		{"period time", []byte{PeriodTime}, "22"},
		{"set clocks", []byte{ClockSets}, "24"},
		{"task fresh", task, "10 00000102" + goldenIDHex},
		{"task moved", AppendTask(nil, goldenLane, MovedSince(goldenTime), goldenID), "10 00000102 0193b3c01235 8000" + goldenIDHex},
		{"lane prefix", AppendLane(nil, goldenLane), "10 00000102"},
		{"from the head", AppendFrom(nil, goldenLane, 0, ID{}), "10 00000102"},
		{"from a fresh task", AppendFrom(nil, goldenLane, SinceOf(goldenID), goldenID), "10 00000102" + goldenIDHex},
		{"from a moved task", AppendFrom(nil, goldenLane, MovedSince(1), goldenID), "10 00000102 000000000001 8000" + goldenIDHex},
		{"lease", lease, "11 0193b3c012345003"},
		{"scheduled", AppendScheduled(nil, goldenTime, goldenID), "12 00000193b3c01235" + goldenIDHex},
		{"blocked", AppendGrouped(nil, Blocked, goldenQueue, goldenScope, goldenID), "13 00000007 fedcba9876543210" + goldenIDHex},
		{"blocked in a scope", AppendGroup(nil, Blocked, goldenQueue, goldenScope), "13 00000007 fedcba9876543210"},
		{"dead", AppendGrouped(nil, Dead, goldenQueue, goldenTime, goldenID), "14 00000007 00000193b3c01235" + goldenIDHex},
		{"done", AppendGrouped(nil, Done, goldenQueue, goldenTime, goldenID), "15 00000007 00000193b3c01235" + goldenIDHex},
		{"canceled", AppendGrouped(nil, Canceled, goldenQueue, goldenTime, goldenID), "16 00000007 00000193b3c01235" + goldenIDHex},
		{"canceled in a bucket", AppendGroup(nil, Canceled, goldenQueue, goldenTime), "16 00000007 00000193b3c01235"},
		{"index", AppendByID(nil, Index, goldenID), "17" + goldenIDHex},
		{"unique", AppendHashed(nil, goldenHash), "18" + goldenHashHex},
		{"freed", AppendFreed(nil, goldenTime, goldenHash), "19 00000193b3c01235" + goldenHashHex},
		{"group", AppendScope(nil, goldenScope), "1a fedcba9876543210"},
		{"wake", AppendGrouped(nil, Wake, goldenQueue, goldenScope, goldenID), "1b 00000007 fedcba9876543210" + goldenIDHex},
		{"pending", AppendByID(nil, Pending, goldenID), "1c" + goldenIDHex},
		{"dependent", AppendDependent(nil, goldenID, otherID), "1d" + goldenIDHex + otherIDHex},
		{"outbound", AppendOutbound(nil, 3, goldenSeq), "1e 00000003 0193b3c012345003"},
		{"telling", AppendByID(nil, Telling, goldenID), "1f" + goldenIDHex},
		{"pin", AppendPin(nil, goldenID, otherID), "20" + goldenIDHex + otherIDHex},
		{"pinned", AppendByID(nil, Pinned, goldenID), "21" + goldenIDHex},
		{"pins", PinnedValue{Count: 2, Until: goldenTime}.Append(nil), "0000000000000002 00000193b3c01235"},

		{"place key, task", FirstPlace(goldenLane, goldenID).AppendKey(nil, goldenID), "10 00000102" + goldenIDHex},
		{
			"place key, moved", Place{Range: Task, Group: goldenLane, At: MovedSince(1)}.AppendKey(nil, goldenID),
			"10 00000102 000000000001 8000" + goldenIDHex,
		},
		{"place key, scheduled", Place{Range: Scheduled, At: 1}.AppendKey(nil, goldenID), "12 0000000000000001" + goldenIDHex},
		{"place key, blocked", Place{Range: Blocked, Group: 7, At: 1}.AppendKey(nil, goldenID), "13 00000007 0000000000000001" + goldenIDHex},
		{"place key, dead", Place{Range: Dead, Group: 7, At: 1}.AppendKey(nil, goldenID), "14 00000007 0000000000000001" + goldenIDHex},
		{"place key, done", Place{Range: Done, Group: 7, At: 1}.AppendKey(nil, goldenID), "15 00000007 0000000000000001" + goldenIDHex},
		{"place key, canceled", Place{Range: Canceled, Group: 7, At: 1}.AppendKey(nil, goldenID), "16 00000007 0000000000000001" + goldenIDHex},

		{"lane value", LaneValue{Queue: goldenQueue, Priority: 9, Tenant: "acme"}.Append(nil), "00000007 09 61636d65"},
		{"lane value with a number that is not the first", LaneValue{Queue: goldenQueue, Priority: 9, Tenant: "acme", Seq: 258}.Append(nil), "00000007 89 0000000000000102 61636d65"},
		{"lane value without a tenant", LaneValue{Queue: goldenQueue}.Append(nil), "00000007 00"},
		{
			"counters value", untotaled,
			"0000000000000008 0000000000000001 0000000000000002 0000000000000003" +
				"0000000000000004 0000000000000005 0000010000000000 0000000000000007",
		},
		{"counters value with totals", counters.Append(nil), hex.EncodeToString(untotaled) + goldenTotalsHex},
		{"row of totals", AppendTotals(nil, "mail", 20_000), "0e 04 6d61696c 00004e20"},
		{"totals", counters.Totals.Append(nil), goldenTotalsHex},
		{"number", AppendNumber(nil, goldenSeq), "0193b3c012345003"},
		{"settings value", settingsValue().Append(nil), "000000000000012c 7b2252617465223a327d"},
		{"place, first", FirstPlace(goldenLane, goldenID).Append(nil), "10 00000102 0193b3c012347abc"},
		{"place, scheduled", Place{Range: Scheduled, At: goldenTime}.Append(nil), "12 00000000 00000193b3c01235"},
		{"place, blocked", Place{Range: Blocked, Group: goldenQueue, At: goldenScope}.Append(nil), "13 00000007 fedcba9876543210"},
		{"clock of leases", LeaseTimeValue{Clock: 7, Crashes: []CrashValue{{Process: 1, Until: 2, Suspects: 3, Partial: true}}}.Append(nil),
			"0000000000000007 0000000000000001 0000000000000002 0000000000000007"},
		{"clock of periods", PeriodTimeValue{Clock: goldenTime, Waits: 1}.Append(nil), "00000193b3c01235 0000000000000001"},
		{"list of set clocks", AppendClockSets(nil, []ClockSet{{1, goldenTime, true}, {goldenTime, 2, false}}), "0000000000000001 00000193b3c01235 01 00000193b3c01235 0000000000000002 00"},
		{"holder of a key", UniqueValue{ID: goldenID, Until: goldenTime}.Append(nil), goldenIDHex + "00000193b3c01235"},
		{"turn of a group", GroupValue{Holder: goldenID}.Append(nil), goldenIDHex + "00"},
		{"turn for which others wait", GroupValue{Holder: goldenID, Waiting: true}.Append(nil), goldenIDHex + "01"},
		{"lane number", AppendLaneNumber(nil, goldenLane), "00000102"},
		{
			"ended value", EndedValue{Lane: goldenLane, At: goldenTime, Result: []byte("ok")}.Append(nil),
			"00000102 00000193b3c01235 02 6f6b",
		},
		{"ended value without a result", EndedValue{Lane: goldenLane, At: goldenTime}.Append(nil), "00000102 00000193b3c01235 00"},
		{"local lease record", LeaseHeader{Local: true, Deadline: goldenTime}.Append(nil), "01 00000193b3c01235"},
		{"lease record in a cluster", LeaseHeader{Deadline: goldenTime, Ends: 258}.Append(nil), "02 00000193b3c01235 0000000000000102"},
		{
			"local lease record of a process in a cluster", LeaseHeader{Local: true, Deadline: goldenTime, Ends: 258, Process: 259}.Append(nil),
			"07 00000193b3c01235 0000000000000102 0000000000000103",
		},
		{"local lease record in a cluster", LeaseHeader{Local: true, Deadline: goldenTime, Ends: 258}.Append(nil), "03 00000193b3c01235 0000000000000102"},
		{
			"lease record", leases,
			"00 00000193b3c01235" +
				"01" + goldenIDHex + "b0ea01" +
				"00" + goldenIDHex + "b0ea01 00000102 0193b3c012358000 0193b3c012345002 ac02 02",
		},
		{
			"lease record of a worker with a name", freshEntry().Append(AppendWorker(LeaseHeader{Deadline: goldenTime}.Append(nil), "w"), goldenSeq),
			"00 00000193b3c01235 02 01 77 01" + goldenIDHex + "b0ea01",
		},
		{"admit", admitMessage().Append(nil), "01 09 04 6d61696c 04 61636d65 abcd"},
		{"follow", (&Message{Kind: MsgFollow, Parent: goldenID, Queue: "a", Record: []byte{0xab}}).Append(nil), "07 " + goldenIDHex + " 00 01 61 00 ab"},
		{
			"flow", (&Message{Kind: MsgFlow, Parent: goldenID, Siblings: []ID{otherID}, Tasks: []MessageTask{{"a", "t", 9, []byte{0xab}}, {Queue: "b"}}}).Append(nil),
			"08 " + goldenIDHex + " 01" + otherIDHex + " 09 01 61 01 74 01 ab 00 01 62 00 00",
		},
		{"tick", (&Message{Kind: MsgTick, Schedule: "s", Tick: 258, Queue: "a", Record: []byte{0xab}}).Append(nil), "09 01 73 0000000000000102 00 01 61 00 ab"},
		{"ticked", (&Message{Kind: MsgTicked, Schedule: "s", Tick: 258}).Append(nil), "0a 01 73 0000000000000102"},
		{"admit without anything", (&Message{Kind: MsgAdmit}).Append(nil), "01 00 00 00"},
		{
			"admit to a queue with a long name", (&Message{Kind: MsgAdmit, Queue: longName}).Append(nil),
			"01 00 c801" + hex.EncodeToString([]byte(longName)) + "00",
		},
		{
			"depend", (&Message{Kind: MsgDepend, Parent: goldenID, Child: otherID, Outcome: 1}).Append(nil),
			"02" + goldenIDHex + otherIDHex + "01",
		},
		{"ended", endedMessage().Append(nil), "03" + goldenIDHex + otherIDHex + "02"},
		{"unpin", unpinMessage().Append(nil), "05" + goldenIDHex + "00000193b3c01235"},
		{"left", leftMessage().Append(nil), "06" + otherIDHex + "00000193b3c01235"},
		{"settings of a queue", settingsMessage().Append(nil), "04 04 6d61696c 000000000000012c 7b2252617465223a327d"},
	} {
		require.Equal(t, hex.EncodeToString(testkit.Unhex(c.want)), hex.EncodeToString(c.got), c.name)
	}
	lower, upper := Range(Dead)
	require.Equal(t, []byte{0x14}, lower)
	require.Equal(t, []byte{0x15}, upper)
}

// TestAppendKeepsWhatIsThere: encoders do not change the bytes before their own, and write the same
// bytes for any content of the buffer.
func TestAppendKeepsWhatIsThere(t *testing.T) {
	before := []byte("before")
	for _, c := range []struct {
		name   string
		append func([]byte) []byte
	}{
		{"task fresh", func(b []byte) []byte { return AppendTask(b, 1, SinceOf(goldenID), goldenID) }},
		{"task moved", func(b []byte) []byte { return AppendTask(b, 1, MovedSince(2), goldenID) }},
		{"lane", func(b []byte) []byte { return AppendLane(b, 1) }},
		{"from the head", func(b []byte) []byte { return AppendFrom(b, 1, 0, goldenID) }},
		{"from a task", func(b []byte) []byte { return AppendFrom(b, 1, MovedSince(2), goldenID) }},
		{"scheduled", func(b []byte) []byte { return AppendScheduled(b, 1, goldenID) }},
		{"grouped", func(b []byte) []byte { return AppendGrouped(b, Blocked, 1, 2, goldenID) }},
		{"group", func(b []byte) []byte { return AppendGroup(b, Dead, 1, 2) }},
		{"bucket", func(b []byte) []byte { return AppendBucket(b, Done, 1, 2) }},
		{"buckets", func(b []byte) []byte { return AppendBuckets(b, Done, 1) }},
		{"hashed", func(b []byte) []byte { return AppendHashed(b, goldenHash) }},
		{"freed", func(b []byte) []byte { return AppendFreed(b, 1, goldenHash) }},
		{"scope", func(b []byte) []byte { return AppendScope(b, 1) }},
		{"dependent", func(b []byte) []byte { return AppendDependent(b, goldenID, otherID) }},
		{"outbound", func(b []byte) []byte { return AppendOutbound(b, 1, 2) }},
		{"by ID", func(b []byte) []byte { return AppendByID(b, Index, goldenID) }},
		{"numbered", func(b []byte) []byte { return AppendNumbered(b, Lane, 1) }},
		{"place key, task", func(b []byte) []byte { return FirstPlace(1, goldenID).AppendKey(b, goldenID) }},
		{"place key, scheduled", func(b []byte) []byte { return Place{Range: Scheduled, At: 1}.AppendKey(b, goldenID) }},
		{"place key, dead", func(b []byte) []byte { return Place{Range: Dead, At: 1}.AppendKey(b, goldenID) }},
		{"place", func(b []byte) []byte { return Place{Range: Task}.Append(b) }},
		{"number", func(b []byte) []byte { return AppendNumber(b, 1) }},
		{"lane number", func(b []byte) []byte { return AppendLaneNumber(b, 1) }},
		{"lane value", func(b []byte) []byte { return LaneValue{Tenant: "t"}.Append(b) }},
		{"unique value", func(b []byte) []byte { return UniqueValue{ID: goldenID, Until: 1}.Append(b) }},
		{"group value", func(b []byte) []byte { return GroupValue{Holder: goldenID, Waiting: true}.Append(b) }},
		{"ended value", func(b []byte) []byte { return EndedValue{Result: []byte("r")}.Append(b) }},
		{"lease header", func(b []byte) []byte { return LeaseHeader{}.Append(b) }},
		{"lease header of a cluster", func(b []byte) []byte { return LeaseHeader{Ends: 1}.Append(b) }},
		{"fresh entry", func(b []byte) []byte { return freshEntry().Append(b, goldenSeq) }},
		{"full entry", func(b []byte) []byte { return fullEntry().Append(b, goldenSeq) }},
		{"admit", func(b []byte) []byte { return admitMessage().Append(b) }},
		{"ended", func(b []byte) []byte { return endedMessage().Append(b) }},
		{"settings of a queue", func(b []byte) []byte { return settingsMessage().Append(b) }},
		{"settings value", func(b []byte) []byte { return settingsValue().Append(b) }},
	} {
		want := append(bytes.Clone(before), c.append(nil)...)
		require.Equal(t, want, c.append(bytes.Clone(before)), c.name)
		used := bytes.Repeat([]byte{0xee}, 200)
		copy(used, before)
		require.Equal(t, want, c.append(used[:len(before)]), "%s, into a buffer that was used", c.name)
	}
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

func TestGroupEnd(t *testing.T) {
	for _, c := range []struct{ group, want string }{
		{"14", "15"},
		{"13 00000007 00000000000000fe", "13 00000007 00000000000000ff"},
		{"13 00000007 00000000000000ff", "13 00000007 0000000000000100"},
		{"13 00000007 00ffffffffffffff", "13 00000007 0100000000000000"},
		{"13 00000007 ffffffffffffffff", "13 00000008 0000000000000000"},
		{"13 ffffffff ffffffffffffffff", "14 00000000 0000000000000000"},
		{"05 16 ffffffff", "05 17 00000000"},
	} {
		group := testkit.Unhex(c.group)
		require.Equal(t, testkit.Unhex(c.want), GroupEnd(group), c.group)
		require.Equal(t, testkit.Unhex(c.group), group, "the group stays as it is")
	}
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

func TestKeysRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		id, other, hash := drawID(t), drawID(t), drawHash(t)
		group, at := drawUint32(t, "group"), drawUint64(t, "at")
		since := drawSince(t, id)

		key := AppendTask(nil, group, since, id)
		require.Len(t, key, TaskLen(since))
		lane, gotSince, gotID, err := ParseTask(key)
		require.NoError(t, err)
		require.Equal(t, group, lane)
		require.Equal(t, since, gotSince)
		require.Equal(t, id, gotID)

		gotAt, gotID, err := ParseScheduled(AppendScheduled(nil, at, id))
		require.NoError(t, err)
		require.Equal(t, at, gotAt)
		require.Equal(t, id, gotID)

		for _, prefix := range grouped {
			queue, gotAt, gotID, err := ParseGrouped(AppendGrouped(nil, prefix, group, at, id))
			require.NoError(t, err)
			require.Equal(t, group, queue)
			require.Equal(t, at, gotAt)
			require.Equal(t, id, gotID)
		}

		for _, prefix := range []byte{Dead, Done, Canceled} {
			gotPrefix, queue, bucket, err := ParseBucket(AppendBucket(nil, prefix, group, at))
			require.NoError(t, err)
			require.Equal(t, prefix, gotPrefix)
			require.Equal(t, group, queue)
			require.Equal(t, at, bucket)
		}

		gotHash, err := ParseHashed(AppendHashed(nil, hash))
		require.NoError(t, err)
		require.Equal(t, hash, gotHash)

		gotAt, gotHash, err = ParseFreed(AppendFreed(nil, at, hash))
		require.NoError(t, err)
		require.Equal(t, at, gotAt)
		require.Equal(t, hash, gotHash)

		scope, err := ParseScope(AppendScope(nil, at))
		require.NoError(t, err)
		require.Equal(t, at, scope)

		parent, child, err := ParseDependent(AppendDependent(nil, id, other))
		require.NoError(t, err)
		require.Equal(t, id, parent)
		require.Equal(t, other, child)

		shard, seq, err := ParseOutbound(AppendOutbound(nil, group, at))
		require.NoError(t, err)
		require.Equal(t, group, shard)
		require.Equal(t, at, seq)

		for _, prefix := range []byte{Index, Pending, Telling, Pinned} {
			gotID, err = ParseByID(AppendByID(nil, prefix, id))
			require.NoError(t, err)
			require.Equal(t, id, gotID)
		}

		var lease [LeaseLen]byte
		PutLease(lease[:], at)
		seq, err = ParseLease(lease[:])
		require.NoError(t, err)
		require.Equal(t, at, seq)

		for _, prefix := range []byte{Queue, Lane, Counters, Inbound, Sent} {
			n, err := ParseNumbered(AppendNumbered(nil, prefix, group))
			require.NoError(t, err)
			require.Equal(t, group, n)
		}

		for _, p := range []Place{
			{Range: Task, Group: group, At: since},
			{Range: Scheduled, At: at},
			{Range: Blocked, Group: group, At: at},
			{Range: Dead, Group: group, At: at},
			{Range: Done, Group: group, At: at},
			{Range: Canceled, Group: group, At: at},
		} {
			gotID, got, err := ParsePlaceKey(p.AppendKey(nil, id))
			require.NoError(t, err)
			require.Equal(t, id, gotID)
			require.Equal(t, p, got)
			b := p.Append(nil)
			require.Len(t, b, PlaceLen)
			if got, err = ParsePlace(b); Ended(p.Range) {
				require.Error(t, err, "the index does not hold what has ended")
			} else {
				require.NoError(t, err)
				require.Equal(t, p, got)
			}
		}
	})
}

func TestValuesRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rec := rapid.SliceOf(rapid.Byte()).Draw(t, "record")
		group := drawUint32(t, "group")

		l := LaneValue{Queue: group, Priority: rapid.ByteRange(0, 127).Draw(t, "priority"), Tenant: rapid.String().Draw(t, "tenant"), Seq: drawUint64(t, "seq")}
		gotLane, err := ParseLaneValue(l.Append(nil))
		require.NoError(t, err)
		require.Equal(t, l, gotLane)

		number := rapid.Uint64()
		c := CountersValue{Clock: number.Draw(t, "clock"), Counts: Counts{
			Ready: number.Draw(t, "ready"), Scheduled: number.Draw(t, "scheduled"), Blocked: number.Draw(t, "blocked"),
			Leased: number.Draw(t, "leased"), Dead: number.Draw(t, "dead"), Done: number.Draw(t, "done"),
			Canceled: number.Draw(t, "canceled"),
		}}
		if rapid.Bool().Draw(t, "totals") {
			c.Totals.Day = rapid.Uint32Range(1, 1<<32-1).Draw(t, "day")
			for i := range c.Totals.All {
				c.Totals.All[i] = number.Draw(t, "total")
				c.Totals.OfDay[i] = rapid.Uint64Max(c.Totals.All[i]).Draw(t, "total of the day")
			}
			name := rapid.StringN(1, 300, -1).Draw(t, "name")
			queue, day, err := ParseTotalsKey(AppendTotals(nil, name, c.Totals.Day))
			require.NoError(t, err)
			require.Equal(t, name, string(queue))
			require.Equal(t, c.Totals.Day, day)
		}
		gotCounters, err := ParseCounters(c.Append(nil))
		require.NoError(t, err)
		require.Equal(t, c, gotCounters)

		n := number.Draw(t, "number")
		gotNumber, err := ParseNumber(AppendNumber(nil, n))
		require.NoError(t, err)
		require.Equal(t, n, gotNumber)

		u := UniqueValue{ID: drawID(t), Until: number.Draw(t, "until")}
		gotUnique, err := ParseUnique(u.Append(nil))
		require.NoError(t, err)
		require.Equal(t, u, gotUnique)

		g := GroupValue{Waiting: rapid.Bool().Draw(t, "waiting")}
		if rapid.Bool().Draw(t, "held") {
			g.Holder = drawID(t)
		}
		gotGroup, err := ParseGroup(g.Append(nil))
		require.NoError(t, err)
		require.Equal(t, g, gotGroup)

		lane, gotRec, err := SplitLane(append(AppendLaneNumber(nil, group), rec...))
		require.NoError(t, err)
		require.Equal(t, group, lane)
		require.True(t, bytes.Equal(rec, gotRec))

		e := EndedValue{Lane: group, At: number.Draw(t, "at"), Result: rapid.SliceOfN(rapid.Byte(), 0, 300).Draw(t, "result")}
		gotEnded, gotRec, err := ParseEnded(append(e.Append(nil), rec...))
		require.NoError(t, err)
		require.Equal(t, e.Lane, gotEnded.Lane)
		require.Equal(t, e.At, gotEnded.At)
		require.True(t, bytes.Equal(e.Result, gotEnded.Result))
		require.True(t, bytes.Equal(rec, gotRec))
	})
}

func TestMessagesRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := Message{Kind: rapid.SampledFrom([]byte{MsgAdmit, MsgDepend, MsgEnded, MsgSettings, MsgUnpin, MsgLeft, MsgFollow, MsgFlow, MsgTick, MsgTicked}).Draw(t, "kind")}
		name := rapid.OneOf(rapid.String(), rapid.StringN(100, 200, -1))
		bytesOf := rapid.SliceOf(rapid.Byte())
		switch m.Kind {
		case MsgAdmit, MsgFollow, MsgTick:
			switch m.Kind {
			case MsgFollow:
				m.Parent = drawID(t)
			case MsgTick:
				m.Schedule, m.Tick = name.Draw(t, "schedule"), rapid.Uint64().Draw(t, "tick")
			}
			m.Queue, m.Tenant = name.Draw(t, "queue"), name.Draw(t, "tenant")
			m.Priority = rapid.Byte().Draw(t, "priority")
			m.Record = bytesOf.Draw(t, "record")
		case MsgFlow:
			m.Parent = drawID(t)
			for range rapid.IntRange(0, 2).Draw(t, "siblings") {
				m.Siblings = append(m.Siblings, drawID(t))
			}
			for range rapid.IntRange(1, 3).Draw(t, "tasks") {
				m.Tasks = append(m.Tasks, MessageTask{
					name.Draw(t, "queue"), name.Draw(t, "tenant"), rapid.Byte().Draw(t, "priority"),
					rapid.SliceOfN(rapid.Byte(), 1, 20).Draw(t, "record"),
				})
			}
		case MsgTicked:
			m.Schedule, m.Tick = name.Draw(t, "schedule"), rapid.Uint64().Draw(t, "tick")
		case MsgSettings:
			m.Queue, m.Settings = name.Draw(t, "queue"), bytesOf.Draw(t, "settings")
		case MsgUnpin:
			m.Parent, m.Until = drawID(t), rapid.Uint64().Draw(t, "until")
		case MsgLeft:
			m.Child, m.Until = drawID(t), rapid.Uint64().Draw(t, "until")
		default:
			m.Parent, m.Child, m.Outcome = drawID(t), drawID(t), rapid.Byte().Draw(t, "outcome")
		}
		got, err := ParseMessage(m.Append(nil))
		require.NoError(t, err)
		require.True(t, bytes.Equal(m.Record, got.Record))
		require.True(t, bytes.Equal(m.Settings, got.Settings))
		m.Record, got.Record, m.Settings, got.Settings = nil, nil, nil, nil
		require.Equal(t, m, got)
	})
}

// TestAliases: values that alias the parsed bytes by their documentation do so.
func TestAliases(t *testing.T) {
	b := append(EndedValue{Result: []byte("result")}.Append(nil), "record"...)
	v, rec, err := ParseEnded(b)
	require.NoError(t, err)
	require.Same(t, &b[13], &v.Result[0])
	require.Same(t, &b[19], &rec[0])

	b = admitMessage().Append(nil)
	m, err := ParseMessage(b)
	require.NoError(t, err)
	require.Same(t, &b[len(b)-2], &m.Record[0])

	b = settingsMessage().Append(nil)
	m, err = ParseMessage(b)
	require.NoError(t, err)
	require.Same(t, &b[6], &m.Settings[0])
	set, err := ParseSettings(m.Settings)
	require.NoError(t, err)
	require.Same(t, &b[14], &set.JSON[0])
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

// only drops the results of a parser except its error.
func only[T any](parse func([]byte) (T, error)) func([]byte) error {
	return func(b []byte) error { _, err := parse(b); return err }
}

func only2[T, U any](parse func([]byte) (T, U, error)) func([]byte) error {
	return func(b []byte) error { _, _, err := parse(b); return err }
}

func only3[T, U, V any](parse func([]byte) (T, U, V, error)) func([]byte) error {
	return func(b []byte) error { _, _, _, err := parse(b); return err }
}

// parsers are the parsers of forms with a fixed length.
var parsers = []struct {
	name   string
	valid  []byte
	parse  func([]byte) error
	ranges []byte // allowed first bytes; nil: any
}{
	{"task fresh", AppendTask(nil, 1, SinceOf(goldenID), goldenID), only3(ParseTask), []byte{Task}},
	{"task moved", AppendTask(nil, 1, MovedSince(2), goldenID), only3(ParseTask), []byte{Task}},
	{"scheduled", AppendScheduled(nil, 1, goldenID), only2(ParseScheduled), []byte{Scheduled}},
	{"grouped", AppendGrouped(nil, Dead, 1, 2, goldenID), only3(ParseGrouped), nil},
	{"bucket", AppendBucket(nil, Dead, 1, 2), only3(ParseBucket), []byte{Buckets}},
	{"hashed", AppendHashed(nil, goldenHash), only(ParseHashed), []byte{Unique}},
	{"freed", AppendFreed(nil, 1, goldenHash), only2(ParseFreed), []byte{Freed}},
	{"scope", AppendScope(nil, 1), only(ParseScope), []byte{Group}},
	{"dependent", AppendDependent(nil, goldenID, otherID), only2(ParseDependent), []byte{Dependent}},
	{"outbound", AppendOutbound(nil, 1, 2), only2(ParseOutbound), []byte{Outbound}},
	{"index", AppendByID(nil, Index, goldenID), only(ParseByID), []byte{Index, Pending, Telling, Pinned}},
	{"pending", AppendByID(nil, Pending, goldenID), only(ParseByID), []byte{Index, Pending, Telling, Pinned}},
	{"pinned", AppendByID(nil, Pinned, goldenID), only(ParseByID), []byte{Index, Pending, Telling, Pinned}},
	{"pin", AppendPin(nil, goldenID, otherID), only2(ParsePin), nil},
	{"clock of periods", PeriodTimeValue{Clock: 1}.Append(nil), only(ParsePeriodTime), nil},
	{"list of set clocks", AppendClockSets(nil, []ClockSet{{1, 2, true}}), only(ParseClockSets), nil},
	{"pins", PinnedValue{Count: 1}.Append(nil), only(ParsePinned), nil},
	{"telling", AppendByID(nil, Telling, goldenID), only(ParseByID), []byte{Index, Pending, Telling, Pinned}},
	{"lease", []byte{Lease, 0, 0, 0, 0, 0, 0, 0, 1}, only(ParseLease), []byte{Lease}},
	{"numbered", AppendNumbered(nil, Queue, 1), only(ParseNumbered), nil},
	{"place key, task", AppendTask(nil, 1, SinceOf(goldenID), goldenID), only2(ParsePlaceKey), []byte{Task}},
	{
		"place key, moved", AppendTask(nil, 1, MovedSince(2), goldenID), only2(ParsePlaceKey),
		[]byte{Task, Blocked, Dead, Done, Canceled}, // they have keys of the same length
	},
	{"place key, scheduled", AppendScheduled(nil, 1, goldenID), only2(ParsePlaceKey), []byte{Scheduled}},
	{
		"place key, grouped", AppendGrouped(nil, Blocked, 1, goldenScope, goldenID), only2(ParsePlaceKey),
		[]byte{Task, Blocked, Dead, Done, Canceled},
	},
	{"place", Place{Range: Task}.Append(nil), only(ParsePlace), []byte{Task, Scheduled, Blocked}},
	{"counters", counted(), only(ParseCounters), nil},
	{"totals", totaled(), only(ParseTotals), nil},
	{"row of totals", AppendTotals(nil, "mail", 1), only2(ParseTotalsKey), []byte{Daily}},
	{"number", AppendNumber(nil, 1), only(ParseNumber), nil},
	{"holder of a key", UniqueValue{ID: goldenID, Until: 1}.Append(nil), only(ParseUnique), nil},
	{"turn of a group", GroupValue{Holder: goldenID, Waiting: true}.Append(nil), only(ParseGroup), nil},
	{"depend", (&Message{Kind: MsgDepend}).Append(nil), only(ParseMessage), []byte{MsgAdmit, MsgDepend, MsgEnded, MsgSettings, MsgFollow, MsgFlow, MsgTick}},
	{"ended", endedMessage().Append(nil), only(ParseMessage), []byte{MsgDepend, MsgEnded, MsgSettings}},
}

// TestRefusals: parsers refuse keys and values that are too short, too long, or of another range.
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
		if p.ranges == nil {
			continue
		}
		for tag := range 256 {
			b := bytes.Clone(p.valid)
			b[0] = byte(tag)
			if err := p.parse(b); slices.Contains(p.ranges, b[0]) {
				require.NoError(t, err, "%s in range %#x", p.name, tag)
			} else {
				require.Error(t, err, "%s in range %#x", p.name, tag)
			}
		}
	}
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
	for _, kind := range []byte{0, MsgSettings + 1, 0xff} {
		refused(append([]byte{kind}, admit[1:]...), "kind %d", kind)
		refused(append([]byte{kind}, endedMessage().Append(nil)[1:]...), "kind %d", kind)
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

func counted() []byte { return new(CountersValue).Append(nil) }

func totaled() []byte {
	v := goldenTotals()
	return v.Append(nil)
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

// The fuzz targets: no input makes a parser panic, and accepted values encode to the same bytes.

func addKeys(f *testing.F) {
	f.Add([]byte(nil))
	for _, p := range parsers {
		f.Add(p.valid)
		f.Add(p.valid[:len(p.valid)-1])
	}
}

// canonical has the forms with only one encoding: each function parses b and encodes the result.
// The fuzz target tries keys and values on the same bytes.
var canonical = map[string]func(b []byte) (again []byte, err error){
	"task": func(b []byte) ([]byte, error) {
		lane, since, id, err := ParseTask(b)
		return AppendTask(nil, lane, since, id), err
	},
	"scheduled": func(b []byte) ([]byte, error) {
		due, id, err := ParseScheduled(b)
		return AppendScheduled(nil, due, id), err
	},
	"grouped": func(b []byte) ([]byte, error) {
		queue, at, id, err := ParseGrouped(b)
		return AppendGrouped(nil, prefixOf(b), queue, at, id), err
	},
	"bucket": func(b []byte) ([]byte, error) {
		prefix, queue, bucket, err := ParseBucket(b)
		if err == nil && !Ended(prefix) {
			err = fmt.Errorf("bucket of range %x", prefix)
		}
		return AppendBucket(nil, prefix, queue, bucket), err
	},
	"hashed": func(b []byte) ([]byte, error) {
		hash, err := ParseHashed(b)
		return AppendHashed(nil, hash), err
	},
	"freed": func(b []byte) ([]byte, error) {
		at, hash, err := ParseFreed(b)
		return AppendFreed(nil, at, hash), err
	},
	"scope": func(b []byte) ([]byte, error) {
		scope, err := ParseScope(b)
		return AppendScope(nil, scope), err
	},
	"dependent": func(b []byte) ([]byte, error) {
		parent, child, err := ParseDependent(b)
		return AppendDependent(nil, parent, child), err
	},
	"outbound": func(b []byte) ([]byte, error) {
		shard, seq, err := ParseOutbound(b)
		return AppendOutbound(nil, shard, seq), err
	},
	"by ID": func(b []byte) ([]byte, error) {
		id, err := ParseByID(b)
		return AppendByID(nil, prefixOf(b), id), err
	},
	"lease": func(b []byte) ([]byte, error) {
		seq, err := ParseLease(b)
		again := make([]byte, LeaseLen)
		PutLease(again, seq)
		return again, err
	},
	"numbered": func(b []byte) ([]byte, error) {
		n, err := ParseNumbered(b)
		return AppendNumbered(nil, prefixOf(b), n), err
	},
	"schedule": func(b []byte) ([]byte, error) {
		name, err := ParseSchedule(b)
		return AppendSchedule(nil, name), err
	},
	"place key": func(b []byte) ([]byte, error) {
		id, p, err := ParsePlaceKey(b)
		return p.AppendKey(nil, id), err
	},
	"place": func(b []byte) ([]byte, error) {
		p, err := ParsePlace(b)
		return p.Append(nil), err
	},
	"number": func(b []byte) ([]byte, error) {
		n, err := ParseNumber(b)
		return AppendNumber(nil, n), err
	},
	"holder": func(b []byte) ([]byte, error) {
		v, err := ParseUnique(b)
		return v.Append(nil), err
	},
	"turn": func(b []byte) ([]byte, error) {
		v, err := ParseGroup(b)
		return v.Append(nil), err
	},
	"lane entry": func(b []byte) ([]byte, error) {
		v, err := ParseLaneValue(b)
		return v.Append(nil), err
	},
	"record with lane": func(b []byte) ([]byte, error) {
		lane, rec, err := SplitLane(b)
		return append(AppendLaneNumber(nil, lane), rec...), err
	},
	"applied": func(b []byte) ([]byte, error) {
		index, term, err := ParseApplied(b)
		again := make([]byte, AppliedLen)
		PutApplied(again, index, term)
		return again, err
	},
}

func prefixOf(b []byte) byte {
	if len(b) == 0 {
		return 0
	}
	return b[0]
}

func FuzzCanonical(f *testing.F) {
	addKeys(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		for name, rewrite := range canonical {
			if again, err := rewrite(b); err == nil {
				require.Equal(t, b, again, name)
			}
		}
	})
}

func FuzzParseTotals(f *testing.F) {
	f.Add(counted())
	f.Add(append(counted(), totaled()...))
	f.Add(append(totaled()[:19], 0x80, 0)) // a zero that takes two bytes
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
	f.Add(admitMessage().Append(nil))
	f.Add(settingsMessage().Append(nil))
	f.Add((&Message{Kind: MsgFollow, Parent: goldenID, Queue: "a"}).Append(nil))
	f.Add((&Message{Kind: MsgFlow, Tasks: []MessageTask{{Queue: "a"}, {Queue: "b"}}}).Append(nil))
	f.Add((&Message{Kind: MsgTick, Schedule: "s", Queue: "a"}).Append(nil))
	f.Add((&Message{Kind: MsgTicked, Schedule: "s"}).Append(nil))
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
