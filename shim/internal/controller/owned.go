package controller

import (
	"context"
	"fmt"

	"holdfast/registry"
)

// Owned records that a node has set the ownership of the volume's files, or has kept the existing ownership.
func (m *Controller) Owned(
	ctx context.Context, key registry.VolumeKey, o registry.Ownership, result registry.OwnershipResult,
) error {
	_, err := registry.Ensure(ctx, m.State, func(view registry.View) (change registry.Change, err error) {
		v, known := view.VolumeByKey(key)
		if !known || v.Owned == o {
			return change, nil
		}
		v.Owned = o
		e := m.event(registry.EventOwnership, v, fmt.Sprintf("%s: %s", o, result))
		e.Role = registry.RoleNode
		return registry.Change{Put: []registry.Record{v}, Events: []registry.Event{e}}, nil
	})
	return err
}
