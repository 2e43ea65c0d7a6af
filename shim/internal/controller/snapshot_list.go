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

// listing is a list of a plugin's volumes or snapshots that is being read.
type listing[T any] struct {
	list           []T
	at             map[registry.ExternalID]int // positions in list
	entries, bytes int                         // of all pages
}

func newListing[T any]() listing[T] { return listing[T]{at: map[registry.ExternalID]int{}} }

// add adds an entry. It replaces an earlier one with the same ID: CSI allows duplicates if something is made or deleted
// while the pages are read. It returns an error if the list is too large.
func (l *listing[T]) add(id registry.ExternalID, entry T) error {
	text, err := json.Marshal(entry)
	if err != nil {
		return err
	}
	if i, twice := l.at[id]; twice {
		l.list[i] = entry
	} else {
		l.at[id], l.list = len(l.list), append(l.list, entry)
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
) ([]registry.VolumeSnapshot, error) {
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
	var found listing[registry.VolumeSnapshot]
	err = csi.ReadPages(func(token string) (string, error) {
		if token == "" {
			found = newListing[registry.VolumeSnapshot]()
		}
		page, next, err := s.driver.ListSnapshots(ctx, inst.InstanceKey, volume, token)
		for _, one := range page {
			if err := found.add(registry.ExternalID(one.ID), describe(id, one, recorded)); err != nil {
				return "", err
			}
		}
		return next, err
	})
	if err != nil {
		return nil, fmt.Errorf("list the snapshots of plugin %s: %w", id, err)
	}
	return found.list, nil
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
