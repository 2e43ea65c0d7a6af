// Package otlp exports the spans of a process with OTLP, as the standard variables OTEL_* say.
package otlp

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"regexp"
	"strings"
	"sync"
	"time"

	"go.opentelemetry.io/otel"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracegrpc"
	"go.opentelemetry.io/otel/exporters/otlp/otlptrace/otlptracehttp"
	"go.opentelemetry.io/otel/sdk/resource"
	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/trace"
)

// Exporter exports the spans of its Provider in the background. It drops spans that the collector does not accept. A
// nil Exporter may be used, and exports nothing.
type Exporter struct{ provider *sdk.TracerProvider }

// stopLimit bounds the wait for a collector when the process ends.
const stopLimit = 500 * time.Millisecond

// Start returns the exporter of this process. It returns nil if neither OTEL_EXPORTER_OTLP_ENDPOINT nor its variant for
// traces is set, and with OTEL_SDK_DISABLED=true or OTEL_TRACES_EXPORTER=none. OTEL_SERVICE_NAME has precedence over
// service. failed is called once, with the first error of an export.
func Start(service, version string, failed func(error)) (*Exporter, error) {
	name := "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
	if os.Getenv(name) == "" {
		name = "OTEL_EXPORTER_OTLP_ENDPOINT"
	}
	endpoint := os.Getenv(name)
	if endpoint == "" || strings.EqualFold(os.Getenv("OTEL_SDK_DISABLED"), "true") ||
		os.Getenv("OTEL_TRACES_EXPORTER") == "none" {
		return nil, nil
	}
	if u, err := url.Parse(endpoint); err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Host == "" {
		return nil, fmt.Errorf("no traces are exported: %s=%s is no URL; use one like http://127.0.0.1:4318", name,
			endpoint)
	}
	values, err := headers()
	if err != nil {
		return nil, err
	}
	ctx := context.Background() // of the process; nothing here waits
	client, err := newClient()
	if err != nil {
		return nil, err
	}
	exporter, err := otlptrace.New(ctx, client)
	if err != nil {
		return nil, fmt.Errorf("no traces are exported: %w", err)
	}
	about, _ := resource.New(ctx, // with an error it is incomplete, but usable
		resource.WithAttributes(attribute.String("service.name", service),
			attribute.String("service.version", version)),
		resource.WithTelemetrySDK(), resource.WithHost(), resource.WithProcessPID(), resource.WithFromEnv())
	var once sync.Once
	otel.SetErrorHandler(otel.ErrorHandlerFunc(func(err error) {
		once.Do(func() { failed(masked(err, values)) })
	}))
	return &Exporter{sdk.NewTracerProvider(sdk.WithBatcher(exporter), sdk.WithResource(about))}, nil
}

// headerName matches a token of HTTP.
var headerName = regexp.MustCompile("^[-A-Za-z0-9!#$%&'*+.^_|~`]+$")

// headers returns the values of the headers for the collector, such as passwords. It refuses values that the
// library would write to its log.
func headers() (values []string, err error) {
	for _, name := range []string{"OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS"} {
		for i, entry := range strings.Split(os.Getenv(name), ",") {
			if strings.TrimSpace(entry) == "" {
				continue
			}
			key, value, _ := strings.Cut(entry, "=")
			plain, err := url.PathUnescape(value)
			if err != nil || len(key) == len(entry) || !headerName.MatchString(strings.TrimSpace(key)) {
				return nil, fmt.Errorf("no traces are exported: entry %d of %s is not like NAME=value; write a comma "+
					"or %% in a value as %%2C or %%25", i+1, name)
			}
			values = append(values, strings.Fields(plain)...)
		}
	}
	return values, nil
}

// masked hides the values in an error, because a collector may repeat them in its answer.
func masked(err error, values []string) error {
	text := err.Error()
	for _, v := range values {
		text = strings.ReplaceAll(text, v, "***")
	}
	return errors.New(text)
}

// newClient returns the client of the configured protocol. It does not repeat a failed batch,
// because later batches would have to wait.
func newClient() (otlptrace.Client, error) {
	protocol := cmp.Or(os.Getenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"), os.Getenv("OTEL_EXPORTER_OTLP_PROTOCOL"))
	switch protocol {
	case "", "http/protobuf":
		return otlptracehttp.NewClient(otlptracehttp.WithRetry(otlptracehttp.RetryConfig{})), nil
	case "grpc":
		return otlptracegrpc.NewClient(otlptracegrpc.WithRetry(otlptracegrpc.RetryConfig{})), nil
	}
	return nil, fmt.Errorf("no traces are exported: OTEL_EXPORTER_OTLP_PROTOCOL=%s is not supported; "+
		"use http/protobuf (the default) or grpc", protocol)
}

// Provider returns the provider that makes spans. It is nil if nothing is exported.
func (e *Exporter) Provider() trace.TracerProvider {
	if e == nil {
		return nil
	}
	return e.provider
}

// Flush exports the spans that have ended. It returns when the collector has answered or ctx has ended.
func (e *Exporter) Flush(ctx context.Context) {
	if e != nil {
		_ = e.provider.ForceFlush(ctx) // the argument failed of Start gets an error
	}
}

// Stop is Flush at the end of the process. It takes at most half a second, even if the collector does not answer.
func (e *Exporter) Stop() {
	if e == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), stopLimit)
	defer cancel()
	_ = e.provider.Shutdown(ctx)
}
