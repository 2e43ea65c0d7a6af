package controller

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/csi"
)

// expands returns a table with a controller that expands volumes in use.
func expands() table {
	return of(registry.CreateDelete, registry.ControllerExpand, registry.ExpandsOnline)
}

// madeOf returns a created volume of that many bytes.
func madeOf(capacity int64) registry.Volume {
	v := ready()
	v.Capacity = capacity
	return v
}

func upTo(required, limit int64) registry.CapacityRange {
	return registry.CapacityRange{Required: required, Limit: limit}
}

const large, larger = 2 << 20, 3 << 20

// The commit of the controller's answer stores the capacity and the pending work of the node. A replay sends no call.
func TestExpansionGoesThroughControllerAndNode(t *testing.T) {
	d := open(t, expands(), madeOf(1<<20))
	d.plugin.enlarged = &csi.Expanded{Capacity: large + 512, NodeExpansionRequired: true}
	v, err := d.Controller.Expand(t.Context(), call, name, upTo(large, larger))
	if err != nil || v.Capacity != large+512 || v.Expansion.Node != upTo(large+512, 0) || v.Expansion.Open() {
		t.Fatalf("%+v, %v", v, err)
	}
	d.expect("ControllerExpandVolume vol-data 2097152..3145728")
	if r := d.last.expand; r.Usage != usage() || len(r.Secrets) != 1 {
		t.Errorf("asked %+v", r)
	}
	stored, _ := d.stored()
	if stored.Expansion != v.Expansion || !slices.Contains(d.kinds(), registry.EventVolumeExpanded) {
		t.Errorf("stored %+v, told %v", stored.Expansion, d.kinds())
	}
	noErr(t, "again", errOf(d.Controller.Expand(t.Context(), registry.Call{}, name, upTo(large, larger))))
	d.expect()
}

// An invalid expansion is refused before any call, with the reason.
func TestExpandRefused(t *testing.T) {
	deleting, inline := madeOf(1<<20), madeOf(1<<20)
	deleting.State, inline.Ephemeral = registry.VolumeDeleting, true
	for what, c := range map[string]struct {
		plugins table
		volume  registry.Volume
		want    registry.CapacityRange
		kind    error
		says    string
	}{
		"no size":       {expands(), madeOf(1 << 20), upTo(0, 0), registry.ErrInvalid, "not a valid size"},
		"a limit below": {expands(), madeOf(1 << 20), upTo(large, 1), registry.ErrInvalid, "limit"},
		"smaller":       {expands(), madeOf(large), upTo(1<<19, 0), registry.ErrInvalid, "cannot be made smaller"},
		"at most less":  {expands(), madeOf(larger), upTo(large, large), registry.ErrInvalid, "cannot be made smaller"},
		"deleting":      {expands(), deleting, upTo(large, 0), registry.ErrConflict, "deleting"},
		"inline":        {expands(), inline, upTo(large, 0), registry.ErrUnsupported, "inline"},
		"nobody expands": {both(registry.CreateDelete), madeOf(1 << 20), upTo(large, 0), registry.ErrUnsupported,
			"lacks controller.EXPAND_VOLUME and node.EXPAND_VOLUME"},
		"another one": {expands(), registry.Volume{VolumeSpec: registry.VolumeSpec{Namespace: "x", ID: "y",
			Plugin: "p"}}, upTo(large, 0),
			registry.ErrNotFound, "not found"},
	} {
		d := open(t, c.plugins, c.volume)
		wantErr(t, what, errOf(d.Controller.Expand(t.Context(), call, name, c.want)), c.kind, c.says)
		d.expect()
	}
}

// The plugin declares whether volumes in use may be expanded. If it declares no mode, the call is sent and the plugin
// decides.
func TestExpansionOfVolumeInUseIsLeftToPluginWithoutMode(t *testing.T) {
	staged := registry.Attachment{Volume: key, Node: "n1", State: registry.MarkDone}
	const asked = "ControllerExpandVolume vol-data 2097152..0"
	for what, c := range map[string]struct {
		modes []registry.Capability
		asked []string
	}{
		"no mode": {nil, []string{asked}},
		"ONLINE":  {[]registry.Capability{registry.ExpandsOnline}, []string{asked}},
		"both":    {[]registry.Capability{registry.ExpandsOffline, registry.ExpandsOnline}, []string{asked}},
		"OFFLINE": {[]registry.Capability{registry.ExpandsOffline}, nil},
	} {
		t.Run(what, func(t *testing.T) {
			d := open(t, of(append(c.modes, registry.ControllerExpand)...), madeOf(1<<20), claimed(), staged)
			_, err := d.Controller.Expand(t.Context(), call, name, upTo(large, 0))
			if c.asked == nil && !errors.Is(err, registry.ErrConflict) || c.asked != nil && err != nil {
				t.Error(err)
			}
			d.expect(c.asked...)
			alone := both(append(c.modes, registry.CreateDelete)...)
			alone[registry.RoleNode] = with(append(c.modes, registry.NodeExpand)...)
			d = open(t, alone, madeOf(1<<20), claimed(), staged)
			_, err = d.Controller.Expand(t.Context(), call, name, upTo(large, 0))
			if v, _ := d.stored(); c.asked == nil && !errors.Is(err, registry.ErrConflict) || c.asked != nil &&
				v.Expansion.Node != upTo(large, 0) {
				t.Errorf("on the node alone: %v, recorded %+v", err, v.Expansion)
			}
			elsewhere := claimed()
			elsewhere.Node = "n2"
			d = open(t, of(append(c.modes, registry.ControllerExpand)...), madeOf(1<<20), elsewhere)
			_, err = d.Controller.Expand(t.Context(), call, name, upTo(large, 0))
			if c.asked == nil && !errors.Is(err, registry.ErrConflict) || c.asked != nil && err != nil {
				t.Errorf("used without an attachment at another node: %v", err)
			}
			d.expect(c.asked...)
		})
	}
}

// The executor of a plugin need not run the node plugin that expands the volume. If it does, that one counts: during a
// roll, those of other nodes may have other capabilities.
func TestExpansionByTheNodePluginOfAnotherNode(t *testing.T) {
	for _, here := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			there := registry.NodePlugin{Plugin: key.Plugin, Node: true}
			plugins := of(registry.CreateDelete)
			if here {
				node := with(registry.NodeExpand)
				node.Role = registry.RoleNode
				plugins[registry.RoleNode] = node
			} else {
				there.Capabilities = []registry.Capability{registry.NodeExpand}
			}
			d := open(t, plugins, madeOf(1<<20), registry.Node{Name: "n0", State: registry.NodeReady,
				Plugins: []registry.NodePlugin{there}})
			d.thisNode, d.Node = "n1", "n1"
			v, err := d.Controller.Expand(t.Context(), call, name, upTo(large, 0))
			if err != nil || v.Expansion.Node != upTo(large, 0) {
				t.Errorf("%v: %+v, %v", here, v.Expansion, err)
			}
		})
	}
}

// both returns a table with a controller that has the capabilities, and a node plugin that has none.
func both(caps ...registry.Capability) table {
	t := of(caps...)
	node := with()
	node.Role = registry.RoleNode
	t[registry.RoleNode] = node
	return t
}

// After a vague answer the intent is closed. The same call is repeated before another expansion.
func TestVagueExpansionIsAskedForOnceMore(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := open(t, expands(), madeOf(1<<20))
		d.faults = []fault{failed("INTERNAL"), failed("INTERNAL"), {"INTERNAL", registry.OutcomeFailed, true}}
		if _, err := d.Controller.Expand(t.Context(), call, name, upTo(large, 0)); err == nil {
			t.Error("it succeeded")
		}
		d.view(func(view registry.View) {
			if open, found := registry.OpenIntent(view, key); found {
				t.Errorf("open: %+v", open)
			}
		})
		v, _ := d.stored()
		if v.Expansion.Asked != upTo(large, 0) || v.Expansion.Code != "INTERNAL" {
			t.Errorf("recorded: %+v", v.Expansion)
		}
		d.crash()
		d.plugin.journal = nil
		noErr(t, "", errOf(d.Controller.Expand(t.Context(), call, name, upTo(larger, 0))))
		d.expect("ControllerExpandVolume vol-data 2097152..0", "ControllerExpandVolume vol-data 3145728..0")
		if v, _ := d.stored(); v.Expansion != (registry.Expansion{Done: larger}) || v.Capacity != larger {
			t.Errorf("recorded: %+v", v)
		}
	})
}

// After a certain refusal, another size can be requested.
func TestRefusedExpansionIsForgotten(t *testing.T) {
	for code, says := range map[string]string{"OUT_OF_RANGE": "ask for another size", "PERMISSION_DENIED": ""} {
		d := open(t, expands(), madeOf(1<<20))
		d.faults = []fault{failed(code)}
		_, err := d.Controller.Expand(t.Context(), call, name, upTo(larger, 0))
		wantErr(t, code, err, registry.ErrInternal, says)
		if v, _ := d.stored(); v.Expansion.Open() || v.Expansion.Code != "" {
			t.Errorf("%s: recorded: %+v", code, v.Expansion)
		}
		noErr(t, code, errOf(d.Controller.Expand(t.Context(), registry.Call{}, name, upTo(large, 0))))
		d.expect("ControllerExpandVolume vol-data 3145728..0", "ControllerExpandVolume vol-data 2097152..0")
	}
}

// Creating a volume again with a larger size returns the expand command. After the expansion it returns the volume.
func TestLargerFileNamesExpand(t *testing.T) {
	d := open(t, expands(), madeOf(1<<20))
	larger := spec()
	larger.CapacityMin = large
	const advice = "holdfast volume expand --size 2097152 data"
	wantErr(t, "before", errOf(d.Controller.Create(t.Context(), call, larger)), registry.ErrExists, advice)
	noErr(t, "", errOf(d.Controller.Expand(t.Context(), registry.Call{}, name, upTo(large, 0))))
	for what, s := range map[string]registry.VolumeSpec{"the larger file": larger,
		"the one that it was made of": spec()} {
		if v, err := d.Controller.Create(t.Context(), registry.Call{}, s); err != nil || v.Capacity != large {
			t.Errorf("%s: %+v, %v", what, v, err)
		}
	}
	larger.CapacityMin = 4 << 20
	wantErr(t, "one that is larger still", errOf(d.Controller.Create(t.Context(), registry.Call{}, larger)),
		registry.ErrExists, "")
	d.expect("ControllerExpandVolume vol-data 2097152..0")
}

// A deletion waits for the certain end of an expansion.
func TestDeleteSettlesAnExpansion(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := open(t, expands(), madeOf(1<<20))
		ctx, cancel := context.WithCancel(t.Context())
		d.faults = []fault{uncertain("UNAVAILABLE", true)}
		go func() { synctest.Wait(); cancel() }()
		wantErr(t, "", errOf(d.Controller.Expand(ctx, call, name, upTo(large, 0))), registry.ErrUncertain, "")
		d.crash()
		noErr(t, "", d.Controller.Delete(t.Context(), registry.Call{}, name))
		d.expect("ControllerExpandVolume vol-data 2097152..0", "ControllerExpandVolume vol-data 2097152..0",
			"DeleteVolume vol-data")
	})
}

// The refusal of a plugin that has not looked at the volume does not settle an earlier try without an answer. The
// earlier try may have expanded the volume.
func TestRefusalAfterALostTryIsNoEnd(t *testing.T) {
	for code, tries := range map[string]int{"PERMISSION_DENIED": 1, "UNAUTHENTICATED": 3, "UNIMPLEMENTED": 1} {
		for what, first := range map[string]fault{
			"lost": uncertain("UNAVAILABLE", true), "answered vaguely": {"INTERNAL", registry.OutcomeFailed, true},
		} {
			synctest.Test(t, func(t *testing.T) {
				d := open(t, expands(), madeOf(1<<20))
				d.faults = []fault{first}
				for range tries {
					d.faults = append(d.faults, failed(code))
				}
				if _, err := d.Controller.Expand(t.Context(), call, name, upTo(large, 0)); err == nil {
					t.Errorf("%s, %s: it succeeded", what, code)
				}
				if v, _ := d.stored(); v.Expansion.Asked != upTo(large, 0) || v.Expansion.Code != code {
					t.Errorf("%s, %s: recorded: %+v", what, code, v.Expansion)
				}
				d.plugin.journal = nil
				noErr(t, "", errOf(d.Controller.Expand(t.Context(), registry.Call{}, name, upTo(larger, 0))))
				d.expect("ControllerExpandVolume vol-data 2097152..0", "ControllerExpandVolume vol-data 3145728..0")
			})
		}
	}
}

// If the controller returns less than the requested size, the record and the node use the returned size.
func TestExpandedToAnotherSize(t *testing.T) {
	for what, c := range map[string]struct {
		want   registry.CapacityRange
		answer csi.Expanded
		says   string
	}{
		"too small": {upTo(larger, 0), csi.Expanded{Capacity: large, NodeExpansionRequired: true},
			"3145728 were requested"},
		"too small, by itself": {upTo(larger, 0), csi.Expanded{Capacity: large}, "3145728 were requested"},
		"too large": {upTo(large, large), csi.Expanded{Capacity: larger, NodeExpansionRequired: true},
			"at most 2097152 were requested"},
		"smaller than it was before": {upTo(larger, 0), csi.Expanded{Capacity: 1, NodeExpansionRequired: true},
			"of 1 bytes"},
	} {
		synctest.Test(t, func(t *testing.T) {
			d := open(t, expands(), madeOf(1<<20))
			d.plugin.enlarged = &c.answer
			_, err := d.Controller.Expand(t.Context(), call, name, c.want)
			wantErr(t, what, err, nil, c.says)
			node, has := registry.CapacityRange{}, max(c.answer.Capacity, 1<<20)
			if c.answer.NodeExpansionRequired {
				node.Required = has
			}
			if v, _ := d.stored(); v.Capacity != has || v.Expansion.Node != node || v.Expansion.Open() ||
				v.Expansion.Done != 0 {
				t.Errorf("%s: recorded %d bytes, %+v", what, v.Capacity, v.Expansion)
			}
		})
	}
}

// A spec with a larger size than the original request is the same volume if the plugin has made it that large.
func TestLargerFileOfARoundedVolume(t *testing.T) {
	d := open(t, expands(), madeOf(larger))
	for what, c := range map[string]struct {
		least, most int64
		is          bool
	}{
		"as much as there is": {larger, 0, true}, "less": {large, 0, true}, "between": {large, larger, true},
		"too little":              {large, large, false},
		"less than was asked for": {1 << 19, 0, false},
	} {
		s := spec()
		s.CapacityMin, s.CapacityMax = c.least, c.most
		v, err := d.Controller.Create(t.Context(), registry.Call{}, s)
		if (err == nil) != c.is || c.is && v.Capacity != larger {
			t.Errorf("%s: %+v, %v", what, v, err)
		}
		if err != nil && (!errors.Is(err, registry.ErrExists) || strings.Contains(err.Error(), "volume expand")) {
			t.Errorf("%s: %v", what, err)
		}
	}
	d.expect()
}

// The request has the usage of the attachment. Without an attachment it has the only usage of the spec.
func TestUsageOfAnExpansion(t *testing.T) {
	several := madeOf(1 << 20)
	several.Capabilities = append(several.Capabilities,
		registry.VolumeCapability{Access: registry.MultiNodeReaderOnly, Attachment: registry.FileSystem})
	attached := registry.Usage{Access: registry.MultiNodeReaderOnly, Attachment: registry.FileSystem, FSType: "xfs"}
	for what, c := range map[string]struct {
		place []registry.Record
		want  registry.Usage
	}{
		"attached": {[]registry.Record{registry.Attachment{Volume: key, Node: "n1", State: registry.MarkDone,
			Usage: attached}}, attached},
		"not": {nil, registry.Usage{}},
	} {
		d := open(t, expands(), append(c.place, several)...)
		if _, err := d.Controller.Expand(t.Context(), call, name, upTo(large, 0)); err != nil ||
			d.last.expand.Usage != c.want {
			t.Errorf("%s: %+v, %v", what, d.last.expand.Usage, err)
		}
	}
}

// An open node call of an expansion does not wait for a controller.
func TestLeftExpansionAwaitsItsPlugin(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		v := madeOf(1 << 20)
		v.Expansion.Asked, v.Expansion.Node = upTo(larger, 0), upTo(large, 0)
		node := table{registry.RoleNode: with(registry.NodeExpand)}
		for rpc, comes := range map[registry.RPC]bool{registry.NodeExpandRPC: true,
			registry.ControllerExpandRPC: false} {
			d := open(t, node, v)
			if d.node = (local{open: rpc}); !rpc.OnNode() {
				d.put(registry.Intent{Volume: key, Name: name, RPC: rpc})
			}
			if err := d.awaitPlugin(t.Context(), v); (err == nil) != comes {
				t.Errorf("%s: %v", rpc, err)
			}
		}
	})
}

// An expansion is not sent while a snapshot of its volume may still be taken at the plugin, and a snapshot is not sent
// while an expansion may still run there.
func TestSnapshotAndExpansionAreMadeInTurn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		d := openSnapshots(t, of(registry.CreateSnapshot, registry.ControllerExpand))
		dying, die := context.WithTimeout(t.Context(), time.Second)
		defer die()
		if _, err := d.Create(dying, call, snapSpec); err == nil { // the creation hangs
			t.Error("the snapshot was taken")
		}
		d.restart()
		expanded := make(chan error, 1)
		expand := func(size int64) {
			_, err := d.desk.Controller.Expand(t.Context(), call, name, registry.CapacityRange{Required: size})
			expanded <- err
		}
		go expand(2 << 30)
		time.Sleep(time.Hour)
		d.view(func(view registry.View) {
			if open, found := view.Intent(key); found {
				t.Errorf("sent beside CreateSnapshot: %+v", open)
			}
		})
		d.plugin.answer(answer(snapReady))
		noErr(t, "", errOf(d.Create(t.Context(), call, snapSpec)))
		noErr(t, "", <-expanded)
		d.desk.plugin.expect("ControllerExpandVolume vol-data 2147483648..0")

		// The other way round: the expansion has no certain answer.
		d.plugin.mu.Lock()
		d.plugin.journal = nil
		d.plugin.mu.Unlock()
		open := registry.Intent{
			Volume: key, Name: name, RPC: registry.ControllerExpandRPC, Outcome: registry.OutcomePending,
		}
		d.put(open)
		second := snapSpec
		second.ID = "s2"
		d.plugin.answer(answer(csi.Snapshot{ID: "snap-9", Volume: key.External, Ready: true}))
		taken := make(chan error, 1)
		go func() { taken <- errOf(d.Create(t.Context(), call, second)) }()
		time.Sleep(time.Hour)
		d.wantJournal()
		d.drop(open.Key())
		noErr(t, "", <-taken)
		d.wantJournal("CreateSnapshot s2 of vol-data with map[tier:cold]")
	})
}
