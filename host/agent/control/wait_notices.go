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

// wait is a wait of an alloc or a volume, with the facts that explain it.
type wait struct {
	registry.Wait
	job     string           // of the alloc
	leaving bool             // the alloc releases its volumes
	holders []Holder         // of the volume, other than the alloc
	others  []registry.Wait  // other waits for the volume or for its release
	open    *registry.Intent // the running call of the volume, with StepTurn
	plugin  *Plugin          // of the volume; nil: the volume is unknown
	mounted string           // the path that is still mounted although the plugin answered NOT_FOUND or OK
}

// name names the volume at the start of a sentence.
func (w wait) name() string {
	if w.Volume.ID == "" {
		return fmt.Sprintf("the volume of request %q", w.Request)
	}
	return "volume " + w.Volume.String()
}

// role returns the role that answers the call. Without a call, it is the awaited role, by default csi-node.
func (w wait) role() registry.Role {
	switch {
	case w.RPC == "" && w.Role != "":
		return w.Role
	case w.RPC == "" || strings.HasPrefix(string(w.RPC), "Node"):
		return registry.RoleNode
	}
	return registry.RoleController
}

// explainWait explains a wait.
func (e *explainer) explainWait(w wait) Notice {
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
	if p := w.plugin; p != nil && (w.Step == registry.StepPlugin || !p.allHealthy()) &&
		w.Step != registry.StepClaim && w.Step != registry.StepTurn {
		n.list("Plugin", p.describe())
	}
	switch {
	case !w.leaving && w.job != "":
		n.command("stop job "+w.job+" instead of waiting", display.Command("holdfast job stop", w.job))
	case w.leaving && w.Alloc != "" && w.Step != registry.StepTurn:
		n.command("if the plugin is gone for good, see what a release by force would skip",
			display.Command("holdfast alloc release --dry-run", short(w.Alloc)))
	}
	return n
}

func (n *Notice) explainClaim(w wait) {
	switch {
	case w.plugin == nil && w.Volume.ID != "":
		n.Summary, n.Next = w.name()+" does not exist", "The alloc continues when the volume exists."
		n.command("list volumes", "holdfast volume list")
		n.command("create it", "holdfast volume create FILE")
		return
	case len(w.holders) == 0:
		n.Summary = w.name() + " cannot be claimed"
		n.Next = "Holdfast retries until the claim is granted; then the alloc continues."
		if w.Volume.ID != "" {
			n.command("inspect the volume", VolumeCommand("status", w.Volume))
		}
		return
	}
	n.Next = "The alloc continues when the volume is released."
	var lines []string
	for _, h := range w.holders {
		lines = append(lines, h.String())
		for _, o := range w.others {
			if o.Alloc == h.Alloc {
				lines = append(lines, o.String())
			}
		}
		if h.leaves() {
			n.Next = "The volume is being released. The alloc continues after that."
		}
		n.holderCommands(h, w.Volume, w.job)
	}
	n.Summary = fmt.Sprintf("%s is held by %s", w.name(), nameHolders(w.holders))
	n.list("Held by", lines)
}

// heldNotices returns a notice with the commands that release a volume, unless nothing holds it.
func heldNotices(name registry.VolumeName, holders []Holder) []Notice {
	if len(holders) == 0 {
		return nil
	}
	n := Notice{Kind: NoticeHeld, Summary: fmt.Sprintf("volume %s is held by %s", name, nameHolders(holders)),
		Next: "Holdfast releases the volume when its users have ended."}
	for _, h := range holders {
		n.holderCommands(h, name, "")
	}
	return []Notice{n}
}

// nameHolders names jobs, engines, and allocs without a known job.
func nameHolders(list []Holder) string {
	var names []string
	for _, h := range list {
		name := "job " + h.Job
		switch {
		case len(h.Engines) > 0:
			name = "containers of " + h.EngineNames()
		case h.Job == "":
			name = "alloc " + short(h.Alloc)
			if h.Node != "" {
				name += " on node " + string(h.Node)
			}
		}
		if !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return strings.Join(names, " and ")
}

// leaves reports whether an alloc of this node releases its volumes.
func (h Holder) leaves() bool {
	return h.State == agent.AllocStopping || h.State == agent.AllocReleasing
}

// holderCommands adds the commands that make a holder release its volume. waits is the job that waits for the volume,
// which is not to be stopped; empty: none.
func (n *Notice) holderCommands(h Holder, volume registry.VolumeName, waits string) {
	status := display.Command("holdfast alloc status", short(h.Alloc))
	switch {
	case h.Node != "":
		n.command("inspect the holder, at node "+string(h.Node), status)
		n.command("see whether that node is alive", display.Command("holdfast node status", string(h.Node)))
	case h.leaves():
		n.command("see why the release waits", status)
	case len(h.Engines) > 0:
		for _, use := range h.Engines {
			n.command("list its containers, to stop them",
				display.Command(use.Engine+" ps --filter", "volume="+string(volume.ID)))
		}
	case h.Job == "":
		n.releaseClaimCommand(volume, h.Alloc)
	case h.Job != waits:
		n.command("stop job "+h.Job+" to release it", display.Command("holdfast job stop --wait", h.Job))
	default:
		n.command("inspect the holder", status)
	}
}

func (h Holder) String() string {
	parts := []string{"alloc " + nameAlloc(h.Alloc, h.Job), string(h.Access)}
	if h.Node != "" {
		parts[0] += " on node " + string(h.Node)
	}
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
	if h.Node == "" {
		parts = append(parts, cmp.Or(string(h.State), "unknown to this agent"))
	}
	return strings.Join(parts, ", ")
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
	n.addStartCommands(p)
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
		lines = append(lines, fmt.Sprintf("for alloc %s: %s, since %s", e.allocName(o.Alloc), o.String(),
			since(o.Since)))
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

// explainCall explains a wait for a plugin's call: a step of an alloc, or the creation, deletion, expansion or
// modification of a volume.
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
		n.addStartCommands(p)
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
		n.command("cancel, and delete it if it was created", VolumeCommand("delete", w.Volume))
	}
	// A volume that is being expanded or modified stays usable, so its record is not to be removed.
	if w.Step == "" && w.RPC != "" && !w.RPC.Alters() {
		n.command("remove the record only; the plugin may keep the volume", VolumeCommand("deregister", w.Volume))
	}
}

// addStartCommands adds the commands that start the plugin.
func (n *Notice) addStartCommands(p *Plugin) {
	if len(p.Jobs) == 0 {
		n.command("run it", "holdfast job run FILE")
	}
	for _, r := range p.Jobs {
		if r.Status == agent.AllocStopped || r.Status == agent.AllocFailed {
			n.command("start job "+r.Job+" again", startCommand(r.Job))
		}
	}
}

// inspectCommands adds the commands that inspect the plugin in a role.
func (n *Notice) inspectCommands(p *Plugin, role registry.Role) {
	if alloc, task := p.servingTask(role); alloc != "" {
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
		return fmt.Sprintf("%s: waits for %s", w.Step, w.For)
	}
	return string(w.Step)
}

// attempts describes how often a step was tried, and when the next try is.
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
