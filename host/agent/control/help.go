package control

import (
	"fmt"
	"slices"
	"strings"

	"holdfast/hooks"
	"holdfast/host/agent"
	"holdfast/internal/display"
	"holdfast/registry"
)

// Help explains a condition to a person.
type Help struct {
	What  string `json:"what"`            // the condition
	Means string `json:"means,omitempty"` // its cause
	Then  string `json:"then"`            // what Holdfast does next
	Do    []Do   `json:"do,omitempty"`    // commands that help
}

// Do is a command for a person to type.
type Do struct {
	Why     string `json:"why"`
	Command string `json:"command"`
}

// help explains a wait, without times.
func help(w Wait) Help {
	switch {
	case w.Step == registry.StepClaim && w.Leaving:
		return claimHeldUp(w)
	case w.Step == registry.StepClaim:
		return claimHelp(w)
	case w.Step == registry.StepPlugin:
		return pluginHelp(w)
	case w.Step == registry.StepTurn:
		return turnHelp(w)
	case w.RPC != "" && w.Step == "":
		return makingHelp(w)
	}
	return stepHelp(w)
}

// name names the volume at the start of a sentence.
func (w Wait) name() string {
	if w.Volume.ID == "" {
		return fmt.Sprintf("the volume of request %q", w.Request)
	}
	return "volume " + w.Volume.String()
}

// end returns the command that ends the wait. A release cannot be ended.
func (w Wait) end() []Do {
	if w.Leaving || w.Job == "" {
		return nil
	}
	return []Do{{"stop the job", display.Command("holdfast job stop", w.Job)}}
}

func claimHelp(w Wait) Help {
	h := Help{What: w.name() + " cannot be claimed"}
	switch {
	case w.Plugin == nil:
		h.What = w.name() + " does not exist"
		h.Then = "The alloc continues when the volume exists."
		h.Do = []Do{{"list volumes", "holdfast volume list"}, {"create it", "holdfast volume create FILE"}}
	case len(w.Holders) == 0:
		h.Then = "Holdfast retries until the claim is granted; then the alloc continues."
		h.Do = []Do{{"inspect the volume", volumeCommand("status", w.Volume)}}
	default:
		h.What = fmt.Sprintf("%s is held by %s", w.name(), whoHolds(w.Holders))
		h.Then, h.Do = holdersHelp(w)
	}
	h.Do = append(h.Do, w.end()...)
	return h
}

// whoHolds names the jobs, or the allocs that belong to no job.
func whoHolds(list []Holder) string {
	var names []string
	for _, h := range list {
		name := "job " + h.Job
		if h.Job == "" {
			name = "alloc " + h.Alloc
		}
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return strings.Join(names, " and ")
}

func holdersHelp(w Wait) (then string, do []Do) {
	then = "The alloc continues when the volume is released."
	for _, h := range w.Holders {
		switch {
		case h.State == string(agent.AllocStopping) || h.State == string(agent.AllocReleasing):
			then = "The volume is being released. The alloc continues after that."
			do = add(do, Do{"see why the release waits", display.Command("holdfast alloc status", short(h.Alloc))})
		case h.Job != "" && h.Job != w.Job:
			do = add(do, Do{"stop job " + h.Job + " to release it", display.Command("holdfast job stop", h.Job)})
		default:
			do = add(do, Do{"inspect the holder", display.Command("holdfast alloc status", short(h.Alloc))})
		}
	}
	return then, do
}

func add(list []Do, d Do) []Do {
	if slices.Contains(list, d) {
		return list
	}
	return append(list, d)
}

// claimHeldUp explains a claim that cannot be released.
func claimHeldUp(w Wait) Help {
	return Help{
		What: w.name() + " is not released yet",
		Then: "Holdfast retries until it succeeds. Until then the volume stays claimed.",
		Do:   []Do{{"find inconsistencies", "holdfast doctor"}},
	}
}

func pluginHelp(w Wait) Help {
	h := Help{What: w.name() + " waits for its plugin", Then: "The alloc continues when the plugin is healthy."}
	if w.Leaving {
		h.Then = "The volume is released when the plugin is healthy: only the plugin can undo its calls."
	}
	if w.Plugin == nil {
		h.Do = w.end()
		return h
	}
	h.What = fmt.Sprintf("%s waits for plugin %s, which %s", w.name(), w.Plugin.ID, w.Plugin.lacks(w.role()))
	h.Means = sentence(w.Plugin.fate())
	if i := w.Plugin.sick(); i != nil && !w.Plugin.restarts() {
		h.Means += " Holdfast does not restart a plugin that was healthy before, because its mounts may be in use."
	}
	h.Do = append(w.Plugin.start(), append(w.Plugin.look(w.role()), w.end()...)...)
	return h
}

// lacks describes what is wrong with a plugin in the role.
func (p *Plugin) lacks(role registry.Role) string {
	serves := func(i Instance) bool { return i.Role == string(role) }
	switch {
	case len(p.Tasks) == 0 && len(p.Instances) == 0:
		return "is not running"
	case len(p.Instances) == 0:
		return "has not answered yet"
	case p.sick() == nil && !slices.ContainsFunc(p.Instances, serves):
		return fmt.Sprintf("serves only %s here", p.Instances[0].Role)
	case p.sick() == nil:
		return "was not healthy"
	}
	return "is not healthy"
}

// sick returns an active instance that is not healthy; nil if there is none.
func (p *Plugin) sick() *Instance {
	for i := range p.Instances {
		if p.Instances[i].Active && p.Instances[i].Health != string(registry.Healthy) {
			return &p.Instances[i]
		}
	}
	return nil
}

// restarts reports whether a restart of a task of the plugin is requested.
func (p *Plugin) restarts() bool {
	return slices.ContainsFunc(p.Tasks, func(t PluginTask) bool { return t.Restart != nil })
}

// fate describes the jobs that run the plugin.
func (p *Plugin) fate() string {
	if len(p.Jobs) == 0 {
		return fmt.Sprintf("no job has a csi_plugin block with id = %q", p.ID)
	}
	var says []string
	for _, r := range p.Jobs {
		text := fmt.Sprintf("job %s runs it", r.Job)
		if r.Status != string(agent.AllocRunning) {
			text += " and has status " + r.Status
		}
		if r.Reason != "" {
			text += ": " + r.Reason
		}
		says = append(says, text)
	}
	return strings.Join(says, "; ")
}

// start returns the commands that start the plugin.
func (p *Plugin) start() (do []Do) {
	if len(p.Jobs) == 0 {
		return []Do{{"run it", "holdfast job run FILE"}}
	}
	for _, r := range p.Jobs {
		if r.Status == string(agent.AllocStopped) || r.Status == string(agent.AllocFailed) {
			do = append(do, Do{"run job " + r.Job + " again", display.Command("holdfast job run", r.File)})
		}
	}
	return do
}

// look returns the commands that inspect the plugin in a role.
func (p *Plugin) look(role registry.Role) []Do {
	var do []Do
	if alloc, task := p.voice(role); alloc != "" {
		do = append(do, Do{"read the plugin's log", display.Command("holdfast alloc logs", short(alloc), task)})
	}
	if len(p.Instances)+len(p.Tasks) > 0 {
		do = append(do, Do{"inspect the plugin", display.Command("holdfast plugin status", p.ID)})
	}
	return do
}

// voice returns the task that serves, or last served, the plugin in a role; empty if there is none.
func (p *Plugin) voice(role registry.Role) (alloc, task string) {
	for _, r := range p.Jobs {
		if serves(r.Type, role) {
			alloc, task = r.Alloc, r.Task
		}
	}
	for _, t := range p.Tasks {
		if serves(t.Type, role) {
			alloc, task = t.Alloc, t.Task
		}
	}
	active := false
	for _, i := range p.Instances {
		if i.Role == string(role) && !active {
			alloc, task, active = i.Alloc, i.Task, i.Active
		}
	}
	return alloc, task
}

// serves reports whether a plugin of the type has the role. An unknown type, from an older record, may have it.
func serves(kind string, role registry.Role) bool {
	return kind == "" || slices.Contains(hooks.PluginType(kind).Roles(), role)
}

// role returns the role of the call, or the role that is waited for.
func (w Wait) role() registry.Role {
	switch {
	case w.RPC == "" && w.Role != "":
		return w.Role
	case w.RPC == "" || strings.HasPrefix(string(w.RPC), "Node"):
		return registry.RoleNode
	}
	return registry.RoleController
}

func turnHelp(w Wait) Help {
	h := Help{
		What: w.name() + " has another operation in progress", Then: "The alloc continues after that operation.",
	}
	for _, other := range w.Others {
		if other.Step != registry.StepTurn && other.Alloc != "" {
			h.Do = add(h.Do, Do{"inspect the other alloc", display.Command("holdfast alloc status",
				short(string(other.Alloc)))})
		}
	}
	h.Do = append(h.Do, w.end()...)
	return h
}

// stepHelp explains a step that a plugin has to do.
func stepHelp(w Wait) Help {
	h := Help{What: fmt.Sprintf("%s is not %s yet", w.name(), w.Participle()), Means: sentence(w.Advice)}
	h.Then = "Holdfast retries until it succeeds; then the alloc continues."
	if w.Leaving {
		h.Then = "Holdfast retries until it succeeds, because the volume may still be in use. Until then the volume stays claimed."
	}
	if p := w.Plugin; p != nil && w.RPC != "" {
		if i := p.sick(); i != nil || len(p.Instances) == 0 {
			h.Then = fmt.Sprintf("Plugin %s %s: %s. Holdfast continues when the plugin is healthy.", p.ID,
				p.lacks(w.role()), p.fate())
			h.Do = p.start()
		}
		h.Do = append(h.Do, p.look(w.role())...)
	}
	if w.Mounted != "" {
		h.Do = append(h.Do, Do{"unmount it manually when it is unused", display.Command("umount", w.Mounted)})
	}
	if w.Leaving {
		h.Do = append(h.Do, Do{"find inconsistencies", "holdfast doctor"})
	}
	h.Do = append(h.Do, w.end()...)
	return h
}

// makingHelp explains a creation, deletion or expansion.
func makingHelp(w Wait) Help {
	h := Help{What: fmt.Sprintf("%s is not %s yet", w.name(), w.Participle()), Means: sentence(w.Advice)}
	h.Then = "Holdfast repeats the call until the plugin reports a definite outcome."
	if w.Plugin != nil {
		h.Do = w.Plugin.look(w.role())
	}
	if w.RPC == registry.CreateVolumeRPC {
		h.Do = append(h.Do, Do{"cancel, and delete it if it was created", volumeCommand("delete", w.Volume)})
	}
	if !w.RPC.Expands() { // the volume exists
		h.Do = append(h.Do, Do{"remove the record only; the plugin may keep the volume",
			volumeCommand("deregister", w.Volume)})
	}
	return h
}

// mountHelp explains a mount that does not work. job uses it and was submitted from file.
func mountHelp(name registry.VolumeName, plugin registry.PluginID, job, file string) Help {
	h := Help{
		What:  "the mount of volume " + name.String() + " does not work",
		Means: "Tasks that use the volume get errors or hang.",
		Then:  "Holdfast leaves a mount in use alone. The next alloc mounts the volume again.",
	}
	if job != "" {
		h.Do = []Do{
			{"stop the job, which releases the volume", display.Command("holdfast job stop --wait", job)},
			{"then run it again", display.Command("holdfast job run", file)},
		}
	}
	h.Do = append(h.Do, Do{"inspect the plugin", display.Command("holdfast plugin status", string(plugin))})
	h.Do = append(h.Do, Do{"find all inconsistencies on this node", "holdfast doctor"})
	return h
}

// volumeCommand is a command of holdfast volume for one volume.
func volumeCommand(verb string, n registry.VolumeName) string {
	words := "holdfast volume " + verb
	if n.Namespace != registry.DefaultNamespace && n.Namespace != "" {
		words += " --namespace=" + display.Quote(string(n.Namespace))
	}
	return display.Command(words, string(n.ID))
}

func expandCommand(n registry.VolumeName, bytes int64) string {
	return volumeCommand(fmt.Sprintf("expand --size %d", bytes), n)
}

// sentence adds a capital and a full stop.
func sentence(s string) string {
	if s == "" {
		return ""
	}
	return strings.ToUpper(s[:1]) + strings.TrimSuffix(s[1:], ".") + "."
}

// short abbreviates an ID; holdfast alloc accepts the result.
func short(id string) string { return id[:min(8, len(id))] }
