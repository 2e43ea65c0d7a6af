package doctor

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"

	"holdfast/registry"
)

// Examine judges: it lists everything in which the facts differ, and what repair does about each. It asks nobody anything.
func Examine(f Facts) []registry.Finding {
	j := newJudge(f)
	for _, p := range f.Records.Placements {
		j.placement(p)
	}
	for _, r := range f.Records.Refs {
		j.ref(r)
	}
	for _, open := range f.Records.Intents {
		j.intent(open)
	}
	j.strangers()
	j.sockets()
	j.directories()
	for _, l := range f.Listings {
		j.listing(l)
	}
	for _, v := range f.Records.Volumes {
		j.health(v)
	}
	for _, text := range f.Damage {
		j.found(registry.Finding{Kind: registry.FoundDamage, Path: f.Layout.Database(), Detail: text,
			Advice: "keep a copy of the state file, and put a good one in its place if there is one; do not remove it while volumes are in use"})
	}
	for _, b := range f.Unseen {
		kind := registry.FoundUnseen
		if b.Skipped {
			kind = registry.FoundSkipped
		}
		j.found(registry.Finding{Kind: kind, Volume: registry.VolumeKey{Plugin: b.Plugin}, Detail: b.Detail, Advice: b.Advice})
	}
	slices.SortFunc(j.findings, compare)
	return j.findings
}

// health judges by what the volume's plugin said last, in each of its roles.
func (j *judge) health(v registry.Volume) {
	for _, role := range []registry.Role{registry.RoleController, registry.RoleNode} {
		if c := v.Health.Of(role); c.Abnormal {
			j.found(registry.Finding{
				Kind: registry.FoundUnhealthy, Volume: v.VolumeKey(), Name: v.VolumeName(),
				Detail: fmt.Sprintf("plugin %s (%s) says that volume %s is unhealthy: %s", v.Plugin, role, v.VolumeName(), c.Message),
				Advice: "look at the plugin's storage; who uses the volume may get errors",
			})
		}
	}
}

// judge looks things up in facts.
type judge struct {
	Facts
	places    places
	byKey     map[registry.VolumeKey]registry.Volume
	claims    map[registry.VolumeKey]int
	refs      map[registry.VolumeKey][]registry.Ref
	open      map[registry.VolumeKey]bool
	placed    map[registry.VolumeKey]registry.Placement
	stacks    map[string]int             // by mount point: how many mounts
	over      map[string]bool            // directories below which something is mounted
	known     map[string]bool            // paths that records name: what lies below is known too
	expected  map[string]bool            // paths that claims are about to use
	stageable map[string]registry.Volume // by staging path
	findings  []registry.Finding
}

func newJudge(f Facts) *judge {
	j := &judge{
		Facts: f, places: placesOf(f.Layout), byKey: map[registry.VolumeKey]registry.Volume{}, claims: map[registry.VolumeKey]int{},
		refs: map[registry.VolumeKey][]registry.Ref{}, open: map[registry.VolumeKey]bool{}, placed: map[registry.VolumeKey]registry.Placement{},
		stacks: map[string]int{}, over: map[string]bool{}, known: map[string]bool{}, expected: map[string]bool{},
		stageable: map[string]registry.Volume{},
	}
	j.learnTable()
	j.learnVolumes()
	j.learnClaims()
	for _, r := range f.Records.Refs {
		j.refs[r.Volume] = append(j.refs[r.Volume], r)
		j.known[r.Target.Host], j.known[filepath.Dir(r.Target.Host)] = true, true
		j.learnParts(r)
	}
	for _, p := range f.Records.Placements {
		j.placed[p.Volume] = p
		if p.Stage != registry.MarkNone {
			j.known[p.StagedAt.Host] = true
		}
	}
	for _, open := range f.Records.Intents {
		j.open[open.Volume] = true
	}
	return j
}

func (j *judge) learnVolumes() {
	for _, v := range j.Records.Volumes {
		if v.External == "" {
			continue // its plugin has not named it yet
		}
		j.byKey[v.VolumeKey()] = v
		if !v.Ephemeral {
			j.stageable[j.Layout.Staging(v.VolumeKey(), j.root(v.Plugin)).Host] = v
		}
	}
}

func (j *judge) learnClaims() {
	for _, c := range j.Records.Claims {
		j.claims[c.Volume]++
		target := j.Layout.Target(c.ClaimKey(), j.root(c.Volume.Plugin)).Host
		for _, path := range []string{j.Layout.Staging(c.Volume, j.root(c.Volume.Plugin)).Host, target, filepath.Dir(target)} {
			j.expected[path] = true
		}
	}
}

func (j *judge) learnTable() {
	for _, m := range j.Mounts {
		j.stacks[m.Point]++
		for at := filepath.Dir(m.Point); !j.over[at] && at != "/"; at = filepath.Dir(at) {
			j.over[at] = true
		}
	}
}

// root is where all volumes of a plugin lie.
func (j *judge) root(id registry.PluginID) registry.Tree {
	return registry.Tree{Host: j.Layout.PluginRoot(id)}
}

func (j *judge) found(f registry.Finding) { j.findings = append(j.findings, f) }

// covered says whether path is one of set or lies below one.
func covered(path string, set map[string]bool) bool {
	for at := path; at != "/" && at != "."; at = filepath.Dir(at) {
		if set[at] {
			return true
		}
	}
	return false
}

// order is that of a list for people: first what is worst.
var order = []registry.FindingKind{
	registry.FoundDamage, registry.FoundUnseen, registry.FoundDead, registry.FoundRebooted, registry.FoundLost, registry.FoundDetached,
	registry.FoundMissing, registry.FoundUnhealthy, registry.FoundUncertain, registry.FoundUnowned, registry.FoundUsed,
	registry.FoundOrphan, registry.FoundAttached, registry.FoundLeft, registry.FoundEmpty,
	registry.FoundSkipped,
}

func compare(a, b registry.Finding) int {
	if a.Kind != b.Kind {
		return cmp.Compare(slices.Index(order, a.Kind), slices.Index(order, b.Kind))
	}
	if a.Path != b.Path {
		return cmp.Compare(a.Path, b.Path)
	}
	return cmp.Or(cmp.Compare(a.Volume.Plugin, b.Volume.Plugin), cmp.Compare(a.Volume.External, b.Volume.External),
		cmp.Compare(a.Alloc, b.Alloc), cmp.Compare(a.Request, b.Request), cmp.Compare(a.Detail, b.Detail))
}

// Digest names what repair does about the findings, in whichever words they are told: two lists with one digest are one plan. It is empty
// if there is nothing to do.
func Digest(findings []registry.Finding) string {
	sum, some := sha256.New(), false
	enc := json.NewEncoder(sum)
	for _, f := range slices.SortedFunc(slices.Values(findings), compare) {
		if f.Action == registry.ActNothing {
			continue
		}
		some = true
		_ = enc.Encode([]any{f.Kind, f.Action, f.Path, f.Volume, f.Alloc, f.Request}) // plain data, and a hash takes all
	}
	if !some {
		return ""
	}
	return hex.EncodeToString(sum.Sum(nil))
}
