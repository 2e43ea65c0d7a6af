package doctor

import (
	"context"
	"time"

	"holdfast/registry"
)

// ask has a plugin list its volumes. A plugin that dies during it is not asked again.
func (d *Doctor) ask(ctx context.Context, in registry.Instance, r Records, limit time.Duration) (Listing, error) {
	l, failed := ask(ctx, d.Lister, in, r, limit)
	if err := d.Suspended.Failed(ctx, d.log, in, failed, d.Now()); err != nil {
		d.Logger.Warn("that a plugin died during a call is not recorded", "plugin", in.Plugin, "error", err)
	}
	return l, failed
}
