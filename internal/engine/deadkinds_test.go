package engine

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/keys"
	"codeq/internal/record"
	"codeq/internal/store"
)

// forgetKinds removes from a store what counts dead letters by kind, as if an earlier version had
// written it.
func forgetKinds(st *store.Store) error {
	b := st.DB().NewBatch()
	lower, upper := keys.Range(keys.DeadKind)
	return errors.Join(
		store.Scan(st.DB(), keys.Dead, func(key, value []byte) error {
			_, p, err := keys.ParsePlaceKey(key)
			if err != nil {
				return err
			}
			lane, encoded, ended, err := store.SplitValue(p, value)
			if err != nil {
				return err
			}
			rec, err := record.Decode(encoded)
			rec.DeadKind = 0
			return errors.Join(err, b.Set(key, store.JoinValue(p, lane, &rec, ended), nil))
		}),
		store.Scan(st.DB(), keys.Buckets, func(key, value []byte) error {
			v, err := keys.ParseBucketValue(value)
			return errors.Join(err, b.Set(key, keys.AppendNumber(nil, v.Size), nil))
		}),
		b.DeleteRange(lower, upper, nil), st.Commit(b), b.Close(),
	)
}

// kill makes new tasks of a queue dead letters, one for each error.
func (r *ruled) kill(queue string, causes ...string) (ids []keys.ID) {
	r.Helper()
	for _, cause := range causes {
		ids = append(ids, r.produce(newTask(LaneKey{Queue: queue}, record.Record{}))...)
		r.die(queue, cause)
	}
	return ids
}

// die makes the first task of a queue a dead letter.
func (r *ruled) die(queue, cause string) {
	r.Helper()
	g := r.claim(queue, 1)
	require.Len(r, g, 1)
	r.in(func() (Verdict, error) { return r.State.Fail(g[0].Receipt, FailDead, nil, 0, cause) })
	r.end()
}

func (r *ruled) alter(id keys.ID, how Alteration, to AlterTo) {
	r.Helper()
	r.in(func() (Verdict, error) { return r.Alter(id, how, to) })
	r.end()
}

// kindsOf settles the shard, which compares memory, counts and records with each other, and returns
// the counts of a queue by the texts on disk.
func (r *ruled) kindsOf(queue string) map[string]uint64 {
	r.Helper()
	r.settle()
	kinds := make(map[string]uint64)
	number, _ := r.Names.CountsOf(queue)
	require.NoError(r, store.ScanPrefix(r.Store.DB(), keys.AppendBuckets(nil, keys.Dead, number), func(_, value []byte) error {
		v, err := keys.ParseBucketValue(value)
		for _, k := range v.Kinds {
			text := []byte("other")
			if k.Kind != keys.OtherKinds {
				text, err = store.Lookup(r.Store.DB(), keys.AppendDeadKind(nil, number, k.Kind))
				require.NoError(r, err)
				require.NotNil(r, text)
			}
			kinds[string(text)] += k.Count
		}
		return err
	}))
	return kinds
}

// TestKindsOfDeadLetters: dead letters are counted by the kinds of their errors, and whatever
// becomes of one, the same kind loses it; a restart changes nothing. The texts of kinds go with
// their last dead letters.
func TestKindsOfDeadLetters(t *testing.T) {
	r := newRuled(t, Config{Retention: time.Hour})
	ids := r.kill("a", "timeout 1", "timeout 2", "timeout 3", "timeout 4", "timeout 5", "refused", "refused", "refused", "")
	require.Equal(t, map[string]uint64{"timeout #": 5, "refused": 3, "": 1}, r.kindsOf("a"))
	require.Equal(t, 3, r.stored(keys.DeadKind))
	r.reopen()
	r.alter(ids[0], AlterRedrive, AlterTo{})
	require.Zero(t, r.find(ids[0]).rec.DeadKind)
	r.alter(ids[1], AlterForget, AlterTo{})
	r.alter(ids[2], AlterCancel, AlterTo{})
	require.Zero(t, r.find(ids[2]).rec.DeadKind)
	r.alter(ids[3], AlterMove, AlterTo{Queue: "b"})
	require.Equal(t, map[string]uint64{"timeout #": 1, "refused": 3, "": 1}, r.kindsOf("a"))
	r.die("a", "refused")
	require.Equal(t, map[string]uint64{"timeout #": 1, "refused": 4, "": 1}, r.kindsOf("a"))
	bulk := BulkAlteration{IDs: ids, How: AlterForget, States: record.SetOf(Dead)}
	r.in(func() (Verdict, error) { return r.AlterMany(&bulk) })
	r.end()
	require.Equal(t, 6, bulk.N)
	require.Empty(t, r.kindsOf("a"))
	require.Zero(t, r.stored(keys.DeadKind))
}

// TestKindsExpire: the counts of a bucket, and the texts that no other counts, go with its tasks.
func TestKindsExpire(t *testing.T) {
	r := newRuled(t, Config{})
	r.configure("a", `{"DeadRetention":3600000000000}`)
	r.kill("a", "one", "both", "both")
	r.pass(30 * time.Minute)
	r.kill("a", "both")
	require.Equal(t, map[string]uint64{"one": 1, "both": 3}, r.kindsOf("a"))
	require.Equal(t, 2, r.stored(keys.Buckets))
	r.pass(45 * time.Minute)
	require.Equal(t, map[string]uint64{"both": 1}, r.kindsOf("a"))
	require.Equal(t, 1, r.stored(keys.DeadKind))
	r.pass(45 * time.Minute)
	require.Empty(t, r.kindsOf("a"))
	require.Zero(t, r.stored(keys.DeadKind))
}

// TestKindsAreFew: a bucket has so many kinds; the dead letters of others are counted together,
// until there is room. The numbers of kinds that have gone are used again.
func TestKindsAreFew(t *testing.T) {
	r := newRuled(t, Config{})
	cause := func(i int) string { return fmt.Sprintf("error%c%c", 'a'+i/26, 'a'+i%26) }
	var ids []keys.ID
	for i := range keys.MostKinds + 6 {
		ids = append(ids, r.kill("a", cause(i))...)
	}
	kinds := r.kindsOf("a")
	require.Len(t, kinds, keys.MostKinds+1)
	require.Equal(t, uint64(6), kinds["other"])
	r.alter(ids[3], AlterForget, AlterTo{})
	r.alter(ids[keys.MostKinds], AlterForget, AlterTo{})
	r.kill("a", cause(keys.MostKinds+1)) // it is counted with others, and has room now
	kinds = r.kindsOf("a")
	require.Equal(t, uint64(5), kinds["other"])
	require.Equal(t, uint64(1), kinds[cause(keys.MostKinds+1)])
	for i := range 1000 {
		r.alter(r.kill("b", cause(i))[0], AlterForget, AlterTo{})
	}
	require.Equal(t, uint32(2), r.find(r.kill("b", "last")[0]).rec.DeadKind)
	r.settle()
}

// TestKindsOfDays: a bucket counts the dead letters of a kind by the day of their death.
func TestKindsOfDays(t *testing.T) {
	const day = 24 * time.Hour
	r := newRuled(t, Config{})
	first := r.kill("a", "x", "x", "x")
	r.pass(2 * day)
	second := r.kill("a", "x", "x")
	kind := func() keys.KindCount {
		r.settle()
		number, _ := r.Names.CountsOf("a")
		b, err := store.Lookup(r.Store.DB(), keys.AppendBucket(nil, keys.Dead, number, keys.Forever))
		require.NoError(t, err)
		v, err := keys.ParseBucketValue(b)
		require.NoError(t, err)
		require.Len(t, v.Kinds, 1)
		return v.Kinds[0]
	}
	require.Equal(t, [keys.DeadDays]uint64{0: 2, 2: 3}, kind().Days)
	require.Equal(t, second[1], kind().Last)
	r.alter(first[0], AlterForget, AlterTo{})
	r.alter(second[1], AlterForget, AlterTo{})
	require.Equal(t, [keys.DeadDays]uint64{0: 1, 2: 2}, kind().Days)
	require.Zero(t, kind().Last)
	r.pass((keys.DeadDays - 1) * day)
	r.kill("a", "x")
	require.Equal(t, [keys.DeadDays]uint64{0: 1, keys.DeadDays - 1: 1}, kind().Days)
	require.Equal(t, uint64(4), kind().Count)
	r.alter(first[1], AlterForget, AlterTo{}) // its day is not counted any more
	require.Equal(t, uint64(3), kind().Count)
}

// TestOldDeadLetters: those that were stored before kinds were counted, and those of a shard with a
// format without counts, are counted in pieces. Meanwhile others die, and some leave.
func TestOldDeadLetters(t *testing.T) {
	for name, age := range map[string]func(*ruled){
		"of an earlier version": func(r *ruled) {
			require.NoError(r, forgetKinds(r.Store))
			r.reopen()
		},
		"of an earlier format": func(*ruled) {},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRuled(t, Config{})
			r.Format = keys.FormatOfDeadKinds - 1
			if name == "of an earlier version" {
				r.Format++
			}
			var ids []keys.ID
			for range 50 {
				r.produce(newTask(LaneKey{Queue: "a"}, record.Record{Payload: make([]byte, 1000)}))
				ids = append(ids, r.claim("a", 1)[0].Receipt.ID)
				r.in(func() (Verdict, error) {
					return r.State.Fail(r.Leases.byID[ids[len(ids)-1]].receipt(), FailDead, nil, 0, "old 1")
				})
				r.end()
			}
			age(r)
			r.State.config.GroupBytes = 20_000
			r.Format = keys.FormatOfDeadKinds
			groups := 0
			for r.upkeepIsDue() {
				groups++
				r.begin(r.drivenShard)
				read, _ := r.Work()
				r.KeepUp(r.passed, 0)
				now, _ := r.Work()
				require.Less(t, now-read, 40, "a part of them")
				r.end()
				if groups == 2 {
					r.alter(ids[0], AlterRedrive, AlterTo{}) // counted
					r.alter(ids[49], AlterForget, AlterTo{}) // not counted yet
					r.die("a", "new")
				}
			}
			require.Greater(t, groups, 4)
			require.Equal(t, map[string]uint64{"old #": 48, "new": 1}, r.kindsOf("a"))
		})
	}
}
