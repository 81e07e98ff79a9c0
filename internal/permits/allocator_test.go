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
