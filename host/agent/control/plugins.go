package control

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"holdfast/hooks"
	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/internal/display"
	"holdfast/registry"
)

// Plugin is a plugin with its instances, tasks and jobs.
type Plugin struct {
	ID        string            `json:"id"`
	Provider  string            `json:"provider"`
	Version   string            `json:"version"`
	Roles     []Role            `json:"roles"`
	Instances []Instance        `json:"instances"`
	Tasks     []host.PluginTask `json:"tasks"`
	Jobs      []PluginJob       `json:"jobs,omitempty"`  // jobs of this agent that run it
	Rolls     []Roll            `json:"rolls,omitempty"` // the last roll of each of these jobs
}

// Role counts the instances that serve a plugin in a role.
type Role struct {
	Role     registry.Role `json:"role"`
	Healthy  int           `json:"healthy"`
	Expected int           `json:"expected"`         // number, from running tasks and from jobs that are not stopped
	Reason   string        `json:"reason,omitempty"` // of the newest alloc, if it is running or has failed
}

// Instance is one running task in one role of a plugin.
type Instance struct {
	host.Instance
	Active bool `json:"active"`
}

// PluginJob is a group of a job with a task that runs a plugin.
type PluginJob struct {
	Job    string           `json:"job"`
	Status agent.AllocState `json:"status"` // of the job
	Count  int              `json:"count"`  // of the group; 0 if the job is stopped
	Task   host.TaskName    `json:"task"`
	Type   hooks.PluginType `json:"type"`
	Alloc  host.AllocID     `json:"alloc,omitempty"`  // the newest alloc
	State  agent.AllocState `json:"state,omitempty"`  // of the newest alloc
	Reason string           `json:"reason,omitempty"` // of the newest alloc

	roll *Roll // of the job
}

// pluginJobs lists jobs by the plugins that they run.
func (s *Server) pluginJobs() map[host.PluginID][]PluginJob {
	out, all := map[host.PluginID][]PluginJob{}, s.agent.Allocs()
	for _, j := range s.agent.Jobs() {
		for _, g := range j.Job.Groups {
			for _, t := range g.Tasks {
				if t.Plugin == "" {
					continue
				}
				r := PluginJob{Job: j.Job.ID, Status: jobStatus(j, all), Count: g.Count, Task: t.Name,
					Type: t.PluginType}
				r.roll = s.rollView(j)
				if j.Stopped {
					r.Count = 0
				}
				for _, rec := range all { // the newest comes last
					if rec.Job == r.Job && rec.Group.Name == g.Name {
						r.Alloc, r.State, r.Reason = rec.ID, rec.State, rec.Why()
					}
				}
				out[t.Plugin] = append(out[t.Plugin], r)
			}
		}
	}
	return out
}

// listPlugins returns the plugins that the shim knows or that jobs run, sorted by ID.
func (s *Server) listPlugins(ctx context.Context, q host.PluginQuery) ([]Plugin, error) {
	list, _, err := s.host.Plugins(ctx, q)
	if err != nil {
		return nil, err
	}
	jobs := s.pluginJobs()
	if q.Plugin != "" {
		jobs = map[host.PluginID][]PluginJob{q.Plugin: jobs[q.Plugin]}
	}
	return joinPlugins(list, jobs), nil
}

// joinPlugins joins the facts about plugins. A plugin whose jobs are all stopped is listed only if it still has tasks.
func joinPlugins(list host.PluginList, jobs map[host.PluginID][]PluginJob) []Plugin {
	found := map[host.PluginID]*Plugin{}
	at := func(id host.PluginID) *Plugin {
		if found[id] == nil {
			found[id] = &Plugin{ID: string(id), Roles: []Role{}, Instances: []Instance{}, Tasks: []host.PluginTask{}}
		}
		return found[id]
	}
	for _, i := range list.Instances {
		p, active := at(i.Plugin), list.Active[i.InstanceKey]
		p.Instances = append(p.Instances, Instance{i, active})
		r := p.role(i.Role)
		if i.Health.State == registry.Healthy {
			r.Healthy++
		}
		if p.Provider == "" || active {
			p.Provider, p.Version = i.Fingerprint.Provider, i.Fingerprint.Version
		}
	}
	for _, t := range list.Tasks {
		p := at(t.Plugin)
		p.Tasks = append(p.Tasks, t)
		for _, role := range hooks.PluginType(t.Type).Roles() {
			p.role(role).Expected++
		}
	}
	for id, of := range jobs {
		if slices.ContainsFunc(of, func(r PluginJob) bool { return r.Count > 0 }) {
			at(id).addMissingRoles(of)
		}
		if found[id] != nil {
			found[id].setJobs(of)
		}
	}
	out := []Plugin{}
	for _, p := range found {
		slices.SortFunc(p.Roles, func(x, y Role) int { return cmp.Compare(x.Role, y.Role) })
		out = append(out, *p)
	}
	slices.SortFunc(out, func(x, y Plugin) int { return cmp.Compare(x.ID, y.ID) })
	return out
}

// role returns the counts of a role. It adds the role if it is not listed. The pointer is valid until the next call.
func (p *Plugin) role(role registry.Role) *Role {
	i := slices.IndexFunc(p.Roles, func(r Role) bool { return r.Role == role })
	if i < 0 {
		i, p.Roles = len(p.Roles), append(p.Roles, Role{Role: role})
	}
	return &p.Roles[i]
}

// setJobs sets the jobs that run the plugin, and their rolls.
func (p *Plugin) setJobs(jobs []PluginJob) {
	p.Jobs = jobs
	for _, j := range jobs {
		known := slices.ContainsFunc(p.Rolls, func(r Roll) bool { return r.Job == j.Job })
		if j.roll != nil && !known {
			p.Rolls = append(p.Rolls, *j.roll)
		}
	}
}

// addMissingRoles adds the roles and the numbers of instances that jobs define but no task serves, because the shim
// forgets failed tasks. It sets the reason of each role that lacks healthy instances.
func (p *Plugin) addMissingRoles(jobs []PluginJob) {
	expected, reasons := map[registry.Role]int{}, map[registry.Role]string{}
	for _, r := range jobs {
		if r.Count == 0 {
			continue
		}
		for _, role := range r.Type.Roles() {
			expected[role] += r.Count
			if r.Reason != "" && (r.State == agent.AllocFailed || r.State == agent.AllocRunning) {
				reasons[role] = r.Reason
			}
		}
	}
	for role, n := range expected {
		r := p.role(role)
		r.Expected = max(r.Expected, n)
		if r.Healthy < r.Expected {
			r.Reason = reasons[role]
		}
	}
}

func (s *Server) getPlugins(r *http.Request) (any, error) {
	return s.listPlugins(r.Context(), host.PluginQuery{})
}

func (s *Server) getPlugin(r *http.Request) (any, error) {
	return s.knownPlugin(r.Context(), pluginID(r))
}

// knownPlugin returns a plugin. It returns ErrNotFound if no task and no running job has the plugin.
func (s *Server) knownPlugin(ctx context.Context, id host.PluginID) (*Plugin, error) {
	p, err := s.plugin(ctx, id)
	if err == nil && len(p.Roles) == 0 && !p.running() {
		err = registry.Errorf(registry.ErrNotFound, "plugin %q not found; run holdfast plugin status for a list", id)
	}
	return p, err
}

// plugin returns a plugin. If the shim does not know it, only its jobs are set.
func (s *Server) plugin(ctx context.Context, id host.PluginID) (*Plugin, error) {
	list, err := s.listPlugins(ctx, host.PluginQuery{Plugin: id})
	for i := range list {
		if list[i].ID == string(id) {
			return &list[i], nil
		}
	}
	return &Plugin{ID: string(id), Jobs: s.pluginJobs()[id]}, err
}

// running reports whether a task of the plugin is starting or running. A task that waits for its restart is not.
func (p *Plugin) running() bool {
	return len(p.Instances) > 0 ||
		slices.ContainsFunc(p.Tasks, func(t host.PluginTask) bool { return t.Phase != registry.TaskExited })
}

// task returns a task of the plugin, or the zero value if the shim does not know it.
func (p *Plugin) task(k registry.TaskKey) host.PluginTask {
	if i := slices.IndexFunc(p.Tasks, func(t host.PluginTask) bool { return t.TaskKey == k }); i >= 0 {
		return p.Tasks[i]
	}
	return host.PluginTask{}
}

// setProblems adds the reasons why the plugins of an alloc are not healthy yet, if the shim answers quickly.
func (s *Server) setProblems(ctx context.Context, a Alloc) {
	ctx, cancel := context.WithTimeout(ctx, reportInterval)
	defer cancel()
	for i, t := range a.Tasks {
		if t.Plugin == "" || t.Reason != "" || a.State != agent.AllocRunning {
			continue
		}
		if p, err := s.plugin(ctx, t.Plugin); err == nil {
			a.Tasks[i].Reason = p.task(registry.TaskKey{Alloc: host.AllocID(a.ID), Task: t.Name}).Problem
		}
	}
}

// gone reports whether the plugin is not running and all its jobs have ended.
func (p *Plugin) gone() bool {
	return !p.running() && len(p.Jobs) > 0 &&
		!slices.ContainsFunc(p.Jobs, func(r PluginJob) bool { return !r.Status.Ended() })
}

// unhealthy reports whether an active instance is not healthy.
func (p *Plugin) unhealthy() bool {
	return slices.ContainsFunc(p.Instances, func(i Instance) bool {
		return i.Active && i.Health.State != registry.Healthy
	})
}

// problem describes what is wrong with the plugin in the role.
func (p *Plugin) problem(role registry.Role) string {
	switch {
	case !p.running():
		return "is not running"
	case len(p.Instances) == 0:
		return "has not answered yet"
	case p.unhealthy():
		return "is not healthy"
	case !slices.ContainsFunc(p.Instances, func(i Instance) bool { return i.Role == role }):
		return fmt.Sprintf("serves only %s here", p.Instances[0].Role)
	}
	return "was not healthy a moment ago"
}

// describeJobs describes the jobs that run the plugin.
func (p *Plugin) describeJobs() string {
	if len(p.Jobs) == 0 {
		return fmt.Sprintf("no job has a csi_plugin block with id = %q", p.ID)
	}
	var texts []string
	for _, r := range p.Jobs {
		texts = append(texts, r.describe())
	}
	return strings.Join(texts, "; ")
}

// describe describes a job of a plugin.
func (r PluginJob) describe() string {
	text := fmt.Sprintf("its job %s has status %s", r.Job, r.Status)
	if r.Reason != "" {
		text += fmt.Sprintf(": %s (see %s)", r.Reason, display.Command("holdfast alloc status", short(r.Alloc)))
	}
	return text
}

// failures describes the failing jobs of roles without a healthy instance. It is empty if there are none.
func (p *Plugin) failures() string {
	var texts []string
	for _, j := range p.Jobs {
		var lacks []string
		for _, r := range p.Roles {
			if r.Healthy == 0 && r.Reason != "" && r.Reason == j.Reason && slices.Contains(j.Type.Roles(), r.Role) {
				lacks = append(lacks, string(r.Role))
			}
		}
		if len(lacks) > 0 {
			texts = append(texts, fmt.Sprintf("plugin %s is not healthy as %s: %s", p.ID, strings.Join(lacks, " and "),
				j.describe()))
		}
	}
	return strings.Join(texts, "; ")
}

// adviseFailing replaces the advice about plugins that the shim could not ask, if their jobs fail.
func (s *Server) adviseFailing(ctx context.Context, findings []host.Finding) {
	for i, f := range findings {
		if f.Kind != registry.FoundUnseen || f.Volume.Plugin == "" {
			continue
		}
		if p, err := s.plugin(ctx, f.Volume.Plugin); err == nil && p.failures() != "" {
			findings[i].Advice = p.failures() + "; when it is healthy, run holdfast doctor again"
		}
	}
}

// allHealthy reports whether the plugin has instances, and all of them are healthy.
func (p *Plugin) allHealthy() bool {
	return len(p.Instances) > 0 &&
		!slices.ContainsFunc(p.Instances, func(i Instance) bool { return i.Health.State != registry.Healthy })
}

// describe lists the instances and tasks of the plugin.
func (p *Plugin) describe() (lines []string) {
	for _, i := range p.Instances {
		lines = append(lines, fmt.Sprintf("%s, task %s of alloc %s: %s since %s: %s", i.Role, i.Task, short(i.Alloc),
			i.Health.State, since(i.Health.Since), WithDetail(i.Health.Cause, i.Health.Detail)))
	}
	for _, t := range p.Tasks {
		if t.Restart != nil {
			lines = append(lines, fmt.Sprintf("task %s of alloc %s: restart requested: %s", t.Task, short(t.Alloc),
				WithDetail(t.Restart.Cause, t.Restart.Detail)))
		} else if len(p.Instances) == 0 {
			text := fmt.Sprintf("task %s of alloc %s of job %s: %s, attempt %d", t.Task, short(t.Alloc), t.Job, t.Phase,
				t.Attempt)
			if t.Problem != "" {
				text += ": " + t.Problem
			}
			lines = append(lines, text)
		}
	}
	return lines
}

// WithDetail adds a detail to a cause, if there is one.
func WithDetail(cause registry.Cause, detail string) string {
	if detail == "" {
		return string(cause)
	}
	return fmt.Sprintf("%s: %s", cause, detail)
}

// servingTask returns the task that serves the plugin in a role, or that has last served it. It prefers the active
// instance to other instances, these to tasks, and tasks to jobs. It returns empty names if there is none of them.
func (p *Plugin) servingTask(role registry.Role) (alloc host.AllocID, task host.TaskName) {
	// A record from an older version may have no type. Such a plugin may have the role.
	serves := func(t hooks.PluginType) bool { return t == "" || slices.Contains(t.Roles(), role) }
	for _, r := range p.Jobs {
		if serves(r.Type) {
			alloc, task = r.Alloc, r.Task
		}
	}
	for _, t := range p.Tasks {
		if serves(hooks.PluginType(t.Type)) {
			alloc, task = t.Alloc, t.Task
		}
	}
	for _, i := range p.Instances {
		if i.Role == role {
			alloc, task = i.Alloc, i.Task
			if i.Active {
				break
			}
		}
	}
	return alloc, task
}

// postCapacity asks a plugin for its free space.
func (s *Server) postCapacity(r *http.Request, q host.CapacityQuery) (any, error) {
	return askPlugin(s, r, q.Plugin, func(ctx context.Context) (host.PluginCapacity, error) {
		return s.host.PluginCapacity(ctx, q)
	})
}

// PluginCapacity asks a plugin for its free space.
func (c *Client) PluginCapacity(ctx context.Context, q host.CapacityQuery) (host.PluginCapacity, error) {
	return post[host.PluginCapacity](ctx, c, "/plugins/capacity?"+c.wait().Encode(), q)
}
