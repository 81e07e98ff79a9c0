package peer

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/testbase"
)

// tlsNode listens on a port of the loopback interface and returns its address too.
func tlsNode(t *testing.T, name string, config *tls.Config) (*Node, string) {
	l, err := tls.Listen("tcp", "127.0.0.1:0", config)
	require.NoError(t, err)
	dialer := tls.Dialer{Config: config}
	n := New(Config{
		Identity: identityOf(name), Listener: l, Groups: 1, Handler: echo, Timeout: time.Minute,
		Dial: func(ctx context.Context, addr string) (net.Conn, error) { return dialer.DialContext(ctx, "tcp", addr) },
	})
	t.Cleanup(func() { require.NoError(t, n.Close()) })
	return n, l.Addr().String()
}

func TestMutualTLS(t *testing.T) {
	ours, theirs := testbase.NewAuthority(t), testbase.NewAuthority(t)
	a, _ := tlsNode(t, "a", ours.Config(t, ours))
	b, addr := tlsNode(t, "b", ours.Config(t, ours))

	var callers sync.WaitGroup
	for i := range 8 {
		callers.Go(func() {
			for j := range 50 {
				body := bytes.Repeat(fmt.Append(nil, i, j), 1+j*j)
				reply, err := a.Call(t.Context(), Target{identityOf("b").ID, "b", addr}, 1, body)
				if err != nil || !bytes.Equal(body, reply) {
					t.Errorf("%d %d: %d bytes, %v", i, j, len(reply), err)
				}
			}
		})
	}
	callers.Wait()

	dialed, err := a.Group(0).Dial(Target{identityOf("b").ID, "b", addr}.RaftAddress(), 0)
	require.NoError(t, err)
	_, err = io.WriteString(dialed, "hello")
	require.NoError(t, err)
	require.NoError(t, dialed.Close())
	accepted, err := b.Group(0).Accept()
	require.NoError(t, err)
	got, err := io.ReadAll(accepted)
	require.NoError(t, err)
	require.Equal(t, "hello", string(got))

	// A stranger trusts b, but b does not trust it.
	stranger, _ := tlsNode(t, "stranger", theirs.Config(t, ours))
	_, err = stranger.Call(t.Context(), Target{identityOf("b").ID, "b", addr}, 1, nil)
	requireNotSent(t, err)
}

// TestTLSBesideNone: a node with TLS and a node without it both report the difference, in either
// direction.
func TestTLSBesideNone(t *testing.T) {
	ca := testbase.NewAuthority(t)
	secure, at := tlsNode(t, "secure", ca.Config(t, ca))
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	plain := New(Config{
		Identity: identityOf("plain"), Listener: l, Groups: 1, Handler: echo, Timeout: time.Minute,
		Dial: func(ctx context.Context, addr string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "tcp", addr)
		},
	})
	defer func() { require.NoError(t, plain.Close()) }()
	_, err = plain.Call(t.Context(), Target{identityOf("secure").ID, "secure", at}, 1, nil)
	requireNotSent(t, err)
	require.ErrorContains(t, err, "set Cluster.TLS")
	_, err = secure.Call(t.Context(), Target{identityOf("plain").ID, "plain", l.Addr().String()}, 1, nil)
	requireNotSent(t, err)
	_, ok := errors.AsType[tls.RecordHeaderError](err)
	require.True(t, ok, "%v", err)
}

// TestBadHandshakesAreCounted: connections without TLS, from a stranger, or with an immediate end
// are a few lines in the log. Close does not wait for a silent connection.
func TestBadHandshakesAreCounted(t *testing.T) {
	ours, theirs := testbase.NewAuthority(t), testbase.NewAuthority(t)
	nameless := ours.Config(t, ours)
	nameless.Certificates = nil
	l, err := tls.Listen("tcp", "127.0.0.1:0", ours.Config(t, ours))
	require.NoError(t, err)
	var log bytes.Buffer
	n := New(Config{
		Identity: identityOf("a"), Listener: l, Groups: 1, Handler: echo, Timeout: time.Hour,
		Logger: slog.New(slog.NewTextHandler(&log, nil)),
	})
	const attempts = 100
	for range attempts {
		for _, config := range []*tls.Config{theirs.Config(t, ours), nameless} {
			if c, err := tls.Dial("tcp", l.Addr().String(), config); err == nil { // it is refused after its part
				_, err = c.Read(make([]byte, 1))
				require.Error(t, err)
				_ = c.Close()
			}
		}
		c, err := net.Dial("tcp", l.Addr().String())
		require.NoError(t, err)
		_, _ = io.WriteString(c, "GET / HTTP/1.1\r\n\r\n")
		_, _ = io.Copy(io.Discard, c)
		require.NoError(t, c.Close())
	}
	silent, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	defer func() { _ = silent.Close() }()
	require.NoError(t, n.Close())
	for _, cause := range []string{"unknown authority", "provide a certificate", "does not look like a TLS handshake"} {
		require.Contains(t, log.String(), cause)
	}
	require.LessOrEqual(t, strings.Count(log.String(), "\n"), logFull+1+attempts/10) // a slow run takes several intervals
}

// TestTLSWithoutAnswer: programs that use TLS, and are dialed without, may close the connection, or
// send an alert.
func TestTLSWithoutAnswer(t *testing.T) {
	for _, answer := range []string{"", "\x15\x03\x01\x00\x02\x02\x0a"} {
		_, err := readAnswer(strings.NewReader(answer))
		require.ErrorContains(t, err, "set Cluster.TLS on all nodes", "%q", answer)
	}
}
