package e2e

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"

	"holdfast/host"
	"holdfast/internal/csifake"
	"holdfast/registry"
)

// The shim is killed in the middle of each call of a CSI client. The next shim repeats the call, and the client gets
// its answer. No use is left.
func TestShimKilledDuringACallOfAClient(t *testing.T) {
	t.Parallel()
	for _, when := range []string{"before", "after"} {
		t.Run(when, func(t *testing.T) {
			t.Parallel()
			e := newEnv(t, allCaps...)
			plugin := e.addPlugin("alloc-p", csifake.Monolith)
			conn, stop := e.serveCSI()
			v := newCSIVolume(conn, "v", filepath.Join(e.dir, "clients"))
			for i, call := range []func(context.Context) error{
				v.create, v.attach, v.stage, v.publish, v.unpublish, v.unstage, v.detach, v.delete,
			} {
				rule := plugin.On(everyCall[i]).Times(1)
				if when == "after" {
					rule = rule.After()
				}
				gate := rule.Hold()
				done := background(func() error { return call(e.ctx()) })
				e.waitHeld(gate, done)
				e.killShim()
				gate.Open()
				e.must(e.result(everyCall[i], done))
				e.wantOneRequest(everyCall[i], 2)
			}
			if uses, _, err := e.host.EndpointUses(e.ctx(), host.EndpointQuery{Plugin: "fake"}); err != nil ||
				len(uses) > 0 {
				t.Errorf("uses %+v, %v", uses, err)
			}
			stop()
			e.stopPlugin(plugin)
		})
	}
}

// The shim is killed while uses are forgotten. Each call succeeds, and is done once.
func TestShimKilledWhileUsesAreForgotten(t *testing.T) {
	t.Parallel()
	e := newEnv(t, allCaps...)
	plugin := e.addPlugin("alloc-p", csifake.Monolith)
	conn, stop := e.serveCSI()
	v := newCSIVolume(conn, "v", filepath.Join(e.dir, "clients"))
	e.must(v.create(e.ctx()))
	const rounds = 5
	for range rounds {
		e.must(v.attach(e.ctx()))
		done := background(func() error {
			return e.host.ForgetEndpointUses(e.ctx(), "fake", registry.ExternalID(v.id),
				host.Force{By: "an operator", Confirm: v.id})
		})
		e.killShim()
		e.must(e.result("forget", done))
	}
	e.must(e.create("last"))
	forgotten := 0
	for _, event := range e.eventsUntil(func(event host.Event) bool { return event.Volume == volumeName("last") }) {
		if event.Kind == registry.EventForced && string(event.External) == v.id {
			forgotten++
		}
	}
	e.must(e.delete("last"))
	uses, _, err := e.host.EndpointUses(e.ctx(), host.EndpointQuery{Plugin: "fake"})
	if err != nil || len(uses) > 0 || forgotten != rounds {
		t.Errorf("uses %+v, %v; %d events, not %d", uses, err, forgotten, rounds)
	}
	e.must(v.detach(e.ctx()))
	e.must(v.delete(e.ctx()))
	stop()
	e.stopPlugin(plugin)
}

// serveCSI runs holdfast csi-endpoint until the test ends, and returns a client's connection.
func (a *agentEnv) serveCSI() *grpc.ClientConn {
	a.t.Helper()
	socket := a.path("csi.sock")
	cmd := exec.Command(filepath.Join(bin, "holdfast"), "csi-endpoint", "fake", socket)
	cmd.Env, cmd.Stderr = a.environ(), a.t.Output()
	a.must(cmd.Start())
	exited := background(cmd.Wait)
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	a.must(err)
	a.t.Cleanup(func() {
		_ = conn.Close()
		a.must(cmd.Process.Signal(unix.SIGTERM))
		a.must(a.result("the end of the endpoint", exited))
	})
	return conn
}

// The agent is killed in the middle of calls of a CSI client. The call in flight fails with UNAVAILABLE. The client
// finds the next agent at the same socket, and repeats the call, which waits for the end of the first. Meanwhile the
// uses are kept. An operator lists them, and removes one whose client has gone.
func TestEndpointOutlivesTheAgent(t *testing.T) {
	a := newAgentEnv(t)
	a.must(a.runJob("fake.hcl"))
	a.must(a.retry("the plugin is known", func() error { return errOf(a.client.Plugin(a.ctx(), "fake")) }))
	v := newCSIVolume(a.serveCSI(), "disk", a.path("clients"))
	call := func(do func(context.Context) error) {
		t.Helper()
		var failed error
		a.waitUntil("the endpoint is available", func() bool {
			failed = do(a.ctx())
			return status.Code(failed) != codes.Unavailable
		})
		a.must(failed)
	}
	killDuring := func(m middle, do func(context.Context) error) {
		t.Helper()
		done := background(func() error { return do(a.ctx()) })
		a.waitInTheMiddle(m, done)
		a.killAgent()
		if err := a.result("the call", done); status.Code(err) != codes.Unavailable {
			t.Errorf("%s of a killed agent: %v", m.rpc, err)
		}
		a.must(a.startAgent())
		done = background(func() error { call(do); return nil })
		a.waitUntil("the call is repeated", func() bool {
			calls, err := csifake.Calls(a.path("journal"), m.rpc)
			return err == nil && len(calls) > 1
		})
		a.must(os.WriteFile(a.path("go-"+m.rpc), nil, 0o600))
		a.must(a.result("the repeated call", done))
	}
	stage, remove := middle{"NodeStageVolume", "after"}, middle{"DeleteVolume", "before"}
	a.holdCalls([]middle{stage, remove})
	call(v.create)
	call(v.attach)
	killDuring(stage, v.stage)
	call(v.publish)
	a.wantOutput(true, []string{"NodeStageVolume", v.staging(), "NodePublishVolume", v.target(), v.id}, "plugin",
		"uses", "fake")
	call(v.unpublish)
	call(v.unstage)
	a.wantOutput(true, []string{v.id}, "__complete", "plugin", "forget", "fake", "")
	a.wantOutput(false, []string{"ControllerPublishVolume at", "data may be lost", "--confirm"}, "plugin", "forget",
		"fake", v.id)
	a.wantOutput(true, []string{"uses of volume " + v.id + " forgotten"}, "plugin", "forget", "fake", v.id, "--confirm",
		v.id)
	a.wantOutput(true, []string{"no client uses a volume"}, "plugin", "uses", "fake")
	a.wantOutput(false, []string{"no client of the CSI endpoint uses volume", "holdfast plugin uses fake"}, "plugin",
		"forget", "fake", v.id, "--confirm", v.id)
	a.wantOutput(true, []string{"use by a client of the CSI endpoint (ControllerPublishVolume at", "by user"}, "events")
	call(v.detach)
	killDuring(remove, v.delete)
	a.must(a.stopJob("fake"))
}
