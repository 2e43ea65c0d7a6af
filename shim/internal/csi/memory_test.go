package csi

import (
	"context"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"holdfast/internal/csifake"
	"holdfast/registry"
)

// telltale has every call that the plugin gets from now on fail with all that it must not tell.
func telltale(fake *csifake.Plugin) {
	fake.On("").Answer(func(context.Context, proto.Message, proto.Message, error) (proto.Message, error) {
		return nil, status.Error(codes.Internal, "it says: "+strings.Join(canaries[:len(canaries)-1], ", ")+fmt.Sprintf(" and %q", canaryQuoted))
	})
}

// What a plugin was sent in one call it must not tell in another one, nor in a probe.
func TestNothingIsToldInAnotherCall(t *testing.T) {
	fake, f := start(t, csifake.Config{})
	fake.On("").Answer(func(context.Context, proto.Message, proto.Message, error) (proto.Message, error) {
		return &csi.NodeStageVolumeResponse{}, nil
	})
	for _, c := range mutating {
		_ = c.do(patient(t), f)
	}
	fake.ClearScript()
	telltale(fake)
	ctx, conn := patient(t), open(t, f)
	_, probe := conn.Probe(ctx)
	_, describe := conn.Describe(ctx, []registry.Role{registry.RoleNode})
	for what, err := range map[string]error{
		"Unstage":   f.Unstage(ctx, nodeKey, UnstageRequest{VolumeID: "vol-1", StagingPath: "/s"}),
		"Unpublish": f.Unpublish(ctx, nodeKey, UnpublishRequest{VolumeID: "vol-1", TargetPath: "/t"}),
		"Detach":    f.Detach(ctx, controllerKey, DetachRequest{VolumeID: "vol-1", Node: "n"}),
		"Delete":    f.Delete(ctx, controllerKey, DeleteRequest{VolumeID: "vol-1"}),
		"Probe":     probe, "Describe": describe,
	} {
		if err == nil || !strings.Contains(err.Error(), "it says: ") {
			t.Fatalf("%s: %v", what, err)
		}
		without(t, what, err.Error(), canaries...)
	}
}

// A new process remembers nothing: it asks for what it must hide, once the plugin has said something, and tells nothing if nobody answers.
func TestWhatCannotBeHiddenIsWithheld(t *testing.T) {
	fake, f := start(t, csifake.Config{})
	asked := 0
	private := func(p Private) func(context.Context) Private {
		return func(context.Context) Private { asked++; return p }
	}
	known := Private{Secrets: secrets, MountFlags: usage.MountFlags, Contexts: []map[string]string{publishContext, volumeContext, {"api-key": canaryParameter}}}
	unstage := func(f *Fleet, p Private) error {
		return f.Unstage(patient(t), nodeKey, UnstageRequest{VolumeID: "vol-1", StagingPath: "/s", Private: private(p)})
	}
	if err := unstage(f, known); err != nil || asked != 0 {
		t.Errorf("a call that succeeds asks %d times: %v", asked, err)
	}
	if err := unstage(New(table{}), known); err == nil || asked != 0 {
		t.Errorf("a call that was not sent asks %d times: %v", asked, err)
	}
	telltale(fake)
	err := unstage(f, known)
	if err == nil || !strings.Contains(err.Error(), "it says: ") {
		t.Errorf("%v", err)
	}
	without(t, "known", fmt.Sprint(err), canaries...)
	err = unstage(f, Private{Unknown: true})
	if err == nil || strings.Contains(err.Error(), "it says") || !strings.Contains(err.Error(), "INTERNAL") || !strings.Contains(err.Error(), "withheld") {
		t.Errorf("%v", err)
	}
	if asked != 2 {
		t.Errorf("asked %d times", asked)
	}
}

func TestMemoryIsBounded(t *testing.T) {
	m := &sentSecrets{}
	kept := secret{"", "secret-kept"}
	for i := range 3 * maxSecrets {
		m.add([]secret{{"", fmt.Sprint("secret-", i)}, kept})
	}
	newest := secret{"", fmt.Sprint("secret-", 3*maxSecrets-1)}
	if len(m.sent) != maxSecrets || !slices.Contains(m.sent, newest) {
		t.Errorf("%d values are remembered; the newest: %v", len(m.sent), slices.Contains(m.sent, newest))
	}
	if !slices.Contains(m.sent, kept) {
		t.Error("a value that every call sends is forgotten")
	}
	large := secret{"", strings.Repeat("x", maxSecretBytes+1)}
	if got := m.redactor([]secret{large}).redact("is " + large.value); got != "is ***" {
		t.Errorf("a value beyond the limit is shown in its own call: %.20q", got)
	}
	m.add([]secret{kept})
	if m.bytes != len(kept.value) || len(m.sent) != 1 {
		t.Errorf("%d bytes of %d values are remembered", m.bytes, len(m.sent))
	}
}

// fleetThatSent is a fleet without plugins which has sent n secrets to the plugin "disk", and n to another one.
func fleetThatSent(n int) *Fleet {
	f := New(table{})
	for i := range n {
		f.secretsOf("disk").add([]secret{{"", fmt.Sprint("secret-number-", i)}})
		f.secretsOf("other").add([]secret{{"", fmt.Sprint("other-number-", i)}})
	}
	return f
}

func failedProbe(t testing.TB, f *Fleet, dir string) func() {
	t.Helper()
	c, err := f.Connect("disk", taskKey, registry.Endpoint{Host: filepath.Join(dir, "none.sock")})
	if err != nil {
		t.Fatal(err)
	}
	return func() {
		if _, err := c.Probe(context.Background()); err == nil {
			t.Error("nobody answered a probe, and it succeeded")
		}
	}
}

// A probe that fails costs the same whatever was sent before. Building the masks of 512 values takes thousands of allocations.
func TestFailedProbeBuildsNoMasks(t *testing.T) {
	f := fleetThatSent(maxSecrets)
	defer f.CloseAll()
	probe := failedProbe(t, f, socketDir(t))
	probe() // builds them once
	built := f.secretsOf("disk").masks
	if n := testing.AllocsPerRun(20, probe); n > 1000 {
		t.Errorf("a failed probe allocates %v times", n)
	}
	if f.secretsOf("disk").masks != built || built == nil || f.secretsOf("other").masks != nil {
		t.Error("masks were built for nothing")
	}
}

// A plugin's texts are masked by what was sent to this plugin.
func TestSecretsOfAnotherPluginMaskNothing(t *testing.T) {
	f := fleetThatSent(1)
	if got := f.secretsOf("disk").redactor(nil).redact("secret-number-0 other-number-0"); got != "*** other-number-0" {
		t.Error(got)
	}
}

func BenchmarkFailedProbe(b *testing.B) {
	f := fleetThatSent(maxSecrets)
	defer f.CloseAll()
	probe := failedProbe(b, f, b.TempDir())
	b.ReportAllocs()
	for b.Loop() {
		probe()
	}
}

// odd is a compression that only the plugin knows.
type odd struct{}

func (odd) Do(w io.Writer, p []byte) error { _, err := w.Write(p); return err }
func (odd) Type() string                   { return "odd" }

// An answer that we cannot read is an answer: the plugin may have acted.
func TestUnreadableAnswerIsUncertain(t *testing.T) {
	l, socket := listen(t)
	//lint:ignore SA1019 a plugin that compresses unasked is built so
	s := grpc.NewServer(grpc.RPCCompressor(odd{}))
	csi.RegisterControllerServer(s, attaching{})
	go func(l net.Listener) { _ = s.Serve(l) }(l)
	t.Cleanup(s.Stop)
	f := met(t, fleetFor(t, socket))
	attach := mutating[2]
	wantCallError(t, "compressed", attach.do(patient(t), f), attach, registry.OutcomeUncertain, "INTERNAL", registry.ErrInternal)
}

// attaching attaches, and does nothing else.
type attaching struct {
	csi.UnimplementedControllerServer
}

func (attaching) ControllerPublishVolume(context.Context, *csi.ControllerPublishVolumeRequest) (*csi.ControllerPublishVolumeResponse, error) {
	return &csi.ControllerPublishVolumeResponse{PublishContext: publishContext}, nil
}
