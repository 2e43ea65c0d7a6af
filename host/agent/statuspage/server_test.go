package statuspage

import (
	"context"
	"errors"
	"net"
	"net/http"
	"strings"
	"sync"
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

// sources returns Sources that have only the overview.
func sources(o control.Overview) Sources {
	return Sources{
		Overview: func(context.Context) control.Overview { return o },
		Usage:    func() map[host.VolumeName][]host.VolumeUsage { return nil },
		Status:   func(context.Context) (host.ShimStatus, error) { return host.ShimStatus{}, errors.New("none") },
		Watch: func(ctx context.Context, _ host.WatchOptions, _ func(host.Event) error) error {
			<-ctx.Done()
			return context.Cause(ctx)
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
	s := New(sources(o), hclog.NewNullLogger())
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
	at := serve(t, New(sources(control.Overview{}), hclog.NewNullLogger()))
	_, port, _ := net.SplitHostPort(at)
	for _, c := range []struct {
		method, path, host string
		want               int
	}{
		{"GET", "/", at, 200}, {"HEAD", "/", at, 200}, {"GET", "/", "localhost:" + port, 200},
		{"GET", "/", "[::1]:" + port, 200}, {"GET", "/", "LOCALHOST", 200},
		{"GET", "/style.css", at, 200}, {"GET", "/live.js", at, 200}, {"GET", "/icon.svg", at, 200},
		{"GET", "/", "evil.example:" + port, 403}, {"GET", "/live.js", "evil.example", 403},
		{"GET", "/", "127.0.0.1.evil.example", 403}, {"GET", "/", "localhost.evil.example", 403},
		{"GET", "/", "192.0.2.1", 403},
		{"POST", "/", at, 405}, {"DELETE", "/", at, 405}, {"OPTIONS", "/", at, 405}, {"PUT", "/live.js", at, 405},
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

// All browsers share a render, which serves them for renderPause. It does not end when its browser leaves.
func TestBrowsersShareARender(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		from, renders, takes := sources(control.Overview{}), 0, time.Duration(0)
		from.Overview = func(ctx context.Context) control.Overview {
			renders++
			time.Sleep(takes)
			return control.Overview{Missing: ctx.Err()}
		}
		s := New(from, hclog.NewNullLogger())
		load := func(want int) {
			t.Helper()
			var wg sync.WaitGroup
			for range 100 {
				wg.Go(func() {
					text, err := s.current(t.Context())
					if err != nil || !strings.Contains(string(text), "No volumes.") {
						t.Errorf("the page: %v\n%s", err, text)
					}
				})
			}
			wg.Wait()
			if renders != want {
				t.Errorf("%d renders, want %d", renders, want)
			}
		}
		load(1)
		time.Sleep(renderPause - time.Millisecond)
		load(1)
		time.Sleep(time.Millisecond)
		load(2)
		time.Sleep(renderPause)
		takes = renderLimit - 1
		left, leave := context.WithCancel(t.Context())
		leave()
		_, _ = s.current(left)
		takes = 0
		load(3)
	})
}

// A connection beyond openMax is served once another is closed.
func TestConnectionsAreLimited(t *testing.T) {
	at := serve(t, New(sources(control.Overview{}), hclog.NewNullLogger()))
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
