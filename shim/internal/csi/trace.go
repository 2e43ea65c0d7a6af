package csi

import (
	"context"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"holdfast/internal/tracing"
	"holdfast/registry"
)

// spans makes the spans of one connection: one for each call that belongs to a trace. A nil *spans makes none.
type spans struct{ stats.Handler }

func newSpans(p trace.TracerProvider, plugin registry.PluginID, t registry.TaskKey) *spans {
	return &spans{tracing.NewClientHandler(p,
		tracing.Plugin.String(string(plugin)), tracing.Instance.String(t.String()))}
}

func (s *spans) begin(ctx context.Context, i *stats.RPCTagInfo) context.Context {
	if s == nil {
		return ctx
	}
	return s.TagRPC(ctx, i)
}

// handle passes an event on without the text of its error, because a plugin may have put secrets into it.
func (s *spans) handle(ctx context.Context, e stats.RPCStats) {
	if s == nil {
		return
	}
	switch event := e.(type) {
	case *stats.OutPayload:
		request, _ := event.Payload.(proto.Message)
		for _, id := range Texts(request, "volume_id") {
			if id != "" {
				trace.SpanFromContext(ctx).SetAttributes(tracing.CSIVolume.String(id))
			}
		}
	case *stats.End:
		if event.Error != nil {
			masked := *event
			masked.Error = status.Error(status.Code(event.Error), "")
			e = &masked
		}
	}
	s.HandleRPC(ctx, e)
}
