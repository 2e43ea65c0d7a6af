// Package installed skips tests that need programs which a machine may lack.
package installed

import (
	"os"
	"os/exec"
	"testing"
)

// Tool skips a test that needs a program which is not installed, and names the Debian package. If CI is set, the test
// fails instead.
func Tool(t testing.TB, name, pkg string) {
	t.Helper()
	_, err := exec.LookPath(name)
	switch {
	case err == nil:
	case os.Getenv("CI") != "":
		t.Fatalf("%s is not installed: .ci/run has to install %s", name, pkg)
	default:
		t.Skipf("%s is not installed: apt-get install %s", name, pkg)
	}
}

// FileSystem skips a test that needs a file system which no installed program can make.
func FileSystem(t testing.TB, kind string) {
	t.Helper()
	pkg := "e2fsprogs"
	if kind == "xfs" {
		pkg = "xfsprogs"
	}
	Tool(t, "mkfs."+kind, pkg)
}
