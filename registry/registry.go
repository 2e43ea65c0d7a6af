package registry

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
)

// Registry is the live table of instances. Reads take no lock and wait for nobody; what they return is as of the last
// change that was applied, and its maps and slices are shared with other readers: Clone before changing them.
//
// The Log calls Applied for each commit: register it with Log.OnApplied.
type Registry struct {
	log     State
	current atomic.Pointer[table]
	writing sync.Mutex // of Load and Applied: held to compute the next table, never while waiting
}

// New returns an empty table.
func New(log State) *Registry {
	r := &Registry{log: log}
	r.current.Store(newTable(0, nil))
	return r
}

// Load publishes what the Log holds. After an error the table is as it was.
func (r *Registry) Load(ctx context.Context) error {
	err := r.log.View(ctx, func(v View) error {
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

// Applied publishes a committed change. The Log calls it in commit order.
func (r *Registry) Applied(a Applied) {
	r.writing.Lock()
	defer r.writing.Unlock()
	old := r.current.Load()
	if a.Last() <= old.index {
		return // Load has seen it
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

// Find is the active instance of a plugin in a role: the newest healthy one; if none is healthy, the newest.
func (r *Registry) Find(role Role, id PluginID) (Instance, bool) {
	return found(activeOf(r.current.Load().members(role, id)))
}

// Get is one instance.
func (r *Registry) Get(k InstanceKey) (Instance, bool) {
	return found(member(r.current.Load().members(k.Role, k.Plugin), k))
}

// All is every instance as of one index.
func (r *Registry) All() Snapshot {
	t := r.current.Load()
	return Snapshot{Index: t.index, Instances: values(t.inOrder())}
}

// Index is that of the last change that was applied, of instances or of anything else.
func (r *Registry) Index() Seq { return r.current.Load().index }

// Await is the active instance once it is healthy. If ctx ends first it is an ErrUnavailable that says what there is
// instead.
func (r *Registry) Await(ctx context.Context, role Role, id PluginID) (Instance, error) {
	for {
		t := r.current.Load()
		members := t.members(role, id)
		if ctx.Err() != nil {
			return Instance{}, Errorf(ErrUnavailable, "plugin %q has no healthy instance in role %s: %s: %w", id, role,
				t.situation(role, id), context.Cause(ctx))
		}
		if active := activeOf(members); active != nil && active.Health.State == Healthy {
			return *active, nil
		}
		select {
		case <-t.changed:
		case <-ctx.Done():
		}
	}
}

// situation says to a person what there is instead of a healthy instance.
func (t *table) situation(role Role, id PluginID) string {
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

func found(i *Instance) (Instance, bool) {
	if i == nil {
		return Instance{}, false
	}
	return *i, true
}

func values(list []*Instance) []Instance {
	out := make([]Instance, len(list))
	for at, i := range list {
		out[at] = *i
	}
	return slices.Clip(out)
}
