package csi

import (
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/emptypb"

	"holdfast/registry"
)

// Fields of CSI up to version 1.12. Later versions reserve their numbers, so that they arrive as unknown fields.
const (
	conditionField protowire.Number = 2 // volume_condition of NodeGetVolumeStatsResponse, and of VolumeStatus in lists
	abnormalField  protowire.Number = 1 // of VolumeCondition
	messageField   protowire.Number = 2 // of VolumeCondition
)

// condition returns the VolumeCondition in m, or nil if m has no readable one. The message of a condition that is not
// abnormal is dropped. getRedactor returns the redactor for the message.
func condition(m proto.Message, getRedactor func() redactor) *registry.Condition {
	abnormal, message, found := decodeCondition(m.ProtoReflect().GetUnknown())
	switch {
	case !found:
		return nil
	case !abnormal:
		return &registry.Condition{}
	}
	return &registry.Condition{Abnormal: true, Message: getRedactor().redact(message)}
}

// decodeCondition reads VolumeCondition from the unknown fields of a message.
func decodeCondition(unknown []byte) (abnormal bool, message string, found bool) {
	inner, size := protowire.ConsumeBytes(lastField(unknown, conditionField, protowire.BytesType))
	if size < 0 || proto.Unmarshal(inner, &emptypb.Empty{}) != nil { // inner is no message
		return false, "", false
	}
	flag, _ := protowire.ConsumeVarint(lastField(inner, abnormalField, protowire.VarintType))
	text, _ := protowire.ConsumeBytes(lastField(inner, messageField, protowire.BytesType))
	return protowire.DecodeBool(flag), string(text), true
}

// lastField returns the encoded value of the field in an encoded message. If the field occurs several times, the last
// value counts, as protobuf demands. The value is empty if there is no such field, and nil if the encoding is invalid.
func lastField(b []byte, number protowire.Number, kind protowire.Type) []byte {
	value := []byte{}
	for len(b) > 0 {
		n, t, tag := protowire.ConsumeTag(b)
		if tag < 0 {
			return nil
		}
		size := protowire.ConsumeFieldValue(n, t, b[tag:])
		if size < 0 {
			return nil
		}
		if n == number && t == kind {
			value = b[tag : tag+size]
		}
		b = b[tag+size:]
	}
	return value
}
