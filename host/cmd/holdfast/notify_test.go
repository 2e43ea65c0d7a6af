package main

import (
	"net"
	"os"
	"path/filepath"
	"testing"
)

func TestNotifySendsStatesAndHidesTheSocketFromTasks(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	l, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path})
	must(t, err)
	defer l.Close()
	t.Setenv("NOTIFY_SOCKET", path)
	n := newNotifier()
	if _, found := os.LookupEnv("NOTIFY_SOCKET"); found {
		t.Error("NOTIFY_SOCKET is still set")
	}
	must(t, n.send("READY=1"))
	got := make([]byte, 64)
	size, err := l.Read(got)
	if err != nil || string(got[:size]) != "READY=1" {
		t.Errorf("received %q, %v", got[:size], err)
	}
	if err := newNotifier().send("READY=1"); err != nil {
		t.Errorf("without a socket: %v", err)
	}
}
