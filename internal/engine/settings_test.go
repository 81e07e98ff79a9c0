package engine

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/keys"
	"codeq/internal/testalloc"
)

// FuzzSettings: stored settings are refused, or are such as Configure takes, and
// are stored again as the same.
func FuzzSettings(f *testing.F) {
	for _, set := range []Settings{
		{},
		{Paused: true, Concurrency: 3, Rate: 0.5, Burst: 2, TenantWeights: map[string]int{"t": 2}},
		{ConcurrencyPerKey: 1, Retention: -1, DeadRetention: time.Hour, HoldGroups: true},
	} {
		value, err := json.Marshal(set)
		require.NoError(f, err)
		f.Add(value)
		f.Add(keys.SettingsValue{Version: 300, JSON: value}.Append(nil))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var c Configured
		var err error
		testalloc.Decode(t, len(b), func() { c, err = ParseSettings(b) })
		if err != nil {
			return
		}
		require.NoError(t, c.Settings.Check())
		require.Positive(t, c.Settings.BurstSize())
		value, err := json.Marshal(c.Settings)
		require.NoError(t, err)
		again, err := ParseSettings(keys.SettingsValue{Version: c.Version, JSON: value}.Append(nil))
		require.NoError(t, err)
		require.Equal(t, c.Version, again.Version)
		after, err := json.Marshal(again.Settings)
		require.NoError(t, err)
		require.Equal(t, string(value), string(after))
	})
}
