package metrics

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// Handler answers scrapes.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{
		MaxRequestsInFlight: 4, ErrorHandling: promhttp.ContinueOnError,
	})
}

// Serve answers GET /metrics and GET /healthz on l until ctx ends, and closes l.
func (m *Metrics) Serve(ctx context.Context, l net.Listener) error {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", m.Handler())
	mux.HandleFunc("GET /healthz", m.healthz)
	web := &http.Server{
		Handler: mux, ReadHeaderTimeout: 10 * time.Second, WriteTimeout: time.Minute, IdleTimeout: 5 * time.Minute,
	}
	stop := context.AfterFunc(ctx, func() { _ = web.Close() })
	defer stop()
	if err := web.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve metrics: %w", err)
	}
	return nil
}

// healthz answers 200 if the agent serves and its shim answers calls, else 503 with the reason.
func (m *Metrics) healthz(w http.ResponseWriter, _ *http.Request) {
	if s := m.source.ShimState(); !s.Serving {
		http.Error(w, "the shim is not serving: "+s.Reason, http.StatusServiceUnavailable)
		return
	}
	fmt.Fprintln(w, "ok")
}
