package doctor

import (
	"context"
	"fmt"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/hooks"
	"holdfast/registry"
)

// Intervals of a Watch.
const (
	watchEvery = 30 * time.Second
	watchGap   = 500 * time.Millisecond // between two inspections, however often Wake is called
)

// Watch inspects the mounts of published volumes. It records a mount that is lost, dead or hanging, and its recovery.
type Watch struct {
	// First is the time until the first inspection, unless Wake is called before. Set before Run.
	First time.Duration

	state   registry.State
	machine Machine
	layout  hooks.Layout
	now     func() time.Time
	logger  hclog.Logger
	wake    chan struct{}
}

// NewWatch returns a Watch that is started by Run.
func NewWatch(state registry.State, m Machine, l hooks.Layout, now func() time.Time, logger hclog.Logger) *Watch {
	return &Watch{state: state, machine: m, layout: l, now: now, logger: logger, wake: make(chan struct{}, 1)}
}

// Wake makes an inspection run soon: when a plugin ends, its mounts may end with it. It never blocks.
func (w *Watch) Wake() {
	select {
	case w.wake <- struct{}{}:
	default: // an inspection is due anyway
	}
}

// Run inspects after First, after each Wake, and every 30 seconds, until ctx ends. At most one inspection is in
// progress.
func (w *Watch) Run(ctx context.Context) error {
	w.pause(ctx, w.First, w.wake)
	for ctx.Err() == nil {
		if err := w.inspect(ctx); err != nil && ctx.Err() == nil {
			w.logger.Warn("cannot inspect the mounts of volumes; retrying", "in", watchEvery, "error", err)
		}
		w.pause(ctx, watchGap, nil)
		w.pause(ctx, watchEvery, w.wake)
	}
	return context.Cause(ctx)
}

// pause waits for d, a wake-up or the end of ctx.
func (w *Watch) pause(ctx context.Context, d time.Duration, wake <-chan struct{}) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-wake:
	case <-ctx.Done():
	}
}

// troubles holds the faults of the mounts of refs; an empty text means that there is none. A ref that could not be
// inspected has no entry.
type troubles map[registry.ClaimKey]string

// inspect inspects all published volumes once, and records changes.
func (w *Watch) inspect(ctx context.Context) error {
	var records Records
	err := w.state.View(ctx, func(v registry.View) error {
		records = Records{Refs: v.AllRefs(), Intents: v.Intents()}
		return nil
	})
	if err != nil {
		return err
	}
	refs := records.published(w.machine.Boot())
	found, err := w.inspectRefs(ctx, refs)
	changed := false
	for _, r := range refs {
		trouble, inspected := found[r.ClaimKey()]
		changed = changed || inspected && trouble != r.Trouble
	}
	if !changed {
		return err
	}
	_, storeErr := w.state.Commit(ctx, func(v registry.View) (registry.Change, error) {
		return w.troubleChange(v, refs, found), nil
	})
	if storeErr != nil {
		return fmt.Errorf("record what is wrong with mounts: %w", storeErr)
	}
	return err
}

// inspectRefs reads the mount table and inspects the mounts. If it returns an error, refs without an entry were not
// inspected.
func (w *Watch) inspectRefs(ctx context.Context, refs []registry.Ref) (troubles, error) {
	if len(refs) == 0 {
		return nil, nil
	}
	mounts, err := w.machine.Mounts(w.layout.MountRoot())
	if err != nil {
		return nil, err
	}
	mounted := map[string]bool{}
	for _, m := range mounts {
		mounted[m.Point] = true
	}
	found := troubles{}
	byPath := map[string]registry.Ref{}
	var paths []string
	for _, r := range refs {
		if lost := lostMount(r, mounted); lost != "" {
			found[r.ClaimKey()] = lost
			continue
		}
		byPath[r.Target.Host] = r
		paths = append(paths, r.Target.Host)
	}
	if len(paths) == 0 {
		return found, nil
	}
	infos, err := inspect(ctx, w.machine, paths)
	for path, info := range infos {
		r, trouble := byPath[path], info.Trouble()
		if r.Usage.Attachment == registry.BlockDevice && trouble == "" && !info.Block {
			trouble = "its block device is gone"
		}
		found[r.ClaimKey()] = trouble
	}
	return found, err
}

// lostMount says which mount of a publish is missing; empty: none.
func lostMount(r registry.Ref, mounted map[string]bool) string {
	if r.Usage.Attachment != registry.BlockDevice && !mounted[r.Target.Host] {
		return "it is not mounted any more"
	}
	for _, p := range r.Parts {
		if p.Mark == registry.MarkDone && !mounted[p.At] {
			return fmt.Sprintf("%q of it is not mounted any more", p.Path)
		}
	}
	return ""
}

// troubleChange returns the change that records the new faults of refs. It skips a ref that has changed since its
// inspection.
func (w *Watch) troubleChange(v registry.View, refs []registry.Ref, found troubles) (c registry.Change) {
	current := map[registry.ClaimKey]registry.Ref{}
	for _, r := range v.AllRefs() {
		current[r.ClaimKey()] = r
	}
	for _, old := range refs {
		trouble, inspected := found[old.ClaimKey()]
		r := current[old.ClaimKey()]
		if !inspected || trouble == old.Trouble || r.ModifyIndex != old.ModifyIndex {
			continue
		}
		if r.Trouble == "" {
			r.Troubled = w.now()
		}
		kind, detail := registry.EventMountLost, trouble+": stop the alloc and place it again"
		if trouble == "" {
			kind, detail, r.Troubled = registry.EventMountBack, "its mount answers again", time.Time{}
		}
		r.Trouble = trouble
		vol, known := v.VolumeByKey(r.Volume)
		name := vol.VolumeName()
		if !known { // another node has deleted the volume
			staging, _ := v.Staging(r.Volume)
			name = staging.Name
		}
		w.logger.Warn(string(kind), "volume", name, "alloc", r.Alloc, "path", r.Target.Host, "detail", detail)
		c.Put = append(c.Put, r)
		c.Events = append(c.Events, registry.Event{
			Kind: kind, Role: registry.RoleNode, Plugin: r.Volume.Plugin, Alloc: r.Alloc, Volume: name,
			External: r.Volume.External, Request: r.Request, Detail: detail, At: w.now(),
		})
	}
	return c
}
