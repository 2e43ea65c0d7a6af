package node_test

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/hooks"
	"holdfast/registry"
	"holdfast/registry/registrytest"
	"holdfast/shim/internal/controller"
	"holdfast/shim/internal/intent"
	"holdfast/shim/internal/node"
)

var layout = hooks.Layout{Run: "/run/h", State: "/var/lib/h"}

// world is one node: plugin, machine, durable state, and the use cases over them.
type world struct {
	*plugin
	log      *registrytest.Log
	check    bool
	limit    time.Duration // of each step; 0: none
	wanted   []hooks.Part  // by who comes up
	ledger   *controller.Claims
	mediator *controller.Controller
	stager   *node.Stager
}

func newWorld(report errorf) *world {
	m := newMachine(report)
	root := layout.PluginRoot("ebs")
	_ = m.MakeDir(root)
	w := &world{plugin: newPlugin(m, root), log: registrytest.NewLog(time.Now), check: true}
	w.attaches, w.stages = true, true
	w.build()
	return w
}

// build makes the use cases anew, as a process that starts does.
func (w *world) build() {
	w.stager = w.newStager(w.plugin, w.machine, vault{})
	w.mediator = w.newController(w.stager)
	w.ledger = w.mediator.Claims
}

// newController returns a controller that knows the node.
func (w *world) newController(n controller.Node) *controller.Controller {
	calls := w.calls(w.plugin, vault{})
	calls.Locks = &intent.Locks{}
	return controller.New(calls, w.plugin, n, hclog.NewNullLogger())
}

// calls is what the use cases share.
func (w *world) calls(plugins intent.Plugins, secrets intent.Secrets) intent.Calls {
	return intent.Calls{
		Sender: intent.Sender{State: w.log, Now: time.Now, Drain: intent.DrainTime}, Plugins: plugins,
		Secrets: secrets,
	}
}

// newStager returns a stager over the world's state.
func (w *world) newStager(plugins intent.Plugins, kernel node.Kernel, secrets intent.Secrets) *node.Stager {
	return node.NewStager(w.calls(plugins, secrets), w.plugin, kernel,
		node.Options{Layout: layout, Node: "n1", Check: w.check, Parts: w.machine})
}

// crash has the process die: whatever it still does is not durable any more.
func (w *world) crash() {
	w.log = w.log.Reopen()
	w.build()
}

func (w *world) put(records ...registry.Record) {
	if _, err := registrytest.Write(context.Background(), w.log, registry.Change{Put: records}); err != nil {
		w.errorf("put: %v", err)
	}
}

func (w *world) view(read func(registry.View)) {
	if err := w.log.View(context.Background(), func(v registry.View) error { read(v); return nil }); err != nil {
		w.errorf("view: %v", err)
	}
}

func volumeOf(id registry.VolumeID) registry.Volume {
	v := registry.Volume{State: registry.VolumeReady, VolumeSpec: registry.VolumeSpec{
		Namespace: "default", ID: id, Plugin: "ebs", External: registry.ExternalID("ext-" + id),
		Secrets: map[string]registry.Secret{"token": {Env: "TOKEN"}}, Context: map[string]string{"pool": "p"},
	}}
	for _, m := range registry.AccessModes {
		v.Capabilities = append(v.Capabilities, registry.VolumeCapability{Access: m, Attachment: registry.FileSystem},
			registry.VolumeCapability{Access: m, Attachment: registry.BlockDevice})
	}
	return v
}

func keyOf(v registry.VolumeID, a registry.AllocID) registry.ClaimKey {
	return registry.ClaimKey{Volume: volumeOf(v).VolumeKey(), Alloc: a, Request: "data"}
}

func shared() registry.Usage {
	return registry.Usage{Access: registry.SingleNodeMultiWriter, Attachment: registry.FileSystem}
}

// up is the story of an alloc that gets its volume.
func (w *world) up(
	ctx context.Context, id registry.VolumeID, a registry.AllocID, u registry.Usage,
) (registry.Tree, error) {
	v, key, call := volumeOf(id), keyOf(id, a), intent.Caller{Call: registry.Call{ID: "op"}}
	c, err := w.ledger.Claim(ctx, registry.Claim{Volume: key.Volume, Alloc: a, Request: key.Request, Node: "n1",
		Usage: u})
	if err != nil {
		return registry.Tree{}, err
	}
	var at registry.Tree
	err = w.steps(ctx,
		func(ctx context.Context) error { return w.settled(ctx, key, registry.NodePublishRPC) },
		func(ctx context.Context) error {
			return w.mediator.Attach(ctx, call, v, c.Usage, w.here(v.VolumeKey(), "i-1"))
		},
		func(ctx context.Context) error { return w.stager.Stage(ctx, call, v, c.Usage) },
		func(ctx context.Context) error { return w.grow(ctx, call, key.Volume) },
		func(ctx context.Context) (err error) {
			published, err := w.stager.Publish(ctx, call, v, key, c.Usage)
			at = published.Target
			return err
		},
		func(ctx context.Context) error { return w.grow(ctx, call, key.Volume) },
		func(ctx context.Context) error {
			_, err := w.stager.MountParts(ctx, key, w.wanted)
			return err
		},
	)
	return at, err
}

// down is the story of an alloc that gives its volume back.
func (w *world) down(ctx context.Context, id registry.VolumeID, a registry.AllocID) error {
	key, call := keyOf(id, a), intent.Caller{}
	return w.steps(ctx,
		func(ctx context.Context) error {
			return w.settled(ctx, key, registry.NodePublishRPC, registry.NodeUnpublishRPC)
		},
		func(ctx context.Context) error { return w.stager.Unpublish(ctx, call, key) },
		func(ctx context.Context) error { return w.stager.Unstage(ctx, call, key.Volume) },
		func(ctx context.Context) error { return w.mediator.Detach(ctx, call, key.Volume, "n1") },
		func(ctx context.Context) error {
			_, err := w.unclaim(ctx, key)
			return err
		},
	)
}

// settled has the volume's open call end first, as an alloc does, unless it is one for the claim that what comes may
// follow, or the last user's.
func (w *world) settled(ctx context.Context, key registry.ClaimKey, follows ...registry.RPC) error {
	var open registry.Intent
	var found, used bool
	w.view(func(v registry.View) {
		open, found = registry.OpenIntent(v, key.Volume)
		used = len(v.Refs(key.Volume)) > 0
	})
	own := open.Alloc == key.Alloc && open.Request == key.Request && slices.Contains(follows, open.RPC)
	switch {
	case !found || own || open.Alloc == "" && !used && len(follows) == 2 && !open.RPC.Expands():
		return nil
	case open.RPC == registry.ControllerExpandRPC || open.RPC == registry.ControllerPublishRPC ||
		open.RPC == registry.ControllerUnpublishRPC:
		return w.mediator.Settle(ctx, intent.Caller{}, open)
	}
	return w.stager.Settle(ctx, intent.Caller{}, open)
}

// steps takes one after another until one fails.
func (w *world) steps(ctx context.Context, steps ...func(context.Context) error) error {
	for _, step := range steps {
		limited, cancel := ctx, context.CancelFunc(func() {})
		if w.limit > 0 {
			limited, cancel = context.WithTimeout(ctx, w.limit)
		}
		err := step(limited)
		cancel()
		if err != nil {
			return err
		}
	}
	return nil
}

// take is the journal since the last time, by RPC.
func (w *world) take() (rpcs []string) {
	for _, line := range w.journal {
		rpcs = append(rpcs, strings.Fields(line)[0])
	}
	w.journal = nil
	return rpcs
}

func (w *world) expect(rpcs ...registry.RPC) {
	var want []string
	for _, rpc := range rpcs {
		want = append(want, string(rpc))
	}
	if got := w.take(); !slices.Equal(got, want) {
		w.errorf("the plugin was asked %q, want %q", got, want)
	}
}

// empty reports whatever is left of any use of any volume.
func (w *world) empty() {
	if left := w.leftovers(); len(left) > 0 {
		w.errorf("the plugin still holds %q", left)
	}
	if len(w.mounts) > 0 {
		w.errorf("still mounted: %v", w.mounts)
	}
	for dir := range w.dirs {
		if strings.HasPrefix(dir, w.volumes.Host+"/") && strings.Count(dir[len(w.volumes.Host):], "/") > 1 {
			w.errorf("left behind: %s", dir)
		}
	}
	w.view(func(v registry.View) {
		if n := len(v.AllClaims()) + len(v.Stagings()) + len(v.AllAttachments()) + len(v.AllRefs()) +
			len(v.Intents()); n > 0 {
			w.errorf("still recorded: %+v %+v %+v %+v", v.AllClaims(), v.Stagings(), v.AllRefs(), v.Intents())
		}
	})
}

// noSecret looks for a secret in everything that is stored.
func (w *world) noSecret() {
	w.view(func(v registry.View) {
		events, _ := v.Events(0, 10000)
		text, err := json.Marshal([]any{v.Volumes(), v.Stagings(), v.AllAttachments(), v.AllRefs(), v.Intents(),
			events})
		if err != nil || strings.Contains(string(text), "canary") {
			w.errorf("a secret is stored (%v): %s", err, text)
		}
	})
}

// here is the node of the tests, as the plugin calls it.
func (w *world) here(v registry.VolumeKey, id registry.NodeID) (to intent.AttachTo) {
	to = intent.AttachTo{Node: "n1", ID: id}
	w.view(func(view registry.View) {
		p, _ := view.Staging(v)
		to.Used = p.State != registry.MarkNone || len(view.Refs(v)) > 0
	})
	return to
}

// grow makes what is pending of an expansion, and records it in the volume.
func (w *world) grow(ctx context.Context, by intent.Caller, v registry.VolumeKey) error {
	done, err := w.stager.Grow(ctx, by, v, false)
	if err != nil {
		return err
	}
	return w.mediator.NodeExpanded(ctx, v, done)
}

// unclaim gives the claim up, once its volume is down.
func (w *world) unclaim(ctx context.Context, key registry.ClaimKey) (existed bool, err error) {
	if err := w.stager.Down(ctx, key); err != nil {
		return false, err
	}
	return w.ledger.Unclaim(ctx, key, true)
}
