package control

import (
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/hashicorp/go-hclog"

	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/registry"
)

// A wait is reported even if the agent does not say what the request waits for.
func TestWaitForAHungAgentIsReported(t *testing.T) {
	t.Parallel()
	l, err := Listen(filepath.Join(shortDir(t), "s"), hclog.NewNullLogger())
	must(t, err)
	reported := make(chan string, 100)
	agent := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasPrefix(r.URL.Path, "/v1/wait/") {
			<-r.Context().Done()
			return
		}
		select {
		case text := <-reported:
			if text != "no answer from the agent yet" {
				t.Errorf("reported %q", text)
			}
		case <-time.After(time.Minute):
			t.Error("the wait is not reported")
		}
		_, _ = w.Write([]byte("{}"))
	}))
	socket := l.Addr().String()
	_ = agent.Listener.Close()
	agent.Listener = l
	agent.Start()
	defer agent.Close()
	c := NewClient(socket)
	c.Waiting = func(text string, _ time.Time) { reported <- text }
	_, err = c.Self(t.Context())
	must(t, err)
	last := "none"
	for len(reported) > 0 {
		last = <-reported
	}
	if last != "" {
		t.Errorf("the last report is %q", last)
	}
}

// A job has settled once its tasks have started, or its allocs have ended. A task that cannot start ends its alloc a
// moment later. A task whose engine does not answer has not started.
func TestJobSettlesOnceItsTasksHaveStarted(t *testing.T) {
	for want, tasks := range map[bool][]Task{
		true: {{State: agent.TaskRunning}, {State: agent.TaskWaiting, Restarts: 1}, {State: agent.TaskDead}},
		false: {{State: agent.TaskPending}, {State: agent.TaskStarting}, {State: agent.TaskWaiting},
			{State: agent.TaskDead, Failed: true}},
	} {
		for _, task := range tasks {
			j := Job{Groups: []Group{{Count: 1}}, Allocs: []Alloc{{State: agent.AllocRunning, Tasks: []Task{task}}}}
			if startedOrEnded(j) != want {
				t.Errorf("task %+v: settled is %v", task, !want)
			}
		}
	}
}

// A plugin that no job runs here may have a controller on another node of the cluster, which can make the call. If the
// plugin's volumes stay on their node, that node can make only calls for its own volumes.
func TestPluginIsControlledElsewhere(t *testing.T) {
	h := &fakeHost{}
	s, _ := serveAgent(t, h)
	with := func(node string, alive bool, p registry.NodePlugin) host.NodeStatus {
		p.Plugin = "disk"
		return host.NodeStatus{Node: registry.Node{Name: host.NodeName(node)}, Alive: alive,
			Plugins: []registry.NodePluginStatus{{NodePlugin: p}}}
	}
	own, controller := s.agent.Node().Name, registry.NodePlugin{Controller: true}
	local := registry.NodePlugin{Controller: true, Local: true}
	for name, c := range map[string]struct {
		node   host.NodeStatus
		stores host.NodeName // the node that stores the volume
		want   bool
	}{
		"a controller":            {with("other", true, controller), "", true},
		"an unhealthy one":        {with("other", true, registry.NodePlugin{ControllerUnhealthy: true}), "", true},
		"of a suspect node":       {with("other", false, controller), "", false},
		"of this node":            {with(own, true, controller), "", false},
		"only its node plugin":    {with("other", true, registry.NodePlugin{Node: true}), "", false},
		"of its own volumes":      {with("other", true, local), host.NodeName(own), false},
		"of no volume":            {with("other", true, local), "", false},
		"of a volume it has":      {with("other", true, local), "other", true},
		"of a volume of a third":  {with("other", true, local), "third", false},
		"of a volume it has lost": {with("other", false, local), "other", false},
	} {
		h.mu.Lock()
		h.nodes = []host.NodeStatus{c.node}
		h.mu.Unlock()
		if got := s.controlledElsewhere(t.Context(), target{plugin: "disk", node: c.stores}); got != c.want {
			t.Errorf("%s: %v", name, got)
		}
	}
}
