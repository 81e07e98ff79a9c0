package broadcast

import (
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/engine"
)

// TestInterestsHalfStored: when a set was stored in some shards only, the next one is stored in
// all, also if it is the one from before.
func TestInterestsHalfStored(t *testing.T) {
	ctx := t.Context()
	w := NewInterests()
	var shards [2]engine.KindSet
	set := func(kinds engine.KindSet, broken bool) error {
		return w.Set(ctx, kinds, func() engine.KindSet { return 0 }, func(all engine.KindSet) error {
			for i := range shards {
				if broken && i == 1 {
					return errors.New("it was given up")
				}
				shards[i] = all
			}
			return nil
		})
	}
	require.NoError(t, set(3, false))
	require.Error(t, set(1, true))
	require.Equal(t, [2]engine.KindSet{1, 3}, shards)
	require.NoError(t, set(3, false))
	require.Equal(t, [2]engine.KindSet{3, 3}, shards)
	shards = [2]engine.KindSet{}
	require.NoError(t, set(3, false))
	require.Equal(t, [2]engine.KindSet{}, shards, "what is stored is not stored again")
}
