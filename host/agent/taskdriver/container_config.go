//go:build !taskparent

package taskdriver

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/distribution/reference"
	"github.com/docker/go-units"
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/mount"

	"holdfast/hooks"
	"holdfast/registry"
)

// containerConfig is the config block of the docker and podman drivers. It has the attributes of Nomad's drivers of
// these names. Where those two drivers name an attribute differently, both names are accepted.
type containerConfig struct {
	Image            string       `json:"image"`
	Load             string       `json:"load"` // an archive of images, relative to the task's directory
	ForcePull        bool         `json:"force_pull"`
	ImagePullTimeout string       `json:"image_pull_timeout"`
	Auth             blocks[auth] `json:"auth"`
	Command          commandLine  `json:"command"`
	Args             []Scalar     `json:"args"`
	Entrypoint       commandLine  `json:"entrypoint"`
	WorkDir          string       `json:"work_dir"`
	WorkingDir       string       `json:"working_dir"`

	Privileged       bool                 `json:"privileged"`
	CapAdd           []string             `json:"cap_add"`
	CapDrop          []string             `json:"cap_drop"`
	SecurityOpt      []string             `json:"security_opt"`
	Devices          blocks[device]       `json:"devices"`
	Volumes          []string             `json:"volumes"`
	Mount            blocks[mounts]       `json:"mount"`
	Mounts           blocks[mounts]       `json:"mounts"`
	Tmpfs            []string             `json:"tmpfs"`
	ReadonlyRootfs   bool                 `json:"readonly_rootfs"`
	ShmSize          Scalar               `json:"shm_size"` // bytes, or with a unit
	Ulimit           options              `json:"ulimit"`
	Sysctl           options              `json:"sysctl"`
	PidsLimit        int64                `json:"pids_limit"`
	Runtime          string               `json:"runtime"`
	Init             bool                 `json:"init"`
	Tty              bool                 `json:"tty"`
	Interactive      bool                 `json:"interactive"`
	OOMScoreAdj      int                  `json:"oom_score_adj"`
	StorageOpt       options              `json:"storage_opt"`
	MemoryHardLimit  int64                `json:"memory_hard_limit"` // MiB, as memory_max of resources
	MemorySwap       Scalar               `json:"memory_swap"`       // bytes, or with a unit
	MemorySwappiness *int64               `json:"memory_swappiness"`
	Healthchecks     blocks[healthchecks] `json:"healthchecks"`

	Hostname    string   `json:"hostname"`
	NetworkMode string   `json:"network_mode"`
	ExtraHosts  []string `json:"extra_hosts"`
	IPCMode     string   `json:"ipc_mode"`
	PidMode     string   `json:"pid_mode"`
	UTSMode     string   `json:"uts_mode"`
	UsernsMode  string   `json:"userns_mode"`
	Userns      string   `json:"userns"`
	DNS         []string `json:"dns"`
	DNSServers  []string `json:"dns_servers"`
	DNSSearch   []string `json:"dns_search_domains"`
	DNSOptions  []string `json:"dns_options"`
	CgroupNS    string   `json:"cgroupns"`
	GroupAdd    []string `json:"group_add"`
	Labels      options  `json:"labels"`
}

// mounts is a mount block of the config.
type mounts struct {
	Type        string `json:"type"` // bind (the default here), volume or tmpfs
	Source      string `json:"source"`
	Target      string `json:"target"`
	ReadOnly    bool   `json:"readonly"`
	BindOptions blocks[struct {
		Propagation string `json:"propagation"`
	}] `json:"bind_options"`
	VolumeOptions blocks[struct {
		NoCopy       bool    `json:"no_copy"`
		Labels       options `json:"labels"`
		DriverConfig blocks[struct {
			Name    string  `json:"name"`
			Options options `json:"options"`
		}] `json:"driver_config"`
	}] `json:"volume_options"`
	TmpfsOptions blocks[struct {
		Size int64  `json:"size"` // bytes
		Mode Scalar `json:"mode"` // octal
	}] `json:"tmpfs_options"`
}

type healthchecks struct {
	Disable bool `json:"disable"`
}

// blocks is a list of blocks. It may also be written as an attribute.
type blocks[T any] []T

func (l *blocks[T]) UnmarshalJSON(b []byte) error {
	if len(b) > 0 && b[0] == '{' {
		*l = make([]T, 1)
		return json.Unmarshal(b, &(*l)[0])
	}
	return json.Unmarshal(b, (*[]T)(l))
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
	*c = toStrings(words)
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

// device is a block of devices, or a string HOST[:CONTAINER[:ACCESS]].
type device struct {
	Host   string `json:"host_path"`
	Target string `json:"container_path"`     // default: as on the host
	Access string `json:"cgroup_permissions"` // default: rwm
}

func (d *device) UnmarshalJSON(b []byte) error {
	var text string
	if json.Unmarshal(b, &text) == nil {
		part := append(strings.SplitN(text, ":", 3), "", "")
		d.Host, d.Target, d.Access = part[0], part[1], part[2]
		return nil
	}
	type plain device
	return json.Unmarshal(b, (*plain)(d))
}

// Configure reads the config block of a container.
func (d Container) Configure(t *Task, config json.RawMessage) (warnings []string, err error) {
	c := &containerConfig{}
	warnings = unknownKeys[containerConfig](d.name, config)
	if err := Decode("config", config, c); err != nil {
		return warnings, err
	}
	c.WorkDir, c.UsernsMode = cmp.Or(c.WorkDir, c.WorkingDir), cmp.Or(c.UsernsMode, c.Userns)
	if c.Image = strings.TrimPrefix(c.Image, "docker://"); c.Image == "" {
		return warnings, registry.Invalid("no image; driver %s needs config { image = ... }", d.name)
	}
	t.container = c
	return warnings, cmp.Or(c.check(), t.checkFiles(true))
}

func (c *containerConfig) pullTimeout() (time.Duration, error) {
	if c.ImagePullTimeout == "" {
		return 5 * time.Minute, nil
	}
	limit, err := time.ParseDuration(c.ImagePullTimeout)
	if err != nil || limit <= 0 {
		return 0, registry.Invalid("image_pull_timeout %q is no duration above 0; write it as in \"5m\"",
			c.ImagePullTimeout)
	}
	return limit, nil
}

// check refuses values for which the engine's error would be hard to understand.
func (c *containerConfig) check() error {
	var wrong configErrors
	add := func(err error) {
		if err != nil {
			wrong = append(wrong, err)
		}
	}
	if _, err := reference.ParseNormalizedNamed(c.Image); err != nil {
		add(registry.Invalid("image %q: %w", c.Image, err))
	}
	_, err := c.pullTimeout()
	add(err)
	for _, m := range append(c.Mount, c.Mounts...) {
		if m.Type != "" && m.Type != "bind" && m.Type != "volume" && m.Type != "tmpfs" {
			add(registry.Invalid("mount type %q: use bind, volume or tmpfs", m.Type))
		}
		if !filepath.IsAbs(m.Target) {
			add(registry.Invalid("mount target %q is not an absolute path", m.Target))
		}
		for _, o := range m.TmpfsOptions {
			if _, err := o.Mode.octal(); err != nil {
				add(registry.Invalid("tmpfs mode %q is no octal number", o.Mode))
			}
		}
	}
	_, err = size("shm_size", c.ShmSize)
	add(err)
	_, err = size("memory_swap", c.MemorySwap)
	add(err)
	_, err = c.ulimits()
	add(err)
	_, err = c.dnsServers()
	add(err)
	if len(wrong) == 0 {
		return nil
	}
	return wrong
}

func size(what string, v Scalar) (int64, error) {
	if v == "" {
		return 0, nil
	}
	n, err := units.RAMInBytes(string(v))
	if err != nil {
		return 0, registry.Invalid("%s %q is not a size; write it as in 64m", what, v)
	}
	return n, nil
}

func (v Scalar) octal() (os.FileMode, error) {
	n, err := strconv.ParseUint(string("0"+v), 8, 12)
	return os.FileMode(n), err
}

func (c *containerConfig) dnsServers() (out []netip.Addr, err error) {
	for _, text := range append(c.DNSServers, c.DNS...) {
		addr, err := netip.ParseAddr(text)
		if err != nil {
			return nil, registry.Invalid("DNS server %q is no IP address", text)
		}
		out = append(out, addr)
	}
	return out, nil
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

// containerOf returns the container that the engine is asked to create.
func (t Task) containerOf() (*container.Config, *container.HostConfig) {
	c := t.container
	config := &container.Config{
		Image: c.Image, User: t.User, WorkingDir: c.WorkDir, Tty: c.Tty, Hostname: c.Hostname,
		Env: t.environ("/local", "/alloc", "/secrets"), Entrypoint: c.Entrypoint, OpenStdin: c.Interactive,
		Cmd:    append([]string(c.Command), toStrings(c.Args)...),
		Labels: map[string]string{"holdfast.task": t.ID, "holdfast.dir": t.Dir},
	}
	for name, v := range c.Labels {
		config.Labels[name] = v
	}
	for _, checks := range c.Healthchecks {
		if checks.Disable {
			config.Healthcheck = &container.HealthConfig{Test: []string{"NONE"}}
		}
	}
	shm, _ := size("shm_size", c.ShmSize) // these were checked by Configure
	dns, _ := c.dnsServers()
	limits, _ := c.ulimits()
	h := &container.HostConfig{
		Privileged: c.Privileged, CapAdd: c.CapAdd, CapDrop: c.CapDrop, SecurityOpt: c.SecurityOpt,
		ReadonlyRootfs: c.ReadonlyRootfs, ShmSize: shm, Sysctls: c.Sysctl, Runtime: c.Runtime, GroupAdd: c.GroupAdd,
		StorageOpt: c.StorageOpt, OomScoreAdj: c.OOMScoreAdj, ExtraHosts: c.ExtraHosts,
		DNS: dns, DNSSearch: c.DNSSearch, DNSOptions: c.DNSOptions,
		NetworkMode: container.NetworkMode(c.NetworkMode), IpcMode: container.IpcMode(c.IPCMode),
		PidMode: container.PidMode(c.PidMode), UTSMode: container.UTSMode(c.UTSMode),
		UsernsMode: container.UsernsMode(c.UsernsMode), CgroupnsMode: container.CgroupnsMode(c.CgroupNS),
		LogConfig: container.LogConfig{Type: "json-file", Config: map[string]string{
			"max-size": strconv.FormatInt(cmp.Or(t.LogSize, DefaultLogSize), 10),
			"max-file": strconv.Itoa(cmp.Or(t.LogFiles, DefaultLogFiles)),
		}},
		RestartPolicy: container.RestartPolicy{Name: container.RestartPolicyDisabled}, // the agent restarts it
	}
	h.Ulimits = limits
	for _, v := range c.Devices {
		h.Devices = append(h.Devices, container.DeviceMapping{
			PathOnHost: v.Host, PathInContainer: cmp.Or(v.Target, v.Host), CgroupPermissions: cmp.Or(v.Access, "rwm"),
		})
	}
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
	t.setLimits(h)
	return config, h
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
		h.Binds = append(h.Binds, planBind(b))
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

// planBind returns a bind in the textual form. Only this form supports SELinux labels, and only with it does Podman
// also bind the mounts below the source.
func planBind(b hooks.Bind) string {
	text := fmt.Sprintf("%s:%s:rw,%s", b.Source, b.Target, enginePropagations[b.Propagation])
	if b.ReadOnly {
		text = fmt.Sprintf("%s:%s:ro,%s", b.Source, b.Target, enginePropagations[b.Propagation])
	}
	if b.SELinux != "" && selinuxEnforced() {
		text += "," + b.SELinux
	}
	return text
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
	for _, o := range m.VolumeOptions {
		out.VolumeOptions = &mount.VolumeOptions{NoCopy: o.NoCopy, Labels: o.Labels}
		for _, driver := range o.DriverConfig {
			out.VolumeOptions.DriverConfig = &mount.Driver{Name: driver.Name, Options: driver.Options}
		}
	}
	for _, o := range m.TmpfsOptions {
		mode, _ := o.Mode.octal() // checked
		out.TmpfsOptions = &mount.TmpfsOptions{SizeBytes: o.Size, Mode: mode}
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

// setLimits sets the limits of the resources block and of the config.
func (t Task) setLimits(h *container.HostConfig) {
	if t.Resources.CPU+t.Resources.Cores > 0 {
		h.CPUShares, h.NanoCPUs = t.Resources.shares(), t.Resources.Cores*1e9
	}
	h.Memory = t.Resources.Memory << 20
	if hardLimit := cmp.Or(t.container.MemoryHardLimit, t.Resources.MemoryMax); hardLimit > 0 {
		h.MemoryReservation, h.Memory = h.Memory, hardLimit<<20
	}
	h.MemorySwappiness = t.container.MemorySwappiness
	h.MemorySwap, _ = size("memory_swap", t.container.MemorySwap) // checked
}
