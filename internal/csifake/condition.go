package csifake

import (
	"context"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
)

// Condition is VolumeCondition of CSI up to version 1.12: what a plugin says of a volume's health. A plugin with the
// capability VOLUME_CONDITION of a service tells one with each volume in the answers of that service: that of the rule,
// or that all is well.
type Condition struct {
	Abnormal bool   `json:"abnormal,omitempty"`
	Message  string `json:"message,omitempty"`
}

// tellCondition adds the condition of a volume to a message that had volume_condition as its field 2, as an old plugin
// encodes it.
func (p *Plugin) tellCondition(ctx context.Context, service string, m proto.Message) {
	if !p.caps.has(service + "/VOLUME_CONDITION") {
		return
	}
	says := &Condition{Message: "the volume is well"}
	if r := callOf(ctx).acts.before; r != nil && r.Condition != nil {
		says = r.Condition
	}
	var inner []byte
	if says.Abnormal {
		inner = protowire.AppendVarint(protowire.AppendTag(inner, 1, protowire.VarintType), 1)
	}
	inner = protowire.AppendString(protowire.AppendTag(inner, 2, protowire.BytesType), says.Message)
	field := protowire.AppendBytes(protowire.AppendTag(nil, 2, protowire.BytesType), inner)
	m.ProtoReflect().SetUnknown(append(m.ProtoReflect().GetUnknown(), field...))
}
