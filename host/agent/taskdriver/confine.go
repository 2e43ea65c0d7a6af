package taskdriver

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"holdfast/registry"
)

// confine makes the policy true for whatever is started in the group, for as long as the group is there. Where nothing can, a
// task that was to get less than a device goes without its start. In a user namespace it is started, and the notes tell: there its
// root has no more right to a device than the user has.
func (g *group) confine(p policy) error {
	if p.open && len(p.rules) == 0 {
		return nil
	}
	err := g.enforce(p)
	switch {
	case err == nil, errors.Is(err, registry.ErrDenied):
		return err
	case p.exact && !inUserNamespace():
		return registry.Errorf(registry.ErrUnsupported, "the task may only read or only write a device, and nothing here enforces that: %w; "+
			"give the orchestrator cgroups that it may write to (version 1 with devices, or version 2; under systemd: Delegate=yes)", err)
	}
	g.note("the task's devices are not confined, and their access is not enforced: %v", err)
	return nil
}

func (g *group) enforce(p policy) error {
	switch {
	case g.devices != "":
		return p.write(g.devices)
	case g.unified != "":
		return p.attach(g.unified)
	}
	return errors.New("there is no cgroup for devices")
}

// write tells a version 1 group. A group below one that is itself confined cannot be given more than that has: of what is usual it
// then goes without, of what the plan asks for it may not.
func (p policy) write(dir string) error {
	if p.open {
		return p.deny(dir)
	}
	if err := tell(dir, "devices.deny", "a"); err != nil {
		return err
	}
	for _, r := range p.rules {
		err := tell(dir, "devices.allow", r.String())
		if errors.Is(err, unix.EPERM) {
			return registry.Errorf(registry.ErrDenied, "%w: the orchestrator's own cgroup does not have this device; allow %q there", err, r)
		}
		if err != nil {
			return err
		}
	}
	for _, r := range p.usual {
		if err := tell(dir, "devices.allow", r.String()); err != nil && !errors.Is(err, unix.EPERM) {
			return err
		}
	}
	return nil
}

// deny takes from a version 1 group that has everything. One that has a list could have a device by a wider line of it.
func (p policy) deny(dir string) error {
	list, err := os.ReadFile(filepath.Join(dir, "devices.list"))
	if err != nil {
		return err
	}
	if !strings.HasPrefix(string(list), "a ") {
		return fmt.Errorf("%s lists what is allowed, and nothing can be taken from that", dir)
	}
	for _, r := range p.rules {
		if err := tell(dir, "devices.deny", r.String()); err != nil {
			return err
		}
	}
	return nil
}

func tell(dir, file, line string) error {
	if err := writeExisting(filepath.Join(dir, file), line); err != nil {
		return fmt.Errorf("device rule %q: %w", line, err)
	}
	return nil
}

// initialUserNamespace is the inode of the first user namespace (linux/nsfs.h).
const initialUserNamespace = 0xEFFFFFFD

func inUserNamespace() bool {
	var ns unix.Stat_t
	err := unix.Stat("/proc/self/ns/user", &ns)
	return err == nil && ns.Ino != initialUserNamespace
}
