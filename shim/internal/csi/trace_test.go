package csi

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"go.opentelemetry.io/otel/codes"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"holdfast/internal/csifake"
)

// The span of a call has its volume and its code. It has no text of the plugin, because that may have secrets. A call
// outside of a trace has no span.
func TestSpanOfACallHasNoSecret(t *testing.T) {
	fake, f := start(t, csifake.Config{})
	recorder := tracetest.NewSpanRecorder()
	provider := sdk.NewTracerProvider(sdk.WithSpanProcessor(recorder))
	f.Close(taskKey)
	f.observer.Traces = provider // of the next connection
	ctx, parent := provider.Tracer("").Start(patient(t), "parent")
	unstage := UnstageRequest{VolumeID: "vol-1", StagingPath: "/s",
		Private: func(context.Context) Private { return Private{Secrets: secrets} }}
	if err := f.Unstage(patient(t), nodeKey, unstage); err != nil || len(recorder.Ended()) > 0 {
		t.Errorf("a call without a trace: %v, %d spans", err, len(recorder.Ended()))
	}
	leakSecrets(fake)
	if err := f.Unstage(ctx, nodeKey, unstage); err == nil {
		t.Error("a call that should fail has not")
	}
	spans := recorder.Ended()
	if len(spans) != 1 || spans[0].Name() != "csi.v1.Node/NodeUnstageVolume" ||
		spans[0].Parent().SpanID() != parent.SpanContext().SpanID() {
		t.Fatalf("the spans of a call in a trace: %v", spans)
	}
	if status := spans[0].Status(); status.Code != codes.Error || status.Description != "" ||
		len(spans[0].Events()) > 0 {
		t.Errorf("the span has %+v and the events %v", status, spans[0].Events())
	}
	shown := fmt.Sprint(spans[0].Attributes())
	for _, want := range []string{"vol-1", "INTERNAL", "alloc/plugin"} {
		if !strings.Contains(shown, want) {
			t.Errorf("the attributes have no %s: %s", want, shown)
		}
	}
	wantNone(t, "the span", shown, canaries...)
}
