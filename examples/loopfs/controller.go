package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"strconv"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/wrapperspb"
)

// Identity of the driver, and its keys in maps.
const (
	driverName    = "loopfs.holdfast.dev"
	driverVersion = "0.1.0"

	topologyKey = driverName + "/node"
	backendKey  = driverName + "/backend"
)

func (d *driver) GetPluginInfo(context.Context, *csi.GetPluginInfoRequest) (*csi.GetPluginInfoResponse, error) {
	return &csi.GetPluginInfoResponse{Name: driverName, VendorVersion: driverVersion}, nil
}

func (d *driver) GetPluginCapabilities(
	context.Context, *csi.GetPluginCapabilitiesRequest,
) (*csi.GetPluginCapabilitiesResponse, error) {
	caps := []*csi.PluginCapability{{Type: &csi.PluginCapability_VolumeExpansion_{
		VolumeExpansion: &csi.PluginCapability_VolumeExpansion{Type: csi.PluginCapability_VolumeExpansion_ONLINE},
	}}}
	services := []csi.PluginCapability_Service_Type{
		csi.PluginCapability_Service_CONTROLLER_SERVICE, csi.PluginCapability_Service_VOLUME_ACCESSIBILITY_CONSTRAINTS,
		csi.PluginCapability_Service_GROUP_CONTROLLER_SERVICE,
	}
	if d.newVolumes == loopBackend {
		services = append(services, csi.PluginCapability_Service_SNAPSHOT_METADATA_SERVICE)
	}
	for _, t := range services {
		caps = append(caps, &csi.PluginCapability{
			Type: &csi.PluginCapability_Service_{Service: &csi.PluginCapability_Service{Type: t}},
		})
	}
	return &csi.GetPluginCapabilitiesResponse{Capabilities: caps}, nil
}

func (d *driver) Probe(context.Context, *csi.ProbeRequest) (*csi.ProbeResponse, error) {
	return &csi.ProbeResponse{Ready: wrapperspb.Bool(true)}, d.store.check()
}

// The controller service. Its calls for snapshots are in snapshots.go, those for health in health.go.

func (d *driver) ControllerGetCapabilities(
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
	if d.newVolumes == loopBackend {
		types = append(types, csi.ControllerServiceCapability_RPC_MODIFY_VOLUME)
	}
	answer := &csi.ControllerGetCapabilitiesResponse{}
	for _, t := range types {
		answer.Capabilities = append(answer.Capabilities, &csi.ControllerServiceCapability{
			Type: &csi.ControllerServiceCapability_Rpc{Rpc: &csi.ControllerServiceCapability_RPC{Type: t}},
		})
	}
	return answer, nil
}

func (d *driver) CreateVolume(ctx context.Context, req *csi.CreateVolumeRequest) (*csi.CreateVolumeResponse, error) {
	usage, badUsage := readAll(req.GetVolumeCapabilities())
	source, badSource := readSource(req.GetVolumeContentSource())
	readAhead, badMutable := parseMutable(req.GetMutableParameters())
	noParameters := noParameters(req.GetParameters())
	if err := cmp.Or(checkName(req.GetName()), badUsage, noParameters, badMutable, badSource); err != nil {
		return nil, err
	}
	where := req.GetAccessibilityRequirements().GetRequisite()
	if len(where) > 0 && !slices.ContainsFunc(where, d.isAt) {
		return nil, status.Errorf(codes.ResourceExhausted,
			"the required topology does not have the node of this loopfs: %v", d.topology())
	}
	r := record{ID: idFor(volumeKind, req.GetName()), Usage: usage, Source: source, ReadAhead: readAhead}
	r, err := d.create(ctx, r, req.GetCapacityRange())
	if err != nil {
		return nil, err
	}
	return &csi.CreateVolumeResponse{Volume: d.volume(r)}, nil
}

func (d *driver) volume(r record) *csi.Volume {
	return &csi.Volume{
		VolumeId: string(r.ID), CapacityBytes: r.Bytes, ContentSource: contentSource(r.Source),
		AccessibleTopology: []*csi.Topology{d.topology()}, VolumeContext: map[string]string{backendKey: r.Backend},
	}
}

// topology returns where all volumes are: at this node.
func (d *driver) topology() *csi.Topology {
	return &csi.Topology{Segments: map[string]string{topologyKey: d.node}}
}

// isAt reports whether this node has all segments of t.
func (d *driver) isAt(t *csi.Topology) bool {
	for key, value := range t.GetSegments() {
		if key != topologyKey || value != d.node {
			return false
		}
	}
	return true
}

func (d *driver) DeleteVolume(ctx context.Context, req *csi.DeleteVolumeRequest) (*csi.DeleteVolumeResponse, error) {
	err := d.delete(ctx, volumeKind, req.GetVolumeId(), func(record) error { return nil })
	return &csi.DeleteVolumeResponse{}, err
}

// ControllerExpandVolume enlarges the bytes of a volume. With the loop backend the node enlarges the file system.
func (d *driver) ControllerExpandVolume(
	_ context.Context, req *csi.ControllerExpandVolumeRequest,
) (*csi.ControllerExpandVolumeResponse, error) {
	size := req.GetCapacityRange()
	if size.GetRequiredBytes() == 0 && size.GetLimitBytes() == 0 {
		return nil, status.Error(codes.InvalidArgument, "the capacity range is missing")
	}
	answer := &csi.ControllerExpandVolumeResponse{}
	return answer, d.locked(volumeKind, req.GetVolumeId(), func(r record) error {
		if err := checkCapability(r, req.GetVolumeCapability()); err != nil {
			return err
		}
		r, err := d.expand(r, size)
		answer.CapacityBytes, answer.NodeExpansionRequired = r.Bytes, r.Backend == loopBackend
		return err
	})
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
		return 0, status.Errorf(codes.InvalidArgument, "the only mutable parameter is %s: KiB from 4 to 65536, a "+
			"multiple of 4", readAheadKey)
	}
	return kib, nil
}

// ControllerModifyVolume changes the read-ahead of the volume's devices, also while it is in use. It saves the record
// first, so the next stage sets what a kill prevented.
func (d *driver) ControllerModifyVolume(
	_ context.Context, req *csi.ControllerModifyVolumeRequest,
) (*csi.ControllerModifyVolumeResponse, error) {
	kib, err := parseMutable(req.GetMutableParameters())
	if err != nil {
		return nil, err
	}
	return &csi.ControllerModifyVolumeResponse{}, d.locked(volumeKind, req.GetVolumeId(), func(r record) error {
		r.ReadAhead = kib
		l, ok := d.bytesOf(r).(loop)
		switch {
		case !ok:
			return status.Errorf(codes.InvalidArgument, "volume %s is a directory, which has no mutable parameters",
				r.ID)
		case kib == 0:
			return status.Error(codes.InvalidArgument, "the mutable parameters are missing")
		}
		if err := d.save(r); err != nil {
			return err
		}
		return l.setReadAhead()
	})
}

func (d *driver) GetCapacity(_ context.Context, req *csi.GetCapacityRequest) (*csi.GetCapacityResponse, error) {
	none := &csi.GetCapacityResponse{} // no capacity is an answer, not an error
	if !d.isAt(req.GetAccessibleTopology()) {
		return none, nil
	}
	if list := req.GetVolumeCapabilities(); len(list) > 0 {
		usage, err := readAll(list)
		r := record{Usage: usage, Backend: d.newVolumes}
		if err != nil || r.supported() != nil {
			return none, nil
		}
	}
	free := d.free()
	return &csi.GetCapacityResponse{AvailableCapacity: free, MaximumVolumeSize: wrapperspb.Int64(free),
		MinimumVolumeSize: wrapperspb.Int64(minBytes)}, nil
}

func (d *driver) ValidateVolumeCapabilities(
	_ context.Context, req *csi.ValidateVolumeCapabilitiesRequest,
) (*csi.ValidateVolumeCapabilitiesResponse, error) {
	if len(req.GetVolumeCapabilities()) == 0 {
		return nil, status.Error(codes.InvalidArgument, "the volume capabilities are missing")
	}
	r, err := d.get(volumeKind, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	usage, bad := readAll(req.GetVolumeCapabilities())
	backend, given := req.GetVolumeContext()[backendKey]
	if bad == nil && !r.Usage.fits(usage) {
		bad = fmt.Errorf("the volume was created for %s, not for %s", r.Usage, usage)
	} else if given && backend != r.Backend {
		bad = errors.New("the volume context is of another backend")
	}
	if bad = cmp.Or(bad, noParameters(req.GetParameters())); bad != nil {
		return &csi.ValidateVolumeCapabilitiesResponse{Message: bad.Error()}, nil
	}
	return &csi.ValidateVolumeCapabilitiesResponse{Confirmed: &csi.ValidateVolumeCapabilitiesResponse_Confirmed{
		VolumeContext: req.GetVolumeContext(), VolumeCapabilities: req.GetVolumeCapabilities(),
	}}, nil
}

func (d *driver) ListVolumes(_ context.Context, req *csi.ListVolumesRequest) (*csi.ListVolumesResponse, error) {
	all, next, err := page(d.all(volumeKind), idOf, volumeKind, req.GetMaxEntries(), req.GetStartingToken())
	answer := &csi.ListVolumesResponse{NextToken: next}
	for _, r := range all {
		answer.Entries = append(answer.Entries, &csi.ListVolumesResponse_Entry{Volume: d.volume(r)})
	}
	return answer, err
}

// page returns one page of entries, which are in the order of IDs. The token is the last ID of the page before, so it
// stays valid when its volume is deleted.
func page[E any](
	all []E, id func(E) string, k kind, max int32, token string,
) (entries []E, next string, err error) {
	if max < 0 {
		return nil, "", status.Error(codes.InvalidArgument, "max_entries is negative")
	}
	if _, err := parseID(k, token); token != "" && err != nil {
		return nil, "", status.Error(codes.Aborted, "starting_token is not a next_token of this call; start from the "+
			"beginning")
	}
	entries = slices.DeleteFunc(all, func(e E) bool { return id(e) <= token })
	if max > 0 && len(entries) > int(max) {
		return entries[:max], id(entries[max-1]), nil
	}
	return entries, "", nil
}

func idOf(r record) string { return string(r.ID) }

func (d *driver) ControllerGetVolume(
	_ context.Context, req *csi.ControllerGetVolumeRequest,
) (*csi.ControllerGetVolumeResponse, error) {
	r, err := d.get(volumeKind, req.GetVolumeId())
	if err != nil {
		return nil, err
	}
	return &csi.ControllerGetVolumeResponse{Volume: d.volume(r),
		Status: &csi.ControllerGetVolumeResponse_VolumeStatus{}}, nil
}
