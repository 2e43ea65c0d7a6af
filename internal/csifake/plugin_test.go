package csifake

import (
	"context"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"holdfast/internal/csifake/journal"
)

// TestFakeServesAVolumeFromCreationToDeletion runs the life of a volume over the socket. The paths, the backend and the
// journal must agree.
func TestFakeServesAVolumeFromCreationToDeletion(t *testing.T) {
	path := NewJournal(t, journal.Options{Settled: true, Strict: true})
	fake, c := start(t, Config{Journal: path, Caps: AllCaps,
		PublishContext: map[string]string{"big": strings.Repeat("x", 4000)}})
	at := newPaths(t)
	id := c.publishNew("one", at)
	if _, err := os.Stat(at.target); err != nil {
		t.Errorf("the plugin has not made the target: %v", err)
	}
	used, err := fake.Backend().Volumes()
	must(t, err)
	if u := used[id]; !slices.Equal(u.Published["node-1"], []string{at.target}) || u.Staged["node-1"] != at.staging ||
		!slices.Equal(u.Attached, []string{"node-1"}) {
		t.Errorf("the backend has %+v", u)
	}
	_, err = c.DeleteVolume(t.Context(), &csi.DeleteVolumeRequest{VolumeId: "another"})
	must(t, err)
	c.deletePublished(id, at)
	if _, err := os.Lstat(at.target); !os.IsNotExist(err) {
		t.Errorf("the target is still there: %v", err)
	}
	if used, _ := fake.Backend().Volumes(); len(used) != 0 {
		t.Errorf("the backend still has %v", used)
	}
	text, err := os.ReadFile(path)
	must(t, err)
	if strings.Contains(string(text), "canary") || !strings.Contains(string(text), `"secret_keys":["token"]`) {
		t.Errorf("the journal has a secret, or not its key:\n%s", text)
	}
}

// The mistakes of a client are also found over a real socket.
func TestCheckFindsABadClientOverASocket(t *testing.T) {
	fake, c := start(t, Config{Caps: []string{"STAGE_UNSTAGE", "PUBLISH_UNPUBLISH"}})
	at := newPaths(t)
	must(t, os.Remove(at.staging))
	must(t, c.stage(t.Context(), "v1", at)) // not attached, no staging directory
	must(t, os.Mkdir(at.target, 0o700))
	must(t, c.publish(t.Context(), "v1", at)) // the target exists already
	everywhere := &csi.ControllerUnpublishVolumeRequest{VolumeId: "v1"}
	_, err := c.ControllerUnpublishVolume(t.Context(), everywhere)
	must(t, err)
	must(t, c.unstage(t.Context(), "v1", at)) // still published
	wantRules(t, fake, journal.Options{}, "R2", "R9", "R11", "R14", "R4")
}

// Two calls for one volume at the same time are recorded, and the second is refused.
func TestSecondCallForAVolumeIsAborted(t *testing.T) {
	fake, c := start(t, Config{Caps: []string{"STAGE_UNSTAGE"}})
	at := newPaths(t)
	gate := fake.On("NodeStageVolume").Hold()
	first := make(chan error, 1)
	go func() { first <- c.stage(t.Context(), "v1", at) }()
	<-gate.Arrived()
	wantCode(t, c.stage(t.Context(), "v1", at), "ABORTED")
	gate.Open()
	must(t, <-first)
	wantRules(t, fake, journal.Options{}, "R3")
}

// A caller gives up, its next call is refused while the effect is still to come, and it undoes the effect afterwards.
func TestEffectComesAfterTheCallerHasGone(t *testing.T) {
	path := NewJournal(t, journal.Options{Settled: true})
	fake, c := start(t, Config{Journal: path, Caps: []string{"STAGE_UNSTAGE"}})
	at := newPaths(t)
	gate := fake.On("NodeStageVolume").Hold()
	ctx, cancel := context.WithCancel(t.Context())
	first := make(chan error, 1)
	go func() { first <- c.stage(ctx, "v1", at) }()
	<-gate.Arrived()
	cancel()
	wantCode(t, <-first, "CANCELLED")
	wantCode(t, c.unstage(t.Context(), "v1", at), "ABORTED")
	gate.Open()
	linesOf(t, path, func(l []journal.Line) bool { return count(l, journal.End, "NodeStageVolume") == 1 })
	if !staged(t, fake, "v1") {
		t.Error("the late effect is missing")
	}
	must(t, c.unstage(t.Context(), "v1", at))
}

// A caller that goes away with its connection has no call in flight, however soon its next call comes.
func TestLostConnectionAbandonsItsCalls(t *testing.T) {
	path := NewJournal(t, journal.Options{})
	fake, c := start(t, Config{Journal: path, Caps: []string{"STAGE_UNSTAGE"}})
	at := newPaths(t)
	gate := fake.On("NodeStageVolume").Times(1).Hold()
	answer := make(chan error, 1)
	go func() { answer <- c.stage(t.Context(), "v1", at) }()
	<-gate.Arrived()
	must(t, c.conn.Close())
	wantCode(t, dial(t, "unix:"+fake.Socket()).stage(t.Context(), "v1", at), "ABORTED")
	gate.Open()
	wantCode(t, <-answer, "CANCELLED")
	lines := linesOf(t, path, func(l []journal.Line) bool { return count(l, journal.End, "NodeStageVolume") == 2 })
	if count(lines, journal.Abandoned, "NodeStageVolume") != 1 {
		t.Error("the first call is not abandoned in the journal")
	}
}

// Each action decides the answer, and whether the call takes effect.
func TestEachActionDecidesAnswerAndEffect(t *testing.T) {
	cases := []struct {
		name   string
		rule   Rule
		code   string
		staged bool
	}{
		{"code before", Rule{Code: "INTERNAL"}, "INTERNAL", false},
		{"code after", Rule{When: After, Code: "DATA_LOSS"}, "DATA_LOSS", true},
		{"hang before", Rule{Hang: UntilCancelled}, "DEADLINE_EXCEEDED", false},
		{"hang for ever before", Rule{Hang: ForEver}, "DEADLINE_EXCEEDED", false},
		{"hang after", Rule{When: After, Hang: UntilCancelled}, "DEADLINE_EXCEEDED", true},
		{"delay", Rule{Delay: Duration(time.Millisecond)}, "OK", true},
		{"crash before", Rule{Crash: true}, "UNAVAILABLE", false},
		{"crash after", Rule{When: After, Crash: true}, "UNAVAILABLE", true},
		{"delay then code", Rule{Delay: Duration(time.Millisecond), Code: "NOT_FOUND"}, "NOT_FOUND", false},
		{"another volume", Rule{Volume: "v2", Code: "INTERNAL"}, "OK", true},
		{"another time", Rule{Nth: 2, Code: "INTERNAL"}, "OK", true},
	}
	for _, tc := range cases {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			tc.rule.RPC = "NodeStageVolume"
			fake, c := start(t, Config{Caps: []string{"STAGE_UNSTAGE"}, Script: []Rule{tc.rule}})
			at := newPaths(t)
			ctx := t.Context()
			if tc.code == "DEADLINE_EXCEEDED" {
				var cancel context.CancelFunc
				ctx, cancel = context.WithTimeout(ctx, 3*time.Second)
				defer cancel()
			}
			wantCode(t, c.stage(ctx, "v1", at), tc.code)
			if got := staged(t, fake, "v1"); got != tc.staged {
				t.Errorf("staged is %v, want %v", got, tc.staged)
			}
			calls, err := fake.Calls("NodeStageVolume")
			must(t, err)
			if tc.rule.Crash && (len(calls) != 1 || calls[0].End != nil) {
				t.Errorf("a call that was cut has an end: %+v", calls)
			}
		})
	}
}

// A kill within the process leaves the same state as a killed process, and the plugin can be started again.
func TestKilledFakeLeavesSocketAndState(t *testing.T) {
	path := NewJournal(t, journal.Options{Settled: true, Strict: true})
	fake, c := start(t, Config{Journal: path, Caps: []string{"STAGE_UNSTAGE"}})
	at := newPaths(t)
	fake.On("NodeStageVolume").After().Crash()
	wantCode(t, c.stage(t.Context(), "v1", at), "UNAVAILABLE")
	if _, err := os.Lstat(fake.Socket()); err != nil {
		t.Errorf("a killed plugin cannot remove its socket: %v", err)
	}
	again := Start(t, fake.Config())
	c = dial(t, "unix:"+again.Socket())
	must(t, c.stage(t.Context(), "v1", at), c.publish(t.Context(), "v1", at),
		c.unpublish(t.Context(), "v1", at), c.unstage(t.Context(), "v1", at))
	again.Stop()
	linesOf(t, path, func(l []journal.Line) bool { return count(l, journal.Stop, "") == 2 })
}

// Every capability is announced by its service, even one that no CSI version defines.
func TestCapabilitiesAreAnnouncedByTheirService(t *testing.T) {
	fake, c := start(t, Config{Caps: []string{"99", "node/EXPAND_VOLUME", "CREATE_DELETE", "expansion/ONLINE",
		"TOPOLOGY"}, Topology: map[string]string{"zone": "a"}, MaxVolumes: 7, NodeID: Empty, Name: "drv.example.org",
		Version: "2.0"})
	calls, err := fake.Calls("GetPluginCapabilities", "ControllerGetCapabilities", "NodeGetCapabilities")
	must(t, err)
	want := [][]string{{"CONTROLLER_SERVICE", "99", "VOLUME_ACCESSIBILITY_CONSTRAINTS"}, {"99", "CREATE_DELETE_VOLUME"},
		{"99", "EXPAND_VOLUME"}}
	for i, call := range calls {
		if !slices.Equal(call.End.Answer.Caps, want[i]) {
			t.Errorf("%s answers %v, want %v", call.RPC, call.End.Answer.Caps, want[i])
		}
	}
	info, err := c.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{})
	must(t, err)
	if info.GetNodeId() != "" || info.GetMaxVolumesPerNode() != 7 ||
		info.GetAccessibleTopology().GetSegments()["zone"] != "a" {
		t.Errorf("NodeGetInfo answers %v", info)
	}
	if again, _, err := fake.Config().filled(); err != nil || again.NodeID != "" {
		t.Errorf("started again, the plugin would have the node id %q, %v", again.NodeID, err)
	}
	wantCode(t, c.stage(t.Context(), "v1", places{"/s", "/t"}), "UNIMPLEMENTED")
	if _, err := New(Config{Caps: []string{"STAGE"}}); err == nil {
		t.Error("an unknown capability is taken")
	}
}

// A node plugin serves no controller. A call of the controller is nevertheless in the journal.
func TestNodePluginServesNoController(t *testing.T) {
	fake := Start(t, Config{Role: Node})
	c := dial(t, "unix:"+fake.Socket())
	_, err := c.CreateVolume(t.Context(), &csi.CreateVolumeRequest{Name: "one"})
	wantCode(t, err, "UNIMPLEMENTED")
	wantRules(t, fake, journal.Options{}, "R1")
	calls, err := fake.Calls()
	must(t, err)
	if calls[0].Role != "controller" || calls[0].Peer != os.Getpid() {
		t.Errorf("the journal has %+v", calls[0])
	}
}

// A controller and a node with one backend and one journal act as one plugin.
func TestTwoPluginsShareJournalAndBackend(t *testing.T) {
	path, backend := filepath.Join(t.TempDir(), "journal.jsonl"), NewBackend(filepath.Join(t.TempDir(), "state.json"))
	ctl := Start(t, Config{Role: Controller, Journal: path, Backend: backend,
		Caps: []string{"CREATE_DELETE", "PUBLISH_UNPUBLISH"}})
	node := Start(t, Config{Role: Node, Journal: path, Backend: NewBackend(backend.path),
		Caps: []string{"STAGE_UNSTAGE"}})
	c, n, at, ctx := dial(t, "unix:"+ctl.Socket()), dial(t, "unix:"+node.Socket()), newPaths(t), t.Context()
	_, err := c.GetPluginCapabilities(ctx, &csi.GetPluginCapabilitiesRequest{})
	must(t, err)
	_, err = c.ControllerGetCapabilities(ctx, &csi.ControllerGetCapabilitiesRequest{})
	must(t, err)
	_, err = n.NodeGetCapabilities(ctx, &csi.NodeGetCapabilitiesRequest{})
	must(t, err)
	info, err := n.NodeGetInfo(ctx, &csi.NodeGetInfoRequest{})
	must(t, err)
	made := c.create("one")
	id, vc := made.GetVolumeId(), made.GetVolumeContext()
	attached, err := c.ControllerPublishVolume(ctx, &csi.ControllerPublishVolumeRequest{VolumeId: id,
		NodeId: info.GetNodeId(), VolumeCapability: writer(), VolumeContext: vc})
	must(t, err)
	_, err = n.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: id, StagingTargetPath: at.staging,
		VolumeCapability: writer(), VolumeContext: vc, PublishContext: attached.GetPublishContext()})
	must(t, err)
	_, err = c.DeleteVolume(ctx, &csi.DeleteVolumeRequest{VolumeId: id})
	wantCode(t, err, "FAILED_PRECONDITION") // the controller sees what the node did
	must(t, n.unstage(ctx, id, at))
	_, err = c.ControllerUnpublishVolume(ctx, &csi.ControllerUnpublishVolumeRequest{VolumeId: id,
		NodeId: info.GetNodeId()})
	must(t, err)
	wantRules(t, ctl, journal.Options{Settled: true}, "R4", "R4") // the early DeleteVolume, attached and staged
}
