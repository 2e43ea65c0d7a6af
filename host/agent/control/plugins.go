package control

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/internal/display"
	"holdfast/registry"
)

// wantedRole is a role of a plugin that a job defines and that is not stopped.
type wantedRole struct {
	plugin host.PluginID
	role   registry.Role
}

// withWanted adds the roles that jobs define and no task serves. The shim forgets failed tasks.
func withWanted(list []Plugin, q host.PluginQuery, jobs []*agent.JobRecord, allocs []*agent.AllocRecord) []Plugin {
	expected, reasons := map[wantedRole]int{}, map[wantedRole]string{}
	for _, j := range jobs {
		for _, g := range j.Job.Groups {
			for _, t := range g.Tasks {
				if j.Stopped || t.Plugin == "" || q.Plugin != "" && q.Plugin != t.Plugin {
					continue
				}
				for _, role := range t.PluginType.Roles() {
					key := wantedRole{t.Plugin, role}
					expected[key] += g.Count
					reasons[key] = cmp.Or(failure(allocs, j.Job.ID, g.Name), reasons[key])
				}
			}
		}
	}
	for key, n := range expected {
		if q.Role != "" && q.Role != key.role {
			continue
		}
		r := roleOf(pluginOf(&list, key.plugin), key.role)
		r.Expected = max(r.Expected, n)
		if r.Healthy < r.Expected {
			r.Reason = reasons[key]
		}
	}
	for _, p := range list {
		slices.SortFunc(p.Roles, func(x, y Role) int { return cmp.Compare(x.Role, y.Role) })
	}
	slices.SortFunc(list, func(x, y Plugin) int { return cmp.Compare(x.ID, y.ID) })
	return list
}

// failure returns why the newest alloc of a group failed; empty if it did not.
func failure(allocs []*agent.AllocRecord, job, group string) (reason string) {
	for _, rec := range allocs { // the newest last
		if rec.Job == job && rec.Group.Name == group {
			reason = ""
			if rec.State == agent.AllocFailed {
				reason = rec.Reason
			}
		}
	}
	return reason
}

// roleFailures describes the failures of roles that no task serves; empty if there are none.
func roleFailures(list []Plugin) string {
	var says []string
	for _, p := range list {
		for _, r := range p.Roles {
			if r.Healthy == 0 && r.Reason != "" {
				says = append(says, fmt.Sprintf("the job that runs plugin %[2]s as %[1]s failed: %[3]s (see %[4]s)",
					r.Role, p.ID, r.Reason,
					display.Command("holdfast plugin status", p.ID)))
			}
		}
	}
	return strings.Join(says, "; ")
}

func pluginOf(list *[]Plugin, id host.PluginID) *Plugin {
	for i := range *list {
		if (*list)[i].ID == string(id) {
			return &(*list)[i]
		}
	}
	*list = append(*list, Plugin{ID: string(id), Roles: []Role{}, Instances: []Instance{}, Tasks: []PluginTask{}})
	return &(*list)[len(*list)-1]
}

func roleOf(p *Plugin, role registry.Role) *Role {
	for i := range p.Roles {
		if p.Roles[i].Role == string(role) {
			return &p.Roles[i]
		}
	}
	p.Roles = append(p.Roles, Role{Role: string(role)})
	return &p.Roles[len(p.Roles)-1]
}
