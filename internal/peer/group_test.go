package peer

import (
	"io"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"
)

func TestGroupConnection(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		a, b := nw.node(t, "a", nil), nw.node(t, "b", nil)
		groups := []raft.StreamLayer{b.Group(0), b.Group(1)}
		require.Equal(t, "b", groups[0].Addr().String())
		dialed, err := a.Group(1).Dial(at("b").RaftAddress(), 0)
		require.NoError(t, err)
		accepted, err := groups[1].Accept()
		require.NoError(t, err)

		// No deadline of the handshake is left, and Close of the group does not close its
		// connections.
		require.NoError(t, groups[1].Close())
		time.Sleep(10 * testTimeout)
		for _, end := range [][2]net.Conn{{dialed, accepted}, {accepted, dialed}} {
			go func() { _, _ = io.WriteString(end[0], "hello") }()
			buf := make([]byte, 5)
			_, err = io.ReadFull(end[1], buf)
			require.NoError(t, err)
			require.Equal(t, "hello", string(buf))
		}
		_, err = groups[1].Accept()
		require.ErrorIs(t, err, net.ErrClosed)

		// Close of the Node ends them.
		require.NoError(t, b.Close())
		_, err = dialed.Read(make([]byte, 1))
		require.ErrorIs(t, err, io.EOF)
		_, err = accepted.Write([]byte("x"))
		require.ErrorIs(t, err, io.ErrClosedPipe)
		_, err = groups[0].Accept()
		require.ErrorIs(t, err, net.ErrClosed)
		_, err = b.Group(0).Dial(at("a").RaftAddress(), 0)
		require.Error(t, err)
		require.NoError(t, dialed.Close())
		requireNoConns(t, a)
	})
}

func TestCloseOfGroupEndsAccept(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		a, b := nw.node(t, "a", nil), nw.node(t, "b", nil)
		g := b.Group(0)
		ended := make(chan error)
		go func() {
			_, err := g.Accept()
			ended <- err
		}()
		synctest.Wait()
		require.NoError(t, g.Close())
		require.NoError(t, g.Close())
		require.ErrorIs(t, <-ended, net.ErrClosed)

		// A connection without an Accept is closed.
		dialed, err := a.Group(0).Dial(at("b").RaftAddress(), 0)
		require.NoError(t, err)
		defer dialed.Close()
		begin := time.Now()
		synctest.Wait()
		for range 20 {
			_, err = g.Accept()
			require.ErrorIs(t, err, net.ErrClosed)
		}
		_, err = dialed.Read(make([]byte, 1))
		require.ErrorIs(t, err, io.EOF)
		require.Equal(t, testTimeout, time.Since(begin))

		// The group may be opened again.
		again, err := a.Group(0).Dial(at("b").RaftAddress(), 0)
		require.NoError(t, err)
		defer again.Close()
		accepted, err := b.Group(0).Accept()
		require.NoError(t, err)
		require.NoError(t, accepted.Close())
	})
}

func TestFilesOfAGroup(t *testing.T) {
	inNetwork(t, func(t *testing.T, nw *network) {
		a := nw.node(t, "a", nil)
		groups := make(chan int, 1)
		b := New(Config{
			Identity: identityOf("b"), Listener: nw.listen("b"), Dial: nw.dial, Groups: 2, Timeout: testTimeout,
			Files: func(group int, from net.Conn) {
				groups <- group
				_, _ = io.CopyN(from, from, 5)
			},
		})
		c, err := a.OpenFiles(t.Context(), at("b"), 1)
		require.NoError(t, err)
		require.Equal(t, 1, <-groups)
		time.Sleep(10 * testTimeout) // no deadline of the handshake is left
		go func() { _, _ = io.WriteString(c, "hello") }()
		got, err := io.ReadAll(c) // the connection ends when Files returns
		require.NoError(t, err)
		require.Equal(t, "hello", string(got))
		require.NoError(t, c.Close())

		_, err = a.OpenFiles(t.Context(), at("b"), 2)
		var refused *RefusedError
		require.ErrorAs(t, err, &refused)
		require.Equal(t, RefusedGroup, refused.Reason)

		// Close of the Node ends those that are open.
		c, err = a.OpenFiles(t.Context(), at("b"), 0)
		require.NoError(t, err)
		require.NoError(t, b.Close())
		_, err = c.Read(make([]byte, 1))
		require.ErrorIs(t, err, io.EOF)
		require.NoError(t, c.Close())
		_, err = a.OpenFiles(t.Context(), at("b"), 0)
		require.Error(t, err)
	})
}
