package main

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/examples/loopfs/internal/disk"
)

// Mounts, and what is written through them, outlive both processes.
func TestControllerAndNodeApart(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend string) {
		m := newMachine(t)
		c := m.start("c", "--backend", backend, "--mode", "controller")
		n := m.start("n", "--backend", backend, "--mode", "node", "--node-id", "n1")
		id, s, target := c.create("a", writer).VolumeId, m.staging("s"), m.target("t")
		n.bringUp(id, s, target, writer)
		before := m.mounted()
		step(t, "delete while staged on the node", c.delete(id), codes.FailedPrecondition)
		n.kill()
		step(t, "delete while the node is dead", c.delete(id), codes.FailedPrecondition)
		c.kill()
		write(t, target, "kept")
		n = m.start("n", "--backend", backend, "--mode", "node", "--node-id", "n1")
		c = m.start("c", "--backend", backend, "--mode", "controller")
		n.bringUp(id, s, target, writer)
		step(t, "publish otherwise", n.publish(id, s, target, writer, true), codes.AlreadyExists)
		expectText(t, target, "kept")
		if after := m.mounted(); !slices.Equal(before, after) {
			t.Errorf("mounted at %q, was at %q", after, before)
		}
		n.takeDown(id, s, target)
		step(t, "delete", c.delete(id), codes.OK)
		step(t, "stage a deleted volume", n.stage(id, s, writer), codes.NotFound)
		m.expectNoVolumes()
	})
}

func (p *process) attach(id, node string, c *csi.VolumeCapability, readOnly bool) (map[string]string, error) {
	answer, err := p.ControllerPublishVolume(p.t.Context(), &csi.ControllerPublishVolumeRequest{
		VolumeId: id, NodeId: node, VolumeCapability: c, Readonly: readOnly,
	})
	return answer.GetPublishContext(), err
}

func (p *process) detach(id, node string) error {
	_, err := p.ControllerUnpublishVolume(p.t.Context(),
		&csi.ControllerUnpublishVolumeRequest{VolumeId: id, NodeId: node})
	return err
}

func (p *process) stageWith(id, at string, context map[string]string) error {
	_, err := p.NodeStageVolume(p.t.Context(), &csi.NodeStageVolumeRequest{
		VolumeId: id, StagingTargetPath: at, VolumeCapability: writer, PublishContext: context,
	})
	return err
}

// attaching starts a controller and two nodes that attach.
func (m *machine) attaching() (c, n1 *process) {
	m.start("n2", "--backend", "dir", "--mode", "node", "--attach", "--node-id", "n2")
	n1 = m.start("n", "--backend", "dir", "--mode", "node", "--attach", "--node-id", "n1")
	return m.start("c", "--backend", "dir", "--mode", "controller", "--attach", "--max-volumes", "1"), n1
}

func TestAttach(t *testing.T) {
	need(t, disk.DirBackend)
	m := newMachine(t)
	c, _ := m.attaching()
	id, other := c.create("a", writer).VolumeId, c.create("b", writer).VolumeId
	context, err := c.attach(id, "n1", writer, false)
	step(t, "attach", err, codes.OK)
	for what, try := range map[string]struct {
		id, node string
		cap      *csi.VolumeCapability
		readOnly bool
		want     codes.Code
	}{
		"to an unknown node":  {id, "nowhere", writer, false, codes.NotFound},
		"an unknown volume":   {string(disk.IDFor(disk.Volume, "none")), "n1", writer, false, codes.NotFound},
		"wider than created":  {id, "n1", multi, false, codes.FailedPrecondition},
		"read-only there":     {id, "n1", writer, true, codes.AlreadyExists},
		"to a second node":    {id, "n2", writer, false, codes.FailedPrecondition},
		"one volume too many": {other, "n1", writer, false, codes.ResourceExhausted},
	} {
		_, err := c.attach(try.id, try.node, try.cap, try.readOnly)
		step(t, "attach "+what, err, try.want)
	}
	step(t, "delete while attached", c.delete(id), codes.FailedPrecondition)

	c.kill()
	c = m.start("c", "--backend", "dir", "--mode", "controller", "--attach", "--max-volumes", "1")
	again, err := c.attach(id, "n1", writer, false)
	step(t, "attach after a kill", err, codes.OK)
	if context[tokenKey] == "" || again[tokenKey] != context[tokenKey] {
		t.Error("the attachment has no durable token")
	}
	listed, err := c.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	must(t, err)
	for _, e := range listed.Entries {
		if nodes := fmt.Sprint(e.Status.PublishedNodeIds); (e.Volume.VolumeId == id) != (nodes == "[n1]") {
			t.Errorf("volume %s is listed on %s", e.Volume.VolumeId, nodes)
		}
	}
}

func TestStageNeedsTheAttachment(t *testing.T) {
	need(t, disk.DirBackend)
	m := newMachine(t)
	c, n := m.attaching()
	id, s := c.create("a", writer).VolumeId, m.staging("s")
	step(t, "stage before attach", n.stageWith(id, s, nil), codes.FailedPrecondition)
	context, err := c.attach(id, "n1", writer, true)
	step(t, "attach", err, codes.OK)
	step(t, "stage with a wrong token", n.stageWith(id, s, map[string]string{tokenKey: "guessed"}),
		codes.FailedPrecondition)
	step(t, "stage", n.stageWith(id, s, context), codes.OK)
	expectReadOnly(t, s)
	step(t, "publish without the token", n.publish(id, s, m.target("t"), writer, false), codes.FailedPrecondition)
	step(t, "detach while staged", c.detach(id, "n1"), codes.FailedPrecondition)
	step(t, "detach from another node", c.detach(id, "n2"), codes.OK)
	step(t, "unstage", n.unstage(id, s), codes.OK)
	step(t, "detach", c.detach(id, "n1"), codes.OK)
	step(t, "detach again", c.detach(id, ""), codes.OK)
	step(t, "detach an unknown volume", c.detach(string(disk.IDFor(disk.Volume, "none")), "n1"), codes.OK)
	step(t, "stage with the old token", n.stageWith(id, s, context), codes.FailedPrecondition)
	fresh, err := c.attach(id, "n2", writer, false)
	step(t, "attach to the other node", err, codes.OK)
	if fresh[tokenKey] == context[tokenKey] {
		t.Error("a new attachment has the old token")
	}
	for _, p := range []*process{c, n} {
		p.stop()
		if strings.Contains(p.logged(), context[tokenKey]) {
			t.Error("the log shows a token")
		}
	}
}

// In a user namespace, which needs no root, auto takes the dir backend, and a loop volume is refused with the reason.
// The mounts are only seen from inside: through /proc of the process.
func TestLoopfsServesInAUserNamespace(t *testing.T) {
	if out, err := exec.Command("unshare", "-Urm", "true").CombinedOutput(); err != nil {
		if os.Geteuid() == 0 {
			t.Fatalf("root cannot make a user namespace: %s", out)
		}
		t.Skipf("no user namespaces here: %s", out)
	}
	m := newMachine(t)
	p := m.startCommand("csi", []string{"unshare", "-Urm", self(t)}, nil)
	if log := p.logged(); !strings.Contains(log, "backend=dir") || !strings.Contains(log, "user namespace") {
		t.Errorf("the log does not give the backend and the reason:\n%s", log)
	}
	inside := filepath.Join("/proc", fmt.Sprint(p.cmd.Process.Pid), "root")
	id, s, one, two := p.create("a", multi).VolumeId, m.staging("s"), m.target("one"), m.target("two")
	p.bringUp(id, s, one, multi)
	step(t, "publish read-only", p.publish(id, s, two, multi, true), codes.OK)
	write(t, filepath.Join(inside, one), "kept")
	expectText(t, filepath.Join(inside, two), "kept")
	expectText(t, filepath.Join(m.data, "dirs", id), "kept")
	expectReadOnly(t, filepath.Join(inside, two))
	step(t, "unpublish", p.unpublish(id, two), codes.OK)
	p.takeDown(id, s, one)

	foreign := string(disk.IDFor(disk.Volume, "l"))
	must(t, os.WriteFile(filepath.Join(m.data, "volumes", foreign+".json"), fmt.Appendf(nil,
		`{"id":%q,"name":"l","state":"ready","backend":"loop","bytes":16777216,"usage":{"mode":"writer"}}`, foreign), 0o600))
	err := p.stage(foreign, s, mountOf(writer, "ext4", ""))
	step(t, "stage a loop volume", err, codes.FailedPrecondition)
	if !strings.Contains(fmt.Sprint(err), "user namespace") {
		t.Errorf("the error does not give the reason: %v", err)
	}
	out, err := exec.Command("unshare", "-Urm", "env", asLoopfs+"=1", self(t), "--backend", "loop", "--data", m.data,
		"--endpoint", "unix://"+m.base+"/x.sock").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "--backend dir") {
		t.Errorf("--backend loop in a user namespace: %v\n%s", err, out)
	}
}

func TestSocket(t *testing.T) {
	m := newMachine(t)
	first := m.start("csi", "--mode", "controller", "--backend", "dir")
	for endpoint, want := range map[string]string{
		"unix://" + first.socket: "another process serves", "": "unix:///path", "tcp://127.0.0.1:1": "unix:///path",
		"unix://relative": "unix:///path", "unix:///" + strings.Repeat("x", 107): "108 bytes",
	} {
		cmd := exec.Command(self(t), "--mode", "controller", "--backend", "dir", "--data", m.data)
		cmd.Env = append(os.Environ(), asLoopfs+"=1", "CSI_ENDPOINT="+endpoint)
		if out, err := cmd.CombinedOutput(); err == nil || !strings.Contains(string(out), want) {
			t.Errorf("endpoint %q: %v, want %q\n%s", endpoint, err, want, out)
		}
	}
	_, err := first.Probe(t.Context(), &csi.ProbeRequest{})
	step(t, "probe after a second start", err, codes.OK)
	first.kill()
	_, err = os.Lstat(first.socket) // stale
	must(t, err)
	next := m.start("csi", "--mode", "controller", "--backend", "dir")
	next.stop()
	expectGone(t, next.socket)
}

// The volume's root directory is given to the group once: later changes by a workload stay.
func TestVolumeMountGroupOwnsTheVolume(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend string) {
		m := newMachine(t)
		p := m.start("csi", "--backend", backend)
		id, s, target := p.create("a", writer).VolumeId, m.staging("s"), m.target("t")
		mine, other := mountOf(writer, "", "1234"), mountOf(writer, "", "1235")
		cycle := func(c *csi.VolumeCapability, gid, mode uint32, then func()) {
			t.Helper()
			p.bringUp(id, s, target, c)
			var st unix.Stat_t
			if err := unix.Stat(target, &st); err != nil || st.Gid != gid || st.Mode&0o7777 != mode {
				t.Errorf("the root directory is of group %d, mode %o, %v; want %d, %o", st.Gid, st.Mode&0o7777, err,
					gid, mode)
			}
			then()
			p.takeDown(id, s, target)
		}
		nothing := func() {}
		cycle(mine, 1234, 0o2775, func() {
			step(t, "stage for another group", p.stage(id, s, other), codes.AlreadyExists)
			step(t, "publish for another group", p.publish(id, s, m.target("x"), other, false),
				codes.FailedPrecondition)
			write(t, target, "new")
			var st unix.Stat_t
			if err := unix.Stat(filepath.Join(target, "f"), &st); err != nil || st.Gid != 1234 {
				t.Errorf("a new file is of group %d, %v", st.Gid, err)
			}
			must(t, os.Chmod(target, 0o700))
		})
		cycle(mine, 1234, 0o0700, nothing)
		cycle(writer, 1234, 0o0700, nothing)
		cycle(other, 1235, 0o2770, nothing)
		p.kill()
		p = m.start("csi", "--backend", backend)
		cycle(other, 1235, 0o2770, nothing)
	})
}

// The first stage settles the file system type of a volume that was created without one.
func TestFirstStageSettlesTheFileSystem(t *testing.T) {
	need(t, disk.LoopBackend)
	m := newMachine(t)
	p := m.start("csi", "--backend", "loop")
	none, xfs := mountOf(writer, "", ""), mountOf(writer, "xfs", "")
	id, s := p.create("a", none).VolumeId, m.staging("s")
	step(t, "stage as xfs, which needs more", p.stage(id, s, xfs), codes.FailedPrecondition)
	step(t, "stage", p.stage(id, s, none), codes.OK)
	step(t, "unstage", p.unstage(id, s), codes.OK)
	err := p.stage(id, s, xfs)
	step(t, "stage as xfs", err, codes.FailedPrecondition)
	if !strings.Contains(status.Convert(err).Message(), "file system ext4") {
		t.Errorf("the error does not name the file system: %v", err)
	}
	for c, want := range map[*csi.VolumeCapability]bool{writer: true, none: true, xfs: false} {
		req := &csi.ValidateVolumeCapabilitiesRequest{VolumeId: id, VolumeCapabilities: []*csi.VolumeCapability{c}}
		if p.confirms(req) != want {
			t.Errorf("%v: want confirmed %v", c, want)
		}
	}
	step(t, "stage as ext4", p.stage(id, s, writer), codes.OK)
	step(t, "unstage", p.unstage(id, s), codes.OK)
	if v := p.create("a", none); v.VolumeId != id {
		t.Errorf("created again: %v", v)
	}
}
