package csifake

import (
	"crypto/rand"
	"io"
	"net"
)

// Garbage is what somebody at a socket says who does not speak gRPC.
type Garbage string

const (
	HTTP1   Garbage = "http1"   // an answer of HTTP/1
	TLS     Garbage = "tls"     // a TLS alert
	Random  Garbage = "random"  // 4 KiB of random bytes
	Close   Garbage = "close"   // the connection is closed at once
	Silence Garbage = "silence" // nothing, and the connection stays
)

// sow says it. The connection is closed by whoever calls.
var sow = map[Garbage]func(*net.UnixConn){
	HTTP1: func(c *net.UnixConn) {
		say(c, []byte("HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: 12\r\n\r\nBad Request\n"))
	},
	TLS: func(c *net.UnixConn) { say(c, []byte{0x15, 0x03, 0x01, 0x00, 0x02, 0x02, 0x46}) },
	Random: func(c *net.UnixConn) {
		b := make([]byte, 4096)
		_, _ = rand.Read(b) // does not fail
		say(c, b)
	},
	Close:   func(*net.UnixConn) {},
	Silence: func(c *net.UnixConn) { _, _ = io.Copy(io.Discard, c) },
}

// say something and nothing more, and listen until the other one has had enough.
func say(c *net.UnixConn, b []byte) {
	if _, err := c.Write(b); err == nil && c.CloseWrite() == nil {
		_, _ = io.Copy(io.Discard, c)
	}
}

// garbage is what the script has for the next connection.
func (p *Plugin) garbage() Garbage {
	found, err := p.script.match(Accept, "")
	if err != nil || found.before == nil {
		return "" // a script that cannot be read is an error of the calls
	}
	return found.before.Garbage
}
