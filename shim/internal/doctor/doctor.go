package doctor

import (
	"context"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/hooks"
	"holdfast/internal/mount"
	"holdfast/registry"
	"holdfast/shim/internal/csi"
	"holdfast/shim/internal/intent"
)

// Machine reads and changes the mounts and directories of this node. No method follows a path into a mount.
type Machine interface {
	// Boot returns the ID of the current boot.
	Boot() string
	// Mounts lists the mounts strictly below root, the oldest first, also those that another mount hides.
	Mounts(root string) (mount.Mounts, error)
	// Dirs lists the directories strictly below root, children before their parents, without entering a mount.
	Dirs(root string) ([]mount.DirInfo, error)
	// Users returns the users of the mounts at each of the points and below.
	Users(points []string) (map[string][]mount.User, error)
	// Inspect inspects paths within a limited time. The error is about paths that are not in the answer.
	Inspect(ctx context.Context, paths ...string) (map[string]mount.Info, error)
	// Unmount unmounts the uppermost mount at path, neither lazily nor by force. A mount in use stays, and Unmount
	// returns an error. It takes a limited time.
	Unmount(ctx context.Context, path string) error
	// RemoveDir removes an empty directory that is no mount point. It returns nil if the directory is gone already.
	RemoveDir(path string) error
}

// Options configure a Doctor. Layout, Now and Logger are required.
type Options struct {
	Layout hooks.Layout
	Node   registry.NodeName // this node; empty: not known
	Now    func() time.Time
	Logger hclog.Logger
	// Live means that a shim runs with the same state.
	Live bool
	// Locks are the locks of volumes. nil: nothing else changes volumes.
	Locks *intent.Locks
	// Undo starts taking down volumes without a claim. nil: the next shim does it.
	Undo func(context.Context) error
	// Lister lists the volumes of plugins. nil: they are not listed; without Live that is a finding.
	Lister Lister
	// Suspended records the calls during which plugins died. nil: none.
	Suspended *csi.Suspensions
	// Check returns the contradictions within the state file. nil: the file is not checked.
	Check func() []string
}

// Doctor finds differences and repairs them.
type Doctor struct {
	state   registry.State
	machine Machine
	Options
	repairing sync.Mutex // held by the running Repair
}

// New returns a Doctor.
func New(state registry.State, m Machine, o Options) *Doctor {
	if o.Locks == nil {
		o.Locks = &intent.Locks{}
	}
	return &Doctor{state: state, machine: m, Options: o}
}

// Examine returns the current findings. It changes nothing but the recorded health of volumes that plugins list.
func (d *Doctor) Examine(ctx context.Context) (registry.Diagnosis, error) {
	f, err := d.collect(ctx)
	if err != nil {
		return registry.Diagnosis{}, err
	}
	findings := Examine(f)
	return registry.Diagnosis{Findings: findings, Digest: Digest(findings)}, nil
}

// collect collects all facts. It reads the mount table both before and after the records, because both may change
// meanwhile. A mount that is in only one of the two tables counts as neither missing nor unknown.
func (d *Doctor) collect(ctx context.Context) (Facts, error) {
	f := Facts{Layout: d.Layout, Boot: d.machine.Boot(), Now: d.Now(), Live: d.Live}
	f.Listings, f.Unexamined = d.listings(ctx)
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
		return f, fmt.Errorf("examine %s: %w", d.Layout.MountRoot(), err)
	}
	f.Mounts, f.Changing = unchangedMounts(before, after)
	if f.Sockets, err = d.machine.Mounts(d.Layout.SocketDirs()); err != nil {
		f.Unexamined = append(f.Unexamined, Unexamined{
			Detail: fmt.Sprintf("mounts below %s: %v", d.Layout.SocketDirs(), err), Advice: "run holdfast doctor again",
		})
	}
	d.findUsers(&f)
	d.inspectPublished(ctx, &f)
	return f, ctx.Err()
}

// records reads the records.
func (d *Doctor) records(ctx context.Context) (r Records, err error) {
	err = d.state.View(ctx, func(v registry.View) error {
		r = RecordsOf(v, d.Node)
		return nil
	})
	return r, err
}

// unchangedMounts returns the mounts that are in both tables. changing has the mount points of all others.
func unchangedMounts(before, after mount.Mounts) (both mount.Mounts, changing []string) {
	numbers := map[mount.Mount]int{}
	for _, m := range before {
		numbers[m]++
	}
	for _, m := range after {
		if numbers[m]--; numbers[m] < 0 {
			changing = append(changing, m.Point)
			continue
		}
		both = append(both, m)
	}
	for m, n := range numbers {
		if n > 0 {
			changing = append(changing, m.Point)
		}
	}
	return both, changing
}

// findUsers finds the users of mounts that no record names.
func (d *Doctor) findUsers(f *Facts) {
	var points []string
	for _, m := range newExaminer(*f).unknownMounts() {
		points = append(points, m.Point)
	}
	if len(points) == 0 {
		return
	}
	var err error
	if f.Users, err = d.machine.Users(points); err != nil {
		f.Users, f.UsersError = nil, err.Error()
	}
}

// inspectPublished inspects the targets of published volumes.
func (d *Doctor) inspectPublished(ctx context.Context, f *Facts) {
	var paths []string
	for _, r := range f.Records.published(f.Boot) {
		paths = append(paths, r.Target.Host)
	}
	if len(paths) == 0 {
		return
	}
	var err error
	if f.Inspected, err = inspect(ctx, d.machine, paths); err != nil {
		f.Unexamined = append(f.Unexamined, Unexamined{
			Detail: fmt.Sprintf("some published volumes cannot be inspected: %v", err),
			Advice: "run holdfast doctor again: what it does not report may still be wrong",
		})
	}
}

// inspect inspects paths. It leaves out paths whose state stays unknown.
func inspect(ctx context.Context, m Machine, paths []string) (map[string]mount.Info, error) {
	found, err := m.Inspect(ctx, paths...)
	maps.DeleteFunc(found, func(_ string, i mount.Info) bool { return !i.Known() })
	return found, err
}
