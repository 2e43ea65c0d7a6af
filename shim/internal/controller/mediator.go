package controller

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// Mediator calls controller plugins.
type Mediator struct {
	log     registry.State
	driver  Driver
	plugins Plugins
	secrets Secrets
	Options
	left chan struct{} // holds one token after a creation, deletion or expansion has ended without success
}

// Options of a Mediator.
type Options struct {
	// Locks are shared with whoever calls Attach and Detach.
	Locks *intent.Locks
	// Expected says whether the plugin has a task in the role, whatever became of its instance. nil: none is known.
	Expected func(registry.View, registry.Role, registry.PluginID) bool
	// Node has the node see to expansions. nil: nobody does.
	Node Node
	// Pause is that of the shim. nil: there never is one.
	Pause *intent.Pause
	// Now tells the wall time, for people.
	Now    func() time.Time
	Logger hclog.Logger
}

// New is a mediator over log.
func New(log registry.State, driver Driver, plugins Plugins, secrets Secrets, o Options) *Mediator {
	return &Mediator{log: log, driver: driver, plugins: plugins, secrets: secrets, Options: o, left: make(chan struct{}, 1)}
}

// controller is the plugin's active controller; false: the plugin has none. It waits for the plugin until ctx ends. certain: the plugin is
// known to have one. A controller that is away for a moment is no reason to go on without one.
func (m *Mediator) controller(ctx context.Context, id registry.PluginID, certain bool) (inst registry.Instance, has bool, err error) {
	if !certain {
		if certain, err = m.expected(ctx, registry.RoleController, id); err != nil {
			return inst, false, err
		}
	}
	if !certain {
		if inst, err = m.either(ctx, id); err != nil {
			return inst, false, fmt.Errorf("plugin %s: %w", id, err)
		}
		if inst.Role == registry.RoleController {
			return inst, true, nil
		}
		if !inst.Fingerprint.Has(registry.PluginController) {
			return inst, false, nil
		}
	}
	if inst, err = m.await(ctx, intent.Caller{}, id); err != nil {
		return inst, false, err
	}
	return inst, true, nil
}

// expected says whether something durable tells of a task of the plugin in the role.
func (m *Mediator) expected(ctx context.Context, role registry.Role, id registry.PluginID) (expected bool, err error) {
	if m.Expected == nil {
		return false, nil
	}
	err = m.log.View(ctx, func(view registry.View) error {
		expected = m.Expected(view, role, id)
		return nil
	})
	return expected, err
}

// either is an instance that can say whether the plugin has a controller: the controller, or any of its node plugins.
func (m *Mediator) either(ctx context.Context, id registry.PluginID) (registry.Instance, error) {
	for _, role := range []registry.Role{registry.RoleController, registry.RoleNode} {
		if _, found := m.plugins.Find(role, id); found {
			return m.plugins.Await(ctx, role, id)
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	type answer struct {
		registry.Instance
		error
	}
	answers := make(chan answer, 2)
	for _, role := range []registry.Role{registry.RoleController, registry.RoleNode} {
		go func() {
			inst, err := m.plugins.Await(ctx, role, id)
			answers <- answer{inst, err}
		}()
	}
	first := <-answers
	cancel()
	second := <-answers
	if first.error != nil && second.error == nil {
		first = second
	}
	return first.Instance, first.error
}

// demands is nil if the controller can be asked for the modes.
func demands(inst registry.Instance, modes ...registry.AccessMode) error {
	for _, m := range modes {
		newer := m == registry.SingleNodeSingleWriter || m == registry.SingleNodeMultiWriter
		if newer && !inst.Fingerprint.Has(registry.ControllerMulti) {
			return registry.Errorf(registry.ErrUnsupported, "plugin %s does not know the access mode %s (it lacks %s); use %s",
				inst.Plugin, m, registry.ControllerMulti, registry.SingleNodeWriter)
		}
	}
	return nil
}

func modesOf(s registry.VolumeSpec) []registry.AccessMode {
	var modes []registry.AccessMode
	for _, c := range s.Capabilities {
		modes = append(modes, c.Access)
	}
	return modes
}

// resolve resolves the volume's secrets for one call.
func (m *Mediator) resolve(ctx context.Context, s registry.VolumeSpec) (map[string]registry.SecretValue, error) {
	if len(s.Secrets) == 0 {
		return nil, nil
	}
	values, err := m.secrets.Resolve(ctx, s.Secrets)
	if err != nil {
		return nil, fmt.Errorf("secrets of volume %s: %w", s.VolumeName(), err)
	}
	return values, nil
}

// renewed is the secrets for a further try of a call: those of now, as one that was refused may have been replaced, or the same again if
// nobody can be asked.
func (m *Mediator) renewed(ctx context.Context, s registry.VolumeSpec, last map[string]registry.SecretValue) map[string]registry.SecretValue {
	values, err := m.resolve(ctx, s)
	if err != nil {
		return last
	}
	return values
}

// volume is the volume of that name as it is stored.
func (m *Mediator) volume(ctx context.Context, name registry.VolumeName) (v registry.Volume, err error) {
	err = m.log.View(ctx, func(view registry.View) error {
		var found bool
		if v, found = view.Volume(name); !found {
			return unknown(name)
		}
		return nil
	})
	return v, err
}

func unknown(name registry.VolumeName) error {
	return registry.Errorf(registry.ErrNotFound, "there is no volume %s", name)
}

func (m *Mediator) event(kind registry.EventKind, v registry.Volume, detail string) registry.Event {
	return registry.Event{
		Kind: kind, Role: registry.RoleController, Plugin: v.Plugin, Volume: v.VolumeName(), External: v.External, Detail: detail, At: m.Now(),
	}
}

// idle is nil if nobody uses the volume, else an ErrConflict that names who does.
func idle(view registry.View, v registry.Volume, what string) error {
	if v.External == "" {
		return nil
	}
	var users []string
	key := v.VolumeKey()
	for _, c := range view.Claims(key) {
		users = append(users, fmt.Sprintf("claimed by alloc %s (as %q on node %s, %s, since %s)",
			c.Alloc, c.Request, c.Node, c.Usage, c.Since.UTC().Format(time.RFC3339)))
	}
	for _, r := range view.Refs(key) {
		users = append(users, fmt.Sprintf("published for alloc %s at %s", r.Alloc, r.Target.Host))
	}
	p, _ := view.Placement(key)
	if p.Stage != registry.MarkNone {
		users = append(users, fmt.Sprintf("staged at %s", p.StagedAt.Host))
	}
	if p.Attach != registry.MarkNone {
		users = append(users, fmt.Sprintf("attached to node %s", p.Node))
	}
	if len(users) == 0 {
		return nil
	}
	return registry.Errorf(registry.ErrConflict, "volume %s cannot be %s: it is %s",
		v.VolumeName(), what, strings.Join(users, ", "))
}

// broken is the error of a call that the plugin answered OK, with an answer that cannot be used.
func broken(rpc registry.RPC, at registry.InstanceKey, kind error, format string, args ...any) error {
	return &registry.CallError{
		RPC: rpc, Instance: at, Code: "OK", Outcome: registry.OutcomeFailed, Kind: kind, Detail: fmt.Sprintf(format, args...),
	}
}

// answered says whether the plugin answered the call with the code.
func answered(err error, code string) bool {
	call, ok := errors.AsType[*registry.CallError](err)
	return ok && call.Code == code
}

// maxMap bounds the maps of a plugin's answer in bytes. CSI allows 4096 ("Size Limits"); a volume whose driver needs more is of more use than none,
// as a map is only stored and handed back.
const maxMap = 64 << 10

func checkMap(what string, m map[string]string) error {
	size := 0
	for k, v := range m {
		size += len(k) + len(v)
	}
	if size > maxMap {
		return registry.Invalid("its %s is %d bytes large; at most %d are allowed", what, size, maxMap)
	}
	return nil
}

// base is the part of an intent that all calls for a volume share.
func base(rpc registry.RPC, call registry.Call, v registry.Volume, hash string) registry.Intent {
	i := registry.Intent{Volume: v.VolumeKey(), Name: v.VolumeName(), RPC: rpc, Operation: call.ID, Hash: hash}
	if call.Method != "" {
		i.Answers = call
	}
	return i
}

func (m *Mediator) drive(ctx context.Context, c intent.Call) error {
	return intent.Sender{State: m.log, Now: m.Now, Pause: m.Pause, Drain: intent.DrainTime}.Send(ctx, c)
}
