package endpoint

import (
	"context"
	"fmt"
	"strings"

	"holdfast/registry"
)

// Forget removes the records of a volume's uses by CSI clients that are gone for good. It sends no call, so attachments
// and mounts stay. f.Confirm is the ID of the volume; without it, ErrDenied says what may be lost. ErrNotFound: no
// client uses the volume.
func (e *Endpoint) Forget(ctx context.Context, key registry.VolumeKey, f registry.Force) error {
	unlock, err := e.Locks.Lock(ctx, key, "the removal of uses of CSI clients")
	if err != nil {
		return err
	}
	defer unlock()
	found := false
	return registry.EnsureAll(ctx, e.State, func(view registry.View) (change registry.Change, err error) {
		var texts []string
		uses := view.EndpointUses(key)
		for _, use := range uses[:min(len(uses), registry.Batch)] {
			change.Delete = append(change.Delete, use.Key())
			texts = append(texts, use.String())
		}
		found = found || len(uses) > 0
		switch {
		case len(uses) == 0 && found: // all are removed
			return registry.Change{}, nil
		case len(uses) == 0:
			return registry.Change{}, registry.Errorf(registry.ErrNotFound,
				"no client of the CSI endpoint uses volume %q of plugin %s; for a list, run: holdfast plugin uses %s",
				key.External, key.Plugin, key.Plugin)
		case f.Confirm != string(key.External):
			return registry.Change{}, registry.Errorf(registry.ErrDenied, "a client of the CSI endpoint uses volume "+
				"%q (%s): without that record Holdfast may use the volume at the same time, and data may be lost; "+
				"make sure that nothing uses it, and add --confirm with the ID of the volume", key.External,
				strings.Join(texts, ", "))
		}
		change.Events = []registry.Event{{
			Kind: registry.EventForced, Plugin: key.Plugin, External: key.External, At: e.Now(),
			Detail: fmt.Sprintf("use by a client of the CSI endpoint (%s), by %s", strings.Join(texts, ", "), f.By),
		}}
		return change, nil
	})
}
