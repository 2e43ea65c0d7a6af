// Package etcdtest runs etcd for tests: the machine's, or else one built from its module, which takes a minute.
package etcdtest

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/gofrs/flock"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// Binary returns the path of an etcd server.
func Binary() (string, error) {
	if path, err := exec.LookPath("etcd"); err == nil {
		return path, nil
	}
	out, err := exec.Command("go", "list", "-m", "-f", "{{.Dir}}", "holdfast").Output()
	if err != nil {
		return "", fmt.Errorf("find the module holdfast: %w", err)
	}
	root := strings.TrimSpace(string(out))
	path := filepath.Join(root, ".cache", "etcd")
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return "", err
	}
	lock := flock.New(path + ".lock")
	if err := lock.Lock(); err != nil {
		return "", err
	}
	defer func() { _ = lock.Unlock() }()
	build := exec.Command("go", "build", "-C", filepath.Join(root, "internal/etcdtest/server"), "-o", path, ".")
	if text, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build etcd: %w: %s", err, text)
	}
	return path, nil
}

// Start runs a cluster of one member until the test ends, and returns a client of it.
func Start(t testing.TB) *clientv3.Client {
	t.Helper()
	client := address(t)
	start(t, client)
	return connect(t, clientv3.Config{Endpoints: []string{client}})
}

// StartTLS is Start for a member that authenticates itself with a certificate, and its clients by one of the same CA. The
// arguments are paths of PEM files.
func StartTLS(t testing.TB, ca, cert, key string, client *tls.Config) *clientv3.Client {
	t.Helper()
	at := strings.Replace(address(t), "http:", "https:", 1)
	start(t, at, "--client-cert-auth", "--trusted-ca-file", ca, "--cert-file", cert, "--key-file", key)
	return connect(t, clientv3.Config{Endpoints: []string{at}, TLS: client})
}

func start(t testing.TB, client string, args ...string) {
	t.Helper()
	binary, err := Binary()
	if err != nil {
		t.Fatal(err)
	}
	peer := address(t)
	cmd := exec.Command(binary, append(args, "--data-dir", filepath.Join(t.TempDir(), "etcd"),
		"--listen-client-urls", client, "--advertise-client-urls", client,
		"--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", "default="+peer,
		"--log-level", "error", "--logger", "zap")...)
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
}

func connect(t testing.TB, config clientv3.Config) *clientv3.Client {
	t.Helper()
	c, err := clientv3.New(config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = c.Close() })
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	if _, err := c.Get(ctx, "ready"); err != nil {
		t.Fatalf("etcd does not answer: %v", err)
	}
	return c
}

// address returns a URL with a port that was free a moment ago.
func address(t testing.TB) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	return "http://" + l.Addr().String()
}
