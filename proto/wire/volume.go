package wire

import (
	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
)

func VolumeSpecProto(s registry.VolumeSpec) *pb.VolumeSpec {
	return &pb.VolumeSpec{
		Namespace: string(s.Namespace), Id: string(s.ID), Name: s.Name, PluginId: string(s.Plugin),
		ExternalId: string(s.External), CapacityMin: s.CapacityMin, CapacityMax: s.CapacityMax, FsType: s.FSType,
		MountFlags: s.MountFlags.List(), Parameters: s.Parameters, Context: s.Context,
		Required: each(s.Required, topologyProto), Preferred: each(s.Preferred, topologyProto),
		Node:    string(s.Node),
		CloneId: string(s.CloneID), CloneExternalId: string(s.CloneExternal), SnapshotId: string(s.SnapshotID),
		MountGroup: s.MountGroup, MutableParameters: s.Mutable, Ownership: ownershipProto(s.Ownership),
		Secrets: mapped(s.Secrets, secretProto),
		Capabilities: each(s.Capabilities, func(c registry.VolumeCapability) *pb.VolumeCapability {
			return &pb.VolumeCapability{AccessMode: string(c.Access), AttachmentMode: string(c.Attachment)}
		}),
	}
}

func VolumeSpec(m *pb.VolumeSpec) registry.VolumeSpec {
	return registry.VolumeSpec{
		Namespace: registry.Namespace(m.GetNamespace()), ID: registry.VolumeID(m.GetId()), Name: m.GetName(),
		Plugin: registry.PluginID(m.GetPluginId()), External: registry.ExternalID(m.GetExternalId()),
		CapacityMin: m.GetCapacityMin(), CapacityMax: m.GetCapacityMax(), FSType: m.GetFsType(),
		MountFlags: registry.FlagsOf(m.GetMountFlags()), Parameters: m.GetParameters(), Context: m.GetContext(),
		Required: each(m.GetRequired(), topology), Preferred: each(m.GetPreferred(), topology),
		Node:    registry.NodeName(m.GetNode()),
		CloneID: registry.VolumeID(m.GetCloneId()), CloneExternal: registry.ExternalID(m.GetCloneExternalId()),
		SnapshotID: registry.ExternalID(m.GetSnapshotId()), MountGroup: m.GetMountGroup(),
		Mutable: m.GetMutableParameters(), Ownership: ownership(m.GetOwnership()),
		Secrets: mapped(m.GetSecrets(), secret),
		Capabilities: each(m.GetCapabilities(), func(c *pb.VolumeCapability) registry.VolumeCapability {
			return registry.VolumeCapability{Access: registry.AccessMode(c.GetAccessMode()),
				Attachment: registry.AttachmentMode(c.GetAttachmentMode())}
		}),
	}
}

func VolumeProto(v registry.VolumeStatus) *pb.Volume {
	var attached registry.Attachment
	if len(v.Attachments) > 0 {
		attached = v.Attachments[0]
	}
	masked := v.Masked()
	return &pb.Volume{
		Spec: VolumeSpecProto(masked.VolumeSpec), State: string(v.State), Created: v.Created, Capacity: v.Capacity,
		Accessible: each(v.Accessible, topologyProto), CreateIndex: uint64(v.CreateIndex),
		ModifyIndex: uint64(v.ModifyIndex), Since: stamp(v.Since), Attach: string(attached.State),
		AttachedNodeId: string(attached.NodeID), Stage: string(v.Staging.State), StagedAt: treeProto(v.Staging.Path),
		Holders: each(v.Holders, holderProto), Intent: intentProto(v.Intent), Ephemeral: v.Ephemeral,
		Owner: string(v.Owner), Waiting: each(v.Waiting, waitProto), Expansion: expansionProto(v.Expansion),
		Health: healthProto(v.Health), Failure: failureProto(v.Failure), SourceVolume: string(v.Source.Volume),
		SourceSnapshot: string(v.Source.Snapshot), SourceSize: v.SourceSize, OriginJob: v.Origin.Job,
		OriginGroup:   v.Origin.Group,
		OriginRequest: string(v.Origin.Request), DeleteWith: string(v.DeleteWith), Made: v.Made,
		Modification: modificationProto(masked.Modification), Owned: ownershipProto(v.Owned),
		Attachments: each(v.Attachments, attachmentProto),
	}
}

// attachmentProto leaves out the publish context and the usage, which only the shim needs.
func attachmentProto(a registry.Attachment) *pb.Attachment {
	return &pb.Attachment{Node: string(a.Node), NodeId: string(a.NodeID), State: string(a.State),
		DetachingBy: a.Detaching.By, DetachingSince: stamp(a.Detaching.Since),
		DetachingConfirmed: a.Detaching.Confirmed}
}

func attachment(m *pb.Attachment) registry.Attachment {
	return registry.Attachment{Node: registry.NodeName(m.GetNode()), NodeID: registry.NodeID(m.GetNodeId()),
		State: registry.Mark(m.GetState()), Detaching: registry.Detaching{Confirmed: m.GetDetachingConfirmed(),
			Forced: registry.Forced{By: m.GetDetachingBy(), Since: timeOf(m.GetDetachingSince())}}}
}

func Volume(m *pb.Volume) registry.VolumeStatus {
	out := registry.VolumeStatus{Volume: registry.Volume{
		VolumeSpec: VolumeSpec(m.GetSpec()), State: registry.VolumeState(m.GetState()), Created: m.GetCreated(),
		Capacity:   m.GetCapacity(),
		Accessible: each(m.GetAccessible(), topology), CreateIndex: registry.Seq(m.GetCreateIndex()),
		ModifyIndex: registry.Seq(m.GetModifyIndex()),
		Since:       timeOf(m.GetSince()), Ephemeral: m.GetEphemeral(), Owner: registry.AllocID(m.GetOwner()),
		Expansion: expansion(m.GetExpansion()), Health: health(m.GetHealth()),
		Failure: failure(m.GetFailure()),
		Source: registry.Source{Volume: registry.ExternalID(m.GetSourceVolume()),
			Snapshot: registry.ExternalID(m.GetSourceSnapshot())},
		SourceSize: m.GetSourceSize(),
		Origin: registry.Origin{Job: m.GetOriginJob(), Group: m.GetOriginGroup(),
			Request: registry.RequestName(m.GetOriginRequest())},
		DeleteWith: registry.AllocID(m.GetDeleteWith()), Made: m.GetMade(),
		Modification: modification(m.GetModification()),
		Owned:        ownership(m.GetOwned()),
	}, Waiting: each(m.GetWaiting(), wait)}
	out.Attachments = each(m.GetAttachments(), attachment)
	if len(out.Attachments) == 0 && m.GetAttach() != "" { // of an earlier release, which sends one
		out.Attachments = []registry.Attachment{{State: registry.Mark(m.GetAttach()),
			NodeID: registry.NodeID(m.GetAttachedNodeId())}}
	}
	out.Staging = registry.Staging{State: registry.Mark(m.GetStage()), Path: tree(m.GetStagedAt())}
	out.Intent = intent(m.GetIntent())
	out.Holders = each(m.GetHolders(), func(h *pb.Holder) registry.Holder {
		return registry.Holder{
			Claim: registry.Claim{
				Volume: out.VolumeKey(), Name: out.VolumeName(), Alloc: registry.AllocID(h.GetAlloc()),
				Request: registry.RequestName(h.GetRequest()),
				Node:    registry.NodeName(h.GetNode()), Usage: usage(h.GetUsage()), Since: timeOf(h.GetSince()),
			},
			Publish: registry.Mark(h.GetPublish()), Target: tree(h.GetTarget()), Trouble: h.GetTrouble(),
			Troubled: timeOf(h.GetTroubled()),
		}
	})
	return out
}

// expansionProto leaves out the usage of the controller's call, which only the shim needs.
func expansionProto(e registry.Expansion) *pb.Expansion {
	if e == (registry.Expansion{}) {
		return nil
	}
	return &pb.Expansion{
		Done: e.Done, AskedRequired: e.Asked.Required, AskedLimit: e.Asked.Limit, NodeRequired: e.Node.Required,
		NodeLimit: e.Node.Limit,
		Refused:   e.Refused, Since: stamp(e.Since), Rpc: string(e.RPC), Code: e.Code, Detail: text(e.Detail),
	}
}

func expansion(m *pb.Expansion) registry.Expansion {
	return registry.Expansion{
		Done: m.GetDone(), Asked: registry.CapacityRange{Required: m.GetAskedRequired(), Limit: m.GetAskedLimit()},
		Node: registry.CapacityRange{Required: m.GetNodeRequired(), Limit: m.GetNodeLimit()}, Refused: m.GetRefused(),
		Since: timeOf(m.GetSince()), RPC: registry.RPC(m.GetRpc()), Code: m.GetCode(), Detail: m.GetDetail(),
	}
}

func modificationProto(m registry.Modification) *pb.Modification {
	if !m.Open() {
		return nil
	}
	return &pb.Modification{Asked: m.Asked, Since: stamp(m.Since), Code: m.Code, Detail: text(m.Detail)}
}

func modification(m *pb.Modification) registry.Modification {
	return registry.Modification{Asked: m.GetAsked(), Since: timeOf(m.GetSince()), Code: m.GetCode(),
		Detail: m.GetDetail()}
}

func healthProto(h registry.VolumeHealth) *pb.VolumeHealth {
	if h == (registry.VolumeHealth{}) {
		return nil
	}
	return &pb.VolumeHealth{Controller: conditionProto(h.Controller), Node: conditionProto(h.Node)}
}

func conditionProto(c registry.Condition) *pb.VolumeCondition {
	if c == (registry.Condition{}) {
		return nil
	}
	return &pb.VolumeCondition{
		Abnormal: c.Abnormal, Reason: text(c.Reason), Message: text(c.Message), Since: stamp(c.Since),
	}
}

func health(m *pb.VolumeHealth) registry.VolumeHealth {
	return registry.VolumeHealth{Controller: condition(m.GetController()), Node: condition(m.GetNode())}
}

func condition(m *pb.VolumeCondition) registry.Condition {
	return registry.Condition{
		Abnormal: m.GetAbnormal(), Reason: m.GetReason(), Message: m.GetMessage(), Since: timeOf(m.GetSince()),
	}
}

func failureProto(f registry.Failure) *pb.Failure {
	if f == (registry.Failure{}) {
		return nil
	}
	return &pb.Failure{Rpc: string(f.RPC), Code: f.Code, Detail: text(f.Detail), Since: stamp(f.Since)}
}

func failure(m *pb.Failure) registry.Failure {
	return registry.Failure{RPC: registry.RPC(m.GetRpc()), Code: m.GetCode(), Detail: m.GetDetail(),
		Since: timeOf(m.GetSince())}
}

func holderProto(h registry.Holder) *pb.Holder {
	return &pb.Holder{
		Alloc: string(h.Claim.Alloc), Request: string(h.Claim.Request), Node: string(h.Claim.Node),
		Usage: usageProto(h.Claim.Usage), Publish: string(h.Publish), Target: treeProto(h.Target),
		Since: stamp(h.Claim.Since), Trouble: text(h.Trouble), Troubled: stamp(h.Troubled),
	}
}

func intentProto(i *registry.Intent) *pb.IntentState {
	if i == nil {
		return nil
	}
	return &pb.IntentState{
		Rpc: string(i.RPC), Attempt: i.Attempt, Outcome: string(i.Outcome), Code: i.Code, Detail: text(i.Detail),
		Since: stamp(i.Since), Next: stamp(i.Next), Alloc: string(i.Alloc), Request: string(i.Request),
	}
}

func intent(m *pb.IntentState) *registry.Intent {
	if m == nil {
		return nil
	}
	return &registry.Intent{
		RPC: registry.RPC(m.Rpc), Attempt: m.Attempt, Outcome: registry.Outcome(m.Outcome), Code: m.Code,
		Detail: m.Detail, Since: timeOf(m.Since),
		Next: timeOf(m.Next), Alloc: registry.AllocID(m.Alloc), Request: registry.RequestName(m.Request),
	}
}

func ClaimProto(c registry.Claim) *pb.Claim {
	return &pb.Claim{
		Volume: VolumeNameProto(c.Name), Plugin: string(c.Volume.Plugin), ExternalId: string(c.Volume.External),
		Alloc: string(c.Alloc), Request: string(c.Request), Node: string(c.Node), Usage: usageProto(c.Usage),
		CreateIndex: uint64(c.CreateIndex), ModifyIndex: uint64(c.ModifyIndex), Since: stamp(c.Since),
	}
}

func Claim(m *pb.Claim) registry.Claim {
	return registry.Claim{
		Volume: volumeKey(m), Name: VolumeName(m.GetVolume()), Alloc: registry.AllocID(m.GetAlloc()),
		Request: registry.RequestName(m.GetRequest()), Node: registry.NodeName(m.GetNode()),
		Usage: usage(m.GetUsage()), Since: timeOf(m.GetSince()),
		CreateIndex: registry.Seq(m.GetCreateIndex()), ModifyIndex: registry.Seq(m.GetModifyIndex()),
	}
}

func AllocProto(a registry.AllocStatus) *pb.Alloc {
	return &pb.Alloc{
		Id: string(a.ID), Job: a.Job, Group: a.Group, Namespace: string(a.Namespace), Index: a.Index,
		State: string(a.State), Waits: text(registry.Waits(a.Waiting)), Waiting: each(a.Waiting, waitProto),
		CreateIndex: uint64(a.CreateIndex), ModifyIndex: uint64(a.ModifyIndex), Since: stamp(a.Since),
		ForcedBy: a.Forced.By, ForcedSince: stamp(a.Forced.Since),
		Volumes: each(a.Volumes, func(u registry.AllocVolume) *pb.Use {
			return &pb.Use{
				Request: string(u.Request), Volume: VolumeNameProto(u.Name), Plugin: string(u.Volume.Plugin),
				ExternalId: string(u.Volume.External), Usage: usageProto(u.Usage), Attach: string(u.Attach),
				Stage: string(u.Stage), Publish: string(u.Publish), Target: treeProto(u.Target),
				Intent: intentProto(u.Intent), Wait: maybeWaitProto(u.Wait), Trouble: text(u.Trouble),
				Troubled: stamp(u.Troubled), Expansion: expansionProto(u.Expansion), Health: healthProto(u.Health),
			}
		}),
	}
}

func Alloc(m *pb.Alloc) registry.AllocStatus {
	return registry.AllocStatus{
		Alloc: registry.Alloc{
			ID: registry.AllocID(m.GetId()), Job: m.GetJob(), Group: m.GetGroup(),
			Namespace: registry.Namespace(m.GetNamespace()), Index: m.GetIndex(),
			State: registry.AllocState(m.GetState()), Waiting: each(m.GetWaiting(), wait),
			CreateIndex: registry.Seq(m.GetCreateIndex()), ModifyIndex: registry.Seq(m.GetModifyIndex()),
			Since:  timeOf(m.GetSince()),
			Forced: registry.Forced{By: m.GetForcedBy(), Since: timeOf(m.GetForcedSince())},
		},
		Volumes: each(m.GetVolumes(), func(u *pb.Use) registry.AllocVolume {
			return registry.AllocVolume{
				Request: registry.RequestName(u.GetRequest()), Name: VolumeName(u.GetVolume()),
				Volume: volumeKey(u),
				Usage:  usage(u.GetUsage()), Attach: registry.Mark(u.GetAttach()), Stage: registry.Mark(u.GetStage()),
				Publish: registry.Mark(u.GetPublish()), Target: tree(u.GetTarget()), Intent: intent(u.GetIntent()),
				Wait: maybeWait(u.GetWait()), Trouble: u.GetTrouble(), Troubled: timeOf(u.GetTroubled()),
				Expansion: expansion(u.GetExpansion()), Health: health(u.GetHealth()),
			}
		}),
	}
}

func InfeasibleProto(i registry.Infeasible) *pb.Infeasible {
	return &pb.Infeasible{
		Request: string(i.Request), Volume: VolumeNameProto(i.Volume), Plugin: string(i.Plugin), Kind: string(i.Kind),
		Detail: i.Detail, Holders: each(i.Holders, ClaimProto),
	}
}

func Infeasible(m *pb.Infeasible) registry.Infeasible {
	return registry.Infeasible{
		Request: registry.RequestName(m.GetRequest()), Volume: VolumeName(m.GetVolume()),
		Plugin: registry.PluginID(m.GetPlugin()), Kind: registry.InfeasibleKind(m.GetKind()), Detail: m.GetDetail(),
		Holders: each(m.GetHolders(), Claim),
	}
}

func ForceProto(f registry.Force) *pb.Force {
	return &pb.Force{By: f.By, Confirm: f.Confirm, DryRun: f.DryRun}
}

func Force(m *pb.Force) registry.Force {
	return registry.Force{By: m.GetBy(), Confirm: m.GetConfirm(), DryRun: m.GetDryRun()}
}

func ReleaseStepProto(s registry.ReleaseStep) *pb.ReleaseStep {
	return &pb.ReleaseStep{
		Volume: VolumeNameProto(s.Volume), Request: string(s.Request), Action: string(s.Action), Rpc: string(s.RPC),
		Target: s.Target, Detail: s.Detail,
	}
}

func ReleaseStep(m *pb.ReleaseStep) registry.ReleaseStep {
	return registry.ReleaseStep{
		Volume: VolumeName(m.GetVolume()), Request: registry.RequestName(m.GetRequest()),
		Action: registry.ReleaseAction(m.GetAction()), RPC: registry.RPC(m.GetRpc()), Target: m.GetTarget(),
		Detail: m.GetDetail(),
	}
}
