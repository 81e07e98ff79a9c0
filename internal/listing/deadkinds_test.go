package listing

import (
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/keys"
)

// TestKindsAreBounded: the kinds with the most dead letters are listed, with the queues that have
// the most of them, and all others together; no dead letter is left out.
func TestKindsAreBounded(t *testing.T) {
	const kinds, shards = 2 * MostDeadKinds, 3
	parts := make([]DeadKinds, shards)
	total := uint64(0)
	for shard := range parts {
		sum := kindSum{}
		for n := range kinds {
			for queue := range 1 + n%50 {
				count := uint64(1 + n/50 + queue)
				sum.add(&DeadKind{Text: fmt.Sprint("kind ", n), Count: keys.KindCount{Count: count, At: uint64(n)}, Queues: []queueDead{{fmt.Sprint("q", queue), count}}})
				total += count
			}
		}
		sum.add(&DeadKind{Other: true, Count: keys.KindCount{Count: 7}})
		total += 7
		parts[shard].Kinds = sum.list()
		require.Len(t, parts[shard].Kinds, MostDeadKinds)
	}
	all := SumKinds(parts)
	require.Len(t, all, MostDeadKinds)
	sum := uint64(0)
	for i, k := range all {
		require.Equal(t, i == len(all)-1, k.Other)
		require.Equal(t, k.Other, k.Text == "")
		if sum += k.Count.Count; i > 0 && !k.Other {
			require.LessOrEqual(t, k.Count.Count, all[i-1].Count.Count)
		}
	}
	require.Equal(t, total, sum)
	require.Equal(t, "kind 1999", all[0].Text)
	require.Len(t, all[0].Names(), queuesOfKind)
	require.Equal(t, "q49", all[0].Names()[0])
}

// TestManyKindsOfQueue: summing up the buckets of a queue costs by their number, also if each of
// them has other kinds.
func TestManyKindsOfQueue(t *testing.T) {
	const buckets = 3000
	of := newQueueKinds(1)
	for n := range buckets {
		b := keys.BucketValue{Size: keys.MostKinds + 1}
		for k := range keys.MostKinds {
			b.Add(uint32(1+n*keys.MostKinds+k), keys.ID{1}, uint64(n))
		}
		of.add(&b)
	}
	require.Len(t, of.kinds, buckets*keys.MostKinds+1)
	require.Equal(t, uint64(buckets), of.kinds[keys.OtherKinds].Count)
}
