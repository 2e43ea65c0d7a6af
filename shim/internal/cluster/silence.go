package cluster

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// silentAfter is how long etcd may take to answer before Problem reports it.
const silentAfter = time.Second

// answers records whether etcd answers this shim.
type answers struct {
	began  time.Time     // of the shim
	advice func() string // adds to why etcd cannot be reached; nil: nothing

	mu     sync.Mutex // guards the fields below
	last   time.Time  // when etcd has last answered; zero: never
	asked  time.Time  // of the first request after that; zero: there was none
	failed error      // why the last connection failed; nil: it has not, or that is not known
}

// sent records a request.
func (a *answers) sent() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.asked.IsZero() {
		a.asked = time.Now()
	}
}

// got records an answer.
func (a *answers) got() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.last, a.asked, a.failed = time.Now(), time.Time{}, nil
}

// note is an interceptor that records why etcd cannot be reached. The client's own errors do not say that.
func (a *answers) note(
	ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker,
	options ...grpc.CallOption,
) error {
	err := invoke(ctx, method, req, reply, conn, options...)
	if code := status.Code(err); code == codes.Unavailable || code == codes.DeadlineExceeded {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.failed = err
	}
	return err
}

// silent reports whether etcd has not answered for longer than silentAfter.
func (a *answers) silent() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return !a.asked.IsZero() && time.Since(a.asked) > silentAfter
}

// silence says for how long etcd, which has these endpoints, has not answered, and why if that is known.
func (a *answers) silence(endpoints []string) string {
	a.mu.Lock()
	defer a.mu.Unlock()
	since := a.last.UTC().Format(time.RFC3339)
	if a.last.IsZero() {
		since = "the shim started at " + a.began.UTC().Format(time.RFC3339)
	}
	text := fmt.Sprintf("etcd has not answered since %s (%s)", since, strings.Join(endpoints, ", "))
	if why := status.Convert(a.failed).Message(); a.failed != nil && why != context.DeadlineExceeded.Error() {
		text += ": " + why
	}
	if a.advice != nil {
		if more := a.advice(); more != "" {
			text += "; " + more
		}
	}
	return text
}

// silence says for how long etcd has not answered.
func (s *State) silence() string { return s.heard.silence(s.client.Endpoints()) }

// Problem says why changes of shared records wait at the moment; empty: they do not.
func (s *State) Problem() string {
	if s.heard.silent() {
		return s.silence()
	}
	if full := s.copy.full.Load(); full != nil {
		return fullText(*full)
	}
	select {
	case <-s.ready:
	default:
		if why := s.waiting.Load(); why != nil {
			return notJoined(*why).Error()
		}
	}
	return ""
}
