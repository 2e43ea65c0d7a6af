package csi

import (
	"context"

	"go.opentelemetry.io/otel/trace"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

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
		if id := volumeIn(event.Payload); id != "" {
			trace.SpanFromContext(ctx).SetAttributes(tracing.CSIVolume.String(id))
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

// volumeIn returns the volume_id of a request, if it has one.
func volumeIn(request any) string {
	m, is := request.(proto.Message)
	if !is {
		return ""
	}
	field := m.ProtoReflect().Descriptor().Fields().ByName("volume_id")
	if field == nil || field.Kind() != protoreflect.StringKind || field.IsList() {
		return ""
	}
	return m.ProtoReflect().Get(field).String()
}
