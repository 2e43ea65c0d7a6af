package csifake

import (
	"fmt"
	"strings"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Size limits of CSI, in bytes.
const (
	longestText = 128
	longestNode = 256
	longestMap  = 4096 // all its keys and values, or all mount flags
)

// Limits for values that a plugin itself has returned. They come back unchanged, and real plugins exceed CSI's limits.
const (
	longestID      = 4096     // of a volume or a snapshot
	longestContext = 64 << 10 // volume_context, publish_context
)

// tooLong names the fields of a request that exceed the size limits of CSI, without their contents. CSI has no limit
// for paths.
func tooLong(req proto.Message) (over []string) {
	tell := func(fd protoreflect.FieldDescriptor, size, limit int) {
		if size > limit {
			over = append(over, fmt.Sprintf("%s: %d bytes", fd.Name(), size))
		}
	}
	measure(req.ProtoReflect(), func(fd protoreflect.FieldDescriptor, v protoreflect.Value) {
		switch {
		case fd.Name() == "volume_context" || fd.Name() == "publish_context":
			tell(fd, weight(fd, v), longestContext)
		case fd.IsMap() || fd.Name() == "mount_flags":
			tell(fd, weight(fd, v), longestMap)
		case fd.Kind() != protoreflect.StringKind || strings.HasSuffix(string(fd.Name()), "_path"):
		case fd.IsList():
			limit := longestText
			if strings.HasSuffix(string(fd.Name()), "_ids") {
				limit = longestID
			}
			for i := range v.List().Len() {
				tell(fd, len(v.List().Get(i).String()), limit)
			}
		case fd.Name() == "node_id":
			tell(fd, len(v.String()), longestNode)
		case strings.HasSuffix(string(fd.Name()), "_id"):
			tell(fd, len(v.String()), longestID)
		default:
			tell(fd, len(v.String()), longestText)
		}
	})
	return over
}

// measure calls f for every field that is set, including fields of inner messages.
func measure(m protoreflect.Message, f func(protoreflect.FieldDescriptor, protoreflect.Value)) {
	m.Range(func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		switch {
		case !own(fd):
			f(fd, v)
		case fd.IsList():
			for i := range v.List().Len() {
				measure(v.List().Get(i).Message(), f)
			}
		default:
			measure(v.Message(), f)
		}
		return true
	})
}

// weight returns the total length of the strings in a map or list.
func weight(fd protoreflect.FieldDescriptor, v protoreflect.Value) (n int) {
	if fd.IsMap() {
		v.Map().Range(func(k protoreflect.MapKey, v protoreflect.Value) bool {
			n += len(k.String()) + len(v.String())
			return true
		})
		return n
	}
	for i := range v.List().Len() {
		n += len(v.List().Get(i).String())
	}
	return n
}

// own reports whether a field holds messages of CSI.
func own(fd protoreflect.FieldDescriptor) bool {
	return fd.Message() != nil && !fd.IsMap() && fd.Message().ParentFile().Package() == "csi.v1"
}
