package peer

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"fmt"
	"io"
	"math/big"
	"net"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/raft"
	"github.com/stretchr/testify/require"
)

// authority signs certificates for 127.0.0.1.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newAuthority(t *testing.T) authority {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "authority"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	require.NoError(t, err)
	cert, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	return authority{cert, key}
}

// config has a certificate of a, and trusts those of peers.
func (a authority) config(t *testing.T, peers authority) *tls.Config {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "node"},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour),
		KeyUsage:    x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	}, a.cert, &key.PublicKey, a.key)
	require.NoError(t, err)
	pool := x509.NewCertPool()
	pool.AddCert(peers.cert)
	return &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}},
		RootCAs:      pool, ClientCAs: pool, ClientAuth: tls.RequireAndVerifyClientCert,
	}
}

// tlsNode listens on a port of the loopback interface and returns its address too.
func tlsNode(t *testing.T, name string, config *tls.Config) (*Node, string) {
	l, err := tls.Listen("tcp", "127.0.0.1:0", config)
	require.NoError(t, err)
	dialer := tls.Dialer{Config: config}
	n := New(Config{
		Name: name, Listener: l, Groups: 1, Handler: echo, Timeout: time.Minute,
		Dial: func(ctx context.Context, addr string) (net.Conn, error) { return dialer.DialContext(ctx, "tcp", addr) },
	})
	t.Cleanup(func() { require.NoError(t, n.Close()) })
	return n, l.Addr().String()
}

func TestMutualTLS(t *testing.T) {
	ours, theirs := newAuthority(t), newAuthority(t)
	a, _ := tlsNode(t, "a", ours.config(t, ours))
	b, addr := tlsNode(t, "b", ours.config(t, ours))

	var callers sync.WaitGroup
	for i := range 8 {
		callers.Go(func() {
			for j := range 50 {
				body := bytes.Repeat(fmt.Append(nil, i, j), 1+j*j)
				reply, err := a.Call(t.Context(), addr, 1, body)
				if err != nil || !bytes.Equal(body, reply) {
					t.Errorf("%d %d: %d bytes, %v", i, j, len(reply), err)
				}
			}
		})
	}
	callers.Wait()

	dialed, err := a.Group(0).Dial(raft.ServerAddress(addr), 0)
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
	stranger, _ := tlsNode(t, "stranger", theirs.config(t, ours))
	_, err = stranger.Call(t.Context(), addr, 1, nil)
	requireNotSent(t, err)
}
