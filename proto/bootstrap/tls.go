package bootstrap

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"math/big"
	"time"
)

// clientCert is the variable with the host's certificate, as PEM.
const clientCert = "PLUGIN_CLIENT_CERT"

// ClientTLS returns the TLS configuration of a host for one shim, and the variable of the shim's environment with the
// host's certificate, as NAME=PEM. It replaces go-plugin's AutoMTLS, whose key is on P-521: see newCertificate.
// go-plugin adds the shim's certificate, which is in the handshake, to the configuration.
func ClientTLS() (config *tls.Config, variable string, err error) {
	cert, err := newCertificate(x509.ExtKeyUsageClientAuth)
	if err != nil {
		return nil, "", err
	}
	text := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: cert.Certificate[0]})
	return &tls.Config{
		Certificates: []tls.Certificate{cert}, ServerName: serverName, MinVersion: tls.VersionTLS12,
	}, clientCert + "=" + string(text), nil
}

// serverTLS returns the TLS configuration of a shim whose host has the certificate hostPEM, and the shim's own
// certificate (DER). Both are nil without hostPEM.
func serverTLS(hostPEM string) (*tls.Config, []byte, error) {
	if hostPEM == "" {
		return nil, nil, nil
	}
	host := x509.NewCertPool()
	if !host.AppendCertsFromPEM([]byte(hostPEM)) {
		return nil, nil, errors.New(clientCert + " has no certificate in PEM")
	}
	cert, err := newCertificate(x509.ExtKeyUsageServerAuth)
	if err != nil {
		return nil, nil, err
	}
	return &tls.Config{
		Certificates: []tls.Certificate{cert}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: host,
		MinVersion: tls.VersionTLS12,
	}, cert.Certificate[0], nil
}

// serverName is in every certificate because TLS requires a name. Each side trusts only the certificate of its peer.
const serverName = "localhost"

// newCertificate returns a certificate that is signed with its own key, for one host or shim process.
//
// go-plugin's AutoMTLS makes a key on the curve P-521. BoringSSL does not verify such a signature, so hosts that use
// the C core of gRPC (Python, Ruby, C++) could not connect. Go verifies one, but takes milliseconds for it.
func newCertificate(usage x509.ExtKeyUsage) (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	now := time.Now()
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: serverName}, DNSNames: []string{serverName}, SerialNumber: big.NewInt(1),
		NotBefore: now.Add(-time.Hour), NotAfter: now.AddDate(100, 0, 0), BasicConstraintsValid: true, IsCA: true,
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{usage},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}, nil
}
