package hosttest

import (
	"context"
	"os"
	"time"

	"google.golang.org/grpc"

	"holdfast/config"
	"holdfast/hooks"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/proto/wire"
	"holdfast/registry"
)

type tasks struct {
	pb.UnimplementedTasksServer
	p *process
}

func (p *process) layout() hooks.Layout {
	p.mu.Lock()
	defer p.mu.Unlock()
	return hooks.Layout{Run: p.hello.GetRunDir(), State: p.hello.GetStateDir()}
}

// preparation returns what a task needs before it starts, and its spec.
func (p *process) preparation(t hooks.AllocTask) (hooks.Preparation, hooks.TaskSpec, error) {
	spec, err := config.OpenTask(t.Sealed)
	if err != nil {
		return hooks.Preparation{}, spec, err
	}
	prepared, err := hooks.Starting(p.layout(), t, spec)
	return prepared, spec, err
}

func (t *tasks) Starting(ctx context.Context, req *pb.TaskStartingRequest) (*pb.TaskStartingReply, error) {
	task, err := wire.AllocTask(req.GetTask())
	if err != nil {
		return nil, err
	}
	prepared, _, err := t.p.preparation(task)
	if err != nil {
		return nil, err
	}
	for _, dir := range prepared.Dirs {
		if err := os.MkdirAll(dir.Path, os.FileMode(dir.Mode)); err != nil {
			return nil, err
		}
	}
	_, err = t.p.log.Commit(ctx, func(registry.View) (registry.Change, error) {
		return registry.Change{Put: []registry.Record{registry.Task{
			TaskKey: task.Key(), Job: task.Job, Attempt: task.Attempt, Phase: registry.TaskStarting,
			Isolated: task.Isolated,
			Sealed:   task.Sealed, Digest: task.Digest,
		}}}, nil
	})
	return &pb.TaskStartingReply{Answer: t.p.answer(), Plan: wire.PlanProto(prepared.Plan)}, err
}

func (t *tasks) Started(ctx context.Context, req *pb.TaskStartedRequest) (*pb.TaskStartedReply, error) {
	return &pb.TaskStartedReply{Answer: t.p.answer()}, t.register(ctx, wire.TaskKey(req.GetTask()), req.GetAttempt())
}

// register registers healthy instances of the plugin that a started task runs.
func (t *tasks) register(ctx context.Context, key registry.TaskKey, attempt uint64) error {
	return t.change(ctx, key, attempt, func(v registry.View, task *registry.Task) (registry.Change, error) {
		prepared, spec, err := t.p.preparation(hooks.AllocTask{
			Alloc: key.Alloc, Task: key.Task, Attempt: attempt, Isolated: task.Isolated, Sealed: task.Sealed,
		})
		if err != nil {
			return registry.Change{}, err
		}
		task.Phase = registry.TaskRunning
		var instances []registry.Instance
		for _, role := range spec.Plugin.Type.Roles() {
			instances = append(instances, registry.Instance{
				InstanceKey: registry.InstanceKey{Role: role, Plugin: spec.Plugin.ID, Alloc: key.Alloc, Task: key.Task},
				Attempt:     attempt, Endpoint: prepared.Endpoint, Volumes: prepared.Volumes,
				Fingerprint: registry.Fingerprint{
					Provider: string(spec.Plugin.ID) + ".hosttest", Version: "1.0.0", NodeID: "node-1",
				},
				Health: registry.Health{State: registry.Healthy, Cause: registry.CauseProbed, Since: time.Now()},
			})
		}
		return registry.PutChange(v, time.Now(), instances...), nil
	})
}

// change commits a change of a task at an attempt.
func (t *tasks) change(ctx context.Context, key registry.TaskKey, attempt uint64,
	f func(registry.View, *registry.Task) (registry.Change, error),
) error {
	_, err := t.p.log.Commit(ctx, func(v registry.View) (registry.Change, error) {
		task, known := v.Task(key)
		if !known || task.Attempt != attempt {
			return registry.Change{}, registry.Errorf(registry.ErrNotFound, "attempt %d of task %s is not known",
				attempt, key)
		}
		c, err := f(v, &task)
		return c.And(registry.Change{Put: []registry.Record{task}}), err
	})
	return err
}

func (t *tasks) Stopping(ctx context.Context, req *pb.TaskStoppingRequest) (*pb.TaskStoppingReply, error) {
	err := t.change(ctx, wire.TaskKey(req.GetTask()), req.GetAttempt(),
		func(_ registry.View, task *registry.Task) (registry.Change, error) {
			task.Phase = registry.TaskStopping
			return registry.Change{}, nil
		})
	return &pb.TaskStoppingReply{Answer: t.p.answer()}, err
}

func (t *tasks) Prefer(ctx context.Context, req *pb.PreferTaskRequest) (*pb.PreferTaskReply, error) {
	key := wire.TaskKey(req.GetTask())
	_, err := t.p.log.Commit(ctx, func(v registry.View) (registry.Change, error) {
		var keys []registry.InstanceKey
		for _, i := range v.AllInstances() {
			if i.TaskKey() == key && i.Attempt == req.GetAttempt() {
				keys = append(keys, i.InstanceKey)
			}
		}
		if len(keys) == 0 {
			return registry.Change{}, registry.Errorf(registry.ErrNotFound, "attempt %d of %s has no instances",
				req.GetAttempt(), key)
		}
		return registry.PreferChange(v, time.Now(), keys...), nil
	})
	return &pb.PreferTaskReply{Answer: t.p.answer()}, err
}

func (t *tasks) Exited(ctx context.Context, req *pb.TaskExitedRequest) (*pb.TaskExitedReply, error) {
	key := wire.TaskKey(req.GetTask())
	return &pb.TaskExitedReply{Answer: t.p.answer()}, t.p.removeTask(ctx, key, req.GetFinal())
}

// removeTask removes the instances of a task that has ended, and its record if no other attempt follows.
func (p *process) removeTask(ctx context.Context, key registry.TaskKey, final bool) error {
	_, err := p.log.Commit(ctx, func(v registry.View) (registry.Change, error) {
		c := registry.RemoveTaskChange(v, time.Now(), key)
		task, known := v.Task(key)
		switch {
		case known && final:
			c.Delete = append(c.Delete, task.Key())
		case known:
			task.Phase = registry.TaskExited
			c.Put = append(c.Put, task)
		}
		return c, nil
	})
	return err
}

type plugins struct {
	pb.UnimplementedPluginsServer
	p *process
}

// selects reports whether a field of a query selects a value. An empty field selects all.
func selects[T ~string](field string, value T) bool { return field == "" || field == string(value) }

func (l *plugins) List(_ context.Context, req *pb.ListPluginsRequest) (*pb.ListPluginsReply, error) {
	reply := &pb.ListPluginsReply{Answer: l.p.answer()}
	for _, i := range l.p.table.All().Instances {
		if selects(req.GetRole(), i.Role) && selects(req.GetPlugin(), i.Plugin) {
			m := wire.InstanceProto(i)
			active, _ := l.p.table.Find(i.Role, i.Plugin)
			m.Active = active.InstanceKey == i.InstanceKey
			reply.Instances = append(reply.Instances, m)
		}
	}
	for _, t := range l.p.view().Tasks() {
		if spec, err := config.OpenTask(t.Sealed); err == nil {
			reply.Tasks = append(reply.Tasks, wire.PluginTaskProto(l.task(t, spec.Plugin)))
		}
	}
	return reply, nil
}

func (l *plugins) task(t registry.Task, spec hooks.PluginSpec) registry.PluginTask {
	task := registry.PluginTask{
		TaskKey: t.TaskKey, Plugin: spec.ID, Type: string(spec.Type), Job: t.Job, Phase: t.Phase, Attempt: t.Attempt,
		Restart: t.Restart, Problem: t.Problem, Healthy: true,
	}
	for _, role := range spec.Type.Roles() {
		i, known := l.p.table.Get(registry.InstanceKey{Role: role, Plugin: spec.ID, Alloc: t.Alloc, Task: t.Task})
		task.Healthy = task.Healthy && known && i.Health.State == registry.Healthy
		active, _ := l.p.table.Find(role, spec.ID)
		task.Active = task.Active || known && active.InstanceKey == i.InstanceKey
	}
	return task
}

type events struct {
	pb.UnimplementedEventsServer
	p *process
}

func (e *events) Watch(req *pb.WatchRequest, s grpc.ServerStreamingServer[pb.WatchReply]) error {
	filter := registry.Filter{
		Role: registry.Role(req.GetRole()), Plugin: registry.PluginID(req.GetPlugin()), Bookmarks: true,
	}
	for _, k := range req.GetKinds() {
		filter.Kinds = append(filter.Kinds, registry.EventKind(k))
	}
	after := registry.Seq(req.GetAfter())
	if req.GetSnapshot() {
		after = registry.FromSnapshot
	}
	ctx, cancel := e.p.whileActive(s.Context())
	defer cancel()
	err := e.p.feed.Watch(ctx, after, filter, func(ev registry.Event) error {
		reply := &pb.WatchReply{Answer: &pb.Answer{Index: uint64(ev.Seq), Generation: e.p.generation}}
		if ev.Kind != registry.EventBookmark {
			reply.Event = wire.EventProto(ev)
		}
		return s.Send(reply)
	})
	if ctx.Err() != nil && s.Context().Err() == nil {
		return errNotActive
	}
	return err
}
