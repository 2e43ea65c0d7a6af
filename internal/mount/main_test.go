package mount

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// inside is set when this binary runs itself in a user namespace.
const inside = "MNT_TEST_INSIDE"

// TestMountsInAUserNamespaceOfTheTest runs the other tests as an ordinary user would: unshare -Urm, mapped from nobody.
func TestMountsInAUserNamespaceOfTheTest(t *testing.T) {
	if os.Getenv(inside) != "" {
		t.Skip("this is the inner run")
	}
	dir, err := os.MkdirTemp("/tmp", "h-") // short, and for every user
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	must(t, os.Chmod(dir, 0o777))
	self := filepath.Join(dir, "mnt.test")
	b, err := os.ReadFile(os.Args[0])
	must(t, err)
	must(t, os.WriteFile(self, b, 0o755))
	// Tests that wait for deadlines or repeat an operation many times prove nothing more there.
	skip := "Hung|SwappedLinks|KilledHelper|WithoutAHelper"
	cmd := exec.CommandContext(t.Context(), "unshare", "-Urm", self, "-test.v", "-test.skip="+skip)
	cmd.Dir = dir
	cmd.Env = []string{inside + "=1", "TMPDIR=" + dir, "PATH=" + os.Getenv("PATH"), "GORACE=atexit_sleep_ms=0"}
	if os.Getuid() == 0 {
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	}
	out, err := cmd.CombinedOutput()
	if err != nil && strings.Contains(string(out), "unshare failed") {
		t.Skipf("this machine allows no user namespaces: %s", out)
	}
	if err != nil || !strings.Contains(string(out), "--- PASS: TestBidirectional") {
		t.Fatalf("in a user namespace: %v\n%s", err, out)
	}
}

// needMounts skips the test if no mount can be made. The run in the user namespace shows that a capable machine does
// not skip.
func needMounts(t *testing.T) {
	t.Helper()
	err := OnThread(func() error { return unix.Unshare(unix.CLONE_NEWNS) })
	if err != nil {
		t.Skipf("mounts cannot be made here: %v", err)
	}
}

// tempDir returns a directory for mounts, which end with the test.
func tempDir(t *testing.T) string {
	t.Helper()
	needMounts(t)
	dir, err := os.MkdirTemp("", "h-")
	must(t, err)
	t.Cleanup(func() {
		for range 64 {
			if unix.Unmount(last(raw(t, dir)), 0) != nil {
				break
			}
		}
		if left := raw(t, dir); len(left) > 0 {
			t.Errorf("mounts are left: %q", left)
		}
		_ = os.RemoveAll(dir)
	})
	return dir
}

// raw lists the mount points at or below dir, from a separate parse of mountinfo.
func raw(t *testing.T, dir string) []string {
	t.Helper()
	b, err := os.ReadFile("/proc/self/mountinfo")
	must(t, err)
	var out []string
	for line := range strings.Lines(string(b)) {
		point := strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`, `\043`,
			"#").Replace(strings.Fields(line)[4])
		if point == dir || strings.HasPrefix(point, dir+"/") {
			out = append(out, point)
		}
	}
	return out
}

func last(list []string) string {
	if len(list) == 0 {
		return ""
	}
	return list[len(list)-1]
}

func mkdir(t *testing.T, elem ...string) string {
	t.Helper()
	dir := filepath.Join(elem...)
	must(t, os.MkdirAll(dir, 0o755))
	return dir
}

func write(t *testing.T, text string, elem ...string) string {
	t.Helper()
	file := filepath.Join(elem...)
	must(t, os.WriteFile(file, []byte(text), 0o644))
	return file
}

func mountTmpfs(t *testing.T, at string) {
	t.Helper()
	must(t, unix.Mount("test", at, "tmpfs", 0, "size=64k"))
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// wantErr checks that err is of a kind and has a text. If kind is nil, any error will do.
func wantErr(t *testing.T, err, kind error, text string) {
	t.Helper()
	if err == nil || kind != nil && !errors.Is(err, kind) || !strings.Contains(err.Error(), text) {
		t.Errorf("the error is %v, want %v with %q", err, kind, text)
	}
}

// exists reports whether a file exists.
func exists(t *testing.T, path string) bool {
	t.Helper()
	_, err := os.Lstat(path)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return err == nil
}
