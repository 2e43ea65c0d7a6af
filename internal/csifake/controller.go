package csifake

import (
	"context"
	"crypto/sha256"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

type controller struct {
	csi.UnimplementedControllerServer
	p *Plugin
}

func (s controller) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (
	*csi.ControllerGetCapabilitiesResponse, error,
) {
	reply := &csi.ControllerGetCapabilitiesResponse{}
	for _, n := range s.p.caps["controller"] {
		rpc := &csi.ControllerServiceCapability_RPC{Type: csi.ControllerServiceCapability_RPC_Type(n)}
		reply.Capabilities = append(reply.Capabilities,
			&csi.ControllerServiceCapability{Type: &csi.ControllerServiceCapability_Rpc{Rpc: rpc}})
	}
	return reply, nil
}

// IDForm is the form of volume IDs.
type IDForm string

const (
	IDShort   IDForm = ""        // vol-5fd924625f6ab16a
	IDSlashes IDForm = "slashes" // a path, 166 bytes long
	IDLong    IDForm = "1KiB"
)

// IDForms lists all forms.
var IDForms = []IDForm{IDShort, IDSlashes, IDLong}

// VolumeID returns the ID that CreateVolume gives to a name. The same name always has the same ID.
func VolumeID(name string) string { return IDShort.VolumeID(name) }

// VolumeID returns the ID of a name in this form.
func (f IDForm) VolumeID(name string) string {
	id := fmt.Sprintf("vol-%x", sha256.Sum256([]byte(name)))[:20]
	switch f {
	case IDSlashes:
		return "/subscriptions/" + strings.Repeat("0/", 65) + "/" + id
	case IDLong:
		return id + strings.Repeat("#", 1024-len(id))
	}
	return id
}

func (s controller) CreateVolume(ctx context.Context, r *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	if r.GetName() == "" || len(r.GetVolumeCapabilities()) == 0 {
		return nil, invalid("name or volume_capabilities is missing")
	}
	if callOf(ctx).ignoresSource() {
		r = proto.CloneOf(r)
		r.VolumeContentSource = nil
	}
	size, err := capacity(r.GetCapacityRange())
	if err == nil {
		err = s.p.checkMutable(r.GetMutableParameters())
	}
	if err != nil {
		return nil, err
	}
	id := s.p.cfg.IDs.VolumeID(r.GetName())
	var v *volume
	err = s.p.cfg.Backend.change(func(c *contents) error {
		least, err := s.p.source(c, r.GetVolumeContentSource())
		if err != nil {
			return err
		}
		if limit := r.GetCapacityRange().GetLimitBytes(); limit > 0 && limit < least {
			return status.Errorf(codes.OutOfRange, "the source has %d bytes", least)
		}
		size = max(size, least)
		made := madeFrom(r)
		if v = c.Volumes[id]; v != nil {
			return compatible(v, made, r.GetCapacityRange())
		}
		if used(c)+size > s.p.cfg.Capacity {
			return status.Error(codes.ResourceExhausted, "the backend is full")
		}
		v = &volume{ID: id, Name: r.GetName(), Capacity: size, Made: made,
			Mutable: maps.Clone(r.GetMutableParameters()),
			Context: map[string]string{"csifake/name": r.GetName()}}
		maps.Copy(v.Context, s.p.cfg.VolumeContext)
		v.Topology = preferredTopology(r.GetAccessibilityRequirements())
		c.Volumes[v.ID] = v
		return nil
	})
	if err != nil {
		return nil, err
	}
	reply := &csi.CreateVolumeResponse{Volume: v.message(s.p)}
	reply.Volume.ContentSource = r.GetVolumeContentSource() // nil if the source was ignored
	return reply, nil
}

func capacity(r *csi.CapacityRange) (int64, error) {
	switch need, limit := r.GetRequiredBytes(), r.GetLimitBytes(); {
	case need < 0 || limit < 0 || limit > 0 && need > limit:
		return 0, status.Error(codes.OutOfRange, "no size is in that range")
	case need == 0 && limit > 0:
		return min(limit, 1<<30), nil
	case need == 0:
		return 1 << 30, nil
	default:
		return need, nil
	}
}

// madeFrom returns a hash of a request without size and secrets. Two requests with one name and an equal hash are for
// the same volume.
func madeFrom(r *csi.CreateVolumeRequest) string {
	same := proto.CloneOf(r)
	same.CapacityRange = nil
	hash, _ := requestHash(same)
	return hash
}

func compatible(v *volume, made string, size *csi.CapacityRange) error {
	limit := size.GetLimitBytes()
	if v.Made != made || v.Capacity < size.GetRequiredBytes() || limit > 0 && v.Capacity > limit {
		return status.Errorf(codes.AlreadyExists, "volume %q exists and is another", v.Name)
	}
	return nil
}

// source returns the smallest size of a volume that is filled from the source.
func (p *Plugin) source(c *contents, s *csi.VolumeContentSource) (least int64, err error) {
	switch {
	case s.GetSnapshot() != nil:
		x := c.Snapshots[s.GetSnapshot().GetSnapshotId()]
		if !p.caps.has("controller/CREATE_DELETE_SNAPSHOT") {
			return 0, invalid("this plugin has no snapshots")
		}
		if x == nil {
			return 0, status.Errorf(codes.NotFound, "snapshot %q does not exist", s.GetSnapshot().GetSnapshotId())
		}
		return x.Size, nil
	case s.GetVolume() != nil:
		v := c.Volumes[s.GetVolume().GetVolumeId()]
		if !p.caps.has("controller/CLONE_VOLUME") {
			return 0, invalid("this plugin clones no volumes")
		}
		if v == nil {
			return 0, status.Errorf(codes.NotFound, "volume %q does not exist", s.GetVolume().GetVolumeId())
		}
		return v.Capacity, nil
	}
	return 0, nil
}

// preferredTopology returns the topology that a request prefers most.
func preferredTopology(r *csi.TopologyRequirement) []map[string]string {
	all := append(slices.Clone(r.GetPreferred()), r.GetRequisite()...)
	if len(all) == 0 {
		return nil
	}
	return []map[string]string{all[0].GetSegments()}
}

func used(c *contents) (sum int64) {
	for _, v := range c.Volumes {
		sum += v.Capacity
	}
	return sum
}

func (v *volume) message(p *Plugin) *csi.Volume {
	m := &csi.Volume{VolumeId: v.ID, CapacityBytes: v.Capacity, VolumeContext: maps.Clone(v.Context)}
	for _, segments := range v.Topology {
		m.AccessibleTopology = append(m.AccessibleTopology, &csi.Topology{Segments: segments})
	}
	if t := p.topology(); t != nil && len(v.Topology) == 0 {
		m.AccessibleTopology = []*csi.Topology{t}
	}
	return m
}

func (s controller) DeleteVolume(_ context.Context, r *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	if r.GetVolumeId() == "" {
		return nil, invalid("volume_id is missing")
	}
	return &csi.DeleteVolumeResponse{}, s.p.cfg.Backend.change(func(c *contents) error {
		if v := c.Volumes[r.GetVolumeId()]; v != nil && v.inUse() {
			return status.Errorf(codes.FailedPrecondition, "volume %q is in use", v.ID)
		}
		delete(c.Volumes, r.GetVolumeId())
		return nil
	})
}

func (s controller) ControllerPublishVolume(_ context.Context, r *csi.ControllerPublishVolumeRequest) (
	*csi.ControllerPublishVolumeResponse, error,
) {
	if r.GetNodeId() == "" || r.GetVolumeCapability() == nil {
		return nil, invalid("node_id or volume_capability is missing")
	}
	var a *attachment
	err := s.p.cfg.Backend.change(func(c *contents) error {
		v, err := s.p.find(c, r.GetVolumeId())
		if err != nil {
			return err
		}
		hash, _ := requestHash(r)
		if a = v.Attached[r.GetNodeId()]; a != nil {
			if a.Request != hash {
				return status.Errorf(codes.AlreadyExists, "volume %q is published at %q otherwise", v.ID, r.GetNodeId())
			}
			return nil
		}
		if err := s.p.mayAttach(c, v, r); err != nil {
			return err
		}
		a = &attachment{Request: hash, Mode: int32(r.GetVolumeCapability().GetAccessMode().GetMode()),
			Context: map[string]string{"csifake/device": "dev-" + v.ID, "csifake/node": r.GetNodeId()}}
		maps.Copy(a.Context, s.p.cfg.PublishContext)
		if v.Attached == nil {
			v.Attached = map[string]*attachment{}
		}
		v.Attached[r.GetNodeId()] = a
		return nil
	})
	if err != nil {
		return nil, err
	}
	return &csi.ControllerPublishVolumeResponse{PublishContext: maps.Clone(a.Context)}, nil
}

func (p *Plugin) mayAttach(c *contents, v *volume, r *csi.ControllerPublishVolumeRequest) error {
	if len(c.NodeIDs) > 0 && !c.NodeIDs[r.GetNodeId()] {
		return status.Errorf(codes.NotFound, "node %q does not exist", r.GetNodeId())
	}
	if len(v.Attached) > 0 && !manyNodes(r.GetVolumeCapability().GetAccessMode().GetMode()) {
		return status.Errorf(codes.FailedPrecondition, "volume %q is published at another node", v.ID)
	}
	count := int64(0)
	for _, other := range c.Volumes {
		if other.Attached[r.GetNodeId()] != nil {
			count++
		}
	}
	if p.cfg.MaxVolumes > 0 && count >= p.cfg.MaxVolumes {
		return status.Errorf(codes.ResourceExhausted, "node %q has %d volumes", r.GetNodeId(), count)
	}
	return nil
}

func manyNodes(m csi.VolumeCapability_AccessMode_Mode) bool {
	switch m {
	case csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY,
		csi.VolumeCapability_AccessMode_MULTI_NODE_SINGLE_WRITER,
		csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER:
		return true
	}
	return false
}

// ControllerUnpublishVolume without a node ID detaches the volume from every node, as the specification says.
func (s controller) ControllerUnpublishVolume(_ context.Context, r *csi.ControllerUnpublishVolumeRequest) (
	*csi.ControllerUnpublishVolumeResponse, error,
) {
	return &csi.ControllerUnpublishVolumeResponse{}, s.p.cfg.Backend.change(func(c *contents) error {
		v, err := s.p.find(c, r.GetVolumeId())
		if status.Code(err) == codes.NotFound && !c.Forgotten {
			return nil // a missing volume is attached nowhere
		}
		if err != nil {
			return err
		}
		delete(v.Attached, r.GetNodeId())
		if r.GetNodeId() == "" {
			clear(v.Attached)
		}
		return nil
	})
}

func (s controller) ValidateVolumeCapabilities(_ context.Context, r *csi.ValidateVolumeCapabilitiesRequest) (
	*csi.ValidateVolumeCapabilitiesResponse, error,
) {
	if len(r.GetVolumeCapabilities()) == 0 {
		return nil, invalid("volume_capabilities is missing")
	}
	err := s.p.cfg.Backend.change(func(c *contents) error {
		_, err := s.p.find(c, r.GetVolumeId())
		return err
	})
	if err != nil {
		return nil, err
	}
	return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
		VolumeContext: r.GetVolumeContext(), VolumeCapabilities: r.GetVolumeCapabilities(),
		Parameters: r.GetParameters(), MutableParameters: r.GetMutableParameters()}}, nil
}

func (s controller) ListVolumes(ctx context.Context, r *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	reply := &csi.ListVolumesResponse{}
	err := s.p.cfg.Backend.change(func(c *contents) error {
		ids, next, err := s.p.page(slices.Sorted(maps.Keys(c.Volumes)), r.GetMaxEntries(), r.GetStartingToken())
		for _, id := range ids {
			status := &csi.ListVolumesResponse_VolumeStatus{}
			if s.p.caps.has("controller/LIST_VOLUMES_PUBLISHED_NODES") {
				status.PublishedNodeIds = slices.Sorted(maps.Keys(c.Volumes[id].Attached))
			}
			s.p.addCondition(ctx, "controller", id, status)
			reply.Entries = append(reply.Entries,
				&csi.ListVolumesResponse_Entry{Volume: c.Volumes[id].message(s.p), Status: status})
		}
		reply.NextToken = next
		return err
	})
	return reply, err
}

// page returns a page of a list, with the plugin's limit and order.
func (p *Plugin) page(ids []string, most int32, token string) (piece []string, next string, err error) {
	if limit := int32(p.cfg.Page); limit > 0 && (most == 0 || most > limit) {
		most = limit
	}
	piece, next, err = page(ids, most, token)
	if p.cfg.Page > 0 {
		piece = slices.Clone(piece)
		slices.Reverse(piece)
	}
	return piece, next, err
}

// page returns a piece of a list. The token is the position at which to continue. A token outside of the list is
// ABORTED.
func page(ids []string, most int32, token string) (piece []string, next string, err error) {
	from := 0
	if token != "" {
		if from, err = strconv.Atoi(token); err != nil || from < 0 || from > len(ids) {
			return nil, "", status.Errorf(codes.Aborted, "%q is no token of this list", token)
		}
	}
	if most < 0 {
		return nil, "", invalid("max_entries is negative")
	}
	to := len(ids)
	if most > 0 && from+int(most) < to {
		to = from + int(most)
		next = strconv.Itoa(to)
	}
	return ids[from:to], next, nil
}

func (s controller) GetCapacity(context.Context, *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	reply := &csi.GetCapacityResponse{MaximumVolumeSize: wrapperspb.Int64(s.p.cfg.Capacity)}
	return reply, s.p.cfg.Backend.change(func(c *contents) error {
		reply.AvailableCapacity = max(0, s.p.cfg.Capacity-used(c))
		return nil
	})
}

func (s controller) ControllerExpandVolume(_ context.Context, r *csi.ControllerExpandVolumeRequest) (
	*csi.ControllerExpandVolumeResponse, error,
) {
	size, err := capacity(r.GetCapacityRange())
	if err != nil {
		return nil, err
	}
	reply := &csi.ControllerExpandVolumeResponse{NodeExpansionRequired: s.p.caps.has("node/EXPAND_VOLUME")}
	return reply, s.p.cfg.Backend.change(func(c *contents) error {
		v, err := s.p.find(c, r.GetVolumeId())
		if err != nil {
			return err
		}
		if s.p.caps.has("expansion/OFFLINE") && !s.p.caps.has("expansion/ONLINE") && v.inUse() {
			return status.Errorf(codes.FailedPrecondition, "volume %q is in use", v.ID)
		}
		if size-v.Capacity > s.p.cfg.Capacity-used(c) {
			return status.Error(codes.OutOfRange, "the backend does not have that much")
		}
		v.Capacity = max(v.Capacity, size)
		reply.CapacityBytes = v.Capacity
		return nil
	})
}

func (s controller) ControllerGetVolume(ctx context.Context, r *csi.ControllerGetVolumeRequest) (
	*csi.ControllerGetVolumeResponse, error,
) {
	reply := &csi.ControllerGetVolumeResponse{}
	return reply, s.p.cfg.Backend.change(func(c *contents) error {
		v, err := s.p.find(c, r.GetVolumeId())
		if err != nil {
			return err
		}
		reply.Volume = v.message(s.p)
		reply.Status = &csi.ControllerGetVolumeResponse_VolumeStatus{}
		if s.p.caps.has("controller/LIST_VOLUMES_PUBLISHED_NODES") {
			reply.Status.PublishedNodeIds = slices.Sorted(maps.Keys(v.Attached))
		}
		s.p.addCondition(ctx, "controller", v.ID, reply.Status)
		return nil
	})
}

func (s controller) ControllerModifyVolume(_ context.Context, r *csi.ControllerModifyVolumeRequest) (
	*csi.ControllerModifyVolumeResponse, error,
) {
	if len(r.GetMutableParameters()) == 0 {
		return nil, invalid("mutable_parameters is missing")
	}
	return &csi.ControllerModifyVolumeResponse{}, s.p.cfg.Backend.change(func(c *contents) error {
		v, err := s.p.find(c, r.GetVolumeId())
		if err == nil {
			err = s.p.checkMutable(r.GetMutableParameters())
		}
		if err != nil {
			return err
		}
		if v.Mutable == nil {
			v.Mutable = map[string]string{}
		}
		maps.Copy(v.Mutable, r.GetMutableParameters())
		return nil
	})
}

// checkMutable returns an error if the plugin does not have one of the mutable parameters.
func (p *Plugin) checkMutable(mutable map[string]string) error {
	for key := range mutable {
		if len(p.cfg.Mutable) > 0 && !slices.Contains(p.cfg.Mutable, key) {
			return invalid("unknown mutable parameter %q", key)
		}
	}
	return nil
}
