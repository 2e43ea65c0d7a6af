package statuspage

import (
	"bufio"
	"context"
	"errors"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"unicode"

	"github.com/hashicorp/go-hclog"

	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/host/agent/control"
	"holdfast/registry"
)

// serve runs a server until the test ends, and returns its address.
func serve(t *testing.T, s *Server) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	served := make(chan error, 1)
	go func() { served <- s.Serve(ctx, l) }()
	t.Cleanup(func() {
		cancel()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return l.Addr().String()
}

// sources returns Sources that have only the overview and events. Each value of changes is a change of a job.
func sources(o control.Overview, events []host.Event, changes <-chan struct{}) Sources {
	return Sources{
		Overview: func(context.Context) control.Overview { return o },
		Usage:    func() map[host.VolumeName][]host.VolumeUsage { return nil },
		Status:   func(context.Context) (host.ShimStatus, error) { return host.ShimStatus{}, errors.New("none") },
		Watch: func(ctx context.Context, _ host.WatchOptions, fn func(host.Event) error) error {
			for _, e := range events {
				_ = fn(e)
			}
			<-ctx.Done()
			return context.Cause(ctx)
		},
		Await: func(ctx context.Context, fn func([]*agent.AllocRecord) bool) error {
			for {
				select {
				case <-changes:
					fn(nil)
				case <-ctx.Done():
					return context.Cause(ctx)
				}
			}
		},
	}
}

func request(t *testing.T, method, url, host string) *http.Response {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, url, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Host = host
	reply, err := http.DefaultClient.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { reply.Body.Close() })
	return reply
}

// Texts of plugins, volumes and jobs neither become markup nor contain characters that affect the text around them.
func TestHostileTextStaysText(t *testing.T) {
	const hostile = "<script>alert(1)</script>\" onload='x' \u202e\x1b[31m\x00{{.}}"
	name := registry.VolumeName{Namespace: hostile, ID: hostile}
	volume := control.Volume{Holders: []control.Holder{{Job: hostile, Access: hostile}}, Notices: []control.Notice{{
		Kind: hostile, Summary: hostile, Meaning: hostile, Next: hostile,
		Commands: []control.Command{{Purpose: hostile, Line: hostile}},
	}}}
	volume.Namespace, volume.ID, volume.Plugin, volume.State = name.Namespace, name.ID, hostile, hostile
	instance := control.Instance{}
	instance.Role, instance.Task, instance.Alloc = hostile, hostile, hostile
	instance.Health.State, instance.Health.Cause, instance.Health.Detail = hostile, hostile, hostile
	o := control.Overview{
		Self: control.Self{Node: agent.Node{Name: hostile}, StateDir: hostile}, Missing: errors.New(hostile),
		Volumes: []control.Volume{volume},
		Plugins: []control.Plugin{{ID: hostile, Provider: hostile, Version: hostile,
			Instances: []control.Instance{instance},
			Roles:     []control.Role{{Role: hostile, Reason: hostile}}}},
		Jobs: []control.Job{{ID: hostile, Type: hostile, Status: hostile, Waits: hostile,
			Groups: []control.Group{{Name: hostile}},
			Allocs: []control.Alloc{{ID: hostile, State: hostile, Reason: hostile}}}},
		Swaps: []host.SwapReport{{By: hostile, From: hostile, To: hostile, Failed: hostile, Reason: hostile}},
	}
	s := New(sources(o, nil, nil), hclog.NewNullLogger())
	s.events = []host.Event{{Kind: hostile, Volume: name, Cause: hostile, Detail: hostile}}
	text, err := s.render(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	page := string(text)
	for _, bad := range []string{"<script>", "onload='", "\" onload", "\u202e"} {
		if strings.Contains(page, bad) {
			t.Errorf("the page has %q", bad)
		}
	}
	if i := strings.IndexFunc(page, func(r rune) bool { return unicode.IsControl(r) && r != '\n' }); i >= 0 {
		t.Errorf("the page has a control character: %q", page[max(0, i-20):i+20])
	}
	const quoted = `&lt;script&gt;alert(1)&lt;/script&gt;&#34; onload=&#39;x&#39; \u202e\u001b[31m`
	if n := strings.Count(page, quoted); n < 25 {
		t.Errorf("the page shows the text %d times:\n%s", n, page)
	}
}

func TestRequestsOfOthersAreRefused(t *testing.T) {
	at := serve(t, New(sources(control.Overview{}, nil, nil), hclog.NewNullLogger()))
	_, port, _ := net.SplitHostPort(at)
	for _, c := range []struct {
		method, path, host string
		want               int
	}{
		{"GET", "/", at, 200}, {"HEAD", "/", at, 200}, {"GET", "/", "localhost:" + port, 200},
		{"GET", "/", "[::1]:" + port, 200}, {"GET", "/", "LOCALHOST", 200},
		{"GET", "/style.css", at, 200}, {"GET", "/live.js", at, 200}, {"GET", "/icon.svg", at, 200},
		{"GET", "/", "evil.example:" + port, 403}, {"GET", "/events", "evil.example", 403},
		{"GET", "/", "127.0.0.1.evil.example", 403}, {"GET", "/", "localhost.evil.example", 403},
		{"GET", "/", "192.0.2.1", 403},
		{"POST", "/", at, 405}, {"DELETE", "/", at, 405}, {"OPTIONS", "/", at, 405}, {"PUT", "/events", at, 405},
		{"GET", "/page.html", at, 404}, {"GET", "/assets/", at, 404}, {"GET", "/../go.mod", at, 404},
	} {
		reply := request(t, c.method, "http://"+at+c.path, c.host)
		if reply.StatusCode != c.want {
			t.Errorf("%s %s of %s: %s, want %d", c.method, c.path, c.host, reply.Status, c.want)
		}
		policy := reply.Header.Get("Content-Security-Policy")
		if !strings.HasPrefix(policy, "default-src 'none';") || strings.Contains(policy, "unsafe") ||
			reply.Header.Get("X-Content-Type-Options") != "nosniff" ||
			reply.Header.Get("Access-Control-Allow-Origin") != "" {
			t.Errorf("%s %s: headers %v", c.method, c.path, reply.Header)
		}
	}
}

// Each open stream gets a message after a change. Streams beyond streamsMax are refused.
func TestBrowsersAreToldOfChanges(t *testing.T) {
	changes := make(chan struct{})
	s := New(sources(control.Overview{}, nil, changes), hclog.NewNullLogger())
	s.tick = time.Hour // only changes cause messages
	at := serve(t, s)
	var streams []*bufio.Reader
	for range streamsMax {
		reply := request(t, "GET", "http://"+at+"/events", at)
		if reply.Header.Get("Content-Type") != "text/event-stream" {
			t.Fatalf("%s %v", reply.Status, reply.Header)
		}
		streams = append(streams, bufio.NewReader(reply.Body))
	}
	if reply := request(t, "GET", "http://"+at+"/events", at); reply.StatusCode != http.StatusServiceUnavailable {
		t.Errorf("one browser too many: %s", reply.Status)
	}
	changes <- struct{}{}
	for _, s := range streams {
		for range 2 { // one message at once, and one for the change
			message, err := s.ReadString('\n')
			empty, err2 := s.ReadString('\n')
			if message != "data: changed\n" || empty != "\n" {
				t.Fatalf("message %q %q: %v", message, empty, errors.Join(err, err2))
			}
		}
	}
}

// All browsers share one render. There is at most one render per second, and only after a change or a tick.
func TestBrowsersShareARender(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		from, renders, leave := sources(control.Overview{}, nil, nil), atomic.Int32{}, func() {}
		from.Overview = func(context.Context) control.Overview {
			renders.Add(1)
			leave()
			return control.Overview{}
		}
		s := New(from, hclog.NewNullLogger())
		load := func(want int32, takes time.Duration) {
			t.Helper()
			var wg sync.WaitGroup
			began := time.Now()
			for range 100 {
				wg.Go(func() {
					if text, err := s.current(t.Context()); len(text) == 0 || err != nil {
						t.Errorf("a page of %d bytes: %v", len(text), err)
					}
				})
			}
			wg.Wait()
			if n, took := renders.Load(), time.Since(began); n != want || took != takes {
				t.Errorf("%d renders in %s; want %d in %s", n, took, want, takes)
			}
		}
		load(1, 0)
		for range 5 {
			s.mu.Lock()
			s.announce()
			s.mu.Unlock()
		}
		load(2, renderPause)
		load(2, 0)
		time.Sleep(streamTick)
		load(3, 0)
		// A render for a browser that has left counts too.
		time.Sleep(streamTick)
		ctx, cancel := context.WithCancel(t.Context())
		leave = cancel
		_, _ = s.current(ctx)
		load(5, renderPause)
	})
}

// A connection beyond openMax is served once another is closed.
func TestConnectionsAreLimited(t *testing.T) {
	at := serve(t, New(sources(control.Overview{}, nil, nil), hclog.NewNullLogger()))
	var conns []net.Conn
	for range openMax {
		c, err := net.Dial("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		conns = append(conns, c)
	}
	served := make(chan int)
	go func() { served <- request(t, "GET", "http://"+at+"/", at).StatusCode }()
	select {
	case code := <-served:
		t.Errorf("one connection too many: %d", code)
	case <-time.After(50 * time.Millisecond):
		conns[0].Close()
		if code := <-served; code != http.StatusOK {
			t.Errorf("after another was closed: %d", code)
		}
	}
}
