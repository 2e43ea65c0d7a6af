package registry

import "time"

// CapacityRange is a requested volume size in bytes (CSI CapacityRange). The zero value requests nothing.
type CapacityRange struct {
	Required int64 `json:"required_bytes,omitempty"`
	Limit    int64 `json:"limit_bytes,omitempty"` // 0: none
}

// Expansion is the progress of a volume's expansions. The zero value means that none was requested.
type Expansion struct {
	Done int64 `json:"done,omitempty"` // bytes of the last request that the controller completed
	// Asked is the controller request whose outcome is unknown; zero: none. Holdfast repeats it with the same Usage
	// before any other request.
	Asked CapacityRange `json:"asked,omitzero"`
	Usage Usage         `json:"usage,omitzero"` // usage of Asked; zero: none
	// Node is the size to which the node still has to expand the volume; zero: none.
	Node CapacityRange `json:"node,omitzero"`
	// NodeDone is the size in bytes of the largest expansion that a node has finished. Each other node that mounted the
	// volume before has to expand it too (see OnNode).
	NodeDone int64 `json:"node_done,omitempty"`
	// Refused is the code with which the node's plugin refused. Only a status has it (see OnNode), not the record.
	Refused string    `json:"refused,omitempty"`
	Since   time.Time `json:"since,omitzero"` // when Asked or Node was recorded
	// RPC, Code and Detail are the plugin's last error; empty: none. A controller's error lasts as long as Asked.
	RPC    RPC    `json:"rpc,omitempty"`
	Code   string `json:"code,omitempty"`
	Detail string `json:"detail,omitempty"` // bounded and redacted
}

// Pending reports whether an expansion is pending on the node.
func (e Expansion) Pending() bool { return e.Node != CapacityRange{} }

// ExpandsOnNodeOnly reports whether the pending expansion exceeds the volume's capacity: the plugin expands on the node
// alone.
func (v Volume) ExpandsOnNodeOnly() bool { return v.Capacity < v.Expansion.Node.Required }

// Open reports whether the outcome of an expansion at the controller is unknown.
func (e Expansion) Open() bool { return e.Asked != CapacityRange{} }

// Closed returns e without the controller request, which the controller will not carry out.
func (e Expansion) Closed() Expansion {
	e.Asked, e.Usage = CapacityRange{}, Usage{}
	if e.RPC == ControllerExpandRPC {
		e.RPC, e.Code, e.Detail = "", "", ""
	}
	return e
}

// WithError returns e with the error of the controller's plugin.
func (e Expansion) WithError(err *CallError) Expansion {
	e.RPC, e.Code, e.Detail = err.RPC, err.Code, err.Detail
	return e
}

// WithoutPending returns e without the expansion pending on the node.
func (e Expansion) WithoutPending() Expansion {
	e.Node = CapacityRange{}
	if e.RPC == NodeExpandRPC {
		e.RPC, e.Code, e.Detail = "", "", ""
	}
	return e
}

// Finished returns e without the expansion pending on the node, which a node has finished.
func (e Expansion) Finished() Expansion {
	e.NodeDone = max(e.NodeDone, e.Node.Required)
	return e.WithoutPending()
}

// OnNode returns e as it is on a node with the progress n. While the node has the volume mounted, an expansion is still
// pending there that another node has finished since the mount.
func (e Expansion) OnNode(n NodeExpansion, mounted bool) Expansion {
	if !e.Pending() && mounted && n.Done < e.NodeDone {
		e.Node.Required = e.NodeDone
	}
	if !e.Pending() || n.RPC == "" {
		return e
	}
	e.Refused = n.Refused
	if !e.Open() || e.RPC != ControllerExpandRPC {
		e.RPC, e.Code, e.Detail = n.RPC, n.Code, n.Detail
	}
	return e
}
