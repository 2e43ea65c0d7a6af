package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/registry"
	"holdfast/registry/registrytest"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

var (
	key  = registry.VolumeKey{Plugin: "ebs", External: "vol-data"}
	name = registry.VolumeName{Namespace: "default", ID: "data"}
	call = registry.Call{ID: "op-1", Method: "Test", Digest: "d"}
	by   = intent.Caller{Call: call}
)

// plugin is a controller plugin in memory. It keeps its volumes and a journal of its calls.
type plugin struct {
	t         *testing.T
	made      map[string]bool   // by volume id
	free      int64             // the answer of Capacity
	attached  map[string]string // volume id to node id
	journal   []string
	secrets   []string
	faults    []fault             // the errors of the next calls, in order
	spoil     func(*csi.Created)  // changes the answer of Create
	publish   map[string]string   // the answer of Attach
	pages     map[string]csi.Page // the answers of ListVolumes, by token
	described csi.Entry           // the answer of GetVolume
	mutable   map[string]string   // the parameters that Modify has set
	sizes     map[string]int64    // the size after Expand, by volume id
	enlarged  *csi.Expanded       // the answer of Expand; nil: the requested size, and no work for the node
	confirm   func(csi.ValidateRequest) (csi.Validated, error)
	last      struct {
		create csi.CreateRequest
		attach csi.AttachRequest
		expand csi.ExpandRequest
	}
}

// fault is the error of one call.
type fault struct {
	code    string
	outcome registry.Outcome
	after   bool // the call takes effect before it fails
}

func uncertain(code string, after bool) fault { return fault{code, registry.OutcomeUncertain, after} }
func failed(code string) fault                { return fault{code, registry.OutcomeFailed, false} }

func (p *plugin) call(rpc registry.RPC, about string, secrets map[string]registry.SecretValue, effect func()) error {
	p.journal = append(p.journal, strings.TrimSpace(string(rpc)+" "+about))
	for _, v := range secrets {
		p.secrets = append(p.secrets, string(rpc)+" "+v.Reveal())
	}
	if len(p.faults) > 0 {
		f := p.faults[0]
		p.faults = p.faults[1:]
		if f.code != "" {
			if f.after {
				effect()
			}
			return &registry.CallError{RPC: rpc, Code: f.code, Outcome: f.outcome, Kind: registry.ErrInternal,
				Detail: "injected"}
		}
	}
	effect()
	return nil
}

func (p *plugin) Create(_ context.Context, _ registry.InstanceKey, r csi.CreateRequest) (csi.Created, error) {
	p.last.create = r
	c := csi.Created{VolumeID: "vol-" + r.Name, Capacity: 1 << 30, Context: map[string]string{"pool": "p"}}
	err := p.call(registry.CreateVolumeRPC, r.Name, r.Secrets, func() { p.made[c.VolumeID] = true })
	if err == nil && p.spoil != nil {
		p.spoil(&c)
	}
	return c, err
}

func (p *plugin) Delete(_ context.Context, _ registry.InstanceKey, r csi.DeleteRequest) error {
	return p.call(registry.DeleteVolumeRPC, string(r.VolumeID), r.Secrets, func() {
		delete(p.made, string(r.VolumeID))
	})
}

func (p *plugin) Attach(_ context.Context, _ registry.InstanceKey, r csi.AttachRequest) (map[string]string, error) {
	p.last.attach = r
	err := p.call(registry.ControllerPublishRPC, fmt.Sprintf("%s %s", r.VolumeID, r.Node), r.Secrets, func() {
		p.attached[string(r.VolumeID)] = string(r.Node)
	})
	return p.publish, err
}

func (p *plugin) Detach(_ context.Context, _ registry.InstanceKey, r csi.DetachRequest) error {
	if r.Node == "" {
		p.t.Error("a detach without a node id left: it means all nodes")
	}
	return p.call(registry.ControllerUnpublishRPC, fmt.Sprintf("%s %s", r.VolumeID, r.Node), r.Secrets, func() {
		delete(p.attached, string(r.VolumeID))
	})
}

func (p *plugin) Validate(_ context.Context, _ registry.InstanceKey, r csi.ValidateRequest) (csi.Validated, error) {
	err := p.call("ValidateVolumeCapabilities", string(r.VolumeID), r.Secrets, func() {})
	if err == nil && p.confirm != nil {
		return p.confirm(r)
	}
	return csi.Validated{Confirmed: r.Capabilities}, err
}

func (p *plugin) Expand(_ context.Context, _ registry.InstanceKey, r csi.ExpandRequest) (csi.Expanded, error) {
	p.last.expand = r
	err := p.call(registry.ControllerExpandRPC, fmt.Sprintf("%s %d..%d", r.VolumeID, r.Range.Required, r.Range.Limit),
		r.Secrets, func() {
			p.sizes[string(r.VolumeID)] = max(p.sizes[string(r.VolumeID)], r.Range.Required)
		})
	if p.enlarged != nil {
		return *p.enlarged, err
	}
	return csi.Expanded{Capacity: p.sizes[string(r.VolumeID)]}, err
}

func (p *plugin) Modify(_ context.Context, _ registry.InstanceKey, r csi.ModifyRequest) error {
	return p.call(registry.ControllerModifyRPC, fmt.Sprintf("%s %v", r.VolumeID, r.Mutable), r.Secrets, func() {
		maps.Copy(p.mutable, r.Mutable)
	})
}

func (p *plugin) ListVolumes(_ context.Context, _ registry.InstanceKey, token string) (csi.Page, error) {
	err := p.call(registry.ListVolumesRPC, token, nil, func() {})
	return p.pages[token], err
}

func (p *plugin) GetVolume(_ context.Context, _ registry.InstanceKey, id registry.ExternalID) (csi.Entry, error) {
	err := p.call(registry.GetVolumeRPC, string(id), nil, func() {})
	return p.described, err
}

func (p *plugin) Capacity(
	_ context.Context, _ registry.InstanceKey, q registry.CapacityQuery,
) (registry.PluginCapacity, error) {
	err := p.call(registry.GetCapacityRPC, fmt.Sprint(q.Parameters, q.Topology), nil, func() {})
	return registry.PluginCapacity{Available: p.free}, err
}

func (p *plugin) expect(calls ...string) {
	p.t.Helper()
	if !slices.Equal(p.journal, calls) {
		p.t.Errorf("the plugin was asked %q, want %q", p.journal, calls)
	}
	p.journal = nil
}

// table is a table of instances that does not change.
type table map[registry.Role]registry.Instance

func (t table) Find(role registry.Role, _ registry.PluginID) (registry.Instance, bool) {
	i, found := t[role]
	return i, found
}

func (t table) Members(role registry.Role, id registry.PluginID) []registry.Instance {
	if i, found := t.Find(role, id); found {
		return []registry.Instance{i}
	}
	return nil
}

func (t table) Await(ctx context.Context, role registry.Role, id registry.PluginID) (registry.Instance, error) {
	if i, found := t[role]; found {
		return i, nil
	}
	<-ctx.Done()
	return registry.Instance{}, registry.Errorf(registry.ErrUnavailable, "no %s of plugin %s: %w", role, id,
		context.Cause(ctx))
}

func with(caps ...registry.Capability) registry.Instance {
	slices.Sort(caps)
	return registry.Instance{Fingerprint: registry.Fingerprint{NodeID: "i-1", Capabilities: caps},
		Health: registry.Health{State: registry.Healthy}}
}

// of returns a table with one controller that has the capabilities.
func of(caps ...registry.Capability) table {
	i := with(caps...)
	i.Role = registry.RoleController
	return table{registry.RoleController: i}
}

// serves reports whether the plugin has a task in the role. Only plugin "split" has one, for its controller.
func serves(_ registry.View, role registry.Role, id registry.PluginID) bool {
	return id == "split" && role == registry.RoleController
}

// vault resolves every secret to a value that must not be stored anywhere.
type vault struct{}

const canary = "canary-3f9a"

func (vault) Resolve(_ context.Context, refs map[string]registry.Secret) (map[string]registry.SecretValue, error) {
	values := map[string]registry.SecretValue{}
	for k := range refs {
		values[k] = canary
	}
	return values, nil
}

// desk is a controller with a fake plugin and a state in memory.
type desk struct {
	*Controller
	*plugin
	log *registrytest.Log
	t   *testing.T
}

func open(t *testing.T, plugins intent.Plugins, records ...registry.Record) *desk {
	d := &desk{plugin: &plugin{t: t, made: map[string]bool{}, attached: map[string]string{}, sizes: map[string]int64{},
		mutable: map[string]string{}},
		log: registrytest.NewLog(time.Now), t: t}
	d.use(plugins)
	d.put(records...)
	t.Cleanup(d.checkNoSecret)
	return d
}

// build returns a controller over the desk's state.
func (d *desk) build(plugins intent.Plugins, secrets intent.Secrets) *Controller {
	return New(intent.Calls{
		Sender: intent.Sender{State: d.log, Now: time.Now, Drain: intent.DrainTime}, Plugins: plugins,
		Secrets: secrets,
		Locks:   &intent.Locks{}, Expected: serves,
	}, d.plugin, local{}, hclog.NewNullLogger())
}

// use replaces the controller as a restart does.
func (d *desk) use(plugins intent.Plugins) {
	d.Controller = d.build(plugins, vault{})
}

// crash simulates the death of the process: only durable state remains.
func (d *desk) crash() {
	d.log = d.log.Reopen()
	d.use(d.Controller.Plugins)
}

func (d *desk) put(records ...registry.Record) {
	d.t.Helper()
	registrytest.Put(d.t, d.log, records...)
}

func (d *desk) drop(key registry.Key) {
	d.t.Helper()
	_, err := d.log.Commit(context.Background(), func(registry.View) (registry.Change, error) {
		return registry.Change{Delete: []registry.Key{key}}, nil
	})
	if err != nil {
		d.t.Fatal(err)
	}
}

func (d *desk) view(read func(registry.View)) {
	d.t.Helper()
	if err := d.log.View(context.Background(), func(v registry.View) error { read(v); return nil }); err != nil {
		d.t.Fatal(err)
	}
}

func (d *desk) stored() (v registry.Volume, found bool) {
	d.t.Helper()
	d.view(func(view registry.View) { v, found = view.Volume(name) })
	return v, found
}

// here returns the node of the tests with the plugin's id of it.
func here(id registry.NodeID) intent.AttachTo { return intent.AttachTo{Node: "n1", ID: id} }

// attachment returns the volume's attachment to the node.
func (d *desk) attachment() (at registry.Attachment) {
	d.t.Helper()
	d.view(func(view registry.View) {
		at, _ = view.Attachment(registry.AttachmentKey{Volume: key, Node: "n1"})
	})
	return at
}

// local is a fake Node with preset uses.
type local struct {
	uses []string
	open registry.RPC
	done registry.NodeExpansion
}

func (l local) Name() registry.NodeName                                    { return "n1" }
func (l local) Uses(context.Context, registry.VolumeKey) ([]string, error) { return l.uses, nil }
func (l local) Grow(context.Context, intent.Caller, registry.VolumeKey, bool) (registry.NodeExpansion, error) {
	return l.done, nil
}
func (l local) Expansion(context.Context, registry.VolumeKey) (registry.NodeExpansion, registry.RPC, error) {
	return l.done, l.open, nil
}
func (l local) Grows(_ context.Context, v registry.Volume) (bool, error) {
	return l.open == registry.NodeExpandRPC || l.done.Answers(v), nil
}

func (d *desk) kinds() (kinds []registry.EventKind) {
	d.t.Helper()
	d.view(func(view registry.View) {
		events, _ := view.Events(0, 1000)
		for _, e := range events {
			kinds = append(kinds, e.Kind)
		}
	})
	return kinds
}

// checkNoSecret looks for the canary in everything that is stored.
func (d *desk) checkNoSecret() {
	d.view(func(view registry.View) {
		events, _ := view.Events(0, 1000)
		text, err := json.Marshal([]any{view.Volumes(), view.AllAttachments(), view.Intents(), events})
		if err != nil || strings.Contains(string(text), canary) {
			d.t.Errorf("a secret is stored (%v): %s", err, text)
		}
	})
}

func spec() registry.VolumeSpec {
	return registry.VolumeSpec{
		Namespace: name.Namespace, ID: name.ID, Plugin: "ebs", CapacityMin: 1 << 20, CapacityMax: 1 << 30,
		Capabilities: []registry.VolumeCapability{{Access: registry.SingleNodeWriter, Attachment: registry.FileSystem}},
		Secrets:      map[string]registry.Secret{"token": {Env: "TOKEN"}},
	}
}

// ready returns a volume in state ready.
func ready() registry.Volume {
	v := registry.Volume{VolumeSpec: spec(), State: registry.VolumeReady, Created: true}
	v.Name, v.External = "data", key.External
	return v
}

func claimed() registry.Claim {
	return registry.Claim{Volume: key, Name: name, Alloc: "a1", Request: "r", Node: "n1", Usage: usage()}
}

func usage() registry.Usage {
	return registry.Usage{Access: registry.SingleNodeWriter, Attachment: registry.FileSystem}
}

// wantErr checks that err is of the kind, if that is not nil, and contains the text. Without both, err must be nil.
func wantErr(t *testing.T, what string, err, kind error, text string) {
	t.Helper()
	switch {
	case kind == nil && text == "":
		noErr(t, what, err)
	case err == nil, kind != nil && !errors.Is(err, kind), !strings.Contains(err.Error(), text):
		t.Errorf("%s: %v; want %v, %q", what, err, kind, text)
	}
}

func noErr(t *testing.T, what string, err error) {
	t.Helper()
	if err != nil {
		t.Errorf("%s: %v", what, err)
	}
}

func errOf[T any](_ T, err error) error { return err }

// runInBubble runs a subtest in a synctest bubble.
func runInBubble(t *testing.T, name string, f func(*testing.T)) {
	t.Run(name, func(t *testing.T) { synctest.Test(t, f) })
}
