package doctor

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"holdfast/internal/mount"
	"holdfast/registry"
)

// Inventory lists the mounts and directories below the mount root. It can be made before the records are read.
type Inventory struct {
	Mounts mount.Mounts
	Dirs   []mount.DirInfo
}

// NewInventory returns the current Inventory.
func NewInventory(m Machine, root string) (s Inventory, err error) {
	var mounts, dirs error
	var both sync.WaitGroup
	both.Go(func() { s.Mounts, mounts = m.Mounts(root) })
	both.Go(func() { s.Dirs, dirs = m.Dirs(root) })
	both.Wait()
	if err := errors.Join(mounts, dirs); err != nil {
		return Inventory{}, fmt.Errorf("examine %s: %w", root, err)
	}
	return s, nil
}

// Start marks records that are no longer certain, and removes empty directories, before a shim does anything else. It
// reports each other finding in the log and with an event. It unmounts nothing and calls no plugin. Mounts and records
// must not have changed since the Inventory was made.
func (d *Doctor) Start(ctx context.Context, s Inventory) ([]registry.Finding, error) {
	f := Facts{Layout: d.Layout, Boot: d.machine.Boot(), Now: d.Now(), Mounts: s.Mounts, Dirs: s.Dirs}
	findings, err := d.record(ctx, f)
	if err != nil {
		return nil, fmt.Errorf("record what is uncertain: %w", err)
	}
	d.carryOut(ctx, findings, registry.ActRemove, func(found *registry.Finding) error {
		return d.machine.RemoveDir(found.Path)
	})
	for _, found := range findings {
		if found.Kind != registry.FoundEmpty || found.Result != registry.RepairDone {
			d.Logger.Warn("found at start", "kind", found.Kind, "path", found.Path, "detail", found.Detail, "result",
				found.Result)
		}
	}
	return findings, nil
}

// record commits the marks and the events of the findings. A full disk does not prevent the start of a shim: every user
// of a volume checks its mount, so a missing mark costs only a message.
func (d *Doctor) record(ctx context.Context, f Facts) (findings []registry.Finding, err error) {
	err = commit(ctx, d.state, func(v registry.View) (registry.Change, error) {
		f.Records = RecordsOf(v, d.Node)
		findings = Examine(f)
		change := markChange(f.Records, findings, f.Now)
		change.Events = bounded(change.Events, f.Now)
		return change, nil
	})
	if err == nil {
		_, err = d.state.Commit(ctx, func(registry.View) (registry.Change, error) {
			return registry.Change{Events: bounded(reported(findings, f.Now), f.Now)}, nil
		})
	}
	if errors.Is(err, registry.ErrExhausted) {
		d.Logger.Warn("cannot record what was found at start", "error", err)
		err = nil
	}
	return findings, err
}

// reported returns the events of findings that Start only reports.
func reported(findings []registry.Finding, now time.Time) (events []registry.Event) {
	for _, f := range findings {
		hasEvents := f.Kind == registry.FoundUnhealthy
		if f.Action != registry.ActMark && f.Action != registry.ActRemove && !hasEvents {
			events = append(events, eventOf(f, now))
		}
	}
	return events
}

// bounded keeps the first maxEvents events, and counts the others.
func bounded(events []registry.Event, now time.Time) []registry.Event {
	if len(events) <= maxEvents {
		return events
	}
	return append(events[:maxEvents:maxEvents], registry.Event{
		Kind: registry.EventReconciled, Detail: fmt.Sprintf("and %d more: see holdfast doctor", len(events)-maxEvents),
		At: now,
	})
}
