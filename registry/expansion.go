package registry

import "time"

// CapacityRange is how large a volume is to be, in bytes (CSI CapacityRange). The zero value asks for nothing.
type CapacityRange struct {
	Required int64 `json:"required_bytes,omitempty"`
	Limit    int64 `json:"limit_bytes,omitempty"` // 0: none
}

// Expansion is how far the expansions of a volume have come. The zero value: there was none.
type Expansion struct {
	Done int64 `json:"done,omitempty"` // bytes that the last one asked for that its controller is done with
	// Asked is what a controller was asked for without an answer that says what became of it; zero: nothing. It is
	// asked for once more before anything else is, with the same usage.
	Asked CapacityRange `json:"asked,omitzero"`
	Usage Usage         `json:"usage,omitzero"` // that Asked named; zero: none
	// Node is what the node is still to see to: the resize is pending. Zero: nothing.
	Node CapacityRange `json:"node,omitzero"`
	// Refused is the code with which the node's plugin refused. The record does not have it; a status does (On).
	Refused string    `json:"refused,omitempty"`
	Since   time.Time `json:"since,omitzero"` // when Asked or Node was recorded
	// What the plugin said last; empty: nothing was wrong. What a controller said of Asked stands as long as that does.
	RPC    RPC    `json:"rpc,omitempty"`
	Code   string `json:"code,omitempty"`
	Detail string `json:"detail,omitempty"` // bounded and redacted
}

// Pending says whether the node is still to see to an expansion.
func (e Expansion) Pending() bool { return e.Node != CapacityRange{} }

// Unmade says whether the node is still to make what the controller has not: a plugin that expands on the node alone.
func (v Volume) Unmade() bool { return v.Capacity < v.Expansion.Node.Required }

// Open says whether nobody knows what became of an expansion at the controller.
func (e Expansion) Open() bool { return e.Asked != CapacityRange{} }

// Closed is e without what a controller was asked for: it will not do it.
func (e Expansion) Closed() Expansion {
	e.Asked, e.Usage = CapacityRange{}, Usage{}
	if e.RPC == ControllerExpandRPC {
		e.RPC, e.Code, e.Detail = "", "", ""
	}
	return e
}

// Troubled is e with what the controller's plugin said.
func (e Expansion) Troubled(err *CallError) Expansion {
	e.RPC, e.Code, e.Detail = err.RPC, err.Code, err.Detail
	return e
}

// Settled is e without what is pending for the node.
func (e Expansion) Settled() Expansion {
	if e.Node = (CapacityRange{}); e.RPC == NodeExpandRPC {
		e.RPC, e.Code, e.Detail = "", "", ""
	}
	return e
}

// On is e as people see it on a node that has come as far as n.
func (e Expansion) On(n NodeExpansion) Expansion {
	if !e.Pending() || n.RPC == "" {
		return e
	}
	e.Refused = n.Refused
	if !e.Open() || e.RPC != ControllerExpandRPC {
		e.RPC, e.Code, e.Detail = n.RPC, n.Code, n.Detail
	}
	return e
}
