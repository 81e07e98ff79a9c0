package fsck

import (
	"testing"

	"github.com/cockroachdb/pebble/v2"
	"github.com/stretchr/testify/require"

	"codeq/internal/crashfs"
	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/store"
)

// TestCheckKinds: counts of dead letters that their records do not confirm are found, and so are
// kinds without a text, or without a dead letter.
func TestCheckKinds(t *testing.T) {
	const day = 24 * 60 * 60 * 1000
	ids := []keys.ID{{5: 1, 6: 0x70, 8: 0x80, 11: 7, 15: 1}, {5: 2, 6: 0x70, 8: 0x80, 11: 7, 15: 2}}
	dead := func(i int, kind uint32) (keys.Place, []byte) {
		p := keys.Place{Range: keys.Dead, Group: 3, At: keys.Forever}
		rec := record.Record{Head: record.Head{DeadKind: kind}, Error: "e"}
		return p, store.JoinValue(p, 7, &rec, keys.EndedValue{At: uint64(20_000+i) * day})
	}
	check := func(alter func(set func(key, value []byte), v *keys.BucketValue)) error {
		db, err := pebble.Open("db", &pebble.Options{FS: crashfs.New()})
		require.NoError(t, err)
		set := func(key, value []byte) { require.NoError(t, db.Set(key, value, nil)) }
		set(keys.AppendNumbered(nil, keys.Lane, 7), keys.LaneValue{Queue: 3, Seq: 1}.Append(nil))
		set(keys.AppendNumbered(nil, keys.Queue, 3), []byte("queue"))
		set(keys.AppendNumbered(nil, keys.Counters, 3), (&keys.CountersValue{Counts: keys.Counts{Dead: 2}, Clock: keys.ClockOf(ids[1])}).Append(nil))
		v := keys.BucketValue{Size: 2}
		for i, id := range ids {
			p, value := dead(i, 2)
			set(p.AppendKey(nil, id), value)
			v.Add(1, id, uint64(20_000+i)*day)
		}
		set(keys.AppendDeadKind(nil, 3, 1), []byte("e"))
		alter(set, &v)
		set(keys.AppendBucket(nil, keys.Dead, 3, keys.Forever), v.Append(nil))
		err = Check(db, testRules, 0, 1)
		require.NoError(t, db.Close())
		return err
	}
	require.NoError(t, check(func(func(key, value []byte), *keys.BucketValue) {}))
	require.NoError(t, check(func(set func(key, value []byte), v *keys.BucketValue) { // not counted yet
		p, value := dead(0, 0)
		set(p.AppendKey(nil, ids[0]), value)
		v.Remove(1, ids[0], 20_000*day)
	}))
	for name, c := range map[string]struct {
		alter func(set func(key, value []byte), v *keys.BucketValue)
		says  string
	}{
		"another count": {func(_ func(key, value []byte), v *keys.BucketValue) { v.Kinds[0].Count-- }, "bucket"},
		"another day": {func(_ func(key, value []byte), v *keys.BucketValue) {
			v.Kinds[0].Days[1], v.Kinds[0].Days[2] = 0, 1
		}, "counts"},
		"an earlier time":  {func(_ func(key, value []byte), v *keys.BucketValue) { v.Kinds[0].At -= 5 }, "counts"},
		"another last one": {func(_ func(key, value []byte), v *keys.BucketValue) { v.Kinds[0].Last = ids[0] }, "whose last one is another"},
		"a kind of none": {func(_ func(key, value []byte), v *keys.BucketValue) {
			v.Kinds[0].Kind = 2
		}, "and has none"},
		"no counts":                 {func(_ func(key, value []byte), v *keys.BucketValue) { v.Kinds = nil }, "does not count them"},
		"a text that nothing needs": {func(set func(key, value []byte), _ *keys.BucketValue) { set(keys.AppendDeadKind(nil, 3, 9), nil) }, "kind 9 of errors of queue 3 is counted in no bucket"},
		"no text":                   {func(set func(key, value []byte), v *keys.BucketValue) { v.Kinds[0].Kind = 2 }, "kind 2 of errors of queue 3 has no text"},
		"a record with another kind": {func(set func(key, value []byte), _ *keys.BucketValue) {
			p, b := dead(1, 3)
			set(p.AppendKey(nil, ids[1]), b)
		}, "of kind 2"},
		"a record without its number": {func(set func(key, value []byte), _ *keys.BucketValue) {
			p, b := dead(1, 0)
			set(p.AppendKey(nil, ids[1]), b)
		}, "counts"},
	} {
		require.ErrorContains(t, check(c.alter), c.says, name)
	}
}
