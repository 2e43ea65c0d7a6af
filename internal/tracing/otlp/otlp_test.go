package otlp

import (
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"holdfast/internal/tracing/tracetest"
)

// clear unsets all variables that Start reads.
func clear(t *testing.T) {
	for _, name := range []string{"ENDPOINT", "TRACES_ENDPOINT", "PROTOCOL", "TRACES_PROTOCOL", "HEADERS"} {
		t.Setenv("OTEL_EXPORTER_OTLP_"+name, "")
	}
	for _, name := range []string{"SERVICE_NAME", "SDK_DISABLED", "TRACES_EXPORTER"} {
		t.Setenv("OTEL_"+name, "")
	}
}

func TestNothingIsExportedWithoutAnEndpoint(t *testing.T) {
	for _, variables := range []map[string]string{
		{"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"},
		{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", "OTEL_SDK_DISABLED": "True"},
		{"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", "OTEL_TRACES_EXPORTER": "none"},
	} {
		clear(t)
		for name, value := range variables {
			t.Setenv(name, value)
		}
		e, err := Start("test", "1", nil)
		if err != nil || e != nil || e.Provider() != nil {
			t.Errorf("with %v, Start returned %v, %v", variables, e, err)
		}
		e.Flush(t.Context())
		e.Stop()
	}
}

func TestBadVariablesOfTracingAreNamed(t *testing.T) {
	for _, c := range []struct{ endpoint, protocol, want string }{
		{"http://[::1", "", "no traces are exported: OTEL_EXPORTER_OTLP_ENDPOINT=http://[::1 is no URL; " +
			"use one like http://127.0.0.1:4318"},
		{"127.0.0.1:4317", "grpc", "no traces are exported: OTEL_EXPORTER_OTLP_ENDPOINT=127.0.0.1:4317 is no URL; " +
			"use one like http://127.0.0.1:4318"},
		{"http://127.0.0.1:4318", "http/json", "no traces are exported: OTEL_EXPORTER_OTLP_PROTOCOL=http/json is not " +
			"supported; use http/protobuf (the default) or grpc"},
	} {
		clear(t)
		t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", c.endpoint)
		t.Setenv("OTEL_EXPORTER_OTLP_PROTOCOL", c.protocol)
		if e, err := Start("test", "1", nil); e != nil || err == nil || err.Error() != c.want {
			t.Errorf("Start returned %v, %v", e, err)
		}
	}
}

// The values of headers are passwords. They appear neither in errors of this package nor in those of the library.
func TestHeadersForTheCollectorAreKeptSecret(t *testing.T) {
	const secret = "hunter2"
	clear(t)
	for _, headers := range []string{"ok=1, " + secret, "token=%zz" + secret, "a=b,hunt er=" + secret} {
		t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
		t.Setenv("OTEL_EXPORTER_OTLP_HEADERS", headers)
		_, err := Start("test", "1", nil)
		if err == nil || strings.Contains(err.Error(), secret) || !strings.Contains(err.Error(), "OTLP_HEADERS") {
			t.Errorf("%s: %v", headers, err)
		}
	}
	echo := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.Error(w, "bad token "+r.Header.Get("Authorization"), http.StatusUnauthorized)
	}))
	defer echo.Close()
	t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", echo.URL)
	t.Setenv("OTEL_EXPORTER_OTLP_HEADERS", "Authorization=Bearer%20"+secret+",")
	failed := make(chan error, 1)
	e, err := Start("test", "1", func(err error) { failed <- err })
	if err != nil {
		t.Fatal(err)
	}
	_, span := e.Provider().Tracer("").Start(t.Context(), "name")
	span.End()
	e.Stop()
	if err := <-failed; !strings.Contains(err.Error(), "bad token *** ***") {
		t.Errorf("the error of an export: %v", err)
	}
}

func TestStandardVariablesOfTracingCount(t *testing.T) {
	collector := tracetest.New(t)
	for i, c := range []struct{ protocol, endpoint, service, want string }{
		{"", collector.HTTP, "", "test"}, {"grpc", collector.GRPC, "mine", "mine"},
	} {
		clear(t)
		t.Setenv("OTEL_EXPORTER_OTLP_ENDPOINT", c.endpoint)
		t.Setenv("OTEL_EXPORTER_OTLP_PROTOCOL", c.protocol)
		t.Setenv("OTEL_EXPORTER_OTLP_HEADERS", "token=x")
		t.Setenv("OTEL_SERVICE_NAME", c.service)
		e, err := Start("test", "1", func(err error) { t.Error(err) })
		if err != nil {
			t.Fatal(err)
		}
		_, span := e.Provider().Tracer("").Start(t.Context(), "name")
		span.End()
		e.Flush(t.Context())
		spans, _ := collector.Spans()
		if len(spans) != i+1 || spans[i].Name != "name" || spans[i].Service != c.want || spans[i].Token != "x" {
			t.Errorf("protocol %q: the collector got %+v", c.protocol, spans)
		}
		e.Stop()
	}
}
