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
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/types/known/emptypb"

	"holdfast/host/internal/launch"
	"holdfast/registry"
)

// T1: a line on stderr that is no hclog line makes go-plugin panic. Here it is logged, escaped and bounded.
func TestTrapT1HostileStderr(t *testing.T) {
	t.Parallel()
	log := newLog()
	opts := options(t, "hostile")
	opts.Logger = log
	p := start(t, opts)
	if _, err := ask(t.Context(), p.Conn(), "echo"); err != nil {
		t.Fatal(err)
	}
	kill(t, p) // all that was written is read by then
	text := log.text()
	for _, want := range []string{
		`{\"@message\":5}`, `"@message":"level is an object"`, `not \\xff UTF-8 \\x1b[31mred`, "more bytes]",
		`"@level":"warn","@message":"still here"`, `"deep":"{\"a\":[\"\\u001b[2J\"]}","n":"1e999"`,
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the log has no %s", want)
		}
	}
	for line := range strings.Lines(text) {
		if len(line) > 3*64<<10 {
			t.Errorf("a line of %d bytes reached the log", len(line))
		}
	}
}

func TestPanicOfTheShimIsLoggedAsError(t *testing.T) {
	t.Parallel()
	log := newLog()
	opts := options(t, "plain")
	opts.Logger = log
	p := start(t, opts)
	if _, err := ask(t.Context(), p.Conn(), "panic"); err == nil {
		t.Error("a shim that panicked has answered")
	}
	awaitDone(t, p)
	kill(t, p)
	if !strings.Contains(log.text(), `"@level":"error","@message":"panic: the shim is broken"`) {
		t.Errorf("the log: %s", log.text())
	}
	if exit, ok := p.Err().(*launch.Exit); !ok || exit.Code != 2 || exit.Asked {
		t.Errorf("the exit is %v", p.Err())
	}
}

// T2: go-plugin's Kill waits for ever for a frozen plugin. The frozen shim here could not answer anything.
func TestTrapT2KillOfAFrozenShim(t *testing.T) {
	t.Parallel()
	opts := options(t, "plain")
	p := start(t, opts)
	freeze(t, p.PID())
	kill(t, p)
	if alive(p.PID()) {
		t.Error("the frozen shim lives")
	}
	checkEmpty(t, opts.RunDir)
}

// A shim that freezes before its handshake, or between that and its first answer, is given up at the start's time.
func TestTrapT2FrozenAtStart(t *testing.T) {
	t.Parallel()
	_, err := startScript(t, 300*time.Millisecond, "kill -STOP $$")
	checkText(t, err, "sent no handshake", "nothing on stdout", "no answer within 300ms")
	checkKind(t, err, registry.ErrUnavailable)

	opts := options(t, "freezes")
	opts.StartTimeout = 3 * time.Second // its handshake has to be there by then
	_, err = launch.Start(t.Context(), opts)
	checkText(t, err, "sent a handshake, but did not answer", "no answer within 3s")
	checkKind(t, err, registry.ErrUnavailable)
	checkEmpty(t, opts.RunDir)
}

// T3: a grandchild that holds the pipes delays go-plugin's Kill and its notice of a death until it ends.
func TestTrapT3GrandchildHoldsThePipes(t *testing.T) {
	t.Parallel()
	opts := options(t, "plain")
	p := start(t, opts)
	text, err := ask(t.Context(), p.Conn(), "fork")
	if err != nil {
		t.Fatal(err)
	}
	holder, _ := strconv.Atoi(text)
	defer awaitDeath(t, holder)
	defer unix.Kill(holder, unix.SIGKILL)
	if err := unix.Kill(p.PID(), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	awaitDone(t, p)
	kill(t, p)
	if !alive(holder) {
		t.Fatal("the holder was to outlive the shim: this test has proved nothing")
	}
	checkEmpty(t, opts.RunDir)
}

// What stays in the shim's own process group ends with it.
func TestTrapT3HelpersEndWithTheShim(t *testing.T) {
	t.Parallel()
	dir := shortDir(t)
	_, err := startScript(t, patience, "sleep 1000 & echo $! >"+dir+"/pid", "exit 3")
	checkText(t, err, "exited with code 3")
	text, rerr := os.ReadFile(dir + "/pid")
	if rerr != nil {
		t.Fatal(rerr)
	}
	helper, _ := strconv.Atoi(strings.TrimSpace(string(text)))
	awaitDeath(t, helper)
}

// T4: a shim freezes when nobody reads what it prints.
func TestTrapT4OutputNeverBlocksTheShim(t *testing.T) {
	t.Parallel()
	p := start(t, options(t, "plain"))
	if _, err := ask(t.Context(), p.Conn(), "stdout done"); err != nil {
		t.Fatal(err)
	}
	if got, err := ask(t.Context(), p.Conn(), "echo after"); err != nil || got != "after" {
		t.Errorf("after 8 MiB of output: %q, %v", got, err)
	}
}

// The same for its log: here the host's logger takes nothing.
func TestTrapT4LogNeverBlocksTheShim(t *testing.T) {
	t.Parallel()
	log := newLog()
	log.gate = make(chan struct{})
	opts := options(t, "plain")
	opts.Logger = log
	p := start(t, opts)
	if got, err := ask(t.Context(), p.Conn(), "log done"); err != nil || got != "done" {
		t.Fatalf("while nobody reads the log: %q, %v", got, err)
	}
	close(log.gate)
	if got, err := ask(t.Context(), p.Conn(), "flush"); err != nil || got != "true" {
		t.Fatalf("the log was not written: %q, %v", got, err)
	}
	kill(t, p)
	if text := log.text(); !strings.Contains(text, "log lines dropped") || strings.Count(text, `"@message":"many words`) < 1000 {
		t.Errorf("the log has %d lines and no count of the dropped", strings.Count(text, `"@message":"many words`))
	}
}

// T5: what is printed before the handshake breaks it. A shim that uses bootstrap cannot; another gets a clear error.
func TestTrapT5PrintsBeforeTheHandshake(t *testing.T) {
	t.Parallel()
	p := start(t, options(t, "prints"))
	if got, err := ask(t.Context(), p.Conn(), "echo hello"); err != nil || got != "hello" {
		t.Errorf("%q, %v", got, err)
	}
}

func TestTrapT5RubbishInPlaceOfTheHandshake(t *testing.T) {
	t.Parallel()
	_, err := startScript(t, patience, `printf 'hel\033lo\377 %0300d\n' 1`, "sleep 1000")
	checkText(t, err, "no handshake", `"hel\x1blo\xff 000`, "and 108 more bytes", "bootstrap.Serve")
	checkKind(t, err, registry.ErrInternal)
}

func TestTrapT5RubbishWithoutANewline(t *testing.T) {
	t.Parallel()
	_, err := startScript(t, time.Second, "printf 'Password: '", "exec sleep 1000")
	checkText(t, err, "sent no handshake", `on stdout "Password: "`)
}

func TestTrapT5StdoutClosed(t *testing.T) {
	t.Parallel()
	_, err := startScript(t, time.Second, "exec >&-", "exec sleep 1000")
	checkText(t, err, "closed its stdout without a handshake")
}

// T6: a line over 64 KiB on stdout makes go-plugin stop reading.
func TestTrapT6EndlessFirstLine(t *testing.T) {
	t.Parallel()
	_, err := startScript(t, patience, "cat /dev/zero")
	checkText(t, err, "stdout has no handshake", `\x00\x00`, "more bytes")
}

// Both outputs without an end, in lines of 1 MiB, while the shim serves: it is answered, heard within bounds, and dies when it has to.
func TestTrapT6EndlessOutputOfAServingShim(t *testing.T) {
	t.Parallel()
	log := newLog()
	opts := options(t, "babbles")
	opts.Logger = log
	p := start(t, opts)
	bounded := func() bool {
		return strings.Contains(log.text(), "more bytes]") && strings.Contains(log.text(), "lines were dropped")
	}
	for end := time.Now().Add(patience); !bounded(); {
		if got, err := ask(t.Context(), p.Conn(), "echo hello"); err != nil || got != "hello" {
			t.Fatalf("%q, %v", got, err)
		}
		if time.Now().After(end) {
			t.Fatalf("the log of %d bytes has no line that was cut, or none was dropped", len(log.text()))
		}
	}
	kill(t, p)
	checkEmpty(t, opts.RunDir)
}

// T7: a shim outlives its host. Here the host is killed with SIGKILL and nothing else is done.
func TestTrapT7ShimDiesWithItsHost(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"plain", "stubborn"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			runDir := shortDir(t)
			awaitDeath(t, killedHost(t, shared.dir, runDir, mode))
			checkOrphansAreRemoved(t, runDir)
		})
	}
}

// checkOrphansAreRemoved is the other half of T8: what a killed host has left goes away at the next start, and nothing else.
func checkOrphansAreRemoved(t *testing.T, runDir string) {
	left, err := filepath.Glob(filepath.Join(runDir, "shim-*"))
	if err != nil || len(left) != 1 {
		t.Fatalf("the killed host has left %v, %v: this test proves nothing", left, err)
	}
	foreign := filepath.Join(runDir, "shim-of-somebody-else", "keep")
	if err := os.MkdirAll(filepath.Dir(foreign), 0o700); err != nil {
		t.Fatal(err)
	}
	writeFile(t, foreign, "", 0o600)
	opts := options(t, "plain")
	opts.RunDir = runDir
	first := start(t, opts)
	sockets, _ := filepath.Glob(filepath.Join(runDir, "shim-7-*", "plugin*"))
	second := start(t, opts) // whose collection must spare the first
	for _, path := range sockets {
		if _, err := os.Lstat(path); err != nil {
			t.Errorf("the first shim, which lives, lost %v", err)
		}
	}
	if _, err := os.Stat(left[0]); !os.IsNotExist(err) {
		t.Errorf("%s is still there (%v)", left[0], err)
	}
	kill(t, second)
	if got, err := ask(t.Context(), first.Conn(), "echo hello"); err != nil || got != "hello" {
		t.Errorf("the first shim: %q, %v", got, err)
	}
	kill(t, first)
	if _, err := os.Stat(foreign); err != nil {
		t.Error(err)
	}
}

// T8: sockets and directories stay behind after a SIGKILL, after a failed start, and go-plugin's own after both.
func TestTrapT8NothingLeftBehind(t *testing.T) {
	t.Parallel()
	opts := options(t, "plain")
	p := start(t, opts)
	sockets, _ := filepath.Glob(filepath.Join(opts.RunDir, "*", "plugin*"))
	if len(sockets) < 2 {
		t.Fatalf("sockets and go-plugin's directory are elsewhere (%v): this test proves nothing", sockets)
	}
	if err := unix.Kill(p.PID(), unix.SIGKILL); err != nil {
		t.Fatal(err)
	}
	awaitDone(t, p)
	kill(t, p)
	checkEmpty(t, opts.RunDir)

	opts.Env = []string{shimMode + "=dies"}
	_, err := launch.Start(t.Context(), opts)
	checkText(t, err, "exited with code 7", "cannot open the state: no such luck", "generation 7")
	checkKind(t, err, registry.ErrUnavailable)
	checkEmpty(t, opts.RunDir)
}

func TestDeathBySignalAtStart(t *testing.T) {
	t.Parallel()
	_, err := startScript(t, patience, "echo 'going down' >&2", "kill -SEGV $$")
	checkText(t, err, "killed by signal 11", "going down")
}

// T12: memory, descriptors and goroutines of the host grow with each plugin. What 24 lives leave would show, once each is enough.
// Not parallel: it counts what this process has.
func TestTrapT12LivesLeaveNothing(t *testing.T) {
	opts := options(t, "plain")
	live := func(p *launch.Process) {
		if _, err := ask(t.Context(), p.Conn(), "echo"); err != nil {
			t.Fatal(err)
		}
		kill(t, p)
	}
	idle := runtime.NumGoroutine()
	live(start(t, opts)) // what is made once is made now
	fds, goroutines := descriptors(t), settled(idle+2)
	for range 12 {
		a, b := startTwo(t, opts)
		live(a)
		live(b)
	}
	if now := descriptors(t); now > fds+2 {
		t.Errorf("%d descriptors, %d before", now, fds)
	}
	if now := settled(goroutines + 2); now > goroutines+2 {
		t.Errorf("%d goroutines, %d before", now, goroutines)
	}
}

// The same for starts that fail, in every way of these tests.
func TestTrapT12FailedStartsLeaveNothing(t *testing.T) {
	idle := runtime.NumGoroutine()
	fail := func() {
		for _, mode := range []string{"dies", "version", "nocert", "cookie"} {
			if p, err := launch.Start(t.Context(), options(t, mode)); err == nil {
				kill(t, p)
				t.Fatalf("%s was taken for a shim", mode)
			}
		}
		opts := options(t, "freezes")
		opts.StartTimeout = time.Second
		if _, err := launch.Start(t.Context(), opts); err == nil {
			t.Fatal("a frozen one was taken for a shim")
		}
	}
	fail()
	fds, goroutines, children := descriptors(t), settled(idle+2), offspring(t)
	for range 4 {
		fail()
	}
	if now := descriptors(t); now > fds+2 {
		t.Errorf("%d descriptors, %d before", now, fds)
	}
	if now := settled(goroutines + 2); now > goroutines+2 {
		t.Errorf("%d goroutines, %d before", now, goroutines)
	}
	if now := offspring(t); now > children {
		t.Errorf("%d processes, %d before", now, children)
	}
}

// offspring counts the children of this process, zombies too.
func offspring(t *testing.T) (n int) {
	tasks, err := filepath.Glob("/proc/self/task/*/children")
	if err != nil || len(tasks) == 0 {
		t.Fatal("this kernel does not say who our children are", err)
	}
	for _, path := range tasks {
		text, _ := os.ReadFile(path)
		n += len(strings.Fields(string(text)))
	}
	return n
}

// startTwo starts two at once, as a swap may.
func startTwo(t *testing.T, opts launch.Options) (a, b *launch.Process) {
	var err error
	started := make(chan struct{})
	go func() {
		defer close(started)
		b, err = launch.Start(t.Context(), opts)
	}()
	a = start(t, opts)
	<-started
	if err != nil {
		t.Fatal(err)
	}
	return a, b
}

func descriptors(t *testing.T) int {
	open, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(open)
}

// settled counts goroutines once they are no more than limit, or patience is over: some of grpc's end a little later.
func settled(limit int) int {
	for end := time.Now().Add(time.Second); ; runtime.Gosched() {
		if n := runtime.NumGoroutine(); n <= limit || time.Now().After(end) {
			return n
		}
	}
}

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
	digest, err := store.Add(t.Context(), source, "")
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

// The same, but the content of the very file is changed, as only its owner can.
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
	digest, err := store.Add(t.Context(), source, "")
	if err != nil {
		t.Fatal(err)
	}
	writeFile(t, filepath.Join(dir, "store", digest.SHA256), script(dir, "evil"), 0o700)
	_, err = launch.Start(t.Context(), launch.Options{Store: store, Digest: digest, RunDir: dir, StartTimeout: patience})
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

// T14: the host's environment leaks to the plugin, and wins over what was set for it.
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
	allowed := []string{"PATH", "TMPDIR", "LANG", "GORACE", "GOCOVERDIR", "BOTH", shimMode, "HOLDFAST_SHIM", "HOLDFAST_LIFE_FD"}
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

// T15: another mount namespace, or sockets in /tmp, split host and shim.
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

// T16: whoever opens the socket can shut the plugin down.
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

// The other direction: a process that is not the shim listens where the handshake says.
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
	_, err := startScript(t, patience, "echo $PLUGIN_UNIX_SOCKET_DIR >"+ready, "until [ -e "+ready+".done ]; do :; done",
		"echo \"1|1|unix|$PLUGIN_UNIX_SOCKET_DIR/plugin1|grpc|"+cert+"\"", "exec sleep 1000")
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
		{"core version", "2|1|" + at + "|grpc|", registry.ErrUnsupported, []string{"go-plugin's own protocol", "version 2"}},
		{"net/rpc", "1|1|" + at + "|netrpc|", registry.ErrUnsupported, []string{`"netrpc"`, "gRPC only"}},
		{"tcp", "1|1|tcp|127.0.0.1:1|grpc|", registry.ErrDenied, []string{"only a unix socket"}},
		{"outside", "1|1|unix|/tmp/plugin1|grpc|", registry.ErrDenied, []string{"outside its own directory"}},
		{"dots", "1|1|unix|$PLUGIN_UNIX_SOCKET_DIR/../plugin1|grpc|", registry.ErrDenied, []string{"outside its own directory"}},
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
