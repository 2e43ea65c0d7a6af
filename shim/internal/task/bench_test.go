package task

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/hooks"
	"holdfast/registry"
	"holdfast/registry/registrytest"
)

// BenchmarkIdle is one heartbeat of a thousand healthy instances, without the wire.
func BenchmarkIdle(b *testing.B) {
	log := registrytest.NewLog(time.Now)
	sup := New(log, &fleet{}, Clock{
		Now: time.Now, Boot: func() registry.BootTime { return registry.BootTime{Boot: "boot"} },
	}, func() float64 { return 0.5 }, hclog.NewNullLogger())
	sup.missing = (&sockets{}).missing
	ctx := context.Background()
	var beats []*heartbeat
	for i := range 1000 {
		task := registry.Task{TaskKey: registry.TaskKey{Alloc: registry.AllocID(fmt.Sprint("alloc-", i)),
			Task: "plugin"}, Attempt: 1}
		s := spec(hooks.TypeNode)
		s.ID = registry.PluginID(fmt.Sprint("plugin-", i))
		w := &supervision{Supervisor: sup, task: task, spec: s, at: preparation(task), plugin: quiet{},
			roles: s.Type.Roles()}
		if _, err := log.Commit(ctx, func(registry.View) (registry.Change, error) {
			return registry.Change{Put: []registry.Record{task}}, nil
		}); err != nil {
			b.Fatal(err)
		}
		if err := w.register(ctx, fingerprints{registry.RoleNode: {Provider: "disk.example.org"}}); err != nil {
			b.Fatal(err)
		}
		beats = append(beats, &heartbeat{supervision: w})
	}
	b.ReportAllocs()
	for b.Loop() {
		for _, h := range beats {
			if err := h.beat(ctx); err != nil {
				b.Fatal(err)
			}
		}
	}
}

// quiet is a plugin that is always healthy.
type quiet struct{}

func (quiet) Probe(context.Context) (bool, error) { return true, nil }
func (quiet) Describe(context.Context, []registry.Role) (map[registry.Role]registry.Fingerprint, error) {
	return nil, nil
}
func (quiet) Outdated() bool             { return false }
func (quiet) Lost(context.Context) error { return nil }
