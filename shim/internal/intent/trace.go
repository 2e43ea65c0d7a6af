package intent

import (
	"context"

	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"holdfast/internal/tracing"
	"holdfast/registry"
)

// startSpan begins the span of a call. A call without a waiting caller begins a new trace, for example one that was
// open when this shim became active. Both traces have the same operation as an attribute.
func (s Sender) startSpan(ctx context.Context, i registry.Intent) (_ context.Context, end func(error)) {
	if s.Traces == nil {
		return ctx, func(error) {}
	}
	ctx, span := s.Traces.Tracer(tracing.Scope).Start(ctx, string(i.RPC), trace.WithAttributes(
		tracing.Plugin.String(string(i.Volume.Plugin)), tracing.Volume.String(i.Name.String()),
		tracing.Operation.String(string(i.Operation))))
	return ctx, func(err error) {
		if err != nil {
			span.SetStatus(codes.Error, err.Error())
		}
		span.End()
	}
}
