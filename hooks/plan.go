package hooks

import (
	"fmt"
	"slices"
	"strings"

	"holdfast/registry"
)

// Operation names one kind of change that a plan requests of a host. Hello lists the operations that a host supports.
// The shim refuses a spec that needs another operation. The host refuses a plan with an unknown operation before it
// applies any.
type Operation string

const (
	OpDir        Operation = "dir"
	OpBind       Operation = "bind"
	OpEnv        Operation = "env"
	OpDevice     Operation = "device"
	OpDeviceRule Operation = "device_rule"
)

// Operations lists all operations.
var Operations = []Operation{OpDir, OpBind, OpEnv, OpDevice, OpDeviceRule}

// Propagation is how mounts below a bind mount propagate, seen from the task (mount_namespaces(7)).
type Propagation string

const (
	Private       Propagation = "private"       // rprivate
	HostToTask    Propagation = "host-to-task"  // rslave
	Bidirectional Propagation = "bidirectional" // rshared: what the task mounts below appears on the host
)

// Plan lists the changes that a host applies before it starts a task, in the order of the fields.
type Plan struct {
	Dirs    []Dir        `json:"dirs,omitempty"`
	Binds   []Bind       `json:"binds,omitempty"`
	Env     []Env        `json:"env,omitempty"`
	Devices []Device     `json:"devices,omitempty"`
	Rules   []DeviceRule `json:"device_rules,omitempty"`
}

// Dir is a directory that has to exist in the task's file system before the task starts.
type Dir struct {
	Path string `json:"path"` // absolute, in the task
	Mode uint32 `json:"mode"` // permission bits
}

// Bind makes a host's directory, file or device node appear in the task.
type Bind struct {
	Source      string      `json:"source"` // absolute, on the host
	Target      string      `json:"target"` // absolute, in the task; made by the host if it does not exist
	ReadOnly    bool        `json:"read_only,omitempty"`
	Propagation Propagation `json:"propagation"`
	SELinux     string      `json:"selinux_label,omitempty"` // "z" or "Z"
}

// Env is one environment variable. A Default variable is set only if the task does not set it itself.
type Env struct {
	Name    string `json:"name"`
	Value   string `json:"value"`
	Default bool   `json:"default,omitempty"`
}

// Device makes a host's device node appear in the task.
type Device struct {
	Source string `json:"source"` // the host's node
	Target string `json:"target"` // the task's node
	Access string `json:"access"` // letters of "rwm"
}

// DeviceRule allows a device in the task's device cgroup.
type DeviceRule struct {
	Type   string `json:"type"`  // "b" or "c"
	Major  int64  `json:"major"` // -1: any
	Minor  int64  `json:"minor"` // -1: any
	Access string `json:"access"`
}

// Needs returns the operations that the plan uses.
func (p Plan) Needs() []Operation {
	var ops []Operation
	for op, n := range map[Operation]int{
		OpDir: len(p.Dirs), OpBind: len(p.Binds), OpEnv: len(p.Env), OpDevice: len(p.Devices),
		OpDeviceRule: len(p.Rules),
	} {
		if n > 0 {
			ops = append(ops, op)
		}
	}
	slices.Sort(ops)
	return ops
}

// Supported returns nil if the host supports every operation of the plan, else an ErrUnsupported that names the others.
func (p Plan) Supported(can []Operation) error {
	for _, op := range p.Needs() {
		if !slices.Contains(can, op) {
			return registry.Errorf(registry.ErrUnsupported,
				"this needs the plan operation %q, which this host cannot apply (it can: %v); update the host", op, can)
		}
	}
	return nil
}

// And returns the plan followed by more.
func (p Plan) And(more Plan) Plan {
	return Plan{
		slices.Concat(p.Dirs, more.Dirs), slices.Concat(p.Binds, more.Binds), slices.Concat(p.Env, more.Env),
		slices.Concat(p.Devices, more.Devices), slices.Concat(p.Rules, more.Rules),
	}
}

// Equal reports whether both plans have equal values in the same order.
func (p Plan) Equal(o Plan) bool {
	return slices.Equal(p.Dirs, o.Dirs) && slices.Equal(p.Binds, o.Binds) && slices.Equal(p.Env, o.Env) &&
		slices.Equal(p.Devices, o.Devices) && slices.Equal(p.Rules, o.Rules)
}

// Environ returns env, a list of NAME=value, with the plan's variables added. A Default variable does not override env.
func (p Plan) Environ(env []string) []string {
	out := slices.Clone(env)
	for _, e := range p.Env {
		prefix := e.Name + "="
		at := slices.IndexFunc(out, func(s string) bool { return strings.HasPrefix(s, prefix) })
		switch {
		case at < 0:
			out = append(out, prefix+e.Value)
		case !e.Default:
			out[at] = prefix + e.Value
		}
	}
	return out
}

func (b Bind) String() string {
	mode := "rw"
	if b.ReadOnly {
		mode = "ro"
	}
	return fmt.Sprintf("%s -> %s %s %s", b.Source, b.Target, mode, b.Propagation)
}
