package controller

import (
	"context"
	"fmt"

	"holdfast/registry"
)

// Capacity asks the plugin's controller for its free space.
func (m *Controller) Capacity(ctx context.Context, q registry.CapacityQuery) (registry.PluginCapacity, error) {
	inst, err := m.capableController(ctx, q.Plugin, false, registry.GetCapacity,
		"plugin %s does not report its capacity (it lacks %s)")
	if err != nil {
		return registry.PluginCapacity{}, err
	}
	if len(q.Topology) > 0 && !inst.Fingerprint.Has(registry.PluginTopology) {
		return registry.PluginCapacity{}, registry.Errorf(registry.ErrUnsupported,
			"plugin %s knows no topology (it lacks %s); ask without one", q.Plugin, registry.PluginTopology)
	}
	answer, err := m.driver.Capacity(ctx, inst.InstanceKey, q)
	if err != nil {
		return registry.PluginCapacity{}, fmt.Errorf("capacity of plugin %s: %w", q.Plugin, err)
	}
	if answer.Available < 0 {
		return registry.PluginCapacity{}, registry.Errorf(registry.ErrInternal,
			"plugin %s reports a capacity of %d bytes", q.Plugin, answer.Available)
	}
	return answer, nil
}
