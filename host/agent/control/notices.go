package control

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"holdfast/host"
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
	NoticeHeld      NoticeKind = "held"      // by allocs or containers; only in the explanation of claims
	NoticeTrouble   NoticeKind = "trouble"   // a mount in use does not work, or a node, a volume or etcd is lost
	NoticePending   NoticeKind = "pending"   // an expansion, modification or detach is incomplete or uncertain
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

// fact adds a fact, unless text is empty.
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

// command adds a command, unless the notice has it already.
func (n *Notice) command(purpose, line string) {
	if c := (Command{purpose, line}); !slices.Contains(n.Commands, c) {
		n.Commands = append(n.Commands, c)
	}
}

// mountTrouble explains a mount that does not work. job is the job that uses the mount.
func mountTrouble(h registry.Holder, job string) Notice {
	n := Notice{
		Kind:    NoticeTrouble,
		Summary: "the mount of volume " + h.Claim.Name.String() + " does not work",
		Meaning: "Tasks that use the volume get errors or hang.",
		Next:    "Holdfast does not change a mount in use. The next alloc mounts the volume again.",
	}
	n.fact("Alloc", nameAlloc(h.Claim.Alloc, job))
	n.fact("Request", string(h.Claim.Request))
	n.fact("Found", h.Trouble)
	n.fact("Since", since(h.Troubled))
	if job != "" {
		n.command("stop the job, which releases the volume", display.Command("holdfast job stop --wait", job))
		n.command("then start it again", startCommand(job))
	}
	n.command("inspect the plugin", pluginCommand(h.Claim.Volume.Plugin))
	n.command("find all inconsistencies on this node", "holdfast doctor")
	return n
}

// reportNotice returns a notice about a report of the plugin.
func reportNotice(kind NoticeKind, text string, at time.Time) Notice {
	n := Notice{Kind: kind}
	n.fact("Reported", text)
	n.fact("Since", since(at))
	return n
}

// expansionNotices explains a pending or uncertain expansion. An expansion that still runs is shown as an open call.
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
	n := reportNotice(NoticePending, found, e.Since)
	expand := func(bytes int64) string { return VolumeCommand(fmt.Sprintf("expand --size %d", bytes), name) }
	switch {
	case e.Open():
		n.Summary = fmt.Sprintf("volume %s may or may not have been expanded to %d bytes", name, e.Asked.Required)
		n.Meaning = "The plugin failed without reporting whether the expansion was done."
		n.Next = "Holdfast repeats this call before the next expansion of the volume."
		n.command("repeat the expansion", expand(e.Asked.Required))
		n.command("see the current size", VolumeCommand("status", name))
		return []Notice{n}
	case e.Refused == "":
		n.Next = "If it is mounted for writing, Holdfast is expanding it on this node now. Else it is expanded on " +
			"this node at the next mount for writing, before the tasks start."
	default:
		n.Meaning = "The plugin cannot expand it now. Users of the volume keep the present size."
		n.Next = "Holdfast retries at the next mount, after all users have ended."
		if e.Refused != "FAILED_PRECONDITION" { // after FAILED_PRECONDITION the call must not be repeated
			n.command("retry now", expand(e.Node.Required))
		}
		n.command("list its users", VolumeCommand("status", name))
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
	n := reportNotice(NoticeUncertain, found, f.Since)
	n.Summary = fmt.Sprintf("volume %s may or may not have been created, and cannot be used", name)
	n.Meaning = "The plugin may have created the volume, but its answer was unusable."
	n.Next = "Holdfast does not retry the creation."
	n.command("delete it, if the plugin created it", VolumeCommand("delete", name))
	n.command("remove the record only; the plugin may keep the volume", VolumeCommand("deregister", name))
	n.command("repeat the creation", "holdfast volume create FILE")
	n.command("inspect the plugin", pluginCommand(v.Plugin))
	return []Notice{n}
}

// deletionNotices explains a deletion without a running call.
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
	n.command("try now, and see the error", VolumeCommand("delete", name))
	n.command("if its secrets cannot be read, give it others", "holdfast volume update FILE")
	n.command("remove the record only; the plugin may keep the volume", VolumeCommand("deregister", name))
	return []Notice{n}
}

// healthNotices explains the health reports of a volume's plugin, one per role.
func healthNotices(name registry.VolumeName, plugin registry.PluginID, h registry.VolumeHealth) (list []Notice) {
	for _, role := range []registry.Role{registry.RoleController, registry.RoleNode} {
		c := h.Of(role)
		if !c.Abnormal {
			continue
		}
		n := reportNotice(NoticeUnhealthy, c.Text(), c.Since)
		n.Summary = fmt.Sprintf("plugin %s (%s) reports volume %s as unhealthy", plugin, role, name)
		n.Meaning = "Users of the volume may get errors or may have lost data. Holdfast changes nothing."
		n.Next = "An event reports when the volume is healthy again."
		n.command("inspect the plugin", pluginCommand(plugin))
		n.command("list its users", VolumeCommand("status", name))
		list = append(list, n)
	}
	return list
}

// VolumeCommand is the command line of holdfast volume for one volume. verb may have flags.
func VolumeCommand(verb string, n registry.VolumeName) string {
	return display.ObjectCommand("holdfast volume "+verb, n.Namespace, string(n.ID))
}

// startCommand is the command that starts a job again.
func startCommand(job string) string { return display.Command("holdfast job start", job) }

func pluginCommand(id registry.PluginID) string {
	return display.Command("holdfast plugin status", string(id))
}

// now is the clock for relative times in notices. Tests replace it.
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
