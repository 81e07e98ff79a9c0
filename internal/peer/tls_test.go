package peer

import (
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"codeq/internal/testcert"
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
	ours, theirs := testcert.New(t), testcert.New(t)
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
