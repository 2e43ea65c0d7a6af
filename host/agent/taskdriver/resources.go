package taskdriver

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"holdfast/internal/mount"
	"holdfast/registry"
)

// setting is a file of a cgroup and the value to write to it.
type setting struct {
	file, value string
	optional    bool // the file is missing if the kernel does not account for swap
}

// cpuPeriod is the period of the quota in microseconds, the kernel's default.
const cpuPeriod = 100_000

// controller limits one resource in either version of cgroups.
type controller struct {
	name     string
	settings func(Resources) (v1, v2 []setting) // empty: the task has no such limit
}

var controllers = []controller{{"memory", memorySettings}, {"cpu", cpuSettings}}

// hardMemory returns the memory limit in bytes, and the reserved part of it. 0 means none.
func (r Resources) hardMemory() (limit, reserved int64) {
	if r.MemoryMax > 0 {
		return r.MemoryMax << 20, r.Memory << 20
	}
	return r.Memory << 20, 0
}

func memorySettings(r Resources) (v1, v2 []setting) {
	limit, reserved := r.hardMemory()
	if limit == 0 {
		return nil, nil
	}
	if reserved > 0 {
		v1 = append(v1, setting{"memory.soft_limit_in_bytes", fmt.Sprint(reserved), false})
		v2 = append(v2, setting{"memory.low", fmt.Sprint(reserved), false})
	}
	v1 = append(v1, setting{"memory.limit_in_bytes", fmt.Sprint(limit), false},
		setting{"memory.memsw.limit_in_bytes", fmt.Sprint(limit), true})
	v2 = append(v2, setting{"memory.max", fmt.Sprint(limit), false}, setting{"memory.swap.max", "0", true},
		setting{"memory.oom.group", "1", true})
	return v1, v2
}

// The range of shares in version 1, and of weights in version 2.
const (
	minShares, maxShares = 2, 262144
	maxWeight            = 10000
)

// shares returns the share of the processor: 1 for each MHz, and 1024 for each core.
func (r Resources) shares() int64 { return min(max(r.CPU+1024*r.Cores, minShares), maxShares) }

func cpuSettings(r Resources) (v1, v2 []setting) {
	if r.CPU+r.Cores == 0 {
		return nil, nil
	}
	weight := 1 + (r.shares()-minShares)*(maxWeight-1)/(maxShares-minShares) // as systemd and the OCI runtimes convert
	v1 = append(v1, setting{"cpu.shares", fmt.Sprint(r.shares()), false})
	v2 = append(v2, setting{"cpu.weight", fmt.Sprint(weight), false})
	if r.Cores > 0 {
		v1 = append(v1, setting{"cpu.cfs_period_us", fmt.Sprint(cpuPeriod), false},
			setting{"cpu.cfs_quota_us", fmt.Sprint(r.Cores * cpuPeriod), false})
		v2 = append(v2, setting{"cpu.max", fmt.Sprintf("%d %d", r.Cores*cpuPeriod, cpuPeriod), false})
	}
	return v1, v2
}

// applyLimits applies the limits to the cgroup. It adds a warning for each limit that this machine does not enforce.
func (g *cgroup) applyLimits(r Resources) {
	for _, c := range controllers {
		v1, v2 := c.settings(r)
		if len(v1) == 0 {
			continue
		}
		err := errors.New("no cgroup for it")
		if dir := g.limited[c.name]; dir != "" {
			err = writeSettings(dir, v1)
		} else if g.unified != "" {
			if err = enableController(filepath.Dir(g.unified), c.name); err == nil {
				err = writeSettings(g.unified, v2)
			}
		}
		if err != nil {
			g.warn("resources: %s is not limited: %v; give the agent a writable cgroup with this controller "+
				"(under systemd: Delegate=yes and DelegateSubgroup=agent)", c.name, err)
		}
	}
}

func writeSettings(dir string, settings []setting) error {
	for _, s := range settings {
		err := writeExisting(filepath.Join(dir, s.file), s.value)
		if err != nil && !(s.optional && errors.Is(err, fs.ErrNotExist)) {
			return err
		}
	}
	return nil
}

// enableController makes a controller available to the cgroups below dir, a cgroup of version 2.
func enableController(dir, controller string) error {
	enabled, err := os.ReadFile(filepath.Join(dir, "cgroup.subtree_control"))
	if err != nil || slices.Contains(strings.Fields(string(enabled)), controller) {
		return err
	}
	available, err := os.ReadFile(filepath.Join(dir, "cgroup.controllers"))
	if err != nil {
		return err
	}
	if !slices.Contains(strings.Fields(string(available)), controller) {
		return fmt.Errorf("cgroup %s does not have controller %s", dir, controller)
	}
	err = writeExisting(filepath.Join(dir, "cgroup.subtree_control"), "+"+controller)
	if errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("cgroup %s has processes of its own", dir)
	}
	return err
}

// delegatedParent returns the parent of the cgroup dir if systemd has delegated the parent too, as with
// DelegateSubgroup=, and otherwise dir. Such a parent has no processes of its own, so cgroups in it can have limits.
func delegatedParent(dir string) string {
	parent := filepath.Dir(dir)
	for _, name := range []string{"trusted.delegate", "user.delegate"} {
		var value [1]byte
		if n, err := unix.Getxattr(parent, name, value[:]); err == nil && n == 1 && value[0] == '1' {
			return parent
		}
	}
	return dir
}

// memoryKills returns how many processes of the cgroup the kernel has killed because of its memory limit.
func (g *cgroup) memoryKills() (n int64) {
	for dir, file := range map[string]string{g.limited["memory"]: "memory.oom_control", g.unified: "memory.events"} {
		text, err := os.ReadFile(filepath.Join(dir, file))
		if dir == "" || err != nil {
			continue
		}
		for line := range strings.Lines(string(text)) {
			if count, found := strings.CutPrefix(strings.TrimSpace(line), "oom_kill "); found {
				kills, _ := strconv.ParseInt(count, 10, 64)
				n += kills
			}
		}
	}
	return n
}

// memoryExit explains the exit of a task that has reached its memory limit.
const memoryExit = "killed because its memory limit was reached; raise memory in resources"

// tryLimits tries the limits in a new cgroup, and returns a warning for each limit that this machine does not enforce.
func tryLimits(r Resources) []string {
	if r == (Resources{}) {
		return nil
	}
	g := newCgroup(fmt.Sprintf("check-%x", rand.Uint64()), r, false)
	g.warnings = nil
	g.applyLimits(r)
	if err := removeCgroups(g.dirs()); err != nil {
		return []string{err.Error()}
	}
	return g.warnings
}

// Check refuses limits that contradict each other.
func (r Resources) Check() error {
	switch {
	case r.MemoryMax > 0 && r.MemoryMax < r.Memory:
		return registry.Invalid("resources: memory_max = %d is less than memory = %d", r.MemoryMax, r.Memory)
	case r.CPU > 0 && r.Cores > 0:
		return registry.Invalid("resources: use cpu or cores, not both")
	}
	return nil
}

// missingControllers returns a warning for each limit whose controller no mounted cgroup hierarchy has.
func missingControllers(r Resources, table mount.Mounts) (warnings []string) {
	for _, c := range controllers {
		limits, _ := c.settings(r)
		has := func(m mount.Mount) bool { return hasController(m, c.name) }
		if len(limits) > 0 && !slices.ContainsFunc(table, has) {
			warnings = append(warnings, fmt.Sprintf("resources: %s is not limited: no mounted cgroup hierarchy has "+
				"this controller", c.name))
		}
	}
	return warnings
}

// hasController reports whether a mount is a cgroup hierarchy of either version with a controller.
func hasController(m mount.Mount, controller string) bool {
	switch m.FSType {
	case "cgroup":
		return slices.Contains(strings.Split(m.Super, ","), controller)
	case "cgroup2":
		list, err := os.ReadFile(filepath.Join(m.Point, "cgroup.controllers"))
		return err == nil && slices.Contains(strings.Fields(string(list)), controller)
	}
	return false
}
