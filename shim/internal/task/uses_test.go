package task

import (
	"testing"
	"time"

	"holdfast/internal/mount"
	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// mounts is a mount table; dev reports whether tasks have /dev/fuse open.
type mounts struct {
	table mount.Mounts
	dev   bool
}

func (m mounts) Mounts(string) (mount.Mounts, error) { return m.table, nil }
func (m mounts) ServesFUSE(string) bool              { return m.dev }

// A plugin task may be stopped once it is not active, no call runs there, and no process of it serves a mount.
func TestWhatAPluginTaskIsNeededFor(t *testing.T) {
	key := registry.VolumeKey{Plugin: "p", External: "x"}
	old, next := registry.TaskKey{Alloc: "old", Task: "t"}, registry.TaskKey{Alloc: "next", Task: "t"}
	target := registry.Tree{Host: "/m/target"}
	ref := func(server registry.TaskKey) registry.Record {
		return registry.Ref{Volume: key, Alloc: "user", Request: "r", Target: target, Publish: registry.MarkDone,
			Server: server}
	}
	at := func(kind string) mount.Mounts { return mount.Mounts{{Point: target.Host, FSType: kind}} }
	intent := registry.Intent{Volume: key, RPC: registry.NodeStageRPC, At: old, Outcome: registry.OutcomePending}
	ended := intent
	ended.Outcome, ended.Code = registry.OutcomeUncertain, "INTERNAL"
	for name, c := range map[string]struct {
		next    registry.HealthState // of the new instance
		record  registry.Record
		mounts  mounts
		running int
		may     bool
	}{
		"replaced":                   {registry.Healthy, ref(old), mounts{at("ext4"), true}, 0, true},
		"the new one is sick":        {registry.Unhealthy, ref(old), mounts{at("ext4"), true}, 0, false},
		"a call runs":                {registry.Healthy, ref(old), mounts{at("ext4"), true}, 1, false},
		"an earlier shim's call":     {registry.Healthy, intent, mounts{}, 0, false},
		"a call of unknown outcome":  {registry.Healthy, ended, mounts{}, 0, true},
		"fuse":                       {registry.Healthy, ref(old), mounts{at("fuse"), true}, 0, false},
		"fuseblk":                    {registry.Healthy, ref(old), mounts{at("fuseblk"), true}, 0, false},
		"fuse.s3":                    {registry.Healthy, ref(old), mounts{at("fuse.s3"), true}, 0, false},
		"fuse of an unknown process": {registry.Healthy, ref(registry.TaskKey{}), mounts{at("fuse.s3"), true}, 0, false},
		"fuse of the new one":        {registry.Healthy, ref(next), mounts{at("fuse.s3"), true}, 0, true},
		"served outside of the task": {registry.Healthy, ref(old), mounts{at("fuse.s3"), false}, 0, true},
		"unmounted":                  {registry.Healthy, ref(old), mounts{nil, true}, 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			log := registrytest.NewLog(time.Now)
			for _, r := range []registry.Record{instanceOf(old, registry.Healthy), instanceOf(next, c.next), c.record} {
				if _, err := log.Commit(t.Context(), func(registry.View) (registry.Change, error) {
					return registry.Change{Put: []registry.Record{r}}, nil
				}); err != nil {
					t.Fatal(err)
				}
			}
			uses := Uses{State: log, Mounts: c.mounts, Root: "/m", Running: func(registry.TaskKey) int { return c.running }}
			found, err := uses.Of(t.Context(), []registry.PluginTask{{TaskKey: old, Plugin: "p", Type: "node",
				Phase: registry.TaskRunning}})
			if err != nil || len(found) != 1 || found[0].MayStop() != c.may || !found[0].Healthy {
				t.Errorf("%+v, %v; it may be stopped: want %v", found, err, c.may)
			}
			if len(found) == 1 && len(found[0].Volumes) > 0 && found[0].Volumes[0].Allocs[0] != "user" {
				t.Errorf("its volumes are %+v", found[0].Volumes)
			}
		})
	}
}

func instanceOf(k registry.TaskKey, state registry.HealthState) registry.Record {
	return registry.Instance{InstanceKey: registry.InstanceKey{Role: registry.RoleNode, Plugin: "p", Alloc: k.Alloc,
		Task: k.Task}, Health: registry.Health{State: state}}
}
