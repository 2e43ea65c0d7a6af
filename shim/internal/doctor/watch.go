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
	watchGap   = 500 * time.Millisecond // between two looks, however often it is rung for
)

// Watch inspects the mounts of published volumes. It records when one is lost, dead or hangs, and when it works again.
type Watch struct {
	// First is the time until the first inspection, unless Wake is called before. Set before Run.
	First time.Duration

	log     registry.State
	machine Machine
	layout  hooks.Layout
	now     func() time.Time
	logger  hclog.Logger
	wake    chan struct{}
}

// NewWatch returns a Watch that is started by Run.
func NewWatch(log registry.State, m Machine, l hooks.Layout, now func() time.Time, logger hclog.Logger) *Watch {
	return &Watch{log: log, machine: m, layout: l, now: now, logger: logger, wake: make(chan struct{}, 1)}
}

// Wake causes an inspection soon: when a plugin ends, its mounts may end with it. It never blocks.
func (w *Watch) Wake() {
	select {
	case w.wake <- struct{}{}:
	default: // one is due anyway
	}
}

// Run inspects after First, after each Wake, and every 30 seconds, until ctx ends. At most one inspection is in progress.
func (w *Watch) Run(ctx context.Context) error {
	w.pause(ctx, w.First, w.wake)
	for ctx.Err() == nil {
		if err := w.look(ctx); err != nil && ctx.Err() == nil {
			w.logger.Warn("the mounts of volumes cannot be looked at", "error", err)
		}
		if !w.pause(ctx, watchGap, nil) {
			break
		}
		w.pause(ctx, watchEvery, w.wake)
	}
	return context.Cause(ctx)
}

// pause waits for d or a wake-up. It returns false when ctx has ended.
func (w *Watch) pause(ctx context.Context, d time.Duration, wake <-chan struct{}) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-wake:
	case <-ctx.Done():
		return false
	}
	return true
}

// troubles is what is wrong with the mounts of refs; empty: nothing. What could not be looked at is not in it.
type troubles map[registry.ClaimKey]string

// look looks at all mounts once, and records what is new.
func (w *Watch) look(ctx context.Context) error {
	var records Records
	err := w.log.View(ctx, func(v registry.View) error {
		records = Records{Refs: v.AllRefs(), Intents: v.Intents()}
		return nil
	})
	if err != nil {
		return err
	}
	refs := records.published(w.machine.Boot())
	if len(refs) == 0 {
		return nil
	}
	found, err := w.seen(ctx, refs)
	if changes := changesOf(refs, found); err == nil && changes == 0 {
		return nil
	}
	if _, store := w.log.Commit(ctx, func(v registry.View) (registry.Change, error) { return w.changed(v, refs, found), nil }); store != nil {
		return fmt.Errorf("record what is wrong with mounts: %w", store)
	}
	return err
}

// seen asks the mount table, and then a helper about what is mounted. An error is about what is not in the answer.
func (w *Watch) seen(ctx context.Context, refs []registry.Ref) (troubles, error) {
	mounts, err := w.machine.Mounts(w.layout.MountRoot())
	if err != nil {
		return nil, err
	}
	mounted := map[string]bool{}
	for _, m := range mounts {
		mounted[m.Point] = true
	}
	found, ask := troubles{}, map[string]registry.Ref{}
	var paths []string
	for _, r := range refs {
		if r.Usage.Attachment != registry.BlockDevice && !mounted[r.Target.Host] {
			found[r.ClaimKey()] = "it is not mounted any more"
			continue
		}
		if gone := lostPart(r, mounted); gone != "" {
			found[r.ClaimKey()] = gone
			continue
		}
		ask[r.Target.Host], paths = r, append(paths, r.Target.Host)
	}
	if len(paths) == 0 {
		return found, nil
	}
	infos, err := inspect(ctx, w.machine, paths)
	for path, info := range infos {
		r, trouble := ask[path], info.Trouble()
		if r.Usage.Attachment == registry.BlockDevice && trouble == "" && !info.Block {
			trouble = "there is no block device any more"
		}
		found[r.ClaimKey()] = trouble
	}
	return found, err
}

func changesOf(refs []registry.Ref, found troubles) (n int) {
	for _, r := range refs {
		if now, looked := found[r.ClaimKey()]; looked && now != r.Trouble {
			n++
		}
	}
	return n
}

// changed is what is new of refs that have not changed since they were looked at.
func (w *Watch) changed(v registry.View, refs []registry.Ref, found troubles) (c registry.Change) {
	current := map[registry.ClaimKey]registry.Ref{}
	for _, r := range v.AllRefs() {
		current[r.ClaimKey()] = r
	}
	for _, old := range refs {
		now, looked := found[old.ClaimKey()]
		r := current[old.ClaimKey()]
		if !looked || now == old.Trouble || r.ModifyIndex != old.ModifyIndex {
			continue
		}
		if r.Trouble == "" {
			r.Troubled = w.now()
		}
		kind, detail := registry.EventMountLost, now+": stop the alloc and place it anew"
		if now == "" {
			kind, detail, r.Troubled = registry.EventMountBack, "its mount answers again", time.Time{}
		}
		r.Trouble = now
		vol, _ := v.VolumeByKey(r.Volume)
		w.logger.Warn(string(kind), "volume", vol.VolumeName(), "alloc", r.Alloc, "path", r.Target.Host, "detail", detail)
		c.Put = append(c.Put, r)
		c.Events = append(c.Events, registry.Event{
			Kind: kind, Role: registry.RoleNode, Plugin: r.Volume.Plugin, Alloc: r.Alloc, Volume: vol.VolumeName(), External: r.Volume.External,
			Request: r.Request, Detail: detail, At: w.now(),
		})
	}
	return c
}
