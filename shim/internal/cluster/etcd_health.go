package cluster

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
)

// silentAfter is how long etcd may take to answer before Problem reports it.
const silentAfter = time.Second

// etcdHealth records whether etcd answers this shim, and whether it is full.
type etcdHealth struct {
	began  time.Time     // when the shim started
	advice func() string // adds advice to the reason why etcd cannot be reached; nil: none

	mu     sync.Mutex // guards the fields below
	last   time.Time  // when etcd has last answered; zero: never
	asked  time.Time  // the first request after that; zero: there was none
	failed error      // why etcd was last unreachable or refused; nil: it has answered since, or the cause is unknown
	full   error      // etcd's refusal of a change because it is full; nil after a later success
}

// recordFull records the error of a request if it says that etcd is full.
func (h *etcdHealth) recordFull(err error) {
	if errors.Is(err, rpctypes.ErrNoSpace) {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.full = err
	}
}

// recordChange records that etcd has made a change, so it is not full.
func (h *etcdHealth) recordChange() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.full = nil
}

// fullError returns the error with which a full etcd refuses changes; nil: it is not known to be full.
func (h *etcdHealth) fullError() error {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.full
}

// recordRequest records a request.
func (h *etcdHealth) recordRequest() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.asked.IsZero() {
		h.asked = time.Now()
	}
}

// recordAnswer records an answer.
func (h *etcdHealth) recordAnswer() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.last, h.asked, h.failed = time.Now(), time.Time{}, nil
}

// intercept is an interceptor that records why etcd cannot be reached, because the errors of the etcd client do not say
// it, and why it refuses this node.
func (h *etcdHealth) intercept(
	ctx context.Context, method string, req, reply any, conn *grpc.ClientConn, invoke grpc.UnaryInvoker,
	options ...grpc.CallOption,
) error {
	err := invoke(ctx, method, req, reply, conn, options...)
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.PermissionDenied, codes.Unauthenticated:
		h.mu.Lock()
		defer h.mu.Unlock()
		h.failed = err
	}
	return err
}

// silent reports whether etcd has not answered for longer than silentAfter.
func (h *etcdHealth) silent() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	return !h.asked.IsZero() && time.Since(h.asked) > silentAfter
}

// silence says since when etcd, at these endpoints, has not answered or has refused all requests, and why if the cause
// is known.
func (h *etcdHealth) silence(endpoints []string) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	since := h.last.UTC().Format(time.RFC3339)
	if h.last.IsZero() {
		since = "the shim started at " + h.began.UTC().Format(time.RFC3339)
	}
	what := "has not answered"
	if code := status.Code(h.failed); code == codes.PermissionDenied || code == codes.Unauthenticated {
		what = "has refused this node's requests"
	}
	text := fmt.Sprintf("etcd %s since %s (%s)", what, since, strings.Join(endpoints, ", "))
	if why := status.Convert(h.failed).Message(); why != "" && why != context.DeadlineExceeded.Error() {
		text += ": " + why
	}
	if h.advice != nil {
		if more := h.advice(); more != "" {
			text += "; " + more
		}
	}
	return text
}

// silence says since when etcd has not answered. It is meant for a caller that has waited for etcd in vain.
func (s *State) silence() string { return s.health.silence(s.client.Endpoints()) }

// Problem says why changes of shared records cannot be made at the moment; empty: no reason is known.
func (s *State) Problem() string {
	if s.health.silent() {
		return s.silence()
	}
	if full := s.health.fullError(); full != nil {
		return fmt.Sprintf("etcd is full and refuses all changes, releases too (%v): "+
			"compact it, defragment each member, and then run etcdctl alarm disarm", full)
	}
	if full := s.copy.full.Load(); full != nil {
		return fullText(*full)
	}
	select {
	case <-s.ready:
	default:
		if why := s.notReady.Load(); why != nil {
			return notJoined(*why).Error()
		}
	}
	return ""
}
