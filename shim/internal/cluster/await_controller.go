package cluster

import (
	"context"
	"sync"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// Table returns the table of plugins for the calls of this node. A wait for a controller ends once another node becomes
// the plugin's executor.
func (e *Executors) Table(all intent.Plugins) intent.Plugins { return table{all, e} }

type table struct {
	intent.Plugins
	executors *Executors
}

// Await implements intent.Plugins.
func (t table) Await(ctx context.Context, role registry.Role, id registry.PluginID) (registry.Instance, error) {
	i, found := t.Find(role, id)
	if role != registry.RoleController || found && i.Health.State == registry.Healthy {
		return t.Plugins.Await(ctx, role, id)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	var watching sync.WaitGroup
	watching.Go(func() { cancel(t.executors.awaitOther(ctx, id)) })
	defer watching.Wait()
	defer cancel(nil)
	return t.Plugins.Await(ctx, role, id)
}

// awaitOther waits until another node is the executor of the plugin, and returns an error that names that node. If ctx
// ends first, it returns the cause.
func (e *Executors) awaitOther(ctx context.Context, plugin registry.PluginID) error {
	for {
		changed := e.state.copy.changed.next()
		err := e.state.View(ctx, func(v registry.View) error {
			executor, _ := v.Executor(plugin)
			if executor.Holder == "" || executor.Holder == e.state.node {
				return nil
			}
			_, err := e.Check(v, registry.ExecutorKey{Plugin: plugin})
			return err
		})
		if err != nil {
			return err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}
