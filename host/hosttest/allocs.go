package hosttest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"holdfast/config"
	"holdfast/hooks"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

type allocs struct {
	pb.UnimplementedAllocsServer
	p *process
}

// Sync takes down the allocs and tasks that are not in the list.
func (a *allocs) Sync(ctx context.Context, req *pb.SyncRequest) (*pb.SyncReply, error) {
	allocs, running := map[registry.AllocID]bool{}, map[registry.TaskKey]*pb.LivingTask{}
	for _, g := range req.GetAllocs() {
		allocs[registry.AllocID(g.GetAlloc())] = true
	}
	for _, t := range req.GetTasks() {
		running[wire.TaskKey(t.GetTask().GetTask())] = t
	}
	reply, v := &pb.SyncReply{}, a.p.view()
	for _, al := range v.Allocs() {
		if !allocs[al.ID] {
			reply.ReleasedAllocs = append(reply.ReleasedAllocs, string(al.ID))
			if err := a.release(ctx, al.ID); err != nil {
				return nil, err
			}
		}
	}
	for _, t := range v.Tasks() {
		if running[t.TaskKey] == nil {
			reply.RemovedTasks = append(reply.RemovedTasks, wire.TaskKeyProto(t.TaskKey))
			if err := a.p.removeTask(ctx, t.TaskKey, true); err != nil {
				return nil, err
			}
		}
	}
	reply.Answer = a.p.answer()
	return reply, nil
}

// Prepare waits until it can claim all volumes of the alloc.
func (a *allocs) Prepare(ctx context.Context, req *pb.PrepareRequest) (*pb.PrepareReply, error) {
	g, spec, err := open(req.GetAlloc())
	if err != nil {
		return nil, err
	}
	for {
		changed := a.p.nextChange()
		reasons, err := a.claim(ctx, g, spec)
		if err != nil {
			return nil, err
		}
		if err := a.note(ctx, g, reasons); err != nil {
			return nil, err
		}
		if len(reasons) == 0 {
			at := map[registry.RequestName]hooks.Published{}
			for _, r := range spec.Volumes {
				dir := a.p.volumeDir(nameOf(g, r))
				at[r.Name] = hooks.Published{Target: registry.Tree{Host: dir, Task: dir}, Usage: r.Usage}
			}
			plans, err := hooks.Mounts(spec, at, g.Isolated)
			return &pb.PrepareReply{Answer: a.p.answer(), Plans: wire.PlansProto(plans)}, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, errors.Join(context.Cause(ctx), reasons[0].Err())
		}
	}
}

func open(m *pb.AllocGroup) (g hooks.AllocGroup, spec hooks.GroupSpec, err error) {
	if g, err = wire.AllocGroup(m); err == nil && len(g.Sealed) > 0 { // else the group has no volumes
		spec, err = config.OpenGroup(g.Sealed)
	}
	for _, r := range spec.Volumes {
		if r.Create != nil || r.Ephemeral != nil {
			return g, spec, registry.Errorf(registry.ErrUnsupported,
				"package hosttest has no volumes of an alloc: volume %s has a block create or ephemeral", r.Name)
		}
	}
	return g, spec, err
}

// claim claims all volumes of the alloc, or returns why the alloc has to wait.
func (a *allocs) claim(
	ctx context.Context, g hooks.AllocGroup, spec hooks.GroupSpec,
) (reasons []registry.Infeasible, err error) {
	_, err = a.p.log.Commit(ctx, func(v registry.View) (c registry.Change, err error) {
		reasons, c = a.examine(v, g, spec)
		if len(reasons) == 0 {
			return c, nil
		}
		for _, reason := range reasons {
			if reason.Kind == registry.InfeasibleNoVolume || reason.Kind == registry.InfeasibleUnsupported {
				return registry.Change{}, reason.Err()
			}
		}
		return registry.Change{}, nil
	})
	return reasons, err
}

// note records an alloc that waits or is ready.
func (a *allocs) note(ctx context.Context, g hooks.AllocGroup, reasons []registry.Infeasible) error {
	al := registry.Alloc{ID: g.Alloc, Job: g.Job, Group: g.Group, Namespace: g.Namespace, Index: g.Index,
		Node:   "node-1",
		Sealed: g.Sealed, State: registry.AllocReady, Since: time.Now()}
	for _, r := range reasons {
		al.State = registry.AllocPreparing
		al.Waiting = append(al.Waiting, registry.Wait{Alloc: g.Alloc, Request: r.Request, Volume: r.Volume,
			Step: registry.StepClaim, For: r.Detail, Since: time.Now()})
	}
	_, err := registry.Ensure(ctx, a.p.log, func(v registry.View) (registry.Change, error) {
		if old, known := v.Alloc(g.Alloc); known && old.State == al.State && len(old.Waiting) == len(al.Waiting) {
			return registry.Change{}, nil // else Prepare would wake itself for ever
		}
		return registry.Change{Put: []registry.Record{al}}, nil
	})
	return err
}

func nameOf(g hooks.AllocGroup, r hooks.VolumeRequest) registry.VolumeName {
	id := r.Source
	if r.PerAlloc {
		id = fmt.Sprintf("%s[%d]", id, g.Index)
	}
	return registry.VolumeName{Namespace: g.Namespace, ID: registry.VolumeID(id)}
}

// examine returns why the volumes of an alloc cannot be claimed now, or the change that claims them.
func (a *allocs) examine(
	v registry.View, g hooks.AllocGroup, spec hooks.GroupSpec,
) (reasons []registry.Infeasible, c registry.Change) {
	for _, r := range spec.Volumes {
		name, plugin := nameOf(g, r), registry.PluginID("")
		add := func(kind registry.InfeasibleKind, format string, args ...any) {
			reasons = append(reasons, registry.Infeasible{Request: r.Name, Volume: name, Plugin: plugin, Kind: kind,
				Detail: fmt.Sprintf(format, args...)})
		}
		volume, known := v.Volume(name)
		switch {
		case !known:
			add(registry.InfeasibleNoVolume, "volume %s not found in namespace %s", name.ID, name.Namespace)
			continue
		case !volume.Supports(registry.VolumeCapability{Access: r.Usage.Access, Attachment: r.Usage.Attachment}):
			add(registry.InfeasibleUnsupported, "volume %s does not support %s as %s", name, r.Usage.Access,
				r.Usage.Attachment)
		}
		plugin = volume.Plugin
		if i, registered := v.ActiveInstance(registry.RoleNode, plugin); !registered {
			add(registry.InfeasibleNoPlugin, "no task serves the node part of plugin %s", plugin)
		} else if i.Health.State != registry.Healthy {
			add(registry.InfeasibleUnhealthy, "plugin %s is %s: %s", plugin, i.Health.State, i.Health.Detail)
		}
		claim := registry.Claim{Volume: volume.VolumeKey(), Name: name, Alloc: g.Alloc, Request: r.Name, Node: "node-1",
			Usage: r.Usage, Since: time.Now()}
		held := false
		for _, other := range v.Claims(claim.Volume) {
			if other.ClaimKey() == claim.ClaimKey() {
				held = true
			} else if excludes(other.Usage, claim.Usage) {
				add(registry.InfeasibleClaimed, "alloc %s uses volume %s as %s", other.Alloc, name, other.Usage.Access)
				reasons[len(reasons)-1].Holders = []registry.Claim{other}
			}
		}
		if !held {
			event := volumeEvent(registry.EventClaimed, volume)
			event.Alloc, event.Request = g.Alloc, r.Name
			c = c.And(registry.Change{Put: []registry.Record{claim}, Events: []registry.Event{event}})
		}
	}
	return reasons, c
}

// excludes reports whether two users of a volume on one node exclude each other, by the access modes of CSI.
func excludes(a, b registry.Usage) bool {
	many := []registry.AccessMode{registry.SingleNodeMultiWriter, registry.MultiNodeReaderOnly,
		registry.MultiNodeSingleWriter, registry.MultiNodeMultiWriter}
	return a.Access != b.Access || !slices.Contains(many, a.Access) ||
		a.Access == registry.MultiNodeSingleWriter && !a.ReadOnly && !b.ReadOnly
}

func (a *allocs) Release(ctx context.Context, req *pb.ReleaseAllocRequest) (*pb.ReleaseAllocReply, error) {
	err := a.release(ctx, registry.AllocID(req.GetAlloc()))
	return &pb.ReleaseAllocReply{Answer: a.p.answer()}, err
}

// release removes the claims and the record of an alloc.
func (a *allocs) release(ctx context.Context, id registry.AllocID) error {
	_, err := a.p.log.Commit(ctx, func(v registry.View) (c registry.Change, _ error) {
		for _, claim := range v.ClaimsOf(id) {
			volume, _ := v.Volume(claim.Name)
			event := volumeEvent(registry.EventReleased, volume)
			event.Alloc, event.Request = id, claim.Request
			c = c.And(registry.Change{Delete: []registry.Key{claim.Key()}, Events: []registry.Event{event}})
		}
		return c, nil
	})
	if err != nil {
		return err
	}
	_, err = a.p.log.Commit(ctx, func(v registry.View) (c registry.Change, _ error) {
		if al, known := v.Alloc(id); known {
			c.Delete = append(c.Delete, al.Key())
		}
		return c, nil
	})
	return err
}

func (a *allocs) List(_ context.Context, req *pb.ListAllocsRequest) (*pb.ListAllocsReply, error) {
	v, reply := a.p.view(), &pb.ListAllocsReply{Answer: a.p.answer()}
	for _, al := range v.Allocs() {
		if !selects(req.GetAlloc(), al.ID) {
			continue
		}
		status := registry.AllocStatus{Alloc: al}
		for _, c := range v.ClaimsOf(al.ID) {
			dir := a.p.volumeDir(c.Name)
			status.Volumes = append(status.Volumes,
				registry.AllocVolume{Request: c.Request, Name: c.Name, Volume: c.Volume,
					Usage: c.Usage, Publish: registry.MarkDone, Target: registry.Tree{Host: dir, Task: dir}})
		}
		reply.Allocs = append(reply.Allocs, wire.AllocProto(status))
	}
	return reply, nil
}

func (a *allocs) Feasible(_ context.Context, req *pb.FeasibleRequest) (*pb.FeasibleReply, error) {
	g, spec, err := open(req.GetAlloc())
	if err != nil {
		return nil, err
	}
	v, reply := a.p.view(), &pb.FeasibleReply{Answer: a.p.answer()}
	reasons, _ := a.examine(v, g, spec)
	for _, r := range reasons {
		reply.Reasons = append(reply.Reasons, wire.InfeasibleProto(r))
	}
	reply.Index = uint64(v.Index())
	return reply, nil
}
