package doctor

import (
	"context"

	"holdfast/registry"
)

// recordHealth records what a plugin's list says of the health of its volumes. A plugin that does not declare that it
// says so may have said so in an earlier version: that is dropped.
func (d *Doctor) recordHealth(ctx context.Context, l Listing) error {
	_, err := registry.Ensure(ctx, d.log, func(view registry.View) (all registry.Change, err error) {
		for id, listed := range l.Volumes {
			v, known := view.VolumeByKey(registry.VolumeKey{Plugin: l.Plugin, External: id})
			switch {
			case known && !l.Conditions && v.Health.Controller.Abnormal:
				all.Put = append(all.Put, v.WithoutCondition(registry.RoleController))
			case known && l.Conditions && listed.Condition != nil:
				all = all.And(v.HealthChange(registry.RoleController, *listed.Condition, d.Now()))
			}
		}
		all.Events = bounded(all.Events, d.Now())
		return all, nil
	})
	return err
}
