package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/hashicorp/go-hclog"

	"holdfast/examples/loopfs/internal/disk"
	"holdfast/examples/loopfs/internal/mount"
	mounttable "holdfast/internal/mount"
)

// node implements the node service. Its calls are in stage.go, publish.go, ephemeral.go and stats.go.
type node struct {
	csi.UnimplementedNodeServer
	pool       *disk.Pool
	id         string
	attach     bool // whether every volume has to be attached before it is staged
	maxVolumes int64
	topology   map[string]string
	log        hclog.Logger
}

func (n *node) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{
		NodeId:             n.id,
		MaxVolumesPerNode:  n.maxVolumes,
		AccessibleTopology: &csi.Topology{Segments: n.topology},
	}, nil
}

func (n *node) NodeGetCapabilities(
	context.Context, *csi.NodeGetCapabilitiesRequest,
) (*csi.NodeGetCapabilitiesResponse, error) {
	var caps []*csi.NodeServiceCapability
	for _, t := range []csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME,
		csi.NodeServiceCapability_RPC_GET_VOLUME_STATS,
		csi.NodeServiceCapability_RPC_EXPAND_VOLUME,
		csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
		csi.NodeServiceCapability_RPC_VOLUME_MOUNT_GROUP,
		csi.NodeServiceCapability_RPC_GET_VOLUME_HEALTH,
		csi.NodeServiceCapability_RPC_GET_STORAGE_HEALTH,
	} {
		caps = append(caps, &csi.NodeServiceCapability{
			Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: t}},
		})
	}
	return &csi.NodeGetCapabilitiesResponse{Capabilities: caps}, nil
}

// place resolves a path from a request. A path that overlaps the data directory is refused.
func (n *node) place(what, path string) (mount.Place, error) {
	if path == "" {
		return mount.Place{}, disk.Errorf(disk.ErrInvalid, "the %s is missing", what)
	}
	at, err := mount.Resolve(path)
	if errors.Is(err, mount.ErrPath) {
		return mount.Place{}, fmt.Errorf("%s: %w", what, err)
	}
	data := n.pool.Path()
	if mount.Inside(at.String(), data) || mount.Inside(data, at.String()) {
		return mount.Place{}, disk.Errorf(disk.ErrInvalid, "the %s %s overlaps the data directory", what, at)
	}
	return at, err
}

// placeToUnmount is place for a path where something is unmounted. A missing parent is no error, as nothing is mounted
// then.
func (n *node) placeToUnmount(what, path string) (mount.Place, error) {
	at, err := n.place(what, path)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return at, err
}

// view is the state of a volume on this node: its record and the mount table of one moment.
type view struct {
	table   mounttable.Mounts
	backend disk.Backend
	node    string
	record  disk.Record
	stage   disk.Stage // as the record has it; without a path if it has none
}

func (n *node) inspect(r disk.Record) (view, error) {
	b, err := n.pool.Backend(r)
	if err != nil {
		return view{}, err
	}
	table, err := mounttable.Table(0)
	return view{table: table, backend: b, node: n.id, record: r, stage: r.Staged[n.id]}, err
}

// shown reports whether the volume is mounted at a path. Another mount there is an error.
func (v view) shown(path string) (bool, error) {
	m, found := v.table.At(path)
	switch {
	case !found && len(v.table.Stack(path)) > 0:
		return false, disk.Errorf(disk.ErrInUse, "the mount at %s is hidden by another one above; unmount that first",
			path)
	case !found:
		return false, nil
	}
	ours, err := v.backend.Shows(v.table, m, v.record.ID)
	if err == nil && !ours {
		err = disk.Errorf(disk.ErrInUse, "another mount is at %s; loopfs does not touch it", path)
	}
	return ours, err
}

// staged reports whether the volume is mounted at its staging path, or its device attached.
func (v view) staged() (bool, error) {
	switch {
	case v.stage.Path == "":
		return false, nil
	case v.stage.Usage.Access == disk.Raw:
		device, err := v.device(v.readOnly())
		return device != "", err
	}
	return v.shown(v.stage.Path)
}

// readOnly reports whether the volume is staged read-only.
func (v view) readOnly() bool { return v.record.ReadOnly(v.node) }

func (v view) devices() (disk.Devices, error) {
	d, ok := v.backend.(disk.Devices)
	if !ok {
		return nil, disk.Errorf(disk.ErrInvalid, "backend %s has no block devices", v.record.Backend)
	}
	return d, nil
}

func (v view) device(readOnly bool) (string, error) {
	d, err := v.devices()
	if err != nil {
		return "", err
	}
	return d.Device(v.record.ID, readOnly)
}

// takeDown unmounts the volume at a place, also if it is mounted more than once.
func (n *node) takeDown(r disk.Record, at mount.Place) error {
	for {
		now, err := n.inspect(r)
		if err != nil {
			return err
		}
		shown, err := now.shown(at.String())
		if err != nil || !shown {
			return err
		}
		if err := at.Unmount(); err != nil {
			return err
		}
	}
}

// clean removes the unmounted target of a publish: a directory, or a file for a raw volume.
func clean(st disk.Stage, at mount.Place) error {
	if st.Usage.Access == disk.Raw {
		return at.RemoveFile()
	}
	return at.Remove()
}

// recover ends the stages and publishes of this node that a kill or a reboot unmounted.
func (n *node) recover() error {
	all, err := n.pool.All(disk.Volume, disk.Ephemeral)
	if err != nil {
		return err
	}
	for _, r := range all {
		if _, staged := r.Staged[n.id]; !staged || r.State != disk.Ready && r.ID.Kind() == disk.Volume {
			continue
		}
		if err := n.recoverVolume(r.ID); err != nil && !errors.Is(err, disk.ErrBusy) &&
			!errors.Is(err, disk.ErrNotFound) {
			n.log.Warn("volume not checked at start", "volume", r.ID, "error", err)
		}
	}
	return nil
}

func (n *node) recoverVolume(id disk.ID) error {
	if id.Kind() == disk.Ephemeral {
		return n.recoverEphemeral(id)
	}
	h, r, err := n.pool.Acquire(id)
	if err != nil {
		return err
	}
	defer h.Release()
	now, err := n.inspect(r)
	if err != nil {
		return err
	}
	st := now.stage
	for target := range st.Published {
		if len(now.table.Stack(target)) == 0 && removeTarget(st, target) == nil {
			st = st.WithPublish(target, nil)
		}
	}
	if staged, err := now.staged(); !staged && err == nil && len(st.Published) == 0 {
		n.log.Info("ending a stage that is not mounted", "volume", id, "path", st.Path)
		return h.Save(r.WithStage(n.id, nil))
	}
	return h.Save(r.WithStage(n.id, &st))
}

// removeTarget removes the target of a publish after its unmount.
func removeTarget(st disk.Stage, target string) error {
	at, err := mount.Resolve(target)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("target path %s: %w", filepath.Base(target), err)
	}
	return clean(st, at)
}
