package localsocket

import (
	"context"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/manifest"
	"codeq/internal/peer"
	"codeq/internal/testkit"
)

const somebody = 65534

// TestOtherUsers: another user cannot reach the socket. If the modes of its directories are
// changed, the socket refuses that user. A program does not use a socket of another user.
func TestOtherUsers(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root may become another user")
	}
	queue, err := os.MkdirTemp("/tmp", "localsocket") // other users may enter it
	require.NoError(t, err)
	defer os.RemoveAll(queue)
	require.NoError(t, os.Chmod(queue, 0o755))
	served := 0
	s, err := Listen(Config{
		Queue: queue, Check: func() error { return nil }, ID: peer.ID{1}, Format: manifest.Format, Logger: slog.New(slog.DiscardHandler),
		Serve: func(context.Context, byte, []byte) ([]byte, error) { served++; return []byte("answer"), nil },
		Waits: func(byte) bool { return false },
	})
	require.NoError(t, err)
	dial := func() error {
		c, err := net.Dial("unix", s.Socket())
		if err != nil {
			return err
		}
		defer c.Close()
		// This is less than the time for a handshake.
		if err := c.SetReadDeadline(time.Now().Add(2 * time.Second)); err != nil {
			return err
		}
		b, err := io.ReadAll(c)
		require.Empty(t, b)
		return err
	}
	require.ErrorIs(t, testkit.AsUser(t, somebody, dial), fs.ErrPermission)
	require.NoError(t, os.Chmod(filepath.Dir(s.Socket()), 0o755))
	require.ErrorIs(t, testkit.AsUser(t, somebody, dial), fs.ErrPermission, "the socket has a mode as well")
	require.NoError(t, os.Chmod(s.Socket(), 0o666))
	require.NoError(t, testkit.AsUser(t, somebody, dial), "it is closed without a word")
	require.NoError(t, os.Chmod(filepath.Dir(s.Socket()), 0o700))

	d := &manifest.Directory{Path: queue}
	d.ID = peer.ID{1}.String()
	client := func() error {
		c, err := NewClient(d, manifest.Format, func(byte) bool { return false }, func(byte, string) error { return io.ErrUnexpectedEOF }, slog.New(slog.DiscardHandler))
		require.NoError(t, err)
		_, err = c.Call(t.Context(), 1, nil, true)
		require.NoError(t, c.Close())
		return err
	}
	require.NoError(t, client())
	require.Equal(t, 1, served)

	// Root accepts an answer from the directory's owner, but not from another user with a socket
	// there.
	require.NoError(t, os.Chown(filepath.Dir(s.Socket()), somebody, -1))
	err = client()
	require.ErrorIs(t, err, fs.ErrPermission)
	require.ErrorContains(t, err, "user 0 at the other end")
	require.NoError(t, os.Chown(filepath.Dir(s.Socket()), 0, -1))
	require.NoError(t, client())
	require.NoError(t, s.Close())

	require.NoError(t, os.Mkdir(filepath.Join(queue, dirName), 0o700))
	require.NoError(t, os.Chown(filepath.Join(queue, dirName), somebody, -1))
	_, err = Listen(Config{Queue: queue, Check: func() error { return nil }})
	require.ErrorIs(t, err, fs.ErrPermission)
	require.ErrorContains(t, err, "belongs to user 65534")
}
