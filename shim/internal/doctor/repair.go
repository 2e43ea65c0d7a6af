package doctor

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"holdfast/registry"
)

// Limits of repairing.
const (
	laneLimit = 2 * time.Second
	undoLimit = 10 * time.Second // how long the plugins' answers are waited for
	undoPoll  = 20 * time.Millisecond
)

// Repair carries out the plan that the digest names, each step in the order in which it is safe: marks; unmounts of what nobody uses, so
// that nothing stands on what is taken down after it; adoptions; what plugins are asked for; directories. An empty digest means the plan
// of now. ErrConflict: what is there has changed since the plan was made, and nothing was done. Each finding of the answer has its
// Result.
func (d *Doctor) Repair(ctx context.Context, digest string) (registry.Diagnosis, error) {
	if !d.repairing.TryLock() {
		return registry.Diagnosis{}, registry.Errorf(registry.ErrConflict, "another repair is under way; wait for it, then look again")
	}
	defer d.repairing.Unlock()
	f, err := d.gather(ctx)
	if err != nil {
		return registry.Diagnosis{}, err
	}
	r := repair{Doctor: d, facts: f, findings: Examine(f)}
	plan := Digest(r.findings)
	if digest != "" && digest != plan {
		return registry.Diagnosis{}, changedSince()
	}
	out := registry.Diagnosis{Digest: plan, Repaired: true}
	if err := r.mark(ctx, plan); err != nil {
		return registry.Diagnosis{}, err
	}
	for _, step := range []func(context.Context){r.unmount, r.adopt, r.undo, r.remove} {
		if ctx.Err() == nil {
			step(ctx)
		}
	}
	r.tell(ctx)
	out.Findings = r.findings
	return out, ctx.Err()
}

func changedSince() error {
	return registry.Errorf(registry.ErrConflict, "what is there has changed since; look again")
}

// repair is one of them.
type repair struct {
	*Doctor
	facts    Facts
	findings []registry.Finding
}

// mark makes the marks, if the plan is still the same by the records of this moment.
func (r *repair) mark(ctx context.Context, plan string) error {
	_, err := r.log.Commit(ctx, func(v registry.View) (registry.Change, error) {
		now := r.facts
		now.Records = RecordsOf(v)
		if Digest(Examine(now)) != plan {
			return registry.Change{}, changedSince()
		}
		change := Marked(now.Records, r.findings, r.Now())
		change.Events = bounded(change.Events, r.Now())
		return change, nil
	})
	if err != nil {
		return fmt.Errorf("record what is not certain: %w", err)
	}
	for _, f := range r.inOrder(r.findings, registry.ActMark) {
		f.Result = registry.RepairDone
	}
	return nil
}

// unmount takes off what no record knows and nobody uses.
func (r *repair) unmount(ctx context.Context) {
	stacks := map[string]int{}
	for _, m := range r.facts.Mounts {
		stacks[m.Point]++
	}
	for _, f := range r.inOrder(r.findings, registry.ActUnmount) {
		f.Result = result(r.takeOff(ctx, f.Path, stacks[f.Path]))
	}
}

// result is an error for people.
func result(err error) string {
	if err == nil {
		return registry.RepairDone
	}
	return "not done: " + err.Error()
}

// takeOff unmounts all that was found at a path, one by one, if it is still nobody's and nobody uses it. Then its directories go, if they
// are empty.
func (r *repair) takeOff(ctx context.Context, path string, stacked int) error {
	for range stacked {
		if err := r.free(ctx, path); err != nil {
			return err
		}
		if err := r.machine.Unmount(ctx, path); err != nil {
			return err
		}
	}
	left, err := r.stack(path)
	if err != nil {
		return err
	}
	if left > 0 {
		return registry.Errorf(registry.ErrConflict, "something was mounted there meanwhile; look again")
	}
	if at := placesOf(r.Layout).of(path); r.machine.RemoveDir(path) == nil && (at == target || at == part) {
		_ = r.machine.RemoveDir(filepath.Dir(path)) // what is left is found by the next look
	}
	return nil
}

// free is nil if the path is still in no record, explained by no claim, and used by nobody.
func (r *repair) free(ctx context.Context, path string) error {
	now := r.facts
	records, err := r.records(ctx)
	if err != nil {
		return err
	}
	now.Records = records
	j := newJudge(now)
	if covered(path, j.known) || covered(path, j.expected) {
		return registry.Errorf(registry.ErrConflict, "a record knows it by now; look again")
	}
	users, err := r.machine.Users([]string{path})
	if err != nil {
		return fmt.Errorf("who uses it cannot be said: %w", err)
	}
	if len(users[path]) > 0 {
		return registry.Errorf(registry.ErrConflict, "it is used by now: %s", users[path][0].Text)
	}
	return nil
}

// stack is how many mounts are at a path.
func (r *repair) stack(path string) (n int, err error) {
	mounts, err := r.machine.Mounts(r.Layout.MountRoot())
	for _, m := range mounts {
		if m.Point == path {
			n++
		}
	}
	return n, err
}

// adopt records what is staged and was not recorded, now that nothing stands on it.
func (r *repair) adopt(ctx context.Context) {
	for _, f := range r.inOrder(r.findings, registry.ActAdopt) {
		f.Result = result(r.adoptOne(ctx, f))
	}
}

func (r *repair) adoptOne(ctx context.Context, f *registry.Finding) error {
	leave, err := r.enter(ctx, f.Volume)
	if err != nil {
		return err
	}
	defer leave()
	if err := r.free(ctx, f.Path); err != nil {
		return err
	}
	_, err = r.log.Commit(ctx, func(v registry.View) (registry.Change, error) {
		now := r.facts
		now.Records = RecordsOf(v)
		j := newJudge(now)
		if _, still := j.adoptable(f.Path); !still || covered(f.Path, j.known) || covered(f.Path, j.expected) {
			return registry.Change{}, changedSince()
		}
		return Adopted(now.Records, r.facts.Boot, []registry.Finding{*f}, r.Now()), nil
	})
	return err
}

// enter enters the volume's lock.
func (r *repair) enter(ctx context.Context, key registry.VolumeKey) (leave func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, laneLimit)
	defer cancel()
	return r.Locks.Lock(ctx, key, "holdfast doctor --repair")
}

// undo has plugins take down what nobody claims, what was adopted included, and waits a moment for that.
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
		r.await(ctx, list)
	}
}

// await waits until the volumes have no placement any more, and says of which they still have.
func (r *repair) await(ctx context.Context, list []*registry.Finding) {
	ctx, cancel := context.WithTimeout(ctx, undoLimit)
	defer cancel()
	for {
		placed, err := r.placed(context.WithoutCancel(ctx))
		open := false
		for _, f := range list {
			f.Result = result(err)
			if placed[f.Volume] {
				open = true
				f.Result = fmt.Sprintf("begun: plugin %s is asked to take it down until it has; see holdfast volume status", f.Volume.Plugin)
			}
		}
		if !open || err != nil {
			return
		}
		select {
		case <-time.After(undoPoll):
		case <-ctx.Done():
			return
		}
	}
}

func (r *repair) placed(ctx context.Context) (map[registry.VolumeKey]bool, error) {
	records, err := r.records(ctx)
	placed := map[registry.VolumeKey]bool{}
	for _, p := range records.Placements {
		placed[p.Volume] = true
	}
	return placed, err
}

// remove removes directories that are empty. That of a volume that is known might be about to be used: its lock says.
func (r *repair) remove(ctx context.Context) {
	byPath := newJudge(r.facts).stageable
	for _, f := range r.inOrder(r.findings, registry.ActRemove) {
		f.Result = result(r.removeOne(ctx, f.Path, byPath[f.Path]))
	}
}

func (r *repair) removeOne(ctx context.Context, path string, v registry.Volume) error {
	if v.External != "" {
		leave, err := r.enter(ctx, v.VolumeKey())
		if err != nil {
			return err
		}
		defer leave()
	}
	now := r.facts
	var err error
	if now.Records, err = r.records(ctx); err != nil {
		return err
	}
	if j := newJudge(now); covered(path, j.known) || j.awaited(path) {
		return registry.Errorf(registry.ErrConflict, "a record knows it by now; look again")
	}
	return r.machine.RemoveDir(path)
}

// tell writes down what became of the rest; of marks their own commit tells.
func (r *repair) tell(ctx context.Context) {
	var events []registry.Event
	for _, f := range r.findings {
		if f.Result != "" && f.Action != registry.ActMark && f.Action != registry.ActRemove {
			events = append(events, told(f, r.Now()))
		}
	}
	_, err := r.log.Commit(context.WithoutCancel(ctx), func(registry.View) (registry.Change, error) {
		return registry.Change{Events: bounded(events, r.Now())}, nil
	})
	if err != nil {
		r.Logger.Warn("what was repaired is not among the events", "error", err)
	}
}
