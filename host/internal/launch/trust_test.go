package launch_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/emptypb"

	"holdfast/host/internal/launch"
	"holdfast/registry"
)

// T13: the stored binary is replaced, or written to, after its verification. Nothing but a verified binary runs.
func TestTrapT13ChangedBinary(t *testing.T) {
	t.Parallel()
	for what, change := range map[string]func(stored, evil string) error{
		"replaced by name": func(stored, evil string) error { return os.Rename(evil, stored) },
		"written to in place": func(stored, evil string) error {
			text, err := os.ReadFile(evil)
			return errors.Join(err, os.WriteFile(stored, text, 0o700))
		},
	} {
		work := shortDir(t)
		good, _ := binaryFile(t, marking(work, "good"))
		evil, _ := binaryFile(t, marking(work, "evil"))
		opts, dir := stored(t, good)
		refused(t, opts, nil, "exited with code 9")
		checkRan(t, work, "good")
		must(t, change(filepath.Join(dir, opts.Digest.SHA256), evil))
		t.Log(what)
		refused(t, opts, registry.ErrDamaged, "was changed")
		checkRan(t, work)
	}
}

// marking returns a script that leaves a file.
func marking(dir, name string) string { return "#!/bin/sh\n: >" + dir + "/ran-" + name + "\nexit 9\n" }

func checkRan(t *testing.T, dir string, want ...string) {
	t.Helper()
	ran, _ := filepath.Glob(filepath.Join(dir, "ran-*"))
	for i, path := range ran {
		ran[i] = strings.TrimPrefix(filepath.Base(path), "ran-")
		os.Remove(path)
	}
	if strings.Join(ran, " ") != strings.Join(want, " ") {
		t.Errorf("%v ran, not %v", ran, want)
	}
}

// T14: the host's environment reaches the plugin, and overrides what was set for it.
func TestTrapT14Environment(t *testing.T) {
	t.Setenv("HOST_SECRET", "swordfish")
	t.Setenv("LANG", "C.UTF-8")
	p := start(t, options(t, "plain"))
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", p.PID())) // the kernel's copy of what exec was given
	must(t, err)
	allowed := []string{"PATH", "TMPDIR", "LANG", "GORACE", "GOCOVERDIR", "HOLDFAST_SHIM", "HOLDFAST_LIFE_FD"}
	env := strings.Split(strings.TrimRight(string(raw), "\x00"), "\x00")
	for _, pair := range env {
		name, _, _ := strings.Cut(pair, "=")
		if !slices.Contains(allowed, name) && !strings.HasPrefix(name, "PLUGIN_") {
			t.Errorf("the shim has %s", pair)
		}
	}
	if !slices.Contains(env, "LANG=C.UTF-8") {
		t.Errorf("the shim's environment: %q", env)
	}
	if inside, err := ask(t.Context(), p.Conn(), "env"); err != nil || strings.Contains(inside, "HOLDFAST_LIFE_FD") {
		t.Errorf("a child of the shim would take itself for one (%v)", err)
	}
}

// T15: another mount namespace separates host and shim. A shim in another one is refused, even if only one thread is.
func TestTrapT15ShimWithItsOwnMountNamespace(t *testing.T) {
	t.Parallel()
	needsRoot(t)
	whole := script(t, patience, "exec unshare --mount --propagation private "+shared.self+" plain")
	for _, opts := range []launch.Options{options(t, "unshared"), whole} {
		refused(t, opts, registry.ErrUnsupported, "a mount namespace of its own", "never reach this host")
	}
}

// Host and shim may both be in another mount namespace than the rest of the system, as in a container.
func TestHostWithItsOwnMountNamespace(t *testing.T) {
	t.Parallel()
	needsRoot(t)
	cmd := hostCommand(shared.dir, shortDir(t), "plain")
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS}
	awaitDeath(t, killedHost(t, cmd))
}

// T16: any process that opens the socket can shut the plugin down.
func TestTrapT16StrangersCannotTalkToTheShim(t *testing.T) {
	t.Parallel()
	opts := options(t, "plain")
	p := start(t, opts)
	dir := privateDir(t, opts.RunDir)
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	sockets, _ := filepath.Glob(filepath.Join(dir, "plugin*"))
	if len(sockets) != 1 {
		t.Fatalf("sockets: %v", sockets)
	}
	conn, err := grpc.NewClient("unix:"+sockets[0], grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, err)
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := conn.Invoke(ctx, "/plugin.GRPCController/Shutdown", new(emptypb.Empty), new(emptypb.Empty)); err == nil {
		t.Error("a stranger has shut the shim down")
	}
	checkEcho(t, p)
}

// Another process than the shim listens at the socket.
func TestTrapT16ImpostorAtTheSocket(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	ready := filepath.Join(dir, "dir")
	must(t, syscall.Mkfifo(ready, 0o600))
	go func() { // listens in the shim's directory, in this process
		raw, _ := os.ReadFile(ready)
		l, err := net.Listen("unix", filepath.Join(strings.TrimSpace(string(raw)), "plugin1"))
		if err != nil {
			return
		}
		context.AfterFunc(t.Context(), func() { l.Close() })
		writeFile(t, ready+".done", "", 0o600)
	}()
	cert := certificate(t)
	refused(t, script(t, patience, "echo $PLUGIN_UNIX_SOCKET_DIR >"+ready,
		"until [ -e "+ready+".done ]; do :; done", "echo \"1|1|unix|$PLUGIN_UNIX_SOCKET_DIR/plugin1|grpc|"+cert+"\"",
		"exec sleep 1000"), nil, fmt.Sprintf("process %d (uid", os.Getpid()),
		"listens at the shim's socket, not the shim")
}

func certificate(t *testing.T) string {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"localhost"}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	must(t, err)
	return base64.RawStdEncoding.EncodeToString(der)
}

func TestHandshakesThatAreRefused(t *testing.T) {
	t.Parallel()
	at := "unix|$PLUGIN_UNIX_SOCKET_DIR/plugin1"
	for _, c := range []struct {
		name, line string
		kind       error
		text       []string
	}{
		{"core version", "2|1|" + at + "|grpc|", registry.ErrUnsupported,
			[]string{"go-plugin's own protocol", "version 2"}},
		{"net/rpc", "1|1|" + at + "|netrpc|", registry.ErrUnsupported, []string{`"netrpc"`, "gRPC only"}},
		{"tcp", "1|1|tcp|127.0.0.1:1|grpc|", registry.ErrDenied, []string{"only a unix socket"}},
		{"outside", "1|1|unix|/tmp/plugin1|grpc|", registry.ErrDenied, []string{"outside its own directory"}},
		{"dots", "1|1|unix|$PLUGIN_UNIX_SOCKET_DIR/../plugin1|grpc|", registry.ErrDenied,
			[]string{"outside its own directory"}},
		{"no socket", "1|1|" + at + "|grpc|", registry.ErrDenied, []string{"no such file"}},
		{"version", "1|12|" + at + "|grpc|", registry.ErrUnsupported, []string{"offers 12", "speaks [1]"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			refused(t, script(t, patience, "echo \""+c.line+"\"", "exec sleep 1000"), c.kind, c.text...)
		})
	}
}

func TestShimOfAnotherProtocolVersion(t *testing.T) {
	t.Parallel()
	refused(t, options(t, "version"), registry.ErrUnsupported, "offers 98 (its lowest), this host speaks [1]",
		`"shim_speaks":"[98 99]"`, `"host_speaks":"[1]"`)
}

func TestPluginOfAnotherProgram(t *testing.T) {
	t.Parallel()
	refused(t, options(t, "cookie"), nil, "exited with code 1", "plugin of another program", "This binary is a plugin")
}

func TestShimWithoutMutualTLS(t *testing.T) {
	t.Parallel()
	refused(t, options(t, "nocert"), registry.ErrUnsupported, "sent no certificate", "mutual TLS")
}
