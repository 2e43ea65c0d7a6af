package doctor

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/hooks"
	"holdfast/internal/mount"
	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// Options of a Doctor. Layout, Now and Logger are required.
type Options struct {
	Layout hooks.Layout
	Now    func() time.Time
	Logger hclog.Logger
	// Live: a shim drives calls beside it.
	Live bool
	// Locks are those of the volumes; nil: nobody else does anything.
	Locks *intent.Locks
	// Undo begins to take down what nobody claims; nil: the next shim does.
	Undo func(context.Context) error
	// Lister asks plugins. nil: they are not asked, and if no shim is Live, that is a finding.
	Lister Lister
	// Suspended are the calls during which plugins died; nil: none is recorded.
	Suspended *csi.Suspensions
	// Check says how the state file contradicts itself; nil: it is not asked.
	Check func() []string
}

// Doctor finds out what is not as it is recorded, and puts it right.
type Doctor struct {
	log     registry.State
	machine Machine
	Options
	repairing sync.Mutex // held by the one Repair that runs
}

// New is a doctor over log.
func New(log registry.State, m Machine, o Options) *Doctor {
	if o.Locks == nil {
		o.Locks = &intent.Locks{}
	}
	return &Doctor{log: log, machine: m, Options: o}
}

// Examine says what is found, and what Repair would do. It changes nothing but the recorded health of volumes that plugins list.
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
	f.Listings, f.Unseen = d.listings(ctx)
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
	var after mount.Mounts
	if err == nil {
		after, err = d.machine.Mounts(d.Layout.MountRoot())
	}
	if err != nil {
		return f, fmt.Errorf("look at %s: %w", d.Layout.MountRoot(), err)
	}
	f.Mounts, f.Fleeting = settled(before, after)
	if f.Sockets, err = d.machine.Mounts(d.Layout.SocketDirs()); err != nil {
		f.Unseen = append(f.Unseen, Blind{
			Detail: fmt.Sprintf("what is mounted below %s: %v", d.Layout.SocketDirs(), err), Advice: "look again",
		})
	}
	d.askUsers(&f)
	d.inspect(ctx, &f)
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
func settled(before, after mount.Mounts) (both mount.Mounts, fleeting []string) {
	numbers := map[mount.Mount]int{}
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

// askUsers finds the users of mounts that no record knows.
func (d *Doctor) askUsers(f *Facts) {
	var points []string
	for _, m := range Unknown(*f) {
		points = append(points, m.Point)
	}
	if len(points) == 0 {
		return
	}
	var err error
	if f.Users, err = d.machine.Users(points); err != nil {
		f.Users, f.Unasked = nil, err.Error()
	}
}

// inspect inspects what is published.
func (d *Doctor) inspect(ctx context.Context, f *Facts) {
	var paths []string
	for _, r := range f.Records.published(f.Boot) {
		paths = append(paths, r.Target.Host)
	}
	if len(paths) == 0 {
		return
	}
	var err error
	if f.Inspected, err = inspect(ctx, d.machine, paths); err != nil {
		f.Unseen = append(f.Unseen, Blind{
			Detail: fmt.Sprintf("some published volumes cannot be inspected: %v", err),
			Advice: "run holdfast doctor again: what it does not report may still be wrong",
		})
	}
}

// inspect inspects paths, and leaves out those about which nothing is known.
func inspect(ctx context.Context, m Machine, paths []string) (map[string]mount.Info, error) {
	found, err := m.Inspect(ctx, paths...)
	maps.DeleteFunc(found, func(_ string, i mount.Info) bool { return !i.Known() })
	return found, err
}

// listings asks the controllers of all plugins for their volumes, all at once. blind says which plugins' volumes are not known, and why.
func (d *Doctor) listings(ctx context.Context) (all []Listing, blind []Blind) {
	records, err := d.records(ctx)
	if err != nil || d.Live && d.Lister == nil {
		return nil, nil // it is read again, and then that is an error
	}
	can, blind := d.listers(records)
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, in := range can {
		wg.Go(func() {
			l, err := d.ask(ctx, in, records, listLimit)
			var unrecorded error
			if err == nil {
				unrecorded = d.recordHealth(ctx, l)
			}
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				blind = append(blind, unlisted(in.Plugin, err.Error(), "see the log of the plugin; if it cannot list its volumes, set "+
					"list_volumes = false in its csi_plugin stanza"))
				return
			}
			if unrecorded != nil {
				blind = append(blind, Blind{
					Plugin: in.Plugin, Advice: "see that the state can be written, then look again",
					Detail: fmt.Sprintf("the health of volumes of plugin %s: its answer cannot be recorded: %v", in.Plugin, unrecorded),
				})
			}
			all = append(all, l)
		})
	}
	wg.Wait()
	return all, blind
}

// unlisted says that the volumes of a plugin are not known.
func unlisted(id registry.PluginID, why, advice string) Blind {
	return Blind{Plugin: id, Detail: fmt.Sprintf("the volumes of plugin %s: %s", id, why), Advice: advice}
}

// listers returns the controllers that can be asked for their volumes, one for each plugin. blind says why other plugins that may have
// volumes cannot be asked.
func (d *Doctor) listers(r Records) (list []registry.Instance, blind []Blind) {
	plugins := map[registry.PluginID]bool{}
	for _, in := range r.Instances {
		plugins[in.Plugin] = true
	}
	owners := map[registry.PluginID]bool{}
	for _, v := range r.Volumes {
		if v.External != "" && !v.Ephemeral {
			plugins[v.Plugin], owners[v.Plugin] = true, true
		}
	}
	for _, id := range slices.Sorted(maps.Keys(plugins)) {
		in, found := r.instance(registry.RoleController, id)
		node, _ := r.instance(registry.RoleNode, id)
		why, advice := "", ""
		switch {
		case !found && (!owners[id] || node.Plugin != "" && !node.Fingerprint.Has(registry.PluginController)):
			continue // it has no controller, or nothing to list
		case found && !in.Fingerprint.Has(registry.ListVolumes):
			continue // it cannot list
		case found && in.Options[registry.OptionListVolumes] == registry.OptionOff:
			b := unlisted(id, "list_volumes = false in its csi_plugin stanza", "look with the tools of its storage")
			b.Skipped = true
			blind = append(blind, b)
			continue
		case d.Lister == nil:
			why, advice = "no plugin is asked while no agent runs", "start the agent, then look again"
		case !found:
			why, advice = "it has no controller now", "start the job of the plugin, then look again"
		case in.Health.State != registry.Healthy:
			why = "its controller is not healthy: " + string(in.Health.Cause)
			if in.Health.Detail != "" {
				why += ": " + in.Health.Detail
			}
			advice = "see holdfast plugin status " + string(id) + ", then look again"
		default:
			if why, advice = d.Suspended.Reason(registry.ListVolumesRPC, in); why == "" {
				list = append(list, in)
				continue
			}
		}
		blind = append(blind, unlisted(id, why, advice))
	}
	return list, append(blind, d.unmeasured(r)...)
}

// unmeasured says for which plugins the health of volumes in use is not asked for, and why.
func (d *Doctor) unmeasured(r Records) (blind []Blind) {
	seen := map[registry.PluginID]bool{}
	for _, in := range r.Instances {
		if in.Role != registry.RoleNode || seen[in.Plugin] {
			continue
		}
		seen[in.Plugin] = true
		in, _ = r.instance(in.Role, in.Plugin)
		if !in.Fingerprint.Has(registry.NodeCondition) {
			continue
		}
		if why, advice := d.Suspended.Reason(registry.NodeStatsRPC, in); why != "" {
			blind = append(blind, Blind{
				Plugin: in.Plugin, Detail: fmt.Sprintf("the health of volumes of plugin %s: %s", in.Plugin, why), Advice: advice,
			})
		}
	}
	return blind
}
