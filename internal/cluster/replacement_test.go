package cluster

import (
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// TestOneReplacement: a leader permits one replacement until it ends, or is confirmed no more; its
// first message may come late.
func TestOneReplacement(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const lease = 10 * time.Second
		var r replacement
		began := time.Now()
		try := func(how Change, token string) error {
			return r.change(how, Peer{Node: "old", Address: "new", ID: token}, began, lease)
		}
		require.ErrorIs(t, try(BeginReplacement, "a"), errReplacing, "another one may be under way")
		require.NoError(t, try(KeepReplacement, "b"), "it is")
		time.Sleep(lease - 1)
		require.NoError(t, try(BeginReplacement, "b"), "again")
		require.ErrorContains(t, try(BeginReplacement, "a"), `that of node "old" by "new" is under way`)
		require.ErrorIs(t, try(KeepReplacement, "a"), errReplacing)
		require.NoError(t, try(EndReplacement, "a"))
		require.ErrorIs(t, try(BeginReplacement, "a"), errReplacing)
		require.NoError(t, try(EndReplacement, "b"))
		time.Sleep(time.Nanosecond)
		require.ErrorIs(t, try(KeepReplacement, "b"), errReplacing, "it is late, and has ended")
		require.NoError(t, try(BeginReplacement, "a"))
		time.Sleep(lease - 1)
		require.ErrorIs(t, try(BeginReplacement, "b"), errReplacing)
		time.Sleep(time.Nanosecond)
		require.NoError(t, try(BeginReplacement, "b"))
		require.ErrorIs(t, try(KeepReplacement, "a"), errReplacing, "it was not confirmed")
	})
}
