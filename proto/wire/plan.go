package wire

import (
	"holdfast/hooks"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
)

// PlanProto writes a plan, each operation with its name.
func PlanProto(p hooks.Plan) *pb.Plan {
	out := &pb.Plan{}
	add := func(name hooks.Operation, op *pb.PlanOperation) {
		op.Name = string(name)
		out.Operations = append(out.Operations, op)
	}
	for _, d := range p.Dirs {
		add(hooks.OpDir, &pb.PlanOperation{Operation: &pb.PlanOperation_Dir{Dir: &pb.Dir{Path: d.Path, Mode: d.Mode}}})
	}
	for _, b := range p.Binds {
		add(hooks.OpBind, &pb.PlanOperation{Operation: &pb.PlanOperation_Bind{Bind: &pb.Bind{
			Source: b.Source, Target: b.Target, ReadOnly: b.ReadOnly, Propagation: string(b.Propagation),
			SelinuxLabel: b.SELinux,
		}}})
	}
	for _, e := range p.Env {
		add(hooks.OpEnv, &pb.PlanOperation{Operation: &pb.PlanOperation_Env{Env: &pb.Env{Name: e.Name, Value: e.Value,
			Default: e.Default}}})
	}
	for _, d := range p.Devices {
		add(hooks.OpDevice, &pb.PlanOperation{Operation: &pb.PlanOperation_Device{Device: &pb.Device{
			Source: d.Source, Target: d.Target, Access: d.Access,
		}}})
	}
	for _, r := range p.Rules {
		add(hooks.OpDeviceRule, &pb.PlanOperation{Operation: &pb.PlanOperation_DeviceRule{DeviceRule: &pb.DeviceRule{
			Type: r.Type, Major: r.Major, Minor: r.Minor, Access: r.Access,
		}}})
	}
	return out
}

// Plan reads a plan. An unknown operation is ErrUnsupported, and the caller must not apply any part of the plan.
func Plan(m *pb.Plan) (hooks.Plan, error) {
	var p hooks.Plan
	for _, op := range m.GetOperations() {
		switch o := op.GetOperation().(type) {
		case *pb.PlanOperation_Dir:
			p.Dirs = append(p.Dirs, hooks.Dir{Path: o.Dir.Path, Mode: o.Dir.Mode})
		case *pb.PlanOperation_Bind:
			p.Binds = append(p.Binds, hooks.Bind{
				Source: o.Bind.Source, Target: o.Bind.Target, ReadOnly: o.Bind.ReadOnly,
				Propagation: hooks.Propagation(o.Bind.Propagation), SELinux: o.Bind.SelinuxLabel,
			})
		case *pb.PlanOperation_Env:
			p.Env = append(p.Env, hooks.Env{Name: o.Env.Name, Value: o.Env.Value, Default: o.Env.Default})
		case *pb.PlanOperation_Device:
			p.Devices = append(p.Devices, hooks.Device{Source: o.Device.Source, Target: o.Device.Target,
				Access: o.Device.Access})
		case *pb.PlanOperation_DeviceRule:
			r := o.DeviceRule
			p.Rules = append(p.Rules, hooks.DeviceRule{Type: r.Type, Major: r.Major, Minor: r.Minor, Access: r.Access})
		default:
			return hooks.Plan{}, registry.Errorf(registry.ErrUnsupported,
				"the plan has the operation %q, which this host does not know; nothing was applied; update the host",
				op.GetName())
		}
	}
	return p, nil
}

// PlansProto and Plans convert plans by task.
func PlansProto(plans map[string]hooks.Plan) map[string]*pb.Plan {
	return mapped(plans, PlanProto)
}

func Plans(ms map[string]*pb.Plan) (map[string]hooks.Plan, error) {
	out := map[string]hooks.Plan{}
	for task, m := range ms {
		p, err := Plan(m)
		if err != nil {
			return nil, err
		}
		out[task] = p
	}
	return out, nil
}

// JobProto and Job convert a parsed job.
func JobProto(j *hooks.Job) *pb.Job {
	if j == nil {
		return nil
	}
	return &pb.Job{
		Id: j.ID, Namespace: string(j.Namespace), Type: j.Type, Groups: each(j.Groups, groupProto), Rest: j.Rest,
		Digest: j.Digest,
	}
}

func groupProto(g hooks.Group) *pb.Group {
	return &pb.Group{
		Name: g.Name, Count: int64(g.Count), Tasks: each(g.Tasks, taskProto), Volumes: g.Volumes, Sealed: g.Sealed,
		Rest: g.Rest,
	}
}

func taskProto(t hooks.Task) *pb.Task {
	return &pb.Task{
		Name: string(t.Name), Driver: t.Driver, Plugin: string(t.Plugin), Sealed: t.Sealed, Env: t.Env,
		Config: t.Config,
		Rest:   t.Rest, PluginType: string(t.PluginType), Roll: string(t.Roll),
		Places: mapped(t.Places, positionProto),
	}
}

func Job(m *pb.Job) *hooks.Job {
	if m == nil {
		return nil
	}
	return &hooks.Job{
		ID: m.Id, Namespace: registry.Namespace(m.Namespace), Type: m.Type, Groups: each(m.Groups, group), Rest: m.Rest,
		Digest: m.Digest,
	}
}

func group(m *pb.Group) hooks.Group {
	return hooks.Group{
		Name: m.GetName(), Count: int(m.GetCount()), Tasks: each(m.GetTasks(), task), Volumes: m.GetVolumes(),
		Sealed: m.GetSealed(), Rest: m.GetRest(),
	}
}

func task(m *pb.Task) hooks.Task {
	return hooks.Task{
		Name: registry.TaskName(m.GetName()), Driver: m.GetDriver(), Plugin: registry.PluginID(m.GetPlugin()),
		Sealed: m.GetSealed(), Env: m.GetEnv(), Config: m.GetConfig(), Rest: m.GetRest(),
		PluginType: hooks.PluginType(m.GetPluginType()), Roll: hooks.RollMode(m.GetRoll()),
		Places: mapped(m.GetPlaces(), position),
	}
}

// AllocTaskProto, AllocTask, AllocGroupProto and AllocGroup convert the tasks and allocs that a host sends to the shim.
// Reading checks the ids.
func AllocTaskProto(t hooks.AllocTask) *pb.AllocTask {
	return &pb.AllocTask{
		Task: &pb.TaskKey{Alloc: string(t.Alloc), Task: string(t.Task)}, Job: t.Job, Digest: t.Digest,
		Attempt: t.Attempt, Isolated: t.Isolated, Sealed: t.Sealed,
	}
}

func AllocTask(m *pb.AllocTask) (hooks.AllocTask, error) {
	key := TaskKey(m.GetTask())
	if _, err := registry.ParseAllocID(string(key.Alloc)); err != nil {
		return hooks.AllocTask{}, err
	}
	if _, err := registry.ParseTaskName(string(key.Task)); err != nil {
		return hooks.AllocTask{}, err
	}
	return hooks.AllocTask{
		Alloc: key.Alloc, Task: key.Task, Job: m.GetJob(), Digest: m.GetDigest(), Attempt: m.GetAttempt(),
		Isolated: m.GetIsolated(), Sealed: m.GetSealed(),
	}, nil
}

func AllocGroupProto(g hooks.AllocGroup) *pb.AllocGroup {
	return &pb.AllocGroup{
		Alloc: string(g.Alloc), Job: g.Job, Group: g.Group, Namespace: string(g.Namespace), Index: g.Index,
		Sealed: g.Sealed, Isolated: g.Isolated,
	}
}

func AllocGroup(m *pb.AllocGroup) (hooks.AllocGroup, error) {
	if _, err := registry.ParseAllocID(m.GetAlloc()); err != nil {
		return hooks.AllocGroup{}, err
	}
	if _, err := registry.ParseNamespace(m.GetNamespace()); err != nil {
		return hooks.AllocGroup{}, err
	}
	return hooks.AllocGroup{
		Alloc: registry.AllocID(m.GetAlloc()), Job: m.GetJob(), Group: m.GetGroup(),
		Namespace: registry.Namespace(m.GetNamespace()),
		Index:     m.GetIndex(), Sealed: m.GetSealed(), Isolated: m.GetIsolated(),
	}, nil
}
