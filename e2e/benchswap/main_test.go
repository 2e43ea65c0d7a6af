package benchswap

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"holdfast/internal/fault"
	"holdfast/internal/nextrelease"
)

// roles are what this program is as another process.
var roles = map[string]func() error{"plugins": servePlugins, "writer": write}

// roleVariable says in the environment which.
const roleVariable = "HOLDFAST_BENCHSWAP_ROLE"

func TestMain(m *testing.M) {
	if role, is := roles[os.Getenv(roleVariable)]; is {
		if err := role(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(run(m))
}

var (
	binaries [2]string // both builds of the shim
	faulty   string    // the shim that fails on purpose: see package fault
)

func run(m *testing.M) int {
	dir, err := os.MkdirTemp("", "h-bin-")
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	defer os.RemoveAll(dir)
	overlay, err := nextrelease.Flag(dir)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	for i, release := range []string{"", overlay} { // the second one has another protocol number and another schema
		binaries[i] = filepath.Join(dir, fmt.Sprint("shim-", i+1))
		args := append([]string{"build"}, raceFlag...)
		if release != "" {
			args = append(args, release)
		}
		cmd := exec.Command("go", append(args, "-o", binaries[i], "../../shim")...)
		if out, err := cmd.CombinedOutput(); err != nil {
			fmt.Fprintf(os.Stderr, "build the shim: %v\n%s", err, out)
			return 1
		}
	}
	if faulty, err = fault.Build(dir, raceFlag...); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}

// other is this program as another process, in a role.
func other(role string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleVariable+"="+role)
	cmd.Stderr = os.Stderr
	return cmd
}
