package statuspage

import (
	"context"
	"embed"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"
	"golang.org/x/net/netutil"

	"holdfast/host"
	"holdfast/host/agent/control"
)

// Limits of the server.
const (
	renderLimit  = 3 * time.Second  // for the answer of the shim; after that the page says what is missing
	renderPause  = time.Second      // between two renders; all browsers share a render
	openMax      = 128              // connections; further ones wait
	writeLimit   = 10 * time.Second // for a browser to receive the page
	shutdownTime = 4 * time.Second  // for running answers when the agent ends; longer than a render
)

// Sources provide the contents of the page. All fields are required.
type Sources struct {
	Overview func(ctx context.Context) control.Overview
	// Usage returns the last reported usage of volumes. The caller must not change it.
	Usage  func() map[host.VolumeName][]host.VolumeUsage
	Status func(ctx context.Context) (host.ShimStatus, error)
	Watch  func(ctx context.Context, o host.WatchOptions, fn func(host.Event) error) error
}

// Server serves the status page of an agent.
type Server struct {
	sources Sources
	log     hclog.Logger

	rendering sync.Mutex // held during a render; guards the results of the last one
	rendered  time.Time  // its end
	text      []byte
	err       error

	mu     sync.Mutex // guards events; held for no longer than a copy
	events []host.Event
}

// New returns the server of the page. Serve runs it.
func New(s Sources, log hclog.Logger) *Server {
	return &Server{sources: s, log: log}
}

// Serve answers requests on l until ctx ends, and closes l.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	life, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { s.followEvents(life) })
	web := &http.Server{
		Handler: s.handler(), ReadHeaderTimeout: 10 * time.Second, WriteTimeout: time.Minute,
		IdleTimeout: 5 * time.Minute, MaxHeaderBytes: 64 << 10,
	}
	served := make(chan error, 1)
	wg.Go(func() { served <- web.Serve(netutil.LimitListener(l, openMax)) })
	select {
	case err := <-served:
		return fmt.Errorf("serve the status page: %w", err)
	case <-ctx.Done():
	}
	grace, done := context.WithTimeout(context.WithoutCancel(ctx), shutdownTime)
	defer done()
	if err := web.Shutdown(grace); err != nil {
		return web.Close()
	}
	return nil
}

//go:embed assets
var assets embed.FS

func (s *Server) handler() http.Handler {
	files, err := fs.Sub(assets, "assets")
	if err != nil {
		panic(err) // the pattern of the embedding is wrong
	}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", s.servePage)
	for _, name := range []string{"style.css", "live.js", "icon.svg"} {
		mux.HandleFunc("GET /"+name, func(w http.ResponseWriter, r *http.Request) {
			http.ServeFileFS(w, r, files, name)
		})
	}
	return guard(mux)
}

// guard sets headers that isolate the page from other pages. On a loopback address, it answers only requests for names
// of this machine. Otherwise a foreign web page whose name resolves to 127.0.0.1 (DNS rebinding) could read the answer.
func guard(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "+
			"connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cache-Control", "no-store")
		at, _ := r.Context().Value(http.LocalAddrContextKey).(*net.TCPAddr)
		if at != nil && at.IP.IsLoopback() && !isLoopback(r.Host) {
			http.Error(w, "this address answers to http://"+at.String()+" and http://localhost only",
				http.StatusForbidden)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// isLoopback reports whether the host of a URL, with or without a port, names this machine.
func isLoopback(hostport string) bool {
	name, _, err := net.SplitHostPort(hostport)
	if err != nil {
		name = strings.Trim(hostport, "[]")
	}
	ip, err := netip.ParseAddr(name)
	return err == nil && ip.IsLoopback() || strings.EqualFold(name, "localhost")
}

// current returns a page that is at most renderPause old.
func (s *Server) current(ctx context.Context) ([]byte, error) {
	s.rendering.Lock()
	defer s.rendering.Unlock()
	if time.Since(s.rendered) >= renderPause {
		s.text, s.err = s.render(ctx)
		s.rendered = time.Now()
	}
	return s.text, s.err
}

func (s *Server) servePage(w http.ResponseWriter, r *http.Request) {
	text, err := s.current(r.Context())
	if err != nil {
		s.log.Error("cannot render the status page", "error", err)
		http.Error(w, "the page cannot be rendered; see the log of the agent", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	if http.NewResponseController(w).SetWriteDeadline(time.Now().Add(writeLimit)) == nil {
		_, _ = w.Write(text)
	}
}
