package csifake

import (
	"net"
	"testing"
)

// A process that was forked and has not called exec yet holds the socket of a dead plugin open. It accepts no
// connection nevertheless.
func TestForkedSocketOfADeadPluginRefuses(t *testing.T) {
	fake := Start(t, Config{})
	forked, err := fake.listener.Listener.(*net.UnixListener).File()
	must(t, err)
	defer forked.Close()
	fake.Kill()
	if conn, err := net.Dial("unix", fake.Socket()); err == nil {
		_ = conn.Close()
		t.Error("the dead still answers")
	}
}
