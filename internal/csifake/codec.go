package csifake

import (
	"bytes"
	"strings"

	"google.golang.org/grpc/encoding"
	grpcproto "google.golang.org/grpc/encoding/proto"
	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// mark stands for a string of invalid UTF-8, which protobuf refuses to encode.
const mark = "\x01\x02csifake: no UTF-8\x02\x01"

// noUTF8 replaces a mark on the wire. It has the same length.
var noUTF8 = []byte("\xff" + strings.Repeat("\xfe", len(mark)-1))

// garbled is a reply in which marks are replaced by invalid UTF-8 on the wire.
type garbled struct{ proto.Message }

// garble returns the reply with marks in place of its strings.
func garble(reply proto.Message) proto.Message {
	reply = proto.Clone(reply)
	setMarks(reply.ProtoReflect())
	return garbled{reply}
}

func setMarks(m protoreflect.Message) {
	m.Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case fd.IsList() || fd.IsMap():
		case fd.Kind() == protoreflect.StringKind:
			m.Set(fd, protoreflect.ValueOfString(mark))
		case fd.Message() != nil:
			setMarks(v.Message())
		}
		return true
	})
}

// garbling is gRPC's codec, with a change for garbled replies.
type garbling struct{}

func (garbling) Name() string { return grpcproto.Name }

func (garbling) Marshal(v any) (mem.BufferSlice, error) {
	g, ok := v.(garbled)
	if !ok {
		return encoding.GetCodecV2(grpcproto.Name).Marshal(v)
	}
	b, err := proto.Marshal(g.Message)
	return mem.BufferSlice{mem.SliceBuffer(bytes.ReplaceAll(b, []byte(mark), noUTF8))}, err
}

func (garbling) Unmarshal(b mem.BufferSlice, v any) error {
	return encoding.GetCodecV2(grpcproto.Name).Unmarshal(b, v)
}

// maxAnswer is the longest message that a client of gRPC accepts by default.
const maxAnswer = 4 << 20

// unreadable reports whether a caller cannot read a reply.
func unreadable(reply proto.Message) bool {
	_, garbled := reply.(garbled)
	return garbled || proto.Size(reply) > maxAnswer
}
