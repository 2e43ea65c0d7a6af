package task

import (
	"slices"
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
	read  func() // runs after the table was read; may be nil
}

func (m mounts) Serves(string) bool { return m.dev }

func (m mounts) Mounts(string) (mount.Mounts, error) {
	if m.read != nil {
		m.read()
	}
	return m.table, nil
}

// A plugin task may be stopped once it is not active, no call runs there, and none of its processes serves a mount.
func TestWhatAPluginTaskIsNeededFor(t *testing.T) {
	key := registry.VolumeKey{Plugin: "p", External: "x"}
	old, next := registry.TaskKey{Alloc: "old", Task: "t"}, registry.TaskKey{Alloc: "next", Task: "t"}
	target := registry.Tree{Host: "/m/target"}
	ref := func(server registry.TaskKey) registry.Record {
		return registry.Ref{Volume: key, Alloc: "user", Request: "r", Target: target, Publish: registry.MarkDone,
			Server: server}
	}
	at := func(kinds ...string) (m mounts) {
		for _, kind := range kinds {
			m.table = append(m.table, mount.Mount{Point: target.Host, FSType: kind})
		}
		m.dev = true
		return m
	}
	outside := at("fuse.s3")
	outside.dev = false
	intent := registry.Intent{Volume: key, RPC: registry.NodeStageRPC, At: old, Outcome: registry.OutcomePending}
	ended := intent
	ended.Outcome, ended.Code = registry.OutcomeUncertain, "INTERNAL"
	root := registry.Task{TaskKey: old, Volumes: registry.Tree{Host: "/m", Task: "/local/csi"}}
	use := registry.EndpointUse{Volume: key, Call: registry.NodePublishRPC, Target: target.Host}
	nextUse, isolatedUse := use, use
	nextUse.Server, isolatedUse.Target = next, "/local/csi/target" // as the task sees it
	for name, c := range map[string]struct {
		next    registry.HealthState // of the new instance
		record  registry.Record
		mounts  mounts
		running int
		may     bool
	}{
		"replaced":                             {registry.Healthy, ref(old), at("ext4"), 0, true},
		"the new one is sick":                  {registry.Unhealthy, ref(old), at("ext4"), 0, false},
		"a call runs":                          {registry.Healthy, ref(old), at("ext4"), 1, false},
		"an earlier shim's call":               {registry.Healthy, intent, mounts{}, 0, false},
		"a call of unknown outcome":            {registry.Healthy, ended, mounts{}, 0, true},
		"fuse":                                 {registry.Healthy, ref(old), at("fuse"), 0, false},
		"fuseblk":                              {registry.Healthy, ref(old), at("fuseblk"), 0, false},
		"fuse.s3":                              {registry.Healthy, ref(old), at("fuse.s3"), 0, false},
		"fuse below another mount":             {registry.Healthy, ref(old), at("fuse.s3", "tmpfs"), 0, false},
		"fuse of a CSI endpoint":               {registry.Healthy, use, at("fuse.s3"), 0, false},
		"a CSI endpoint's fuse of the new one": {registry.Healthy, nextUse, at("fuse.s3"), 0, true},
		"a CSI endpoint's fuse in a container": {registry.Healthy, isolatedUse, at("fuse.s3"), 0, false},
		"fuse of an unknown process":           {registry.Healthy, ref(registry.TaskKey{}), at("fuse.s3"), 0, false},
		"fuse of the new one":                  {registry.Healthy, ref(next), at("fuse.s3"), 0, true},
		"served outside of the task":           {registry.Healthy, ref(old), outside, 0, true},
		"unmounted":                            {registry.Healthy, ref(old), at(), 0, true},
		"fuse without a record":                {registry.Healthy, root, at("fuse"), 0, false},
		"another mount without a record":       {registry.Healthy, root, at("ext4"), 0, true},
	} {
		t.Run(name, func(t *testing.T) {
			log := registrytest.NewLog(time.Now)
			for _, r := range []registry.Record{ // the last instance is the newest
				instanceOf(old, registry.Healthy), instanceOf(next, c.next), root, c.record,
			} {
				registrytest.Put(t, log, r)
			}
			uses := Uses{State: log, Mounts: c.mounts, Running: func(registry.TaskKey) int { return c.running }}
			found, err := uses.Of(t.Context(), []registry.PluginTask{{TaskKey: old, Plugin: "p", Type: "node",
				Phase: registry.TaskRunning}})
			if err != nil || len(found) != 1 || found[0].MayStop() != c.may || !found[0].Healthy {
				t.Errorf("%+v, %v; it may be stopped: want %v", found, err, c.may)
			}
			if _, used := c.record.(registry.Ref); !used || len(found) != 1 {
				return
			}
			for _, v := range found[0].Volumes {
				if !slices.Equal(v.Allocs, []registry.AllocID{"user"}) {
					t.Errorf("the volume is used by %v", v.Allocs)
				}
			}
		})
	}
}

// Two processes of a plugin serve a volume, for one alloc each, as while a plugin without staging is replaced.
func TestTaskIsNeededForItsOwnAllocs(t *testing.T) {
	old, next := registry.TaskKey{Alloc: "old", Task: "t"}, registry.TaskKey{Alloc: "next", Task: "t"}
	log := registrytest.NewLog(time.Now)
	m := mounts{dev: true}
	for alloc, server := range map[registry.AllocID]registry.TaskKey{"a": old, "b": next} {
		target := registry.Tree{Host: "/m/" + string(alloc)}
		m.table = append(m.table, mount.Mount{Point: target.Host, FSType: "fuse"})
		registrytest.Put(t, log, registry.Ref{Volume: registry.VolumeKey{Plugin: "p", External: "x"}, Alloc: alloc,
			Request: "r", Target: target, Publish: registry.MarkDone, Server: server})
	}
	uses := Uses{State: log, Mounts: m, Running: func(registry.TaskKey) int { return 0 }}
	found, err := uses.Of(t.Context(), []registry.PluginTask{{TaskKey: old, Plugin: "p"}, {TaskKey: next, Plugin: "p"}})
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []registry.AllocID{"a", "b"} {
		if v := found[i].Volumes; len(v) != 1 || !slices.Equal(v[0].Allocs, []registry.AllocID{want}) {
			t.Errorf("%s serves %+v, not the volume of alloc %s alone", found[i].TaskKey, v, want)
		}
	}
}

// A call that mounts and ends while the uses of its task are looked up is found, either as a call or by its mount.
func TestCallThatEndsMeanwhileIsSeen(t *testing.T) {
	log := registrytest.NewLog(time.Now)
	k := registry.TaskKey{Alloc: "old", Task: "t"}
	open := registry.Intent{Volume: registry.VolumeKey{Plugin: "p", External: "x"}, RPC: registry.NodePublishRPC, At: k,
		Outcome: registry.OutcomePending}
	registrytest.Put(t, log, open)
	ends := func() {
		_, err := registrytest.Write(t.Context(), log, registry.Change{
			Delete: []registry.Key{open.Key()}, Put: []registry.Record{registry.Ref{
				Volume: open.Volume, Alloc: "user", Request: "r", Target: registry.Tree{Host: "/m/target"},
				Publish: registry.MarkDone, Server: k}},
		})
		if err != nil {
			t.Error(err)
		}
	}
	uses := Uses{State: log, Mounts: mounts{dev: true, read: ends}, Running: func(registry.TaskKey) int { return 0 }}
	found, err := uses.Of(t.Context(), []registry.PluginTask{{TaskKey: k, Plugin: "p", Type: "node"}})
	if err != nil || len(found) != 1 || found[0].MayStop() {
		t.Errorf("%+v, %v; want the call", found, err)
	}
}

func instanceOf(k registry.TaskKey, state registry.HealthState) registry.Record {
	return registry.Instance{InstanceKey: registry.InstanceKey{Role: registry.RoleNode, Plugin: "p", Alloc: k.Alloc,
		Task: k.Task}, Health: registry.Health{State: state}}
}
