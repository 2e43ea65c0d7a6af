package launch

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	plugin "github.com/hashicorp/go-plugin"

	"holdfast/proto/bootstrap"
	"holdfast/registry"
)

const (
	// maxHandshake bounds the handshake line, certificate included. It stays below the line limit of go-plugin's own
	// reader.
	maxHandshake = 16 << 10
	// shownBytes is how much of an invalid output an error quotes.
	shownBytes = 200
	// minCert is the length up to which go-plugin ignores the certificate.
	minCert = 50
)

// handshakeWriter gets a shim's stdout: one line, which should be the handshake. The rest is dropped, so that printing
// never blocks the shim.
type handshakeWriter struct {
	mu    sync.Mutex    // guards got; held only to read or change it
	got   []byte        // the line so far, without its newline
	ended chan struct{} // closed at the end of the line, or when it is too long
}

func newHandshakeWriter() *handshakeWriter { return &handshakeWriter{ended: make(chan struct{})} }

func (w *handshakeWriter) Write(text []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	select {
	case <-w.ended:
		return len(text), nil
	default:
	}
	line, _, ended := bytes.Cut(text, []byte("\n"))
	w.got = append(w.got, line...)
	if ended || len(w.got) > maxHandshake {
		close(w.ended)
	}
	return len(text), nil
}

func (w *handshakeWriter) text() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	return string(w.got)
}

// describe describes the output that came instead of a handshake.
func (w *handshakeWriter) describe() string {
	text := w.text()
	if text == "" {
		return "nothing on stdout"
	}
	return "on stdout " + excerpt(text)
}

func excerpt(text string) string {
	if len(text) <= shownBytes {
		return strconv.QuoteToASCII(text)
	}
	return fmt.Sprintf("%s and %d more bytes", strconv.QuoteToASCII(text[:shownBytes]), len(text)-shownBytes)
}

// handshake holds the fields of the handshake line, which go-plugin documents.
type handshake struct{ core, version, network, address, protocol, cert string }

func parseHandshake(line string) (handshake, error) {
	fields := strings.Split(strings.TrimSpace(line), "|")
	if len(line) > maxHandshake || len(fields) < 4 || !isNumber(fields[0]) || !isNumber(fields[1]) {
		return handshake{}, registry.Errorf(registry.ErrInternal,
			"the shim's first line on stdout is no handshake: %s; "+
				"a shim must call bootstrap.Serve and print nothing itself", excerpt(line))
	}
	fields = append(fields, "", "")
	return handshake{fields[0], fields[1], fields[2], fields[3], fields[4], fields[5]}, nil
}

func isNumber(s string) bool {
	_, err := strconv.ParseUint(s, 10, 16)
	return err == nil
}

// check refuses handshakes after which go-plugin would connect to anything but our shim, or without TLS.
func (h handshake) check(dir string) error {
	if core := strconv.Itoa(plugin.CoreProtocolVersion); h.core != core {
		return registry.Errorf(registry.ErrUnsupported, "the shim speaks version %s of go-plugin's own protocol, "+
			"this host speaks %s: build both with the same major version of go-plugin", h.core, core)
	}
	if v, _ := strconv.Atoi(h.version); !slices.Contains(bootstrap.Versions(), v) {
		return registry.Errorf(registry.ErrUnsupported, "no common protocol version: the shim offers %d (its lowest), "+
			"this host speaks %v; use a shim or a host of a nearer release", v, bootstrap.Versions())
	}
	if h.protocol != string(plugin.ProtocolGRPC) {
		return registry.Errorf(registry.ErrUnsupported, "the shim speaks %q, this host speaks gRPC only", h.protocol)
	}
	if err := h.checkAddress(dir); err != nil {
		return err
	}
	if len(h.cert) <= minCert {
		return registry.Errorf(registry.ErrUnsupported,
			"the shim sent no certificate: it must serve mutual TLS for the certificate in PLUGIN_CLIENT_CERT, "+
				"as bootstrap.Serve does")
	}
	return nil
}

func (h handshake) checkAddress(dir string) error {
	if h.network != "unix" {
		return registry.Errorf(registry.ErrDenied,
			"the shim listens at %s of network %s: only a unix socket in %s is allowed", excerpt(h.address),
			excerpt(h.network), dir)
	}
	if filepath.Dir(h.address) != dir || filepath.Clean(h.address) != h.address {
		return registry.Errorf(registry.ErrDenied, "the shim listens at %s, outside its own directory %s",
			excerpt(h.address), dir)
	}
	info, err := os.Lstat(h.address)
	if err == nil && info.Mode().Type() != fs.ModeSocket {
		err = errors.New("it is not a socket")
	}
	if err != nil {
		return registry.Errorf(registry.ErrDenied, "the shim says that it listens at %s: %w", excerpt(h.address), err)
	}
	return nil
}
