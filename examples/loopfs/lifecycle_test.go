package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"holdfast/examples/loopfs/internal/disk"
)

func TestVolumeLivesFromCreationToDeletion(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend string) {
		m := newMachine(t)
		p := m.start("csi", "--backend", backend)
		v := p.create("a", multi)
		if v.CapacityBytes != 16<<20 || v.VolumeContext[backendKey] != backend {
			t.Errorf("made %+v", v)
		}
		staging, one, two := m.staging("s"), m.target("one"), m.target("two")
		id := v.VolumeId

		step(t, "publish before stage", p.publish(id, staging, one, multi, false), codes.FailedPrecondition)
		step(t, "stage", p.stage(id, staging, multi), codes.OK)
		step(t, "stage again", p.stage(id, staging, multi), codes.OK)
		step(t, "publish", p.publish(id, staging, one, multi, false), codes.OK)
		step(t, "publish again", p.publish(id, staging, one, multi, false), codes.OK)
		step(t, "publish read-only elsewhere", p.publish(id, staging, two, multi, true), codes.OK)
		if got := m.mounted(); len(got) != 3 {
			t.Errorf("mounted are %q", got)
		}
		write(t, one, "kept")
		expectText(t, two, "kept")
		expectText(t, staging, "kept")
		expectReadOnly(t, two)

		step(t, "delete while staged", p.delete(id), codes.FailedPrecondition)
		step(t, "unstage while published", p.unstage(id, staging), codes.FailedPrecondition)
		expectText(t, one, "kept")
		for range 2 {
			step(t, "unpublish", p.unpublish(id, one), codes.OK)
			step(t, "unpublish", p.unpublish(id, two), codes.OK)
		}
		expectGone(t, one)
		expectGone(t, two)
		for range 2 {
			step(t, "unstage", p.unstage(id, staging), codes.OK)
		}
		if got := m.mounted(); len(got) > 0 {
			t.Errorf("mounted are %q", got)
		}
		if _, err := os.Stat(staging); err != nil {
			t.Errorf("the caller's staging directory: %v", err)
		}

		other := m.staging("other") // what was written is still there, elsewhere
		step(t, "stage elsewhere", p.stage(id, other, reader), codes.OK)
		expectText(t, other, "kept")
		expectReadOnly(t, other)
		step(t, "unstage", p.unstage(id, other), codes.OK)

		for range 2 {
			step(t, "delete", p.delete(id), codes.OK)
		}
		if left := m.volumeFiles(); len(left) > 0 {
			t.Errorf("left are %q", left)
		}
		p.stop()
		expectGone(t, p.socket)
	})
}

func TestOtherArguments(t *testing.T) {
	need(t, disk.LoopBackend)
	m := newMachine(t)
	p := m.start("csi", "--backend", "loop")
	id := p.create("a", multi).VolumeId
	narrow := p.create("narrow", writer).VolumeId
	s, s2, one := m.staging("s"), m.staging("s2"), m.target("one")

	step(t, "stage", p.stage(id, s, multi), codes.OK)
	step(t, "stage for another mode", p.stage(id, s, writer), codes.AlreadyExists)
	step(t, "stage with other flags", p.stage(id, s, capability(multi.AccessMode.Mode, "noatime")), codes.AlreadyExists)
	step(t, "stage at a second path", p.stage(id, s2, multi), codes.AlreadyExists)
	step(t, "stage another volume there", p.stage(narrow, s, writer), codes.FailedPrecondition)
	step(t, "stage wider than made", p.stage(narrow, s2, multi), codes.FailedPrecondition)

	step(t, "publish", p.publish(id, s, one, multi, false), codes.OK)
	step(t, "publish read-only there", p.publish(id, s, one, multi, true), codes.AlreadyExists)
	step(t, "publish for another mode there", p.publish(id, s, one, writer, false), codes.AlreadyExists)
	step(t, "publish from elsewhere", p.publish(id, s2, m.target("x"), multi, false), codes.FailedPrecondition)
	step(t, "publish for one writer, second target", p.publish(id, s, m.target("x"), writer, false),
		codes.FailedPrecondition)
	step(t, "publish without staging path", p.publish(id, "", m.target("x"), multi, false), codes.FailedPrecondition)
	step(t, "publish without parent", p.publish(id, s, m.target("no/x"), multi, false), codes.FailedPrecondition)
	step(t, "unstage elsewhere", p.unstage(id, s2), codes.OK)
	if got := m.mounted(); !slices.Equal(got, []string{s, one}) {
		t.Errorf("mounted are %q", got)
	}
	step(t, "unpublish", p.unpublish(id, one), codes.OK)
	step(t, "unstage", p.unstage(id, s), codes.OK)

	step(t, "stage for one writer", p.stage(narrow, s, single), codes.OK)
	step(t, "publish", p.publish(narrow, s, one, single, false), codes.OK)
	step(t, "second target", p.publish(narrow, s, m.target("x"), single, false), codes.FailedPrecondition)
	step(t, "second target, as reader", p.publish(narrow, s, m.target("x"), reader, true), codes.FailedPrecondition)
	step(t, "unpublish", p.unpublish(narrow, one), codes.OK)
	step(t, "next target", p.publish(narrow, s, m.target("x"), single, false), codes.OK)
	step(t, "unpublish", p.unpublish(narrow, m.target("x")), codes.OK)
	step(t, "unstage", p.unstage(narrow, s), codes.OK)
}

func TestUnknownVolume(t *testing.T) {
	need(t, disk.DirBackend)
	m := newMachine(t)
	p := m.start("csi", "--backend", "dir")
	s := m.staging("s")
	for _, id := range []string{string(disk.IDFor(disk.Volume, "never made")), "somebody-elses"} {
		step(t, "stage", p.stage(id, s, writer), codes.NotFound)
		step(t, "publish", p.publish(id, s, m.target("x"), writer, false), codes.NotFound)
		step(t, "unstage", p.unstage(id, s), codes.NotFound)
		if strings.HasPrefix(id, "vol-") {
			step(t, "unpublish", p.unpublish(id, m.target("x")), codes.NotFound)
		} else { // it may have been an ephemeral volume, which is gone by now
			step(t, "unpublish", p.unpublish(id, m.target("x")), codes.OK)
		}
		step(t, "stage nowhere", p.stage(id, "", writer), codes.InvalidArgument)
		step(t, "publish nothing", p.publish(id, s, m.target("x"), nil, false), codes.InvalidArgument)
		step(t, "unstage nowhere", p.unstage(id, ""), codes.InvalidArgument)
		step(t, "unpublish nowhere", p.unpublish(id, ""), codes.InvalidArgument)
		step(t, "delete", p.delete(id), codes.OK)
		_, err := p.ValidateVolumeCapabilities(t.Context(), &csi.ValidateVolumeCapabilitiesRequest{
			VolumeId: id, VolumeCapabilities: []*csi.VolumeCapability{writer},
		})
		step(t, "validate", err, codes.NotFound)
	}
}

// What somebody else mounted, or left in a directory, stays.
func TestForeignMountsStay(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend string) {
		m := newMachine(t)
		p := m.start("csi", "--backend", backend)
		id := p.create("a", multi).VolumeId
		s, foreign := m.staging("s"), m.staging("foreign")
		if err := unix.Mount("none", foreign, "tmpfs", 0, "size=64k"); err != nil {
			t.Fatal(err)
		}
		write(t, foreign, "precious")
		step(t, "stage onto it", p.stage(id, foreign, multi), codes.FailedPrecondition)
		step(t, "unstage it", p.unstage(id, foreign), codes.FailedPrecondition)
		step(t, "stage", p.stage(id, s, multi), codes.OK)
		step(t, "publish onto it", p.publish(id, s, foreign, multi, false), codes.FailedPrecondition)
		step(t, "unpublish it", p.unpublish(id, foreign), codes.FailedPrecondition)
		expectText(t, foreign, "precious")

		one := m.target("one")
		step(t, "publish", p.publish(id, s, one, multi, false), codes.OK)
		if err := unix.Mount("none", one, "tmpfs", 0, "size=64k"); err != nil { // on top of the publish
			t.Fatal(err)
		}
		step(t, "unpublish what is covered", p.unpublish(id, one), codes.FailedPrecondition)
		for _, dir := range []string{one, foreign} {
			if err := unix.Unmount(dir, 0); err != nil {
				t.Fatal(err)
			}
		}
		step(t, "unpublish", p.unpublish(id, one), codes.OK)

		full := m.staging("full")
		write(t, full, "precious")
		step(t, "unpublish a directory that was never published", p.unpublish(id, full), codes.OK)
		expectText(t, full, "precious")
		step(t, "unstage", p.unstage(id, s), codes.OK)
	})
}

func TestListPages(t *testing.T) {
	m := newMachine(t)
	p := m.start("csi", "--backend", "dir", "--mode", "controller")
	var made []string
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		made = append(made, p.create(name, writer).VolumeId)
	}
	slices.Sort(made)
	var got []string
	for token, first := "", true; first || token != ""; first = false {
		var ids []string
		ids, token = p.list(2, token)
		if len(ids) > 2 {
			t.Errorf("a page of %d", len(ids))
		}
		if got = append(got, ids...); len(got) == 2 {
			step(t, "delete the token's volume", p.delete(ids[1]), codes.OK)
		}
	}
	if !slices.Equal(got, made) {
		t.Errorf("listed %q, made %q", got, made)
	}
	for _, token := range []string{"x", "../x", strings.Repeat("a", 200)} {
		_, err := p.ListVolumes(t.Context(), &csi.ListVolumesRequest{StartingToken: token})
		step(t, "token "+token, err, codes.Aborted)
	}
	_, err := p.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: -1})
	step(t, "negative max", err, codes.InvalidArgument)
}

func TestCapacity(t *testing.T) {
	m := newMachine(t)
	p := m.start("csi", "--backend", "dir", "--mode", "controller", "--capacity", "40MiB")
	free := func(caps ...*csi.VolumeCapability) int64 {
		answer, err := p.GetCapacity(t.Context(), &csi.GetCapacityRequest{VolumeCapabilities: caps})
		if err != nil {
			t.Fatal(err)
		}
		return answer.AvailableCapacity
	}
	create := func(name string, least, most int64) error {
		_, err := p.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
			Name: name, VolumeCapabilities: []*csi.VolumeCapability{writer},
			CapacityRange: &csi.CapacityRange{RequiredBytes: least, LimitBytes: most},
		})
		return err
	}
	if free() != 40<<20 || free(writer) != 40<<20 || free(blockOf(writer)) != 0 ||
		free(mountOf(writer, "xfs", "")) != 0 {
		t.Error("an empty loopfs does not have its capacity free")
	}
	step(t, "create", create("a", 30<<20, 0), codes.OK)
	if free() != 10<<20 {
		t.Errorf("free are %d", free())
	}
	step(t, "over what is left", create("b", 16<<20, 0), codes.ResourceExhausted)
	step(t, "over everything", create("b", 41<<20, 0), codes.OutOfRange)
	step(t, "too small a limit", create("b", 0, 1<<20), codes.OutOfRange)
	step(t, "inverted", create("b", 2, 1), codes.OutOfRange)
	step(t, "again, larger", create("a", 31<<20, 0), codes.AlreadyExists)
	step(t, "again, smaller", create("a", 0, 29<<20), codes.AlreadyExists)
	step(t, "again", create("a", 20<<20, 40<<20), codes.OK)
	step(t, "delete", p.delete(string(disk.IDFor(disk.Volume, "a"))), codes.OK)
	step(t, "room again", create("b", 16<<20, 0), codes.OK)
}

func TestVolumeCapabilitiesAreValidated(t *testing.T) {
	m := newMachine(t)
	p := m.start("csi", "--backend", "dir", "--mode", "controller")
	v := p.create("a", writer)
	ask := func(change func(*csi.ValidateVolumeCapabilitiesRequest)) bool {
		req := &csi.ValidateVolumeCapabilitiesRequest{
			VolumeId: v.VolumeId, VolumeContext: v.VolumeContext, VolumeCapabilities: []*csi.VolumeCapability{writer},
		}
		change(req)
		answer, err := p.ValidateVolumeCapabilities(t.Context(), req)
		if err != nil {
			t.Fatal(err)
		}
		if (answer.Confirmed == nil) == (answer.Message == "") {
			t.Errorf("neither confirmed nor a reason, or both: %+v", answer)
		}
		return answer.Confirmed != nil
	}
	far := capability(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER)
	for what, c := range map[string]struct {
		want   bool
		change func(*csi.ValidateVolumeCapabilitiesRequest)
	}{
		"as made":    {true, func(*csi.ValidateVolumeCapabilitiesRequest) {}},
		"narrower":   {true, func(r *csi.ValidateVolumeCapabilitiesRequest) { r.VolumeCapabilities[0] = reader }},
		"wider":      {false, func(r *csi.ValidateVolumeCapabilitiesRequest) { r.VolumeCapabilities[0] = multi }},
		"many nodes": {false, func(r *csi.ValidateVolumeCapabilitiesRequest) { r.VolumeCapabilities[0] = far }},
		"context": {false, func(r *csi.ValidateVolumeCapabilitiesRequest) {
			r.VolumeContext = map[string]string{backendKey: "x"}
		}},
		"parameters": {false, func(r *csi.ValidateVolumeCapabilitiesRequest) {
			r.Parameters = map[string]string{"x": "y"}
		}},
	} {
		if ask(c.change) != c.want {
			t.Errorf("%s: not %v", what, c.want)
		}
	}
}

func TestIdentityAndAnnouncements(t *testing.T) {
	need(t, disk.DirBackend)
	m := newMachine(t)
	all := m.start("csi", "--backend", "dir", "--node-id", "n1", "--max-volumes", "7")
	info, err := all.GetPluginInfo(t.Context(), &csi.GetPluginInfoRequest{})
	if err != nil || info.Name != "loopfs.holdfast.dev" || info.VendorVersion == "" {
		t.Errorf("%+v, %v", info, err)
	}
	ready, err := all.Probe(t.Context(), &csi.ProbeRequest{})
	if err != nil || !ready.GetReady().GetValue() {
		t.Errorf("%+v, %v", ready, err)
	}
	node, err := all.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
	want := &csi.NodeGetInfoResponse{NodeId: "n1", MaxVolumesPerNode: 7,
		AccessibleTopology: &csi.Topology{Segments: map[string]string{"loopfs.holdfast.dev/node": "n1"}}}
	if err != nil || !proto.Equal(node, want) {
		t.Errorf("%+v, %v", node, err)
	}
	serves := func(p *process) bool {
		answer, err := p.GetPluginCapabilities(t.Context(), &csi.GetPluginCapabilitiesRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return slices.ContainsFunc(answer.Capabilities, func(c *csi.PluginCapability) bool {
			return c.GetService().GetType() == csi.PluginCapability_Service_CONTROLLER_SERVICE
		})
	}
	only := m.start("node", "--backend", "dir", "--mode", "node", "--node-id", "n1")
	if !serves(all) || !serves(only) {
		t.Error("an instance does not announce the controller service, which the plugin as a whole has")
	}
	_, err = only.ControllerGetCapabilities(t.Context(), &csi.ControllerGetCapabilitiesRequest{})
	step(t, "controller call to a node", err, codes.Unimplemented)
	_, err = all.ControllerPublishVolume(t.Context(),
		&csi.ControllerPublishVolumeRequest{VolumeId: "x", NodeId: "n1", VolumeCapability: writer})
	step(t, "attach without --attach", err, codes.Unimplemented)

	if err := os.Rename(m.data, m.data+".away"); err != nil {
		t.Fatal(err)
	}
	_, err = all.Probe(t.Context(), &csi.ProbeRequest{}) // the directory is held open: that it moved harms nothing
	step(t, "probe", err, codes.OK)
	if err := os.RemoveAll(filepath.Join(m.data + ".away")); err != nil {
		t.Fatal(err)
	}
	_, err = all.Probe(t.Context(), &csi.ProbeRequest{})
	step(t, "probe without data", err, codes.FailedPrecondition)
}

func TestTopology(t *testing.T) {
	need(t, disk.DirBackend)
	m := newMachine(t)
	p := m.start("csi", "--backend", "dir", "--node-id", "n1")
	create := func(node string) error {
		_, err := p.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
			Name: "a", VolumeCapabilities: []*csi.VolumeCapability{writer},
			AccessibilityRequirements: &csi.TopologyRequirement{Requisite: []*csi.Topology{{Segments: map[string]string{topologyKey: node}}}},
		})
		return err
	}
	step(t, "elsewhere", create("n2"), codes.ResourceExhausted)
	step(t, "here", create("n1"), codes.OK)
	if v := p.create("b", writer); len(v.AccessibleTopology) != 1 ||
		v.AccessibleTopology[0].Segments[topologyKey] != "n1" {
		t.Errorf("reachable from %v", v.AccessibleTopology)
	}
}
