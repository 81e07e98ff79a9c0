package peer

import (
	"fmt"
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// formatted starts a Node that knows and requires formats.
func (nw *network) formatted(t *testing.T, name string, f Formats) *Node {
	n := New(Config{
		Identity: identityOf(name), Listener: nw.listen(name), Dial: nw.dial, Groups: 2, Handler: echo, Timeout: testTimeout, Formats: f,
	})
	t.Cleanup(func() { require.NoError(t, n.Close()) })
	return n
}

// dialRaft opens a connection of Raft to a node.
func dialRaft(t *testing.T, n *Node, to string) net.Conn {
	t.Helper()
	c, err := n.Group(0).Dial(at(to).RaftAddress(), time.Second)
	require.NoError(t, err)
	return c
}

// TestFormatsAreTold: both sides of a connection learn the formats of the other.
func TestFormatsAreTold(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		a, b := nw.formatted(t, "a", Formats{6, 5}), nw.formatted(t, "b", Formats{7, 5})
		require.Zero(t, a.NewestOf(identityOf("b").ID))
		_, err := a.Call(t.Context(), at("b"), 1, nil)
		require.NoError(t, err)
		require.Equal(t, 7, a.NewestOf(identityOf("b").ID))
		require.Equal(t, 6, b.NewestOf(identityOf("a").ID))

		// An introduced node may have any identity.
		c := nw.formatted(t, "c", Formats{6, 5})
		_, err = c.Introduce(t.Context(), at("b"), 1, nil)
		require.NoError(t, err)
		require.Equal(t, 7, c.NewestOf(identityOf("b").ID))
		require.Zero(t, b.NewestOf(identityOf("c").ID))
	})
}

// TestProgramsAreForgotten: a Node serves programs, each with a new ID, and keeps nothing of them
// after the end of their connections.
func TestProgramsAreForgotten(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		server := New(Config{Identity: identityOf("a"), Listener: nw.listen("a"), Timeout: testTimeout})
		for i := range 100 {
			program := New(Config{Identity: identityOf(fmt.Sprint("program ", i)), Dial: nw.dial, Timeout: testTimeout})
			_, err := program.Call(t.Context(), at("a"), 1, nil)
			require.Error(t, err, "there is no handler")
			require.Positive(t, program.NewestOf(identityOf("a").ID))
			require.NoError(t, program.Close())
		}
		synctest.Wait()
		require.Empty(t, server.conns)
		require.Empty(t, server.newest)
		require.Empty(t, server.admitted)
		require.NoError(t, server.Close())
	})
}

// TestOldNode: a node of an older build is understood, in both directions, until its cluster
// requires more.
func TestOldNode(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		old, a := nw.formatted(t, "old", Formats{4, 4}), nw.formatted(t, "a", Formats{5, 4})
		dialed, accepted := dialRaft(t, a, "old"), dialRaft(t, old, "a")
		synctest.Wait()
		require.Equal(t, 4, a.NewestOf(identityOf("old").ID))

		a.Require(5)
		for _, c := range []net.Conn{dialed, accepted} {
			_, err := c.Read(make([]byte, 1))
			require.Error(t, err, "the connection goes on")
		}
		want := &RefusedError{RefusedFormat, `node "old" knows format 4, the cluster of node "a" has format 5`}
		for _, d := range []struct {
			by *Node
			to string
		}{{a, "old"}, {old, "a"}} {
			_, err := d.by.Group(0).Dial(at(d.to).RaftAddress(), time.Second)
			var refused *RefusedError
			require.ErrorAs(t, err, &refused)
			require.Equal(t, want, refused)
			require.Equal(t, want, d.by.Failure(at(d.to)).(interface{ Unwrap() error }).Unwrap())
		}
	})
}

// TestRequire: after a node begins to require a format, it tells each other node before Raft sends
// more to that node. Connections of calls go on.
func TestRequire(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		a, b := nw.formatted(t, "a", Formats{6, 5}), nw.formatted(t, "b", Formats{6, 5})
		raised := 0
		b.c.Raise = func(format int) error { raised = format; return nil }
		_, err := a.Call(t.Context(), at("b"), 1, nil)
		require.NoError(t, err)
		before := dialRaft(t, a, "b")
		a.Require(6)
		_, err = before.Write([]byte{1})
		require.Error(t, err)
		dials := nw.dials
		_, err = a.Call(t.Context(), at("b"), 1, nil)
		require.NoError(t, err)
		require.Equal(t, dials, nw.dials)
		require.Zero(t, raised)
		dialRaft(t, a, "b")
		require.Equal(t, 6, raised)
		require.Equal(t, Formats{6, 6}, b.formats)

		// A dialing node is told the format as well. It gives up if it cannot change to it.
		c := nw.formatted(t, "c", Formats{6, 5})
		dialRaft(t, c, "a")
		require.Equal(t, Formats{6, 6}, c.formats)
		d := nw.formatted(t, "d", Formats{6, 5})
		d.c.Raise = func(int) error { return io.ErrShortWrite }
		_, err = d.Group(0).Dial(at("a").RaftAddress(), time.Second)
		require.ErrorContains(t, err, "format 6: short write")

		// Introductions raise no format.
		e := nw.formatted(t, "e", Formats{6, 5})
		_, err = e.Introduce(t.Context(), at("a"), 1, nil)
		require.NoError(t, err)
		require.Equal(t, Formats{6, 5}, e.formats)
		old := nw.formatted(t, "old", Formats{5, 5})
		_, err = old.Introduce(t.Context(), at("a"), 1, nil)
		require.ErrorContains(t, err, `node "old" knows format 5, the cluster of node "a" has format 6`)
	})
}
