package doctor

import (
	"cmp"
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"holdfast/registry"
)

// Limits of a repair.
const (
	lockLimit = 2 * time.Second
	undoLimit = 10 * time.Second // for the plugins' answers
	undoPoll  = 20 * time.Millisecond
)

// errStale means that Repair did nothing because its plan differs from the current one.
var errStale = registry.Errorf(registry.ErrConflict,
	"something has changed since the plan was made; run holdfast doctor again")

// Repair carries out the plan with this digest, in an order that makes each step safe: marks, unmounts of unused
// mounts, adoptions, calls to plugins, directories. Unmounts come before the calls, so that no mount is left above a
// volume that a plugin takes down. An empty digest means the current plan. ErrConflict means that something has changed
// since the plan was made, and that Repair did nothing. Each finding of the result has its Result.
func (d *Doctor) Repair(ctx context.Context, digest string) (registry.Diagnosis, error) {
	if !d.repairing.TryLock() {
		return registry.Diagnosis{}, registry.Errorf(registry.ErrConflict,
			"another repair is in progress; wait for it, then run holdfast doctor again")
	}
	defer d.repairing.Unlock()
	facts, err := d.collect(ctx)
	if err != nil {
		return registry.Diagnosis{}, err
	}
	r := repair{Doctor: d, facts: facts, findings: Examine(facts)}
	plan := Digest(r.findings)
	if digest != "" && digest != plan {
		return registry.Diagnosis{}, errStale
	}
	if err := r.mark(ctx, plan); err != nil {
		return registry.Diagnosis{}, err
	}
	before := newExaminer(facts)
	r.carryOut(ctx, r.findings, registry.ActUnmount, func(f *registry.Finding) error {
		if f.Volume != (registry.VolumeKey{}) { // the mount is in the way of a claim, which is tried again
			unlock, err := r.lock(ctx, f.Volume)
			if err != nil {
				return err
			}
			defer unlock()
		}
		return r.unmountAll(ctx, f.Path, f.Volume, before.stacks[f.Path])
	})
	r.carryOut(ctx, r.findings, registry.ActAdopt, func(f *registry.Finding) error { return r.adopt(ctx, f) })
	if ctx.Err() == nil {
		r.undo(ctx)
	}
	r.carryOut(ctx, r.findings, registry.ActRemove, func(f *registry.Finding) error {
		return r.remove(ctx, f.Path, before.stageable[f.Path])
	})
	r.recordEvents(ctx)
	return registry.Diagnosis{Digest: plan, Repaired: true, Findings: r.findings}, ctx.Err()
}

// repair is one run of Repair.
type repair struct {
	*Doctor
	facts    Facts
	findings []registry.Finding
}

// mark commits the marks, if the current records still lead to the same plan.
func (r *repair) mark(ctx context.Context, plan string) error {
	err := commit(ctx, r.state, func(v registry.View) (registry.Change, error) {
		now := r.facts
		now.Records = RecordsOf(v, r.Node)
		if Digest(Examine(now)) != plan {
			return registry.Change{}, errStale
		}
		change := markChange(now.Records, r.findings, r.Now())
		change.Events = limitEvents(change.Events, r.Now())
		return change, nil
	})
	if err != nil {
		return fmt.Errorf("record what is uncertain: %w", err)
	}
	for _, f := range r.inOrder(r.findings, registry.ActMark) {
		f.Result = registry.RepairDone
	}
	return nil
}

// inOrder returns the findings with the given action in the order of their execution: parts and publishes before the
// staged volume below them, children before their parents.
func (d *Doctor) inOrder(findings []registry.Finding, action registry.FindingAction) (list []*registry.Finding) {
	for i := range findings {
		if findings[i].Action == action {
			list = append(list, &findings[i])
		}
	}
	shapes := shapesOf(d.Layout)
	rank := func(f *registry.Finding) int {
		switch shapes.kind(f.Path) {
		case partPath:
			return 0
		case stagingPath:
			return 2
		}
		return 1
	}
	slices.SortStableFunc(list, func(a, b *registry.Finding) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)),
			cmp.Compare(strings.Count(b.Path, "/"), strings.Count(a.Path, "/")), cmp.Compare(a.Path, b.Path))
	})
	return list
}

// carryOut calls do for each finding with the given action, in order, until ctx ends. It sets the Result of each.
func (d *Doctor) carryOut(
	ctx context.Context, findings []registry.Finding, action registry.FindingAction, do func(*registry.Finding) error,
) {
	for _, f := range d.inOrder(findings, action) {
		if ctx.Err() == nil {
			f.Result = result(do(f))
		}
	}
}

// result returns the Result of a step.
func result(err error) string {
	if err == nil {
		return registry.RepairDone
	}
	return "not done: " + err.Error()
}

// currentExaminer returns an examiner of the collected facts with the current records.
func (r *repair) currentExaminer(ctx context.Context) (*examiner, error) {
	facts := r.facts
	var err error
	facts.Records, err = r.records(ctx)
	return newExaminer(facts), err
}

// unmountAll unmounts the mounts that were found at a path, one by one, as long as the path stays unknown and unused.
// Then it removes the directories of the path, if they are empty. locked is as in checkUnused.
func (r *repair) unmountAll(ctx context.Context, path string, locked registry.VolumeKey, stacked int) error {
	for range stacked {
		err := r.checkUnused(ctx, path, locked)
		if err == nil {
			err = r.machine.Unmount(ctx, path)
		}
		if err != nil {
			return err
		}
	}
	mounts, err := r.machine.Mounts(r.Layout.MountRoot())
	if err != nil {
		return err
	}
	if len(mounts.Stack(path)) > 0 {
		return registry.Errorf(registry.ErrConflict, "something was mounted there meanwhile; run holdfast doctor again")
	}
	kind := shapesOf(r.Layout).kind(path)
	if r.machine.RemoveDir(path) == nil && (kind == targetPath || kind == partPath) {
		_ = r.machine.RemoveDir(filepath.Dir(path)) // if it stays, the next examination finds it
	}
	return nil
}

// checkUnused returns an error if a record or claim now names the path, or if something uses it. A claim on the locked
// volume does not count, because no call for that volume begins meanwhile; zero: none is locked.
func (r *repair) checkUnused(ctx context.Context, path string, locked registry.VolumeKey) error {
	e, err := r.currentExaminer(ctx)
	if err != nil {
		return err
	}
	claim, claimed := e.claimants[path]
	waits := claimed && claim.Volume == locked
	if covers(e.known, path) || covers(e.expected, path) && !waits {
		return registry.Errorf(registry.ErrConflict, "a record names it by now; run holdfast doctor again")
	}
	users, err := r.machine.Users([]string{path})
	if err != nil {
		return fmt.Errorf("find its users: %w", err)
	}
	if len(users[path]) > 0 {
		return registry.Errorf(registry.ErrConflict, "it is in use by now: %s", users[path][0].Text)
	}
	return nil
}

// adopt records a volume that is staged without a record. It runs after the unmounts, so nothing uses its staging any
// more.
func (r *repair) adopt(ctx context.Context, f *registry.Finding) error {
	unlock, err := r.lock(ctx, f.Volume)
	if err != nil {
		return err
	}
	defer unlock()
	if err := r.checkUnused(ctx, f.Path, registry.VolumeKey{}); err != nil {
		return err
	}
	return commit(ctx, r.state, func(v registry.View) (registry.Change, error) {
		now := r.facts
		now.Records = RecordsOf(v, r.Node)
		e := newExaminer(now)
		if _, still := e.adoptable(f.Path); !still || covers(e.known, f.Path) || covers(e.expected, f.Path) {
			return registry.Change{}, errStale
		}
		return adoptChange(now.Records, r.Node, r.facts.Boot, *f, r.Now()), nil
	})
}

// lock locks a volume.
func (r *repair) lock(ctx context.Context, key registry.VolumeKey) (unlock func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, lockLimit)
	defer cancel()
	return r.Locks.Lock(ctx, key, "holdfast doctor --repair")
}

// undo asks plugins to take down volumes without a claim, adopted ones included. It waits for at most undoLimit.
func (r *repair) undo(ctx context.Context) {
	list := r.inOrder(r.findings, registry.ActUndo)
	for _, f := range r.inOrder(r.findings, registry.ActAdopt) {
		if f.Result == registry.RepairDone {
			list = append(list, f)
		}
	}
	if len(list) == 0 {
		return
	}
	if r.Undo == nil {
		for _, f := range list {
			f.Result = fmt.Sprintf("recorded: the next shim asks plugin %s to take it down", f.Volume.Plugin)
		}
		return
	}
	err := r.Undo(ctx)
	for _, f := range list {
		f.Result = result(err)
	}
	if err == nil {
		r.awaitUndone(ctx, list)
	}
}

// awaitUndone waits until none of the volumes is attached or staged, and sets the results.
func (r *repair) awaitUndone(ctx context.Context, list []*registry.Finding) {
	ctx, cancel := context.WithTimeout(ctx, undoLimit)
	defer cancel()
	for {
		records, err := r.records(context.WithoutCancel(ctx))
		placed := records.placed()
		pending := false
		for _, f := range list {
			f.Result = result(err)
			if _, still := placed[f.Volume]; still {
				pending = true
				f.Result = fmt.Sprintf("begun: plugin %s is asked to take it down until it succeeds; "+
					"see holdfast volume status", f.Volume.Plugin)
			}
		}
		if !pending || err != nil {
			return
		}
		select {
		case <-time.After(undoPoll):
		case <-ctx.Done():
			return
		}
	}
}

// remove removes an empty directory. If it is the staging directory of a volume v, remove locks v, because a call may
// be about to use the directory.
func (r *repair) remove(ctx context.Context, path string, v registry.Volume) error {
	if v.External != "" {
		unlock, err := r.lock(ctx, v.VolumeKey())
		if err != nil {
			return err
		}
		defer unlock()
	}
	e, err := r.currentExaminer(ctx)
	if err != nil {
		return err
	}
	if covers(e.known, path) || e.awaited(path) {
		return registry.Errorf(registry.ErrConflict, "a record names it by now; run holdfast doctor again")
	}
	return r.machine.RemoveDir(path)
}

// recordEvents commits the events of the repairs. Marks are committed with their events, and removals have no events.
func (r *repair) recordEvents(ctx context.Context) {
	var events []registry.Event
	for _, f := range r.findings {
		if f.Result != "" && f.Action != registry.ActMark && f.Action != registry.ActRemove {
			events = append(events, eventOf(f, r.Now()))
		}
	}
	_, err := r.state.Commit(context.WithoutCancel(ctx), func(registry.View) (registry.Change, error) {
		return registry.Change{Events: limitEvents(events, r.Now())}, nil
	})
	if err != nil {
		r.Logger.Warn("cannot record the events of a repair", "error", err)
	}
}
