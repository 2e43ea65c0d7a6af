package controller

import (
	"context"
	"encoding/json"
	"fmt"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
)

// Limits of a list of a plugin's snapshots or volumes, so that it fits into a message (bootstrap.MaxMessage).
const (
	maxListed      = 20_000
	maxListedBytes = 12 << 20
)

// listSize is the size of a list that is being read.
type listSize struct{ entries, bytes int }

// add counts an entry. It returns an error if the list is too large.
func (l *listSize) add(entry any) error {
	text, err := json.Marshal(entry)
	if err != nil {
		return err
	}
	l.entries, l.bytes = l.entries+1, l.bytes+len(text)
	switch {
	case l.entries > maxListed:
		return registry.Errorf(registry.ErrExhausted, "the list has more than %d entries", maxListed)
	case l.bytes > maxListedBytes:
		return registry.Errorf(registry.ErrExhausted, "the list is larger than %d MiB", maxListedBytes>>20)
	}
	return nil
}

// ListAtPlugin lists the snapshots at the plugin, of one volume or of all. Those with a record have its fields.
func (s *Snapshots) ListAtPlugin(
	ctx context.Context, id registry.PluginID, volume registry.ExternalID,
) (list []registry.VolumeSnapshot, err error) {
	inst, err := s.volumes.capableController(ctx, id, false, registry.ListSnapshots,
		"plugin %s cannot list snapshots (it lacks %s)")
	if err != nil {
		return nil, err
	}
	all, err := s.List(ctx)
	if err != nil {
		return nil, err
	}
	recorded := map[registry.ExternalID]registry.VolumeSnapshot{}
	for _, snap := range all {
		if snap.Plugin == id && snap.External != "" {
			recorded[snap.External] = snap
		}
	}
	var size listSize
	err = csi.ReadPages(func(token string) (string, error) {
		if token == "" {
			list, size = nil, listSize{}
		}
		page, next, err := s.driver.ListSnapshots(ctx, inst.InstanceKey, volume, token)
		for _, found := range page {
			one := describe(id, found, recorded)
			if err := size.add(one); err != nil {
				return "", err
			}
			list = append(list, one)
		}
		return next, err
	})
	if err != nil {
		return nil, fmt.Errorf("list the snapshots of plugin %s: %w", id, err)
	}
	return list, nil
}

// describe returns the snapshot of an entry in the plugin's list, with the fields of its record if there is one.
func describe(
	id registry.PluginID, found csi.Snapshot, recorded map[registry.ExternalID]registry.VolumeSnapshot,
) registry.VolumeSnapshot {
	snap, known := recorded[registry.ExternalID(found.ID)]
	if !known {
		snap = registry.VolumeSnapshot{Plugin: id, External: registry.ExternalID(found.ID)}
	}
	snap.Source, snap.Size, snap.Taken, snap.Group = found.Volume, found.Size, found.Taken, found.Group
	if snap.State != registry.SnapshotDeleting {
		snap.State = registry.SnapshotProcessing
		if found.Ready {
			snap.State = registry.SnapshotReady
		}
	}
	return snap
}

// List returns all snapshots with a record.
func (s *Snapshots) List(ctx context.Context) (list []registry.VolumeSnapshot, err error) {
	err = s.volumes.State.View(ctx, func(view registry.View) error { list = view.Snapshots(); return nil })
	return list, err
}
