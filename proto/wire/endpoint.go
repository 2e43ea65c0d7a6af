package wire

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
