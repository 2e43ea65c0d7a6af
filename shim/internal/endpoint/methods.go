package endpoint

import (
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"holdfast/registry"
)

// effect is what a call does to the volumes that it names.
type effect int

const (
	none    effect = iota // it only reads
	changes               // it is refused for a volume of Holdfast's own
	begins                // changes, and begins a use of the volume
	ends                  // changes, and ends such a use
	deletes               // changes, and ends every use of the volume
)

// effects has each method of the CSI specification. A method that is not in it is passed without any rule.
var effects = map[string]effect{
	"Identity/GetPluginInfo":         none,
	"Identity/GetPluginCapabilities": none,
	"Identity/Probe":                 none,

	"Controller/CreateVolume":               changes,
	"Controller/DeleteVolume":               deletes,
	"Controller/ControllerPublishVolume":    begins,
	"Controller/ControllerUnpublishVolume":  ends,
	"Controller/ValidateVolumeCapabilities": none,
	"Controller/ListVolumes":                none,
	"Controller/GetCapacity":                none,
	"Controller/ControllerGetCapabilities":  none,
	"Controller/CreateSnapshot":             none, // the volume stays as it is
	"Controller/DeleteSnapshot":             none,
	"Controller/ListSnapshots":              none,
	"Controller/GetSnapshot":                none,
	"Controller/ControllerExpandVolume":     changes,
	"Controller/ControllerGetVolume":        none,
	"Controller/ControllerModifyVolume":     changes,
	"Controller/ControllerGetVolumeHealth":  none,
	"Controller/ControllerListVolumeHealth": none,

	"GroupController/GroupControllerGetCapabilities": none,
	"GroupController/CreateVolumeGroupSnapshot":      none,
	"GroupController/DeleteVolumeGroupSnapshot":      none,
	"GroupController/GetVolumeGroupSnapshot":         none,

	"SnapshotMetadata/GetMetadataAllocated": none,
	"SnapshotMetadata/GetMetadataDelta":     none,

	"Node/NodeStageVolume":      begins,
	"Node/NodeUnstageVolume":    ends,
	"Node/NodePublishVolume":    begins,
	"Node/NodeUnpublishVolume":  ends,
	"Node/NodeGetVolumeStats":   none,
	"Node/NodeExpandVolume":     changes,
	"Node/NodeGetCapabilities":  none,
	"Node/NodeGetInfo":          none,
	"Node/NodeGetVolumeHealth":  none,
	"Node/NodeGetStorageHealth": none,
}

// undoes names the call that each undo ends the use of.
var undoes = map[registry.RPC]registry.RPC{
	registry.ControllerUnpublishRPC: registry.ControllerPublishRPC,
	registry.NodeUnstageRPC:         registry.NodeStageRPC,
	registry.NodeUnpublishRPC:       registry.NodePublishRPC,
}

// places names the field that says where each call uses the volume.
var places = map[registry.RPC]protoreflect.Name{
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

// parseMethod reports whether the method is one of a CSI service.
func parseMethod(full string) (method, bool) {
	rest, is := strings.CutPrefix(full, "/csi.v1.")
	service, rpc, two := strings.Cut(rest, "/")
	return method{full, service, registry.RPC(rpc)}, is && two && service != "" && rpc != ""
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

// decode returns the request as its type, or nil if this build does not know the method.
func (m method) decode(raw proto.Message) (proto.Message, error) {
	found, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName("csi.v1." + m.service))
	if err != nil {
		return nil, nil
	}
	service, is := found.(protoreflect.ServiceDescriptor)
	if !is || service.Methods().ByName(protoreflect.Name(m.rpc)) == nil {
		return nil, nil
	}
	kind, err := protoregistry.GlobalTypes.FindMessageByName(
		service.Methods().ByName(protoreflect.Name(m.rpc)).Input().FullName())
	if err != nil {
		return nil, err
	}
	request := kind.New().Interface()
	return request, proto.Unmarshal(raw.ProtoReflect().GetUnknown(), request)
}

// text returns a field of the request, or "" if it has no such text.
func text(request proto.Message, name protoreflect.Name) string {
	if request == nil {
		return ""
	}
	m := request.ProtoReflect()
	field := m.Descriptor().Fields().ByName(name)
	if field == nil || field.IsList() || field.Kind() != protoreflect.StringKind {
		return ""
	}
	return m.Get(field).String()
}

// volumeFields are the fields of requests that name volumes.
var volumeFields = []protoreflect.Name{"volume_id", "source_volume_id", "source_volume_ids"}

// volumesOf returns the ids of the volumes that the request names.
func volumesOf(request proto.Message) (ids []registry.ExternalID) {
	if request == nil {
		return nil
	}
	m := request.ProtoReflect()
	for _, name := range volumeFields {
		field := m.Descriptor().Fields().ByName(name)
		switch {
		case field == nil:
		case field.IsList():
			for i := range m.Get(field).List().Len() {
				ids = append(ids, registry.ExternalID(m.Get(field).List().Get(i).String()))
			}
		case m.Get(field).String() != "":
			ids = append(ids, registry.ExternalID(m.Get(field).String()))
		}
	}
	return ids
}
