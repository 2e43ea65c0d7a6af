package main

import (
	"context"
	"errors"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"holdfast/examples/loopfs/internal/disk"
)

func health(id disk.ID, problems []*disk.Problem) *csi.VolumeHealth {
	return &csi.VolumeHealth{VolumeId: string(id), HealthStatuses: problems}
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
	problems := map[disk.ID][]*disk.Problem{}
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
	if r, err := n.pool.Get(id.Kind(), string(id)); err == nil && r.Staged[n.id].Path != "" {
		v, err := n.inspect(r)
		if err != nil {
			return nil, err
		}
		if p := v.problem(); p != nil {
			problems = append(problems, p)
		}
	}
	return &csi.NodeGetVolumeHealthResponse{VolumeHealth: health(id, problems)}, nil
}

// problem compares what the record says with the mount table. It is nil if both agree.
func (v view) problem() *disk.Problem {
	staged, err := v.staged()
	if err != nil {
		return &disk.Problem{Status: csi.VolumeHealthErrorType_INACCESSIBLE, Reason: "MountHidden", Message: err.Error()}
	}
	if !staged {
		return &disk.Problem{Status: csi.VolumeHealthErrorType_INACCESSIBLE, Reason: "NotMounted",
			Message: "it is staged at " + v.stage.Path + ", but not mounted or attached there"}
	}
	if m, _ := v.table.At(v.stage.Path); m.ReadOnly() && !v.raw() && !v.readOnly() {
		return &disk.Problem{Status: csi.VolumeHealthErrorType_DEGRADED, Reason: "ReadOnly",
			Message: "its file system became read-only; the reason is in the log of the kernel"}
	}
	return nil
}

// NodeGetStorageHealth checks the data directory.
func (n *node) NodeGetStorageHealth(
	context.Context, *csi.NodeGetStorageHealthRequest,
) (*csi.NodeGetStorageHealthResponse, error) {
	problem := &csi.NodeGetStorageHealthResponse_StorageBackendHealth{}
	var st unix.Statfs_t
	if err := errors.Join(n.pool.Check(), unix.Statfs(n.pool.Path(), &st)); err != nil {
		problem.Status, problem.Reason = csi.StorageHealthErrorType_STORAGE_UNREACHABLE, "DataDirectoryMissing"
		problem.Message = err.Error()
	} else if st.Bavail < st.Blocks/50 {
		problem.Status, problem.Reason = csi.StorageHealthErrorType_STORAGE_DEGRADED, "DataDirectoryFull"
		problem.Message = "less than 2% of the data directory's file system are free; without space writes to volumes fail"
	} else {
		return &csi.NodeGetStorageHealthResponse{}, nil
	}
	return &csi.NodeGetStorageHealthResponse{
		BackendHealth: []*csi.NodeGetStorageHealthResponse_StorageBackendHealth{problem},
	}, nil
}
