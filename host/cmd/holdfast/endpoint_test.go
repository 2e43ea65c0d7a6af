package main

import (
	"bytes"
	"context"
	"net"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"

	"holdfast/host/agent/control"
)

// fullListener fails to accept the first clients, because no descriptor is left.
type fullListener struct {
	failures int
	end      context.CancelFunc
}

func (l *fullListener) Accept() (net.Conn, error) {
	if l.failures--; l.failures < 0 {
		l.end()
		return nil, net.ErrClosed
	}
	return nil, &net.OpError{Op: "accept", Err: syscall.EMFILE}
}

func (l *fullListener) Close() error   { return nil }
func (l *fullListener) Addr() net.Addr { return &net.UnixAddr{} }

// An endpoint continues after a client could not be accepted.
func TestEndpointGoesOnAfterAFailedAccept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, end := context.WithCancel(t.Context())
		l, log := &fullListener{failures: 3, end: end}, &bytes.Buffer{}
		if err := forwardCSI(ctx, &control.Client{}, "disk", l, log); err != nil {
			t.Error(err)
		}
		if n := strings.Count(log.String(), "too many open files"); n != 3 {
			t.Errorf("%d messages: %s", n, log)
		}
	})
}
