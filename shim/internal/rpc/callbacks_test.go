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

// hostStream is the host's end of the stream of callbacks.
type hostStream struct {
	pb.Callbacks_ServeClient
	t *testing.T
}

func (e *env) host(t *testing.T) (hostStream, context.CancelFunc) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	stream, err := pb.NewCallbacksClient(e.conn).Serve(ctx)
	must(t, err)
	return hostStream{stream, t}, cancel
}

func (h hostStream) next() *pb.CallbackRequest {
	h.t.Helper()
	req, err := h.Recv()
	must(h.t, err)
	return req
}

func (h hostStream) reply(r *pb.CallbackReply) {
	h.t.Helper()
	must(h.t, h.Send(r))
}

type resolved struct {
	value string
	err   error
}

func (e *env) resolve(ctx context.Context, ref registry.Secret) <-chan resolved {
	done := make(chan resolved, 1)
	go func() {
		values, err := e.callbacks.Resolve(ctx, map[string]registry.Secret{"key": ref})
		done <- resolved{string(values["key"]), err}
	}()
	return done
}

// The host may answer requests in any order. An error keeps its kind.
func TestCallbackReplyReachesItsCaller(t *testing.T) {
	e := newCandidate(t)
	h, _ := e.host(t)
	first := e.resolve(t.Context(), registry.Secret{Callback: "one"})
	one := h.next()
	second := e.resolve(t.Context(), registry.Secret{Env: "TWO"})
	two := h.next()
	if one.GetSecret().GetName() != "one" || two.GetSecret().GetName() != "env:TWO" {
		t.Errorf("requests: %v and %v", one, two)
	}
	if d := one.GetDeadline().AsDuration(); d <= 0 || d > callbackLimit {
		t.Errorf("the deadline is %v", d)
	}
	h.reply(&pb.CallbackReply{Id: 999, Value: []byte("of an unknown request")})
	h.reply(&pb.CallbackReply{Id: two.GetId(), Value: []byte("2")})
	h.reply(&pb.CallbackReply{Id: one.GetId(), Error: "no such thing", Kind: pb.ErrorKind_ERROR_KIND_UNSUPPORTED})
	if got := <-second; got.value != "2" || got.err != nil {
		t.Errorf("two is %v", got)
	}
	if got := <-first; !errors.Is(got.err, registry.ErrUnsupported) ||
		!strings.Contains(got.err.Error(), `"one": no such thing`) {
		t.Errorf("one is %v", got)
	}
}

// A fence may take long enough to switch a machine off. If the host refuses it, the error keeps its kind.
func TestFenceHasMoreTimeThanOtherCallbacks(t *testing.T) {
	e := newCandidate(t)
	h, _ := e.host(t)
	done := make(chan error, 1)
	for _, refused := range []bool{false, true} {
		go func() { done <- e.callbacks.Fence(t.Context(), "lost") }()
		ask := h.next()
		if d := ask.GetDeadline().AsDuration(); ask.GetFence().GetNode() != "lost" || d < fenceLimit/2 {
			t.Errorf("the host is asked %v", ask)
		}
		answer := &pb.CallbackReply{Id: ask.GetId()}
		if refused {
			answer.Error, answer.Kind = "no power switch", pb.ErrorKind_ERROR_KIND_UNSUPPORTED
		}
		h.reply(answer)
		if err := <-done; errors.Is(err, registry.ErrUnsupported) != refused || err != nil && !refused {
			t.Errorf("refused %v: %v", refused, err)
		}
	}
}

// If the host does not answer, a callback ends at its own deadline. If the stream ends, the callback is repeated on the
// next one.
func TestCallbacksContinueOnTheNextStream(t *testing.T) {
	e := newCandidate(t)
	soon, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
	defer cancel()
	if got := <-e.resolve(soon, registry.Secret{Callback: "x"}); !errors.Is(got.err, registry.ErrUnavailable) ||
		!errors.Is(got.err, context.DeadlineExceeded) {
		t.Errorf("without a stream: %v", got.err)
	}
	h, leave := e.host(t)
	done := e.resolve(t.Context(), registry.Secret{Callback: "x"})
	h.next()
	leave()
	h, _ = e.host(t)
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
		"plain": registry.ErrInvalid, path("none"): registry.ErrUnavailable, "": registry.ErrInvalid,
	} {
		if _, err := c.Resolve(t.Context(), map[string]registry.Secret{"k": {File: name}}); !errors.Is(err, kind) {
			t.Errorf("%q: %v", name, err)
		}
	}
}
