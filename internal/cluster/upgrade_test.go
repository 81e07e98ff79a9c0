//go:build nextformat

package cluster

import (
	"context"
	"net"
	"strings"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq/internal/container/slowlock"
	"codeq/internal/crashfs"
	"codeq/internal/manifest"
	"codeq/internal/peer"
	"codeq/internal/testkit"
)

// TestFormatWaitsForRoom: while the disk has no room for the manifest, an entry that raises the
// format waits, until there is room, the node is about to be closed, or the group has failed. Other
// errors, and those of a node that is not open, are returned at once.
func TestFormatWaitsForRoom(t *testing.T) {
	t.Parallel()
	const before, after = manifest.OldestOfNodes, manifest.Format
	begin := func(t *testing.T, refuse func(g *Group, writes int) error) *Group {
		var g *Group
		writes := 0
		disk := &testkit.HookFS{FS: crashfs.New(), Before: func(op, name string) error {
			if g == nil || op != "write" || !strings.HasSuffix(name, manifest.TempName) {
				return nil
			}
			writes++
			return refuse(g, writes)
		}}
		d := manifest.New(disk, "dir", manifest.Manifest{Format: before, Shards: 1, ID: manifest.NewID(), Node: "a"})
		require.NoError(t, disk.MkdirAll("dir", 0o755))
		require.NoError(t, d.Write())
		g = loneGroup(disk, new(notes))
		n := g.node
		n.c.Directory, n.c.Newest = d, after
		n.membership.writing = slowlock.New()
		n.membership.ctx, n.membership.stop = context.WithCancel(n.ctx)
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		n.peer = peer.New(peer.Config{Listener: l, Groups: 1, Formats: peer.Formats{Newest: after, Least: before}})
		t.Cleanup(func() { require.NoError(t, n.peer.Close()); n.background.Wait() })
		return g
	}
	requireFormat := func(t *testing.T, g *Group, format int) {
		d := g.node.c.Directory
		require.Equal(t, format, d.Format)
		m, err := manifest.Read(d.FS, d.Path)
		require.NoError(t, err)
		require.Equal(t, format, m.Format)
	}
	t.Run("until there is room", func(t *testing.T) {
		g := begin(t, func(_ *Group, writes int) error {
			if writes < 4 {
				return syscall.ENOSPC
			}
			return nil
		})
		require.NoError(t, g.AwaitFormat(after))
		requireFormat(t, g, after)
	})
	t.Run("until the node is closed", func(t *testing.T) {
		g := begin(t, func(g *Group, writes int) error {
			if writes == 3 {
				g.node.membership.stop()
			}
			return syscall.ENOSPC
		})
		require.ErrorIs(t, g.AwaitFormat(after), syscall.ENOSPC)
		requireFormat(t, g, before)
	})
	t.Run("until the group has failed", func(t *testing.T) {
		g := begin(t, func(g *Group, writes int) error {
			if writes == 3 {
				g.Fail(errBroken)
			}
			return syscall.ENOSPC
		})
		require.ErrorIs(t, g.AwaitFormat(after), errBroken)
	})
	t.Run("another error", func(t *testing.T) {
		g := begin(t, func(*Group, int) error { return errBroken })
		require.ErrorIs(t, g.AwaitFormat(after), errBroken)
		requireFormat(t, g, before)
	})
	t.Run("not open", func(t *testing.T) {
		g := begin(t, func(*Group, int) error { return syscall.ENOSPC })
		open := g.node.peer
		g.node.peer = nil
		require.ErrorIs(t, g.AwaitFormat(after), syscall.ENOSPC)
		g.node.peer = open
		requireFormat(t, g, before)
	})
}
