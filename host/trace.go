package host

import (
	"context"
	"reflect"
	"strings"

	"go.opentelemetry.io/otel/codes"

	"holdfast/internal/tracing"
	pb "holdfast/proto/holdfast/v1"
)

// startSpan begins the span of a call that changes something. The calls to shims are its children: more than one if a
// shim is swapped meanwhile. The span is named after the request, as in "host CreateVolume".
func (h *Host) startSpan(ctx context.Context, a access, req any) (_ context.Context, end func(error)) {
	if h.config.TracerProvider == nil || a == reads {
		return ctx, func(error) {}
	}
	name := strings.TrimSuffix(reflect.TypeOf(req).Elem().Name(), "Request")
	ctx, span := h.config.TracerProvider.Tracer(tracing.Scope).Start(ctx, "host "+name)
	if r, is := req.(interface{ GetCall() *pb.Call }); is {
		span.SetAttributes(tracing.Operation.String(r.GetCall().GetOperationId()))
	}
	return ctx, func(err error) {
		if err != nil {
			span.SetStatus(codes.Error, err.Error())
		}
		span.End()
	}
}
