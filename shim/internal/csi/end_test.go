package csi

import (
	"net"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// TestEndHangsUpWhereACallWasCut: when End returns, the kernel has told a plugin of the end whose call was cut off in this moment, and nobody gets
// through to it any more. Over a connection over which nothing was cut off nothing goes, and it is closed later.
func TestEndHangsUpWhereACallWasCut(t *testing.T) {
	for what, cut := range map[string]bool{"a call was cut off": true, "none was": false} {
		t.Run(what, func(t *testing.T) {
			l, socket := server(t, func([]byte) {})
			f := fleetFor(t, socket)
			c := open(t, f)
			answers(t, c)
			c.current().cut.Store(cut)
			was := l.accepted()
			last := was[len(was)-1]
			if hungUp(t, last) {
				t.Fatal("the connection had ended before")
			}
			rest := f.End()
			if hungUp(t, last) != cut {
				t.Errorf("hung up: %v", !cut)
			}
			if _, err := c.connect(patient(t)); err == nil {
				t.Error("there is another connection")
			}
			rest()
			for ctx := patient(t); !hungUp(t, last); time.Sleep(time.Millisecond) {
				if ctx.Err() != nil {
					t.Fatal("the connection is not closed")
				}
			}
		})
	}
}

// hungUp says whether the other side of a connection has ended it, as the kernel knows.
func hungUp(t *testing.T, conn net.Conn) (is bool) {
	t.Helper()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	err = raw.Control(func(fd uintptr) {
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}
		_, _ = unix.Poll(poll, 0)
		is = poll[0].Revents&unix.POLLRDHUP != 0
	})
	return is || err != nil // our own side was closed after the other's
}
