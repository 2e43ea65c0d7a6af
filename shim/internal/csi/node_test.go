package csi

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"holdfast/internal/csifake"
	"holdfast/registry"
)

func askStats(ctx context.Context, f *Fleet) (registry.VolumeReport, error) {
	return f.Stats(ctx, nodeKey, StatsRequest{
		VolumeID: "vol-1", Path: "/t", StagingPath: "/s",
		Private: known.asFunc,
	})
}

// scriptStats scripts the plugin's answer, and returns the request that it will get.
func scriptStats(fake *csifake.Plugin, reply proto.Message, err error) (asked *csi.NodeGetVolumeStatsRequest) {
	asked = &csi.NodeGetVolumeStatsRequest{}
	fake.ClearScript()
	fake.On(string(registry.NodeStatsRPC)).Answer(
		func(_ context.Context, req, _ proto.Message, _ error) (proto.Message, error) {
			proto.Merge(asked, req)
			return reply, err
		})
	return asked
}

func TestStatsOfEveryAnswer(t *testing.T) {
	fake, f := start(t, csifake.Config{})
	big := make([]*csi.VolumeUsage, 10_000)
	for i := range big {
		big[i] = &csi.VolumeUsage{Unit: csi.VolumeUsage_BYTES, Total: int64(i + 1)}
	}
	for what, c := range map[string]struct {
		answer []*csi.VolumeUsage
		want   []registry.VolumeUsage
		broken string
	}{
		"both units": {
			[]*csi.VolumeUsage{
				{Unit: csi.VolumeUsage_BYTES, Total: 9, Used: 4, Available: 5}, {Unit: csi.VolumeUsage_INODES,
					Total: 3, Used: 1, Available: 2},
			},
			[]registry.VolumeUsage{{Unit: "bytes", Total: 9, Used: 4, Available: 5},
				{Unit: "inodes", Total: 3, Used: 1, Available: 2}}, "",
		},
		"a block device": {
			[]*csi.VolumeUsage{{Unit: csi.VolumeUsage_BYTES, Total: math.MaxInt64}},
			[]registry.VolumeUsage{{Unit: "bytes", Total: math.MaxInt64}}, "",
		},
		"an empty volume": {[]*csi.VolumeUsage{{Unit: csi.VolumeUsage_BYTES}},
			[]registry.VolumeUsage{{Unit: "bytes"}}, ""},
		"nothing": {nil, nil, ""},
		"nil entries": {
			[]*csi.VolumeUsage{nil, {Unit: csi.VolumeUsage_BYTES, Total: 1}, {},
				nil}, []registry.VolumeUsage{{Unit: "bytes", Total: 1}}, "",
		},
		"no unit": {[]*csi.VolumeUsage{{Total: 7}}, []registry.VolumeUsage{{Unit: "unknown", Total: 7}}, ""},
		"another unit": {[]*csi.VolumeUsage{{Unit: 77, Used: 7}},
			[]registry.VolumeUsage{{Unit: "unknown-77", Used: 7}}, ""},
		"negative": {
			[]*csi.VolumeUsage{{Unit: csi.VolumeUsage_BYTES, Total: 1}, {Unit: csi.VolumeUsage_INODES, Used: -1}}, nil,
			"used -1, available 0 inodes",
		},
		"most negative":  {[]*csi.VolumeUsage{{Available: math.MinInt64}}, nil, "none may be negative"},
		"negative total": {[]*csi.VolumeUsage{{Total: -1, Used: 1}}, nil, "total -1"},
		"too many":       {big, usagesTo(maxUnits), ""},
	} {
		asked := scriptStats(fake, &csi.NodeGetVolumeStatsResponse{Usage: c.answer}, nil)
		report, err := askStats(patient(t), f)
		got := report.Usage
		if call, is := errors.AsType[*registry.CallError](err); (c.broken != "") != is || is &&
			(!strings.Contains(call.Detail, c.broken) ||
				call.Code != "OK" || call.Outcome != registry.OutcomeFailed || !errors.Is(err, registry.ErrInternal)) {
			t.Errorf("%s: %v", what, err)
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%s: %d units, %.200s, want %.200s", what, len(got), fmt.Sprint(got), fmt.Sprint(c.want))
		}
		if want := (&csi.NodeGetVolumeStatsRequest{VolumeId: "vol-1", VolumePath: "/t",
			StagingTargetPath: "/s"}); !proto.Equal(asked, want) {
			t.Errorf("%s: the plugin got %v, want %v", what, asked, want)
		}
	}
	if _, err := usages([]*csi.VolumeUsage{nil}); err != nil {
		t.Error(err)
	}
}

func usagesTo(n int) (out []registry.VolumeUsage) {
	for i := range n {
		out = append(out, registry.VolumeUsage{Unit: "bytes", Total: int64(i + 1)})
	}
	return out
}

// oldCaps are the capabilities of a plugin of CSI 1.12.
var oldCaps = append([]string{"VOLUME_CONDITION"}, csifake.AllCaps...)

// Plugins of CSI up to 1.12 report a volume's condition in fields that later versions reserve. It is read from both
// answers that have it, on one line and without secrets.
func TestConditionOfAnOldPluginIsRead(t *testing.T) {
	backend := csifake.NewBackend("")
	must(t, backend.AddVolume("vol-1", 1<<20, nil))
	fake, f := start(t, csifake.Config{Caps: oldCaps, Backend: backend})
	said, err := open(t, f).Describe(patient(t), bothRoles)
	if err != nil || !said[registry.RoleNode].Has(registry.NodeCondition) ||
		!said[registry.RoleController].Has(registry.ListCondition) {
		t.Errorf("described as %+v, %v", said, err)
	}
	conditions := map[string]func() (*registry.Condition, error){
		"NodeGetVolumeStats": func() (*registry.Condition, error) {
			report, err := askStats(patient(t), f)
			return report.Condition, err
		},
		"ListVolumes": func() (*registry.Condition, error) {
			page, err := f.ListVolumes(patient(t), controllerKey, "")
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
			fake.On("NodeGetVolumeStats").Reply(statsOf(says), nil)
			fake.On("ListVolumes").Rule(csifake.Rule{Condition: &says})
			f.secretsOf("disk").add([]secret{{"", canarySecret}})
			got, err := ask()
			if err != nil || got == nil || got.Abnormal != abnormal ||
				abnormal != strings.HasPrefix(got.Message, "source path") {
				t.Fatalf("%s: %+v, %v", rpc, got, err)
			}
			if strings.ContainsAny(got.Message, "\x1b\n") {
				t.Errorf("%s: %q is not for a terminal", rpc, got.Message)
			}
			wantNone(t, rpc, got.Message, canarySecret)
		}
	}
	fake.ClearScript()
	scriptStats(fake, &csi.NodeGetVolumeStatsResponse{}, nil)
	if got, err := conditions["NodeGetVolumeStats"](); err != nil || got != nil {
		t.Errorf("of an answer without one: %+v, %v", got, err)
	}
}

// Answers about health are bounded, sorted, on one line and without secrets. A missing status, and one that this build
// does not know, is ignored. An answer about another volume is refused.
func TestHealthAnswersAreChecked(t *testing.T) {
	_, f := start(t, csifake.Config{Caps: []string{"GET_VOLUME_HEALTH"}})
	entry := func(status csi.VolumeHealthErrorType, reason, message string) *csi.VolumeHealth_VolumeHealthEntry {
		return &csi.VolumeHealth_VolumeHealthEntry{Status: status, Reason: reason, Message: message}
	}
	f.secretsOf("disk").add([]secret{{"", canarySecret}})
	degraded := entry(csi.VolumeHealthErrorType_DEGRADED, "PathLost", "a\x1b[2J\nb "+canarySecret)
	for name, c := range map[string]struct {
		reply  *csi.VolumeHealth
		reason string
		fails  bool
	}{
		"none":          {nil, "", true},
		"of another":    {&csi.VolumeHealth{VolumeId: "vol-2"}, "", true},
		"good":          {&csi.VolumeHealth{VolumeId: "vol-1"}, "", false},
		"empty entry":   {health(nil), "", false},
		"unknown alone": {health(entry(99, "Later", "")), "", false},
		"sorted": {health(degraded, entry(99, "Later", ""), entry(csi.VolumeHealthErrorType_DATA_LOSS, "", "")),
			"DATA_LOSS, DEGRADED/PathLost", false},
		"long": {health(entry(csi.VolumeHealthErrorType_DEGRADED, strings.Repeat("x", 1<<20), "")), "DEGRADED/xxx",
			false},
	} {
		reply, err := healthOf(registry.NodeHealthRPC, nodeKey, HealthRequest{VolumeID: "vol-1"}, c.reply,
			func() redactor { return f.secretsOf("disk").redactor(nil) })
		if (err != nil) != c.fails || reply.Abnormal != (c.reason != "") ||
			!strings.HasPrefix(reply.Reason, c.reason) ||
			len(reply.Text()) > 3*maxText || strings.ContainsAny(reply.Message, "\x1b\n") {
			t.Errorf("%s: %+v, %v", name, reply, err)
		}
		wantNone(t, name, reply.Text(), canarySecret)
	}
}

func health(entries ...*csi.VolumeHealth_VolumeHealthEntry) *csi.VolumeHealth {
	return &csi.VolumeHealth{VolumeId: "vol-1", HealthStatuses: entries}
}

// statsOf returns stats with the condition as an old plugin encodes it.
func statsOf(c csifake.Condition) proto.Message {
	reply := &csi.NodeGetVolumeStatsResponse{}
	reply.ProtoReflect().SetUnknown(protowire.AppendBytes(protowire.AppendTag(nil, 2, protowire.BytesType), encoded(c)))
	return reply
}

func encoded(c csifake.Condition) []byte {
	b := protowire.AppendVarint(protowire.AppendTag(nil, 1, protowire.VarintType), protowire.EncodeBool(c.Abnormal))
	return protowire.AppendString(protowire.AppendTag(b, 2, protowire.BytesType), c.Message)
}

// Any bytes in the condition's field are decoded or ignored; none cause a panic.
func FuzzConditionDecodesAnyBytes(f *testing.F) {
	valid := protowire.AppendBytes(protowire.AppendTag(nil, 2, protowire.BytesType),
		encoded(csifake.Condition{Abnormal: true, Message: "m"}))
	for _, seed := range [][]byte{nil, valid, valid[:3], append(valid, valid...),
		{0x12, 0xff, 0xff, 0xff, 0xff, 0x0f}, {0x10, 1}, {0x12, 1, 0x08}, {0xff}} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		abnormal, message, found := decodeCondition(b)
		if !found && len(b) == len(valid) && string(b) == string(valid) || found && len(message) > len(b) ||
			abnormal && len(b) == 0 {
			t.Errorf("%x is read as %v %q %v", b, abnormal, message, found)
		}
	})
}
