package doctor

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"path/filepath"
	"slices"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// Examine compares the facts, and returns the differences with their repairs, the worst first.
func Examine(f Facts) []registry.Finding {
	e := newExaminer(f)
	for _, p := range f.Records.Placements {
		e.examinePlacement(p)
	}
	for _, r := range f.Records.Refs {
		e.examineRef(r)
	}
	for _, open := range f.Records.Intents {
		e.examineIntent(open)
	}
	e.examineUnknownMounts()
	e.examineSocketDirs()
	e.examineDirs()
	for _, l := range f.Listings {
		e.examineListing(l)
	}
	for _, v := range f.Records.Volumes {
		e.examineHealth(v)
	}
	for _, text := range f.Damage {
		e.add(registry.Finding{Kind: registry.FoundDamage, Path: f.Layout.Database(), Detail: text,
			Advice: "copy the state file, and restore a good one; do not remove it while volumes are in use"})
	}
	for _, u := range f.Unexamined {
		kind := registry.FoundUnseen
		if u.Skipped {
			kind = registry.FoundSkipped
		}
		e.add(registry.Finding{Kind: kind, Volume: registry.VolumeKey{Plugin: u.Plugin}, Detail: u.Detail,
			Advice: u.Advice})
	}
	slices.SortFunc(e.findings, compare)
	return e.findings
}

// examiner looks facts up and collects findings.
type examiner struct {
	Facts
	shapes      pathShapes
	volumes     map[registry.VolumeKey]registry.Volume
	claims      map[registry.VolumeKey]int // how many claims
	refs        map[registry.VolumeKey][]registry.Ref
	placements  map[registry.VolumeKey]Placement
	versions    map[registry.VolumeKey]Version
	stacks      map[string]int             // by mount point: how many mounts
	mountsBelow map[string]bool            // directories below which something is mounted
	known       map[string]bool            // paths that records name; paths below them count too (covers)
	expected    map[string]bool            // paths that claims are about to use; paths below them count too
	claimants   map[string]registry.Claim  // by such a path, if it is a mount point
	stageable   map[string]registry.Volume // by staging path
	findings    []registry.Finding
}

func newExaminer(f Facts) *examiner {
	e := &examiner{
		Facts: f, shapes: shapesOf(f.Layout), volumes: map[registry.VolumeKey]registry.Volume{},
		claims: map[registry.VolumeKey]int{},
		refs:   map[registry.VolumeKey][]registry.Ref{}, placements: f.Records.placed(), versions: f.Records.versions(),
		stacks: map[string]int{}, mountsBelow: map[string]bool{}, known: map[string]bool{}, expected: map[string]bool{},
		claimants: map[string]registry.Claim{}, stageable: map[string]registry.Volume{},
	}
	for _, m := range f.Mounts {
		e.stacks[m.Point]++
		for at := filepath.Dir(m.Point); !e.mountsBelow[at] && at != "/"; at = filepath.Dir(at) {
			e.mountsBelow[at] = true
		}
	}
	for _, v := range f.Records.Volumes {
		if v.External == "" {
			continue // the plugin has not named the volume yet
		}
		e.volumes[v.VolumeKey()] = v
		if !v.Ephemeral {
			e.stageable[f.Layout.Staging(v.VolumeKey(), e.root(v.Plugin)).Host] = v
		}
	}
	for _, c := range f.Records.Claims {
		e.claims[c.Volume]++
		target := f.Layout.Target(c.ClaimKey(), e.root(c.Volume.Plugin)).Host
		staging := f.Layout.Staging(c.Volume, e.root(c.Volume.Plugin)).Host
		e.expected[staging], e.expected[target], e.expected[filepath.Dir(target)] = true, true, true
		e.claimants[staging], e.claimants[target] = c, c
	}
	for _, r := range f.Records.Refs {
		e.refs[r.Volume] = append(e.refs[r.Volume], r)
		e.known[r.Target.Host], e.known[filepath.Dir(r.Target.Host)] = true, true
		for _, p := range r.Parts {
			e.known[p.At], e.known[filepath.Dir(p.At)] = true, true
		}
	}
	for _, p := range f.Records.Placements {
		if p.Staging.State != registry.MarkNone {
			e.known[p.Staging.Path.Host] = true
		}
	}
	for _, u := range f.Records.EndpointUses {
		if intent.RoleOf(u.Call) == registry.RoleNode && u.Target != "" {
			e.addClientPath(u.Volume.Plugin, u.Target)
		}
	}
	return e
}

// addClientPath adds to known a path at which a client of a CSI endpoint uses a volume, as the plugin's tasks see it.
// While no task of the plugin is registered, the path on the host is not known. Then all paths of the plugin are known.
func (e *examiner) addClientPath(id registry.PluginID, path string) {
	registered := false
	for _, in := range e.Records.Instances {
		if in.Plugin != id || in.Role != registry.RoleNode {
			continue
		}
		registered = true
		at := in.Volumes.OnHost(path)
		if e.Layout.Ours(at) {
			e.known[at] = true
		}
		if up := filepath.Dir(at); e.shapes.kind(up) == targetParent {
			e.known[up] = true
		}
	}
	if !registered {
		e.known[e.Layout.PluginRoot(id)] = true
	}
}

// root returns the directory of a plugin's volumes.
func (e *examiner) root(id registry.PluginID) registry.Tree {
	return registry.Tree{Host: e.Layout.PluginRoot(id)}
}

func (e *examiner) add(f registry.Finding) { e.findings = append(e.findings, f) }

// covers reports whether path is in set or lies below an element of set.
func covers(set map[string]bool, path string) bool {
	for at := path; at != "/" && at != "."; at = filepath.Dir(at) {
		if set[at] {
			return true
		}
	}
	return false
}

// order lists the kinds of findings, the worst first.
var order = []registry.FindingKind{
	registry.FoundDamage, registry.FoundUnseen, registry.FoundDead, registry.FoundRebooted, registry.FoundLost,
	registry.FoundDetached, registry.FoundMissing, registry.FoundUnhealthy, registry.FoundUncertain,
	registry.FoundUnowned, registry.FoundUsed, registry.FoundOrphan, registry.FoundAttached, registry.FoundLeft,
	registry.FoundEmpty, registry.FoundSkipped,
}

func compare(a, b registry.Finding) int {
	return cmp.Or(
		cmp.Compare(slices.Index(order, a.Kind), slices.Index(order, b.Kind)), cmp.Compare(a.Path, b.Path),
		cmp.Compare(a.Volume.Plugin, b.Volume.Plugin), cmp.Compare(a.Volume.External, b.Volume.External),
		cmp.Compare(a.Alloc, b.Alloc), cmp.Compare(a.Request, b.Request), cmp.Compare(a.Detail, b.Detail))
}

// Digest identifies the actions of the findings, but not their texts. Lists with equal digests are the same plan. The
// digest is empty if there are no actions.
func Digest(findings []registry.Finding) string {
	sum := sha256.New()
	enc := json.NewEncoder(sum)
	hasActions := false
	for _, f := range slices.SortedFunc(slices.Values(findings), compare) {
		if f.Action != registry.ActNothing {
			hasActions = true
			// encoding plain data into a hash cannot fail
			_ = enc.Encode([]any{f.Kind, f.Action, f.Path, f.Volume, f.Alloc, f.Request})
		}
	}
	if !hasActions {
		return ""
	}
	return hex.EncodeToString(sum.Sum(nil))
}
