package taskdriver

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/docker/go-units"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/mount"

	"holdfast/hooks"
	"holdfast/registry"
)

// containerConfig is the config block of the docker and podman drivers. It has the attributes of Nomad's drivers of
// these names. Where the two use different names, both are accepted.
type containerConfig struct {
	Image            string      `json:"image"`
	Load             string      `json:"load"` // an archive of images, relative to the task's directory
	ForcePull        bool        `json:"force_pull"`
	ImagePullTimeout string      `json:"image_pull_timeout"`
	Auth             []auth      `json:"auth"`
	Command          commandLine `json:"command"`
	Args             []Scalar    `json:"args"`
	Entrypoint       commandLine `json:"entrypoint"`
	WorkDir          string      `json:"work_dir"`
	WorkingDir       string      `json:"working_dir"`

	Privileged     bool       `json:"privileged"`
	CapAdd         []string   `json:"cap_add"`
	CapDrop        []string   `json:"cap_drop"`
	SecurityOpt    []string   `json:"security_opt"`
	Devices        deviceList `json:"devices"`
	Volumes        []string   `json:"volumes"`
	Mount          []mounts   `json:"mount"`
	Mounts         []mounts   `json:"mounts"`
	Tmpfs          []string   `json:"tmpfs"`
	ReadonlyRootfs bool       `json:"readonly_rootfs"`
	ShmSize        Scalar     `json:"shm_size"` // bytes, or with a unit
	Ulimit         options    `json:"ulimit"`
	Sysctl         options    `json:"sysctl"`
	PidsLimit      int64      `json:"pids_limit"`
	Runtime        string     `json:"runtime"`
	Init           bool       `json:"init"`
	Tty            bool       `json:"tty"`

	Hostname    string   `json:"hostname"`
	NetworkMode string   `json:"network_mode"`
	ExtraHosts  []string `json:"extra_hosts"`
	IPCMode     string   `json:"ipc_mode"`
	PidMode     string   `json:"pid_mode"`
	UTSMode     string   `json:"uts_mode"`
	UsernsMode  string   `json:"userns_mode"`
	CgroupNS    string   `json:"cgroupns"`
	GroupAdd    []string `json:"group_add"`
	Labels      options  `json:"labels"`
}

type auth struct {
	Username      string `json:"username"`
	Password      string `json:"password"`
	ServerAddress string `json:"server_address"`
}

// mounts is a mount block of the config.
type mounts struct {
	Type        string `json:"type"` // bind (the default here), volume or tmpfs
	Source      string `json:"source"`
	Target      string `json:"target"`
	ReadOnly    bool   `json:"readonly"`
	BindOptions []struct {
		Propagation string `json:"propagation"`
	} `json:"bind_options"`
}

// commandLine is a string, which is one word, or a list of words.
type commandLine []string

func (c *commandLine) UnmarshalJSON(b []byte) error {
	var words []Scalar
	if json.Unmarshal(b, &words) != nil {
		var word Scalar
		if err := json.Unmarshal(b, &word); err != nil {
			return err
		}
		words = []Scalar{word}
	}
	*c = texts(words)
	return nil
}

// options is a map, written as an attribute or as blocks.
type options map[string]string

func (o *options) UnmarshalJSON(b []byte) error {
	var blocks []map[string]Scalar
	if json.Unmarshal(b, &blocks) != nil {
		blocks = make([]map[string]Scalar, 1)
		if err := json.Unmarshal(b, &blocks[0]); err != nil {
			return err
		}
	}
	*o = options{}
	for _, m := range blocks {
		for name, v := range m {
			(*o)[name] = string(v)
		}
	}
	return nil
}

// deviceList has blocks with host_path, container_path and cgroup_permissions, or strings HOST[:CONTAINER[:ACCESS]].
type deviceList []container.DeviceMapping

func (d *deviceList) UnmarshalJSON(b []byte) error {
	var list []json.RawMessage
	if err := json.Unmarshal(b, &list); err != nil {
		return err
	}
	for _, item := range list {
		var text string
		var block struct {
			Host   string `json:"host_path"`
			Target string `json:"container_path"`
			Access string `json:"cgroup_permissions"`
		}
		if json.Unmarshal(item, &text) == nil {
			part := append(strings.SplitN(text, ":", 3), "", "")
			block.Host, block.Target, block.Access = part[0], part[1], part[2]
		} else if err := json.Unmarshal(item, &block); err != nil {
			return err
		}
		m := container.DeviceMapping{PathOnHost: block.Host, PathInContainer: block.Target, CgroupPermissions: block.Access}
		if m.PathInContainer == "" {
			m.PathInContainer = m.PathOnHost
		}
		if m.CgroupPermissions == "" {
			m.CgroupPermissions = "rwm"
		}
		*d = append(*d, m)
	}
	return nil
}

// Configure reads the config block of a container.
func (d Container) Configure(t *Task, config json.RawMessage) (warnings []string, err error) {
	c := &containerConfig{}
	if err := Decode("config", config, c); err != nil {
		return nil, err
	}
	if c.WorkDir == "" {
		c.WorkDir = c.WorkingDir
	}
	if c.Image = strings.TrimPrefix(c.Image, "docker://"); c.Image == "" {
		return nil, registry.Invalid("no image; driver %s needs config { image = ... }", d.name)
	}
	if _, err := pullTimeout(c); err != nil {
		return nil, err
	}
	if err := c.check(); err != nil {
		return nil, err
	}
	t.container = c
	return unknownKeys[containerConfig](d.name, config), nil
}

func pullTimeout(c *containerConfig) (time.Duration, error) {
	if c.ImagePullTimeout == "" {
		return 5 * time.Minute, nil
	}
	limit, err := time.ParseDuration(c.ImagePullTimeout)
	if err != nil || limit <= 0 {
		return 0, registry.Invalid("image_pull_timeout %q is no duration above 0; write it as in \"5m\"", c.ImagePullTimeout)
	}
	return limit, nil
}

// check refuses values that the engine would refuse with an error that is hard to read, and mounts that would hide
// what the plan mounts.
func (c *containerConfig) check() error {
	for _, m := range append(c.Mount, c.Mounts...) {
		switch {
		case m.Type != "" && m.Type != "bind" && m.Type != "volume" && m.Type != "tmpfs":
			return registry.Invalid("mount type %q: use bind, volume or tmpfs", m.Type)
		case !filepath.IsAbs(m.Target):
			return registry.Invalid("mount target %q is not an absolute path", m.Target)
		}
	}
	if _, err := size(c.ShmSize); err != nil {
		return err
	}
	_, err := c.ulimits()
	return err
}

func size(v Scalar) (int64, error) {
	if v == "" {
		return 0, nil
	}
	n, err := units.RAMInBytes(string(v))
	if err != nil {
		return 0, registry.Invalid("shm_size %q is no size; write it as in 64m", v)
	}
	return n, nil
}

func (c *containerConfig) ulimits() (out []*container.Ulimit, err error) {
	for name, v := range c.Ulimit {
		u, err := units.ParseUlimit(name + "=" + v)
		if err != nil {
			return nil, registry.Invalid("ulimit %s = %q: write SOFT or SOFT:HARD; %w", name, v, err)
		}
		out = append(out, u)
	}
	return out, nil
}

// containerOf returns what the engine is asked to create.
func (d Container) containerOf(t Task) (*container.Config, *container.HostConfig, error) {
	c := t.container
	config := &container.Config{
		Image: c.Image, User: t.User, WorkingDir: c.WorkDir, Tty: c.Tty, Hostname: c.Hostname,
		Env: t.environ("/local", "/alloc", "/secrets"), Entrypoint: c.Entrypoint,
		Cmd:    append([]string(c.Command), texts(c.Args)...),
		Labels: map[string]string{"holdfast.task": t.ID, "holdfast.dir": t.Dir},
	}
	for name, v := range c.Labels {
		config.Labels[name] = v
	}
	shm, err := size(c.ShmSize)
	if err != nil {
		return nil, nil, err
	}
	limits, err := c.ulimits()
	if err != nil {
		return nil, nil, err
	}
	h := &container.HostConfig{
		NetworkMode: container.NetworkMode(c.NetworkMode), Privileged: c.Privileged, CapAdd: c.CapAdd, CapDrop: c.CapDrop,
		SecurityOpt: c.SecurityOpt, ReadonlyRootfs: c.ReadonlyRootfs, ShmSize: shm, Sysctls: c.Sysctl, Runtime: c.Runtime,
		ExtraHosts: c.ExtraHosts, IpcMode: container.IpcMode(c.IPCMode), PidMode: container.PidMode(c.PidMode),
		UTSMode: container.UTSMode(c.UTSMode), UsernsMode: container.UsernsMode(c.UsernsMode), GroupAdd: c.GroupAdd,
		CgroupnsMode:  container.CgroupnsMode(c.CgroupNS),
		LogConfig:     container.LogConfig{Type: "json-file", Config: t.logOptions()},
		RestartPolicy: container.RestartPolicy{Name: container.RestartPolicyDisabled}, // the agent restarts it
	}
	h.Ulimits, h.Devices = limits, c.Devices
	if c.PidsLimit != 0 {
		h.PidsLimit = &c.PidsLimit
	}
	if c.Init {
		h.Init = &c.Init
	}
	for _, path := range c.Tmpfs {
		path, mode, _ := strings.Cut(path, ":")
		if h.Tmpfs == nil {
			h.Tmpfs = map[string]string{}
		}
		h.Tmpfs[path] = mode
	}
	t.mountInto(h)
	t.limit(h)
	return config, h, nil
}

// logOptions limits what the engine keeps of the output of a running container.
func (t Task) logOptions() map[string]string {
	size, files := t.LogSize, t.LogFiles
	if size <= 0 {
		size = DefaultLogSize
	}
	if files <= 0 {
		files = DefaultLogFiles
	}
	return map[string]string{"max-size": strconv.FormatInt(size, 10), "max-file": strconv.Itoa(files)}
}

// mountInto adds the task's own directories, the volumes and mounts of its config, and the plan.
func (t Task) mountInto(h *container.HostConfig) {
	for _, own := range [][2]string{
		{t.localDir(), "/local"}, {t.allocDir(), "/alloc"}, {t.secretsDir(), "/secrets"},
	} {
		h.Mounts = append(h.Mounts, bind(own[0], own[1], false, mount.PropagationRPrivate))
	}
	for _, v := range t.container.Volumes {
		source, rest, found := strings.Cut(v, ":")
		if found && strings.Contains(source, "/") && !filepath.IsAbs(source) {
			v = filepath.Join(t.Dir, source) + ":" + rest
		}
		h.Binds = append(h.Binds, v)
	}
	for _, m := range append(t.container.Mount, t.container.Mounts...) {
		h.Mounts = append(h.Mounts, t.configMount(m))
	}
	for i, dir := range t.Plan.Dirs {
		h.Mounts = append(h.Mounts, bind(t.planDir(i), dir.Path, false, mount.PropagationRPrivate))
	}
	for _, b := range t.Plan.Binds {
		propagation := enginePropagations[b.Propagation]
		if b.SELinux == "" || !selinuxEnforced() {
			h.Mounts = append(h.Mounts, bind(b.Source, b.Target, b.ReadOnly, propagation))
			continue
		}
		mode := "rw" // the form that knows labels
		if b.ReadOnly {
			mode = "ro"
		}
		h.Binds = append(h.Binds, fmt.Sprintf("%s:%s:%s,%s,%s", b.Source, b.Target, mode, b.SELinux, propagation))
	}
	for _, d := range t.Plan.Devices {
		h.Devices = append(h.Devices, container.DeviceMapping{
			PathOnHost: d.Source, PathInContainer: d.Target, CgroupPermissions: d.Access,
		})
	}
	for _, r := range t.Plan.Rules {
		rule := numbers{r.Type == "b", r.Major, r.Minor}.String() + " " + r.Access
		h.DeviceCgroupRules = append(h.DeviceCgroupRules, rule)
	}
	if hasHostDevices(t.Plan) && !t.container.Privileged {
		h.DeviceCgroupRules = append(h.DeviceCgroupRules, "a *:* rwm") // as the exec driver does
	}
}

// planDir is the source of a directory of the plan.
func (t Task) planDir(i int) string { return filepath.Join(t.Dir, "dirs", strconv.Itoa(i)) }

func (t Task) configMount(m mounts) mount.Mount {
	out := mount.Mount{Type: mount.Type(m.Type), Source: m.Source, Target: m.Target, ReadOnly: m.ReadOnly}
	if out.Type == "" {
		out.Type = mount.TypeBind
	}
	if out.Type == mount.TypeBind && !filepath.IsAbs(out.Source) {
		out.Source = filepath.Join(t.Dir, out.Source)
	}
	for _, o := range m.BindOptions {
		out.BindOptions = &mount.BindOptions{Propagation: mount.Propagation(o.Propagation)}
	}
	return out
}

func bind(source, target string, readOnly bool, p mount.Propagation) mount.Mount {
	return mount.Mount{
		Type: mount.TypeBind, Source: source, Target: target, ReadOnly: readOnly,
		BindOptions: &mount.BindOptions{Propagation: p},
	}
}

var enginePropagations = map[hooks.Propagation]mount.Propagation{
	hooks.Private:       mount.PropagationRPrivate,
	hooks.HostToTask:    mount.PropagationRSlave,
	hooks.Bidirectional: mount.PropagationRShared,
}

// limit sets the limits of the resources block.
func (t Task) limit(h *container.HostConfig) {
	h.CPUShares = t.Resources.CPU
	h.Memory = t.Resources.Memory << 20
	if t.Resources.MemoryMax > 0 {
		h.MemoryReservation, h.Memory = h.Memory, t.Resources.MemoryMax<<20
	}
}
