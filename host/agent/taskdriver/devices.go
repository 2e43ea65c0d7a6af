package taskdriver

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"holdfast/hooks"
	"holdfast/internal/mount"
	"holdfast/registry"
)

// access is a set of operations on a device, as bits of BPF_DEVCG_ACC_* (linux/bpf.h).
type access uint32

const (
	mknod access = 1 << iota // harmless by itself: opening the node needs read or write
	read
	write
)

// accessLetters has the letter of each operation, at the number of its bit.
const accessLetters = "mrw"

func parseAccess(letters string) (access, error) {
	var a access
	for i, letter := range accessLetters {
		if strings.ContainsRune(letters, letter) {
			a |= 1 << i
		}
	}
	if a == 0 || len(a.String()) != len(letters) {
		return 0, registry.Invalid("device access %q: use one or more letters of \"rwm\"", letters)
	}
	return a, nil
}

func (a access) String() (letters string) {
	for i, letter := range accessLetters {
		if a&(1<<i) != 0 {
			letters += string(letter)
		}
	}
	return letters
}

// numbers identify devices by type, major and minor. Major and minor may be anyNumber.
type numbers struct {
	block        bool // else a character device
	major, minor int64
}

const anyNumber = -1

// The kernel's limits: 12 and 20 bits.
const maxMajor, maxMinor = 1<<12 - 1, 1<<20 - 1

func (n numbers) covers(o numbers) bool {
	return n.block == o.block && (n.major == anyNumber || n.major == o.major) &&
		(n.minor == anyNumber || n.minor == o.minor)
}

// String returns the syntax of devices.allow in a version 1 cgroup.
func (n numbers) String() string {
	kind := "c"
	if n.block {
		kind = "b"
	}
	text := fmt.Sprintf("%s %d:%d", kind, n.major, n.minor)
	return strings.ReplaceAll(text, strconv.Itoa(anyNumber), "*")
}

// deviceRule allows access to devices.
type deviceRule struct {
	numbers
	access access
}

func (r deviceRule) String() string { return r.numbers.String() + " " + r.access.String() }

// denied returns the part of read and write that the rule does not allow.
func (r deviceRule) denied() access { return (read | write) &^ r.access }

// defaultRules allow the devices that every confined task gets, as in a container.
var defaultRules = []deviceRule{
	{numbers{false, 1, 3}, mknod | read | write},           // null
	{numbers{false, 1, 5}, mknod | read | write},           // zero
	{numbers{false, 1, 7}, mknod | read | write},           // full
	{numbers{false, 1, 8}, mknod | read | write},           // random
	{numbers{false, 1, 9}, mknod | read | write},           // urandom
	{numbers{false, 5, 0}, mknod | read | write},           // tty
	{numbers{false, 5, 1}, mknod | read | write},           // console
	{numbers{false, 5, 2}, mknod | read | write},           // ptmx
	{numbers{false, 136, anyNumber}, mknod | read | write}, // pts
	{numbers{false, anyNumber, anyNumber}, mknod},
	{numbers{true, anyNumber, anyNumber}, mknod},
}

// devicePolicy says how a task may use devices. It denies all other access.
type devicePolicy struct {
	restricted bool         // a device of the plan lacks read or write
	rules      []deviceRule // of the plan; no numbers twice
	defaults   []deviceRule
}

// newDevicePolicy allows the devices and rules of the plan, and the default devices. It returns an error if the plan
// has a device with restricted access and allows more access elsewhere: see checkConflict.
func newDevicePolicy(plan hooks.Plan) (devicePolicy, error) {
	devices, err := planDevices(plan.Devices)
	if err != nil {
		return devicePolicy{}, err
	}
	rules, err := planRules(plan.Rules)
	if err != nil {
		return devicePolicy{}, err
	}
	p := devicePolicy{rules: mergeRules(slices.Concat(devices, rules))}
	// A device of the plan replaces the default rule for its numbers, which may allow more.
	p.defaults = slices.DeleteFunc(slices.Clone(defaultRules), func(d deviceRule) bool {
		return slices.ContainsFunc(devices, func(r deviceRule) bool { return r.numbers == d.numbers })
	})
	for i, r := range devices {
		p.restricted = p.restricted || r.denied() != 0
		if err := p.checkConflict(plan.Devices[i], r, hasHostDevices(plan)); err != nil {
			return devicePolicy{}, err
		}
	}
	return p, nil
}

// hasHostDevices reports whether the plan binds the host's /dev, as plans of plugins do.
func hasHostDevices(plan hooks.Plan) bool {
	return slices.ContainsFunc(plan.Binds, func(b hooks.Bind) bool { return filepath.Clean(b.Source) == "/dev" })
}

// planDevices returns the rules of the plan's devices, in their order.
func planDevices(devices []hooks.Device) ([]deviceRule, error) {
	var rules []deviceRule
	for _, d := range devices {
		a, err := parseAccess(d.Access)
		if err != nil {
			return nil, registry.Invalid("device %s: %w", d.Source, err)
		}
		n, err := mount.NumberOf(d.Source)
		if err != nil {
			return nil, registry.Invalid("device %s at %s: %w; check its plugin, and restart the alloc to publish "+
				"the volume again", d.Source, d.Target, err)
		}
		rules = append(rules, deviceRule{numbers{n.Block, int64(n.Major), int64(n.Minor)}, a})
	}
	return rules, nil
}

// planRules returns the device rules of the plan, in their order.
func planRules(list []hooks.DeviceRule) ([]deviceRule, error) {
	var rules []deviceRule
	for _, r := range list {
		a, err := parseAccess(r.Access)
		if err != nil {
			return nil, err
		}
		n := numbers{r.Type == "b", max(r.Major, anyNumber), max(r.Minor, anyNumber)}
		if r.Type != "b" && r.Type != "c" || n.major > maxMajor || n.minor > maxMinor {
			return nil, registry.Invalid("device rule %+v: use type \"b\" or \"c\", a major number up to %d and a "+
				"minor number up to %d, or -1 for any", r, maxMajor, maxMinor)
		}
		rules = append(rules, deviceRule{n, a})
	}
	return rules, nil
}

// mergeRules joins rules for the same numbers.
func mergeRules(rules []deviceRule) (out []deviceRule) {
	for _, r := range rules {
		if i := slices.IndexFunc(out, func(o deviceRule) bool { return o.numbers == r.numbers }); i >= 0 {
			out[i].access |= r.access
		} else {
			out = append(out, r)
		}
	}
	return out
}

// checkConflict returns an error if the plan denies an access to device d, whose rule is want, but allows it elsewhere:
// by another rule, or by the host's /dev. The kernel identifies a device only by its number, and so cannot tell these
// apart.
func (p devicePolicy) checkConflict(d hooks.Device, want deviceRule, hostDevices bool) error {
	if want.denied() == 0 {
		return nil
	}
	other := ""
	if hostDevices {
		other = "the host's /dev"
	}
	for _, r := range slices.Concat(p.rules, p.defaults) {
		if r.covers(want.numbers) && r.access&want.denied() != 0 {
			other = fmt.Sprintf("rule %q", r)
			break
		}
	}
	if other == "" {
		return nil
	}
	return registry.Errorf(registry.ErrUnsupported,
		"device %s at %s: the plan gives access %q, and more access through %s; "+
			"a cgroup cannot tell them apart; mount the volume with one access only, or in two tasks",
		d.Source, d.Target, d.Access, other)
}

// writeRules sets the rules of a version 1 cgroup. The kernel refuses rules that exceed those of the parent cgroup. For
// a rule of the plan this is an error; a default rule is then left out.
func (p devicePolicy) writeRules(dir string) error {
	if err := writeRule(dir, "devices.deny", "a"); err != nil {
		return err
	}
	for _, r := range p.rules {
		err := writeRule(dir, "devices.allow", r.String())
		if errors.Is(err, unix.EPERM) {
			return registry.Errorf(registry.ErrDenied,
				"%w: the orchestrator's own cgroup may not use this device; allow %q there", err, r)
		}
		if err != nil {
			return err
		}
	}
	for _, r := range p.defaults {
		if err := writeRule(dir, "devices.allow", r.String()); err != nil && !errors.Is(err, unix.EPERM) {
			return err
		}
	}
	return nil
}

func writeRule(dir, file, rule string) error {
	if err := writeExisting(filepath.Join(dir, file), rule); err != nil {
		return fmt.Errorf("device rule %q: %w", rule, err)
	}
	return nil
}
