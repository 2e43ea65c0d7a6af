package csifake

import (
	"maps"
	"slices"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
)

// Hostile is a way to spoil a true answer. The effect of the call is the true one.
type Hostile string

const (
	// Of every answer that has what they spoil.

	EmptyAnswer Hostile = "empty"        // nothing in it
	NilParts    Hostile = "nil"          // no message in it: no volume, entries and capabilities that are empty
	Huge        Hostile = "huge"         // 5 MiB, more than a client of gRPC takes by default
	BigMap      Hostile = "big-map"      // every map has 4097 bytes
	EmptyIDs    Hostile = "id-empty"     // every id
	LongIDs     Hostile = "id-4097"      // every id has 4097 bytes
	LongerIDs   Hostile = "id-257"       // every id has 257 bytes
	BadUTF8     Hostile = "bad-utf8"     // every string, on the wire; protobuf for Go does not let its caller see it
	Negative    Hostile = "negative"     // every number is -1
	UnknownEnum Hostile = "unknown-enum" // a capability more that is number 99, every other enumeration is 99

	// Of GetPluginInfo.

	NameChanges Hostile = "name-changes" // another name every time
	NameEmpty   Hostile = "name-empty"
	NameLong    Hostile = "name-64" // bytes
	NameIllegal Hostile = "name-illegal"

	// Of topology, in NodeGetInfo and with volumes.

	TopologyIllegal Hostile = "topology-illegal" // a key that breaks the rules, a value of 64 bytes
	TopologyTwins   Hostile = "topology-twins"   // zone and Zone

	// Of ValidateVolumeCapabilities.

	ConfirmPart    Hostile = "confirm-part"    // all but the last capability, without parameters and context
	ConfirmNothing Hostile = "confirm-nothing" // says why not, and confirms nothing
	ConfirmMore    Hostile = "confirm-more"    // a capability and a context that nobody asked for

	// Of CreateVolume.

	SameID Hostile = "same-id" // the id of the first volume that was ever made

	// Of lists.

	RepeatIDs    Hostile = "repeat-ids"    // every entry twice
	TokenLoop    Hostile = "token-loop"    // the next page is always this one
	Endless      Hostile = "endless"       // there is always a next page, with a new token
	EmptyPages   Hostile = "empty-pages"   // the same, and nothing on any page
	ManyEntries  Hostile = "many"          // 10^5 entries
	UnknownNodes Hostile = "unknown-nodes" // volumes are published to nodes that nobody knows
)

// hostility is how to spoil an answer, and which.
type hostility struct {
	fits  func(rpc string, reply protoreflect.MessageDescriptor) bool
	spoil func(s spoiling, reply proto.Message) proto.Message
}

// spoiling is what a hostility may need to know.
type spoiling struct {
	p    *Plugin
	turn int // how often the rule has matched
	req  proto.Message
}

// HostileAnswers are those that an RPC can give.
func HostileAnswers(rpc string) []Hostile {
	return slices.DeleteFunc(slices.Sorted(maps.Keys(hostilities)), func(h Hostile) bool { return !h.Fits(rpc) })
}

// Fits tells whether an RPC can give that answer.
func (h Hostile) Fits(rpc string) bool {
	mt, err := messageType(rpc, "Response")
	return err == nil && hostilities[h].fits(rpc, mt.Descriptor())
}

// own tells whether a field is a message of CSI, or several.
func own(fd protoreflect.FieldDescriptor) bool {
	return fd.Message() != nil && !fd.IsMap() && fd.Message().ParentFile().Package() == "csi.v1"
}

// kind is a test of fields.
type kind func(protoreflect.FieldDescriptor) bool

// visit calls f for all fields of a kind, in a message and in those in it, whether they are set or not. A message that
// is missing is made for the sake of such a field, unless it is one of several that may be.
func (is kind) visit(m protoreflect.Message, f func(protoreflect.Message, protoreflect.FieldDescriptor)) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		fd := fields.Get(i)
		if is(fd) {
			f(m, fd)
		}
		if !own(fd) || !is.within(fd.Message()) || !m.Has(fd) && fd.ContainingOneof() != nil {
			continue
		}
		if !fd.IsList() {
			is.visit(m.Mutable(fd).Message(), f)
			continue
		}
		list := m.Mutable(fd).List()
		if list.Len() == 0 {
			list.AppendMutable()
		}
		for j := range list.Len() {
			is.visit(list.Get(j).Message(), f)
		}
	}
}

// within tells whether a message has such a field, somewhere.
func (is kind) within(md protoreflect.MessageDescriptor) bool {
	for i := range md.Fields().Len() {
		if fd := md.Fields().Get(i); is(fd) || own(fd) && is.within(fd.Message()) {
			return true
		}
	}
	return false
}

// fits is that of a hostility: the answer has such a field.
func (is kind) fits(_ string, md protoreflect.MessageDescriptor) bool { return is.within(md) }

// of is a fits: it is one of these RPCs.
func of(rpcs ...string) func(string, protoreflect.MessageDescriptor) bool {
	return func(rpc string, _ protoreflect.MessageDescriptor) bool { return slices.Contains(rpcs, rpc) }
}

// each is a hostility that does something to all fields of a kind.
func each(is kind, f func(protoreflect.Message, protoreflect.FieldDescriptor)) hostility {
	return hostility{is.fits, func(_ spoiling, reply proto.Message) proto.Message {
		is.visit(reply.ProtoReflect(), f)
		return reply
	}}
}

// as is a spoil of one kind of answer.
func as[T proto.Message](f func(spoiling, T)) func(spoiling, proto.Message) proto.Message {
	return func(s spoiling, reply proto.Message) proto.Message {
		if r, ok := reply.(T); ok {
			f(s, r)
		}
		return reply
	}
}
