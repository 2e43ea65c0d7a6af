package bootstrap

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	hclog "github.com/hashicorp/go-hclog"
	"google.golang.org/grpc"
)

// mode makes this test binary something else than a test.
const mode = "BOOTSTRAP_TEST_MODE"

func TestMain(m *testing.M) {
	switch os.Getenv(mode) {
	case "":
		os.Exit(m.Run())
	case "print":
		fmt.Println("printed")
	case "serve":
		opts := ServeOptions{Logger: NewLogger(hclog.Info)}
		if os.Getenv("BOOTSTRAP_TEST_FAILS") != "" {
			opts.Run = func(context.Context) error { return errors.New("the work failed") }
		}
		err := Serve(context.Background(), func(context.Context, *grpc.Server) error { return nil }, opts)
		fmt.Println(err) // to /dev/null
		fmt.Fprintln(os.NewFile(2, "stderr"), "ended:", err)
	}
}

// rerun runs this binary in another mode. life is what it inherits as its life pipe; nil passes none.
func rerun(t *testing.T, life *os.File, env ...string) (stdout, stderr string, code int) {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(self)
	cmd.Env = append([]string{"PATH=" + os.Getenv("PATH"), "TMPDIR=" + t.TempDir(), "GORACE=atexit_sleep_ms=0"}, env...)
	if life != nil {
		cmd.Env = append(cmd.Env, LifeFD+"=3", CookieKey+"="+CookieValue, "PLUGIN_PROTOCOL_VERSIONS=1")
		cmd.ExtraFiles = []*os.File{life}
	}
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return out.String(), errs.String(), cmd.ProcessState.ExitCode()
}

// lifePipe returns both ends. Closing the writer is the end of the host.
func lifePipe(t *testing.T) (r, w *os.File) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { r.Close(); w.Close() })
	return r, w
}

func TestOnlyAShimIsSilenced(t *testing.T) {
	if out, _, _ := rerun(t, nil, mode+"=print"); out != "printed\n" {
		t.Errorf("a host printed %q", out)
	}
	if out, _, _ := rerun(t, nil, mode+"=print", CookieKey+"="+CookieValue); out != "printed\n" {
		t.Errorf("a shim's helper printed %q", out)
	}
	r, _ := lifePipe(t)
	if out, _, _ := rerun(t, r, mode+"=print"); out != "" {
		t.Errorf("a shim printed %q", out)
	}
}

func TestServeByHandSaysWhatItIs(t *testing.T) {
	out, errs, code := rerun(t, nil, mode+"=serve")
	if out != "" || code != ExitNotAPlugin || !strings.Contains(errs, "A Holdfast host starts it") {
		t.Errorf("stdout %q, stderr %q, code %d", out, errs, code)
	}
}

// The host is gone before the shim has even served: it still ends, and by itself.
func TestServeEndsWithItsHost(t *testing.T) {
	r, w := lifePipe(t)
	w.Close()
	_, errs, code := rerun(t, r, mode+"=serve")
	if code != 0 || !strings.Contains(errs, "ended: <nil>") {
		t.Errorf("stderr %q, code %d", errs, code)
	}
}

func TestServeEndsWithItsWork(t *testing.T) {
	r, _ := lifePipe(t)
	_, errs, _ := rerun(t, r, mode+"=serve", "BOOTSTRAP_TEST_FAILS=1")
	if !strings.Contains(errs, "ended: the work failed") {
		t.Errorf("stderr %q", errs)
	}
}

// gate is a reader that reads nothing until it is opened.
type gate struct {
	open chan struct{}
	mu   sync.Mutex
	buf  bytes.Buffer
}

func (g *gate) Write(p []byte) (int, error) {
	<-g.open
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.buf.Write(p)
}

func (g *gate) text() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.buf.String()
}

func TestLoggerNeverWaits(t *testing.T) {
	g := &gate{open: make(chan struct{})}
	log := newLogger(g, hclog.Info)
	const lines = 3 * maxQueued
	for range lines {
		log.Info("line")
	}
	if log.Flush(time.Millisecond) {
		t.Error("Flush says that all is written, and nothing is")
	}
	close(g.open)
	if !log.Flush(time.Minute) {
		t.Fatal("the lines were not written")
	}
	written := strings.Count(g.text(), `"@message":"line"`)
	if written < maxQueued || uint64(written)+log.out.dropped.Load() != lines {
		t.Errorf("%d written, %d dropped of %d", written, log.out.dropped.Load(), lines)
	}
	if !strings.Contains(g.text(), fmt.Sprintf(`"lines":%d`, log.out.dropped.Load())) {
		t.Error("the log does not say how many lines were dropped")
	}
}

// sink is the host's end of the handshake.
type sink struct {
	bytes.Buffer
	closed bool
}

func (s *sink) Close() error { s.closed = true; return nil }

func TestOnlyTheHandshakePasses(t *testing.T) {
	const line = "1|1|unix|/run/x/plugin1|grpc|\n"
	var to sink
	forwardHandshake(strings.NewReader("hello\n1|1|noise\n"+strings.Repeat("x", 1<<20)+"\n"+line+"after\n"+line), &to,
		[]byte("certificate"))
	if want := strings.TrimSpace(line) + "Y2VydGlmaWNhdGU\n"; to.String() != want || !to.closed {
		t.Errorf("the host got %q, closed %v", to.String(), to.closed)
	}
	var none sink
	forwardHandshake(io.LimitReader(strings.NewReader("no newline"), 5), &none, nil)
	if none.Len() != 0 {
		t.Errorf("the host got %q", none.String())
	}
}

// newPair returns the TLS configurations of a host and of its shim. The host trusts the
// shim's certificate, as go-plugin arranges after the handshake line.
func newPair(t *testing.T) (host, shim *tls.Config) {
	t.Helper()
	host, variable, err := ClientTLS()
	if err != nil {
		t.Fatal(err)
	}
	shim, der, err := serverTLS(strings.TrimPrefix(variable, clientCert+"="))
	if err != nil {
		t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	host.RootCAs = x509.NewCertPool()
	host.RootCAs.AddCert(cert)
	return host, shim
}

// BoringSSL, and with it the gRPC of most other languages, refuses the curve P-521.
func TestCertificatesUseP256(t *testing.T) {
	config, der, err := serverTLS("")
	if config != nil || der != nil || err != nil {
		t.Errorf("without a host's certificate: %v, %v, %v", config, der, err)
	}
	if _, _, err := serverTLS("rubbish"); err == nil {
		t.Error("rubbish is taken for a certificate")
	}
	host, shim := newPair(t)
	for _, config := range []*tls.Config{host, shim} {
		key, ok := config.Certificates[0].PrivateKey.(*ecdsa.PrivateKey)
		if !ok || key.Curve != elliptic.P256() {
			t.Errorf("the key is %T", config.Certificates[0].PrivateKey)
		}
	}
}

// A host and a shim trust only each other's certificate, although all certificates have the same name.
func TestHostAndShimTrustOnlyEachOther(t *testing.T) {
	host, shim := newPair(t)
	otherHost, otherShim := newPair(t)
	stranger := otherHost.Clone() // a host that trusts the shim, but whose certificate the shim does not know
	stranger.RootCAs = host.RootCAs
	for _, c := range []struct {
		name                 string
		host, shim           *tls.Config
		hostFails, shimFails bool
	}{
		{"the pair", host, shim, false, false},
		{"another host", stranger, shim, false, true}, // with TLS 1.3 the host ends its handshake first
		{"a host without a certificate", &tls.Config{RootCAs: host.RootCAs, ServerName: serverName}, shim, false, true},
		{"another shim", host, otherShim, true, true},
	} {
		here, there := net.Pipe()
		server := make(chan error, 1)
		go func() {
			defer there.Close()
			server <- tls.Server(there, c.shim).HandshakeContext(t.Context())
		}()
		err := tls.Client(here, c.host).HandshakeContext(t.Context())
		go func() { _, _ = io.Copy(io.Discard, here) }() // so that the shim can send an alert
		if srv := <-server; (err != nil) != c.hostFails || (srv != nil) != c.shimFails {
			t.Errorf("%s: the host says %v, the shim %v", c.name, err, srv)
		}
		here.Close()
	}
}
