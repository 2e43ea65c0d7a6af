package launch_test

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/base64"
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

// T13: the binary is replaced between verification and execution. What was verified runs.
func TestTrapT13SwappedBinary(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	store, err := launch.OpenStore(filepath.Join(dir, "store"))
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	source := filepath.Join(dir, "shim")
	writeFile(t, source, script(dir, "good"), 0o755)
	digest, err := store.Add(t.Context(), source, "", "")
	if err != nil {
		t.Fatal(err)
	}
	evil := filepath.Join(dir, "evil")
	writeFile(t, evil, script(dir, "evil"), 0o755)
	stored := filepath.Join(dir, "store", digest.SHA256)
	if err := os.Rename(evil, stored); err != nil { // by name
		t.Fatal(err)
	}
	opts := launch.Options{Store: store, Digest: digest, RunDir: filepath.Join(dir, "run"), StartTimeout: patience}
	_, err = launch.Start(t.Context(), opts)
	checkText(t, err, "exited with code 9")
	checkRan(t, dir, "good")

	reopened, err := launch.OpenStore(filepath.Join(dir, "store"))
	if err != nil {
		t.Fatal(err)
	}
	defer reopened.Close()
	opts.Store = reopened // which has only the name
	_, err = launch.Start(t.Context(), opts)
	checkText(t, err, "was changed")
	checkKind(t, err, registry.ErrDamaged)
	checkRan(t, dir)
}

// The same, but the file is changed in place.
func TestTrapT13BinaryWrittenInPlace(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	store, err := launch.OpenStore(filepath.Join(dir, "store"))
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	source := filepath.Join(dir, "shim")
	writeFile(t, source, script(dir, "good"), 0o755)
	digest, err := store.Add(t.Context(), source, "", "")
	if err != nil {
		t.Fatal(err)
	}
	writeFile(t, filepath.Join(dir, "store", digest.SHA256), script(dir, "evil"), 0o700)
	_, err = launch.Start(t.Context(),
		launch.Options{Store: store, Digest: digest, RunDir: dir, StartTimeout: patience})
	checkText(t, err, "was changed")
	checkKind(t, err, registry.ErrDamaged)
	checkRan(t, dir)
}

func script(dir, name string) string { return "#!/bin/sh\n: >" + dir + "/ran-" + name + "\nexit 9\n" }

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
	t.Setenv("BOTH", "host")
	opts := options(t, "plain")
	opts.Env = append(opts.Env, "BOTH=shim")
	p := start(t, opts)
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/environ", p.PID())) // the kernel's copy of what exec was given
	if err != nil {
		t.Fatal(err)
	}
	allowed := []string{
		"PATH",
		"TMPDIR",
		"LANG",
		"GORACE",
		"GOCOVERDIR",
		"BOTH",
		shimMode,
		"HOLDFAST_SHIM",
		"HOLDFAST_LIFE_FD",
	}
	env := strings.Split(strings.TrimRight(string(raw), "\x00"), "\x00")
	for _, pair := range env {
		name, _, _ := strings.Cut(pair, "=")
		if !slices.Contains(allowed, name) && !strings.HasPrefix(name, "PLUGIN_") {
			t.Errorf("the shim has %s", pair)
		}
	}
	joined := strings.Join(env, "\n") + "\n"
	if !strings.Contains(joined, "BOTH=shim\n") || !strings.Contains(joined, "LANG=C.UTF-8\n") {
		t.Errorf("the shim's environment:\n%s", joined)
	}
	if inside, err := ask(t.Context(), p.Conn(), "env"); err != nil || strings.Contains(inside, "HOLDFAST_LIFE_FD") {
		t.Errorf("a child of the shim would take itself for one (%v)", err)
	}
}

// T15: another mount namespace, or sockets in /tmp, separate host and shim.
func TestTrapT15OneMountNamespace(t *testing.T) {
	opts := options(t, "plain")
	t.Setenv("TMPDIR", "/nonexistent")
	p := start(t, opts)
	for _, link := range []string{"ns/mnt", "root"} {
		ours, err := os.Readlink("/proc/self/" + link)
		if err != nil {
			t.Fatal(err)
		}
		if theirs, err := os.Readlink(fmt.Sprintf("/proc/%d/%s", p.PID(), link)); err != nil || theirs != ours {
			t.Errorf("%s of the shim is %s (%v), the host's is %s", link, theirs, err, ours)
		}
	}
}

// A shim in another mount namespace is refused, even if only one thread is.
func TestTrapT15ShimWithItsOwnMountNamespace(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("a mount namespace needs root")
	}
	thread := options(t, "unshared")
	whole, dir := options(t, "plain"), shortDir(t)
	wrapper := filepath.Join(dir, "wrapper")
	writeFile(t, wrapper, "#!/bin/sh\nexec unshare --mount --propagation private "+shared.self+"\n", 0o755)
	var err error
	if whole.Store, err = launch.OpenStore(filepath.Join(dir, "store")); err != nil {
		t.Fatal(err)
	}
	defer whole.Store.Close()
	if whole.Digest, err = whole.Store.Add(t.Context(), wrapper, "", ""); err != nil {
		t.Fatal(err)
	}
	for _, opts := range []launch.Options{thread, whole} {
		p, err := launch.Start(t.Context(), opts)
		if err == nil {
			kill(t, p)
		}
		checkText(t, err, "a mount namespace of its own", "never reach this host")
		checkKind(t, err, registry.ErrUnsupported)
		checkEmpty(t, opts.RunDir)
	}
}

// Both may be in another namespace than the rest of the system, as in a container.
func TestHostWithItsOwnMountNamespace(t *testing.T) {
	t.Parallel()
	if os.Getuid() != 0 {
		t.Skip("a mount namespace needs root")
	}
	cmd := hostCommand(shared.dir, shortDir(t), "plain")
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS}
	awaitDeath(t, runHost(t, cmd))
}

// T16: any process that opens the socket can shut the plugin down.
func TestTrapT16StrangersCannotTalkToTheShim(t *testing.T) {
	t.Parallel()
	opts := options(t, "plain")
	p := start(t, opts)
	dirs, _ := filepath.Glob(filepath.Join(opts.RunDir, "shim-*"))
	if len(dirs) != 1 {
		t.Fatalf("socket directories: %v", dirs)
	}
	if info, err := os.Stat(dirs[0]); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	conn, err := grpc.NewClient("unix:"+socketIn(t, dirs[0]), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := conn.Invoke(ctx, "/plugin.GRPCController/Shutdown", new(emptypb.Empty), new(emptypb.Empty)); err == nil {
		t.Error("a stranger has shut the shim down")
	}
	if got, err := ask(t.Context(), p.Conn(), "echo hello"); err != nil || got != "hello" {
		t.Errorf("after the stranger's call: %q, %v", got, err)
	}
}

func socketIn(t *testing.T, dir string) string {
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if e.Type() == os.ModeSocket {
			return filepath.Join(dir, e.Name())
		}
	}
	t.Fatalf("no socket in %s", dir)
	return ""
}

// Another process than the shim listens at the socket.
func TestTrapT16ImpostorAtTheSocket(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	ready := filepath.Join(dir, "dir")
	if err := syscall.Mkfifo(ready, 0o600); err != nil {
		t.Fatal(err)
	}
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
	_, err := startScript(t, patience, "echo $PLUGIN_UNIX_SOCKET_DIR >"+ready,
		"until [ -e "+ready+".done ]; do :; done", "echo \"1|1|unix|$PLUGIN_UNIX_SOCKET_DIR/plugin1|grpc|"+cert+"\"",
		"exec sleep 1000")
	checkText(t, err, fmt.Sprintf("process %d (uid", os.Getpid()), "listens at the shim's socket, not the shim")
}

func certificate(t *testing.T) string {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: []string{"localhost"}}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		t.Fatal(err)
	}
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
			_, err := startScript(t, patience, "echo \""+c.line+"\"", "exec sleep 1000")
			checkText(t, err, c.text...)
			checkKind(t, err, c.kind)
		})
	}
}

func TestShimOfAnotherProtocolVersion(t *testing.T) {
	t.Parallel()
	opts := options(t, "version")
	_, err := launch.Start(t.Context(), opts)
	checkText(t, err, "offers 98 (its lowest), this host speaks [1]", `"shim_speaks":"[98 99]"`, `"host_speaks":"[1]"`)
	checkKind(t, err, registry.ErrUnsupported)
	checkEmpty(t, opts.RunDir)
}

func TestPluginOfAnotherProgram(t *testing.T) {
	t.Parallel()
	opts := options(t, "cookie")
	_, err := launch.Start(t.Context(), opts)
	checkText(t, err, "exited with code 1", "plugin of another program", "This binary is a plugin")
	checkEmpty(t, opts.RunDir)
}

func TestShimWithoutMutualTLS(t *testing.T) {
	t.Parallel()
	opts := options(t, "nocert")
	_, err := launch.Start(t.Context(), opts)
	checkText(t, err, "sent no certificate", "AutoMTLS")
	checkKind(t, err, registry.ErrUnsupported)
	checkEmpty(t, opts.RunDir)
}
