package taskdriver

import (
	"errors"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"holdfast/hooks"
	"holdfast/internal/mount"
	"holdfast/registry"
)

// programs are those that confine the devices of a version 2 group.
func programs(t *testing.T, group string) *link.QueryResult {
	t.Helper()
	f, err := os.Open(group)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	all, err := link.QueryPrograms(link.QueryOptions{Target: int(f.Fd()), Attach: ebpf.AttachCGroupDevice})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// ended stops a task and waits until nothing that confined it is left. The kernel frees a program a moment after its group.
func ended(t *testing.T, h Handle) {
	t.Helper()
	var ids []ebpf.ProgramID
	for _, dir := range h.Cgroups {
		if exists(dir + "/cgroup.controllers") {
			for _, p := range programs(t, dir).Programs {
				ids = append(ids, p.ID)
			}
		}
	}
	if err := NewExec().Stop(t.Context(), h, time.Minute); err != nil {
		t.Fatal(err)
	}
	noGroups(t, h.ID)
	deadline := time.Now().Add(10 * time.Second)
	for _, id := range ids {
		for {
			p, err := ebpf.NewProgramFromID(id)
			if errors.Is(err, os.ErrNotExist) {
				break
			}
			if err != nil || time.Now().After(deadline) {
				t.Fatalf("program %d is left: %v", id, err)
			}
			p.Close()
			time.Sleep(10 * time.Millisecond)
		}
	}
}

// TestDevicesWithVersion2 runs the tests of devices once more where there is no cgroup version 1.
func TestDevicesWithVersion2(t *testing.T) {
	if os.Getenv(roleEnv) != "" {
		t.Skip("this is the inner run")
	}
	if os.Getuid() != 0 {
		t.Skip("only root takes cgroups out of a mount namespace")
	}
	fs := cgroups(t)
	if fs["cgroup2"] == 0 {
		t.Skip("no cgroup version 2 is mounted here")
	}
	if err := features.HaveProgramType(ebpf.CGroupDevice); errors.Is(err, ebpf.ErrNotSupported) {
		t.Skipf("this kernel has no programs that confine devices: %v", err)
	}
	if fs["cgroup"] == 0 {
		t.Skip("there is no cgroup version 1 here: the other tests have run with version 2")
	}
	out := again(t, version2, "Device|Rules|Confined|Survives|Leaked/exec")
	for _, name := range []string{
		"TestBlockDeviceIsTheTasks", "TestBlockDeviceIsReadOnly", "TestTheRulesAreTheGroups", "TestDeviceRulesSurviveAdoption",
	} {
		if !strings.Contains(out, "--- PASS: "+name+" ") {
			t.Errorf("with version 2 %s has not passed:\n%s", name, out)
		}
	}
}

// Without any cgroup root of the machine could do with a device what it likes: one that is to be read only is refused, one that may be
// used in full is given, and the notes say what else the task can use.
func TestDevicesWithoutAnyCgroup(t *testing.T) {
	if os.Getenv(roleEnv) == "" && os.Getuid() == 0 {
		if out := again(t, nogroups, "^TestDevicesWithoutAnyCgroup$"); !strings.Contains(out, "--- PASS: TestDevicesWithoutAnyCgroup ") {
			t.Errorf("without cgroups:\n%s", out)
		}
		return
	}
	if os.Getenv(roleEnv) != nogroups {
		t.Skip("only root takes cgroups out of a mount namespace, and does so once")
	}
	task := shell(t, `head -c 4 /dev/of-plan/zero | od -An -tx1`)
	give := func(access string) hooks.Plan {
		return hooks.Plan{Devices: []hooks.Device{{Source: "/dev/zero", Target: "/dev/of-plan/zero", Access: access}}}
	}
	task.Plan = give("r")
	_, err := NewExec().Start(t.Context(), task)
	if !errors.Is(err, registry.ErrUnsupported) || !strings.Contains(err.Error(), "give the orchestrator a writable cgroup") {
		t.Errorf("read-only: %v", err)
	}
	task.Plan = give("rw")
	h := start(t, NewExec(), task)
	wait(t, NewExec(), h)
	said(t, logs(t, NewExec(), h, Stdout), "00 00 00 00")
	if !strings.Contains(strings.Join(h.Warnings, "; "), "can use all devices") {
		t.Errorf("warnings: %q", h.Warnings)
	}
}

// again runs tests in another process with a mount namespace of its own, from which the role takes cgroups.
func again(t *testing.T, role, tests string) string {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.v", "-test.run="+tests)
	cmd.Env = append(os.Environ(), roleEnv+"="+role)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNS}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", role, err, out)
	}
	return string(out)
}

// leaves is what each role takes.
var leaves = map[string][]string{version2: {"cgroup"}, nogroups: {"cgroup", "cgroup2"}}

// leave takes cgroup file systems out of this process's mount namespace, and out of no other.
func leave(types ...string) {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SLAVE, ""); err != nil {
		panic(err)
	}
	table, err := mount.Table(0)
	if err != nil {
		panic(err)
	}
	for _, m := range table {
		if slices.Contains(types, m.FSType) {
			if err := unix.Unmount(m.Point, unix.MNT_DETACH); err != nil {
				panic(err)
			}
		}
	}
}

// cgroups counts the mounts of each version.
func cgroups(t *testing.T) map[string]int {
	t.Helper()
	n := map[string]int{}
	for _, line := range mountLines(t, " - cgroup") {
		_, after, _ := strings.Cut(line, " - ")
		n[strings.Fields(after)[0]]++
	}
	return n
}
