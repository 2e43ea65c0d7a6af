package registry

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"time"
)

// Registry is the live table of instances. Reads take no lock and wait for nobody; what they return is as of the last change that
// was applied, and its maps and slices are shared with other readers: Clone before changing them.
//
// A write returns once it is durable, published here and told to the Feed. The Log calls Applied for it, so whoever builds a
// Registry registers that with the Log.
type Registry struct {
	log     Log
	now     func() time.Time
	current atomic.Pointer[table]
	writing sync.Mutex // of Load and Applied: held to compute the next table, never while waiting
}

// New is an empty table. now stamps what people read.
func New(log Log, now func() time.Time) *Registry {
	r := &Registry{log: log, now: now}
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
	if !touchesInstances(a.Change) {
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

// Put registers an instance, or supersedes it in its rank, and returns it as stored. One that is the same changes nothing.
func (r *Registry) Put(ctx context.Context, i Instance) (Instance, error) {
	if err := i.Valid(); err != nil {
		return Instance{}, err
	}
	var stored Instance
	var changes bool
	at, err := r.commit(ctx, "put "+i.InstanceKey.String(), func(v View) (Change, error) {
		known, _ := v.Instance(i.InstanceKey)
		c := PutChange(v, r.now(), i)
		if changes = len(c.Put) > 0; changes {
			stored = c.Put[0].(Instance)
		} else {
			stored = known
		}
		stored.CreateIndex = known.CreateIndex
		return c, nil
	})
	if err != nil {
		return Instance{}, err
	}
	if changes {
		stored = stored.Indexed(stored.CreateIndex, at).(Instance)
	}
	return stored, nil
}

// PutAll puts instances in one transaction, as the two roles of a monolith need it, and returns its index.
func (r *Registry) PutAll(ctx context.Context, instances ...Instance) (Seq, error) {
	for _, i := range instances {
		if err := i.Valid(); err != nil {
			return 0, err
		}
	}
	return r.commit(ctx, "put instances", func(v View) (Change, error) { return PutChange(v, r.now(), instances...), nil })
}

// Remove removes an instance. One that is not there is no error and changes nothing.
func (r *Registry) Remove(ctx context.Context, k InstanceKey) error {
	_, err := r.RemoveAll(ctx, k)
	return err
}

// RemoveAll removes instances in one transaction and returns its index.
func (r *Registry) RemoveAll(ctx context.Context, keys ...InstanceKey) (Seq, error) {
	return r.commit(ctx, "remove instances", func(v View) (Change, error) { return RemoveChange(v, r.now(), keys...), nil })
}

// RemoveTask removes every instance that a task serves, in one transaction.
func (r *Registry) RemoveTask(ctx context.Context, t TaskKey) error {
	_, err := r.commit(ctx, "remove the instances of "+t.String(), func(v View) (Change, error) { return RemoveTaskChange(v, r.now(), t), nil })
	return err
}

// SetHealth records a judgement of an instance. ErrNotFound: it is not there (any more).
func (r *Registry) SetHealth(ctx context.Context, k InstanceKey, h Health) error {
	_, err := r.SetHealthAll(ctx, h, k)
	return err
}

// SetHealthAll records one judgement of several instances, as the two roles of a monolith share their process, in one transaction,
// and returns its index. ErrNotFound: one of them is not there; nothing has changed then.
func (r *Registry) SetHealthAll(ctx context.Context, h Health, keys ...InstanceKey) (Seq, error) {
	if err := h.valid(); err != nil {
		return 0, err
	}
	return r.commit(ctx, "set the health of instances", func(v View) (Change, error) {
		for _, k := range keys {
			if _, found := v.Instance(k); !found {
				return Change{}, Errorf(ErrNotFound, "instance %s is not registered", k)
			}
		}
		return HealthChange(v, r.now(), h, keys...), nil
	})
}

func (r *Registry) commit(ctx context.Context, what string, decide func(View) (Change, error)) (Seq, error) {
	at, err := r.log.Commit(ctx, decide)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", what, err)
	}
	return at, nil
}

// Find is the active instance of a plugin in a role: the newest healthy one; if none is healthy, the newest.
func (r *Registry) Find(role Role, id PluginID) (Instance, bool) {
	return found(activeOf(r.current.Load().members(role, id)))
}

// Get is one instance.
func (r *Registry) Get(k InstanceKey) (Instance, bool) {
	return found(member(r.current.Load().members(k.Role, k.Plugin), k))
}

// List is the instances of a plugin in a role, newest first.
func (r *Registry) List(role Role, id PluginID) []Instance {
	return values(r.current.Load().members(role, id))
}

// ForAlloc is the instances that an alloc's tasks serve, by role, plugin and task.
func (r *Registry) ForAlloc(id AllocID) []Instance { return values(r.current.Load().allocs.get(id)) }

// All is every instance as of one index.
func (r *Registry) All() Snapshot {
	t := r.current.Load()
	return Snapshot{Index: t.index, Instances: values(t.inOrder())}
}

// Index is that of the last change that was applied, of instances or of anything else.
func (r *Registry) Index() Seq { return r.current.Load().index }

// Await is the active instance once it is healthy. If ctx ends first it is an ErrUnavailable that says what there is instead.
func (r *Registry) Await(ctx context.Context, role Role, id PluginID) (Instance, error) {
	for {
		t := r.current.Load()
		members := t.members(role, id)
		if ctx.Err() != nil {
			return Instance{}, Errorf(ErrUnavailable, "plugin %q has no healthy instance in role %s: %s: %w", id, role, situation(members), context.Cause(ctx))
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
func situation(members []*Instance) string {
	active := activeOf(members)
	if active == nil {
		return "none is registered"
	}
	s := fmt.Sprintf("%d registered, the newest (%s) is %s: %s", len(members), active.TaskKey(), active.Health.State, active.Health.Cause)
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
