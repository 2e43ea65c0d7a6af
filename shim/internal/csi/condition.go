package csi

import (
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"holdfast/registry"
)

// Fields of CSI up to version 1.12. Later versions reserve their numbers, so that they arrive as unknown fields.
const (
	conditionField protowire.Number = 2 // volume_condition of NodeGetVolumeStatsResponse, and of VolumeStatus in lists
	abnormalField  protowire.Number = 1 // of VolumeCondition
	messageField   protowire.Number = 2 // of VolumeCondition
)

// condition returns the VolumeCondition in m, or nil if m has none that can be read. redact makes its message fit to be
// shown.
func condition(m proto.Message, redact func(string) string) *registry.VolumeCondition {
	abnormal, message, found := decodeCondition(m.ProtoReflect().GetUnknown())
	switch {
	case !found:
		return nil
	case !abnormal:
		return &registry.VolumeCondition{}
	}
	return &registry.VolumeCondition{Abnormal: true, Message: redact(message)}
}

// decodeCondition reads VolumeCondition from the unknown fields of a message. As in any protobuf message, the last
// value of a field counts.
func decodeCondition(unknown []byte) (abnormal bool, message string, found bool) {
	eachField(unknown, func(n protowire.Number, t protowire.Type, value []byte) {
		if n != conditionField || t != protowire.BytesType {
			return
		}
		inner, size := protowire.ConsumeBytes(value)
		if size < 0 {
			return
		}
		found = eachField(inner, func(n protowire.Number, t protowire.Type, value []byte) {
			switch {
			case n == abnormalField && t == protowire.VarintType:
				flag, _ := protowire.ConsumeVarint(value)
				abnormal = protowire.DecodeBool(flag)
			case n == messageField && t == protowire.BytesType:
				text, _ := protowire.ConsumeBytes(value)
				message = string(text)
			}
		})
	})
	return abnormal, message, found
}

// eachField calls f for each field of an encoded message, and reports whether the encoding is valid to its end.
func eachField(b []byte, f func(n protowire.Number, t protowire.Type, value []byte)) bool {
	for len(b) > 0 {
		n, t, tag := protowire.ConsumeTag(b)
		if tag < 0 {
			return false
		}
		size := protowire.ConsumeFieldValue(n, t, b[tag:])
		if size < 0 {
			return false
		}
		f(n, t, b[tag:tag+size])
		b = b[tag+size:]
	}
	return true
}
