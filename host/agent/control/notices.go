package control

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	"holdfast/host"
	"holdfast/host/agent"
	"holdfast/internal/display"
	"holdfast/registry"
)

// Notice explains to a person what an alloc or a volume waits for, or what is wrong with it.
type Notice struct {
	Kind     NoticeKind `json:"kind"`
	Summary  string     `json:"summary"`
	Facts    []Fact     `json:"facts,omitempty"`
	Meaning  string     `json:"meaning,omitempty"` // the cause, or the consequence for users
	Next     string     `json:"next"`              // what Holdfast does next
	Commands []Command  `json:"commands,omitempty"`
}

// NoticeKind is the kind of a notice.
type NoticeKind string

const (
	NoticeWaiting   NoticeKind = "waiting"   // for a claim, a plugin, another operation, or a successful call
	NoticeTrouble   NoticeKind = "trouble"   // the mount of a volume in use does not work
	NoticePending   NoticeKind = "pending"   // an expansion is not done on this node yet, or its outcome is uncertain
	NoticeUncertain NoticeKind = "uncertain" // a creation ended without a usable volume
	NoticeUnhealthy NoticeKind = "unhealthy" // the plugin reports the volume as unhealthy
)

// Fact is a named text of a notice. A fact without a name continues the one before.
type Fact struct {
	Name string `json:"name"`
	Text string `json:"text"`
}

// Command is a command for a person to type.
type Command struct {
	Purpose string `json:"purpose"`
	Line    string `json:"line"`
}

// fact adds a fact unless the text is empty.
func (n *Notice) fact(name, text string) {
	if text != "" {
		n.Facts = append(n.Facts, Fact{name, text})
	}
}

// list adds a fact of several lines.
func (n *Notice) list(name string, lines []string) {
	for _, line := range lines {
		n.fact(name, line)
		name = ""
	}
}

// command adds a command once.
func (n *Notice) command(purpose, line string) {
	if c := (Command{purpose, line}); !slices.Contains(n.Commands, c) {
		n.Commands = append(n.Commands, c)
	}
}

// wait is a wait of an alloc or a volume with its circumstances.
type wait struct {
	registry.Wait
	job     string           // of the alloc
	leaving bool             // the alloc releases its volumes
	holders []Holder         // of the volume, other than the alloc
	others  []registry.Wait  // that wait for the volume or for its release
	open    *registry.Intent // the running call of the volume, with StepTurn
	plugin  *Plugin          // of the volume; nil: the volume is unknown
	mounted string           // left mounted although the plugin answered NOT_FOUND or OK
}

// name names the volume at the start of a sentence.
func (w wait) name() string {
	if w.Volume.ID == "" {
		return fmt.Sprintf("the volume of request %q", w.Request)
	}
	return "volume " + w.Volume.String()
}

// role returns the role of the call, or the role that is waited for.
func (w wait) role() registry.Role {
	switch {
	case w.RPC == "" && w.Role != "":
		return w.Role
	case w.RPC == "" || strings.HasPrefix(string(w.RPC), "Node"):
		return registry.RoleNode
	}
	return registry.RoleController
}

// waiting explains a wait.
func (e *explainer) waiting(w wait) Notice {
	n := Notice{Kind: NoticeWaiting}
	n.fact("Alloc", e.allocName(w.Alloc))
	n.fact("Step", describeStep(w.Wait))
	n.fact("Since", since(w.Since))
	switch {
	case w.Step == registry.StepClaim && !w.leaving:
		n.explainClaim(w)
	case w.Step == registry.StepPlugin:
		n.explainPlugin(w)
	case w.Step == registry.StepTurn:
		e.explainTurn(&n, w)
	default:
		n.explainCall(w)
	}
	switch {
	case w.RPC == "":
		n.fact("Reason", w.Detail)
	case w.Code != "":
		n.fact("Plugin error", w.Code+": "+w.Detail)
	case w.Detail != "":
		n.fact("Plugin error", "no answer: "+w.Detail)
	default:
		n.fact("Plugin error", "none yet")
	}
	n.fact("Attempts", attempts(w.Wait))
	if w.Step != registry.StepClaim && w.Step != registry.StepTurn {
		n.list("Plugin", w.plugin.describe(w.Step == registry.StepPlugin))
	}
	switch {
	case !w.leaving && w.job != "":
		n.command("stop the job", display.Command("holdfast job stop", w.job))
	case w.leaving && w.Alloc != "" && w.Step != registry.StepTurn:
		n.command("if the plugin is gone for good, see what a release by force would skip",
			display.Command("holdfast alloc release --dry-run", short(w.Alloc)))
	}
	return n
}

func (n *Notice) explainClaim(w wait) {
	switch {
	case w.plugin == nil:
		n.Summary, n.Next = w.name()+" does not exist", "The alloc continues when the volume exists."
		n.command("list volumes", "holdfast volume list")
		n.command("create it", "holdfast volume create FILE")
		return
	case len(w.holders) == 0:
		n.Summary = w.name() + " cannot be claimed"
		n.Next = "Holdfast retries until the claim is granted; then the alloc continues."
		n.command("inspect the volume", volumeCommand("status", w.Volume))
		return
	}
	n.Next = "The alloc continues when the volume is released."
	var names, lines []string
	for _, h := range w.holders {
		name := "job " + h.Job
		switch {
		case len(h.Engines) > 0:
			name = "containers of " + h.EngineNames()
		case h.Job == "":
			name = "alloc " + short(h.Alloc)
		}
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
		lines = append(lines, h.String())
		for _, o := range w.others {
			if o.Alloc == h.Alloc {
				lines = append(lines, o.String())
			}
		}
		status := display.Command("holdfast alloc status", short(h.Alloc))
		switch {
		case h.State == agent.AllocStopping || h.State == agent.AllocReleasing:
			n.Next = "The volume is being released. The alloc continues after that."
			n.command("see why the release waits", status)
		case len(h.Engines) > 0:
			n.command("list its containers, to stop them",
				display.Command(h.Engines[0].Engine+" ps --filter", "volume="+string(w.Volume.ID)))
		case h.Job != "" && h.Job != w.job:
			n.command("stop job "+h.Job+" to release it", display.Command("holdfast job stop", h.Job))
		default:
			n.command("inspect the holder", status)
		}
	}
	n.Summary = fmt.Sprintf("%s is held by %s", w.name(), strings.Join(names, " and "))
	n.list("Held by", lines)
}

func (h Holder) String() string {
	parts := []string{"alloc " + nameAlloc(h.Alloc, h.Job), string(h.Access)}
	if len(h.Engines) > 0 {
		parts[0] = "containers of " + h.EngineNames()
		h.State = "mounted"
	}
	if h.ReadOnly {
		parts = append(parts, "read-only")
	}
	if !h.Since.IsZero() {
		parts = append(parts, "since "+since(h.Since))
	}
	return strings.Join(append(parts, cmp.Or(string(h.State), "unknown to this agent")), ", ")
}

func (n *Notice) explainPlugin(w wait) {
	n.Summary, n.Next = w.name()+" waits for its plugin", "The alloc continues when the plugin is healthy."
	if w.leaving {
		n.Next = "The volume is released when the plugin is healthy: only the plugin can undo its calls."
	}
	p := w.plugin
	if p == nil {
		return
	}
	n.Summary = fmt.Sprintf("%s waits for plugin %s, which %s", w.name(), p.ID, p.problem(w.role()))
	n.Meaning = sentence(p.describeJobs())
	if p.unhealthy() && !slices.ContainsFunc(p.Tasks, func(t host.PluginTask) bool { return t.Restart != nil }) {
		n.Meaning += " Holdfast does not restart a plugin that was healthy before, because its mounts may be in use."
	}
	n.startCommands(p)
	n.inspectCommands(p, w.role())
}

func (e *explainer) explainTurn(n *Notice, w wait) {
	n.Summary = w.name() + " has another operation in progress"
	n.Next = "The alloc continues after that operation."
	var lines []string
	for _, o := range w.others {
		if o.Step == registry.StepTurn {
			continue
		}
		lines = append(lines, fmt.Sprintf("for alloc %s: %s, since %s", e.allocName(o.Alloc), o.String(), since(o.Since)))
		if o.Alloc != "" {
			n.command("inspect the other alloc", display.Command("holdfast alloc status", short(o.Alloc)))
		}
	}
	if len(lines) == 0 {
		lines = append(lines, w.For)
		if w.open != nil {
			lines = append(lines, fmt.Sprintf("%s, since %s", w.open.RPC, since(w.open.Since)))
		}
	}
	n.list("Running", lines)
}

// explainCall explains a step that needs a call of the plugin, or a creation, deletion or expansion.
func (n *Notice) explainCall(w wait) {
	done, p := w.Participle(), w.plugin
	if w.Step == registry.StepClaim {
		done = "released"
	}
	n.Summary, n.Meaning = fmt.Sprintf("%s is not %s yet", w.name(), done), sentence(w.Advice)
	n.Next = "Holdfast retries until it succeeds; then the alloc continues."
	switch {
	case w.Step == "" && w.RPC != "":
		n.Next = "Holdfast repeats the call until the plugin reports a definite outcome."
	case p != nil && w.RPC != "" && (p.unhealthy() || len(p.Instances) == 0):
		n.Next = fmt.Sprintf("Plugin %s %s: %s. Holdfast continues when the plugin is healthy.", p.ID,
			p.problem(w.role()), p.describeJobs())
		n.startCommands(p)
	case w.leaving:
		n.Next = "Holdfast retries until it succeeds, because the volume may still be in use. " +
			"Until then the volume stays claimed."
	}
	if p != nil && w.RPC != "" {
		n.inspectCommands(p, w.role())
	}
	if w.mounted != "" {
		n.command("unmount it manually when it is unused", display.Command("umount", w.mounted))
	}
	if w.leaving {
		n.command("find inconsistencies", "holdfast doctor")
	}
	if w.Step == "" && w.RPC == registry.CreateVolumeRPC {
		n.command("cancel, and delete it if it was created", volumeCommand("delete", w.Volume))
	}
	if w.Step == "" && w.RPC != "" && !w.RPC.Alters() { // the volume exists
		n.command("remove the record only; the plugin may keep the volume", volumeCommand("deregister", w.Volume))
	}
}

// startCommands adds the commands that start the plugin.
func (n *Notice) startCommands(p *Plugin) {
	if len(p.Jobs) == 0 {
		n.command("run it", "holdfast job run FILE")
	}
	for _, r := range p.Jobs {
		if r.Status == agent.AllocStopped || r.Status == agent.AllocFailed {
			n.command("run job "+r.Job+" again", display.Command("holdfast job run", r.File))
		}
	}
}

// inspectCommands adds the commands that inspect the plugin in a role.
func (n *Notice) inspectCommands(p *Plugin, role registry.Role) {
	if alloc, task := p.server(role); alloc != "" {
		n.command("read the plugin's log", display.Command("holdfast alloc logs", short(alloc), string(task)))
	}
	if len(p.Instances)+len(p.Tasks) > 0 {
		n.command("inspect the plugin", display.Command("holdfast plugin status", p.ID))
	}
}

func describeStep(w registry.Wait) string {
	switch {
	case w.RPC != "" && w.Step != "":
		return fmt.Sprintf("%s: %s of %s", w.Step, w.RPC, w.For)
	case w.RPC != "":
		return fmt.Sprintf("%s of %s", w.RPC, w.For)
	case w.Step == registry.StepTurn:
		return "turn: a volume has one operation at a time"
	case w.For != "":
		return fmt.Sprintf("%s: %s", w.Step, w.For)
	}
	return string(w.Step)
}

// attempts says how often a step was tried, and when the next try is.
func attempts(w registry.Wait) string {
	var parts []string
	if w.Attempt > 0 {
		parts = append(parts, fmt.Sprint(w.Attempt))
	}
	switch ahead := w.Next.Sub(now()); {
	case w.Next.IsZero() && w.RPC != "" && w.Code+w.Detail != "":
		parts = append(parts, "next soon")
	case w.Next.IsZero() && w.RPC != "":
		parts = append(parts, "the last one is running")
	case w.Next.IsZero():
	case ahead < time.Second:
		parts = append(parts, "next now")
	default:
		parts = append(parts, fmt.Sprintf("next in %v", ahead.Round(time.Second)))
	}
	return strings.Join(parts, ", ")
}

// mountTrouble explains a mount that does not work. Job uses it and was submitted from file.
func mountTrouble(h registry.Holder, job, file string) Notice {
	n := Notice{
		Kind:    NoticeTrouble,
		Summary: "the mount of volume " + h.Claim.Name.String() + " does not work",
		Meaning: "Tasks that use the volume get errors or hang.",
		Next:    "Holdfast leaves a mount in use alone. The next alloc mounts the volume again.",
	}
	n.fact("Alloc", nameAlloc(h.Claim.Alloc, job))
	n.fact("Request", string(h.Claim.Request))
	n.fact("Found", h.Trouble)
	n.fact("Since", since(h.Troubled))
	if job != "" {
		n.command("stop the job, which releases the volume", display.Command("holdfast job stop --wait", job))
		n.command("then run it again", display.Command("holdfast job run", file))
	}
	n.command("inspect the plugin", pluginCommand(h.Claim.Volume.Plugin))
	n.command("find all inconsistencies on this node", "holdfast doctor")
	return n
}

// reported is a notice about a report of the plugin.
func reported(kind NoticeKind, text string, at time.Time) Notice {
	n := Notice{Kind: kind}
	n.fact("Reported", text)
	n.fact("Since", since(at))
	return n
}

// expansionNotices explains a pending or uncertain expansion. A running one is shown as an open call.
func expansionNotices(name registry.VolumeName, e registry.Expansion) []Notice {
	if !e.Pending() && (!e.Open() || e.RPC == "") {
		return nil
	}
	found := ""
	switch {
	case e.RPC != "":
		found = fmt.Sprintf("%s: %s: %s", e.RPC, e.Code, e.Detail)
	case e.Refused != "":
		found = fmt.Sprintf("%s: %s", registry.NodeExpandRPC, e.Refused)
	}
	n := reported(NoticePending, found, e.Since)
	expand := func(bytes int64) string { return volumeCommand(fmt.Sprintf("expand --size %d", bytes), name) }
	switch {
	case e.Open():
		n.Summary = fmt.Sprintf("volume %s may or may not have been expanded to %d bytes", name, e.Asked.Required)
		n.Meaning = "The plugin failed without reporting whether the expansion was done."
		n.Next = "Holdfast repeats this call before the next expansion of the volume."
		n.command("repeat the expansion", expand(e.Asked.Required))
		n.command("see the current size", volumeCommand("status", name))
		return []Notice{n}
	case e.Refused == "":
		n.Next = "It is expanded on this node at the next mount, before the tasks start. A read-only mount cannot grow, " +
			"so the expansion waits for a writer."
	default:
		n.Meaning = "The plugin cannot expand it now. Users of the volume keep the present size."
		n.Next = "Holdfast retries at the next mount, after all users have ended."
		if e.Refused != "FAILED_PRECONDITION" { // which may not be tried again before
			n.command("retry now", expand(e.Node.Required))
		}
		n.command("list its users", volumeCommand("status", name))
	}
	n.Summary = fmt.Sprintf("volume %s is expanded to %d bytes, but not on this node yet", name, e.Node.Required)
	return []Notice{n}
}

// creationNotices explains a creation without a usable volume, unless it is being retried.
func creationNotices(v host.VolumeStatus) []Notice {
	f, name := v.Failure, v.VolumeName()
	if v.State != registry.VolumeUncertain || v.Intent != nil {
		return nil
	}
	found := fmt.Sprintf("%s: %s: %s", f.RPC, f.Code, f.Detail)
	if f.Code == "OK" {
		found = fmt.Sprintf("%s: %s", f.RPC, f.Detail)
	}
	n := reported(NoticeUncertain, found, f.Since)
	n.Summary = fmt.Sprintf("volume %s may or may not have been created, and cannot be used", name)
	n.Meaning = "The plugin may have created the volume, but its answer was unusable."
	n.Next = "Holdfast does not retry the creation."
	n.command("delete it, if the plugin created it", volumeCommand("delete", name))
	n.command("remove the record only; the plugin may keep the volume", volumeCommand("deregister", name))
	n.command("repeat the creation", "holdfast volume create FILE")
	n.command("inspect the plugin", pluginCommand(v.Plugin))
	return []Notice{n}
}

// deletionNotices explains a deletion of which no call is under way.
func deletionNotices(v host.VolumeStatus) []Notice {
	if v.State != registry.VolumeDeleting || v.Intent != nil {
		return nil
	}
	name := v.VolumeName()
	n := Notice{Kind: NoticeWaiting, Summary: fmt.Sprintf("volume %s is not deleted yet", name),
		Next: "Holdfast tries again until the plugin has deleted it."}
	if f := v.Failure; f.RPC == registry.DeleteVolumeRPC {
		n.fact("Plugin error", f.Code+": "+f.Detail)
		n.fact("Since", since(f.Since))
	}
	n.command("try now, and see what is in the way", volumeCommand("delete", name))
	n.command("if its secrets cannot be read, give it others", "holdfast volume update FILE")
	n.command("remove the record only; the plugin may keep the volume", volumeCommand("deregister", name))
	return []Notice{n}
}

// healthNotices explains the health reports of a volume's plugin, one per role.
func healthNotices(name registry.VolumeName, plugin registry.PluginID, h registry.VolumeHealth) (list []Notice) {
	for _, role := range []registry.Role{registry.RoleController, registry.RoleNode} {
		c := h.Of(role)
		if !c.Abnormal {
			continue
		}
		n := reported(NoticeUnhealthy, c.Text(), c.Since)
		n.Summary = fmt.Sprintf("plugin %s (%s) reports volume %s as unhealthy", plugin, role, name)
		n.Meaning = "Users of the volume may get errors or may have lost data. Holdfast changes nothing."
		n.Next = "An event reports when the volume is healthy again."
		n.command("inspect the plugin", pluginCommand(plugin))
		n.command("list its users", volumeCommand("status", name))
		list = append(list, n)
	}
	return list
}

// volumeCommand is a command of holdfast volume for one volume.
func volumeCommand(verb string, n registry.VolumeName) string {
	words := "holdfast volume " + verb
	if n.Namespace != registry.DefaultNamespace && n.Namespace != "" {
		words += " --namespace=" + display.Quote(string(n.Namespace))
	}
	return display.Command(words, string(n.ID))
}

func pluginCommand(id registry.PluginID) string {
	return display.Command("holdfast plugin status", string(id))
}

// now is the clock of relative times in notices. Tests replace it.
var now = time.Now

// since formats a time and how long ago it was.
func since(t time.Time) string {
	if t.IsZero() {
		return ""
	}
	return fmt.Sprintf("%s UTC, %v ago", t.UTC().Format(time.DateTime), max(0, now().Sub(t).Round(time.Second)))
}

// sentence adds a capital and a full stop.
func sentence(s string) string {
	if s == "" {
		return ""
	}
	return strings.ToUpper(s[:1]) + strings.TrimSuffix(s[1:], ".") + "."
}

// short abbreviates an ID; holdfast alloc accepts the result.
func short[T ~string](id T) string { return string(id[:min(8, len(id))]) }

// nameAlloc names an alloc and its job, if it has one.
func nameAlloc(id registry.AllocID, job string) string {
	if job == "" {
		return short(id)
	}
	return fmt.Sprintf("%s of job %s", short(id), job)
}
