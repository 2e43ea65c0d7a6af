package csi

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/protobuf/proto"

	"holdfast/internal/csifake"
	"holdfast/registry"
)

// ListVolumes returns every entry and token unchecked.
func TestListVolumesPassesEntriesOn(t *testing.T) {
	fake, f := start(t, csifake.Config{})
	var asked []*csi.ListVolumesRequest
	replies := []*csi.ListVolumesResponse{
		{NextToken: "more", Entries: []*csi.ListVolumesResponse_Entry{
			{Volume: &csi.Volume{VolumeId: "vol-1"},
				Status: &csi.ListVolumesResponse_VolumeStatus{PublishedNodeIds: []string{"n1", "n2"}}},
			{Volume: &csi.Volume{VolumeId: "vol-2"}},
		}},
		{Entries: []*csi.ListVolumesResponse_Entry{nil, {}}},
	}
	fake.On("ListVolumes").Answer(func(_ context.Context, req, _ proto.Message, _ error) (proto.Message, error) {
		asked = append(asked, proto.CloneOf(req.(*csi.ListVolumesRequest)))
		return replies[len(asked)-1], nil
	})
	first, err := f.ListVolumes(patient(t), controllerKey, "")
	must(t, err)
	want := []Entry{{Volume: "vol-1", Nodes: []registry.NodeID{"n1", "n2"}}, {Volume: "vol-2"}}
	if first.Next != "more" || !slices.EqualFunc(first.Entries, want, func(a, b Entry) bool {
		return a.Volume == b.Volume &&
			slices.Equal(a.Nodes, b.Nodes)
	}) {
		t.Errorf("got %+v", first)
	}
	second, err := f.ListVolumes(patient(t), controllerKey, first.Next)
	if err != nil || second.Next != "" || len(second.Entries) != 2 {
		t.Errorf("got %+v, %v", second, err)
	}
	if len(asked) != 2 || asked[0].StartingToken != "" || asked[1].StartingToken != "more" ||
		asked[0].MaxEntries != pageSize {
		t.Errorf("asked %v", asked)
	}
}

func TestListVolumesDistinguishesDeathFromAnswer(t *testing.T) {
	for what, c := range map[string]struct {
		rule csifake.Rule
		lost bool
	}{
		"it dies":                       {csifake.Rule{RPC: "ListVolumes", Crash: true}, true},
		"it answers UNAVAILABLE":        {csifake.Rule{RPC: "ListVolumes", Code: "UNAVAILABLE"}, false},
		"it does not answer in time":    {csifake.Rule{RPC: "ListVolumes", Hang: csifake.ForEver}, false},
		"it panics after its last page": {csifake.Rule{RPC: "ListVolumes", When: csifake.After, Crash: true}, true},
	} {
		fake, f := start(t, csifake.Config{Caps: []string{"LIST_VOLUMES"}})
		must(t, fake.Script(c.rule))
		ctx, cancel := context.WithCancel(patient(t))
		if c.rule.Hang == csifake.ForEver {
			time.AfterFunc(time.Second, cancel)
		}
		_, err := f.ListVolumes(ctx, controllerKey, "")
		cancel()
		call, is := errors.AsType[*registry.CallError](err)
		if !is || call.Lost != c.lost {
			t.Errorf("%s: %+v", what, err)
		}
	}
	_, err := fleetFor(t, "/no/such/socket").ListVolumes(patient(t), controllerKey, "")
	if call, is := errors.AsType[*registry.CallError](err); !is || call.Lost {
		t.Errorf("no listener: %+v", err)
	}
}
