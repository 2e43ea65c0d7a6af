package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"fmt"
	"maps"
	"slices"
	"strconv"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"holdfast/examples/loopfs/internal/disk"
)

// controller implements the controller service. Its calls for snapshots are in snapshots.go, those for health in
// health.go.
type controller struct {
	csi.UnimplementedControllerServer
	pool       *disk.Pool
	attach     bool
	maxVolumes int // per node, 0: no limit; only attaching counts
}

func (c *controller) ControllerGetCapabilities(
	context.Context, *csi.ControllerGetCapabilitiesRequest,
) (*csi.ControllerGetCapabilitiesResponse, error) {
	types := []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
		csi.ControllerServiceCapability_RPC_LIST_VOLUMES,
		csi.ControllerServiceCapability_RPC_GET_VOLUME,
		csi.ControllerServiceCapability_RPC_GET_CAPACITY,
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_SNAPSHOT,
		csi.ControllerServiceCapability_RPC_LIST_SNAPSHOTS,
		csi.ControllerServiceCapability_RPC_GET_SNAPSHOT,
		csi.ControllerServiceCapability_RPC_CLONE_VOLUME,
		csi.ControllerServiceCapability_RPC_EXPAND_VOLUME,
		csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
		csi.ControllerServiceCapability_RPC_GET_VOLUME_HEALTH,
		csi.ControllerServiceCapability_RPC_LIST_VOLUME_HEALTH,
	}
	if c.pool.NewVolumes == disk.LoopBackend {
		types = append(types, csi.ControllerServiceCapability_RPC_MODIFY_VOLUME)
	}
	if c.attach {
		types = append(types, csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME,
			csi.ControllerServiceCapability_RPC_PUBLISH_READONLY,
			csi.ControllerServiceCapability_RPC_LIST_VOLUMES_PUBLISHED_NODES)
	}
	answer := &csi.ControllerGetCapabilitiesResponse{}
	for _, t := range types {
		answer.Capabilities = append(answer.Capabilities, &csi.ControllerServiceCapability{
			Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: t}},
		})
	}
	return answer, nil
}

func (c *controller) CreateVolume(
	ctx context.Context, req *csi.CreateVolumeRequest,
) (*csi.CreateVolumeResponse, error) {
	name, badName := disk.ParseName(req.GetName())
	usage, badUsage := readAll(req.GetVolumeCapabilities())
	source, badSource := readSource(req.GetVolumeContentSource())
	parameters, badParameters := mapDigest("parameters", req.GetParameters())
	readAhead, badMutable := parseMutable(req.GetMutableParameters())
	places, err := c.places()
	if err := cmp.Or(badName, badUsage, badParameters, badMutable, badSource, err); err != nil {
		return nil, err
	}
	where := req.GetAccessibilityRequirements().GetRequisite()
	if len(where) > 0 && !slices.ContainsFunc(where, func(t *csi.Topology) bool { return contains(places, t) }) {
		return nil, status.Errorf(codes.ResourceExhausted, "the required topology has none of the nodes of this loopfs: %v",
			places)
	}
	r, err := c.pool.Create(ctx, disk.Request{
		Name: name, Usage: usage, Parameters: parameters, Source: source, ReadAhead: readAhead,
		AtLeast: req.GetCapacityRange().GetRequiredBytes(), AtMost: req.GetCapacityRange().GetLimitBytes(),
	})
	if err != nil {
		return nil, err
	}
	return &csi.CreateVolumeResponse{Volume: volume(r, places)}, nil
}

func volume(r disk.Record, places []*csi.Topology) *csi.Volume {
	return &csi.Volume{
		VolumeId: string(r.ID), CapacityBytes: r.Bytes, AccessibleTopology: places, ContentSource: contentSource(r.Source),
		VolumeContext: map[string]string{backendKey: r.Backend},
	}
}

// contains reports whether one of the places has all segments of t.
func contains(places []*csi.Topology, t *csi.Topology) bool {
	return slices.ContainsFunc(places, func(place *csi.Topology) bool {
		for key, value := range t.GetSegments() {
			if place.GetSegments()[key] != value {
				return false
			}
		}
		return true
	})
}

// places returns the topology of all volumes: the nodes that ever worked with this data directory.
func (c *controller) places() (places []*csi.Topology, err error) {
	nodes, err := c.pool.Nodes()
	for _, n := range nodes {
		places = append(places, &csi.Topology{Segments: n.Topology})
	}
	return places, err
}

func (c *controller) DeleteVolume(_ context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	err := c.pool.Delete(disk.Volume, req.GetVolumeId(), func(disk.Record) error { return nil })
	return &csi.DeleteVolumeResponse{}, err
}

// known returns an error, but none that means that a volume or snapshot does not exist.
func known(err error) error {
	if status.Code(err) == codes.NotFound {
		return nil
	}
	return err
}

// ControllerExpandVolume enlarges the bytes of a volume. With the loop backend the node enlarges the file system.
func (c *controller) ControllerExpandVolume(
	_ context.Context, req *csi.ControllerExpandVolumeRequest,
) (*csi.ControllerExpandVolumeResponse, error) {
	least, most := req.GetCapacityRange().GetRequiredBytes(), req.GetCapacityRange().GetLimitBytes()
	if least == 0 && most == 0 {
		return nil, status.Error(codes.InvalidArgument, "the capacity range is missing")
	}
	h, r, err := c.pool.Acquire(disk.Volume, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	defer h.Release()
	if err := checkCapability(r, req.GetVolumeCapability()); err != nil {
		return nil, err
	}
	r, err = c.pool.Expand(h, r, least, most)
	return &csi.ControllerExpandVolumeResponse{CapacityBytes: r.Bytes,
		NodeExpansionRequired: r.Backend == disk.LoopBackend}, err
}

// readAheadKey is the mutable parameter of the loop backend: how much the kernel reads ahead from the volume's devices,
// in KiB (/sys/block/loop0/queue/read_ahead_kb).
const readAheadKey = "readahead"

// parseMutable returns the read-ahead of mutable parameters in KiB, or 0 if there are none.
func parseMutable(parameters map[string]string) (int64, error) {
	if len(parameters) == 0 {
		return 0, nil
	}
	text, ok := parameters[readAheadKey]
	kib, err := strconv.ParseInt(text, 10, 64)
	if !ok || len(parameters) > 1 || err != nil || kib < 4 || kib > 64<<10 || kib%4 != 0 {
		return 0, status.Errorf(codes.InvalidArgument, "the only mutable parameter is %s: KiB from 4 to 65536, a multiple "+
			"of 4", readAheadKey)
	}
	return kib, nil
}

// ControllerModifyVolume changes the read-ahead of the volume's devices, also while it is in use. The record has it
// first, so the next stage sets what a kill prevented.
func (c *controller) ControllerModifyVolume(
	_ context.Context, req *csi.ControllerModifyVolumeRequest,
) (*csi.ControllerModifyVolumeResponse, error) {
	kib, err := parseMutable(req.GetMutableParameters())
	if err != nil {
		return nil, err
	}
	h, r, err := c.pool.Acquire(disk.Volume, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	defer h.Release()
	devices := c.pool.Devices(r)
	if devices == nil {
		return nil, status.Errorf(codes.InvalidArgument, "volume %s is a directory, which has no mutable parameters",
			r.ID)
	}
	if kib == 0 {
		return nil, status.Error(codes.InvalidArgument, "the mutable parameters are missing")
	}
	r.ReadAhead = kib
	if err := h.Save(r); err != nil {
		return nil, err
	}
	return &csi.ControllerModifyVolumeResponse{}, devices.SetReadAhead(r.ID, kib)
}

func (c *controller) GetCapacity(_ context.Context, req *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	none := &csi.GetCapacityResponse{} // no capacity is an answer, not an error
	places, err := c.places()
	if err != nil || req.GetAccessibleTopology() != nil && !contains(places, req.GetAccessibleTopology()) {
		return none, err
	}
	var usage disk.Usage
	if list := req.GetVolumeCapabilities(); len(list) > 0 {
		usage, err = readAll(list)
		if err != nil || c.pool.Backend(c.pool.NewVolumes).Supports(usage) != nil {
			return none, nil
		}
	}
	free, err := c.pool.Free()
	return &csi.GetCapacityResponse{AvailableCapacity: free, MaximumVolumeSize: wrapperspb.Int64(free),
		MinimumVolumeSize: wrapperspb.Int64(c.pool.MinSize(usage))}, err
}

func (c *controller) ValidateVolumeCapabilities(
	_ context.Context, req *csi.ValidateVolumeCapabilitiesRequest,
) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	if len(req.GetVolumeCapabilities()) == 0 {
		return nil, status.Error(codes.InvalidArgument, "the volume capabilities are missing")
	}
	r, err := c.pool.Get(disk.Volume, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	usage, err := readAll(req.GetVolumeCapabilities())
	backend, given := req.GetVolumeContext()[backendKey]
	var reason string
	switch {
	case err != nil:
		reason = err.Error()
	case !r.Usage.Fits(usage):
		reason = fmt.Sprintf("the volume was created for %s, not for %s", r.Usage, usage)
	case given && backend != r.Backend:
		reason = "the volume context is of another backend"
	case len(req.GetParameters()) > 0 && disk.Digest(req.GetParameters()) != r.Parameters:
		reason = "the volume was created with other parameters"
	default:
		return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
			VolumeContext: req.GetVolumeContext(), VolumeCapabilities: req.GetVolumeCapabilities(),
			Parameters: req.GetParameters(),
		}}, nil
	}
	return &csi.ValidateVolumeCapabilitiesResponse{Message: reason}, nil
}

func (c *controller) ListVolumes(_ context.Context, req *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	all, err := c.pool.All(disk.Volume)
	if err != nil {
		return nil, err
	}
	all, next, err := page(all, disk.Volume, req.GetMaxEntries(), req.GetStartingToken())
	if err != nil {
		return nil, err
	}
	places, err := c.places()
	answer := &csi.ListVolumesResponse{NextToken: next}
	for _, r := range all {
		e := &csi.ListVolumesResponse_Entry{Volume: volume(r, places)}
		if c.attach {
			e.Status = &csi.ListVolumesResponse_VolumeStatus{PublishedNodeIds: slices.Sorted(maps.Keys(r.Attached))}
		}
		answer.Entries = append(answer.Entries, e)
	}
	return answer, err
}

// page returns one page of ready records in the order of IDs. The token is the last ID of the page before, so it stays
// valid when its volume is deleted.
func page(all []disk.Record, kind disk.Kind, max int32, token string) (entries []disk.Record, next string, err error) {
	if max < 0 {
		return nil, "", status.Error(codes.InvalidArgument, "max_entries is negative")
	}
	if _, err := disk.ParseID(kind, token); token != "" && err != nil {
		return nil, "", status.Error(codes.Aborted, "starting_token is not a next_token of this call; start from the "+
			"beginning")
	}
	for _, r := range all {
		if r.State != disk.Ready || string(r.ID) <= token {
			continue
		}
		if n := len(entries); n > 0 && n == int(max) {
			return entries, string(entries[n-1].ID), nil
		}
		entries = append(entries, r)
	}
	return entries, "", nil
}

func (c *controller) ControllerGetVolume(
	_ context.Context, req *csi.ControllerGetVolumeRequest,
) (*csi.ControllerGetVolumeResponse, error) {
	r, err := c.pool.Get(disk.Volume, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	places, err := c.places()
	return &csi.ControllerGetVolumeResponse{Volume: volume(r, places),
		Status: &csi.ControllerGetVolumeResponse_VolumeStatus{PublishedNodeIds: slices.Sorted(maps.Keys(r.Attached))}}, err
}

var errNoAttach = status.Error(codes.Unimplemented, "loopfs was started without --attach")

// ControllerPublishVolume attaches a volume to a node. It returns a token that NodeStageVolume needs on that node.
func (c *controller) ControllerPublishVolume(
	_ context.Context, req *csi.ControllerPublishVolumeRequest,
) (*csi.ControllerPublishVolumeResponse, error) {
	if !c.attach {
		return nil, errNoAttach
	}
	node := req.GetNodeId()
	a, badAccess := readAccess(req.GetVolumeCapability())
	badNode := disk.CheckText("node id", node, maxNodeID)
	nodes, err := c.pool.Nodes()
	if badNode == nil && !slices.ContainsFunc(nodes, func(n disk.Node) bool { return n.ID == node }) {
		badNode = status.Errorf(codes.NotFound, "node %q never worked with this data directory", node)
	}
	if err := cmp.Or(badAccess, err, badNode); err != nil {
		return nil, err
	}
	h, r, err := c.pool.Acquire(disk.Volume, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	defer h.Release()
	have, ok := r.Attached[node]
	switch {
	case !r.Usage.Fits(a.usage):
		return nil, status.Errorf(codes.FailedPrecondition, "volume %s was created for %s, not for %s", r.ID, r.Usage,
			a.usage)
	case ok && (have.Usage != a.usage || have.ReadOnly != req.GetReadonly()):
		return nil, status.Errorf(codes.AlreadyExists, "volume %s is attached to node %s for another usage", r.ID, node)
	case !ok && len(r.Attached) > 0:
		return nil, status.Errorf(codes.FailedPrecondition, "volume %s is attached to another node", r.ID)
	case !ok:
		have = disk.Attachment{Token: rand.Text(), Usage: a.usage, ReadOnly: req.GetReadonly()}
		err = c.pool.Attach(h, r, node, c.maxVolumes, have)
	}
	return &csi.ControllerPublishVolumeResponse{PublishContext: map[string]string{tokenKey: have.Token}}, err
}

// ControllerUnpublishVolume detaches a volume from a node, or from every node if none is named. A volume that is staged
// on the node stays attached, and an unknown one is attached nowhere.
func (c *controller) ControllerUnpublishVolume(
	_ context.Context, req *csi.ControllerUnpublishVolumeRequest,
) (*csi.ControllerUnpublishVolumeResponse, error) {
	if !c.attach {
		return nil, errNoAttach
	}
	node := req.GetNodeId()
	if node != "" {
		if err := disk.CheckText("node id", node, maxNodeID); err != nil {
			return nil, err
		}
	}
	h, r, err := c.pool.Acquire(disk.Volume, req.GetVolumeId())
	if err != nil {
		return &csi.ControllerUnpublishVolumeResponse{}, known(err)
	}
	defer h.Release()
	for n := range r.Attached {
		if node != "" && n != node {
			continue
		}
		if st, staged := r.Staged[n]; staged && st.Boot == c.pool.Boot() {
			return nil, status.Errorf(codes.FailedPrecondition, "volume %s is still staged at %s on node %s", r.ID, st.Path,
				n)
		}
		r = r.WithAttachment(n, nil)
	}
	return &csi.ControllerUnpublishVolumeResponse{}, h.Save(r)
}
