package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
)

// staged tells what the backend of a process has.
func (p place) staged(t *testing.T) bool {
	t.Helper()
	used, err := csifake.NewBackend(p.state).Volumes()
	if err != nil {
		t.Fatal(err)
	}
	return used["v1"].Staged["node-1"] != ""
}

// TestAnswersOfAProcess: a file has a process answer what it wants, and take effect or not, now or later.
func TestAnswersOfAProcess(t *testing.T) {
	cases := []struct {
		name, rule string
		code       codes.Code
		staged     bool
	}{
		{"an unknown code", `"code": "CODE_77", "text_bytes": 100, "details": true`, codes.Code(77), false},
		{"cut before", `"drop": true`, codes.Unavailable, false},
		{"cut after", `"drop": true, "when": "after"`, codes.Unavailable, true},
		{"cut in the middle", `"drop": true, "when": "middle"`, codes.Unavailable, false},
		{"a lie", `"lie": "no-effect"`, codes.OK, false},
		{"too much", `"hostile": "huge"`, codes.ResourceExhausted, true},
		{"a pattern", `"pattern": ["INTERNAL", "ok"]`, codes.Internal, false},
		{"an answer", `"reply": {}`, codes.OK, true},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			p := newPlace(t)
			p.write(t, `[{"rpc": "NodeStageVolume", `+tc.rule+`}]`)
			p.launch(t, "--caps", "STAGE_UNSTAGE")
			c := p.dial(t)
			learn(t, c)
			if err := stage(t.Context(), c, p); status.Code(err) != tc.code {
				t.Errorf("it answers %v", err)
			}
			if p.staged(t) != tc.staged {
				t.Errorf("staged is %v", !tc.staged)
			}
		})
	}
}

// TestLateEffectOfAProcess: the answer comes at once, the effect later.
func TestLateEffectOfAProcess(t *testing.T) {
	p := newPlace(t)
	p.write(t, `[{"rpc": "NodeStageVolume", "late": "2s", "code": "ABORTED", "times": 1}]`)
	p.launch(t, "--caps", "STAGE_UNSTAGE")
	c := p.dial(t)
	learn(t, c)
	if err := stage(t.Context(), c, p); status.Code(err) != codes.Aborted || p.staged(t) {
		t.Errorf("it answers %v, staged is %v", err, p.staged(t))
	}
	waitFor(t, func() bool { return p.staged(t) })
	waitFor(t, func() bool { return unstage(t.Context(), c, p) == nil })
	for _, v := range csifake.Check(p.journal, journal.Options{Settled: true}) {
		t.Error(v)
	}
}

// TestIdentityOfAProcess: what a process says of itself is what the file wants, by the call.
func TestIdentityOfAProcess(t *testing.T) {
	p := newPlace(t)
	p.write(t, `[{"rpc": "NodeGetInfo", "hostile": "id-257"}, {"rpc": "GetPluginInfo", "hostile": "name-changes"},
		{"rpc": "Probe", "pattern": ["ok", "not_ready", "UNAUTHENTICATED"]}]`)
	p.launch(t)
	conn := p.conn(t)
	node, identity := csi.NewNodeClient(conn), csi.NewIdentityClient(conn)
	if info, err := node.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{}); err != nil ||
		len(info.GetNodeId()) != 257 {
		t.Errorf("NodeGetInfo answers %v, %v", info, err)
	}
	var got []string
	for range 3 {
		info, err := identity.GetPluginInfo(t.Context(), &csi.GetPluginInfoRequest{})
		ready, probed := identity.Probe(t.Context(), &csi.ProbeRequest{})
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, fmt.Sprintln(info.GetName(), ready.GetReady().GetValue(), status.Code(probed)))
	}
	want := []string{"csifake.example.org-1 true OK\n", "csifake.example.org-2 false OK\n",
		"csifake.example.org-3 false Unauthenticated\n"}
	if !slices.Equal(got, want) {
		t.Errorf("it says %q, want %q", got, want)
	}
}

// TestGarbageOfAProcess: who connects first meets something else.
func TestGarbageOfAProcess(t *testing.T) {
	p := newPlace(t)
	p.write(t, `[{"rpc": "accept", "garbage": "http1", "times": 1}]`)
	p.launch(t)
	conn, err := net.Dial("unix", p.socket)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	b := make([]byte, 64)
	if n, err := conn.Read(b); err != nil || !strings.HasPrefix(string(b[:n]), "HTTP/1.1 400") {
		t.Errorf("it says %q, %v", b[:n], err)
	}
	if _, err := p.dial(t).NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{}); err != nil {
		t.Error(err)
	}
}

// TestCapsLaterOfAProcess: every start may announce something else; the endpoint of each is in the journal.
func TestCapsLaterOfAProcess(t *testing.T) {
	p := newPlace(t)
	var got []int
	for range 3 {
		cmd := p.launch(t, "--roles", "node", "--caps", "STAGE_UNSTAGE", "--caps-later",
			"STAGE_UNSTAGE,node/EXPAND_VOLUME;")
		reply, err := p.dial(t).NodeGetCapabilities(t.Context(), &csi.NodeGetCapabilitiesRequest{})
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, len(reply.GetCapabilities()))
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	if !slices.Equal(got, []int{1, 2, 0}) {
		t.Errorf("the starts announce %v capabilities", got)
	}
	if lines, err := journal.Read(p.journal); err != nil || lines[0].Endpoint != "unix://"+p.socket {
		t.Errorf("the journal begins with %+v, %v", lines, err)
	}
}

func needMounts(t *testing.T, device string) {
	t.Helper()
	if _, err := os.Stat(device); os.Getuid() != 0 || err != nil {
		t.Skipf("this process may not mount, or there is no %s", device)
	}
}

func mountsOn(t *testing.T, path string) int {
	t.Helper()
	all, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) { return m.Mountpoint != path, false })
	if err != nil {
		t.Fatal(err)
	}
	return len(all)
}

func (p place) publish(t *testing.T, c csi.NodeClient, v *csi.VolumeCapability) (target string, err error) {
	t.Helper()
	target = filepath.Join(filepath.Dir(p.socket), "target")
	t.Cleanup(func() {
		for range mountsOn(t, target) {
			_ = unix.Unmount(target, unix.MNT_DETACH)
		}
	})
	_, err = c.NodePublishVolume(t.Context(), &csi.NodePublishVolumeRequest{VolumeId: "v1", TargetPath: target,
		VolumeCapability: v})
	return target, err
}

func unpublish(t *testing.T, c csi.NodeClient, target string) {
	t.Helper()
	if _, err := c.NodeUnpublishVolume(t.Context(),
		&csi.NodeUnpublishVolumeRequest{VolumeId: "v1", TargetPath: target}); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(target); !os.IsNotExist(err) || mountsOn(t, target) != 0 {
		t.Errorf("the target is left: %v", err)
	}
}

// TestDeathInTheMiddle: a process that dies between the two steps of a mount leaves the first, and the next one takes
// it down.
func TestDeathInTheMiddle(t *testing.T) {
	needMounts(t, "/proc")
	p := newPlace(t)
	p.write(t, `[{"rpc": "NodePublishVolume", "when": "middle", "times": 1, "crash": true}]`)
	cmd := p.launch(t, "--mounts")
	target, err := p.publish(t, p.dial(t), &csi.VolumeCapability{})
	if status.Code(err) != codes.Unavailable {
		t.Errorf("it answers %v", err)
	}
	diedBySIGKILL(t, cmd)
	if used, err := csifake.NewBackend(p.state).Volumes(); mountsOn(t, target) != 1 || len(used["v1"].Published) != 0 {
		t.Errorf("%d mounts, the backend has %v, %v", mountsOn(t, target), used, err)
	}
	p.launch(t, "--mounts")
	unpublish(t, p.dial(t), target)
}

// TestForgetfulAfterKill: a process that was killed has forgotten what exists and what it has published, and the
// mount is still there. It answers NOT_FOUND or OK, and unmounts nothing, until it has published there again. One
// that was stopped remembers.
func TestForgetfulAfterKill(t *testing.T) {
	needMounts(t, "/proc")
	p := newPlace(t)
	cmd := p.launch(t, "--mounts", "--any-volume", "--forgetful")
	c := p.dial(t)
	learn(t, c)
	target, err := p.publish(t, c, &csi.VolumeCapability{})
	if err != nil {
		t.Fatal(err)
	}
	_ = cmd.Process.Signal(unix.SIGTERM)
	_ = cmd.Wait()
	cmd = p.launch(t, "--mounts", "--any-volume", "--forgetful")
	used, err := csifake.NewBackend(p.state).Volumes()
	if err != nil || !slices.Equal(used["v1"].Published["node-1"], []string{target}) {
		t.Errorf("after it was stopped, it has %v, %v", used, err)
	}
	_ = cmd.Process.Kill()
	diedBySIGKILL(t, cmd)

	p.launch(t, "--mounts", "--any-volume", "--forgetful")
	c = p.dial(t)
	learn(t, c)
	if used, err := csifake.NewBackend(p.state).Volumes(); err != nil || len(used) != 0 {
		t.Errorf("after it was killed, it has %v, %v", used, err)
	}
	down := func() error {
		_, err := c.NodeUnpublishVolume(t.Context(),
			&csi.NodeUnpublishVolumeRequest{VolumeId: "v1", TargetPath: target})
		return err
	}
	if err := down(); status.Code(err) != codes.NotFound || mountsOn(t, target) != 1 {
		t.Errorf("it answers %v for a volume that it does not know; %d mounts", err, mountsOn(t, target))
	}
	other := &csi.NodePublishVolumeRequest{
		VolumeId: "v1", TargetPath: target + "2", VolumeCapability: &csi.VolumeCapability{},
	}
	if _, err := c.NodePublishVolume(t.Context(), other); err != nil {
		t.Fatal(err)
	}
	if err := down(); err != nil || mountsOn(t, target) != 1 {
		t.Errorf("it answers %v for a publication that it does not know; %d mounts", err, mountsOn(t, target))
	}
	if _, err := p.publish(t, c, &csi.VolumeCapability{}); err != nil {
		t.Fatal(err)
	}
	unpublish(t, c, target)
	unpublish(t, c, other.GetTargetPath())
	// R11: no client may publish where a mount has stayed, as this test did.
	for _, v := range csifake.Check(p.journal, journal.Options{Settled: true, Allow: []string{"R11"}}) {
		t.Error(v)
	}
}

// TestFuseOfAProcess: a FUSE mount hangs as long as the file says, and dies with the process.
func TestFuseOfAProcess(t *testing.T) {
	needMounts(t, "/dev/fuse")
	p := newPlace(t)
	cmd := p.launch(t, "--mounts", "--mount", "fuse")
	target, err := p.publish(t, p.dial(t), &csi.VolumeCapability{})
	if err != nil {
		t.Fatal(err)
	}
	list := func() <-chan error {
		answer := make(chan error, 1)
		go func() { _, err := os.ReadDir(target); answer <- err }()
		return answer
	}
	if err := <-list(); err != nil {
		t.Errorf("the mount is not alive: %v", err)
	}
	proceed := p.script + ".go"
	p.write(t, `[{"rpc": "fuse", "volume": "v1", "until": "`+proceed+`"}]`)
	waiting := list()
	select {
	case err := <-waiting:
		t.Errorf("a mount that hangs answers %v", err)
	case <-time.After(50 * time.Millisecond):
	}
	if err := os.WriteFile(proceed, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := <-waiting; err != nil {
		t.Errorf("the mount hangs for ever: %v", err)
	}
	p.write(t, `[{"rpc": "fuse", "hang": "forever"}]`)
	waiting = list()
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	diedBySIGKILL(t, cmd)
	if err := <-waiting; !errors.Is(err, unix.ENOTCONN) && !errors.Is(err, unix.ECONNABORTED) {
		t.Errorf("who waits is told %v", err)
	}
	if err := <-list(); !errors.Is(err, unix.ENOTCONN) || mountsOn(t, target) != 1 {
		t.Errorf("the mount of a dead process: %v", err)
	}
	p.write(t, ``)
	p.launch(t, "--mounts", "--mount", "fuse")
	unpublish(t, p.dial(t), target)
}

// TestBlockOfAProcess: a loop device lives on as its process dies, and the next one gives it back.
func TestBlockOfAProcess(t *testing.T) {
	needMounts(t, "/dev/loop-control")
	p := newPlace(t)
	data := t.TempDir()
	t.Cleanup(func() {
		if err := csifake.FreeLoops(data); err != nil {
			t.Error(err)
		}
	})
	cmd := p.launch(t, "--mounts", "--data", data, "--block", "loop")
	block := &csi.VolumeCapability{AccessType: &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}}
	target, err := p.publish(t, p.dial(t), block)
	if err != nil {
		t.Fatal(err)
	}
	_ = cmd.Process.Kill()
	diedBySIGKILL(t, cmd)
	var st unix.Stat_t
	if err := unix.Stat(target, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFBLK {
		t.Errorf("the target is %o, %v", st.Mode, err)
	}
	p.launch(t, "--mounts", "--data", data, "--block", "loop")
	unpublish(t, p.dial(t), target)
	sys := fmt.Sprintf("/sys/dev/block/%d:%d/loop/backing_file", unix.Major(st.Rdev), unix.Minor(st.Rdev))
	if b, err := os.ReadFile(sys); err == nil && strings.HasPrefix(string(b), data) {
		t.Errorf("%s still has %s", sys, b)
	}
}
