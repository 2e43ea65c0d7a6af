package main

import (
	"bufio"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"holdfast/internal/csifake"
	"holdfast/internal/csifake/journal"
	"holdfast/internal/mount/mounttest"
)

// TestMain lets the test binary be the command itself.
func TestMain(m *testing.M) {
	if os.Getenv("CSIFAKE_TEST_MAIN") != "" {
		main()
		return
	}
	os.Exit(mounttest.Run(m))
}

// place has the paths of a plugin process.
type place struct{ socket, journal, script, state, staging string }

func newPlace(t *testing.T) place {
	t.Helper()
	dir, err := os.MkdirTemp("", "h-")
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	p := place{socket: dir + "/csi.sock", journal: dir + "/journal", script: dir + "/script",
		state: dir + "/state", staging: dir + "/staging"}
	must(t, os.Mkdir(p.staging, 0o700))
	return p
}

// launch starts the process and returns once it listens.
func (p place) launch(t *testing.T, args ...string) *exec.Cmd {
	t.Helper()
	all := append([]string{"--journal", p.journal, "--script", p.script, "--state", p.state}, args...)
	cmd := exec.Command(os.Args[0], all...)
	cmd.Env = append(os.Environ(), "CSIFAKE_TEST_MAIN=1", "CSI_ENDPOINT=unix://"+p.socket)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	must(t, err)
	must(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		t.Fatalf("the plugin does not come up: %v", err)
	}
	return cmd
}

func (p place) write(t *testing.T, script string) {
	t.Helper()
	must(t, os.WriteFile(p.script, []byte(script), 0o600))
}

func (p place) dial(t *testing.T) csi.NodeClient { t.Helper(); return csi.NewNodeClient(p.conn(t)) }

func (p place) conn(t *testing.T) *grpc.ClientConn {
	t.Helper()
	conn, err := grpc.NewClient("unix:"+p.socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

func stage(ctx context.Context, c csi.NodeClient, p place) error {
	_, err := c.NodeStageVolume(ctx, &csi.NodeStageVolumeRequest{VolumeId: "v1", StagingTargetPath: p.staging,
		VolumeCapability: &csi.VolumeCapability{}})
	return err
}

func unstage(ctx context.Context, c csi.NodeClient, p place) error {
	_, err := c.NodeUnstageVolume(ctx, &csi.NodeUnstageVolumeRequest{VolumeId: "v1", StagingTargetPath: p.staging})
	return err
}

func learn(t *testing.T, c csi.NodeClient) {
	t.Helper()
	if _, err := c.NodeGetCapabilities(t.Context(), &csi.NodeGetCapabilitiesRequest{}); err != nil {
		t.Fatal(err)
	}
}

// diedBySIGKILL waits for the process, and checks that SIGKILL has ended it.
func diedBySIGKILL(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	_ = cmd.Wait()
	if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); !ok || ws.Signal() != syscall.SIGKILL {
		t.Fatalf("the plugin ended with %v, not by SIGKILL", cmd.ProcessState)
	}
}

// After a kill -9 during a hanging call, the call is open in the journal. The next process knows the existing volumes,
// and the journal of both processes is legal.
func TestKilledPluginProcessLeavesItsCallOpen(t *testing.T) {
	p := newPlace(t)
	p.write(t, `[{"rpc": "NodeStageVolume", "when": "after", "times": 1, "hang": "forever"}]`)
	cmd := p.launch(t, "--roles", "node", "--caps", "STAGE_UNSTAGE", "--instance", "one")
	c := p.dial(t)
	learn(t, c)
	answer := make(chan error, 1)
	go func() { answer <- stage(t.Context(), c, p) }()
	waitFor(t, func() bool {
		used, err := csifake.NewBackend(p.state).Volumes()
		return err == nil && used["v1"].Staged["node-1"] == p.staging
	})
	must(t, cmd.Process.Kill())
	diedBySIGKILL(t, cmd)
	if err := <-answer; status.Code(err) != codes.Unavailable {
		t.Errorf("the call ends with %v", err)
	}
	calls, err := csifake.Calls(p.journal, "NodeStageVolume")
	if err != nil || len(calls) != 1 || calls[0].End != nil {
		t.Fatalf("the journal has %+v, %v; want one open call", calls, err)
	}
	p.launch(t, "--roles", "node", "--caps", "STAGE_UNSTAGE", "--instance", "one")
	c = p.dial(t)
	must(t, stage(t.Context(), c, p))
	if err := unstage(t.Context(), c, p); err != nil {
		t.Fatal(err)
	}
	for _, v := range csifake.Check(p.journal, journal.Options{Settled: true, Strict: true}) {
		t.Error(v)
	}
}

// A rule that crashes the plugin once does so only once, although the process that has counted it is dead.
func TestCrashRuleCountsOverProcesses(t *testing.T) {
	p := newPlace(t)
	p.write(t, `[{"rpc": "NodeStageVolume", "times": 1, "crash": true}]`)
	for attempt := range 2 {
		cmd := p.launch(t, "--caps", "STAGE_UNSTAGE")
		c := p.dial(t)
		learn(t, c)
		err := stage(t.Context(), c, p)
		if attempt == 1 && err != nil {
			t.Errorf("it crashes again: %v", err)
		}
		if attempt == 0 {
			diedBySIGKILL(t, cmd)
		}
	}
}

// A call uses the content that the script has when the call arrives. An invalid script is an error.
func TestScriptIsReadForEachCall(t *testing.T) {
	p := newPlace(t)
	p.launch(t, "--caps", "STAGE_UNSTAGE")
	c := p.dial(t)
	learn(t, c)
	for _, step := range []struct {
		script string
		want   codes.Code
	}{
		{`[{"rpc": "NodeStageVolume", "code": "DATA_LOSS"}]`, codes.DataLoss},
		{`[{"rpc": "NodeStageVolume", "code": "NOT_FOUND", "delay": "1ms"}]`, codes.NotFound},
		{`[{"rpc": "NodeStageVolume", "cod": "NOT_FOUND"}]`, codes.Internal},
		{``, codes.OK},
	} {
		p.write(t, step.script)
		if err := stage(t.Context(), c, p); status.Code(err) != step.want {
			t.Errorf("with %s: %v, want %v", step.script, err, step.want)
		}
	}
}

// A call waits for a file that the test makes.
func TestCallWaitsForAFile(t *testing.T) {
	p := newPlace(t)
	proceed := p.script + ".go"
	p.write(t, `[{"rpc": "NodeStageVolume", "until": "`+proceed+`"}]`)
	p.launch(t, "--caps", "STAGE_UNSTAGE")
	c := p.dial(t)
	learn(t, c)
	answer := make(chan error, 1)
	go func() { answer <- stage(t.Context(), c, p) }()
	waitFor(t, func() bool {
		calls, err := csifake.Calls(p.journal, "NodeStageVolume")
		return err == nil && len(calls) == 1 && calls[0].End == nil
	})
	must(t, os.WriteFile(proceed, nil, 0o600))
	if err := <-answer; err != nil {
		t.Error(err)
	}
}

// Two processes write many lines each to one journal. No line is torn, and the order within each run is kept.
func TestTwoProcessesWriteOneJournal(t *testing.T) {
	a := newPlace(t)
	b := newPlace(t)
	b.journal = a.journal
	clients := []csi.NodeClient{}
	for _, p := range []place{a, b} {
		p.launch(t, "--instance", filepath.Base(filepath.Dir(p.socket)))
		clients = append(clients, p.dial(t))
	}
	done := make(chan error, 2)
	for _, c := range clients {
		go func() {
			for range 200 {
				if _, err := c.NodeGetInfo(t.Context(), &csi.NodeGetInfoRequest{}); err != nil {
					done <- err
					return
				}
			}
			done <- nil
		}()
	}
	for range clients {
		must(t, <-done)
	}
	lines, err := journal.Read(a.journal)
	if err != nil || len(lines) != 802 {
		t.Fatalf("the journal has %d lines, %v; want 802", len(lines), err)
	}
	last := map[string]uint64{}
	for n, l := range lines {
		if l.Seq != last[l.Run]+1 {
			t.Fatalf("line %d has number %d after %d", n+1, l.Seq, last[l.Run])
		}
		last[l.Run] = l.Seq
	}
}

func waitFor(t *testing.T, done func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		if done() {
			return
		}
	}
	t.Fatal("what was waited for does not happen")
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
