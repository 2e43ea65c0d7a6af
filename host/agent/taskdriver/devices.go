package taskdriver

import (
	"path/filepath"
	"slices"
	"strconv"

	"holdfast/hooks"
	"holdfast/internal/mount"
	"holdfast/registry"
)

// access is a set of what can be done with a device, in the bits of the kernel: BPF_DEVCG_ACC_* of linux/bpf.h.
type access uint32

const (
	create access = 1 << iota // mknod(2): harmless, what is made cannot be opened without a right
	read
	write
)

var accessLetters = map[rune]access{'m': create, 'r': read, 'w': write}

func parseAccess(letters string) (access, error) {
	var a access
	for _, r := range letters {
		a |= accessLetters[r]
	}
	if a == 0 || a.String() != sorted(letters) {
		return 0, registry.Invalid("device access %q: one or more letters of \"rwm\" are needed", letters)
	}
	return a, nil
}

func (a access) String() string {
	var letters []rune
	for r, bit := range accessLetters {
		if a&bit != 0 {
			letters = append(letters, r)
		}
	}
	slices.Sort(letters)
	return string(letters)
}

func sorted(letters string) string { return string(slices.Sorted(slices.Values([]rune(letters)))) }

// numbers are those of one device or, where each stands for any, of several.
type numbers struct {
	block        bool // else character devices
	major, minor int64
}

const each = -1

// The kernel's limits: 12 and 20 bits.
const maxMajor, maxMinor = 1<<12 - 1, 1<<20 - 1

func (n numbers) covers(o numbers) bool {
	return n.block == o.block && (n.major == each || n.major == o.major) && (n.minor == each || n.minor == o.minor)
}

// String is what the files of a version 1 group take.
func (n numbers) String() string {
	kind := map[bool]string{true: "b", false: "c"}[n.block]
	return kind + " " + number(n.major) + ":" + number(n.minor)
}

func number(n int64) string {
	if n == each {
		return "*"
	}
	return strconv.FormatInt(n, 10)
}

// rule is one line of a policy.
type rule struct {
	of  numbers
	can access
}

func (r rule) String() string { return r.of.String() + " " + r.can.String() }

// usual is what every task may use whose devices are confined, as in a container.
var usual = []rule{
	{numbers{false, 1, 3}, create | read | write},      // null
	{numbers{false, 1, 5}, create | read | write},      // zero
	{numbers{false, 1, 7}, create | read | write},      // full
	{numbers{false, 1, 8}, create | read | write},      // random
	{numbers{false, 1, 9}, create | read | write},      // urandom
	{numbers{false, 5, 0}, create | read | write},      // tty
	{numbers{false, 5, 1}, create | read | write},      // console
	{numbers{false, 5, 2}, create | read | write},      // ptmx
	{numbers{false, 136, each}, create | read | write}, // pts
	{numbers{false, each, each}, create},
	{numbers{true, each, each}, create},
}

// policy is what a task may do with devices.
type policy struct {
	open  bool   // everything is allowed but what the rules take away; else nothing but what rules and usual give
	exact bool   // a device is given for less than reading and writing
	rules []rule // what the plan makes of it; no numbers twice
	usual []rule
}

// newPolicy confines a task to what its plan gives it and to what is usual. One that gets the host's /dev, as a plugin that mounts
// does, keeps every device, and of those in the plan no more than the plan says.
func newPolicy(plan hooks.Plan) (policy, error) {
	devices, err := deviceRules(plan.Devices)
	if err != nil {
		return policy{}, err
	}
	more, err := planRules(plan.Rules)
	if err != nil {
		return policy{}, err
	}
	p := policy{open: keepsAll(plan), rules: merge(slices.Concat(devices, more))}
	if !p.open {
		p.usual = slices.DeleteFunc(slices.Clone(usual), func(u rule) bool {
			return slices.ContainsFunc(devices, func(d rule) bool { return d.of == u.of })
		})
	}
	for i, d := range devices {
		p.exact = p.exact || withheld(d) != 0
		if err := p.contradicts(plan.Devices[i], d); err != nil {
			return policy{}, err
		}
	}
	if p.open {
		p.rules = takenAway(merge(devices))
	}
	return p, nil
}

// keepsAll says whether the plan gives the task the host's devices.
func keepsAll(plan hooks.Plan) bool {
	return slices.ContainsFunc(plan.Binds, func(b hooks.Bind) bool { return filepath.Clean(b.Source) == "/dev" })
}

// deviceRules are those of the plan's devices, in their order: the kernel knows a device by its number, not by its node.
func deviceRules(devices []hooks.Device) ([]rule, error) {
	var rules []rule
	for _, d := range devices {
		can, err := parseAccess(d.Access)
		if err != nil {
			return nil, registry.Invalid("device %s: %w", d.Source, err)
		}
		n, err := mount.NumberOf(d.Source)
		if err != nil {
			return nil, registry.Invalid("device %s at %s: %w; start the alloc anew to have it published again, and see what its plugin says",
				d.Source, d.Target, err)
		}
		rules = append(rules, rule{numbers{n.Block, int64(n.Major), int64(n.Minor)}, can})
	}
	return rules, nil
}

func planRules(of []hooks.DeviceRule) ([]rule, error) {
	var rules []rule
	for _, r := range of {
		can, err := parseAccess(r.Access)
		if err != nil {
			return nil, err
		}
		n := numbers{r.Type == "b", max(r.Major, each), max(r.Minor, each)}
		if r.Type != "b" && r.Type != "c" || n.major > maxMajor || n.minor > maxMinor {
			return nil, registry.Invalid("device rule %+v: type \"b\" or \"c\", a major number up to %d and a minor one up to %d are needed, or -1",
				r, maxMajor, maxMinor)
		}
		rules = append(rules, rule{n, can})
	}
	return rules, nil
}

// merge makes one rule of those for the same numbers.
func merge(rules []rule) (out []rule) {
	for _, r := range rules {
		if i := slices.IndexFunc(out, func(o rule) bool { return o.of == r.of }); i >= 0 {
			out[i].can |= r.can
		} else {
			out = append(out, r)
		}
	}
	return out
}

// contradicts is an error if the task may do more with the device than it was asked for.
func (p policy) contradicts(d hooks.Device, asked rule) error {
	for _, r := range slices.Concat(p.rules, p.usual) {
		if r.of.covers(asked.of) && r.can&withheld(asked) != 0 {
			return registry.Errorf(registry.ErrUnsupported,
				"device %s at %s: the plan gives it to the task with access %q, and with more by another device or rule (%s), "+
					"which a cgroup cannot tell apart; mount the volume with one access only, or in two tasks", d.Source, d.Target, d.Access, r)
		}
	}
	return nil
}

// withheld is what a rule does not give of reading and writing.
func withheld(r rule) access { return (read | write) &^ r.can }

// takenAway turns rules that give into rules that deny the rest.
func takenAway(given []rule) (out []rule) {
	for _, r := range given {
		if w := withheld(r); w != 0 {
			out = append(out, rule{r.of, w})
		}
	}
	return out
}
