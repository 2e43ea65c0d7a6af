package csi

import (
	"context"
	"net"
	"sync"

	"holdfast/registry"
)

// Instances finds the record of an instance, for its endpoint.
type Instances interface {
	Get(registry.InstanceKey) (registry.Instance, bool)
}

// Fleet holds the connections to plugins: one per task, whatever roles it serves.
type Fleet struct {
	instances Instances
	dial      Dial
	mu        sync.Mutex // guards what follows; held for no longer than a look-up
	conns     map[registry.TaskKey]*Conn
	memories  map[registry.PluginID]*memory
	ending    bool
	ended     bool
}

// Dial connects to a socket by its path.
type Dial func(ctx context.Context, path string) (net.Conn, error)

// New is a fleet without connections. instances may be nil where only Open and Connect are used.
func New(instances Instances) *Fleet { return Dialling(instances, dial) }

// Dialling is a fleet that connects by d.
func Dialling(instances Instances, d Dial) *Fleet {
	return &Fleet{conns: map[registry.TaskKey]*Conn{}, memories: map[registry.PluginID]*memory{}, instances: instances, dial: d}
}

// Open is the connection to the plugin's task at its socket; it is made if there is none. Nothing is dialled before the first call.
func (f *Fleet) Open(id registry.PluginID, t registry.TaskKey, at registry.Endpoint) (*Conn, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.open(id, t, at)
}

// open is Open for a caller that holds the fleet's lock.
func (f *Fleet) open(id registry.PluginID, t registry.TaskKey, at registry.Endpoint) (*Conn, error) {
	if f.ended {
		return nil, registry.Errorf(registry.ErrUnavailable, "the connections to plugins are closed")
	}
	if c := f.conns[t]; c != nil && c.path == at.Host && c.sent == f.memoryOf(id) {
		return c, nil
	}
	c, err := newConn(t, at.Host, f.dial, f.memoryOf(id))
	if err != nil {
		return nil, err
	}
	if old := f.conns[t]; old != nil {
		old.close()
	}
	f.conns[t] = c
	return c, nil
}

// Connect returns the connection as Open does. The connection stays open until Close.
func (f *Fleet) Connect(id registry.PluginID, t registry.TaskKey, at registry.Endpoint) (*Conn, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	c, err := f.open(id, t, at)
	if err != nil {
		return nil, err
	}
	c.supervised = true
	return c, nil
}

// Close ends the task's connection, if there is one. Calls under way end uncertain. A fleet that is about to end leaves that to End.
func (f *Fleet) Close(t registry.TaskKey) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if c := f.conns[t]; c != nil && !f.ending {
		c.close()
		delete(f.conns, t)
	}
}

// Find has the fleet find instances there from now on, and ends the connections of tasks that have none. It is called before the first call.
func (f *Fleet) Find(instances Instances, serves func(registry.TaskKey) bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.instances = instances
	for t, c := range f.conns {
		if !serves(t) {
			c.close()
			delete(f.conns, t)
		}
	}
}

// Ending says that End comes, as soon as whoever calls plugins has ended.
func (f *Fleet) Ending() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ending = true
}

// End lets nothing be sent by this fleet any more, and returns what is left to do: to close connections over which nothing goes. The sockets of those
// over which a call was cut off in this moment are shut down when it returns, so that the plugin hears of that before it hears from anybody else. All
// calls have ended.
func (f *Fleet) End() (rest func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ended = true
	idle := f.conns
	f.conns = map[registry.TaskKey]*Conn{}
	for _, c := range idle {
		if c.cutLately() {
			c.sever()
		}
	}
	return func() {
		for _, c := range idle {
			c.close()
		}
	}
}

// CloseAll ends every connection for good: nothing is sent by this fleet any more.
func (f *Fleet) CloseAll() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ended = true
	for t, c := range f.conns {
		c.close()
		delete(f.conns, t)
	}
}

// of returns the instance and the connection to its task.
func (f *Fleet) of(k registry.InstanceKey) (*Conn, registry.Instance, error) {
	in, known := f.instances.Get(k)
	if !known {
		return nil, in, unregistered(k)
	}
	c, err := f.Open(k.Plugin, k.TaskKey(), in.Endpoint)
	if err != nil {
		return nil, in, err
	}
	// The instance leaves the table before its connection is closed. If it has left by now, Close may have come before Open.
	if _, known := f.instances.Get(k); !known {
		f.drop(c)
		return nil, in, unregistered(k)
	}
	return c, in, nil
}

func unregistered(k registry.InstanceKey) error {
	return registry.Errorf(registry.ErrUnavailable, "%s is not registered any more", k)
}

// drop closes c unless a supervisor uses it: a newer attempt of the task has the same key.
func (f *Fleet) drop(c *Conn) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.conns[c.Task] == c && !f.ending && !c.supervised {
		c.close()
		delete(f.conns, c.Task)
	}
}
