package main

import (
	"fmt"
	"net"
	"os"
)

// notifier tells systemd about the state of this service; see sd_notify(3).
type notifier struct{ socket string }

// newNotifier removes the socket from the environment, so that tasks do not inherit it.
func newNotifier() notifier {
	defer os.Unsetenv("NOTIFY_SOCKET")
	return notifier{os.Getenv("NOTIFY_SOCKET")}
}

// send sends a state such as READY=1. Without a socket it does nothing.
func (n notifier) send(state string) error {
	if n.socket == "" {
		return nil
	}
	conn, err := net.Dial("unixgram", n.socket)
	if err != nil {
		return fmt.Errorf("notify systemd: %w", err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte(state)); err != nil {
		return fmt.Errorf("notify systemd: %w", err)
	}
	return nil
}
