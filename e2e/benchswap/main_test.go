package benchswap

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"holdfast/internal/nextrelease"
	"holdfast/internal/testbin"
)

// servesPlugins is the environment variable that makes this program the process of the plugins.
const servesPlugins = "HOLDFAST_BENCHSWAP_PLUGINS"

func TestMain(m *testing.M) {
	if os.Getenv(servesPlugins) != "" {
		if err := servePlugins(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(run(m))
}

// binaries are two builds of the shim. The next release has another protocol number and another schema.
var binaries [2]string

func run(m *testing.M) int {
	if flag.Parse(); testing.Short() { // the test is skipped, and needs no binaries
		return m.Run()
	}
	cache, err := filepath.Abs("../../.cache")
	if err == nil {
		err = os.MkdirAll(cache, 0o755)
	}
	overlay := ""
	if err == nil {
		overlay, err = nextrelease.Flag(cache)
	}
	dir := ""
	if err == nil {
		dir, err = testbin.Build(testbin.Shim("holdfast-shim"), testbin.Shim("holdfast-shim-next", overlay))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	binaries = [2]string{filepath.Join(dir, "holdfast-shim"), filepath.Join(dir, "holdfast-shim-next")}
	return m.Run()
}
