// Package tracing makes OpenTelemetry spans of gRPC calls that belong to a trace. It needs the API of OpenTelemetry
// only. Package otlp exports spans.
package tracing

import (
	"context"

	"go.opentelemetry.io/contrib/instrumentation/google.golang.org/grpc/otelgrpc"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/propagation"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/stats"
)

// Scope names the tracer of Holdfast's own spans.
const Scope = "holdfast"

// Attributes of spans, beside those of OpenTelemetry.
const (
	Plugin    = attribute.Key("holdfast.plugin")
	Instance  = attribute.Key("holdfast.instance")  // alloc/task of a plugin
	Volume    = attribute.Key("holdfast.volume")    // namespace/id, or what else the call is for
	Operation = attribute.Key("holdfast.operation") // id of a call of the host that changes something
	CSIVolume = attribute.Key("csi.volume_id")      // as the plugin calls the volume
)

// Propagator passes a trace to other processes, in the form of W3C Trace Context.
var Propagator propagation.TextMapPropagator = propagation.TraceContext{}

// NewClientHandler returns a handler that makes a span of each call whose context has a span. Calls without one, such
// as heartbeats and polls, get none.
func NewClientHandler(p trace.TracerProvider, each ...attribute.KeyValue) stats.Handler {
	return handler{otelgrpc.NewClientHandler(append(options(p), otelgrpc.WithSpanAttributes(each...))...), InTrace}
}

// NewServerHandler returns a handler that makes a span of each call that comes with a trace.
func NewServerHandler(p trace.TracerProvider) stats.Handler {
	return handler{otelgrpc.NewServerHandler(options(p)...), comesWithTrace}
}

func options(p trace.TracerProvider) []otelgrpc.Option {
	return []otelgrpc.Option{otelgrpc.WithTracerProvider(p), otelgrpc.WithPropagators(Propagator)}
}

// InTrace reports whether the context has a span.
func InTrace(ctx context.Context) bool { return trace.SpanContextFromContext(ctx).IsValid() }

func comesWithTrace(ctx context.Context) bool {
	header, _ := metadata.FromIncomingContext(ctx)
	return len(header.Get("traceparent")) > 0
}

// handler makes spans of some calls.
type handler struct {
	stats.Handler
	wanted func(context.Context) bool
}

func (h handler) TagRPC(ctx context.Context, i *stats.RPCTagInfo) context.Context {
	if !h.wanted(ctx) {
		return ctx
	}
	return h.Handler.TagRPC(ctx, i)
}

func (h handler) HandleRPC(ctx context.Context, s stats.RPCStats) {
	if InTrace(ctx) { // without a span, TagRPC has not passed the call on
		h.Handler.HandleRPC(ctx, s)
	}
}
