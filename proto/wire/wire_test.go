package wire

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"holdfast/hooks"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// trip takes v over the wire, as bytes.
func trip[T any, M proto.Message](t *testing.T, v T, to func(T) M, from func(M) T) T {
	t.Helper()
	m := to(v)
	encoded, err := proto.Marshal(m)
	if err != nil {
		t.Fatal(err)
	}
	back := m.ProtoReflect().New().Interface().(M)
	if err := proto.Unmarshal(encoded, back); err != nil {
		t.Fatal(err)
	}
	return from(back)
}

func same[T any](t *testing.T, got, want T) {
	t.Helper()
	if !reflect.DeepEqual(got, want) {
		a, _ := json.MarshalIndent(got, "", " ")
		b, _ := json.MarshalIndent(want, "", " ")
		t.Errorf("%T came back otherwise\ngot  %s\nwant %s", want, a, b)
	}
}

// crosses takes a value with all fields set over the wire, after change has reset those that do not travel.
func crosses[T any, M proto.Message](t *testing.T, to func(T) M, from func(M) (T, error), change func(*T)) {
	t.Helper()
	v := registrytest.FilledWhole[T](t)
	if change != nil {
		change(&v)
	}
	same(t, trip(t, v, to, func(m M) T {
		out, err := from(m)
		if err != nil {
			t.Error(err)
		}
		return out
	}), v)
}

// sure adapts a conversion that cannot fail.
func sure[M, T any](from func(M) T) func(M) (T, error) {
	return func(m M) (T, error) { return from(m), nil }
}

// Every field of every type crosses the wire, except those that are reset here.
func TestEveryFieldCrosses(t *testing.T) {
	crosses(t, PlanProto, Plan, nil)
	crosses(t, AllocTaskProto, AllocTask, nil)
	crosses(t, AllocGroupProto, AllocGroup, nil)
	crosses(t, JobProto, sure(Job), nil)
	crosses(t, InstanceProto, sure(Instance), nil)
	crosses(t, InfeasibleProto, sure(Infeasible), nil)
	crosses(t, NodeFeasibleProto, sure(NodeFeasible), nil)
	crosses(t, ForceProto, sure(Force), nil)
	crosses(t, ReleaseStepProto, sure(ReleaseStep), nil)
	crosses(t, EventProto, sure(Event), func(e *registry.Event) { e.Kind = registry.EventResync }) // for its snapshot
	crosses(t, PluginTaskProto, sure(PluginTask), nil)
	crosses(t, BootTimeProto, sure(BootTime), nil)
	crosses(t, VolumeSpecProto, sure(VolumeSpec), nil)
	crosses(t, ClaimProto, sure(Claim), nil)
	crosses(t, VolumeUsageProto, sure(VolumeUsage), nil)
	crosses(t, DiagnosisProto, sure(Diagnosis), nil)
	crosses(t, SnapshotSpecProto, sure(SnapshotSpec), nil)
	crosses(t, FieldChangeProto, sure(FieldChange), nil)
	crosses(t, PluginVolumeProto, sure(PluginVolume), func(v *registry.PluginVolume) {
		v.Condition.Since = time.Time{}
	})
	crosses(t, EndpointUseProto, sure(EndpointUse), func(u *registry.EndpointUse) { u.Server = registry.TaskKey{} })
	ds := registrytest.FilledWhole[registry.Diagnostics](t)
	same(t, Diagnostics(DiagnosticsProto(ds)), ds)
}

// The fields of a volume's and an alloc's status that a host uses cross the wire.
func TestStatusCrosses(t *testing.T) {
	v := registrytest.FilledWhole[registry.VolumeStatus](t)
	v.Unattached, v.Modification.Earlier = false, nil // for the shim to remember
	v.Expansion.Usage, v.Expansion.NodeDone = registry.Usage{}, 0
	for i, a := range v.Attachments {
		v.Attachments[i] = registry.Attachment{Node: a.Node, NodeID: a.NodeID, State: a.State, Detaching: a.Detaching}
	}
	v.Staging = registry.Staging{State: registry.MarkSent, Path: registry.Tree{Host: "/h", Task: "/t"}}
	v.Intent = shown(v.Intent)
	for i := range v.Holders {
		c := &v.Holders[i].Claim
		c.Volume, c.Name, c.CreateIndex, c.ModifyIndex = v.VolumeKey(), v.VolumeName(), 0, 0
	}
	same(t, trip(t, v, VolumeProto, Volume), v)
	a := registrytest.FilledWhole[registry.AllocStatus](t)
	a.Sealed, a.Node, a.Release, a.Keep, a.Lost = nil, "", registry.Call{}, false, false
	for i := range a.Volumes {
		use := &a.Volumes[i]
		use.Intent, use.Expansion.Usage, use.Expansion.NodeDone = shown(use.Intent), registry.Usage{}, 0
	}
	same(t, trip(t, a, AllocProto, Alloc), a)
}

func shown(i *registry.Intent) *registry.Intent {
	return &registry.Intent{
		RPC: i.RPC, Attempt: i.Attempt, Outcome: i.Outcome, Code: i.Code, Detail: i.Detail, Since: i.Since,
		Next: i.Next, Alloc: i.Alloc, Request: i.Request,
	}
}

// An operation that a host does not know refuses the whole plan, by its name.
func TestUnknownPlanOperation(t *testing.T) {
	m := PlanProto(hooks.Plan{Env: []hooks.Env{{Name: "A", Value: "b"}}})
	m.Operations = append(m.Operations, &pb.PlanOperation{Name: "seccomp"})
	p, err := Plan(m)
	if !errors.Is(err, registry.ErrUnsupported) || !strings.Contains(err.Error(), `"seccomp"`) ||
		!p.Equal(hooks.Plan{}) {
		t.Errorf("Plan = %+v, %v", p, err)
	}
}

func TestErrorsCross(t *testing.T) {
	for _, kind := range append(registry.Kinds, context.Canceled, context.DeadlineExceeded) {
		err := Error(Status(fmt.Errorf("outer: %w", registry.Errorf(kind, "text of it"))))
		if !errors.Is(err, kind) {
			t.Errorf("%v came back as %v", kind, err)
		}
		for _, other := range registry.Kinds {
			if other != kind && errors.Is(err, other) {
				t.Errorf("%v came back as %v too", kind, other)
			}
		}
		if err.Error() != "outer: text of it" {
			t.Errorf("its text came back as %q", err)
		}
	}
	call := registry.CallError{
		RPC: "NodeStageVolume", Instance: registrytest.FilledWhole[registry.InstanceKey](t), Code: "ABORTED",
		Outcome: registry.OutcomeUncertain, Detail: "busy",
		Kind: registry.ErrUncertain,
	}
	err := Error(Status(fmt.Errorf("stage: %w", &call)))
	back, ok := errors.AsType[*registry.CallError](err)
	if !ok || *back != call || !errors.Is(err, registry.ErrUncertain) || err.Error() != "stage: "+call.Error() {
		t.Errorf("call error came back as %#v (%v)", back, err)
	}
}

// An error of the transport has no detail and gets its kind by its code.
func TestErrorsOfTheTransport(t *testing.T) {
	if err := Error(status.Error(codes.Unavailable, "gone")); !errors.Is(err, registry.ErrUnavailable) {
		t.Error(err)
	}
	if err := Error(status.Error(codes.Unknown, "?")); !errors.Is(err, registry.ErrInternal) {
		t.Error(err)
	}
	if Error(nil) != nil || Status(nil) != nil {
		t.Error("nil does not stay nil")
	}
}

func FuzzErrors(f *testing.F) {
	f.Add(uint8(0), "text", "NodeStageVolume", "detail")
	f.Add(uint8(5), "\xff\x00", "", strings.Repeat("x", 20000))
	f.Fuzz(func(t *testing.T, at uint8, text, rpc, detail string) {
		kind := registry.Kinds[int(at)%len(registry.Kinds)]
		if err := Error(Status(registry.Errorf(kind, "%s", text))); !errors.Is(err, kind) {
			t.Errorf("%v with %q came back as %v", kind, text, err)
		}
		err := Error(Status(&registry.CallError{RPC: registry.RPC(rpc), Detail: detail, Kind: kind,
			Outcome: registry.OutcomeFailed}))
		if !errors.Is(err, kind) {
			t.Errorf("call error of %v with %q came back as %v", kind, detail, err)
		}
	})
}

func FuzzPlan(f *testing.F) {
	encoded, _ := proto.Marshal(PlanProto(registrytest.FilledWhole[hooks.Plan](f)))
	f.Add(encoded)
	f.Fuzz(func(t *testing.T, b []byte) {
		var m pb.Plan
		if proto.Unmarshal(b, &m) != nil {
			return
		}
		p, err := Plan(&m)
		if err != nil {
			return
		}
		again, err := Plan(PlanProto(p))
		if err != nil || !again.Equal(p) {
			t.Errorf("%+v came back as %+v, %v", p, again, err)
		}
	})
}
