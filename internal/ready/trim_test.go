package ready

import (
	"math/rand/v2"
	"testing"

	"github.com/stretchr/testify/require"
)

// TestTrail compares segments with the positions of the leased tasks.
func TestTrail(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 0))
	for range 50 {
		var tr trail
		alive := make(map[uint64]bool) // by since: leased
		leased, next, taken := 0, uint64(1), int32(0)
		ready := make(map[uint64]bool)
		for range 2000 {
			switch n := rng.IntN(10); {
			case n < 5:
				since := next
				next += uint64(rng.IntN(3)) + 1
				for r := range ready { // of the tasks that are back
					since = min(since, r)
				}
				delete(ready, since)
				tr.take(since)
				taken += 10
				tr.lease(since)
				alive[since] = true
				leased++
			case n < 9:
				for since := range alive {
					tr.unlease(since)
					delete(alive, since)
					if leased--; n == 8 {
						ready[since] = true
					}
					break
				}
			default:
				first := next
				for r := range ready {
					first = min(first, r)
				}
				if rng.IntN(50) == 0 && tr.segments != nil {
					tr.segments.halve()
				}
				taken = tr.close(leased, taken)
				tr.segments.gaps(first, 1+rng.IntN(200), func(from, to uint64) {
					require.Less(t, from, to)
					require.LessOrEqual(t, to, first)
					for since := range alive {
						require.False(t, from <= since && since < to, "%d is alive between %d and %d", since, from, to)
					}
				})
			}
		}
		for since := range alive {
			tr.unlease(since)
		}
		tr.close(0, taken)
		var got [][2]uint64
		tr.segments.gaps(Never, 0, func(from, to uint64) { got = append(got, [2]uint64{from, to}) })
		require.Equal(t, [][2]uint64{{0, tr.reach}}, got, "all is dead")
	}
}
