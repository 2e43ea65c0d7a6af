package control

import (
	"context"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/registry"
)

var (
	disk = host.VolumeName{Namespace: "default", ID: "disk"}
	noon = time.Date(2026, 5, 4, 12, 0, 0, 0, time.UTC)
)

// held is a shim where somebody else holds the volume that every job wants, and cannot give it back.
type held struct {
	*shim
	mu   sync.Mutex
	mine host.AllocID
}

func (s *held) Parse(_ context.Context, src host.Source, _ host.ParseOptions) (*host.Job, host.Diagnostics, error) {
	t := hooks.Task{Name: "main", Driver: "raw_exec", Config: []byte(`{"command":"/bin/true"}`)}
	return &host.Job{ID: src.Name, Namespace: "default", Type: "service", Groups: []hooks.Group{
		{Name: "g", Count: 1, Volumes: []string{"data"}, Sealed: hooks.Sealed("s"), Tasks: []hooks.Task{t}},
	}}, nil, nil
}

func (s *held) PrepareAlloc(_ context.Context, g host.AllocGroup) (map[string]host.Plan, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.mine = g.Alloc
	return nil, registry.Errorf(registry.ErrConflict, "volume disk is held by alloc %s", g.Alloc)
}

func (s *held) ReleaseAlloc(context.Context, host.AllocID) error { return nil }

func (s *held) waits() (mine, theirs registry.Wait) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return registry.Wait{Alloc: s.mine, Request: "data", Volume: disk, Step: registry.StepClaim,
			Detail: "volume disk is held by alloc other-alloc", Since: noon},
		registry.Wait{Alloc: "other-alloc", Volume: disk, Step: registry.StepUnpublish, For: "plugin loopfs",
			RPC: registry.NodeUnpublishRPC, Code: "INTERNAL", Detail: "busy"}
}

func (s *held) Allocs(context.Context, host.AllocID) ([]host.AllocStatus, host.Seq, error) {
	mine, _ := s.waits()
	use := registry.Use{Request: "data", Name: disk, Trouble: "its server is gone", Troubled: noon}
	return []host.AllocStatus{{Alloc: registry.Alloc{ID: mine.Alloc, Waiting: []registry.Wait{mine}},
		Uses: []registry.Use{use}}}, 1, nil
}

func (s *held) Volumes(context.Context, host.VolumeQuery) ([]host.VolumeStatus, host.Seq, error) {
	mine, theirs := s.waits()
	v := host.VolumeStatus{Waiting: []registry.Wait{mine, theirs}, Holders: []registry.Holder{
		{Claim: registry.Claim{Name: disk, Alloc: "other-alloc",
			Usage: registry.Usage{Access: registry.SingleNodeWriter}, Since: noon}, Trouble: "it hangs",
			Troubled: noon},
	}}
	v.Namespace, v.ID, v.Plugin = disk.Namespace, disk.ID, "loopfs"
	return []host.VolumeStatus{v}, 1, nil
}

// What an alloc waits for is told with who holds it and what they wait for themselves, what there is of the plugin, and
// the next try.
func TestWaitsAreExplained(t *testing.T) {
	_, c := serve(t, &held{shim: &shim{}})
	job, err := c.RunJob(t.Context(), Submission{Name: "user", Text: []byte("x")}, false)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for len(job.Allocs) == 0 || job.Allocs[0].Next.IsZero() {
		if job, err = c.Job(ctx, "user"); err != nil {
			t.Fatal(err)
		}
		<-tick.C
	}
	const line = "volume disk is held by alloc other-al"
	if job.Allocs[0].Reason != line {
		t.Errorf("the job's status says %q", job.Allocs[0].Reason)
	}
	if list, err := c.Allocs(ctx); err != nil || len(list) != 1 || list[0].Reason != line {
		t.Errorf("the list of allocs says %+v, %v", list, err)
	}
	a, err := c.Alloc(ctx, job.Allocs[0].ID)
	if err != nil || len(a.Waiting) != 1 || len(a.Volumes) != 1 {
		t.Fatalf("%+v, %v", a, err)
	}
	w := a.Waiting[0]
	if w.Job != "user" || w.Leaving || w.Next.IsZero() || w.Plugin == nil || w.Plugin.ID != "loopfs" ||
		len(w.Plugin.Instances) != 1 || w.Help.What != line+"loc" {
		t.Errorf("%+v", w)
	}
	if len(w.Holders) != 1 || w.Holders[0].Alloc != "other-alloc" || len(w.Others) != 1 ||
		w.Others[0].Detail != "busy" {
		t.Errorf("others: %+v %+v", w.Holders, w.Others)
	}
	if tr := a.Volumes[0].Trouble; tr == nil || tr.Found != "its server is gone" || !tr.Since.Equal(noon) ||
		!commands(tr.Help, "holdfast job stop --wait user") {
		t.Errorf("trouble: %+v", tr)
	}
	v, err := c.Volume(ctx, disk)
	if err != nil || len(v.Waiting) != 2 || v.Waiting[0].Help.What != w.Help.What || len(v.Holders) != 1 ||
		v.Holders[0].Trouble == nil || v.Holders[0].Trouble.Found != "it hangs" {
		t.Errorf("the volume: %+v, %v", v, err)
	}
	if err := c.StopJob(ctx, "user", true, false); err != nil {
		t.Error(err)
	}
}

func commands(h Help, want ...string) bool {
	var have []string
	for _, d := range h.Do {
		have = append(have, d.Command)
	}
	return !slices.ContainsFunc(want, func(w string) bool { return !slices.Contains(have, w) })
}

// helpCase is a wait and what its help has to contain.
type helpCase struct {
	w    Wait
	what string
	then string
	do   []string // commands
}

// waitAt returns a wait of the alloc mine-alloc for the volume disk.
func waitAt(step registry.Step, rpc registry.RPC) registry.Wait {
	return registry.Wait{Alloc: "mine-alloc", Volume: disk, Step: step, RPC: rpc, Advice: "advice of the retry table"}
}

var (
	halfHealthy = &Plugin{ID: "p", Instances: []Instance{
		{Role: "csi-controller", Alloc: "ctrl-alloc", Task: "c", Active: true, Health: "healthy"},
		{Role: "csi-node", Alloc: "node-alloc", Task: "n", Active: true, Health: "unhealthy"},
	}}
	namespaced     = host.VolumeName{Namespace: "mine", ID: "disk"}
	stageOfAnother = registry.Wait{Alloc: "other-alloc", Volume: disk, Step: registry.StepStage, Advice: "advice of the retry table"}
)

// helpCases are waits that no end-to-end script reaches.
var helpCases = map[string]helpCase{
	"two jobs hold it": {
		Wait{Wait: waitAt(registry.StepClaim, ""), Job: "j", Plugin: halfHealthy,
			Holders: []Holder{{Job: "a", Alloc: "1"}, {Job: "b", Alloc: "2"}, {Job: "a", Alloc: "3"}}},
		"volume disk is held by job a and job b", "continues when",
		[]string{"holdfast job stop a", "holdfast job stop b", "holdfast job stop j"},
	},
	"an older alloc of the job holds it": {
		Wait{Wait: waitAt(registry.StepClaim, ""), Job: "j", Plugin: halfHealthy,
			Holders: []Holder{{Job: "j", Alloc: "12345678-9"}}},
		"volume disk is held by job j", "continues when", []string{"holdfast alloc status 12345678"},
	},
	"an alloc of another agent holds it": {
		Wait{Wait: waitAt(registry.StepClaim, ""), Plugin: halfHealthy, Holders: []Holder{{Alloc: "x"}}},
		"volume disk is held by alloc x", "continues when", []string{"holdfast alloc status x"},
	},
	"no holder is known": {
		Wait{Wait: waitAt(registry.StepClaim, ""), Job: "j", Plugin: halfHealthy}, "volume disk cannot be claimed",
		"retries", []string{"holdfast volume status disk", "holdfast job stop j"},
	},
	"the claim is not given up": {Wait{Wait: waitAt(registry.StepClaim, ""), Leaving: true},
		"volume disk is not released yet", "retries", []string{"holdfast doctor"}},
	"the plugin is unhealthy during a call": {
		Wait{Wait: waitAt(registry.StepStage, registry.NodeStageRPC), Job: "j", Plugin: halfHealthy},
		"volume disk is not staged yet", "Plugin p is not healthy: no job has a csi_plugin block",
		[]string{"holdfast job run FILE", "holdfast alloc logs node-all n", "holdfast plugin status p"},
	},
	"a controller's log for a controller's call": {
		Wait{Wait: waitAt(registry.StepAttach, registry.ControllerPublishRPC), Plugin: halfHealthy},
		"volume disk is not attached yet", "", []string{"holdfast alloc logs ctrl-all c"},
	},
	"a detach waits for a controller that has failed": {
		Wait{Wait: registry.Wait{Volume: disk, Step: registry.StepPlugin, Role: registry.RoleController},
			Leaving: true, Plugin: &Plugin{
				ID: "p", Instances: []Instance{{Role: "csi-node", Alloc: "node-alloc", Task: "n", Active: true,
					Health: "healthy"}},
				Tasks: []PluginTask{{Alloc: "node-alloc", Task: "n", Type: "node"}},
				Jobs: []Runner{
					{Job: "pc", Alloc: "ctrl-alloc", Task: "c", Type: "controller", Status: "failed"},
					{Job: "pn", Alloc: "node-alloc", Task: "n", Type: "node", Status: "running"},
				},
			}},
		"volume disk waits for plugin p, which serves only csi-node here", "only the plugin can undo",
		[]string{"holdfast alloc logs ctrl-all c"},
	},
	"the plugin is gone while all is given back": {
		Wait{Wait: waitAt(registry.StepPlugin, ""), Leaving: true, Job: "j",
			Plugin: &Plugin{ID: "p", Jobs: []Runner{{Job: "pj", Status: "stopped", File: "p.hcl"}}}},
		"volume disk waits for plugin p, which is not running", "only the plugin can undo",
		[]string{"holdfast job run p.hcl"},
	},
	"the plugin has not said anything": {
		Wait{Wait: waitAt(registry.StepPlugin, ""), Job: "j",
			Plugin: &Plugin{ID: "p", Tasks: []PluginTask{{Alloc: "a", Task: "t"}}}},
		"volume disk waits for plugin p, which has not answered yet", "continues when",
		[]string{"holdfast plugin status p", "holdfast alloc logs a t", "holdfast job stop j"},
	},
	"the plugin lacks the role": {
		Wait{Wait: waitAt(registry.StepPlugin, ""), Job: "j", Plugin: &Plugin{
			ID: "p", Instances: []Instance{{Role: "csi-controller", Active: true, Health: "healthy", Alloc: "a",
				Task: "t"}},
		}},
		"volume disk waits for plugin p, which serves only csi-controller here", "continues when",
		[]string{"holdfast job run FILE", "holdfast plugin status p", "holdfast job stop j"},
	},
	"the plugin has become healthy meanwhile": {
		Wait{Wait: registry.Wait{Volume: disk, Step: registry.StepPlugin, Role: registry.RoleNode}, Job: "j",
			Plugin: &Plugin{
				ID: "p", Instances: []Instance{{Role: "csi-node", Active: true, Health: "healthy", Alloc: "a",
					Task: "t"}},
			}},
		"volume disk waits for plugin p, which was not healthy", "continues when",
		[]string{"holdfast plugin status p"},
	},
	"the plugin is unknown": {Wait{Wait: waitAt(registry.StepPlugin, ""), Job: "j"},
		"volume disk waits for its plugin", "continues when", []string{"holdfast job stop j"}},
	"another operation of the volume runs": {
		Wait{Wait: waitAt(registry.StepTurn, ""), Job: "j", Others: []Other{{Wait: stageOfAnother}}},
		"volume disk has another operation in progress", "continues after",
		[]string{"holdfast alloc status other-al", "holdfast job stop j"},
	},
	"a deletion in a namespace": {
		Wait{Wait: registry.Wait{Volume: namespaced, RPC: registry.DeleteVolumeRPC}},
		"volume mine/disk is not deleted yet", "definite outcome",
		[]string{"holdfast volume deregister --namespace=mine disk"},
	},
	"an expansion": {
		Wait{Wait: registry.Wait{Volume: namespaced, RPC: registry.ControllerExpandRPC}},
		"volume mine/disk is not expanded yet", "definite outcome", nil,
	},
}

func TestHelpNamesTheReasonAndTheNextStep(t *testing.T) {
	for name, c := range helpCases {
		h := help(c.w)
		if h.What != c.what || !strings.Contains(h.Then, c.then) || !commands(h, c.do...) {
			t.Errorf("%s: %+v", name, h)
		}
		if c.w.RPC.Expands() && slices.ContainsFunc(h.Do,
			func(d Do) bool { return strings.Contains(d.Command, "deregister") }) {
			t.Errorf("%s: help advises to deregister the volume: %+v", name, h)
		}
		if c.w.Leaving && slices.ContainsFunc(h.Do,
			func(d Do) bool { return strings.Contains(d.Command, "job stop") }) {
			t.Errorf("%s: help advises to stop a job that is being stopped: %+v", name, h)
		}
	}
}
