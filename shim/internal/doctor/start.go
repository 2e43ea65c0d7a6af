package doctor

import (
	"context"
	"errors"
	"fmt"
	"time"

	"holdfast/registry"
)

// Start marks records that are no longer certain, and removes empty directories, before a shim does anything else. It
// reports the other findings in the log and, unless a plugin's report has an event already, with events. It unmounts
// nothing and calls no plugin. Mounts and records must not change meanwhile.
func (d *Doctor) Start(ctx context.Context) ([]registry.Finding, error) {
	f := Facts{Layout: d.Layout, Boot: d.machine.Boot(), Now: d.Now()}
	var err error
	if f.Mounts, err = d.machine.Mounts(d.Layout.MountRoot()); err == nil {
		f.Dirs, err = d.machine.Dirs(d.Layout.MountRoot())
	}
	if err != nil {
		return nil, fmt.Errorf("examine %s: %w", d.Layout.MountRoot(), err)
	}
	findings, err := d.recordStart(ctx, f)
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

// recordStart commits the marks and the events of the findings. A full disk does not prevent the start of a shim: every
// user of a volume checks its mount, so a missing mark costs only a message.
func (d *Doctor) recordStart(ctx context.Context, f Facts) (findings []registry.Finding, err error) {
	err = commit(ctx, d.state, func(v registry.View) (registry.Change, error) {
		f.Records = RecordsOf(v, d.Node)
		findings = Examine(f)
		change := markChange(f.Records, findings, f.Now)
		change.Events = limitEvents(change.Events, f.Now)
		return change, nil
	})
	if err == nil {
		_, err = d.state.Commit(ctx, func(registry.View) (registry.Change, error) {
			return registry.Change{Events: limitEvents(reportEvents(findings, f.Now), f.Now)}, nil
		})
	}
	if errors.Is(err, registry.ErrExhausted) {
		d.Logger.Warn("cannot record what was found at start", "error", err)
		err = nil
	}
	return findings, err
}

// reportEvents returns the events of findings that Start only reports.
func reportEvents(findings []registry.Finding, now time.Time) (events []registry.Event) {
	for _, f := range findings {
		reported := f.Kind == registry.FoundUnhealthy // had an event when the plugin reported it
		if f.Action != registry.ActMark && f.Action != registry.ActRemove && !reported {
			events = append(events, eventOf(f, now))
		}
	}
	return events
}

// maxEvents is the limit of events of one commit.
const maxEvents = 100

// limitEvents keeps the first maxEvents events, and counts the others.
func limitEvents(events []registry.Event, now time.Time) []registry.Event {
	if len(events) <= maxEvents {
		return events
	}
	return append(events[:maxEvents:maxEvents], registry.Event{
		Kind: registry.EventReconciled, Detail: fmt.Sprintf("and %d more: see holdfast doctor", len(events)-maxEvents),
		At: now,
	})
}
