// Package endpoint passes calls of CSI clients to a plugin's active instance. It is the shim's part of host.ServeCSI.
//
// A volume belongs either to Holdfast, which then has a record of it, or to the clients of the endpoint, whose uses of
// it are recorded (registry.EndpointUse). Calls that name the same volume are made one at a time. If a plugin dies
// before it has answered a call, the call is repeated at its next instance; CSI allows that for every call.
package endpoint

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/genproto/googleapis/rpc/code"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/emptypb"

	"holdfast/internal/tracing"
	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// Plugins makes the calls to plugins. *csi.Fleet implements it.
type Plugins interface {
	Pass(ctx context.Context, at registry.InstanceKey, call csi.Passed, reply func(*emptypb.Empty) error) (
		answered bool, err error)
}

// Endpoint passes calls. It has the same Calls as the rest of the shim, so both take the same locks of volumes.
type Endpoint struct {
	intent.Calls
	Instances Plugins
	Node      registry.NodeName
	Since     time.Time              // when this shim became active
	Served    func(path string) bool // reports whether a process serves the mount at a path on the host
}

// call is one call of a client.
type call struct {
	method
	plugin  registry.PluginID
	raw     *emptypb.Empty
	request proto.Message // raw, decoded; nil: this build does not know the method
	volumes []registry.VolumeKey

	repeated bool // the call was made before, and may still run at the plugin
}

// executor returns the executor that has to send the call. It is zero if any node may send the call: one that only
// reads, or one of the CSI node service.
func (c call) executor() registry.ExecutorKey {
	if c.effect() == effectRead || c.service == "Node" {
		return registry.ExecutorKey{}
	}
	return registry.ExecutorKey{Plugin: c.plugin}
}

// Request is a call of a client.
type Request struct {
	Plugin  registry.PluginID
	Method  string // full gRPC method, such as /csi.v1.Node/NodeStageVolume
	Message *emptypb.Empty
	// Repeated means that the same call was cut off before. That call may still run at the plugin, which then answers
	// ABORTED (CSI spec "Error Scheme"). Pass waits until it has ended.
	Repeated bool
}

// Pass passes a call to the plugin, and each message of the answer to reply. It returns the plugin's error with the
// plugin's code, an error of reply, or an error of package registry.
func (e *Endpoint) Pass(ctx context.Context, r Request, reply func(*emptypb.Empty) error) error {
	c, err := newCall(r.Plugin, r.Method, r.Message)
	if err != nil {
		return err
	}
	c.repeated = r.Repeated
	if span := trace.SpanFromContext(ctx); span.IsRecording() && len(c.volumes) > 0 {
		span.SetAttributes(tracing.CSIVolume.String(string(c.volumes[0].External)))
	}
	if c.effect() == effectRead {
		return e.read(ctx, c, reply)
	}
	if err := e.checkExecutor(ctx, c); err != nil {
		return err
	}
	if _, err := e.instance(ctx, c); err != nil { // wait without the locks, which others may need
		return err
	}
	unlock, err := e.Locks.LockAll(ctx, c.keys(), c.what()) // all calls lock in the same order
	if err != nil {
		return err
	}
	defer unlock()
	// Choose the instance before a use is recorded. During the wait for the lock another one may have become active.
	at, err := e.instance(ctx, c)
	if err != nil {
		return err
	}
	isNew, err := e.recordUse(ctx, c, at)
	if err != nil {
		return err
	}
	o := e.send(ctx, c, reply)
	return errors.Join(o.err, o.replyErr, e.updateUses(ctx, c, isNew, o))
}

// checkExecutor returns an ErrUnavailable that names the node at whose endpoint the client has to make the call. The
// call is not passed to that node, because it carries secrets, and the records that nodes share hold no secrets.
func (e *Endpoint) checkExecutor(ctx context.Context, c call) error {
	if e.Executors == nil || c.executor().Plugin == "" {
		return nil
	}
	return e.State.View(ctx, func(view registry.View) error {
		if !view.Executed(c.plugin) {
			return nil
		}
		if _, err := e.Executors.Check(view, c.executor()); err != nil {
			return fmt.Errorf("%w; use the CSI endpoint of that node", err)
		}
		return nil
	})
}

// read makes a call that only reads. If another operation needs the volume, the call is cancelled and made again after
// it.
func (e *Endpoint) read(ctx context.Context, c call, reply func(*emptypb.Empty) error) error {
	if len(c.volumes) != 1 {
		o := e.send(ctx, c, reply)
		return errors.Join(o.err, o.replyErr)
	}
	for {
		held, unlock, err := e.Locks.LockYielding(ctx, c.volumes[0], c.what())
		if err != nil {
			return err
		}
		o := e.send(held, c, reply)
		yielded := errors.Is(context.Cause(held), intent.ErrYielded)
		unlock()
		if !yielded || o.err == nil || o.replied || ctx.Err() != nil {
			return errors.Join(o.err, o.replyErr)
		}
	}
}

func (c call) what() string { return string(c.rpc) + " of a client of the CSI endpoint" }

// newCall decodes a request, whose fields raw holds as unknown fields. The volumes of the call are sorted, without
// duplicates. Only a call that reads may have invalid volume IDs.
func newCall(plugin registry.PluginID, fullMethod string, raw *emptypb.Empty) (c call, err error) {
	m, is := parseMethod(fullMethod)
	if !is {
		return c, registry.Errorf(registry.ErrUnsupported, "unknown method %s", fullMethod)
	}
	c = call{method: m, plugin: plugin, raw: raw}
	if c.request, err = m.decode(raw); err != nil {
		return c, registry.Invalid("the request of %s cannot be decoded: %w", m.rpc, err)
	}
	for _, id := range volumesOf(c.request) {
		if m.effect() != effectRead {
			if _, err := registry.ParseExternalID(string(id)); err != nil {
				return c, err
			}
		}
		c.volumes = append(c.volumes, registry.VolumeKey{Plugin: plugin, External: id})
	}
	if field := targets[m.rpc]; len(text(c.request, field)) > registry.MaxExternalID { // it is part of a record's key
		return c, registry.Invalid("%s has more than %d bytes", field, registry.MaxExternalID)
	}
	slices.SortFunc(c.volumes, func(a, b registry.VolumeKey) int { return cmp.Compare(a.External, b.External) })
	c.volumes = slices.Compact(c.volumes)
	return c, nil
}

// object is the key of a lock: a name or a snapshot id in requests.
type object struct {
	plugin registry.PluginID
	field  protoreflect.Name
	value  string
}

func (o object) String() string { return fmt.Sprintf("%s %q of plugin %s", o.field, o.value, o.plugin) }

// keys returns the lock keys of the objects in the request. A call that lists has none: its ABORTED means an invalid
// token.
func (c call) keys() (keys []intent.Key) {
	if c.rpc == registry.ListSnapshotsRPC {
		return nil // it names a volume only to select the volume's snapshots
	}
	for _, field := range []protoreflect.Name{"name", "snapshot_id", "group_snapshot_id"} {
		if value := text(c.request, field); value != "" && c.effect() != effectRead {
			keys = append(keys, object{c.plugin, field, value})
		}
	}
	for _, v := range c.volumes {
		keys = append(keys, v)
	}
	return keys
}

// outcome is the result of a call.
type outcome struct {
	at       registry.Instance // the instance of the last try
	sent     bool              // an instance may have got the call
	lost     bool              // an instance that may have got the call has not answered
	replied  bool              // a message was passed to the client
	err      error             // the plugin's error, or why no call was made
	replyErr error
}

// hadNoEffect reports whether the call has certainly had no effect.
func (o outcome) hadNoEffect() bool {
	failure, is := errors.AsType[*registry.CallError](o.err)
	return o.err != nil && !o.lost && (!o.sent || is && failure.Outcome == registry.OutcomeFailed)
}

// repeatBackoff is the wait before a call is repeated.
var repeatBackoff = intent.Backoff{First: 50 * time.Millisecond, Max: time.Second}

// afterActivation is how long after its activation a shim repeats calls that the plugin answers with ABORTED. Calls of
// the previous shim may still run.
const afterActivation = 30 * time.Second

// Limits of one call to a plugin. The client's deadline may be shorter.
const (
	callLimit   = 15 * time.Minute
	streamLimit = 24 * time.Hour // for a stream of answers, such as the changed blocks of a large volume
)

// Limit returns how long a call of the method may take if its client sets no deadline.
func Limit(full string) time.Duration {
	if m, is := parseMethod(full); is && m.service == "SnapshotMetadata" {
		return streamLimit
	}
	return callLimit
}

// send makes the call. It repeats the call while instances die before they answer, and while the plugin answers ABORTED
// because an earlier call may still run. It does not repeat a call of which it has passed on a message.
func (e *Endpoint) send(ctx context.Context, c call, reply func(*emptypb.Empty) error) (o outcome) {
	passOn := func(m *emptypb.Empty) error {
		o.replied = true
		o.replyErr = reply(m)
		return o.replyErr
	}
	for try := uint64(1); ; try++ {
		at, err := e.instance(ctx, c)
		if err != nil {
			o.err = err
			return o
		}
		o.at = at
		answered := false
		o.err = e.Once(ctx, c.executor(), Limit(c.full), func(ctx context.Context) (err error) {
			answered, err = e.Instances.Pass(ctx, at.InstanceKey,
				csi.Passed{Method: c.full, RPC: c.rpc, Message: c.raw, Decoded: c.request}, passOn)
			return err
		})
		if o.replyErr != nil {
			o.sent, o.err = true, nil
			return o
		}
		failure, is := errors.AsType[*registry.CallError](o.err)
		if o.err == nil || !is {
			o.sent = o.sent || o.err == nil
			return o
		}
		// cut: no answer came, because the connection was lost or not made
		cut := !answered && (failure.Code == "UNAVAILABLE" || failure.Code == "CANCELLED")
		o.sent = o.sent || failure.Lost || answered || failure.Outcome != registry.OutcomeFailed
		o.lost = o.lost || failure.Lost || cut && failure.Outcome != registry.OutcomeFailed
		mayHaveEarlier := c.repeated || o.lost || time.Since(e.Since) < afterActivation
		earlierRuns := failure.Code == "ABORTED" && len(c.keys()) > 0 && mayHaveEarlier
		if o.replied || !cut && !earlierRuns || !intent.Sleep(ctx, repeatBackoff.Delay(try, rand.Float64())) {
			return o
		}
	}
}

// instance returns the instance that serves the call: the active one, or an older one that serves a mount of the
// volume. If there is none, instance waits for it as long as a task of the plugin in a fitting role is expected. If no
// task of the plugin is expected, it waits for one, at most taskWait. ErrUnsupported: the plugin has tasks in other
// roles only.
func (e *Endpoint) instance(ctx context.Context, c call) (at registry.Instance, err error) {
	for waited := time.Duration(0); ; waited += taskPause {
		for _, role := range c.roles() {
			inst, found := e.Plugins.Find(role, c.plugin)
			if len(c.volumes) > 0 {
				inst, found = e.FindFor(ctx, role, c.volumes[0])
			}
			if found {
				return inst, nil
			}
		}
		role, expected, err := e.expected(ctx, c.plugin, c.roles()...)
		if err != nil {
			return at, err
		}
		if expected {
			return e.Await(ctx, intent.Caller{}, role, c.plugin)
		}
		_, other, err := e.expected(ctx, c.plugin, registry.RoleController, registry.RoleNode)
		switch {
		case err != nil:
			return at, err
		case other:
			return at, registry.Errorf(registry.ErrUnsupported, "plugin %s does not serve CSI's service %s", c.plugin,
				c.service)
		case waited >= taskWait:
			return at, registry.Errorf(registry.ErrUnavailable,
				"plugin %s is not running: no task has it in its csi_plugin stanza", c.plugin)
		case !intent.Sleep(ctx, taskPause):
			return at, context.Cause(ctx)
		}
	}
}

// expected returns the first of the roles in which a task of the plugin is expected, and whether there is one.
func (e *Endpoint) expected(
	ctx context.Context, id registry.PluginID, roles ...registry.Role,
) (role registry.Role, expected bool, err error) {
	for _, role = range roles {
		if expected, err = e.Expects(ctx, role, id); expected || err != nil {
			break
		}
	}
	return role, expected, err
}

// A plugin without a task may be about to start again in a newer version, so instance waits for it.
const (
	taskWait  = 5 * time.Second
	taskPause = 100 * time.Millisecond
)

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

// Status returns the error of a call for the CSI client. An error of the plugin keeps the plugin's code.
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
