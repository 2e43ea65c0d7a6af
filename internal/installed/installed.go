// Package installed is what tests ask for programs that are no part of Go, and that a machine may lack.
package installed

import (
	"os"
	"os/exec"
	"testing"
)

// Tool skips a test that needs a program which this machine does not have, and says which Debian package has it. Where CI is set, what is
// needed has been installed, and a test that would be skipped fails.
func Tool(t testing.TB, name, pkg string) {
	t.Helper()
	_, err := exec.LookPath(name)
	switch {
	case err == nil:
	case os.Getenv("CI") != "":
		t.Fatalf("%s is not here: .ci/run has to install %s", name, pkg)
	default:
		t.Skipf("%s is not here: apt-get install %s", name, pkg)
	}
}

// FileSystem skips a test that needs a file system which nothing here can make.
func FileSystem(t testing.TB, kind string) {
	t.Helper()
	pkg := "e2fsprogs"
	if kind == "xfs" {
		pkg = "xfsprogs"
	}
	Tool(t, "mkfs."+kind, pkg)
}
