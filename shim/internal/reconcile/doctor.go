package reconcile

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/hooks"
	"holdfast/registry"
	"holdfast/shim/internal/lane"
)

// Options of a Doctor. Layout, Now and Logger are required.
type Options struct {
	Layout hooks.Layout
	Now    func() time.Time
	Logger hclog.Logger
	// Live: a shim drives calls beside it.
	Live bool
	// Lanes are those of the volumes; nil: nobody else does anything.
	Lanes *lane.Lanes
	// Undo begins to take down what nobody claims; nil: the next shim does.
	Undo func(context.Context) error
	// Lister asks plugins; nil: they are not asked.
	Lister Lister
	// Check says how the state file contradicts itself; nil: it is not asked.
	Check func() []string
}

// Doctor finds out what is not as it is recorded, and puts it right.
type Doctor struct {
	log     registry.Log
	machine Machine
	Options
	repairing sync.Mutex // held by the one Repair that runs
}

// New is a doctor over log.
func New(log registry.Log, m Machine, o Options) *Doctor {
	if o.Lanes == nil {
		o.Lanes = &lane.Lanes{}
	}
	return &Doctor{log: log, machine: m, Options: o}
}

// Limits of looking.
const (
	usersLimit = 20 * time.Second
	lookLimit  = 5 * time.Second // a mount that takes longer hangs
)

// Examine says what is found, and what Repair would do. It changes nothing.
func (d *Doctor) Examine(ctx context.Context) (registry.Diagnosis, error) {
	f, err := d.gather(ctx)
	if err != nil {
		return registry.Diagnosis{}, err
	}
	findings := Examine(f)
	return registry.Diagnosis{Findings: findings, Digest: Digest(findings)}, nil
}

// gather looks at everything. The mount table is read before and after the records, as both change while it is looked: what is in one of
// the two tables only is neither missing nor unknown.
func (d *Doctor) gather(ctx context.Context) (Facts, error) {
	f := Facts{Layout: d.Layout, Boot: d.machine.Boot(), Now: d.Now(), Live: d.Live}
	f.Listings = d.listings(ctx)
	if d.Check != nil {
		f.Damage = d.Check()
	}
	before, err := d.machine.Mounts(d.Layout.MountRoot())
	if err == nil {
		f.Dirs, err = d.machine.Dirs(d.Layout.MountRoot())
	}
	if err == nil {
		f.Records, err = d.records(ctx)
	}
	var after []Mount
	if err == nil {
		after, err = d.machine.Mounts(d.Layout.MountRoot())
	}
	if err != nil {
		return f, fmt.Errorf("look at %s: %w", d.Layout.MountRoot(), err)
	}
	f.Mounts, f.Fleeting = settled(before, after)
	d.askUsers(ctx, &f)
	d.look(ctx, &f)
	return f, ctx.Err()
}

func (d *Doctor) records(ctx context.Context) (r Records, err error) {
	err = d.log.View(ctx, func(v registry.View) error {
		r = RecordsOf(v)
		return nil
	})
	return r, err
}

// settled are the mounts that were there before and after, and the points of the others.
func settled(before, after []Mount) (both []Mount, fleeting []string) {
	numbers := map[Mount]int{}
	for _, m := range before {
		numbers[m]++
	}
	for _, m := range after {
		if numbers[m]--; numbers[m] < 0 {
			fleeting = append(fleeting, m.Point)
			continue
		}
		both = append(both, m)
	}
	for m, n := range numbers {
		if n > 0 {
			fleeting = append(fleeting, m.Point)
		}
	}
	return both, fleeting
}

// askUsers finds out who uses the mounts that no record knows.
func (d *Doctor) askUsers(ctx context.Context, f *Facts) {
	var points []string
	for _, m := range Unknown(*f) {
		points = append(points, m.Point)
	}
	if len(points) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, usersLimit)
	defer cancel()
	var err error
	if f.Users, err = d.machine.Users(ctx, points); err != nil {
		f.Users, f.Unasked = nil, err.Error()
	}
}

// look has a helper look at what is published.
func (d *Doctor) look(ctx context.Context, f *Facts) {
	var paths []string
	for _, r := range f.Records.published(f.Boot) {
		paths = append(paths, r.Target.Host)
	}
	if len(paths) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, lookLimit)
	defer cancel()
	var err error
	if f.Sights, err = d.machine.Look(ctx, paths...); err != nil {
		f.Unseen = append(f.Unseen, fmt.Sprintf("what is published cannot be looked at, or not all of it: %v", err))
	}
}

// listings asks every healthy controller that can list its volumes, all at once. Of those that do not answer nothing is found.
func (d *Doctor) listings(ctx context.Context) (all []Listing) {
	if d.Lister == nil {
		return nil
	}
	records, err := d.records(ctx)
	if err != nil {
		return nil // it is read again, and then that is an error
	}
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, in := range listers(records) {
		wg.Go(func() {
			l, err := ask(ctx, d.Lister, in, records)
			if err != nil {
				d.Logger.Warn("a plugin does not list its volumes; nothing is concluded of that", "plugin", in.Plugin, "error", err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			all = append(all, l)
		})
	}
	wg.Wait()
	return all
}

// listers are the healthy controllers that can list volumes, one for each plugin.
func listers(r Records) (list []registry.Instance) {
	done := map[registry.PluginID]bool{}
	for _, in := range r.Instances {
		if in.Role != registry.RoleController || done[in.Plugin] {
			continue
		}
		done[in.Plugin] = true
		active, _ := r.instance(registry.RoleController, in.Plugin)
		if active.Health.State == registry.Healthy && active.Fingerprint.Has(registry.ListVolumes) {
			list = append(list, active)
		}
	}
	return list
}
