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
	"google.golang.org/grpc/codes"
)

// Mounts, and what is written through them, outlive the process.
func TestMountsOutliveTheProcess(t *testing.T) {
	eachBackend(t, func(t *testing.T, backend string) {
		m, p := runLoopfs(t, backend)
		id, s, target := p.create("a", writer).VolumeId, m.staging("s"), m.target("t")
		p.bringUp(id, s, target, writer)
		before := m.mounted()
		p.kill()
		write(t, target, "kept")
		p = m.start("csi", "--backend", backend)
		step(t, "delete while staged", p.delete(id), codes.FailedPrecondition)
		p.bringUp(id, s, target, writer)
		step(t, "publish otherwise", p.publish(id, s, target, writer, true), codes.AlreadyExists)
		expectText(t, target, "kept")
		if after := m.mounted(); !slices.Equal(before, after) {
			t.Errorf("mounted at %q, was at %q", after, before)
		}
		p.takeDown(id, s, target)
		step(t, "delete", p.delete(id), codes.OK)
		step(t, "stage a deleted volume", p.stage(id, s, writer), codes.NotFound)
		m.expectNoVolumes()
	})
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
	expectText(t, filepath.Join(m.data, "volumes", id, "files"), "kept")
	expectReadOnly(t, filepath.Join(inside, two))
	step(t, "unpublish", p.unpublish(id, two), codes.OK)
	p.takeDown(id, s, one)

	out, err := exec.Command("unshare", "-Urm", "env", asLoopfs+"=1", self(t), "--backend", "loop", "--data", m.data,
		"--endpoint", "unix://"+m.base+"/x.sock").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "--backend dir") {
		t.Errorf("--backend loop in a user namespace: %v\n%s", err, out)
	}
}

func TestSocket(t *testing.T) {
	m := newMachine(t)
	first := m.start("csi", "--backend", "dir")
	for endpoint, want := range map[string]string{
		"unix://" + first.socket: "another process serves", "": "unix:///path", "tcp://127.0.0.1:1": "unix:///path",
		"unix://relative": "unix:///path", "unix:///" + strings.Repeat("x", 107): "108 bytes",
	} {
		cmd := exec.Command(self(t), "--backend", "dir", "--data", m.data)
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
	next := m.start("csi", "--backend", "dir")
	next.stop()
	expectGone(t, next.socket)
}
