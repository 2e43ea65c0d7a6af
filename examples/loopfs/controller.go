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
	"google.golang.org/protobuf/types/known/wrapperspb"

	"holdfast/examples/loopfs/internal/disk"
)

// controller implements the controller service. Attaching is in attach.go, snapshots are in snapshot.go, lists in
// list.go.
type controller struct {
	csi.UnimplementedControllerServer
	pool       *disk.Pool
	attach     bool
	maxVolumes int64 // per node, 0: no limit; only attaching counts
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
	var caps []*csi.ControllerServiceCapability
	for _, t := range types {
		caps = append(caps, &csi.ControllerServiceCapability{
			Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: t}},
		})
	}
	return &csi.ControllerGetCapabilitiesResponse{Capabilities: caps}, nil
}

func (c *controller) CreateVolume(
	ctx context.Context, req *csi.CreateVolumeRequest,
) (*csi.CreateVolumeResponse, error) {
	want, err := parseRequest(req)
	if err != nil {
		return nil, err
	}
	if err := c.checkTopology(req.GetAccessibilityRequirements()); err != nil {
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

func parseRequest(req *csi.CreateVolumeRequest) (disk.Request, error) {
	name, err := disk.ParseName(req.GetName())
	if err != nil {
		return disk.Request{}, err
	}
	usage, err := readAll(req.GetVolumeCapabilities())
	if err != nil {
		return disk.Request{}, err
	}
	source, err := readSource(req.GetVolumeContentSource())
	if err != nil {
		return disk.Request{}, err
	}
	readAhead, err := parseMutable(req.GetMutableParameters())
	if err != nil {
		return disk.Request{}, err
	}
	parameters, err := mapDigest("parameters", req.GetParameters())
	return disk.Request{
		Name: name, Usage: usage, Parameters: parameters, Source: source, ReadAhead: readAhead,
		AtLeast: req.GetCapacityRange().GetRequiredBytes(), AtMost: req.GetCapacityRange().GetLimitBytes(),
	}, err
}

// mapDigest returns a digest of a map, or an empty string for an empty map. Maps may hold secrets, so they are not
// stored.
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

// checkTopology checks that a required topology contains a node of this data directory.
func (c *controller) checkTopology(where *csi.TopologyRequirement) error {
	places, err := c.places()
	if err != nil || len(where.GetRequisite()) == 0 {
		return err
	}
	for _, t := range where.GetRequisite() {
		if contains(places, t) {
			return nil
		}
	}
	return disk.Errorf(disk.ErrFull, "the required topology has none of the nodes of this loopfs: %v", places)
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
func (c *controller) places() ([]*csi.Topology, error) {
	nodes, err := c.pool.Nodes()
	if err != nil {
		return nil, err
	}
	var places []*csi.Topology
	for _, n := range nodes {
		places = append(places, &csi.Topology{Segments: n.Topology})
	}
	return places, nil
}

func volume(r disk.Record, places []*csi.Topology) *csi.Volume {
	return &csi.Volume{
		VolumeId: string(r.ID), CapacityBytes: r.Bytes, AccessibleTopology: places,
		ContentSource: contentSource(r.Source),
		VolumeContext: map[string]string{backendKey: r.Backend},
	}
}

func (c *controller) DeleteVolume(_ context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	id, err := disk.ParseID(disk.Volume, req.GetVolumeId())
	if err == nil {
		err = c.pool.Delete(id, func(disk.Record) error { return nil })
	}
	if err != nil && !errors.Is(err, disk.ErrNotFound) {
		return nil, err
	}
	return &csi.DeleteVolumeResponse{}, nil
}

// ControllerExpandVolume enlarges the bytes of a volume. With the loop backend the node enlarges the file system.
func (c *controller) ControllerExpandVolume(
	_ context.Context, req *csi.ControllerExpandVolumeRequest,
) (*csi.ControllerExpandVolumeResponse, error) {
	id, badID := disk.ParseID(disk.Volume, req.GetVolumeId())
	least, most := req.GetCapacityRange().GetRequiredBytes(), req.GetCapacityRange().GetLimitBytes()
	var badRange error
	if least == 0 && most == 0 {
		badRange = disk.Errorf(disk.ErrInvalid, "the capacity range is missing")
	}
	if err := refusal(badID, badRange); err != nil {
		return nil, err
	}
	r, err := c.pool.Expand(id, least, most, func(r disk.Record) error {
		return checkCapability(r, req.GetVolumeCapability())
	})
	if err != nil {
		return nil, err
	}
	return &csi.ControllerExpandVolumeResponse{CapacityBytes: r.Bytes,
		NodeExpansionRequired: r.Backend == disk.LoopBackend}, nil
}

// checkCapability checks that the volume has a capability; nil is no capability to check.
func checkCapability(r disk.Record, c *csi.VolumeCapability) error {
	if c == nil {
		return nil
	}
	a, err := readAccess(c)
	if err == nil && !r.Usage.Fits(a.usage) {
		err = disk.Errorf(disk.ErrInvalid, "volume %s was created for %s, not for %s", r.ID, r.Usage, a.usage)
	}
	return err
}

func (c *controller) GetCapacity(_ context.Context, req *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	usage, possible, err := c.possible(req)
	if !possible || err != nil { // no capacity is an answer, not an error
		return &csi.GetCapacityResponse{}, err
	}
	free, err := c.pool.Free()
	if err != nil {
		return nil, err
	}
	return &csi.GetCapacityResponse{
		AvailableCapacity: free,
		MaximumVolumeSize: wrapperspb.Int64(free),
		MinimumVolumeSize: wrapperspb.Int64(c.pool.MinSize(usage)),
	}, nil
}

func (c *controller) possible(req *csi.GetCapacityRequest) (disk.Usage, bool, error) {
	if place := req.GetAccessibleTopology(); place != nil {
		places, err := c.places()
		if err != nil || !contains(places, place) {
			return disk.Usage{}, false, err
		}
	}
	if len(req.GetVolumeCapabilities()) == 0 {
		return disk.Usage{}, true, nil
	}
	usage, err := readAll(req.GetVolumeCapabilities())
	if err == nil {
		err = c.pool.Backends[c.pool.NewVolumes].Supports(usage)
	}
	return usage, err == nil, nil
}

func (c *controller) ValidateVolumeCapabilities(
	_ context.Context, req *csi.ValidateVolumeCapabilitiesRequest,
) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	if len(req.GetVolumeCapabilities()) == 0 {
		return nil, disk.Errorf(disk.ErrInvalid, "the volume capabilities are missing")
	}
	id, err := disk.ParseID(disk.Volume, req.GetVolumeId())
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

// mismatch returns why the volume is not as requested, or an empty string.
func mismatch(r disk.Record, req *csi.ValidateVolumeCapabilitiesRequest) string {
	usage, err := readAll(req.GetVolumeCapabilities())
	if err != nil {
		return err.Error()
	}
	if !r.Usage.Fits(usage) {
		return fmt.Sprintf("the volume was created for %s, not for %s", r.Usage, usage)
	}
	if b, ok := req.GetVolumeContext()[backendKey]; ok && b != r.Backend {
		return "the volume context is of another backend"
	}
	if d, err := mapDigest("parameters", req.GetParameters()); len(req.GetParameters()) > 0 &&
		(err != nil || d != r.Parameters) {
		return "the volume was created with other parameters"
	}
	return ""
}
