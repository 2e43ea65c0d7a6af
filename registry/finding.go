package registry

import (
	"fmt"
	"slices"
	"strings"
)

// FindingKind says in what records, mount table, directories and plugins differ.
type FindingKind string

const (
	FoundLost      FindingKind = "lost"      // recorded as done, not mounted
	FoundRebooted  FindingKind = "rebooted"  // recorded as done before this boot
	FoundUncertain FindingKind = "uncertain" // a call has no certain answer
	FoundOrphan    FindingKind = "orphan"    // a mount below our root that no record knows, and nobody uses
	FoundUsed      FindingKind = "used"      // a mount below our root that no record knows, and somebody uses
	FoundUnowned   FindingKind = "unowned"   // attached or staged, with no claim
	FoundDead      FindingKind = "dead"      // mounted, and it does not answer, or with an error
	FoundLeft      FindingKind = "left"      // a directory that no record knows and that is not empty
	FoundEmpty     FindingKind = "empty"     // a directory that no record knows
	FoundDetached  FindingKind = "detached"  // recorded as attached, and the plugin says that it is not
	FoundAttached  FindingKind = "attached"  // the plugin says that it is attached to this node, and no record knows
	FoundMissing   FindingKind = "missing"   // the plugin does not list the volume
	FoundUnhealthy FindingKind = "unhealthy" // the plugin says that the volume is
	FoundDamage    FindingKind = "damage"    // the state file contradicts itself
	FoundUnseen    FindingKind = "unseen"    // something could not be examined
	// something is not examined because the configuration says so: nothing is wrong
	FoundSkipped FindingKind = "skipped"
)

// FindingAction is what repair does about a finding.
type FindingAction string

const (
	ActNothing FindingAction = "" // it is for people
	// the record says from now on that it is not certain: whoever holds the claim redoes or undoes it
	ActMark    FindingAction = "mark"
	ActAdopt   FindingAction = "adopt"   // a record is made of it, so that the plugin is asked to take it down
	ActUndo    FindingAction = "undo"    // the plugin is asked to take it down
	ActUnmount FindingAction = "unmount" // by us, never lazily
	ActRemove  FindingAction = "remove"  // rmdir(2)
)

// Finding is one thing in which records, mount table, directories and plugins differ.
type Finding struct {
	Kind    FindingKind   `json:"kind"`
	Action  FindingAction `json:"action,omitempty"`
	Volume  VolumeKey     `json:"volume,omitzero"`
	Name    VolumeName    `json:"name,omitzero"`
	Alloc   AllocID       `json:"alloc,omitempty"`
	Request RequestName   `json:"request,omitempty"`
	Path    string        `json:"path,omitempty"`   // on the host
	Detail  string        `json:"detail,omitempty"` // for people
	Advice  string        `json:"advice,omitempty"` // what a person may do
	// of the repair: RepairDone, or how far it came and why; empty: not tried
	Result string `json:"result,omitempty"`
}

func (f Finding) String() string {
	return strings.TrimSpace(fmt.Sprintf("%s: %s %s", f.Kind, f.Path, f.Detail))
}

// RepairDone is the Result of what was repaired for good.
const RepairDone = "done"

// Diagnosis is everything that was found. Digest names what repair would do; it is empty if that is nothing.
type Diagnosis struct {
	Findings []Finding `json:"findings"`
	Digest   string    `json:"digest,omitempty"`
	Repaired bool      `json:"repaired,omitempty"`
}

// Unexamined returns what could not be examined, without what the configuration leaves out. If it is not empty, more
// may be wrong than was found.
func (d Diagnosis) Unexamined() (list []Finding) {
	for _, f := range d.Findings {
		if f.Kind == FoundUnseen {
			list = append(list, f)
		}
	}
	return list
}

// Sound reports whether everything that was examined is well, or repaired for good.
func (d Diagnosis) Sound() bool {
	return !slices.ContainsFunc(d.Findings, func(f Finding) bool {
		return f.Kind != FoundUnseen && f.Kind != FoundSkipped && f.Result != RepairDone
	})
}

// Well reports whether everything was examined that the configuration does not leave out, and is well or repaired for
// good.
func (d Diagnosis) Well() bool { return d.Sound() && len(d.Unexamined()) == 0 }
