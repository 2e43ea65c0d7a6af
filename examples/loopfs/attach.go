package main

import (
	"context"
	"crypto/rand"
	"crypto/subtle"
	"errors"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/examples/loopfs/internal/disk"
)

// maxNodeID is the limit of the CSI specification for node IDs, in bytes.
const maxNodeID = 256

var errNoAttach = status.Error(codes.Unimplemented, "loopfs was started without --attach")

// ControllerPublishVolume attaches a volume to a node. It returns a token that NodeStageVolume needs on that node.
func (c *controller) ControllerPublishVolume(
	_ context.Context, req *csi.ControllerPublishVolumeRequest,
) (*csi.ControllerPublishVolumeResponse, error) {
	if !c.attach {
		return nil, errNoAttach
	}
	id, badID := disk.ParseID(disk.Volume, req.GetVolumeId())
	a, badAccess := readAccess(req.GetVolumeCapability())
	if err := refusal(badID, badAccess, c.knownNode(req.GetNodeId())); err != nil {
		return nil, err
	}
	given, err := c.pool.Attach(id, req.GetNodeId(), c.maxVolumes, func(r disk.Record) (disk.Attachment, error) {
		return attachment(r, req.GetNodeId(), a.usage, req.GetReadonly())
	})
	if err != nil {
		return nil, err
	}
	return &csi.ControllerPublishVolumeResponse{PublishContext: map[string]string{tokenKey: given.Token}}, nil
}

func (c *controller) knownNode(id string) error {
	if err := disk.CheckText("node id", id, maxNodeID); err != nil {
		return err
	}
	nodes, err := c.pool.Nodes()
	if err != nil {
		return err
	}
	if !slices.ContainsFunc(nodes, func(n disk.Node) bool { return n.ID == id }) {
		return disk.Errorf(disk.ErrNotFound, "node %q never worked with this data directory", id)
	}
	return nil
}

// attachment returns the attachment to the node, a new one if the volume is attached nowhere.
func attachment(r disk.Record, node string, usage disk.Usage, readOnly bool) (disk.Attachment, error) {
	if !r.Usage.Fits(usage) {
		return disk.Attachment{}, disk.Errorf(disk.ErrInUse, "volume %s was created for %s, not for %s", r.ID, r.Usage,
			usage)
	}
	have, ok := r.Attached[node]
	if ok && (have.Usage != usage || have.ReadOnly != readOnly) {
		return disk.Attachment{}, disk.Errorf(disk.ErrExists, "volume %s is attached to node %s for another usage",
			r.ID, node)
	}
	if ok {
		return have, nil
	}
	for other := range r.Attached {
		return disk.Attachment{}, disk.Errorf(disk.ErrInUse, "volume %s is attached to node %s", r.ID, other)
	}
	return disk.Attachment{Token: rand.Text(), Usage: usage, ReadOnly: readOnly}, nil
}

// ControllerUnpublishVolume detaches a volume from a node, or from every node if none is named. A volume that is staged
// on the node stays attached.
func (c *controller) ControllerUnpublishVolume(
	_ context.Context, req *csi.ControllerUnpublishVolumeRequest,
) (*csi.ControllerUnpublishVolumeResponse, error) {
	if !c.attach {
		return nil, errNoAttach
	}
	id, err := disk.ParseID(disk.Volume, req.GetVolumeId())
	if err != nil && !errors.Is(err, disk.ErrNotFound) {
		return nil, err
	}
	if node := req.GetNodeId(); node != "" {
		if err := disk.CheckText("node id", node, maxNodeID); err != nil {
			return nil, err
		}
	}
	if err == nil {
		err = c.detach(id, req.GetNodeId())
	}
	if err != nil && !errors.Is(err, disk.ErrNotFound) { // an unknown volume is attached nowhere
		return nil, err
	}
	return &csi.ControllerUnpublishVolumeResponse{}, nil
}

func (c *controller) detach(id disk.ID, node string) error {
	h, r, err := c.pool.Acquire(id)
	if err != nil {
		return err
	}
	defer h.Release()
	next := r
	for n := range r.Attached {
		if node != "" && n != node {
			continue
		}
		if st, staged := r.Staged[n]; staged && st.Boot == c.pool.Boot() {
			return disk.Errorf(disk.ErrInUse, "volume %s is still staged at %s on node %s", id, st.Path, n)
		}
		next = next.WithAttachment(n, nil)
	}
	return h.Save(next)
}

// checkAttachment checks that the volume is attached to the node, if attaching is required or used, and that the
// publish context has its token.
func checkAttachment(r disk.Record, node string, required bool, context map[string]string) error {
	have, ok := r.Attached[node]
	if !ok && !required && len(r.Attached) == 0 {
		return nil
	}
	if !ok {
		return disk.Errorf(disk.ErrInUse, "volume %s is not attached to node %s", r.ID, node)
	}
	if subtle.ConstantTimeCompare([]byte(have.Token), []byte(context[tokenKey])) != 1 {
		return disk.Errorf(disk.ErrInUse, "the publish context is not that of the attachment of volume %s to node %s", r.ID,
			node)
	}
	return nil
}
