package keys

import (
	"bytes"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/testbase"
)

// forms are the stored keys, and the values with one encoding.
var forms = []struct {
	name   string
	append func(b []byte) []byte
	want   string // hexadecimal
	parser string // one of parsers; "": none reads it, or it has several encodings
	ranges []byte // the first bytes that the parser takes; nil: any
}{
	{"queue", func(b []byte) []byte { return AppendNumbered(b, Queue, goldenQueue) }, "02 00000007", "numbered", nil},
	{"lane", func(b []byte) []byte { return AppendNumbered(b, Lane, goldenLane) }, "03 00000102", "numbered", nil},
	{"counters", func(b []byte) []byte { return AppendNumbered(b, Counters, goldenQueue) }, "04 00000007", "numbered", nil},
	{"bucket of dead letters", func(b []byte) []byte { return AppendBucket(b, Dead, goldenQueue, goldenTime) }, "05 14 00000007 00000193b3c01235", "bucket", []byte{Buckets}},
	{"kind of dead letters", func(b []byte) []byte { return AppendDeadKind(b, goldenQueue, 3) }, "26 00000007 00000003", "dead kind", []byte{DeadKind}},
	{"bucket without kinds", func(b []byte) []byte { return (&BucketValue{Size: 5}).Append(b) }, "0000000000000005", "", nil},
	{"bucket with kinds", func(b []byte) []byte {
		v := BucketValue{Size: 9}
		v.Add(OtherKinds, goldenID, goldenTime)
		v.Add(3, goldenID, goldenTime)
		v.Add(3, otherID, goldenTime+2*dayMillis)
		return v.Append(b)
	}, "0000000000000009 00 01 b5a4809ebb32" + goldenIDHex + "01 01 03 02 b594b3f0bb32" + otherIDHex + "03 01 00 01", "", nil},
	{"buckets of a queue", func(b []byte) []byte { return AppendBuckets(b, Canceled, goldenQueue) }, "05 16 00000007", "", nil},
	{"task fresh", func(b []byte) []byte { return AppendTask(b, goldenLane, SinceOf(goldenID), goldenID) }, "10 00000102" + goldenIDHex, "task", []byte{Task}},
	{"task moved", func(b []byte) []byte { return AppendTask(b, goldenLane, MovedSince(goldenTime), goldenID) }, "10 00000102 0193b3c01235 8000" + goldenIDHex, "task", []byte{Task}},
	{"lane prefix", func(b []byte) []byte { return AppendLane(b, goldenLane) }, "10 00000102", "", nil},
	{"from the head", func(b []byte) []byte { return AppendFrom(b, goldenLane, 0, ID{}) }, "10 00000102", "", nil},
	{"from a moved task", func(b []byte) []byte { return AppendFrom(b, goldenLane, MovedSince(1), goldenID) }, "10 00000102 000000000001 8000" + goldenIDHex, "", nil},
	{"scheduled", func(b []byte) []byte { return AppendScheduled(b, goldenTime, goldenID) }, "12 00000193b3c01235" + goldenIDHex, "scheduled", []byte{Scheduled}},
	{"blocked", func(b []byte) []byte { return AppendGrouped(b, Blocked, goldenQueue, goldenScope, goldenID) }, "13 00000007 fedcba9876543210" + goldenIDHex, "grouped", nil},
	{"blocked in a scope", func(b []byte) []byte { return AppendGroup(b, Blocked, goldenQueue, goldenScope) }, "13 00000007 fedcba9876543210", "", nil},
	{"dead", func(b []byte) []byte { return AppendGrouped(b, Dead, goldenQueue, goldenTime, goldenID) }, "14 00000007 00000193b3c01235" + goldenIDHex, "grouped", nil},
	{"done", func(b []byte) []byte { return AppendGrouped(b, Done, goldenQueue, goldenTime, goldenID) }, "15 00000007 00000193b3c01235" + goldenIDHex, "", nil},
	{"canceled", func(b []byte) []byte { return AppendGrouped(b, Canceled, goldenQueue, goldenTime, goldenID) }, "16 00000007 00000193b3c01235" + goldenIDHex, "", nil},
	{"canceled in a bucket", func(b []byte) []byte { return AppendGroup(b, Canceled, goldenQueue, goldenTime) }, "16 00000007 00000193b3c01235", "", nil},
	{"index", func(b []byte) []byte { return AppendByID(b, Index, goldenID) }, "17" + goldenIDHex, "by ID", []byte{Index, Pending, Telling, Pinned}},
	{"unique", func(b []byte) []byte { return AppendHashed(b, goldenHash) }, "18" + goldenHashHex, "hashed", []byte{Unique}},
	{"freed", func(b []byte) []byte { return AppendFreed(b, goldenTime, goldenHash) }, "19 00000193b3c01235" + goldenHashHex, "freed", []byte{Freed}},
	{"group", func(b []byte) []byte { return AppendScope(b, goldenScope) }, "1a fedcba9876543210", "scope", []byte{Group}},
	{"wake", func(b []byte) []byte { return AppendGrouped(b, Wake, goldenQueue, goldenScope, goldenID) }, "1b 00000007 fedcba9876543210" + goldenIDHex, "", nil},
	{"pending", func(b []byte) []byte { return AppendByID(b, Pending, goldenID) }, "1c" + goldenIDHex, "by ID", []byte{Index, Pending, Telling, Pinned}},
	{"dependent", func(b []byte) []byte { return AppendDependent(b, goldenID, otherID) }, "1d" + goldenIDHex + otherIDHex, "dependent", []byte{Dependent}},
	{"outbound", func(b []byte) []byte { return AppendOutbound(b, 3, goldenSeq) }, "1e 00000003 0193b3c012345003", "outbound", []byte{Outbound}},
	{"telling", func(b []byte) []byte { return AppendByID(b, Telling, goldenID) }, "1f" + goldenIDHex, "by ID", []byte{Index, Pending, Telling, Pinned}},
	{"pin", func(b []byte) []byte { return AppendPin(b, goldenID, otherID) }, "20" + goldenIDHex + otherIDHex, "pin", []byte{Pin}},
	{"pinned", func(b []byte) []byte { return AppendByID(b, Pinned, goldenID) }, "21" + goldenIDHex, "by ID", []byte{Index, Pending, Telling, Pinned}},
	{"pins", func(b []byte) []byte { return PinnedValue{Count: 2, Until: goldenTime}.Append(b) }, "0000000000000002 00000193b3c01235", "pins", nil},
	{"lease", func(b []byte) []byte {
		key := make([]byte, LeaseLen)
		PutLease(key, goldenSeq)
		return append(b, key...)
	}, "11 0193b3c012345003", "lease", []byte{Lease}},
	{"applied", func(b []byte) []byte {
		value := make([]byte, AppliedLen)
		PutApplied(value, 5, 3)
		return append(b, value...)
	}, "0000000000000005 0000000000000003", "applied", nil},
	{"node", func(b []byte) []byte { return AppendNamed(b, Session, "n1") }, "0b 6e31", "", nil},
	{"schedule", func(b []byte) []byte { return AppendSchedule(b, "nightly") }, "08 6e696768746c79", "schedule", []byte{Schedule}},
	{"record of a lane", func(b []byte) []byte { return append(AppendLaneNumber(b, goldenLane), 0xab, 0xcd) }, "00000102 abcd", "record with lane", nil},
	{
		"counters value", func(b []byte) []byte { v := goldenCounters(); return v.Append(b) },
		"0000000000000008 0000000000000001 0000000000000002 0000000000000003" +
			"0000000000000004 0000000000000005 0000010000000000 0000000000000007", "counters", nil,
	},
	{"totals", func(b []byte) []byte { v := goldenTotals(); return v.Append(b) }, "a09c01 01020304050607ac02 01000000000007ab02", "", nil},
	{"place key, task", func(b []byte) []byte { return FirstPlace(goldenLane, goldenID).AppendKey(b, goldenID) }, "10 00000102" + goldenIDHex, "place key", []byte{Task}},
	{"place key, moved", func(b []byte) []byte {
		return Place{Range: Task, Group: goldenLane, At: MovedSince(1)}.AppendKey(b, goldenID)
	}, "10 00000102 000000000001 8000" + goldenIDHex, "place key", []byte{Task, Blocked, Dead, Done, Canceled}},
	{"place key, scheduled", func(b []byte) []byte { return Place{Range: Scheduled, At: 1}.AppendKey(b, goldenID) }, "12 0000000000000001" + goldenIDHex, "place key", []byte{Scheduled}},
	{"place key, blocked", func(b []byte) []byte { return Place{Range: Blocked, Group: 7, At: 1}.AppendKey(b, goldenID) }, "13 00000007 0000000000000001" + goldenIDHex, "place key", []byte{Task, Blocked, Dead, Done, Canceled}},
	{"place key, dead", func(b []byte) []byte { return Place{Range: Dead, Group: 7, At: 1}.AppendKey(b, goldenID) }, "14 00000007 0000000000000001" + goldenIDHex, "", nil},
	{"lane value", func(b []byte) []byte { return LaneValue{Queue: goldenQueue, Priority: 9, Tenant: "acme"}.Append(b) }, "00000007 09 61636d65", "lane entry", nil},
	{"lane value with a number that is not the first", func(b []byte) []byte {
		return LaneValue{Queue: goldenQueue, Priority: 9, Tenant: "acme", Seq: 258}.Append(b)
	}, "00000007 89 0000000000000102 61636d65", "lane entry", nil},
	{"lane value without a tenant", func(b []byte) []byte { return LaneValue{Queue: goldenQueue}.Append(b) }, "00000007 00", "lane entry", nil},
	{
		"totals with unhandled tasks",
		func(b []byte) []byte {
			v := goldenTotals()
			v.All[Unhandled], v.OfDay[Unhandled] = 5, 0
			return v.Append(b)
		},
		"a09c818008 01020304050607ac02 05 01000000000007ab02 00", "", nil,
	},
	{"row of totals", func(b []byte) []byte { return AppendTotals(b, "mail", 20_000) }, "0e 04 6d61696c 00004e20", "", nil},
	{"number", func(b []byte) []byte { return AppendNumber(b, goldenSeq) }, "0193b3c012345003", "number", nil},
	{"settings value", func(b []byte) []byte { return settingsValue().Append(b) }, "000000000000012c 7b2252617465223a327d", "", nil},
	{"place, first", func(b []byte) []byte { return FirstPlace(goldenLane, goldenID).Append(b) }, "10 00000102 0193b3c012347abc", "place", []byte{Task, Scheduled, Blocked}},
	{"place, scheduled", func(b []byte) []byte { return Place{Range: Scheduled, At: goldenTime}.Append(b) }, "12 00000000 00000193b3c01235", "place", nil},
	{"place, blocked", func(b []byte) []byte { return Place{Range: Blocked, Group: goldenQueue, At: goldenScope}.Append(b) }, "13 00000007 fedcba9876543210", "place", nil},
	{"clock of leases", func(b []byte) []byte {
		return LeaseTimeValue{Clock: 7, Crashes: []CrashValue{{Process: 1, Until: 2, Suspects: 3, Partial: true}}}.Append(b)
	}, "0000000000000007 0000000000000001 0000000000000002 0000000000000007", "", nil},
	{"clock of periods", func(b []byte) []byte { return PeriodTimeValue{Clock: goldenTime, Waits: 1}.Append(b) }, "00000193b3c01235 0000000000000001", "clock of periods", nil},
	{"list of set clocks", func(b []byte) []byte {
		return AppendClockSets(b, []ClockSet{{1, goldenTime, true}})
	}, "0000000000000001 00000193b3c01235 01", "list of set clocks", nil},
	{"holder of a key", func(b []byte) []byte { return UniqueValue{ID: goldenID, Until: goldenTime}.Append(b) }, goldenIDHex + "00000193b3c01235", "holder", nil},
	{"turn of a group", func(b []byte) []byte { return GroupValue{Holder: goldenID}.Append(b) }, goldenIDHex + "00", "turn", nil},
	{"turn for which others wait", func(b []byte) []byte { return GroupValue{Holder: goldenID, Waiting: true}.Append(b) }, goldenIDHex + "01", "turn", nil},
	{"lane number", func(b []byte) []byte { return AppendLaneNumber(b, goldenLane) }, "00000102", "", nil},
	{"ended value", func(b []byte) []byte {
		return EndedValue{Lane: goldenLane, At: goldenTime, Result: []byte("ok")}.Append(b)
	}, "00000102 00000193b3c01235 02 6f6b", "", nil},
	{"ended value without a result", func(b []byte) []byte { return EndedValue{Lane: goldenLane, At: goldenTime}.Append(b) }, "00000102 00000193b3c01235 00", "", nil},
	{"local lease record", func(b []byte) []byte { return LeaseHeader{Local: true, Deadline: goldenTime}.Append(b) }, "01 00000193b3c01235", "", nil},
	{"lease record in a cluster", func(b []byte) []byte { return LeaseHeader{Deadline: goldenTime, Ends: 258}.Append(b) }, "02 00000193b3c01235 0000000000000102", "", nil},
	{"local lease record of a process in a cluster", func(b []byte) []byte {
		return LeaseHeader{Local: true, Deadline: goldenTime, Ends: 258, Process: 259}.Append(b)
	}, "07 00000193b3c01235 0000000000000102 0000000000000103", "", nil},
	{"local lease record in a cluster", func(b []byte) []byte { return LeaseHeader{Local: true, Deadline: goldenTime, Ends: 258}.Append(b) }, "03 00000193b3c01235 0000000000000102", "", nil},
}

// messages are the stored forms of messages between shards.
var messages = []struct {
	m    Message
	want string
}{
	{Message{Kind: MsgAdmit, Queue: "mail", Tenant: "acme", Priority: 9, Record: []byte{0xab, 0xcd}}, "01 09 04 6d61696c 04 61636d65 abcd"},
	{Message{Kind: MsgAdmit}, "01 00 00 00"},
	{Message{Kind: MsgAdmit, Queue: longName}, "01 00 c801" + hex.EncodeToString([]byte(longName)) + "00"},
	{Message{Kind: MsgDepend, Parent: goldenID, Child: otherID, Outcome: 1}, "02" + goldenIDHex + otherIDHex + "01"},
	{Message{Kind: MsgEnded, Parent: goldenID, Child: otherID, Outcome: 2}, "03" + goldenIDHex + otherIDHex + "02"},
	{Message{Kind: MsgSettings, Queue: "mail", Settings: settingsValue().Append(nil)}, "04 04 6d61696c 000000000000012c 7b2252617465223a327d"},
	{Message{Kind: MsgUnpin, Parent: goldenID, Until: goldenTime}, "05" + goldenIDHex + "00000193b3c01235"},
	{Message{Kind: MsgLeft, Child: otherID, Until: goldenTime}, "06" + otherIDHex + "00000193b3c01235"},
	{Message{Kind: MsgFollow, Parent: goldenID, Queue: "a", Tenant: "t", Priority: 9, Record: []byte{0xab}}, "07 " + goldenIDHex + " 09 01 61 01 74 ab"},
	{
		Message{Kind: MsgFlow, Parent: goldenID, Siblings: []ID{otherID, goldenID}, Tasks: []MessageTask{{"a", "t", 9, []byte{0xab}}, {Queue: "b"}}},
		"08 " + goldenIDHex + " 02" + otherIDHex + goldenIDHex + " 09 01 61 01 74 01 ab 00 01 62 00 00",
	},
	{Message{Kind: MsgTick, Schedule: "s", Tick: 258, Queue: "a", Record: []byte{0xab}}, "09 01 73 0000000000000102 00 01 61 00 ab"},
	{Message{Kind: MsgTicked, Schedule: "s", Tick: 258}, "0a 01 73 0000000000000102"},
}

var longName = strings.Repeat("q", 200)

// parsers parse the forms with one encoding, and encode the result again. The fuzz target tries all
// on the same bytes.
var parsers = map[string]func(b []byte) (again []byte, err error){
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
	"dead kind": func(b []byte) ([]byte, error) {
		queue, kind, err := ParseDeadKind(b)
		return AppendDeadKind(nil, queue, kind), err
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
	"pin": func(b []byte) ([]byte, error) {
		child, parent, err := ParsePin(b)
		return AppendPin(nil, child, parent), err
	},
	"pins": func(b []byte) ([]byte, error) {
		v, err := ParsePinned(b)
		return v.Append(nil), err
	},
	"clock of periods": func(b []byte) ([]byte, error) {
		v, err := ParsePeriodTime(b)
		return v.Append(nil), err
	},
	"list of set clocks": func(b []byte) ([]byte, error) {
		v, err := ParseClockSets(b)
		return AppendClockSets(nil, v), err
	},
	"counters": func(b []byte) ([]byte, error) {
		v, err := ParseCounters(b)
		if v.Totals != (TotalsValue{}) {
			err = errors.Join(err, errors.New("with totals")) // FuzzParseTotals
		}
		return v.Append(nil), err
	},
}

func prefixOf(b []byte) byte {
	if len(b) == 0 {
		return 0
	}
	return b[0]
}

// TestForms fixes every stored form. An encoder keeps the bytes before its own, and writes the same
// bytes for any content of the buffer. A parser reads all that was encoded, and refuses forms that
// are too short, too long, or of another range.
func TestForms(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	tried := make(map[string]bool)
	for _, f := range forms {
		want := testbase.Unhex(f.want)
		require.Equal(t, hex.EncodeToString(want), hex.EncodeToString(f.append(nil)), f.name)
		used := append([]byte("before"), bytes.Repeat([]byte{0xee}, 200)...)
		require.Equal(t, append([]byte("before"), want...), f.append(used[:len("before")]), f.name)
		if f.parser == "" {
			continue
		}
		parse := parsers[f.parser]
		tried[f.parser] = true
		again, err := parse(want)
		require.NoError(t, err, f.name)
		require.Equal(t, want, again, f.name)
		if slices.Contains([]string{"lane entry", "record with lane", "schedule"}, f.parser) {
			continue // any number of bytes at the end
		}
		for n := range want {
			_, err := parse(want[:n])
			require.Error(t, err, "%s, %d bytes", f.name, n)
		}
		for _, n := range []int{1, 8, 16, 100} {
			_, err := parse(append(bytes.Clone(want), make([]byte, n)...))
			require.Error(t, err, "%s, %d bytes too many", f.name, n)
		}
		for tag := range 256 {
			b := bytes.Clone(want)
			b[0] = byte(tag)
			if _, err := parse(b); f.ranges != nil {
				require.Equal(t, slices.Contains(f.ranges, b[0]), err == nil, "%s in range %#x", f.name, tag)
			}
		}
		valid := 0
		for range 200 { // the numbers and IDs in it
			b := bytes.Clone(want)
			for range 4 {
				b[1+rng.IntN(len(b)-1)] = byte(rng.Uint32())
			}
			if again, err := parse(b); err == nil {
				require.Equal(t, b, again, f.name)
				valid++
			}
		}
		require.Positive(t, valid, f.name)
	}
	for name := range parsers {
		require.True(t, tried[name], name)
	}
	lower, upper := Range(Dead)
	require.Equal(t, []byte{0x14}, lower)
	require.Equal(t, []byte{0x15}, upper)
}

// TestMessages fixes the stored forms of messages; a parser gets a message as it was encoded.
func TestMessages(t *testing.T) {
	kinds := make(map[byte]bool)
	for _, c := range messages {
		want := testbase.Unhex(c.want)
		require.Equal(t, hex.EncodeToString(want), hex.EncodeToString(c.m.Append(nil)))
		require.Equal(t, append([]byte("before"), want...), c.m.Append([]byte("before")))
		got, err := ParseMessage(want)
		require.NoError(t, err)
		require.Equal(t, fmt.Sprint(c.m), fmt.Sprint(got), "an empty slice may be nil")
		kinds[c.m.Kind] = true
	}
	require.Len(t, kinds, MsgTicked)
}

func addKeys(f *testing.F) {
	f.Add([]byte(nil))
	for _, form := range forms {
		b := form.append(nil)
		f.Add(b)
		f.Add(b[:len(b)-1])
	}
}

// FuzzCanonical: no input makes a parser panic, and accepted keys and values encode to the same
// bytes.
func FuzzCanonical(f *testing.F) {
	addKeys(f)
	f.Fuzz(func(t *testing.T, b []byte) {
		for name, rewrite := range parsers {
			if again, err := rewrite(b); err == nil {
				require.Equal(t, b, again, name)
			}
		}
	})
}
