package csifake

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"holdfast/internal/csifake/journal"
)

// told is what a caller has after one call.
type told struct {
	req, reply proto.Message
	code       string
}

// shows says how a caller sees that an answer is spoilt. No honest answer shows it.
var shows = map[Hostile]func(told) bool{
	EmptyAnswer: func(a told) bool { return a.code == "OK" && proto.Size(a.reply) == 0 },
	NilParts:    func(a told) bool { return a.code == "OK" && lacksAll(a.reply.ProtoReflect()) },
	Huge:        func(a told) bool { return a.code == "RESOURCE_EXHAUSTED" },
	BigMap: func(a told) bool {
		return someField(a, func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
			return fd.IsMap() && weight(fd, v) == 4097
		})
	},
	EmptyIDs: func(a told) bool {
		found, all := false, true
		kind(isID).visit(a.reply.ProtoReflect(), func(m protoreflect.Message, fd protoreflect.FieldDescriptor) {
			found, all = true, all && m.Get(fd).String() == ""
		})
		return a.code == "OK" && found && all
	},
	LongIDs:   func(a told) bool { return someField(a, idOf(4097)) },
	LongerIDs: func(a told) bool { return someField(a, idOf(257)) },
	BadUTF8:   func(a told) bool { return a.code == "INTERNAL" },
	Negative: func(a told) bool {
		return someField(a, func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
			return isNumber(fd) && v.Int() == -1
		})
	},
	UnknownEnum: func(a told) bool {
		return someField(a, func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
			return isEnum(fd) && !fd.IsList() && v.Enum() == 99
		})
	},

	NameChanges: nameIs(func(s string) bool { return s == "csifake.example.org-1" }),
	NameEmpty:   nameIs(func(s string) bool { return s == "" }),
	NameLong:    nameIs(func(s string) bool { return len(s) == 64 }),
	NameIllegal: nameIs(func(s string) bool { return strings.Contains(s, "\n") }),

	TopologyIllegal: func(a told) bool { return someField(a, segmentKeys("Up.Example/a/b")) },
	TopologyTwins:   func(a told) bool { return someField(a, segmentKeys("example.org/Zone", "example.org/zone")) },

	ConfirmPart:    confirms(func(asked, got int, context bool) bool { return got == asked-1 && !context }),
	ConfirmNothing: confirms(func(_, got int, _ bool) bool { return got == 0 }),
	ConfirmMore:    confirms(func(asked, got int, _ bool) bool { return got > asked }),

	SameID: func(a told) bool {
		req, create := a.req.(*csi.CreateVolumeRequest)
		return create && a.reply.(*csi.CreateVolumeResponse).GetVolume().GetVolumeId() != VolumeID(req.GetName())
	},

	RepeatIDs: func(a told) bool {
		m, n := a.reply.ProtoReflect(), entriesOf(a)
		l := m.Get(m.Descriptor().Fields().ByName("entries")).List()
		return n > 0 && n%2 == 0 && proto.Equal(l.Get(0).Message().Interface(), l.Get(n/2).Message().Interface())
	},
	TokenLoop:   func(a told) bool { return tokenOf(a) == "0" },
	Endless:     func(a told) bool { return tokenOf(a) != "" },
	EmptyPages:  func(a told) bool { return tokenOf(a) != "" && entriesOf(a) == 0 },
	ManyEntries: func(a told) bool { return entriesOf(a) == 100_000 },
	UnknownNodes: func(a told) bool {
		return someField(a, func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
			return isNodes(fd) && v.List().Get(v.List().Len()-1).String() == "csifake-nowhere"
		})
	},
}

// someField tells whether an answer has a field, set, that passes a test.
func someField(a told, test func(protoreflect.FieldDescriptor, protoreflect.Value) bool) (found bool) {
	measure(a.reply.ProtoReflect(), func(fd protoreflect.FieldDescriptor, v protoreflect.Value) {
		found = found || test(fd, v)
	})
	return found
}

func lacksAll(m protoreflect.Message) bool {
	found := false
	for i := range m.Descriptor().Fields().Len() {
		fd := m.Descriptor().Fields().Get(i)
		switch {
		case !own(fd):
		case fd.IsList():
			found = true
			if m.Get(fd).List().Len() != 1 || proto.Size(m.Get(fd).List().Get(0).Message().Interface()) != 0 {
				return false
			}
		default:
			found = true
			if m.Has(fd) {
				return false
			}
		}
	}
	return found
}

func idOf(n int) func(protoreflect.FieldDescriptor, protoreflect.Value) bool {
	return func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		return isID(fd) && len(v.String()) == n
	}
}

func nameIs(test func(string) bool) func(told) bool {
	return func(a told) bool { return test(a.reply.(*csi.GetPluginInfoResponse).GetName()) }
}

func segmentKeys(want ...string) func(protoreflect.FieldDescriptor, protoreflect.Value) bool {
	return func(fd protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		if fd.Name() != "segments" {
			return false
		}
		var keys []string
		v.Map().Range(func(k protoreflect.MapKey, _ protoreflect.Value) bool {
			keys = append(keys, k.String())
			return true
		})
		slices.Sort(keys)
		return slices.Equal(keys, want)
	}
}

func confirms(test func(asked, got int, context bool) bool) func(told) bool {
	return func(a told) bool {
		asked := a.req.(*csi.ValidateVolumeCapabilitiesRequest).GetVolumeCapabilities()
		c := a.reply.(*csi.ValidateVolumeCapabilitiesResponse).GetConfirmed()
		return test(len(asked), len(c.GetVolumeCapabilities()), len(c.GetVolumeContext()) > 0)
	}
}

func entriesOf(a told) int {
	m := a.reply.ProtoReflect()
	return m.Get(m.Descriptor().Fields().ByName("entries")).List().Len()
}

func tokenOf(a told) string { return text(a.reply.ProtoReflect(), "next_token") }

// hall is a plugin where every RPC has a request that succeeds. There are three volumes and one snapshot.
type hall struct {
	t        *testing.T
	fake     *Plugin
	c        *client
	at       places
	volume   string
	snapshot string
	group    string
	made     int
}

func newHall(t *testing.T, start func(Config) (*Plugin, *client)) *hall {
	h := &hall{t: t, at: makePlaces(t)}
	h.fake, h.c = start(Config{Caps: append(everyCap(), "expansion/ONLINE"), Topology: map[string]string{"zone": "a"},
		MaxVolumes: 9})
	ctx := t.Context()
	for _, name := range []string{"one", "two", "three"} {
		made, err := h.c.CreateVolume(ctx, &csi.CreateVolumeRequest{Name: name,
			VolumeCapabilities: []*csi.VolumeCapability{writer()}})
		must(t, err)
		h.volume = made.GetVolume().GetVolumeId()
	}
	_, err := h.c.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{VolumeId: h.volume, NodeId: "node-1",
		VolumeCapability: writer()})
	must(t, err, h.c.stage(ctx, h.volume, h.at), h.c.publish(ctx, h.volume, h.at))
	snap, err := h.c.CreateSnapshot(ctx, &csi.CreateSnapshotRequest{Name: "snap", SourceVolumeId: h.volume})
	must(t, err)
	h.snapshot = snap.GetSnapshot().GetSnapshotId()
	group, err := csi.NewGroupControllerClient(h.c.to).CreateVolumeGroupSnapshot(ctx,
		&csi.CreateVolumeGroupSnapshotRequest{Name: "group", SourceVolumeIds: []string{h.volume}})
	must(t, err)
	h.group = group.GetGroupSnapshot().GetGroupSnapshotId()
	return h
}

// request is one that succeeds.
func (h *hall) request(rpc string) proto.Message {
	h.made++
	switch rpc {
	case "CreateVolume":
		return &csi.CreateVolumeRequest{Name: fmt.Sprint("more-", h.made),
			VolumeCapabilities: []*csi.VolumeCapability{writer()}}
	case "DeleteVolume":
		return &csi.DeleteVolumeRequest{VolumeId: "gone"}
	case "ControllerPublishVolume":
		return &csi.ControllerPublishVolumeRequest{VolumeId: h.volume, NodeId: "node-1", VolumeCapability: writer()}
	case "ControllerUnpublishVolume":
		return &csi.ControllerUnpublishVolumeRequest{VolumeId: h.volume, NodeId: "node-2"}
	case "ValidateVolumeCapabilities":
		return &csi.ValidateVolumeCapabilitiesRequest{VolumeId: h.volume, VolumeContext: map[string]string{"k": "v"},
			VolumeCapabilities: []*csi.VolumeCapability{writer(), {AccessType: writer().AccessType}}}
	case "CreateSnapshot":
		return &csi.CreateSnapshotRequest{Name: fmt.Sprint("more-", h.made), SourceVolumeId: h.volume}
	case "DeleteSnapshot":
		return &csi.DeleteSnapshotRequest{SnapshotId: "gone"}
	case "GetSnapshot":
		return &csi.GetSnapshotRequest{SnapshotId: h.snapshot}
	case "CreateVolumeGroupSnapshot":
		return &csi.CreateVolumeGroupSnapshotRequest{Name: fmt.Sprint("more-", h.made),
			SourceVolumeIds: []string{h.volume}}
	case "GetVolumeGroupSnapshot":
		return &csi.GetVolumeGroupSnapshotRequest{GroupSnapshotId: h.group}
	case "NodeStageVolume":
		return &csi.NodeStageVolumeRequest{VolumeId: h.volume, StagingTargetPath: h.at.staging,
			VolumeCapability: writer()}
	case "NodeUnstageVolume":
		return &csi.NodeUnstageVolumeRequest{VolumeId: h.volume, StagingTargetPath: "/csifake/nothing"}
	case "NodePublishVolume":
		return &csi.NodePublishVolumeRequest{VolumeId: h.volume, StagingTargetPath: h.at.staging,
			TargetPath:       h.at.target,
			VolumeCapability: writer()}
	case "NodeUnpublishVolume":
		return &csi.NodeUnpublishVolumeRequest{VolumeId: h.volume, TargetPath: "/csifake/nothing"}
	case "NodeGetVolumeStats":
		return &csi.NodeGetVolumeStatsRequest{VolumeId: h.volume, VolumePath: h.at.target,
			StagingTargetPath: h.at.staging}
	case "NodeExpandVolume":
		return &csi.NodeExpandVolumeRequest{VolumeId: h.volume, VolumePath: h.at.target,
			StagingTargetPath: h.at.staging}
	}
	mt, err := messageType(rpc, "Request")
	must(h.t, err)
	m := mt.New()
	if fd := m.Descriptor().Fields().ByName("volume_id"); fd != nil {
		m.Set(fd, protoreflect.ValueOfString(h.volume))
	}
	return m.Interface()
}

// ask makes one call with a request that succeeds.
func (h *hall) ask(ctx context.Context, rpc string) told {
	h.t.Helper()
	reply, err := newReply(rpc)
	must(h.t, err)
	a := told{req: h.request(rpc), reply: reply}
	for _, s := range services {
		for _, m := range s.Methods {
			if m.MethodName == rpc {
				a.code = codeName(h.c.to.Invoke(ctx, "/"+s.ServiceName+"/"+rpc, a.req, a.reply))
			}
		}
	}
	return a
}

// TestHostileAnswers: every RPC gives every hostile answer that it can, its caller sees it, and the journal has what
// was sent. Its honest answer shows none of them.
func TestHostileAnswers(t *testing.T) {
	inBothForms(t, func(t *testing.T, start func(Config) (*Plugin, *client)) {
		h, given := newHall(t, start), map[Hostile]bool{}
		for _, rpc := range RPCs() {
			for _, hostile := range HostileAnswers(rpc) {
				given[hostile] = true
				honest := h.ask(t.Context(), rpc)
				if honest.code != "OK" {
					t.Fatalf("%s answers %s to an honest request", rpc, honest.code)
				}
				small := proto.Size(honest.reply) == 0
				if shows[hostile](honest) && !(hostile == EmptyAnswer && small) {
					t.Errorf("%s is %s already: %v", rpc, hostile, honest.reply)
				}
				h.fake.On(rpc).Times(1).Hostile(hostile)
				if spoilt := h.ask(t.Context(), rpc); !shows[hostile](spoilt) {
					t.Errorf("%s is not %s: %s %.300v", rpc, hostile, spoilt.code, spoilt.reply)
				}
				h.fake.ClearScript()
			}
		}
		for hostile := range hostilities {
			if !given[hostile] {
				t.Errorf("no RPC answers %s", hostile)
			}
		}
		calls, err := h.fake.Calls()
		must(t, err)
		lost := 0
		for _, c := range calls {
			if c.End.Lost {
				lost++
			}
		}
		if lost < len(RPCs()) {
			t.Errorf("%d answers are lost in the journal, of %d RPCs", lost, len(RPCs()))
		}
	})
}

// TestPages: the pages of a list that never ends are as they are said to be.
func TestPages(t *testing.T) {
	inBothForms(t, func(t *testing.T, start func(Config) (*Plugin, *client)) {
		h := newHall(t, start)
		page := func(token string) *csi.ListVolumesResponse {
			list, err := h.c.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: 2, StartingToken: token})
			must(t, err)
			return list
		}
		h.fake.On("ListVolumes").Times(3).Hostile(TokenLoop)
		one, two, three := page(""), page("0"), page("0")
		if one.GetNextToken() != two.GetNextToken() || two.GetNextToken() != three.GetNextToken() ||
			!proto.Equal(one, three) {
			t.Errorf("the loop is %v, %v, %v", one, two, three)
		}
		h.fake.ClearScript()
		h.fake.On("ListVolumes").Hostile(Endless)
		seen, token := map[string]bool{}, ""
		for range 50 {
			next := page(token)
			if token = next.GetNextToken(); seen[token] || token == "" || len(next.GetEntries()) == 0 {
				t.Fatalf("after %d pages: %v", len(seen), next)
			}
			seen[token] = true
		}
	})
}

// TestReply: an answer is what a script says, in either form.
func TestReply(t *testing.T) {
	inBothForms(t, func(t *testing.T, start func(Config) (*Plugin, *client)) {
		rules, err := ParseScript([]byte(`[{"rpc": "NodeGetInfo", "reply": {"nodeId": "", "maxVolumesPerNode": "-7"}},
			{"rpc": "ControllerGetCapabilities", "reply": {"capabilities": [{"rpc": {"type": 99}}, {}]}}]`))
		must(t, err)
		_, c := start(Config{Script: rules})
		info, err := c.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
		must(t, err)
		if info.GetNodeId() != "" || info.GetMaxVolumesPerNode() != -7 {
			t.Errorf("NodeGetInfo answers %v", info)
		}
		caps, err := c.ControllerGetCapabilities(t.Context(), &csi.ControllerGetCapabilitiesRequest{})
		must(t, err)
		if len(caps.GetCapabilities()) != 2 || caps.GetCapabilities()[0].GetRpc().GetType() != 99 ||
			caps.GetCapabilities()[1].GetType() != nil {
			t.Errorf("ControllerGetCapabilities answers %v", caps)
		}
	})
}

// TestErrorText: an error may be as long as 1 MiB and carry binary details.
func TestErrorText(t *testing.T) {
	inBothForms(t, func(t *testing.T, start func(Config) (*Plugin, *client)) {
		_, c := start(Config{Script: []Rule{{RPC: "Probe", Code: "INTERNAL", Message: "begin ", TextBytes: 1 << 20,
			Details: true}}})
		_, err := c.Probe(t.Context(), &csi.ProbeRequest{})
		s := statusOf(t, err)
		if s.Code().String() != "Internal" || len(s.Message()) != 1<<20 ||
			!strings.HasPrefix(s.Message(), "begin xxx") || len(s.Details()) != 1 {
			t.Errorf("%v, %d bytes, details %v", s.Code(), len(s.Message()), s.Details())
		}
	})
}

// TestOddAnswersInTheJournal: the judge knows what the caller could not read, or could make nothing of.
func TestOddAnswersInTheJournal(t *testing.T) {
	for hostile, want := range map[Hostile][]string{Huge: {"RU"}, BadUTF8: {"RU"}, NilParts: {"RU"}, EmptyIDs: {"RU"},
		LongIDs: nil} {
		t.Run(string(hostile), func(t *testing.T) {
			fake := Start(t, Config{Caps: AllCaps, Script: []Rule{{RPC: "CreateVolume", Hostile: hostile}}})
			c := dial(t, fake.Socket()).learn()
			_, _ = c.CreateVolume(t.Context(), &csi.CreateVolumeRequest{Name: "one",
				VolumeCapabilities: []*csi.VolumeCapability{writer()}})
			var got []string
			for _, v := range fake.Check(journal.Options{Settled: true}) {
				got = append(got, v.Rule)
			}
			if !slices.Equal(got, want) {
				t.Errorf("Check finds %v, want %v", got, want)
			}
		})
	}
}
