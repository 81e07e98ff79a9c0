package keys

import (
	"bytes"
	"encoding/hex"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"codeq/internal/testbase"
	"codeq/internal/testkit"
)

var goldenSchedule = ScheduleValue{
	Start: goldenTime, After: goldenTime + 1, Last: goldenTime + 2,
	Missed: 2, Priority: 9, Every: 300, Cron: "@daily", TimeZone: "UTC", Queue: "mail", Tenant: "acme",
	Record: []byte("record"),
}

// TestGoldenSchedule fixes the stored form.
func TestGoldenSchedule(t *testing.T) {
	require.Equal(t, hex.EncodeToString(testkit.Unhex("08 6e696768746c79")), hex.EncodeToString(AppendSchedule(nil, "nightly")))
	want := "01 00000193b3c01235 00000193b3c01236 00000193b3c01237 02 09 ac02" +
		"06 406461696c79 03 555443 04 6d61696c 04 61636d65 7265636f7264"
	require.Equal(t, hex.EncodeToString(testkit.Unhex(want)), hex.EncodeToString(goldenSchedule.Append(nil)))
	require.Equal(t, goldenSchedule.Append([]byte("before")), append([]byte("before"), testkit.Unhex(want)...))
	require.Equal(t, []byte("before\x08n"), AppendSchedule([]byte("before"), "n"))
}

func TestScheduleRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		text, number := rapid.StringN(0, 200, 300), rapid.Uint64()
		v := ScheduleValue{
			Start: number.Draw(t, "start"), After: number.Draw(t, "after"), Last: number.Draw(t, "last"),
			Missed: rapid.Uint8().Draw(t, "missed"), Paused: rapid.Bool().Draw(t, "paused"), Priority: rapid.Uint8().Draw(t, "priority"),
			Every: number.Draw(t, "every"), Cron: text.Draw(t, "cron"), TimeZone: text.Draw(t, "zone"),
			Queue: text.Draw(t, "queue"), Tenant: text.Draw(t, "tenant"),
			Record: rapid.SliceOf(rapid.Byte()).Draw(t, "record"),
		}
		got, err := ParseScheduleValue(v.Append(nil))
		require.NoError(t, err)
		require.True(t, bytes.Equal(v.Record, got.Record))
		got.Record, v.Record = nil, nil
		require.Equal(t, v, got)

		name := rapid.StringN(1, 100, 200).Draw(t, "name")
		key := AppendSchedule(nil, name)
		gotName, err := ParseSchedule(key)
		require.NoError(t, err)
		require.Equal(t, name, gotName)
		lower, upper := Range(Schedule)
		require.Negative(t, bytes.Compare(lower, key))
		require.Negative(t, bytes.Compare(key, upper))
	})
}

func TestScheduleRefusals(t *testing.T) {
	b := goldenSchedule.Append(nil)
	for n := range len(b) - len(goldenSchedule.Record) {
		_, err := ParseScheduleValue(b[:n])
		require.Error(t, err, "%d bytes", n)
	}
	for _, form := range []byte{0, pausedForm + 1, 0xff} {
		other := bytes.Clone(b)
		other[0] = form
		_, err := ParseScheduleValue(other)
		require.Error(t, err, "form %d", form)
	}
	for _, key := range [][]byte{nil, {Schedule}, {Schedule - 1, 'n'}, {Schedule + 1, 'n'}} {
		_, err := ParseSchedule(key)
		require.Error(t, err, "%x", key)
	}
}

func FuzzParseScheduleValue(f *testing.F) {
	f.Add(goldenSchedule.Append(nil))
	f.Add((&ScheduleValue{}).Append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		var v ScheduleValue
		var err error
		testbase.BoundDecode(t, len(b), func() { v, err = ParseScheduleValue(b) })
		if err != nil {
			return
		}
		again := v.Append(nil)
		sameOrShorter(t, b, again)
		got, err := ParseScheduleValue(again)
		require.NoError(t, err)
		require.Equal(t, v, got)
	})
}

// TestScheduleShard: the shard of a name is part of the format.
func TestScheduleShard(t *testing.T) {
	require.Zero(t, ShardOfSchedule("nightly", 1))
	require.Equal(t, []int{2, 1, 1}, []int{ShardOfSchedule("nightly", 3), ShardOfSchedule("hourly", 3), ShardOfSchedule("weekly", 3)})
}
