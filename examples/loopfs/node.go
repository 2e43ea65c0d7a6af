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

// node shows volumes on this machine: stage.go, publish.go, ephemeral.go, and what they hold: stats.go.
type node struct {
	csi.UnimplementedNodeServer
	pool       *disk.Pool
	id         string
	attach     bool // whether every volume has to be attached before it is staged
	maxVolumes int64
	log        hclog.Logger
}

func (n *node) NodeGetInfo(context.Context, *csi.NodeGetInfoRequest) (*csi.NodeGetInfoResponse, error) {
	return &csi.NodeGetInfoResponse{
		NodeId:             n.id,
		MaxVolumesPerNode:  n.maxVolumes,
		AccessibleTopology: &csi.Topology{Segments: map[string]string{topologyKey: n.id}},
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
	} {
		caps = append(caps, &csi.NodeServiceCapability{
			Type: &csi.NodeServiceCapability_Rpc{Rpc: &csi.NodeServiceCapability_RPC{Type: t}},
		})
	}
	return &csi.NodeGetCapabilitiesResponse{Capabilities: caps}, nil
}

// place resolves a path that a caller gave. One that would hide or enter loopfs' own files is refused.
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
		return mount.Place{}, disk.Errorf(disk.ErrInvalid, "the %s %s overlaps loopfs' data directory", what, at)
	}
	return at, err
}

// oldPlace is a place for taking down: without the directory above, nothing is mounted there, which is no error.
func (n *node) oldPlace(what, path string) (mount.Place, error) {
	at, err := n.place(what, path)
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	return at, err
}

// here is what the kernel shows of one volume on this node, at one moment.
type here struct {
	table   mounttable.Mounts
	backend disk.Backend
	node    string
	record  disk.Record
	stage   disk.Stage // as the record has it; without a path if it has none
}

func (n *node) look(r disk.Record) (here, error) {
	b, err := n.pool.Backend(r)
	if err != nil {
		return here{}, err
	}
	table, err := mounttable.Table(0)
	return here{table: table, backend: b, node: n.id, record: r, stage: r.Staged[n.id]}, err
}

// shown says whether the volume is mounted at that path. Something else that is mounted there is an error.
func (h here) shown(path string) (bool, error) {
	m, found := h.table.At(path)
	switch {
	case !found && len(h.table.Stack(path)) > 0:
		return false, disk.Errorf(disk.ErrInUse, "what is mounted at %s is hidden by a mount above; take that down first", path)
	case !found:
		return false, nil
	}
	ours, err := h.backend.Shows(h.table, m, h.record.ID)
	if err == nil && !ours {
		err = disk.Errorf(disk.ErrInUse, "something else is mounted at %s; it stays untouched", path)
	}
	return ours, err
}

// staged says whether the volume is staged as the record has it: mounted at its path, or with its device attached.
func (h here) staged() (bool, error) {
	switch {
	case h.stage.Path == "":
		return false, nil
	case h.stage.Usage.Access == disk.Raw:
		device, err := h.device(h.readOnly())
		return device != "", err
	}
	return h.shown(h.stage.Path)
}

// readOnly says whether the volume is staged so that nobody can write.
func (h here) readOnly() bool { return h.record.ReadOnly(h.node) }

func (h here) devices() (disk.Devices, error) {
	d, ok := h.backend.(disk.Devices)
	if !ok {
		return nil, disk.Errorf(disk.ErrInvalid, "backend %s has no block devices", h.record.Backend)
	}
	return d, nil
}

func (h here) device(readOnly bool) (string, error) {
	d, err := h.devices()
	if err != nil {
		return "", err
	}
	return d.Device(h.record.ID, readOnly)
}

// takeDown unmounts the volume at a place until nothing of it is mounted there.
func (n *node) takeDown(r disk.Record, at mount.Place) error {
	for {
		now, err := n.look(r)
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

// clean removes the target of a publish that is mounted no more: a directory, or a raw volume's file.
func clean(st disk.Stage, at mount.Place) error {
	if st.Usage.Access == disk.Raw {
		return at.RemoveFile()
	}
	return at.Remove()
}

// recover forgets the stages and publishes of this node that are mounted nowhere: a kill or a reboot ended them.
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
	h, r, err := n.pool.Take(id)
	if err != nil {
		return err
	}
	defer h.Release()
	now, err := n.look(r)
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
		n.log.Info("forget a stage that is no more", "volume", id, "path", st.Path)
		return h.Save(r.WithStage(n.id, nil))
	}
	return h.Save(r.WithStage(n.id, &st))
}

// removeTarget removes what a publish made and did not take away again.
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
