package e2e

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"testing"

	"holdfast/internal/fault"
	"holdfast/internal/nextrelease"
)

// bin is the directory with the binaries that all tests use.
var bin string

// faulty is the program of the shims that fail on purpose: see package fault.
var faulty string

// source is a package, and whether it is built as of the release after this one.
type source struct {
	pkg  string
	next bool
}

// programs are built once, with the race detector if this test has it.
var programs = map[string]source{
	"holdfast": {pkg: "../host/cmd/holdfast"}, "holdfast-shim": {pkg: "../shim"}, "holdfast-shim-next": {pkg: "../shim", next: true},
	"loopfs": {pkg: "../examples/loopfs"}, "csifake": {pkg: "../internal/csifake/cmd/csifake"},
}

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	if errand := os.Getenv(hostErrand); errand != "" {
		return hostMain(errand)
	}
	if flag.Parse(); testing.Short() {
		if at := flag.Lookup("test.parallel"); at.Value.String() == at.DefValue { // nobody has said how many
			_ = flag.Set("test.parallel", fmt.Sprint(2*runtime.GOMAXPROCS(0))) // these mostly wait for processes
		}
	}
	dir, err := os.MkdirTemp("", "h-bin-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	bin = dir
	for name, p := range programs {
		args := append([]string{"build", "-ldflags=-s -w"}, raceFlag...) // what is smaller is linked, copied and hashed sooner
		if p.next {
			overlay, err := nextrelease.Flag(dir)
			if err != nil {
				fmt.Fprintln(os.Stderr, err)
				return 1
			}
			args = append(args, overlay)
		}
		if out, err := exec.Command("go", append(args, "-o", filepath.Join(dir, name), p.pkg)...).CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "build %s: %v\n%s", name, err, out)
			return 1
		}
	}
	if faulty, err = fault.Build(dir, raceFlag...); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}
