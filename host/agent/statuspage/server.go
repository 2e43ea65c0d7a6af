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
	"holdfast/host/agent"
	"holdfast/host/agent/control"
)

// Limits of the server.
const (
	renderLimit  = 3 * time.Second        // for the answer of the shim; after that the page says what is missing
	renderPause  = time.Second            // between two renders; all browsers share a render
	streamsMax   = 32                     // browsers with an open stream of changes
	openMax      = 128                    // connections; further ones wait
	streamPause  = 500 * time.Millisecond // between two messages to a browser
	streamTick   = 5 * time.Second        // between messages without a change, which update times, waits and swaps
	writeLimit   = 10 * time.Second       // for a browser to take a message
	shutdownTime = 2 * time.Second        // for running answers when the agent ends
)

// Sources provide the contents of the page. All fields are required.
type Sources struct {
	Overview func(ctx context.Context) control.Overview
	// Usage returns the last reported usage of volumes. The caller must not change it.
	Usage  func() map[host.VolumeName][]host.VolumeUsage
	Status func(ctx context.Context) (host.ShimStatus, error)
	Watch  func(ctx context.Context, o host.WatchOptions, fn func(host.Event) error) error
	// Await calls fn after each change of a job or alloc, until fn returns true.
	Await func(ctx context.Context, fn func([]*agent.AllocRecord) bool) error
}

// Server serves the status page of an agent.
type Server struct {
	sources Sources
	log     hclog.Logger
	renders chan struct{} // holds a value while the page is being rendered; guards latest and began
	latest  rendered
	began   time.Time     // start of the last render, even if its client has left
	streams chan struct{} // holds a value for each open stream of changes
	tick    time.Duration // streamTick

	mu      sync.Mutex // guards what follows; held for no longer than a copy
	events  []host.Event
	changed chan struct{} // closed at the next change
}

// New returns the server of the page. Serve runs it.
func New(s Sources, log hclog.Logger) *Server {
	return &Server{sources: s, log: log, renders: make(chan struct{}, 1),
		streams: make(chan struct{}, streamsMax), tick: streamTick, changed: make(chan struct{})}
}

// Serve answers requests on l until ctx ends, and closes l.
func (s *Server) Serve(ctx context.Context, l net.Listener) error {
	life, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	wg.Go(func() { s.followEvents(life) })
	wg.Go(func() { s.followRecords(life) })
	web := &http.Server{
		Handler: s.handler(), ReadHeaderTimeout: 10 * time.Second, WriteTimeout: time.Minute,
		IdleTimeout: 5 * time.Minute, MaxHeaderBytes: 64 << 10,
		BaseContext: func(net.Listener) context.Context { return life },
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
	mux.HandleFunc("GET /events", s.serveEvents)
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

// rendered is a page with its time.
type rendered struct {
	text    []byte
	at      time.Time
	changed <-chan struct{} // closed once the page is outdated
}

// current returns a page that includes the last change and is at most one tick old. It renders at most once in
// renderPause.
func (s *Server) current(ctx context.Context) ([]byte, error) {
	select {
	case s.renders <- struct{}{}:
		defer func() { <-s.renders }()
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	select {
	case <-s.latest.changed:
	default:
		if s.latest.text != nil && time.Since(s.latest.at) < s.tick {
			return s.latest.text, nil
		}
	}
	select {
	case <-time.After(renderPause - time.Since(s.began)):
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	s.began = time.Now()
	next := rendered{at: s.began, changed: s.nextChange()}
	var err error
	if next.text, err = s.render(ctx); err == nil && ctx.Err() == nil {
		s.latest = next
	}
	return next.text, err
}

func (s *Server) servePage(w http.ResponseWriter, r *http.Request) {
	text, err := s.current(r.Context())
	if r.Context().Err() != nil {
		return
	}
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

// serveEvents sends a message at once, after each change and at each tick, until the browser leaves or does not receive
// a message in time.
func (s *Server) serveEvents(w http.ResponseWriter, r *http.Request) {
	select {
	case s.streams <- struct{}{}:
		defer func() { <-s.streams }()
	default:
		http.Error(w, "too many browsers show this page: this one gets no messages", http.StatusServiceUnavailable)
		return
	}
	w.Header().Set("Content-Type", "text/event-stream")
	out := http.NewResponseController(w)
	tick := time.NewTicker(s.tick)
	defer tick.Stop()
	for {
		changed := s.nextChange()
		if err := out.SetWriteDeadline(time.Now().Add(writeLimit)); err != nil {
			return
		}
		if _, err := fmt.Fprint(w, "data: changed\n\n"); err != nil || out.Flush() != nil {
			return
		}
		select {
		case <-time.After(streamPause):
		case <-r.Context().Done():
			return
		}
		select {
		case <-changed:
		case <-tick.C:
		case <-r.Context().Done():
			return
		}
	}
}

func (s *Server) nextChange() <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.changed
}

// announce wakes the streams of browsers after a change. The caller holds mu.
func (s *Server) announce() {
	close(s.changed)
	s.changed = make(chan struct{})
}
