package config

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/hashicorp/hcl/v2"

	"holdfast/hooks"
	"holdfast/registry"
)

var mountStanza = &stanza{
	name: "volume_mount",
	fields: []field{
		{name: "volume", kind: isText, required: true, doc: "The name of a volume block of the group."},
		{name: "destination", kind: isText,
			doc: "Where the task sees the volume: an absolute path, or one below the task's root. " +
				"It may start with `${NOMAD_TASK_DIR}`, `${NOMAD_ALLOC_DIR}` or `${NOMAD_SECRETS_DIR}`. " +
				"Required for CSI volumes."},
		{name: "read_only", kind: isBool, fallback: false, doc: "Mounts the volume without the right to write."},
		{name: "propagation_mode", kind: isChoice, fallback: string(hooks.Private),
			words: words(hooks.Private, hooks.HostToTask, hooks.Bidirectional),
			doc:   "Whether mounts below the destination pass between host and task."},
		{name: "selinux_label", kind: isChoice, words: []string{"z", "Z", ""},
			doc: "How the volume is labelled for SELinux: shared (z) or private (Z)."},
		{name: "sub_path", kind: isText,
			doc: "A directory or file of the volume. It is mounted instead of the volume's root, and may hold " +
				"references such as `${NOMAD_ALLOC_INDEX}`."},
	},
}

// place is a destination in a task and the volume or device mounted there.
type place struct {
	hooks.VolumeMount // for a device, ReadOnly is set also if the request is read-only
	device            bool
	unsure            bool // ReadOnly of a device depends on a variable without a value
	at                hcl.Range
}

// mounts reads a task's volume_mount blocks. It carries blocks for volumes of other types.
func (f *file) mounts(rest map[string]any, task *fields, asked *requests) []hooks.VolumeMount {
	var mounts []hooks.VolumeMount
	var places []place
	for _, b := range task.all("volume_mount") {
		in := f.open(b, mountStanza)
		name, ok := in.primitive("volume")
		if !ok {
			continue
		}
		if slices.Contains(asked.carried, name) {
			f.carryInto(rest, b)
			if to, ok := in.destinationText("destination"); ok {
				places = append(places, place{VolumeMount: hooks.VolumeMount{Destination: to},
					at: in.rangeOf("destination")})
			}
			continue
		}
		f.checkAsked(in, name, asked)
		m := f.mount(in, name) // also for an unknown volume, to report the block's other errors
		mounts = append(mounts, m)
		p := place{VolumeMount: m, at: in.rangeOf("destination")}
		if r, found := asked.find(name); found && r.Usage.Attachment == registry.BlockDevice {
			f.checkDevice(in, m)
			p.device, p.ReadOnly = true, m.ReadOnly || r.Usage.ReadOnly
			p.unsure = f.unsure(b) || f.unsure(asked.blocks[name])
		}
		places = append(places, p)
	}
	f.checkPlaces(places)
	return mounts
}

func (f *file) checkAsked(in *fields, name string, asked *requests) {
	if _, exists := asked.blocks[name]; exists || asked.unexpanded {
		return
	}
	detail := didYouMean(name, slices.Collect(maps.Keys(asked.blocks)))
	if len(asked.blocks) == 0 {
		detail = fmt.Sprintf("add volume %q { ... } to the group", name)
	}
	f.errorf(in.rangeOf("volume"), detail, "the group asks for no volume %q", name)
}

func (f *file) mount(in *fields, volume string) hooks.VolumeMount {
	in.need("destination")
	m := hooks.VolumeMount{
		Volume: registry.RequestName(volume), ReadOnly: in.isTrue("read_only"),
		Propagation: oneOf[hooks.Propagation](in, "propagation_mode"), SELinux: oneOf[string](in, "selinux_label"),
	}
	m.Destination, _ = in.destination("destination")
	if s, ok := in.textAtRunTime("sub_path"); ok { // references that differ per alloc remain in it
		if wrong := hooks.WrongSubPath(s); wrong != "" {
			f.errorf(in.rangeOf("sub_path"), "", "sub_path %s", wrong)
		} else {
			m.SubPath = s
		}
	}
	return m
}

// taskDevices are the nodes in /dev that every task has (OCI runtime specification, "Default Devices").
var taskDevices = []string{
	"console", "core", "fd", "full", "mqueue", "null", "ptmx", "pts", "random", "shm", "stderr", "stdin", "stdout",
	"tty", "urandom", "zero",
}

// checkDevice reports fields that a block device's volume_mount cannot have. Fields that Nomad ignores are warnings.
func (f *file) checkDevice(in *fields, m hooks.VolumeMount) {
	if name, inDev := strings.CutPrefix(m.Destination, "/dev/"); inDev && slices.Contains(taskDevices, name) {
		f.errorf(in.rangeOf("destination"), `use a name of its own, as in "/dev/data"`,
			"%s is there in every task already", m.Destination)
	}
	if m.Propagation != hooks.Private && m.Propagation != "" {
		f.warnf(in.rangeOf("propagation_mode"), "remove it",
			"propagation_mode has no effect on a block device: nothing is mounted below it")
	}
	if in.given("sub_path") {
		f.errorf(in.rangeOf("sub_path"), "remove it", "a block device has no directories to choose one from")
	}
	if m.SELinux != "" {
		f.warnf(in.rangeOf("selinux_label"), "label the device on the host",
			"selinux_label has no effect on a block device: a node is not labelled")
	}
}

// checkPlaces reports destinations that conflict.
func (f *file) checkPlaces(places []place) {
	for i, b := range places {
		for _, a := range places[:i] {
			if wrong, advice := checkPair(a, b); wrong != "" {
				f.errorf(b.at, advice, "%s", wrong)
				break
			}
		}
	}
}

// checkPair returns why a task cannot have both places, and advice, or empty strings if it can. A task has the same
// permissions at each node of a device.
func checkPair(a, b place) (wrong, advice string) {
	switch {
	case a.Destination == "" || b.Destination == "":
	case a.Destination == b.Destination:
		return fmt.Sprintf("two volumes are mounted at %s", b.Destination), "mount it elsewhere"
	case a.device && within(b.Destination, a.Destination):
		return fmt.Sprintf("nothing can be mounted at %s: %s is a block device", b.Destination, a.Destination),
			"mount it elsewhere"
	case b.device && within(a.Destination, b.Destination):
		return fmt.Sprintf("%s cannot be a block device: %s is mounted below it", b.Destination, a.Destination),
			"use a path of its own"
	case b.device && a.Volume == b.Volume && a.ReadOnly != b.ReadOnly && !a.unsure && !b.unsure:
		return fmt.Sprintf("volume %q is a block device: it is as writable at %s as at %s", b.Volume, a.Destination,
				b.Destination),
			"give both the same read_only"
	}
	return "", ""
}
