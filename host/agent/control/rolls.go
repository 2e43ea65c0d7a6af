package control

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"

	"holdfast/host"
	"holdfast/host/agent"
)

// Roll is the replacement of a job's plugin allocs.
type Roll struct {
	agent.Roll
	Job   string          `json:"job"`
	State agent.RollState `json:"state"`
	Begun []RollAlloc     `json:"begun,omitempty"` // new allocs
	Kept  []RollAlloc     `json:"kept,omitempty"`  // replaced allocs that have not ended
}

// RollAlloc is an alloc of a roll.
type RollAlloc struct {
	ID     host.AllocID     `json:"id"`
	State  agent.AllocState `json:"state"`
	Reason string           `json:"reason,omitempty"` // what it waits for, what it is needed for, or why it ended
}

// rollView returns the last roll of a job, or nil.
func (s *Server) rollView(j *agent.JobRecord) *Roll {
	if j.Roll == nil {
		return nil
	}
	out := &Roll{Roll: *j.Roll, Job: j.Job.ID, State: j.RollState()}
	begun, kept := s.agent.RollAllocs(j)
	for _, r := range begun {
		out.Begun = append(out.Begun, RollAlloc{r.ID, r.State, r.Why()})
	}
	if out.State != agent.RollFailed {
		for _, r := range kept {
			out.Kept = append(out.Kept, RollAlloc{r.ID, r.State, r.Reason})
		}
	}
	return out
}

// String returns one line about the roll.
func (r Roll) String() string {
	text := fmt.Sprintf("job %s, version %d: %s", r.Job, r.Version, r.State)
	list := r.Kept
	switch r.State {
	case agent.RollFailed:
		return text + ", nothing has changed: " + r.Failed
	case agent.RollStarting:
		list = r.Begun
	}
	for _, a := range list {
		text += fmt.Sprintf("; alloc %s is %s", short(a.ID), a.State)
		if a.Reason != "" {
			text += ": " + a.Reason
		}
	}
	return text
}

// RollText returns a line about each roll, and whether the plugin's rolls are held.
func (p *Plugin) RollText() string {
	text := fmt.Sprintln("held:", p.Held())
	for _, r := range p.Rolls {
		text += r.String() + "\n"
	}
	return text
}

// Held reports whether the plugin's rolls wait only for users of old mounts: for each old alloc the
// agent has recorded why it is kept, and its process serves mounts but no calls.
func (p *Plugin) Held() bool {
	held := false
	for _, r := range p.Rolls {
		switch r.State {
		case agent.RollStarting:
			return false
		case agent.RollDraining:
			for _, a := range r.Kept {
				if !p.onlyServesMounts(a) {
					return false
				}
				held = true
			}
		}
	}
	return held
}

// onlyServesMounts reports whether a replaced alloc is kept because its process serves mounts, and has no calls any
// more.
func (p *Plugin) onlyServesMounts(a RollAlloc) bool {
	return a.Reason != "" && slices.ContainsFunc(p.Tasks, func(t host.PluginTask) bool {
		return t.Alloc == a.ID && len(t.Volumes) > 0 && t.Calls == 0 && len(t.Open) == 0 && !t.Active
	})
}

// Rolling reports whether a roll of the plugin is under way.
func (p *Plugin) Rolling() bool {
	return slices.ContainsFunc(p.Rolls, func(r Roll) bool {
		return r.State == agent.RollStarting || r.State == agent.RollDraining
	})
}

// postRoll replaces the allocs of a plugin. It answers once the rolls are recorded.
func (s *Server) postRoll(r *http.Request) (any, error) {
	id := pluginID(r)
	_, err := s.agent.RollPlugin(r.Context(), id, s.host,
		agent.RollOptions{Drain: isTrue(r, "drain"), Force: isTrue(r, "force")})
	if err != nil {
		return nil, err
	}
	return s.plugin(r.Context(), id)
}

// RollPlugin replaces the allocs of a plugin. It returns once the rolls are recorded. Plugin.Rolls has their progress.
func (c *Client) RollPlugin(ctx context.Context, id string, o agent.RollOptions) (Plugin, error) {
	q := url.Values{"drain": {fmt.Sprint(o.Drain)}, "force": {fmt.Sprint(o.Force)}}
	return post[Plugin](ctx, c, "/plugin/"+segment(id)+"/roll?"+q.Encode(), nil)
}
