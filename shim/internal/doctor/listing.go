package doctor

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"slices"
	"time"

	"holdfast/internal/display"
	"holdfast/registry"
	"holdfast/shim/internal/csi"
)

// Lister asks a plugin's controller for its volumes.
type Lister interface {
	// ListPage is one page of ListVolumes. A token that does not hold any more is a *registry.CallError with the code ABORTED.
	ListPage(ctx context.Context, at registry.InstanceKey, token string) (csi.Page, error)
}

// Bounds of asking one plugin.
const (
	maxPages    = 1000
	maxRestarts = 3   // of the paging, when a token does not hold any more
	maxFound    = 100 // findings of one kind about one plugin
	listLimit   = 20 * time.Second
)

// errEndless is a paging without an end.
var errEndless = registry.Errorf(registry.ErrInternal, "its pages have no end")

// ask has a plugin tell all its volumes. records are those before it is asked. Only what matters is kept of the answer, however long it is.
func ask(ctx context.Context, l Lister, in registry.Instance, records Records, limit time.Duration) (Listing, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not all of them were listed within %v", limit))
	defer cancel()
	node, _ := records.instance(registry.RoleNode, in.Plugin)
	out := Listing{
		Plugin: in.Plugin, Node: node.Fingerprint.NodeID, Published: in.Fingerprint.Has(registry.ListPublished),
		Conditions: in.Fingerprint.Has(registry.ListCondition), Before: records.mentions(),
	}
	wanted := map[registry.NodeID]bool{}
	for _, p := range records.Placements {
		if p.Volume.Plugin == in.Plugin {
			wanted[p.Node] = true
		}
	}
	var err error
	for range maxRestarts + 1 {
		if err = out.pages(ctx, l, in.InstanceKey, wanted); !aborted(err) {
			break
		}
	}
	if late := context.Cause(ctx); err != nil && late != nil {
		err = fmt.Errorf("%w (%w)", late, err)
	}
	if err != nil {
		return Listing{}, err
	}
	return out, nil
}

func aborted(err error) bool {
	call, is := errors.AsType[*registry.CallError](err)
	return is && call.Code == "ABORTED"
}

// pages goes through the pages once, from the first.
func (l *Listing) pages(ctx context.Context, from Lister, at registry.InstanceKey, wanted map[registry.NodeID]bool) error {
	l.Volumes, l.strange = map[registry.ExternalID]Listed{}, 0
	token, used := "", map[[sha256.Size]byte]bool{} // tokens may be of any size
	for range maxPages {
		page, err := from.ListPage(ctx, at, token)
		if err != nil {
			return err
		}
		for _, e := range page.Entries {
			l.take(e, wanted)
		}
		if page.Next == "" {
			return nil
		}
		sum := sha256.Sum256([]byte(page.Next))
		if used[sum] {
			return errEndless
		}
		token, used[sum] = page.Next, true
	}
	return errEndless
}

// take keeps what matters of an entry: that it is there, if we know the volume, and where it is attached, if we name that node.
func (l *Listing) take(e csi.Entry, wanted map[registry.NodeID]bool) {
	_, known := l.Before[registry.VolumeKey{Plugin: l.Plugin, External: e.Volume}]
	v := l.Volumes[e.Volume]
	for _, n := range e.Nodes {
		if known && wanted[n] {
			if v.Nodes == nil {
				v.Nodes = map[registry.NodeID]bool{}
			}
			v.Nodes[n] = true
		}
		v.Here = v.Here || n != "" && n == l.Node
	}
	if known && l.Conditions && e.Condition != nil {
		v.Condition = e.Condition
	}
	if !known && v.Here {
		_, err := registry.ParseExternalID(string(e.Volume))
		v.Here = err == nil && l.strange < maxFound
		l.strange++
	}
	if known || v.Here {
		l.Volumes[e.Volume] = v
	}
}

// listing judges what a plugin says. What has changed since it was asked, and what is being changed, is not judged.
func (j *judge) listing(l Listing) {
	now := j.Records.mentions()
	still := func(key registry.VolumeKey) bool { return now[key] == l.Before[key] && !now[key].Open }
	var found []registry.Finding
	for _, v := range j.Records.Volumes {
		if v.Plugin == l.Plugin && v.State == registry.VolumeReady && !v.Ephemeral && still(v.VolumeKey()) {
			found = append(found, l.missing(v)...)
		}
	}
	for _, p := range j.Records.Placements {
		if p.Volume.Plugin == l.Plugin && still(p.Volume) {
			found = append(found, l.detached(p)...)
		}
	}
	for id, v := range l.Volumes {
		key := registry.VolumeKey{Plugin: l.Plugin, External: id}
		if v.Here && l.Published && still(key) && j.placed[key].Attach == registry.MarkNone {
			found = append(found, j.attached(l, key)...)
		}
	}
	slices.SortFunc(found, compare)
	j.findings = append(j.findings, few(found)...)
}

func (l Listing) missing(v registry.Volume) []registry.Finding {
	if _, listed := l.Volumes[v.External]; listed {
		return nil
	}
	return []registry.Finding{{
		Kind: registry.FoundMissing, Volume: v.VolumeKey(), Name: v.VolumeName(),
		Detail: fmt.Sprintf("plugin %s does not list volume %s, which it calls %s", l.Plugin, v.VolumeName(), v.External),
		Advice: "look at the plugin's storage; if the volume is gone for good: " +
			display.Command("holdfast volume deregister --namespace="+display.Quote(string(v.Namespace)), string(v.ID)),
	}}
}

func (l Listing) detached(p registry.Placement) []registry.Finding {
	v, listed := l.Volumes[p.Volume.External]
	if !l.Published || !listed || p.Attach != registry.MarkDone || p.Node == "" || v.Nodes[p.Node] {
		return nil
	}
	return []registry.Finding{{
		Kind: registry.FoundDetached, Action: registry.ActMark, Volume: p.Volume, Name: p.Name,
		Detail: fmt.Sprintf("volume %s is recorded as attached to node %s, and plugin %s does not say so", p.Name, p.Node, l.Plugin),
		Advice: "see who has detached it; if its mounts fail, stop the allocs that use it and place them anew",
	}}
}

func (j *judge) attached(l Listing, key registry.VolumeKey) []registry.Finding {
	name, text := j.byKey[key].VolumeName(), string(key.External)
	if name.ID != "" {
		text = name.String()
	}
	return []registry.Finding{{
		Kind: registry.FoundAttached, Volume: key, Name: name,
		Detail: fmt.Sprintf("plugin %s says that volume %q is attached to this node (%s), and no record says so", l.Plugin, text, l.Node),
		Advice: "if nothing else on this node uses it, detach it with the plugin's own tools",
	}}
}

// few bounds the findings of each kind: an answer of a plugin may be of any size.
func few(found []registry.Finding) (kept []registry.Finding) {
	numbers := map[registry.FindingKind]int{}
	for _, f := range found {
		if numbers[f.Kind]++; numbers[f.Kind] <= maxFound {
			kept = append(kept, f)
		}
	}
	return kept
}
