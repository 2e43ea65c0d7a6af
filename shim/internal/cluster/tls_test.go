package cluster

import (
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

// TestLeaseHasWholeSeconds rounds the lease down, because etcd counts in seconds. Otherwise a node would take its lease
// for valid for too long.
func TestLeaseHasWholeSeconds(t *testing.T) {
	c := config.Cluster{Endpoints: []string{"http://127.0.0.1:1"}, LeaseTTL: 2900 * time.Millisecond}
	n, err := NewNode(Options{Cluster: c})
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
	c.NotBefore = time.Now().Add(-time.Hour)
	if c.NotAfter.IsZero() {
		c.NotAfter = time.Now().Add(time.Hour)
	}
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

// TestCertificatesAreRenewed runs a node with certificates that etcd or the node rejects. The node says why etcd cannot
// be reached, and continues once a good certificate replaces the bad one.
func TestCertificatesAreRenewed(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	ca := newAuthority(t, dir)
	ca.sign(t, "server", &x509.Certificate{IPAddresses: []net.IP{net.IPv4(127, 0, 0, 2)}})
	ca.sign(t, "client", &x509.Certificate{})
	good := config.Cluster{CAFile: in("ca.pem"), CertFile: in("client.pem"), KeyFile: in("client-key.pem"),
		LeaseTTL: 10 * time.Second}
	trusted, err := tlsOf(good)
	if err != nil {
		t.Fatal(err)
	}
	server := etcdtest.StartTLS(t, in("ca.pem"), in("server.pem"), in("server-key.pem"), trusted)
	good.Endpoints = server.Endpoints()

	for name, test := range map[string]struct {
		make func(*testing.T, string, *config.Cluster) // makes bad files in a directory
		want string
	}{
		"certificate of another authority": {func(t *testing.T, dir string, _ *config.Cluster) {
			newAuthority(t, dir).sign(t, "client", &x509.Certificate{})
		}, "(bad certificate|broken pipe|connection reset)"},
		"expired certificate": {func(t *testing.T, dir string, _ *config.Cluster) {
			expired := &x509.Certificate{NotAfter: time.Now().Add(-time.Minute)}
			(&authority{dir, ca.cert, ca.key}).sign(t, "client", expired)
		}, "; the certificate in cert_file .*/client.pem is valid from .* to 20.*"},
		"another ca_file": {func(t *testing.T, dir string, c *config.Cluster) {
			newAuthority(t, dir)
			(&authority{dir, ca.cert, ca.key}).sign(t, "client", &x509.Certificate{})
			c.CAFile = filepath.Join(dir, "ca.pem")
		}, "x509: certificate signed by unknown authority"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir, c := t.TempDir(), good
			c.ID = t.Name()
			c.CertFile, c.KeyFile = filepath.Join(dir, "client.pem"), filepath.Join(dir, "client-key.pem")
			test.make(t, dir, &c)
			n := runDialed(t, c)
			wantProblem(t, n,
				"etcd has not answered since the shim started at .* \\("+c.Endpoints[0]+"\\): .*"+test.want+".*")
			if c.CAFile != in("ca.pem") { // a shim reads this file at its start only
				return
			}
			(&authority{dir, ca.cert, ca.key}).sign(t, "client", &x509.Certificate{})
			wantProblem(t, n, "")
		})
	}
	missing := good
	missing.CAFile = in("missing.pem")
	if _, err := dial(missing, nil, "node"); !errors.Is(err, registry.ErrInvalid) {
		t.Errorf("no ca_file: %v", err)
	}
}
