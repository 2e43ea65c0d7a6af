package node

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"holdfast/config"
	"holdfast/hooks"
	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// Feasible returns every reason why Prepare of the alloc could not claim and mount its volumes on this node now, in the
// order of the volumes. It also returns the index of the state that it read. A volume that Prepare would claim counts
// as claimed for the requests that follow. Feasible changes nothing and calls no plugin.
func (a *Allocs) Feasible(
	ctx context.Context, g hooks.AllocGroup,
) (reasons []registry.Infeasible, at registry.Seq, err error) {
	spec, err := feasibleSpec(g)
	if err != nil {
		return nil, 0, err
	}
	err = a.State.View(ctx, func(v registry.View) error {
		at = v.Index()
		if al, known := v.Alloc(g.Alloc); known && al.State == registry.AllocReleasing {
			return releasedError(g.Alloc)
		}
		reasons = a.groupReasons(v, g, spec, a.host.Node)
		return nil
	})
	return reasons, at, err
}

// FeasibleNodes is Feasible for each node of the cluster, in the order of their names. For other nodes it uses what
// they have published about themselves. Without a cluster there is only this node.
func (a *Allocs) FeasibleNodes(
	ctx context.Context, g hooks.AllocGroup,
) (list []registry.NodeFeasible, at registry.Seq, err error) {
	spec, err := feasibleSpec(g)
	if err != nil {
		return nil, 0, err
	}
	err = a.State.View(ctx, func(v registry.View) error {
		at = v.Index()
		nodes := v.Nodes()
		if len(nodes) == 0 {
			nodes = []registry.Node{{Name: a.host.Node}}
		}
		for _, n := range nodes {
			list = append(list, registry.NodeFeasible{Node: n.Name, Reasons: a.groupReasons(v, g, spec, n.Name)})
		}
		return nil
	})
	return list, at, err
}

// groupReasons returns every reason why a node cannot mount the volumes of a group.
func (a *Allocs) groupReasons(
	v registry.View, g hooks.AllocGroup, spec hooks.GroupSpec, node registry.NodeName,
) (reasons []registry.Infeasible) {
	if _, alive := v.NodeLease(node); !alive && node != a.host.Node {
		reasons = append(reasons, registry.Infeasible{Kind: registry.InfeasibleNode,
			Detail: fmt.Sprintf("node %s is suspect: etcd does not hear from it", node)})
	}
	var planned []registry.Claim
	for _, r := range inVolumeOrder(spec.Volumes) {
		claim, found := a.claimReasons(v, g, r, node, planned)
		if len(found) == 0 && r.Ephemeral == nil { // inline volumes are not shared and do not count against a limit
			planned = append(planned, claim)
		}
		reasons = append(reasons, found...)
	}
	return reasons
}

// feasibleSpec is groupSpec for an alloc that may have no volumes.
func feasibleSpec(g hooks.AllocGroup) (hooks.GroupSpec, error) {
	if len(g.Sealed) == 0 {
		return hooks.GroupSpec{}, nil
	}
	return groupSpec(g)
}

// groupSpec returns the volume requests of an alloc.
func groupSpec(g hooks.AllocGroup) (hooks.GroupSpec, error) {
	spec, err := config.OpenGroup(g.Sealed)
	if err == nil {
		spec, err = spec.For(g.Alloc, g.Index)
	}
	if err != nil {
		return spec, fmt.Errorf("alloc %s: %w", g.Alloc, err)
	}
	return spec, nil
}

// claimReasons returns the claim of a request on a node, and every reason why the node could not get or mount the
// volume. planned are the claims of earlier requests. If the volume cannot be used at all, the claim is zero.
func (a *Allocs) claimReasons(
	v registry.View, g hooks.AllocGroup, r hooks.VolumeRequest, node registry.NodeName, planned []registry.Claim,
) (registry.Claim, []registry.Infeasible) {
	vol, err := volumeOf(v, g, r)
	if err != nil {
		return registry.Claim{}, []registry.Infeasible{{Request: r.Name, Volume: vol.VolumeName(), Plugin: vol.Plugin,
			Kind: kindOf(err), Detail: err.Error()}}
	}
	claim, reasons := a.controller.Feasible(v, vol, claimFor(g, r, vol, node), planned)
	here := node == a.host.Node
	if here {
		reasons = append(reasons, intent.FeasibleAt(a.Plugins, registry.RoleNode, vol.Plugin, claim.Usage)...)
	} else {
		other, _ := v.Node(node)
		reasons = append(reasons, intent.FeasibleOn(other, registry.RoleNode, vol.Plugin, claim.Usage)...)
	}
	if r.Create != nil && vol.CreateIndex == 0 {
		reasons = append(reasons, a.controller.FeasibleCreate(v, vol.VolumeSpec)...)
	} else {
		to := intent.AttachTo{Node: node, Used: here && a.stager.usedHere(v, vol.VolumeKey())}
		reasons = append(reasons, a.controller.FeasibleAttach(v, vol, claim.Usage, to)...)
	}
	for i := range reasons {
		reasons[i].Request, reasons[i].Volume, reasons[i].Plugin = r.Name, vol.VolumeName(), vol.Plugin
	}
	return claim, reasons
}

// kindOf returns the kind of reason for an error of volumeOf.
func kindOf(err error) registry.InfeasibleKind {
	switch {
	case errors.Is(err, registry.ErrNotFound):
		return registry.InfeasibleNoVolume
	case errors.Is(err, registry.ErrInvalid):
		return registry.InfeasibleRequest
	}
	return registry.InfeasibleNotReady
}

// claimFor returns the claim of a request.
func claimFor(
	g hooks.AllocGroup, r hooks.VolumeRequest, vol registry.Volume, node registry.NodeName,
) registry.Claim {
	return registry.Claim{Volume: vol.VolumeKey(), Name: vol.VolumeName(), Alloc: g.Alloc, Request: r.Name, Node: node,
		Usage: r.Usage}
}

// volumeOf returns the volume of a request. The volume of an ephemeral or create block may have no record yet. If it
// returns an error, vol may have only its name, or nothing.
func volumeOf(v registry.View, g hooks.AllocGroup, r hooks.VolumeRequest) (vol registry.Volume, err error) {
	if r.Ephemeral != nil {
		vol = inlineVolume(g, r)
		old, known := v.Volume(vol.VolumeName())
		switch {
		case known && old.Owner != g.Alloc:
			return vol, registry.Errorf(registry.ErrConflict,
				"volume %s has the name of an inline volume of alloc %s; rename it", vol.VolumeName(), g.Alloc)
		case known:
			return old, nil
		}
		return vol, nil
	}
	name, err := volumeName(g, r)
	if err != nil {
		return vol, err
	}
	vol.Namespace, vol.ID = name.Namespace, name.ID
	known, found := v.Volume(name)
	switch {
	case r.Create != nil && (!found || known.Unwanted()):
		spec := r.Create.Spec(name, r.Usage)
		// else all volumes that are to be created would have the same key
		spec.External = registry.ExternalID("to be created: " + name.String())
		return registry.Volume{VolumeSpec: spec, State: registry.VolumeReady, Accessible: spec.Required}, nil
	case !found:
		return vol, registry.Errorf(registry.ErrNotFound,
			"volume %s is not known in namespace %s; create or register it first", name.ID, g.Namespace)
	case known.Ephemeral:
		return vol, registry.Errorf(registry.ErrConflict,
			"volume %s is an inline volume of alloc %s: no other alloc can use it", name.ID, known.Owner)
	case r.Create != nil && known.Plugin != r.Create.Plugin:
		return vol, registry.OfAnotherPlugin(known, r.Create.Plugin)
	}
	return known, nil
}

// volumeName returns the name of the volume of a request that names a source.
func volumeName(g hooks.AllocGroup, r hooks.VolumeRequest) (registry.VolumeName, error) {
	source := r.Source
	if r.PerAlloc {
		source = fmt.Sprintf("%s[%d]", source, g.Index)
	}
	id, err := registry.ParseVolumeID(source)
	return registry.VolumeName{Namespace: g.Namespace, ID: id}, err
}

// usedHere reports whether the volume is, or may be, staged or published on this node. Nothing is left of an earlier
// boot.
func (s *Stager) usedHere(v registry.View, key registry.VolumeKey) bool {
	p, _ := v.Staging(key)
	return p.State != registry.MarkNone && p.Boot == s.machine.Boot() || slices.ContainsFunc(v.Refs(key), s.sinceBoot)
}
