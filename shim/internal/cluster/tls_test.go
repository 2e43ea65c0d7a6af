package cluster

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"holdfast/config"
	"holdfast/internal/etcdtest"
	"holdfast/registry"
)

// TestLeaseHasWholeSeconds: etcd counts in seconds, and a node must not take its lease for valid for longer.
func TestLeaseHasWholeSeconds(t *testing.T) {
	n, err := NewNode(Options{Cluster: config.Cluster{Endpoints: []string{"http://127.0.0.1:1"}, LeaseTTL: 2900 * time.Millisecond}})
	if err != nil {
		t.Fatal(err)
	}
	if err := n.Close(); err != nil || n.session.ttl != 2*time.Second {
		t.Errorf("%v, %v", n.session.ttl, err)
	}
}

// authority signs certificates.
type authority struct {
	dir  string
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

// newAuthority writes the certificate of a new authority to ca.pem in dir.
func newAuthority(t *testing.T, dir string) *authority {
	t.Helper()
	a := &authority{dir: dir}
	a.cert, a.key = a.sign(t, "ca", &x509.Certificate{IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign})
	return a
}

// sign writes a certificate and its key to NAME.pem and NAME-key.pem.
func (a *authority) sign(t *testing.T, name string, c *x509.Certificate) (*x509.Certificate, *ecdsa.PrivateKey) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	c.SerialNumber, c.Subject = big.NewInt(time.Now().UnixNano()), pkix.Name{CommonName: name}
	c.NotBefore, c.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	c.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth, x509.ExtKeyUsageServerAuth}
	parent, signer := a.cert, a.key
	if parent == nil {
		parent, signer = c, key
	}
	der, err := x509.CreateCertificate(rand.Reader, c, parent, &key.PublicKey, signer)
	if err != nil {
		t.Fatal(err)
	}
	private, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	for file, block := range map[string]*pem.Block{
		name + ".pem": {Type: "CERTIFICATE", Bytes: der}, name + "-key.pem": {Type: "EC PRIVATE KEY", Bytes: private},
	} {
		if err := os.WriteFile(filepath.Join(a.dir, file), pem.EncodeToMemory(block), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return parsed, key
}

// TestCertificatesAreRenewed connects with a certificate that etcd does not accept, and writes a good one over it.
func TestCertificatesAreRenewed(t *testing.T) {
	dir, elsewhere := t.TempDir(), t.TempDir()
	ca := newAuthority(t, dir)
	ca.sign(t, "server", &x509.Certificate{IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}})
	ca.sign(t, "client", &x509.Certificate{})
	in := func(name string) string { return filepath.Join(dir, name) }
	c := config.Cluster{CAFile: in("ca.pem"), CertFile: in("client.pem"), KeyFile: in("client-key.pem"),
		LeaseTTL: 10 * time.Second}
	trusted, err := tlsOf(c)
	if err != nil {
		t.Fatal(err)
	}
	server := etcdtest.StartTLS(t, in("ca.pem"), in("server.pem"), in("server-key.pem"), trusted)

	other := newAuthority(t, elsewhere)
	other.sign(t, "client", &x509.Certificate{})
	for _, file := range []string{"client.pem", "client-key.pem"} {
		if err := os.Rename(filepath.Join(elsewhere, file), in(file)); err != nil {
			t.Fatal(err)
		}
	}
	c.Endpoints = server.Endpoints()
	s, err := dial(c, nil, "node")
	if err != nil {
		t.Fatal(err)
	}
	client := s.client
	t.Cleanup(func() { _ = client.Close() })
	refused, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
	defer cancel()
	if _, err := client.Get(refused, "key"); err == nil {
		t.Error("a certificate of another authority was accepted")
	}
	ca.sign(t, "client", &x509.Certificate{})
	if _, err := client.Get(t.Context(), "key"); err != nil {
		t.Errorf("after the renewal: %v", err)
	}
	c.CAFile = filepath.Join(elsewhere, "missing.pem")
	if _, err := dial(c, nil, "node"); !errors.Is(err, registry.ErrInvalid) {
		t.Errorf("no ca_file: %v", err)
	}
}
