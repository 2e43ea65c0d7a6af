package registry

import (
	"fmt"
	"slices"
	"strings"
)

// FindingKind is the kind of a difference between records, mount table, directories and plugins.
type FindingKind string

const (
	FoundLost      FindingKind = "lost"      // recorded as done, not mounted
	FoundRebooted  FindingKind = "rebooted"  // recorded as done before this boot
	FoundUncertain FindingKind = "uncertain" // a call has no certain answer
	FoundOrphan    FindingKind = "orphan"    // an unused mount below our root that no record names
	FoundUsed      FindingKind = "used"      // a mount in use below our root that no record names
	FoundUnowned   FindingKind = "unowned"   // attached, staged or published, with no claim
	FoundDead      FindingKind = "dead"      // mounted, and it hangs or returns errors
	FoundLeft      FindingKind = "left"      // a directory that no record names and that is not empty
	FoundEmpty     FindingKind = "empty"     // an empty directory that no record names
	FoundDetached  FindingKind = "detached"  // recorded as attached, but not according to the plugin
	FoundAttached  FindingKind = "attached"  // attached to this node according to the plugin, but not recorded
	FoundMissing   FindingKind = "missing"   // the plugin does not list the volume
	FoundUnhealthy FindingKind = "unhealthy" // the plugin reports the volume as unhealthy
	FoundDamage    FindingKind = "damage"    // the state file contradicts itself
	FoundUnseen    FindingKind = "unseen"    // something could not be examined
	// the configuration excludes something from the examination: nothing is wrong
	FoundSkipped FindingKind = "skipped"
)

// FindingAction is the repair of a finding.
type FindingAction string

const (
	ActNothing FindingAction = "" // a person has to act, if anything is wrong
	// mark the record as uncertain: the holder of the claim then redoes or undoes the step
	ActMark    FindingAction = "mark"
	ActAdopt   FindingAction = "adopt"   // create a record, then undo
	ActUndo    FindingAction = "undo"    // have the plugin take it down
	ActUnmount FindingAction = "unmount" // never lazily
	ActRemove  FindingAction = "remove"  // rmdir(2)
)

// Finding is one difference between records, mount table, directories and plugins.
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
	// of the repair: RepairDone, or its progress and error; empty: not tried
	Result string `json:"result,omitempty"`
}

func (f Finding) String() string {
	return strings.TrimSpace(fmt.Sprintf("%s: %s %s", f.Kind, f.Path, f.Detail))
}

// RepairDone is the Result of a completed repair.
const RepairDone = "done"

// Diagnosis holds all findings. Digest identifies the actions of a repair; empty: there are none.
type Diagnosis struct {
	Findings []Finding `json:"findings"`
	Digest   string    `json:"digest,omitempty"`
	Repaired bool      `json:"repaired,omitempty"`
}

// Unexamined returns the findings of kind FoundUnseen. If there are any, more may be wrong than was found.
func (d Diagnosis) Unexamined() (list []Finding) {
	for _, f := range d.Findings {
		if f.Kind == FoundUnseen {
			list = append(list, f)
		}
	}
	return list
}

// Clean reports whether everything that was examined is in order or repaired.
func (d Diagnosis) Clean() bool {
	return !slices.ContainsFunc(d.Findings, func(f Finding) bool {
		return f.Kind != FoundUnseen && f.Kind != FoundSkipped && f.Result != RepairDone
	})
}

// CleanAndComplete reports whether everything but what the configuration excludes was examined, and is in order or
// repaired.
func (d Diagnosis) CleanAndComplete() bool { return d.Clean() && len(d.Unexamined()) == 0 }
