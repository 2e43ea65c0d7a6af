package registry_test

import (
	"context"
	"time"

	"holdfast/registry"
)

// writer is a table with the commits that tests make of the change functions.
type writer struct {
	*registry.Registry
	log registry.State
	now func() time.Time
}

func newWriter(log registry.State, now func() time.Time) *writer {
	return &writer{registry.New(log), log, now}
}

func (w *writer) Put(ctx context.Context, i registry.Instance) (registry.Instance, error) {
	if _, err := w.PutAll(ctx, i); err != nil {
		return registry.Instance{}, err
	}
	err := w.log.View(ctx, func(v registry.View) error {
		i, _ = v.Instance(i.InstanceKey)
		return nil
	})
	return i, err
}

func (w *writer) PutAll(ctx context.Context, instances ...registry.Instance) (registry.Seq, error) {
	for _, i := range instances {
		if err := i.Valid(); err != nil {
			return 0, err
		}
	}
	return w.log.Commit(ctx, func(v registry.View) (registry.Change, error) {
		return registry.PutChange(v, w.now(), instances...), nil
	})
}

func (w *writer) Remove(ctx context.Context, keys ...registry.InstanceKey) error {
	_, err := w.log.Commit(ctx, func(v registry.View) (registry.Change, error) {
		return registry.RemoveChange(v, w.now(), keys...), nil
	})
	return err
}

func (w *writer) RemoveTask(ctx context.Context, t registry.TaskKey) error {
	_, err := w.log.Commit(ctx, func(v registry.View) (registry.Change, error) {
		return registry.RemoveTaskChange(v, w.now(), t), nil
	})
	return err
}

// SetHealth puts the instances with another health, as a heartbeat does. ErrNotFound: one of them is not registered.
func (w *writer) SetHealth(ctx context.Context, h registry.Health, keys ...registry.InstanceKey) (registry.Seq, error) {
	return w.log.Commit(ctx, func(v registry.View) (registry.Change, error) {
		var instances []registry.Instance
		for _, k := range keys {
			i, found := v.Instance(k)
			if !found {
				return registry.Change{}, registry.Errorf(registry.ErrNotFound, "instance %s is not registered", k)
			}
			i.Health = h
			instances = append(instances, i)
		}
		return registry.PutChange(v, w.now(), instances...), nil
	})
}

// members returns the instances of a plugin in a role, newest first.
func (w *writer) members(role registry.Role, id registry.PluginID) (found []registry.Instance) {
	for _, i := range w.All().Instances {
		if i.Role == role && i.Plugin == id {
			found = append(found, i)
		}
	}
	return found
}
