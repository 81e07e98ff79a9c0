package keys

import (
	"math"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"codeq/internal/testbase"
)

// TestBucketCounts: the counts of a bucket are those of the dead letters in it, whatever comes and
// goes in any order, and are read again as they were written. Joined, the counts of kinds are those
// of one kind.
func TestBucketCounts(t *testing.T) {
	type dead struct {
		id   ID
		kind uint32
		at   uint64
	}
	rapid.Check(t, func(t *rapid.T) {
		var v BucketValue
		var all []dead
		latest := make(map[uint32]uint64) // since the bucket counts some of the kind
		for range rapid.IntRange(0, 40).Draw(t, "steps") {
			if len(all) > 0 && rapid.IntRange(0, 2).Draw(t, "which") == 0 {
				i := rapid.IntRange(0, len(all)-1).Draw(t, "leaves")
				d := all[i]
				all = slices.Delete(all, i, i+1)
				v.Size--
				if left := slices.ContainsFunc(all, func(o dead) bool { return o.kind == d.kind }); left == v.Remove(d.kind, d.id, d.at) {
					t.Fatalf("kind %d has others: %t", d.kind, left)
				} else if !left {
					delete(latest, d.kind)
				}
			} else {
				d := dead{drawID(t), rapid.Uint32Range(0, 2).Draw(t, "kind"), rapid.Uint64Range(0, 40).Draw(t, "day")*dayMillis + rapid.Uint64Range(0, 2).Draw(t, "ms")}
				_, known := latest[d.kind]
				v.Size++
				require.Equal(t, !known, v.Add(d.kind, d.id, d.at))
				if all = append(all, d); d.at >= latest[d.kind] {
					latest[d.kind] = d.at
				}
			}
			again, err := ParseBucketValue(v.Append(nil))
			require.NoError(t, err)
			require.Equal(t, v.Size, again.Size)
			require.True(t, slices.Equal(v.Kinds, again.Kinds))
			require.Equal(t, uint64(len(all)), v.Counted())
		}
		want := func(at uint64, kinds ...uint32) (n uint64, days [DeadDays]uint64) {
			for _, d := range all {
				if slices.Contains(kinds, d.kind) {
					n++
					if day := at/dayMillis - d.at/dayMillis; day < DeadDays {
						days[day]++
					}
				}
			}
			return n, days
		}
		require.Len(t, v.Kinds, len(latest))
		var joined KindCount
		for _, k := range v.Kinds {
			n, days := want(latest[k.Kind], k.Kind)
			require.Equal(t, latest[k.Kind], k.At)
			require.Equal(t, n, k.Count)
			require.Equal(t, days, k.Days)
			if k.Last != (ID{}) {
				require.True(t, slices.ContainsFunc(all, func(d dead) bool { return d.id == k.Last && d.kind == k.Kind && d.at == k.At }))
			}
			joined.Join(&k)
		}
		n, days := want(joined.At, 0, 1, 2)
		require.Equal(t, n, joined.Count)
		require.Equal(t, days, joined.Days)
	})
}

// TestBucketsOfBefore: the value of a bucket without kinds is its size alone, as it was before
// there were kinds.
func TestBucketsOfBefore(t *testing.T) {
	v, err := ParseBucketValue(AppendNumber(nil, 7))
	require.NoError(t, err)
	require.Equal(t, BucketValue{Size: 7}, v)
	require.Equal(t, AppendNumber(nil, 7), v.Append(nil))
}

func FuzzParseBucket(f *testing.F) {
	v := BucketValue{Size: math.MaxUint64}
	f.Add(v.Append(nil))
	v.Add(OtherKinds, goldenID, goldenTime)
	v.Add(1, otherID, goldenTime+5*dayMillis)
	v.Add(1, goldenID, goldenTime)
	f.Add(v.Append(nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		var v BucketValue
		var err error
		testbase.BoundDecode(t, 16*len(b), func() { v, err = ParseBucketValue(b) })
		if err == nil {
			sameOrShorter(t, b, v.Append(nil))
			require.LessOrEqual(t, v.Counted(), v.Size)
		}
	})
}
