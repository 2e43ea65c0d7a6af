package wire

import (
	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
)

// Metadata of a CSI call that a host passes to its shim, under the call's own gRPC method.
const (
	// EndpointPlugin is the header that names the plugin.
	EndpointPlugin = "holdfast-plugin"
	// EndpointRepeated is a header: the same call was cut off at an earlier shim.
	EndpointRepeated = "holdfast-repeated"
	// EndpointAnswered is the trailer of an answer that is final: the plugin's own, or a refusal by the shim. Without
	// it the call may be repeated at the next shim.
	EndpointAnswered = "holdfast-answered"
)

func EndpointUseProto(u registry.EndpointUse) *pb.EndpointUse {
	return &pb.EndpointUse{Plugin: string(u.Volume.Plugin), ExternalId: string(u.Volume.External), Call: string(u.Call),
		Target: u.Target, Node: string(u.Node), Since: stamp(u.Since), CreateIndex: uint64(u.CreateIndex),
		ModifyIndex: uint64(u.ModifyIndex)}
}

func EndpointUse(m *pb.EndpointUse) registry.EndpointUse {
	return registry.EndpointUse{
		Volume: volumeKey(m), Call: registry.RPC(m.GetCall()), Target: m.GetTarget(),
		Node: registry.NodeName(m.GetNode()), Since: timeOf(m.GetSince()),
		CreateIndex: registry.Seq(m.GetCreateIndex()), ModifyIndex: registry.Seq(m.GetModifyIndex()),
	}
}
