// Package etcdtest runs etcd for tests: the machine's, or else one built from its module, which takes a minute.
package etcdtest

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/gofrs/flock"
	clientv3 "go.etcd.io/etcd/client/v3"
)

// Binary returns the path of an etcd server.
var Binary = sync.OnceValues(func() (string, error) {
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
})

// Start runs a cluster of one member until the test ends, and returns a client of it.
func Start(t testing.TB) *clientv3.Client {
	client, _ := StartProcess(t)
	return client
}

// StartProcess is Start for a test that sends signals to the member.
func StartProcess(t testing.TB) (*clientv3.Client, *os.Process) {
	t.Helper()
	at, process := start(t, "http")
	return connect(t, clientv3.Config{Endpoints: []string{at}}), process
}

// shared is the cluster of Shared.
var shared struct {
	start sync.Once
	dir   string
	cmd   *exec.Cmd
	at    string
	err   error // why it did not start
}

// Run runs the tests of a package and ends the cluster of Shared. TestMain calls it.
func Run(m *testing.M) (exitCode int) {
	defer func() {
		if shared.cmd != nil {
			_ = shared.cmd.Process.Kill()
			_ = shared.cmd.Wait()
		}
		_ = os.RemoveAll(shared.dir)
	}()
	return m.Run()
}

// Shared returns a client of a cluster of one member that all tests of a package use. It deletes all keys with the
// prefix, which an earlier run of the test may have left.
func Shared(t testing.TB, prefix string) *clientv3.Client {
	t.Helper()
	shared.start.Do(func() {
		if shared.dir, shared.err = os.MkdirTemp("", "etcd-"); shared.err == nil {
			shared.cmd, shared.at, shared.err = run(shared.dir, "http")
		}
	})
	if shared.err != nil {
		t.Fatal(shared.err)
	}
	c := connect(t, clientv3.Config{Endpoints: []string{shared.at}})
	if _, err := c.Delete(t.Context(), prefix, clientv3.WithPrefix()); err != nil {
		t.Fatal(err)
	}
	return c
}

// StartTLS is Start for a member that authenticates itself with a certificate, and requires client certificates of the
// same CA. The arguments are paths of PEM files.
func StartTLS(t testing.TB, ca, cert, key string, client *tls.Config) *clientv3.Client {
	t.Helper()
	at, _ := start(t, "https", "--client-cert-auth", "--trusted-ca-file", ca, "--cert-file", cert, "--key-file", key)
	return connect(t, clientv3.Config{Endpoints: []string{at}, TLS: client})
}

func start(t testing.TB, scheme string, args ...string) (at string, process *os.Process) {
	t.Helper()
	cmd, at, err := run(t.TempDir(), scheme, args...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return at, cmd.Process
}

func run(dir, scheme string, args ...string) (cmd *exec.Cmd, at string, err error) {
	cmd, at, err = Command(filepath.Join(dir, "etcd"), scheme, args...)
	if err != nil {
		return nil, "", err
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		return nil, "", err
	}
	return cmd, at, nil
}

// Command returns a command that runs a cluster of one member in a directory, and the URL of the member. Its ports were
// free a moment ago.
func Command(dir, scheme string, args ...string) (cmd *exec.Cmd, at string, err error) {
	binary, err1 := Binary()
	client, peer, err2 := freeAddresses()
	at, peer = scheme+"://"+client, "http://"+peer
	args = append(args, "--data-dir", dir, "--log-level", "error", "--logger", "zap",
		"--listen-client-urls", at, "--advertise-client-urls", at, "--listen-peer-urls", peer,
		"--initial-advertise-peer-urls", peer, "--initial-cluster", "default="+peer)
	return exec.Command(binary, args...), at, errors.Join(err1, err2)
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

// freeAddresses returns two addresses. Both are taken for a moment, so that they differ. Until etcd takes them, most
// other programs leave them alone: the ports that the kernel chooses for 127.0.0.1 are not of this address.
func freeAddresses() (client, peer string, err error) {
	l, err := net.Listen("tcp", "127.0.0.2:0")
	if err != nil {
		return "", "", err
	}
	defer l.Close()
	m, err := net.Listen("tcp", "127.0.0.2:0")
	if err != nil {
		return "", "", err
	}
	return l.Addr().String(), m.Addr().String(), m.Close()
}
