package sanity

import (
	"encoding/json"
	"encoding/xml"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// configuration is a way to start loopfs, and what csi-sanity requests from it.
type configuration struct {
	Name         string
	Args         []string // of loopfs
	Access       string   // "" is mount
	Size, Larger int64    // of volumes, before and after they are expanded
	Limited      bool     // the number of volumes on the node
	Driver       string   // a program beside loopfs; "" is loopfs
	Mutable      bool     // csi-sanity modifies volumes
	MayFail      bool     // specs may fail, and are compared
	Endpoint     bool     // the driver is a plugin of holdfast, and csi-sanity calls its CSI endpoint during swaps

	skips []skip
}

const mib = 1 << 20

var configurations = []configuration{
	{Name: "ext4", Args: []string{"--backend=loop"}, Size: 20 * mib, Larger: 40 * mib, skips: always},
	{Name: "block", Args: []string{"--backend=loop"}, Access: "block", Size: 16 * mib, Larger: 17 * mib, skips: always},
	{Name: "dir", Args: []string{"--backend=dir"}, Size: 16 * mib, Larger: 32 * mib,
		skips: slices.Concat(ofDirectories, always)},
}

func TestSanity(t *testing.T) {
	needsRoot(t)
	binary := build(t)
	for _, c := range configurations {
		t.Run(c.Name, func(t *testing.T) {
			t.Parallel()
			specs := run(t, c, binary)
			for _, found := range findings(c.skips, specs) {
				t.Error(found)
			}
			t.Logf("%d specs", len(specs))
		})
	}
}

// lacking returns an error that names the package to install, if a program that loopfs runs is missing. Without it no
// configuration runs, so none is skipped.
func lacking() error {
	for _, program := range []string{"mkfs.ext4", "resize2fs"} {
		if _, err := exec.LookPath(program); err != nil {
			return fmt.Errorf("%w: apt-get install e2fsprogs", err)
		}
	}
	return nil
}

// build builds loopfs, and beside it holdfast and its shim, in their own module. It returns the path of loopfs.
func build(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for name, pkg := range map[string]string{
		"loopfs": "./examples/loopfs", "holdfast": "./host/cmd/holdfast", "holdfast-shim": "./shim",
		"csifake": "./internal/csifake/cmd/csifake",
	} {
		cmd := exec.CommandContext(t.Context(), "go", "build", "-o", filepath.Join(dir, name), pkg)
		cmd.Dir = "../../.."
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("build %s: %v\n%s", pkg, err, out)
		}
	}
	return filepath.Join(dir, "loopfs")
}

// spec is a spec in a JUnit report.
type spec struct {
	Name    string `xml:"name,attr"`   // "[It]" and its text; else it is a set-up
	State   string `xml:"status,attr"` // passed, failed, skipped or pending
	Failure struct {
		Message string `xml:"message,attr"`
	} `xml:"failure"`
}

func (s spec) text() string { return strings.TrimPrefix(s.Name, "[It] ") }

// run runs csi-sanity once: in a process of its own, as ginkgo runs once per process, and in a mount namespace of its
// own.
func run(t *testing.T, c configuration, binary string) []spec {
	t.Helper()
	dir, err := os.MkdirTemp("", "h-") // short, for sockets
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	job, err := json.Marshal(task{Configuration: c, Dir: dir, Binary: binary})
	if err != nil {
		t.Fatal(err)
	}
	report := filepath.Join(dir, "report.xml")
	cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "-ginkgo.junit-report="+report, "-ginkgo.no-color",
		"-ginkgo.succinct", "-ginkgo.seed=1")
	cmd.Env = append(os.Environ(), taskVariable+"="+string(job))
	cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("csi-sanity: %v\n%s", err, out)
	}
	text, err := os.ReadFile(report)
	if err != nil {
		t.Fatal(err)
	}
	var all struct {
		Specs []spec `xml:"testsuite>testcase"`
	}
	if err := xml.Unmarshal(text, &all); err != nil {
		t.Fatalf("the report: %v", err)
	}
	return slices.DeleteFunc(all.Specs, func(s spec) bool { return !strings.HasPrefix(s.Name, "[It] ") })
}

// findings returns the specs that were neither passed nor skipped as expected.
func findings(list []skip, specs []spec) []string {
	var found []string
	used := make([]bool, len(list))
	for _, s := range specs {
		i, may := allowed(list, s.text())
		switch {
		case s.State == "passed" && !may:
		case (s.State == "skipped" || s.State == "pending") && may:
			used[i] = true
		default:
			found = append(found, fmt.Sprintf("%s: %q %s", s.State, s.text(), s.Failure.Message))
		}
	}
	for i, s := range list {
		if !used[i] {
			found = append(found, fmt.Sprintf("no spec that begins with %q was skipped; take it off the list", s.spec))
		}
	}
	return found
}

// The negative control of the check.
func TestFindings(t *testing.T) {
	made := func(text, state string) spec { return spec{Name: text, State: state} }
	good := []spec{made("x", "passed")}
	for _, s := range always {
		good = append(good, made(s.spec+"y", "skipped"))
	}
	for what, specs := range map[string][]spec{
		"a spec that failed":            append(slices.Clone(good), made("z", "failed")),
		"a skip that is on no list":     append(slices.Clone(good), made("NodeStageVolume", "skipped")),
		"a spec that should be skipped": append(slices.Clone(good), made(always[0].spec, "passed")),
		"a list that is out of date":    good[:len(good)-1],
	} {
		if found := findings(always, specs); len(found) != 1 {
			t.Errorf("%s: found %q", what, found)
		}
	}
	if found := findings(always, good); len(found) > 0 {
		t.Errorf("in a good report: found %q", found)
	}
}
