package task

import (
	"context"
	"maps"
	"slices"
	"strings"

	"holdfast/hooks"
	"holdfast/internal/mount"
	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// Mounts finds the mounts that processes of plugin tasks serve.
type Mounts interface {
	// Mounts lists the mounts strictly below root, also hidden ones.
	Mounts(root string) (mount.Mounts, error)
	// Serves reports whether the task that listens at socket has a process that serves mounts, or may serve some.
	Serves(socket string) bool
}

// Uses finds the calls that run at plugin tasks, and the mounts that these tasks serve.
type Uses struct {
	State   registry.State
	Mounts  Mounts
	Running func(registry.TaskKey) int // how many calls run at a task now
}

// Of returns the tasks with their health, their running calls, and the volumes whose mounts they serve.
func (u Uses) Of(ctx context.Context, tasks []registry.PluginTask) ([]registry.PluginTask, error) {
	if len(tasks) == 0 {
		return nil, nil
	}
	out := slices.Clone(tasks)
	sockets := make([]string, len(out))
	roots := make([]registry.Tree, len(out)) // of the plugins' volumes
	err := u.State.View(ctx, func(v registry.View) error {
		open := v.Intents()
		for i := range out {
			task, _ := v.Task(out[i].TaskKey)
			sockets[i], roots[i] = task.Endpoint.Host, task.Volumes
			out[i].Healthy, out[i].Active = healthOf(v, out[i])
			out[i].Open = callsAt(open, out[i].TaskKey)
			out[i].Calls = u.Running(out[i].TaskKey)
		}
		// The mount table is read after the calls, so it includes the mounts of calls that have ended meanwhile.
		mounts, err := u.servedMounts()
		if err != nil {
			return err
		}
		if len(mounts) == 0 {
			return nil
		}
		stagings, refs := v.Stagings(), v.AllRefs()
		for i := range out {
			out[i].Volumes = servedBy(v, out[i], roots[i], stagings, refs, mounts)
		}
		return nil
	})
	for i := range out {
		if len(out[i].Volumes) > 0 && !u.Mounts.Serves(sockets[i]) {
			out[i].Volumes = nil
		}
	}
	return out, err
}

// servedMounts returns the mount points on the host that processes serve, also mounts below another mount. It reads the
// whole table, because clients of CSI endpoints choose paths outside of the mount root.
func (u Uses) servedMounts() (map[string]bool, error) {
	table, err := u.Mounts.Mounts("/")
	served := map[string]bool{}
	for _, m := range table {
		if m.IsServed() {
			served[m.Point] = true
		}
	}
	return served, err
}

// healthOf reports whether the task runs with healthy instances in all its roles, and whether one of them is the active
// instance of its role.
func healthOf(v registry.View, task registry.PluginTask) (healthy, active bool) {
	healthy = task.Phase == registry.TaskRunning
	for _, role := range hooks.PluginType(task.Type).Roles() {
		k := registry.InstanceKey{Role: role, Plugin: task.Plugin, Alloc: task.Alloc, Task: task.Task}
		in, found := v.Instance(k)
		healthy = healthy && found && in.Health.State == registry.Healthy
		first, _ := v.ActiveInstance(role, task.Plugin)
		active = active || first.InstanceKey == k
	}
	return healthy, active
}

// callsAt returns the open calls that probably run at the task.
func callsAt(open []registry.Intent, k registry.TaskKey) (calls []registry.OpenCall) {
	for _, i := range open {
		if i.At == k && intent.MayRun(i) {
			calls = append(calls, registry.OpenCall{RPC: i.RPC, Volume: i.Name, Alloc: i.Alloc, Since: i.Since})
		}
	}
	return calls
}

// servedBy returns the volumes with a served mount that this task has made. A mount whose task is not recorded counts
// for each task of the plugin. So does a mount below the root of the plugin's volumes that has no record, as after a
// loss of the records.
func servedBy(
	v registry.View, task registry.PluginTask, root registry.Tree, stagings []registry.Staging, refs []registry.Ref,
	mounts map[string]bool,
) (volumes []registry.ServedVolume) {
	unknown := maps.Clone(mounts)
	// serves reports whether the task may serve the mount at a recorded path, and removes the mount from unknown.
	serves := func(host string, server registry.TaskKey) bool {
		delete(unknown, host)
		return mounts[host] && (server == registry.TaskKey{} || server == task.TaskKey)
	}
	positions := map[registry.VolumeKey]int{} // in volumes
	add := func(key registry.VolumeKey, name registry.VolumeName) *registry.ServedVolume {
		i, known := positions[key]
		if !known {
			i = len(volumes)
			positions[key] = i
			volumes = append(volumes, registry.ServedVolume{Volume: name, External: key.External})
		}
		return &volumes[i]
	}
	staged := map[registry.VolumeKey]bool{}
	for _, p := range stagings {
		if serves(p.Path.Host, p.Server) && p.Volume.Plugin == task.Plugin {
			add(p.Volume, p.Name)
			staged[p.Volume] = true
		}
	}
	for _, r := range refs {
		published := serves(r.Target.Host, r.Server)
		if r.Volume.Plugin == task.Plugin && (published || staged[r.Volume]) {
			volume, _ := v.VolumeByKey(r.Volume)
			served := add(r.Volume, volume.VolumeName())
			served.Allocs = append(served.Allocs, r.Alloc)
		}
	}
	for _, use := range v.EndpointUsesAt(task.Plugin) {
		if serves(root.OnHost(use.Target), use.Server) {
			add(use.Volume, registry.VolumeName{})
		}
	}
	for _, point := range slices.Sorted(maps.Keys(unknown)) {
		if root.Host != "" && strings.HasPrefix(point, root.Host+"/") {
			volumes = append(volumes, registry.ServedVolume{Mount: point})
		}
	}
	return volumes
}
