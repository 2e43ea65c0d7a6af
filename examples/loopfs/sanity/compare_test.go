package sanity

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// allFake are the capabilities of csifake that csi-sanity tests.
const allFake = "ALL,GROUP_CONTROLLER_SERVICE,CREATE_DELETE_GET_VOLUME_GROUP_SNAPSHOT,GET_VOLUME,GET_SNAPSHOT," +
	"SINGLE_NODE_MULTI_WRITER,service/VOLUME_ACCESSIBILITY_CONSTRAINTS,GET_VOLUME_HEALTH,LIST_VOLUME_HEALTH," +
	"GET_STORAGE_HEALTH"

// drivers are run straight and over the endpoint.
var drivers = []configuration{
	{Name: "loopfs", Args: []string{"--backend=loop"}, Size: 16 * mib, Larger: 24 * mib},
	{Name: "csifake", Driver: "csifake", Args: []string{"--caps=" + allFake, "--mutable=speed", "--max-volumes=3",
		"--topology=zone=z1", "--mounts", "--journal=DIR/journal"}, Size: mib, Larger: 2 * mib, Mutable: true,
		Limited: true},
}

// Over the CSI endpoint csi-sanity has the same result for each spec as straight at the driver, while shims are
// swapped.
func TestEndpointGivesTheSameResults(t *testing.T) {
	needsRoot(t)
	binary := build(t)
	for _, c := range drivers {
		t.Run(c.Name, func(t *testing.T) { compare(t, c, binary) })
	}
}

// TestForeignDriver is TestEndpointGivesTheSameResults for drivers that are not ours: the mock driver of csi-test 4,
// which is built on CSI 1.3, and with HOSTPATH=PROGRAM the host path driver of Kubernetes.
func TestForeignDriver(t *testing.T) {
	needsRoot(t)
	dir := os.Getenv("FOREIGN")
	if dir == "" {
		t.Skip("run make foreign, which builds the drivers")
	}
	binary := build(t)
	link := func(program, name string) {
		t.Helper()
		if err := os.Symlink(program, filepath.Join(filepath.Dir(binary), name)); err != nil {
			t.Fatal(err)
		}
	}
	link(filepath.Join(dir, "mock-driver"), "mock-driver")
	foreign := []configuration{{Name: "mock driver", Driver: "mock-driver", Args: []string{"-name=mock.example.org",
		"-permissive-target-path"}, Size: mib, Larger: 2 * mib}}
	if program := os.Getenv("HOSTPATH"); program != "" {
		link("/bin/sh", "sh")
		foreign = append(foreign, configuration{Name: "host path", Driver: "sh", Args: []string{"-c",
			"exec " + program + " -drivername hostpath.csi.k8s.io -nodeid n1 -statedir DIR/hostpath -endpoint " +
				"$CSI_ENDPOINT"},
			Size: mib, Larger: 2 * mib})
	}
	for _, c := range foreign {
		t.Run(c.Name, func(t *testing.T) { compare(t, c, binary) })
	}
}

func needsRoot(t *testing.T) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("the drivers need root for mounts: run make sanity as root")
	}
	if err := lacking(); err != nil {
		t.Fatal(err)
	}
}

// compare runs csi-sanity twice. A spec may fail, if it fails in both runs.
func compare(t *testing.T, c configuration, binary string) {
	c.MayFail = c.Driver != "" && c.Driver != "csifake"
	straight := run(t, c, binary)
	c.Endpoint = true
	over := run(t, c, binary)
	for _, difference := range differences(straight, over) {
		t.Error(difference)
	}
	count := map[string]int{}
	for _, s := range straight {
		count[s.State]++
		if s.State == "failed" {
			t.Logf("the driver fails %q in both runs: %s", s.text(), s.Failure.Message)
		}
	}
	t.Logf("%v", count)
	if count["passed"] < 30 {
		t.Errorf("csi-sanity has run too little: %v", count)
	}
}

// differences returns the specs whose results differ.
func differences(straight, over []spec) (found []string) {
	states := func(specs []spec) map[string]string {
		all := map[string]string{}
		for _, s := range specs {
			all[s.text()] = s.State
		}
		return all
	}
	a, b := states(straight), states(over)
	for text := range maps.Keys(b) {
		if _, both := a[text]; !both {
			a[text] = "absent"
		}
	}
	for _, text := range slices.Sorted(maps.Keys(a)) {
		if b[text] == "" {
			b[text] = "absent"
		}
		if a[text] != b[text] {
			found = append(found, fmt.Sprintf("%q: %s straight, %s over the endpoint: %s", text, a[text], b[text],
				failureOf(slices.Concat(straight, over), text)))
		}
	}
	return found
}

func failureOf(specs []spec, text string) string {
	for _, s := range specs {
		if s.text() == text && s.Failure.Message != "" {
			return strings.TrimSpace(s.Failure.Message)
		}
	}
	return ""
}

// The negative control of the comparison.
func TestDifferences(t *testing.T) {
	made := func(text, state string) spec { return spec{Name: text, State: state} }
	straight := []spec{made("a", "passed"), made("b", "failed"), made("c", "skipped")}
	for want, over := range map[int][]spec{
		0: {made("c", "skipped"), made("b", "failed"), made("a", "passed")},
		1: {made("a", "passed"), made("b", "passed"), made("c", "skipped")},
		2: {made("a", "failed"), made("b", "failed")},
		4: {made("d", "passed")},
	} {
		if found := differences(straight, over); len(found) != want {
			t.Errorf("found %q", found)
		}
	}
}
