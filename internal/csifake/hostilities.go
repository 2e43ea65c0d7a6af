package csifake

import (
	"fmt"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

var lists = []string{"ListVolumes", "ListSnapshots", "ControllerListVolumeHealth"}

// hostilities are all of them.
var hostilities = map[Hostile]hostility{
	EmptyAnswer: {anything.fits, func(_ spoiling, reply proto.Message) proto.Message {
		return reply.ProtoReflect().New().Interface()
	}},
	NilParts: {kind(own).fits, emptied},
	Huge: {func(string, protoreflect.MessageDescriptor) bool { return true },
		func(_ spoiling, reply proto.Message) proto.Message {
			reply.ProtoReflect().SetUnknown(protowire.AppendBytes(protowire.AppendTag(nil, 9999, protowire.BytesType),
				make([]byte, maxAnswer+1<<20)))
			return reply
		}},
	BigMap:    each(protoreflect.FieldDescriptor.IsMap, bigMap),
	EmptyIDs:  each(isID, setText("")),
	LongIDs:   each(isID, setText(strings.Repeat("i", 4097))),
	LongerIDs: each(isID, setText(strings.Repeat("i", 257))),
	BadUTF8: {kind(isText).fits, func(s spoiling, reply proto.Message) proto.Message {
		return garbled{each(isText, setText(mark)).spoil(s, reply)}
	}},
	Negative:    each(isNumber, minus),
	UnknownEnum: {kind(isEnum).fits, unknownEnum},

	NameChanges: {of("GetPluginInfo"), as(func(s spoiling, r *csi.GetPluginInfoResponse) {
		r.Name = fmt.Sprintf("%s-%d", r.Name, s.turn)
	})},
	NameEmpty: {of("GetPluginInfo"), as(func(_ spoiling, r *csi.GetPluginInfoResponse) { r.Name = "" })},
	NameLong: {of("GetPluginInfo"), as(func(_ spoiling, r *csi.GetPluginInfoResponse) {
		r.Name = strings.Repeat("n", 64)
	})},
	NameIllegal: {of("GetPluginInfo"), as(func(_ spoiling, r *csi.GetPluginInfoResponse) {
		r.Name = "-../a plugin\n"
	})},

	TopologyIllegal: each(isTopology, setSegments(map[string]string{"Up.Example/a/b": strings.Repeat("v", 64)})),
	TopologyTwins:   each(isTopology, setSegments(map[string]string{"example.org/zone": "a", "example.org/Zone": "b"})),

	ConfirmPart: {of("ValidateVolumeCapabilities"), as(func(_ spoiling, r *csi.ValidateVolumeCapabilitiesResponse) {
		all := r.GetConfirmed().GetVolumeCapabilities()
		r.Confirmed = &csi.ValidateVolumeCapabilitiesResponse_Confirmed{VolumeCapabilities: all[:max(len(all)-1, 0)]}
	})},
	ConfirmNothing: {of("ValidateVolumeCapabilities"), as(func(_ spoiling, r *csi.ValidateVolumeCapabilitiesResponse) {
		r.Confirmed, r.Message = nil, "csifake: nothing of this"
	})},
	ConfirmMore: {of("ValidateVolumeCapabilities"), as(func(_ spoiling, r *csi.ValidateVolumeCapabilitiesResponse) {
		more := &csi.VolumeCapability{AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}},
			AccessMode: &csi.VolumeCapability_AccessMode{Mode: csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY}}
		r.Confirmed = &csi.ValidateVolumeCapabilitiesResponse_Confirmed{VolumeContext: map[string]string{"nobody": "asked"},
			VolumeCapabilities: append(r.GetConfirmed().GetVolumeCapabilities(), more)}
	})},

	SameID: {of("CreateVolume"), as(func(s spoiling, r *csi.CreateVolumeResponse) {
		r.Volume.VolumeId = s.p.cfg.Backend.firstMade()
	})},

	RepeatIDs: {of(lists...), entries(func(_ spoiling, l protoreflect.List) {
		for i := range l.Len() {
			l.Append(protoreflect.ValueOfMessage(proto.Clone(l.Get(i).Message().Interface()).ProtoReflect()))
		}
	})},
	TokenLoop:    {of(lists...), nextToken(func(spoiling, string) string { return "0" })},
	Endless:      {of(lists...), nextToken(oneMore)},
	EmptyPages:   {of(lists...), emptyPages},
	ManyEntries:  {of(lists...), entries(many)},
	UnknownNodes: each(isNodes, addText("csifake-nowhere")),
}

var anything kind = func(protoreflect.FieldDescriptor) bool { return true }

func isID(fd protoreflect.FieldDescriptor) bool {
	return isText(fd) && !fd.IsList() && !fd.IsMap() && strings.HasSuffix(string(fd.Name()), "_id")
}
func isText(fd protoreflect.FieldDescriptor) bool {
	return fd.Kind() == protoreflect.StringKind
}
func isNumber(fd protoreflect.FieldDescriptor) bool {
	return !fd.IsList() && (fd.Kind() == protoreflect.Int32Kind || fd.Kind() == protoreflect.Int64Kind)
}
func isEnum(fd protoreflect.FieldDescriptor) bool {
	return fd.Kind() == protoreflect.EnumKind && !fd.IsList()
}
func isNodes(fd protoreflect.FieldDescriptor) bool { return fd.Name() == "published_node_ids" }
func isTopology(fd protoreflect.FieldDescriptor) bool {
	return own(fd) && fd.Message().Name() == "Topology"
}

func setText(s string) func(protoreflect.Message, protoreflect.FieldDescriptor) {
	return func(m protoreflect.Message, fd protoreflect.FieldDescriptor) {
		if !fd.IsList() {
			m.Set(fd, protoreflect.ValueOfString(s))
			return
		}
		m.Clear(fd)
		addText(s)(m, fd)
	}
}

func addText(s string) func(protoreflect.Message, protoreflect.FieldDescriptor) {
	return func(m protoreflect.Message, fd protoreflect.FieldDescriptor) {
		m.Mutable(fd).List().Append(protoreflect.ValueOfString(s))
	}
}

func minus(m protoreflect.Message, fd protoreflect.FieldDescriptor) {
	if fd.Kind() == protoreflect.Int32Kind {
		m.Set(fd, protoreflect.ValueOfInt32(-1))
		return
	}
	m.Set(fd, protoreflect.ValueOfInt64(-1))
}

// bigMap fills a map of strings up to 4097 bytes.
func bigMap(m protoreflect.Message, fd protoreflect.FieldDescriptor) {
	entries, size := m.Mutable(fd).Map(), len("csifake")
	entries.Range(func(k protoreflect.MapKey, v protoreflect.Value) bool {
		size += len(k.String()) + len(v.String())
		return true
	})
	entries.Set(protoreflect.ValueOfString("csifake").MapKey(),
		protoreflect.ValueOfString(strings.Repeat("x", max(0, 4097-size))))
}

func setSegments(to map[string]string) func(protoreflect.Message, protoreflect.FieldDescriptor) {
	topology := (&csi.Topology{Segments: to}).ProtoReflect()
	return func(m protoreflect.Message, fd protoreflect.FieldDescriptor) {
		if !fd.IsList() {
			m.Set(fd, protoreflect.ValueOfMessage(topology))
			return
		}
		m.Clear(fd)
		m.Mutable(fd).List().Append(protoreflect.ValueOfMessage(topology))
	}
}

// emptied takes all messages out of an answer, and leaves empty ones where there must be some.
func emptied(_ spoiling, reply proto.Message) proto.Message {
	m := reply.ProtoReflect()
	for i := range m.Descriptor().Fields().Len() {
		fd := m.Descriptor().Fields().Get(i)
		if !own(fd) {
			continue
		}
		m.Clear(fd)
		if fd.IsList() {
			m.Mutable(fd).List().AppendMutable()
		}
	}
	return reply
}

// unknownEnum gives lists one more entry, with an enumeration that nobody knows in it; what stands alone is changed.
func unknownEnum(_ spoiling, reply proto.Message) proto.Message {
	m, set := reply.ProtoReflect(), func(m protoreflect.Message, fd protoreflect.FieldDescriptor) {
		m.Set(fd, protoreflect.ValueOfEnum(99))
	}
	for i := range m.Descriptor().Fields().Len() {
		fd := m.Descriptor().Fields().Get(i)
		if !own(fd) || !kind(isEnum).within(fd.Message()) {
			continue
		}
		into := m.Mutable(fd)
		if fd.IsList() {
			into = oneMoreLikeTheLast(into.List())
		}
		kind(isEnum).visit(into.Message(), set)
	}
	return reply
}

func oneMoreLikeTheLast(l protoreflect.List) protoreflect.Value {
	if l.Len() == 0 {
		return l.AppendMutable()
	}
	l.Append(protoreflect.ValueOfMessage(proto.Clone(l.Get(l.Len() - 1).Message().Interface()).ProtoReflect()))
	return l.Get(l.Len() - 1)
}

// entries is a spoil of what a list has on one page.
func entries(f func(spoiling, protoreflect.List)) func(spoiling, proto.Message) proto.Message {
	return func(s spoiling, reply proto.Message) proto.Message {
		m := reply.ProtoReflect()
		f(s, m.Mutable(m.Descriptor().Fields().ByName("entries")).List())
		return reply
	}
}

// nextToken is a spoil of what comes after a page. All tokens that it makes are, for this plugin, that of the first
// page.
func nextToken(next func(s spoiling, before string) string) func(spoiling, proto.Message) proto.Message {
	return func(s spoiling, reply proto.Message) proto.Message {
		m := reply.ProtoReflect()
		token := next(s, text(s.req.ProtoReflect(), "starting_token"))
		m.Set(m.Descriptor().Fields().ByName("next_token"), protoreflect.ValueOfString(token))
		return reply
	}
}

func oneMore(_ spoiling, before string) string { return before + "0" }

func emptyPages(s spoiling, reply proto.Message) proto.Message {
	entries(func(_ spoiling, l protoreflect.List) { l.Truncate(0) })(s, reply)
	return nextToken(oneMore)(s, reply)
}

// many fills a page up to 10^5 entries.
func many(_ spoiling, l protoreflect.List) {
	for i := l.Len(); i < 100_000; i++ {
		id := fmt.Sprint("many-", i)
		kind(isID).visit(l.AppendMutable().Message(), func(m protoreflect.Message, fd protoreflect.FieldDescriptor) {
			m.Set(fd, protoreflect.ValueOfString(id))
		})
	}
}
