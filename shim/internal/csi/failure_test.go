package csi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"holdfast/internal/csifake"
	"holdfast/registry"
)

// codesTable has the meaning of each code, from the error scheme of the CSI spec and from gRPC's own answers.
var codesTable = []struct {
	code codes.Code
	name string
	sure bool // the call certainly does not run any more
	kind error
}{
	{codes.Canceled, "CANCELLED", false, registry.ErrUnavailable},
	{codes.Unknown, "UNKNOWN", false, registry.ErrInternal},
	{codes.InvalidArgument, "INVALID_ARGUMENT", true, registry.ErrInvalid},
	{codes.DeadlineExceeded, "DEADLINE_EXCEEDED", false, registry.ErrUnavailable},
	{codes.NotFound, "NOT_FOUND", true, registry.ErrNotFound},
	{codes.AlreadyExists, "ALREADY_EXISTS", true, registry.ErrExists},
	{codes.PermissionDenied, "PERMISSION_DENIED", true, registry.ErrDenied},
	{codes.ResourceExhausted, "RESOURCE_EXHAUSTED", false, registry.ErrExhausted},
	{codes.FailedPrecondition, "FAILED_PRECONDITION", true, registry.ErrConflict},
	{codes.Aborted, "ABORTED", false, registry.ErrUnavailable},
	{codes.OutOfRange, "OUT_OF_RANGE", true, registry.ErrInvalid},
	{codes.Unimplemented, "UNIMPLEMENTED", true, registry.ErrUnsupported},
	{codes.Internal, "INTERNAL", false, registry.ErrInternal},
	{codes.Unavailable, "UNAVAILABLE", false, registry.ErrUnavailable},
	{codes.DataLoss, "DATA_LOSS", false, registry.ErrInternal},
	{codes.Unauthenticated, "UNAUTHENTICATED", true, registry.ErrDenied},
	{codes.Code(17), "UNKNOWN", false, registry.ErrInternal},
}

// vague lists the codes after which the effect of a call is unknown. For an expansion they mean failure, because an
// expansion may be repeated.
var vague = []string{"UNKNOWN", "INTERNAL", "DATA_LOSS", "RESOURCE_EXHAUSTED"}

// wantCallError checks the error of a call.
func wantCallError(t *testing.T, what string, err error, c call, outcome registry.Outcome, code string, kind error) {
	t.Helper()
	e, ok := errors.AsType[*registry.CallError](err)
	if !ok {
		t.Fatalf("%s: error is %v", what, err)
	}
	at := controllerKey
	if strings.HasPrefix(string(c.rpc), "Node") {
		at = nodeKey
	}
	if e.RPC != c.rpc || e.Instance != at || e.Outcome != outcome || e.Code != code || e.Detail == "" {
		t.Errorf("%s: error is %+v, want %s %s of %s at %s", what, e, outcome, code, c.rpc, at)
	}
	for _, k := range registry.Kinds {
		if want := k == kind || k == registry.ErrUncertain &&
			outcome == registry.OutcomeUncertain; errors.Is(err, k) != want {
			t.Errorf("%s: errors.Is(%v, %v) is %v", what, err, k, !want)
		}
	}
}

// A plugin answers each call with each code, and its secrets are in the text.
func TestOutcomeOfEveryCode(t *testing.T) {
	fake, f := start(t, csifake.Config{})
	for _, c := range slices.Concat(mutating, reading) {
		for _, code := range codesTable {
			fake.ClearScript()
			said := "it says: " + strings.Join(canaries, ", ") + fmt.Sprintf(" and %q pin 77", canaryQuoted)
			fake.On(string(c.rpc)).Reply(nil, status.Error(code.code, said))
			outcome := registry.OutcomeUncertain
			if code.sure || c.rpc == validateRPC || c.rpc == registry.NodeStatsRPC || c.rpc.Alters() &&
				slices.Contains(vague, code.name) {
				outcome = registry.OutcomeFailed
			}
			err := c.do(patient(t), f)
			what := fmt.Sprint(c.rpc, " ", code.name)
			wantCallError(t, what, err, c, outcome, code.name, code.kind)
			stored, _ := json.Marshal(err)
			wantNone(t, what, err.Error()+string(stored), c.hide...)
			if !strings.Contains(err.Error(), "it says: ") {
				t.Errorf("%s: the plugin's words are lost: %v", what, err)
			}
		}
	}
	if want := (len(mutating) + len(reading)) * len(codesTable); calls(t, fake) != want {
		t.Errorf("%d calls were sent, want %d: each once", calls(t, fake), want)
	}
}

// The plugin gets exactly the requested message, and its OK is a success.
func TestRequestsSayWhatWasAsked(t *testing.T) {
	fake, f := start(t, csifake.Config{})
	for _, c := range slices.Concat(mutating, reading) {
		var got proto.Message
		fake.ClearScript()
		fake.On(string(c.rpc)).Answer(
			func(_ context.Context, req, reply proto.Message, _ error) (proto.Message, error) {
				got = proto.Clone(req)
				if reply == nil {
					reply = &csi.NodeStageVolumeResponse{} // nil: the fake has refused a call in this order
				}
				return reply, nil
			})
		if err := c.do(patient(t), f); err != nil {
			t.Errorf("%s: %v", c.rpc, err)
		}
		if !proto.Equal(got, c.want) {
			t.Errorf("%s: the plugin got\n%v, want\n%v", c.rpc, got, c.want)
		}
	}
}

// overdue is a context that ends as if by its deadline.
type overdue struct{ context.Context }

func (overdue) Value(any) any { return nil }
func (o overdue) Err() error {
	if o.Context.Err() == nil {
		return nil
	}
	return context.DeadlineExceeded
}

// If a call was sent and ends without an answer from the plugin, its outcome is uncertain.
func TestNoAnswerIsUncertain(t *testing.T) {
	big := map[string]string{"big": strings.Repeat("x", maxAnswer)}
	for _, c := range []struct {
		name, code string
		kind       error
		script     func(csifake.Expect)
		during     func(*Fleet, context.CancelFunc)
	}{
		{"killed before the effect", "UNAVAILABLE", registry.ErrUnavailable, func(e csifake.Expect) { e.Crash() }, nil},
		{"killed after the effect", "UNAVAILABLE", registry.ErrUnavailable,
			func(e csifake.Expect) { e.After().Crash() }, nil},
		{"deadline", "DEADLINE_EXCEEDED", registry.ErrUnavailable, nil,
			func(_ *Fleet, cancel context.CancelFunc) { cancel() }},
		{"cancelled", "CANCELLED", registry.ErrUnavailable, nil,
			func(_ *Fleet, cancel context.CancelFunc) { cancel() }},
		{"connection closed", "CANCELLED", registry.ErrUnavailable, nil,
			func(f *Fleet, _ context.CancelFunc) { f.Close(taskKey) }},
		{"oversized answer", registry.CodeUnreadable, registry.ErrInternal, func(e csifake.Expect) {
			e.Reply(&csi.ControllerPublishVolumeResponse{PublishContext: big}, nil)
		}, nil},
		{"answer of another type", registry.CodeUnreadable, registry.ErrInternal, func(e csifake.Expect) {
			e.Reply(&csi.GetPluginInfoResponse{Name: "\x0a"}, nil)
		}, nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			fake, f := start(t, csifake.Config{})
			attach := mutatingCall(registry.ControllerPublishRPC)
			answers(t, open(t, f))
			ctx, cancel := context.WithCancel(patient(t))
			defer cancel()
			if c.name == "deadline" {
				ctx = overdue{ctx}
			}
			ended := make(chan error, 1)
			if c.during == nil {
				c.script(fake.On(string(attach.rpc)))
				ended <- attach.do(ctx, f)
			} else {
				gate := fake.On(string(attach.rpc)).Hold()
				go func() { ended <- attach.do(ctx, f) }()
				<-gate.Arrived()
				c.during(f, cancel)
				defer gate.Open()
			}
			wantCallError(t, c.name, <-ended, attach, registry.OutcomeUncertain, c.code, c.kind)
			if calls(t, fake, string(attach.rpc)) != 1 {
				t.Errorf("it was sent %d times", calls(t, fake, string(attach.rpc)))
			}
		})
	}
}

// An answer that gRPC refuses to read is not mistaken for a full storage, nor a full storage for such an answer.
func TestOversizedAnswerIsNoFullStorage(t *testing.T) {
	fake, f := start(t, csifake.Config{})
	attach := mutatingCall(registry.ControllerPublishRPC)
	for range 3 { // the windows of a connection that is used
		for _, size := range []int{maxAnswer, maxAnswer + 1, 16 << 20} {
			big := map[string]string{"big": strings.Repeat("x", size)}
			fake.ClearScript()
			fake.On(string(attach.rpc)).Reply(&csi.ControllerPublishVolumeResponse{PublishContext: big}, nil)
			wantCallError(t, "oversized", attach.do(patient(t), f), attach, registry.OutcomeUncertain,
				registry.CodeUnreadable, registry.ErrInternal)
		}
		fake.ClearScript()
		fake.On(string(attach.rpc)).Code(codes.ResourceExhausted,
			"grpc: received message larger than max (4194310 vs. 4194304)")
		wantCallError(t, "full", attach.do(patient(t), f), attach, registry.OutcomeUncertain, "RESOURCE_EXHAUSTED",
			registry.ErrExhausted)
		fake.ClearScript()
		fake.On(string(attach.rpc)).Code(codes.Internal, "grpc: failed to unmarshal the received message: no")
		wantCallError(t, "internal", attach.do(patient(t), f), attach, registry.OutcomeUncertain, "INTERNAL",
			registry.ErrInternal)
	}
}

// An ID that is not UTF-8 makes the answer unreadable. It is not reported as an error of the plugin.
func TestAnswerThatIsNotUTF8IsUnreadable(t *testing.T) {
	storage := csifake.NewBackend("")
	if err := storage.AddVolume("other", 1, nil); err != nil { // which is cloned
		t.Fatal(err)
	}
	fake, f := start(t, csifake.Config{Backend: storage})
	create := mutatingCall(registry.CreateVolumeRPC)
	fake.On(string(create.rpc)).BadUTF8()
	err := create.do(patient(t), f)
	wantCallError(t, "not UTF-8", err, create, registry.OutcomeFailed, registry.CodeUnreadable, registry.ErrInternal)
}

// A call that was not sent has failed, because it can have no effect.
func TestCallThatWasNotSentHasFailed(t *testing.T) {
	fake, f := start(t, csifake.Config{})
	ended, cancel := context.WithCancel(context.Background())
	cancel()
	late, cancelLate := context.WithDeadline(context.Background(), time.Unix(0, 0))
	defer cancelLate()
	stale, gone := start(t, csifake.Config{})
	answers(t, open(t, gone))
	stale.Kill()
	_ = open(t, gone).Lost(patient(t)) // until the loss is known, a call may be sent
	closed := fleetFor(t, fake.Socket())
	closed.CloseAll()
	connected := fleetFor(t, fake.Socket())
	answers(t, open(t, connected))
	for _, c := range []struct {
		name, code string
		ctx        context.Context
		fleet      *Fleet
	}{
		{"never there", "UNAVAILABLE", patient(t), fleetFor(t, filepath.Join(socketDir(t), "csi.sock"))},
		{"killed", "UNAVAILABLE", patient(t), gone},
		{"not registered", "UNAVAILABLE", patient(t), New(table{}, Observer{Metrics: &CallMetrics{}})},
		{"fleet closed", "UNAVAILABLE", patient(t), closed},
		{"cancelled before", "CANCELLED", ended, f},
		{"cancelled before, connected", "CANCELLED", ended, connected},
		{"too late", "DEADLINE_EXCEEDED", late, f},
	} {
		for _, m := range mutating {
			wantCallError(t, c.name, m.do(c.ctx, c.fleet), m, registry.OutcomeFailed, c.code, registry.ErrUnavailable)
		}
	}
	if n := calls(t, fake) + calls(t, stale); n != 2 { // the two probes
		t.Errorf("%d calls reached a plugin", n)
	}
}

// An empty node id would detach the volume from every node.
func TestDetachNeedsANode(t *testing.T) {
	fake, f := start(t, csifake.Config{})
	detach := mutatingCall(registry.ControllerUnpublishRPC)
	request := detach
	request.do = func(ctx context.Context, f *Fleet) error {
		return f.Detach(ctx, controllerKey, DetachRequest{VolumeID: "vol-1", Secrets: secrets})
	}
	wantCallError(t, "without a node id", request.do(patient(t), f), detach, registry.OutcomeFailed,
		"INVALID_ARGUMENT", registry.ErrInvalid)
	if n := calls(t, fake); n != 0 {
		t.Errorf("%d calls were sent", n)
	}
}
