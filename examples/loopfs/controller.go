package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"

	"holdfast/examples/loopfs/internal/disk"
)

// controller makes, lists and removes volumes; with attach it also gives them to nodes (attach.go).
type controller struct {
	csi.UnimplementedControllerServer
	pool       *disk.Pool
	attach     bool
	maxVolumes int64 // per node, 0: no limit; only attaching counts
}

func (c *controller) ControllerGetCapabilities(context.Context, *csi.ControllerGetCapabilitiesRequest) (*csi.ControllerGetCapabilitiesResponse, error) {
	types := []csi.ControllerServiceCapability_RPC_Type{
		csi.ControllerServiceCapability_RPC_CREATE_DELETE_VOLUME,
		csi.ControllerServiceCapability_RPC_LIST_VOLUMES,
		csi.ControllerServiceCapability_RPC_GET_CAPACITY,
		csi.ControllerServiceCapability_RPC_SINGLE_NODE_MULTI_WRITER,
	}
	if c.attach {
		types = append(types, csi.ControllerServiceCapability_RPC_PUBLISH_UNPUBLISH_VOLUME,
			csi.ControllerServiceCapability_RPC_LIST_VOLUMES_PUBLISHED_NODES)
	}
	var caps []*csi.ControllerServiceCapability
	for _, t := range types {
		caps = append(caps, &csi.ControllerServiceCapability{
			Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: t}},
		})
	}
	return &csi.ControllerGetCapabilitiesResponse{Capabilities: caps}, nil
}

func (c *controller) CreateVolume(ctx context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	want, err := wanted(req)
	if err != nil {
		return nil, err
	}
	if err := c.reachable(req.GetAccessibilityRequirements()); err != nil {
		return nil, err
	}
	r, err := c.pool.Create(ctx, want)
	if err != nil {
		return nil, err
	}
	places, err := c.places()
	if err != nil {
		return nil, err
	}
	return &csi.CreateVolumeResponse{Volume: volume(r, places)}, nil
}

func wanted(req *csi.CreateVolumeRequest) (disk.Wanted, error) {
	name, err := disk.ParseName(req.GetName())
	if err != nil {
		return disk.Wanted{}, err
	}
	usage, err := readAll(req.GetVolumeCapabilities())
	if err != nil {
		return disk.Wanted{}, err
	}
	if req.GetVolumeContentSource() != nil {
		return disk.Wanted{}, disk.Errorf(disk.ErrInvalid, "a volume cannot be made from a snapshot or another volume yet")
	}
	if len(req.GetMutableParameters()) > 0 {
		return disk.Wanted{}, disk.Errorf(disk.ErrInvalid, "mutable parameters are not supported")
	}
	parameters, err := mapDigest("parameters", req.GetParameters())
	return disk.Wanted{
		Name: name, Usage: usage, Parameters: parameters,
		AtLeast: req.GetCapacityRange().GetRequiredBytes(), AtMost: req.GetCapacityRange().GetLimitBytes(),
	}, err
}

// mapDigest is a digest of a caller's map, which is compared and never kept: "" for an empty one.
func mapDigest(what string, m map[string]string) (string, error) {
	if len(m) == 0 {
		return "", nil
	}
	text, err := json.Marshal(m)
	if err != nil {
		return "", fmt.Errorf("encode the %s: %w", what, err)
	}
	if len(text) > maxMap {
		return "", disk.Errorf(disk.ErrInvalid, "the %s have %d bytes, at most %d are allowed", what, len(text), maxMap)
	}
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:16]), nil
}

// reachable says whether a volume here can be reached from one of the places that the caller insists on.
func (c *controller) reachable(where *csi.TopologyRequirement) error {
	if len(where.GetRequisite()) == 0 {
		return nil
	}
	nodes, err := c.pool.Nodes()
	if err != nil {
		return err
	}
	for _, t := range where.GetRequisite() {
		if slices.Contains(nodes, t.GetSegments()[topologyKey]) {
			return nil
		}
	}
	return disk.Errorf(disk.ErrFull, "no place asked for is a node of this loopfs: its nodes are %q", nodes)
}

// places are the nodes that reach the volumes: all that work on this directory.
func (c *controller) places() ([]*csi.Topology, error) {
	nodes, err := c.pool.Nodes()
	if err != nil {
		return nil, err
	}
	var places []*csi.Topology
	for _, n := range nodes {
		places = append(places, &csi.Topology{Segments: map[string]string{topologyKey: n}})
	}
	return places, nil
}

func volume(r disk.Record, places []*csi.Topology) *csi.Volume {
	return &csi.Volume{
		VolumeId: string(r.ID), CapacityBytes: r.Bytes, AccessibleTopology: places,
		VolumeContext: map[string]string{backendKey: r.Backend},
	}
}

func (c *controller) DeleteVolume(_ context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	id, err := disk.ParseID(req.GetVolumeId())
	if err == nil {
		err = c.pool.Delete(id)
	}
	if err != nil && !errors.Is(err, disk.ErrNotFound) {
		return nil, err
	}
	return &csi.DeleteVolumeResponse{}, nil
}

// ListVolumes pages by id: the token is the last id of the page before, so that a token outlives its volume.
func (c *controller) ListVolumes(_ context.Context, req *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	if req.GetMaxEntries() < 0 {
		return nil, disk.Errorf(disk.ErrInvalid, "max_entries is negative")
	}
	after := req.GetStartingToken()
	if _, err := disk.ParseID(after); after != "" && err != nil {
		return nil, status.Error(codes.Aborted, "starting_token is not one that ListVolumes gave; start from the beginning")
	}
	all, err := c.pool.All()
	if err != nil {
		return nil, err
	}
	places, err := c.places()
	if err != nil {
		return nil, err
	}
	answer := &csi.ListVolumesResponse{}
	for _, r := range all {
		if r.State != disk.Ready || string(r.ID) <= after {
			continue
		}
		if n := len(answer.Entries); n > 0 && n == int(req.GetMaxEntries()) {
			answer.NextToken = answer.Entries[n-1].Volume.VolumeId
			break
		}
		answer.Entries = append(answer.Entries, &csi.ListVolumesResponse_Entry{Volume: volume(r, places), Status: c.listStatus(r)})
	}
	return answer, nil
}

func (c *controller) listStatus(r disk.Record) *csi.ListVolumesResponse_VolumeStatus {
	if !c.attach {
		return nil
	}
	s := &csi.ListVolumesResponse_VolumeStatus{}
	for node := range r.Attached {
		s.PublishedNodeIds = append(s.PublishedNodeIds, node)
	}
	slices.Sort(s.PublishedNodeIds)
	return s
}

func (c *controller) GetCapacity(_ context.Context, req *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	if caps := req.GetVolumeCapabilities(); len(caps) > 0 {
		if _, err := readAll(caps); err != nil { // nothing can be made of that kind, which is an answer, not a failure
			return &csi.GetCapacityResponse{}, nil
		}
	}
	free, err := c.pool.Free()
	if err != nil {
		return nil, err
	}
	return &csi.GetCapacityResponse{
		AvailableCapacity: free,
		MaximumVolumeSize: wrapperspb.Int64(free),
		MinimumVolumeSize: wrapperspb.Int64(disk.MinBytes),
	}, nil
}

func (c *controller) ValidateVolumeCapabilities(_ context.Context, req *csi.ValidateVolumeCapabilitiesRequest) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	if len(req.GetVolumeCapabilities()) == 0 {
		return nil, disk.Errorf(disk.ErrInvalid, "the volume capabilities are missing")
	}
	id, err := disk.ParseID(req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	r, err := c.pool.Find(id)
	if err != nil {
		return nil, err
	}
	if reason := mismatch(r, req); reason != "" {
		return &csi.ValidateVolumeCapabilitiesResponse{Message: reason}, nil
	}
	return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
		VolumeContext:      req.GetVolumeContext(),
		VolumeCapabilities: req.GetVolumeCapabilities(),
		Parameters:         req.GetParameters(),
	}}, nil
}

// mismatch says why the volume is not what the caller takes it for, or "".
func mismatch(r disk.Record, req *csi.ValidateVolumeCapabilitiesRequest) string {
	usage, err := readAll(req.GetVolumeCapabilities())
	if err != nil {
		return err.Error()
	}
	if !fits(r.Usage, usage) {
		return fmt.Sprintf("the volume was made for mode %s, not for %s", r.Usage.Mode, usage.Mode)
	}
	if b, ok := req.GetVolumeContext()[backendKey]; ok && b != r.Backend {
		return "the volume context is not this volume's"
	}
	if d, err := mapDigest("parameters", req.GetParameters()); len(req.GetParameters()) > 0 && (err != nil || d != r.Parameters) {
		return "the volume was made with other parameters"
	}
	return ""
}
