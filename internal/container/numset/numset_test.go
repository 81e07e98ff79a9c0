package numset

import (
	"maps"
	"slices"
	"testing"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"
)

func numbers(s *Set) []uint32 {
	var all []uint32
	for n, ok := s.Next(0); ok; n, ok = s.Next(n + 1) {
		all = append(all, n)
	}
	return all
}

func TestSet(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var set, other Set
		want, without := make(map[uint32]bool), make(map[uint32]bool)
		number := rapid.OneOf(rapid.Uint32Range(0, 200), rapid.Uint32Range(0, 1<<16))
		for range rapid.IntRange(0, 300).Draw(t, "steps") {
			n := number.Draw(t, "n")
			switch rapid.IntRange(0, 4).Draw(t, "step") {
			case 0:
				set.Remove(n)
				delete(want, n)
			case 1:
				least := uint32(0)
				for want[least] {
					least++
				}
				require.Equal(t, least, set.Take())
				want[least] = true
			case 2:
				other.Add(n)
				without[n] = true
			default:
				set.Add(n)
				want[n] = true
			}
			require.Equal(t, want[n], set.Has(n))
			require.Equal(t, len(want), set.Len())
		}
		require.Equal(t, slices.Sorted(maps.Keys(want)), numbers(&set))
		maps.DeleteFunc(want, func(n uint32, _ bool) bool { return without[n] })
		left := set.Without(&other)
		require.Equal(t, slices.Sorted(maps.Keys(want)), numbers(&left))
		require.Equal(t, len(want), left.Len())
	})
}
