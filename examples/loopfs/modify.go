package main

import (
	"context"
	"strconv"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"holdfast/examples/loopfs/internal/disk"
)

// readAheadKey is the mutable parameter of the loop backend: how much the kernel reads ahead from the volume's devices,
// in KiB (/sys/block/loop0/queue/read_ahead_kb).
const readAheadKey = "readahead"

// parseMutable returns the read-ahead of mutable parameters in KiB, or 0 if there are none.
func parseMutable(parameters map[string]string) (int64, error) {
	for key := range parameters {
		if key != readAheadKey {
			return 0, disk.Errorf(disk.ErrInvalid, "mutable parameter %.64q is not %s", key, readAheadKey)
		}
	}
	if len(parameters) == 0 {
		return 0, nil
	}
	kib, err := strconv.ParseInt(parameters[readAheadKey], 10, 64)
	if err != nil || kib < 4 || kib > 64<<10 || kib%4 != 0 {
		return 0, disk.Errorf(disk.ErrInvalid, "mutable parameter %s=%.16q: want KiB from 4 to 65536, a multiple of 4",
			readAheadKey, parameters[readAheadKey])
	}
	return kib, nil
}

// ControllerModifyVolume changes the read-ahead of the volume's devices, also while it is in use.
func (c *controller) ControllerModifyVolume(
	_ context.Context, req *csi.ControllerModifyVolumeRequest,
) (*csi.ControllerModifyVolumeResponse, error) {
	id, badID := disk.ParseID(disk.Volume, req.GetVolumeId())
	kib, badParameters := parseMutable(req.GetMutableParameters())
	if err := refusal(badID, badParameters); err != nil {
		return nil, err
	}
	if kib == 0 {
		return nil, disk.Errorf(disk.ErrInvalid, "the mutable parameters are missing")
	}
	return &csi.ControllerModifyVolumeResponse{}, c.pool.Modify(id, kib)
}
