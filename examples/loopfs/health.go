package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/internal/mount"
)

// problem is an adverse condition of a volume.
type problem = csi.VolumeHealth_VolumeHealthEntry

// problems returns a list of one problem.
func problems(kind csi.VolumeHealthErrorType, reason, format string, args ...any) []*problem {
	return []*problem{{Status: kind, Reason: reason, Message: fmt.Sprintf(format, args...)}}
}

// health checks the record and the bytes of a volume. It has no entries for a healthy volume.
func (d *driver) health(id volumeID) (h *csi.VolumeHealth, r record, err error) {
	h = &csi.VolumeHealth{VolumeId: string(id)}
	r, err = d.load(id)
	if status.Code(err) == codes.DataLoss {
		h.HealthStatuses = problems(csi.VolumeHealthErrorType_DATA_LOSS, "RecordDamaged", "%v", err)
		return h, r, nil
	}
	if err == nil {
		h.HealthStatuses, err = d.bytesOf(r).check()
	}
	return h, r, err
}

func (l loop) check() ([]*problem, error) {
	st, err := os.Stat(l.image())
	if errors.Is(err, fs.ErrNotExist) {
		return problems(csi.VolumeHealthErrorType_DATA_LOSS, "ImageMissing", "%v", err), nil
	}
	if err != nil {
		return nil, err
	}
	size, damaged, err := l.readSuper()
	switch {
	case err != nil:
		return problems(csi.VolumeHealthErrorType_DATA_LOSS, "ImageUnreadable", "%v", err), nil
	case st.Size() < l.Bytes && (l.Usage.Block || st.Size() < size):
		return problems(csi.VolumeHealthErrorType_DATA_LOSS, "ImageTruncated", "the image has %d bytes, the volume %d",
			st.Size(), l.Bytes), nil
	case !l.Usage.Block && size == 0:
		return problems(csi.VolumeHealthErrorType_DATA_LOSS, "FileSystemDamaged", "the superblock was overwritten"), nil
	case !l.Usage.Block && damaged:
		return problems(csi.VolumeHealthErrorType_DEGRADED, "FileSystemErrors", "the kernel found errors in the file "+
			"system: unstage the volume and run e2fsck"), nil
	}
	return nil, nil
}

func (t tree) check() ([]*problem, error) {
	_, err := os.Stat(t.files())
	if errors.Is(err, fs.ErrNotExist) {
		return problems(csi.VolumeHealthErrorType_DATA_LOSS, "DirectoryMissing", "%v", err), nil
	}
	return nil, err
}

// ControllerGetVolumeHealth checks the record and the bytes of a volume.
func (d *driver) ControllerGetVolumeHealth(
	_ context.Context, req *csi.ControllerGetVolumeHealthRequest,
) (*csi.ControllerGetVolumeHealthResponse, error) {
	id, err := parseID(volumeKind, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	h, _, err := d.health(id)
	return &csi.ControllerGetVolumeHealthResponse{VolumeHealth: h}, err
}

// ControllerListVolumeHealth lists the volumes with a problem.
func (d *driver) ControllerListVolumeHealth(
	_ context.Context, req *csi.ControllerListVolumeHealthRequest,
) (*csi.ControllerListVolumeHealthResponse, error) {
	var bad []*csi.VolumeHealth
	for _, id := range d.ids(volumeKind) {
		h, _, err := d.health(id)
		if unlessNotFound(err) != nil {
			return nil, err
		}
		if err == nil && len(h.HealthStatuses) > 0 {
			bad = append(bad, h)
		}
	}
	bad, next, err := page(bad, (*csi.VolumeHealth).GetVolumeId, volumeKind, req.GetMaxEntries(),
		req.GetStartingToken())
	return &csi.ControllerListVolumeHealthResponse{Entries: bad, NextToken: next}, err
}

// NodeGetVolumeHealth checks what ControllerGetVolumeHealth checks, and the mounts of the volume.
func (d *driver) NodeGetVolumeHealth(
	_ context.Context, req *csi.NodeGetVolumeHealthRequest,
) (*csi.NodeGetVolumeHealthResponse, error) {
	id, err := parseID(volumeKind, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	h, r, err := d.health(id)
	if err != nil {
		return nil, err
	}
	h.HealthStatuses = append(h.HealthStatuses, d.checkMount(r)...)
	return &csi.NodeGetVolumeHealthResponse{VolumeHealth: h}, nil
}

// checkMount compares what the record says with the mount table.
func (d *driver) checkMount(r record) []*problem {
	if r.Stage == nil {
		return nil
	}
	staged, err := d.staged(r)
	if err != nil {
		return problems(csi.VolumeHealthErrorType_INACCESSIBLE, "MountHidden", "%v", err)
	}
	if !staged {
		return problems(csi.VolumeHealthErrorType_INACCESSIBLE, "NotMounted",
			"it is staged at %s, but not mounted or attached there", r.Stage.Path)
	}
	if m, _, err := mount.At(r.Stage.Path); err == nil && m.ReadOnly() && !r.Usage.Block && !r.stagedReadOnly() {
		return problems(csi.VolumeHealthErrorType_DEGRADED, "ReadOnly",
			"its file system became read-only; the reason is in the log of the kernel")
	}
	return nil
}

// NodeGetStorageHealth checks the data directory.
func (d *driver) NodeGetStorageHealth(
	context.Context, *csi.NodeGetStorageHealthRequest,
) (*csi.NodeGetStorageHealthResponse, error) {
	found := &csi.NodeGetStorageHealthResponse_StorageBackendHealth{}
	var st unix.Statfs_t
	if err := errors.Join(d.store.check(), unix.Statfs(d.path, &st)); err != nil {
		found.Status, found.Reason = csi.StorageHealthErrorType_STORAGE_UNREACHABLE, "DataDirectoryMissing"
		found.Message = err.Error()
	} else if st.Bavail < st.Blocks/50 {
		found.Status, found.Reason = csi.StorageHealthErrorType_STORAGE_DEGRADED, "DataDirectoryFull"
		found.Message = "less than 2% of the data directory's file system are free; without space writes to volumes " +
			"fail"
	} else {
		return &csi.NodeGetStorageHealthResponse{}, nil
	}
	return &csi.NodeGetStorageHealthResponse{
		BackendHealth: []*csi.NodeGetStorageHealthResponse_StorageBackendHealth{found},
	}, nil
}
