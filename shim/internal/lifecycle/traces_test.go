package lifecycle

import (
	"testing"

	"holdfast/internal/tracing/otlp"
	"holdfast/internal/tracing/tracetest"
	"holdfast/registry"
)

// A shim that has released the state exports the spans of its calls before it may be killed. A collector that does not
// answer delays neither the release nor the end.
func TestReleaseExportsSpansAndWaitsForNoCollector(t *testing.T) {
	collector := tracetest.New(t)
	for _, endpoint := range []string{collector.HTTP, tracetest.Silent(t)} {
		t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint)
		t.Setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "3600000") // ms
		t.Setenv("OTEL_BSP_EXPORT_TIMEOUT", "3600000")
		t.Setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000") // only a flush exports
		traces, err := otlp.Start("shim", "1", func(error) {})
		must(t, err)
		p := newProcess(t)
		p.Traces = traces
		p.activate(dirs(t))
		_, span := traces.Provider().Tracer("").Start(t.Context(), "call")
		span.End()
		at, err := p.Release(t.Context())
		if err != nil || at == (registry.Revision{}) {
			t.Fatalf("Release: %v, %v", at, err)
		}
		if endpoint == collector.HTTP {
			spans, more := collector.Spans()
			if len(spans) == 0 {
				<-more
				spans, _ = collector.Spans()
			}
			if len(spans) != 1 || spans[0].Name != "call" {
				t.Errorf("the collector got %+v", spans)
			}
		}
		p.stop()
		must(t, <-p.ended)
		traces.Stop()
	}
}
