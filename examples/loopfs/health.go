package main

import (
	"context"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"holdfast/examples/loopfs/internal/disk"
)

var volumeHealth = map[disk.Severity]csi.VolumeHealthErrorType{
	disk.Degraded:     csi.VolumeHealthErrorType_DEGRADED,
	disk.Inaccessible: csi.VolumeHealthErrorType_INACCESSIBLE,
	disk.Lost:         csi.VolumeHealthErrorType_DATA_LOSS,
}

func health(id disk.ID, problems []disk.Problem) *csi.VolumeHealth {
	h := &csi.VolumeHealth{VolumeId: string(id)}
	for _, p := range problems {
		h.HealthStatuses = append(h.HealthStatuses, &csi.VolumeHealth_VolumeHealthEntry{
			Status: volumeHealth[p.Severity], Reason: p.Reason, Message: p.Message,
		})
	}
	return h
}

// ControllerGetVolumeHealth checks the record and the bytes of a volume.
func (c *controller) ControllerGetVolumeHealth(
	_ context.Context, req *csi.ControllerGetVolumeHealthRequest,
) (*csi.ControllerGetVolumeHealthResponse, error) {
	id, err := disk.ParseID(disk.Volume, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	problems, err := c.pool.Health(id)
	if err != nil {
		return nil, err
	}
	return &csi.ControllerGetVolumeHealthResponse{VolumeHealth: health(id, problems)}, nil
}

// ControllerListVolumeHealth lists the volumes with a problem.
func (c *controller) ControllerListVolumeHealth(
	_ context.Context, req *csi.ControllerListVolumeHealthRequest,
) (*csi.ControllerListVolumeHealthResponse, error) {
	ids, err := c.pool.IDs(disk.Volume)
	if err != nil {
		return nil, err
	}
	problems := map[disk.ID][]disk.Problem{}
	var bad []disk.Record
	for _, id := range ids {
		if problems[id], err = c.pool.Health(id); known(err) != nil {
			return nil, err
		}
		if len(problems[id]) > 0 {
			bad = append(bad, disk.Record{ID: id, State: disk.Ready}) // the record itself may be damaged
		}
	}
	bad, next, err := page(bad, disk.Volume, req.GetMaxEntries(), req.GetStartingToken())
	answer := &csi.ControllerListVolumeHealthResponse{NextToken: next}
	for _, r := range bad {
		answer.Entries = append(answer.Entries, health(r.ID, problems[r.ID]))
	}
	return answer, err
}

// NodeGetVolumeHealth checks also the mounts of a volume on this node.
func (n *node) NodeGetVolumeHealth(
	_ context.Context, req *csi.NodeGetVolumeHealthRequest,
) (*csi.NodeGetVolumeHealthResponse, error) {
	id, err := parseVolumeID(req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	problems, err := n.pool.Health(id)
	if err != nil {
		return nil, err
	}
	if r, err := n.pool.Find(id); err == nil && r.Staged[n.id].Path != "" {
		now, err := n.inspect(r)
		if err != nil {
			return nil, err
		}
		problems = append(problems, now.problems()...)
	}
	return &csi.NodeGetVolumeHealthResponse{VolumeHealth: health(id, problems)}, nil
}

// problems compares what the record says with the mount table.
func (v view) problems() (list []disk.Problem) {
	staged, err := v.staged()
	switch {
	case err != nil:
		list = append(list, disk.Problem{Severity: disk.Inaccessible, Reason: "StageHidden", Message: err.Error()})
	case !staged:
		list = append(list, disk.Problem{Severity: disk.Inaccessible, Reason: "NotMounted",
			Message: "it is staged at " + v.stage.Path + ", but not mounted or attached there"})
	case !v.raw() && !v.readOnly():
		if m, _ := v.table.At(v.stage.Path); m.ReadOnly() {
			list = append(list, disk.Problem{Severity: disk.Degraded, Reason: "ReadOnly",
				Message: "its file system became read-only; errors are in the log of the kernel"})
		}
	}
	return list
}

// NodeGetStorageHealth checks the data directory.
func (n *node) NodeGetStorageHealth(
	context.Context, *csi.NodeGetStorageHealthRequest,
) (*csi.NodeGetStorageHealthResponse, error) {
	answer := &csi.NodeGetStorageHealthResponse{}
	if p := n.pool.StorageProblem(); p.Reason != "" {
		kind := csi.StorageHealthErrorType_STORAGE_DEGRADED
		if p.Severity == disk.Inaccessible {
			kind = csi.StorageHealthErrorType_STORAGE_UNREACHABLE
		}
		answer.BackendHealth = append(answer.BackendHealth, &csi.NodeGetStorageHealthResponse_StorageBackendHealth{
			Status: kind, Reason: p.Reason, Message: p.Message,
		})
	}
	return answer, nil
}
