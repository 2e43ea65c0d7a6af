package main

import (
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/examples/loopfs/internal/disk"
)

func TestControllerAndNodeApart(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend string) {
		m := newMachine(t)
		c := m.start("c", "--backend", backend, "--mode", "controller")
		n := m.start("n", "--backend", backend, "--mode", "node", "--node-id", "n1")
		v := c.create("a", writer)
		id, s, target := v.VolumeId, m.staging("s"), m.target("t")
		step(t, "stage", n.stage(id, s, writer), codes.OK)
		step(t, "publish", n.publish(id, s, target, writer, false), codes.OK)
		write(t, target, "kept")
		step(t, "delete while staged on the node", c.delete(id), codes.FailedPrecondition)
		n.kill()
		step(t, "delete while the node is dead", c.delete(id), codes.FailedPrecondition)
		c.kill()
		n = m.start("n", "--backend", backend, "--mode", "node", "--node-id", "n1")
		c = m.start("c", "--backend", backend, "--mode", "controller")
		expectText(t, target, "kept")
		step(t, "unpublish", n.unpublish(id, target), codes.OK)
		step(t, "unstage", n.unstage(id, s), codes.OK)
		step(t, "delete", c.delete(id), codes.OK)
		step(t, "stage what was deleted", n.stage(id, s, writer), codes.NotFound)
		if left := m.volumeFiles(); len(left) > 0 {
			t.Errorf("left are %q", left)
		}
	})
}

// Another process that is at a volume shows by its lock on the volume's file.
func TestVolumeLockedByAnotherProcess(t *testing.T) {
	need(t, disk.DirBackend)
	m := newMachine(t)
	p := m.start("csi", "--backend", "dir")
	id := p.create("a", writer).VolumeId
	f, err := os.OpenFile(filepath.Join(m.data, "locks", id+".lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	s := m.staging("s")
	step(t, "stage", p.stage(id, s, writer), codes.Aborted)
	step(t, "delete", p.delete(id), codes.Aborted)
	if err := unix.Flock(int(f.Fd()), unix.LOCK_UN); err != nil {
		t.Fatal(err)
	}
	step(t, "stage", p.stage(id, s, writer), codes.OK)
	step(t, "unstage", p.unstage(id, s), codes.OK)
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
	_, err := c.attach(id, "nowhere", writer, false)
	step(t, "attach to an unknown node", err, codes.NotFound)
	_, err = c.attach(string(disk.IDFor(disk.Volume, "none")), "n1", writer, false)
	step(t, "attach an unknown volume", err, codes.NotFound)
	_, err = c.attach(id, "n1", multi, false)
	step(t, "attach wider than made", err, codes.FailedPrecondition)

	context, err := c.attach(id, "n1", writer, false)
	step(t, "attach", err, codes.OK)
	again, err := c.attach(id, "n1", writer, false)
	step(t, "attach again", err, codes.OK)
	if context[tokenKey] == "" || again[tokenKey] != context[tokenKey] {
		t.Error("the same attachment has no token, or two")
	}
	_, err = c.attach(id, "n1", writer, true)
	step(t, "attach read-only there", err, codes.AlreadyExists)
	_, err = c.attach(id, "n2", writer, false)
	step(t, "attach to a second node", err, codes.FailedPrecondition)
	if !strings.Contains(fmt.Sprint(err), "n1") {
		t.Errorf("the error does not name the node: %v", err)
	}
	_, err = c.attach(other, "n1", writer, false)
	step(t, "attach one too many", err, codes.ResourceExhausted)
	step(t, "delete while attached", c.delete(id), codes.FailedPrecondition)

	c.kill()
	c = m.start("c", "--backend", "dir", "--mode", "controller", "--attach", "--max-volumes", "1")
	again, err = c.attach(id, "n1", writer, false)
	step(t, "attach after a kill", err, codes.OK)
	if again[tokenKey] != context[tokenKey] {
		t.Error("the attachment was not durable")
	}
	listed, err := c.ListVolumes(t.Context(), &csi.ListVolumesRequest{})
	if err != nil {
		t.Fatal(err)
	}
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
	context, err := c.attach(id, "n1", writer, false)
	step(t, "attach", err, codes.OK)
	step(t, "stage with a wrong token", n.stageWith(id, s, map[string]string{tokenKey: "guessed"}),
		codes.FailedPrecondition)
	step(t, "stage", n.stageWith(id, s, context), codes.OK)
	step(t, "publish without the token", n.publish(id, s, m.target("t"), writer, false), codes.FailedPrecondition)
	step(t, "detach while staged", c.detach(id, "n1"), codes.FailedPrecondition)
	step(t, "detach from another node", c.detach(id, "n2"), codes.OK)
	step(t, "unstage", n.unstage(id, s), codes.OK)
	step(t, "detach", c.detach(id, "n1"), codes.OK)
	step(t, "detach again", c.detach(id, ""), codes.OK)
	step(t, "detach what never was", c.detach(string(disk.IDFor(disk.Volume, "none")), "n1"), codes.OK)
	step(t, "stage with the old token", n.stageWith(id, s, context), codes.FailedPrecondition)
	fresh, err := c.attach(id, "n2", writer, false)
	step(t, "attach to the other node", err, codes.OK)
	if fresh[tokenKey] == context[tokenKey] {
		t.Error("a new attachment has the old token")
	}
	for _, p := range []*process{c, n} {
		p.stop()
		if strings.Contains(p.log.String(), context[tokenKey]) {
			t.Error("the log shows a token")
		}
	}
}

func TestReadOnlyAttachmentStagesReadOnly(t *testing.T) {
	need(t, disk.DirBackend)
	m := newMachine(t)
	p := m.start("csi", "--backend", "dir", "--attach", "--node-id", "n1")
	id, s := p.create("a", writer).VolumeId, m.staging("s")
	context, err := p.attach(id, "n1", writer, true)
	step(t, "attach", err, codes.OK)
	step(t, "stage", p.stageWith(id, s, context), codes.OK)
	expectReadOnly(t, s)
	step(t, "unstage", p.unstage(id, s), codes.OK)
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
	if !strings.Contains(p.log.String(), "backend=dir") || !strings.Contains(p.log.String(), "user namespace") {
		t.Errorf("the log does not say which backend and why:\n%s", p.log)
	}
	inside := filepath.Join("/proc", fmt.Sprint(p.cmd.Process.Pid), "root")
	id, s, one, two := p.create("a", multi).VolumeId, m.staging("s"), m.target("one"), m.target("two")
	step(t, "stage", p.stage(id, s, multi), codes.OK)
	step(t, "publish", p.publish(id, s, one, multi, false), codes.OK)
	step(t, "publish read-only", p.publish(id, s, two, multi, true), codes.OK)
	write(t, filepath.Join(inside, one), "kept")
	expectText(t, filepath.Join(inside, two), "kept")
	expectText(t, filepath.Join(m.data, "dirs", id), "kept")
	expectReadOnly(t, filepath.Join(inside, two))
	step(t, "unpublish", p.unpublish(id, one), codes.OK)
	step(t, "unpublish", p.unpublish(id, two), codes.OK)
	step(t, "unstage", p.unstage(id, s), codes.OK)
	step(t, "delete", p.delete(id), codes.OK)

	record := fmt.Sprintf(`{"id":%q,"name":"l","state":"ready","backend":"loop","bytes":16777216,
		"usage":{"mode":"writer","file_system":"ext4"}}`, disk.IDFor(disk.Volume, "l"))
	if err := os.WriteFile(filepath.Join(m.data, "volumes", string(disk.IDFor(disk.Volume, "l"))+".json"),
		[]byte(record), 0o600); err != nil {
		t.Fatal(err)
	}
	err := p.stage(string(disk.IDFor(disk.Volume, "l")), s, writer)
	step(t, "stage a loop volume", err, codes.FailedPrecondition)
	if !strings.Contains(fmt.Sprint(err), "user namespace") {
		t.Errorf("the error does not say why: %v", err)
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
	run := func(endpoint string) (string, error) {
		cmd := exec.Command(self(t), "--mode", "controller", "--backend", "dir", "--data", m.data)
		cmd.Env = append(os.Environ(), asLoopfs+"=1", "CSI_ENDPOINT="+endpoint)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	if out, err := run("unix://" + first.socket); err == nil || !strings.Contains(out, "another process serves") {
		t.Errorf("a second loopfs on a living socket: %v\n%s", err, out)
	}
	if _, err := first.Probe(t.Context(), &csi.ProbeRequest{}); err != nil {
		t.Errorf("the first one suffers: %v", err)
	}
	first.kill()
	if _, err := os.Lstat(first.socket); err != nil {
		t.Fatalf("no stale socket to replace: %v", err)
	}
	next := m.start("csi", "--mode", "controller", "--backend", "dir")
	next.stop()
	expectGone(t, next.socket)

	file := filepath.Join(m.base, "file")
	if err := os.WriteFile(file, []byte("precious"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, endpoint := range []string{"", "tcp://127.0.0.1:1", "unix://relative", "unix:///" + strings.Repeat("x", 107),
		"unix://" + file} {
		if out, err := run(endpoint); err == nil {
			t.Errorf("endpoint %q was served:\n%s", endpoint, out)
		}
	}
	if text, err := os.ReadFile(file); string(text) != "precious" || err != nil {
		t.Errorf("the file in the way: %q, %v", text, err)
	}
	bound, err := net.Listen("unix", filepath.Join(m.base, "silent.sock"))
	if err != nil {
		t.Fatal(err)
	}
	defer bound.Close()
	if out, err := run("unix://" + m.base + "/silent.sock"); err == nil {
		t.Errorf("a socket on which somebody listens was replaced:\n%s", out)
	}
}

func TestByteSizes(t *testing.T) {
	for in, want := range map[string]int64{"1": 1, "1073741824": 1 << 30, "3KiB": 3 << 10, "64MiB": 64 << 20,
		"2GiB": 2 << 30, "1TiB": 1 << 40} {
		var b byteSize
		if err := b.Set(in); err != nil || int64(b) != want {
			t.Errorf("%s gave %d, %v", in, b, err)
		}
	}
	for _, in := range []string{"", "0", "-1", "x", "1GB", "GiB", "9999999999TiB", "99999999999999999999"} {
		var b byteSize
		if b.Set(in) == nil {
			t.Errorf("%q gave %d", in, b)
		}
	}
}

// The volume's root directory is given to the group once: what a workload makes of it afterwards stays.
func TestVolumeMountGroupOwnsTheVolume(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend string) {
		m := newMachine(t)
		p := m.start("csi", "--backend", backend)
		id, s, target := p.create("a", writer).VolumeId, m.staging("s"), m.target("t")
		mine, other := mountOf(writer, "", "1234"), mountOf(writer, "", "1235")
		owner := func(gid, mode uint32) {
			t.Helper()
			var st unix.Stat_t
			if err := unix.Stat(target, &st); err != nil || st.Gid != gid || st.Mode&0o7777 != mode {
				t.Errorf("the root directory is of group %d, mode %o, %v; want %d, %o", st.Gid, st.Mode&0o7777, err,
					gid, mode)
			}
		}
		cycle := func(c *csi.VolumeCapability, then func()) {
			t.Helper()
			step(t, "stage", p.stage(id, s, c), codes.OK)
			step(t, "publish", p.publish(id, s, target, c, false), codes.OK)
			then()
			step(t, "unpublish", p.unpublish(id, target), codes.OK)
			step(t, "unstage", p.unstage(id, s), codes.OK)
		}
		cycle(mine, func() {
			owner(1234, 0o2775)
			step(t, "stage for another group", p.stage(id, s, other), codes.AlreadyExists)
			step(t, "publish for another group", p.publish(id, s, m.target("x"), other, false),
				codes.FailedPrecondition)
			if err := os.WriteFile(filepath.Join(target, "f"), nil, 0o640); err != nil {
				t.Error(err)
			}
			var st unix.Stat_t
			if err := unix.Stat(filepath.Join(target, "f"), &st); err != nil || st.Gid != 1234 {
				t.Errorf("a new file is of group %d, %v", st.Gid, err)
			}
			if err := os.Chmod(target, 0o700); err != nil {
				t.Error(err)
			}
		})
		cycle(mine, func() { owner(1234, 0o0700) })
		cycle(writer, func() { owner(1234, 0o0700) })
		cycle(other, func() { owner(1235, 0o2770) })
		p.kill()
		p = m.start("csi", "--backend", backend)
		cycle(other, func() { owner(1235, 0o2770) })
	})
}

// A volume for which no type was asked is of the one that it is staged with first.
func TestFirstStageSettlesTheFileSystem(t *testing.T) {
	need(t, disk.LoopBackend)
	m := newMachine(t)
	p := m.start("csi", "--backend", "loop")
	none, xfs := mountOf(writer, "", ""), mountOf(writer, "xfs", "")
	id, s := p.create("a", none).VolumeId, m.staging("s")
	ask := func(c *csi.VolumeCapability) bool {
		answer, err := p.ValidateVolumeCapabilities(t.Context(), &csi.ValidateVolumeCapabilitiesRequest{
			VolumeId: id, VolumeCapabilities: []*csi.VolumeCapability{c},
		})
		if err != nil {
			t.Error(err)
		}
		return answer.GetConfirmed() != nil
	}
	step(t, "stage as xfs, which needs more", p.stage(id, s, xfs), codes.FailedPrecondition)
	step(t, "stage", p.stage(id, s, none), codes.OK)
	step(t, "unstage", p.unstage(id, s), codes.OK)
	err := p.stage(id, s, xfs)
	step(t, "stage as xfs", err, codes.FailedPrecondition)
	if !strings.Contains(status.Convert(err).Message(), "file system ext4") {
		t.Errorf("the error does not say what it is: %v", err)
	}
	if !ask(writer) || !ask(none) || ask(xfs) {
		t.Error("validated is not just ext4")
	}
	step(t, "stage as ext4", p.stage(id, s, writer), codes.OK)
	step(t, "unstage", p.unstage(id, s), codes.OK)
	if v := p.create("a", none); v.VolumeId != id {
		t.Errorf("the same again is %v", v)
	}
}
