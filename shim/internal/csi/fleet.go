package csi

import (
	"context"
	"net"
	"slices"
	"sync"

	"go.opentelemetry.io/otel/trace"

	"holdfast/registry"
)

// Instances looks up the record of an instance, for its endpoint. Get takes no lock and must not call the Fleet.
type Instances interface {
	Get(registry.InstanceKey) (registry.Instance, bool)
}

// Fleet holds the connections to plugins: one per task, for all its roles.
type Fleet struct {
	dial     Dial
	observer Observer

	mu        sync.Mutex // guards instances, conns and ended; held for no longer than a look-up
	instances Instances
	conns     map[registry.TaskKey]*Conn
	ended     bool

	secrets sync.Map // of *sentSecrets by registry.PluginID
}

// Dial connects to a socket by its path.
type Dial func(ctx context.Context, path string) (net.Conn, error)

// New returns a fleet without connections. If instances is nil, no call may be made to an instance before SetInstances.
func New(instances Instances, o Observer) *Fleet {
	f := NewDialing(instances, dial)
	f.observer = o
	return f
}

// Observer observes the calls of a Fleet.
type Observer struct {
	Metrics *CallMetrics
	Traces  trace.TracerProvider // makes a span of each call in a trace; nil: none
}

// NewDialing returns a fleet that connects with d.
func NewDialing(instances Instances, d Dial) *Fleet {
	return &Fleet{
		dial: d, observer: Observer{Metrics: &CallMetrics{}}, instances: instances, conns: map[registry.TaskKey]*Conn{},
	}
}

// Connect returns the connection to the plugin's task at its socket. Nothing is dialled before the first call.
func (f *Fleet) Connect(id registry.PluginID, t registry.TaskKey, at registry.Endpoint) (*Conn, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.connect(id, t, at)
}

// connect is Connect for a caller that holds the lock.
func (f *Fleet) connect(id registry.PluginID, t registry.TaskKey, at registry.Endpoint) (*Conn, error) {
	if f.ended {
		return nil, registry.Errorf(registry.ErrUnavailable, "the connections to plugins are closed")
	}
	sent := f.secretsOf(id)
	old := f.conns[t]
	if old != nil && old.path == at.Host && old.secrets == sent {
		return old, nil
	}
	if old != nil {
		old.close()
	}
	c := newConn(id, at.Host, f.dial, sent, f.observer.Metrics)
	if f.observer.Traces != nil {
		c.spans = newSpans(f.observer.Traces, id, t)
	}
	f.conns[t] = c
	return c, nil
}

// beginCall returns the instance and the connection to its task, and counts the call as running. After an error the
// connection is nil. An instance leaves the table before its connection is closed. beginCall looks up both under one
// lock, so no call can open a connection that is never closed. The caller calls endCall at the end of its call.
func (f *Fleet) beginCall(k registry.InstanceKey) (*Conn, registry.Instance, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	in, known := f.instances.Get(k)
	if !known {
		return nil, in, registry.Errorf(registry.ErrUnavailable, "%s is not registered any more", k)
	}
	c, err := f.connect(k.Plugin, k.TaskKey(), in.Endpoint)
	if err == nil {
		c.running.Add(1)
	}
	return c, in, err
}

// endCall ends a call for which beginCall has returned the connection. The connection may be nil.
func (c *Conn) endCall() {
	if c != nil {
		c.running.Add(-1)
	}
}

// Running returns how many calls of instances run at the task now. Probes do not count.
func (f *Fleet) Running(t registry.TaskKey) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	if c := f.conns[t]; c != nil {
		return int(c.running.Load())
	}
	return 0
}

// Close closes the task's connection, if there is one. The outcome of calls in flight is uncertain.
func (f *Fleet) Close(t registry.TaskKey) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if c := f.conns[t]; c != nil {
		c.close()
		delete(f.conns, t)
	}
}

// SetInstances sets where instances are found, and closes the connections of tasks for which serves returns false. Call
// it before the first call.
func (f *Fleet) SetInstances(instances Instances, serves func(registry.TaskKey) bool) {
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

// Preconnect connects to a task's plugin before the connection is needed, and makes the plugin describe itself in the
// roles of the instances. There is at least one instance. If the plugin does not answer, or differs from the instances,
// Preconnect closes the connection. It returns an error only if the plugin does not answer Probe or cannot be reached.
func (f *Fleet) Preconnect(ctx context.Context, t registry.TaskKey, instances []registry.Instance) error {
	c, err := f.Connect(instances[0].Plugin, t, instances[0].Endpoint)
	if err != nil {
		return err
	}
	var roles []registry.Role
	for _, in := range instances {
		roles = append(roles, in.Role)
	}
	_, err = c.Probe(ctx)
	_, undescribed := c.Describe(ctx, roles)
	l := c.current()
	if err != nil || undescribed != nil || l == nil ||
		slices.ContainsFunc(instances, func(in registry.Instance) bool { return !l.describedAs(in) }) {
		f.Close(t)
	}
	return err
}

// End ends the fleet: nothing is sent afterwards. The caller has waited for all calls to end. If a call was cut off,
// End shuts the plugin's socket down, so that the plugin learns of that before the next shim can call the plugin. rest
// closes all connections.
func (f *Fleet) End() (rest func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ended = true
	conns := f.conns
	f.conns = map[registry.TaskKey]*Conn{}
	for _, c := range conns {
		c.sever()
	}
	return func() {
		for _, c := range conns {
			c.close()
		}
	}
}

// CloseAll ends the fleet and closes every connection.
func (f *Fleet) CloseAll() { f.End()() }

// secretsOf returns the secrets that were sent to the plugin.
func (f *Fleet) secretsOf(id registry.PluginID) *sentSecrets {
	s, _ := f.secrets.LoadOrStore(id, &sentSecrets{})
	return s.(*sentSecrets)
}
