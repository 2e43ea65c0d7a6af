package endpoint

import (
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
)

// effect is the effect of a call on the volumes that it names.
type effect int

const (
	effectRead     effect = iota // only reads, and is cancelled if another operation needs the volume
	effectSnapshot               // makes or deletes a snapshot; the volume does not change
	effectChange                 // changes the volume; refused if the volume is registered in Holdfast
	effectBegin                  // as effectChange, and begins a use of the volume
	effectEnd                    // as effectChange, and ends such a use
	effectDelete                 // as effectChange, and ends every use of the volume
)

// effects has the methods of the CSI specification. Other methods count as effectRead. They are passed on without any
// rule, because this build cannot decode their requests.
var effects = map[string]effect{
	"Identity/GetPluginInfo":         effectRead,
	"Identity/GetPluginCapabilities": effectRead,
	"Identity/Probe":                 effectRead,

	"Controller/CreateVolume":               effectChange,
	"Controller/DeleteVolume":               effectDelete,
	"Controller/ControllerPublishVolume":    effectBegin,
	"Controller/ControllerUnpublishVolume":  effectEnd,
	"Controller/ValidateVolumeCapabilities": effectRead,
	"Controller/ListVolumes":                effectRead,
	"Controller/GetCapacity":                effectRead,
	"Controller/ControllerGetCapabilities":  effectRead,
	"Controller/CreateSnapshot":             effectSnapshot,
	"Controller/DeleteSnapshot":             effectSnapshot,
	"Controller/ListSnapshots":              effectRead,
	"Controller/GetSnapshot":                effectRead,
	"Controller/ControllerExpandVolume":     effectChange,
	"Controller/ControllerGetVolume":        effectRead,
	"Controller/ControllerModifyVolume":     effectChange,
	"Controller/ControllerGetVolumeHealth":  effectRead,
	"Controller/ControllerListVolumeHealth": effectRead,

	"GroupController/GroupControllerGetCapabilities": effectRead,
	"GroupController/CreateVolumeGroupSnapshot":      effectSnapshot,
	"GroupController/DeleteVolumeGroupSnapshot":      effectSnapshot,
	"GroupController/GetVolumeGroupSnapshot":         effectRead,

	"SnapshotMetadata/GetMetadataAllocated": effectRead,
	"SnapshotMetadata/GetMetadataDelta":     effectRead,

	"Node/NodeStageVolume":      effectBegin,
	"Node/NodeUnstageVolume":    effectEnd,
	"Node/NodePublishVolume":    effectBegin,
	"Node/NodeUnpublishVolume":  effectEnd,
	"Node/NodeGetVolumeStats":   effectRead,
	"Node/NodeExpandVolume":     effectChange,
	"Node/NodeGetCapabilities":  effectRead,
	"Node/NodeGetInfo":          effectRead,
	"Node/NodeGetVolumeHealth":  effectRead,
	"Node/NodeGetStorageHealth": effectRead,
}

// beginningOf maps each call that ends a use to the call that begins such a use.
var beginningOf = map[registry.RPC]registry.RPC{
	registry.ControllerUnpublishRPC: registry.ControllerPublishRPC,
	registry.NodeUnstageRPC:         registry.NodeStageRPC,
	registry.NodeUnpublishRPC:       registry.NodePublishRPC,
}

// targets has the field of each call that says where the call uses the volume.
var targets = map[registry.RPC]protoreflect.Name{
	registry.ControllerPublishRPC: "node_id",
	registry.NodeStageRPC:         "staging_target_path",
	registry.NodePublishRPC:       "target_path",
}

// method is a gRPC method.
type method struct {
	full    string // /csi.v1.Node/NodeStageVolume
	service string // Node
	rpc     registry.RPC
}

// parseMethod parses the name of a gRPC method. It reports whether the method is one of a CSI service.
func parseMethod(full string) (method, bool) {
	rest, is := strings.CutPrefix(full, "/csi.v1.")
	service, rpc, ok := strings.Cut(rest, "/")
	return method{full, service, registry.RPC(rpc)}, is && ok && service != "" && rpc != ""
}

func (m method) effect() effect { return effects[m.service+"/"+string(m.rpc)] }

// roles returns the roles whose instance serves the method, the preferred one first.
func (m method) roles() []registry.Role {
	switch m.service {
	case "Node":
		return []registry.Role{registry.RoleNode}
	case "Identity":
		return []registry.Role{registry.RoleController, registry.RoleNode}
	}
	return []registry.Role{registry.RoleController}
}

// decode decodes a request. It returns nil if this build does not know the method.
func (m method) decode(raw proto.Message) (proto.Message, error) {
	name := protoreflect.FullName("csi.v1." + m.service + "." + string(m.rpc))
	found, _ := protoregistry.GlobalFiles.FindDescriptorByName(name)
	known, is := found.(protoreflect.MethodDescriptor)
	if !is {
		return nil, nil
	}
	kind, err := protoregistry.GlobalTypes.FindMessageByName(known.Input().FullName())
	if err != nil {
		return nil, err
	}
	request := kind.New().Interface()
	return request, proto.Unmarshal(raw.ProtoReflect().GetUnknown(), request)
}

// text returns a text field of the request, or "" if the request has no such field.
func text(request proto.Message, name protoreflect.Name) string {
	for _, value := range csi.Texts(request, name) {
		return value
	}
	return ""
}

// volumesOf returns the ids of the volumes that the request names.
func volumesOf(request proto.Message) (ids []registry.ExternalID) {
	for _, name := range []protoreflect.Name{"volume_id", "source_volume_id", "source_volume_ids"} {
		for _, id := range csi.Texts(request, name) {
			if id != "" {
				ids = append(ids, registry.ExternalID(id))
			}
		}
	}
	return ids
}
