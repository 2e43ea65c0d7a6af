package csifake

import (
	"fmt"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
)

// services are the services of CSI.
var services = []grpc.ServiceDesc{csi.Identity_ServiceDesc, csi.Controller_ServiceDesc, csi.Node_ServiceDesc,
	csi.GroupController_ServiceDesc, csi.SnapshotMetadata_ServiceDesc}

// roles maps the names of CSI's services to roles.
var roles = map[string]string{"csi.v1.Identity": "identity", "csi.v1.Controller": "controller",
	"csi.v1.GroupController": "group", "csi.v1.SnapshotMetadata": "metadata", "csi.v1.Node": "node"}

// RPCs returns the names of all calls with one request and one answer.
func RPCs() (all []string) {
	for _, s := range services {
		for _, m := range s.Methods {
			all = append(all, m.MethodName)
		}
	}
	return all
}

// known reports whether CSI has the call.
func known(rpc string) bool {
	_, err := messageType(rpc, "Request")
	return err == nil
}

func messageType(rpc, kind string) (protoreflect.MessageType, error) {
	mt, err := protoregistry.GlobalTypes.FindMessageByName(protoreflect.FullName("csi.v1." + rpc + kind))
	if err != nil {
		return nil, fmt.Errorf("no RPC of CSI is named %q", rpc)
	}
	return mt, nil
}
