package main

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
)

func TestVolumeLivesFromCreationToDeletion(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend string) {
		m, p := runLoopfs(t, backend)
		v := p.create("a", multi)
		if v.CapacityBytes != 16<<20 || v.VolumeContext[backendKey] != backend {
			t.Errorf("created %+v", v)
		}
		staging, one, two := m.staging("s"), m.target("one"), m.target("two")
		id := v.VolumeId

		step(t, "publish before stage", p.publish(id, staging, one, multi, false), codes.FailedPrecondition)
		for range 2 {
			p.bringUp(id, staging, one, multi)
		}
		step(t, "publish read-only elsewhere", p.publish(id, staging, two, multi, true), codes.OK)
		if got := m.mounted(); !slices.Equal(got, []string{staging, one, two}) {
			t.Errorf("mounted at %q", got)
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
			t.Errorf("mounted at %q", got)
		}
		if _, err := os.Stat(staging); err != nil {
			t.Errorf("the caller's staging directory: %v", err)
		}

		other := m.staging("other")
		step(t, "stage elsewhere", p.stage(id, other, reader), codes.OK)
		expectText(t, other, "kept")
		expectReadOnly(t, other)
		step(t, "unstage", p.unstage(id, other), codes.OK)
		for range 2 {
			step(t, "delete", p.delete(id), codes.OK)
		}
		m.expectNoVolumes()
		p.stop()
		expectGone(t, p.socket)
	})
}

func TestOtherArgumentsAreRefused(t *testing.T) {
	m, p := runLoopfs(t, loopBackend)
	id := p.create("a", multi).VolumeId
	narrow := p.create("narrow", writer).VolumeId
	s, s2, one, x := m.staging("s"), m.staging("s2"), m.target("one"), m.target("x")
	for _, unknown := range []string{string(idFor(volumeKind, "never made")), "somebody-elses"} {
		step(t, "stage an unknown volume", p.stage(unknown, s, writer), codes.NotFound)
		step(t, "publish an unknown volume", p.publish(unknown, s, x, writer, false), codes.NotFound)
		step(t, "unstage an unknown volume", p.unstage(unknown, s), codes.NotFound)
		step(t, "delete an unknown volume", p.delete(unknown), codes.OK)
	}

	step(t, "stage", p.stage(id, s, multi), codes.OK)
	step(t, "stage for another mode", p.stage(id, s, writer), codes.AlreadyExists)
	step(t, "stage with other flags", p.stage(id, s, capability(multi.AccessMode.Mode, "noexec")), codes.AlreadyExists)
	step(t, "stage at a second path", p.stage(id, s2, multi), codes.AlreadyExists)
	step(t, "stage another volume there", p.stage(narrow, s, writer), codes.FailedPrecondition)
	step(t, "stage for a wider mode", p.stage(narrow, s2, multi), codes.FailedPrecondition)

	step(t, "publish", p.publish(id, s, one, multi, false), codes.OK)
	step(t, "publish read-only there", p.publish(id, s, one, multi, true), codes.AlreadyExists)
	step(t, "publish from elsewhere", p.publish(id, s2, x, multi, false), codes.FailedPrecondition)
	step(t, "publish without staging path", p.publish(id, "", x, multi, false), codes.FailedPrecondition)
	step(t, "publish without parent", p.publish(id, s, m.target("no/x"), multi, false), codes.FailedPrecondition)
	step(t, "unstage elsewhere", p.unstage(id, s2), codes.OK)
	if got := m.mounted(); !slices.Equal(got, []string{s, one}) {
		t.Errorf("mounted at %q", got)
	}
	p.takeDown(id, s, one)

	p.bringUp(narrow, s, one, single)
	step(t, "second target", p.publish(narrow, s, x, single, false), codes.FailedPrecondition)
	step(t, "second target for a reader", p.publish(narrow, s, x, reader, true), codes.FailedPrecondition)
	step(t, "unpublish", p.unpublish(narrow, one), codes.OK)
	step(t, "next target", p.publish(narrow, s, x, single, false), codes.OK)
	p.takeDown(narrow, s, x)
}

// Mounts and files that loopfs did not make stay.
func TestForeignMountsStay(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend string) {
		m, p := runLoopfs(t, backend)
		id := p.create("a", multi).VolumeId
		s, foreign, one := m.staging("s"), m.staging("foreign"), m.target("one")
		must(t, unix.Mount("none", foreign, "tmpfs", 0, "size=64k"))
		write(t, foreign, "precious")
		step(t, "stage onto it", p.stage(id, foreign, multi), codes.FailedPrecondition)
		step(t, "unstage it", p.unstage(id, foreign), codes.FailedPrecondition)
		p.bringUp(id, s, one, multi)
		step(t, "publish onto it", p.publish(id, s, foreign, multi, false), codes.FailedPrecondition)
		step(t, "unpublish it", p.unpublish(id, foreign), codes.FailedPrecondition)
		expectText(t, foreign, "precious")
		must(t, unix.Mount("none", one, "tmpfs", 0, "size=64k")) // on top of the publish
		step(t, "unpublish what is covered", p.unpublish(id, one), codes.FailedPrecondition)
		must(t, unix.Unmount(one, 0))
		must(t, unix.Unmount(foreign, 0))

		full := m.staging("full")
		write(t, full, "precious")
		step(t, "unpublish a directory that was never published", p.unpublish(id, full), codes.OK)
		expectText(t, full, "precious")
		p.takeDown(id, s, one)
	})
}

func TestListPages(t *testing.T) {
	_, p := runLoopfs(t, dirBackend)
	var made, got []string
	for _, name := range []string{"a", "b", "c", "d", "e"} {
		made = append(made, p.create(name, writer).VolumeId)
	}
	slices.Sort(made)
	for token, first := "", true; first || token != ""; first = false {
		answer, err := p.ListVolumes(t.Context(), &csi.ListVolumesRequest{MaxEntries: 2, StartingToken: token})
		must(t, err)
		if len(answer.Entries) > 2 {
			t.Errorf("a page of %d", len(answer.Entries))
		}
		for _, e := range answer.Entries {
			got = append(got, e.Volume.VolumeId)
		}
		if token = answer.NextToken; first {
			step(t, "delete the token's volume", p.delete(token), codes.OK)
		}
	}
	if !slices.Equal(got, made) {
		t.Errorf("listed %q, created %q", got, made)
	}
	for _, token := range []string{"x", "../x", strings.Repeat("a", 200)} {
		_, err := p.ListVolumes(t.Context(), &csi.ListVolumesRequest{StartingToken: token})
		step(t, "token "+token, err, codes.Aborted)
	}
}

func TestCapacity(t *testing.T) {
	_, p := runLoopfs(t, dirBackend, "--capacity", "40MiB")
	expectFree := func(want int64, caps ...*csi.VolumeCapability) {
		t.Helper()
		answer, err := p.GetCapacity(t.Context(), &csi.GetCapacityRequest{VolumeCapabilities: caps})
		if err != nil || answer.AvailableCapacity != want {
			t.Errorf("free are %d, %v; want %d", answer.GetAvailableCapacity(), err, want)
		}
	}
	create := func(name string, least int64) error {
		_, err := p.tryCreate(name, "", least, 0, writer)
		return err
	}
	expectFree(40 << 20)
	expectFree(40<<20, writer)
	expectFree(0, blockOf(writer))
	step(t, "create", create("a", 30<<20), codes.OK)
	expectFree(10 << 20)
	step(t, "more than what is left", create("b", 16<<20), codes.ResourceExhausted)
	step(t, "more than everything", create("b", 41<<20), codes.OutOfRange)
	step(t, "again, larger", create("a", 31<<20), codes.AlreadyExists)
	step(t, "again", create("a", 20<<20), codes.OK)
	step(t, "delete", p.delete(string(idFor(volumeKind, "a"))), codes.OK)
	step(t, "room again", create("b", 16<<20), codes.OK)
}

func TestVolumeCapabilitiesAreValidated(t *testing.T) {
	_, p := runLoopfs(t, dirBackend)
	v := p.create("a", writer)
	far := capability(csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER)
	for what, c := range map[string]struct {
		want                bool
		cap                 *csi.VolumeCapability
		context, parameters map[string]string
	}{
		"as created": {true, writer, v.VolumeContext, nil},
		"narrower":   {true, reader, nil, nil},
		"wider":      {false, multi, nil, nil},
		"many nodes": {false, far, nil, nil},
		"context":    {false, writer, map[string]string{backendKey: "x"}, nil},
		"parameters": {false, writer, nil, map[string]string{"x": "y"}},
	} {
		req := &csi.ValidateVolumeCapabilitiesRequest{VolumeId: v.VolumeId, VolumeContext: c.context,
			VolumeCapabilities: []*csi.VolumeCapability{c.cap}, Parameters: c.parameters}
		if p.confirms(req) != c.want {
			t.Errorf("%s: want confirmed %v", what, c.want)
		}
	}
}

func TestIdentityAndTopology(t *testing.T) {
	m, p := runLoopfs(t, dirBackend, "--node-id", "n1")
	here := &csi.Topology{Segments: map[string]string{topologyKey: "n1"}}
	node, err := p.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
	want := &csi.NodeGetInfoResponse{NodeId: "n1", AccessibleTopology: here}
	if err != nil || !proto.Equal(node, want) {
		t.Errorf("NodeGetInfo: %+v, %v", node, err)
	}
	create := func(key, value string) (*csi.Volume, error) {
		answer, err := p.CreateVolume(t.Context(), &csi.CreateVolumeRequest{
			Name: "a", VolumeCapabilities: []*csi.VolumeCapability{writer},
			AccessibilityRequirements: &csi.TopologyRequirement{
				Requisite: []*csi.Topology{{Segments: map[string]string{key: value}}}},
		})
		return answer.GetVolume(), err
	}
	for key, value := range map[string]string{topologyKey: "n2", "unknown": "a"} {
		_, err = create(key, value)
		step(t, "create elsewhere", err, codes.ResourceExhausted)
		answer, err := p.GetCapacity(t.Context(), &csi.GetCapacityRequest{
			AccessibleTopology: &csi.Topology{Segments: map[string]string{key: value}},
		})
		if err != nil || answer.AvailableCapacity != 0 {
			t.Errorf("capacity of %s=%s: %v, %v", key, value, answer, err)
		}
	}
	v, err := create(topologyKey, "n1")
	if err != nil || len(v.AccessibleTopology) != 1 || !proto.Equal(v.AccessibleTopology[0], here) {
		t.Errorf("created %v, %v", v, err)
	}

	_, err = p.Probe(t.Context(), &csi.ProbeRequest{})
	step(t, "probe", err, codes.OK)
	must(t, os.RemoveAll(m.data))
	_, err = p.Probe(t.Context(), &csi.ProbeRequest{})
	step(t, "probe without data", err, codes.FailedPrecondition)
}
