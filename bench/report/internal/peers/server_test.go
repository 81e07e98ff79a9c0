package peers

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A server and its children use CPU time together, and end together.
func TestServer(t *testing.T) {
	dir := t.TempDir()
	pids := filepath.Join(dir, "pids")
	// The child spins, and is no job of an interactive shell: it stays in the group.
	s, err := startServer(t.Context(), dir, nil, syscall.SIGTERM, func(context.Context) error {
		_, err := os.Stat(pids)
		return err
	}, "/bin/sh", "-c", "(while :; do :; done) & echo $! >pids.new; mv pids.new pids; wait")
	require.NoError(t, err)
	t.Cleanup(func() { _ = s.stop() })
	require.Eventually(t, func() bool { return s.cpu() > 0 }, 20*time.Second, 10*time.Millisecond)
	text, err := os.ReadFile(pids)
	require.NoError(t, err)
	var child int
	_, err = fmt.Sscan(string(text), &child)
	require.NoError(t, err)
	require.NoError(t, syscall.Kill(child, 0))
	require.NoError(t, s.stop())
	require.Eventually(t, func() bool { return ended(child) }, 20*time.Second, 10*time.Millisecond)
}

// ended is true of a zombie, too, which waits for its new parent.
func ended(pid int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return true
	}
	var name, state string
	_, err = fmt.Sscan(string(b), &pid, &name, &state)
	return err == nil && state == "Z"
}

// A program that ends before it is ready is an error with its output.
func TestServerFails(t *testing.T) {
	never := func(context.Context) error { return errors.New("not ready") }
	_, err := startServer(t.Context(), t.TempDir(), nil, syscall.SIGTERM, never, "/bin/sh", "-c", "echo first; echo no such data; exit 3")
	require.ErrorContains(t, err, "/bin/sh ended at its start: no such data")

	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = startServer(ctx, t.TempDir(), nil, syscall.SIGTERM, never, "/bin/sleep", "60")
	require.ErrorIs(t, err, context.Canceled)
}
