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
)

// fill sets every field of v to a value that is not zero. No two fields get the same value.
func fill(v reflect.Value, n *int) {
	*n++
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), n)
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			v.Set(reflect.ValueOf(time.Unix(int64(*n), 5).UTC()))
			return
		}
		for i := range v.NumField() {
			fill(v.Field(i), n)
		}
	case reflect.String:
		v.SetString(fmt.Sprintf("s%d", *n))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Int, reflect.Int64, reflect.Int32:
		v.SetInt(int64(*n))
	case reflect.Uint64, reflect.Uint32:
		v.SetUint(uint64(*n))
	case reflect.Uint8:
		v.SetUint(uint64(*n % 200))
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 2, 2))
		fill(v.Index(0), n)
		fill(v.Index(1), n)
	case reflect.Map:
		v.Set(reflect.MakeMap(v.Type()))
		key, value := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
		fill(key, n)
		fill(value, n)
		v.SetMapIndex(key, value)
	default:
		panic(v.Kind().String())
	}
}

func full[T any]() T {
	var t T
	n := 0
	fill(reflect.ValueOf(&t).Elem(), &n)
	return t
}

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

// Every field of every type crosses the wire, except those that are reset here.
func TestEveryFieldCrosses(t *testing.T) {
	t.Run("Plan", func(t *testing.T) {
		p := full[hooks.Plan]()
		same(t, trip(t, p, PlanProto, func(m *pb.Plan) hooks.Plan {
			out, err := Plan(m)
			if err != nil {
				t.Error(err)
			}
			return out
		}), p)
	})
	t.Run("Job", func(t *testing.T) {
		j := full[hooks.Job]()
		same(t, *trip(t, &j, JobProto, Job), j)
	})
	t.Run("AllocTask", func(t *testing.T) {
		a := full[hooks.AllocTask]()
		same(t, trip(t, a, AllocTaskProto, func(m *pb.AllocTask) hooks.AllocTask {
			out, _ := AllocTask(m)
			return out
		}), a)
	})
	t.Run("AllocGroup", func(t *testing.T) {
		a := full[hooks.AllocGroup]()
		same(t, trip(t, a, AllocGroupProto, func(m *pb.AllocGroup) hooks.AllocGroup {
			out, _ := AllocGroup(m)
			return out
		}), a)
	})
	t.Run("Instance", func(t *testing.T) {
		i := full[registry.Instance]()
		same(t, trip(t, i, InstanceProto, Instance), i)
	})
	t.Run("Infeasible", func(t *testing.T) {
		i := full[registry.Infeasible]()
		same(t, trip(t, i, InfeasibleProto, Infeasible), i)
	})
	t.Run("Force", func(t *testing.T) {
		f := full[registry.Force]()
		same(t, trip(t, f, ForceProto, Force), f)
		step := full[registry.ReleaseStep]()
		same(t, trip(t, step, ReleaseStepProto, ReleaseStep), step)
	})
	t.Run("Event", func(t *testing.T) {
		e := full[registry.Event]()
		e.Kind = registry.EventResync // with any other kind the snapshot does not travel
		same(t, trip(t, e, EventProto, Event), e)
	})
	t.Run("PluginTask", func(t *testing.T) {
		p := full[registry.PluginTask]()
		same(t, trip(t, p, PluginTaskProto, PluginTask), p)
	})
	t.Run("PluginFingerprint", func(t *testing.T) {
		f := full[registry.PluginFingerprint]()
		f.Gone = false // with it there is no active one
		same(t, trip(t, f, PluginFingerprintProto, PluginFingerprint), f)
	})
	t.Run("Restart", func(t *testing.T) {
		r := full[registry.PendingRestart]()
		same(t, trip(t, r, RestartProto, Restart), r)
	})
	t.Run("BootTime", func(t *testing.T) {
		b := full[registry.BootTime]()
		same(t, trip(t, b, BootTimeProto, BootTime), b)
	})
	t.Run("Diagnostics", func(t *testing.T) {
		ds := full[registry.Diagnostics]()
		same(t, Diagnostics(DiagnosticsProto(ds)), ds)
	})
	t.Run("VolumeSpec", func(t *testing.T) {
		s := full[registry.VolumeSpec]()
		same(t, trip(t, s, VolumeSpecProto, VolumeSpec), s)
	})
	t.Run("Claim", func(t *testing.T) {
		c := full[registry.Claim]()
		same(t, trip(t, c, ClaimProto, Claim), c)
	})
	t.Run("VolumeUsage", func(t *testing.T) {
		u := full[registry.VolumeUsage]()
		same(t, trip(t, u, VolumeUsageProto, VolumeUsage), u)
	})
	t.Run("Diagnosis", func(t *testing.T) {
		d := full[registry.Diagnosis]()
		same(t, trip(t, d, DiagnosisProto, Diagnosis), d)
	})
}

// The fields of a volume's and an alloc's status that a host uses cross the wire.
func TestStatusCrosses(t *testing.T) {
	v := full[registry.VolumeStatus]()
	v.Unattached, v.Expansion.Usage, v.Modification.Earlier = false, registry.Usage{}, nil // for the shim to remember
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
	a := full[registry.AllocStatus]()
	a.Sealed, a.Node, a.Release, a.Keep, a.Lost = nil, "", registry.Call{}, false, false
	for i := range a.Volumes {
		a.Volumes[i].Intent, a.Volumes[i].Expansion.Usage = shown(a.Volumes[i].Intent), registry.Usage{}
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
		RPC: "NodeStageVolume", Instance: full[registry.InstanceKey](), Code: "ABORTED",
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
	encoded, _ := proto.Marshal(PlanProto(full[hooks.Plan]()))
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
