package control

import (
	"context"
	"errors"
	"reflect"
	"strings"
	"testing"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/registry"
)

func TestFailedControllerKeepsItsRow(t *testing.T) {
	task := func(name string, kind hooks.PluginType) hooks.Task {
		return hooks.Task{Plugin: "p", PluginType: kind, Name: host.TaskName(name)}
	}
	controllers := hooks.Group{Name: "c", Count: 1, Tasks: []hooks.Task{task("c", hooks.TypeController)}}
	nodes := hooks.Group{Name: "n", Count: 1, Tasks: []hooks.Task{task("n", hooks.TypeNode)}}
	job := &agent.JobRecord{Job: hooks.Job{ID: "j", Groups: []hooks.Group{controllers, nodes}}}
	allocs := []*agent.AllocRecord{
		{Job: "j", Group: controllers, State: agent.AllocStopped, Reason: "an older one"},
		{Job: "j", Group: nodes, State: agent.AllocRunning},
		{Job: "j", Group: controllers, State: agent.AllocFailed, Reason: "exit code 3"},
	}
	node := Plugin{ID: "p", Roles: []Role{{Role: "csi-node", Healthy: 1, Expected: 1}}}
	got := withWanted([]Plugin{node}, host.PluginQuery{}, []*agent.JobRecord{job}, allocs)
	want := []Role{{Role: "csi-controller", Expected: 1, Reason: "exit code 3"},
		{Role: "csi-node", Healthy: 1, Expected: 1}}
	if len(got) != 1 || !reflect.DeepEqual(got[0].Roles, want) {
		t.Errorf("%+v, want %+v", got, want)
	}
	says := "the job that runs plugin p as csi-controller failed: exit code 3 (see holdfast plugin status p)"
	if got := roleFailures(got); got != says {
		t.Errorf("%q, want %q", got, says)
	}
	// Nothing of the plugin is left, and another one was asked for.
	if got := withWanted(nil, host.PluginQuery{}, []*agent.JobRecord{job},
		allocs); len(got) != 1 || len(got[0].Roles) != 2 {
		t.Errorf("no task is left: %+v", got)
	}
	if got := withWanted(nil, host.PluginQuery{Plugin: "other"}, []*agent.JobRecord{job}, allocs); len(got) != 0 {
		t.Errorf("another plugin: %+v", got)
	}
	job.Stopped = true
	if got := withWanted(nil, host.PluginQuery{}, []*agent.JobRecord{job}, allocs); len(got) != 0 {
		t.Errorf("a stopped job: %+v", got)
	}
}

// halved is a shim that starts no task of a controller: only the plugin's node is there.
type halved struct{ *shim }

func (s *halved) Parse(_ context.Context, src host.Source, _ host.ParseOptions) (*host.Job, host.Diagnostics, error) {
	t := hooks.Task{
		Name: "c", Driver: "raw_exec", Plugin: "loopfs", PluginType: hooks.TypeController, Sealed: hooks.Sealed("s"),
		Config: []byte(`{"command":"/bin/true"}`),
	}
	return &host.Job{ID: src.Name, Namespace: "default", Type: "service",
		Groups: []hooks.Group{{Name: "g", Count: 1, Tasks: []hooks.Task{t}}}}, nil, nil
}

func (s *halved) TaskStarting(context.Context, host.AllocTask) (host.Plan, error) {
	return host.Plan{}, registry.Invalid("its stanza is wrong")
}

func (s *halved) Volumes(context.Context, host.VolumeQuery) ([]host.VolumeStatus, host.Seq, error) {
	v := registry.Volume{VolumeSpec: registry.VolumeSpec{Namespace: disk.Namespace, ID: disk.ID, Plugin: "loopfs"}}
	return []host.VolumeStatus{{Volume: v}}, 1, nil
}

func (s *halved) TaskExited(context.Context, host.TaskKey, uint64, int, int, bool) error { return nil }

// The job that was to serve the role that is missing has failed: whoever needs the role is told so, and why.
func TestFailureOfAMissingRolesJobIsTold(t *testing.T) {
	s := &halved{&shim{refuse: registry.Errorf(registry.ErrUnavailable, "plugin loopfs serves only csi-node here")}}
	_, c := serve(t, s)
	if _, err := c.RunJob(t.Context(), Submission{Name: "pc", Text: []byte("x")}, false); err != nil {
		t.Fatal(err)
	}
	for status := ""; status != string(agent.AllocFailed); {
		job, err := c.Job(t.Context(), "pc")
		if err != nil {
			t.Fatal(err)
		}
		status = job.Status
	}
	_, err := c.ExpandVolume(t.Context(), disk, host.CapacityRange{Required: 1})
	for _, says := range []string{"serves only csi-node here", "plugin loopfs as csi-controller failed",
		"its stanza is wrong"} {
		if !errors.Is(err, registry.ErrUnavailable) || !strings.Contains(err.Error(), says) {
			t.Errorf("%v does not say %q", err, says)
		}
	}
}
