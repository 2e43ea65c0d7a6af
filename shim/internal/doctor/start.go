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

// maxEvents bounds the events of one look: the log of events keeps a limited number.
const maxEvents = 100

// Surroundings are what is below a directory. They can be looked at before there are records to compare them with.
type Surroundings struct {
	Mounts mount.Mounts
	Dirs   []mount.DirInfo
}

// Surveyed is the surroundings as they are now.
func Surveyed(m Machine, root string) (s Surroundings, err error) {
	var mounts, dirs error
	var both sync.WaitGroup
	both.Go(func() { s.Mounts, mounts = m.Mounts(root) })
	both.Go(func() { s.Dirs, dirs = m.Dirs(root) })
	both.Wait()
	if err := errors.Join(mounts, dirs); err != nil {
		return Surroundings{}, fmt.Errorf("look at %s: %w", root, err)
	}
	return s, nil
}

// Start does what needs no judgement, before anything else happens: it marks what is not certain any more, and removes empty directories.
// The rest it tells, in the log and in an event each. It unmounts nothing and asks nobody. Nobody has acted since the surroundings were surveyed.
func (d *Doctor) Start(ctx context.Context, s Surroundings) ([]registry.Finding, error) {
	f := Facts{Layout: d.Layout, Boot: d.machine.Boot(), Now: d.Now(), Mounts: s.Mounts, Dirs: s.Dirs}
	findings, err := d.begin(ctx, f)
	if err != nil {
		return nil, fmt.Errorf("record what is not certain: %w", err)
	}
	for _, found := range d.inOrder(findings, registry.ActRemove) {
		found.Result = result(d.machine.RemoveDir(found.Path))
	}
	for _, found := range findings {
		if found.Kind != registry.FoundEmpty || found.Result != registry.RepairDone {
			d.Logger.Warn("found at start", "kind", found.Kind, "path", found.Path, "detail", found.Detail, "result", found.Result)
		}
	}
	return findings, nil
}

// begin marks what is not certain, and tells the rest. A full disk keeps no shim from starting: whoever uses a volume looks at its mount
// first, so a mark that could not be made costs a word.
func (d *Doctor) begin(ctx context.Context, f Facts) (findings []registry.Finding, err error) {
	_, err = d.log.Commit(ctx, func(v registry.View) (registry.Change, error) {
		f.Records = RecordsOf(v)
		findings = Examine(f)
		change := Marked(f.Records, findings, f.Now)
		change.Events = bounded(change.Events, f.Now)
		return change, nil
	})
	if err == nil {
		_, err = d.log.Commit(ctx, func(registry.View) (registry.Change, error) {
			return registry.Change{Events: bounded(rest(findings, f.Now), f.Now)}, nil
		})
	}
	if errors.Is(err, registry.ErrExhausted) {
		d.Logger.Warn("what was found at start could not be recorded", "error", err)
		err = nil
	}
	return findings, err
}

// rest are the events of what is only told.
func rest(findings []registry.Finding, now time.Time) (events []registry.Event) {
	for _, f := range findings {
		known := f.Kind == registry.FoundUnhealthy // it has events of its own
		if f.Action != registry.ActMark && f.Action != registry.ActRemove && !known {
			events = append(events, told(f, now))
		}
	}
	return events
}

func bounded(events []registry.Event, now time.Time) []registry.Event {
	if len(events) <= maxEvents {
		return events
	}
	return append(events[:maxEvents:maxEvents], registry.Event{
		Kind: registry.EventReconciled, Detail: fmt.Sprintf("and %d more: see holdfast doctor", len(events)-maxEvents), At: now,
	})
}
