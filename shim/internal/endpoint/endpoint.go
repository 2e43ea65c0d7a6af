// Package endpoint passes calls of CSI clients to a plugin's active instance: what host.ServeCSI serves.
//
// A volume belongs to Holdfast, which has a record of it, or to the clients of the endpoint, whose uses are recorded
// (registry.EndpointUse), and never to both. Calls that name the same volume are made one at a time. A call that a
// plugin has not answered because it died is repeated at its next instance, which CSI allows for every call.
package endpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/emptypb"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// Plugins makes the calls. *csi.Fleet implements it.
type Plugins interface {
	Pass(ctx context.Context, at registry.InstanceKey, call csi.Passed, reply func(*emptypb.Empty) error) (
		answered bool, err error)
}

// Endpoint passes calls. Its Calls are those of the rest of the shim, with whose operations it shares the locks of
// volumes.
type Endpoint struct {
	intent.Calls
	Instances Plugins
	Node      registry.NodeName
}

// call is one call of a client.
type call struct {
	method
	plugin  registry.PluginID
	raw     *emptypb.Empty
	request proto.Message // raw, decoded; nil: the method is unknown to this build
	volumes []registry.VolumeKey

	repeated bool // it may still run at the plugin
}

// Pass passes a call to the plugin, and each message of the answer to reply. Its error is the plugin's, with its code,
// an error of reply, or one of package registry.
//
// repeated means that the same call was cut off before and may still run at the plugin, which then answers ABORTED (CSI
// spec "Error Scheme"). Pass waits for its end.
func (e *Endpoint) Pass(
	ctx context.Context, plugin registry.PluginID, full string, request *emptypb.Empty, repeated bool,
	reply func(*emptypb.Empty) error,
) error {
	c, err := newCall(plugin, full, request)
	if err != nil {
		return err
	}
	c.repeated = repeated
	unlock, err := e.lock(ctx, c)
	if err != nil {
		return err
	}
	defer unlock()
	begun, err := e.begin(ctx, c)
	if err != nil {
		return err
	}
	lost, err := e.send(ctx, c, reply)
	return errors.Join(err, e.end(ctx, c, begun && !lost, err))
}

func newCall(plugin registry.PluginID, full string, raw *emptypb.Empty) (c call, err error) {
	m, is := parseMethod(full)
	if !is {
		return c, registry.Errorf(registry.ErrUnsupported, "unknown method %s", full)
	}
	c = call{method: m, plugin: plugin, raw: raw}
	if c.request, err = m.decode(raw); err != nil {
		return c, registry.Invalid("the request of %s cannot be decoded: %w", m.rpc, err)
	}
	for _, id := range volumesOf(c.request) {
		if m.effect() != none {
			if _, err := registry.ParseExternalID(string(id)); err != nil {
				return c, err
			}
		}
		c.volumes = append(c.volumes, registry.VolumeKey{Plugin: plugin, External: id})
	}
	slices.SortFunc(c.volumes, func(a, b registry.VolumeKey) int { return cmp.Compare(a.External, b.External) })
	c.volumes = slices.Compact(c.volumes)
	return c, nil
}

// object identifies what is no volume (yet) in calls: what is made under a name, or a snapshot.
type object struct {
	plugin registry.PluginID
	field  protoreflect.Name
	value  string
}

func (o object) String() string { return fmt.Sprintf("%s %q of plugin %s", o.field, o.value, o.plugin) }

// lock waits for other calls that name the same objects. All calls lock in the same order.
func (e *Endpoint) lock(ctx context.Context, c call) (unlock func(), err error) {
	var held []func()
	unlock = func() {
		for _, one := range slices.Backward(held) {
			one()
		}
	}
	var keys []intent.Key
	for _, field := range []protoreflect.Name{"name", "snapshot_id", "group_snapshot_id"} {
		if value := text(c.request, field); value != "" {
			keys = append(keys, object{c.plugin, field, value})
		}
	}
	for _, v := range c.volumes {
		keys = append(keys, v)
	}
	for _, key := range keys {
		one, err := e.Locks.Lock(ctx, key, string(c.rpc)+" of a client of the CSI endpoint")
		if err != nil {
			unlock()
			return nil, err
		}
		held = append(held, one)
	}
	return unlock, nil
}

// begin refuses the call if it would change a volume of Holdfast's own, and records the use that it begins. begun
// reports whether the use is new.
func (e *Endpoint) begin(ctx context.Context, c call) (begun bool, err error) {
	if c.effect() == none || len(c.volumes) == 0 {
		return false, nil
	}
	decide := func(view registry.View) (change registry.Change, err error) {
		for _, key := range c.volumes {
			if v, found := view.VolumeByKey(key); found {
				return change, registry.Errorf(registry.ErrConflict, "volume %q of plugin %s is volume %s of Holdfast, "+
					"which alone changes it; use holdfast volume, or deregister it there first",
					key.External, key.Plugin, v.VolumeName())
			}
		}
		use, is := c.use(e.Node, e.Now())
		known := slices.ContainsFunc(view.EndpointUses(use.Volume), func(u registry.EndpointUse) bool { return u.Key() == use.Key() })
		if begun = is && !known; begun {
			change.Put = append(change.Put, use)
		}
		return change, nil
	}
	_, err = registry.Ensure(ctx, e.State, decide)
	return begun, err
}

// use returns the use that the call begins, if it begins one.
func (c call) use(node registry.NodeName, now time.Time) (use registry.EndpointUse, is bool) {
	place := text(c.request, places[c.rpc])
	use = registry.EndpointUse{Volume: c.volumes[0], Call: c.rpc, Place: place, Node: node, Since: now}
	return use, c.effect() == begins && place != ""
}

// end removes records of uses: those that the call has ended, or the new one if the call has certainly failed.
func (e *Endpoint) end(ctx context.Context, c call, isNew bool, failed error) error {
	if c.effect() == none || len(c.volumes) == 0 {
		return nil
	}
	failure, is := errors.AsType[*registry.CallError](failed)
	certain := is && failure.Outcome == registry.OutcomeFailed
	over := func(use registry.EndpointUse) bool { return false }
	switch {
	case c.effect() == begins && isNew && certain:
		over = func(use registry.EndpointUse) bool {
			return use.Call == c.rpc && use.Place == text(c.request, places[c.rpc])
		}
	case c.effect() == ends && failed == nil:
		began := undoes[c.rpc]
		place := text(c.request, places[began])
		over = func(use registry.EndpointUse) bool {
			// ControllerUnpublishVolume without a node detaches the volume from every node.
			return use.Call == began && (use.Place == place || place == "" && began == registry.ControllerPublishRPC)
		}
	case c.effect() == deletes && failed == nil:
		over = func(registry.EndpointUse) bool { return true }
	default:
		return nil
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), commitTimeout)
	defer cancel()
	_, err := registry.Ensure(ctx, e.State, func(view registry.View) (change registry.Change, err error) {
		for _, key := range c.volumes {
			for _, use := range view.EndpointUses(key) {
				if over(use) {
					change.Delete = append(change.Delete, use.Key())
				}
			}
		}
		return change, nil
	})
	return err
}

// commitTimeout bounds the commit of an outcome, after which the caller may be gone.
const commitTimeout = 10 * time.Second

// repeatBackoff is the wait before a call is repeated.
var repeatBackoff = intent.Backoff{First: 50 * time.Millisecond, Max: time.Second}

// send makes the call at the active instance, and repeats it while instances die before they answer, and while an
// earlier one of the same call runs. lost reports whether an instance died that may have carried it out.
func (e *Endpoint) send(ctx context.Context, c call, reply func(*emptypb.Empty) error) (lost bool, err error) {
	for try := uint64(1); ; try++ {
		at, err := e.instance(ctx, c)
		if err != nil {
			return lost, err
		}
		answered, err := e.Instances.Pass(ctx, at,
			csi.Passed{Method: c.full, RPC: c.rpc, Message: c.raw, Decoded: c.request}, reply)
		failure, is := errors.AsType[*registry.CallError](err)
		if !is || !(answered && failure.Code == "ABORTED" && (c.repeated || lost) || !answered && failure.Code == "UNAVAILABLE") {
			return lost, err
		}
		lost = lost || failure.Lost
		select {
		case <-ctx.Done():
			return lost, err
		case <-time.After(repeatBackoff.Delay(try, rand.Float64())):
		}
	}
}

// instance waits for the active instance that serves the call, unless no task is to become one.
func (e *Endpoint) instance(ctx context.Context, c call) (at registry.InstanceKey, err error) {
	roles := c.roles()
	for _, role := range roles {
		if inst, found := e.Plugins.Find(role, c.plugin); found {
			return inst.InstanceKey, nil
		}
	}
	for _, role := range roles {
		expected, err := e.Expects(ctx, role, c.plugin)
		if err != nil {
			return at, err
		}
		if expected {
			inst, err := e.Await(ctx, intent.Caller{}, role, c.plugin)
			return inst.InstanceKey, err
		}
	}
	for _, other := range []registry.Role{registry.RoleController, registry.RoleNode} {
		expected, err := e.Expects(ctx, other, c.plugin)
		if err != nil {
			return at, err
		}
		if expected {
			return at, registry.Errorf(registry.ErrUnsupported, "plugin %s does not serve CSI's service %s", c.plugin,
				c.service)
		}
	}
	return at, registry.Errorf(registry.ErrUnavailable, "plugin %s is not running: no task has it in its csi_plugin stanza",
		c.plugin)
}

// kinds maps kinds of error to the codes that a CSI client gets (CSI spec "Error Scheme").
var kinds = []struct {
	kind error
	code codes.Code
}{
	{context.DeadlineExceeded, codes.DeadlineExceeded},
	{context.Canceled, codes.Canceled},
	{registry.ErrConflict, codes.FailedPrecondition},
	{registry.ErrInvalid, codes.InvalidArgument},
	{registry.ErrUnsupported, codes.Unimplemented},
	{registry.ErrExhausted, codes.ResourceExhausted},
	{registry.ErrUnavailable, codes.Unavailable},
	{registry.ErrUncertain, codes.Unavailable},
}

// Status returns the error of a call as a CSI client gets it: the plugin's with the plugin's code.
func Status(err error) error {
	if failure, is := errors.AsType[*registry.CallError](err); is {
		n, known := code.Code_value[failure.Code]
		if !known {
			n = int32(codes.Unknown)
		}
		return status.Error(codes.Code(n), failure.Detail)
	}
	if err == nil {
		return nil
	}
	if _, is := status.FromError(err); is {
		return err
	}
	for _, k := range kinds {
		if errors.Is(err, k.kind) {
			return status.Error(k.code, err.Error())
		}
	}
	return status.Error(codes.Internal, err.Error())
}
