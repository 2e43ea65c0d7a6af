package endpoint

import (
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protodesc"
	"google.golang.org/protobuf/reflect/protoregistry"
	"google.golang.org/protobuf/types/descriptorpb"
	"google.golang.org/protobuf/types/dynamicpb"
)

// The next release knows a service that CSI does not have yet, with an RPC that changes a volume.
func init() {
	effects["Compaction/CompactVolume"] = effectChange
	request := &descriptorpb.DescriptorProto{Name: proto.String("CompactVolumeRequest"),
		Field: []*descriptorpb.FieldDescriptorProto{{Name: proto.String("volume_id"), Number: proto.Int32(1),
			Type: descriptorpb.FieldDescriptorProto_TYPE_STRING.Enum()}}}
	rpc := &descriptorpb.MethodDescriptorProto{Name: proto.String("CompactVolume"),
		InputType:  proto.String(".csi.v1.CompactVolumeRequest"),
		OutputType: proto.String(".csi.v1.CompactVolumeRequest")}
	file, err := protodesc.NewFile(&descriptorpb.FileDescriptorProto{Name: proto.String("csi_compaction.proto"),
		Syntax: proto.String("proto3"), Package: proto.String("csi.v1"),
		MessageType: []*descriptorpb.DescriptorProto{request},
		Service: []*descriptorpb.ServiceDescriptorProto{{Name: proto.String("Compaction"),
			Method: []*descriptorpb.MethodDescriptorProto{rpc}}}}, nil)
	if err == nil {
		err = protoregistry.GlobalFiles.RegisterFile(file)
	}
	if err == nil {
		err = protoregistry.GlobalTypes.RegisterMessage(dynamicpb.NewMessageType(file.Messages().Get(0)))
	}
	if err != nil {
		panic(err)
	}
}
