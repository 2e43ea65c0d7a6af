package csi

import (
	"context"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"holdfast/internal/csifake"
	"holdfast/registry"
)

// oldCaps are those of a plugin of CSI 1.12.
var oldCaps = append([]string{"VOLUME_CONDITION"}, csifake.AllCaps...)

// A plugin of CSI up to 1.12 says how a volume is in fields that later versions only reserve. That is read from both answers that have it,
// on one line and without secrets, and the capability has its name.
func TestConditionOfAnOldPluginIsRead(t *testing.T) {
	backend := csifake.NewBackend("")
	if err := backend.AddVolume("vol-1", 1<<20, nil); err != nil {
		t.Fatal(err)
	}
	fake, f := start(t, csifake.Config{Caps: oldCaps, Backend: backend})
	said, err := open(t, f).Describe(patient(t), bothRoles)
	if err != nil || !said[registry.RoleNode].Has(registry.NodeCondition) || !said[registry.RoleController].Has(registry.ListCondition) {
		t.Errorf("described as %+v, %v", said, err)
	}
	conditions := map[string]func() (*registry.VolumeCondition, error){
		"NodeGetVolumeStats": func() (*registry.VolumeCondition, error) {
			report, err := askReport(patient(t), f)
			return report.Condition, err
		},
		"ListVolumes": func() (*registry.VolumeCondition, error) {
			page, err := f.ListPage(patient(t), controllerKey, "")
			if err != nil || len(page.Entries) != 1 {
				t.Fatalf("%+v, %v", page, err)
			}
			return page.Entries[0].Condition, nil
		},
	}
	for rpc, ask := range conditions {
		for _, abnormal := range []bool{false, true} {
			fake.ClearScript()
			says := csifake.Condition{Abnormal: abnormal, Message: "source path\x1b[2J\ndoesn't exist: " + canarySecret}
			fake.On("NodeGetVolumeStats").Answer(statsOf(&csi.NodeGetVolumeStatsResponse{}, says))
			fake.On("ListVolumes").Rule(csifake.Rule{Condition: &says})
			f.secretsOf("disk").add([]secret{{"", canarySecret}})
			got, err := ask()
			if err != nil || got == nil || got.Abnormal != abnormal || abnormal != strings.HasPrefix(got.Message, "source path") {
				t.Fatalf("%s: %+v, %v", rpc, got, err)
			}
			if strings.ContainsAny(got.Message, "\x1b\n") {
				t.Errorf("%s: %q is not for a terminal", rpc, got.Message)
			}
			without(t, rpc, got.Message, canarySecret)
		}
	}
	fake.ClearScript()
	told(fake, &csi.NodeGetVolumeStatsResponse{}, nil)
	if got, err := conditions["NodeGetVolumeStats"](); err != nil || got != nil {
		t.Errorf("of an answer without one: %+v, %v", got, err)
	}
}

// statsOf answers with the condition as an old plugin encodes it.
func statsOf(reply proto.Message, c csifake.Condition) csifake.Answer {
	reply.ProtoReflect().SetUnknown(protowire.AppendBytes(protowire.AppendTag(nil, 2, protowire.BytesType), encoded(c)))
	return func(context.Context, proto.Message, proto.Message, error) (proto.Message, error) { return reply, nil }
}

func encoded(c csifake.Condition) []byte {
	b := protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), protowire.EncodeBool(c.Abnormal))
	return protowire.AppendString(protowire.AppendTag(b, 2, protowire.BytesType), c.Message)
}

// Any bytes in the condition's field are decoded or ignored; none cause a panic.
func FuzzConditionOfAnyBytes(f *testing.F) {
	valid := protowire.AppendBytes(protowire.AppendTag(nil, 2, protowire.BytesType), encoded(csifake.Condition{Abnormal: true, Message: "m"}))
	for _, seed := range [][]byte{nil, valid, valid[:3], append(valid, valid...), {0x12, 0xff, 0xff, 0xff, 0xff, 0x0f}, {0x10, 1}, {0x12, 1, 0x08}, {0xff}} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		abnormal, message, found := decodeCondition(b)
		if !found && len(b) == len(valid) && string(b) == string(valid) || found && len(message) > len(b) || abnormal && len(b) == 0 {
			t.Errorf("%x is read as %v %q %v", b, abnormal, message, found)
		}
	})
}
