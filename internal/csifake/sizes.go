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

// What a plugin has named or said itself comes back as it is, whatever CSI allows: real ones exceed it.
const (
	longestID      = 4096     // of a volume or a snapshot
	longestContext = 64 << 10 // volume_context, publish_context
)

// tooLong names the fields of a request that break the size limits of CSI, never what they hold. Paths have no limit of
// CSI.
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

// measure calls f for every field that is set, also within messages.
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

// weight is the length of all strings in a map or list.
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
