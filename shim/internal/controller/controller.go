package controller

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/internal/display"
	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// Controller manages volumes, and makes the calls to controller plugins.
type Controller struct {
	intent.Calls
	*Claims
	driver Driver
	node   Node
	logger hclog.Logger
	// Fence returns once a node cannot write any more. If the host cannot fence, Fence is nil or returns
	// ErrUnsupported.
	Fence func(context.Context, registry.NodeName) error
	// Suspended are the optional calls during which plugins died. If it is nil, no such call is recorded.
	Suspended *csi.Suspensions
	wakeup
}

// New returns a controller that calls plugins through driver. node does the part of expansions that this node has to
// do.
func New(calls intent.Calls, driver Driver, node Node, logger hclog.Logger) *Controller {
	return &Controller{
		Calls: calls, Claims: NewClaims(calls),
		driver: driver, node: node, logger: logger, wakeup: make(wakeup, 1),
	}
}

// sendTo sends a call to the controller of the volume's plugin. Before each try it waits for the controller. Before
// each further try it resolves the secrets again.
func (m *Controller) sendTo(
	ctx context.Context, by intent.Caller, v registry.VolumeSpec, secrets *map[string]registry.SecretValue,
	c intent.Call, do func(context.Context, registry.InstanceKey) error,
) (err error) {
	if *secrets, err = m.Resolve(ctx, v); err != nil {
		if c.Intent.RPC != registry.CreateVolumeRPC {
			err = fmt.Errorf("%w; restore it, or give the volume another one with `volume update`", err)
		}
		return err
	}
	c.Renew = func(ctx context.Context) { *secrets = m.Renew(ctx, v, *secrets) }
	return m.Send(ctx, by, c, func(ctx context.Context, inst registry.Instance) error {
		return do(ctx, inst.InstanceKey)
	})
}

// lockVolume takes the locks of the volume's name and key, and returns the volume. A volume whose external id is
// unknown has only the lock of its name.
func (m *Controller) lockVolume(
	ctx context.Context, name registry.VolumeName, what string,
) (v registry.Volume, unlock func(), err error) {
	unlockName, err := m.Locks.Lock(ctx, name, what)
	if err != nil {
		return v, nil, err
	}
	v, err = m.volume(ctx, name)
	if err == nil && v.External == "" {
		return v, unlockName, nil
	}
	var unlockKey func()
	if err == nil {
		unlockKey, err = m.lockToAlter(ctx, v.VolumeKey(), what)
	}
	if err != nil {
		unlockName()
		return v, nil, err
	}
	return v, func() { unlockKey(); unlockName() }, nil
}

// lockToAlter takes the lock of a volume that is to be altered. While the creation of a snapshot of the volume may run
// at the plugin, lockToAlter releases the lock and tries again later. If an alteration may run too, it does not wait:
// the snapshot waits for the alteration.
func (m *Controller) lockToAlter(ctx context.Context, key registry.VolumeKey, what string) (unlock func(), err error) {
	for try := uint64(1); ; try++ {
		if unlock, err = m.Locks.Lock(ctx, key, what); err != nil {
			return nil, err
		}
		var name snapshotName
		wait := false
		err = m.State.View(ctx, func(view registry.View) error {
			name, wait = snapshotBeingTaken(view, key)
			wait = wait && !alterationRuns(view, key)
			return nil
		})
		if err == nil && !wait {
			return unlock, nil
		}
		unlock()
		if err != nil {
			return nil, err
		}
		if !intent.Sleep(ctx, readyBackoff.Delay(try, rand.Float64())) {
			return nil, registry.Errorf(registry.ErrUnavailable, "%s is being taken of it: %w",
				name, context.Cause(ctx))
		}
	}
}

func usagesOf(s registry.VolumeSpec) (usages []registry.Usage) {
	for _, c := range s.Capabilities {
		usages = append(usages, registry.Usage{Access: c.Access, Attachment: c.Attachment})
	}
	return usages
}

// volume returns the stored volume of that name.
func (m *Controller) volume(ctx context.Context, name registry.VolumeName) (v registry.Volume, err error) {
	err = m.State.View(ctx, func(view registry.View) error {
		var found bool
		if v, found = view.Volume(name); !found {
			return errUnknown(name)
		}
		return nil
	})
	return v, err
}

// confirmedVolume returns the volume of that name if check accepts it; nil accepts all. A refusal is confirmed
// (registry.Confirm), so that a call sees the effect of an earlier one at another node.
func (m *Controller) confirmedVolume(
	ctx context.Context, name registry.VolumeName, check func(registry.Volume) error,
) (v registry.Volume, err error) {
	err = registry.Confirm(ctx, m.State, func(view registry.View) error {
		var found bool
		if v, found = view.Volume(name); !found {
			return errUnknown(name)
		}
		if check == nil {
			return nil
		}
		return check(v)
	})
	return v, err
}

func errUnknown(name registry.VolumeName) error {
	return registry.Errorf(registry.ErrNotFound, "volume %s not found", name)
}

func (m *Controller) event(kind registry.EventKind, v registry.Volume, detail string) registry.Event {
	return registry.Event{
		Kind: kind, Role: registry.RoleController, Plugin: v.Plugin, Volume: v.VolumeName(), External: v.External,
		Detail: detail, At: m.Now(),
	}
}

// checkUnused returns an ErrConflict that names the users if the volume is in use. local lists the uses on this node
// (Node.Uses). The attachments in except do not count as uses.
func checkUnused(
	view registry.View, v registry.Volume, local []string, what string, except ...registry.Attachment,
) error {
	if v.External == "" {
		return nil
	}
	var users []string
	key := v.VolumeKey()
	for _, c := range view.Claims(key) {
		users = append(users, fmt.Sprintf("claimed by alloc %s (as %q on node %s, %s, since %s)",
			c.Alloc, c.Request, c.Node, c.Usage, c.Since.UTC().Format(time.RFC3339)))
	}
	users = append(users, local...)
	for _, at := range view.Attachments(key) {
		if slices.ContainsFunc(except, func(x registry.Attachment) bool { return x.Key() == at.Key() }) {
			continue
		}
		users = append(users, fmt.Sprintf("attached to node %s", at.NodeID))
	}
	if len(users) == 0 {
		return nil
	}
	return registry.Errorf(registry.ErrConflict, "volume %s cannot be %s: it is %s; "+
		"to see how to release it: %s", v.VolumeName(), what, strings.Join(users, ", "),
		display.ObjectCommand("holdfast claim explain", v.Namespace, string(v.ID)))
}

// uses describes how this node uses the volume.
func (m *Controller) uses(ctx context.Context, v registry.Volume) ([]string, error) {
	if v.External == "" {
		return nil, nil
	}
	return m.node.Uses(ctx, v.VolumeKey())
}

// badResponse returns the error of a call that the plugin answered with OK but with an unusable response.
func badResponse(
	rpc registry.RPC, at registry.InstanceKey, kind error, format string, args ...any,
) *registry.CallError {
	return &registry.CallError{
		RPC: rpc, Instance: at, Code: "OK", Outcome: registry.OutcomeFailed, Kind: kind,
		Detail: fmt.Sprintf(format, args...),
	}
}

// answered reports whether the plugin answered the call with the code.
func answered(err error, code string) bool {
	call, ok := errors.AsType[*registry.CallError](err)
	return ok && call.Code == code
}

// maxMap bounds the maps in a plugin's response, in bytes. CSI allows 4096 ("Size Limits"). Larger maps of real drivers
// are accepted because Holdfast only stores them and sends them back.
const maxMap = 64 << 10

// checkMap returns an ErrInvalid if the map is larger than maxMap. what names the map in the error.
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

// newIntent returns an intent with the fields that all calls for a volume share.
func newIntent(rpc registry.RPC, call registry.Call, v registry.Volume, hash string) registry.Intent {
	return registry.Intent{Volume: v.VolumeKey(), Name: v.VolumeName(), RPC: rpc, Operation: call.ID, Hash: hash}
}

// Driver makes the CSI calls to controller plugins. Calls for one volume are never concurrent. An error that is not a
// *registry.CallError counts as an unknown outcome.
type Driver interface {
	Create(context.Context, registry.InstanceKey, csi.CreateRequest) (csi.Created, error)
	Delete(context.Context, registry.InstanceKey, csi.DeleteRequest) error
	// Attach returns the publish context.
	Attach(context.Context, registry.InstanceKey, csi.AttachRequest) (map[string]string, error)
	Detach(context.Context, registry.InstanceKey, csi.DetachRequest) error
	Validate(context.Context, registry.InstanceKey, csi.ValidateRequest) (csi.Validated, error)
	Expand(context.Context, registry.InstanceKey, csi.ExpandRequest) (csi.Expanded, error)
	Modify(context.Context, registry.InstanceKey, csi.ModifyRequest) error
	ListVolumes(ctx context.Context, at registry.InstanceKey, token string) (csi.Page, error)
	GetVolume(context.Context, registry.InstanceKey, registry.ExternalID) (csi.Entry, error)
	Capacity(context.Context, registry.InstanceKey, registry.CapacityQuery) (registry.PluginCapacity, error)
}

// Node does the work of this node that Controller needs. Grow needs the volume's lock.
type Node interface {
	// Name returns the name of the node.
	Name() registry.NodeName
	// Uses describes how the node uses the volume: publishes and staging.
	Uses(ctx context.Context, key registry.VolumeKey) ([]string, error)
	// Grow does the pending expansion on the node if the volume is mounted in a way that can grow. It returns the
	// progress of the node. If retryRefused is set, an expansion that the plugin has refused is retried too, unless CSI
	// forbids that. A certain refusal is recorded and is not an error.
	Grow(ctx context.Context, by intent.Caller, key registry.VolumeKey, retryRefused bool) (
		registry.NodeExpansion, error)
	// Expansion returns the progress of the node, and the open call for the volume on the node. The RPC is empty if
	// none is open.
	Expansion(ctx context.Context, key registry.VolumeKey) (registry.NodeExpansion, registry.RPC, error)
	// Grows reports whether Grow would have something to do.
	Grows(ctx context.Context, v registry.Volume) (bool, error)
}
