package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/hashicorp/go-hclog"

	"holdfast/examples/loopfs/internal/disk"
	"holdfast/examples/loopfs/internal/mount"
)

// node mounts volumes on this machine: stage.go and publish.go.
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

func (n *node) NodeGetCapabilities(context.Context, *csi.NodeGetCapabilitiesRequest) (*csi.NodeGetCapabilitiesResponse, error) {
	var caps []*csi.NodeServiceCapability
	for _, t := range []csi.NodeServiceCapability_RPC_Type{
		csi.NodeServiceCapability_RPC_STAGE_UNSTAGE_VOLUME,
		csi.NodeServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
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
	table   mount.Table
	backend disk.Backend
	id      disk.ID
}

func (n *node) look(r disk.Record) (here, error) {
	b, err := n.pool.Backend(r)
	if err != nil {
		return here{}, err
	}
	table, err := mount.ReadTable()
	return here{table: table, backend: b, id: r.ID}, err
}

// shown says whether the volume is mounted at that path. Something else that is mounted there is an error.
func (h here) shown(path string) (bool, error) {
	e := h.table.At(path)
	if e == nil {
		return false, nil
	}
	ours, err := h.backend.Shows(h.table, e, h.id)
	if err == nil && !ours {
		err = disk.Errorf(disk.ErrInUse, "something else is mounted at %s; it stays untouched", path)
	}
	return ours, err
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

// recover forgets the stages and publishes of this node that are mounted nowhere: a kill or a reboot ended them.
func (n *node) recover() error {
	all, err := n.pool.All()
	if err != nil {
		return err
	}
	for _, r := range all {
		if _, staged := r.Staged[n.id]; !staged || r.State != disk.Ready {
			continue
		}
		if err := n.recoverVolume(r.ID); err != nil && !errors.Is(err, disk.ErrBusy) {
			n.log.Warn("volume not checked at start", "volume", r.ID, "error", err)
		}
	}
	return nil
}

func (n *node) recoverVolume(id disk.ID) error {
	h, err := n.pool.Lock(id)
	if err != nil {
		return err
	}
	defer h.Release()
	r, err := h.Find()
	if err != nil {
		return err
	}
	st, now := r.Staged[n.id], here{}
	if now, err = n.look(r); err != nil {
		return err
	}
	for target := range st.Published {
		if now.table.At(target) == nil && n.removeTarget(target) == nil {
			st = st.WithPublish(target, nil)
		}
	}
	if len(st.Published) == 0 && now.table.At(st.Path) == nil {
		n.log.Info("forget a stage that is mounted no more", "volume", id, "path", st.Path)
		return h.Save(r.WithStage(n.id, nil))
	}
	return h.Save(r.WithStage(n.id, &st))
}
