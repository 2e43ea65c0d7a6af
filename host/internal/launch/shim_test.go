package launch_test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	hclog "github.com/hashicorp/go-hclog"
	plugin "github.com/hashicorp/go-plugin"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"holdfast/proto/bootstrap"
)

// mode returns the first argument that makes this test binary a shim, or a host to be killed, and a file for it.
func mode() (mode, file string) {
	args := append(os.Args[1:], "", "")
	if strings.HasPrefix(args[0], "-") { // a flag of the tests
		return "", ""
	}
	return args[0], args[1]
}

func init() {
	if mode, _ := mode(); mode == "prints" {
		fmt.Println("a library prints while it initialises")
	}
}

func TestMain(m *testing.M) {
	switch mode, file := mode(); mode {
	case "":
		os.Exit(runTests(m))
	case "host":
		hostMain(os.Args[2], os.Args[3], os.Args[4], os.Args[5:]...)
	default:
		os.Exit(shimMain(mode, file))
	}
}

// shimLog is the log of this process as a shim.
var shimLog = sync.OnceValue(func() *bootstrap.Logger { return bootstrap.NewLogger(hclog.Info) })

// shimMain is the program of the test shims.
func shimMain(mode, file string) int {
	log := shimLog()
	opts := bootstrap.ServeOptions{Logger: log}
	switch mode {
	case "prints":
		fmt.Println("and main prints too")
		go func() {
			for range 1000 {
				fmt.Println("1|1|no handshake")
			}
		}()
	case "hostile":
		hostileLines()
	case "dies":
		fmt.Fprintln(os.Stderr, "cannot open the state: no such luck")
		return 7
	case "version":
		opts.Versions = []int{98, 99}
	case "nocert":
		os.Unsetenv("PLUGIN_CLIENT_CERT")
	case "cookie":
		plugin.Serve(&plugin.ServeConfig{
			HandshakeConfig: plugin.HandshakeConfig{MagicCookieKey: "OTHER_PROGRAM", MagicCookieValue: "x"},
		})
		return 0
	case "freezes": // in its first call, after its handshake
		freezes := func(ctx context.Context, _ any, _ *grpc.UnaryServerInfo, _ grpc.UnaryHandler) (any, error) {
			_ = os.WriteFile(file, nil, 0o600)
			_ = syscall.Kill(os.Getpid(), syscall.SIGSTOP)
			<-ctx.Done()
			return nil, ctx.Err()
		}
		opts.Server = []grpc.ServerOption{grpc.ChainUnaryInterceptor(freezes)}
	case "babbles":
		go babble()
	case "ignores": // the end of its host: the life pipe has no end, as this process writes to it
		ignored, _ = os.OpenFile("/proc/self/fd/3", os.O_WRONLY, 0)
		locked = lockDatabase(file)
	case "locks":
		locked = lockDatabase(file)
	case "unshared": // a thread other than the first has a mount namespace of its own
		runtime.LockOSThread()
		unshared := make(chan error)
		go func() {
			runtime.LockOSThread()
			unshared <- unix.Unshare(unix.CLONE_NEWNS)
			select {}
		}()
		if err := <-unshared; err != nil {
			panic(err)
		}
	case "stubborn":
		opts.Run = func(context.Context) error { select {} }
	}
	if err := bootstrap.Serve(context.Background(), register, opts); err != nil {
		log.Error("serve", "error", err)
		log.Flush(time.Second)
		return 1
	}
	return 0
}

// ignored keeps the shim of mode "ignores" from seeing the end of its life pipe. locked is the database of a shim that
// is active.
var ignored, locked *os.File

func lockDatabase(path string) *os.File {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err == nil {
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	}
	if err != nil {
		panic(err)
	}
	return f
}

// hostileLines prints lines that made hosts of go-plugin panic or block.
func hostileLines() {
	fmt.Fprintln(os.Stderr, `{"@message":5}`)
	fmt.Fprintln(os.Stderr, `{"@level":{},"@message":"level is an object","@timestamp":[]}`)
	fmt.Fprintln(os.Stderr, "not \xff UTF-8 \x1b[31mred")
	fmt.Fprintln(os.Stderr, strings.Repeat("x", 1<<20))
	fmt.Fprintln(os.Stderr, `{"@message":"`+strings.Repeat("y", 1<<20)+`"}`)
	fmt.Fprintln(os.Stderr, strings.Repeat("[", 60000))
	fmt.Fprintln(os.Stderr, `{"@level":"warn","@message":"still here","n":1e999,"deep":{"a":["\u001b[2J"]}}`)
}

// babble writes to both outputs without an end, in lines of 1 MiB.
func babble() {
	long := append(bytes.Repeat([]byte{0xfe, '|', '1'}, 1<<20/3), '\n')
	for {
		syscall.Write(1, long)
		syscall.Write(2, long)
		fmt.Fprintln(os.Stdout, `{"@message":5}`)
		fmt.Fprintln(os.Stderr, `{"@message":5}`)
	}
}

// echoer is the service of the test shim. Its request is a command.
type echoer struct{}

func register(_ context.Context, s *grpc.Server) error {
	s.RegisterService(&grpc.ServiceDesc{
		ServiceName: "test.Echo", HandlerType: (*any)(nil),
		Methods: []grpc.MethodDesc{{MethodName: "Do", Handler: handleDo}},
	}, echoer{})
	return nil
}

func handleDo(_ any, _ context.Context, decode func(any) error, _ grpc.UnaryServerInterceptor) (any, error) {
	in := new(wrapperspb.StringValue)
	if err := decode(in); err != nil {
		return nil, err
	}
	name, arg, _ := strings.Cut(in.GetValue(), " ")
	out, err := do(name, arg)
	return wrapperspb.String(out), err
}

func do(name, arg string) (string, error) {
	switch name {
	case "env":
		return strings.Join(os.Environ(), "\n"), nil
	case "size":
		return fmt.Sprint(len(arg)), nil
	case "stdout":
		for range 4096 { // far more than pipes hold: both the variable and the descriptor
			fmt.Println(strings.Repeat("o", 1024))
			syscall.Write(1, []byte(strings.Repeat("r", 1024)))
		}
	case "log":
		for range 20000 {
			shimLog().Info(strings.Repeat("many words ", 20))
		}
	case "flush":
		return fmt.Sprint(shimLog().Flush(patience)), nil
	case "daemon":
		return startDaemon(arg)
	case "hang":
		select {}
	case "stdin":
		text, err := io.ReadAll(os.Stdin)
		return fmt.Sprintf("%d bytes", len(text)), err
	case "panic":
		go func() { panic("the shim is broken") }()
		select {}
	}
	return arg, nil
}

// startDaemon starts a process outside the process group and session of the shim. The process has the shim's stderr,
// its life pipe, and its database with the lock.
func startDaemon(database string) (pid string, err error) {
	cmd := exec.Command("setsid", "sh", "-c", "sleep 1000 & echo $! >&5")
	r, w, err := os.Pipe()
	if err != nil {
		return "", err
	}
	stderr, _ := unix.Dup(2)
	life, _ := unix.Dup(3)
	cmd.Stderr = os.NewFile(uintptr(stderr), "stderr")
	cmd.ExtraFiles = []*os.File{os.NewFile(uintptr(life), "life"), lockDatabase(database), w}
	if err := cmd.Run(); err != nil {
		return "", err
	}
	line, err := bufio.NewReader(r).ReadString('\n')
	return strings.TrimSpace(line), err
}

func ask(ctx context.Context, conn grpc.ClientConnInterface, command string) (string, error) {
	out := new(wrapperspb.StringValue)
	err := conn.Invoke(ctx, "/test.Echo/Do", wrapperspb.String(command), out)
	return out.GetValue(), err
}
