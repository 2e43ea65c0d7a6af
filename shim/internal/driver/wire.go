package driver

import (
	"context"
	"net"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// wires are the sockets of a Conn.
type wires struct {
	mu      sync.Mutex // guards all below; held for no longer than a look-up, or a hang-up
	open    map[*wire]bool
	severed bool
}

// wire is a socket that was dialled, and is not closed.
type wire struct {
	net.Conn
	of *wires
}

func (w *wire) Close() error {
	w.of.mu.Lock()
	delete(w.of.open, w)
	w.of.mu.Unlock()
	return w.Conn.Close()
}

// wired dials.
func (c *Conn) wired(ctx context.Context, path string) (net.Conn, error) {
	conn, err := c.dial(ctx, path)
	if err != nil {
		return nil, err
	}
	return c.wires.add(conn)
}

func (ws *wires) add(conn net.Conn) (net.Conn, error) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if ws.severed {
		_ = conn.Close()
		return nil, net.ErrClosed
	}
	if ws.open == nil {
		ws.open = map[*wire]bool{}
	}
	w := &wire{conn, ws}
	ws.open[w] = true
	return w, nil
}

// sever is what the plugin sees of close: when it returns nothing goes over the connection any more, and there will be no other. What is left of close
// is to wait for goroutines.
func (c *Conn) sever() {
	c.wires.mu.Lock()
	defer c.wires.mu.Unlock()
	c.wires.severed = true
	for w := range c.wires.open {
		hangUp(w.Conn)
	}
}

// hangUp ends a connection for both sides, and waits for nobody: to close it would be to wait for who reads.
func hangUp(conn net.Conn) {
	if socket, is := conn.(syscall.Conn); is {
		if raw, err := socket.SyscallConn(); err == nil && raw.Control(func(fd uintptr) { _ = unix.Shutdown(int(fd), unix.SHUT_RDWR) }) == nil {
			return
		}
	}
	_ = conn.Close()
}
