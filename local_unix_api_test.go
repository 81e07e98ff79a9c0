//go:build unix

package codeq_test

import (
	"errors"
	"io"
	"net"
	"runtime"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"

	"codeq"
	"codeq/internal/testkit"
)

// TestLocalConnections: of ten thousand connections some are let in, and the others are told why
// they are not. The process goes on meanwhile, and serves others when they have gone.
func TestLocalConnections(t *testing.T) {
	var limit syscall.Rlimit
	require.NoError(t, syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit))
	n := min(testkit.Sized(1000, 10_000, 10_000), int(limit.Cur)-1000)
	s := openServed(t, t.TempDir(), codeq.Options{Shards: 1})
	socket, stop := s.serve(t)
	first := s.client(t)
	conns := make([]net.Conn, n)
	for i := range conns {
		c, err := net.Dial("unix", socket)
		for errors.Is(err, syscall.EAGAIN) { // more come than are accepted
			runtime.Gosched()
			c, err = net.Dial("unix", socket)
		}
		require.NoError(t, err)
		conns[i] = c
		if i%1000 == 0 {
			produce(t, s.Queue, codeq.Task{Queue: "a"})
		}
	}
	turnedAway := 0
	for _, c := range conns[100:] {
		text, err := io.ReadAll(c)
		require.NoError(t, err)
		require.Contains(t, string(text), "there are 100 connections")
		turnedAway++
	}
	require.Positive(t, turnedAway)
	produce(t, first, codeq.Task{Queue: "a"})
	_, err := codeq.OpenLocal(t.Context(), s.dir)
	require.ErrorIs(t, err, codeq.ErrNotServed)
	require.ErrorContains(t, err, "there are 100 connections")
	for _, c := range conns {
		require.NoError(t, c.Close())
	}
	for { // until the process has noticed
		c, err := codeq.OpenLocal(t.Context(), s.dir)
		if err == nil {
			require.NoError(t, c.Close())
			break
		}
		require.ErrorIs(t, err, codeq.ErrNotServed)
	}
	require.NoError(t, stop())
}
