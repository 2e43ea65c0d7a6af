package csifake

import (
	"context"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"

	"holdfast/internal/csifake/journal"
)

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
