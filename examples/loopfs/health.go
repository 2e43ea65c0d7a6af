package main

import (
	"context"
	"errors"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

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
	token := req.GetStartingToken()
	if err := checkPage(disk.Volume, req.GetMaxEntries(), token); err != nil {
		return nil, err
	}
	ids, err := c.pool.IDs()
	if err != nil {
		return nil, err
	}
	answer := &csi.ControllerListVolumeHealthResponse{}
	for _, id := range ids {
		if id.Kind() != disk.Volume || string(id) <= token {
			continue
		}
		problems, err := c.pool.Health(id)
		if errors.Is(err, disk.ErrNotFound) || err == nil && len(problems) == 0 {
			continue
		}
		if err != nil {
			return nil, err
		}
		if n := len(answer.Entries); n > 0 && n == int(req.GetMaxEntries()) {
			answer.NextToken = answer.Entries[n-1].VolumeId
			break
		}
		answer.Entries = append(answer.Entries, health(id, problems))
	}
	return answer, nil
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
	case v.stage.Usage.Access == disk.Mounted && !v.readOnly():
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

// checkPage checks the arguments of a list.
func checkPage(kind disk.Kind, max int32, token string) error {
	if max < 0 {
		return disk.Errorf(disk.ErrInvalid, "max_entries is negative")
	}
	if _, err := disk.ParseID(kind, token); token != "" && err != nil {
		return status.Error(codes.Aborted,
			"starting_token is not a next_token of this call; start from the beginning")
	}
	return nil
}
