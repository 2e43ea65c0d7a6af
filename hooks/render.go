package hooks

import (
	"bytes"
	"encoding/csv"
	"fmt"
	"strings"
)

// OCI is the part of an OCI runtime specification (config.json) that a plan decides. What marshals to JSON is to be
// merged into a container's own.
type OCI struct {
	Mounts  []OCIMount  `json:"mounts,omitempty"`
	Process *OCIProcess `json:"process,omitempty"`
	Linux   *OCILinux   `json:"linux,omitempty"`
}

// OCIMount is an entry of mounts.
type OCIMount struct {
	Destination string   `json:"destination"`
	Type        string   `json:"type"`
	Source      string   `json:"source"`
	Options     []string `json:"options,omitempty"`
}

// OCIProcess is the part of process that a plan decides.
type OCIProcess struct {
	Env []string `json:"env,omitempty"`
}

// OCILinux is the part of linux that a plan decides.
type OCILinux struct {
	Resources OCIResources `json:"resources"`
}

// OCIResources is the part of linux.resources that a plan decides.
type OCIResources struct {
	Devices []OCIDeviceRule `json:"devices"`
}

// OCIDeviceRule is an entry of linux.resources.devices.
type OCIDeviceRule struct {
	Allow  bool   `json:"allow"`
	Type   string `json:"type,omitempty"`
	Major  *int64 `json:"major,omitempty"` // nil: any
	Minor  *int64 `json:"minor,omitempty"`
	Access string `json:"access,omitempty"`
}

var propagationOptions = map[Propagation]string{Private: "rprivate", HostToTask: "rslave", Bidirectional: "rshared"}

// OCI is the plan as part of an OCI runtime specification. A Device becomes a bind mount of its node: an entry of
// linux.devices would need numbers that a Device does not have. A Dir is a tmpfs. Labels for SELinux have no place in a
// mount there: the source has to be labelled before.
func (p Plan) OCI() OCI {
	var o OCI
	for _, d := range p.Dirs {
		o.Mounts = append(o.Mounts, OCIMount{d.Path, "tmpfs", "tmpfs",
			[]string{"nosuid", "nodev", fmt.Sprintf("mode=%04o", d.Mode)}})
	}
	for _, b := range p.Binds {
		o.Mounts = append(o.Mounts, OCIMount{b.Target, "bind", b.Source,
			[]string{"rbind", b.mode(), propagationOptions[b.Propagation]}})
	}
	for _, d := range p.Devices {
		mode := "ro"
		if strings.Contains(d.Access, "w") {
			mode = "rw"
		}
		o.Mounts = append(o.Mounts, OCIMount{d.Target, "bind", d.Source, []string{"bind", mode, "rprivate"}})
	}
	if len(p.Env) > 0 {
		o.Process = &OCIProcess{Env: p.Environ(nil)}
	}
	if len(p.Rules) > 0 {
		o.Linux = &OCILinux{Resources: OCIResources{ociRules(p.Rules)}}
	}
	return o
}

func ociRules(rules []DeviceRule) []OCIDeviceRule {
	var out []OCIDeviceRule
	for _, r := range rules {
		out = append(out, OCIDeviceRule{true, r.Type, exact(r.Major), exact(r.Minor), r.Access})
	}
	return out
}

// exact is nil for any number.
func exact(n int64) *int64 {
	if n < 0 {
		return nil
	}
	return &n
}

// Docker is the plan as arguments of docker run, to be given before those of the task so that its variables win over
// defaults. A label for SELinux needs the older form of a bind, which cannot name a path with a colon.
func (p Plan) Docker() []string {
	return p.arguments(func(b Bind) []string {
		if b.SELinux != "" {
			return []string{"--volume", strings.Join([]string{b.Source, b.Target, b.mode() + "," +
				propagationOptions[b.Propagation] + "," + b.SELinux}, ":")}
		}
		return []string{"--mount", mountArgument(b)}
	})
}

// Podman is the plan as arguments of podman run, to be given before those of the task so that its variables win over
// defaults.
func (p Plan) Podman() []string {
	return p.arguments(func(b Bind) []string {
		switch b.SELinux {
		case "z":
			return []string{"--mount", mountArgument(b, "relabel=shared")}
		case "Z":
			return []string{"--mount", mountArgument(b, "relabel=private")}
		}
		return []string{"--mount", mountArgument(b)}
	})
}

// arguments are those that docker and podman have in common, with bind for those they do not.
func (p Plan) arguments(bind func(Bind) []string) []string {
	var args []string
	for _, d := range p.Dirs {
		args = append(args, "--tmpfs", fmt.Sprintf("%s:mode=%04o", d.Path, d.Mode))
	}
	for _, b := range p.Binds {
		args = append(args, bind(b)...)
	}
	for _, e := range p.Environ(nil) {
		args = append(args, "--env", e)
	}
	for _, d := range p.Devices {
		args = append(args, "--device", d.Source+":"+d.Target+":"+d.Access)
	}
	for _, r := range p.Rules {
		args = append(args, "--device-cgroup-rule",
			fmt.Sprintf("%s %s:%s %s", r.Type, number(r.Major), number(r.Minor), r.Access))
	}
	return args
}

func (b Bind) mode() string {
	if b.ReadOnly {
		return "ro"
	}
	return "rw"
}

// mountArgument is the value of --mount. Both programs read it as a line of comma-separated values, quotes included.
func mountArgument(b Bind, more ...string) string {
	fields := []string{"type=bind", "source=" + b.Source, "target=" + b.Target}
	if b.ReadOnly {
		fields = append(fields, "readonly")
	}
	fields = append(fields, "bind-propagation="+propagationOptions[b.Propagation])
	var line bytes.Buffer
	w := csv.NewWriter(&line)
	_ = w.Write(append(fields, more...)) // a buffer takes everything
	w.Flush()
	return strings.TrimSuffix(line.String(), "\n")
}

func number(n int64) string {
	if n < 0 {
		return "*"
	}
	return fmt.Sprint(n)
}
