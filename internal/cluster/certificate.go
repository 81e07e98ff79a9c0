package cluster

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"slices"

	"codeq/internal/guard"
)

// A certificate is valid for a node if the node's name is one of its subject alternative names (DNS
// names or URIs).

// checkCertificate returns an error if a node would present a certificate that is not valid for its
// name, as far as that can be seen. As a server it needs a valid one from GetCertificate or in
// Certificates; as a client, if it must present one, from GetClientCertificate. A certificate that
// a function does not return outside of a handshake is not checked, nor is the configuration of
// GetConfigForClient. Without TLS there is no error.
func checkCertificate(c *tls.Config, node string, anonymous bool) error {
	if c == nil {
		return nil
	}
	if c.GetConfigForClient == nil {
		var got *tls.Certificate
		if c.GetCertificate != nil {
			got = try(func() (*tls.Certificate, error) { return c.GetCertificate(new(tls.ClientHelloInfo)) })
		}
		if err := anyFor(node, c.Certificates, got, c.GetCertificate != nil); err != nil {
			return err
		}
	}
	switch {
	case anonymous:
	case c.GetClientCertificate != nil:
		got := try(func() (*tls.Certificate, error) { return c.GetClientCertificate(new(tls.CertificateRequestInfo)) })
		return anyFor(node, nil, got, true)
	default:
		return anyFor(node, c.Certificates, nil, false)
	}
	return nil
}

// try returns the certificate of a function of the user; nil: the function has none now.
func try(get func() (*tls.Certificate, error)) (got *tls.Certificate) {
	guard.RunUser("question for a certificate", func() {
		if c, err := get(); err == nil {
			got = c
		}
	}, func(any, []byte) {})
	return got
}

// anyFor returns an error if no certificate is valid for the node. No certificate at all is no
// error if others may come later.
func anyFor(node string, known []tls.Certificate, got *tls.Certificate, later bool) error {
	if got != nil {
		known = append(slices.Clone(known), *got)
	}
	var names []string
	for i := range known {
		leaf, err := leafOf(&known[i])
		if err != nil {
			return err
		}
		names = append(names, namesOf(leaf)...)
	}
	switch {
	case slices.Contains(names, node), len(known) == 0 && later:
		return nil
	case len(known) == 0:
		return errors.New("no certificate")
	}
	return fmt.Errorf("a certificate for %q", names)
}

func leafOf(c *tls.Certificate) (*x509.Certificate, error) {
	switch {
	case c.Leaf != nil:
		return c.Leaf, nil
	case len(c.Certificate) == 0:
		return nil, errors.New("a certificate that is empty")
	}
	return x509.ParseCertificate(c.Certificate[0])
}

// namesOf lists the names that a certificate is valid for.
func namesOf(c *x509.Certificate) []string {
	names := slices.Clone(c.DNSNames)
	for _, uri := range c.URIs {
		names = append(names, uri.String())
	}
	return names
}

// verifyName is peer.Config.Verify: it refuses a certificate for another node.
func (c *Config) verifyName(conn net.Conn, name string, accepted bool) error {
	t, ok := conn.(*tls.Conn)
	if !ok || accepted && c.AllowAnonymous {
		return nil
	}
	certs := t.ConnectionState().PeerCertificates
	if len(certs) == 0 {
		return errors.New("there is none")
	}
	if names := namesOf(certs[0]); !slices.Contains(names, name) {
		return fmt.Errorf("it is for %q", names)
	}
	return nil
}
