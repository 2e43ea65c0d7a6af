package doctor

import (
	"fmt"
	"path/filepath"
	"slices"

	"holdfast/registry"
)

// learnParts has the parts of what is published known.
func (j *judge) learnParts(r registry.Ref) {
	for _, p := range r.Parts {
		j.known[p.At], j.known[filepath.Dir(p.At)] = true, true
	}
}

// parts judges the parts of a publish that is done and stands. One that is gone is not mounted again by itself: its task has mounted it
// before that, and still has it.
func (j *judge) parts(r registry.Ref, name registry.VolumeName) {
	for _, p := range r.Parts {
		if p.Mark != registry.MarkDone || j.stacks[p.At] > 0 || slices.Contains(j.Fleeting, p.At) {
			continue
		}
		j.found(registry.Finding{
			Kind: registry.FoundLost, Volume: r.Volume, Name: name, Alloc: r.Alloc, Request: r.Request, Path: p.At,
			Detail: fmt.Sprintf("%q of volume %s is recorded as mounted here for alloc %s, and nothing is", p.Path, name, r.Alloc),
			Advice: fmt.Sprintf("if alloc %s runs, stop it and place it anew: a task of it that starts again would not see the volume", r.Alloc),
		})
	}
}

// lostPart says that a part of what is published is gone; empty: none is.
func lostPart(r registry.Ref, mounted map[string]bool) string {
	for _, p := range r.Parts {
		if p.Mark == registry.MarkDone && !mounted[p.At] {
			return fmt.Sprintf("%q of it is not mounted any more", p.Path)
		}
	}
	return ""
}
