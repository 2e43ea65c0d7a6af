package csi

import (
	"cmp"
	"context"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"holdfast/registry"
)

// HealthRequest is ControllerGetVolumeHealthRequest, ControllerGetVolumeRequest or NodeGetVolumeHealthRequest.
type HealthRequest struct {
	VolumeID    registry.ExternalID
	Path        string                          // volume_publish_path, of the node's request only
	StagingPath string                          // staging_target_path, of the node's request only; empty: not staged
	Secrets     map[string]registry.SecretValue // of ControllerGetVolumeHealthRequest only
	Private     PrivateFunc                     // may be nil
}

// HealthPage is a page of volumes with their health. Volumes without a reported condition are left out.
type HealthPage struct {
	Volumes map[registry.ExternalID]registry.Condition
	Next    string // token; empty: it is the last
}

// NodeHealth sends NodeGetVolumeHealth.
func (f *Fleet) NodeHealth(
	ctx context.Context, at registry.InstanceKey, r HealthRequest,
) (registry.Condition, error) {
	req := &csi.NodeGetVolumeHealthRequest{
		VolumeId: string(r.VolumeID), VolumePublishPath: r.Path, StagingTargetPath: r.StagingPath,
	}
	var reply csi.NodeGetVolumeHealthResponse
	if err := f.send(ctx, registry.NodeHealthRPC, at, req, &reply, r.Private); err != nil {
		return registry.Condition{}, err
	}
	return healthOf(registry.NodeHealthRPC, at, r, reply.GetVolumeHealth(), f.lazyRedactor(ctx, at, req, r.Private))
}

// ControllerHealth sends ControllerGetVolumeHealth.
func (f *Fleet) ControllerHealth(
	ctx context.Context, at registry.InstanceKey, r HealthRequest,
) (registry.Condition, error) {
	req := &csi.ControllerGetVolumeHealthRequest{VolumeId: string(r.VolumeID), Secrets: reveal(r.Secrets)}
	var reply csi.ControllerGetVolumeHealthResponse
	if err := f.send(ctx, registry.ControllerHealthRPC, at, req, &reply, r.Private); err != nil {
		return registry.Condition{}, err
	}
	return healthOf(registry.ControllerHealthRPC, at, r, reply.GetVolumeHealth(),
		f.lazyRedactor(ctx, at, req, r.Private))
}

// healthOf returns the condition in the answer about one volume. An answer without one, or about another volume, is an
// error.
func healthOf(
	rpc registry.RPC, at registry.InstanceKey, r HealthRequest, h *csi.VolumeHealth, getRedactor func() redactor,
) (registry.Condition, error) {
	if h == nil || h.GetVolumeId() != string(r.VolumeID) {
		return registry.Condition{}, AnswerError(rpc, at, "the plugin's answer is not about volume %q", r.VolumeID)
	}
	return volumeHealth(h, getRedactor), nil
}

// ListHealth returns one page of ControllerListVolumeHealth.
func (f *Fleet) ListHealth(ctx context.Context, at registry.InstanceKey, token string) (page HealthPage, err error) {
	req := &csi.ControllerListVolumeHealthRequest{MaxEntries: pageSize, StartingToken: token}
	var reply csi.ControllerListVolumeHealthResponse
	err = f.send(ctx, registry.ListHealthRPC, at, req, &reply, nil)
	page = HealthPage{Next: reply.GetNextToken(), Volumes: map[registry.ExternalID]registry.Condition{}}
	getRedactor := f.lazyRedactor(ctx, at, req, nil)
	for _, h := range reply.GetEntries() {
		page.Volumes[registry.ExternalID(h.GetVolumeId())] = volumeHealth(h, getRedactor)
	}
	return page, err
}

// ListConditions returns the conditions in one page of ListVolumes, for plugins of CSI up to 1.12.
func (f *Fleet) ListConditions(
	ctx context.Context, at registry.InstanceKey, token string,
) (HealthPage, error) {
	volumes, err := f.ListVolumes(ctx, at, token)
	page := HealthPage{Next: volumes.Next, Volumes: map[registry.ExternalID]registry.Condition{}}
	for _, e := range volumes.Entries {
		if e.Condition != nil {
			page.Volumes[e.Volume] = *e.Condition
		}
	}
	return page, err
}

// VolumeCondition returns the condition in the answer to ControllerGetVolume, for plugins of CSI up to 1.12. It is nil
// if the answer has none.
func (f *Fleet) VolumeCondition(
	ctx context.Context, at registry.InstanceKey, r HealthRequest,
) (*registry.Condition, error) {
	req := &csi.ControllerGetVolumeRequest{VolumeId: string(r.VolumeID)}
	var reply csi.ControllerGetVolumeResponse
	err := f.send(ctx, registry.GetVolumeRPC, at, req, &reply, r.Private)
	if err != nil || reply.GetStatus() == nil {
		return nil, err
	}
	return condition(reply.GetStatus(), f.lazyRedactor(ctx, at, req, r.Private)), nil
}

// StorageHealth sends NodeGetStorageHealth.
func (f *Fleet) StorageHealth(ctx context.Context, at registry.InstanceKey) (registry.Condition, error) {
	req := &csi.NodeGetStorageHealthRequest{}
	var reply csi.NodeGetStorageHealthResponse
	if err := f.send(ctx, registry.StorageHealthRPC, at, req, &reply, nil); err != nil {
		return registry.Condition{}, err
	}
	var list []healthEntry
	for _, b := range bounded(reply.GetBackendHealth()) {
		status, known := csi.StorageHealthErrorType_name[int32(b.GetStatus())]
		list = append(list, healthEntry{known && b.GetStatus() != 0, status, b.GetReason(), b.GetMessage()})
	}
	return conditionOf(list, f.lazyRedactor(ctx, at, req, nil)), nil
}

// volumeHealth returns the condition of one volume. A volume without statuses is healthy.
func volumeHealth(h *csi.VolumeHealth, getRedactor func() redactor) registry.Condition {
	var list []healthEntry
	for _, e := range bounded(h.GetHealthStatuses()) {
		status, known := csi.VolumeHealthErrorType_name[int32(e.GetStatus())]
		list = append(list, healthEntry{known && e.GetStatus() != 0, status, e.GetReason(), e.GetMessage()})
	}
	return conditionOf(list, getRedactor)
}

// healthEntry is a VolumeHealthEntry or a StorageBackendHealth.
type healthEntry struct {
	known                   bool // this build knows the status, and it is not the zero value
	status, reason, message string
}

// conditionOf joins the entries of a plugin into one condition. As CSI demands (VolumeHealth.health_statuses), it
// ignores a status that this build does not know; the plugin has to report a status of an earlier version as well.
// getRedactor is called only if there are texts, because it may resolve secrets.
func conditionOf(list []healthEntry, getRedactor func() redactor) registry.Condition {
	list = slices.DeleteFunc(list, func(t healthEntry) bool { return !t.known })
	if len(list) == 0 {
		return registry.Condition{}
	}
	slices.SortFunc(list, func(a, b healthEntry) int {
		return cmp.Or(cmp.Compare(a.status, b.status), cmp.Compare(a.reason, b.reason))
	})
	var reasons, messages []string
	for _, t := range list {
		reasons = append(reasons, strings.TrimSuffix(t.status+"/"+t.reason, "/"))
		if t.message != "" {
			messages = append(messages, t.message)
		}
	}
	r := getRedactor()
	return registry.Condition{
		Abnormal: true, Reason: r.redact(strings.Join(slices.Compact(reasons), ", ")),
		Message: r.redact(strings.Join(slices.Compact(messages), "; ")),
	}
}
