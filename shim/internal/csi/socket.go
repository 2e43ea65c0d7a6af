package csi

import (
	"context"
	"net"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// sockets are those of a Conn that were dialled, and are not closed.
type sockets struct {
	mu      sync.Mutex // guards all below; held for no longer than a look-up, or a hang-up
	open    map[*socket]bool
	severed bool
}

// socket leaves its sockets when it is closed.
type socket struct {
	net.Conn
	of *sockets
}

func (s *socket) Close() error {
	s.of.mu.Lock()
	delete(s.of.open, s)
	s.of.mu.Unlock()
	return s.Conn.Close()
}

// add has the connection be closed with the others.
func (ss *sockets) add(conn net.Conn) (net.Conn, error) {
	ss.mu.Lock()
	defer ss.mu.Unlock()
	if ss.severed {
		_ = conn.Close()
		return nil, net.ErrClosed
	}
	if ss.open == nil {
		ss.open = map[*socket]bool{}
	}
	s := &socket{conn, ss}
	ss.open[s] = true
	return s, nil
}

// dialSocket is dial for calls.
func (c *Conn) dialSocket(ctx context.Context, path string) (net.Conn, error) {
	conn, err := c.dial(ctx, path)
	if err != nil {
		return nil, err
	}
	return c.sockets.add(conn)
}

// sever is what the plugin sees of close: when it returns nothing goes over the connection any more, and calls get no other. What is left of close is to
// wait for goroutines.
func (c *Conn) sever() {
	c.sockets.mu.Lock()
	defer c.sockets.mu.Unlock()
	c.sockets.severed = true
	for s := range c.sockets.open {
		hangUp(s.Conn)
	}
}

// hangUp ends a connection for both sides, and waits for nobody: to close it would be to wait for who reads.
func hangUp(conn net.Conn) {
	if of, is := conn.(syscall.Conn); is {
		if raw, err := of.SyscallConn(); err == nil && raw.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_RDWR) }) == nil {
			return
		}
	}
	_ = conn.Close()
}
