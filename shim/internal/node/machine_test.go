package node_test

import (
	"context"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
)

// errorf is how a fake reports what must never happen.
type errorf func(format string, args ...any)

// machine is a node's directories and mount table, in memory.
type machine struct {
	errorf errorf
	boot   string
	dirs   map[string]bool
	mounts map[string]bool
	parts  parts
}

func newMachine(report errorf) *machine {
	return &machine{errorf: report, boot: "boot-1", dirs: map[string]bool{}, mounts: map[string]bool{},
		parts: newParts()}
}

func (m *machine) Boot() string                      { return m.boot }
func (m *machine) Mounted(path string) (bool, error) { return m.mounts[path], nil }

// covered says whether path is a mount or lies in one.
func (m *machine) covered(path string) bool {
	for ; path != "/"; path = filepath.Dir(path) {
		if m.mounts[path] {
			return true
		}
	}
	return false
}

func (m *machine) MakeDir(path string) error {
	if m.covered(path) {
		m.errorf("a directory is made at or in a mount: %s", path)
	}
	for ; path != "/"; path = filepath.Dir(path) {
		m.dirs[path] = true
	}
	return nil
}

func (m *machine) RemoveDir(path string) error {
	if m.covered(filepath.Dir(path)) {
		m.errorf("a directory is removed in a mount: %s", path)
	}
	if m.mounts[path] {
		return unix.EBUSY
	}
	for other := range m.dirs {
		if strings.HasPrefix(other, path+"/") {
			return unix.ENOTEMPTY
		}
	}
	delete(m.dirs, path)
	return nil
}

// reboot loses what a boot loses.
func (m *machine) reboot() {
	m.boot += "+"
	clear(m.mounts)
	clear(m.parts.at)
}

// plugin is a CSI plugin in memory, node and controller. It checks the order of its calls itself, against what it did
// and against what it answered: an edge whose call got no good answer is in doubt, and nothing that stands on it may
// follow.
type plugin struct {
	*machine
	volumes         registry.Tree // as the active instance has it
	attaches        bool
	stages          bool
	mountsStaging   bool
	keepsTargetDirs bool
	blind           bool  // does not know how full a volume is
	expands         bool  // at the controller
	grows           bool  // on the node
	tells           int64 // the answer of Grow
	offline         bool  // expands volumes that nobody uses, and no others
	absent          bool  // no instance of it is there
	health          registry.Health
	fault           func(registry.RPC) fault
	state           map[registry.ExternalID]*disk
	journal         []string
	last            struct {
		stage   csi.StageRequest
		publish csi.PublishRequest
		private csi.Private
		stats   csi.StatsRequest
		grow    csi.GrowRequest
		expand  csi.ExpandRequest
	}
	says       atomic.Pointer[registry.VolumeCondition] // of every volume
	conditions bool                                     // it declares that it says so

	measure func(context.Context) ([]registry.VolumeUsage, error) // what it answers to Stats; nil: something
}

// disk is what a plugin knows of one volume on one node.
type disk struct {
	size     int64 // as the controller has it, and as the node shows it
	shown    int64
	attached string
	staged   string          // host path
	targets  map[string]bool // host paths
	made     map[string]bool // targets that it ever made: a boot may leave their directories
	doubt    map[string]bool // edges without a good last answer: "attach", "stage", targets
	pending  [2]string       // RPC and edge of the call that has had no certain answer
	busy     int
}

// undoes says which call takes back which.
var undoes = map[registry.RPC]registry.RPC{
	registry.ControllerUnpublishRPC: registry.ControllerPublishRPC,
	registry.NodeUnstageRPC:         registry.NodeStageRPC,
	registry.NodeUnpublishRPC:       registry.NodePublishRPC,
}

// fault is how a call ends instead of well. The zero value: it ends well.
type fault struct {
	code    string
	outcome registry.Outcome
	effect  bool   // it took effect all the same
	then    func() // what happens while it runs
}

func newPlugin(m *machine, root string) *plugin {
	return &plugin{
		machine: m, volumes: registry.Tree{Host: root, Task: "/csi"}, mountsStaging: true,
		state: map[registry.ExternalID]*disk{},
		fault: func(registry.RPC) fault { return fault{} },
	}
}

func (p *plugin) disk(id registry.ExternalID) *disk {
	if p.state[id] == nil {
		p.state[id] = &disk{targets: map[string]bool{}, made: map[string]bool{}, doubt: map[string]bool{}}
	}
	return p.state[id]
}

// host is a path of the plugin's as the host knows it.
func (p *plugin) host(path string) string {
	rel, found := strings.CutPrefix(path, p.volumes.Task+"/")
	if !found {
		p.errorf("%q is not below the plugin's root %s", path, p.volumes.Task)
	}
	return filepath.Join(p.volumes.Host, rel)
}

// call is one call about one edge of a volume.
func (pl *plugin) call(
	rpc registry.RPC, id registry.ExternalID, edge, about string, legal func(*disk) string, effect func(*disk),
) error {
	d := pl.disk(id)
	pl.journal = append(pl.journal, strings.TrimSpace(fmt.Sprintf("%s %s %s", rpc, id, about)))
	if d.busy++; d.busy > 1 {
		pl.errorf("two calls for %s at once", id)
	}
	defer func() { d.busy-- }()
	if why := legal(d); why != "" {
		pl.errorf("%s of %s: %s; journal: %q", rpc, id, why, pl.journal)
	}
	if p := d.pending; p[0] != "" && (p[1] != edge || p[0] != string(rpc) && p[0] != string(undoes[rpc])) {
		pl.errorf("%s of %s is sent while %s has no certain answer", rpc, id, p[0])
	}
	f := pl.fault(rpc)
	if f.code == "" || f.effect {
		effect(d)
	}
	if f.then != nil {
		f.then()
	}
	d.doubt[edge] = f.code != "" && !(f.code == "NOT_FOUND" && f.effect) // that one was gone already
	switch {
	case f.code == "" || f.outcome == registry.OutcomeFailed && f.code != "UNAVAILABLE":
		d.pending = [2]string{}
	case f.outcome == registry.OutcomeUncertain:
		d.pending = [2]string{string(rpc), edge}
	}
	if f.code == "" {
		return nil
	}
	return &registry.CallError{RPC: rpc, Code: f.code, Outcome: f.outcome, Kind: registry.ErrUnavailable,
		Detail: "injected"}
}

func fine(*disk) string { return "" }

func (d *disk) anyTarget() bool {
	for at, doubt := range d.doubt {
		if doubt && strings.HasPrefix(at, "/") {
			return true
		}
	}
	return len(d.targets) > 0
}

func (p *plugin) Attach(_ context.Context, _ registry.InstanceKey, r csi.AttachRequest) (map[string]string, error) {
	return map[string]string{"device": "/dev/" + string(r.VolumeID)},
		p.call(registry.ControllerPublishRPC, r.VolumeID, "attach", string(r.Node),
			fine, func(d *disk) { d.attached = string(r.Node) })
}

func (p *plugin) Detach(_ context.Context, _ registry.InstanceKey, r csi.DetachRequest) error {
	return p.call(registry.ControllerUnpublishRPC, r.VolumeID, "attach", string(r.Node), func(d *disk) string {
		if d.staged != "" || d.doubt["stage"] || d.anyTarget() || r.Node == "" {
			return "staged, published, or to no node"
		}
		return ""
	}, func(d *disk) { d.attached = "" })
}

func (p *plugin) Stage(_ context.Context, _ registry.InstanceKey, r csi.StageRequest) error {
	p.last.stage = r
	at := p.host(r.StagingPath)
	return p.call(registry.NodeStageRPC, r.VolumeID, "stage", "", func(d *disk) string {
		switch {
		case !p.stages:
			return "not announced"
		case p.attaches && (d.attached == "" || d.doubt["attach"] || r.PublishContext["device"] == ""):
			return "not attached"
		case d.staged != "" && d.staged != at:
			return "a second staging path"
		case !p.dirs[at]:
			return "no directory"
		}
		return ""
	}, func(d *disk) {
		d.staged = at
		if p.mountsStaging {
			p.mounts[at] = true
		}
	})
}

func (p *plugin) Unstage(ctx context.Context, _ registry.InstanceKey, r csi.UnstageRequest) error {
	if r.Private != nil {
		p.last.private = r.Private(ctx)
	}
	at := p.host(r.StagingPath)
	return p.call(registry.NodeUnstageRPC, r.VolumeID, "stage", "", func(d *disk) string {
		if d.anyTarget() {
			return "still published"
		}
		return ""
	}, func(d *disk) {
		d.staged = ""
		delete(p.mounts, at)
	})
}

func (p *plugin) Publish(_ context.Context, _ registry.InstanceKey, r csi.PublishRequest) error {
	p.last.publish = r
	at := p.host(r.TargetPath)
	return p.call(registry.NodePublishRPC, r.VolumeID, at, "", func(d *disk) string {
		switch {
		case p.attaches && (d.attached == "" || d.doubt["attach"]):
			return "not attached"
		case p.stages && (d.staged == "" || d.doubt["stage"] || p.host(r.StagingPath) != d.staged):
			return "not staged there"
		case !p.stages && r.StagingPath != "":
			return "a staging path without staging"
		case !p.dirs[filepath.Dir(at)] || p.dirs[at] && !d.made[at]:
			return "no parent, or a target that it did not make"
		}
		return ""
	}, func(d *disk) {
		p.parts.published(at, p.mounts[at])
		d.targets[at], d.made[at], p.mounts[at], p.dirs[at] = true, true, true, true
	})
}

func (p *plugin) Unpublish(ctx context.Context, _ registry.InstanceKey, r csi.UnpublishRequest) error {
	if r.Private != nil {
		p.last.private = r.Private(ctx)
	}
	at := p.host(r.TargetPath)
	return p.call(registry.NodeUnpublishRPC, r.VolumeID, at, "", func(*disk) string {
		return p.parts.standing(at)
	}, func(d *disk) {
		delete(d.targets, at)
		delete(p.mounts, at)
		if !p.keepsTargetDirs {
			delete(p.dirs, at)
		}
	})
}

func (p *plugin) Expand(_ context.Context, _ registry.InstanceKey, r csi.ExpandRequest) (csi.Expanded, error) {
	p.last.expand = r
	err := p.call(registry.ControllerExpandRPC, r.VolumeID, "size", fmt.Sprint(r.Range.Required), func(d *disk) string {
		switch {
		case !p.expands:
			return "not announced"
		case p.offline && (d.attached != "" || d.staged != "" || d.anyTarget()):
			return "in use"
		}
		return ""
	}, func(d *disk) { d.size = max(d.size, r.Range.Required) })
	return csi.Expanded{Capacity: p.disk(r.VolumeID).size, Node: p.grows}, err
}

func (p *plugin) Grow(_ context.Context, _ registry.InstanceKey, r csi.GrowRequest) (int64, error) {
	p.last.grow = r
	at, where := p.host(r.Path), "target"
	if at == p.disk(r.VolumeID).staged {
		where = "staging"
	}
	err := p.call(registry.NodeExpandRPC, r.VolumeID, "node size", fmt.Sprintf("%d at %s", r.Range.Required, where),
		func(d *disk) string {
			switch {
			case !p.grows:
				return "not announced"
			case p.expands && d.size < r.Range.Required:
				return "not expanded by the controller"
			case p.stages && (d.staged == "" || r.StagingPath == "" || p.host(r.StagingPath) != d.staged):
				return "not staged there"
			case at != d.staged && !d.targets[at]:
				return "not at " + at
			}
			return ""
		}, func(d *disk) { d.shown = max(d.size, r.Range.Required) })
	return p.tells, err
}

func (p *plugin) Stats(ctx context.Context, _ registry.InstanceKey, r csi.StatsRequest) (registry.VolumeReport, error) {
	says := p.says.Load() // first: a test that stores it has read the journal
	at, d := p.host(r.Path), p.disk(r.VolumeID)
	p.journal = append(p.journal, "NodeGetVolumeStats "+string(r.VolumeID)+" "+at)
	p.last.stats = r
	switch {
	case !d.targets[at] && d.staged != at || !p.mounts[at] && p.mountsStaging:
		p.errorf("%s is not at %s", r.VolumeID, at)
	case p.stages && (r.StagingPath == "" || p.host(r.StagingPath) != d.staged), !p.stages && r.StagingPath != "":
		p.errorf("%q is not where it is staged: %q", r.StagingPath, d.staged)
	}
	report := registry.VolumeReport{Usage: []registry.VolumeUsage{{Unit: "bytes", Total: 100, Used: 40, Available: 60}},
		Condition: says}
	if p.measure == nil {
		return report, nil
	}
	usage, err := p.measure(ctx)
	return registry.VolumeReport{Usage: usage, Condition: says}, err
}

// reboot loses what the node's part knew.
func (p *plugin) reboot() {
	p.machine.reboot()
	for _, d := range p.state {
		d.staged = ""
		clear(d.targets)
		if d.pending[0] == string(registry.NodeExpandRPC) {
			d.pending = [2]string{} // the place that it was for is gone
		}
		maps.DeleteFunc(d.doubt, func(edge string, _ bool) bool { return edge != "attach" })
	}
}

// leftovers is what the plugin still holds, for people.
func (p *plugin) leftovers() (left []string) {
	for id, d := range p.state {
		if d.attached != "" || d.staged != "" || d.anyTarget() || d.doubt["attach"] || d.doubt["stage"] {
			left = append(left, fmt.Sprintf("%s: %+v", id, *d))
		}
	}
	return left
}

// Create, Delete and Validate are not asked for here.
func (p *plugin) Create(context.Context, registry.InstanceKey, csi.CreateRequest) (csi.Created, error) {
	panic("not here")
}
func (p *plugin) Delete(context.Context, registry.InstanceKey, csi.DeleteRequest) error {
	panic("not here")
}
func (p *plugin) Validate(context.Context, registry.InstanceKey, csi.ValidateRequest) (csi.Validated, error) {
	panic("not here")
}

// Find and Await are the table of instances: one task that is both.
func (p *plugin) Find(role registry.Role, id registry.PluginID) (registry.Instance, bool) {
	caps := []registry.Capability{registry.PluginController, registry.SingleNodeMulti, registry.ControllerMulti}
	if p.attaches {
		caps = append(caps, registry.AttachDetach)
	}
	if p.stages {
		caps = append(caps, registry.StageUnstage)
	}
	if p.expands {
		caps = append(caps, registry.ControllerExpand)
	}
	if p.grows {
		caps = append(caps, registry.NodeExpand)
	}
	if p.offline {
		caps = append(caps, registry.ExpandsOffline)
	} else {
		caps = append(caps, registry.ExpandsOnline)
	}
	if !p.blind {
		caps = append(caps, registry.VolumeStats)
	}
	if p.conditions {
		caps = append(caps, registry.NodeCondition)
	}
	slices.Sort(caps)
	return registry.Instance{
		InstanceKey: registry.InstanceKey{Role: role, Plugin: id, Alloc: "p", Task: "p"}, Volumes: p.volumes,
		Fingerprint: registry.Fingerprint{NodeID: "i-1", Capabilities: caps}, Health: p.health,
	}, !p.absent
}

func (p *plugin) Await(_ context.Context, role registry.Role, id registry.PluginID) (registry.Instance, error) {
	i, _ := p.Find(role, id)
	return i, nil
}

// vault resolves every secret.
type vault struct{}

func (vault) Resolve(_ context.Context, refs map[string]registry.Secret) (map[string]registry.SecretValue, error) {
	values := map[string]registry.SecretValue{}
	for k := range refs {
		values[k] = "canary-77d1"
	}
	return values, nil
}
