package keys

import (
	"bytes"
	"encoding/hex"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/testbase"
)

var goldenSchedule = ScheduleValue{
	Start: goldenTime, After: goldenTime + 1, Last: goldenTime + 2,
	Missed: 2, Priority: 9, Every: 300, Cron: "@daily", TimeZone: "UTC", Queue: "mail", Tenant: "acme",
	Record: []byte("record"),
}

// TestGoldenSchedule fixes the stored form.
func TestGoldenSchedule(t *testing.T) {
	const times = " 00000193b3c01235 00000193b3c01236 00000193b3c01237 02 09 ac02"
	const rest = "06 406461696c79 03 555443 04 6d61696c 04 61636d65 7265636f7264"
	for form, is := range map[string]ScheduleValue{
		"01" + times: {}, "02" + times: {Paused: true},
		"03" + times + "c801": {Jitter: 200}, "04" + times + "c801": {Paused: true, Jitter: 200},
	} {
		want, v := testbase.Unhex(form+rest), goldenSchedule
		v.Paused, v.Jitter = is.Paused, is.Jitter
		require.Equal(t, hex.EncodeToString(want), hex.EncodeToString(v.Append(nil)))
		require.Equal(t, append([]byte("before"), want...), v.Append([]byte("before")))
		got, err := ParseScheduleValue(want)
		require.NoError(t, err)
		require.Equal(t, v, got)
	}
}

func TestScheduleRefusals(t *testing.T) {
	b := goldenSchedule.Append(nil)
	for n := range len(b) - len(goldenSchedule.Record) {
		_, err := ParseScheduleValue(b[:n])
		require.Error(t, err, "%d bytes", n)
	}
	for _, form := range []byte{0, lastForm + 1, 0xff} {
		other := bytes.Clone(b)
		other[0] = form
		_, err := ParseScheduleValue(other)
		require.Error(t, err, "form %d", form)
	}
	none := goldenSchedule
	none.Jitter = 1
	b = none.Append(nil)
	b[1+3*8+2+2] = 0
	_, err := ParseScheduleValue(b)
	require.Error(t, err, "no jitter")
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
