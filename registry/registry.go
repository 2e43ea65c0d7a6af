package registry

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
)

// Registry is the live table of instances as of the last applied change. Reads take no lock and never wait. The maps
// and slices of returned instances are shared with other readers: Clone an instance before changing it.
//
// The State calls Applied for each commit.
type Registry struct {
	state   State
	current atomic.Pointer[table]
	writing sync.Mutex // held by Load and Applied while they compute the next table
}

// New returns an empty table.
func New(state State) *Registry {
	r := &Registry{state: state}
	r.current.Store(newTable(0, nil))
	return r
}

// Load publishes the instances of the State. After an error the table is unchanged.
func (r *Registry) Load(ctx context.Context) error {
	err := r.state.View(ctx, func(v View) error {
		loaded := newTable(v.Index(), v.AllInstances())
		r.writing.Lock()
		defer r.writing.Unlock()
		if old := r.current.Load(); loaded.index >= old.index {
			r.current.Store(loaded)
			close(old.changed)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("load the table of instances: %w", err)
	}
	return nil
}

// Applied publishes a committed change. The State calls it in commit order.
func (r *Registry) Applied(a Applied) {
	r.writing.Lock()
	defer r.writing.Unlock()
	old := r.current.Load()
	if a.Last() <= old.index {
		return // the loaded table includes it
	}
	if !a.Change.Touches(BucketInstances) {
		next := *old
		next.index = a.Last()
		r.current.Store(&next)
		return
	}
	next := old.with(a.Change)
	next.index = a.Last()
	r.current.Store(next)
	close(old.changed)
}

// Find returns the active instance of a plugin in a role: the newest healthy one, or the newest if none is healthy.
func (r *Registry) Find(role Role, id PluginID) (Instance, bool) {
	return copyOf(activeOf(r.current.Load().members(role, id)))
}

// Members returns the instances of a plugin in a role, newest first.
func (r *Registry) Members(role Role, id PluginID) []Instance {
	return copiesOf(r.current.Load().members(role, id))
}

// Get returns the instance of a key.
func (r *Registry) Get(k InstanceKey) (Instance, bool) {
	return copyOf(member(r.current.Load().members(k.Role, k.Plugin), k))
}

// All returns every instance as of one index.
func (r *Registry) All() Snapshot {
	t := r.current.Load()
	return Snapshot{Index: t.index, Instances: copiesOf(t.ordered())}
}

// Index returns the index of the last applied change.
func (r *Registry) Index() Seq { return r.current.Load().index }

// Await waits for a healthy active instance and returns it. If ctx ends first, it returns an ErrUnavailable that
// describes the registered instances.
func (r *Registry) Await(ctx context.Context, role Role, id PluginID) (Instance, error) {
	for {
		t := r.current.Load()
		if ctx.Err() != nil {
			return Instance{}, Errorf(ErrUnavailable, "plugin %q has no healthy instance in role %s: %s: %w", id, role,
				t.describe(role, id), context.Cause(ctx))
		}
		if active := activeOf(t.members(role, id)); active != nil && active.Health.State == Healthy {
			return *active, nil
		}
		select {
		case <-t.changed:
		case <-ctx.Done():
		}
	}
}

// describe describes the instances of a plugin that has no healthy one.
func (t *table) describe(role Role, id PluginID) string {
	members := t.members(role, id)
	active := activeOf(members)
	if active == nil {
		for _, other := range []Role{RoleController, RoleNode} {
			if other != role && len(t.members(other, id)) > 0 {
				return fmt.Sprintf("none is registered, the plugin serves only %s here", other)
			}
		}
		return "none is registered"
	}
	s := fmt.Sprintf("%d registered, the newest (%s) is %s: %s", len(members), active.TaskKey(), active.Health.State,
		active.Health.Cause)
	if active.Health.Detail != "" {
		s += " (" + active.Health.Detail + ")"
	}
	return s
}

func copyOf(i *Instance) (Instance, bool) {
	if i == nil {
		return Instance{}, false
	}
	return *i, true
}

func copiesOf(list []*Instance) []Instance {
	out := make([]Instance, len(list))
	for at, i := range list {
		out[at] = *i
	}
	return out
}
