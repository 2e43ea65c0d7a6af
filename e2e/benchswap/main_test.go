package benchswap

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"holdfast/internal/nextrelease"
	"holdfast/internal/testbin"
)

// roles are what this program does as another process.
var roles = map[string]func() error{"plugins": servePlugins, "writer": write}

// roleVariable is the environment variable that names the role.
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
	faulty   string    // the program that package fault gives faults to
)

func run(m *testing.M) int {
	cache, err := filepath.Abs("../../.cache")
	if err == nil {
		err = os.MkdirAll(cache, 0o755)
	}
	overlay := ""
	if err == nil {
		overlay, err = nextrelease.Flag(cache)
	}
	dir := ""
	if err == nil { // the next release has another protocol number and another schema
		dir, err = testbin.Build(testbin.Shim("shim"), testbin.Shim("shim-next", overlay),
			testbin.FaultyShim("shim-faulty"))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	binaries = [2]string{filepath.Join(dir, "shim"), filepath.Join(dir, "shim-next")}
	faulty = filepath.Join(dir, "shim-faulty")
	return m.Run()
}

// other is this program as another process, in a role.
func other(role string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), roleVariable+"="+role)
	cmd.Stderr = os.Stderr
	return cmd
}
