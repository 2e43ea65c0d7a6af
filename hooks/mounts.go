package hooks

import (
	"cmp"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	"holdfast/registry"
)

// Published is a volume that a plugin has published for one request of an alloc.
type Published struct {
	Target registry.Tree
	Parts  map[string]string // host paths at which parts of it are mounted, by their paths in the volume
	Usage  registry.Usage
	Device DeviceNumber // of a block device; zero: not known, and no device rule is made
}

// DeviceNumber is a device's major and minor number.
type DeviceNumber struct {
	Major int64 `json:"major"`
	Minor int64 `json:"minor"`
}

// Mounts returns a plan for each task that mounts volumes. For each volume_mount block, an isolated task gets a bind or
// a device at the destination: of the whole volume, or of its sub_path. Each task gets one variable per volume, such as
// HOLDFAST_VOLUME_DATA, with the path at which it finds the volume; if it mounts the volume several times, that is the
// outermost path. A task that is not isolated finds the volume at the path of the host. There, a read-only mount of a
// writable volume is not enforced.
func Mounts(s GroupSpec, at map[registry.RequestName]Published, isolated map[string]bool) (map[string]Plan, error) {
	plans := make(map[string]Plan, len(s.Mounts))
	for _, task := range slices.Sorted(maps.Keys(s.Mounts)) { // so that the same error is returned each time
		plan, err := taskMounts(task, s, at, isolated[task])
		if err != nil {
			return nil, err
		}
		plans[task] = plan
	}
	return plans, nil
}

// taskMounts returns the plan of one task: see Mounts.
func taskMounts(task string, s GroupSpec, at map[registry.RequestName]Published, isolated bool) (Plan, error) {
	var plan Plan
	named := map[string]registry.RequestName{} // volumes by their variable
	for _, m := range outerFirst(s.Mounts[task]) {
		from, err := mountSource(task, m, s, at)
		if err != nil {
			return Plan{}, err
		}
		place := from.Target.Host
		if isolated {
			place = m.Destination
			plan = plan.And(mountPlan(m, from))
		}
		name := volumeVariable(m.Volume)
		switch other, taken := named[name]; {
		case !taken:
			named[name] = m.Volume
			plan.Env = append(plan.Env, Env{Name: name, Value: place, Default: true})
		case other != m.Volume:
			return Plan{}, registry.Invalid("task %q: volumes %q and %q would share the variable %s; rename one", task,
				other, m.Volume, name)
		}
	}
	plan.Rules = mergeRules(plan.Rules)
	return plan, nil
}

// mountSource returns what a volume_mount block mounts: the published volume, or a part of it. It is read-only if the
// block, the request or the published volume is.
func mountSource(
	task string, m VolumeMount, s GroupSpec, at map[registry.RequestName]Published,
) (Published, error) {
	request := slices.IndexFunc(s.Volumes, func(r VolumeRequest) bool { return r.Name == m.Volume })
	if request < 0 {
		return Published{}, registry.Invalid("task %q mounts volume %q, which its group does not ask for", task,
			m.Volume)
	}
	from, found := at[m.Volume]
	if !found {
		return Published{}, registry.Errorf(registry.ErrInternal, "task %q mounts volume %q, which is not published",
			task, m.Volume)
	}
	from.Usage.ReadOnly = m.ReadOnly || s.Volumes[request].Usage.ReadOnly || from.Usage.ReadOnly ||
		from.Usage.Access.ReaderOnly()
	if m.SubPath == "" {
		return from, nil
	}
	part := from.Parts[m.SubPath]
	if part == "" { // never the whole volume instead
		return Published{}, registry.Errorf(registry.ErrInternal,
			"task %q mounts %q of volume %q, which has no mount of its own", task, m.SubPath, m.Volume)
	}
	from.Target = registry.Tree{Host: part}
	return from, nil
}

// outerFirst sorts mounts so that none hides another one below it.
func outerFirst(mounts []VolumeMount) []VolumeMount {
	return slices.SortedStableFunc(slices.Values(mounts), func(a, b VolumeMount) int {
		return strings.Count(filepath.Clean(a.Destination), "/") - strings.Count(filepath.Clean(b.Destination), "/")
	})
}

// mountPlan returns the plan that makes one volume appear in a task that has a file system of its own. A read-only
// device node does not prevent writing to the device; the device rule does.
func mountPlan(m VolumeMount, from Published) (plan Plan) {
	if from.Usage.Attachment != registry.BlockDevice {
		return Plan{Binds: []Bind{{
			Source: from.Target.Host, Target: m.Destination, ReadOnly: from.Usage.ReadOnly,
			Propagation: cmp.Or(m.Propagation, Private), SELinux: m.SELinux,
		}}}
	}
	access := "rw"
	if from.Usage.ReadOnly {
		access = "r"
	}
	plan.Devices = []Device{{Source: from.Target.Host, Target: m.Destination, Access: access}}
	if from.Device != (DeviceNumber{}) {
		plan.Rules = []DeviceRule{{Type: "b", Major: from.Device.Major, Minor: from.Device.Minor, Access: access}}
	}
	return plan
}

// mergeRules returns one rule per device. It allows writing if any rule of the device does.
func mergeRules(rules []DeviceRule) []DeviceRule {
	var out []DeviceRule
	for _, r := range rules {
		same := slices.IndexFunc(out, func(o DeviceRule) bool {
			return o.Type == r.Type && o.Major == r.Major && o.Minor == r.Minor
		})
		switch {
		case same < 0:
			out = append(out, r)
		case strings.Contains(r.Access, "w"):
			out[same].Access = r.Access
		}
	}
	return out
}

// volumeVariable returns the name of the variable that tells a task where the volume of a request is: a prefix and the
// request's name in upper case, with '_' in place of characters that a variable's name may not contain.
func volumeVariable(name registry.RequestName) string {
	return "HOLDFAST_VOLUME_" + strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z':
			return r - 'a' + 'A'
		case r >= 'A' && r <= 'Z', r >= '0' && r <= '9':
			return r
		}
		return '_'
	}, string(name))
}
