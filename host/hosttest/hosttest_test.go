package hosttest_test

import (
	"context"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"holdfast/host"
	"holdfast/host/hosttest"
	pb "holdfast/proto/holdfast/v1"
	"holdfast/registry"
)

const job = `
job "notes" {
  group "plugin" {
    task "disk" {
      driver = "exec"
      csi_plugin {
        id   = "disk"
        type = "monolith"
      }
    }
  }
  group "users" {
    volume "notes" {
      type            = "csi"
      source          = "notes"
      access_mode     = "single-node-writer"
      attachment_mode = "file-system"
    }
    task "user" {
      driver = "exec"
      volume_mount {
        volume      = "notes"
        destination = "/notes"
      }
    }
  }
}`

const volume = `
id        = "notes"
plugin_id = "disk"
capability {
  access_mode     = "single-node-writer"
  attachment_mode = "file-system"
}`

// orchestrator is the part of an orchestrator that the tests need.
type orchestrator struct {
	*testing.T
	*host.Host
	shim *hosttest.Shim
	job  *host.Job
}

func open(t *testing.T) *orchestrator {
	shim := hosttest.New()
	t.Cleanup(shim.Close)
	h, err := host.Open(t.Context(), shim.Config())
	o := &orchestrator{t, h, shim, nil}
	o.must(err)
	t.Cleanup(func() {
		if err := h.Close(); err != nil {
			t.Error(err)
		}
	})
	o.job, _, err = h.Parse(t.Context(), host.Source{Name: "job.hcl", Text: []byte(job)}, host.ParseOptions{})
	o.must(err)
	return o
}

func (o *orchestrator) must(err error) {
	o.Helper()
	if err != nil {
		o.Fatal(err)
	}
}

// startPlugin starts the task of the plugin, and creates the volume.
func (o *orchestrator) startPlugin() host.TaskKey {
	parsed := o.job.Groups[0].Tasks[0]
	task := host.AllocTask{Alloc: "plugin-1", Task: parsed.Name, Attempt: 1, Isolated: true, Sealed: parsed.Sealed}
	plan, err := o.TaskStarting(o.Context(), task)
	o.must(err)
	if len(plan.Binds) != 3 || len(plan.Env) != 1 {
		o.Errorf("the plan of the plugin: %+v", plan)
	}
	o.must(o.TaskStarted(o.Context(), task.Key(), 1))
	spec, _, err := o.ParseVolume(o.Context(), host.Source{Name: "v.hcl", Text: []byte(volume)}, host.ParseOptions{})
	o.must(err)
	_, err = o.CreateVolume(o.Context(), spec)
	o.must(err)
	return task.Key()
}

func (o *orchestrator) alloc(id host.AllocID) host.AllocGroup {
	g := o.job.Groups[1]
	return host.AllocGroup{Alloc: id, Job: o.job.ID, Group: g.Name, Namespace: o.job.Namespace, Sealed: g.Sealed,
		Isolated: map[string]bool{"user": true}}
}

// source prepares an alloc and returns the host directory of its volume.
func (o *orchestrator) source(id host.AllocID) string {
	o.Helper()
	plans, err := o.PrepareAlloc(o.Context(), o.alloc(id))
	o.must(err)
	if binds := plans["user"].Binds; len(binds) != 1 || binds[0].Target != "/notes" {
		o.Fatalf("the plan of the user: %+v", plans)
	}
	return plans["user"].Binds[0].Source
}

func (o *orchestrator) countPrepares() (n int) {
	for _, c := range o.shim.Calls() {
		if _, is := c.Request.(*pb.PrepareRequest); is {
			n++
		}
	}
	return n
}

// The content of a volume outlives its users. A second user waits for the first one.
func TestVolumeInMemoryIsUsedByOneAllocAfterTheOther(t *testing.T) {
	t.Parallel()
	o := open(t)
	o.startPlugin()
	o.must(os.WriteFile(filepath.Join(o.source("a"), "line"), []byte("written"), 0o600))

	reasons, _, err := o.Feasible(t.Context(), o.alloc("b"))
	if o.must(err); len(reasons) != 1 || reasons[0].Kind != host.InfeasibleClaimed {
		t.Errorf("while a has the volume: %+v", reasons)
	}
	second := make(chan string)
	go func() { second <- o.source("b") }()
	for waits, seen := false, host.Seq(0); !waits && t.Context().Err() == nil; {
		list, at, err := o.Allocs(t.Context(), host.AllocQuery{ID: "b", Blocking: host.Blocking{MinIndex: seen}})
		o.must(err)
		waits, seen = len(list) == 1 && len(list[0].Waiting) == 1, at
	}
	name := host.VolumeName{Namespace: "default", ID: "notes"}
	if err := o.DeleteVolume(t.Context(), name); !errors.Is(err, host.ErrConflict) {
		t.Errorf("delete in use: %v", err)
	}
	o.must(o.ReleaseAlloc(t.Context(), "a"))
	if text, err := os.ReadFile(filepath.Join(<-second, "line")); string(text) != "written" {
		t.Errorf("b reads %q, %v", text, err)
	}
	o.must(o.ReleaseAlloc(t.Context(), "b"))
	o.must(o.DeleteVolume(t.Context(), name))
	if left, _, err := o.Volumes(t.Context(), host.VolumeQuery{}); err != nil || len(left) > 0 {
		t.Errorf("left: %+v, %v", left, err)
	}
}

// A call that waits at a shim is answered by the next shim, after a swap and after a crash.
func TestHostOfAShimInMemoryRepeatsCalls(t *testing.T) {
	t.Parallel()
	for name, replace := range map[string]func(o *orchestrator) error{
		"swap": func(o *orchestrator) error {
			report, err := o.Swap(o.Context(), o.shim.Binary())
			if err == nil && report.Outcome != host.SwapBaking {
				o.Errorf("%+v", report)
			}
			return err
		},
		"crash": func(o *orchestrator) error { o.shim.Crash(); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			o := open(t)
			task := o.startPlugin()
			o.shim.SetHealth(task, host.Unhealthy, "no answer")
			prepared := make(chan string)
			go func() { prepared <- o.source("a") }()
			for o.countPrepares() == 0 && t.Context().Err() == nil {
			}
			o.must(replace(o))
			o.shim.SetHealth(task, host.Healthy, "")
			<-prepared
			if o.countPrepares() < 2 {
				t.Error("the shim that follows has not got the call")
			}
			notes := host.VolumeName{Namespace: "default", ID: "notes"}
			for q, want := range map[host.ClaimQuery]int{
				{}: 1, {Alloc: "a", Volume: notes}: 1, {Alloc: "b"}: 0, {Volume: host.VolumeName{ID: "x"}}: 0,
			} {
				if held, _, err := o.Claims(t.Context(), q); err != nil || len(held) != want {
					t.Errorf("claims of %+v: %+v, %v", q, held, err)
				}
			}
		})
	}
}

// The list of plugins and the events show what a test does with a plugin.
func TestPluginInMemoryIsFollowed(t *testing.T) {
	t.Parallel()
	o := open(t)
	task := o.startPlugin()
	o.shim.SetHealth(task, host.Unhealthy, "disk on fire")
	q := host.PluginQuery{Role: host.RoleNode}
	list, at, err := o.Plugins(t.Context(), q)
	if o.must(err); len(list.Instances) != 1 || list.Instances[0].Health.Detail != "disk on fire" ||
		list.Tasks[0].Healthy || list.Tasks[0].Restart != nil {
		t.Errorf("unhealthy: %+v", list)
	}
	go o.shim.RequestRestart(task, "not healthy in time")
	q.MinIndex = at
	list, _, err = o.Plugins(t.Context(), q)
	o.must(err)
	if asked := list.Tasks[0]; asked.TaskKey != task || asked.Restart == nil || asked.Restart.Attempt != 1 {
		t.Errorf("a restart is requested: %+v", asked)
	}
	o.must(o.TaskExited(t.Context(), task, 1, 1, 0, true))
	var kinds []string
	o.must(o.Watch(t.Context(), host.WatchOptions{Past: true}, func(e host.Event) error {
		kinds = append(kinds, string(e.Kind))
		return nil
	}))
	if all := strings.Join(kinds, ", "); !strings.Contains(all, string(registry.EventVolumeCreated)) ||
		!strings.Contains(all, "unhealthy") {
		t.Errorf("events: %s", all)
	}
}

// A host that is started again tells the shim what it still runs; the rest is released.
func TestShimInMemoryReleasesWhatItsNextHostDoesNotName(t *testing.T) {
	t.Parallel()
	o := open(t)
	o.startPlugin()
	o.source("a")
	o.must(o.Close())
	h, err := host.Open(context.Background(), o.shim.Config())
	o.must(err)
	defer h.Close()
	list, _, err := h.Allocs(t.Context(), host.AllocQuery{})
	if o.must(err); len(list) > 0 {
		t.Errorf("allocs: %+v", list)
	}
	plugins, _, err := h.Plugins(t.Context(), host.PluginQuery{})
	if o.must(err); len(plugins.Instances)+len(plugins.Tasks) > 0 {
		t.Errorf("plugins: %+v", plugins)
	}
	err = h.Watch(t.Context(), host.WatchOptions{Snapshot: true}, func(e host.Event) error { return io.EOF })
	if err != io.EOF {
		t.Error(err)
	}
}

// The fake shim refuses what a real one does: another volume under an existing id, a preference without an instance.
func TestShimInMemoryRefusesWhatARealOneDoes(t *testing.T) {
	t.Parallel()
	o := open(t)
	task := o.startPlugin()
	spec, _, err := o.ParseVolume(t.Context(), host.Source{Name: "v.hcl", Text: []byte(volume)}, host.ParseOptions{})
	o.must(err)
	_, err = o.CreateVolume(t.Context(), spec)
	o.must(err)
	spec.CapacityMin = 1 << 30
	if v, err := o.CreateVolume(t.Context(), spec); !errors.Is(err, host.ErrExists) {
		t.Errorf("another size: %+v, %v", v, err)
	}
	spec.External = "theirs"
	if v, err := o.RegisterVolume(t.Context(), spec); !errors.Is(err, host.ErrExists) {
		t.Errorf("registered: %+v, %v", v, err)
	}

	second := host.AllocTask{Alloc: "plugin-2", Task: task.Task, Attempt: 1, Isolated: true,
		Sealed: o.job.Groups[0].Tasks[0].Sealed}
	_, err = o.TaskStarting(t.Context(), second)
	o.must(err)
	o.must(o.TaskStarted(t.Context(), second.Key(), 1))
	if err := o.PreferTask(t.Context(), task, 2); !errors.Is(err, host.ErrNotFound) {
		t.Errorf("prefer an attempt that is not there: %v", err)
	}
	for _, want := range []host.TaskKey{second.Key(), task} {
		o.must(o.PreferTask(t.Context(), want, 1))
		list, _, err := o.Plugins(t.Context(), host.PluginQuery{})
		o.must(err)
		for _, p := range list.Tasks {
			if p.Active != (p.TaskKey == want) {
				t.Errorf("%s preferred: %s is active: %t", want, p.TaskKey, p.Active)
			}
		}
	}
}
