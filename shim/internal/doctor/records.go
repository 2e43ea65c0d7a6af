package doctor

import (
	"context"
	"slices"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// Records are the records that an examination needs, all read in one transaction.
type Records struct {
	Volumes    []registry.Volume
	Placements []Placement
	Refs       []registry.Ref
	Claims     []registry.Claim
	Intents    []registry.Intent
	Instances  []registry.Instance // the newest first
	// EndpointUses are how clients of CSI endpoints use volumes, without their mounts on other nodes.
	EndpointUses []registry.EndpointUse
	// Executors are the other nodes that make the controller calls of plugins.
	Executors map[registry.PluginID]registry.NodeName
	Drained   bool // this node is drained, so that no plugin runs on it
}

// Placement is where a volume is attached and staged. It has at least one of the two.
type Placement struct {
	Volume     registry.VolumeKey
	Name       registry.VolumeName
	Attachment registry.Attachment
	Staging    registry.Staging
}

// RecordsOf reads the records. The parameter this names this node; empty: not known. If it is known, placements and
// claims of other nodes, and volumes that stay on another node, are left out.
func RecordsOf(v registry.View, this registry.NodeName) Records {
	other := func(n registry.NodeName) bool { return this != "" && n != "" && n != this }
	executors := map[registry.PluginID]registry.NodeName{}
	for _, e := range v.Executors() {
		if other(e.Holder) {
			executors[e.Plugin] = e.Holder
		}
	}
	node, _ := v.Node(this)
	_, drained := node.Drains()
	return Records{
		Volumes:    slices.DeleteFunc(v.Volumes(), func(v registry.Volume) bool { return other(v.Node) }),
		Placements: placementsOf(v, this), Refs: v.AllRefs(),
		Claims:  slices.DeleteFunc(v.AllClaims(), func(c registry.Claim) bool { return this != "" && c.Node != this }),
		Intents: v.Intents(), Instances: v.AllInstances(), Executors: executors, Drained: drained,
		EndpointUses: slices.DeleteFunc(v.AllEndpointUses(), func(u registry.EndpointUse) bool {
			return intent.RoleOf(u.Call) == registry.RoleNode && other(u.Node)
		}),
	}
}

func placementsOf(v registry.View, this registry.NodeName) (list []Placement) {
	at := map[registry.VolumeKey]int{} // positions in list
	for _, s := range v.Stagings() {
		if s.State != registry.MarkNone {
			at[s.Volume] = len(list)
			list = append(list, Placement{Volume: s.Volume, Name: s.Name, Staging: s})
		}
	}
	for _, a := range v.AllAttachments() {
		if this != "" && a.Node != this {
			continue
		}
		if i, staged := at[a.Volume]; staged {
			list[i].Attachment = a
		} else {
			at[a.Volume] = len(list)
			list = append(list, Placement{Volume: a.Volume, Name: a.Name, Attachment: a})
		}
	}
	return list
}

// Version identifies the state of a volume's records. The zero value means that there were none.
type Version struct {
	Volume    registry.Seq // ModifyIndex
	Placement registry.Seq // ModifyIndex
	Open      bool         // a call is open
}

// versions returns the version of each volume.
func (r Records) versions() map[registry.VolumeKey]Version {
	all := map[registry.VolumeKey]Version{}
	for _, v := range r.Volumes {
		all[v.VolumeKey()] = Version{Volume: v.ModifyIndex}
	}
	for _, p := range r.Placements {
		v := all[p.Volume]
		v.Placement = max(p.Attachment.ModifyIndex, p.Staging.ModifyIndex)
		all[p.Volume] = v
	}
	for _, open := range r.Intents {
		v := all[open.Volume]
		v.Open = true
		all[open.Volume] = v
	}
	return all
}

// placed returns the placements by volume.
func (r Records) placed() map[registry.VolumeKey]Placement {
	all := map[registry.VolumeKey]Placement{}
	for _, p := range r.Placements {
		all[p.Volume] = p
	}
	return all
}

// attachNodes returns the nodes to which volumes of a plugin are recorded as attached.
func (r Records) attachNodes(id registry.PluginID) map[registry.NodeID]bool {
	nodes := map[registry.NodeID]bool{}
	for _, p := range r.Placements {
		if p.Volume.Plugin == id {
			nodes[p.Attachment.NodeID] = true
		}
	}
	return nodes
}

// instance returns the active instance of a plugin: the newest healthy one, or the newest if none is healthy.
func (r Records) instance(role registry.Role, id registry.PluginID) (best registry.Instance, found bool) {
	for _, in := range r.Instances {
		if in.Role != role || in.Plugin != id {
			continue
		}
		if !found || best.Health.State != registry.Healthy && in.Health.State == registry.Healthy {
			best, found = in, true
		}
	}
	return best, found
}

// published returns the refs of this boot whose publish is confirmed. It leaves out volumes with an open call, because
// an inspection briefly uses the mount.
func (r Records) published(boot string) (refs []registry.Ref) {
	versions := r.versions()
	for _, ref := range r.Refs {
		if ref.Publish == registry.MarkDone && ref.Boot == boot && !versions[ref.Volume].Open {
			refs = append(refs, ref)
		}
	}
	return refs
}

// markChange returns the change for findings with the action mark: it turns MarkDone into MarkSent. No two findings are
// about the same record.
func markChange(r Records, findings []registry.Finding, now time.Time) (c registry.Change) {
	placements := r.placed()
	refs := map[registry.ClaimKey]registry.Ref{}
	for _, ref := range r.Refs {
		refs[ref.ClaimKey()] = ref
	}
	for _, f := range findings {
		if f.Action != registry.ActMark {
			continue
		}
		p := placements[f.Volume]
		switch {
		case f.Kind == registry.FoundDetached:
			p.Attachment.State = registry.MarkSent
			c.Put = append(c.Put, p.Attachment)
		case f.Alloc != "":
			ref := refs[registry.ClaimKey{Volume: f.Volume, Alloc: f.Alloc, Request: f.Request}]
			ref.Publish, ref.Trouble, ref.Troubled = registry.MarkSent, "", time.Time{}
			c.Put = append(c.Put, ref)
		default:
			p.Staging.State = registry.MarkSent
			c.Put = append(c.Put, p.Staging)
		}
		c.Events = append(c.Events, eventOf(f, now))
	}
	return c
}

// adoptChange returns the change for a finding with the action adopt. It records the volume as uncertainly staged, and
// as attached if its plugin attaches, so that the plugin takes it down. this is the name of the node.
func adoptChange(
	r Records, this registry.NodeName, boot string, f registry.Finding, now time.Time,
) registry.Change {
	p := r.placed()[f.Volume]
	staging := p.Staging
	staging.Volume, staging.Name, staging.State, staging.Stages = f.Volume, f.Name, registry.MarkSent, true
	staging.Boot, staging.Path = boot, registry.Tree{Host: f.Path, Task: f.Path}
	node, known := r.instance(registry.RoleNode, f.Volume.Plugin)
	staging.Path.Task = node.Volumes.InTask(staging.Path)
	change := registry.Change{Put: []registry.Record{staging}, Events: []registry.Event{eventOf(f, now)}}
	controller, found := r.instance(registry.RoleController, f.Volume.Plugin)
	if found && known && p.Attachment.State == registry.MarkNone && node.Fingerprint.NodeID != "" &&
		controller.Fingerprint.Has(registry.AttachDetach) {
		change.Put = append(change.Put, registry.Attachment{
			Volume: f.Volume, Name: f.Name, Node: this, NodeID: node.Fingerprint.NodeID, State: registry.MarkSent,
		})
	}
	return change
}

// commit commits the change of decide in parts (Change.Parts). It skips a record of a later part that has changed since
// decide ran.
func commit(
	ctx context.Context, state registry.State, decide func(registry.View) (registry.Change, error),
) error {
	var later []registry.Change
	_, err := state.Commit(ctx, func(v registry.View) (registry.Change, error) {
		change, err := decide(v)
		parts := change.Parts()
		later = parts[1:]
		return parts[0], err
	})
	if err != nil {
		return err
	}
	for _, part := range later {
		_, err := state.Commit(ctx, func(v registry.View) (registry.Change, error) {
			unchanged := registry.Change{Delete: part.Delete, Events: part.Events}
			for _, r := range part.Put {
				_, before := registry.IndexesOf(r)
				if _, now := registry.IndexesOf(v.Get(r.Key())); now == before {
					unchanged.Put = append(unchanged.Put, r)
				}
			}
			return unchanged, nil
		})
		if err != nil {
			return err
		}
	}
	return nil
}

// eventOf returns the event of a finding.
func eventOf(f registry.Finding, now time.Time) registry.Event {
	text := string(f.Kind) + ": " + f.Detail
	if f.Path != "" {
		text = string(f.Kind) + ": " + f.Path + ": " + f.Detail
	}
	if f.Result != "" {
		text += " (repair: " + f.Result + ")"
	}
	e := registry.Event{
		Kind: registry.EventReconciled, Plugin: f.Volume.Plugin, Alloc: f.Alloc, Volume: f.Name,
		External: f.Volume.External, Request: f.Request, Detail: text, At: now,
	}
	if f.Volume != (registry.VolumeKey{}) {
		e.Role = registry.RoleNode
	}
	return e
}
