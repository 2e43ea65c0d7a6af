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

// answers records whether etcd answers this shim.
type answers struct {
	began  time.Time     // when the shim started
	advice func() string // adds advice to the reason why etcd cannot be reached; nil: none

	mu     sync.Mutex // guards the fields below
	last   time.Time  // when etcd has last answered; zero: never
	asked  time.Time  // the first request after that; zero: there was none
	failed error      // why the last connection failed; nil: it has not, or the cause is unknown
	full   error      // etcd's refusal of a change because it is full; nil after a later success
}

// refused records the error of a request if it says that etcd is full.
func (a *answers) refused(err error) {
	if errors.Is(err, rpctypes.ErrNoSpace) {
		a.mu.Lock()
		defer a.mu.Unlock()
		a.full = err
	}
}

// stored records that etcd has made a change.
func (a *answers) stored() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.full = nil
}

// fullError returns the error with which a full etcd refuses changes; nil: it is not known to be full.
func (a *answers) fullError() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.full
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

// note is an interceptor that records why etcd cannot be reached, because the errors of the etcd client do not say it.
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

// silence says since when etcd, at these endpoints, has not answered, and why if the cause is known.
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

// silence says since when etcd has not answered.
func (s *State) silence() string { return s.heard.silence(s.client.Endpoints()) }

// Problem says why changes of shared records cannot be made at the moment; empty: they can.
func (s *State) Problem() string {
	if s.heard.silent() {
		return s.silence()
	}
	if full := s.heard.fullError(); full != nil {
		return fmt.Sprintf("etcd is full and refuses all changes, releases too (%v): "+
			"compact it, defragment each member, and then run etcdctl alarm disarm", full)
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
