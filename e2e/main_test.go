package e2e

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"runtime"
	"syscall"
	"testing"

	"holdfast/internal/testbin"
)

// bin is the directory with the programs that all tests execute. They must not be changed.
var bin string

// faulty is the path of the program that package fault gives faults to.
var faulty string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) (code int) {
	if file := os.Getenv(hostTaskVariable); file != "" {
		return hostMain(file)
	}
	if socket := os.Getenv(relayVariable); socket != "" {
		return relayMain(socket)
	}
	if sockets := os.Getenv(proxyVariable); sockets != "" {
		return proxyMain(sockets)
	}
	if os.Getenv("GORACE") == "" { // a program with the race detector sleeps for a second before it exits
		_ = os.Setenv("GORACE", "atexit_sleep_ms=0")
	}
	if signal.Ignored(os.Interrupt) { // as in a background job of a shell; the commands of scripts would inherit it
		signal.Notify(make(chan os.Signal, 1), os.Interrupt)
	}
	flag.Parse()
	if parallel := flag.Lookup("test.parallel"); parallel.Value.String() == parallel.DefValue {
		_ = flag.Set("test.parallel", fmt.Sprint(2*runtime.GOMAXPROCS(0))) // most tests wait for processes
	}
	var err error
	bin, err = testbin.Build(testbin.Shim("holdfast-shim"), testbin.FaultyShim("holdfast-shim-faulty"),
		testbin.Program{Name: "holdfast", Package: "holdfast/host/cmd/holdfast"},
		testbin.Program{
			Name: "holdfast-task", Package: "holdfast/host/cmd/holdfast-task",
			Flags: []string{"-tags", "taskparent,netgo,osusergo"},
		},
		testbin.Program{Name: "loopfs", Package: "holdfast/examples/loopfs"},
		testbin.Program{Name: "csifake", Package: "holdfast/internal/csifake/cmd/csifake"},
		testbin.Program{Name: "cosanity", Package: "holdfast/internal/csifake/cmd/cosanity"})
	faulty = bin + "/holdfast-shim-faulty"
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	free, err := mountTempDir()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer func() {
		if err := free(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			code = 1
		}
	}()
	return m.Run()
}

// mountTempDir keeps the files of all tests in memory: no test here is about durability but those that make a disk of
// their own (newDisk). Without root it does nothing.
func mountTempDir() (free func() error, err error) {
	if os.Getuid() != 0 {
		return func() error { return nil }, nil
	}
	dir, err := os.MkdirTemp("/tmp", "h-") // not TMPDIR: paths of sockets are limited to 107 bytes
	if err != nil {
		return nil, err
	}
	if err := syscall.Mount("none", dir, "tmpfs", 0, "mode=755"); err != nil {
		return nil, errors.Join(fmt.Errorf("mount a tmpfs at %s: %w", dir, err), os.Remove(dir))
	}
	return func() error {
		return errors.Join(syscall.Unmount(dir, syscall.MNT_DETACH), os.Remove(dir))
	}, os.Setenv("TMPDIR", dir)
}
