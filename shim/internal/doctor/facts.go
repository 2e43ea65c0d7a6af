package doctor

import (
	"time"

	"holdfast/hooks"
	"holdfast/internal/mount"
	"holdfast/registry"
)

// Facts is all that was looked at.
type Facts struct {
	Layout  hooks.Layout
	Boot    string // boot id
	Now     time.Time
	Live    bool // a shim drives calls while this is looked at
	Records Records

	Mounts   mount.Mounts    // below the mount root, the oldest first
	Fleeting []string        // mount points that came or went while it was looked: neither missing nor unknown
	Dirs     []mount.DirInfo // below the mount root, children first
	Sockets  mount.Mounts    // at or below directories of sockets, the oldest first

	Inspected map[string]mount.Info // what was seen at targets; nil: nobody looked
	// Users is who uses the mounts that no record knows. nil: nobody was asked, and Unasked says why if that is a
	// fault.
	Users   map[string][]mount.User
	Unasked string

	Listings []Listing
	Damage   []string // how the state file contradicts itself
	Unseen   []Blind  // what was not examined
}

// Blind is what was not examined, and why.
type Blind struct {
	Plugin         registry.PluginID
	Detail, Advice string // for people
	Skipped        bool   // the configuration says so
}

// Records is what is recorded, as one transaction sees it.
type Records struct {
	Volumes    []registry.Volume
	Placements []registry.Placement
	Refs       []registry.Ref
	Claims     []registry.Claim
	Intents    []registry.Intent
	Instances  []registry.Instance
}

// RecordsOf reads them.
func RecordsOf(v registry.View) Records {
	return Records{
		Volumes: v.Volumes(), Placements: v.Placements(), Refs: v.AllRefs(), Claims: v.AllClaims(), Intents: v.Intents(),
		Instances: v.AllInstances(),
	}
}

// Listing is what a plugin's controller says of its volumes. There is none of an answer that was cut off or failed.
type Listing struct {
	Plugin    registry.PluginID
	Node      registry.NodeID // this node, as the plugin calls it; empty: not known
	Published bool            // the plugin says where its volumes are attached
	// Conditions: the plugin says how its volumes are.
	Conditions bool
	Volumes    map[registry.ExternalID]Listed
	// Before is what was recorded when the plugin was asked: what has changed since is not judged by its answer.
	Before  map[registry.VolumeKey]Mention
	strange int // volumes attached here that no record names
}

// Listed is one volume of a plugin: where it is attached, as far as that matters.
type Listed struct {
	Here  bool                     // attached to this node
	Nodes map[registry.NodeID]bool // of the nodes that records name
	// Condition is that of a volume that records name; nil: it is not told.
	Condition *registry.VolumeCondition
}

// Mention is how far the records of a volume were when somebody looked. The zero value: there are none.
type Mention struct {
	Volume    registry.Seq // ModifyIndex
	Placement registry.Seq // ModifyIndex
	Open      bool         // a call is open
}

// mentions is that of every volume.
func (r Records) mentions() map[registry.VolumeKey]Mention {
	all := map[registry.VolumeKey]Mention{}
	for _, v := range r.Volumes {
		m := all[v.VolumeKey()]
		m.Volume = v.ModifyIndex
		all[v.VolumeKey()] = m
	}
	for _, p := range r.Placements {
		m := all[p.Volume]
		m.Placement = p.ModifyIndex
		all[p.Volume] = m
	}
	for _, open := range r.Intents {
		m := all[open.Volume]
		m.Open = true
		all[open.Volume] = m
	}
	return all
}

// instance is the one of a plugin in a role that is asked: the newest healthy one, else the newest. Instances are
// newest first.
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

// published are the refs of this boot whose publish is confirmed. A volume for which a call is open is left alone:
// whoever looks at a mount uses it for that moment.
func (r Records) published(boot string) (refs []registry.Ref) {
	open := r.mentions()
	for _, ref := range r.Refs {
		if ref.Publish == registry.MarkDone && ref.Boot == boot && !open[ref.Volume].Open {
			refs = append(refs, ref)
		}
	}
	return refs
}
