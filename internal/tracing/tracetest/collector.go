// Package tracetest is a collector of spans for tests.
package tracetest

import (
	"context"
	"encoding/hex"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"sync"
	"testing"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	common "go.opentelemetry.io/proto/otlp/common/v1"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"
)

// Span is a span that a Collector got. IDs are in hex.
type Span struct {
	Service, Name     string
	Trace, ID, Parent string            // Parent is empty for a root
	Attributes        map[string]string // also of the process
	Failed            bool
	Message           string // of the failure
	Token             string // the header "token" of the export
}

// Collector serves OTLP over HTTP and gRPC.
type Collector struct {
	HTTP, GRPC string // values of OTEL_EXPORTER_OTLP_ENDPOINT

	collector.UnimplementedTraceServiceServer
	mu    sync.Mutex // guards the fields below
	spans []Span
	more  chan struct{} // closed and replaced when spans have come
}

// New returns a collector that serves until the test ends.
func New(t testing.TB) *Collector {
	t.Helper()
	c := &Collector{more: make(chan struct{})}
	web := httptest.NewServer(c)
	t.Cleanup(web.Close)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := grpc.NewServer()
	collector.RegisterTraceServiceServer(server, c)
	go func() { _ = server.Serve(l) }()
	t.Cleanup(server.Stop)
	c.HTTP, c.GRPC = web.URL, "http://"+l.Addr().String()
	return c
}

// Silent returns the endpoint of a collector that accepts connections and never answers.
func Silent(t testing.TB) (endpoint string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return "http://" + l.Addr().String()
}

// Spans returns the spans so far, and a channel that is closed when more have come.
func (c *Collector) Spans() ([]Span, <-chan struct{}) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Clone(c.spans), c.more
}

// ServeHTTP takes an export over HTTP.
func (c *Collector) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	request := &collector.ExportTraceServiceRequest{}
	if err == nil {
		err = proto.Unmarshal(body, request)
	}
	if err != nil || r.URL.Path != "/v1/traces" {
		http.Error(w, "no traces", http.StatusBadRequest)
		return
	}
	c.add(request, r.Header.Get("token"))
	w.Header().Set("Content-Type", "application/x-protobuf")
}

// Export takes an export over gRPC.
func (c *Collector) Export(
	ctx context.Context, request *collector.ExportTraceServiceRequest,
) (*collector.ExportTraceServiceResponse, error) {
	header, _ := metadata.FromIncomingContext(ctx)
	c.add(request, append(header.Get("token"), "")[0])
	return &collector.ExportTraceServiceResponse{}, nil
}

func (c *Collector) add(request *collector.ExportTraceServiceRequest, token string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, process := range request.GetResourceSpans() {
		for _, scope := range process.GetScopeSpans() {
			for _, s := range scope.GetSpans() {
				attributes := texts(append(process.GetResource().GetAttributes(), s.GetAttributes()...))
				c.spans = append(c.spans, Span{
					Service: attributes["service.name"], Name: s.GetName(), Trace: hex.EncodeToString(s.GetTraceId()),
					ID: hex.EncodeToString(s.GetSpanId()), Parent: hex.EncodeToString(s.GetParentSpanId()),
					Attributes: attributes, Failed: s.GetStatus().GetCode() != 0, Message: s.GetStatus().GetMessage(),
					Token: token,
				})
			}
		}
	}
	close(c.more)
	c.more = make(chan struct{})
}

func texts(list []*common.KeyValue) map[string]string {
	all := map[string]string{}
	for _, kv := range list {
		all[kv.GetKey()] = kv.GetValue().GetStringValue()
		if n, is := kv.GetValue().GetValue().(*common.AnyValue_IntValue); is {
			all[kv.GetKey()] = strconv.FormatInt(n.IntValue, 10)
		}
	}
	return all
}
