package rpc

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
)

// hostStream is the host's end, opened: questions arrive on it.
type hostStream struct {
	pb.Callbacks_ServeClient
	t *testing.T
}

func (s *stage) host(t *testing.T) (hostStream, context.CancelFunc) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	stream, err := pb.NewCallbacksClient(s.conn).Serve(ctx)
	must(t, err)
	return hostStream{stream, t}, cancel
}

func (h hostStream) next() *pb.CallbackRequest {
	h.t.Helper()
	ask, err := h.Recv()
	must(h.t, err)
	return ask
}

func (h hostStream) reply(r *pb.CallbackReply) {
	h.t.Helper()
	must(h.t, h.Send(r))
}

type outcome struct {
	value string
	err   error
}

func (s *stage) resolve(ctx context.Context, ref registry.Secret) <-chan outcome {
	done := make(chan outcome, 1)
	go func() {
		values, err := s.callbacks.Resolve(ctx, map[string]registry.Secret{"key": ref})
		done <- outcome{string(values["key"]), err}
	}()
	return done
}

// Questions may be answered in any order; each answer goes to who asked.
func TestAnswersGoToWhoAsked(t *testing.T) {
	s := candidate(t)
	h, _ := s.host(t)
	first := s.resolve(t.Context(), registry.Secret{Callback: "one"})
	ask := h.next()
	second := s.resolve(t.Context(), registry.Secret{Env: "TWO"})
	other := h.next()
	if ask.GetSecret().GetName() != "one" || other.GetSecret().GetName() != "env:TWO" {
		t.Errorf("asked for %v and %v", ask, other)
	}
	if d := ask.GetDeadline().AsDuration(); d <= 0 || d > callbackLimit {
		t.Errorf("the deadline is %v", d)
	}
	h.reply(&pb.CallbackReply{Id: 999, Value: []byte("nobody asked")})
	h.reply(&pb.CallbackReply{Id: other.GetId(), Value: []byte("2")})
	h.reply(&pb.CallbackReply{Id: ask.GetId(), Value: []byte("1")})
	if got := <-first; got.value != "1" || got.err != nil {
		t.Errorf("one is %v", got)
	}
	if got := <-second; got.value != "2" || got.err != nil {
		t.Errorf("two is %v", got)
	}
}

func TestRefusalOfTheHostKeepsItsKind(t *testing.T) {
	s := candidate(t)
	h, _ := s.host(t)
	done := make(chan error, 1)
	go func() { done <- s.callbacks.Fence(t.Context(), "lost") }()
	ask := h.next()
	if ask.GetFence().GetNode() != "lost" {
		t.Errorf("asked %v", ask)
	}
	h.reply(&pb.CallbackReply{Id: ask.GetId(), Error: "no such thing", Kind: pb.ErrorKind_ERROR_KIND_UNSUPPORTED})
	if err := <-done; !errors.Is(err, registry.ErrUnsupported) ||
		!strings.Contains(err.Error(), `node "lost": no such thing`) {
		t.Errorf("got %v", err)
	}
}

// Without a host that answers, a question ends with its own deadline; when the host goes in the middle, it ends then.
// It can be asked again on the next stream.
func TestQuestionsEndWithTheHost(t *testing.T) {
	s := candidate(t)
	soon, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if got := <-s.resolve(soon, registry.Secret{Callback: "x"}); !errors.Is(got.err, registry.ErrUnavailable) ||
		!errors.Is(got.err, context.DeadlineExceeded) {
		t.Errorf("without a stream: %v", got.err)
	}
	h, leave := s.host(t)
	done := s.resolve(t.Context(), registry.Secret{Callback: "x"})
	h.next()
	leave()
	if got := <-done; !errors.Is(got.err, registry.ErrUnavailable) || !strings.Contains(got.err.Error(), "went away") {
		t.Errorf("in the middle: %v", got.err)
	}
	h, _ = s.host(t)
	done = s.resolve(t.Context(), registry.Secret{Callback: "x"})
	h.reply(&pb.CallbackReply{Id: h.next().GetId(), Value: []byte("v")})
	if got := <-done; got.value != "v" || got.err != nil {
		t.Errorf("on the next stream: %v", got)
	}
}

func TestSecretFiles(t *testing.T) {
	dir := t.TempDir()
	path := func(name string) string { return filepath.Join(dir, name) }
	write := func(name, text string) { must(t, os.WriteFile(path(name), []byte(text), 0o600)) }
	write("plain", "v")
	write("line", "v\n")
	write("lines", "v\n\n")
	write("large", strings.Repeat("x", maxSecret+1))
	must(t, os.Symlink("plain", path("link")))
	must(t, unix.Mkfifo(path("fifo"), 0o600))
	var c Callbacks
	for name, want := range map[string]string{"plain": "v", "line": "v", "lines": "v\n", "link": "v"} {
		got, err := c.Resolve(t.Context(), map[string]registry.Secret{"k": {File: path(name)}})
		if err != nil || string(got["k"]) != want {
			t.Errorf("%s: %q, %v", name, string(got["k"]), err)
		}
	}
	for name, kind := range map[string]error{
		path("large"): registry.ErrInvalid, path("fifo"): registry.ErrInvalid, dir: registry.ErrInvalid,
		"plain":      registry.ErrInvalid,
		path("none"): registry.ErrUnavailable, "": registry.ErrInvalid,
	} {
		if _, err := c.Resolve(t.Context(), map[string]registry.Secret{"k": {File: name}}); !errors.Is(err, kind) {
			t.Errorf("%q: %v", name, err)
		}
	}
}
