package cluster

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/registry"
	"holdfast/registry/registrytest"
	"holdfast/shim/internal/controller"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// TestFeasibleNeedsANodeThatAttaches asks whether a volume can be mounted on a node. It does so with and without an
// executor of the volume's plugin.
func TestFeasibleNeedsANodeThatAttaches(t *testing.T) {
	volume := volumeOf("vol", "vol")
	volume.Created = true
	unattached, registered, local := volume, volume, volume
	unattached.Unattached, registered.Created, local.Node = true, false, "b"
	lease := registry.NodeLease{Node: "b", Lease: 7}
	node := func(plugin registry.NodePlugin) registry.Node {
		plugin.Plugin = volume.Plugin
		return registry.Node{Name: "b", State: registry.NodeReady, Plugins: []registry.NodePlugin{plugin}}
	}
	holder := registry.Executor{Plugin: volume.Plugin}.Taken("b", 7, lease.Since)
	done := registry.Attachment{Volume: volume.VolumeKey(), Node: "b", NodeID: "b-id", State: registry.MarkDone,
		Usage: registry.Usage{Access: registry.SingleNodeWriter}}
	for name, test := range map[string]struct {
		volume   registry.Volume
		records  []registry.Record
		feasible bool
	}{
		"an executor":        {volume, []registry.Record{lease, holder}, true},
		"a suspect executor": {volume, []registry.Record{holder}, false},
		"an executor whose lease is another": {
			volume, []registry.Record{registry.NodeLease{Node: "b", Lease: 8}, holder}, false},
		"a plugin that had an executor": {volume, []registry.Record{lease, holder.Left("b", lease.Since)}, false},
		"no controller yet": {
			volume, []registry.Record{lease, node(registry.NodePlugin{Node: true})}, false},
		"a volume that needs no controller": {
			registered, []registry.Record{lease, node(registry.NodePlugin{Node: true})}, true},
		"a volume that may need one": {registered, []registry.Record{lease, node(registry.NodePlugin{Node: true,
			Capabilities: []registry.Capability{registry.PluginController}})}, false},
		"a volume that is not attached": {unattached, []registry.Record{lease, holder.Left("b", lease.Since)}, true},
		"a volume that is attached":     {volume, []registry.Record{lease, holder.Left("b", lease.Since), done}, true},
		"a node with the volume": {local, []registry.Record{lease, node(registry.NodePlugin{Controller: true,
			Local: true})}, true},
		"a suspect node with the volume": {
			local, []registry.Record{node(registry.NodePlugin{Controller: true, Local: true})}, false},
		"an unhealthy plugin at the volume": {
			local, []registry.Record{lease, node(registry.NodePlugin{ControllerUnhealthy: true})}, false},
	} {
		t.Run(name, func(t *testing.T) {
			s := openStore(t, nil)
			registrytest.Put(t, s, test.records...)
			look(t, s, func(v registry.View) {
				got := (&Attacher{}).FeasibleAttach(v, test.volume, done.Usage, intent.AttachTo{Node: "b"})
				if (len(got) == 0) != test.feasible {
					t.Errorf("%v", got)
				}
			})
		})
	}
}

// TestDryRunNamesWhatTheExecutorDoes asks for the steps of a detach by force, on a node without the plugin.
func TestDryRunNamesWhatTheExecutorDoes(t *testing.T) {
	lease := registry.NodeLease{Node: "b", Lease: 7}
	holder := registry.Executor{Plugin: "p"}.Taken("b", 7, lease.Since)
	here := registry.ReleaseStep{Action: registry.ReleaseSkip, Detail: "no task on this node serves plugin p"}
	for name, test := range map[string]struct {
		records []registry.Record
		action  registry.ReleaseAction
		detail  string
	}{
		"an executor": {[]registry.Record{lease, holder}, registry.ReleaseSend, "skipped if it fails"},
		"no executor any more": {
			[]registry.Record{holder.Left("b", lease.Since)}, registry.ReleaseSkip, "plugin p has no executor"},
		"never an executor": {nil, here.Action, here.Detail},
	} {
		t.Run(name, func(t *testing.T) {
			s := openStore(t, nil)
			registrytest.Put(t, s, test.records...)
			look(t, s, func(v registry.View) {
				step := atExecutor(v, registry.ExecutorKey{Plugin: "p"}, here)
				if step.Action != test.action || step.Detail != test.detail {
					t.Errorf("%+v", step)
				}
			})
		})
	}
}

// TestMethodOfALaterReleaseIsRefused asks an executor for a call that only a later release knows.
func TestMethodOfALaterReleaseIsRefused(t *testing.T) {
	s := openStore(t, nil)
	volume := volumeOf("vol", "vol")
	call, err := newCall("later", volume.ExecutedBy(), request{Volume: volume.VolumeKey()})
	if err != nil {
		t.Fatal(err)
	}
	registrytest.Put(t, s, volume, call)
	a := &Attacher{calls: callsOf(s), remote: &Remote{state: &State{node: "a"}}}
	if err := a.Serve(t.Context(), call.Method, call.Request); !errors.Is(err, registry.ErrUnsupported) {
		t.Errorf("%v", err)
	}
}

// TestReleaseBeforeTheAttachNeedsNoExecutor gives up an attach that waits for an executor, and detaches the volume: the
// attach is withdrawn. An attach that an executor has begun is not withdrawn, and the detach waits for an executor.
func TestReleaseBeforeTheAttachNeedsNoExecutor(t *testing.T) {
	x := newMember(t, parallelWithEtcd(t), "a")
	x.makeFormer(t)
	a := newAttacher(t, x)
	volume := volumeOf("vol", "vol")
	attach := func() {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		done := make(chan error)
		go func() {
			done <- a.Attach(ctx, intent.Caller{}, volume, registry.Usage{}, intent.AttachTo{Node: "a", ID: "a-id"})
		}()
		until(t, "the attach is asked for", func() bool { return x.remoteCalls(t) == 1 })
		cancel()
		if err := <-done; !errors.Is(err, context.Canceled) {
			t.Errorf("the attach: %v", err)
		}
	}
	attach()
	if err := a.Detach(t.Context(), intent.Caller{}, volume.VolumeKey(), "a"); err != nil || x.remoteCalls(t) != 0 {
		t.Errorf("the release: %v; %d calls are left", err, x.remoteCalls(t))
	}
	attach()
	commit(t, x, registry.Change{Put: []registry.Record{registry.Attachment{
		Volume: volume.VolumeKey(), Node: "a", NodeID: "a-id", State: registry.MarkSent,
	}}})
	limited := intent.Caller{RetryUntil: time.Now().Add(time.Second)}
	if err := a.Detach(t.Context(), limited, volume.VolumeKey(), "a"); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("the release after the attach has begun: %v", err)
	}
}

// TestDetachByForceIsWithdrawn detaches a volume of another node by force while there is no executor. The attachment is
// abandoned. No call is left that a later executor would carry out, as the node may have attached the volume again.
func TestDetachByForceIsWithdrawn(t *testing.T) {
	x := newMember(t, parallelWithEtcd(t), "a")
	x.makeFormer(t)
	a := newAttacher(t, x)
	a.Controller = controller.New(a.calls, nil, hereOnly{}, hclog.NewNullLogger())
	at := registry.Attachment{Volume: volumeOf("vol", "vol").VolumeKey(), Node: "b", NodeID: "b-id",
		State: registry.MarkDone}
	commit(t, x, registry.Change{Put: []registry.Record{at}})
	limited := intent.Caller{RetryUntil: time.Now().Add(time.Second)}
	if err := a.Detach(t.Context(), limited, at.Volume, at.Node); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("in order: %v", err)
	}
	err := a.DetachOrAbandon(t.Context(), intent.Caller{}, at.AttachmentKey(), registry.Forced{By: "ada"})
	if err != nil || x.remoteCalls(t) != 0 {
		t.Errorf("by force: %v; %d calls are left", err, x.remoteCalls(t))
	}
	look(t, x, func(v registry.View) {
		if _, found := v.Attachment(at.AttachmentKey()); found {
			t.Error("it is still attached")
		}
	})
}

// maker is a table with one controller, which makes volumes, and the driver that counts them.
type maker struct {
	noPlugins
	controller.Driver
	made int
}

func (m *maker) Find(role registry.Role, _ registry.PluginID) (registry.Instance, bool) {
	return registry.Instance{InstanceKey: registry.InstanceKey{Role: registry.RoleController, Plugin: "p"},
		Health:      registry.Health{State: registry.Healthy},
		Fingerprint: registry.Fingerprint{Capabilities: []registry.Capability{registry.CreateDelete}},
	}, role == registry.RoleController
}

func (m *maker) Await(context.Context, registry.Role, registry.PluginID) (registry.Instance, error) {
	i, _ := m.Find(registry.RoleController, "p")
	return i, nil
}

func (m *maker) Create(context.Context, registry.InstanceKey, csi.CreateRequest) (csi.Created, error) {
	m.made++
	return csi.Created{VolumeID: "vol"}, nil
}

// TestWithdrawnCreationMakesNoVolume withdraws a call for a new volume while the executor waits for the volume's lock.
// It was withdrawn because its alloc has ended, so nothing would delete the volume.
func TestWithdrawnCreationMakesNoVolume(t *testing.T) {
	for _, withdrawn := range []bool{false, true} {
		s, plugin := openStore(t, nil), &maker{}
		calls := callsOf(s)
		calls.Plugins = plugin
		a := &Attacher{Controller: controller.New(calls, plugin, hereOnly{}, hclog.NewNullLogger()), calls: calls}
		r := request{Spec: volumeOf("vol", "").VolumeSpec}
		r.Spec.Name, r.Spec.Capabilities = "vol", []registry.VolumeCapability{{Access: registry.SingleNodeWriter}}
		call, err := newCall(provideMethod, registry.ExecutorKey{Plugin: "p"}, r)
		if err != nil {
			t.Fatal(err)
		}
		registrytest.Put(t, s, call)
		unlock, err := calls.Locks.Lock(t.Context(), r.Spec.VolumeName(), "a test")
		if err != nil {
			t.Fatal(err)
		}
		served := make(chan error)
		go func() { served <- a.Serve(t.Context(), call.Method, call.Request) }()
		if withdrawn {
			commit(t, s, registry.Change{Delete: []registry.Key{call.Key()}})
		}
		unlock()
		err = <-served
		look(t, s, func(v registry.View) {
			_, found := v.Volume(r.Spec.VolumeName())
			refused := errors.Is(err, registry.ErrConflict)
			if found == withdrawn || (plugin.made == 0) != withdrawn || refused != withdrawn {
				t.Errorf("withdrawn %v: recorded %v, made %d times, %v", withdrawn, found, plugin.made, err)
			}
		})
	}
}
