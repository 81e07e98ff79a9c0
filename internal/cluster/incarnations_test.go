package cluster

import (
	"context"
	"errors"
	"log/slog"
	"testing"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/stretchr/testify/require"

	"codeq/internal/base"
	"codeq/internal/container/slowlock"
	"codeq/internal/crashfs"
	"codeq/internal/manifest"
	"codeq/internal/peer"
	"codeq/internal/testkit"
)

// TestMeeting: the incarnations of others that a node has met are on its disk; those that are not
// there do not count. It remembers no more of those that are no members than it may.
func TestMeeting(t *testing.T) {
	require.Equal(t, peer.MaxIncarnations, manifest.MaxIncarnations+1)
	disk := crashfs.New()
	var broken error
	fs := &testkit.HookFS{FS: disk, Before: func(string, string) error { return broken }}
	require.NoError(t, manifest.MakeDirectory(fs, "q"))
	d := manifest.New(fs, "q", manifest.Manifest{Format: manifest.Format, Shards: 1, Node: "n", Cluster: "c"})
	n := &Node{c: Config{Directory: d}, log: slog.New(slog.DiscardHandler)}
	n.membership.writing = slowlock.New()
	seen := func() map[string]uint64 {
		m, err := manifest.Read(disk.CrashClone(vfs.CrashCloneCfg{}), "q")
		require.NoError(t, err)
		return m.Seen
	}
	a := peer.ID{1}.String()
	require.NoError(t, n.see(t.Context(), a, []uint64{3, 5}))
	require.Equal(t, map[string]uint64{a: 5}, seen())
	require.ErrorIs(t, n.see(t.Context(), a, []uint64{4, 6}), base.ErrOldCopy)

	broken = errors.New("broken")
	require.NoError(t, n.see(t.Context(), a, []uint64{3, 5}), "nothing is new")
	for range 2 {
		require.ErrorIs(t, n.see(t.Context(), a, []uint64{3, 5, 7}), broken)
	}
	broken = nil
	require.NoError(t, n.see(t.Context(), a, []uint64{3, 5, 8}), "incarnation 7 was not relied on")
	require.Equal(t, map[string]uint64{a: 8}, seen())

	n.membership.writing.Lock() // on a disk that hangs
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	require.ErrorIs(t, n.see(ctx, a, []uint64{9}), peer.ErrEarly)
	n.membership.writing.Unlock()

	n.ready.Store(true)
	for i := range 3 * maxSeen {
		b := peer.ID{2, byte(i)}.String()
		require.NoError(t, n.see(t.Context(), b, []uint64{1}))
		require.Contains(t, seen(), b)
		require.LessOrEqual(t, len(seen()), maxSeen)
	}
}
