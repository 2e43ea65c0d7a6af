package doctor

import (
	"cmp"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"holdfast/registry"
)

// Marked is the change that the marks among the findings make.
func Marked(r Records, findings []registry.Finding, now time.Time) registry.Change {
	return changed(r, findings, now, func(f registry.Finding, p *registry.Placement, ref *registry.Ref) bool {
		switch {
		case f.Action != registry.ActMark:
			return false
		case f.Kind == registry.FoundDetached:
			p.Attach = registry.MarkSent
		case f.Alloc != "":
			ref.Publish, ref.Trouble, ref.Troubled = registry.MarkSent, "", time.Time{}
		default:
			p.Stage = registry.MarkSent
		}
		return true
	})
}

// Adopted is the change that the adoptions among the findings make: a record that says that the volume may be staged, and attached before
// that, so that its plugin is asked to take it down.
func Adopted(r Records, boot string, findings []registry.Finding, now time.Time) registry.Change {
	return changed(r, findings, now, func(f registry.Finding, p *registry.Placement, _ *registry.Ref) bool {
		if f.Action != registry.ActAdopt {
			return false
		}
		p.Volume, p.Name, p.Stage, p.Stages, p.Boot = f.Volume, f.Name, registry.MarkSent, true, boot
		p.StagedAt = registry.Tree{Host: f.Path, Task: f.Path}
		node, known := r.instance(registry.RoleNode, f.Volume.Plugin)
		if rel, err := filepath.Rel(node.Volumes.Host, f.Path); err == nil && !strings.HasPrefix(rel, "..") && node.Volumes.Task != "" {
			p.StagedAt.Task = filepath.Join(node.Volumes.Task, rel)
		}
		attacher, found := r.instance(registry.RoleController, f.Volume.Plugin)
		if found && known && p.Attach == registry.MarkNone && node.Fingerprint.NodeID != "" && attacher.Fingerprint.Has(registry.AttachDetach) {
			p.Attach, p.Attaches, p.Node = registry.MarkSent, true, node.Fingerprint.NodeID
		}
		return true
	})
}

// changed is the change that edit makes of the records that findings name, each once, with an event for each finding that it takes.
func changed(
	r Records, findings []registry.Finding, now time.Time, edit func(registry.Finding, *registry.Placement, *registry.Ref) bool,
) (c registry.Change) {
	places, refs := map[registry.VolumeKey]*registry.Placement{}, map[registry.ClaimKey]*registry.Ref{}
	for _, p := range r.Placements {
		places[p.Volume] = &p
	}
	for _, ref := range r.Refs {
		refs[ref.ClaimKey()] = &ref
	}
	var touched []func() registry.Record
	seen := map[registry.Key]bool{}
	for _, f := range findings {
		key := registry.ClaimKey{Volume: f.Volume, Alloc: f.Alloc, Request: f.Request}
		p, ref := places[f.Volume], refs[key]
		if p == nil {
			p = &registry.Placement{Volume: f.Volume}
		}
		if ref == nil {
			ref = &registry.Ref{Volume: f.Volume, Alloc: f.Alloc, Request: f.Request}
		}
		if !edit(f, p, ref) {
			continue
		}
		places[f.Volume], refs[key] = p, ref
		record := func() registry.Record { return *p }
		if f.Alloc != "" {
			record = func() registry.Record { return *ref }
		}
		if at := record().Key(); !seen[at] {
			seen[at], touched = true, append(touched, record)
		}
		c.Events = append(c.Events, told(f, now))
	}
	for _, record := range touched {
		c.Put = append(c.Put, record())
	}
	return c
}

// told is the event of a finding.
func told(f registry.Finding, now time.Time) registry.Event {
	text := string(f.Kind) + ": " + f.Detail
	if f.Path != "" {
		text = string(f.Kind) + ": " + f.Path + ": " + f.Detail
	}
	if f.Result != "" {
		text += " (repair: " + f.Result + ")"
	}
	e := registry.Event{
		Kind: registry.EventReconciled, Plugin: f.Volume.Plugin, Alloc: f.Alloc, Volume: f.Name, External: f.Volume.External, Request: f.Request,
		Detail: text, At: now,
	}
	if f.Volume != (registry.VolumeKey{}) {
		e.Role = registry.RoleNode
	}
	return e
}

// inOrder are the findings with that action, in the order in which it is taken: parts and publishes before what they were made of, children
// before their parents.
func (d *Doctor) inOrder(findings []registry.Finding, action registry.FindingAction) (list []*registry.Finding) {
	for i := range findings {
		if findings[i].Action == action {
			list = append(list, &findings[i])
		}
	}
	shape := placesOf(d.Layout)
	first := func(f *registry.Finding) int {
		switch shape.of(f.Path) {
		case part:
			return 0
		case staging:
			return 2
		}
		return 1
	}
	slices.SortStableFunc(list, func(a, b *registry.Finding) int {
		return cmp.Or(cmp.Compare(first(a), first(b)), cmp.Compare(strings.Count(b.Path, "/"), strings.Count(a.Path, "/")), cmp.Compare(a.Path,
			b.Path))
	})
	return list
}
