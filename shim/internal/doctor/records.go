package doctor

import (
	"fmt"
	"slices"
	"time"

	"holdfast/registry"
	"holdfast/shim/internal/intent"
)

// young is how long a call may be under way in a running shim before it is worth a word.
const young = time.Minute

// lost says why a mark that says done is worth less; empty: it is not.
func (j *judge) lost(boot, path string) registry.FindingKind {
	switch {
	case boot != j.Boot:
		return registry.FoundRebooted
	case j.stacks[path] == 0 && !slices.Contains(j.Fleeting, path):
		return registry.FoundLost
	}
	return ""
}

// placement judges where a volume is attached and staged. Plugins need not mount anything at the staging path: that nothing is there counts
// only if something was, and if no publish stands on it.
func (j *judge) placement(p registry.Placement) {
	refs := j.refs[p.Volume]
	if j.claims[p.Volume] == 0 && len(refs) == 0 {
		j.unowned(p)
	}
	if p.Stage != registry.MarkDone {
		return
	}
	kind := j.lost(p.Boot, p.StagedAt.Host)
	if kind == registry.FoundLost && (!p.StageMounts || j.standing(refs)) || kind == "" {
		return
	}
	f := registry.Finding{
		Kind: kind, Action: registry.ActMark, Volume: p.Volume, Name: p.Name, Path: p.StagedAt.Host,
		Detail: fmt.Sprintf("volume %s is recorded as staged here, and nothing is mounted", p.Name),
		Advice: "nothing: whoever claims the volume has it staged again",
	}
	if kind == registry.FoundRebooted {
		f.Detail = fmt.Sprintf("volume %s was staged here before the machine was started anew", p.Name)
	}
	j.found(f)
}

func (j *judge) standing(refs []registry.Ref) bool {
	return slices.ContainsFunc(refs, func(r registry.Ref) bool {
		return r.Publish == registry.MarkDone && j.lost(r.Boot, r.Target.Host) == ""
	})
}

func (j *judge) unowned(p registry.Placement) {
	what := "attached"
	if p.Stage != registry.MarkNone {
		what = "staged"
	}
	j.found(registry.Finding{
		Kind: registry.FoundUnowned, Action: registry.ActUndo, Volume: p.Volume, Name: p.Name, Path: p.StagedAt.Host,
		Detail: fmt.Sprintf("volume %s is %s, or may be, and nobody claims it", p.Name, what),
		Advice: fmt.Sprintf("see that plugin %s runs: it is asked to take the volume down until it has", p.Volume.Plugin),
	})
}

// ref judges one publish.
func (j *judge) ref(r registry.Ref) {
	if r.Publish != registry.MarkDone {
		return
	}
	name := j.byKey[r.Volume].VolumeName()
	f := registry.Finding{
		Kind: j.lost(r.Boot, r.Target.Host), Action: registry.ActMark, Volume: r.Volume, Name: name, Alloc: r.Alloc, Request: r.Request,
		Path: r.Target.Host, Advice: fmt.Sprintf("if alloc %s runs, stop it and place it anew", r.Alloc),
	}
	saw, looked := j.Inspected[r.Target.Host]
	if f.Kind == registry.FoundLost && r.Usage.Attachment == registry.BlockDevice && (!looked || saw.Block || saw.Trouble() != "") {
		f.Kind = "" // a device that the plugin has made is no mount
	}
	switch {
	case f.Kind == registry.FoundRebooted:
		f.Detail = fmt.Sprintf("volume %s was published here for alloc %s before the machine was started anew", name, r.Alloc)
		f.Advice = "nothing: it is published anew with the alloc, or taken down with it"
	case f.Kind == registry.FoundLost && r.Usage.Attachment == registry.BlockDevice:
		f.Detail = fmt.Sprintf("volume %s is recorded as published here for alloc %s, and there is no block device", name, r.Alloc)
	case f.Kind == registry.FoundLost:
		f.Detail = fmt.Sprintf("volume %s is recorded as published here for alloc %s, and nothing is mounted", name, r.Alloc)
	case saw.Trouble() != "":
		f.Kind, f.Action = registry.FoundDead, registry.ActNothing
		f.Detail = fmt.Sprintf("volume %s is published here for alloc %s: %s", name, r.Alloc, saw.Trouble())
		f.Advice = fmt.Sprintf("stop alloc %s and place it anew: its tasks cannot use the volume", r.Alloc)
	default:
		j.parts(r, name)
		return
	}
	j.found(f)
}

// intent judges an open call. One that a running shim has just sent is no finding.
func (j *judge) intent(open registry.Intent) {
	if j.Live && open.Outcome == registry.OutcomePending && j.Now.Sub(open.Since) < young {
		return
	}
	advice := intent.Advice(open.RPC, open.Code)
	if advice == "" {
		advice = fmt.Sprintf("see that plugin %s runs: the call is made again or undone", open.Volume.Plugin)
	}
	j.found(registry.Finding{
		Kind: registry.FoundUncertain, Volume: open.Volume, Name: open.Name, Alloc: open.Alloc, Request: open.Request,
		Detail: intent.Describe(open), Advice: advice,
	})
}
