package permits

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// TestTokensComeBack: another shard gets at once the tokens that a shard has not used.
func TestTokensComeBack(t *testing.T) {
	now := time.UnixMilli(0)
	a := NewAllocator(2)
	a.Set(Limits{Rate: 0.001, Burst: 9}, true, now)
	for shard := range 2 {
		require.True(t, a.Ask(shard))
		require.True(t, a.Reported(shard, &Report{Epoch: 1, Seq: 1}, now))
	}
	granted := func(shard int, r Request) int {
		require.True(t, a.Hear(shard, &r, now))
		answers, _ := a.Allot(now)
		require.Len(t, answers, 1)
		require.Equal(t, shard, answers[0].Shard)
		return answers[0].Granted
	}
	require.Equal(t, 9, granted(0, Request{Report: Report{Epoch: 1, Seq: 2}, Want: 20}))
	require.Zero(t, granted(1, Request{Report: Report{Epoch: 1, Seq: 2}, Want: 20}))
	require.Zero(t, granted(0, Request{Report: Report{Epoch: 1, Seq: 3, Spent: 2}}))
	require.Equal(t, 7, granted(1, Request{Report: Report{Epoch: 1, Seq: 3}, Want: 20}))
}

// TestPermitsByShares: shards that wait all the time get permits in proportion to their shares, one
// by one or many at once; one that comes later does not catch up.
func TestPermitsByShares(t *testing.T) {
	for _, most := range []int{1, 7} {
		now, shares := time.UnixMilli(0), []uint64{1000, 3000, 0, 2000}
		shares[2] = 1 // of a node that does not say it
		a := NewAllocator(len(shares))
		a.Set(Limits{Concurrency: most}, true, now)
		requests := make([]Request, len(shares))
		ask := func(shard int) {
			r := &requests[shard]
			r.Seq++
			r.Want, r.Rank, r.Share = most, 1, shares[shard]
			require.True(t, a.Hear(shard, r, now))
		}
		got := make([]int, len(shares))
		grant := func() {
			answers, _ := a.Allot(now)
			for _, d := range answers {
				got[d.Shard] += d.Granted
				defer ask(d.Shard) // its permits were used
			}
		}
		for shard := range shares {
			require.True(t, a.Ask(shard))
			require.True(t, a.Reported(shard, &Report{Epoch: 1, Seq: 1}, now))
			requests[shard].Report = Report{Epoch: 1, Seq: 1}
			if shard < 3 {
				ask(shard)
			}
		}
		const rounds = 4000
		for range rounds {
			grant()
		}
		require.InDelta(t, rounds/4, got[0]/most, 2)
		require.InDelta(t, rounds*3/4, got[1]/most, 2)
		require.Less(t, got[2]/most, 10)
		ask(3)
		clear(got)
		for range rounds {
			grant()
		}
		require.InDelta(t, rounds/6, got[0]/most, 3)
		require.InDelta(t, rounds/3, got[3]/most, 3)
	}
}

// TestPermitsByPriority: of the shards that wait, the one with the most urgent task goes first.
func TestPermitsByPriority(t *testing.T) {
	now := time.UnixMilli(0)
	a := NewAllocator(3)
	a.Set(Limits{Concurrency: 1}, true, now)
	for shard := range 3 {
		require.True(t, a.Ask(shard))
		require.True(t, a.Reported(shard, &Report{Epoch: 1, Seq: 1}, now))
		require.True(t, a.Hear(shard, &Request{
			Report: Report{Epoch: 1, Seq: 2}, Want: 1, Wait: true, Rank: []uint64{1, 3, 2}[shard], Share: []uint64{9000, 1, 9000}[shard],
		}, now))
	}
	for _, shard := range []int{1, 2, 0} {
		answers, _ := a.Allot(now)
		require.Contains(t, answers, Decision{Shard: shard, Answer: Answer{Granted: 1}})
		require.True(t, a.Hear(shard, &Request{Report: Report{Epoch: 1, Seq: 3}}, now), "it was used")
	}
}
