package bootstrap

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"math/big"
	"time"
)

// clientCert is the variable with the host's certificate, as PEM.
const clientCert = "PLUGIN_CLIENT_CERT"

// mutualTLS returns the TLS configuration of a shim whose host has the certificate hostPEM, and the shim's own
// certificate (DER). Both are nil without hostPEM.
//
// go-plugin itself makes a key on the curve P-521. BoringSSL does not verify such a signature, so hosts that use the C
// core of gRPC (Python, Ruby, C++) could not connect.
func mutualTLS(hostPEM string) (*tls.Config, []byte, error) {
	if hostPEM == "" {
		return nil, nil, nil
	}
	host := x509.NewCertPool()
	if !host.AppendCertsFromPEM([]byte(hostPEM)) {
		return nil, nil, errors.New(clientCert + " has no certificate in PEM")
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, nil, err
	}
	now := time.Now()
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: "localhost"}, DNSNames: []string{"localhost"}, SerialNumber: big.NewInt(1),
		NotBefore: now.Add(-time.Hour), NotAfter: now.AddDate(100, 0, 0), BasicConstraintsValid: true, IsCA: true,
		KeyUsage:    x509.KeyUsageDigitalSignature | x509.KeyUsageCertSign,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, nil, err
	}
	return &tls.Config{
		Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}},
		ClientAuth:   tls.RequireAndVerifyClientCert, ClientCAs: host, MinVersion: tls.VersionTLS12,
	}, der, nil
}
