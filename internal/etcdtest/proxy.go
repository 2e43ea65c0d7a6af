package etcdtest

import (
	"errors"
	"io"
	"net"
	"net/url"
	"sync"
	"testing"
)

// Proxy passes connections on to an etcd, until the network is cut.
type Proxy struct {
	URL string

	to   string // address of etcd
	all  sync.WaitGroup
	mu   sync.Mutex    // guards the fields below
	open chan struct{} // closed while connections pass data
	conn []io.Closer
}

// StartProxy runs a proxy to the etcd with a URL until the test ends.
func StartProxy(t testing.TB, to string) *Proxy {
	t.Helper()
	u, err := url.Parse(to)
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	p := &Proxy{to: u.Host, open: make(chan struct{}), conn: []io.Closer{l}}
	close(p.open)
	u.Host = l.Addr().String()
	p.URL = u.String()
	p.all.Go(func() { p.accept(l) })
	t.Cleanup(func() {
		p.Heal()
		p.mu.Lock()
		for _, c := range p.conn {
			_ = c.Close()
		}
		p.conn = nil
		p.mu.Unlock()
		p.all.Wait()
	})
	return p
}

// Cut lets nothing pass in either direction until Heal. As in a network that drops packets, connections stay open, and
// what was sent arrives after Heal.
func (p *Proxy) Cut() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.open = make(chan struct{})
}

// Heal ends Cut.
func (p *Proxy) Heal() {
	p.mu.Lock()
	defer p.mu.Unlock()
	select {
	case <-p.open:
	default:
		close(p.open)
	}
}

// opened returns a channel that is closed once connections pass data.
func (p *Proxy) opened() <-chan struct{} {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.open
}

func (p *Proxy) accept(l net.Listener) {
	for {
		near, err := l.Accept()
		if err != nil {
			return
		}
		far, err := net.Dial("tcp", p.to)
		if err != nil {
			_ = near.Close()
			continue
		}
		p.mu.Lock()
		ended := p.conn == nil
		if !ended {
			p.conn = append(p.conn, near, far)
		}
		p.mu.Unlock()
		if ended {
			_ = errors.Join(near.Close(), far.Close())
			return
		}
		p.all.Go(func() { p.pass(near, far) })
		p.all.Go(func() { p.pass(far, near) })
	}
}

// pass copies what one end sends to the other end.
func (p *Proxy) pass(from, to net.Conn) {
	part := make([]byte, 64<<10)
	for {
		n, err := from.Read(part)
		<-p.opened()
		if _, failed := to.Write(part[:n]); err != nil || failed != nil {
			_ = errors.Join(from.Close(), to.Close())
			return
		}
	}
}
