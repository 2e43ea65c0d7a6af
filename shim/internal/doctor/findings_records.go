package doctor

import (
	"fmt"
	"slices"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// openLimit is how long a call may be open in a running shim before it is a finding.
const openLimit = time.Minute

// whyMissing returns the reason why a mount that is recorded as done does not exist. It is empty if the mount exists,
// or came or went during the examination.
func (e *examiner) whyMissing(boot, path string) registry.FindingKind {
	switch {
	case boot != e.Boot:
		return registry.FoundRebooted
	case e.stacks[path] == 0 && !slices.Contains(e.Changing, path):
		return registry.FoundLost
	}
	return ""
}

// examinePlacement examines where a volume is attached and staged. A plugin need not mount anything at the staging
// path. A missing mount there counts only if there was one before.
func (e *examiner) examinePlacement(p Placement) {
	refs := e.refs[p.Volume]
	if e.claims[p.Volume] == 0 && len(refs) == 0 {
		what := "attached"
		if p.Staging.State != registry.MarkNone {
			what = "staged"
		}
		e.add(registry.Finding{
			Kind: registry.FoundUnowned, Action: registry.ActUndo, Volume: p.Volume, Name: p.Name,
			Path: p.Staging.Path.Host, Detail: fmt.Sprintf("volume %s is or may be %s, and has no claim", p.Name, what),
			Advice: fmt.Sprintf("make sure that plugin %s runs: it is asked to take the volume down until it succeeds",
				p.Volume.Plugin),
		})
	}
	if p.Staging.State != registry.MarkDone {
		return
	}
	kind := e.whyMissing(p.Staging.Boot, p.Staging.Path.Host)
	if kind == "" || kind == registry.FoundLost && !p.Staging.Mounts {
		return
	}
	f := registry.Finding{
		Kind: kind, Action: registry.ActMark, Volume: p.Volume, Name: p.Name, Path: p.Staging.Path.Host,
		Detail: fmt.Sprintf("volume %s is recorded as staged here, and nothing is mounted", p.Name),
		Advice: "nothing: the next claim of the volume stages it again",
	}
	if kind == registry.FoundRebooted {
		f.Detail = fmt.Sprintf("volume %s was staged here before the node rebooted", p.Name)
	}
	e.add(f)
}

// examineRef examines one publish.
func (e *examiner) examineRef(r registry.Ref) {
	if r.Publish != registry.MarkDone {
		return
	}
	name := e.volumes[r.Volume].VolumeName()
	if name.ID == "" { // another node has deleted the volume
		name = e.placements[r.Volume].Name
	}
	if !slices.ContainsFunc(e.Records.Claims, func(c registry.Claim) bool { return c.ClaimKey() == r.ClaimKey() }) {
		e.add(registry.Finding{
			Kind: registry.FoundUnowned, Volume: r.Volume, Name: name, Alloc: r.Alloc, Request: r.Request,
			Path: r.Target.Host,
			Detail: fmt.Sprintf("volume %s is published here for alloc %s, which has no claim: other nodes may use "+
				"the volume", name, r.Alloc),
			Advice: fmt.Sprintf("stop alloc %s: its claim was released by force, or with all claims of this node",
				r.Alloc),
		})
	}
	block := r.Usage.Attachment == registry.BlockDevice
	info, inspected := e.Inspected[r.Target.Host]
	missing := e.whyMissing(r.Boot, r.Target.Host)
	if missing == registry.FoundLost && block && (!inspected || info.Block || info.Trouble() != "") {
		missing = "" // a block device need not be mounted
	}
	f := registry.Finding{
		Kind: missing, Action: registry.ActMark, Volume: r.Volume, Name: name, Alloc: r.Alloc, Request: r.Request,
		Path: r.Target.Host, Advice: fmt.Sprintf("if alloc %s runs, stop it and place it again", r.Alloc),
	}
	switch {
	case missing == registry.FoundRebooted:
		f.Detail = fmt.Sprintf("volume %s was published here for alloc %s before the node rebooted", name, r.Alloc)
		f.Advice = "nothing: it is published again with the alloc, or taken down with it"
	case missing == registry.FoundLost && block:
		f.Detail = fmt.Sprintf("volume %s is recorded as published here for alloc %s, and there is no block device",
			name, r.Alloc)
	case missing == registry.FoundLost:
		f.Detail = fmt.Sprintf("volume %s is recorded as published here for alloc %s, and nothing is mounted", name,
			r.Alloc)
	case info.Trouble() != "":
		f.Kind, f.Action = registry.FoundDead, registry.ActNothing
		f.Detail = fmt.Sprintf("volume %s is published here for alloc %s: %s", name, r.Alloc, info.Trouble())
		f.Advice = fmt.Sprintf("stop alloc %s and place it again: its tasks cannot use the volume", r.Alloc)
	default:
		e.examineParts(r, name)
		return
	}
	e.add(f)
}

// examineParts examines the parts of a mounted publish. A lost part is not mounted again, because its task uses the
// mount that it got at its start.
func (e *examiner) examineParts(r registry.Ref, name registry.VolumeName) {
	for _, p := range r.Parts {
		if p.Mark != registry.MarkDone || e.whyMissing(e.Boot, p.At) == "" {
			continue
		}
		e.add(registry.Finding{
			Kind: registry.FoundLost, Volume: r.Volume, Name: name, Alloc: r.Alloc, Request: r.Request, Path: p.At,
			Detail: fmt.Sprintf("%q of volume %s is recorded as mounted here for alloc %s, and nothing is", p.Path,
				name, r.Alloc),
			Advice: fmt.Sprintf("if alloc %s runs, stop it and place it again: a task that restarts would not see it",
				r.Alloc),
		})
	}
}

// examineIntent examines an open call. A call that a running shim has just sent is no finding.
func (e *examiner) examineIntent(open registry.Intent) {
	if e.Live && open.Outcome == registry.OutcomePending && e.Now.Sub(open.Since) < openLimit {
		return
	}
	advice := intent.Advice(open.RPC, open.Code)
	if advice == "" {
		advice = fmt.Sprintf("make sure that plugin %s runs: the call is repeated or undone", open.Volume.Plugin)
	}
	e.add(registry.Finding{
		Kind: registry.FoundUncertain, Volume: open.Volume, Name: open.Name, Alloc: open.Alloc, Request: open.Request,
		Detail: intent.Describe(open), Advice: advice,
	})
}

// examineHealth examines the last reported condition of a volume in each role.
func (e *examiner) examineHealth(v registry.Volume) {
	health := v.Health
	health.Node = e.placements[v.VolumeKey()].Staging.Condition
	for _, role := range []registry.Role{registry.RoleController, registry.RoleNode} {
		if c := health.Of(role); c.Abnormal {
			e.add(registry.Finding{
				Kind: registry.FoundUnhealthy, Volume: v.VolumeKey(), Name: v.VolumeName(),
				Detail: fmt.Sprintf("plugin %s (%s) reports volume %s as unhealthy: %s", v.Plugin, role, v.VolumeName(),
					c.Text()),
				Advice: "check the plugin's storage; users of the volume may get errors",
			})
		}
	}
}
