package csi

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync/atomic"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/encoding"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"holdfast/registry"
)

// services names the CSI service of each role.
var services = map[registry.Role]string{registry.RoleController: "Controller", registry.RoleNode: "Node"}

// serviceOf returns the CSI service that serves the call at an instance of the role.
func serviceOf(role registry.Role, rpc registry.RPC) string {
	switch rpc {
	case registry.CreateGroupSnapshotRPC, registry.DeleteGroupSnapshotRPC, registry.GetGroupSnapshotRPC:
		return "GroupController"
	case registry.GetMetadataAllocatedRPC, registry.GetMetadataDeltaRPC:
		return "SnapshotMetadata"
	}
	return services[role]
}

// send makes one unary call to the instance. private may be nil.
func (f *Fleet) send(
	ctx context.Context, rpc registry.RPC, at registry.InstanceKey, req, reply proto.Message, private PrivateFunc,
) error {
	_, err := f.call(ctx, rpc, at, req, private,
		func(ctx context.Context, in registry.Instance, l *link, trace *callTrace) error {
			return l.invoke(ctx, trace, serviceOf(in.Role, rpc), rpc, req, reply)
		})
	return err
}

// call makes one call to the instance with invoke. req is the request, whose secrets are remembered for the plugin. The
// error is a *registry.CallError, or the error inside a replyError. The text of a CallError has no secret: none of the
// request, none that private returns, and none that the plugin was sent before.
func (f *Fleet) call(
	ctx context.Context, rpc registry.RPC, at registry.InstanceKey, req proto.Message, private PrivateFunc,
	invoke invocation,
) (*callTrace, error) {
	sent := f.secretsOf(at.Plugin)
	sent.add(secretsIn(req))
	trace := &callTrace{}
	c, in, err := f.beginCall(at)
	defer c.endCall()
	if err != nil {
		unsent := status.Error(codes.Unavailable, err.Error())
		return trace, failure(rpc, at, unsent, trace, sent.redactorOf(ctx, req, nil))
	}
	if trace, err = c.deliver(ctx, in, invoke); err == nil {
		return trace, nil
	}
	if r, is := errors.AsType[replyError](err); is {
		return trace, r.error
	}
	c.markOutdated(err)
	if !trace.sent.Load() && !trace.answered.Load() { // the error's text is not from the plugin
		private = nil
	}
	return trace, failure(rpc, at, err, trace, sent.redactorOf(ctx, req, private))
}

// replyError wraps an error of the function that receives the messages of an answer. It ends the call.
type replyError struct{ error }

// markOutdated marks the plugin's description as outdated if the error of a call may contradict it.
func (c *Conn) markOutdated(err error) {
	switch status.Code(err) {
	case codes.ResourceExhausted, // the node may be full: its max_volumes_per_node may have changed
		codes.Unimplemented: // a capability may be gone: the process may be of another version
		c.changes.Add(1)
	}
}

// maxTries bounds how often a call is tried if its link is lost before the call was sent.
const maxTries = 3

// invocation makes one call to an instance over a link.
type invocation func(ctx context.Context, in registry.Instance, l *link, trace *callTrace) error

// deliver makes the call over a link on which the plugin has described itself. If the link is lost before the call was
// sent, it tries again over a new link, maxTries times in all.
func (c *Conn) deliver(
	ctx context.Context, in registry.Instance, invoke invocation,
) (trace *callTrace, err error) {
	for range maxTries {
		var l *link
		if l, err = c.connect(ctx); err != nil {
			return &callTrace{}, err
		}
		if trace, err = c.deliverOver(ctx, l, in, invoke); err == nil || trace.sent.Load() || l.up() {
			break
		}
	}
	return trace, err
}

// deliverOver makes the call over one link. If ctx ends after the call was sent, it marks the link as cut.
func (c *Conn) deliverOver(
	ctx context.Context, l *link, in registry.Instance, invoke invocation,
) (*callTrace, error) {
	trace := &callTrace{}
	if err := c.identify(ctx, l, in); err != nil {
		return trace, err
	}
	err := invoke(ctx, in, l, trace)
	if err != nil && ctx.Err() != nil && trace.sent.Load() {
		l.cut.Store(true)
	}
	return trace, err
}

// identify makes the plugin describe itself in the instance's role, unless it has done so over this link. CSI requires
// the capabilities to be known before any call that depends on them, and another process may listen at the socket now.
// A plugin that differs from the registered one gets no call: its supervisor registers it anew at the next heartbeat.
func (c *Conn) identify(ctx context.Context, l *link, in registry.Instance) error {
	if l.describedAs(in) {
		return nil
	}
	if _, err := c.describe(ctx, l, []registry.Role{in.Role}); err != nil {
		return status.Errorf(codes.Unavailable, "the plugin has restarted and does not describe itself: %v", err)
	}
	if !l.describedAs(in) {
		return status.Error(codes.Unavailable,
			"another plugin answers at the socket; it gets calls once it is registered")
	}
	return nil
}

// ask makes one call that changes nothing and does not belong to an instance.
func (c *Conn) ask(ctx context.Context, l *link, service string, rpc registry.RPC, req, reply proto.Message) error {
	if err := l.invoke(ctx, &callTrace{}, service, rpc, req, reply); err != nil {
		return c.askError(rpc, err)
	}
	return nil
}

// askError returns the error of a call that belongs to no instance.
func (c *Conn) askError(rpc registry.RPC, err error) error {
	text, kind := classify(err, c.secrets.redactor(nil))
	return registry.Errorf(kind, "%s: %s: %s", rpc, codeName(err), text)
}

// callTrace records how far a call has come.
type callTrace struct {
	sent     atomic.Bool // the request was handed to the transport, so the plugin may have read it
	answered atomic.Bool // the plugin's own status has come, which ends the answer
	method   string      // in full; set by statsHandler
}

type traceKey struct{}

// withTrace passes the trace to statsHandler. The API of stats.Handler has no other way to find the call of an event.
func withTrace(ctx context.Context, trace *callTrace) context.Context {
	return context.WithValue(ctx, traceKey{}, trace)
}

// invoke makes one call over the link. Its error is an *unreadable if the plugin's answer could not be read.
func (l *link) invoke(
	ctx context.Context, trace *callTrace, service string, rpc registry.RPC, req, reply proto.Message,
) error {
	ctx = withTrace(ctx, trace)
	a := &answer{into: reply}
	err := l.cc.Invoke(ctx, "/csi.v1."+service+"/"+string(rpc), req, a)
	switch {
	case err == nil:
		return nil
	case a.err != nil: // the decoder has run, so the plugin has sent a message and not only a status
		return &unreadable{fmt.Sprintf("the plugin's answer cannot be read: %v", a.err)}
	case status.Code(err) == codes.ResourceExhausted && trace.sent.Load() && !trace.answered.Load():
		// The plugin's own RESOURCE_EXHAUSTED would have come in the trailer. So gRPC has refused a large message when
		// it read the length at the start of the message. The trailer cannot have come by then: the plugin may send
		// only window bytes before the client reads any of them.
		return &unreadable{fmt.Sprintf("the plugin's answer is larger than %d MiB and was not read", maxAnswer>>20)}
	}
	return err
}

// statsHandler fills in the trace of each call over the link, and counts the call at its end.
type statsHandler struct {
	conn *Conn
	link *link
}

var _ stats.Handler = statsHandler{}

func (h statsHandler) TagRPC(ctx context.Context, i *stats.RPCTagInfo) context.Context {
	trace, _ := ctx.Value(traceKey{}).(*callTrace)
	trace.method = i.FullMethodName
	return h.conn.spans.begin(ctx, i)
}

func (h statsHandler) HandleRPC(ctx context.Context, s stats.RPCStats) {
	h.conn.spans.handle(ctx, s)
	trace, _ := ctx.Value(traceKey{}).(*callTrace)
	switch s := s.(type) {
	case *stats.OutPayload:
		trace.sent.Store(true)
	case *stats.InTrailer:
		trace.answered.Store(true)
	case *stats.End:
		h.conn.metrics.observe(callKind{
			h.conn.plugin, h.link.driverName(), strings.ToValidUTF8(trace.method, "?"), codeLabel(s.Error),
		}, s.EndTime.Sub(s.BeginTime))
	}
}

func (statsHandler) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }

func (statsHandler) HandleConn(context.Context, stats.ConnStats) {}

// unreadable is the error of an answer that has arrived but cannot be read. gRPC reports it with a code that a plugin
// can also send: RESOURCE_EXHAUSTED for a message over the size limit, INTERNAL for one that cannot be decoded. Neither
// code nor text shows who sent it, so invoke decides by the part of the answer that has arrived.
type unreadable struct{ why string }

func (e *unreadable) Error() string { return e.why }

// GRPCStatus returns the status UNKNOWN. codeName handles the error separately.
func (e *unreadable) GRPCStatus() *status.Status { return status.New(codes.Unknown, e.why) }

func isUnreadable(err error) bool {
	_, is := errors.AsType[*unreadable](err)
	return is
}

// answer receives a decoded message, or the error of the decoding.
type answer struct {
	into proto.Message
	err  error
}

// codec encodes equal messages as equal bytes, so that a repeated call is the same call in every generation.
type codec struct{}

var _ encoding.CodecV2 = codec{}

func (codec) Name() string { return "proto" }

func (codec) Marshal(v any) (mem.BufferSlice, error) {
	b, err := proto.MarshalOptions{Deterministic: true}.Marshal(v.(proto.Message))
	if err != nil {
		return nil, err
	}
	return mem.BufferSlice{mem.SliceBuffer(b)}, nil
}

func (codec) Unmarshal(data mem.BufferSlice, v any) error {
	a := v.(*answer)
	a.err = proto.Unmarshal(data.Materialize(), a.into)
	return a.err
}
