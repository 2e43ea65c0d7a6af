package registry

import (
	"fmt"
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
	FoundDamage    FindingKind = "damage"    // the state file contradicts itself
)

// FindingAction is what repair does about a finding.
type FindingAction string

const (
	ActNothing FindingAction = ""        // it is for people
	ActMark    FindingAction = "mark"    // the record says from now on that it is not certain: whoever holds the claim redoes or undoes it
	ActAdopt   FindingAction = "adopt"   // a record is made of it, so that the plugin is asked to take it down
	ActUndo    FindingAction = "undo"    // the plugin is asked to take it down
	ActUnmount FindingAction = "unmount" // by us, never lazily
	ActRemove  FindingAction = "remove"  // rmdir(2)
)

// Finding is one thing in which records, mount table, directories and plugins differ.
type Finding struct {
	Kind    FindingKind
	Action  FindingAction
	Volume  VolumeKey
	Name    VolumeName
	Alloc   AllocID
	Request RequestName
	Path    string // on the host
	Detail  string // for people
	Advice  string // what a person may do
	Result  string // of the repair: "done", or why not; empty: not tried
}

func (f Finding) String() string {
	return strings.TrimSpace(fmt.Sprintf("%s: %s %s", f.Kind, f.Path, f.Detail))
}

// Diagnosis is everything that was found. Digest names what repair would do.
type Diagnosis struct {
	Findings []Finding
	Digest   string
	Repaired bool
}
