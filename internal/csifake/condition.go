package csifake

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strconv"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// Condition is the health of a volume or of storage, as a plugin reports it. In CSI up to version 1.12 it is
// VolumeCondition. In later versions it is one entry of VolumeHealth, or one StorageBackendHealth. A plugin with the
// capability reports the condition of a rule, or good health.
type Condition struct {
	Volume   string `json:"volume,omitempty"` // the volume that has it; empty: every volume
	Abnormal bool   `json:"abnormal,omitempty"`
	Message  string `json:"message,omitempty"`
	Status   string `json:"status,omitempty"` // of CSI 1.13; empty: DEGRADED. A number is sent as it is
	Reason   string `json:"reason,omitempty"` // of CSI 1.13; empty: Scripted
}

// conditionOf returns the condition that the rule of a call has for a volume, or nil.
func conditionOf(ctx context.Context, volume string) *Condition {
	r := callOf(ctx).acts[Before]
	if r == nil || r.Condition == nil || r.Condition.Volume != "" && volume != "" && r.Condition.Volume != volume {
		return nil
	}
	return r.Condition
}

// status returns the number of the condition's status.
func (c *Condition) status(enum map[string]int32, fallback string) int32 {
	n, known := enum[cmp.Or(c.Status, fallback)]
	if !known {
		number, _ := strconv.ParseInt(c.Status, 10, 32)
		n = int32(number)
	}
	return n
}

// healthOf returns the health of a volume.
func healthOf(ctx context.Context, volume string) *csi.VolumeHealth {
	h := &csi.VolumeHealth{VolumeId: volume}
	if c := conditionOf(ctx, volume); c != nil && c.Abnormal {
		status := csi.VolumeHealthErrorType(c.status(csi.VolumeHealthErrorType_value, "DEGRADED"))
		h.HealthStatuses = append(h.HealthStatuses, &csi.VolumeHealth_VolumeHealthEntry{
			Status: status, Reason: cmp.Or(c.Reason, "Scripted"), Message: c.Message,
		})
	}
	return h
}

func (s nodeService) NodeGetVolumeHealth(ctx context.Context, r *csi.NodeGetVolumeHealthRequest) (
	*csi.NodeGetVolumeHealthResponse, error,
) {
	err := s.onNode(r.GetVolumeId(), func(*volume, *onNode) error { return nil })
	return &csi.NodeGetVolumeHealthResponse{VolumeHealth: healthOf(ctx, r.GetVolumeId())}, err
}

func (s nodeService) NodeGetStorageHealth(ctx context.Context, _ *csi.NodeGetStorageHealthRequest) (
	*csi.NodeGetStorageHealthResponse, error,
) {
	reply := &csi.NodeGetStorageHealthResponse{}
	if c := conditionOf(ctx, ""); c != nil && c.Abnormal {
		status := csi.StorageHealthErrorType(c.status(csi.StorageHealthErrorType_value, "STORAGE_DEGRADED"))
		reply.BackendHealth = append(reply.BackendHealth, &csi.NodeGetStorageHealthResponse_StorageBackendHealth{
			Status: status, Reason: cmp.Or(c.Reason, "Scripted"), Message: c.Message,
		})
	}
	return reply, nil
}

func (s controller) ControllerGetVolumeHealth(ctx context.Context, r *csi.ControllerGetVolumeHealthRequest) (
	*csi.ControllerGetVolumeHealthResponse, error,
) {
	err := s.p.cfg.Backend.change(func(c *contents) error {
		_, err := s.p.find(c, r.GetVolumeId())
		return err
	})
	return &csi.ControllerGetVolumeHealthResponse{VolumeHealth: healthOf(ctx, r.GetVolumeId())}, err
}

// ControllerListVolumeHealth leaves out healthy volumes.
func (s controller) ControllerListVolumeHealth(ctx context.Context, r *csi.ControllerListVolumeHealthRequest) (
	*csi.ControllerListVolumeHealthResponse, error,
) {
	reply := &csi.ControllerListVolumeHealthResponse{}
	return reply, s.p.cfg.Backend.change(func(c *contents) error {
		var ids []string
		for _, id := range slices.Sorted(maps.Keys(c.Volumes)) {
			if len(healthOf(ctx, id).GetHealthStatuses()) > 0 {
				ids = append(ids, id)
			}
		}
		ids, next, err := s.p.page(ids, r.GetMaxEntries(), r.GetStartingToken())
		for _, id := range ids {
			reply.Entries = append(reply.Entries, healthOf(ctx, id))
		}
		reply.NextToken = next
		return err
	})
}

// addCondition adds the condition of a volume to a message. It encodes it as old plugins did: volume_condition was
// field 2.
func (p *Plugin) addCondition(ctx context.Context, service, volume string, m proto.Message) {
	if !p.caps.has(service + "/VOLUME_CONDITION") {
		return
	}
	says := &Condition{Message: "the volume is well"}
	if c := conditionOf(ctx, volume); c != nil {
		says = c
	}
	var inner []byte
	if says.Abnormal {
		inner = protowire.AppendVarint(protowire.AppendTag(inner, 1, protowire.VarintType), 1)
	}
	inner = protowire.AppendString(protowire.AppendTag(inner, 2, protowire.BytesType), says.Message)
	field := protowire.AppendBytes(protowire.AppendTag(nil, 2, protowire.BytesType), inner)
	m.ProtoReflect().SetUnknown(append(m.ProtoReflect().GetUnknown(), field...))
}
