package volume

import (
	"context"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"holdfast/registry"
)

// FindingKind says what Reconcile found.
type FindingKind string

const (
	FoundLost      FindingKind = "lost"      // recorded as done, not mounted: marked as sent, to be redone or undone
	FoundRebooted  FindingKind = "rebooted"  // recorded as done before this boot: marked as sent
	FoundUncertain FindingKind = "uncertain" // a call has no certain answer
	FoundForeign   FindingKind = "foreign"   // a mount below our root that no record knows: not touched
	FoundLeft      FindingKind = "left"      // a directory that no record knows and that is not empty: not touched
)

// Finding is one thing in which records and mount table differ.
type Finding struct {
	Kind    FindingKind
	Volume  registry.VolumeKey
	Name    registry.VolumeName
	Alloc   registry.AllocID
	Request registry.RequestName
	Path    string // on the host
	Detail  string // for people
}

func (f Finding) String() string {
	return strings.TrimSpace(fmt.Sprintf("%s: %s %s", f.Kind, f.Path, f.Detail))
}

// Reconcile compares the records with the mount table below the mount root. It has no call sent and unmounts nothing: what is
// recorded as done and is not there is marked as sent, so that whoever holds the claim redoes or undoes it; mounts that no record
// knows are reported; empty directories are removed. It runs before any other call.
func (s *Stager) Reconcile(ctx context.Context) ([]Finding, error) {
	mounts, err := s.mounts()
	if err != nil {
		return nil, err
	}
	var findings []Finding
	var kept map[string]bool
	_, err = s.log.Commit(ctx, func(view registry.View) (registry.Change, error) {
		d := doubt{stager: s, mounts: mounts, kept: map[string]bool{}}
		for _, p := range view.Placements() {
			d.placement(p, view.Refs(p.Volume))
		}
		for _, r := range view.AllRefs() {
			v, _ := view.VolumeByKey(r.Volume)
			d.ref(r, v.VolumeName())
		}
		for _, open := range view.Intents() {
			d.intent(open)
		}
		findings, kept = d.findings, d.kept
		return d.change, nil
	})
	if err != nil {
		return nil, err
	}
	left, err := s.sweep(kept, mounts)
	return slices.Concat(findings, foreign(kept, mounts), left), err
}

// mounts is the mount table below the mount root. nil: the table is not to be asked.
func (s *Stager) mounts() (map[string]bool, error) {
	if !s.Check {
		return nil, nil
	}
	paths, err := s.kernel.Below(s.Layout.MountRoot())
	if err != nil {
		return nil, fmt.Errorf("read the mount table: %w", err)
	}
	mounts := make(map[string]bool, len(paths))
	for _, path := range paths {
		mounts[path] = true
	}
	return mounts, nil
}

// doubt collects what is marked, found and known.
type doubt struct {
	stager   *Stager
	mounts   map[string]bool
	kept     map[string]bool // paths that records know
	change   registry.Change
	findings []Finding
}

// lost says why a mark that says done is worth less; empty: it is not.
func (d *doubt) lost(boot, path string) FindingKind {
	switch {
	case boot != d.stager.kernel.Boot():
		return FoundRebooted
	case d.stager.Check && !d.mounts[path]:
		return FoundLost
	}
	return ""
}

func (d *doubt) placement(p registry.Placement, refs []registry.Ref) {
	if p.Stage == registry.MarkNone {
		return
	}
	d.kept[p.StagedAt.Host] = true
	kind := d.lost(p.Boot, p.StagedAt.Host)
	standing := slices.ContainsFunc(refs, func(r registry.Ref) bool {
		return r.Publish == registry.MarkDone && d.lost(r.Boot, r.Target.Host) == ""
	})
	if p.Stage != registry.MarkDone || kind == "" || kind == FoundLost && standing {
		return
	}
	p.Stage = registry.MarkSent
	d.mark(p, Finding{Kind: kind, Volume: p.Volume, Name: p.Name, Path: p.StagedAt.Host, Detail: "was staged"})
}

func (d *doubt) ref(r registry.Ref, name registry.VolumeName) {
	d.kept[r.Target.Host], d.kept[filepath.Dir(r.Target.Host)] = true, true
	kind := d.lost(r.Boot, r.Target.Host)
	if r.Publish != registry.MarkDone || kind == "" || kind == FoundLost && r.Usage.Attachment != registry.FileSystem {
		return
	}
	r.Publish = registry.MarkSent
	d.mark(r, Finding{
		Kind: kind, Volume: r.Volume, Name: name, Alloc: r.Alloc, Request: r.Request, Path: r.Target.Host,
		Detail: fmt.Sprintf("was published for alloc %s", r.Alloc),
	})
}

func (d *doubt) mark(record registry.Record, f Finding) {
	d.findings = append(d.findings, f)
	d.change.Put = append(d.change.Put, record)
	d.change.Events = append(d.change.Events, registry.Event{
		Kind: registry.EventReconciled, Role: registry.RoleNode, Plugin: f.Volume.Plugin, Alloc: f.Alloc, Volume: f.Name,
		External: f.Volume.External, Request: f.Request, Detail: f.String(), At: d.stager.Now(),
	})
}

func (d *doubt) intent(open registry.Intent) {
	d.findings = append(d.findings, Finding{
		Kind: FoundUncertain, Volume: open.Volume, Name: open.Name, Alloc: open.Alloc, Request: open.Request,
		Detail: fmt.Sprintf("%s has no certain answer", open.RPC),
	})
}

// foreign are the mounts that are neither recorded nor part of a recorded one.
func foreign(kept, mounts map[string]bool) []Finding {
	var found []Finding
	for _, path := range sorted(mounts) {
		if !within(path, kept) {
			found = append(found, Finding{Kind: FoundForeign, Path: path, Detail: "is mounted, and no record knows it"})
		}
	}
	return found
}

// sweep removes the empty directories of volumes that no record knows, and reports those that are not empty.
func (s *Stager) sweep(kept, mounts map[string]bool) ([]Finding, error) {
	root := s.Layout.MountRoot()
	dirs, err := s.kernel.Dirs(root)
	if err != nil {
		return nil, fmt.Errorf("list %s: %w", root, err)
	}
	var found []Finding
	for _, dir := range dirs {
		if mounts[dir] || !ofVolume(root, dir) || within(dir, kept) || above(dir, mounts) {
			continue
		}
		if err := s.kernel.RemoveDir(dir); err != nil {
			found = append(found, Finding{Kind: FoundLeft, Path: dir, Detail: err.Error()})
		}
	}
	return found, nil
}

// ofVolume says whether dir is one that Layout makes for a volume: a staging path, a target or its parent, two or three names below
// the plugin's root. Those above are the plugin's, whose task has them mounted; those below are what somebody wrote.
func ofVolume(root, dir string) bool {
	rel, err := filepath.Rel(root, dir)
	depth := strings.Count(rel, "/")
	return err == nil && (depth == 2 || depth == 3)
}

// within says whether path is one of set or lies below one.
func within(path string, set map[string]bool) bool {
	for at := path; at != "/" && at != "."; at = filepath.Dir(at) {
		if set[at] {
			return true
		}
	}
	return false
}

// above says whether a mount lies below dir.
func above(dir string, mounts map[string]bool) bool {
	for path := range mounts {
		if strings.HasPrefix(path, dir+"/") {
			return true
		}
	}
	return false
}

func sorted(set map[string]bool) []string {
	var list []string
	for path := range set {
		list = append(list, path)
	}
	slices.Sort(list)
	return list
}
