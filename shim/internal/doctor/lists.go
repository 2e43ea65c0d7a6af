package doctor

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"holdfast/internal/display"
	"holdfast/registry"
	"holdfast/shim/internal/csi"
)

// Lister lists the volumes of a plugin's controller.
type Lister interface {
	// ListVolumes returns one page of ListVolumes. For an expired token, the error is a *registry.CallError with the
	// code ABORTED.
	ListVolumes(ctx context.Context, at registry.InstanceKey, token string) (csi.Page, error)
}

// Limits of listing the volumes of one plugin.
const (
	maxFindings = 100 // of one kind about one plugin
	listLimit   = 20 * time.Second
)

// listings lists the volumes of all plugins that can list them, concurrently. unexamined has the other plugins and the
// reasons.
func (d *Doctor) listings(ctx context.Context) (all []Listing, unexamined []Unexamined) {
	if d.Live && d.Lister == nil {
		return nil, nil
	}
	records, err := d.records(ctx)
	if err != nil {
		return nil, nil // the caller reads the records again, and reports the error
	}
	can, unexamined := d.listable(records)
	var mu sync.Mutex
	var wg sync.WaitGroup
	for _, in := range can {
		wg.Go(func() {
			l, err := list(ctx, d.Lister, in, records)
			if err := d.Suspended.SuspendFailed(ctx, d.state, in, err, d.Now()); err != nil {
				d.Logger.Warn("cannot record that a plugin died during a call", "plugin", in.Plugin, "error", err)
			}
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				unexamined = append(unexamined, unlisted(in.Plugin, err.Error(),
					"see the log of the plugin; if it cannot list its volumes, set "+
						"list_volumes = false in its csi_plugin stanza"))
				return
			}
			all = append(all, l)
		})
	}
	wg.Wait()
	return all, unexamined
}

// unlisted returns the Unexamined for a plugin whose volumes are not listed.
func unlisted(id registry.PluginID, why, advice string) Unexamined {
	return Unexamined{Plugin: id, Detail: fmt.Sprintf("the volumes of plugin %s: %s", id, why), Advice: advice}
}

// listable returns the controllers that can list their volumes, one for each plugin. unexamined has the other plugins
// that may have volumes, and the reasons. It also has the suspended health calls.
func (d *Doctor) listable(r Records) (list []registry.Instance, unexamined []Unexamined) {
	plugins := map[registry.PluginID]bool{}
	owners := map[registry.PluginID]bool{} // plugins that have volumes
	for _, in := range r.Instances {
		plugins[in.Plugin] = true
	}
	for _, v := range r.Volumes {
		if v.External != "" && !v.Ephemeral {
			plugins[v.Plugin], owners[v.Plugin] = true, true
		}
	}
	ids := slices.Sorted(maps.Keys(plugins))
	for _, id := range ids {
		in, found := r.instance(registry.RoleController, id)
		node, _ := r.instance(registry.RoleNode, id)
		var u Unexamined
		switch {
		case !found && (!owners[id] || node.Plugin != "" && !node.Fingerprint.Has(registry.PluginController)):
			continue // the plugin has no controller, or no volumes
		case found && !in.Fingerprint.Has(registry.ListVolumes):
			continue // the plugin cannot list its volumes
		case found && in.Options[registry.OptionListVolumes] == registry.OptionOff:
			u = unlisted(id, "list_volumes = false in its csi_plugin stanza", "use the tools of its storage")
			u.Skipped = true
		case !found && r.Executors[id] != "":
			u = unlisted(id, fmt.Sprintf("node %s makes its controller calls", r.Executors[id]),
				"run holdfast doctor there")
			u.Skipped = true
		case d.Lister == nil:
			u = unlisted(id, "no plugin is asked while no agent runs",
				"start the agent, then run holdfast doctor again")
		case !found && r.Drained:
			end := display.Command("holdfast node drain --off", string(d.Node))
			u = unlisted(id, fmt.Sprintf("node %s is drained", d.Node), "end that: "+end+
				", then run holdfast doctor again")
		case !found:
			u = unlisted(id, "it has no controller now", "start the job of the plugin, then run holdfast doctor again")
		case in.Health.State != registry.Healthy:
			why := "its controller is not healthy: " + string(in.Health.Cause)
			if in.Health.Detail != "" {
				why += ": " + in.Health.Detail
			}
			u = unlisted(id, why, "see holdfast plugin status "+string(id)+", then run holdfast doctor again")
		default:
			why, advice := d.Suspended.Reason(registry.ListVolumesRPC, in)
			if why == "" {
				list = append(list, in)
				continue
			}
			u = unlisted(id, why, advice)
		}
		unexamined = append(unexamined, u)
	}
	return list, append(unexamined, d.healthNotAsked(r, ids)...)
}

// healthCalls are the calls other than ListVolumes by which plugins report the health of volumes and storage, by role.
var healthCalls = map[registry.Role]map[registry.RPC]registry.Capability{
	registry.RoleNode: {
		registry.NodeStatsRPC: registry.NodeCondition, registry.NodeHealthRPC: registry.NodeHealth,
		registry.StorageHealthRPC: registry.StorageHealth,
	},
	registry.RoleController: {
		registry.GetVolumeRPC: registry.ListCondition, registry.ListHealthRPC: registry.ListHealth,
		registry.ControllerHealthRPC: registry.ControllerHealth,
	},
}

// healthNotAsked returns the suspended health calls of the plugins, and the reasons.
func (d *Doctor) healthNotAsked(r Records, ids []registry.PluginID) (list []Unexamined) {
	for _, id := range ids {
		for role, calls := range healthCalls {
			in, _ := r.instance(role, id)
			for rpc, needs := range calls {
				if !in.Fingerprint.Has(needs) {
					continue
				}
				if why, advice := d.Suspended.Reason(rpc, in); why != "" {
					what := fmt.Sprintf("the health of volumes of plugin %s: %s", id, why)
					list = append(list, Unexamined{Plugin: id, Detail: what, Advice: advice})
				}
			}
		}
	}
	return list
}

// list lists the volumes of one plugin. The caller has read records before the call. The size of the result is limited,
// however long the plugin's list is.
func list(ctx context.Context, from Lister, in registry.Instance, records Records) (Listing, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, listLimit, fmt.Errorf("not all of them were listed within %v",
		listLimit))
	defer cancel()
	node, _ := records.instance(registry.RoleNode, in.Plugin)
	l := Listing{
		Plugin: in.Plugin, Node: node.Fingerprint.NodeID, Published: in.Fingerprint.Has(registry.ListPublished),
		Before: records.versions(),
	}
	nodes := records.attachNodes(in.Plugin)
	err := csi.ReadPages(func(token string) (string, error) {
		if token == "" {
			l.Volumes, l.unknown = map[registry.ExternalID]Listed{}, 0
		}
		page, err := from.ListVolumes(ctx, in.InstanceKey, token)
		for _, e := range page.Entries {
			l.add(e, nodes)
		}
		return page.Next, err
	})
	if late := context.Cause(ctx); err != nil && late != nil {
		err = fmt.Errorf("%w (%w)", late, err)
	}
	if err != nil {
		return Listing{}, err
	}
	return l, nil
}

// add adds an entry if a record names its volume, or if an unknown volume is attached to this node. Of a recorded
// volume it keeps those attached nodes that are in nodes.
func (l *Listing) add(e csi.Entry, nodes map[registry.NodeID]bool) {
	_, known := l.Before[registry.VolumeKey{Plugin: l.Plugin, External: e.Volume}]
	v := l.Volumes[e.Volume]
	for _, n := range e.Nodes {
		if known && nodes[n] {
			if v.Nodes == nil {
				v.Nodes = map[registry.NodeID]bool{}
			}
			v.Nodes[n] = true
		}
		v.Here = v.Here || n != "" && n == l.Node
	}
	if !known && v.Here { // keep a valid ID only, and not too many
		_, err := registry.ParseExternalID(string(e.Volume))
		v.Here = err == nil && l.unknown < maxFindings
		l.unknown++
	}
	if known || v.Here {
		l.Volumes[e.Volume] = v
	}
}

// examineListing compares a plugin's list with the records. It skips volumes that have changed since the call or have
// an open call.
func (e *examiner) examineListing(l Listing) {
	unchanged := func(key registry.VolumeKey) bool { return e.versions[key] == l.Before[key] && !e.versions[key].Open }
	var found []registry.Finding
	for _, v := range e.Records.Volumes {
		_, listed := l.Volumes[v.External]
		if v.Plugin == l.Plugin && v.State == registry.VolumeReady && !v.Ephemeral && !listed &&
			unchanged(v.VolumeKey()) {
			found = append(found, registry.Finding{
				Kind: registry.FoundMissing, Volume: v.VolumeKey(), Name: v.VolumeName(),
				Detail: fmt.Sprintf("plugin %s does not list volume %s (external ID %s)", l.Plugin, v.VolumeName(),
					v.External),
				Advice: "check the plugin's storage; if the volume is gone for good: " +
					display.ObjectCommand("holdfast volume deregister", v.Namespace, string(v.ID)),
			})
		}
	}
	for _, p := range e.Records.Placements {
		v, listed := l.Volumes[p.Volume.External]
		if p.Volume.Plugin == l.Plugin && l.Published && listed && p.Attachment.State == registry.MarkDone &&
			p.Attachment.NodeID != "" && !v.Nodes[p.Attachment.NodeID] && unchanged(p.Volume) {
			found = append(found, registry.Finding{
				Kind: registry.FoundDetached, Action: registry.ActMark, Volume: p.Volume, Name: p.Name,
				Detail: fmt.Sprintf("volume %s is recorded as attached to node %s, and plugin %s does not say so",
					p.Name, p.Attachment.NodeID, l.Plugin),
				Advice: "find out who detached it; if its mounts fail, stop its allocs and place them again",
			})
		}
	}
	for id, v := range l.Volumes {
		key := registry.VolumeKey{Plugin: l.Plugin, External: id}
		if v.Here && l.Published && unchanged(key) && e.placements[key].Attachment.State == registry.MarkNone &&
			!e.attachedByClient(key, l.Node) {
			found = append(found, e.attachedFinding(l, key))
		}
	}
	slices.SortFunc(found, compare)
	numbers := map[registry.FindingKind]int{}
	for _, f := range found { // a plugin's list may be of any length
		if numbers[f.Kind]++; numbers[f.Kind] <= maxFindings {
			e.add(f)
		}
	}
}

// attachedByClient reports whether a client of a CSI endpoint has attached the volume to a node, or may have.
func (e *examiner) attachedByClient(key registry.VolumeKey, node registry.NodeID) bool {
	return slices.ContainsFunc(e.Records.EndpointUses, func(u registry.EndpointUse) bool {
		return u.Volume == key && u.Call == registry.ControllerPublishRPC && u.Target == string(node)
	})
}

func (e *examiner) attachedFinding(l Listing, key registry.VolumeKey) registry.Finding {
	name, text := e.volumes[key].VolumeName(), string(key.External)
	if name.ID != "" {
		text = name.String()
	}
	return registry.Finding{
		Kind: registry.FoundAttached, Volume: key, Name: name,
		Detail: fmt.Sprintf("plugin %s says that volume %q is attached to this node (%s), and no record says so",
			l.Plugin, text, l.Node),
		Advice: "if nothing else on this node uses it, detach it with the plugin's own tools",
	}
}
