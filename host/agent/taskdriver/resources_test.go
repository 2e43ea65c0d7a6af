package taskdriver

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"holdfast/internal/mount"
)

func TestSettingsOfResources(t *testing.T) {
	const mib = 1 << 20
	for name, c := range map[string]struct {
		have   Resources
		v1, v2 string
	}{
		"none": {Resources{}, "", ""},
		"memory": {Resources{Memory: 64},
			fmt.Sprintf("memory.limit_in_bytes=%d memory.memsw.limit_in_bytes=%[1]d", 64*mib),
			fmt.Sprintf("memory.max=%d memory.swap.max=0 memory.oom.group=1", 64*mib)},
		"reserved": {Resources{Memory: 64, MemoryMax: 128}, fmt.Sprintf("memory.soft_limit_in_bytes=%d "+
			"memory.limit_in_bytes=%d memory.memsw.limit_in_bytes=%[2]d", 64*mib, 128*mib),
			fmt.Sprintf("memory.low=%d memory.max=%d memory.swap.max=0 memory.oom.group=1", 64*mib, 128*mib)},
		"share":    {Resources{CPU: 500}, "cpu.shares=500", "cpu.weight=19"},
		"smallest": {Resources{CPU: 1}, "cpu.shares=2", "cpu.weight=1"},
		"largest":  {Resources{CPU: 1 << 30}, "cpu.shares=262144", "cpu.weight=10000"},
		"cores": {Resources{Cores: 2}, "cpu.shares=2048 cpu.cfs_period_us=100000 cpu.cfs_quota_us=200000",
			"cpu.weight=79 cpu.max=200000 100000"},
	} {
		var v1, v2 []string
		for _, controller := range controllers {
			first, second := controller.settings(c.have)
			for _, s := range first {
				v1 = append(v1, s.file+"="+s.value)
			}
			for _, s := range second {
				v2 = append(v2, s.file+"="+s.value)
			}
		}
		if strings.Join(v1, " ") != c.v1 || strings.Join(v2, " ") != c.v2 {
			t.Errorf("%s: version 1 %q\nversion 2 %q", name, v1, v2)
		}
	}
}

// Files replace a hierarchy of version 2, because this machine may not have one with controllers.
func TestLimitsOfVersion2(t *testing.T) {
	for name, c := range map[string]struct {
		available, enabled, warning string
	}{
		"enabled":   {"cpu memory", "cpu memory", ""},
		"available": {"cpu memory", "", ""},
		"missing":   {"pids", "", "does not have controller memory"},
	} {
		t.Run(name, func(t *testing.T) {
			parent := t.TempDir()
			task := filepath.Join(parent, "task")
			must(t, os.Mkdir(task, 0o755))
			for file, content := range map[string]string{
				"cgroup.controllers": c.available, "cgroup.subtree_control": c.enabled, "task/memory.max": "max",
				"task/cpu.weight": "100",
			} {
				must(t, os.WriteFile(filepath.Join(parent, file), []byte(content), 0o600))
			}
			g := &cgroup{unified: task}
			g.applyLimits(Resources{CPU: 500, Memory: 1})
			if c.warning != "" {
				if len(g.warnings) != 2 || !strings.Contains(strings.Join(g.warnings, "\n"), c.warning) {
					t.Errorf("warnings: %q", g.warnings)
				}
				return
			}
			limit, _ := os.ReadFile(filepath.Join(task, "memory.max"))
			if len(g.warnings) > 0 || string(limit) != "1048576" {
				t.Errorf("memory.max is %q, warnings: %q", limit, g.warnings)
			}
		})
	}
}

func TestLimitsBelongBesideADelegatedSubgroup(t *testing.T) {
	unit := t.TempDir()
	own := filepath.Join(unit, "agent")
	if at := delegatedParent(own); at != own {
		t.Errorf("without the attribute: %s", at)
	}
	if err := unix.Setxattr(unit, "user.delegate", []byte("1"), 0); err != nil {
		t.Skipf("no extended attributes in %s: %v", unit, err)
	}
	if at := delegatedParent(own); at != unit {
		t.Errorf("with the attribute: %s", at)
	}
}

// A check without cgroups of its own, as that of holdfast validate, warns of controllers that no hierarchy has.
func TestLimitsWithoutAControllerAreNamed(t *testing.T) {
	unified := t.TempDir()
	must(t, os.WriteFile(filepath.Join(unified, "cgroup.controllers"), []byte("cpuset memory pids\n"), 0o600))
	for name, c := range map[string]struct {
		table     mount.Mounts
		unlimited []string
	}{
		"none":      {mount.Mounts{{FSType: "tmpfs", Super: "memory,cpu"}}, []string{"memory", "cpu"}},
		"version 1": {mount.Mounts{{FSType: "cgroup", Super: "rw,cpu,cpuacct"}}, []string{"memory"}},
		"version 2": {mount.Mounts{{FSType: "cgroup2", Point: unified}}, []string{"cpu"}},
		"both": {mount.Mounts{{FSType: "cgroup2", Point: unified}, {FSType: "cgroup", Super: "rw,cpu"}},
			nil},
	} {
		warnings := missingControllers(Resources{CPU: 500, Memory: 1}, c.table)
		var got []string
		for _, w := range warnings {
			controller, _, _ := strings.Cut(strings.TrimPrefix(w, "resources: "), " is not limited: ")
			got = append(got, controller)
		}
		if !slices.Equal(got, c.unlimited) {
			t.Errorf("%s: %q", name, warnings)
		}
		if warnings := missingControllers(Resources{}, c.table); warnings != nil {
			t.Errorf("%s, without limits: %q", name, warnings)
		}
	}
}

// needLimits skips the test on a machine that cannot limit the resources, and checks that the driver says so.
func needLimits(t *testing.T, d Driver, r Resources) {
	t.Helper()
	task := Task{Resources: r, TryLimits: true}
	warnings, err := d.Configure(&task, []byte(`{"command": "/bin/true"}`))
	must(t, err)
	if slices.ContainsFunc(warnings, func(w string) bool { return strings.Contains(w, "is not limited") }) {
		t.Skipf("this machine cannot limit them: %q", warnings)
	}
	if len(warnings) > 0 {
		t.Errorf("warnings: %q", warnings)
	}
}

func TestMemoryLimitKillsTheTask(t *testing.T) {
	eachDriver(t, func(t *testing.T, d Driver) {
		limited := Resources{Memory: 16, MemoryMax: 32}
		needLimits(t, d, limited)
		task := shell(t, `echo started; exec dd if=/dev/zero of=/dev/null bs=200M count=1`)
		task.Resources = limited
		h := start(t, d, task)
		exit := wait(t, d, h)
		if exit.Code != 137 || exit.Err != memoryExit {
			t.Errorf("exit: %+v", exit)
		}
		wantLines(t, logs(t, d, h, Stdout), "started")
		wantNothingLeft(t, task.ID)
		task = shell(t, `head -c 1m /dev/zero | wc -c`)
		task.Resources = limited
		h = start(t, d, task)
		if exit := wait(t, d, h); exit.Code != 0 || exit.Err != "" {
			t.Errorf("exit of a task that needs less: %+v", exit)
		}
	})
}

func TestShareOfTheProcessorIsApplied(t *testing.T) {
	eachDriver(t, func(t *testing.T, d Driver) {
		limited := Resources{Cores: 1}
		needLimits(t, d, limited)
		task := shell(t, `cat /proc/self/cgroup; sleep 1000`)
		task.Resources = limited
		h := start(t, d, task)
		defer func() { must(t, d.Stop(t.Context(), h, 0)); wait(t, d, h) }()
		var found []string
		for _, dir := range h.Cgroups {
			for _, file := range []string{"cpu.cfs_quota_us", "cpu.max"} {
				if text, err := os.ReadFile(filepath.Join(dir, file)); err == nil &&
					slices.Contains(cgroupMembers(dir), h.TaskPID) {
					found = append(found, strings.Fields(string(text))[0])
				}
			}
		}
		if !slices.Contains(found, "100000") {
			t.Errorf("quotas of the task's cgroups %v: %q", h.Cgroups, found)
		}
	})
}
