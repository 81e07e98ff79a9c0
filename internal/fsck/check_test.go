package fsck

import (
	"errors"
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/crashfs"
	"codeq/internal/keys"
	"codeq/internal/record"
)

// testRules refuse malformed settings, and a schedule without a value.
var testRules = &Rules{
	Settings: func(value []byte) (uint64, error) {
		v, err := keys.ParseSettings(value)
		if err != nil {
			err = errors.New("settings refused")
		}
		return v.Version, err
	},
	Schedule: func(key, value []byte) (string, error) {
		if len(value) == 0 {
			return "", errors.New("schedule refused")
		}
		return keys.ParseSchedule(key)
	},
}

// TestCheck: a store with one ready task is sound. The check finds each missing or additional
// entry.
func TestCheck(t *testing.T) {
	id := keys.ID{0, 0, 0, 0, 0, 1, 0x70, 0, 0x80, 0, 0, 7, 0, 0, 0, 1}
	counters := (&keys.CountersValue{Counts: keys.Counts{Ready: 1}, Clock: keys.ClockOf(id)}).Append(nil)
	task := keys.FirstPlace(7, id).AppendKey(nil, id)
	sound := map[string][]byte{
		string(keys.AppendNumbered(nil, keys.Lane, 7)):     keys.LaneValue{Queue: 3, Seq: 1}.Append(nil),
		string(keys.AppendNumbered(nil, keys.Queue, 3)):    []byte("queue"),
		string(keys.AppendNumbered(nil, keys.Counters, 3)): counters,
		string(task): (&record.Record{}).Encode(),
		string(append([]byte{keys.Settings}, "queue"...)): keys.SettingsValue{Version: 1, JSON: []byte("{}")}.Append(nil),
		string(keys.AppendSchedule(nil, "nightly")):       {1},
	}
	check := func(alter func(entries map[string][]byte)) error {
		db, err := pebble.Open("db", &pebble.Options{FS: crashfs.New()})
		require.NoError(t, err)
		entries := make(map[string][]byte)
		for key, value := range sound {
			entries[key] = value
		}
		alter(entries)
		for key, value := range entries {
			require.NoError(t, db.Set([]byte(key), value, nil))
		}
		err = Check(db, testRules, 0, 1)
		require.NoError(t, db.Close())
		return err
	}
	require.NoError(t, check(func(map[string][]byte) {}))
	for name, c := range map[string]struct {
		alter func(entries map[string][]byte)
		says  string
	}{
		"no record":   {func(e map[string][]byte) { delete(e, string(task)) }, "queue 3 is counted as"},
		"no counters": {func(e map[string][]byte) { delete(e, string(keys.AppendNumbered(nil, keys.Counters, 3))) }, "queue 3 has tasks and no counters"},
		"no lane":     {func(e map[string][]byte) { delete(e, string(keys.AppendNumbered(nil, keys.Lane, 7))) }, "lane 7"},
		"index": {func(e map[string][]byte) {
			e[string(keys.AppendByID(nil, keys.Index, id))] = keys.Place{Range: keys.Scheduled, At: 5}.Append(nil)
		}, "index says that task " + keys.FormatID(id)},
		"group": {func(e map[string][]byte) {
			r := record.Record{GroupKey: "group"}
			r.Group = 12345
			e[string(task)] = r.Encode()
		}, `of group "group" has scope`},
		"history": {func(e map[string][]byte) {
			r := record.Record{History: &record.History{Attempts: make([]record.Attempt, 1)}}
			e[string(task)] = r.Encode()
		}, "history of 1 attempts, 0 of which were dropped, after 0 leases"},
		"notes": {func(e map[string][]byte) {
			r := record.Record{Notes: &record.Notes{Text: string(make([]byte, record.MaxNotes+1))}}
			e[string(task)] = r.Encode()
		}, "notes of 4097 bytes"},
		"settings":  {func(e map[string][]byte) { e[string(append([]byte{keys.Settings}, "queue"...))] = []byte{0} }, "settings refused"},
		"schedule":  {func(e map[string][]byte) { e[string(keys.AppendSchedule(nil, "nightly"))] = nil }, "schedule refused"},
		"malformed": {func(e map[string][]byte) { e[string([]byte{keys.Lease})] = nil }, ""},
	} {
		err := check(c.alter)
		require.ErrorIs(t, err, base.ErrCorrupt, name)
		require.ErrorContains(t, err, c.says, name)
	}
}
